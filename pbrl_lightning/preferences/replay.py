"""Which stored pairs a round trains on: a function of the rounds' sizes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from typing_extensions import override

from pbrl_lightning.randomness import counted_permutation
from pbrl_lightning.utils.errors import ConfigurationError


class ReplayBuffer(ABC):
    """Draws training pairs from the datasets of this and earlier rounds.

    A subclass says which datasets are eligible and how they are weighted; ``select`` draws. Nothing is stored or
    read here: a dataset is known by its iteration and its number of pairs.

    Args:
        sample_size: Pairs per round. None: the current round's number of pairs, or that of the latest non-empty
            dataset when the current round is empty.

    Raises:
        ConfigurationError: If ``sample_size`` is not a positive integer.
    """

    sample_size: int | None = None

    def __init__(self, sample_size: int | None = None) -> None:
        if sample_size is not None:
            _require_positive("sample_size", sample_size, "an integer >= 1 or null")
        self.sample_size = sample_size

    @abstractmethod
    def eligible(self, entries: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
        """The datasets that may be drawn from.

        Args:
            entries: ``(iteration, num_pairs)`` of every non-empty dataset so far, oldest first.
            current_round: The round that is about to train, 1-based.

        Returns:
            Some of ``entries``, oldest first.
        """

    @abstractmethod
    def weights(self, count: int) -> list[float]:
        """The chance of each eligible dataset per draw, **oldest first, the newest last**.

        Args:
            count: Number of eligible datasets.

        Returns:
            ``count`` non-negative numbers; they need not sum to 1.
        """

    def select(
        self, counts: list[tuple[int, int]], current_round: int, generator: torch.Generator
    ) -> list[tuple[int, int]]:
        """The pairs that this round trains on.

        A dataset is drawn ``sample_size`` times by weight; then that many of its pairs are taken: without repetition
        while there are enough, else whole shuffled copies and a remainder. The union is shuffled.

        Args:
            counts: ``(iteration, num_pairs)`` of every round so far, the current one included, in any order.
            current_round: The current round, 1-based. Later rounds are ignored.
            generator: Where all draws come from.

        Returns:
            ``(iteration, pair index)`` in training order; empty when no eligible dataset has a pair.

        Raises:
            ConfigurationError: If an iteration stands twice, or a subclass gives weights that cannot be drawn from.
        """
        entries = _non_empty(counts, current_round)
        datasets = self.eligible(entries, current_round)
        if not datasets:
            return []
        # The latest non-empty dataset is the current round's unless that one is empty.
        size = entries[-1][1] if self.sample_size is None else self.sample_size
        draws = _draw_datasets(self._checked_weights(len(datasets)), size, generator)
        chosen = [
            (iteration, index)
            for (iteration, num_pairs), times in zip(datasets, draws, strict=True)
            for index in _take(num_pairs, times, generator)
        ]
        return [chosen[position] for position in counted_permutation(len(chosen), generator)]

    def _checked_weights(self, count: int) -> list[float]:
        weights = self.weights(count)
        usable = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
        if len(weights) != count or not usable:
            expected = f"{count} finite numbers >= 0 with a positive sum"
            raise ConfigurationError(f"`{type(self).__name__}.weights` must return {expected}, got {weights}")
        return weights


class CurrentReplay(ReplayBuffer):
    """All pairs of the current round, in order; nothing is drawn. Empty when the round is."""

    def __init__(self) -> None:
        super().__init__()

    @override
    def eligible(self, entries: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
        return [entry for entry in entries if entry[0] == current_round]

    @override
    def weights(self, count: int) -> list[float]:
        return [1.0] * count

    @override
    def select(
        self, counts: list[tuple[int, int]], current_round: int, generator: torch.Generator
    ) -> list[tuple[int, int]]:
        del generator
        current = self.eligible(_non_empty(counts, current_round), current_round)
        return [(iteration, index) for iteration, num_pairs in current for index in range(num_pairs)]


class NearestKReplay(ReplayBuffer):
    """The latest ``k`` non-empty datasets with equal weight, whatever their size.

    Args:
        k: Number of datasets, the current one included.
        sample_size: See `ReplayBuffer`.

    Raises:
        ConfigurationError: If ``k`` or ``sample_size`` is not a positive integer.

    Example:
        >>> NearestKReplay(2).eligible([(1, 5), (2, 5), (4, 5)], current_round=4)
        [(2, 5), (4, 5)]
    """

    def __init__(self, k: int, sample_size: int | None = None) -> None:
        super().__init__(sample_size)
        _require_positive("k", k, "an integer >= 1")
        self.k = k

    @override
    def eligible(self, entries: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
        return entries[-self.k :]

    @override
    def weights(self, count: int) -> list[float]:
        return [1.0 / count] * count


class AllHistoryReplay(ReplayBuffer):
    """Every non-empty dataset of this run with equal weight, whatever its size.

    Args:
        sample_size: See `ReplayBuffer`.
    """

    @override
    def eligible(self, entries: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
        return entries

    @override
    def weights(self, count: int) -> list[float]:
        return [1.0 / count] * count


class LambdaDecayReplay(ReplayBuffer):
    """Every non-empty dataset of this run, weighted towards recent ones.

    The dataset of age ``a`` (0 is the newest of ``K``) has weight ``λ^a / Σ_{b<K} λ^b``: with λ = 0 only the newest
    is drawn, with λ = 1 all have equal weight. Age counts non-empty datasets, not rounds.

    Args:
        decay: λ.
        sample_size: See `ReplayBuffer`.

    Raises:
        ConfigurationError: If ``decay`` is not in [0, 1] or ``sample_size`` is not a positive integer.

    Example:
        >>> LambdaDecayReplay(0.5).weights(2)  # 0.5 / 1.5 and 1 / 1.5, the newest last
        [0.3333333333333333, 0.6666666666666666]
    """

    def __init__(self, decay: float, sample_size: int | None = None) -> None:
        super().__init__(sample_size)
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ConfigurationError(f"`decay` must be a number from 0 to 1, got {decay!r}")
        self.decay = float(decay)

    @override
    def eligible(self, entries: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
        return entries

    @override
    def weights(self, count: int) -> list[float]:
        powers = [self.decay**age for age in reversed(range(count))]  # 0.0**0 is 1.0
        total = sum(powers)
        return [power / total for power in powers]


def _require_positive(name: str, value: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"`{name}` must be {expected}, got {value!r}")


def _non_empty(counts: list[tuple[int, int]], current_round: int) -> list[tuple[int, int]]:
    """The non-empty datasets up to the current round, oldest first."""
    iterations = [iteration for iteration, _ in counts]
    if len(set(iterations)) != len(iterations):
        raise ConfigurationError(f"`counts` must hold each iteration once, got iterations {sorted(iterations)}")
    return sorted((iteration, size) for iteration, size in counts if size > 0 and iteration <= current_round)


def _draw_datasets(weights: list[float], size: int, generator: torch.Generator) -> list[int]:
    """How often each dataset is drawn in ``size`` draws with replacement, by inverting the weights' CDF."""
    cdf = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    uniforms = torch.rand(size, generator=generator, dtype=torch.float64)
    # First index with cdf > u * total: a dataset of weight 0 is never drawn.
    drawn = torch.searchsorted(cdf, uniforms * cdf[-1], right=True)
    return torch.bincount(drawn, minlength=len(weights)).tolist()


def _take(num_pairs: int, times: int, generator: torch.Generator) -> list[int]:
    """Take ``times`` of ``num_pairs`` indices: whole shuffled copies, then a remainder without repetition."""
    taken: list[int] = []
    while len(taken) < times:
        taken += counted_permutation(num_pairs, generator)[: times - len(taken)]
    return taken
