"""Matrix products of sampling and scoring: weights are brought into the kernel's order once, not in every product.

A step of sampling multiplies few rows with every weight of the model. On a CPU oneDNN does that faster from a copy of
the weights in its blocked order, and in bfloat16 faster still, while all else stays in the model's precision.

A CPU that does not multiply the model's narrow type natively multiplies float32 copies of the narrow numbers and rounds
the products, which is several times faster than emulation. That pays for scoring too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from pbrl_lightning.acceleration.precision import is_emulated, warn_if_emulated

SMALLEST = 2**15
"""Numbers in the smallest matrix that is worth a copy."""

_READY_DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def ready_products(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, the linear layers of a model work on ready copies of their weights, which must not change meanwhile.

    On a CPU a second copy of the weights is held, as long as it is less than a quarter of the machine's memory; of a
    type that the CPU emulates, a copy in float32. Larger models and other devices multiply as always, under autocast if
    another precision is asked for.

    Args:
        model: Any model; what is not exactly ``nn.Linear``, or in float64, is left as it is.
        dtype: In which the products are made: ``bfloat16`` or ``float16``. None for the model's own.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    _warn_if_emulated(model, dtype)
    with ExitStack() as stack:
        if devices == {"cpu"}:
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            layers = [layer for layer in model.modules() if type(layer) is nn.Linear and _worth_it(layer, dtype)]
            size = sum(layer.weight.numel() * _held(dtype or layer.weight.dtype).itemsize for layer in layers)
            if size >= device_memory(torch.device("cpu")) / 4:
                if dtype is not None:
                    stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=False))
            else:
                for layer in layers:
                    # Logits of some 20 in bfloat16 are rounded to an eighth: the head keeps its precision.
                    stack.enter_context(_ready_layer(layer, None if layer is head else dtype))
        elif dtype is not None:
            for device in devices:
                stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def scoring_products(model: nn.Module) -> AbstractContextManager[None]:
    """Ready products for a forward without gradients, where a CPU emulates the model's type; else as always.

    Args:
        model: What scores; its weights must not change meanwhile.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not is_emulated(parameter.dtype, parameter.device):
        return nullcontext()
    if torch.is_grad_enabled() or parameter.device.type != "cpu":
        _warn_if_emulated(model, None)
        return nullcontext()
    return ready_products(model)


def _warn_if_emulated(model: nn.Module, dtype: torch.dtype | None) -> None:
    parameter = next(model.parameters(), None)
    if parameter is not None and dtype is not None:
        warn_if_emulated("`sampling.dtype`", dtype, parameter.device)
    elif parameter is not None:
        warn_if_emulated("`dtype` of the models", parameter.dtype, parameter.device)


def device_memory(device: torch.device) -> int:
    """Bytes of a device's memory; its size, not what is free now, so that the same run does the same again."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _worth_it(layer: nn.Linear, dtype: torch.dtype | None) -> bool:
    plain = type(layer.weight) is nn.Parameter and "forward" not in layer.__dict__
    own = layer.weight.dtype
    wanted = dtype is not None or (own in _READY_DTYPES and _has_kernels()) or is_emulated(own, "cpu")
    return plain and wanted and layer.weight.numel() >= SMALLEST


def _has_kernels() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def _ready_layer(layer: nn.Linear, dtype: torch.dtype | None) -> Iterator[None]:
    wanted = dtype or layer.weight.dtype
    held = _held(wanted)
    weight = layer.weight.detach().to(wanted).to(held)
    bias = None if layer.bias is None else layer.bias.detach().to(wanted).to(held)
    product: Callable[..., Tensor] = partial(F.linear, weight=weight, bias=bias)
    if held in _READY_DTYPES and _has_kernels() and (held == torch.float32 or _has_bfloat16()):
        ready: Any = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        product = partial(_ready_linear, ready=ready, bias=bias)
    if held != wanted:
        product = partial(_converted, product=product, dtype=held)
    layer.forward = partial(_converted, product=product, dtype=wanted)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def _held(wanted: torch.dtype) -> torch.dtype:
    """The type of the copies that make a CPU's products in a type."""
    return torch.float32 if is_emulated(wanted, "cpu") else wanted


def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _ready_linear(inputs: Tensor, ready: Any, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, ready, bias, "none", [], "")
    return product


def _converted(inputs: Tensor, product: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
    return product(inputs.to(dtype)).to(inputs.dtype)
