"""Rollouts as data: sampled, scored and turned into advantages when the learner asks for the next batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import RolloutBatch, TaskItem, TeamSample, TokenBatch
from pbrl_lightning.curves import standard_error
from pbrl_lightning.distributed import gather_by_index, together
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.pair_tokens import collate_rows, used_batches
from pbrl_lightning.randomness import counted_generator, counted_permutation
from pbrl_lightning.sharding import gathered
from pbrl_lightning.timing import spending
from pbrl_lightning.utils.errors import ConfigurationError

Rows = list[tuple[list[int], list[int]]]
"""Token ids of a prompt and of what follows it, per row."""


@dataclass
class Rollout:
    """The rollout batch in progress of one process, in plain containers and tensors (it goes into checkpoints).

    ``B`` items, ``G`` responses each, ``R = B * G``.

    Attributes:
        agent_rows: Per agent, ``R`` rows.
        critic_rows: Per critic with a model of its own, ``B`` or ``R`` rows.
        rewards: Shared reward, shape ``(R,)``; 0 where there is none.
        returns: Each agent's reward, the reference KL subtracted, shape ``(N, R)``.
        advantages: Shape ``(N, R)``.
        old_values: Shape ``(C, R)``, or None.
        weights: Shape ``(R,)``; 0 for a response without a score and for items that only fill up a short rank.
        global_scored: Which responses of the global rollout batch have a score, shape ``(B over all processes, G)``.
    """

    agent_rows: list[Rows]
    critic_rows: list[Rows]
    rewards: Tensor
    returns: Tensor
    advantages: Tensor
    old_values: Tensor | None
    weights: Tensor
    global_scored: Tensor

    def state_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass
class _Share:
    """What one process sampled of a rollout batch: ``R`` responses, the ``G`` of an item together."""

    agent_rows: list[Rows]
    critic_rows: list[Rows]
    rewards: Tensor
    scored: Tensor
    returns: Tensor
    old_values: Tensor | None
    kl: Tensor
    clamped: Tensor
    seconds: float

    def of_item(self, row: int, count: int) -> dict[str, Tensor]:
        """What the other processes need to know of one item."""
        kept = slice(row * count, (row + 1) * count)
        known = {
            "returns": self.returns[:, kept],
            "kl": torch.stack([self.kl[:, kept], self.clamped[:, kept]]),
            "rewards": self.rewards[kept],
            "scored": self.scored[kept],
        }
        return known if self.old_values is None else known | {"values": self.old_values[:, kept]}


class PolicyLearner(Protocol):
    """What a rollout needs to know of the module that learns from it."""

    num_generations: int

    def critic_rows(self, prompts: list[list[str]], completions: list[list[str]]) -> list[Rows]:
        """What critics with models of their own read, per critic; empty without any."""
        ...

    def critic_pad_ids(self) -> list[int]:
        """What fills up their rows."""
        ...

    def old_values(self, agents: list[TokenBatch], critic_rows: list[TokenBatch]) -> Tensor | None:
        """The critics' values now, shape ``(C, R)``."""
        ...

    @property
    def kl_coef(self) -> float:
        """Reward per nat of KL against the reference; 0 without one."""
        ...

    def kl_to_reference(self, agents: list[TokenBatch]) -> tuple[Tensor, Tensor] | None:
        """KL of each response and how many of its tokens were clamped, both of shape ``(N, R)``."""
        ...

    def advantages(self, returns: Tensor, old_values: Tensor | None, scored: Tensor) -> Tensor:
        """Advantages of the global rollout batch, all of shape ``(N, B, G)`` or ``(C, B, G)``."""
        ...


