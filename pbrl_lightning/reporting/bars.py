"""Progress bars: where they are seen as such, that of a collection, and log lines beside them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from tqdm import tqdm  # type: ignore[import-untyped]


def works_here(bar: ProgressBar | None) -> bool:
    """True if a progress bar of Lightning's is seen as one: on a terminal, or in a notebook that can show it.

    A bar of another class is its owner's affair.
    """
    if bar is None:
        return False
    if type(bar) not in (RichProgressBar, TQDMProgressBar):
        return True
    rich = isinstance(bar, RichProgressBar)
    if in_notebook():
        return not rich or _has_widgets()
    return (sys.stdout if rich else sys.stderr).isatty()


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _has_widgets() -> bool:
    """Rich draws in a notebook by way of ipywidgets alone."""
    return find_spec("ipywidgets") is not None


class CollectionBar:
    """A bar for a collection: in Lightning's own display where it is Rich's, else by tqdm."""

    def __init__(self, trainer: L.Trainer, pl_module: L.LightningModule, total: int) -> None:
        self._tqdm: tqdm[None] | None = None
        lightnings = trainer.progress_bar_callback
        if isinstance(lightnings, RichProgressBar):
            lightnings.on_train_start(trainer, pl_module)  # the first collection comes before; does nothing later
            assert lightnings.progress is not None
            self._progress = lightnings.progress
            self._task = self._progress.add_task("Collecting", total=total)
        else:
            self._tqdm = tqdm(total=total, desc="Collecting", unit="item", leave=False)

    def update(self, done: int) -> None:
        """So many items are done."""
        if self._tqdm is not None:
            self._tqdm.update(done - self._tqdm.n)
        else:
            self._progress.update(self._task, completed=done)
            self._progress.refresh()

    def close(self) -> None:
        """Takes the bar away."""
        if self._tqdm is not None:
            self._tqdm.close()
        else:
            self._progress.remove_task(self._task)
            self._progress.refresh()  # or the next line that is printed would be taken for the bar, and erased


class LogsAboveBar:
    """Prints Lightning's log lines, and those of this library, above a bar of Rich that is in progress.

    The handler of these lines holds the stream that was there before Rich took its place, so that they would be written
    into the bar.
    """

    def __init__(self) -> None:
        self._redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def start(self) -> None:
        """Does nothing where no such bar is in progress, nor the second time."""
        proxied = getattr(sys.stderr, "rich_proxied_file", None)
        for handler in _handlers() if proxied is not None else ():
            if handler.stream is proxied:
                handler.setStream(sys.stderr)
                self._redirected.append((handler, proxied))

    def stop(self) -> None:
        """Puts the streams back."""
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()


def _handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    """What prints the lines of ``rank_zero_info``."""
    logger: logging.Logger | None = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    while logger is not None:
        yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
        logger = logger.parent if logger.propagate else None
