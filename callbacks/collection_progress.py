"""Shows a collection's progress, and the table of rounds at the end."""

from __future__ import annotations

import sys

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from pbrl_lightning.callbacks.joint_evaluation import JointEvaluation
from pbrl_lightning.rounds import RoundCallback, RoundRecord


class CollectionProgress(RoundCallback):
    """A progress bar while a round is collected, a line after it, and a table of all rounds at the end."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    @override
    def on_collection_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, total: int) -> None:
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = tqdm(total=total, desc="collecting", unit="item", leave=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None

    @override
    def on_round_collected(self, trainer: L.Trainer, pl_module: L.LightningModule, record: RoundRecord) -> None:
        reward = "no score" if record.reward_mean is None else f"mean reward {record.reward_mean:.3f}"
        rank_zero_info(
            f"round {record.round}: {record.collected_pairs} pairs collected, {record.train_pairs} to train on, "
            f"{reward}, {record.tokens_per_second:.0f} tokens/s"
        )

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        records = trainer.datamodule.rounds  # type: ignore[attr-defined]
        if trainer.is_global_zero and records:
            evaluations = [c.results for c in trainer.callbacks if isinstance(c, JointEvaluation)]  # type: ignore[attr-defined]
            rank_zero_info("\n" + rounds_table(records, evaluations[0] if evaluations else []))


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
