"""One round of collection: sample joint responses, score them, keep pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairTokens, PreferencePair, TaskItem, TeamSample
from pbrl_lightning.comparators.base import CollectionPhase, Comparator, Speaker
from pbrl_lightning.preferences.journal import CollectionJournal, sample_from_json, sample_to_json
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.scoring import JudgeScorer, OracleScorer, PreferenceJudge, Scorer, Scores, Side
from pbrl_lightning.preferences.selection import PairSelection, base_pairs, comparator_pairs
from pbrl_lightning.randomness import counted_generator
from pbrl_lightning.samples import response_tokens
from pbrl_lightning.timing import spending


@dataclass
class RawRewards:
    """Scores of a round before ``reward_processor``, side by side.

    Attributes:
        actors: Of the current agents' joint responses.
        comparator: Of the comparator's; empty in base runs.
        selected_actors: Of the current agents' side of the pairs that were kept; in base runs of both sides.
        selected_comparator: Of the comparator's side; empty in base runs.
    """

    actors: list[float] = field(default_factory=list)
    comparator: list[float] = field(default_factory=list)
    selected_actors: list[float] = field(default_factory=list)
    selected_comparator: list[float] = field(default_factory=list)

    def extend(self, other: RawRewards) -> None:
        """Adds another part."""
        self.actors += other.actors
        self.comparator += other.comparator
        self.selected_actors += other.selected_actors
        self.selected_comparator += other.selected_comparator


@dataclass
class Collection:
    """What one round, or a part of it, collected.

    Attributes:
        pairs: Preference pairs in item order.
        actor_rewards: Scores of the current agents' joint responses.
        comparator_rewards: Scores of the comparator's; empty in base runs.
        num_responses: Joint responses sampled, both sides.
        num_comparator_responses: Those of the comparator.
        num_tokens: Their tokens.
        raw_rewards: The scores before the processor, those of the pairs apart.
        outcomes: Of each comparison with the comparator, all candidates of the same index that have both scores: 1 if
            the current agents' score is higher, 0.5 for a tie, 0 if it is lower.
        response_tokens: Per agent, tokens of each of the current agents' responses, EOS included; empty where tokens
            belong to no single agent.
    """

    pairs: list[PreferencePair] = field(default_factory=list)
    actor_rewards: list[float] = field(default_factory=list)
    comparator_rewards: list[float] = field(default_factory=list)
    num_responses: int = 0
    num_comparator_responses: int = 0
    num_tokens: int = 0
    raw_rewards: RawRewards = field(default_factory=RawRewards)
    outcomes: list[float] = field(default_factory=list)
    response_tokens: list[list[int]] = field(default_factory=list)

    def extend(self, other: Collection) -> None:
        """Adds another part."""
        self.pairs += other.pairs
        self.actor_rewards += other.actor_rewards
        self.comparator_rewards += other.comparator_rewards
        self.num_responses += other.num_responses
        self.num_comparator_responses += other.num_comparator_responses
        self.num_tokens += other.num_tokens
        self.raw_rewards.extend(other.raw_rewards)
        self.outcomes += other.outcomes
        missing = len(other.response_tokens) - len(self.response_tokens)
        self.response_tokens += [[] for _ in range(missing)]
        for own, more in zip(self.response_tokens, other.response_tokens, strict=False):
            own += more


@dataclass
class Collector:
    """Turns task items into preference pairs.

    Attributes:
        oracle: Scores joint responses; may be None with a judge.
        sampling: How the current agents and local comparators sample.
        num_candidates: Joint responses of the current agents per item.
        selection: Which comparisons are kept first.
        pairs_per_sample: Most pairs kept per item; None keeps all.
        seed: The run's seed.
        comparator: Who gives the other side; None compares the agents' own candidates (a base run).
        judge: Decides comparisons in the oracle's place.
        max_concurrency: Most comparisons of the judge at once.
        judge_identity: Tells this judge from another one, for the journal.
    """

    oracle: Oracle | None
    sampling: SamplingConfig
    num_candidates: int
    selection: PairSelection
    pairs_per_sample: int | None
    seed: int
    comparator: Comparator | None = None
    judge: PreferenceJudge | None = None
    max_concurrency: int = 8
    judge_identity: str = ""

    def collect(
        self,
        team: AgentTeam,
        items: list[TaskItem],
        item_indices: list[int],
        round_number: int,
        *,
        history: Path | None = None,
        progress: Callable[[int], None] | None = None,
        journal: CollectionJournal | None = None,
    ) -> list[Collection]:
        """Collects the pairs of one round.

        Args:
            team: The current agents.
            items: Task items.
            item_indices: Their indices in the dataset.
            round_number: 1-based.
            history: Directory of policy checkpoints.
            progress: Called with the number of items done since the last call.
            journal: Where everything is kept as it arrives; what it holds already is not asked for again.

        Returns:
            What each item gave.
        """
        journal = journal if journal is not None else CollectionJournal(None)
        phase = CollectionPhase(round_number, history, journal, progress or _ignore)
        actors = self._sample(team, "actors", items, item_indices, phase, self.num_candidates)
        scorer = self._scorer(team, journal)
        if self.comparator is None:
            with spending("scoring"):
                own_scores = scorer.among(items, actors)
            return [self._base(*row, round_number) for row in zip(actors, own_scores, strict=True)]
        count = self.comparator.num_candidates or self.num_candidates
        with self.comparator.open(team, phase) as speaker:
            others = self._sample(speaker, "comparator", items, item_indices, phase, count)
        for sample in others:
            if not sample.joint_indices:
                warn_once(
                    team.counts,
                    "items_without_comparator",
                    f"the comparator has no response to task item {sample.item_index}, which gives no pairs; further "
                    "ones are counted as `items_without_comparator`",
                )
        with spending("scoring"):
            both_scores = scorer.between(items, actors, others)
        return [
            self._against(actor, other, *scores, round_number)
            for actor, other, scores in zip(actors, others, both_scores, strict=True)
        ]

    def _scorer(self, team: AgentTeam, journal: CollectionJournal) -> Scorer:
        if self.judge is not None:
            return JudgeScorer(
                self.judge, self.judge_identity, journal, team.role_view, team.counts, self.max_concurrency
            )
        assert self.oracle is not None  # one of the two is given
        return OracleScorer(self.oracle, journal)

    def reward_range(self) -> tuple[float, float] | None:
        """Lowest and highest score before the processor; None if the reward does not say it."""
        if self.judge is not None:
            return (0.0, 1.0)  # shares of comparisons
        with suppress(ValueError):  # what needs a right one asks the oracle before anything is sampled
            return self.oracle.reward_range() if self.oracle is not None else None
        return None

    def sampling_passes(self) -> int:
        """How often every item is sampled in a round: once, or twice with a comparator."""
        return 1 if self.comparator is None else 2

    def _sample(
        self,
        speaker: Speaker,
        side: Side,
        items: list[TaskItem],
        item_indices: list[int],
        phase: CollectionPhase,
        num_candidates: int,
    ) -> list[TeamSample]:
        options: dict[str, Any] = {
            "num_candidates": num_candidates,
            "sampling": self.sampling,
            "seed": self.seed,
            "stream": side,
            "step": phase.round_number,
        }
        if side == "comparator" and self.comparator is not None and self.comparator.is_remote:
            with spending("sampling"):
                return speaker.sample(items, item_indices, **options)
        journal, samples = phase.journal, dict[int, TeamSample]()
        for index in item_indices:
            if (key := ("sample", side, index)) in journal:
                samples[index] = sample_from_json(index, journal.take(key))
        missing = [row for row, index in enumerate(item_indices) if index not in samples]
        if samples:
            phase.progress(len(samples))
        # A few full batches at a time: often enough for a progress bar, and no sample depends on the cut.
        rows = 4 * (self.sampling.token_budget or 16384) // (self.sampling.max_new_tokens + 64)
        size = max(1, rows // num_candidates)
        for start in range(0, len(missing), size):
            chunk = missing[start : start + size]
            said = speaker.sample([items[row] for row in chunk], [item_indices[row] for row in chunk], **options)
            samples.update({sample.item_index: sample for sample in said})
            journal.write((("sample", side, sample.item_index), sample_to_json(sample)) for sample in said)
            phase.progress(len(chunk))
        return [samples[index] for index in item_indices]

    def _base(self, sample: TeamSample, scores: Scores, round_number: int) -> Collection:
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
        raw = RawRewards(
            actors=[score.raw for score in scores.values()],
            selected_actors=[scores[index].raw for pair in kept for index in (pair.winner, pair.loser)],
        )
        return Collection(
            pairs=pairs,
            actor_rewards=list(values.values()),
            num_responses=len(sample.joint_indices),
            num_tokens=sample.num_tokens,
            raw_rewards=raw,
            response_tokens=response_tokens(sample),
        )

    def _against(
        self,
        actor: TeamSample,
        other: TeamSample,
        actor_scores: Scores,
        other_scores: Scores,
        round_number: int,
    ) -> Collection:
        compared = sorted(actor_scores.keys() & other_scores.keys())
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
        said = len(other.joint_indices)
        num_tokens = actor.num_tokens + other.num_tokens
        raw = RawRewards(
            [score.raw for score in actor_scores.values()],
            [score.raw for score in other_scores.values()],
            [actor_scores[pair.index].raw for pair in kept],
            [other_scores[pair.index].raw for pair in kept],
        )
        return Collection(
            pairs=pairs,
            actor_rewards=actor_rewards,
            comparator_rewards=other_rewards,
            num_responses=len(actor.joint_indices) + said,
            num_comparator_responses=said,
            num_tokens=num_tokens,
            raw_rewards=raw,
            outcomes=[outcome(actor_values[index], other_values[index]) for index in compared],
            response_tokens=response_tokens(actor),
        )


def outcome(current: float, comparator: float) -> float:
    """A comparison as the current agents see it: 1 for a win, 0.5 for a tie, 0 for a loss."""
    return 0.5 * (1 + (current > comparator) - (current < comparator))


def _ignore(_items: int) -> None:
    """Progress that nobody watches."""


def _tokens(sample: TeamSample, winner: int, loser: int) -> PairTokens | None:
    if sample.prompt_ids is None:
        return None
    return PairTokens(sample.prompt_ids, sample.token_ids(winner), sample.token_ids(loser))
