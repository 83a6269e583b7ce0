"""Pair selection against a literal enumeration of all comparisons."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from pbrl_lightning.preferences.selection import (
    ComparatorComparison,
    Comparison,
    base_pairs,
    comparator_pairs,
    validate_selection,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def every_base_comparison(scores):
    """All ordered pairs whose first member scores higher, ascending by (winner, loser)."""
    ordered = itertools.product(sorted(scores), repeat=2)
    return [(high, low, scores[high] - scores[low]) for high, low in ordered if scores[high] > scores[low]]


def as_tuples(comparisons):
    return [(c.winner, c.loser, c.gap) for c in comparisons]


def random_scores(seed, count=12, levels=5):
    """Few levels, so that there are many ties in scores and gaps; indices with holes, in no order."""
    rng = random.Random(seed)
    indices = rng.sample(range(3 * count), count)
    return {index: rng.randrange(levels) / 4 - 0.5 for index in indices}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [None, 1, 5, 1000])
def test_reward_gap_is_widest_first_then_winner_then_loser(seed, limit):
    scores = random_scores(seed)
    expected = sorted(every_base_comparison(scores), key=lambda c: (-c[2], c[0], c[1]))
    assert as_tuples(base_pairs(scores, "reward_gap", limit)) == expected[:limit]


@pytest.mark.parametrize("seed", range(20))
def test_all_is_every_comparison_once(seed):
    scores = random_scores(seed)
    assert as_tuples(base_pairs(scores, "all", None)) == every_base_comparison(scores)


@pytest.mark.parametrize("limit", [None, 1, 7])
def test_random_is_a_part_of_all_without_repetition(limit):
    scores = random_scores(3)
    everything = every_base_comparison(scores)
    drawn = as_tuples(base_pairs(scores, "random", limit, generator(1)))
    assert len(drawn) == len(set(drawn)) == (len(everything) if limit is None else limit)
    assert set(drawn) <= set(everything)
    assert drawn == as_tuples(base_pairs(scores, "random", limit, generator(1)))
    assert drawn != as_tuples(base_pairs(scores, "random", limit, generator(5)))


def test_random_draws_each_comparison_equally_often():
    scores = {0: 0.0, 1: 1.0, 2: 2.0, 3: 2.0}  # five comparisons: 2 and 3 tie
    source = generator(0)
    counts = Counter(as_tuples(base_pairs(scores, "random", 1, source))[0] for _ in range(5000))
    assert set(counts) == set(every_base_comparison(scores))
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_by_hand():
    # Gaps: (1,0) 3, (1,2) 2, (2,0) 1.
    expected = [Comparison(1, 0, 3.0), Comparison(1, 2, 2.0), Comparison(2, 0, 1.0)]
    assert base_pairs({0: 0.0, 1: 3.0, 2: 1.0}, "reward_gap", None) == expected


def test_distinct_scores_give_k_choose_2():
    assert len(base_pairs({k: float(k) for k in range(80)}, "all", None)) == 80 * 79 // 2


def test_fault_B24_one_candidate_gives_no_pair():
    for selection in ("reward_gap", "random", "all"):
        assert base_pairs({4: 1.0}, selection, None, generator()) == []
    assert base_pairs({}, "reward_gap", 4) == []


def test_fault_B83_all_ties_give_no_pair():
    scores = dict.fromkeys(range(8), 0.5)
    assert base_pairs(scores, "reward_gap", 16) == []
    assert comparator_pairs(scores, scores, "comparator_reward", 4) == []


def test_fault_B40_a_missing_score_is_neither_zero_nor_winner():
    scores = {0: -5.0, 2: -4.0, 3: -5.0}  # candidate 1 has none
    assert as_tuples(base_pairs(scores, "reward_gap", None)) == [(2, 0, 1.0), (2, 3, 1.0)]
    # Index 1 is on one side only: not compared, though 0 would win against -5.
    assert [c.index for c in comparator_pairs(scores, {1: -5.0, 2: -3.0}, "all", None)] == [2]


def test_fault_B39_a_nan_that_slips_through_is_an_error():
    with pytest.raises(ValueError, match="`scores` must be finite, got nan for candidate 2"):
        base_pairs({0: 1.0, 2: float("nan")}, "reward_gap", None)
    with pytest.raises(ValueError, match="`comparator_scores` must be finite, got inf for candidate 0"):
        comparator_pairs({0: 1.0}, {0: float("inf")}, "reward_gap", None)


def every_comparator_comparison(actor, comparator):
    found = []
    for index in range(100):
        if index in actor and index in comparator and actor[index] != comparator[index]:
            side = "actor" if actor[index] > comparator[index] else "comparator"
            gap = max(actor[index], comparator[index]) - min(actor[index], comparator[index])
            found.append(ComparatorComparison(index, side, gap, comparator[index]))
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [None, 1, 4])
def test_comparator_orders(seed, limit):
    actor, comparator = random_scores(seed, 20), random_scores(seed + 100, 15)
    everything = every_comparator_comparison(actor, comparator)
    by_reward = sorted(everything, key=lambda c: (-c.comparator_score, -c.gap, c.index))
    by_gap = sorted(everything, key=lambda c: (-c.gap, c.index))
    assert comparator_pairs(actor, comparator, "comparator_reward", limit) == by_reward[:limit]
    assert comparator_pairs(actor, comparator, "reward_gap", limit) == by_gap[:limit]
    assert comparator_pairs(actor, comparator, "all", None) == everything
    drawn = comparator_pairs(actor, comparator, "random", limit, generator(seed))
    assert len(drawn) == len(set(drawn)) == len(everything[:limit])
    assert set(drawn) <= set(everything)


def test_comparator_reward_does_not_assume_that_the_comparator_wins():
    actor, comparator = {0: 1.0, 1: 0.0, 2: 0.25, 3: 9.0}, {0: 0.5, 1: 0.5, 2: 0.5, 4: 9.0}
    # All have comparator score 0.5: gaps 0.5, 0.5, 0.25, so index decides between the first two.
    assert comparator_pairs(actor, comparator, "comparator_reward", None) == [
        ComparatorComparison(0, "actor", 0.5, 0.5),
        ComparatorComparison(1, "comparator", 0.5, 0.5),
        ComparatorComparison(2, "comparator", 0.25, 0.5),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("comparator_reward", 4, False), "`pair_selection` must be one of reward_gap, random, all in a run without"),
        (("widest", 4, True), "must be one of reward_gap, random, all, comparator_reward, got 'widest'"),
        (("widest", 4, False), "must be one of reward_gap, random, all, got 'widest'"),
        (("all", 4, False), "`pairs_per_sample` must be null with pair_selection 'all', got 4"),
        (("reward_gap", 0, False), "`pairs_per_sample` must be an integer >= 1 or null, got 0"),
        (("reward_gap", -1, True), "got -1"),
        (("reward_gap", True, True), "got True"),
        (("reward_gap", 2.0, True), "got 2.0"),
    ],
)
def test_validation(arguments, message):
    with pytest.raises(ValueError, match=message):
        validate_selection(*arguments)


def test_validation_names_all_problems_at_once():
    with pytest.raises(ValueError, match=r"`pair_selection` must be .*; `pairs_per_sample` must be"):
        validate_selection("widest", 0, iterative=True)


def test_validation_accepts_what_fits():
    for selection in ("reward_gap", "random", "comparator_reward"):
        validate_selection(selection, 1, iterative=True)
        validate_selection(selection, None, iterative=True)
    validate_selection("all", None, iterative=False)


def test_the_functions_validate():
    with pytest.raises(ValueError, match="without a comparator"):
        base_pairs({0: 1.0}, "comparator_reward", 1)
    with pytest.raises(ValueError, match="must be null"):
        comparator_pairs({}, {}, "all", 1)
    with pytest.raises(ValueError, match=r"`generator` must be a torch.Generator"):
        base_pairs({0: 1.0, 1: 2.0}, "random", 1)
