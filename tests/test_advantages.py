"""Advantages against hand-worked numbers and a plain loop over each group that deletes what was not scored."""

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from pbrl_lightning.advantages import critic_advantages, group_advantages, normalise_by_group, normalise_over_batch

ALGORITHMS = ("magrpo", "mareinforce", "marloo", "maremax")
RELATIVE = ("magrpo", "marloo", "maremax")  # equal rewards leave nothing
SHAPES = ((1, 2), (3, 2), (5, 4), (4, 7), (2, 3, 4), (3, 2, 5))
NOTHING = (math.nan, math.inf, 1e3)  # what may stand where there is no score


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask_of(*shape: int, seed: int = 0) -> Tensor:
    """About a third False; the first group is False but for one entry, the last altogether."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.67
    groups = mask.view(-1, shape[-1])
    groups[0] = torch.arange(shape[-1]) == 1
    groups[-1] = False
    return mask


# The slow reference: lists of floats, one group at a time.


def slow_advantage(rewards: list[float], index: int, algorithm: str) -> float:
    others = [reward for other, reward in enumerate(rewards) if other != index]
    if algorithm == "magrpo":
        return rewards[index] - statistics.mean(rewards)
    if algorithm == "mareinforce":
        return rewards[index]
    if algorithm == "marloo":
        return rewards[index] - statistics.mean(others) if others else 0.0
    return rewards[index] - max(rewards)


def slow_divisor(deviating: list[float], rewards: list[float]) -> float:
    if len(rewards) < 2:
        return 1.0
    deviation = statistics.pstdev(deviating)
    return 1.0 if deviation == 0 or deviation < 1e-6 * max(map(abs, rewards)) else deviation


def slow_group(rewards: list[float], scored: list[bool], algorithm: str, normalise: bool) -> list[float]:
    kept = [reward for reward, keep in zip(rewards, scored, strict=True) if keep]
    divisor = slow_divisor(kept, kept) if normalise else 1.0
    remaining = iter([slow_advantage(kept, index, algorithm) / divisor for index in range(len(kept))])
    return [next(remaining) if keep else 0.0 for keep in scored]


def by_group(function: Callable[..., list[float]], *tensors: Tensor) -> Tensor:
    """The function on every group's lists, back in the tensors' common shape."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    rows = [tensor.expand(shape).reshape(-1, shape[-1]).tolist() for tensor in tensors]
    return double([function(*row) for row in zip(*rows, strict=True)]).reshape(shape)


def slow(rewards: Tensor, algorithm: str, scored: Tensor | None = None, normalise: bool = False) -> Tensor:
    mask = torch.ones(1, dtype=torch.bool) if scored is None else scored
    return by_group(lambda row, keep: slow_group(row, keep, algorithm, normalise), rewards, mask)


def slow_over_batch(advantages: Tensor, rewards: Tensor, scored: Tensor) -> Tensor:
    """Each agent's (B, G) as one list."""
    scored = scored.expand(advantages.shape)
    agents = []
    for agent in range(advantages[..., 0, 0].numel()):
        values, targets, keeps = (
            item.reshape(-1, *advantages.shape[-2:])[agent].flatten().tolist()
            for item in (advantages, rewards.expand(advantages.shape), scored)
        )
        kept = [index for index, keep in enumerate(keeps) if keep]
        divisor = slow_divisor([values[index] for index in kept], [targets[index] for index in kept])
        if divisor != 1.0:  # by no less than the size of the mean
            divisor = max(divisor, abs(statistics.mean(values[index] for index in kept)))
        agents.append([value / divisor if keep else 0.0 for value, keep in zip(values, keeps, strict=True)])
    return double(agents).reshape(advantages.shape)


# Group baselines.


