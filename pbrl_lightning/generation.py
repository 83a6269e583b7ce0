"""A team's responses to task items: what ``team.generate``, ``trainer.predict`` and ``pbrl sample`` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.distributed import this_process, together
from pbrl_lightning.sharding import gathered
from pbrl_lightning.utils.errors import ConfigurationError

if TYPE_CHECKING:
    from pbrl_lightning.agents.sampling import SamplingConfig
    from pbrl_lightning.agents.team import AgentTeam

_CHUNK = 16
"""Task items sampled together; no response depends on it."""


@dataclass(frozen=True)
class JointResponse:
    """One joint response to a task item, by role.

    Attributes:
        item_index: Index of the task item.
        candidate: Index among the joint responses to this item.
        prompts: ``N`` prompts.
        completions: ``N`` responses.
        joint_completion: The text of a centralized team that the responses were taken from; None for others.
        finished: For each policy, whether its response ended by itself; False if it was cut at ``max_new_tokens``.
    """

    item_index: int
    candidate: int
    prompts: list[str]
    completions: list[str]
    joint_completion: str | None
    finished: list[bool]


def task_items(given: Iterable[TaskItem | str]) -> list[TaskItem]:
    """Task items of dicts and of texts, which become their ``prompt``.

    Raises:
        ConfigurationError: If they are not a list, or one is neither; names its place.

    Example:
        >>> task_items(["rain", {"prompt": "snow"}])
        [{'prompt': 'rain'}, {'prompt': 'snow'}]
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"`items` must be a list of texts or dicts, got {type(given).__name__}")
    items: list[TaskItem] = []
    for index, item in enumerate(given):
        if not isinstance(item, str | dict):
            raise ConfigurationError(f"`items[{index}]` must be a text or a dict, got {type(item).__name__}")
        items.append({"prompt": item} if isinstance(item, str) else item)
    return items


def joint_responses(
    team: AgentTeam,
    items: Sequence[TaskItem],
    indices: Sequence[int],
    *,
    num_responses: int,
    sampling: SamplingConfig,
    seed: int,
) -> Iterator[JointResponse]:
    """Samples a team's joint responses, with the draws that an evaluation makes.

    Args:
        team: The agents.
        items: All task items.
        indices: Which of them are answered; with the seed they fix every draw.
        num_responses: Joint responses per item.
        sampling: How responses are sampled.
        seed: Every draw is a function of it.

    Yields:
        ``num_responses`` joint responses of each item, in the order of ``indices``.
    """
    for start in range(0, len(indices), _CHUNK):
        chunk = list(indices[start : start + _CHUNK])
        samples = team.sample(
            [items[index] for index in chunk],
            chunk,
            num_candidates=num_responses,
            sampling=sampling,
            seed=seed,
            stream="evaluation",
        )
        for sample in samples:
            for candidate in sample.joint_indices:
                texts = sample.completions(candidate)
                prompts, completions = team.role_view(
                    [items[sample.item_index]], [[prompt] for prompt in sample.prompts], [[text] for text in texts]
                )
                yield JointResponse(
                    sample.item_index,
                    candidate,
                    [column[0] for column in prompts],
                    [column[0] for column in completions],
                    None if team.roles is None else texts[0],
                    [responses[candidate].finished for responses in sample.responses],
                )


def generated_texts(
    team: AgentTeam,
    items: Sequence[TaskItem],
    indices: Sequence[int],
    *,
    num_responses: int,
    sampling: SamplingConfig,
    seed: int,
) -> list[list[list[str]]]:
    """The texts of :func:`joint_responses`: for each item ``num_responses`` lists of ``N`` texts."""
    texts: dict[int, list[list[str]]] = {index: [] for index in indices}
    options = {"num_responses": num_responses, "sampling": sampling, "seed": seed}
    for response in joint_responses(team, items, indices, **options):  # type: ignore[arg-type]
        texts[response.item_index].append(response.completions)
    return [texts[index] for index in indices]


@dataclass(frozen=True)
class IndexLoader:
    """Batches of indices of task items, which a module's ``predict_step`` answers.

    Attributes:
        num_items: Number of task items.

    Example:
        >>> [len(batch) for batch in IndexLoader(20)]
        [16, 4]
    """

    num_items: int

    def __len__(self) -> int:
        return -(-self.num_items // _CHUNK)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.num_items, _CHUNK):
            yield list(range(start, min(start + _CHUNK, self.num_items)))


def predicted_texts(
    team: AgentTeam, items: Sequence[TaskItem], indices: Sequence[int], *, sampling: SamplingConfig, seed: int
) -> list[list[list[str]]]:
    """One joint response to each item; the items are divided among the processes, and all get the whole result."""

    def own_share() -> dict[int, list[list[str]]]:
        rank, world_size = this_process()
        places = range(rank, len(indices), world_size)
        own = [indices[place] for place in places]
        texts = generated_texts(team, items, own, num_responses=1, sampling=sampling, seed=seed)
        return dict(zip(places, texts, strict=True))

    with gathered(team):
        return together(own_share)
