"""Model files that other libraries read: what they raise for damaged ones, as one sentence that names the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pbrl_lightning.utils.errors import ConfigurationError, MissingPackageError, UserError


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Names what could not be read, for whatever reason.

    Args:
        what: Such as ``the model 'runs/a'``.

    Raises:
        ConfigurationError: In the place of what transformers, PEFT and safetensors raise for files that are cut short,
            of an unknown kind or of other shapes than they say. Errors of the operating system and a lack of memory
            stay what they are.
        MissingPackageError: If reading needs a package that is not installed.
    """
    try:
        yield
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MissingPackageError(f"{what} cannot be loaded: {_one_line(error)}") from error
    except Exception as error:
        raise ConfigurationError(f"{what} cannot be loaded: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
