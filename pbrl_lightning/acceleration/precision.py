"""Which narrow number types a device multiplies natively, and what ``dtype: auto`` means on it.

A CPU without bfloat16 instructions still accepts bfloat16: oneDNN emulates the products, which takes several times as
long as in float32, and reports the type as supported. So the instruction sets are looked up instead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn import functional as F

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16", "float64")
NARROW = (torch.bfloat16, torch.float16)

CPU_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "svebf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp", "fp16_arith"),
}
"""The CPU features, as Linux and torch name them, that multiply a type; those without an underscore are Arm's."""

_ISA_WITHOUT = {
    "bfloat16": {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"},
    "float16": {"AVX512_CORE_BF16"},
}
_ISA_WITHOUT["float16"] |= _ISA_WITHOUT["bfloat16"]
"""Values of oneDNN's ``ONEDNN_MAX_CPU_ISA`` that switch a type's instructions off."""


@dataclass(frozen=True)
class Support:
    """The narrow types that a device multiplies natively.

    Attributes:
        device: What the device is called in messages.
        reasons: For each native type, what multiplies it.
        missing: Why the other types are not native.
        known: False for a kind of device on which nothing was measured.
    """

    device: str
    reasons: Mapping[str, str]
    missing: str
    known: bool = True

    def is_native(self, dtype: torch.dtype) -> bool:
        """False for a narrow type that is emulated, as far as the device is known."""
        return dtype not in NARROW or not self.known or name_of(dtype) in self.reasons


def cpu_support(features: Collection[str], max_isa: str = "", name: str = "CPU") -> Support:
    """What a CPU multiplies natively.

    Args:
        features: Its instruction sets, named as in ``/proc/cpuinfo`` or ``torch.cpu.get_capabilities()``.
        max_isa: The value of ``ONEDNN_MAX_CPU_ISA``; empty for no limit.
        name: The CPU's name.

    Example:
        >>> sorted(cpu_support({"avx2", "avx512_bf16"}).reasons)
        ['bfloat16']
        >>> sorted(cpu_support({"avx2", "avx512_bf16"}, max_isa="AVX2").reasons)
        []
    """
    reasons = {}
    for dtype, known in CPU_INSTRUCTIONS.items():
        present = [feature for feature in known if feature in features]
        if present and max_isa.upper() not in _ISA_WITHOUT[dtype]:
            reasons[dtype] = ", ".join(present)
    missing = f"has no bfloat16 instructions ({', '.join(CPU_INSTRUCTIONS['bfloat16'])})"
    if max_isa.upper() in _ISA_WITHOUT["bfloat16"]:
        missing = f"has no bfloat16 instructions under ONEDNN_MAX_CPU_ISA={max_isa}"
    return Support(name, reasons, missing)


def cuda_support(capability: tuple[int, int], name: str = "GPU") -> Support:
    """What a GPU multiplies natively: float16 from compute capability 7 on, bfloat16 from 8 on.

    Args:
        capability: Its compute capability.
        name: The GPU's name.

    Example:
        >>> sorted(cuda_support((7, 5)).reasons)
        ['float16']
    """
    version = ".".join(map(str, capability))
    reasons = {
        dtype: f"compute capability {version}"
        for dtype, first in (("bfloat16", 8), ("float16", 7))
        if capability[0] >= first
    }
    return Support(name, reasons, f"has compute capability {version}, below 8")


def device_support(device: torch.device | str) -> Support:
    """What a device of this machine multiplies natively."""
    device = torch.device(device)
    if device.type == "cpu":
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
        features, name = _cpu()
        if sys.platform == "darwin" or not torch.backends.mkldnn.is_available():  # products that oneDNN does not make
            return Support(name, {}, "was not tried without oneDNN", known=False)
        return cpu_support(features, limit, name)
    if device.type == "cuda":
        return cuda_support(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    return Support(device.type, {}, "was not tried", known=False)


@lru_cache(maxsize=1)
def _cpu() -> tuple[frozenset[str], str]:
    """The CPU's instruction sets and its name."""
    features: set[str] = set()
    name = "CPU"
    if hasattr(torch.cpu, "get_capabilities"):
        features |= {feature for feature, present in torch.cpu.get_capabilities().items() if present is True}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            features |= set(value.split())
        elif key.strip() == "model name":
            name = f"CPU ({value.strip()})"
    return frozenset(features), name


def choose_dtype(support: Support) -> tuple[str, str]:
    """What ``dtype: auto`` means on a device, and why.

    Returns:
        ``bfloat16`` or ``float32``, and a reason.

    Example:
        >>> choose_dtype(cpu_support({"avx2"}))[0]
        'float32'
    """
    if "bfloat16" in support.reasons:
        return "bfloat16", f"the {support.device} multiplies it natively ({support.reasons['bfloat16']})"
    return "float32", f"the {support.device} {support.missing}"


def resolve_auto(device: torch.device | str) -> str:
    """Chooses the type for ``dtype: auto`` on a device, and prints the choice with its reason."""
    dtype, reason = choose_dtype(device_support(device))
    announce(dtype, reason)
    return dtype


def announce(dtype: str, reason: str) -> None:
    """Prints what ``dtype: auto`` means in this run."""
    rank_zero_info(f"dtype auto: {dtype}, because {reason}")


def dtype_problem(dtype: str) -> str | None:
    """What is wrong with the value of a ``dtype`` option; None if nothing is."""
    if dtype == AUTO or dtype in DTYPES:
        return None
    return f"`dtype` must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}"


def name_of(dtype: torch.dtype) -> str:
    """A type's name in options, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_emulated(dtype: torch.dtype, device: torch.device | str) -> bool:
    """True for a narrow type that the device does not multiply natively."""
    return dtype in NARROW and not device_support(device).is_native(dtype)


_warned: set[tuple[str, torch.dtype]] = set()


def warn_if_emulated(option: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Warns, once per type and kind of device, that products of a narrow type are emulated and how slow they are.

    Args:
        option: What asked for the type.
        dtype: The type.
        device: Where it is multiplied.
    """
    device = torch.device(device)
    if (device.type, dtype) in _warned or not is_emulated(dtype, device):
        return
    _warned.add((device.type, dtype))
    support, name = device_support(device), name_of(dtype)
    ratio = product_ratio(dtype, device)
    rank_zero_warn(
        f"{option} asks for {name}, which the {support.device} does not multiply natively: a product of 256 x 256 x "
        f"256 took {ratio:.1f} times as long as in float32 just now. `auto` chooses a type that the device is fast in"
    )


def product_ratio(dtype: torch.dtype, device: torch.device | str, size: int = 256) -> float:
    """How many times as long as in float32 a small matrix product takes in another type, measured now."""
    seconds = {}
    for kind in (torch.float32, dtype):
        left, right = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
        runs = [_seconds(left, right) for _ in range(4)]
        seconds[kind] = min(runs[1:])  # the first one prepares the kernel
    return seconds[dtype] / seconds[torch.float32]


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    with torch.no_grad(), torch.autocast(left.device.type, enabled=False):
        started = time.perf_counter()
        F.linear(left, right)
        if left.device.type == "cuda":
            torch.cuda.synchronize(left.device)
        return time.perf_counter() - started
