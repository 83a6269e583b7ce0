"""Errors that are addressed to the user: their message alone says what to change."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Base of every error that the command line reports as one sentence, without a traceback."""

    exit_code = 1
    """Exit code of the command, 1 for what went wrong in a run and 2 for what was asked for wrongly."""


class ConfigurationError(UserError, ValueError):
    """An option, a file or a combination of them that cannot be used; names what it got and what is allowed."""

    exit_code = 2


class OptionTypeError(ConfigurationError, TypeError):
    """An option holds an object of the wrong type."""


class MissingFileError(ConfigurationError, FileNotFoundError):
    """A file or directory that an option names does not exist."""


class ExistingFileError(ConfigurationError, FileExistsError):
    """A file that would be written exists already."""


class MissingModelError(ConfigurationError, OSError):
    """A model or its tokenizer is neither in a local directory nor available from the hub."""


class MissingPackageError(ConfigurationError, ImportError):
    """An option needs an optional package that is not installed."""


class CheckpointError(UserError, KeyError):
    """A checkpoint does not belong to this run: weights are missing, or it has others."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's is the repr of its message


class RunError(UserError, RuntimeError):
    """A run cannot continue."""


class NonFiniteLossError(UserError, FloatingPointError):
    """A loss is NaN or infinite."""


class FileError(UserError, OSError):
    """The operating system refused to read or write a file; also an instance of the error that it gave."""


def file_error(error: OSError, *arguments: object) -> OSError:
    """An operating system's error with a message of our own, still caught by ``except PermissionError`` and the like.

    Args:
        error: As the operating system gave it.
        *arguments: A message; or an error number, a message and a file name.

    Example:
        >>> isinstance(file_error(PermissionError(13, "denied"), "`replay_dir` is read-only"), PermissionError)
        True
    """
    kind = type(error)
    if not issubclass(kind, FileError):
        kind = type("FileError", (FileError, kind), {"__module__": __name__})
    return kind(*arguments)


def raise_together(problems: Iterable[str]) -> None:
    """Raises one error that lists all problems; does nothing if there are none.

    Args:
        problems: One sentence each.

    Raises:
        ConfigurationError: If there is at least one problem.

    Example:
        >>> raise_together([])
        >>> raise_together(["`k` must be >= 1, got 0", "`seed` must be >= 0, got -1"])
        Traceback (most recent call last):
        pbrl_lightning.utils.errors.ConfigurationError: `k` must be >= 1, got 0; `seed` must be >= 0, got -1
    """
    if listed := "; ".join(problems):
        raise ConfigurationError(listed)
