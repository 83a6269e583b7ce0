"""Evaluation: the current policies on held-out items, scored by the task reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import EvaluationBatch, TaskItem
from pbrl_lightning.preferences.oracle import Oracle, accepted_keywords


@dataclass(frozen=True)
class Evaluator:
    """Samples and scores joint responses to evaluation items, with the same uniforms each time.

    Attributes:
        items: The evaluation set.
        oracle: The task reward; never a learned one.
        sampling: The actors' sampling options.
        seed: The run's seed.
        metrics: The user's own, called like the reward; returns a dict of numbers.
    """

    items: list[TaskItem]
    oracle: Oracle
    sampling: SamplingConfig
    seed: int
    metrics: Callable[..., dict[str, float]] | None = None

    def evaluate(self, team: AgentTeam, indices: list[int], num_responses: int = 1) -> EvaluationBatch:
        """Scores ``num_responses`` joint responses to each of these items, ``B = len(indices) * num_responses``."""
        items = [self.items[index] for index in indices]
        samples = team.sample(
            items,
            indices,
            num_candidates=num_responses,
            sampling=self.sampling,
            seed=self.seed,
            stream="evaluation",
        )
        rows = [(item, sample, k) for item, sample in zip(items, samples, strict=True) for k in range(num_responses)]
        completions = [[sample.completions(k)[agent] for _, sample, k in rows] for agent in range(team.num_agents)]
        prompts = [[sample.prompts[agent] for _, sample, _ in rows] for agent in range(team.num_agents)]
        row_items = [item for item, _, _ in rows]
        prompts, completions = team.role_view(row_items, prompts, completions)
        scores = self.oracle.score(row_items, [sample.item_index for _, sample, _ in rows], prompts, completions)
        own: dict[str, Any] = {}
        if self.metrics is not None:
            offered = {"prompts": prompts, "batch_items": row_items}
            own = self.metrics(*completions, **{n: offered[n] for n in accepted_keywords(self.metrics, tuple(offered))})
            if not isinstance(own, dict):
                raise TypeError(f"`eval_metrics` must return a dict of numbers, got {type(own).__name__}")
        return EvaluationBatch(
            rewards=torch.tensor(
                [float("nan") if score is None else score.value for score in scores], dtype=torch.float64
            ),
            samples=samples,
            metrics={name: float(value) for name, value in own.items()},
        )


@dataclass(frozen=True)
class EvaluationLoader:
    """All evaluation items in batches, sampled when they are asked for (``pbrl validate``)."""

    evaluator: Evaluator
    team: AgentTeam
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.evaluator.items) // self.batch_size)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for start in range(0, len(self.evaluator.items), self.batch_size):
            stop = min(start + self.batch_size, len(self.evaluator.items))
            yield self.evaluator.evaluate(self.team, list(range(start, stop)))
