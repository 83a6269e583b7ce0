"""Losses of policy learning and critics, and the KL estimate, against hand-worked numbers and plain loops."""

import math

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from pbrl_lightning.losses import k3_kl, policy_gradient_losses, value_losses


def double(values: list | float, requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def has_no_gradient(tensor: Tensor) -> bool:
    return tensor.grad is None or not tensor.grad.any()


# Policies.


def test_policy_losses_by_hand():
    # response 1: -(2 * -1 + -1 * -3) = -1; response 2: -(0.5 * -4 + 3 * -0.5) = 3.5; response 3: -(0 + -2 * -2) = -4
    logps = double([[-1, -4, -7], [-3, -0.5, -2]])
    advantages = double([[2, 0.5, 0], [-1, 3, -2]])
    assert_close(policy_gradient_losses(logps, advantages), double([-1, 3.5, -4]))


@pytest.mark.parametrize(("agents", "responses"), [(1, 1), (1, 6), (2, 5), (3, 8)])
def test_policy_losses_equal_a_plain_loop(agents, responses):
    logps, advantages = 20 * normal(agents, responses, seed=1), normal(agents, responses, seed=2)
    expected = []
    for response in range(responses):
        loss = 0.0
        for agent in range(agents):
            loss -= advantages[agent, response].item() * logps[agent, response].item()
        expected.append(loss)
    assert_close(policy_gradient_losses(logps, advantages), double(expected))


def test_the_gradient_of_the_policy_loss_is_minus_the_advantages():
    logps = normal(3, 4, seed=3).requires_grad_()
    advantages = normal(3, 4, seed=4).requires_grad_()
    advantages.data[0, 0] = 0
    policy_gradient_losses(logps, advantages).sum().backward()
    assert torch.equal(logps.grad, -advantages.detach())
    assert has_no_gradient(advantages)


def test_each_response_has_a_loss_of_its_own():
    logps = normal(2, 3, seed=5).requires_grad_()
    advantages = normal(2, 3, seed=6)
    (gradient,) = torch.autograd.grad(policy_gradient_losses(logps, advantages)[1], logps)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    expected[:, 1] = -advantages[:, 1]
    assert torch.equal(gradient, expected)


def test_advantages_of_zero_leave_the_policy_alone():
    logps = (-1e3 * normal(2, 3, seed=7).abs()).requires_grad_()
    losses = policy_gradient_losses(logps, torch.zeros(2, 3, dtype=torch.float64))
    losses.sum().backward()
    assert not losses.any()
    assert not logps.grad.any()


# Shapes that would broadcast are the dangerous ones.
@pytest.mark.parametrize("other", [(1, 3), (3,), (2, 1), (1,), (), (3, 2), (2, 3, 1), (1, 2, 3), (2, 4)])
def test_policy_losses_want_one_shape(other):
    wanted, given = torch.zeros(2, 3), torch.zeros(other)
    for logps, advantages in ((wanted, given), (given, wanted)):
        with pytest.raises(ValueError, match="advantages") as caught:
            policy_gradient_losses(logps, advantages)
        assert "(2, 3)" in str(caught.value)
        assert str(other) in str(caught.value)


# Critics.


def test_value_losses_by_hand():
    values, returns = double([1, -2, 0.5]), double([3, 1, 0.5])
    assert_close(value_losses(values, returns), double([4, 9, 0]))
    # without a range the old values have no part in it
    assert_close(value_losses(values, returns, double([9, 9, 9])), double([4, 9, 0]))


# V_old = 1, c = 0.2: the value may be 0.8 to 1.2.
CLIP_TABLE = [
    # value, return, loss, gradient
    (1.1, 2.0, 0.81, -1.8),  # inside the range: plain
    (0.9, 2.0, 1.21, -2.2),
    (1.1, 0.0, 1.21, 2.2),
    (0.9, 0.0, 0.81, 1.8),
    (1.0, 3.0, 4.0, -4.0),
    (1.5, 2.0, 0.64, 0.0),  # above, towards the return: (1.2 - 2)^2 > 0.5^2, and no further push
    (1.5, 0.0, 2.25, 3.0),  # above, away from it: 1.5^2 > 1.2^2
    (0.5, 0.0, 0.64, 0.0),  # below, towards: 0.8^2 > 0.5^2
    (0.5, 2.0, 2.25, -3.0),  # below, away: 1.5^2 > 1.2^2
    (3.0, 1.0, 4.0, 4.0),  # above, beyond the return: 2^2 > 0.2^2
    (-1.0, 1.0, 4.0, -4.0),  # below, beyond: 2^2 > 0.2^2
    (1.5, 1.5, 0.09, 0.0),  # right, but out of range: 0.3^2
]


def test_clipped_value_losses_by_hand():
    values, returns, losses, gradients = (double(list(column)) for column in zip(*CLIP_TABLE, strict=True))
    values.requires_grad_()
    clipped = value_losses(values, returns, torch.ones_like(returns), 0.2)
    assert_close(clipped, losses)
    clipped.sum().backward()
    assert_close(values.grad, gradients)


@pytest.mark.parametrize("clip_range", [None, 0.0, 0.2, 1.0, 100.0])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4)])
def test_value_losses_equal_a_plain_loop(shape, clip_range):
    values, returns, old = (normal(*shape, seed=seed) for seed in (8, 9, 10))
    expected = []
    for value, target, before in zip(*(item.flatten().tolist() for item in (values, returns, old)), strict=True):
        loss = (value - target) ** 2
        if clip_range is not None:
            step = value - before
            step = clip_range if step > clip_range else -clip_range if step < -clip_range else step
            loss = max(loss, (before + step - target) ** 2)
        expected.append(loss)
    assert_close(value_losses(values, returns, old, clip_range), double(expected).reshape(shape))


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_only_values_get_a_gradient(clip_range):
    values, returns, old = (normal(4, 5, seed=seed).requires_grad_() for seed in (11, 12, 13))
    value_losses(values, returns, old, clip_range).sum().backward()
    assert values.grad.any()
    assert has_no_gradient(returns)
    assert has_no_gradient(old)


