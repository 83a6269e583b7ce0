"""Which curves of a run are drawn together, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pbrl_lightning.curves import Curve, agent_names, error_name


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn together.

    Attributes:
        title: Above them.
        names: What is logged, and what the legend calls it.
        unit: Of the values.
        learning: False if it says how the run went, and nothing of what was learned.
        with_agents: True if lines per agent are drawn beside the others, False if they get a figure of their own.
    """

    title: str
    names: dict[str, str]
    unit: str = ""
    learning: bool = True
    with_agents: bool = False


Panels = list[tuple[Panel, dict[str, Curve]]]
"""Panels with their curves by what the legend calls them."""

_TEAMS: Final = {"collect/reward_mean": "current agents", "collect/comparator_reward_mean": "comparator"}
_FITTED: Final = ("training pairs", "held-out pairs")
_ACTIVITIES: Final = ("sampling", "scoring", "tokenising", "training", "evaluating", "saving", "other")


def _sides(quantity: str) -> dict[str, str]:
    return {f"{quantity}/{side}": side for side in ("chosen", "rejected")}


PANELS: Final = (
    Panel("Evaluation: mean task reward", {"eval/turn_1/reward_mean": "evaluation items"}),
    Panel("Collection: mean score of a round", _TEAMS),
    Panel(
        "Win rate against the comparator",
        {"collect/win_rate": "wins + ties / 2", "collect/tie_rate": "ties"},
        "share of comparisons",
    ),
    Panel("Response length in evaluation", {"eval/response_length": "mean"}, "tokens", with_agents=True),
    Panel("Response length in collection", {"collect/response_length": "mean"}, "tokens", with_agents=True),
    Panel("Response length in rollouts", {"policy/response_length": "mean"}, "tokens", with_agents=True),
    Panel("Response length of pairs", _sides("train/response_length"), "tokens"),
    Panel("Reward of what is trained on", {"turn_1/reward_mean": "training"}),
    Panel("MADPO loss", {"train/loss": _FITTED[0], "val/loss": _FITTED[1]}, "nats"),
    Panel("Joint margin of the pairs", {"train/margin": _FITTED[0], "val/margin": _FITTED[1]}, "nats"),
    Panel(
        "Pairs with a positive margin",
        {"train/preference_accuracy": _FITTED[0], "val/preference_accuracy": _FITTED[1]},
        "share",
    ),
    Panel("Log-probability of pairs", _sides("train/logps"), "nats"),
    Panel("Reward model: loss", {"reward/loss": _FITTED[0], "reward/val_loss": _FITTED[1]}, "nats"),
    Panel("Reward model: accuracy", {"reward/accuracy": _FITTED[0], "reward/val_accuracy": _FITTED[1]}, "share"),
    Panel("Reward model: margin", {"reward/margin": _FITTED[0], "reward/val_margin": _FITTED[1]}),
    Panel("Reward model: calibration error", {"reward/val_calibration_error": _FITTED[1]}),
    Panel("Policy loss", {"policy/loss": "loss"}),
    Panel("Log-probability of a response", {"policy/logp": "mean"}, "nats", with_agents=True),
    Panel("KL against the reference", {"policy/kl": "mean of a response"}, "nats", with_agents=True),
    Panel("Critics' loss", {"value/loss": "loss"}),
    Panel(
        "Gradient norm before clipping",
        {
            "train/grad_norm": "all",
            "train/grad_norm/reward": "reward model",
            "train/grad_norm/critic": "critic",
        },
        with_agents=True,
    ),
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
    "eval/n",
    "eval/turn_1/expected_return",
    "turn_1/expected_return",
    "iter/current_iteration",
    "iter/total_preference_pairs",
    "collect/seconds",
    "time/round",
    "rollout/scored_responses",
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Replaces characters that no page and no figure may hold."""
    return _CONTROL.sub("\ufffd", text)


def filled_panels(curves: Mapping[str, Curve]) -> Panels:
    """The panels that have something to draw, in order; a mean has its standard error with it."""
    return [(panel, lines) for panel in _all_panels(curves) if (lines := _lines(panel, curves))]


def learning_panels(curves: Mapping[str, Curve]) -> Panels:
    """Panels that show how well was learned, by more than one point."""
    return [(panel, lines) for panel, lines in filled_panels(curves) if panel.learning and not single(lines)]


def single(lines: Mapping[str, Curve]) -> bool:
    """True if there is one point of each, which is a number and no curve."""
    return all(len(curve) == 1 for curve in lines.values())


def is_drawn(name: str) -> bool:
    """True if a panel shows what is logged under a name, or it is left out on purpose."""
    drawn = {name for panel in PANELS for name in panel.names} | _NOT_DRAWN
    return name in drawn or name.endswith("_standard_error") or bool(agent_names([name]))


def _all_panels(curves: Mapping[str, Curve]) -> Iterator[Panel]:
    """The fixed panels with the lines of their agents; then agents of other quantities, then the user's own metrics."""
    agents = agent_names(curves)
    for panel in PANELS:
        own = {name: agents.pop(name) for name in panel.names if name in agents}
        if panel.with_agents:
            lines = {name: label for names in own.values() for name, label in _agent_lines(names).items()}
            yield replace(panel, names=panel.names | lines)
            continue
        yield panel
        for quantity, names in own.items():
            which = f": {panel.names[quantity]}" if len(own) > 1 else ""
            yield replace(panel, title=f"{panel.title}{which}, by agent", names=_agent_lines(names))
    for quantity, names in agents.items():
        yield Panel(f"{clean(quantity)}, by agent", _agent_lines(names))
    for name in sorted(curves):
        if name.startswith("eval/") and not is_drawn(name):
            yield Panel(clean(name), {name: clean(name)})


def _agent_lines(names: Mapping[int, str]) -> dict[str, str]:
    return {name: f"agent {agent}" for agent, name in names.items()}


def _lines(panel: Panel, curves: Mapping[str, Curve]) -> dict[str, Curve]:
    return {
        label: replace(curves[name], error=curves.get(error_name(name)))
        for name, label in panel.names.items()
        if name in curves and len(curves[name])
    }
