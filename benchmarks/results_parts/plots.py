"""The pictures of docs/results.md: evaluation reward against samples, mean and standard deviation over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from .rows import ROWS, TABLES
from .summary import Summary, summaries

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def draw(directory: Path, results: dict[tuple[str, int], dict[str, Any]]) -> list[Path]:
    """One picture per table that has runs, a panel for each group of rows."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for table in TABLES:
        rows = [row for row in summaries([row for row in ROWS if row.table == table], results) if row.runs]
        if rows:
            drawn.append(directory / f"results_{table}.png")
            _picture(rows, drawn[-1])
    return drawn


def _picture(rows: list[Summary], path: Path) -> None:
    groups = list(dict.fromkeys(row.row.group for row in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(4.0 * len(groups), 4.6), sharey=True, squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        for row in rows:
            if row.row.group == group:
                _line(axis, row)
        axis.set(title=group, xlabel="joint responses sampled", xlim=(0, None))
        axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0][0].set_ylabel("evaluation reward")
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _line(axis: Axes, summary: Summary) -> None:
    samples, mean, std = summary.curve()
    style: dict[str, Any] = {"linestyle": "--"} if summary.row.control else {}
    (line,) = axis.plot(samples, mean, "o-" if not style else "o", markersize=2.5, linewidth=1.3, **style)
    line.set_label(summary.row.title)
    axis.fill_between(samples, mean - std, mean + std, alpha=0.12, color=line.get_color(), linewidth=0)
