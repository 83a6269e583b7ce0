"""Ends a run in order when it is asked to: SIGTERM, or Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pbrl_lightning.checkpoints import checkpoint_directory, saved_at_once
from pbrl_lightning.distributed import StopRequested
from pbrl_lightning.rounds import RoundCallback

_AGAIN = 2.0
"""Seconds after which a signal is a second one."""


class GracefulStop(RoundCallback):
    """Saves a checkpoint, ``stopped.ckpt``, and ends the run on SIGTERM or Ctrl-C.

    A collection stops at once (of several processes: when the part in progress is sampled), what it brought is in its
    journal; training stops after the optimizer step in progress. A second signal, seconds later, does not wait. The
    checkpoint is written beside the run's others; without a ModelCheckpoint there is none. Added by itself.
    """

    def __init__(self) -> None:
        self._trainer: L.Trainer | None = None
        self._before: dict[int, Any] = {}
        self._requested = False
        self._requested_at = 0.0
        self._collecting = False

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._requested = self._collecting = False
        self._trainer = trainer
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            self._install()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, StopRequested) and self._collecting:
            self._save(trainer)  # in training it was saved where it stopped
        self._restore()

    @override
    def on_round_start(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._install()
        self._collecting = True
        if self._requested:
            raise StopRequested

    @override
    def on_collection_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, total: int) -> None:
        if self._requested:
            raise StopRequested

    @override
    def on_collection_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._collecting = False

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            return  # a checkpoint holds no half of a gradient
        if trainer.strategy.reduce_boolean_decision(self._requested, all=False):
            self._save(trainer)
            raise StopRequested

    def _install(self) -> None:
        # Again after Lightning has put its own in front, which makes the processes exchange something in the handler.
        for number in self._before:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        # The signal may have reached this process alone, and Lightning's launcher started the others of this machine.
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if not self._requested and launcher is not None:
            launcher.kill(signal.Signals(number))
        # A terminal's Ctrl-C and the first process's word of it are one signal.
        again = self._requested and time.monotonic() - self._requested_at > _AGAIN
        if not self._requested:
            self._requested, self._requested_at = True, time.monotonic()
        # Several processes must not be torn out of what they exchange: they look for the request between two parts.
        alone = self._trainer is None or self._trainer.world_size == 1
        if again or (self._collecting and alone):
            raise StopRequested

    def _save(self, trainer: L.Trainer) -> None:
        directory = checkpoint_directory(trainer)
        if directory is None:
            rank_zero_warn("the run was asked to stop and saves no checkpoint, since it has no ModelCheckpoint")
            return
        path = directory / "stopped.ckpt"
        with saved_at_once(trainer):
            trainer.save_checkpoint(path, weights_only=False)  # of the file: with the optimizer
        rank_zero_info(f"asked to stop; the run goes on with --ckpt_path {path}")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
