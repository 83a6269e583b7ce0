"""Replay: eligibility and weights against the formulas, draws within a dataset exactly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy.stats import chisquare

from pbrl_lightning.preferences.replay import (
    AllHistoryReplay,
    CurrentReplay,
    LambdaDecayReplay,
    NearestKReplay,
    ReplayBuffer,
)
from pbrl_lightning.randomness import counted_generator

COUNTS = [(1, 300), (2, 0), (3, 500), (4, 7), (5, 400)]
HISTORICAL = [NearestKReplay(2), AllHistoryReplay(), LambdaDecayReplay(0.5)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def name(replay):
    return type(replay).__name__


def test_current_is_all_pairs_in_order_without_a_draw():
    source = generator()
    before = source.get_state()
    assert CurrentReplay().select([(1, 4), (2, 3)], 2, source) == [(2, 0), (2, 1), (2, 2)]
    assert torch.equal(source.get_state(), before)


def test_fault_B83_nothing_to_draw_from_gives_nothing():
    assert CurrentReplay().select([(1, 4), (2, 0)], 2, generator()) == []
    for replay in HISTORICAL:
        assert replay.select([(1, 0), (2, 0)], 2, generator()) == []
        assert replay.select([], 1, generator()) == []


def test_fault_B37_an_empty_round_draws_from_earlier_ones_and_later_rounds_are_unaffected():
    for replay in HISTORICAL:
        drawn = replay.select([(1, 30), (2, 20), (3, 0)], 3, generator())
        assert len(drawn) == 20  # the latest non-empty dataset's size
        assert {iteration for iteration, _ in drawn} == {1, 2}
        with_hole = replay.select([(1, 30), (2, 20), (3, 0), (4, 25)], 4, generator())
        without = replay.select([(1, 30), (2, 20), (4, 25)], 4, generator())
        assert with_hole == without
        assert len(with_hole) == 25


def expected_weights(replay):
    """The weights by hand for ``COUNTS``: non-empty rounds 1, 3, 4, 5."""
    if isinstance(replay, NearestKReplay):
        return {3: 1 / 3, 4: 1 / 3, 5: 1 / 3}
    if isinstance(replay, AllHistoryReplay):
        return dict.fromkeys((1, 3, 4, 5), 1 / 4)
    total = 1 + replay.decay + replay.decay**2 + replay.decay**3
    return {5: 1 / total, 4: replay.decay / total, 3: replay.decay**2 / total, 1: replay.decay**3 / total}


@pytest.mark.parametrize(
    "replay",
    [
        NearestKReplay(3, 6000),
        AllHistoryReplay(6000),
        LambdaDecayReplay(0.5, 6000),
        LambdaDecayReplay(0.9, 6000),
        LambdaDecayReplay(1, 6000),
    ],
    ids=name,
)
def test_datasets_are_drawn_by_weight_whatever_their_size(replay):
    counts = Counter(iteration for iteration, _ in replay.select(COUNTS, 5, generator(1)))
    weights = expected_weights(replay)
    assert set(counts) == set(weights)
    assert chisquare([counts[i] for i in weights], [6000 * weight for weight in weights.values()]).pvalue > 1e-3
    flipped = dict(zip(weights, reversed(weights.values()), strict=True))
    if isinstance(replay, LambdaDecayReplay) and replay.decay < 1:
        assert chisquare([counts[i] for i in weights], [6000 * weight for weight in flipped.values()]).pvalue < 1e-9


def test_the_dataset_draws_are_independent():
    """With two equal datasets the share of one has the variance of a binomial."""
    replay = AllHistoryReplay(16)
    sums = [sum(i == 1 for i, _ in replay.select([(1, 99), (2, 99)], 2, generator(seed))) for seed in range(2000)]
    assert torch.tensor(sums, dtype=torch.float64).var().item() == pytest.approx(4.0, rel=0.15)


def test_decay_zero_is_only_the_newest_and_one_is_equal():
    drawn = LambdaDecayReplay(0, 1000).select(COUNTS, 5, generator())
    assert {iteration for iteration, _ in drawn} == {5}
    assert LambdaDecayReplay(0.0).weights(3) == [0.0, 0.0, 1.0]
    assert LambdaDecayReplay(1).weights(4) == AllHistoryReplay().weights(4) == [0.25] * 4
    assert LambdaDecayReplay(0.5).weights(3) == pytest.approx([1 / 7, 2 / 7, 4 / 7])  # the newest last


def test_nearest_k_counts_non_empty_datasets():
    drawn = NearestKReplay(3, 3000).select(COUNTS, 5, generator())
    assert {iteration for iteration, _ in drawn} == {3, 4, 5}
    assert {i for i, _ in NearestKReplay(99, 3000).select(COUNTS, 5, generator())} == {1, 3, 4, 5}
    assert {i for i, _ in NearestKReplay(1).select(COUNTS, 5, generator())} == {5}


@pytest.mark.parametrize(("sample_size", "size"), [(1, 5), (4, 5), (5, 5), (6, 5), (10, 5), (13, 5), (3, 1)])
def test_pairs_repeat_only_above_the_dataset_size_and_then_evenly(sample_size, size):
    """One dataset: its count is sample_size. Every pair floor(n/s) or ceil(n/s) times."""
    drawn = AllHistoryReplay(sample_size).select([(1, size)], 1, generator(3))
    counts = Counter(index for _, index in drawn)
    assert len(drawn) == sample_size
    assert set(counts) <= set(range(size))
    whole, rest = divmod(sample_size, size)
    times = sorted((counts[index] for index in range(size)), reverse=True)
    assert times == [whole + 1] * rest + [whole] * (size - rest)


@pytest.mark.parametrize("seed", range(10))
def test_no_repetition_within_each_of_several_datasets(seed):
    drawn = AllHistoryReplay(60).select([(1, 60), (2, 60), (3, 4)], 3, generator(seed))
    counts = Counter(drawn)
    assert all(counts[key] == 1 for key in counts if key[0] != 3)
    small = [counts[3, index] for index in range(4)]
    assert max(small) - min(small) <= 1


def test_pairs_within_a_dataset_are_drawn_evenly_and_the_union_is_shuffled():
    counts, first = Counter(), Counter()
    for seed in range(3000):
        drawn = AllHistoryReplay(2).select([(1, 5)], 1, generator(seed))
        counts.update(index for _, index in drawn)
        first.update(drawn[:1])
    assert chisquare([counts[i] for i in range(5)]).pvalue > 1e-3
    mixed = AllHistoryReplay(200).select([(1, 500), (2, 500)], 2, generator())
    rounds = [iteration for iteration, _ in mixed]
    assert chisquare([first[1, i] for i in range(5)]).pvalue > 1e-3
    assert 70 < sum(a != b for a, b in pairwise(rounds)) < 130  # 199 / 2 when shuffled


def test_default_sample_size_is_the_current_rounds():
    assert len(AllHistoryReplay().select(COUNTS, 5, generator())) == 400
    assert len(AllHistoryReplay().select(COUNTS, 4, generator())) == 7  # rounds after the current one do not count
    assert len(AllHistoryReplay().select(COUNTS, 2, generator())) == 300
    assert len(AllHistoryReplay(9).select(COUNTS, 5, generator())) == 9


def test_fault_B88_a_draw_depends_only_on_the_counts_and_the_counted_generator():
    replay = LambdaDecayReplay(0.8, 50)
    uninterrupted = [replay.select(COUNTS, nu, counted_generator(7, "replay", step=nu)) for nu in (3, 4, 5)]
    resumed = LambdaDecayReplay(0.8, 50).select(COUNTS[::-1], 5, counted_generator(7, "replay", step=5))
    assert resumed == uninterrupted[-1]
    assert uninterrupted[0] != uninterrupted[1]


class OldestReplay(ReplayBuffer):
    """A user's own buffer, without a constructor of its own."""

    def eligible(self, entries, current_round):
        return entries[:2]

    def weights(self, count):
        return [0.0, 3.0][:count]


