"""Logs what a round's time was spent on."""

from __future__ import annotations

import time

import lightning as L
from typing_extensions import override

from pbrl_lightning.rounds import RoundCallback, log_to
from pbrl_lightning.timing import take_seconds


class RoundTimes(RoundCallback):
    """After each round, ``time/sampling``, ``time/scoring`` …: seconds of the first process since the round began.

    ``time/round`` is all of it, and ``time/other`` what none of them accounts for. Of a resumed run's first round only
    the part after the resume is there.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin()

    @override
    def on_round_start(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._begin()

    @override
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        now = time.monotonic()
        spent = {f"time/{activity}": seconds for activity, seconds in take_seconds().items()}
        whole = now - self._started
        log_to(trainer, {**spent, "time/round": whole, "time/other": max(0.0, whole - sum(spent.values()))})
        self._begin()

    def _begin(self) -> None:
        take_seconds()
        self._started = time.monotonic()
