"""The head of scalar models and attached critics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

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


class ClassifierHead:
    """A head that is more than one linear map, such as BERT's: it lies in a sequence classifier, whose forward runs it.

    Args:
        classifier: The sequence classifier.
    """

    def __init__(self, classifier: Any) -> None:
        backbone = {id(module) for module in classifier.base_model.modules()}
        self._layers = [module for module in classifier.children() if id(module) not in backbone]

    def parameters(self) -> list[nn.Parameter]:
        """What is trained with it."""
        return [parameter for layer in self._layers for parameter in layer.parameters()]

    @torch.no_grad()
    def draw(self, seed: int, round_number: int, kind: int, index: int) -> None:
        """New matrices, a function of the four numbers; biases are zero, scales of norms one."""
        generator = counted_generator(seed, "init", round_number, item=kind, agent=index)
        for layer in self._layers:
            for name, parameter in layer.named_parameters():
                if parameter.dim() > 1:
                    drawn = HEAD_STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                else:
                    drawn = torch.full(parameter.shape, float(not name.endswith("bias")), dtype=torch.float64)
                assign(parameter, drawn)


def head_dtype(like: Tensor) -> torch.dtype:
    """float64 on a float64 backbone, float32 on any other."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
