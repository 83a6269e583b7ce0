"""What a model's own files say that CoMLRL leaves to transformers. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
_NAMES: Final = {"float": "float32", "half": "float16", "double": "float64"}


def dtype_name(value: str) -> str | None:
    """One of our names for a type as transformers takes it; None for any other, such as ``auto``.

    Example:
        >>> dtype_name("torch.bfloat16"), dtype_name("half"), dtype_name("auto")
        ('bfloat16', 'float16', None)
    """
    name = value.strip().removeprefix("torch.")
    name = _NAMES.get(name, name)
    return name if name in DTYPES else None


def checkpoint_dtype(models: list[str]) -> str | None:
    """The type of the weights of all models, from their ``config.json``; None where one is not here or they differ.

    Args:
        models: Local directories or hub ids.
    """
    found = set()
    for model in set(models):
        config = _read(model, "config.json")
        value = config.get("dtype") or config.get("torch_dtype")
        found.add(dtype_name(value) if isinstance(value, str) else None)
    return found.pop() if len(found) == 1 else None


def generation_top_k(model: str) -> int | None:
    """`top_k` in the model's ``generation_config.json``; None if the file is not here or has none.

    Args:
        model: A local directory or a hub id.
    """
    value = _read(model, "generation_config.json").get("top_k")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _read(model: str, name: str) -> dict[str, Any]:
    path = Path(model).expanduser() / name
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(model, name)
        except ValueError:  # not the id of a repository
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
