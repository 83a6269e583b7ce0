"""How well held-out preference pairs are ordered: what is measured of them, and what is said at the end."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torchmetrics import MeanMetric, Metric, MetricCollection


def held_out_metrics(prefix: str, accuracy: str) -> MetricCollection:
    """Loss, accuracy and margin as sums and counts: batches of different sizes and processes weigh as their pairs do.

    Args:
        prefix: What their names begin with.
        accuracy: What the share of rightly ordered pairs is called.
    """
    return MetricCollection({"loss": MeanMetric(), accuracy: MeanMetric(), "margin": MeanMetric()}, prefix=prefix)


def log_and_reset(module: L.LightningModule, held_out: MetricCollection, *others: Metric) -> None:
    """Logs what was measured, and begins anew.

    Args:
        module: Whose numbers they are.
        held_out: Its metrics.
        *others: More of them, which it has logged itself.
    """
    module.log_dict({name: value.float() for name, value in held_out.compute().items()})
    with torch.inference_mode(False):  # or a fit after `Trainer.validate` could not add to them
        held_out.reset()
        for other in others:
            other.reset()


def print_held_out(trainer: L.Trainer, prefix: str) -> None:
    """Prints the last values that were measured; nothing if none were."""
    found = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
    if found:
        listed = ", ".join(f"{name.removeprefix(prefix)} {value:.3f}" for name, value in sorted(found.items()))
        rank_zero_info(f"held-out pairs: {listed}")
