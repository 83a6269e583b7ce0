"""The comparator protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TaskItem, TeamSample
from pbrl_lightning.randomness import Stream


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


class Comparator(ABC):
    """Gives the other side of each comparison; subclass it for your own.

    Args:
        num_candidates: Responses per role and item; None takes the actors' number. Only candidate indices that both
            sides have are compared.
    """

    def __init__(self, num_candidates: int | None = None) -> None:
        if num_candidates is not None and num_candidates < 1:
            raise ValueError(f"the comparator's `num_candidates` must be >= 1 or null, got {num_candidates}")
        self.num_candidates = num_candidates

    @abstractmethod
    def session(self, team: AgentTeam, round_number: int, history: Path | None) -> AbstractContextManager[Speaker]:
        """Opens one collection phase.

        Args:
            team: The actors, with their current weights.
            round_number: 1-based.
            history: Where the policy checkpoints lie, if they are kept.

        Returns:
            A context that gives who speaks; what was loaded for it is freed at its end.
        """

    def check(self, num_agents: int) -> None:
        """Raises a ValueError if this comparator cannot answer for a team of so many agents; loads nothing."""
        del num_agents

    @property
    def needs_history(self) -> int | None:
        """How many rounds back policy checkpoints are needed; None if they are not."""
        return None
