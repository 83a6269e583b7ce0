"""Which round and phase an epoch belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Where an epoch lies: its round (1-based), its phase, and its number within the phase (0-based)."""

    round: int
    phase: str
    epoch: int


@dataclass(frozen=True)
class RoundSchedule:
    """``num_rounds`` rounds, each of the same phases.

    Attributes:
        num_rounds: Number of collect-replay-train cycles; 1 in a base run.
        phases: Name and number of epochs of each phase of a round, in order.

    Example:
        >>> RoundSchedule(2, (("reward", 1), ("policy", 2))).locate(4)
        Position(round=2, phase='policy', epoch=0)
    """

    num_rounds: int
    phases: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ValueError(f"the number of rounds must be >= 1, got {self.num_rounds}")
        if not self.phases or any(epochs < 1 for _, epochs in self.phases):
            raise ValueError(f"every phase must have at least one epoch, got {self.phases}")

    @property
    def epochs_per_round(self) -> int:
        """Epochs of one round, all phases together."""
        return sum(epochs for _, epochs in self.phases)

    @property
    def total_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.num_rounds * self.epochs_per_round

    def locate(self, epoch: int) -> Position | None:
        """The position of a 0-based epoch, None when the run is over."""
        if epoch >= self.total_epochs:
            return None
        completed, rest = divmod(epoch, self.epochs_per_round)
        for name, epochs in self.phases:
            if rest < epochs:
                return Position(completed + 1, name, rest)
            rest -= epochs
        raise AssertionError("phases add up to a round")
