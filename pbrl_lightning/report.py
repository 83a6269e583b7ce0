"""A run as one HTML page that needs nothing else: no server, no script, no file beside it.

What models wrote stands in it. Every text is escaped, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from pbrl_lightning.curves import CAPACITY, SMOOTHED_FROM, SMOOTHING, Curve
from pbrl_lightning.figures import LINES, curve_figure, reward_figure, svg
from pbrl_lightning.panels import PANELS, Panel, Panels, clean, filled_panels, is_drawn, learning_panels, single
from pbrl_lightning.report_style import PAGE, STYLE
from pbrl_lightning.samples import JointSample
from pbrl_lightning.timing import duration

__all__ = ["LONGEST_TEXT", "PANELS", "Panel", "RunSummary", "learning_panels", "render", "render_page"]

LONGEST_TEXT: Final = 6000
"""Characters of a text that are shown."""


@dataclass
class RunSummary:
    """What a report is made from; of bounded size, whatever the length of the run, but for the table of rounds.

    Attributes:
        title: The run's name.
        facts: One line each below the title.
        curves: By what is logged.
        rounds: Rows of the table of rounds, its head first; empty without rounds.
        distributions: Rewards of the first and the last round.
        before: Joint responses to evaluation items before the first update.
        after: Those of the last evaluation.
        pairs: Winners and losers by round.
        module: The module's name.
        models: The models, a line each, in Markdown.
        tiles: Labels and values that are shown large: when the run was started, how long it took ….
        phases: Seconds by activity.
        options: Headings, each with names and values in Markdown of the options that matter.
        changed: What the user set, as YAML; empty where it is not known.
        configuration: All options, as YAML; empty where they are not known.
    """

    title: str
    facts: list[str]
    curves: Mapping[str, Curve]
    rounds: Sequence[Sequence[str]] = ()
    distributions: Sequence[Mapping[str, Any]] = ()
    before: Sequence[JointSample] = ()
    after: Sequence[JointSample] = ()
    pairs: Mapping[int, Sequence[JointSample]] = field(default_factory=dict)
    module: str = ""
    models: Sequence[str] = ()
    tiles: Sequence[tuple[str, str]] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    options: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    changed: str = ""
    configuration: str = ""


def render(run: RunSummary) -> str:
    """The page."""
    header = _kind(run) + _tiles(run.tiles)
    if run.facts:
        header += f'<ul class="facts">{"".join(f"<li>{_text(fact)}</li>" for fact in run.facts)}</ul>'
    sections = [
        ("Time", _phases(run.phases)),
        ("Options", _options(run)),
        ("Curves", _curves(run.curves)),
        ("Rounds", _table(run.rounds) if len(run.rounds) > 1 else ""),
        ("Rewards of all candidates and of selected pairs", _distributions(run.distributions)),
        ("Joint responses to evaluation items, before and after", _before_and_after(run.before, run.after)),
        ("Preference pairs", "".join(_pairs(number, samples) for number, samples in run.pairs.items())),
        ("What was cut or dropped", _counts(run.curves)),
    ]
    return render_page(run.title, header, sections)


def render_page(title: str, header: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page in the style of a report.

    Args:
        title: Any text.
        header: HTML below it.
        sections: Headings (any text) and HTML; those without HTML are left out.
    """
    body = "\n".join(f"<section><h2>{escape(heading)}</h2>\n{html}</section>" for heading, html in sections if html)
    return PAGE.format(title=_text(title), style=STYLE, header=header, body=body)


def _text(value: str) -> str:
    """Any text, safe to stand in the page."""
    hidden = len(value) - LONGEST_TEXT
    if hidden > 0:
        value = value[:LONGEST_TEXT] + f" … ({hidden} more characters)"
    return escape(clean(value))


def _markdown(value: str) -> str:
    """A line of Markdown whose only markup is code, as HTML."""
    parts = re.split(r"(`+)(.*?)\1", value)  # a text, then fence, code and text again and again
    html = [_text(parts[0])]
    for code, text in zip(parts[2::3], parts[3::3], strict=True):
        html.append(f"<code>{_text(code.strip())}</code>{_text(text)}")
    return "".join(html)


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:.3f}"


