"""Errors of constructors on the command line: the one that was raised, not what jsonargparse says around it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pbrl_lightning.commands.parsing import first_user_error
from pbrl_lightning.utils.errors import ConfigurationError, UserError


class Instantiation:
    """Context in which a parser's classes are made; an error in it becomes one that is addressed to the user.

    jsonargparse tries all branches of a type and reports all of their errors with all values. What constructors raise
    is kept here.

    Args:
        parser: Of the whole command line.
    """

    def __init__(self, parser: LightningArgumentParser) -> None:
        self._refused: list[UserError] = []
        parser.add_instantiator(self._make, object, subclasses=True)

    def __enter__(self) -> Instantiation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        found = first_user_error(error) or next((one for one in self._refused if str(one) in str(error)), None)
        if found is not None:
            raise found from found.__cause__
        raise _of_trainer(error) from error

    def _make(self, kind: type, *args: Any, **options: Any) -> Any:
        try:
            return kind(*args, **options)
        except Exception as error:
            if isinstance(error, UserError):
                refused: UserError = error
            else:
                refused = ConfigurationError(f"`{kind.__name__}` cannot be created: {type(error).__name__}: {error}")
                refused.__cause__ = error
            self._refused.append(refused)
            raise refused from refused.__cause__


def _of_trainer(error: Exception) -> ConfigurationError:
    """What Lightning's Trainer, or another class, says of its options."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    message = " ".join(str(error).split())
    if "gpu" in message.lower() or "accelerator" in message.lower():
        names = ["auto"] + [name for name in AcceleratorRegistry.available_accelerators() if _is_there(name)]
        return ConfigurationError(
            f"{message.rstrip('!.')}; this machine offers `--trainer.accelerator` {', '.join(names)}"
        )
    kind = "" if isinstance(error, MisconfigurationException) else f" ({type(error).__name__})"
    return ConfigurationError(f"the run cannot be set up{kind}: {message}")


def _is_there(name: str) -> bool:
    return bool(AcceleratorRegistry[name]["accelerator"].is_available())
