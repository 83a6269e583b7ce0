"""The comparator that was the team some rounds ago."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from typing_extensions import override

from pbrl_lightning.acceleration.precision import name_of
from pbrl_lightning.agents.adapters import adapter_values, read_adapter
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.comparators.base import CentralizedGeneration, CollectionPhase, Comparator, Speaker
from pbrl_lightning.comparators.local import checked_devices, frozen_team
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, RunError


def history_name(rounds_completed: int) -> str:
    """Directory name of the policy after that many rounds: ``initial``, then the 0-based ``iteration_0000`` and so on.

    Example:
        >>> history_name(0), history_name(3)
        ('initial', 'iteration_0002')
    """
    return "initial" if rounds_completed < 1 else f"iteration_{rounds_completed - 1:04d}"


class HistoryComparator(Comparator):
    """The policy saved after round ``v - k`` in round ``v``; the initial policy until there is one.

    ``k = 1`` is the current policy itself; ``k >= 2`` lags behind it. The policy checkpoints are written by
    :class:`callbacks.ComparatorHistory`, which is added by itself. Adapters are put into the team's own backbone for
    the collection phase, so that nothing is held twice; full models are loaded once per phase and freed.

    Args:
        k: How many rounds back, at least 1.
        devices: Where the old policies go; None for the actors' device.
        num_candidates: See :class:`Comparator`.
        centralized: See :class:`Comparator`.
    """

    def __init__(
        self,
        k: int = 1,
        *,
        devices: list[str] | None = None,
        num_candidates: int | None = None,
        centralized: CentralizedGeneration | None = None,
    ) -> None:
        super().__init__(num_candidates, centralized=centralized)
        if k < 1:
            raise ConfigurationError(f"`k` must be >= 1 (rounds back), got {k}")
        self.k = k
        self.devices = checked_devices(devices) if devices is not None else None

    @property
    @override
    def needs_history(self) -> int | None:
        return self.k

    @override
    @contextmanager
    def session(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        if phase.history is None:
            raise RunError("a HistoryComparator needs policy checkpoints: add the ComparatorHistory callback")
        directory = phase.history / history_name(phase.round_number - self.k)
        agents = [directory / f"agent_{agent}" for agent in range(team.num_agents)]
        for path in agents:
            if not path.is_dir():
                raise MissingFileError(f"the policy checkpoint {str(path)!r} for round {phase.round_number} is missing")
        if self.devices is None and all(team.adapter(agent) for agent in range(team.num_agents)):
            with ExitStack() as stack:
                for agent, path in enumerate(agents):
                    parameters = team.agent_parameters(agent)
                    values = read_adapter(path, team.backbone(agent), str(team.adapter(agent)), parameters)
                    stack.enter_context(adapter_values(parameters, values))
                yield team
        else:
            # In the actors' dtype: k = 1 must say what the current policy says.
            dtype = name_of(next(team.parameters()).dtype)
            yield frozen_team(team, [str(path) for path in agents], self.devices, dtype=dtype)
