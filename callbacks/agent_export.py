"""Writes what was trained as directories that plain transformers or PEFT loads."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pbrl_lightning.callbacks.collection_progress import round_rows
from pbrl_lightning.callbacks.joint_evaluation import JointEvaluation
from pbrl_lightning.callbacks.run_report import RunReport
from pbrl_lightning.cards.facts import RunResults
from pbrl_lightning.cards.writing import write_cards
from pbrl_lightning.run_directory import run_directory
from pbrl_lightning.sharding import gathered


class AgentExport(L.Callback):
    """Exports the team as ``agent_0``, ``agent_1`` …, and a reward model as ``reward_model``, at the end of a run.

    Each directory gets a model card, ``README.md``: how it was trained, on what, with which results and versions, and
    how to load it. It holds no task item, no key, no address and no path of this machine.

    Args:
        dirpath: Where to; default ``export`` in the run's directory.
        model_cards: False leaves the cards out.
    """

    def __init__(self, dirpath: str | None = None, *, model_cards: bool = True) -> None:
        self.dirpath = dirpath
        self.model_cards = model_cards

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            target = self.export(trainer, pl_module)
            rank_zero_info(f"trained models: {target}")

    def export(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Path:
        """Writes the agents now and returns the directory; to be called by every process, of which the first writes."""
        target = Path(self.dirpath or run_directory(trainer) / "export")
        with gathered(pl_module):
            if trainer.is_global_zero:
                pl_module.export(target)  # type: ignore[operator]
        if self.model_cards:
            self._write_cards(trainer, pl_module, target)
        return target

    def _write_cards(self, trainer: L.Trainer, pl_module: L.LightningModule, target: Path) -> None:
        # The weights are safe by now, and nothing that a card could trip over may end a run.
        try:
            results = _results(trainer)
            if trainer.is_global_zero:
                write_cards(trainer, pl_module, results, target)  # type: ignore[arg-type]
        except Exception as error:
            rank_zero_warn(f"what was trained is in {target}, but without model cards: {type(error).__name__}: {error}")


def _results(trainer: L.Trainer) -> RunResults:
    """What the run's other callbacks gathered; asked for by every process, since Lightning may sum metrics up."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    evaluation = next((c for c in callbacks if isinstance(c, JointEvaluation)), None)
    report = next((c for c in callbacks if isinstance(c, RunReport)), None)
    done = evaluation.results if evaluation is not None else []
    return RunResults(
        evaluations=done,
        samples=evaluation.num_samples if evaluation is not None else 0,
        rounds=round_rows(trainer.datamodule.rounds, done),  # type: ignore[attr-defined]
        curves=report.curves if report is not None else {},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )
