"""What a run says of itself: how far it is, a line per round, and a table of the rounds at the end."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pbrl_lightning.batches import RolloutBatch
from pbrl_lightning.callbacks.joint_evaluation import JointEvaluation
from pbrl_lightning.reporting.bars import CollectionBar, LogsAboveBar, in_notebook, works_here
from pbrl_lightning.reporting.empty_rounds import NOTHING_LEARNED
from pbrl_lightning.reporting.progress_lines import ProgressLines
from pbrl_lightning.reporting.quiet import QuietLightning, summary_line
from pbrl_lightning.rounds import RoundCallback, RoundRecord, batches_per_update
from pbrl_lightning.utils.errors import ConfigurationError


class CollectionProgress(RoundCallback):
    """Shows how far a run is: bars on a terminal, and plain lines everywhere else.

    Without a terminal (log files, batch systems, notebooks) or without Lightning's progress bar, a line comes every
    ``interval`` seconds: round, phase, how far, rate, time remaining, last loss. It comes also while a single step
    takes minutes. Lightning's own bar is switched off where it would write control characters into a file. After each
    collection there is a line, at the end a table of all rounds. Warnings of Lightning that no user of this library
    can act on are left out during the run. Added by itself.

    Args:
        interval: Seconds from one line to the next; 0 prints none and leaves Lightning's bar alone.
    """

    def __init__(self, interval: float = 30.0) -> None:
        if not 0 <= interval < math.inf:
            raise ConfigurationError(f"`interval` must be a number of seconds >= 0 (0 = no lines), got {interval}")
        self.interval = interval
        self._quiet = QuietLightning()
        self._lines: ProgressLines | None = None
        self._bar: CollectionBar | None = None
        self._logs = LogsAboveBar()
        self._shows_bars = False
        self._summarizes = False
        self._phase: _Phase | None = None
        self._steps_before = self._round = self._batches = 0
        self._had_signal = True
        self._ended = False

    # -- from the beginning to the end ------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._shows_bars = works_here(trainer.progress_bar_callback) and sys.stderr.isatty() and not in_notebook()
        self._summarizes |= self._quiet.start(trainer, replace_bar=self.interval > 0)
        self._phase, self._had_signal, self._ended = None, True, False
        if trainer.is_global_zero and self.interval and not self._shows_bars:
            self._lines = ProgressLines(
                self.interval,
                rank_zero_info,
                running=lambda: trainer.state.status == TrainerStatus.RUNNING,
                detail=lambda: self._detail(pl_module),
            )
            self._lines.begin("loading models")
            self._lines.start()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._had_signal = trainer.ckpt_path is not None  # what a resumed run learned before is not known here
        if self._summarizes:
            rank_zero_info(summary_line(pl_module))
        self._begin("preparing")

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._logs.start()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._had_signal = trainer.strategy.reduce_boolean_decision(self._had_signal, all=False)
        self._begin("finishing")

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended = True
        bar = trainer.progress_bar_callback
        self._logs.stop()
        if isinstance(bar, RichProgressBar):
            bar.teardown(trainer, pl_module, stage="fit")  # or it would be drawn once more, below what follows
        records = getattr(trainer.datamodule, "rounds", [])  # type: ignore[attr-defined]
        if records:
            evaluations = [c.results for c in trainer.callbacks if isinstance(c, JointEvaluation)]  # type: ignore[attr-defined]
            rank_zero_info("\n" + rounds_table(records, evaluations[0] if evaluations else []))

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # After what other callbacks say at the end of a fit.
        if self._ended and trainer.global_step == 0:
            rank_zero_info(f"{NOTHING_LEARNED}the run made no update, so what it trains is as it was at the start")
        elif self._ended and not self._had_signal:
            rank_zero_info(
                f"{NOTHING_LEARNED}in every rollout all joint responses of a task item had the same reward, so no "
                "update had a gradient"
            )
        self._stop()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._lines is not None:
            self._lines.stop()
            self._lines = None
        self._close_bar()
        self._logs.stop()
        self._quiet.stop()

    def _begin(self, what: str, total: int | None = None, unit: str = "", **options: Any) -> None:
        self._phase, self._batches = None, 0
        if self._lines is not None:
            self._lines.begin(what, total, unit, **options)

    def _detail(self, pl_module: L.LightningModule) -> str:
        """Epoch and last loss, in training."""
        phase = self._phase
        if phase is None:
            return ""
        facts = [f"epoch {phase.epoch + 1} of {phase.epochs}"] if phase.epochs > 1 else []
        loss = getattr(pl_module, "last_loss", None)
        if loss is not None:
            facts.append(f"{loss[0]} {float(loss[1]):.4g}")
        return ", ".join(facts)

    # -- collection -------------------------------------------------------------------------------------------------

    @override
    def on_round_start(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._round = round_number
        self._begin(f"{_round(trainer, round_number)}, preparing")

    @override
    def on_collection_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, total: int) -> None:
        if not trainer.is_global_zero:
            return
        if self._lines is not None and not (done and self._lines.has_sampled):
            # At the start, and once more after what a journal had: that tells nothing of the rate.
            what = f"{_round(trainer, self._round)}, collecting{_from_whom(trainer)}"
            self._begin(what, total, "item", done=done, most_tokens=_most_tokens(trainer, total))
        elif self._lines is not None:
            self._lines.advance(done)
        if self._shows_bars:
            self._bar = self._bar or CollectionBar(trainer, pl_module, total)
            self._logs.start()
            self._bar.update(done)
        if done >= total:
            self._close_bar()

    @override
    def on_round_collected(self, trainer: L.Trainer, pl_module: L.LightningModule, record: RoundRecord) -> None:
        reward = "no score" if record.reward_mean is None else f"mean reward {record.reward_mean:.3f}"
        rank_zero_info(
            f"round {record.round}: {record.collected_pairs} pairs collected, {record.train_pairs} to train on, "
            f"{reward}, {record.tokens_per_second:.0f} tokens/s"
        )

    @override
    def on_round_prepared(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        self._begin(f"{_round(trainer, round_number)}, preparing to train")

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # -- training and evaluation ------------------------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._train(trainer, 0)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._train(trainer, batch_idx)  # a run that resumes within an epoch is not told of its start

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._had_signal:
            signal = batch.advantages * batch.weights if isinstance(batch, RolloutBatch) else batch.weights
            self._had_signal = bool(signal.any())
        if self._lines is not None and self._phase is not None:
            self._lines.advance(self._steps_before + _steps(trainer, batch_idx + 1))

    def _train(self, trainer: L.Trainer, batch_idx: int) -> None:
        """Begins a phase of a round unless it has begun; its epochs are counted together."""
        if self._lines is None:
            return
        phase = _phase(trainer)
        per_epoch = _steps(trainer, int(trainer.num_training_batches))
        self._steps_before = phase.epoch * per_epoch
        if self._phase is None or phase.what != self._phase.what:
            done = self._steps_before + _steps(trainer, batch_idx)
            total = phase.epochs * per_epoch
            if trainer.max_steps > 0:
                total = min(total, done + trainer.max_steps - trainer.global_step)
            self._begin(phase.what, total, "step", done=done)
        self._phase = phase

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("validating", _number_of(trainer.num_val_batches), "batch")

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("testing", _number_of(trainer.num_test_batches), "batch")

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("predicting", _number_of(trainer.num_predict_batches), "batch")

    @override
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._evaluated()

    @override
    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._evaluated()

    @override
    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._evaluated()

    def _evaluated(self) -> None:
        self._batches += 1  # over all loaders
        if self._lines is not None:
            self._lines.advance(self._batches)


@dataclass(frozen=True)
class _Phase:
    """A phase of a round: its name, its epochs, and the epoch in progress (0-based)."""

    what: str
    epochs: int
    epoch: int


def _phase(trainer: L.Trainer) -> _Phase:
    data = trainer.datamodule  # type: ignore[attr-defined]
    position = getattr(data, "position", None)
    if position is None:  # a loader of the user's own
        return _Phase(f"epoch {trainer.current_epoch + 1}, training", 1, 0)
    name = {"reward": "fitting the reward model", "policy": "training the policy"}.get(position.phase, "training")
    epochs = dict(data.schedule.phases)[position.phase]
    return _Phase(f"{_round(trainer, position.round)}, {name}", epochs, position.epoch)


def _round(trainer: L.Trainer, number: int) -> str:
    schedule = getattr(trainer.datamodule, "schedule", None)  # type: ignore[attr-defined]
    return f"round {number}" if schedule is None else f"round {number} of {schedule.num_rounds}"


def _from_whom(trainer: L.Trainer) -> str:
    """Why each item counts twice in a collection with a comparator."""
    comparator = getattr(trainer.datamodule, "comparator", None)  # type: ignore[attr-defined]
    return "" if comparator is None else " from agents and comparator"


def _steps(trainer: L.Trainer, batches: int) -> int:
    return -(-batches // batches_per_update(trainer))


def _number_of(batches: Any) -> int | None:
    """All batches of Lightning's one number per loader; None if one of them has no length."""
    numbers = batches if isinstance(batches, list) else [batches]
    return int(sum(numbers)) if all(math.isfinite(number) for number in numbers) else None


