"""What the runs of a row say together."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .rows import Row

FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Summary:
    """Means over the seeds of a row.

    Attributes:
        row: The row.
        runs: Its runs, by seed.
    """

    row: Row
    runs: list[dict[str, Any]]

    def of(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a number over seeds."""
        values = [run[name] for run in self.runs]
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean gain: over seeds or over paired responses, the larger one.

        Three seeds may agree by luck, and a hundred responses of one seed say nothing of the next seed.
        """
        count = len(self.runs)
        responses = sum(run["error"] ** 2 for run in self.runs) ** 0.5 / count
        return max(self.of("gain")[1] / count**0.5, responses)

    @property
    def complete(self) -> bool:
        """True if there are enough seeds to say something."""
        return len(self.runs) >= FEWEST_SEEDS

    @property
    def learns(self) -> bool:
        """True if the mean gain is more than two standard errors."""
        return self.complete and self.of("gain")[0] > 2 * self.error

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples, and mean and standard deviation of the reward there; between evaluations along straight lines."""
        grid = np.array(sorted({point[0] for run in self.runs for point in run["curve"]}), dtype=float)
        rewards = np.array([np.interp(grid, *zip(*run["curve"], strict=True)) for run in self.runs])
        return grid, rewards.mean(0), rewards.std(0, ddof=1) if len(rewards) > 1 else np.zeros_like(grid)


def summaries(rows: list[Row], results: dict[tuple[str, int], dict[str, Any]]) -> list[Summary]:
    """One per row, of all of its runs that are there."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for (name, _), entry in sorted(results.items()):
        by_row.setdefault(name, []).append(entry)
    return [Summary(row, by_row.get(row.name, [])) for row in rows]
