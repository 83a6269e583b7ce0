"""What is handed from one part to the next, typed. ``*_mask`` True means keep.

Letters: ``B`` pairs or items, ``K`` candidates, ``N`` agents, ``T`` tokens, ``R`` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TaskItem = dict[str, Any]

RoleView = Callable[[Sequence[TaskItem], list[list[str]], list[list[str]]], tuple[list[list[str]], list[list[str]]]]
"""``B`` items, lists of ``B`` prompts and of ``B`` responses per policy, to those lists per role."""


@dataclass(frozen=True)
class Response:
    """One sampled response of one agent.

    Attributes:
        text: The response without special tokens.
        token_ids: The sampled ids, EOS included where it was sampled.
        finished: True if it ended at EOS, False if the token limit cut it.
    """

    text: str
    token_ids: list[int]
    finished: bool


@dataclass(frozen=True)
class AgentAnswer:
    """What one agent said to one task item.

    Attributes:
        prompt: The prompt text.
        responses: Candidate index to response. An index may be missing.
        prompt_ids: Token ids as the agent read them (after cutting), None where unknown.
    """

    prompt: str
    responses: dict[int, Response]
    prompt_ids: list[int] | None = None


@dataclass(frozen=True)
class TeamSample:
    """What ``N`` agents said to one task item.

    Attributes:
        item_index: Index of the item in its dataset.
        prompts: ``N`` prompt texts.
        responses: ``N`` lists; ``responses[i]`` maps candidate index to response. An index may be missing.
        prompt_ids: ``N`` lists of token ids as the agents read them (after cutting), None where unknown.
        joint_tokens: Tokens that were sampled, where they belong to no single agent (a joint text taken apart).
    """

    item_index: int
    prompts: list[str]
    responses: list[dict[int, Response]]
    prompt_ids: list[list[int]] | None = None
    joint_tokens: int = 0

    @classmethod
    def of(cls, item_index: int, answers: Sequence[AgentAnswer]) -> TeamSample:
        """The answers of ``N`` agents to one task item, together."""
        ids = [answer.prompt_ids for answer in answers if answer.prompt_ids is not None]
        return cls(
            item_index=item_index,
            prompts=[answer.prompt for answer in answers],
            responses=[answer.responses for answer in answers],
            prompt_ids=ids if len(ids) == len(answers) else None,
        )

    @property
    def joint_indices(self) -> list[int]:
        """Candidate indices that every agent has, ascending."""
        shared = set(self.responses[0]).intersection(*self.responses[1:])
        return sorted(shared)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled for all responses."""
        said = sum(len(response.token_ids) for responses in self.responses for response in responses.values())
        return said + self.joint_tokens

    def completions(self, index: int) -> list[str]:
        """The joint response of one candidate index: ``N`` texts."""
        return [responses[index].text for responses in self.responses]

    def token_ids(self, index: int) -> list[list[int]]:
        """The joint response of one candidate index: ``N`` lists of token ids."""
        return [responses[index].token_ids for responses in self.responses]


@dataclass(frozen=True)
class PairTokens:
    """Token ids of a pair as they were sampled, one list per agent."""

    prompts: list[list[int]]
    winner: list[list[int]]
    loser: list[list[int]]


@dataclass(frozen=True)
class PreferencePair:
    """A winner and a loser joint response of the same task item.

    Attributes:
        prompts: ``N`` prompt texts.
        winner_completions: ``N`` response texts.
        loser_completions: ``N`` response texts.
        winner_reward: Oracle score of the winner.
        loser_reward: Oracle score of the loser.
        candidate_reward_mean: Mean score of the candidates compared for the item.
        raw_rewards: Winner's and loser's score before the reward processor; empty in base runs.
        target_raw_reward: The current agents' score before the processor; None in base runs.
        comparator_raw_reward: The comparator's score before the processor; None in base runs.
        tokens: Sampled token ids. Not part of the record in a round file.
        has_rewards: False if the scores only say which side won, as for TRL's chosen and rejected texts. Not part of
            the record either.
    """

    prompts: list[str]
    winner_completions: list[str]
    loser_completions: list[str]
    winner_reward: float
    loser_reward: float
    candidate_reward_mean: float
    raw_rewards: list[float] = field(default_factory=list)
    target_raw_reward: float | None = None
    comparator_raw_reward: float | None = None
    tokens: PairTokens | None = None
    has_rewards: bool = True


