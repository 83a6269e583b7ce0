"""Figures, histograms and tables to whatever loggers a run has. To be called by the first process."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import CSVLogger

from pbrl_lightning.figures import pixels, png
from pbrl_lightning.samples import Cell, wrapped_table
from pbrl_lightning.timing import spending

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@spending("saving")
def log_table(trainer: L.Trainer, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
    """A table: as text to TensorBoard, as a table to Weights & Biases, as a file of `tables` to a CSV logger."""
    step = trainer.global_step
    for logger in _loggers(trainer):
        if hasattr(logger, "log_table"):
            logger.log_table(name, columns=columns, data=rows, step=step)
        elif isinstance(logger, CSVLogger):
            _append(_place(logger, "tables", name, ".csv"), ["step", *columns], [[step, *row] for row in rows])
        elif (add_text := _experiments(logger, "add_text")) is not None:
            add_text(name, wrapped_table(columns, rows), step)


@spending("saving")
def log_figure(trainer: L.Trainer, name: str, draw: Callable[[], Figure]) -> None:
    """A figure, drawn only if a logger takes it: as an image, or as a file of `figures` for a CSV logger."""
    step, figure = trainer.global_step, None
    for logger in _loggers(trainer):
        add_image = _experiments(logger, "add_image")
        if not (hasattr(logger, "log_image") or isinstance(logger, CSVLogger) or add_image is not None):
            continue
        figure = figure or draw()
        if hasattr(logger, "log_image"):
            logger.log_image(name, images=[pixels(figure)], step=step)
        elif isinstance(logger, CSVLogger):
            path = _place(logger, "figures", name.removeprefix("figures/"), f"_{step:06d}.png")
            path.write_bytes(png(figure))
        elif add_image is not None:
            add_image(name, pixels(figure), step, dataformats="HWC")


@spending("saving")
def log_histogram(trainer: L.Trainer, name: str, values: Sequence[float]) -> None:
    """A histogram, to loggers that have them; nothing without values."""
    if not len(values):
        return
    for logger in _loggers(trainer):
        if hasattr(logger, "log_table") and not isinstance(logger, CSVLogger):
            _log_wandb_histogram(logger, name, values, trainer.global_step)
        elif (add_histogram := _experiments(logger, "add_histogram")) is not None:
            add_histogram(name, np.asarray(values, dtype=np.float64), trainer.global_step)


def _loggers(trainer: L.Trainer) -> list[Any]:
    # The stand-in of a trial run has every method, and no files.
    return [] if trainer.fast_dev_run else list(trainer.loggers)  # type: ignore[attr-defined]


def _experiments(logger: Any, method: str) -> Callable[..., Any] | None:
    return getattr(getattr(logger, "experiment", None), method, None)


def _log_wandb_histogram(logger: Any, name: str, values: Sequence[float], step: int) -> None:
    import wandb

    logger.log_metrics({name: wandb.Histogram(list(values))}, step=step)


def _place(logger: CSVLogger, kind: str, name: str, ending: str) -> Path:
    directory = Path(logger.log_dir) / kind
    directory.mkdir(parents=True, exist_ok=True)
    return directory / (name.replace("/", "_") + ending)


def _inert(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: an apostrophe before a text that begins as one."""
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip(" ").startswith((*"=+-@\t\r\n",)) else cell


def _append(path: Path, columns: list[str], rows: list[list[Any]]) -> None:
    new = not path.exists()
    safe = [[_inert(cell) for cell in row] for row in rows]
    # A model may write halves of characters, which UTF-8 has no form for.
    with path.open("a", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file)
        writer.writerows([columns, *safe] if new else safe)
