"""One round of collection: sample joint responses, score them, keep pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairTokens, PreferencePair, TaskItem, TeamSample
from pbrl_lightning.comparators.base import Comparator, Speaker
from pbrl_lightning.preferences.oracle import Oracle, Score
from pbrl_lightning.preferences.selection import PairSelection, base_pairs, comparator_pairs
from pbrl_lightning.randomness import Stream, counted_generator


@dataclass
class Collection:
    """What one round, or a part of it, collected.

    Attributes:
        pairs: Preference pairs in item order.
        actor_rewards: Scores of the current agents' joint responses.
        comparator_rewards: Scores of the comparator's; empty in base runs.
        num_responses: Joint responses sampled, both sides.
        num_tokens: Their tokens.
    """

    pairs: list[PreferencePair] = field(default_factory=list)
    actor_rewards: list[float] = field(default_factory=list)
    comparator_rewards: list[float] = field(default_factory=list)
    num_responses: int = 0
    num_tokens: int = 0

    def extend(self, other: Collection) -> None:
        """Adds another part."""
        self.pairs += other.pairs
        self.actor_rewards += other.actor_rewards
        self.comparator_rewards += other.comparator_rewards
        self.num_responses += other.num_responses
        self.num_tokens += other.num_tokens


@dataclass
class Collector:
    """Turns task items into preference pairs.

    Attributes:
        oracle: Scores joint responses.
        sampling: How the current agents and local comparators sample.
        num_candidates: Joint responses of the current agents per item.
        selection: Which comparisons are kept first.
        pairs_per_sample: Most pairs kept per item; None keeps all.
        seed: The run's seed.
        comparator: Who gives the other side; None compares the agents' own candidates (a base run).
    """

    oracle: Oracle
    sampling: SamplingConfig
    num_candidates: int
    selection: PairSelection
    pairs_per_sample: int | None
    seed: int
    comparator: Comparator | None = None

    def collect(
        self,
        team: AgentTeam,
        items: list[TaskItem],
        item_indices: list[int],
        round_number: int,
        *,
        history: Path | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Collection]:
        """Collects the pairs of one round.

        Args:
            team: The current agents.
            items: Task items.
            item_indices: Their indices in the dataset.
            round_number: 1-based.
            history: Directory of policy checkpoints.
            progress: Called with the number of items done since the last call.

        Returns:
            What each item gave.
        """
        actors = self._sample(
            team, items, item_indices, round_number, "actors", self.num_candidates, progress or _ignore
        )
        others: Sequence[TeamSample | None] = [None] * len(items)
        if self.comparator is not None:
            count = self.comparator.num_candidates or self.num_candidates
            with self.comparator.session(team, round_number, history) as speaker:
                others = self._sample(
                    speaker, items, item_indices, round_number, "comparator", count, progress or _ignore
                )
        return [
            self._base(item, actor, round_number) if other is None else self._against(item, actor, other, round_number)
            for item, actor, other in zip(items, actors, others, strict=True)
        ]

    def sampling_passes(self) -> int:
        """How often every item is sampled in a round: once, or twice with a comparator."""
        return 1 if self.comparator is None else 2

    def _sample(
        self,
        speaker: Speaker,
        items: list[TaskItem],
        item_indices: list[int],
        round_number: int,
        stream: Stream,
        num_candidates: int,
        progress: Callable[[int], None],
    ) -> list[TeamSample]:
        samples: list[TeamSample] = []
        # A few full batches at a time: often enough for a progress bar, and no sample depends on the cut.
        rows = 4 * self.sampling.token_budget // (self.sampling.max_new_tokens + 64)
        chunk = max(1, rows // num_candidates)
        for start in range(0, len(items), chunk):
            samples += speaker.sample(
                items[start : start + chunk],
                item_indices[start : start + chunk],
                num_candidates=num_candidates,
                sampling=self.sampling,
                seed=self.seed,
                stream=stream,
                step=round_number,
            )
            progress(len(items[start : start + chunk]))
        return samples

    def _score(self, item: TaskItem, sample: TeamSample, indices: list[int]) -> dict[int, Score]:
        """Scores of the joint responses with these candidate indices; what has no score is left out."""
        if not indices:
            return {}
        count = len(indices)
        joint = [sample.completions(index) for index in indices]
        scores = self.oracle.score(
            [item] * count,
            [sample.item_index] * count,
            [[prompt] * count for prompt in sample.prompts],
            [list(texts) for texts in zip(*joint, strict=True)],
        )
        return {index: score for index, score in zip(indices, scores, strict=True) if score is not None}

    def _base(self, item: TaskItem, sample: TeamSample, round_number: int) -> Collection:
        scores = self._score(item, sample, sample.joint_indices)
        values = {index: score.value for index, score in scores.items()}
        generator = counted_generator(self.seed, "selection", round_number, sample.item_index)
        kept = base_pairs(values, self.selection, self.pairs_per_sample, generator)
        mean = fmean(values.values()) if values else 0.0
        pairs = [
            PreferencePair(
                prompts=sample.prompts,
                winner_completions=sample.completions(pair.winner),
                loser_completions=sample.completions(pair.loser),
                winner_reward=values[pair.winner],
                loser_reward=values[pair.loser],
                candidate_reward_mean=mean,
                tokens=_tokens(sample, pair.winner, pair.loser),
            )
            for pair in kept
        ]
        return Collection(pairs, list(values.values()), [], len(sample.joint_indices), _count_tokens(sample))

    def _against(self, item: TaskItem, actor: TeamSample, other: TeamSample, round_number: int) -> Collection:
        shared = sorted(set(actor.joint_indices) & set(other.joint_indices))
        actor_scores, other_scores = self._score(item, actor, shared), self._score(item, other, shared)
        compared = [index for index in shared if index in actor_scores and index in other_scores]
        actor_values = {index: actor_scores[index].value for index in compared}
        other_values = {index: other_scores[index].value for index in compared}
        generator = counted_generator(self.seed, "selection", round_number, actor.item_index)
        kept = comparator_pairs(actor_values, other_values, self.selection, self.pairs_per_sample, generator)
        mean = fmean([*actor_values.values(), *other_values.values()]) if compared else 0.0
        pairs = []
        for pair in kept:
            actor_side = (actor.completions(pair.index), actor_scores[pair.index])
            other_side = (other.completions(pair.index), other_scores[pair.index])
            winner, loser = (actor_side, other_side) if pair.winner_side == "actor" else (other_side, actor_side)
            pairs.append(
                PreferencePair(
                    prompts=actor.prompts,
                    winner_completions=winner[0],
                    loser_completions=loser[0],
                    winner_reward=winner[1].value,
                    loser_reward=loser[1].value,
                    candidate_reward_mean=mean,
                    raw_rewards=[winner[1].raw, loser[1].raw],
                    target_raw_reward=actor_side[1].raw,
                    comparator_raw_reward=other_side[1].raw,
                )
            )
        actor_rewards = [score.value for score in actor_scores.values()]
        other_rewards = [score.value for score in other_scores.values()]
        num_responses = len(actor.joint_indices) + len(other.joint_indices)
        num_tokens = _count_tokens(actor) + _count_tokens(other)
        return Collection(pairs, actor_rewards, other_rewards, num_responses, num_tokens)


def _ignore(_items: int) -> None:
    """Progress that nobody watches."""


def _tokens(sample: TeamSample, winner: int, loser: int) -> PairTokens | None:
    if sample.prompt_ids is None:
        return None
    return PairTokens(sample.prompt_ids, sample.token_ids(winner), sample.token_ids(loser))


def _count_tokens(sample: TeamSample) -> int:
    return sum(len(response.token_ids) for responses in sample.responses for response in responses.values())
