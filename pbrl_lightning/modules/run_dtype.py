"""What ``dtype: auto`` means in a run: chosen once for the run's device, kept in its checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import lightning as L
import torch

from pbrl_lightning.acceleration.precision import announce, resolve_auto, warn_if_emulated
from pbrl_lightning.utils.errors import ConfigurationError


class DtypeHolder(Protocol):
    """A team, a reward model or a critic: something with an option ``dtype``."""

    @property
    def dtype(self) -> str:
        """The option; once models are loaded, never ``auto``."""

    @property
    def chooses_dtype(self) -> bool:
        """True if the option is ``auto`` and nothing is chosen yet."""

    def settle_dtype(self, dtype: str) -> None:
        """Takes a type in the place of ``auto``."""

    def unload(self) -> None:
        """Gives up the weights, so that the next ``load`` reads them again."""

    def parameters(self, recurse: bool = True) -> Any:
        """The weights."""


class RunDtype(L.LightningModule):
    """The part of a module that knows the number types of a run."""

    auto_dtype: str | None = None
    """What ``dtype: auto`` means in this run; None before the choice, and where no model asks for it."""

    @abstractmethod
    def dtype_holders(self) -> list[DtypeHolder]:
        """Everything with an option ``dtype``, the team first."""

    @property
    def run_dtype(self) -> str:
        """The type of the run's weights, as checkpoints keep it."""
        return self.auto_dtype or self.dtype_holders()[0].dtype

    def settle_dtype(self, saved: str | None = None) -> None:
        """Chooses what ``dtype: auto`` means in this run, before models are loaded; does nothing the second time.

        Args:
            saved: What the checkpoint says that the run resumes from. None chooses for the run's device.
        """
        waiting = [holder for holder in self.dtype_holders() if holder.chooses_dtype]
        if waiting and self.auto_dtype is None:
            if saved is not None:
                announce(saved, "the checkpoint says so")
                self.auto_dtype = saved
            elif self._trainer is None:
                self.auto_dtype = resolve_auto("cpu")
            else:  # all processes take the first one's choice
                strategy = self.trainer.strategy
                self.auto_dtype = strategy.broadcast(resolve_auto(strategy.root_device))
        for holder in waiting:
            holder.settle_dtype(str(self.auto_dtype))

    def take_dtype(self, saved: str | None) -> None:
        """Brings the models into the precision of a checkpoint, where their option was ``auto``.

        Args:
            saved: The checkpoint's type; None if it does not say.

        Raises:
            ConfigurationError: If the strategy has already set up the models in another precision.
        """
        if self.auto_dtype is None:
            self.settle_dtype(saved)
        if saved is None or self.auto_dtype in (None, saved):
            return
        if self.trainer.strategy.restore_checkpoint_after_setup:
            raise ConfigurationError(
                f"`dtype: auto` is {self.auto_dtype} on this machine, but the checkpoint is in {saved}; set "
                f"`dtype: {saved}` to resume it"
            )
        announce(saved, "the checkpoint says so")
        chosen, self.auto_dtype = self.auto_dtype, saved
        self.unload()
        for holder in self.dtype_holders():
            if holder.dtype == chosen:
                holder.settle_dtype(saved)

    def unload(self) -> None:
        """Gives up all models, so that the next ``load`` reads them again."""
        for holder in self.dtype_holders():
            holder.unload()

    def warn_of_emulated_types(self) -> None:
        """Warns of narrow types in weights, training and sampling that the run's device emulates."""
        device = self.trainer.strategy.root_device
        for holder in self.dtype_holders():
            for dtype in {parameter.dtype for parameter in holder.parameters()}:
                warn_if_emulated("`dtype` of the models", dtype, device)
        precision = str(self.trainer.precision)
        for prefix, dtype in (("bf16", torch.bfloat16), ("16", torch.float16)):
            if precision.startswith(prefix):
                warn_if_emulated(f"`trainer.precision: {precision}`", dtype, device)
        sampling = getattr(getattr(self.trainer, "datamodule", None), "sampling", None)
        if sampling is not None and sampling.dtype is not None:
            warn_if_emulated("`sampling.dtype`", getattr(torch, sampling.dtype), device)
