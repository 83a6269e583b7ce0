"""What is answered before training begins to who asks for the training loader: how long it will be, and nothing else.

A schedule may ask for ``trainer.estimated_stepping_batches``, a callback or logger for the loader itself. Lightning
would build it then, before a checkpoint's loop state is restored, and keep it: a round would be collected for a
question, and a resumed epoch begin again at its first batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L

from pbrl_lightning.utils.errors import RunError


class PlannedLoader:
    """Stands for a training loader that is not there yet.

    Args:
        num_batches: Batches of an epoch, as far as can be said.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        raise RunError("training batches are there only when training has begun (`on_train_start` and later)")
        yield  # at the first batch: Lightning makes an iterator at once


class TrainingStart:
    """Tells whether the loop of a fit runs, and lets it begin without what was built before.

    Args:
        trainer: The fit's, in ``setup``.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.begun = False
        self._loop: Any = trainer.fit_loop
        vars(self._loop)["run"] = self._run

    def end(self) -> None:
        """Leaves the loop as it was."""
        vars(self._loop).pop("run", None)

    def _run(self) -> None:
        self.end()
        self.begun = True
        loader = self._loop._combined_loader
        if loader is not None and any(isinstance(part, PlannedLoader) for part in loader.flattened):
            self._loop._combined_loader = None
            self._loop._last_train_dl_reload_epoch = float("-inf")
        self._loop.run()


def batches_of_pairs(num_pairs: int, batch_size: int, world_size: int) -> int:
    """Batches of an epoch over so many pairs."""
    return -(-num_pairs // (batch_size * world_size))


def most_pairs_of_item(num_candidates: int, limit: int | None, iterative: bool) -> int:
    """Most pairs that one task item can give.

    Args:
        num_candidates: Joint responses, of each side in an iterative run.
        limit: ``pairs_per_sample``; None for all.
        iterative: Whether candidates are compared with a comparator's, index by index, or with each other.
    """
    most = num_candidates if iterative else math.comb(num_candidates, 2)
    return most if limit is None else min(limit, most)


def mean_length(phases: Sequence[tuple[int, int]]) -> int:
    """Batches of a run's mean epoch, rounded up.

    Args:
        phases: Epochs and batches per epoch of each phase of a round.
    """
    return -(-sum(epochs * batches for epochs, batches in phases) // sum(epochs for epochs, _ in phases))