def _kind(run: RunSummary) -> str:
    """Module and models."""
    module = [f"<code>{_text(run.module)}</code>"] if run.module else []
    parts = [*module, *map(_markdown, run.models)]
    return f'<p class="kind">{" · ".join(parts)}</p>' if parts else ""


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Labels and values, large."""
    cells = [f'<div class="tile"><span>{_text(label)}</span><b>{_text(value)}</b></div>' for label, value in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _phases(phases: Mapping[str, float]) -> str:
    """A bar of what the time was spent on, and the seconds and shares behind it."""
    total = sum(phases.values())
    if not total:
        return ""
    bar, rows = [], []
    for place, (name, seconds) in enumerate(phases.items()):
        color = f"background: var(--line-{place % len(LINES)})"
        share = 100 * seconds / total
        bar.append(f'<span style="width: {share:.2f}%; {color}" title="{_text(name)}"></span>')
        mark = f'<i style="{color}"></i>{_text(name)}'
        rows.append(f"<tr><td>{mark}</td><td>{_text(duration(seconds))}</td><td>{share:.0f} %</td></tr>")
    head = "<tr><th>spent on</th><th>time</th><th>share</th></tr>"
    return f'<div class="bar">{"".join(bar)}</div><table class="phases">{head}{"".join(rows)}</table>'


def _options(run: RunSummary) -> str:
    """The options that matter, then all of them folded."""
    groups = []
    for heading, options in run.options:
        rows = "".join(f"<dt>{_markdown(name)}</dt><dd>{_markdown(value)}</dd>" for name, value in options)
        groups.append(f"<div><h3>{_text(heading)}</h3><dl>{rows}</dl></div>" if rows else "")
    folded = _folded("what was set, as a configuration", run.changed) + _folded("all options", run.configuration)
    return (f'<div class="options">{"".join(groups)}</div>' if any(groups) else "") + folded


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(clean(text))}</pre></details>" if text else ""


def _curves(curves: Mapping[str, Curve]) -> str:
    """Single numbers as tiles, the rest as figures, and how to read them."""
    panels = filled_panels(curves)
    numbers = [
        tile
        for panel, lines in panels
        # The seconds of a single round are those of the run, which stand further up.
        if single(lines) and not all(name.startswith("time/") for name in panel.names)
        for tile in _number_tiles(panel, lines)
    ]
    drawn = [(panel, lines) for panel, lines in panels if not single(lines)]
    return _tiles(numbers) + _caption(drawn) + draw_panels(drawn)


def _number_tiles(panel: Panel, lines: Mapping[str, Curve]) -> list[tuple[str, str]]:
    """What a panel of one point each says."""
    tiles = []
    for label, curve in lines.items():
        low, high = curve.band()
        error = "" if high[0] != high[0] else f" ± {(high[0] - low[0]) / 2:.2g}"
        name = panel.title if len(panel.names) == 1 else f"{panel.title}: {label}"
        tiles.append((name + (f" ({panel.unit})" if panel.unit else ""), f"{curve.values[0]:.4g}{error}"))
    return tiles


def _caption(panels: Panels) -> str:
    """How to read the curves, as far as there is such a one."""
    curves = [curve for _, lines in panels for curve in lines.values()]
    parts = []
    if any(len(curve) >= SMOOTHED_FROM for curve in curves):
        parts.append(
            f"Curves of {SMOOTHED_FROM} points or more are smoothed: the faint line is what was logged, the other one "
            f"its exponential moving average with weight {SMOOTHING:g} of the past."
        )
    if any(curve.stride > 1 for curve in curves):
        parts.append(f"Curves of more than {CAPACITY} values show means of neighboring values.")
    if any(curve.error is not None for curve in curves):
        parts.append("Bands are one standard error of the mean to each side.")
    return f'<p class="caption">{escape(" ".join(parts))}</p>' if parts else ""


def draw_panels(panels: Panels) -> str:
    """Panels as figures in a grid."""
    figures = [
        _figure(svg(curve_figure(panel.title, lines, panel.unit), panel.title), panel.title) for panel, lines in panels
    ]
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _figure(image: str, name: str) -> str:
    return f'<figure role="img" aria-label="{escape(name)}">{image}</figure>\n'


def _distributions(distributions: Sequence[Mapping[str, Any]]) -> str:
    figures = [
        _figure(svg(reward_figure(rewards), f"rewards {place}"), f"rewards of round {rewards['iteration']}")
        for place, rewards in enumerate(distributions)
    ]
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0])
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]]
    return f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _joint(sample: JointSample, title: str) -> str:
    """One joint response: a line of title and score, then each agent's text."""
    texts = [
        f'<div class="agent"><span>agent {agent}</span><pre>{_text(text)}</pre></div>'
        for agent, text in enumerate(sample.completions)
    ]
    return f'<div class="joint"><h4>{_text(title)} · {_number(sample.reward)}</h4>{"".join(texts)}</div>'


def _prompts(prompts: Sequence[str]) -> str:
    said = [
        f'<div class="agent"><span>prompt of agent {agent}</span><pre>{_text(prompt)}</pre></div>'
        for agent, prompt in enumerate(prompts)
    ]
    return f"<details><summary>prompts</summary>{''.join(said)}</details>"


def _before_and_after(before: Sequence[JointSample], after: Sequence[JointSample]) -> str:
    last = {sample.item: sample for sample in after}
    parts = []
    for sample in before:
        now = last.get(sample.item)
        both = _joint(sample, "before") + (_joint(now, "after") if now is not None else "")
        parts.append(
            f'<article><h3>item {sample.item}</h3>{_prompts(sample.prompts)}<div class="both">{both}</div></article>'
        )
    return "\n".join(parts)


def _pairs(round_number: int, samples: Sequence[JointSample]) -> str:
    parts = []
    for winner, loser in zip(samples[::2], samples[1::2], strict=True):
        both = _joint(winner, winner.side) + _joint(loser, loser.side)
        parts.append(f'<article>{_prompts(winner.prompts)}<div class="both">{both}</div></article>')
    return f"<h3>Round {round_number}</h3>" + "\n".join(parts) if parts else ""


def _counts(curves: Mapping[str, Curve]) -> str:
    """What was counted at least once."""
    counts = {
        name.removeprefix("collect/").replace("_", " "): curve.last
        for name, curve in curves.items()
        if name.startswith("collect/") and not is_drawn(name)
    }
    rows = [(name, f"{count:g}") for name, count in counts.items() if count]
    return _table([("what", "so far"), *rows]) if rows else ""
