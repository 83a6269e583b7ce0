"""Speed of whole rounds."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import lightning as L

from pbrl_lightning import CurrentComparator, MADPOModule, PreferenceDataModule, ReplayBuffer, SamplingConfig
from pbrl_lightning.callbacks import AgentExport
from pbrl_lightning.rounds import RoundCallback
from speed_parts.bench import PAIRS_PER_ITEM, Bench, Variant, prompt_lengths
from speed_parts.limit import TRAINED, Products, sampling_products
from speed_parts.rows import Row, Rows, Turns
from speed_parts.shared import reward
from speed_parts.workload import Workload

STAGES = ("sample and score", "store, replay and tokenise", "train")


class Clock(RoundCallback):
    """Times the rounds of a run but the first; between two rounds the limit and the peer have their turn.

    Args:
        turns: Where the times go.

    Attributes:
        parts: Seconds of the three stages, per round.
    """

    def __init__(self, turns: Turns) -> None:
        self.parts: list[list[float]] = []
        self._turns = turns
        self._times: list[float] = []

    def on_round_start(self, *_: Any) -> None:
        """Sampling begins."""
        self._times = [time.perf_counter()]

    def on_collection_end(self, *_: Any) -> None:
        """All is sampled and scored."""
        self._times.append(time.perf_counter())

    def on_round_prepared(self, *_: Any) -> None:
        """All is stored, drawn and tokenised."""
        self._times.append(time.perf_counter())

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        """All is trained."""
        del trainer, pl_module
        self._times.append(time.perf_counter())
        if round_number > 1:
            self.parts.append([after - before for before, after in itertools.pairwise(self._times)])
            self._turns.add(self._times[-1] - self._times[0])


class NoExport(AgentExport):
    """Stands in for the export at the end of a run, which is no part of a round."""

    def on_fit_end(self, *_: Any) -> None:
        """Writes nothing."""


def whole_round(bench: Bench) -> Rows:
    """A round of iterative MADPO: both sides sampled, scored, stored, replayed, trained on for one epoch."""
    for variant, length in itertools.product(bench.variants(), bench.lengths):
        yield _round_row(bench, variant, length)


def _round_row(bench: Bench, variant: Variant, length: str) -> Row:
    work = bench.work
    team = work.team(variant.precision)
    items = work.items(team, length)
    # Updates as large as they mostly are: the prompts of all items, once each.
    num_pairs = len(items) * min(PAIRS_PER_ITEM, work.num_candidates)
    updates = -(-num_pairs // work.batch_size)
    said = 2 * num_pairs * work.new_tokens // updates
    products = [
        (
            matrices,
            [
                *sampling_products(prompts, work.num_candidates, work.new_tokens) * 2,
                Products(sum(prompts[: len(set(work.pair_items))]) + said, said, TRAINED, updates),
            ],
        )
        for matrices, prompts in zip(variant.matrices(team), prompt_lengths(team, work, items), strict=True)
    ]
    sizes = {"candidates": work.num_candidates, "batch_size": work.batch_size, "new_tokens": work.new_tokens}
    turns = bench.turns(variant, products, "round", items=items, **sizes)
    clock = Clock(turns)
    precision = "bf16-mixed" if variant.precision == "mixed" else "32-true"
    module = MADPOModule(team, num_iterations=1 + bench.repeats)
    fit_rounds(module, work, items, [clock], precision=precision, sampling=variant.sampling(work))
    seconds = dict(zip(STAGES, map(median, zip(*clock.parts, strict=True)), strict=True))
    note = ", ".join(f"{stage} {part / sum(seconds.values()):.1%}" for stage, part in seconds.items())
    both = 2 * len(items) * work.num_candidates
    return turns.row(
        f"iterative round {length} {variant}", both, "joint responses/s", note=note, extra={"stages": seconds}
    )


def fit_rounds(
    module: MADPOModule,
    work: Workload,
    items: list[dict[str, Any]],
    callbacks: list[L.Callback],
    replay: ReplayBuffer | None = None,
    *,
    precision: Any = "32-true",
    sampling: SamplingConfig | None = None,
) -> None:
    """An iterative run against the current agents, without logs, checkpoints and export."""
    data = PreferenceDataModule(
        items,
        reward,
        comparator=CurrentComparator(),
        num_candidates=work.num_candidates,
        pairs_per_sample=PAIRS_PER_ITEM,
        batch_size=work.batch_size,
        sampling=sampling or work.sampling,
        replay=replay,
    )
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        trainer = L.Trainer(
            accelerator="cpu",
            precision=precision,
            default_root_dir=scratch,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, NoExport()],
        )
        trainer.fit(module, data)


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's hints are none of the table's."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)
