"""From sampled joint responses to scores: by an oracle, or by a judge that compares two of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations, groupby
from statistics import fmean
from typing import Literal, Protocol

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.batches import RoleView, TaskItem, TeamSample
from pbrl_lightning.concurrency import each, opened, run_to_end
from pbrl_lightning.preferences.fingerprint import text_digest
from pbrl_lightning.preferences.journal import CollectionJournal, Key
from pbrl_lightning.preferences.oracle import Oracle, OracleError, Score

Side = Literal["actors", "comparator"]
Scores = dict[int, Score]


class Scorer(Protocol):
    """Scores the candidates of one collection; what has no score is left out."""

    def among(self, items: list[TaskItem], samples: list[TeamSample]) -> list[Scores]:
        """Scores of each item's own candidates, by candidate index."""
        ...

    def between(
        self, items: list[TaskItem], actors: list[TeamSample], others: list[TeamSample]
    ) -> list[tuple[Scores, Scores]]:
        """Per item, scores of the current agents' and the comparator's candidates at the indices both have."""
        ...


class PreferenceJudge(ABC):
    """Says which of two joint responses to a task item is better; subclass it for your own.

    It is asked concurrently, up to ``max_concurrency`` of the data module.
    """

    @abstractmethod
    async def compare(self, first: list[str], second: list[str], *, prompts: list[str], item: TaskItem) -> float | None:
        """Compares two joint responses.

        Args:
            first: One text per role.
            second: One text per role.
            prompts: One prompt per role.
            item: The task item.

        Returns:
            1 if the first is better, 0 if the second is, 0.5 for a tie, None if it cannot say (the comparison is left
            out and counted). Numbers between are degrees of preference.
        """


@dataclass
class OracleScorer:
    """Asks the oracle for one number per joint response.

    Attributes:
        oracle: The task reward, or a reward model.
        journal: Where raw scores are kept as they arrive, and found again.
    """

    oracle: Oracle
    journal: CollectionJournal

    def among(self, items: list[TaskItem], samples: list[TeamSample]) -> list[Scores]:
        """See :class:`Scorer`."""
        return self._scores("actors", items, samples, [sample.joint_indices for sample in samples])

    def between(
        self, items: list[TaskItem], actors: list[TeamSample], others: list[TeamSample]
    ) -> list[tuple[Scores, Scores]]:
        """See :class:`Scorer`."""
        shared = [shared_indices(actor, other) for actor, other in zip(actors, others, strict=True)]
        actor_scores = self._scores("actors", items, actors, shared)
        return list(zip(actor_scores, self._scores("comparator", items, others, shared), strict=True))

    def _scores(
        self, side: Side, items: list[TaskItem], samples: list[TeamSample], indices: list[list[int]]
    ) -> list[Scores]:
        keys = {
            (row, index): self._key(side, samples[row], index) for row, kept in enumerate(indices) for index in kept
        }
        missing = [place for place, key in keys.items() if key not in self.journal]
        # An async oracle is asked for everything at once; another one item by item, so that an error names the item.
        groups = [list(group) for _, group in groupby(missing, key=lambda place: self.oracle.is_async or place[0])]
        for group in groups:
            self._ask(items, samples, group, [keys[place] for place in group])
        found: list[Scores] = [{} for _ in items]
        for (row, index), key in keys.items():
            score = self.oracle.processed(self.journal[key], samples[row].item_index)
            if score is not None:
                found[row][index] = score
        return found

    def _ask(
        self, items: list[TaskItem], samples: list[TeamSample], places: list[tuple[int, int]], keys: list[Key]
    ) -> None:
        def arrived(scores: dict[int, float | None]) -> None:
            finite = {n: None if raw is None or not math.isfinite(raw) else raw for n, raw in scores.items()}
            self.journal.add((keys[n], raw) for n, raw in finite.items())

        joint = [samples[row].completions(index) for row, index in places]
        prompts = [samples[row].prompts for row, _ in places]
        self.oracle.raw_scores(
            [items[row] for row, _ in places],
            [samples[row].item_index for row, _ in places],
            [list(column) for column in zip(*prompts, strict=True)],
            [list(column) for column in zip(*joint, strict=True)],
            arrived,
        )

    def _key(self, side: Side, sample: TeamSample, index: int) -> Key:
        # Not the score of another reward, or of one that was corrected since, or of another text.
        return ("score", self.oracle.identity, side, sample.item_index, index, text_digest(sample.completions(index)))


