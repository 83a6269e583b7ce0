"""Which comparisons become preference pairs: pure functions of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch

from pbrl_lightning.randomness import counted_permutation
from pbrl_lightning.utils.errors import ConfigurationError, raise_together

PairSelection = Literal["reward_gap", "random", "all", "comparator_reward"]
Side = Literal["actor", "comparator"]


@dataclass(frozen=True)
class Comparison:
    """Two joint responses of the same agents with different scores.

    Attributes:
        winner: Candidate index of the higher score.
        loser: Candidate index of the lower score.
        gap: Winner's score minus loser's; positive.
    """

    winner: int
    loser: int
    gap: float


@dataclass(frozen=True)
class ComparatorComparison:
    """The current agents against the comparator at one candidate index, with different scores.

    Attributes:
        index: Candidate index on both sides.
        winner_side: Who has the higher score.
        gap: Winner's score minus loser's; positive.
        comparator_score: The comparator's score.
    """

    index: int
    winner_side: Side
    gap: float
    comparator_score: float


_C = TypeVar("_C", Comparison, ComparatorComparison)

_BASE_ORDERS: dict[str, Callable[[Comparison], Any]] = {
    "reward_gap": lambda c: (-c.gap, c.winner, c.loser),
    "all": lambda c: (c.winner, c.loser),
}
_COMPARATOR_ORDERS: dict[str, Callable[[ComparatorComparison], Any]] = {
    "reward_gap": lambda c: (-c.gap, c.index),
    "comparator_reward": lambda c: (-c.comparator_score, -c.gap, c.index),
    "all": lambda c: c.index,
}


def base_pairs(
    scores: dict[int, float],
    selection: PairSelection,
    pairs_per_sample: int | None,
    generator: torch.Generator | None = None,
) -> list[Comparison]:
    """Compare every two joint responses of one task item and keep the first ``pairs_per_sample``.

    ``reward_gap``: widest gap first, then (winner, loser) index. ``random``: shuffled. ``all``: every comparison,
    by (winner, loser) index. Ties are dropped.

    Args:
        scores: Candidate index to score; dropped candidates are absent.
        selection: The order of comparisons.
        pairs_per_sample: Most comparisons to keep; None for no limit.
        generator: Where ``random`` draws from; the others draw nothing.

    Returns:
        At most K(K-1)/2 comparisons.

    Raises:
        ConfigurationError: If an option does not fit a base run, a score is not finite, or ``random`` has no generator.

    Example:
        >>> base_pairs({0: 1.0, 1: 3.0, 2: 1.0}, "reward_gap", 1)
        [Comparison(winner=1, loser=0, gap=2.0)]
    """
    validate_selection(selection, pairs_per_sample, iterative=False)
    _require_finite("scores", scores)
    ranked = sorted(scores)
    comparisons = []
    for position, first in enumerate(ranked):
        for second in ranked[position + 1 :]:
            if scores[first] == scores[second]:
                continue
            winner, loser = (first, second) if scores[first] > scores[second] else (second, first)
            comparisons.append(Comparison(winner, loser, scores[winner] - scores[loser]))
    return _ordered(comparisons, _BASE_ORDERS.get(selection), generator)[:pairs_per_sample]


def comparator_pairs(
    actor_scores: dict[int, float],
    comparator_scores: dict[int, float],
    selection: PairSelection,
    pairs_per_sample: int | None,
    generator: torch.Generator | None = None,
) -> list[ComparatorComparison]:
    """Compare agents and comparator at every index both have and keep the first ``pairs_per_sample``.

    ``comparator_reward``: highest comparator score first, then widest gap, then index. ``reward_gap``: widest gap,
    then index. ``random``: shuffled. ``all``: every comparison, by index. Ties are dropped; either side can win.

    Args:
        actor_scores: The current agents' scores by candidate index; dropped candidates are absent.
        comparator_scores: The comparator's scores by candidate index.
        selection: The order of comparisons.
        pairs_per_sample: Most comparisons to keep; None for no limit.
        generator: Where ``random`` draws from; the others draw nothing.

    Returns:
        At most one comparison per shared index.

    Raises:
        ConfigurationError: If an option does not fit, a score is not finite, or ``random`` has no generator.
    """
    validate_selection(selection, pairs_per_sample, iterative=True)
    _require_finite("actor_scores", actor_scores)
    _require_finite("comparator_scores", comparator_scores)
    comparisons = []
    for index in sorted(actor_scores.keys() & comparator_scores.keys()):
        actor, comparator = actor_scores[index], comparator_scores[index]
        if actor != comparator:
            side: Side = "actor" if actor > comparator else "comparator"
            comparisons.append(ComparatorComparison(index, side, abs(actor - comparator), comparator))
    return _ordered(comparisons, _COMPARATOR_ORDERS.get(selection), generator)[:pairs_per_sample]


def validate_selection(selection: str, pairs_per_sample: int | None, iterative: bool) -> None:
    """Check the pair options of a run, all at once.

    Args:
        selection: The order of comparisons.
        pairs_per_sample: Most pairs per task item; None for no limit.
        iterative: Whether the run has a comparator.

    Raises:
        ConfigurationError: If ``selection`` is unknown or needs a comparator, or ``pairs_per_sample`` is below 1 or
            set with ``all``.
    """
    known = get_args(PairSelection) if iterative else _BASE_SELECTIONS
    problems = []
    if selection == "comparator_reward" and not iterative:
        problems.append(
            "`pair_selection` must be one of "
            f"{', '.join(known)} in a run without a comparator, got 'comparator_reward'; set `comparator` to use it"
        )
    elif selection not in known:
        problems.append(f"`pair_selection` must be one of {', '.join(known)}, got {selection!r}")
    if pairs_per_sample is not None:
        if isinstance(pairs_per_sample, bool) or not isinstance(pairs_per_sample, int) or pairs_per_sample < 1:
            problems.append(f"`pairs_per_sample` must be an integer >= 1 or null, got {pairs_per_sample!r}")
        elif selection == "all":
            problems.append(f"`pairs_per_sample` must be null with pair_selection 'all', got {pairs_per_sample}")
    raise_together(problems)


_BASE_SELECTIONS = tuple(name for name in get_args(PairSelection) if name != "comparator_reward")


def _require_finite(name: str, scores: dict[int, float]) -> None:
    for index, score in scores.items():
        if not math.isfinite(score):
            raise ConfigurationError(
                f"`{name}` must be finite, got {score} for candidate {index}; leave dropped ones out"
            )


def _ordered(
    comparisons: list[_C],
    key: Callable[[_C], Any] | None,
    generator: torch.Generator | None,
) -> list[_C]:
    """Sort by ``key``, or shuffle where there is none."""
    if key is not None:
        return sorted(comparisons, key=key)
    if generator is None:
        raise ConfigurationError("`generator` must be a torch.Generator with pair_selection 'random', got None")
    return [comparisons[position] for position in counted_permutation(len(comparisons), generator)]