def test_users_subclass_with_unnormalised_weights():
    drawn = OldestReplay().select(COUNTS, 5, generator())
    assert len(drawn) == 400
    assert {iteration for iteration, _ in drawn} == {3}


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]], ids=str)
def test_weights_that_cannot_be_drawn_from(weights):
    class Broken(OldestReplay):
        def weights(self, count):
            return weights

    with pytest.raises(
        ValueError, match=r"`Broken.weights` must return 2 finite numbers >= 0 with a positive sum, got"
    ):
        Broken().select(COUNTS, 5, generator())


def test_construction_errors():
    for wrong in (0, -1, 1.0, True, None, "2"):
        with pytest.raises(ValueError, match="`k` must be an integer >= 1, got"):
            NearestKReplay(wrong)
    for wrong in (-0.1, 1.1, float("nan"), True, "0.5", None):
        with pytest.raises(ValueError, match="`decay` must be a number from 0 to 1, got"):
            LambdaDecayReplay(wrong)
    for wrong in (0, -3, 2.0, True):
        for make in (AllHistoryReplay, lambda size: NearestKReplay(1, size), lambda size: LambdaDecayReplay(0.5, size)):
            with pytest.raises(ValueError, match="`sample_size` must be an integer >= 1 or null, got"):
                make(wrong)
    with pytest.raises(TypeError, match="positional argument"):
        CurrentReplay(5)
    with pytest.raises(TypeError, match="abstract"):
        ReplayBuffer()


def test_an_iteration_stands_once():
    with pytest.raises(ValueError, match=r"`counts` must hold each iteration once, got iterations \[1, 1\]"):
        AllHistoryReplay().select([(1, 3), (1, 4)], 1, generator())
