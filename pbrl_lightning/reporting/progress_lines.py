"""Plain lines that say how far a run is, for log files, batch systems and notebooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from pbrl_lightning.timing import current_activity, tokens_sampled

THREAD_NAME: Final = "pbrl-progress"
"""Name of the thread that prints the lines."""


@dataclass(frozen=True)
class Work:
    """A stretch of work in progress.

    Attributes:
        what: Names it: round and phase.
        started: When its rate began to count, in seconds of the clock.
        tokens: Tokens that the process had sampled by then.
        unit: What is counted, in the singular.
        total: How many there are; None if that is unknown.
        done: How many are done.
        first: How many of them were done when it started, by an earlier run.
        most_tokens: Most tokens that all of it can take; None if that is unknown.
    """

    what: str
    started: float
    tokens: int = 0
    unit: str = ""
    total: int | None = None
    done: int = 0
    first: int = 0
    most_tokens: int | None = None

    def describe(self, now: float, tokens: int, activity: str | None = None, detail: str = "") -> str:
        """One line: what, how far, rate, remaining.

        Args:
            now: Seconds of the clock.
            tokens: Tokens that the process has sampled so far.
            activity: What it is doing right now.
            detail: More to say of it.

        Example:
            >>> Work("collecting", started=0.0, unit="item", total=10, done=4).describe(8.0, 0)
            'collecting: 4 of 10 items, 0.5 items/s, 0:00:12 remaining'
        """
        seconds, sampled = now - self.started, tokens - self.tokens
        facts = [] if self.total is None else [f"{self.done} of {self.total} {self.unit}s"]
        moving = self.total is not None and self.first < self.done < self.total
        if moving and self.total is not None and seconds > 0:
            rate = (self.done - self.first) / seconds
            facts += [_rate(rate, self.unit), f"{_duration((self.total - self.done) / rate)} remaining"]
        else:
            facts.append(f"{_duration(seconds)} so far")
        if sampled > 0 and seconds > 0 and not moving and activity in ("sampling", "evaluating"):
            # A first step that takes minutes is seen to go on.
            facts.append(f"{sampled} tokens sampled, {_rate(sampled / seconds, 'token')}")
            if self.most_tokens is not None and self.done == self.first:
                facts.append(f"at most {_duration(max(0, self.most_tokens - sampled) * seconds / sampled)} remaining")
        if detail:
            facts.append(detail)
        return f"{self.what}: {', '.join(facts)}" + (f" (now {activity})" if activity else "")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _rate(per_second: float, unit: str) -> str:
    if per_second < 0.1:
        return f"{1 / per_second:.0f} s per {unit}"
    return f"{per_second:.0f} {unit}s/s" if per_second >= 100 else f"{per_second:.2g} {unit}s/s"


class ProgressLines:
    """Prints what a run is doing, one line per interval, from a thread of its own.

    The thread prints also while a single step takes minutes, and ends by itself once the run is over.

    Args:
        interval: Seconds from one line to the next.
        write: Prints a line.
        running: False once the run is over.
        detail: More to say of the work in progress, such as the last loss.
        clock: Seconds; monotonic.
    """

    def __init__(
        self,
        interval: float,
        write: Callable[[str], object],
        running: Callable[[], bool] = lambda: True,
        detail: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval, self._write, self._running = interval, write, running
        self._detail, self._clock = detail, clock
        self._began = clock()
        self._work = Work("starting", self._began, tokens_sampled())
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; no line comes afterwards."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def begin(
        self, what: str, total: int | None = None, unit: str = "", *, done: int = 0, most_tokens: int | None = None
    ) -> None:
        """Begins a stretch of work, of which ``done`` is done already."""
        work = Work(what, self._clock(), tokens_sampled(), unit, total, done, done, most_tokens)
        self._work = work  # one assignment: the thread sees the old one or the new one

    def advance(self, done: int) -> None:
        """So much of the work is done."""
        self._work = replace(self._work, done=done)

    @property
    def has_sampled(self) -> bool:
        """True if tokens were sampled since the work began."""
        return tokens_sampled() > self._work.tokens

    def line(self) -> str:
        """What is printed now, with the time since the start of the run."""
        now = self._clock()
        described = self._work.describe(now, tokens_sampled(), current_activity(), self._detail())
        return f"[{_duration(now - self._began)}] {described}"

    def _run(self) -> None:
        while not self._stopped.wait(self._interval) and self._running():
            self._write(self.line())
