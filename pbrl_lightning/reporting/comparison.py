"""Runs beside each other: a table, the options that differ, and one page with their curves laid over each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from pbrl_lightning.curves import Curve
from pbrl_lightning.figures import svg
from pbrl_lightning.reporting.runs import ERROR, EVALUATION, RunRecord, Series
from pbrl_lightning.utils.options import differing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATOR: Final = "pbrl compare"
"""Stands in the head of a page, so that a later one may take its place."""

_COLORS: Final = ("#1f6fb4", "#d9822b", "#3a8f5c", "#a0468c", "#6b6b6b", "#b03a3a", "#5a54b8", "#8a6d1f")
_DASHES: Final = ("-", "--", ":", "-.")
_FIRST: Final = (
    EVALUATION,
    "eval/",
    "collect/reward_mean",
    "turn_1/reward_mean",
    "train/loss",
    "train/",
    "reward/",
    "policy/",
    "value/",
    "collect/",
    "iter/",
    "rollout/",
    "time/",
)
_NOT_DRAWN: Final = ("epoch", "env_step", "step", "hp_metric", "eval/turn_1/expected_return", "turn_1/expected_return")
_NOT_COMPARED: Final = ("data.replay_dir", "trainer.")
_AXES: Final = {
    "update": "optimizer steps",
    "responses": "joint responses sampled",
    "time": "minutes",
}


def table(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """A row per run, the head first; ``-`` stands for what a run does not have."""
    rows: list[tuple[str, ...]] = [
        (
            "run",
            "module",
            "rounds",
            "updates",
            "first evaluation",
            "last evaluation",
            "best evaluation",
            "last round's reward",
            "time",
        )
    ]
    for run in runs:
        evaluated = run.series.get(EVALUATION, Series())
        best = max(range(len(evaluated.values)), key=evaluated.values.__getitem__, default=None)
        rounds = run.last("iter/current_iteration")
        reward = run.last("collect/reward_mean")
        rows.append(
            (
                run.name,
                str(run.options.get("module.class", "-")),
                "-" if rounds is None else f"{rounds:.0f}",
                "-" if run.updates is None else str(run.updates),
                _evaluation(run, 0),
                _evaluation(run, -1),
                "-" if best is None else f"{_evaluation(run, best)} at {evaluated.steps[best]}",
                _number(run.last("turn_1/reward_mean") if reward is None else reward),
                _time(run.seconds),
            )
        )
    return rows


def option_rows(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """The options that are not the same in all runs, the head first; empty if all are, or fewer than two are known."""
    known = [run for run in runs if run.options]
    names = [
        name
        for name in differing(run.options for run in known)
        if not name.startswith(_NOT_COMPARED) and any(run.options.get(name) not in (None, {}) for run in known)
    ]
    if len(known) < 2 or not names:
        return []
    return [("option", *(run.name for run in known))] + [
        (name, *(_short(run.options.get(name)) for run in known)) for name in names
    ]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def missing_lines(runs: Sequence[RunRecord]) -> list[str]:
    """What the runs do not hold, a line each."""
    return [f"{run.name}: {what}" for run in runs for what in run.missing]


def page(runs: Sequence[RunRecord]) -> str:
    """The comparison as one HTML page that needs nothing else."""
    parts = [f"<h2>Results</h2>{_html(table(runs))}"]
    options = option_rows(runs)
    parts.append(f"<h2>Options that differ</h2>{_html(options)}" if options else "<p>No option is known to differ.</p>")
    parts += [f"<p>{_text(line)}</p>" for line in missing_lines(runs)]
    axes = [axis for axis in _AXES if axis == "update" or any(_along(run, axis) for run in runs)]
    inputs = "".join(
        f'<input type="radio" name="axis" id="{axis}"{" checked" if axis == "update" else ""}>'
        f'<label for="{axis}">by {_AXES[axis]}</label>'
        for axis in axes
    )
    legend = "".join(
        f'<span><i style="border-color:{_color(place)};border-style:{"solid" if place < 8 else "dashed"}"></i>'
        f"{_text(run.name)}</span>"
        for place, run in enumerate(runs)
    )
    figures = "".join(_figures(runs, name, axes) for name in _names(runs))
    curves = f'<h2>Curves</h2>{inputs}<p class="legend">{legend}</p><div class="figures">{figures}</div>'
    title = " · ".join(run.name for run in runs)
    body = "\n".join([*parts, curves if figures else ""])
    return _PAGE.format(title=_text(title), generator=GENERATOR, style=_CSS, body=body)


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """What is drawn, the most telling first: of more than one point in at least one run."""
    several = {name for run in runs for name, series in run.series.items() if len(series.steps) > 1}

    def rank(name: str) -> tuple[int, str]:
        return next((place for place, first in enumerate(_FIRST) if name.startswith(first)), len(_FIRST)), name

    return sorted(several - set(_NOT_DRAWN), key=rank)


def _figures(runs: Sequence[RunRecord], name: str, axes: Sequence[str]) -> str:
    drawn = [(axis, _draw(runs, name, axis)) for axis in axes]
    images = "".join(
        f'<figure role="img" class="by-{axis}" aria-label="{_text(name)} by {_AXES[axis]}">'
        f"{svg(figure, name + axis)}</figure>"
        for axis, figure in drawn
        if figure is not None
    )
    return f"<div>{images}</div>\n"


def _draw(runs: Sequence[RunRecord], name: str, axis: str) -> Figure | None:
    """One name's curves of all runs; None if no run has it along this axis."""
    from matplotlib.figure import Figure

    lines = [(place, curve) for place, run in enumerate(runs) if (curve := _curve(run, name, axis)) is not None]
    if not lines:
        return None
    figure = Figure(figsize=(4.6, 2.8), dpi=110)
    figure.subplots_adjust(0.17, 0.18, 0.97, 0.89)
    axes = figure.subplots()
    for place, curve in lines:
        dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve) <= 40 else {}
        dash = _DASHES[place // len(_COLORS) % len(_DASHES)]
        axes.plot(curve.steps, curve.values, color=_color(place), linestyle=dash, linewidth=1.3, **dots)
    axes.set_title(_clean(name), loc="left", fontsize=10, parse_math=False)
    axes.set_xlabel(_AXES[axis])
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(run: RunRecord, name: str, axis: str) -> Curve | None:
    """A run's curve of a bounded number of points along an axis."""
    series, place = run.series.get(name), _along(run, axis)
    if series is None or place is None or (axis == "time" and not series.seconds):
        return None
    curve = Curve()
    for index, value in enumerate(series.values):
        curve.add(place(series, index), value)  # type: ignore[arg-type]  # steps are kept as floats
    return curve if len(curve) else None


def _along(run: RunRecord, axis: str) -> Callable[[Series, int], float] | None:
    """The place of a point on an axis; None if the run does not know it."""
    if axis == "update":
        return lambda series, index: series.steps[index]
    if axis == "responses":
        counted = "env_step" in run.series
        return (lambda series, index: run.responses_at(series.steps[index]) or 0.0) if counted else None
    timed = any(len(series.seconds) > 1 for series in run.series.values())
    return (lambda series, index: series.seconds[index] / 60) if timed else None


def _evaluation(run: RunRecord, place: int) -> str:
    series, errors = run.series.get(EVALUATION), run.series.get(ERROR)
    if series is None or not series.values:
        return "-"
    step = series.steps[place]
    error = dict(zip(errors.steps, errors.values, strict=True)).get(step) if errors is not None else None
    return _number(series.values[place]) + (f" ± {error:.3f}" if error is not None else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(value: Any) -> str:
    text = "-" if value is None else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:59] + "…"


def _color(place: int) -> str:
    return _COLORS[place % len(_COLORS)]


def _html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0])
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]]
    return f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _text(value: str) -> str:
    return escape(_clean(value))


def _clean(value: str) -> str:
    """Characters that no page and no figure may hold are replaced."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)


_CSS: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto; max-width: 1180px;
  padding: 0 1em; }
h2 { border-bottom: 1px solid #ddd; margin-top: 1.6em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .25em .8em; border-bottom: 1px solid #e4e4e4; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
label { margin: 0 1em 0 .2em; }
.legend span { margin-right: 1.4em; white-space: nowrap; }
.legend i { display: inline-block; width: 1.6em; border-top: 3px; vertical-align: middle; margin-right: .4em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1em; }
figure { margin: 0; display: none; } figure svg { width: 100%; height: auto; }
#update:checked ~ .figures .by-update, #responses:checked ~ .figures .by-responses,
#time:checked ~ .figures .by-time { display: block; }
"""

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{generator}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>Comparison of runs</h1>
{body}
</body>
</html>
"""
