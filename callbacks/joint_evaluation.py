"""Evaluates the current team on held-out items while it trains."""

from __future__ import annotations

from typing import Any

import lightning as L
from typing_extensions import override

from pbrl_lightning.batches import EvaluationBatch
from pbrl_lightning.rounds import log_to


class JointEvaluation(L.Callback):
    """Scores one joint response of the current agents to each of a few held-out items with the task reward.

    Before the first update, every ``interval`` updates of the agents, and at the end. Always the same items and random
    numbers, so that differences come from the agents. It changes no training result.

    Args:
        interval: Updates of the agents (a reward model's do not count) from one to the next; 0 evaluates first and
            last only.
        num_samples: Evaluation items used.
    """

    def __init__(self, interval: int = 16, num_samples: int = 4) -> None:
        if interval < 0:
            raise ValueError(f"`interval` must be >= 0 (0 = first and last only), got {interval}")
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be >= 1, got {num_samples}")
        self.interval = interval
        self.num_samples = num_samples
        self.results: list[tuple[int, float]] = []
        self._updates: int | None = None

    @property
    @override
    def state_key(self) -> str:
        return "JointEvaluation"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"results": [list(result) for result in self.results], "updates": self._updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results = [(step, value) for step, value in state_dict["results"]]
        self._updates = state_dict["updates"]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._evaluate(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        updates = pl_module.policy_updates
        if self.interval and updates and updates % self.interval == 0:  # type: ignore[operator]
            mean = self._evaluate(trainer)
            if mean is not None:
                # For ModelCheckpoint(monitor=…); the loggers have it already.
                pl_module.log("eval/turn_1/reward_mean", mean, logger=False)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluate(trainer)

    def _evaluate(self, trainer: L.Trainer) -> float | None:
        """Mean reward, None if there is nothing to evaluate or these agents were evaluated already."""
        updates = trainer.lightning_module.policy_updates
        if self._updates == updates:
            return None
        self._updates = updates  # type: ignore[assignment]
        batch = trainer.datamodule.evaluate(self.num_samples)  # type: ignore[attr-defined]
        if batch is None:
            return None
        scored = batch.rewards[~batch.rewards.isnan()]
        metrics = {f"eval/{name}": value for name, value in batch.metrics.items()}
        mean = float(scored.mean()) if len(scored) else None
        if mean is not None:
            self.results.append((trainer.global_step, mean))
            metrics |= {"eval/turn_1/reward_mean": mean, "eval/turn_1/expected_return": mean}
        log_to(trainer, {**metrics, "env_step": trainer.datamodule.env_step})  # type: ignore[attr-defined]
        self._log_table(trainer, batch)
        return mean

    def _log_table(self, trainer: L.Trainer, batch: EvaluationBatch) -> None:
        table = sample_table(batch)
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is not None:
                add_text("eval/samples", table, trainer.global_step)


def sample_table(batch: EvaluationBatch) -> str:
    """Joint responses and their rewards as a Markdown table."""
    num_agents = len(batch.samples[0].prompts)
    lines = ["| item | reward | " + " | ".join(f"agent {agent}" for agent in range(num_agents)) + " |"]
    lines.append("|---" * (num_agents + 2) + "|")
    rows = [(sample, index) for sample in batch.samples for index in sample.joint_indices]
    for (sample, index), reward in zip(rows, batch.rewards.tolist(), strict=True):
        cells = [" ".join(text.replace("|", "\\|").splitlines()) for text in sample.completions(index)]
        lines.append(f"| {sample.item_index} | {reward:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
