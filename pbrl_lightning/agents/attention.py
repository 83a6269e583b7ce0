"""Attention of our own in place of a transformers model's: who may have it, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from pbrl_lightning.agents.forward import accepts

T = TypeVar("T")
_EXACT: ContextVar[bool] = ContextVar("exact_attention", default=True)


def may_exchange_attention(decoder: nn.Module, width: int) -> bool:
    """True if nothing in its configuration speaks against an attention of ours for rows of this width."""
    if not isinstance(decoder, PreTrainedModel) or not accepts(decoder, "position_ids"):
        return False
    config: Any = decoder.config.get_text_config()
    window = getattr(config, "sliding_window", None) or width
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and window < width):
        return False
    return getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa")


@contextmanager
def attention_exchanged(model: Any, name: str, told: ContextVar[T], value: T) -> Iterator[None]:
    """Lets the model's layers call the attention registered under ``name``, which reads ``value`` from ``told``."""
    config = model.config.get_text_config()
    earlier, token = config._attn_implementation, told.set(value)
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = earlier
        told.reset(token)


def check_options(options: dict[str, Any], *, masked: bool) -> None:
    """Refuses what an attention of ours does not know.

    Raises:
        ValueError: If a layer passes a mask, attention sinks, a bias of positions or a dropout.
    """
    unknown = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    unknown += ["dropout"] if options.get("dropout") else []
    if unknown or masked:
        raise ValueError(f"attention with {unknown or 'a mask'} cannot be exchanged")


@contextmanager
def precision_of_the_model() -> Iterator[None]:
    """Inside, attention of ours is as precise as the model's own, so that the two can be compared.

    In 16 bits single tokens of a real model end in quite other states after any other rounding.
    """
    token = _EXACT.set(False)
    try:
        yield
    finally:
        _EXACT.reset(token)


def attention_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Attention under a mask, or a causal one; on a CPU exact between products in bfloat16. The dtype of ``v``."""
    device = q.device.type
    if _EXACT.get() and device == "cpu" and (v.dtype == torch.bfloat16 or torch.is_autocast_enabled(device)):
        # Between products in bfloat16: a CPU's backward of this attention takes half as long in float32.
        exact = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            return attention_of(q.to(exact), k.to(exact), v.to(exact), mask, scale, softcap).to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(v.dtype) @ v