@dataclass
class RolloutLoader:
    """Minibatches of one policy epoch over the task items, in a counted order.

    A rollout batch is sampled when its first minibatch is asked for, so with the weights of the update it feeds. The
    loader has a length and no workers: Lightning would sample a loader without length one batch ahead.

    Attributes:
        learner: Who learns from the rollouts.
        team: The agents.
        items: All task items.
        oracle: Scores joint responses: the task reward, or a reward model.
        sampling: How responses are sampled.
        rollout_batch_size: Items per rollout and process.
        train_batch_size: Items per minibatch and process; an item's responses stay together.
        seed: The run's seed.
        epoch: Policy epochs of the run before this one; numbers the draws.
        accumulation: Batches per optimizer step.
        rank: This process.
        world_size: Number of processes.
        limit: As in :class:`~pbrl_lightning.preferences.pair_tokens.PairLoader`.
        same_items: Every epoch takes the items in the same order, as ``overfit_batches`` asks.
        on_rollout: Called with the number of joint responses sampled (over all processes) and what is to be logged.
        models: What speaks and scores, where a sharded strategy has shared it out.
    """

    learner: PolicyLearner
    team: AgentTeam
    items: list[TaskItem]
    oracle: Oracle
    sampling: SamplingConfig
    rollout_batch_size: int
    train_batch_size: int
    seed: int
    epoch: int = 0
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1
    limit: int | float = 1.0
    same_items: bool = False
    on_rollout: Callable[[int, dict[str, float]], None] | None = None
    models: tuple[nn.Module, ...] = ()

    def __post_init__(self) -> None:
        self._start = self._position = 0
        self._repeat = False
        self._rollout: Rollout | None = None
        self._everyones: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._plan())

    def __iter__(self) -> Iterator[RolloutBatch]:
        plan = self._plan()
        epoch = 0 if self.same_items else self.epoch
        order = counted_permutation(len(self.items), counted_generator(self.seed, "order", epoch, item=1))
        begin, self._start = self._start, 0
        repeat, self._repeat = self._repeat, False
        for position in range(begin, len(plan)):
            rollout_index, start, stop = plan[position]
            if start == 0 and not (repeat and position == begin):
                self._rollout = self._sample(self._global_items(order, rollout_index))
            assert self._rollout is not None  # begun here, or restored from a checkpoint
            batch = self._minibatch(self._rollout, order, plan, position, start, stop)
            self._position = position + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many minibatches of the epoch were handed out, and the rollout they are cut from, of every process."""
        own = [] if self._rollout is None else [self._rollout.state_dict()]
        return {"position": self._position, "rollouts": self._everyones or own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after that many minibatches; a finished epoch starts the next one from its beginning.

        Raises:
            ConfigurationError: If the checkpoint lies within a rollout of another number of processes.
        """
        self._start = self._position = state["position"] % max(1, len(self))
        self._everyones, self._rollout = state["rollouts"], None
        self._repeat = state.get("repeat", False)  # the rollout's first minibatch was not trained on
        begun = self._repeat or (self._start > 0 and self._plan()[self._start][1] > 0)
        if begun and len(self._everyones) != self.world_size:
            raise ConfigurationError(
                f"the checkpoint lies within a rollout of {len(self._everyones)} processes, and can only be gone on "
                f"with by as many, not by {self.world_size}; another checkpoint may lie between two rollouts"
            )
        if begun:
            self._rollout = Rollout(**self._everyones[self.rank])

    def _plan(self) -> list[tuple[int, int, int]]:
        """Per minibatch: its rollout, and its first and last item (exclusive) within this process's share of it."""
        plan = []
        size = self.rollout_batch_size * self.world_size
        for rollout in range(-(-len(self.items) // size)):
            count = -(-min(size, len(self.items) - rollout * size) // self.world_size)
            for start in range(0, count, self.train_batch_size):
                plan.append((rollout, start, min(start + self.train_batch_size, count)))
        return plan

    def _global_items(self, order: list[int], rollout: int) -> list[int]:
        size = self.rollout_batch_size * self.world_size
        return order[rollout * size : (rollout + 1) * size]

    def _sample(self, everyone: list[int]) -> Rollout:
        """Samples this process's share of a global rollout batch; advantages are of the whole."""
        count = self.learner.num_generations
        own = everyone[self.rank :: self.world_size]
        # A short rank samples the first item once more, with weight 0, so that all make the same number of steps.
        filled = own + everyone[:1] * (-(-len(everyone) // self.world_size) - len(own))
        places = [everyone.index(item) for item in filled]
        share: list[_Share] = []

        def work() -> dict[int, dict[str, Tensor]]:
            share.append(self._own_share(filled))
            return {place: share[0].of_item(row, count) for row, place in enumerate(places[: len(own)])}

        with gathered(*self.models):
            everything = _stacked(together(work))
        everyones_values = everything["values"].transpose(0, 1) if "values" in everything else None
        advantages = self.learner.advantages(
            everything["returns"].transpose(0, 1), everyones_values, everything["scored"]
        )
        mine = share[0]
        self._log(everything, len(everyone) * count, _count_tokens(mine.agent_rows) / max(mine.seconds, 1e-9))
        weights = mine.scored.double()
        weights[len(own) * count :] = 0.0
        rollout = Rollout(
            mine.agent_rows,
            mine.critic_rows,
            mine.rewards,
            mine.returns,
            advantages[:, places].flatten(1),
            mine.old_values,
            weights,
            everything["scored"],
        )
        # Lightning saves the loader's state of the first process alone.
        self._everyones = gather_by_index({self.rank: rollout.state_dict()}) if self.world_size > 1 else []
        return rollout

    def _own_share(self, filled: list[int]) -> _Share:
        """Samples and scores these items."""
        items = [self.items[index] for index in filled]
        started = time.monotonic()
        samples = self.team.sample(
            items,
            filled,
            num_candidates=self.learner.num_generations,
            sampling=self.sampling,
            seed=self.seed,
            stream="rollouts",
            step=self.epoch,
        )
        seconds = time.monotonic() - started
        with spending("scoring"):
            rewards, scored = self._score(items, samples)
        agent_rows = [_response_rows(samples, agent) for agent in range(self.team.num_agents)]
        prompts, completions = _texts(samples)
        critic_rows = self.learner.critic_rows(prompts, completions)
        with spending("scoring"):
            old_values, kl, clamped = self._quantities(agent_rows, critic_rows)
        returns = rewards - self.learner.kl_coef * kl
        return _Share(agent_rows, critic_rows, rewards, scored, returns, old_values, kl, clamped, seconds)

    def _log(self, everything: dict[str, Tensor], num_responses: int, tokens_per_second: float) -> None:
        if self.on_rollout is None:
            return
        found = everything["rewards"][everything["scored"]]
        metrics = {"rollout/scored_responses": float(len(found)), "rollout/tokens_per_second": tokens_per_second}
        if len(found):
            metrics["turn_1/reward_mean"] = metrics["turn_1/expected_return"] = found.mean().item()
            if (error := standard_error(found.tolist())) is not None:
                metrics["turn_1/reward_standard_error"] = error
        if self.learner.kl_coef:
            kl, clamped = everything["kl"].unbind(1)
            metrics |= {"policy/kl": kl.mean().item(), "policy/kl_clamped_tokens": clamped.sum().item()}
            metrics |= {f"policy/kl/agent_{i}": mean.item() for i, mean in enumerate(kl.mean((0, 2)))}  # of (B, N, G)
        self.on_rollout(num_responses, metrics)

    def _score(self, items: list[TaskItem], samples: list[TeamSample]) -> tuple[Tensor, Tensor]:
        """Rewards and which responses have one, both of shape ``(R,)``."""
        count = self.learner.num_generations
        prompts, completions = _texts(samples)
        scores = self.oracle.score(
            [item for item in items for _ in range(count)],
            [sample.item_index for sample in samples for _ in range(count)],
            [[text for text in column for _ in range(count)] for column in prompts],
            completions,
        )
        rewards = torch.tensor([0.0 if score is None else score.value for score in scores], dtype=torch.float64)
        return rewards, torch.tensor([score is not None for score in scores])

    @torch.no_grad()
    def _quantities(self, agent_rows: list[Rows], critic_rows: list[Rows]) -> tuple[Tensor | None, Tensor, Tensor]:
        """Old values ``(C, R)``, KL and clamped tokens ``(N, R)``, in minibatches as training has them."""
        values, kls, clamped = [], [], []
        count = self.learner.num_generations
        items = len(agent_rows[0]) // count
        for start in range(0, items, self.train_batch_size):
            stop = min(start + self.train_batch_size, items)
            agents = [batch.to(self._device) for batch in self._agent_batches(agent_rows, start, stop)]
            critics = [batch.to(self._device) for batch in self._critic_batches(critic_rows, items, start, stop)]
            values.append(self.learner.old_values(agents, critics))
            nothing = torch.zeros(len(agents), (stop - start) * count)
            kl, cut = self.learner.kl_to_reference(agents) or (nothing, nothing)
            kls.append(kl.cpu().double())
            clamped.append(cut.cpu().double())
        kept = [value.cpu().double() for value in values if value is not None]
        return torch.cat(kept, 1) if kept else None, torch.cat(kls, 1), torch.cat(clamped, 1)

    @property
    def _device(self) -> torch.device:
        return next(self.team.parameters()).device

    def _agent_batches(self, rows: list[Rows], start: int, stop: int) -> list[TokenBatch]:
        count = self.learner.num_generations
        pads = [self.team.tokenizer(agent).pad_token_id or 0 for agent in range(self.team.num_agents)]
        return [_collate(r[start * count : stop * count], pad) for r, pad in zip(rows, pads, strict=True)]

    def _critic_batches(self, rows: list[Rows], items: int, start: int, stop: int) -> list[TokenBatch]:
        per_item = [len(r) // items for r in rows]
        return [
            _collate(r[start * width : stop * width], pad)
            for r, width, pad in zip(rows, per_item, self.learner.critic_pad_ids(), strict=True)
        ]

    def _minibatch(
        self,
        rollout: Rollout,
        order: list[int],
        plan: list[tuple[int, int, int]],
        position: int,
        start: int,
        stop: int,
    ) -> RolloutBatch:
        count = self.learner.num_generations
        rows = slice(start * count, stop * count)
        items = len(rollout.agent_rows[0]) // count
        first = position - position % self.accumulation
        batches = plan[first : min(first + self.accumulation, used_batches(len(plan), self.limit))]
        step_items = sum(self._global_count(order, *batch) for batch in batches)
        # Responses without a score are left out of the mean over the responses of their optimizer step.
        same = [batch for batch in batches if batch[0] == plan[position][0]]
        items_seen = sum(self._global_count(order, *batch) for batch in same)
        world = self.world_size
        num_scored = sum(int(rollout.global_scored[first * world : last * world].sum()) for _, first, last in same)
        return RolloutBatch(
            agents=self._agent_batches(rollout.agent_rows, start, stop),
            advantages=rollout.advantages[:, rows],
            returns=rollout.returns[:, rows],
            weights=rollout.weights[rows] * (items_seen * count / max(1, num_scored)),
            loss_scale=self.world_size * self.accumulation / (step_items * count),
            num_generations=count,
            rewards=rollout.rewards[rows],
            critic_rows=self._critic_batches(rollout.critic_rows, items, start, stop),
            old_values=None if rollout.old_values is None else rollout.old_values[:, rows],
        )

    def _global_count(self, order: list[int], rollout: int, start: int, stop: int) -> int:
        """Items of one minibatch over all processes, those that only fill up left out."""
        everyone = len(self._global_items(order, rollout))
        shares = [len(range(rank, everyone, self.world_size)) for rank in range(self.world_size)]
        return sum(max(0, min(stop, share) - start) for share in shares)


def _texts(samples: list[TeamSample]) -> tuple[list[list[str]], list[list[str]]]:
    """``N`` lists of ``B`` prompts, and ``N`` lists of ``R`` completions."""
    agents = range(len(samples[0].prompts))
    prompts = [[sample.prompts[agent] for sample in samples] for agent in agents]
    completions = [
        [r.text for sample in samples for _, r in sorted(sample.responses[agent].items())] for agent in agents
    ]
    return prompts, completions


def _response_rows(samples: list[TeamSample], agent: int) -> Rows:
    rows: Rows = []
    for sample in samples:
        assert sample.prompt_ids is not None  # a team knows what it read
        responses = sorted(sample.responses[agent].items())
        rows += [(sample.prompt_ids[agent], response.token_ids) for _, response in responses]
    return rows


def _collate(rows: Rows, pad_id: int) -> TokenBatch:
    return collate_rows([prompt for prompt, _ in rows], [response for _, response in rows], pad_id)


def _count_tokens(agent_rows: list[Rows]) -> int:
    return sum(len(response) for rows in agent_rows for _, response in rows)


def _stacked(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all processes have of each item, the items as the first dimension."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
