"""Which of Lightning's features a run takes: what cannot have its documented effect is refused before anything loads.

The verdicts on all callbacks, Trainer options and entry points stand in ``docs/lightning_features.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import lightning as L
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled

from pbrl_lightning.monitoring import monitor_problems, validates_pairs
from pbrl_lightning.sharding import ShardedStrategy, splits_weights
from pbrl_lightning.utils.errors import raise_together
from pbrl_lightning.writable import write_problems

if TYPE_CHECKING:
    from pbrl_lightning.data import PreferenceDataModule
    from pbrl_lightning.modules.base import LearnerModule


@dataclass(frozen=True)
class _Run:
    trainer: Any
    module: LearnerModule
    data: PreferenceDataModule

    @property
    def alternates(self) -> bool:
        """True if it fits a reward model and trains a team by turns."""
        return self.module.collects_pairs and self.module.policy_stage is not None

    @property
    def samples(self) -> bool:
        """True if it trains on what its agents sample, and not on files of pairs alone."""
        return self.module.policy_stage is not None or self.data.given_pairs is None

    @property
    def ignores_validation(self) -> bool:
        """True if Lightning's validation has nothing to do in a fit, and none of Lightning's own settings says so."""
        return not (
            validates_pairs(self.module, self.data) or self.trainer.fast_dev_run or self.trainer.overfit_batches
        )


def _always(_: _Run) -> bool:
    return True


_CALLBACKS: tuple[tuple[type[L.Callback], Callable[[_Run], bool], str], ...] = (
    (
        StochasticWeightAveraging,
        _always,
        "`StochasticWeightAveraging` copies the module before its models are loaded, so it would average nothing; use "
        "`WeightAveraging()` or `EMAWeightAveraging()`",
    ),
    (
        WeightAveraging,
        lambda run: run.alternates,
        "`WeightAveraging` would average a reward model and a team over each other's updates; leave it out of a "
        "MARLHFModule's run, or fit the two after each other (JointRewardModule, then MARLModule)",
    ),
    (
        WeightAveraging,
        lambda run: isinstance(run.trainer.strategy, (ShardedStrategy, DeepSpeedStrategy)),
        "`WeightAveraging` needs whole weights on every process; use `strategy` `auto` or `ddp`",
    ),
    (
        ModelPruning,
        _always,
        "`ModelPruning` replaces weights before the models are loaded; prune the exported models instead",
    ),
    (
        BaseFinetuning,
        _always,
        "`BackboneFinetuning` and other `BaseFinetuning` callbacks freeze layers before the models are loaded; choose "
        "what is trained with the team's `lora` (adapters alone) or `frozen`",
    ),
    (
        BatchSizeFinder,
        _always,
        "`BatchSizeFinder` (`Tuner.scale_batch_size`) would collect pairs or sample rollouts for each size that it "
        "tries; set `data.batch_size` (pairs per batch) or `data.rollout_batch_size`, and reach larger batches with "
        "`accumulate_grad_batches`",
    ),
    (
        LearningRateFinder,
        lambda run: run.samples,
        "`LearningRateFinder` (`Tuner.lr_find`) needs training data that does not depend on the rate, and this run "
        "samples its own; search on collected pairs, `data.pairs=[…]`, without `data.items`",
    ),
    (
        LearningRateMonitor,
        lambda run: not run.trainer.loggers,
        "`LearningRateMonitor` needs a `logger`, and this Trainer has none",
    ),
    (
        DeviceStatsMonitor,
        lambda run: not run.trainer.loggers,
        "`DeviceStatsMonitor` needs a `logger`, and this Trainer has none",
    ),
    (
        GradientAccumulationScheduler,
        lambda run: run.trainer.accumulate_grad_batches != 1,
        "`GradientAccumulationScheduler` and `accumulate_grad_batches` exclude each other; leave one out",
    ),
)

_VALIDATION = (
    "sets how often Lightning validates, and this run does not: its agents are evaluated by "
    "`JointEvaluation(interval=…, num_samples=…)`; leave it out"
)

_OPTIONS: tuple[tuple[Callable[[_Run], bool], str], ...] = (
    (
        lambda run: run.trainer.limit_val_batches not in (0, 1.0) and run.ignores_validation,
        f"`limit_val_batches` {_VALIDATION}, or set it to 0 for no evaluation",
    ),
    (
        lambda run: run.trainer.val_check_interval != 1.0 and run.ignores_validation,
        f"`val_check_interval` {_VALIDATION}",
    ),
    (
        lambda run: run.trainer.check_val_every_n_epoch != 1 and run.ignores_validation,
        f"`check_val_every_n_epoch` {_VALIDATION}",
    ),
    (
        lambda run: run.trainer.reload_dataloaders_every_n_epochs not in (0, 1),
        "`reload_dataloaders_every_n_epochs` must be 0 or 1: each epoch has a loader of its own",
    ),
    (
        lambda run: bool(run.trainer._model_registry),
        "`model_registry` uploads checkpoints to Lightning's registry and is not supported; `AgentExport` writes the "
        "trained models",
    ),
    (
        lambda run: splits_weights(run.trainer.strategy),
        "`strategy` must leave whole weights to sample from or be `pbrl_lightning.ShardedStrategy` "
        "(configs/trainer/fsdp.yaml): `fsdp`, ModelParallelStrategy and DeepSpeed's stage 3 are not supported",
    ),
    (
        lambda run: isinstance(run.trainer.accelerator, XLAAccelerator),
        "`accelerator` must be a CPU or GPU, got TPU: sampling has no fixed shapes to compile",
    ),
    (
        lambda run: isinstance(run.trainer.precision_plugin, (BitsandbytesPrecision, TransformerEnginePrecision)),
        "`precision` must be one of 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true and 16-true: bitsandbytes and "
        "transformer-engine replace layers that adapters, sampling and export know; set the team's `dtype` and `lora` "
        "for less memory",
    ),
)

_COMPILED = (
    "`torch.compile(module)` and `module.compile()` are not supported: batches have another shape each time, and "
    "sampling, where most of the time goes, would stay as it is; pass the module itself"
)


def check_features(trainer: Any, module: LearnerModule) -> None:
    """Refuses features of Lightning that cannot have their documented effect in this run.

    Args:
        trainer: With its data attached; nothing is set up yet.
        module: What it runs.

    Raises:
        ConfigurationError: Names every such callback, option and entry point, and what to use instead; also every
            directory that cannot be written to.
    """
    problems = []
    if module._compiler_ctx is not None:
        to_uncompiled(module)  # so that the next run gets the module as it was
        problems.append(_COMPILED)
    elif module._compiled_call_impl is not None:
        problems.append(_COMPILED)
    data = _data(trainer)
    if data is None:
        problems.append(
            f"a {type(module).__name__} takes its batches from a PreferenceDataModule, not from other loaders or data "
            f"modules: `trainer.{_method(trainer)}(module, PreferenceDataModule(…))`, with `pairs=[…]` for pairs of "
            "your own"
        )
    elif trainer.state.fn == TrainerFn.FITTING:
        run = _Run(trainer, module, data)
        problems += [sentence for kind, applies, sentence in _CALLBACKS if _has(trainer, kind) and applies(run)]
        problems += [sentence for applies, sentence in _OPTIONS if applies(run)]
        problems += _min_epochs(run) + monitor_problems(trainer, module, data)
    problems += write_problems(trainer, collects=_collects(trainer, module, data))
    if problems:
        _drop_tuner(trainer)
    raise_together(problems)


def _collects(trainer: Any, module: LearnerModule, data: Any) -> bool:
    """True if a run collects pairs of its own."""
    if getattr(trainer, "collecting", False):
        return True
    return trainer.state.fn == TrainerFn.FITTING and module.collects_pairs and data is not None and not data.given_pairs


def _drop_tuner(trainer: Any) -> None:
    """Takes out what a Tuner put in for this one fit, as it would have done after it."""
    trainer.callbacks = [callback for callback in trainer.callbacks if not getattr(callback, "_early_exit", False)]


def _data(trainer: Any) -> PreferenceDataModule | None:
    """The data module of this library that the run takes its batches from."""
    source = trainer._active_loop._data_source.instance
    if not isinstance(source, L.LightningDataModule):
        return None
    ours = any(kind.__module__.startswith("pbrl_lightning.") for kind in type(source).__mro__)
    return cast("PreferenceDataModule", source) if ours else None


def _method(trainer: Any) -> str:
    """The Trainer's method that was called."""
    return trainer.state.fn.value


def _has(trainer: Any, kind: type[L.Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callbacks)


def _min_epochs(run: _Run) -> list[str]:
    """What is wrong with `min_epochs`: the rounds of a run are its epochs, and there are no more."""
    wanted = run.trainer.fit_loop.min_epochs or 0
    total = run.module.make_schedule(run.data.iterative).total_epochs
    if wanted <= total or run.trainer.fast_dev_run:
        return []
    return [
        f"`min_epochs` must be at most {total}, the epochs of this run, got {wanted}; set `num_iterations` or "
        "`num_train_epochs` for more"
    ]
