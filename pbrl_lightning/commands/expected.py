"""Errors on the command line: those that are addressed to the user are one sentence, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from pbrl_lightning.utils.errors import UserError

TRACEBACK = "PBRL_TRACEBACK"
"""The environment variable that asks for tracebacks, if it is set to anything but 0."""

_OF_THE_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Read-only, full, over quota: nothing in the program is wrong, wherever it wanted to write."""

_LONGEST = 800
"""Characters of a sentence, and half as many of what caused it; other libraries' messages may be pages."""


def sentence(error: BaseException) -> str | None:
    """What to print for an error; None if it is shown with its traceback.

    Args:
        error: As it was caught.
    """
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        return None
    if isinstance(error, OSError) and not isinstance(error, UserError) and error.errno in _OF_THE_DISK:
        where = f": {error.filename}" if error.filename is not None else ""
        return f"error: a file could not be written{where} ({error.strerror})\n({TRACEBACK}=1 shows the traceback)"
    if not isinstance(error, UserError):
        return None
    message = f"error: {_short(str(error), _LONGEST)}"
    cause = error.__cause__
    reason = _one_line(str(cause)).rstrip(".!")
    if cause is not None and not isinstance(cause, UserError) and reason not in _one_line(message):
        message += f" ({type(cause).__name__}: {_short(reason, _LONGEST // 2)})"
    return f"{message}\n({TRACEBACK}=1 shows the traceback)"


@contextmanager
def reported() -> Iterator[None]:
    """Ends the program with one sentence and the error's exit code where an error is addressed to the user."""
    try:
        yield
    except (UserError, OSError) as error:
        if (message := sentence(error)) is None:
            raise
        code = error.exit_code if isinstance(error, UserError) else 1
    else:
        return
    sys.stderr.write(f"{message}\n")
    ended = SystemExit(message)
    ended.code = code
    raise ended


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(text: str, longest: int) -> str:
    """A text as it is, or its beginning; the lines of a list of problems stay."""
    if len(text) <= longest:
        return text
    return "\n".join(textwrap.shorten(line, longest, placeholder=" …") for line in text.splitlines()[:20])
