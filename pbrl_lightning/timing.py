"""What a process spends its time on, by activity."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, get_args

Activity = Literal["sampling", "scoring", "tokenising", "training", "evaluating", "saving"]
ACTIVITIES: Final[tuple[Activity, ...]] = get_args(Activity)

_seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)
_doing: list[Activity] = []
_since = 0.0
_tokens = 0


def _account() -> None:
    """Counts the time since the last change for what was being done."""
    global _since
    now = time.monotonic()
    if _doing:
        _seconds[_doing[-1]] += now - _since
    _since = now


@contextmanager
def spending(activity: Activity) -> Iterator[None]:
    """Counts the time inside as this activity's, and not as that of one around it; an evaluation keeps all of its own.

    Also a decorator. Of the main thread alone: what others do is part of what it does or waits for meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _account()
    _doing.append("evaluating" if "evaluating" in _doing else activity)
    try:
        yield
    finally:
        _account()
        _doing.pop()


class Stopwatch:
    """Counts time from one hook to another, without what other activities count inside."""

    def __init__(self) -> None:
        self._started, self._counted = time.monotonic(), _counted()

    def stop(self, activity: Activity) -> float:
        """Counts the rest of the time since the start for this activity, and returns its seconds."""
        seconds = time.monotonic() - self._started - (_counted() - self._counted)
        _seconds[activity] += seconds
        return seconds


def _counted() -> float:
    _account()
    return sum(_seconds.values())


def take_seconds() -> dict[Activity, float]:
    """Seconds of each activity since the last call."""
    _account()
    taken = dict(_seconds)
    _seconds.update(dict.fromkeys(ACTIVITIES, 0.0))
    return taken


def current_activity() -> Activity | None:
    """What the main thread is doing; of the activities above, None if it is none of them."""
    doing = _doing[-1:]  # one operation: other threads ask
    return doing[0] if doing else None


def count_sampled_tokens(count: int) -> None:
    """Counts tokens as they are sampled, for whoever shows the progress."""
    global _tokens
    _tokens += count  # models that sample at the same time may lose a few: nothing is computed from it


def tokens_sampled() -> int:
    """Tokens that this process has sampled so far."""
    return _tokens


def pending_seconds() -> dict[Activity, float]:
    """Seconds of each activity since the last call of :func:`take_seconds`, which takes them still."""
    _account()
    return dict(_seconds)


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    Example:
        >>> duration(3.21), duration(125), duration(7380)
        ('3.2 s', '2 min 5 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