def test_group_baselines_by_hand():
    # group 1: mean (1 + 2 + 6) / 3 = 3, max 6, others' means (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5
    # group 2: mean (-4 + 0 + 1) / 3 = -1, max 1, others' means 0.5, -1.5, -2
    rewards = double([[1, 2, 6], [-4, 0, 1]])
    assert_close(group_advantages(rewards, "magrpo"), double([[-2, -1, 3], [-3, 1, 2]]))
    assert_close(group_advantages(rewards, "mareinforce"), double([[1, 2, 6], [-4, 0, 1]]))
    assert_close(group_advantages(rewards, "marloo"), double([[-3, -1.5, 4.5], [-4.5, 1.5, 3]]))
    assert_close(group_advantages(rewards, "maremax"), double([[-5, -4, 0], [-5, -1, 0]]))


def test_two_generations_by_hand():
    # rewards 1 and 4: mean 2.5, the other's 4 and 1, deviation 1.5
    rewards = double([[1, 4]])
    expected = {"magrpo": [-1.5, 1.5], "mareinforce": [1, 4], "marloo": [-3, 3], "maremax": [-3, 0]}
    for algorithm, advantages in expected.items():
        assert_close(group_advantages(rewards, algorithm), double([advantages]))
        normalised = normalise_by_group(group_advantages(rewards, algorithm), rewards)
        assert_close(normalised, double([[advantage / 1.5 for advantage in advantages]]))


