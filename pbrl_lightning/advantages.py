"""Advantages of a rollout: group baselines, critics' baselines, and a normalisation that does not re-centre.

Letters: ``G`` generations of one task item, ``B`` items, ``N`` agents. Functions broadcast over leading dimensions, so
they take one shared reward ``(B, G)`` or, with a reference KL, every agent's own ``(N, B, G)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

RLAlgorithm = Literal["magrpo", "mareinforce", "marloo", "maremax", "maac", "iac"]
GroupAlgorithm = Literal["magrpo", "mareinforce", "marloo", "maremax"]
CriticType = Literal["v", "q"]

GROUP_ALGORITHMS: Final = get_args(GroupAlgorithm)
NEGLIGIBLE: Final = 1e-6
"""A spread under this share of the rewards' magnitude is rounding, and nothing is divided by it."""


def group_advantages(rewards: Tensor, algorithm: GroupAlgorithm, scored: Tensor | None = None) -> Tensor:
    """Advantage of each response against a baseline from its own group.

    ``magrpo``: ``R_g - mean(R)`` · ``mareinforce``: ``R_g`` · ``marloo``: ``R_g - mean of the other G - 1``, which is
    ``magrpo * G / (G - 1)`` · ``maremax``: ``R_g - max(R)``. Equal rewards give exactly 0 in all but ``mareinforce``.

    Args:
        rewards: Shape ``(..., G)``.
        algorithm: Which baseline.
        scored: Shape broadcastable to ``rewards``, bool; False entries have no reward: they enter no baseline and get
            advantage 0, as does, with ``marloo``, a response without another in its group. None: all are scored.

    Returns:
        Shape ``(..., G)``.

    Raises:
        ValueError: If ``algorithm`` is not one of the four.

    Example:
        >>> group_advantages(torch.tensor([[1.0, 2.0, 6.0]]), "magrpo")
        tensor([[-2., -1.,  3.]])
        >>> group_advantages(torch.tensor([[1.0, 2.0, 6.0]]), "maremax")
        tensor([[-5., -4.,  0.]])
    """
    if algorithm not in _BASELINES:
        raise ValueError(f"`algorithm` must be one of {', '.join(_BASELINES)}, got {algorithm!r}")
    kept = _kept(rewards, scored)
    advantages = _BASELINES[algorithm](rewards.masked_fill(~kept, 0.0), kept)
    return advantages.masked_fill(~kept, 0.0)


def critic_advantages(rewards: Tensor, values: Tensor, critic_type: CriticType, scored: Tensor | None = None) -> Tensor:
    """Advantage of each response against a critic.

    ``v``: ``R_g - V``. ``q``: ``Q_g - mean(Q)`` over the group: subtracting an action-dependent Q from the reward
    would make the expected gradient vanish as Q becomes right.

    Args:
        rewards: Shape ``(..., G)``.
        values: The critic's, of each response, broadcastable to ``rewards``.
        critic_type: What ``values`` are.
        scored: As in :func:`group_advantages`.

    Returns:
        Shape ``(..., G)``.

    Example:
        >>> critic_advantages(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 1.5]]), "q")
        tensor([[-0.5000,  0.5000]])
    """
    if critic_type not in get_args(CriticType):
        raise ValueError(f"`critic_type` must be 'v' or 'q', got {critic_type!r}")
    if critic_type == "q":
        return group_advantages(values.expand_as(rewards), "magrpo", scored)
    kept = _kept(rewards, scored)
    return (rewards.masked_fill(~kept, 0.0) - values).masked_fill(~kept, 0.0)


def normalise_by_group(advantages: Tensor, rewards: Tensor, scored: Tensor | None = None) -> Tensor:
    """Divides by the population standard deviation of each group's rewards, without re-centring.

    Re-centring would make all group baselines the same algorithm. Nothing is divided where the deviation is under
    :data:`NEGLIGIBLE` of the group's largest reward, or fewer than two responses are scored.

    Args:
        advantages: Shape ``(..., G)``.
        rewards: Shape ``(..., G)``.
        scored: As in :func:`group_advantages`.

    Returns:
        Shape ``(..., G)``.

    Example:
        >>> normalise_by_group(torch.tensor([[-1.0, 1.0]]), torch.tensor([[2.0, 4.0]]))
        tensor([[-1.,  1.]])
    """
    kept = _kept(rewards, scored)
    return (advantages / _divisor(rewards, rewards, kept, (-1,), at_least=0.0)).masked_fill(~kept, 0.0)


def normalise_over_batch(advantages: Tensor, rewards: Tensor, scored: Tensor | None = None) -> Tensor:
    """Divides a critic's advantages by their population standard deviation over the global rollout batch.

    As above without re-centring, so by no less than the size of their mean: once a team has solved its task, what is
    left is a small common offset of the critic with almost no spread, which would become a huge advantage.

    Args:
        advantages: Shape ``(..., B, G)``.
        rewards: Shape ``(..., B, G)``; their magnitude says which deviation is rounding.
        scored: As in :func:`group_advantages`.

    Returns:
        Shape ``(..., B, G)``.

    Example:
        >>> normalise_over_batch(torch.tensor([[0.1, 0.1001]]), torch.tensor([[1.0, 1.0]])).round(decimals=2)
        tensor([[1., 1.]])
    """
    kept, dims = _kept(rewards, scored), (-2, -1)
    mean = advantages.masked_fill(~kept, 0.0).sum(dims, keepdim=True) / kept.sum(dims, keepdim=True).clamp(min=1)
    divisor = _divisor(advantages, rewards, kept, dims, at_least=mean.abs())
    return (advantages / divisor).masked_fill(~kept, 0.0)


def _kept(rewards: Tensor, scored: Tensor | None) -> Tensor:
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    return everyone if scored is None else everyone & scored


def _centred(rewards: Tensor, kept: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Rewards minus their mean over the kept ones; exactly 0 where these are equal."""
    # Measured from one of their own, equal numbers are exactly 0, and so is their mean.
    shifted = rewards - rewards.masked_fill(~kept, -torch.inf).amax(dims, keepdim=True)
    shifted = shifted.masked_fill(~kept, 0.0)
    return shifted - shifted.sum(dims, keepdim=True) / kept.sum(dims, keepdim=True).clamp(min=1)


def _leave_one_out(rewards: Tensor, kept: Tensor) -> Tensor:
    count = kept.sum(-1, keepdim=True).to(rewards.dtype)
    factor = torch.where(count > 1, count / (count - 1), torch.zeros_like(count))
    return _centred(rewards, kept) * factor


def _below_maximum(rewards: Tensor, kept: Tensor) -> Tensor:
    return rewards - rewards.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)


_BASELINES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "magrpo": _centred,
    "mareinforce": lambda rewards, _kept: rewards,
    "marloo": _leave_one_out,
    "maremax": _below_maximum,
}


def _divisor(
    spread_of: Tensor, rewards: Tensor, kept: Tensor, dims: tuple[int, ...], at_least: Tensor | float
) -> Tensor:
    count = kept.sum(dims, keepdim=True)
    centred = _centred(spread_of, kept, dims).masked_fill(~kept, 0.0)
    deviation = (centred.square().sum(dims, keepdim=True) / count.clamp(min=1)).sqrt()
    magnitude = rewards.masked_fill(~kept, 0.0).abs().amax(dims, keepdim=True)
    divided = (deviation > NEGLIGIBLE * magnitude) & (count > 1)
    return torch.where(divided, deviation.clamp(min=at_least), torch.ones_like(deviation))