@dataclass(frozen=True)
class TokenBatch:
    """Rows of prompt + response for one agent, padded on the right.

    Attributes:
        input_ids: Shape ``(R, T)``, int64.
        attention_mask: Shape ``(R, T)``, bool; True for real tokens.
        response_mask: Shape ``(R, T)``, bool; True for response tokens, EOS included.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    def to(self, device: torch.device | str, **kwargs: Any) -> TokenBatch:
        """The same rows on another device."""
        return TokenBatch(
            self.input_ids.to(device, **kwargs),
            self.attention_mask.to(device, **kwargs),
            self.response_mask.to(device, **kwargs),
        )


class PairBatch:
    """``B`` preference pairs as tokens.

    Not a dataclass: ``Trainer(precision="bf16-true")`` rewrites the floats of those, and stops at frozen ones.

    Attributes:
        agents: One batch per agent of ``2B`` rows: the ``B`` winners, then the ``B`` losers.
        weights: Shape ``(B,)``; 1 for a pair, 0 for a row that only fills up a short rank.
        loss_scale: What the weighted sum of pair losses is multiplied by, so that Lightning's division by the
            accumulation count and averaging over ranks give the mean over all pairs of the optimizer step.
        candidate_reward_means: Shape ``(B,)``; recorded at collection, NaN for pairs without rewards.
    """

    def __init__(
        self, agents: list[TokenBatch], weights: Tensor, loss_scale: float, candidate_reward_means: Tensor
    ) -> None:
        self.agents = agents
        self.weights = weights
        self.loss_scale = loss_scale
        self.candidate_reward_means = candidate_reward_means

    def __len__(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device | str, **kwargs: Any) -> PairBatch:
        """The same pairs on another device."""
        return PairBatch(
            [batch.to(device, **kwargs) for batch in self.agents],
            self.weights.to(device, **kwargs),
            self.loss_scale,
            self.candidate_reward_means.to(device, **kwargs),
        )


class RolloutBatch:
    """``R = B * G`` sampled responses per agent to ``B`` items, with their advantages. Not a dataclass, as above.

    Attributes:
        agents: One batch of ``R`` rows per agent; the ``G`` responses of an item together.
        advantages: Shape ``(N, R)``, float64; constants.
        returns: Each agent's reward, the reference KL subtracted, shape ``(N, R)``, float64.
        weights: Shape ``(R,)``; 0 for a response without a score and for items that only fill up a short rank.
        loss_scale: What the weighted sum of losses is multiplied by, as in :class:`PairBatch`.
        num_generations: ``G``.
        rewards: The shared reward of each joint response, shape ``(R,)``, float64; 0 where there is none.
        critic_rows: What each critic with a model of its own reads, else empty.
        old_values: The critics' values when the rollout was sampled, shape ``(C, R)``, or None without critics.
    """

    def __init__(
        self,
        agents: list[TokenBatch],
        advantages: Tensor,
        returns: Tensor,
        weights: Tensor,
        loss_scale: float,
        num_generations: int,
        rewards: Tensor,
        critic_rows: list[TokenBatch],
        old_values: Tensor | None,
    ) -> None:
        self.agents = agents
        self.advantages = advantages
        self.returns = returns
        self.weights = weights
        self.loss_scale = loss_scale
        self.num_generations = num_generations
        self.rewards = rewards
        self.critic_rows = critic_rows
        self.old_values = old_values

    def __len__(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device | str, **kwargs: Any) -> RolloutBatch:
        """The same responses on another device."""
        return RolloutBatch(
            [batch.to(device, **kwargs) for batch in self.agents],
            self.advantages.to(device, **kwargs),
            self.returns.to(device, **kwargs),
            self.weights.to(device, **kwargs),
            self.loss_scale,
            self.num_generations,
            self.rewards.to(device, **kwargs),
            [batch.to(device, **kwargs) for batch in self.critic_rows],
            None if self.old_values is None else self.old_values.to(device, **kwargs),
        )


class EvaluationBatch:
    """Scored joint responses of the current policies to held-out items. Not a dataclass, as :class:`PairBatch`.

    Attributes:
        rewards: Shape ``(B,)``, float64; NaN where the reward gave no score.
        samples: The ``B`` joint responses.
        metrics: The user's own metrics over these responses.
    """

    def __init__(self, rewards: Tensor, samples: list[TeamSample], metrics: dict[str, float]) -> None:
        self.rewards = rewards
        self.samples = samples
        self.metrics = metrics

    def __len__(self) -> int:
        return len(self.rewards)

    def to(self, device: torch.device | str, **kwargs: Any) -> EvaluationBatch:
        """The same batch; its numbers stay on the host, where they are logged."""
        del device, kwargs
        return self
