"""Writes a report of the whole run at its end."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pbrl_lightning.callbacks.collection_progress import round_rows
from pbrl_lightning.callbacks.joint_evaluation import JointEvaluation
from pbrl_lightning.callbacks.run_directory import parts_elsewhere
from pbrl_lightning.curves import Curve, CurveLogger
from pbrl_lightning.distributions import reward_distribution, without_values
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.preferences.collector import Collection
from pbrl_lightning.report import RunSummary, render
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.run_directory import name_of_directory, run_directory
from pbrl_lightning.samples import JointSample, pair_samples
from pbrl_lightning.timing import duration, pending_seconds
from pbrl_lightning.utils.errors import ConfigurationError


class RunReport(RoundCallback):
    """Writes ``report.html``: what was run and how long it took, curves, rounds, rewards and joint responses.

    One file that any browser opens, without a server or a network. A resumed run's shows all of it, from the first
    start. Curves are kept in a bounded number of points, by a logger beside those of the trainer. Added by itself to
    runs with a logger.

    Args:
        dirpath: Where to; default the run's directory.
        num_samples: Task items of a round whose pairs are shown.
    """

    def __init__(self, dirpath: str | None = None, num_samples: int = 4) -> None:
        if num_samples < 0:
            raise ConfigurationError(f"`num_samples` must be >= 0, got {num_samples}")
        self.dirpath = dirpath
        self.num_samples = num_samples
        self._begin()

    def _begin(self) -> None:
        self._curves = CurveLogger()
        self._rounds: list[dict[str, Any]] = []  # the first and the last one
        self._started = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        self._clock = time.monotonic()

    @property
    def curves(self) -> dict[str, Curve]:
        """What was logged so far, by name."""
        return self._curves.curves

    @property
    def seconds(self) -> float:
        """Time of the run so far; of a resumed run without what came after the checkpoint in the earlier start."""
        return time.monotonic() - self._clock

    @property
    @override
    def state_key(self) -> str:
        return "RunReport"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": self._curves.state_dict(),
            "rounds": [dict(known) for known in self._rounds],
            "started": self._started,
            "seconds": self.seconds,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._curves.load_state_dict(state_dict["curves"])
        self._rounds = [dict(known) for known in state_dict["rounds"]]
        # Checkpoints of earlier versions have neither.
        self._started = state_dict.get("started", self._started)
        self._clock -= state_dict.get("seconds", 0.0)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._begin()  # a resumed run's state comes after this

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.loggers.append(self._curves)

    @override
    def on_round_scored(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        round_number: int,
        collected: Collection,
        reward_range: tuple[float, float] | None,
    ) -> None:
        samples = pair_samples(collected.pairs, self.num_samples) if self.num_samples else []
        this = {
            "round": round_number,
            "rewards": without_values(reward_distribution(round_number, collected.raw_rewards, reward_range)),
            "pairs": [asdict(sample) for sample in samples],
        }
        earlier = [known for known in self._rounds if known["round"] < round_number]
        self._rounds = [*earlier[:1], this]

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        directory = Path(self.dirpath or run_directory(trainer))
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        try:
            page = render(self._summary(trainer, pl_module, directory))
        except Exception as error:  # what was trained is complete without it
            rank_zero_warn(f"no report was written: {type(error).__name__}: {error}")
            return
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "report.html"
        write_atomically(path, lambda file: file.write(page.encode(errors="replace")))
        rank_zero_info(f"report: {path}")

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._leave(trainer)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: L.Trainer) -> None:
        if self._curves in trainer.loggers:
            trainer.loggers.remove(self._curves)

    def _summary(self, trainer: L.Trainer, pl_module: L.LightningModule, directory: Path) -> RunSummary:
        # Not at import: they need the modules, and these need the callbacks.
        from pbrl_lightning import report_facts

        data = trainer.datamodule  # type: ignore[attr-defined]
        evaluation = next((c for c in trainer.callbacks if isinstance(c, JointEvaluation)), JointEvaluation())  # type: ignore[attr-defined]
        changed, configuration = report_facts.configuration(trainer)
        facts = [] if evaluation.results else ["not evaluated: no evaluation items were given"]
        return RunSummary(
            title=name_of_directory(directory),
            facts=facts + [f"{what}: {path}" for what, path in parts_elsewhere(trainer).items()],
            curves=self._curves.curves,
            rounds=round_rows(data.rounds, evaluation.results) if data.rounds else (),
            distributions=[known["rewards"] for known in self._rounds],
            before=evaluation.first,
            after=evaluation.last,
            pairs={known["round"]: [JointSample(**sample) for sample in known["pairs"]] for known in self._rounds},
            module=type(pl_module).__name__,
            models=report_facts.models(pl_module),  # type: ignore[arg-type]
            tiles=self._tiles(trainer, evaluation),
            phases=report_facts.phases(self.curves, pending_seconds(), self.seconds),
            options=report_facts.options(trainer, pl_module, data, evaluation.num_samples),  # type: ignore[arg-type]
            changed=changed,
            configuration=configuration,
        )

    def _tiles(self, trainer: L.Trainer, evaluation: JointEvaluation) -> list[tuple[str, str]]:
        """When, how long, how much of everything, and what came out."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        tiles = [
            ("started", self._started),
            ("total time", duration(self.seconds)),
            ("optimizer steps", str(trainer.global_step)),
        ]
        if data.rounds:
            tiles.append(("rounds of collection", str(len(data.rounds))))
        if data.env_step:
            tiles.append(("joint responses sampled for training", str(data.env_step)))
        if len(evaluation.results) > 1:
            (_, first), (_, last) = evaluation.results[0], evaluation.results[-1]
            tiles.append(("mean task reward in evaluation", f"{first:.3f} → {last:.3f}"))
        return tiles
