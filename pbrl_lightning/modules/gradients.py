"""Norms of gradients, and their clipping, one parameter group at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, algorithm: str | None) -> Tensor | None:
    """Clips the gradients of one parameter group together.

    Args:
        parameters: Of the group; those without a gradient are left out.
        limit: Largest norm or, with ``algorithm="value"``, largest absolute value; None or 0 clips nothing.
        algorithm: ``"norm"``, which is also what None means, or ``"value"``.

    Returns:
        The Euclidean norm of all gradients before clipping, shape ``()``; None if there is no gradient.
    """
    moving = [parameter for parameter in parameters if parameter.grad is not None]
    if not moving:
        return None
    if limit and algorithm != "value":
        return _whole(nn.utils.clip_grad_norm_(moving, limit))
    norm = _whole(nn.utils.get_total_norm([parameter.grad for parameter in moving if parameter.grad is not None]))
    if limit:
        nn.utils.clip_grad_value_(moving, limit)
    return norm


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several groups together, from the norm of each; they may be on several devices."""
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _whole(norm: Tensor) -> Tensor:
    """The norm over all processes where parameters are sharded."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
