"""Which errors a user is told in a sentence, without a traceback."""

from __future__ import annotations

import dis
import os
from pathlib import Path
from types import TracebackType

from pbrl_lightning.preferences.round_files import ForeignReplayError
from pbrl_lightning.remote.errors import ApiError

TRACEBACK = "PBRL_TRACEBACK"
"""The environment variable that asks for tracebacks, if it is set to anything but 0."""

_KINDS = (ValueError, OSError, ImportError, ForeignReplayError, ApiError)
_PACKAGE = Path(__file__).parent.parent
_OURS = (_PACKAGE, (_PACKAGE / "callbacks").resolve())


def sentence(error: BaseException) -> str | None:
    """What to tell of an error that one of the library's own checks raised; None for all others.

    A check says ``raise`` in a file of this package. An error that comes out of another library, of Python itself or of
    the user's own code is not expected, and neither is any while ``PBRL_TRACEBACK`` is set.

    Args:
        error: As it was caught.
    """
    if os.environ.get(TRACEBACK, "0") not in ("", "0") or not isinstance(error, _KINDS):
        return None
    if error.__traceback__ is None or not _was_raised_here(error.__traceback__):
        return None
    said = f"error: {error}"
    cause = error.__cause__
    if cause is not None and str(cause) not in said:
        said += f" ({type(cause).__name__}: {cause})"
    return f"{said}\n({TRACEBACK}=1 shows where it was found)"


def _was_raised_here(traceback: TracebackType) -> bool:
    """True if the innermost frame is one of this package's, and stands at a ``raise``."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    here = Path(code.co_filename)
    if not any(folder in here.parents for folder in _OURS):
        return False
    return dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
