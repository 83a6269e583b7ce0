"""What is drawn of a run. Figures are made without pyplot: no window, no global state, nothing kept."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import numpy as np

from pbrl_lightning.curves import SMOOTHED_FROM, Curve, smoothed
from pbrl_lightning.distributions import reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pbrl_lightning.panels import Panel

P = ParamSpec("P")

CURRENT: Final = "#1f6fb4"
COMPARATOR: Final = "#d9822b"
LINES: Final = (CURRENT, COMPARATOR, "#3a8f5c", "#a0468c", "#7b7b7b", "#b03a3a", "#5a54b8", "#8a6d1f")
"""Colors of lines, in order."""
INK: Final = "#222222"
MUTED: Final = "#757575"
GRID: Final = "#e4e4e4"
BARS: Final = "#d5dde6"
PAGE_COLORS: Final = {
    **{color: f"--line-{place}" for place, color in enumerate(LINES)},
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BARS: "--bars",
}
"""CSS variables that a page may set to give the figures in it other colors, such as on a dark background."""
_STYLE: Final[dict[str, Any]] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # texts stay texts: small, and found by a search
    "text.parse_math": False,  # names are the user's, and a dollar is no formula
}


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return drawn


def _style(**more: str) -> AbstractContextManager[None]:
    from matplotlib import rc_context

    settings: Any = {**_STYLE, **more}  # its keys are a type of matplotlib's own
    return rc_context(settings)


def _figure(width: float, height: float, left: float, bottom: float, right: float, top: float) -> Figure:
    """Edges of the axes are shares of the figure: a layout that is sought takes two to three times as long to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110)
    figure.subplots_adjust(left, bottom, right, top)
    return figure


@_styled
def reward_figure(distribution: Mapping[str, Any]) -> Figure:
    """Rewards of a round: current agents against the comparator, all candidates above those of selected pairs.

    Args:
        distribution: Of :func:`pbrl_lightning.distributions.reward_distribution`; the values themselves are not needed.
    """
    figure = _figure(4.4, 4.9, 0.13, 0.1, 0.97, 0.87)
    figure.subplots_adjust(hspace=0.85)
    panels = figure.subplots(2, 1, sharex=True)
    groups = (("candidates", "all candidates"), ("selected_pairs", "in selected pairs"))
    for axes, (group, name) in zip(panels, groups, strict=True):
        _draw_sides(axes, np.asarray(distribution["bin_edges"]), distribution[group])
        _head(axes, f"round {distribution['iteration']}: {name}", columns=1)
    panels[1].set_xlabel("reward")
    return figure


def _draw_sides(axes: Axes, edges: np.ndarray, group: Mapping[str, Mapping[str, Any]]) -> None:
    """Both sides of a comparison as bars side by side, each with its mean as a dashed line."""
    sides = {side: part for side, part in group.items() if part["count"]}
    for place, (side, part) in enumerate(sides.items()):
        width = np.diff(edges) * 0.9 / len(sides)
        left = edges[:-1] + np.diff(edges) * 0.05 + place * width
        color = CURRENT if side == "current" else COMPARATOR
        outside = part["below"] + part["above"]
        name = "current agents" if side == "current" else side
        label = f"{name}: mean {part['mean']:.3g} (dashed), n = {part['count']}"
        label += f", {outside} outside" if outside else ""
        share = np.asarray(part["counts"]) / part["count"]
        axes.bar(left, share, width, align="edge", color=color, alpha=0.85, label=label)
        axes.axvline(part["mean"], color=color, linestyle="--", linewidth=1.2)
    axes.set_ylabel("share of n")
    axes.grid(visible=False, axis="x")
    axes.set_xticks(edges, minor=True)  # where bins begin and end
    axes.tick_params(axis="x", labelbottom=True)
    if not sides:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color=MUTED)


def _head(axes: Axes, title: str, columns: int = 2) -> None:
    """A title, and below it a legend that covers nothing."""
    named = len(axes.get_legend_handles_labels()[0])
    rows = -(-named // columns)
    axes.set_title(title, pad=6 + 14 * rows)
    if named:
        narrow = {"ncols": columns, "handlelength": 1.2, "columnspacing": 1.2, "borderaxespad": 0.1}
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), **narrow)


