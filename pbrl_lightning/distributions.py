"""How rewards and margins are distributed: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pbrl_lightning.preferences.collector import RawRewards

NUM_BINS: Final = 16


def bin_edges(values: Sequence[float], reward_range: tuple[float, float] | None) -> list[float]:
    """The 17 edges of 16 bins of equal width.

    Args:
        values: All scores; they span the bins where there is no range.
        reward_range: Lowest and highest score, if the reward says it.

    Example:
        >>> bin_edges([], (0.0, 8.0))[:3]
        [0.0, 0.5, 1.0]
    """
    low, high = reward_range or (min(values, default=0.0), max(values, default=1.0))
    if low == high:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, NUM_BINS + 1).tolist()


def binned(values: Sequence[float], edges: Sequence[float]) -> dict[str, Any]:
    """Counts, mean and the values themselves; a value on an edge belongs to the bin above, on the last to the last bin.

    Args:
        values: Scores.
        edges: Ascending.

    Returns:
        ``count`` of all values, ``mean`` (None without any), ``counts`` per bin, how many lie ``below`` and ``above``
        all bins, and ``values``.

    Example:
        >>> binned([0.0, 1.0, 2.0, 9.0], [0.0, 1.0, 2.0])["counts"]
        [1, 2]
    """
    array = np.asarray(values, dtype=np.float64)
    return {
        "count": len(array),
        "mean": float(array.mean()) if len(array) else None,
        "counts": np.histogram(array, bins=np.asarray(edges))[0].tolist(),
        "below": int((array < edges[0]).sum()),
        "above": int((array > edges[-1]).sum()),
        "values": array.tolist(),
    }


def reward_distribution(
    round_number: int, rewards: RawRewards, reward_range: tuple[float, float] | None
) -> dict[str, Any]:
    """What ``reward_distributions/iteration_0001.json`` holds of a round.

    Args:
        round_number: 1-based.
        rewards: Scores before ``reward_processor``.
        reward_range: Lowest and highest one, if the reward says it; else the bins span the scores.

    Returns:
        ``iteration``, ``reward_range`` (None if not known), ``bin_edges``, and for ``candidates`` and
        ``selected_pairs`` what :func:`binned` gives of the ``current`` and of the ``comparator`` side.
    """
    sides = {
        "candidates": {"current": rewards.actors, "comparator": rewards.comparator},
        "selected_pairs": {"current": rewards.selected_actors, "comparator": rewards.selected_comparator},
    }
    edges = bin_edges([*rewards.actors, *rewards.comparator], reward_range)
    return {
        "iteration": round_number,
        "reward_range": None if reward_range is None else list(reward_range),
        "bin_edges": edges,
        **{group: {side: binned(values, edges) for side, values in both.items()} for group, both in sides.items()},
    }


def without_values(distribution: dict[str, Any]) -> dict[str, Any]:
    """A distribution of :func:`reward_distribution` whose size does not depend on how much was scored."""
    groups = ("candidates", "selected_pairs")
    return distribution | {
        group: {side: part | {"values": []} for side, part in distribution[group].items()} for group in groups
    }


@dataclass(frozen=True)
class Reliability:
    """How often a Bradley-Terry model is right, by how sure it is.

    The model's confidence in a pair is ``sigmoid(|margin|)``, from 0.5; it is right where the margin is positive.

    Attributes:
        edges: ``num_bins + 1`` confidences.
        counts: Pairs per bin.
        confidence: Mean confidence per bin; NaN in an empty one.
        accuracy: Share of right answers per bin; NaN in an empty one.
    """

    edges: list[float]
    counts: list[int]
    confidence: list[float]
    accuracy: list[float]

    @property
    def error(self) -> float:
        """Expected calibration error: mean of ``|accuracy - confidence|`` over pairs; NaN without pairs."""
        kept = [
            (count, abs(right - sure))
            for count, right, sure in zip(self.counts, self.accuracy, self.confidence, strict=True)
            if count
        ]
        return sum(count * gap for count, gap in kept) / sum(self.counts) if kept else float("nan")


def reliability(margins: Sequence[float], num_bins: int = 10) -> Reliability:
    """Accuracy by confidence of scores ``R(winner) - R(loser)``.

    Args:
        margins: One per pair.
        num_bins: Bins of equal width from 0.5 to 1.

    Example:
        >>> found = reliability([0.1, 0.1, -0.1, 9.0], num_bins=2)
        >>> found.counts, [round(share, 3) for share in found.accuracy]
        ([3, 1], [0.667, 1.0])
    """
    array = np.asarray(margins, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(array)))
    places = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    counts = np.bincount(places, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        sure = np.bincount(places, confidence, num_bins) / counts
        right = np.bincount(places, (array > 0).astype(np.float64), num_bins) / counts
    return Reliability(np.linspace(0.5, 1, num_bins + 1).tolist(), counts.tolist(), sure.tolist(), right.tolist())
