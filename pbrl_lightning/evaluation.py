"""Evaluation: the current policies on held-out items, scored by the task reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pbrl_lightning.agents.roles import JointRoles
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import EvaluationBatch, Response, TaskItem, TeamSample
from pbrl_lightning.distributed import this_process, together
from pbrl_lightning.preferences.oracle import Oracle, accepted_keywords
from pbrl_lightning.sharding import gathered
from pbrl_lightning.timing import spending
from pbrl_lightning.utils.errors import OptionTypeError, RunError


@dataclass(frozen=True)
class Evaluator:
    """Samples and scores joint responses to evaluation items, with the same uniforms each time.

    Attributes:
        items: The evaluation set.
        oracle: The task reward; never a learned one.
        sampling: The actors' sampling options.
        seed: The run's seed.
        metrics: The user's own, called like the reward; returns a dict of numbers.
    """

    items: list[TaskItem]
    oracle: Oracle
    sampling: SamplingConfig
    seed: int
    metrics: Callable[..., dict[str, float]] | None = None

    @spending("evaluating")
    def evaluate(self, team: AgentTeam, indices: list[int], num_responses: int = 1) -> EvaluationBatch:
        """Scores ``num_responses`` joint responses to each of these items, ``B = len(indices) * num_responses``.

        The items are shared out over processes; all of them get the whole batch.
        """
        with gathered(team):
            parts = together(lambda: self._own_share(team, indices, num_responses))
        samples = [sample for sample, _ in parts]
        rows = [(self.items[sample.item_index], sample, k) for sample in samples for k in range(num_responses)]
        own: dict[str, Any] = {}
        if self.metrics is not None:
            items, prompts, completions = _columns(team, rows)
            offered = {"prompts": prompts, "batch_items": items}
            accepted = {name: offered[name] for name in accepted_keywords(self.metrics, tuple(offered))}
            try:
                own = self.metrics(*completions, **accepted)
            except Exception as error:
                raise RunError(f"`eval_metrics` raised {type(error).__name__}: {error}") from error
            if not isinstance(own, dict):
                raise OptionTypeError(f"`eval_metrics` must return a dict of numbers, got {type(own).__name__}")
        return EvaluationBatch(
            rewards=torch.tensor([reward for _, rewards in parts for reward in rewards], dtype=torch.float64),
            samples=samples if team.roles is None else [_by_role(team.roles, self.items, sample) for sample in samples],
            metrics={name: float(value) for name, value in own.items()},
        )

    def _own_share(
        self, team: AgentTeam, indices: list[int], num_responses: int
    ) -> dict[int, tuple[TeamSample, list[float]]]:
        """This process's items by their place: the sample and its rewards, NaN where there is none."""
        rank, world_size = this_process()
        places = range(rank, len(indices), world_size)
        own = [indices[place] for place in places]
        samples = team.sample(
            [self.items[index] for index in own],
            own,
            num_candidates=num_responses,
            sampling=self.sampling,
            seed=self.seed,
            stream="evaluation",
        )
        rows = [(self.items[sample.item_index], sample, k) for sample in samples for k in range(num_responses)]
        items, prompts, completions = _columns(team, rows)
        scores = self.oracle.score(items, [sample.item_index for _, sample, _ in rows], prompts, completions)
        rewards = [math.nan if score is None else score.value for score in scores]
        by_sample = [rewards[start : start + num_responses] for start in range(0, len(rewards), num_responses)]
        return dict(zip(places, zip(samples, by_sample, strict=True), strict=True))


def _by_role(roles: JointRoles, items: list[TaskItem], sample: TeamSample) -> TeamSample:
    """A joint text's responses, role by role, to be looked at."""
    said: list[dict[int, Response]] = [{} for _ in range(len(roles))]
    for index, response in sample.responses[0].items():
        for role, text in enumerate(roles.split(response.text) or [""] * len(roles)):
            said[role][index] = Response(text, [], response.finished)
    return TeamSample(sample.item_index, roles.prompts(items[sample.item_index]), said)


def _columns(
    team: AgentTeam, rows: list[tuple[TaskItem, TeamSample, int]]
) -> tuple[list[TaskItem], list[list[str]], list[list[str]]]:
    """Items, and per role the prompts and responses of these candidates, as the task reward sees them."""
    agents = range(team.num_agents)
    items = [item for item, _, _ in rows]
    prompts = [[sample.prompts[agent] for _, sample, _ in rows] for agent in agents]
    completions = [[sample.completions(k)[agent] for _, sample, k in rows] for agent in agents]
    return items, *(
        team.role_view(items, prompts, completions, {"untagged_responses": 1}) if rows else (prompts, completions)
    )


@dataclass(frozen=True)
class EvaluationLoader:
    """All evaluation items in batches, sampled when they are asked for (``pbrl validate``)."""

    evaluator: Evaluator
    team: AgentTeam
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.evaluator.items) // self.batch_size)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for start in range(0, len(self.evaluator.items), self.batch_size):
            stop = min(start + self.batch_size, len(self.evaluator.items))
            yield self.evaluator.evaluate(self.team, list(range(start, stop)))
