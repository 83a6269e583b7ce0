"""Remote models as judges: one that scores a joint response, and one that compares two."""

from __future__ import annotations

import asyncio
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from typing_extensions import override

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.concurrency import all_of
from pbrl_lightning.preferences.fingerprint import text_digest
from pbrl_lightning.preferences.scoring import PreferenceJudge
from pbrl_lightning.remote import ApiClient, ApiEndpoint, ApiRequest
from pbrl_lightning.utils.errors import ConfigurationError, raise_together

_NUMBER = r"[-+]?\d+(?:\.\d+)?"


class RemoteJudge(ABC):
    """What the two judges share: a client for the time of a batch, a cache by content, and questions asked again.

    ``wanted`` says what an answer must end in.

    Args:
        endpoint: Where the judging model is.
        criteria: What makes a joint response good, in words.
        max_new_tokens: Most tokens of its answer.
        temperature: Its sampling temperature.
        attempts: How often it is asked for an answer of the right form.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    def __init__(
        self,
        endpoint: ApiEndpoint,
        criteria: str,
        max_new_tokens: int,
        temperature: float,
        attempts: int,
    ) -> None:
        problems = []
        if not criteria.strip():
            problems.append("`criteria` must say what makes a joint response good, got an empty text")
        if max_new_tokens < 1:
            problems.append(f"`max_new_tokens` must be >= 1, got {max_new_tokens}")
        if attempts < 1:
            problems.append(f"`attempts` must be >= 1, got {attempts}")
        raise_together(problems)
        self.endpoint = endpoint
        self.criteria = criteria
        self.wanted = "a verdict"
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.attempts = attempts
        self._told = False
        self._client: ApiClient | None = None
        self._cache: dict[str, float | None] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        self._client = await ApiClient(self.endpoint).__aenter__()
        self._locks = {}  # of this event loop
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(kind, error, traceback)

    @abstractmethod
    def parse(self, answer: str) -> float | None:
        """What an answer says, None if it is not of the right form."""

    async def _judged(self, question: str) -> float | None:
        """What was said to this question before, or is being said right now, or else what the model says."""
        key = text_digest([question])
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._cache:
                self._cache[key] = await self._ask(question)
            return self._cache[key]

    async def _ask(self, question: str) -> float | None:
        """The first answer of the right form, None if there is none."""
        if self._client is not None:
            return await self._ask_with(self._client, question)
        async with ApiClient(self.endpoint) as client:  # called outside of an oracle
            return await self._ask_with(client, question)

    async def _ask_with(self, client: ApiClient, question: str) -> float | None:
        request = ApiRequest(question, 1, self.max_new_tokens, self.temperature, 1.0, None)
        for attempt in range(self.attempts):  # with a seed, each needs another one
            answers = await client.answer(replace(request, stream=(text_digest([question]), attempt)), [0])
            value = self.parse(answers[0]) if answers else None
            if value is not None:
                return value
        if not self._told:
            self._told = True
            said = repr(_last_line(answers[0])[-80:]) if answers else "nothing"
            warnings.warn(
                f"{type(self).__name__}: the answer of {self.endpoint.address} ends in {said}, where {self.wanted} is "
                "asked for; what it judges so is left out. Further ones are only counted",
                stacklevel=2,
            )
        return None


class ScoreJudge(RemoteJudge):
    """A task reward that asks a remote model for one number per joint response.

    Give it as ``reward_func``. An answer must end in a line ``Score: <number>`` with a number in range; one that does
    not is asked for again, then the response is dropped like any without a score. Equal contents are asked once.

    Args:
        endpoint: Where the judging model is.
        criteria: What makes a joint response good, in words.
        low: Lowest score.
        high: Highest score.
        max_new_tokens: Most tokens of the judge's answer.
        temperature: Its sampling temperature.
        attempts: How often it is asked for an answer of the right form.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    _SCORE = re.compile(rf"[*_ ]*score[*_ ]*[:=][*_ ]*({_NUMBER})[*_ ]*\.?", re.IGNORECASE)

    def __init__(
        self,
        endpoint: ApiEndpoint,
        criteria: str,
        *,
        low: float = 0.0,
        high: float = 10.0,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        attempts: int = 2,
    ) -> None:
        super().__init__(endpoint, criteria, max_new_tokens, temperature, attempts)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigurationError(f"`low` must be below `high`, got {low} and {high}")
        self.low = low
        self.high = high
        self.wanted = f"'Score: <number>' from {low:g} to {high:g}"

    @property
    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest score."""
        return self.low, self.high

    async def __call__(
        self, *completions: list[str], prompts: list[list[str]], batch_items: list[TaskItem]
    ) -> list[float | None]:
        """Scores of ``B`` joint responses.

        Args:
            *completions: Per role, ``B`` responses.
            prompts: Per role, ``B`` prompts.
            batch_items: ``B`` task items; the judge reads the prompts only.

        Returns:
            ``B`` numbers; None where the judge gave none.
        """
        del batch_items
        joint = zip(zip(*prompts, strict=True), zip(*completions, strict=True), strict=True)
        return [await self._score(asked, said) for asked, said in joint]

    async def _score(self, prompts: Sequence[str], responses: Sequence[str]) -> float | None:
        question = (
            f"You judge how well {_agents(len(responses))} answered. Criteria: {self.criteria}\n\n"
            f"{_tasks(prompts)}\n\n{_responses(responses, 'Response')}\n\n"
            f"Give one score for all responses together, from {self.low:g} (worst) to {self.high:g} (best). You may "
            'reason first. End with one line of this form and nothing after it:\n"Score: <number>"'
        )
        return await self._judged(question)

    @override
    def parse(self, answer: str) -> float | None:
        r"""The score in the last line of an answer, or in an answer that is a number; None if it is not in range.

        Example:
            >>> judge = ScoreJudge(ApiEndpoint("http://localhost:8000/v1"), "brevity")
            >>> judge.parse("Short and clear.\n**Score: 8.5**"), judge.parse("8 of 10."), judge.parse("Score: 11")
            (8.5, None, None)
        """
        found = self._SCORE.fullmatch(_last_line(answer)) or re.fullmatch(f"({_NUMBER})", answer.strip())
        score = float(found[1]) if found else math.nan
        return score if self.low <= score <= self.high else None


class PairwiseJudge(RemoteJudge, PreferenceJudge):
    """Asks a remote model which of two joint responses is better, twice with the sides swapped.

    Give it as ``judge``. Two verdicts that contradict each other are a tie, which gives no pair. An answer must end in
    a line ``Better: A``, ``Better: B`` or ``Better: tie``; without one after ``attempts`` the comparison is left out.

    Args:
        endpoint: Where the judging model is.
        criteria: What makes a joint response good, in words.
        max_new_tokens: Most tokens of the judge's answer.
        temperature: Its sampling temperature.
        attempts: How often it is asked for an answer of the right form.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    _VERDICT = re.compile(r"[*_ ]*better[*_ ]*[:=][*_ ]*(a|b|tie)[*_ ]*\.?", re.IGNORECASE)

    def __init__(
        self,
        endpoint: ApiEndpoint,
        criteria: str,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        attempts: int = 2,
    ) -> None:
        super().__init__(endpoint, criteria, max_new_tokens, temperature, attempts)
        self.wanted = "'Better: A', 'Better: B' or 'Better: tie'"

    @override
    async def compare(self, first: list[str], second: list[str], *, prompts: list[str], item: TaskItem) -> float | None:
        del item
        if first == second:
            return 0.5
        orders = [(first, second), (second, first)]
        there, back = await all_of(self._verdict(prompts, *order) for order in orders)
        if there is None or back is None:
            return None
        return there if there == 1 - back else 0.5

    async def _verdict(self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> float | None:
        question = (
            f"You compare two joint answers of {_agents(len(first))} to the same task. Criteria: {self.criteria}\n\n"
            f"{_tasks(prompts)}\n\n{_responses(first, 'Answer A, response')}\n\n"
            f"{_responses(second, 'Answer B, response')}\n\n"
            "Which joint answer is better? The order in which they stand means nothing. You may reason first. End with "
            'one line of one of these forms and nothing after it:\n"Better: A"\n"Better: B"\n"Better: tie"'
        )
        return await self._judged(question)

    @override
    def parse(self, answer: str) -> float | None:
        """The verdict in the last line of an answer: 1 for A, 0 for B, 0.5 for a tie, None without one."""
        found = self._VERDICT.fullmatch(_last_line(answer))
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[found[1].lower()] if found else None


def _last_line(answer: str) -> str:
    lines = answer.strip().splitlines()
    return lines[-1].strip().strip('"') if lines else ""


def _agents(count: int) -> str:
    return "one agent" if count == 1 else f"{count} agents that work together"


def _tasks(prompts: Sequence[str]) -> str:
    return "\n\n".join(f"### Task of agent {agent}\n{prompt}" for agent, prompt in enumerate(prompts))


def _responses(responses: Sequence[str], title: str) -> str:
    return "\n\n".join(f"### {title} of agent {agent}\n{text}" for agent, text in enumerate(responses))