def test_the_gradient_of_a_plain_value_loss():
    values, returns = double([1, -2], requires_grad=True), double([3, 1])
    value_losses(values, returns).sum().backward()
    assert_close(values.grad, double([-4, -6]))


# The KL estimate.


def test_k3_by_hand():
    # d = log ref - log pi = 0, 1, -1, log 2: e - 2 = 0.71828183, 1 / e = 0.36787944, 1 - log 2 = 0.30685282
    logps = double([-2, -2, -2, -2])
    reference = double([-2, -1, -3, -2 + math.log(2)])
    expected = double([0, 0.7182818284590452, 0.36787944117144233, 0.3068528194400547])
    assert_close(k3_kl(logps, reference), expected)


@pytest.mark.parametrize("shape", [(50,), (3, 4), (2, 3, 4)])
def test_k3_equals_the_formula(shape):
    logps, reference = 4 * normal(*shape, seed=14), 4 * normal(*shape, seed=15)
    expected = []
    for policy, other in zip(logps.flatten().tolist(), reference.flatten().tolist(), strict=True):
        difference = other - policy
        assert difference < 20
        expected.append(math.exp(difference) - difference - 1)
    assert_close(k3_kl(logps, reference), double(expected).reshape(shape))


def test_k3_sums_to_the_exact_kl_over_all_outcomes():
    for seed in range(5):
        policy = torch.softmax(2 * normal(6, seed=seed), -1)
        reference = torch.softmax(2 * normal(6, seed=seed + 100), -1)
        expectation = sum((policy * k3_kl(policy.log(), reference.log())).tolist())
        exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
        assert exact > 0.01
        assert_close(double(expectation), double(exact))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_k3_of_equal_logps_is_exactly_zero(dtype):
    logps = torch.cat([-300 * normal(500, seed=16).abs(), double([0, -1e-8, -1e4])]).to(dtype)
    assert torch.equal(k3_kl(logps, logps.clone()), torch.zeros_like(logps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_k3_is_never_negative(dtype):
    logps = -10 * normal(2000, seed=17).abs()
    for exponent in range(-9, 3):
        for size in (10.0**exponent, -(10.0**exponent)):
            reference = logps + size * (1 + normal(2000, seed=18).abs())
            estimate = k3_kl(logps.to(dtype), reference.to(dtype))
            assert (estimate >= 0).all(), size
    # differences that float32 holds in full: e^d - 1 - d is d^2 / 2, far below the rounding of 1 + d
    tiny = torch.logspace(-30, -1, 3000, dtype=torch.float64).to(dtype)
    for difference in (tiny, -tiny):
        assert (k3_kl(torch.zeros_like(difference), difference) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fault_B22_k3_stays_finite_when_policy_and_reference_drift_apart(dtype):
    # in the exponent 119 counts as 20: e^20 - 119 - 1
    logps, reference = torch.tensor([-120.0, -1.0], dtype=dtype), torch.tensor([-1.0, -120.0], dtype=dtype)
    estimate = k3_kl(logps, reference)
    assert estimate.isfinite().all()
    assert_close(estimate, torch.tensor([math.exp(20) - 119 - 1, math.exp(-119) + 119 - 1], dtype=estimate.dtype))
    far = k3_kl(torch.tensor([-1e4], dtype=dtype), torch.tensor([0.0], dtype=dtype))
    assert far.isfinite().all()
    assert (far >= 0).all()


def test_fault_B22_the_exponent_alone_is_clamped_and_from_20_only():
    logps = double([-19.5, -20, -20.5, -50])
    expected = double([math.exp(19.5) - 20.5, math.exp(20) - 21, math.exp(20) - 21.5, math.exp(20) - 51])
    # the values are about 5e8: what tells 21 from 21.5 is a difference of 1e-9 of them
    assert_close(k3_kl(logps, torch.zeros_like(logps)), expected, 1e-13)
