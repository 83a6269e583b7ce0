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

SIZE = (5.2, 3.3)
"""Width and height of a picture in inches without its legend: readable beside another one, and alone on a phone."""
LINE = 0.22
"""Height of a line of the legend, inches."""


def draw(directory: Path, results: dict[tuple[str, int], dict[str, Any]]) -> list[Path]:
    """One picture per table and group of rows that has runs; pictures of a table share their y-axis."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in TABLES:
        groups = grouped(summaries([row for row in ROWS if row.table == table], results))
        limits = _limits([row for rows in groups.values() for row in rows])
        for group, rows in groups.items():
            paths.append(directory / file_name(table, group))
            _picture(group, rows, limits, paths[-1])
    return paths


def grouped(rows: list[Summary]) -> dict[str, list[Summary]]:
    """Rows that have runs, by group."""
    with_runs = [row for row in rows if row.runs]
    names = dict.fromkeys(row.row.group for row in with_runs)
    return {group: [row for row in with_runs if row.row.group == group] for group in names}


def file_name(table: str, group: str) -> str:
    """Where the picture of a group is."""
    return f"results_{table}_{group.lower().replace(' ', '_')}.png"


def _limits(rows: list[Summary]) -> tuple[float, float]:
    """Lowest and highest value that is drawn, with some space around."""
    bounds = [bound for row in rows for _, mean, std in [row.curve()] for bound in (*(mean - std), *(mean + std))]
    low, high = min(bounds, default=0.0), max(bounds, default=1.0)
    space = 0.04 * ((high - low) or 1.0)
    return low - space, high + space


def _picture(group: str, rows: list[Summary], limits: tuple[float, float], path: Path) -> None:
    width, height = SIZE
    legend = LINE * len(rows) + 0.15
    figure, axis = plt.subplots(figsize=(width, height + legend))
    for row in rows:
        _line(axis, row)
    axis.set(title=group, xlabel="joint responses sampled", ylabel="evaluation reward", xlim=(0, None), ylim=limits)
    axis.grid(color="#e4e4e4")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0.1, 0.0))
    total = height + legend
    figure.subplots_adjust(left=0.13, right=0.95, top=1 - 0.35 / total, bottom=(legend + 0.55) / total)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _line(axis: Axes, summary: Summary) -> None:
    samples, mean, std = summary.curve()
    style: dict[str, Any] = {"linestyle": "--"} if summary.row.control else {}
    (line,) = axis.plot(samples, mean, "o-" if not style else "o", markersize=2.5, linewidth=1.3, **style)
    line.set_label(summary.row.title)
    axis.fill_between(samples, mean - std, mean + std, alpha=0.12, color=line.get_color(), linewidth=0)