@dataclass
class JudgeScorer:
    """Asks a judge for comparisons; a candidate's score is the share of its comparisons that it wins, ties half.

    Attributes:
        judge: Who compares.
        identity: Tells this judge from another one, for the journal.
        journal: Where verdicts are kept as they arrive, and found again.
        view: How joint responses are shown by role.
        counts: Where comparisons without a verdict are counted.
        max_concurrency: Most comparisons at once.
    """

    judge: PreferenceJudge
    identity: str
    journal: CollectionJournal
    view: RoleView
    counts: dict[str, int]
    max_concurrency: int = 8

    def among(self, items: list[TaskItem], samples: list[TeamSample]) -> list[Scores]:
        """See :class:`Scorer`; every two candidates of an item are compared."""
        duels = [
            (row, (sample, first), (sample, second))
            for row, sample in enumerate(samples)
            for first, second in combinations(sample.joint_indices, 2)
        ]
        won: list[dict[int, list[float]]] = [{} for _ in items]
        for (row, (_, first), (_, second)), verdict in zip(duels, self._verdicts(items, duels), strict=True):
            if verdict is not None:
                won[row].setdefault(first, []).append(verdict)
                won[row].setdefault(second, []).append(1 - verdict)
        return [{index: _score(fmean(shares)) for index, shares in sorted(item.items())} for item in won]

    def between(
        self, items: list[TaskItem], actors: list[TeamSample], others: list[TeamSample]
    ) -> list[tuple[Scores, Scores]]:
        """See :class:`Scorer`; the two candidates of an index are compared."""
        duels = [
            (row, (actor, index), (other, index))
            for row, (actor, other) in enumerate(zip(actors, others, strict=True))
            for index in shared_indices(actor, other)
        ]
        found: list[tuple[Scores, Scores]] = [({}, {}) for _ in items]
        for (row, (_, index), _), verdict in zip(duels, self._verdicts(items, duels), strict=True):
            if verdict is not None:
                found[row][0][index], found[row][1][index] = _score(verdict), _score(1 - verdict)
        return found

    def _verdicts(
        self, items: list[TaskItem], duels: list[tuple[int, tuple[TeamSample, int], tuple[TeamSample, int]]]
    ) -> list[float | None]:
        candidates = {(id(sample), index): (row, sample, index) for row, *sides in duels for sample, index in sides}
        roles = {key: self._by_role(items[row], sample, index) for key, (row, sample, index) in candidates.items()}

        async def one(duel: tuple[int, tuple[TeamSample, int], tuple[TeamSample, int]]) -> float | None:
            row, first, second = duel
            sample, index = first
            other_side = "actors" if sample is second[0] else "comparator"
            texts = text_digest(sample.completions(index) + second[0].completions(second[1]))
            key: Key = ("verdict", self.identity, sample.item_index, index, other_side, second[1], texts)
            if key not in self.journal:
                shown = [roles[id(side), candidate] for side, candidate in (first, second)]
                verdict = await self._compare(items[row], sample.item_index, *shown)
                self.journal.add([(key, verdict)])
            return self._counted(self.journal[key], sample.item_index)

        async def every() -> list[float | None]:
            async with opened(self.judge):
                return await each(one, duels, self.max_concurrency)

        return run_to_end(every)

    def _by_role(self, item: TaskItem, sample: TeamSample, index: int) -> tuple[list[str], list[str]]:
        """Prompts and responses of one candidate, one of each per role."""
        prompts, texts = self.view([item], [[p] for p in sample.prompts], [[t] for t in sample.completions(index)])
        return [column[0] for column in prompts], [column[0] for column in texts]

    async def _compare(
        self,
        item: TaskItem,
        item_index: int,
        first: tuple[list[str], list[str]],
        second: tuple[list[str], list[str]],
    ) -> float | None:
        name = f"{type(self.judge).__name__}.compare"
        where = f"task item {item_index}"
        try:
            verdict = await self.judge.compare(first[1], second[1], prompts=first[0], item=item)
        except Exception as error:
            raise OracleError(f"`{name}` raised {type(error).__name__} for {where}: {error}") from error
        if verdict is None:
            return None
        if isinstance(verdict, bool) or not isinstance(verdict, int | float) or not 0 <= verdict <= 1:
            raise OracleError(f"`{name}` must return a number from 0 to 1 or None, got {verdict!r} for {where}")
        return float(verdict)

    def _counted(self, verdict: float | None, item_index: int) -> float | None:
        if verdict is None:
            warn_once(
                self.counts,
                "judge_without_verdict",
                f"the judge gave no verdict on two responses to task item {item_index}: the comparison is left out; "
                "further ones are counted as `judge_without_verdict`",
            )
        return verdict


def shared_indices(actor: TeamSample, other: TeamSample) -> list[int]:
    """Candidate indices that both sides have, ascending."""
    return sorted(set(actor.joint_indices) & set(other.joint_indices))


def _score(value: float) -> Score:
    return Score(value, value)
