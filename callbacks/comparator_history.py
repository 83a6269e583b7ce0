"""Keeps the policy checkpoints that a HistoryComparator compares against."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from pbrl_lightning.agents.loading import write_directory
from pbrl_lightning.comparators.history import history_name
from pbrl_lightning.distributed import from_rank_zero
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.run_directory import run_directory
from pbrl_lightning.sharding import gathered


class ComparatorHistory(RoundCallback):
    """Saves ``initial`` before the first update and ``iteration_0000`` (0-based) … after each round.

    Each holds ``agent_0``, ``agent_1`` … that plain transformers or PEFT loads (adapters alone where the agents are
    adapters). What the comparator can no longer need is removed, ``initial`` excepted.

    Args:
        dirpath: Where to; default ``history`` in the run's directory.
        keep_all: Keep the checkpoints of all rounds.
    """

    def __init__(self, dirpath: str | None = None, keep_all: bool = False) -> None:
        self.dirpath = dirpath
        self.keep_all = keep_all
        self._directory: Path | None = None
        self._earlier: Path | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    @override
    def state_key(self) -> str:
        return "ComparatorHistory"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"directory": str(self._directory) if self._directory is not None else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A resumed run may have a new directory, and a checkpoint may come from elsewhere: what it names is read only.
        directory = state_dict["directory"]
        self._directory = None
        self._earlier = Path(directory) if isinstance(directory, str) and not self.dirpath else None

    @override
    def on_round_start(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        trainer.datamodule.pair_source.history_dir = self._place(trainer)  # type: ignore[attr-defined]
        if round_number == 1:
            self._save(trainer, pl_module, 0)

    @override
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._save(trainer, pl_module, round_number)
        lag = getattr(trainer.datamodule.comparator, "needs_history", None)  # type: ignore[attr-defined]
        if lag is None or self.keep_all or not trainer.is_global_zero:
            return
        # Round v + 1 needs the policy after round v + 1 - k; the one before it will never be asked for, nor one that a
        # kill left there a round ago.
        for completed in range(max(1, round_number - 1 - lag), round_number + 1 - lag):
            shutil.rmtree(self._place(trainer) / history_name(completed), ignore_errors=True)

    def _place(self, trainer: L.Trainer) -> Path:
        """Where the checkpoints go; to be asked for by every process, of which the first tells the others."""
        if self._directory is None and trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._scratch = tempfile.TemporaryDirectory(prefix="pbrl_")  # a trial leaves nothing
            self._directory = Path(from_rank_zero(self._scratch.name))
        elif self._directory is None:
            self._directory = Path(self.dirpath or run_directory(trainer) / "history")
            if self._earlier is not None:
                if trainer.is_global_zero:
                    adopt(self._earlier, self._directory, trainer.datamodule.current_round)  # type: ignore[attr-defined]
                trainer.strategy.barrier()
        return self._directory

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule, completed: int) -> None:
        directory = self._place(trainer)
        with gathered(pl_module.team):  # type: ignore[arg-type]
            if trainer.is_global_zero:
                pl_module.team.save(directory / history_name(completed))  # type: ignore[union-attr,operator]
        trainer.strategy.barrier()


def adopt(earlier: Path, directory: Path, rounds: int) -> None:
    """Takes over the policy checkpoints of the run's earlier directory, as hard links where possible.

    Args:
        earlier: Where they were; nothing there is changed. Nothing is done if it is the same place, or has none.
        directory: Where they go; what is there under the same names is replaced.
        rounds: Those after at most this many rounds are taken over.
    """
    if earlier.resolve() == directory.resolve() or not (earlier / history_name(0)).is_dir():
        return
    for completed in range(rounds + 1):
        source = earlier / history_name(completed)
        for agent in sorted(source.glob("agent_*")):
            if agent.is_dir():
                copy = partial(shutil.copytree, agent, copy_function=_link, dirs_exist_ok=True)
                write_directory(directory / source.name / agent.name, copy)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