def test_one_outlier_by_hand():
    # mean 200; variance (4 * 200^2 + 800^2) / 5 = 160000, deviation 400; the zeros' others have mean 1000 / 4 = 250
    rewards = double([[0, 0, 1000, 0, 0]])
    expected = {
        "magrpo": [-0.5, -0.5, 2, -0.5, -0.5],
        "mareinforce": [0, 0, 2.5, 0, 0],
        "marloo": [-0.625, -0.625, 2.5, -0.625, -0.625],
        "maremax": [-2.5, -2.5, 0, -2.5, -2.5],
    }
    for algorithm, normalised in expected.items():
        advantages = group_advantages(rewards, algorithm)
        assert_close(advantages, 400 * double([normalised]))
        assert_close(normalise_by_group(advantages, rewards), double([normalised]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_group_baselines_equal_a_plain_loop(algorithm, shape):
    rewards = 3 * normal(*shape, seed=1) + 2
    advantages = group_advantages(rewards, algorithm)
    assert_close(advantages, slow(rewards, algorithm))
    assert_close(normalise_by_group(advantages, rewards), slow(rewards, algorithm, normalise=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_marloo_is_magrpo_times_g_over_g_minus_1(shape):
    rewards = normal(*shape, seed=2)
    generations = shape[-1]
    expected = group_advantages(rewards, "magrpo") * generations / (generations - 1)
    assert_close(group_advantages(rewards, "marloo"), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("generations", range(2, 8))
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -3.7, 1e8 + 0.1, -1e-9, 1e-30])
def test_equal_rewards_give_exactly_zero(reward, generations, dtype):
    rewards = torch.full((2, 3, generations), reward, dtype=dtype)
    mixed = torch.ones(3, generations, dtype=torch.bool)
    mixed[1, 0] = False
    for scored in (None, mixed):
        for algorithm in RELATIVE:
            advantages = group_advantages(rewards, algorithm, scored)
            assert advantages.dtype == dtype
            assert torch.equal(advantages, torch.zeros_like(rewards)), algorithm
            assert torch.equal(normalise_by_group(advantages, rewards, scored), torch.zeros_like(rewards)), algorithm
        advantages = group_advantages(rewards, "mareinforce", scored)
        expected = rewards if scored is None else rewards * scored
        assert torch.equal(advantages, expected)
        assert torch.equal(normalise_by_group(advantages, rewards, scored), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arguments_are_left_as_they_are(algorithm):
    rewards, scored = normal(3, 4, seed=3), mask_of(3, 4)
    rewards_before, scored_before = rewards.clone(), scored.clone()
    advantages = group_advantages(rewards, algorithm, scored)
    advantages_before = advantages.clone()
    normalise_by_group(advantages, rewards, scored)
    normalise_over_batch(advantages, rewards, scored)
    assert torch.equal(rewards, rewards_before)
    assert torch.equal(scored, scored_before)
    assert torch.equal(advantages, advantages_before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_group_advantages_permute_with_the_rewards(algorithm):
    rewards, scored = normal(5, 4, seed=4), mask_of(5, 4)
    expected = group_advantages(rewards, algorithm, scored)
    expected_normalised = normalise_by_group(expected, rewards, scored)
    for order in itertools.permutations(range(4)):
        permuted = group_advantages(rewards[:, order], algorithm, scored[:, order])
        assert_close(permuted, expected[:, order])
        normalised = normalise_by_group(permuted, rewards[:, order], scored[:, order])
        assert_close(normalised, expected_normalised[:, order])
    items = [3, 0, 4, 1, 2]
    assert_close(group_advantages(rewards[items], algorithm, scored[items]), expected[items])


def test_fault_B27_advantages_use_every_member_of_the_group():
    # mean 1, deviation sqrt((1 + 1 + 1 + 9) / 4) = sqrt(3); others' means 4 / 3 and 0
    root = math.sqrt(3)
    expected = {
        "magrpo": {0.0: -1, 4.0: 3},
        "mareinforce": {0.0: 0, 4.0: 4},
        "marloo": {0.0: -4 / 3, 4.0: 4},
        "maremax": {0.0: -4, 4.0: 0},
    }
    for permutation in itertools.permutations([0.0, 0.0, 0.0, 4.0]):
        rewards = double([permutation, [1, 2, 3, 4]])
        for algorithm, advantage in expected.items():
            hand = double([advantage[reward] for reward in permutation])
            advantages = group_advantages(rewards, algorithm)
            assert_close(advantages[0], hand)
            assert_close(normalise_by_group(advantages, rewards)[0], hand / root)
            if algorithm in ("magrpo", "marloo"):
                assert_close(advantages.sum(-1), double([0, 0]))


@pytest.mark.parametrize("normalise", [False, True])
def test_fault_B26_groups_are_compared_within_themselves_only(normalise):
    rewards = double([[1, 1, 1, 1], [0, 0, 0, 0]])
    for algorithm in RELATIVE:
        advantages = group_advantages(rewards, algorithm)
        if normalise:
            advantages = normalise_by_group(advantages, rewards)
        assert torch.equal(advantages, torch.zeros(2, 4, dtype=torch.float64)), algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fault_B26_another_group_changes_nothing(algorithm):
    rewards = normal(3, 4, seed=5)
    alone = normalise_by_group(group_advantages(rewards[:1], algorithm), rewards[:1])
    rewards[1:] = 1e3 * rewards[1:] + 7
    assert torch.equal(normalise_by_group(group_advantages(rewards, algorithm), rewards)[:1], alone)


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7, 1e8 + 0.1])
def test_fault_B24_a_group_of_one_is_never_nan(reward):
    rewards = double([[reward], [reward + 1]])
    for algorithm in RELATIVE:
        advantages = group_advantages(rewards, algorithm)
        assert torch.equal(advantages, torch.zeros_like(rewards)), algorithm
        assert torch.equal(normalise_by_group(advantages, rewards), torch.zeros_like(rewards)), algorithm
    advantages = group_advantages(rewards, "mareinforce")
    assert torch.equal(advantages, rewards)
    assert torch.equal(normalise_by_group(advantages, rewards), rewards)


@pytest.mark.parametrize("name", ["", "grpo", "MAGRPO", "magrpo ", "maac", "iac"])
def test_fault_B28_an_unknown_algorithm_is_an_error(name):
    with pytest.raises(ValueError, match=r"must be .*magrpo.*mareinforce.*marloo.*maremax.*got") as caught:
        group_advantages(double([[1, 2]]), name)
    assert repr(name) in str(caught.value)


# Normalisation over the group.


def test_fault_B28_normalisation_by_group_is_what_the_table_says():
    # rewards 1 3 5 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5; 0 0 0 4: mean 1, variance (1 + 1 + 1 + 9) / 4 = 3
    rewards = double([[1, 3, 5, 7], [0, 0, 0, 4]])
    deviations = double([[math.sqrt(5)], [math.sqrt(3)]])
    table = {
        "magrpo": [[-3, -1, 1, 3], [-1, -1, -1, 3]],
        "mareinforce": [[1, 3, 5, 7], [0, 0, 0, 4]],
        "marloo": [[-4, -4 / 3, 4 / 3, 4], [-4 / 3, -4 / 3, -4 / 3, 4]],
        "maremax": [[-6, -4, -2, 0], [-4, -4, -4, 0]],
    }
    for algorithm, unnormalised in table.items():
        advantages = group_advantages(rewards, algorithm)
        assert_close(advantages, double(unnormalised))
        assert_close(normalise_by_group(advantages, rewards), double(unnormalised) / deviations)


def test_normalisation_divides_by_the_deviation_of_the_rewards_not_of_the_advantages():
    # the rewards 2 and 6 deviate by 2, the advantages by 50
    assert_close(normalise_by_group(double([[100, 200]]), double([[2, 6]])), double([[50, 100]]))


def test_normalisation_does_not_recentre():
    rewards = normal(6, 4, seed=6) + 1
    deviations = double([statistics.pstdev(row) for row in rewards.tolist()])
    for algorithm in ALGORITHMS:
        advantages = group_advantages(rewards, algorithm)
        means = normalise_by_group(advantages, rewards).mean(-1)
        assert_close(means, advantages.mean(-1) / deviations)
        if algorithm in ("mareinforce", "maremax"):
            assert (means.abs() > 0.01).all(), algorithm


def test_normalised_baselines_are_different_algorithms():
    rewards = normal(8, 4, seed=7)
    directions = {}
    for algorithm in ALGORITHMS:
        directions[algorithm] = normalise_by_group(group_advantages(rewards, algorithm), rewards).flatten()
    for first, second in itertools.combinations(ALGORITHMS, 2):
        cosine = torch.cosine_similarity(directions[first], directions[second], dim=0)
        if {first, second} == {"magrpo", "marloo"}:
            assert_close(cosine, double(1))
        else:
            assert cosine < 0.999, (first, second)


@pytest.mark.parametrize("centre", [1e6, -1e6])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_deviation_of_rounding_is_not_divided_by(algorithm, centre):
    rewards = centre + 1e-3 * normal(3, 4, seed=8)
    advantages = group_advantages(rewards, algorithm)
    assert torch.equal(normalise_by_group(advantages, rewards), advantages)
    assert torch.equal(normalise_over_batch(advantages, rewards), advantages)


def test_a_deviation_counts_from_a_millionth_of_the_rewards():
    # 1e6 -+ 0.5 deviates by 0.5 < 1e-6 * 1e6, 1e6 -+ 2 by 2 > 1
    rewards = double([[1e6 - 0.5, 1e6 + 0.5], [1e6 - 2, 1e6 + 2]])
    advantages = group_advantages(rewards, "magrpo")
    assert_close(normalise_by_group(advantages, rewards), double([[-0.5, 0.5], [-1, 1]]))
    for row, expected in enumerate([[-0.5, 0.5], [-1.0, 1.0]]):
        normalised = normalise_over_batch(advantages[row : row + 1], rewards[row : row + 1])
        assert_close(normalised, double([expected]))


@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 1e7])
def test_small_rewards_are_no_rounding(scale):
    # 1 and 3 deviate by 1, at every scale
    rewards = scale * double([[1, 3], [-1, -3]])
    advantages = group_advantages(rewards, "magrpo")
    assert_close(normalise_by_group(advantages, rewards), double([[-1, 1], [1, -1]]))
    assert_close(normalise_over_batch(advantages, rewards), double([[-1, 1], [1, -1]]))


def test_rewards_of_zero_leave_everything_as_it_is():
    rewards = torch.zeros(2, 3, 4, dtype=torch.float64)
    for algorithm in ALGORITHMS:
        advantages = group_advantages(rewards, algorithm)
        assert torch.equal(normalise_by_group(advantages, rewards), rewards)
        assert torch.equal(normalise_over_batch(advantages, rewards), rewards)
    advantages = normal(2, 3, 4, seed=9)  # a critic's, say
    assert torch.equal(normalise_by_group(advantages, rewards), advantages)


# Entries without a score.


@pytest.mark.parametrize("shape", [(6, 4), (5, 2), (3, 4, 5), (2, 3, 7)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fault_B39_unscored_entries_are_as_if_deleted(algorithm, shape):
    scored = mask_of(*shape, seed=10)
    rewards = torch.where(scored, normal(*shape, seed=11) - 5, math.nan)
    advantages = group_advantages(rewards, algorithm, scored)
    normalised = normalise_by_group(advantages, rewards, scored)
    assert_close(advantages, slow(rewards, algorithm, scored))
    assert_close(normalised, slow(rewards, algorithm, scored, normalise=True))
    for result in (advantages, normalised):
        assert (result[~scored] == 0).all()
        assert result.isfinite().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fault_B33_what_stands_at_unscored_entries_leaks_nowhere(algorithm):
    scored = mask_of(6, 4, seed=12)
    rewards = normal(6, 4, seed=13)
    results = []
    for nothing in NOTHING:
        filled = torch.where(scored, rewards, nothing)
        advantages = group_advantages(filled, algorithm, scored)
        normalised = [normalise_by_group(advantages, filled, scored), normalise_over_batch(advantages, filled, scored)]
        results.append(torch.stack([advantages, *normalised]))
    for result in results:
        assert (result[:, ~scored] == 0).all()
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("normalise", [normalise_by_group, normalise_over_batch])
def test_fault_B33_unscored_advantages_are_in_no_deviation(normalise, nothing):
    scored = mask_of(6, 4, seed=12)
    rewards, advantages = normal(6, 4, seed=13), normal(6, 4, seed=30)
    expected = normalise(advantages * scored, rewards, scored)
    dirty = normalise(torch.where(scored, advantages, nothing), torch.where(scored, rewards, nothing), scored)
    assert torch.equal(dirty[scored], expected[scored])


@pytest.mark.parametrize("normalise", [normalise_by_group, normalise_over_batch])
def test_fault_B33_normalisation_gives_unscored_entries_the_advantage_zero(normalise):
    scored = torch.tensor([[True, True, False], [True, True, True]])
    rewards = double([[1, 3, math.nan], [2, 4, 9]])
    for nothing in NOTHING:
        advantages = double([[-1, 1, nothing], [-3, -1, 4]])
        assert normalise(advantages, rewards, scored)[0, 2] == 0, nothing


def test_fault_B40_an_unscored_response_is_not_one_of_reward_zero():
    rewards = double([[-5, math.nan, -5, -5], [-5, -7, -6, math.nan]])
    scored = rewards.isfinite()
    # second group without the last: mean -6, max -5, others' means -6.5, -5.5, -6; variance (1 + 1 + 0) / 3
    expected = {
        "magrpo": [[0, 0, 0, 0], [1, -1, 0, 0]],
        "mareinforce": [[-5, 0, -5, -5], [-5, -7, -6, 0]],
        "marloo": [[0, 0, 0, 0], [1.5, -1.5, 0, 0]],
        "maremax": [[0, 0, 0, 0], [0, -2, -1, 0]],
    }
    divisors = double([[1], [math.sqrt(2 / 3)]])
    for algorithm, hand in expected.items():
        advantages = group_advantages(rewards, algorithm, scored)
        assert_close(advantages, double(hand))
        assert_close(normalise_by_group(advantages, rewards, scored), double(hand) / divisors)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fault_B39_a_group_without_any_score_is_all_zeros(algorithm):
    rewards = double([[1, 4], [math.nan, math.nan]])
    scored = torch.tensor([[True, True], [False, False]])
    advantages = group_advantages(rewards, algorithm, scored)
    for result in (
        advantages,
        normalise_by_group(advantages, rewards, scored),
        normalise_over_batch(advantages, rewards, scored),
    ):
        assert result[1].tolist() == [0, 0]
        assert result.isfinite().all()
    nobody = torch.zeros(2, 2, dtype=torch.bool)
    advantages = group_advantages(rewards, algorithm, nobody)
    assert advantages.tolist() == [[0, 0], [0, 0]]
    assert normalise_by_group(advantages, rewards, nobody).tolist() == [[0, 0], [0, 0]]
    assert normalise_over_batch(advantages, rewards, nobody).tolist() == [[0, 0], [0, 0]]


def test_fault_B24_one_scored_response_of_a_group_is_a_group_of_one():
    rewards = double([[math.nan, 3, math.nan]])
    scored = rewards.isfinite()
    for algorithm in ALGORITHMS:
        advantages = group_advantages(rewards, algorithm, scored)
        expected = [[0, 3, 0]] if algorithm == "mareinforce" else [[0, 0, 0]]
        assert advantages.tolist() == expected
        assert normalise_by_group(advantages, rewards, scored).tolist() == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_mask_serves_all_agents(algorithm):
    rewards, scored = normal(3, 5, 4, seed=14), mask_of(5, 4, seed=15)
    every = scored.expand(3, 5, 4)
    advantages = group_advantages(rewards, algorithm, scored)
    assert torch.equal(advantages, group_advantages(rewards, algorithm, every))
    assert_close(advantages, slow(rewards, algorithm, scored))
    normalised = normalise_by_group(advantages, rewards, scored)
    assert_close(normalised, slow(rewards, algorithm, scored, normalise=True))
    over_batch = normalise_over_batch(advantages, rewards, scored)
    assert_close(over_batch, slow_over_batch(advantages, rewards, scored))


# Critics.


def test_critic_advantages_by_hand():
    rewards = double([[1, 3, 5], [0, 0, 4]])
    values = double([[0.5, 1, 6], [2, -1, 2]])
    assert_close(critic_advantages(rewards, values, "v"), double([[0.5, 2, -1], [-2, 1, 2]]))
    # mean Q: 2.5 and 1
    assert_close(critic_advantages(rewards, values, "q"), double([[-2, -1.5, 3.5], [1, -2, 1]]))


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("shape", [(3, 2), (5, 4), (2, 3, 4)])
def test_critic_advantages_equal_a_plain_loop(shape, critic_type):
    rewards, values, scored = normal(*shape, seed=16), normal(*shape, seed=17), mask_of(*shape, seed=18)

    def slow_critic(rewards: list[float], values: list[float], scored: list[bool]) -> list[float]:
        kept = [value for value, keep in zip(values, scored, strict=True) if keep]
        advantages = []
        for reward, value, keep in zip(rewards, values, scored, strict=True):
            gap = reward - value if critic_type == "v" else value - statistics.mean(kept or [0.0])
            advantages.append(gap if keep else 0.0)
        return advantages

    everyone = torch.ones(shape, dtype=torch.bool)
    assert_close(critic_advantages(rewards, values, critic_type), by_group(slow_critic, rewards, values, everyone))
    expected = by_group(slow_critic, rewards, values, scored)
    for nothing in NOTHING:
        filled = torch.where(scored, rewards, nothing)
        assert_close(critic_advantages(filled, values, critic_type, scored), expected)
        filled_values = torch.where(scored, values, nothing)
        assert_close(critic_advantages(filled, filled_values, critic_type, scored), expected)


def test_one_value_serves_all_responses_of_an_item():
    rewards = double([[1, 3, 5], [0, 0, 4]])
    values = double([[2], [1]])
    hand = double([[-1, 1, 3], [-1, -1, 3]])
    assert_close(critic_advantages(rewards, values, "v"), hand)
    assert_close(critic_advantages(rewards.expand(2, 2, 3), values, "v"), hand.expand(2, 2, 3))
    scored = torch.tensor([[True, False, True], [True, True, True]])
    assert_close(critic_advantages(rewards, values, "v", scored), hand * scored)
    # a Q that does not depend on the response prefers none
    assert_close(critic_advantages(rewards, values, "q"), torch.zeros_like(rewards))


def test_a_critic_does_with_one_generation():
    rewards = double([[2], [5]])
    advantages = critic_advantages(rewards, double([[1], [1]]), "v")
    assert_close(advantages, double([[1], [4]]))
    # mean 2.5, deviation 1.5: the mean is larger
    assert_close(normalise_over_batch(advantages, rewards), double([[1 / 2.5], [4 / 2.5]]))
    # mean 0.5, deviation 1.5
    advantages = critic_advantages(rewards, double([[3], [3]]), "v")
    assert_close(normalise_over_batch(advantages, rewards), double([[-1 / 1.5], [2 / 1.5]]))


def test_q_advantages_do_not_look_at_the_rewards():
    values = normal(3, 4, seed=19)
    first = critic_advantages(normal(3, 4, seed=20), values, "q")
    assert torch.equal(critic_advantages(normal(3, 4, seed=21), values, "q"), first)


@pytest.mark.parametrize("critic_type", ["", "V", "value", "a", "vq"])
def test_fault_B28_an_unknown_critic_type_is_an_error(critic_type):
    with pytest.raises(ValueError, match=r"`critic_type` must be .*\bv\b.*\bq\b.*got") as caught:
        critic_advantages(double([[1, 2]]), double([[1, 2]]), critic_type)
    assert repr(critic_type) in str(caught.value)


# Normalisation over the batch.


def test_fault_B28_normalisation_over_the_batch_is_what_the_table_says():
    # advantages with V = 2 and 1: mean 8 / 8 = 1, deviations from it -2 0 2 4 -2 -2 -2 2, variance 40 / 8 = 5;
    # the rewards' own variance, 100 / 8 - 2.5^2 = 6.25, has no part in it, nor has a re-centring
    rewards = double([[1, 3, 5, 7], [0, 0, 0, 4]])
    advantages = critic_advantages(rewards, double([[2], [1]]), "v")
    hand = double([[-1, 1, 3, 5], [-1, -1, -1, 3]])
    assert_close(advantages, hand)
    normalised = normalise_over_batch(advantages, rewards)
    assert_close(normalised, hand / math.sqrt(5))
    assert_close(normalised.mean(), double(1 / math.sqrt(5)))


@pytest.mark.parametrize("shape", SHAPES)
def test_normalisation_over_the_batch_equals_a_plain_loop(shape):
    advantages, rewards = normal(*shape, seed=22) + 1, normal(*shape, seed=23)
    everyone = torch.ones(shape, dtype=torch.bool)
    assert_close(normalise_over_batch(advantages, rewards), slow_over_batch(advantages, rewards, everyone))
    scored = mask_of(*shape, seed=24)
    advantages = advantages * scored
    expected = slow_over_batch(advantages, rewards, scored)
    assert_close(normalise_over_batch(advantages, torch.where(scored, rewards, math.nan), scored), expected)


def test_each_agent_is_normalised_by_its_own_batch():
    advantages, rewards = normal(2, 3, 4, seed=25), normal(2, 3, 4, seed=26)
    alone = normalise_over_batch(advantages[0], rewards[0])
    advantages[1] *= 1e3
    rewards[1] *= 1e3
    assert_close(normalise_over_batch(advantages, rewards)[0], alone)


def test_advantages_that_are_rounding_are_not_divided():
    # a critic that is right up to 1e-3, at rewards around 1e6
    rewards = 1e6 + normal(3, 4, seed=27)
    advantages = 1e-3 * normal(3, 4, seed=28)
    assert torch.equal(normalise_over_batch(advantages, rewards), advantages)
    # at rewards around 1 the same advantages count
    everyone = torch.ones(3, 4, dtype=torch.bool)
    rewards = rewards - 1e6 + 1
    normalised = normalise_over_batch(advantages, rewards)
    assert_close(normalised, slow_over_batch(advantages, rewards, everyone))
    assert_close(normalised.std(correction=0), double(1))


def test_a_batch_with_one_score_is_not_divided():
    rewards = double([[math.nan, 3], [math.nan, math.nan]])
    advantages = double([[0, 0.25], [0, 0]])
    assert normalise_over_batch(advantages, rewards, rewards.isfinite()).tolist() == [[0, 0.25], [0, 0]]
    assert normalise_over_batch(double([[0.25]]), double([[3]])).tolist() == [[0.25]]
