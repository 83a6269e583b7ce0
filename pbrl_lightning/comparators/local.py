"""Comparators that run here: the current agents, a copy of them, or other models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from pbrl_lightning.acceleration.precision import AUTO, name_of
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.comparators.base import CentralizedGeneration, CollectionPhase, Comparator, Speaker
from pbrl_lightning.utils.errors import ConfigurationError


class CurrentComparator(Comparator):
    """The current agents, sampled with the comparator's own random stream."""

    @override
    @contextmanager
    def session(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        del phase
        yield team


class CurrentCopyComparator(Comparator):
    """A copy of the current agents on other devices, made once per collection phase.

    Args:
        devices: Where the copies go, such as ``["cuda:1"]``; agent ``i`` to ``devices[i % len(devices)]``. No copy is
            made when they are where the actors are.
        num_candidates: See :class:`Comparator`.
        centralized: See :class:`Comparator`.
    """

    def __init__(
        self,
        devices: list[str],
        num_candidates: int | None = None,
        *,
        centralized: CentralizedGeneration | None = None,
    ) -> None:
        super().__init__(num_candidates, centralized=centralized)
        self.devices = checked_devices(devices)

    @override
    @contextmanager
    def session(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        del phase
        here = {parameter.device for parameter in team.load().parameters()}
        # An empty tensor says which device a name such as "cuda" or "cpu:0" means.
        if here == {torch.empty(0, device=device).device for device in self.devices}:
            yield team
        else:
            yield team.frozen_copy(self.devices)


class ModelComparator(Comparator):
    """Other models: one for all roles, or one per role.

    Args:
        models: A model name for all roles or a list of one per role, as in :class:`AgentTeam`; adapter directories
            included. They are loaded at the first collection and stay loaded.
        tokenizers: Needed when ``models`` holds loaded models.
        formatters: Item to prompt; None takes the actors' formatters.
        dtype: Weights of loaded models; ``auto`` for the actors' type.
        devices: Where they go; None for the actors' device.
        num_candidates: See :class:`Comparator`.
        centralized: See :class:`Comparator`.
    """

    def __init__(
        self,
        models: str | list[Any],
        *,
        tokenizers: Any = None,
        formatters: Any = None,
        dtype: str = "float32",
        devices: list[str] | None = None,
        num_candidates: int | None = None,
        centralized: CentralizedGeneration | None = None,
    ) -> None:
        super().__init__(num_candidates, centralized=centralized)
        self.models = models
        self.tokenizers = tokenizers
        self.formatters = formatters
        self.dtype = dtype
        self.devices = checked_devices(devices) if devices is not None else None
        self._team: AgentTeam | None = None

    @override
    def check(self, team: AgentTeam) -> None:
        super().check(team)
        if isinstance(self.models, list) and len(self.models) != team.num_agents:
            raise ConfigurationError(
                f"the comparator's `models` must be one for all roles or {team.num_agents}, got {len(self.models)}"
            )

    @override
    @contextmanager
    def session(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        del phase
        if self._team is None:
            self.check(team)
            actors = name_of(next(team.load().parameters()).dtype)
            self._team = frozen_team(
                team,
                self.models,
                self.devices,
                dtype=actors if self.dtype == AUTO else self.dtype,
                tokenizers=self.tokenizers,
                formatters=self.role_formatters(team) if team.roles is None else None,
            )
        yield self._team


def frozen_team(
    team: AgentTeam,
    models: Any,
    devices: list[str] | None,
    *,
    dtype: str = "float32",
    tokenizers: Any = None,
    formatters: Any = None,
) -> AgentTeam:
    """Models that nothing trains, with a team's formatters; agents with the same source share one model."""
    frozen = AgentTeam(
        models,
        num_agents=None if isinstance(models, list) else team.num_agents,
        formatters=formatters if formatters is not None else team.formatters,
        tokenizers=tokenizers,
        dtype=dtype,
        max_prompt_length=team.max_prompt_length,
        frozen=True,
    ).load()
    frozen.place(devices or [str(next(team.parameters()).device)])
    return frozen


def checked_devices(devices: list[str]) -> list[str]:
    """The devices, if each is one that torch knows.

    Raises:
        ConfigurationError: If the list is empty or a name is not a device.
    """
    if not devices:
        raise ConfigurationError("`devices` must name at least one device, got an empty list")
    for device in devices:
        try:
            torch.device(device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"`devices` must be device names such as 'cpu' or 'cuda:1', got {device!r}"
            ) from error
    return devices
