"""Leaves out what Lightning says of every run of this library and of nothing that a user could change."""

from __future__ import annotations

import logging
import warnings
from typing import Final

import lightning as L
from lightning.pytorch.callbacks import ModelSummary, ProgressBar, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count

from pbrl_lightning.reporting.bars import works_here

NOISE: Final[tuple[tuple[str, type[Warning]], ...]] = (
    # Models are in eval mode in training: dropout is off for good.
    (r"Found \d+ module\(s\) in eval mode at the start of training", UserWarning),
    # Loaders sample and tokenize in the process that trains; there are no workers to add.
    (r"The '\w+' does not have many workers", UserWarning),
    # A collection without training is a validation without batches.
    (r"Total length of `\w+` across ranks is zero", UserWarning),
    # A resumed run goes back to its directory; file names are versioned.
    (r"Checkpoint directory .* exists and is not empty", UserWarning),
    # Lightning 2.6.6 on torch 2.13, once per epoch.
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
)
"""Message and category of each warning that is left out; of Lightning's own modules only."""

_ADVERTISEMENT = "Tip: For seamless cloud"


class _WithoutAdvertisements(logging.Filter):
    """Leaves out Lightning's two tips to install its cloud packages, for which it has no switch."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for one of the tips."""
        return _ADVERTISEMENT not in str(record.msg)


def drop_advertisements() -> None:
    """Leaves the tips out of everything that this process prints: the first comes with the Trainer, before any run."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not any(isinstance(known, _WithoutAdvertisements) for known in logger.filters):
        logger.addFilter(_WithoutAdvertisements())


class QuietLightning:
    """Leaves out the warnings above and the table of modules during a run, and bars where no terminal shows them."""

    def __init__(self) -> None:
        self._warnings: warnings.catch_warnings[None] | None = None
        self._disabled: ProgressBar | None = None

    def start(self, trainer: L.Trainer, *, replace_bar: bool) -> bool:
        """Begins to leave things out.

        Args:
            trainer: The run's.
            replace_bar: Whether Lightning's progress bar is switched off where it would only write control characters.

        Returns:
            True if a table of modules was left out.
        """
        self.stop()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        for message, category in NOISE:
            warnings.filterwarnings("ignore", message=message, category=category, module=r"lightning\.")
        bar = trainer.progress_bar_callback
        if replace_bar and bar is not None and not works_here(bar):
            bar.disable()
            self._disabled = bar
        return _without_summary(trainer)

    def stop(self) -> None:
        """Puts everything back."""
        if self._warnings is not None:
            self._warnings.__exit__(None, None, None)
            self._warnings = None
        if self._disabled is not None:
            self._disabled.enable()
            self._disabled = None


def _without_summary(trainer: L.Trainer) -> bool:
    """Takes the summary that Lightning adds by itself out of the callbacks; one that goes deeper was asked for."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    automatic = [c for c in callbacks if type(c) in (ModelSummary, RichModelSummary) and c._max_depth == 1]  # type: ignore[attr-defined]
    # A list of its own: Lightning is going through the other one.
    trainer.callbacks = [callback for callback in callbacks if callback not in automatic]  # type: ignore[attr-defined]
    return bool(automatic)


def summary_line(module: L.LightningModule) -> str:
    """What a run trains, in one line."""
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    count = sum(parameter.numel() for parameter in parameters)
    team = getattr(module, "team", None)
    agents = f"{team.num_agents} agent{'s' * (team.num_agents > 1)}, " if team is not None else ""
    readable = [get_human_readable_count(number).strip() for number in (count, trained)]
    return f"{type(module).__name__}: {agents}{readable[0]} parameters, of which {readable[1]} are trained"
