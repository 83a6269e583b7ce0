"""A run as one HTML page that needs nothing else: no server, no script, no file beside it.

What models wrote stands in it. Every text is escaped, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from pbrl_lightning.curves import Curve
from pbrl_lightning.figures import curve_figure, reward_figure, svg
from pbrl_lightning.samples import JointSample

LONGEST_TEXT: Final = 6000
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn together.

    Attributes:
        title: Above them.
        names: What is logged, and what the legend calls it.
        unit: Of the values.
        learning: False if it says how the run went, and nothing of what was learned.
    """

    title: str
    names: dict[str, str]
    unit: str = ""
    learning: bool = True


_SIDES: Final = {"collect/reward_mean": "current agents", "collect/comparator_reward_mean": "comparator"}
_FITTED: Final = ("training pairs", "held-out pairs")
_ACTIVITIES: Final = ("sampling", "scoring", "tokenising", "training", "evaluating", "saving", "other")

PANELS: Final = (
    Panel("Evaluation: mean task reward", {"eval/turn_1/reward_mean": "evaluation items"}),
    Panel("Collection: mean score of a round", _SIDES),
    Panel("Reward of what is trained on", {"turn_1/reward_mean": "training"}),
    Panel("MADPO loss", {"train/loss": "loss"}, "nats"),
    Panel("Joint margin of the pairs", {"train/margin": "margin"}, "nats"),
    Panel("Pairs with a positive margin", {"train/preference_accuracy": "share"}, "share"),
    Panel("Reward model: loss", {"reward/loss": _FITTED[0], "reward/val_loss": _FITTED[1]}, "nats"),
    Panel("Reward model: accuracy", {"reward/accuracy": _FITTED[0], "reward/val_accuracy": _FITTED[1]}, "share"),
    Panel("Reward model: margin", {"reward/margin": _FITTED[0], "reward/val_margin": _FITTED[1]}),
    Panel("Reward model: calibration error", {"reward/val_calibration_error": _FITTED[1]}),
    Panel("Policy loss", {"policy/loss": "loss"}),
    Panel("Log-probability of a response", {"policy/logp": "mean"}, "nats"),
    Panel("KL against the reference", {"policy/kl": "mean of a response"}, "nats"),
    Panel("Critics' loss", {"value/loss": "loss"}),
    Panel(
        "Pairs of a round",
        {"iter/current_preference_pairs": "collected", "iter/train_preference_pairs": "trained on"},
        learning=False,
    ),
    Panel(
        "Tokens per second",
        {
            "collect/tokens_per_second": "collection",
            "rollout/tokens_per_second": "rollouts",
            "train/tokens_per_second": "training",
        },
        learning=False,
    ),
    Panel("Time of a round", {f"time/{name}": name for name in _ACTIVITIES}, "seconds", learning=False),
)
_NOT_DRAWN: Final = {
    "epoch",
    "env_step",
    "eval/turn_1/expected_return",
    "turn_1/expected_return",
    "iter/current_iteration",
    "iter/total_preference_pairs",
    "collect/seconds",
    "time/round",
    "rollout/scored_responses",
}


@dataclass
class RunSummary:
    """What a report is made from; of bounded size, whatever the length of the run, but for the table of rounds.

    Attributes:
        title: The module's name.
        facts: One line each below the title.
        curves: By what is logged.
        rounds: Rows of the table of rounds, its head first; empty without rounds.
        distributions: Rewards of the first and the last round.
        before: Joint responses to evaluation items before the first update.
        after: Those of the last evaluation.
        pairs: Winners and losers by round.
    """

    title: str
    facts: list[str]
    curves: Mapping[str, Curve]
    rounds: Sequence[Sequence[str]] = ()
    distributions: Sequence[Mapping[str, Any]] = ()
    before: Sequence[JointSample] = ()
    after: Sequence[JointSample] = ()
    pairs: Mapping[int, Sequence[JointSample]] = field(default_factory=dict)


