"""From names and objects to the backbones and agents of a team."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from pbrl_lightning.acceleration.precision import dtype_problem
from pbrl_lightning.agents.adapters import LoraOptions, attach_adapters
from pbrl_lightning.agents.loading import (
    Source,
    context_length_of,
    eos_ids_of,
    load_model,
    load_tokenizer_of,
    resolve_source,
)
from pbrl_lightning.utils.errors import ConfigurationError, raise_together


@dataclass
class Agent:
    """One agent of a team: its place in the team's backbones, and what goes with it."""

    backbone: int
    adapter: str | None
    tokenizer: PreTrainedTokenizerBase
    eos_ids: set[int]
    context_length: int | None


@dataclass(frozen=True)
class TeamSettings:
    """What a team was asked to be; see :class:`pbrl_lightning.agents.team.AgentTeam`."""

    models: str | list[Any] | nn.Module
    num_agents: int
    lora: LoraOptions | None
    tokenizers: Any
    dtype: str
    seed: int
    frozen: bool = False

    def models_given(self) -> list[Any]:
        """The names and objects as a list."""
        return self.models if isinstance(self.models, list) else [self.models]

    def problems(self) -> list[str]:
        """Everything that is wrong with the settings, found without loading a model."""
        found = []
        models = self.models_given()
        objects = [model for model in models if isinstance(model, nn.Module)]
        shared_object = isinstance(self.models, nn.Module) and self.num_agents > 1
        given_twice = shared_object or len({id(model) for model in objects}) < len(objects)
        if given_twice and self.lora is None and not self.frozen:
            found.append("one model object is given for two agents; use `lora` (adapters on one backbone) or copies")
        for index, model in enumerate(models):
            if not isinstance(model, (str, nn.Module)):
                found.append(f"`models[{index}]` must be a name, a path or a loaded model, got {type(model).__name__}")
        if objects and self.tokenizers is None:
            found.append("`tokenizers` must be given when `models` holds loaded models")
        if isinstance(self.tokenizers, (list, tuple)) and len(self.tokenizers) != self.num_agents:
            found.append(f"`tokenizers` must be one for all or {self.num_agents}, got {len(self.tokenizers)}")
        if (problem := dtype_problem(self.dtype)) is not None:
            found.append(problem)
        return found

    def shares_one_backbone(self) -> bool:
        """True if all agents are adapters on the same base."""
        sources = _sources(self)
        adapted = [self.lora is not None or (isinstance(s, Source) and s.adapter is not None) for s in sources]
        return all(adapted) and len({s.base if isinstance(s, Source) else id(s) for s in sources}) == 1

    def source_name(self, agent: int) -> str | None:
        """What names the agent's model, None for a loaded model that does not say."""
        model = self.models[agent] if isinstance(self.models, list) else self.models
        if isinstance(model, str):
            return model
        return getattr(getattr(model, "config", None), "name_or_path", None) or None


def assemble(settings: TeamSettings) -> tuple[list[nn.Module], list[Agent]]:
    """Loads what the settings name.

    Agents with adapters on the same base share one backbone; every full model stands alone.

    Returns:
        The backbones, and the agents that point into them.

    Raises:
        OSError: If a model or a tokenizer cannot be loaded.
    """
    sources = _sources(settings)
    groups: dict[Any, list[int]] = {}
    for agent, source in enumerate(sources):
        adapted = settings.lora is not None or (isinstance(source, Source) and source.adapter is not None)
        base = source.base if isinstance(source, Source) else id(source)
        kind = "adapters" if adapted else "full"
        groups.setdefault((kind, base if adapted or settings.frozen else agent), []).append(agent)
    backbones: list[nn.Module] = []
    agents: dict[int, Agent] = {}
    for (kind, _), members in groups.items():
        first = sources[members[0]]
        model = load_model(first.base, settings.dtype) if isinstance(first, Source) else first.eval()
        context_length = context_length_of(model)
        tokenizers = {agent: _tokenizer(settings, agent, sources[agent]) for agent in members}
        eos_ids = {agent: eos_ids_of(model, tokenizers[agent]) for agent in members}
        if kind == "adapters":
            adapters = [source.adapter if isinstance(source := sources[agent], Source) else None for agent in members]
            names = [f"agent_{agent}" for agent in members]
            named_base = first.base if isinstance(first, Source) else None
            model = attach_adapters(model, named_base, names, settings.lora, adapters, settings.seed)
        for agent in members:
            adapter = f"agent_{agent}" if kind == "adapters" else None
            agents[agent] = Agent(len(backbones), adapter, tokenizers[agent], eos_ids[agent], context_length)
        backbones.append(model)
    return backbones, [agents[agent] for agent in range(settings.num_agents)]


def _sources(settings: TeamSettings) -> list[Any]:
    """Per agent, a :class:`Source` or a loaded model."""
    models = settings.models if isinstance(settings.models, list) else [settings.models] * settings.num_agents
    resolved = {name: resolve_source(name) for name in models if isinstance(name, str)}
    return [resolved[model] if isinstance(model, str) else model for model in models]


def _tokenizer(settings: TeamSettings, agent: int, source: Any) -> PreTrainedTokenizerBase:
    if settings.tokenizers is not None:
        listed = isinstance(settings.tokenizers, (list, tuple))
        return settings.tokenizers[agent] if listed else settings.tokenizers
    return load_tokenizer_of(source)


def check_collaboration(collaboration: str, has_adapter: bool, models: Any, num_agents: int | None) -> None:
    """Raises a ValueError if a team that speaks as one, or not, is given what it cannot use."""
    problems = []
    if collaboration not in ("decentralized", "centralized"):
        problems.append(f"`collaboration` must be 'decentralized' or 'centralized', got {collaboration!r}")
    if collaboration != "centralized" and has_adapter:
        problems.append("`joint_adapter` is for `collaboration: centralized`")
    if collaboration == "centralized":
        if num_agents is None or num_agents < 1:
            problems.append(f"`num_agents` must be the number of roles in a centralised team, got {num_agents}")
        if isinstance(models, (list, tuple)) and len(models) != 1:
            problems.append(f"`models` must be one model in a centralised team, got {len(models)}")
    raise_together(problems)


def count_agents(models: str | list[Any] | nn.Module, num_agents: int | None) -> int:
    """How many agents a team has.

    Raises:
        ConfigurationError: If the counts do not fit together.
    """
    if isinstance(models, (list, tuple)):
        if not models:
            raise ConfigurationError("`models` must name at least one model, got an empty list")
        if num_agents is not None and num_agents != len(models):
            raise ConfigurationError(f"`num_agents` is {num_agents}, but `models` lists {len(models)}")
        return len(models)
    if num_agents is None:
        raise ConfigurationError("`num_agents` must be given when `models` is a single name")
    if num_agents < 1:
        raise ConfigurationError(f"`num_agents` must be >= 1, got {num_agents}")
    return num_agents