@_styled
def histogram_figure(values: Sequence[float], title: str, label: str, marked: float | None = None) -> Figure:
    """How numbers are distributed, with their mean.

    Args:
        values: At least one.
        title: Above the figure.
        label: What the numbers are, with their unit.
        marked: A value to mark, such as 0 for margins.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _figure(5.0, 3.0, 0.12, 0.16, 0.97, 0.83)
    axes = figure.subplots()
    array = np.asarray(values, dtype=np.float64)
    bins = min(40, max(8, len(array) // 8))
    edges = axes.hist(array, bins=bins, color=CURRENT, alpha=0.85, edgecolor="white", linewidth=0.4)[1]
    axes.axvline(array.mean(), color=INK, linestyle="--", linewidth=1.2, label=f"mean {array.mean():.3g}")
    if marked is not None:
        axes.axvline(marked, color=COMPARATOR, linewidth=1.2, label=f"{marked:g}")
    axes.set_xlabel(f"{label} ({bins} bins of {edges[1] - edges[0]:.2g})")
    axes.set_ylabel("count")
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(visible=False, axis="x")
    _head(axes, f"{title} (n = {len(array)})")
    return figure


@_styled
def calibration_figure(margins: Sequence[float], title: str) -> Figure:
    """A reward model's share of right answers by how sure it is; on the diagonal it is calibrated.

    Args:
        margins: ``R(winner) - R(loser)`` of at least one pair.
        title: Above the figure.
    """
    found = reliability(margins)
    figure = _figure(4.4, 3.8, 0.11, 0.21, 0.95, 0.87)
    axes = figure.subplots()
    width = found.edges[1] - found.edges[0]
    share = np.asarray(found.counts) / sum(found.counts)
    axes.bar(found.edges[:-1], share, width, align="edge", color=BARS, label="share of the pairs")
    axes.plot([0.5, 1], [0.5, 1], color=MUTED, linestyle="--", linewidth=1, label="calibrated")
    filled = [bin for bin, count in enumerate(found.counts) if count]
    axes.plot(
        [found.confidence[bin] for bin in filled],
        [found.accuracy[bin] for bin in filled],
        marker="o",
        color=CURRENT,
        label="share of right answers",
    )
    axes.set(xlim=(0.5, 1), ylim=(-0.03, 1.03), xlabel="confidence  σ(|R(winner) − R(loser)|)")
    axes.set_title(f"{title} (n = {sum(found.counts)})\ncalibration error by confidence {found.error:.3f}")
    figure.legend(loc="lower center", ncols=3, columnspacing=1.2, borderaxespad=0.1)
    return figure


@_styled
def curve_figure(title: str, curves: Mapping[str, Curve], label: str = "") -> Figure:
    """Curves over optimizer steps.

    Args:
        title: Above the figure.
        curves: By what the legend calls them.
        label: Unit of the values.
    """
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns) if len(curves) > 1 else 0  # of the legend
    figure = _figure(4.4, 2.7 + 0.18 * rows, 0.19, 0.18 + 0.06 * rows, 0.97, 0.91)
    _draw_curves(figure.subplots(), title, curves, label)
    if rows:
        figure.legend(loc="lower center", ncols=columns, borderaxespad=0.1)
    return figure


@_styled
def curves_figure(panels: Sequence[tuple[Panel, Mapping[str, Curve]]]) -> Figure:
    """Several panels of curves in one figure, in up to three columns.

    Args:
        panels: At least one, each with its curves by what the legend calls them.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    edges = (0.16 / columns, 0.18 / rows, 1 - 0.04 / columns, 1 - 0.11 / rows)
    figure = _figure(4.0 * columns, 2.6 * rows, *edges)
    figure.subplots_adjust(wspace=0.24, hspace=0.45)
    for place, (panel, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        _draw_curves(axes, panel.title, curves, panel.unit)
        if len(curves) > 1:
            axes.legend()
    return figure


def _draw_curves(axes: Axes, title: str, curves: Mapping[str, Curve], label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, (name, curve) in enumerate(curves.items()):
        dashed = len(curves) == 2 and place > 0  # a line that lies on another one stays visible
        _draw_curve(axes, name, curve, LINES[place % len(LINES)], "--" if dashed else "-")
    axes.set_title(title)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _draw_curve(axes: Axes, name: str, curve: Curve, color: str, line: str) -> None:
    """A line with its band of standard errors; a long one smoothed, and faint as it was logged."""
    label = name.lstrip("_")  # a legend leaves out names that begin with an underscore
    if curve.error is not None:
        axes.fill_between(curve.steps, *curve.band(), color=color, alpha=0.18, linewidth=0)
    if len(curve) < SMOOTHED_FROM:
        axes.plot(curve.steps, curve.values, line, color=color, linewidth=1.3, label=label, marker="o", markersize=3)
        return
    axes.plot(curve.steps, curve.values, "-", color=color, linewidth=0.9, alpha=0.3)
    axes.plot(curve.steps, smoothed(curve.values), line, color=color, linewidth=1.5, label=label)


def pixels(figure: Figure) -> np.ndarray:
    """A figure as an image, shape ``(height, width, 3)``, uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with _style():  # ticks are made as they are drawn
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def svg(figure: Figure, salt: str) -> str:
    """A figure as an ``<svg>`` element for a page: transparent, with colors that :data:`PAGE_COLORS` may replace.

    Args:
        figure: What to write.
        salt: Another one for each figure of a page: names inside of it are made from it.
    """
    buffer = io.StringIO()
    with _style(**{"svg.hashsalt": salt, "savefig.facecolor": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return _COLOR.sub(lambda color: f"var({PAGE_COLORS[color[0]]}, {color[0]})", text)


# As matplotlib writes them into `style` attributes.
_COLOR: Final = re.compile(r"(?<=(?:fill|roke): )(?:" + "|".join(PAGE_COLORS) + r")\b")
