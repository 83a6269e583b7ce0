"""MARLHFModule: a joint reward model, then multi-agent policy learning on it, once or round after round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.advantages import RLAlgorithm
from pbrl_lightning.agents.reference import ReferenceKL
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairBatch, PairTokens, PreferencePair, RolloutBatch
from pbrl_lightning.models.critic import Critic
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.base import Metrics, TeamModule
from pbrl_lightning.modules.joint_reward import JointRewardModule
from pbrl_lightning.modules.marl import MARLModule
from pbrl_lightning.modules.run_dtype import DtypeHolder
from pbrl_lightning.schedule import RoundSchedule
from pbrl_lightning.utils.errors import ConfigurationError, raise_together
from pbrl_lightning.utils.options import record_options


class MARLHFModule(TeamModule):
    """Each round: fits the reward model to the round's pairs, then trains the team on what it says.

    A JointRewardModule and a MARLModule, alternated by the schedule. In an iterative run the reward model and the
    critics are newly initialised after each round's collection; the agents and their optimizer state go on.

    Args:
        team: The agents.
        reward_model: Default: the agents' own model, loaded once more.
        num_iterations: Rounds of an iterative run; default 6.
        num_reward_epochs: Passes over a round's pairs; default 1, in an iterative run 2.
        num_train_epochs: Passes over the task items per round; default 20, in an iterative run 2.
        reward_learning_rate: Default 1e-5.
        rl_algorithm: See :class:`MARLModule`, as all that follow.
        num_generations: Responses per agent and item.
        advantage_normalization: Divide advantages by their scale.
        critic: For ``maac`` and ``iac``.
        critic_learning_rate: Default: the first agent's.
        value_loss_coef: Weight of the critics' loss.
        reference_kl: A KL penalty against the start of the run.
        learning_rate: Of every agent.
        weight_decay: AdamW's.
        lr_scheduler: See :class:`LearnerModule`.

    Raises:
        ConfigurationError: If options do not fit together.
    """

    pair_batch_size = 1
    pair_margins_name = "reward/margins"

    def __init__(
        self,
        team: AgentTeam,
        *,
        reward_model: JointRewardModel | None = None,
        num_iterations: int | None = None,
        num_reward_epochs: int | None = None,
        num_train_epochs: int | None = None,
        reward_learning_rate: float | None = None,
        rl_algorithm: RLAlgorithm = "magrpo",
        num_generations: int = 4,
        advantage_normalization: bool = True,
        critic: Critic | None = None,
        critic_learning_rate: float | None = None,
        value_loss_coef: float = 0.6,
        reference_kl: ReferenceKL | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        record_options(self, locals())
        super().__init__(
            team,
            num_iterations=num_iterations,
            num_train_epochs=num_train_epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            lr_scheduler=lr_scheduler,
        )
        problems = []
        if num_reward_epochs is not None and num_reward_epochs < 1:
            problems.append(f"`num_reward_epochs` must be >= 1, got {num_reward_epochs}")
        if reward_learning_rate is not None and not reward_learning_rate > 0:
            problems.append(f"`reward_learning_rate` must be > 0, got {reward_learning_rate}")
        raise_together(problems)
        reward_model = reward_model or JointRewardModel()
        reward = JointRewardModule(reward_model, num_train_epochs=num_reward_epochs, learning_rate=reward_learning_rate)
        policy = MARLModule(
            team,
            rl_algorithm=rl_algorithm,
            num_generations=num_generations,
            advantage_normalization=advantage_normalization,
            critic=critic,
            critic_learning_rate=critic_learning_rate,
            value_loss_coef=value_loss_coef,
            reference_kl=reference_kl,
            learning_rate=learning_rate,
        )
        # What is trained is registered here, under the names it has in the two modules alone; they only compute.
        self.reward_model = reward_model
        self.critic = policy.critic
        self._reward, self._policy = (reward,), (policy,)
        self._policy_updates = 0
        self._in_policy_phase = False

    @property
    def reward(self) -> JointRewardModule:
        """The reward stage."""
        return self._reward[0]

    @property
    def policy(self) -> MARLModule:
        """The policy stage."""
        return self._policy[0]

    @property
    @override
    def policy_stage(self) -> MARLModule:
        return self.policy

    @property
    @override
    def learned_reward(self) -> JointRewardModel:
        return self.reward_model

    @property
    @override
    def policy_updates(self) -> int:
        return self._policy_updates

    @property
    @override
    def step_metrics(self) -> list[str]:
        return [*self.reward.step_metrics, *self.policy.step_metrics]

    @override
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        reward_epochs = self.reward.num_train_epochs or (2 if iterative else 1)
        policy_epochs = self.num_train_epochs or (2 if iterative else 20)
        return RoundSchedule(self.num_rounds(iterative), (("reward", reward_epochs), ("policy", policy_epochs)))

    @override
    def check(self) -> None:
        self.reward_model.bind(self.team)
        self.policy.check()

    @override
    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            raise ConfigurationError(
                "a MARLHFModule trains its reward model and its team by turns, and DeepSpeed moves what has no turn; "
                "set `strategy` to `ddp_find_unused_parameters_true` or `pbrl_lightning.ShardedStrategy`"
            )
        if isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("find_unused_parameters"):
            raise ConfigurationError(
                "a MARLHFModule trains its reward model and its team by turns, so in several processes `strategy` must "
                "be `ddp_find_unused_parameters_true`"
            )
        self._policy_updates = 0  # of this fit; a checkpoint, loaded after this, knows better
        super().configure_model()

    @override
    def load(self) -> None:
        self.policy.load_policy_stage()
        self.reward_model.bind(self.team).load().set_trained(True)

    @override
    def dtype_holders(self) -> list[DtypeHolder]:
        return [*self.policy.dtype_holders(), self.reward_model]

    @override
    def unload(self) -> None:
        self.policy.unload()
        self.reward_model.unload()

    @override
    def on_fit_start(self) -> None:
        self.policy.begin_fit(self.trainer.ckpt_path is not None)

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        return [*self.policy.parameter_groups(), *self.reward.parameter_groups()]

    @override
    def begin_round(self, round_number: int) -> None:
        if not self.trainer.datamodule.iterative:  # type: ignore[attr-defined]
            return  # fitted once, from what it was given as
        self.reward_model.renew(round_number)
        self.forget("reward", self.reward_model.trained_parameters())
        if self.critic is not None:  # the reward's scale has changed
            self.critic.renew(round_number)
            self.forget("critic", self.critic.trained_parameters())

    @override
    def encode_pairs(self, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
        return self.reward.encode_pairs(pairs)

    @override
    def counts(self) -> dict[str, int]:
        return super().counts() | self.reward.counts()

    @override
    def pair_pad_ids(self) -> list[int]:
        return self.reward.pair_pad_ids()

    @override
    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self.reward.render_chat(messages, add_generation_prompt)

    @override
    def step(self, batch: PairBatch | RolloutBatch, where: str) -> tuple[Tensor, Metrics]:
        self._in_policy_phase = isinstance(batch, RolloutBatch)
        if isinstance(batch, RolloutBatch):
            return self.policy.step(batch, where)
        loss, metrics = self.reward.step(batch, where)
        self.pair_margins = self.reward.pair_margins
        return loss, metrics

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.reward_model.fitted = True

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        del optimizer
        self._policy_updates += self._in_policy_phase

    @override
    def restore(self, checkpoint: dict[str, Any]) -> None:
        super().restore(checkpoint)
        self.reward_model.fitted = checkpoint["global_step"] > 0

    @override
    def export(self, directory: Path) -> None:
        super().export(directory)
        self.reward.export(directory)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["policy_updates"] = self._policy_updates
        checkpoint["reference"] = self.policy.reference_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._policy_updates = checkpoint["policy_updates"]
        self.policy.load_reference_state(checkpoint["reference"])
