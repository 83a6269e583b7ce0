"""CoMLRL's Weights & Biases section as one of Lightning's loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WANDB_LOGGER: Final = "lightning.pytorch.loggers.WandbLogger"
_MOVED: Final = {"project": ("project",), "name": ("name", "run_name"), "save_dir": ("dir",), "id": ("id",)}
_TO_INIT: Final = ("entity", "tags", "resume")  # WandbLogger passes them on to `wandb.init`
_YES: Final = ("1", "true", "yes", "y", "on")


def wandb_logger(section: Mapping[str, Any], directory: str) -> dict[str, Any] | None:
    """The logger of a section.

    Args:
        section: The options that are given.
        directory: Where W&B's files go if the section does not say.

    Returns:
        ``class_path``, ``init_args`` and ``dict_kwargs`` of a ``WandbLogger``; None if W&B is switched off.

    Example:
        >>> wandb_logger({"project": "p", "entity": "team", "enabled": True}, "runs")["dict_kwargs"]
        {'entity': 'team'}
        >>> wandb_logger({"project": "p", "mode": "disabled"}, "runs") is None
        True
    """
    enabled = section.get("enabled", True)
    if (enabled.strip().lower() not in _YES if isinstance(enabled, str) else not enabled) or (
        section.get("mode") == "disabled"
    ):
        return None
    options: dict[str, Any] = {"save_dir": directory}
    for ours, theirs in _MOVED.items():
        given = [section[name] for name in theirs if section.get(name) is not None]
        if given:
            options[ours] = given[0]
    if section.get("mode") == "offline":
        options["offline"] = True
    to_init = {name: section[name] for name in _TO_INIT if section.get(name) is not None}
    return {"class_path": WANDB_LOGGER, "init_args": options, **({"dict_kwargs": to_init} if to_init else {})}
