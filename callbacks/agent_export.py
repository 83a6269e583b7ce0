"""Writes what was trained as directories that plain transformers or PEFT loads."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pbrl_lightning.sharding import gathered


class AgentExport(L.Callback):
    """Exports the team as ``agent_0``, ``agent_1`` …, and a reward model as ``reward_model``, at the end of a run.

    Args:
        dirpath: Where to; default ``export`` in the run's log directory.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            target = self.export(trainer, pl_module)
            rank_zero_info(f"trained models: {target}")

    def export(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Path:
        """Writes the agents now and returns the directory; to be called by every process, of which the first writes."""
        target = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "export")
        with gathered(pl_module):
            if trainer.is_global_zero:
                pl_module.export(target)  # type: ignore[operator]
        return target
