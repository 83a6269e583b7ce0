"""A checkpoint right after each collection."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from typing_extensions import override

from pbrl_lightning.checkpoints import checkpoint_directory, saved_at_once
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.utils.errors import FileError

_NAME = re.compile(r"round_\d+\.ckpt")


class RoundCheckpoint(RoundCallback):
    """Saves a checkpoint when a round's pairs are ready for training, so that no collection is ever paid for twice.

    It is written beside the run's other checkpoints, as ``round_0001.ckpt``; the one of the round before is removed
    when it is there. The journal of the collection is dropped then. Added by itself to runs that save checkpoints.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._last = None  # of an earlier fit

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            trainer.datamodule.pair_source.drop_stale_journals(trainer)  # type: ignore[attr-defined]

    @override
    def on_round_prepared(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        directory = checkpoint_directory(trainer)
        if directory is None or trainer.fast_dev_run or not trainer.datamodule.rounds:  # type: ignore[attr-defined]
            return
        path = directory / f"round_{round_number:04d}.ckpt"
        before, self._last = self._last, path.name
        with saved_at_once(trainer):
            trainer.save_checkpoint(path, weights_only=False)  # of the file: with the optimizer
        if trainer.is_global_zero:
            if not path.exists():  # Lightning says nothing where it may not write
                raise FileError(f"the checkpoint {path} could not be written")
            # A name alone, of this run's own directory: a checkpoint from elsewhere must not name files to remove.
            if before is not None and before != self._last and _NAME.fullmatch(before):
                path.with_name(before).unlink(missing_ok=True)
        trainer.datamodule.pair_source.drop_journals()  # type: ignore[attr-defined]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last = state_dict["last"]