def _most_tokens(trainer: L.Trainer, passes: int) -> int | None:
    """Most tokens that a collection samples: every response as long as it may be."""
    data = getattr(trainer.datamodule, "data", trainer.datamodule)  # type: ignore[attr-defined]
    team = getattr(trainer.lightning_module, "team", None)
    sampling = getattr(data, "sampling", None)
    if data is None or team is None or sampling is None:
        return None
    candidates = max(data.num_candidates, getattr(data.comparator, "num_candidates", None) or 0)
    return passes * candidates * team.num_agents * sampling.max_new_tokens


def round_rows(records: list[RoundRecord], evaluations: list[tuple[int, float]]) -> list[tuple[str, ...]]:
    """The rounds of a run as the rows of a table, its head first.

    Args:
        records: One per round.
        evaluations: Optimizer step and mean evaluation reward, in order.
    """

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def evaluated(until: int | None) -> float | None:
        values = [value for step, value in evaluations if until is None or step <= until]
        return values[-1] if values else None

    rows: list[tuple[str, ...]] = [
        ("round", "pairs", "trained on", "mean reward", "comparator", "evaluation before", "evaluation after")
    ]
    for index, record in enumerate(records):
        following = records[index + 1].first_step if index + 1 < len(records) else None
        rows.append(
            (
                str(record.round),
                str(record.collected_pairs),
                str(record.train_pairs),
                number(record.reward_mean),
                number(record.comparator_reward_mean),
                number(evaluated(record.first_step)),
                number(evaluated(following)),
            )
        )
    return rows


def rounds_table(records: list[RoundRecord], evaluations: list[tuple[int, float]]) -> str:
    """The rounds of a run as text; see :func:`round_rows`."""
    rows = round_rows(records, evaluations)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
