"""Losses as pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pbrl_lightning.utils.errors import NonFiniteLossError


def bradley_terry_losses(winner: Tensor, loser: Tensor) -> Tensor:
    """Negative log-likelihood of each observed preference under Bradley-Terry.

    ``-log sigmoid(r_winner - r_loser)``  (Bradley & Terry 1952; Christiano et al. 2017, eq. 1).

    Args:
        winner: Scores of the preferred joint responses, shape ``(B,)``.
        loser: Scores of the other ones, shape ``(B,)``.

    Returns:
        Nats, shape ``(B,)``.

    Raises:
        ValueError: If the shapes differ or ``B`` is 0.
    """
    if winner.shape != loser.shape or winner.ndim != 1 or len(winner) == 0:
        raise ValueError(
            "`winner` and `loser` must have one shape (B,) with B > 0, "
            f"got {tuple(winner.shape)} and {tuple(loser.shape)}"
        )
    return -logsigmoid(winner - loser)


def bradley_terry_loss(winner: Tensor, loser: Tensor) -> Tensor:
    """Mean of :func:`bradley_terry_losses` over pairs, shape ``()``.

    Example:
        >>> bradley_terry_loss(torch.zeros(3), torch.zeros(3))  # equal scores: log 2
        tensor(0.6931)
    """
    return bradley_terry_losses(winner, loser).mean()


def joint_margins(winner_logps: Tensor, loser_logps: Tensor) -> Tensor:
    """The team's preference margin: ``sum_i log pi_i(winner_i | h_i) - log pi_i(loser_i | h_i)``.

    Args:
        winner_logps: Summed log-probabilities of the winners' responses, shape ``(N, B)``, nats.
        loser_logps: The same of the losers, shape ``(N, B)``.

    Returns:
        Shape ``(B,)``.
    """
    return (winner_logps - loser_logps).sum(0)


def madpo_losses(winner_logps: Tensor, loser_logps: Tensor, beta: float) -> Tensor:
    """MADPO's loss of each pair: ``-log sigmoid(beta * margin)`` with the joint margin of all agents.

    Reference-free direct preference optimisation of a team. The gradient for agent ``i`` flows through its own
    log-probabilities only and is weighted by ``sigmoid(-beta * margin)`` of the whole team; with one agent it is
    reference-free DPO (Rafailov et al. 2023, eq. 7, with a uniform reference).

    Args:
        winner_logps: Shape ``(N, B)``, nats.
        loser_logps: Shape ``(N, B)``, nats.
        beta: The inverse temperature, above 0.

    Returns:
        Nats, shape ``(B,)``.

    Raises:
        ValueError: If the shapes differ, ``B`` is 0 or ``beta`` is not positive.

    Example:
        >>> madpo_losses(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [3.0]]), beta=0.1)  # margin 1 - 1 = 0
        tensor([0.6931])
    """
    if not beta > 0:
        raise ValueError(f"`beta` must be > 0, got {beta}")
    return bradley_terry_losses(beta * winner_logps.sum(0), beta * loser_logps.sum(0))


def madpo_loss(winner_logps: Tensor, loser_logps: Tensor, beta: float = 0.1) -> Tensor:
    """Mean of :func:`madpo_losses` over pairs, shape ``()``.

    Example:
        >>> madpo_loss(torch.zeros(2, 3), torch.zeros(2, 3))
        tensor(0.6931)
    """
    return madpo_losses(winner_logps, loser_logps, beta).mean()


def policy_gradient_losses(logps: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE on whole responses: ``-sum_i A_i * log pi_i(response_i | h_i)``.

    Williams 1992; with a group's mean as baseline MAGRPO (arXiv 2508.04652).

    Each agent's gradient flows through its own log-probability only, so the sum over agents gives every agent the
    gradient of its own loss.

    Args:
        logps: Summed log-probabilities of the responses, shape ``(N, R)``, nats.
        advantages: Shape ``(N, R)``; constants.

    Returns:
        Shape ``(R,)``.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> policy_gradient_losses(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]]))
        tensor([ 1., -2.])
    """
    if logps.shape != advantages.shape or logps.ndim != 2:
        raise ValueError(
            "`logps` and `advantages` must have one shape (N, R), "
            f"got {tuple(logps.shape)} and {tuple(advantages.shape)}"
        )
    return -(advantages.detach() * logps).sum(0)


def value_losses(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Squared error of a critic, clipped where asked for: ``max((V - R)^2, (V_clip - R)^2)``.

    ``V_clip = V_old + clamp(V - V_old, -c, c)``  (PPO's value clipping, Schulman et al. 2017).

    Args:
        values: Any shape, differentiable.
        returns: The same shape; constants.
        old_values: The critic's values at the rollout, the same shape; needed with ``clip_range``.
        clip_range: ``c``; None clips nothing.

    Returns:
        The same shape.

    Raises:
        ValueError: If the shapes differ, or ``old_values`` lacks.

    Example:
        >>> value_losses(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip_range=0.2)  # V_clip = 1.8
        tensor([3.2400])
    """
    for name, other in (("returns", returns), ("old_values", old_values)):
        if other is not None and other.shape != values.shape:
            raise ValueError(
                f"`{name}` must have the shape of `values`, {tuple(values.shape)}, got {tuple(other.shape)}"
            )
    losses = (values - returns.detach()).square()
    if clip_range is None:
        return losses
    if old_values is None:
        raise ValueError("`old_values` must be given with `clip_range`")
    old_values = old_values.detach()
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return torch.maximum(losses, (clipped - returns.detach()).square())


def k3_kl(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """Sampled estimate of KL(policy || reference) of each token: ``exp(d) - d - 1`` with ``d = log ref - log pi``.

    Unbiased for tokens drawn from the policy, and never negative (Schulman, "Approximating KL divergence", k3). In the
    exponent ``d`` is clamped to :data:`KL_EXPONENT_LIMIT`, so that it stays finite.

    Args:
        logps: Log-probabilities of sampled tokens under the policy, any shape, nats.
        reference_logps: The same under the reference.

    Returns:
        Nats, the same shape.

    Example:
        >>> k3_kl(torch.tensor([-1.0, -120.0]), torch.tensor([-1.0, -1.0])).isfinite()
        tensor([True, True])
    """
    difference = reference_logps - logps
    return difference.clamp(max=KL_EXPONENT_LIMIT).expm1() - difference


KL_EXPONENT_LIMIT = 20.0
"""Largest difference of log-probabilities that :func:`k3_kl` exponentiates."""


def require_finite(loss: Tensor, quantities: dict[str, Tensor], where: str) -> None:
    """Stops a step before a non-finite loss reaches the weights.

    Args:
        loss: Shape ``()``.
        quantities: What the loss was made of, by name, to be named if it is the cause.
        where: Which batch.

    Raises:
        NonFiniteLossError: If the loss is NaN or infinite.
    """
    if not torch.isfinite(loss):
        guilty = [name for name, value in quantities.items() if not torch.isfinite(value).all()]
        raise NonFiniteLossError(
            f"the loss of {where} is {loss.item()}; not finite: {', '.join(guilty) or 'the loss alone'}. "
            "No weight was changed by this batch. Lower the learning rate, or train in float32 or bfloat16"
        )
