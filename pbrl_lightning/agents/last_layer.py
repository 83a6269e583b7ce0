"""The last layer for the tokens whose states are wanted only: the others are no more than its keys and values.

Of a long prompt nothing is predicted, and a reward is read from a text's last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from pbrl_lightning.agents.attention import attention_exchanged, attention_of, check_options
from pbrl_lightning.agents.forward import forward_replaced

_TELL, _HEAR = "pbrl_last_keys", "pbrl_last_tokens"


@dataclass(frozen=True)
class Hearing:
    """Wanted tokens that see the same keys.

    Attributes:
        count: Of the tokens.
        keys: Places of the keys, shape ``(K,)``.
        mask: Which of them each token sees, shape ``(count, K)``, bool.
    """

    count: int
    keys: Tensor
    mask: Tensor


class _ToldError(Exception):
    """The keys and values are known: the rest of the layer is not wanted."""


_TOLD: ContextVar[list[Tensor]] = ContextVar("last_layer_told")
_HEARD: ContextVar[tuple[list[Tensor], list[Hearing]]] = ContextVar("last_layer_heard")


def last_layer_of(decoder: nn.Module) -> nn.Module | None:
    """The decoder's last layer, or None if it does not show one."""
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    return layers[-1] if layers else None


@contextmanager
def last_layer_narrowed(decoder: nn.Module, kept: Tensor, hearings: list[Hearing]) -> Iterator[None]:
    """Inside, the decoder gives states of the kept tokens only: shape ``(1, M, H)``.

    The layer runs twice: as far as its attention on all tokens, which gives keys and values, and on the kept ones.

    Args:
        decoder: A decoder whose attention is ours.
        kept: Places of the tokens in the one row of ``T``, ascending, shape ``(M,)``.
        hearings: Of the kept tokens, in their order.
    """
    layer = last_layer_of(decoder)
    assert layer is not None
    run = layer.forward

    def of_kept(value: Any, length: int) -> Any:
        """Positions, and what is made of them, have the tokens in their second dimension, or their only one."""
        if isinstance(value, tuple):
            return tuple(of_kept(entry, length) for entry in value)
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        along = min(1, value.ndim - 1)
        return value.index_select(along, kept) if value.shape[along] == length else value

    def narrow(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        told: list[Tensor] = []
        # The exception holds no tensors: its frames would keep them as long as it is known to anybody.
        with suppress(_ToldError), attention_exchanged(decoder, _TELL, _TOLD, told):
            run(hidden_states, *args, **kwargs)
        if not told:
            raise ValueError("the last layer has no attention of ours")
        given, named = of_kept(args, hidden_states.shape[1]), of_kept(tuple(kwargs.values()), hidden_states.shape[1])
        with attention_exchanged(decoder, _HEAR, _HEARD, (told, hearings)):
            return run(hidden_states.index_select(1, kept), *given, **dict(zip(kwargs, named, strict=True)))

    with forward_replaced(layer, narrow):
        yield


def _tell(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    del module, query, args, kwargs
    _TOLD.get().extend([key, value])
    raise _ToldError


def _hear(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the kept tokens, shape ``(1, H, M, D)``, to the keys of all."""
    del module, key, value
    check_options(kwargs, masked=attention_mask is not None)
    told, hearings = _HEARD.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heard = []
    for asked, hearing in zip(query.split([some.count for some in hearings], 2), hearings, strict=True):
        keys, values = (states.index_select(2, hearing.keys) for states in told)
        heard.append(attention_of(asked, keys, values, hearing.mask, scale, softcap).transpose(1, 2))
    return torch.cat(heard, 1), None


AttentionInterface.register(_TELL, _tell)
AttentionInterface.register(_HEAR, _hear)
