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
from pbrl_lightning.cards.hub import check_hub_id, push_to_hub
from pbrl_lightning.cards.writing import write_cards
from pbrl_lightning.run_directory import run_directory
from pbrl_lightning.sharding import gathered
from pbrl_lightning.utils.errors import raise_together


class AgentExport(L.Callback):
    """Exports the team as ``agent_0``, ``agent_1`` …, and a reward model as ``reward_model``, at the end of a run.

    Each directory gets a model card, ``README.md``: how it was trained, on what, with which results and versions, and
    how to load it. It holds no task item, no key, no address and no path of this machine.

    With ``hub_id`` each directory is uploaded to the Hugging Face hub at the end of the run; without it nothing is. The
    token is that of ``hf auth login`` or of HF_TOKEN in the environment, and is kept nowhere else.

    Args:
        dirpath: Where to; default ``export`` in the run's directory.
        model_cards: False leaves the cards out.
        license: What the cards state, by the hub's name of it, such as ``apache-2.0``; None states none.
        hub_id: Uploads to ``HUB_ID-agent_0``, ``HUB_ID-agent_1`` and so on, and ``HUB_ID-reward_model``.
        hub_private: False lets everybody read the repositories that are created.

    Raises:
        ConfigurationError: If an option needs another one.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        *,
        model_cards: bool = True,
        license: str | None = None,
        hub_id: str | None = None,
        hub_private: bool = True,
    ) -> None:
        problems = []
        if license is not None and not model_cards:
            problems.append("`license` is stated in model cards: leave `model_cards` true")
        if not hub_private and hub_id is None:
            problems.append("`hub_private: false` needs a `hub_id`: nothing is uploaded without one")
        raise_together(problems)
        self.dirpath = dirpath
        self.model_cards = model_cards
        self.license = license
        self.hub_id = hub_id
        self.hub_private = hub_private

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.hub_id is not None and stage == "fit":
            check_hub_id(self.hub_id)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        target = self.export(trainer, pl_module)
        rank_zero_info(f"trained models: {target}")
        if self.hub_id is not None and trainer.is_global_zero:
            self._push(target)

    def _push(self, target: Path) -> None:
        assert self.hub_id is not None
        try:
            push_to_hub(target, self.hub_id, private=self.hub_private)
        except Exception as error:  # the models are safe, and the network is not the run's
            said = " ".join(str(error).split())
            rank_zero_warn(
                f"what was trained is in {target}, but was not uploaded: {type(error).__name__}: {said}. To try "
                f"again: `from pbrl_lightning.cards.hub import push_to_hub; push_to_hub(Path({str(target)!r}), "
                f"{self.hub_id!r}, private={self.hub_private})`"
            )

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
                write_cards(trainer, pl_module, results, target, self.license)  # type: ignore[arg-type]
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
