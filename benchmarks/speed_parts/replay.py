"""Replay: the time of a round's replay against the length of the history."""

from __future__ import annotations

import tempfile
from functools import partial
from statistics import median

import torch

from pbrl_lightning import AllHistoryReplay, LambdaDecayReplay, PreferencePair, ReplayBuffer
from pbrl_lightning.preferences.round_files import RoundStore
from speed_parts.bench import Bench
from speed_parts.limit import seconds_of
from speed_parts.rows import Row, Rows


def replay(bench: Bench) -> Rows:
    """Stores round after round, as a run does; at some lengths the round's replay is timed.

    A round's replay is what the data side does between collection and tokenising: write the round file, draw from the
    history and read what was drawn, as many pairs as the round has.
    """
    work = bench.work
    buffers: dict[str, ReplayBuffer] = {"all history": AllHistoryReplay(), "lambda decay": LambdaDecayReplay(decay=0.8)}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = RoundStore(directory)
        store.open("benchmark")
        pairs = [_pair(index) for index in range(work.round_pairs)]
        for number in range(1, work.histories[-1] + 1):
            writes = [seconds_of(partial(store.write, number, pairs))]
            if number not in work.histories:
                continue
            writes += [seconds_of(partial(store.write, number, pairs)) for _ in range(bench.repeats - 1)]
            for name, buffer in buffers.items():
                times = [seconds_of(partial(_draw, store, buffer, number, seed)) for seed in range(bench.repeats)]
                seconds = median(writes) + median(times)
                growth = seconds / first.setdefault(name, seconds)
                yield Row(
                    f"replay {name}, {number} rounds",
                    work.round_pairs / seconds,
                    "pairs/s",
                    seconds,
                    note=f"{growth:.2f} × the first; {median(writes):.2g} s of it to write the round",
                    extra={"rounds": number, "write_seconds": writes, "draw_seconds": times, "growth": growth},
                )


def _draw(store: RoundStore, buffer: ReplayBuffer, number: int, seed: int) -> None:
    """What a round trains on, drawn and read."""
    counts = [(entry.iteration, entry.num_pairs) for entry in store.entries]
    store.fetch(buffer.select(counts, number, torch.Generator().manual_seed(seed)))


def _pair(index: int) -> PreferencePair:
    """A pair of two agents with texts of some sentences."""
    text = f"Response number {index} says what a response of this length says. " * 3
    return PreferencePair(["A task.", "Its other view."], [text, text + "a"], [text + "b", text], 1.0, 0.5, 0.75)
