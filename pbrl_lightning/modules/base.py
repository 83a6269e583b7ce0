"""What every learner of a team shares: optimizer, clipping, checkpoints, validation and the callbacks of a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import EvaluationBatch
from pbrl_lightning.resume import settle_epoch
from pbrl_lightning.schedule import RoundSchedule


class TeamModule(L.LightningModule):
    """Base of the modules that train a team.

    Args:
        team: The agents.
        num_iterations: Rounds of an iterative run; default 6. Must be None in a base run.
        learning_rate: Of every agent; default 5e-6, for adapters 1e-4.
        weight_decay: AdamW's.
        lr_scheduler: Optimizer to learning-rate schedule, stepped after every update; None keeps the rate.
    """

    def __init__(
        self,
        team: AgentTeam,
        *,
        num_iterations: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        problems = []
        if num_iterations is not None and num_iterations < 1:
            problems.append(f"`num_iterations` must be >= 1, got {num_iterations}")
        if learning_rate is not None and not learning_rate > 0:
            problems.append(f"`learning_rate` must be > 0, got {learning_rate}")
        if weight_decay < 0:
            problems.append(f"`weight_decay` must be >= 0, got {weight_decay}")
        if problems:
            raise ValueError("; ".join(problems))
        self.team = team
        self.num_iterations = num_iterations
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.lr_scheduler = lr_scheduler
        # Checkpoints hold what is trained and no frozen backbone; `on_load_checkpoint` checks that nothing lacks.
        self.strict_loading = False
        self._validation_rewards: list[torch.Tensor] = []

    @abstractmethod
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        """The rounds and epochs of a run.

        Raises:
            ValueError: If the module's options do not fit the kind of run.
        """

    def num_rounds(self, iterative: bool) -> int:
        """Rounds of a run; 1 in a base run.

        Raises:
            ValueError: If `num_iterations` is set without a comparator.
        """
        if not iterative and self.num_iterations is not None:
            raise ValueError(
                f"`num_iterations` is {self.num_iterations}, but a run is iterative only with a `comparator`; set "
                "`data.comparator` (CurrentComparator, HistoryComparator …) or leave `num_iterations` out"
            )
        return (6 if self.num_iterations is None else self.num_iterations) if iterative else 1

    @override
    def configure_model(self) -> None:
        # After the data module's setup, so that a wrong configuration is reported before anything is loaded.
        self.team.load()

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        from pbrl_lightning.callbacks import AgentExport, CollectionProgress, ComparatorHistory, JointEvaluation

        present = [type(callback) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        comparator = getattr(self.trainer.datamodule, "comparator", None)  # type: ignore[attr-defined]
        wanted: list[L.Callback] = [JointEvaluation(), CollectionProgress(), AgentExport()]
        if comparator is not None and comparator.needs_history is not None:
            wanted.insert(0, ComparatorHistory())
        return [callback for callback in wanted if not any(issubclass(there, type(callback)) for there in present)]

    @override
    def configure_optimizers(self) -> Any:
        groups = []
        for agent in range(self.team.num_agents):
            rate = self.learning_rate or (1e-4 if self.team.adapter(agent) is not None else 5e-6)
            parameters = list(self.team.agent_parameters(agent).values())
            groups.append({"params": parameters, "lr": rate, "name": f"agent_{agent}"})
        optimizer = AdamW(groups, weight_decay=self.weight_decay)
        if self.lr_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "interval": "step"},
        }

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips each parameter group by itself: one agent's large gradient does not shrink another's."""
        if not gradient_clip_val:
            return
        for group in optimizer.param_groups:
            if gradient_clip_algorithm == "value":
                torch.nn.utils.clip_grad_value_(group["params"], gradient_clip_val)
            else:
                torch.nn.utils.clip_grad_norm_(group["params"], gradient_clip_val)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Tied weights have several names, and all of them are in the state dict.
        everything = self.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in everything if not parameter.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name not in frozen}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settle_epoch(checkpoint)
        self.team.load()
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        missing = sorted(trained - set(checkpoint["state_dict"]))
        if missing:
            raise KeyError(f"the checkpoint lacks {len(missing)} trained weights, such as {missing[0]!r}")
        unknown = sorted(set(checkpoint["state_dict"]) - set(self.state_dict()))
        if unknown:
            raise KeyError(f"the checkpoint has {len(unknown)} weights that this team lacks, such as {unknown[0]!r}")

    @override
    def on_train_end(self) -> None:
        self.trainer.datamodule.finish()  # type: ignore[attr-defined]

    @override
    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        del batch_idx
        self._validation_rewards.append(batch.rewards)
        for name, value in batch.metrics.items():
            self.log(f"eval/{name}", value, batch_size=len(batch), on_epoch=True, on_step=False)

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs the mean reward over all items, its standard error and the number of scored joint responses."""
        rewards = torch.cat(self._validation_rewards) if self._validation_rewards else torch.empty(0)
        self._validation_rewards.clear()
        rewards = rewards[~rewards.isnan()]
        if not len(rewards):
            raise RuntimeError("no joint response of the evaluation items got a score")
        error = rewards.std() / len(rewards) ** 0.5 if len(rewards) > 1 else torch.tensor(float("inf"))
        self.log("eval/turn_1/reward_mean", rewards.mean().float())
        self.log("eval/turn_1/expected_return", rewards.mean().float())
        self.log("eval/turn_1/reward_standard_error", error.float())
        self.log("eval/n", float(len(rewards)))
