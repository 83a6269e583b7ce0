"""The limit: the time that a workload's matrix products alone take, at the shapes in which they occur.

Useful floating-point operations of a model of ``P`` parameters in matrices (head included):

- sampling: ``2 P`` per sampled token but the first, whose logits come with the prompt; ``2 (P - head)`` per prompt
  token, a prompt of several candidates counted once, and the head once per prompt;
- training all weights: ``6 P`` per response token that is scored, ``6 (P - head)`` per token without logits: those of
  prompts (one that winner and loser, or several generations, share is counted once) and a reward model's;
- training an adapter on a frozen backbone: ``4`` in the place of ``6``; the adapter's own products are left out.

Attention, norms, embeddings, the softmax, drawing and the optimizer count as nothing: they are what a share of the
limit below 1 is lost to, as is padding. The share is useful FLOP/s over the rate at which the products of the same
shapes run in the same minute: the model's own weights in its own dtype, against random activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, FROZEN, TRAINED = 1, 2, 3
"""Products per weight matrix: forward; the gradient of its input too; and that of the weight."""

SAMPLED_LAYERS = 4
"""Of products with many rows, so many matrices of each shape are timed and stand for the others."""


@dataclass(frozen=True)
class Products:
    """What goes through the model's matrices at once.

    Attributes:
        rows: Tokens through all matrices but the head.
        head_rows: Tokens through the head.
        passes: ``FORWARD``, ``FROZEN`` or ``TRAINED``.
        times: How often.
    """

    rows: int
    head_rows: int
    passes: int = FORWARD
    times: int = 1


def sampling_products(prompts: list[int], candidates: int, new_tokens: int) -> list[Products]:
    """One agent samples candidates for prompts of these lengths."""
    rows = len(prompts) * candidates
    return [Products(sum(prompts), len(prompts)), Products(rows, rows, FORWARD, new_tokens - 1)]


class Matrices:
    """The weight matrices of a causal language model (the head's may be tied to the embeddings).

    Args:
        model: The model.
        dtype: In which the products are made; None for the weights' own.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        head = model.get_output_embeddings()
        self.dtype = dtype or head.weight.dtype
        self.head = head.weight.detach()
        linears = [layer for layer in model.base_model.modules() if isinstance(layer, nn.Linear) and layer is not head]
        adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
        shared = {id(model.get_submodule(name.rsplit(".", 1)[0])) for name in adapters}
        self.body = [layer.weight.detach() for layer in linears if id(layer) not in shared]

    def flops(self, products: list[Products]) -> float:
        """Useful floating-point operations."""
        body = sum(weight.numel() for weight in self.body)
        return float(sum(2 * p.passes * p.times * (p.rows * body + p.head_rows * self.head.numel()) for p in products))

    @torch.no_grad()
    def seconds(self, products: list[Products]) -> float:
        """Seconds of the matrix products alone, measured now."""
        return sum(p.times * (_timed(self.body, p.rows, p.passes, self.dtype) + _head(self, p)) for p in products)


def _head(matrices: Matrices, products: Products) -> float:
    if not products.head_rows:
        return 0.0
    return _timed([matrices.head], products.head_rows, products.passes, matrices.dtype)


def _timed(weights: list[Tensor], rows: int, passes: int, dtype: torch.dtype) -> float:
    """Seconds of the products of all weights with so many rows."""
    shapes: dict[tuple[int, ...], list[Tensor]] = {}
    for weight in weights:
        shapes.setdefault(tuple(weight.shape), []).append(weight)
    # Few rows stream the weights from memory, so all of them are read; many do not.
    kept = {shape: same if rows < 256 else same[:SAMPLED_LAYERS] for shape, same in shapes.items()}
    total = 0.0
    for (width_out, width_in), some in kept.items():
        inputs, gradients = torch.randn(rows, width_in).to(dtype), torch.randn(rows, width_out).to(dtype)
        work = [weight.to(dtype) for weight in some]
        nn.functional.linear(inputs, work[0])
        started = time.perf_counter()
        for weight in work:
            nn.functional.linear(inputs, weight)
            if passes >= FROZEN:
                gradients @ weight
            if passes >= TRAINED:
                gradients.T @ inputs
        total += (time.perf_counter() - started) * len(shapes[width_out, width_in]) / len(some)
    return total


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
