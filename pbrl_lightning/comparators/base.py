"""The comparator protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pbrl_lightning.agents.prompts import Formatter, resolve_formatters
from pbrl_lightning.agents.roles import JointAdapter, JointRoles, TagAdapter
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TaskItem, TeamSample
from pbrl_lightning.comparators.centralized import JointSpeaker
from pbrl_lightning.preferences.journal import CollectionJournal
from pbrl_lightning.randomness import Stream
from pbrl_lightning.utils.errors import ConfigurationError


class Speaker(Protocol):
    """Whoever answers task items: an :class:`AgentTeam`, or anything with the same ``sample``."""

    def sample(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        *,
        num_candidates: int,
        sampling: SamplingConfig,
        seed: int,
        stream: Stream,
        step: int = 0,
    ) -> list[TeamSample]:
        """See :meth:`AgentTeam.sample`. A candidate index may be missing from the result."""
        ...


@dataclass(frozen=True)
class CollectionPhase:
    """The collection that a comparator speaks in.

    Attributes:
        round_number: 1-based.
        history: Where the policy checkpoints lie, if they are kept.
        journal: Where a speaker that is paid for its answers keeps them as they arrive.
        progress: Called with the number of items done since the last call.
    """

    round_number: int
    history: Path | None = None
    journal: CollectionJournal = field(default_factory=lambda: CollectionJournal(None))
    progress: Callable[[int], None] = lambda _: None


@dataclass(frozen=True)
class CentralizedGeneration:
    """One model of the comparator writes the responses of all roles in one text.

    Attributes:
        agent_index: Which of the comparator's agents writes.
        adapter: How it is asked, and how its text is taken apart; default :class:`TagAdapter`.
    """

    agent_index: int = 0
    adapter: JointAdapter | None = None


class Comparator(ABC):
    """Gives the other side of each comparison; subclass it for your own.

    Args:
        num_candidates: Responses per role and item; None takes the actors' number. Only candidate indices that both
            sides have are compared.
        centralized: One model writes all roles' responses; None lets every role speak for itself.
    """

    is_remote = False
    """True if its speaker takes all items in one call, reports progress itself and journals answers as they arrive."""

    def __init__(self, num_candidates: int | None = None, *, centralized: CentralizedGeneration | None = None) -> None:
        if num_candidates is not None and num_candidates < 1:
            raise ConfigurationError(f"the comparator's `num_candidates` must be >= 1 or null, got {num_candidates}")
        self.num_candidates = num_candidates
        self.centralized = centralized
        self.formatters: Any = None

    @abstractmethod
    def session(self, team: AgentTeam, phase: CollectionPhase) -> AbstractContextManager[Speaker]:
        """Opens one collection phase.

        Args:
            team: The actors, with their current weights.
            phase: Which collection it is.

        Returns:
            A context that gives who speaks; what was loaded for it is freed at its end.
        """

    @contextmanager
    def open(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        """A session whose speaker answers as the team does: role by role, or for a centralised team jointly."""
        own = self.role_formatters(team)
        with self.session(team, phase) as speaker:
            if team.roles is not None:
                roles = team.roles if own is None else JointRoles(own, team.roles.adapter)
                yield JointSpeaker(speaker, 0, roles, team.counts, split=False)
            elif self.centralized is not None:
                roles = JointRoles(own or team.formatters, self.centralized.adapter or TagAdapter())
                yield JointSpeaker(speaker, self.centralized.agent_index, roles, team.counts, split=True)
            else:
                yield speaker

    def identity(self) -> Any:
        """What decides its answers: its options, by which a restarted collection finds its journal."""
        return [type(self), {name: value for name, value in vars(self).items() if name[0] != "_"}]

    def role_formatters(self, team: AgentTeam) -> list[Formatter] | None:
        """The comparator's own prompts, one per role; None where it takes the actors'."""
        if self.formatters is None:
            return None
        return resolve_formatters(self.formatters, team.num_agents if team.roles is None else len(team.roles))

    def check(self, team: AgentTeam) -> None:
        """Finds what is wrong with the options for this team; loads nothing.

        Raises:
            ConfigurationError: If it cannot answer for the team.
        """
        self.role_formatters(team)
        if self.centralized is None:
            return
        if team.roles is not None:
            raise ConfigurationError(
                "`centralized` must be left out: the comparator of a centralised team is centralised"
            )
        if not 0 <= self.centralized.agent_index < team.num_agents:
            raise ConfigurationError(
                f"`centralized.agent_index` must be from 0 to {team.num_agents - 1} in a team of {team.num_agents}, "
                f"got {self.centralized.agent_index}"
            )

    @property
    def needs_history(self) -> int | None:
        """How many rounds back policy checkpoints are needed; None if they are not."""
        return None
