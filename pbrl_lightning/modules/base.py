"""What every learner shares: optimizer, clipping, checkpoints; and what every learner of a team shares besides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.agents.prompts import render_messages
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairTokens, PreferencePair
from pbrl_lightning.checkpoints import make_durable
from pbrl_lightning.generation import predicted_texts
from pbrl_lightning.group_schedules import GroupSchedules
from pbrl_lightning.heap import keep_freed_memory
from pbrl_lightning.lightning_features import check_features
from pbrl_lightning.modules.gradients import clip_gradients, total_norm
from pbrl_lightning.modules.restoring import drop_objects, load_module, saved_options
from pbrl_lightning.modules.run_dtype import DtypeHolder, RunDtype
from pbrl_lightning.preferences.pair_tokens import trainable_pairs
from pbrl_lightning.reporting.quiet import drop_advertisements
from pbrl_lightning.resume import settle_epoch
from pbrl_lightning.rounds import batches_per_update, log_to, writes_logs
from pbrl_lightning.schedule import RoundSchedule
from pbrl_lightning.sharding import share_out
from pbrl_lightning.timing import Stopwatch, spending
from pbrl_lightning.utils.errors import CheckpointError, ConfigurationError, RunError, raise_together

if TYPE_CHECKING:
    from pbrl_lightning.models.reward import JointRewardModel
    from pbrl_lightning.modules.marl import MARLModule

Metrics = dict[str, Tensor | float]

_DETAILS = ("/agent_", "/logps/", "/response_length")
"""Parts of names that are many: they are logged on steps that loggers write, and on the first of each epoch."""
_WEIGHTS = {"state_dict", "current_model_state"}
"""Where a checkpoint holds weights; the second beside a ``WeightAveraging``, whose average is the first."""

drop_advertisements()


def by_agent(name: str, values: Tensor) -> Metrics:
    """One number per agent, shape ``(N,)``, under the names ``NAME/agent_0``, ``NAME/agent_1`` and so on."""
    return {f"{name}/agent_{agent}": value for agent, value in enumerate(values.unbind())}


class LearnerModule(RunDtype):
    """Base of all modules: one AdamW with a named parameter group per agent, reward model and critic.

    A subclass gives the loss of a batch in :meth:`step`.

    Args:
        weight_decay: AdamW's.
        lr_scheduler: Optimizer to learning-rate schedule, one per parameter group; it counts the updates in which the
            group took part. None keeps the rate.
    """

    collects_pairs = True
    """True if its rounds begin with preference pairs."""

    pair_batch_size = 2
    """Pairs per batch where the data module is not told."""

    val_fraction = 0.0
    """Share of the task items whose pairs are held out where the data module is not told."""

    pair_margins: Tensor | None = None
    """Margins of the last batch's pairs, detached, those that only fill up left out; callbacks draw them."""

    pair_margins_name = "train/margins"
    """What loggers call them."""

    last_loss: tuple[str, Tensor | float] | None
    """Name and value of the loss that was logged last, detached; for whoever shows the progress."""

    val_margins_name = "val/margins"
    """The same for held-out pairs."""

    measures_pairs = False
    """True if it can be measured on held-out pairs while it trains."""

    held_out_names: tuple[str, ...] = ()
    """What is logged of them."""

    def __init__(
        self,
        *,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        if weight_decay < 0:
            raise ConfigurationError(f"`weight_decay` must be >= 0, got {weight_decay}")
        self.weight_decay = weight_decay
        self.lr_scheduler = lr_scheduler
        # Checkpoints hold no frozen backbone; `on_load_checkpoint` checks that no trained weight is missing.
        self.strict_loading = False
        self._batch_started = Stopwatch()
        self.last_loss = None
        self._logs_details = True
        self._resumed_metrics: dict[str, float] = {}

    @property
    @abstractmethod
    def step_metrics(self) -> list[str]:
        """Names of what is logged of batches and rollouts, without those per agent; callbacks can monitor them."""

    @abstractmethod
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        """The rounds and epochs of a run.

        Raises:
            ConfigurationError: If the module's options do not fit the kind of run.
        """

    @abstractmethod
    def load(self) -> None:
        """Brings all models into memory; does nothing the second time."""

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: ``params``, ``lr`` and ``name``."""

    @abstractmethod
    def step(self, batch: Any, where: str) -> tuple[Tensor, Metrics]:
        """The loss of a batch, already scaled to its share of the optimizer step, and what is logged of it.

        Args:
            batch: What the loader gave.
            where: Names the batch in errors.

        Raises:
            FloatingPointError: If the loss is not finite.
        """

    @abstractmethod
    def encode_pairs(self, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
        """The pairs that can be trained on, with their token ids."""

    @abstractmethod
    def pair_pad_ids(self) -> list[int]:
        """What fills up the rows of pairs, per reader."""

    @abstractmethod
    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Chat messages of a pair file as text, as the models of this run read them."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Writes what was trained in forms that plain transformers or PEFT loads."""

    def check(self) -> None:
        """Finds what is wrong with the options of a run before anything is loaded.

        Raises:
            ConfigurationError: If a model that is needed has no name.
        """

    @property
    def policy_stage(self) -> MARLModule | None:
        """Who learns from rollouts; None if nobody does."""
        return None

    @property
    def learned_reward(self) -> JointRewardModel | None:
        """The reward model that scores rollouts in the place of the task reward."""
        return None

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """How often something was cut or dropped so far, by name."""

    def begin_round(self, round_number: int) -> None:
        """After a round's collection, before its first update."""

    def wanted_callbacks(self) -> list[L.Callback]:
        """What a run of this module needs, unless the user gives one of the kind."""
        from pbrl_lightning.callbacks import (
            AgentExport,
            CollectionProgress,
            GracefulStop,
            RoundFigures,
            RoundTimes,
            RunDirectory,
            RunReport,
        )

        # What a logger gets is shown once more at the end; who logs nothing gets no pictures either.
        pictures = [RoundFigures(), RunReport()] if writes_logs(self.trainer) else []
        return [CollectionProgress(), RunDirectory(), RoundTimes(), AgentExport(), *pictures, GracefulStop()]

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        check_features(self.trainer, self)  # the first hook of any run
        present = [type(callback) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        return [new for new in self.wanted_callbacks() if not any(issubclass(there, type(new)) for there in present)]

    @override
    def configure_model(self) -> None:
        # After the data module's setup, so that a wrong configuration is reported before anything is loaded.
        make_durable(self.trainer)
        self.settle_dtype()
        self.load()
        share_out(self)
        self.warn_of_emulated_types()
        if self.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()

    @override
    def on_train_start(self) -> None:
        # Of a run resumed inside an epoch, whose beginning Lightning leaves out.
        self.trainer.accumulate_grad_batches = batches_per_update(self.trainer)
        for name, value in self._resumed_metrics.items():
            self.trainer.callback_metrics.setdefault(name, torch.tensor(value))

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The same as validation: ``trainer.test`` and ``trainer.validate`` log the same numbers."""
        del dataloader_idx
        self.validation_step(batch, batch_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    @override
    def predict_step(self, indices: list[int], batch_idx: int) -> list[list[list[str]]]:
        """The responses to task items; only modules with a team have them.

        Raises:
            ConfigurationError: If the module has no team.
        """
        del indices, batch_idx
        raise ConfigurationError(
            f"a {type(self).__name__} has no team that could respond: use `trainer.validate`, or score joint responses "
            "with the reward model's `score_texts`"
        )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, metrics = self.step(batch, f"batch {batch_idx}")
        if not self._logs_details:
            metrics = {name: value for name, value in metrics.items() if not any(part in name for part in _DETAILS)}
        if metrics:
            self.last_loss = next(((name, value) for name, value in metrics.items() if name.endswith("/loss")), None)
            self.log_dict(
                {**metrics, "env_step": float(self.trainer.datamodule.env_step)},  # type: ignore[attr-defined]
                batch_size=int((batch.weights > 0).sum()),
            )
        return loss

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        del batch
        trainer = self.trainer
        written = (trainer.global_step + 1) % (trainer.log_every_n_steps or 1) == 0  # type: ignore[attr-defined]
        self._logs_details = written or batch_idx < trainer.accumulate_grad_batches
        self._batch_started = Stopwatch()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch_idx
        num_tokens = sum(int(rows.attention_mask.sum()) for rows in batch.agents)
        seconds = self._batch_started.stop("training")
        self.log("train/tokens_per_second", num_tokens / max(seconds, 1e-9), batch_size=len(batch))

    @override
    def configure_optimizers(self) -> Any:
        groups = self.parameter_groups()
        owner: dict[int, str] = {}
        for group in groups:
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), group["name"]) != group["name"]:
                    raise ConfigurationError(
                        f"{owner[id(parameter)]} and {group['name']} are one model object; give copies, or a name"
                    )
        # One pass over the weights instead of ten; a gradient scaler would not let clip its gradients.
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None if self._trainer else False
        optimizer = AdamW(groups, weight_decay=self.weight_decay, fused=not scaled)
        if self.lr_scheduler is None:
            return optimizer
        schedules = GroupSchedules(optimizer, self.lr_scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, "interval": "step"}}

    def forget(self, group: str, parameters: list[nn.Parameter]) -> None:
        """Drops what the optimizer knows of newly initialised parameters, and begins their schedule anew."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        for parameter in parameters:
            optimizer.state.pop(parameter, None)  # type: ignore[union-attr]
        schedules = self.lr_schedulers()
        if isinstance(schedules, GroupSchedules):
            schedules.restart(group)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips each parameter group by itself: one agent's large gradient does not shrink another's.

        Logs the norm of each group's gradient before that, and of all together.
        """
        if not gradient_clip_val and not self._logs_details:
            return
        norms = {
            group["name"]: norm
            for group in optimizer.param_groups
            if (norm := clip_gradients(group["params"], gradient_clip_val, gradient_clip_algorithm)) is not None
        }
        if norms and self._logs_details:
            by_group = {f"train/grad_norm/{name}": norm for name, norm in norms.items()}
            self.log_dict({"train/grad_norm": total_norm(list(norms.values())), **by_group})

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """A module with the options and trained weights of a checkpoint; frozen backbones are loaded by their names.

        Args:
            checkpoint_path: A ``.ckpt`` file, or a run's directory for its newest one.
            map_location: As in ``torch.load``; default: where the weights were.
            hparams_file: Not taken: the checkpoint holds the options.
            strict: Every trained weight must be there in any case.
            weights_only: True in any case: a checkpoint runs no code.
            **kwargs: Options of the module in the place of the saved ones, such as ``team=``.

        Raises:
            ConfigurationError: If it is another module's, or does not hold what is needed; says what to give.
        """
        del strict
        if hparams_file is not None or weights_only is False:
            raise ConfigurationError("`hparams_file` and `weights_only=False` are not taken: the options are saved")
        return load_module(cls, checkpoint_path, map_location, kwargs)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Takes the trained weights of a checkpoint, and moves to where they are.

        Args:
            checkpoint: As loaded; its epoch is settled in place.
        """
        self.check()
        self.on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        self.load_state_dict(state, strict=False)
        self.to(next((value.device for value in state.values()), self.device))

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        # `ddp_fork` and `ddp_spawn` bring trained weights back to a process that never loaded its models.
        if not strict:
            self.settle_dtype()
            self.load()
        return super().load_state_dict(state_dict, strict, assign)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["options"] = saved_options(self)
        drop_objects(checkpoint)
        # What this run does not train stays out: frozen backbones, adapters of earlier runs on the same team. Tied
        # weights have several names, and all of them are in the state dict.
        everything = self.named_parameters(remove_duplicate=False)
        trained = self._trained()
        frozen = {name for name, parameter in everything if id(parameter) not in trained}
        for part in _WEIGHTS & checkpoint.keys():
            checkpoint[part] = {name: value for name, value in checkpoint[part].items() if name not in frozen}
        # What callbacks monitor may be logged once a round.
        checkpoint["callback_metrics"] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint["dtype"] = self.run_dtype

    def _trained(self) -> set[int]:
        """Identities of the parameters in the optimizer's groups."""
        return {id(parameter) for group in self.parameter_groups() for parameter in group["params"]}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settle_epoch(checkpoint)
        self.take_dtype(checkpoint.get("dtype"))
        self.load()
        moving = self._trained()
        trained = {name for name, parameter in self.named_parameters() if id(parameter) in moving}
        missing = sorted(trained - set(checkpoint["state_dict"]))
        if missing:
            raise CheckpointError(
                f"{len(missing)} trained weights are missing from the checkpoint, such as {missing[0]!r}"
            )
        unknown = sorted(set(checkpoint["state_dict"]) - set(self.state_dict()))
        if unknown:
            raise CheckpointError(
                f"the checkpoint has {len(unknown)} weights that this run does not have, such as {unknown[0]!r}"
            )
        self._resumed_metrics = checkpoint.get("callback_metrics", {})
        if "averaging_state" in checkpoint:  # WeightAveraging reads what is frozen too
            for part in _WEIGHTS:
                checkpoint[part] = {**self.state_dict(), **checkpoint[part]}

    @override
    def on_train_end(self) -> None:
        self.trainer.datamodule.finish()  # type: ignore[attr-defined]
        if not self.trainer.datamodule.rounds or self.policy_stage is not None:  # type: ignore[attr-defined]
            # What was cut or dropped outside of collections, after which it is logged otherwise.
            log_to(self.trainer, {f"collect/{name}": count for name, count in self.counts().items()})


class TeamModule(LearnerModule):
    """Base of the modules that train a team.

    Args:
        team: The agents.
        num_iterations: Rounds of an iterative run; default 6. Must be None in a base run.
        learning_rate: Of every agent; default 5e-6, for adapters 1e-4.
        weight_decay: AdamW's.
        lr_scheduler: See :class:`LearnerModule`.
    """

    def __init__(
        self,
        team: AgentTeam,
        *,
        num_iterations: int | None = None,
        num_train_epochs: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        problems = []
        for name, value in (("num_iterations", num_iterations), ("num_train_epochs", num_train_epochs)):
            if value is not None and value < 1:
                problems.append(f"`{name}` must be >= 1, got {value}")
        if learning_rate is not None and not learning_rate > 0:
            problems.append(f"`learning_rate` must be > 0, got {learning_rate}")
        if weight_decay < 0:
            problems.append(f"`weight_decay` must be >= 0, got {weight_decay}")
        raise_together(problems)
        super().__init__(weight_decay=weight_decay, lr_scheduler=lr_scheduler)
        self.team = team
        self.num_iterations = num_iterations
        self.num_train_epochs = num_train_epochs
        self.learning_rate = learning_rate
        self._validation_rewards: list[torch.Tensor] = []

    @property
    def policy_updates(self) -> int:
        """Optimizer steps that moved the agents."""
        return self.trainer.global_step

    def num_rounds(self, iterative: bool) -> int:
        """Rounds of a run; 1 in a base run.

        Raises:
            ConfigurationError: If `num_iterations` is set without a comparator.
        """
        if not iterative and self.num_iterations is not None:
            raise ConfigurationError(
                f"`num_iterations` is {self.num_iterations}, but a run is iterative only with a `comparator`; set "
                "`data.comparator` (CurrentComparator, HistoryComparator …) or leave `num_iterations` out"
            )
        return (6 if self.num_iterations is None else self.num_iterations) if iterative else 1

    @override
    def wanted_callbacks(self) -> list[L.Callback]:
        from pbrl_lightning import callbacks as ours

        wanted: list[L.Callback] = super().wanted_callbacks()
        if self.trainer.limit_val_batches != 0:
            wanted.insert(0, ours.JointEvaluation())
        if writes_logs(self.trainer) and self.collects_pairs:
            wanted.append(ours.SampleTable())
        if self.trainer.checkpoint_callbacks and self.collects_pairs:
            wanted.append(ours.RoundCheckpoint())
        comparator = getattr(self.trainer.datamodule, "comparator", None)  # type: ignore[attr-defined]
        if comparator is not None and comparator.needs_history is not None:
            wanted.insert(0, ours.ComparatorHistory())
        return wanted

    def agent_learning_rate(self, agent: int) -> float:
        """As given, or the default for a full model or an adapter."""
        return self.learning_rate or (1e-4 if self.team.adapter(agent) is not None else 5e-6)

    @override
    def load(self) -> None:
        self.team.load()

    @override
    def dtype_holders(self) -> list[DtypeHolder]:
        return [self.team]

    @override
    def export(self, directory: Path) -> None:
        self.team.save(directory)

    @override
    def counts(self) -> dict[str, int]:
        return {"truncated_prompts": 0, "truncated_responses": 0, "identical_pairs": 0} | self.team.counts

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {
                "params": list(self.team.agent_parameters(agent).values()),
                "lr": self.agent_learning_rate(agent),
                "name": f"agent_{agent}",
            }
            for agent in range(self.team.num_agents)
        ]

    @override
    @spending("tokenising")
    def encode_pairs(self, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
        return trainable_pairs(self.team, pairs)

    @override
    def pair_pad_ids(self) -> list[int]:
        return [self.team.tokenizer(agent).pad_token_id or 0 for agent in range(self.team.num_agents)]

    @override
    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return render_messages(self.team.tokenizer(0), messages, add_generation_prompt)

    @override
    def predict_step(self, indices: list[int], batch_idx: int) -> list[list[list[str]]]:
        """One joint response to each of these task items, as :meth:`AgentTeam.generate` returns them."""
        del batch_idx
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "predicted_items"):
            raise ConfigurationError(
                "`trainer.predict` responds to the items of a PreferenceDataModule; `team.generate` responds to any"
            )
        return predicted_texts(self.team, data.predicted_items, indices, sampling=data.sampling, seed=data.seed)

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        del batch_idx, dataloader_idx
        self._validation_rewards.append(batch.rewards)
        self.log_dict(
            {f"eval/{name}": value for name, value in batch.metrics.items()},
            batch_size=len(batch),
            on_epoch=True,
            on_step=False,
            add_dataloader_idx=False,
        )

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs the mean reward over all items, its standard error and the number of scored joint responses."""
        if not self._validation_rewards:
            return  # a fit, which measures pairs alone
        rewards = torch.cat(self._validation_rewards)
        self._validation_rewards.clear()
        rewards = rewards[~rewards.isnan()]
        if not len(rewards):
            raise RunError("no joint response of the evaluation items got a score")
        error = rewards.std() / len(rewards) ** 0.5 if len(rewards) > 1 else torch.tensor(float("inf"))
        self.log("eval/turn_1/reward_mean", rewards.mean().float())
        self.log("eval/turn_1/expected_return", rewards.mean().float())
        self.log("eval/turn_1/reward_standard_error", error.float())
        self.log("eval/n", float(len(rewards)))
