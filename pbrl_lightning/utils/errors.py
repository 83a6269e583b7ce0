"""Errors that are addressed to the user: their message alone says what to change."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Base of every error that the command line reports as one sentence, without a traceback."""


class ConfigurationError(UserError, ValueError):
    """An option, a file or a combination of them that cannot be used; names what it got and what is allowed."""


class MissingFileError(ConfigurationError, FileNotFoundError):
    """A file or directory that an option names does not exist."""


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