def render(run: RunSummary) -> str:
    """The page."""
    sections = [
        ("Curves", _curves(run.curves)),
        ("Rounds", _table(run.rounds) if len(run.rounds) > 1 else ""),
        ("Rewards of all candidates and of selected pairs", _distributions(run.distributions)),
        ("Joint responses to evaluation items, before and after", _before_and_after(run.before, run.after)),
        ("Preference pairs", "".join(_pairs(number, samples) for number, samples in run.pairs.items())),
        ("What was cut or dropped", _counts(run.curves)),
    ]
    body = "\n".join(f"<section><h2>{escape(title)}</h2>\n{text}</section>" for title, text in sections if text)
    facts = "".join(f"<li>{_text(fact)}</li>" for fact in run.facts)
    return _PAGE.format(title=_text(run.title), style=_CSS, facts=facts, body=body)


def _text(value: str) -> str:
    """Any text, safe to stand in the page."""
    hidden = len(value) - LONGEST_TEXT
    if hidden > 0:
        value = value[:LONGEST_TEXT] + f" … ({hidden} more characters)"
    return escape(_clean(value))


def _clean(value: str) -> str:
    """Characters that no page and no figure may hold are replaced."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:.3f}"


def learning_panels(curves: Mapping[str, Curve]) -> list[tuple[Panel, dict[str, Curve]]]:
    """What shows how well was learned, and its curves by what the legend calls them."""
    return [(panel, found) for panel, found in _filled(curves) if panel.learning]


def _filled(curves: Mapping[str, Curve]) -> list[tuple[Panel, dict[str, Curve]]]:
    """The panels that have something to draw."""
    known = {name for panel in PANELS for name in panel.names} | _NOT_DRAWN
    own = sorted(name for name in curves if name.startswith("eval/") and name not in known)
    filled = []
    for panel in [*PANELS, *(Panel(_clean(name), {name: _clean(name)}) for name in own)]:
        found = {label: curves[name] for name, label in panel.names.items() if name in curves and len(curves[name])}
        if found:
            filled.append((panel, found))
    return filled


def _curves(curves: Mapping[str, Curve]) -> str:
    drawn = [
        _figure(svg(curve_figure(panel.title, found, panel.unit), panel.title), panel.title)
        for panel, found in _filled(curves)
    ]
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _figure(image: str, name: str) -> str:
    return f'<figure role="img" aria-label="{escape(name)}">{image}</figure>\n'


def _distributions(distributions: Sequence[Mapping[str, Any]]) -> str:
    drawn = [
        _figure(svg(reward_figure(found), f"rewards {place}"), f"rewards of round {found['iteration']}")
        for place, found in enumerate(distributions)
    ]
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0])
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]]
    return f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _joint(sample: JointSample, title: str) -> str:
    """One joint response: a line of title and score, then what each agent said."""
    said = [
        f'<div class="agent"><span>agent {agent}</span><pre>{_text(text)}</pre></div>'
        for agent, text in enumerate(sample.completions)
    ]
    return f'<div class="joint"><h4>{_text(title)} · {_number(sample.reward)}</h4>{"".join(said)}</div>'


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
    known = {name for panel in PANELS for name in panel.names} | _NOT_DRAWN
    counted = {
        name.removeprefix("collect/").replace("_", " "): curve.last
        for name, curve in curves.items()
        if name.startswith("collect/") and name not in known
    }
    rows = [(name, f"{count:g}") for name, count in counted.items() if count]
    return _table([("what", "so far"), *rows]) if rows else ""


_CSS: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto; max-width: 1180px;
  padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { border-bottom: 1px solid #ddd; margin-top: 2em; } h3 { margin: 1.2em 0 .3em; }
h4 { margin: 0 0 .4em; font-size: 1em; }
ul.facts { list-style: none; padding: 0; color: #555; margin-top: .3em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1em; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .25em .8em; border-bottom: 1px solid #e4e4e4; text-align: right; }
th:first-child, td:first-child { text-align: left; }
article { border: 1px solid #e4e4e4; border-radius: 6px; padding: .6em .9em; margin: .8em 0; }
article h3 { margin-top: 0; } details { margin-bottom: .6em; color: #555; }
.both { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1.2em; }
.agent span { font-size: .85em; color: #777; }
pre { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  background: #f6f7f9; border-radius: 4px; padding: .5em .6em; margin: .1em 0 .6em; max-height: 22em;
  overflow-y: auto; }
"""

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<ul class="facts">{facts}</ul>
{body}
</body>
</html>
"""
