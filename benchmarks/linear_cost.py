"""Does cost grow linearly in candidates, pairs, agents and rounds?

    python benchmarks/linear_cost.py [--tiny] [--threads 2] [--out runs/linear_cost]

Times collections of more and more candidates, MADPO epochs over more and more pairs, collections and updates of larger
and larger LoRA teams, and the rounds of a long iterative run that replays from all of its history; SmolLM2-135M, fp32.
Prints seconds and the slope of their logarithms (1: linear; below: fixed costs are shared), writes them as JSON and
draws them as PNG.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from speed_parts.bench import Variant
from speed_parts.learning import pair_batch, update_of
from speed_parts.rounds import fit_rounds
from speed_parts.shared import reward
from speed_parts.workload import Workload, save_endless

from pbrl_lightning import AllHistoryReplay, MADPOModule
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.rounds import RoundCallback

mpl.use("Agg")
from matplotlib import pyplot as plt

Points = list[tuple[int, float]]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of a call after one to warm up: the shorter of two."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def collection(work: Workload, num_agents: int, candidates: int, lora: bool) -> float:
    """Seconds of a collection."""
    team, rounds = work.team(num_agents=num_agents, lora=lora), itertools.count(1)
    items = work.items(team, "short")
    collector = Collector(Oracle(reward), work.sampling, candidates, "reward_gap", 4, seed=0)
    return seconds_of(lambda: collector.collect(team, items, list(range(len(items))), next(rounds)))


def updates(work: Workload, num_agents: int, num_pairs: int) -> float:
    """Seconds of MADPO updates of four pairs each."""
    module = MADPOModule(work.team(num_agents=num_agents, lora=True))
    batch = pair_batch(module, work.pairs(module.team, "short"))
    update = update_of(module, Variant("fp32", lora=True))
    return seconds_of(lambda: [update(batch) for _ in range(num_pairs // work.batch_size)])


class RoundClock(RoundCallback):
    """Seconds from the first round's start to each round's end."""

    def __init__(self) -> None:
        self.points: Points = []
        self._started = 0.0

    def on_round_start(self, trainer: Any, pl_module: Any, round_number: int) -> None:
        """The first one starts the clock."""
        del trainer, pl_module
        if round_number == 1:
            self._started = time.perf_counter()

    def on_round_end(self, trainer: Any, pl_module: Any, round_number: int) -> None:
        """A round is over."""
        del trainer, pl_module
        self.points.append((round_number, time.perf_counter() - self._started))


def rounds(work: Workload, count: int) -> Points:
    """Seconds after each round of an iterative run whose replay draws from all rounds."""
    clock, team = RoundClock(), work.team(lora=True)
    fit_rounds(MADPOModule(team, num_iterations=count), work, work.items(team, "short"), [clock], AllHistoryReplay())
    return clock.points


def measure(work: Workload, tiny: bool) -> Iterator[tuple[str, Points]]:
    """Each series, when it is there."""
    small = replace(work, num_items=2, new_tokens=4 if tiny else 24)
    few = (2, 4) if tiny else (4, 8, 16, 32, 64, 128)
    yield "candidates of a collection", [(count, collection(small, 1, count, False)) for count in few]
    pairs = (2, 4) if tiny else (4, 8, 16, 32)
    yield "pairs of an epoch", [(count, updates(work, 2, count)) for count in pairs]
    agents = (1, 2) if tiny else (1, 2, 4, 8)
    yield "agents of a collection", [(count, collection(small, count, 8, True)) for count in agents]
    yield "agents of an update", [(count, updates(work, count, work.batch_size)) for count in agents]
    yield "rounds of a run", rounds(small, 2 if tiny else 12)


def slope(points: Points) -> float:
    """Least squares through the logarithms."""
    x = torch.tensor([math.log(count) for count, _ in points], dtype=torch.float64)
    y = torch.tensor([math.log(seconds) for _, seconds in points], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def draw(series: dict[str, Points], path: Path) -> None:
    """A panel for each series, with the line from the origin through its last point."""
    figure, axes = plt.subplots(1, len(series), figsize=(3.4 * len(series), 3.0))
    for axis, (name, points) in zip(axes, series.items(), strict=True):
        counts, seconds = zip(*points, strict=True)
        axis.plot(counts, seconds, "o-", markersize=4, label="measured")
        axis.plot([0, counts[-1]], [0, seconds[-1]], "--", color="grey", linewidth=1, label="proportional")
        axis.set(title=name, xlabel=name.split()[0], ylabel="seconds", xlim=(0, None), ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small sizes: does it run at all?")
    parser.add_argument("--out", type=Path, default=Path("runs/linear_cost"), help="without a suffix")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    series: dict[str, Points] = {}
    with tempfile.TemporaryDirectory(prefix="pbrl_linear_") as directory:
        save_endless(Path(directory), options.tiny)
        work = Workload.tiny(directory) if options.tiny else Workload(directory)
        for name, points in measure(work, options.tiny):
            series[name] = points
            numbers = ", ".join(f"{count}: {seconds:.2f} s" for count, seconds in points)
            print(f"{name}: slope {slope(points):.2f}  ({numbers})", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {name: {"slope": slope(points), "points": points} for name, points in series.items()}
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    draw(series, options.out.with_suffix(".png"))
    print(f"written to {options.out}.json and {options.out}.png")


if __name__ == "__main__":
    main()
