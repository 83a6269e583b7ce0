"""What is drawn of a run. Figures are made without pyplot: no window, no global state, nothing kept."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import numpy as np

from pbrl_lightning.curves import Curve
from pbrl_lightning.distributions import reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pbrl_lightning.report import Panel

P = ParamSpec("P")

CURRENT: Final = "#1f6fb4"
COMPARATOR: Final = "#d9822b"
_COLOURS: Final = (CURRENT, COMPARATOR, "#3a8f5c", "#a0468c", "#6b6b6b", "#b03a3a", "#5a54b8", "#8a6d1f")
_STYLE: Final[dict[str, Any]] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
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
    figure = _figure(6.6, 4.6, 0.1, 0.1, 0.98, 0.88)
    figure.subplots_adjust(hspace=0.42)
    edges = np.asarray(distribution["bin_edges"])
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (group, name) in zip(
        panels, (("candidates", "all candidates"), ("selected_pairs", "in selected pairs")), strict=True
    ):
        sides = {side: part for side, part in distribution[group].items() if part["count"]}
        for place, (side, part) in enumerate(sides.items()):
            width = np.diff(edges) * 0.9 / len(sides)
            left = edges[:-1] + np.diff(edges) * 0.05 + place * width
            colour = CURRENT if side == "current" else COMPARATOR
            outside = part["below"] + part["above"]
            label = f"{'current agents' if side == 'current' else side}: mean {part['mean']:.3g}, n = {part['count']}"
            label += f" ({outside} outside)" if outside else ""
            share = np.asarray(part["counts"]) / part["count"]
            axes.bar(left, share, width, align="edge", color=colour, alpha=0.85, label=label)
            axes.axvline(part["mean"], color=colour, linestyle="--", linewidth=1.2)
        axes.set_ylabel("share")
        axes.grid(visible=False, axis="x")
        _head(axes, f"round {distribution['iteration']}: {name}")
        if not sides:
            axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color="#777777")
    panels[1].set_xlabel("reward")
    return figure


def _head(axes: Axes, title: str) -> None:
    """A title, and below it a legend that covers nothing."""
    named = bool(axes.get_legend_handles_labels()[0])
    axes.set_title(title, pad=20 if named else 6)
    if named:
        narrow = {"ncols": 2, "handlelength": 1.2, "columnspacing": 1.2, "borderaxespad": 0.1}
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
    figure = _figure(5.0, 3.0, 0.12, 0.16, 0.97, 0.83)
    axes = figure.subplots()
    array = np.asarray(values, dtype=np.float64)
    axes.hist(array, bins=min(40, max(8, len(array) // 8)), color=CURRENT, alpha=0.85)
    axes.axvline(array.mean(), color="#222222", linestyle="--", linewidth=1.2, label=f"mean {array.mean():.3g}")
    if marked is not None:
        axes.axvline(marked, color=COMPARATOR, linewidth=1.2, label=f"{marked:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("count")
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
    axes.bar(found.edges[:-1], share, width, align="edge", color="#d5dde6", label="share of the pairs")
    axes.plot([0.5, 1], [0.5, 1], color="#777777", linestyle="--", linewidth=1, label="calibrated")
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
    lines = -(-len(curves) // 4) if len(curves) > 1 else 0  # of the legend
    figure = _figure(4.4, 2.7, 0.18, 0.18 + 0.07 * lines, 0.97, 0.9)
    _draw_curves(figure.subplots(), title, curves, label)
    if lines:
        figure.legend(loc="lower center", ncols=min(4, len(curves)), borderaxespad=0.1)
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
        few = len(curve) <= 40
        colour = _COLOURS[place % len(_COLOURS)]
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if few else {}
        style["linestyle"] = "--" if len(curves) == 2 and place else "-"  # one that lies on the other is seen
        # A legend leaves out names that begin with an underscore.
        axes.plot(curve.steps, curve.values, color=colour, linewidth=1.3, label=name.lstrip("_"), **style)
    axes.set_title(title)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


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
    """A figure as an ``<svg>`` element to stand in a page.

    Args:
        figure: What to write.
        salt: Another one for each figure of a page: names inside of it are made from it.
    """
    buffer = io.StringIO()
    with _style(**{"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
