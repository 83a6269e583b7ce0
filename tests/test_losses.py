"""Losses against hand-worked numbers and plain loops."""

import math

import pytest
import torch

from pbrl_lightning.losses import bradley_terry_loss, joint_margins, madpo_loss, madpo_losses, require_finite


def test_bradley_terry_by_hand():
    # -log sigmoid(1) = log(1 + e^-1) = 0.31326169, -log sigmoid(-2) = log(1 + e^2) = 2.12692801
    winner = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loser = torch.tensor([0.0, 2.0], dtype=torch.float64)
    assert math.isclose(bradley_terry_loss(winner, loser).item(), (0.3132616875182228 + 2.1269280110429727) / 2)


def test_madpo_by_hand():
    # two agents, one pair: margins 2 - 1 = 1 and -3 - (-1) = -2, together -1; beta 0.5: -log sigmoid(-0.5)
    winner = torch.tensor([[2.0], [-3.0]], dtype=torch.float64)
    loser = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert joint_margins(winner, loser).tolist() == [-1.0]
    assert math.isclose(madpo_loss(winner, loser, 0.5).item(), math.log(1 + math.exp(0.5)), rel_tol=1e-12)


def test_madpo_equals_a_plain_loop():
    generator = torch.Generator().manual_seed(1)
    winner = 20 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    loser = 20 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    expected = []
    for pair in range(5):
        margin = 0.0
        for agent in range(3):
            margin += winner[agent, pair].item() - loser[agent, pair].item()
        expected.append(math.log1p(math.exp(-0.1 * margin)))
    torch.testing.assert_close(madpo_losses(winner, loser, 0.1), torch.tensor(expected, dtype=torch.float64))
    assert math.isclose(madpo_loss(winner, loser).item(), sum(expected) / 5, rel_tol=1e-12)


def test_extreme_margins_stay_finite():
    winner = torch.tensor([[1e4, -1e4]])
    loss = madpo_losses(winner, -winner, 1.0)
    assert loss[0] == 0
    assert loss[1] == 2e4


def test_bad_input():
    with pytest.raises(ValueError, match=r"one shape \(B,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="B > 0"):
        bradley_terry_loss(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="`beta` must be > 0, got 0"):
        madpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), 0)


def test_a_non_finite_loss_names_its_cause():
    with pytest.raises(FloatingPointError, match="batch 3 is nan; not finite: agent 1's"):
        require_finite(
            torch.tensor(float("nan")), {"agent 0's": torch.zeros(1), "agent 1's": torch.tensor([math.inf])}, "batch 3"
        )
