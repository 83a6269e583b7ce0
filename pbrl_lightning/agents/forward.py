"""The two halves of a causal LM's forward, each usable alone: hidden states, and logits of chosen positions.

Logits are the largest tensor of language-model training, and most positions need none. The head is always
applied by the model's own ``forward``, so that scaling and soft-capping of logits stay the model's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pbrl_lightning.utils.errors import ConfigurationError

ContextPair = tuple[AbstractContextManager[None], AbstractContextManager[None]]


@dataclass(frozen=True)
class Reading:
    """How a model is read so that it says what its own plain forward says; found by the self-check.

    Attributes:
        padded: A batch may be padded anywhere, with a mask and positions; otherwise it is padded on the right, and the
            model gets token ids alone: no token sees what comes after it.
        split: Logits may be computed from chosen hidden states; otherwise they are computed for all tokens.
        decoder: Name of the module below the head, if it is not the model's ``base_model``.
        sampling: How responses are decoded: ``batched`` in one padded batch, ``own_cache`` prompt by prompt with the
            cache and the inputs that ``generate`` would use, ``own_positions`` the same without positions,
            ``recomputed`` prompt by prompt without a cache.
    """

    padded: bool = True
    split: bool = True
    decoder: str | None = None
    sampling: Literal["batched", "own_cache", "own_positions", "recomputed"] = "batched"


READINGS: WeakKeyDictionary[nn.Module, Reading] = WeakKeyDictionary()
"""Of the models that were tried, and of their decoders."""


def reading_of(module: nn.Module) -> Reading:
    """How a model, or a decoder, is read; one that was not tried is taken to be like most."""
    return READINGS.get(module, Reading())


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The part of a causal LM below its head, or None if the model does not show one that may be used."""
    reading = reading_of(model)
    if not reading.split:
        return None
    if reading.decoder is not None:
        return model.get_submodule(reading.decoder)
    return base_decoder_of(model)


def base_decoder_of(model: nn.Module) -> nn.Module | None:
    """What transformers calls the model's ``base_model``, or None if there is none."""
    decoder = getattr(model, "base_model", None)
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


def accepts(model: nn.Module, argument: str) -> bool:
    """True if the model's forward names this argument."""
    return argument in _parameters_of(type(model).forward)


@functools.cache  # asked for at every step of decoding
def _parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def without_extras(model: nn.Module) -> dict[str, Any]:
    """Options of a forward that needs no loss of a mixture's router, which asks for masks of its own."""
    return {"output_router_logits": False} if accepts(model, "output_router_logits") else {}


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module has another ``forward``."""
    earlier = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if earlier is None:
            del module.forward
        else:
            module.forward = earlier


@contextmanager
def checkpointed_layers(model: nn.Module, context_fn: Callable[[], ContextPair]) -> Iterator[None]:
    """Activation checkpointing of every decoder layer called inside, in train and in eval mode alike.

    Transformers' own switch works in train mode only, while our policies stay in eval mode (no dropout).

    Args:
        model: A causal LM.
        context_fn: Gives the contexts of the forward and of its recomputation; the latter must activate the same
            adapter again, because the backward of all agents comes after the last agent's forward.

    Raises:
        ConfigurationError: If the model has no layers that can be checkpointed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigurationError(
            f"{type(model).__name__} has no checkpointable layers; set gradient_checkpointing=False"
        )
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    originals = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(run, layer.forward)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            if original is None:
                del layer.forward
            else:
                layer.forward = original


class SplitForward:
    """One forward pass of a causal LM whose logits are computed only where they are asked for.

    Args:
        model: A causal LM of transformers, or any module that maps ``input_ids`` to an output with ``logits``.
        **inputs: What the model's forward takes.
    """

    def __init__(self, model: nn.Module, **inputs: Any) -> None:
        self._model = model
        self._decoder = decoder_of(model)
        reader = self._decoder or model
        self._output = reader(**inputs, **without_extras(reader))
        # Without a visible decoder the full logits stand in for the hidden states, and the head for nothing.
        self.states: Tensor = self._output.logits if self._decoder is None else self._output[0]

    def logits(self, states: Tensor) -> Tensor:
        """Logits of chosen rows of ``states``.

        Args:
            states: Shape ``(M, H)``.

        Returns:
            Shape ``(M, V)``, in the model's dtype.
        """
        if self._decoder is None:
            return states
        output = dataclasses.replace(self._output, last_hidden_state=states[None])
        dummy = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        options = without_extras(self._model)
        with forward_replaced(self._decoder, lambda *_args, **_kwargs: output):
            logits: Tensor = self._model(input_ids=dummy, use_cache=False, **options).logits
            return logits.squeeze(0)  # whose backward, unlike that of an index, is a view
