"""The head of scalar models and attached critics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from pbrl_lightning.agents.adapters import kept_precise
from pbrl_lightning.randomness import counted_generator
from pbrl_lightning.sharding import assign

HEAD_STD = 0.02
"""Standard deviation of a new head's weights, as transformers initialises them."""


class ScalarHead(nn.Module):
    """A linear map to one number without bias, in float32 at least whatever the module around it is cast to."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size, dtype=dtype, device=device))

    @override
    def forward(self, states: Tensor) -> Tensor:
        """Numbers of shape ``(R,)`` for states of shape ``(R, H)``."""
        with torch.autocast(states.device.type, enabled=False):
            return states.to(self.weight.dtype) @ self.weight[0]

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with kept_precise([self.weight]):
            return super()._apply(fn, recurse)

    @torch.no_grad()
    def draw(self, seed: int, round_number: int, kind: int, index: int) -> None:
        """New weights, a function of the four numbers."""
        generator = counted_generator(seed, "init", round_number, item=kind, agent=index)
        assign(self.weight, HEAD_STD * torch.randn(self.weight.shape, generator=generator, dtype=torch.float64))


def head_dtype(like: Tensor) -> torch.dtype:
    """float64 on a float64 backbone, float32 on any other."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
