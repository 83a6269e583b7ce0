"""Answering: agents' prompts go to the sampler, those of agents on one backbone together, and texts come back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pbrl_lightning.agents.adapters import mixes_adapters
from pbrl_lightning.agents.at_once import in_threads
from pbrl_lightning.agents.forward import reading_of
from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.products import device_memory
from pbrl_lightning.agents.prompts import Formatter
from pbrl_lightning.agents.sampling import SampledIds, SamplingConfig, sample_responses
from pbrl_lightning.agents.self_check import check_model
from pbrl_lightning.batches import AgentAnswer, Response, TaskItem
from pbrl_lightning.randomness import Stream, counted_uniforms
from pbrl_lightning.text_gate import encodable_text
from pbrl_lightning.timing import spending
from pbrl_lightning.utils.errors import ConfigurationError

if TYPE_CHECKING:
    from pbrl_lightning.agents.team import AgentTeam


@dataclass(frozen=True)
class Draws:
    """What fixes every draw of a call, besides item and agent.

    Attributes:
        num_candidates: Responses per agent and item.
        sampling: Sampling options.
        seed: The run's seed.
        stream: Random stream.
        step: Round or rollout number.
    """

    num_candidates: int
    sampling: SamplingConfig
    seed: int
    stream: Stream
    step: int


@dataclass(frozen=True)
class _Questions:
    """What one agent is asked: ``B`` prompts, and the uniforms of the answers, each of shape ``(K, T)``."""

    agent: int
    texts: list[str]
    prompt_ids: list[list[int]]
    uniforms: list[Tensor]


@spending("tokenising")
def answer(
    team: AgentTeam,
    formatters: dict[int, Formatter],
    items: Sequence[TaskItem],
    item_indices: Sequence[int],
    draws: Draws,
) -> list[list[AgentAnswer]]:
    """What agents say to task items.

    Args:
        team: The team.
        formatters: By agent that is to answer.
        items: ``B`` task items.
        item_indices: Their indices in the dataset.
        draws: What fixes every draw.

    Returns:
        ``B`` answers of each agent, in the order of ``formatters``.

    Raises:
        ConfigurationError: If a formatter fails or a model cannot be sampled; names the agents.
    """
    if draws.sampling.temperature == 0 and draws.num_candidates > 1:
        warn_once(team.counts, "greedy", "temperature 0 makes all candidates of an item the same")
    for agent in formatters:
        check_model(team.model(agent), f"the model of agent {agent}")
    groups = [
        [_questions(team, agent, formatters[agent], items, item_indices, draws) for agent in agents]
        for agents in _speaking_together(team, list(formatters))
    ]
    answers: dict[int, list[AgentAnswer]] = {}
    for asked, spoken in zip(groups, _at_once(team, groups, draws), strict=True):
        for questions, sampled in zip(asked, spoken, strict=True):
            said = [dict(enumerate(map(partial(_response, team, questions.agent), rows))) for rows in sampled]
            answers[questions.agent] = list(map(AgentAnswer, questions.texts, said, questions.prompt_ids))
    return [answers[agent] for agent in formatters]


def _speaking_together(team: AgentTeam, agents: list[int]) -> list[list[int]]:
    """Agents whose rows can be in one batch: adapters on one backbone that end at the same ids."""
    groups: dict[object, list[int]] = {}
    for agent in agents:
        backbone, adapter = team.backbone(agent), team.adapter(agent)
        mixes = adapter is not None and _mixes(team.model(agent))
        key = (id(backbone), frozenset(team.eos_ids(agent))) if mixes else agent
        groups.setdefault(key, []).append(agent)
    return list(groups.values())


def _mixes(model: nn.Module) -> bool:
    return reading_of(model).sampling == "batched" and mixes_adapters(model)


def _questions(
    team: AgentTeam,
    agent: int,
    formatter: Formatter,
    items: Sequence[TaskItem],
    item_indices: Sequence[int],
    draws: Draws,
) -> _Questions:
    length = draws.sampling.max_new_tokens
    texts = [team.prompt(agent, item, index, formatter) for item, index in zip(items, item_indices, strict=True)]
    uniforms = [
        counted_uniforms(draws.num_candidates, length, draws.seed, draws.stream, draws.step, index, agent)
        for index in item_indices
    ]
    return _Questions(agent, texts, [team.prompt_ids(agent, text, length) for text in texts], uniforms)


def _at_once(team: AgentTeam, groups: list[list[_Questions]], draws: Draws) -> list[list[list[list[SampledIds]]]]:
    """Samples the groups, on a CPU several at a time."""
    models = [team.model(asked[0].agent) for asked in groups]
    with spending("sampling"):
        tasks = [partial(_sample, team, asked, draws) for asked in groups]
        return in_threads(tasks, min(torch.get_num_threads(), _most_at_once(models)))


def _most_at_once(models: list[nn.Module]) -> int:
    """How many models may be sampled at once: one, if they are not on the CPU or share a configuration.

    Attention is exchanged by way of the configuration; and each may hold a second copy of its weights meanwhile, for
    which a quarter of the memory is left.
    """
    parameters = [list(model.parameters()) for model in models]
    on_cpu = all(parameter.device.type == "cpu" for some in parameters for parameter in some)
    own = len({id(getattr(model, "config", model)) for model in models}) == len(models)
    if not (on_cpu and own):
        return 1
    largest = max(sum(parameter.nbytes for parameter in some) for some in parameters)
    return max(1, min(len(models), device_memory(torch.device("cpu")) // 4 // max(1, largest)))


def _sample(team: AgentTeam, asked: list[_Questions], draws: Draws) -> list[list[list[SampledIds]]]:
    """For each agent, ``B`` lists of ``K`` responses."""
    first, together = asked[0].agent, len(asked) > 1
    adapters = [str(team.adapter(questions.agent)) for questions in asked for _ in questions.texts]
    try:
        with nullcontext() if together else team.active(first):
            sampled = sample_responses(
                team.model(first),
                [ids for questions in asked for ids in questions.prompt_ids],
                [drawn for questions in asked for drawn in questions.uniforms],
                draws.sampling,
                team.eos_ids(first),
                adapters if together else None,
            )
    except ValueError as error:
        who = ", ".join(str(questions.agent) for questions in asked)
        name = f"agents {who} of one backbone" if together else f"agent {who}"
        raise ConfigurationError(f"{name} cannot be sampled ({draws.stream}, {draws.step}): {error}") from error
    size = len(asked[0].texts)
    return [sampled[place * size : (place + 1) * size] for place in range(len(asked))]


def _response(team: AgentTeam, agent: int, row: SampledIds) -> Response:
    text = encodable_text(str(team.tokenizer(agent).decode(row.token_ids, skip_special_tokens=True)))
    return Response(text, row.token_ids, row.finished)
