"""How often a run logs where its user did not say it."""

from __future__ import annotations

from typing import Final

import lightning as L

from pbrl_lightning.rounds import batches_per_update

LIGHTNINGS_DEFAULT: Final = 50
_POINTS: Final = 100


def log_interval(batches: int, steps: int) -> int:
    """Optimizer steps from one point of a curve to the next: about 100 points, and at most Lightning's 50 steps.

    Args:
        batches: Batches of an epoch; the interval is no longer, or Lightning would warn.
        steps: Optimizer steps of the phase over all rounds.

    Example:
        >>> [log_interval(30, 90), log_interval(40, 800), log_interval(5, 800), log_interval(400, 80_000)]
        [1, 8, 5, 50]
    """
    return max(1, min(LIGHTNINGS_DEFAULT, batches, steps // _POINTS))


class LogInterval:
    """Sets ``log_every_n_steps`` of a trainer that has Lightning's default, and puts it back at the end."""

    def __init__(self) -> None:
        self._chosen = False

    def begin(self, trainer: L.Trainer) -> None:
        """At the beginning of a fit. The command line knows whether the user gave the default themselves."""
        given = getattr(trainer, "log_interval_given", False)
        self._chosen = trainer.log_every_n_steps == LIGHTNINGS_DEFAULT and not given  # type: ignore[attr-defined]

    def choose(self, trainer: L.Trainer, batches: int, epochs: int) -> None:
        """Before an epoch.

        Args:
            trainer: The run's.
            batches: Batches of the epoch.
            epochs: Epochs of its phase over all rounds.
        """
        if not self._chosen:
            return
        steps = epochs * -(-batches // batches_per_update(trainer))
        if trainer.max_steps > 0:
            steps = min(steps, trainer.max_steps)
        trainer.log_every_n_steps = log_interval(batches, steps)  # type: ignore[attr-defined]

    def end(self, trainer: L.Trainer) -> None:
        """At the end of a fit."""
        if self._chosen:
            trainer.log_every_n_steps = LIGHTNINGS_DEFAULT  # type: ignore[attr-defined]
            self._chosen = False
