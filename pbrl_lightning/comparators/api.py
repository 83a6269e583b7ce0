"""The comparator behind a remote endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from typing_extensions import override

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.prompts import Formatter, made_prompt, plain_text
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import AgentAnswer, Response, TaskItem, TeamSample
from pbrl_lightning.comparators.base import CentralizedGeneration, CollectionPhase, Comparator, Speaker
from pbrl_lightning.concurrency import each, run_to_end
from pbrl_lightning.remote import ApiClient, ApiEndpoint, ApiRequest, ApiUnavailableError
from pbrl_lightning.text_gate import Thoughts, control_tokens, encodable_text, neutralize, split_thoughts
from pbrl_lightning.utils.errors import ConfigurationError


class ApiComparator(Comparator):
    """A remote model: one request per role and item, or one for all roles with ``centralized``.

    Candidates that do not come (refused, filtered, unfinished or blank answers, a request without a usable one) are
    left out and counted; a round without any is an error. Every answer is kept in the round's journal as it arrives, so
    that a run that is started again asks only for what is missing. How the sampling options reach the endpoint depends
    on its format.

    Args:
        endpoint: Where the model is and how it is spoken to.
        formatters: Item to prompt, as in :class:`AgentTeam`; None takes the actors' formatters. Chat messages are sent
            as such, where the format has them.
        num_candidates: See :class:`Comparator`.
        centralized: See :class:`Comparator`.
        thoughts: ``strip`` takes the ``<think>…</think>`` before an answer away, counted as ``stripped_thoughts``; an
            answer of thoughts alone is left out. ``keep`` leaves it as part of the answer.
    """

    is_remote = True

    def __init__(
        self,
        endpoint: ApiEndpoint,
        *,
        formatters: Any = None,
        num_candidates: int | None = None,
        centralized: CentralizedGeneration | None = None,
        thoughts: Thoughts = "strip",
    ) -> None:
        super().__init__(num_candidates, centralized=centralized)
        if thoughts not in get_args(Thoughts):
            raise ConfigurationError(f"`thoughts` must be 'strip' or 'keep', got {thoughts!r}")
        self.endpoint = endpoint
        self.formatters = formatters
        self.thoughts = thoughts

    @override
    def check(self, team: AgentTeam) -> None:
        super().check(team)
        self.endpoint.check()

    @override
    def identity(self) -> Any:
        # Not the limits: who is asked again with a longer timeout is the same.
        asked = self.endpoint
        where = [asked.url, asked.kind, asked.model, asked.extra_body, asked.parameter_names, asked.response_field]
        kept = [] if self.thoughts == "strip" else [self.thoughts]
        return [type(self), where, self.formatters, self.num_candidates, self.centralized, *kept]

    @override
    @contextmanager
    def session(self, team: AgentTeam, phase: CollectionPhase) -> Iterator[Speaker]:
        # To speak needs no model of the team; a collection has loaded it.
        readers = range(team.num_agents if team.is_loaded else 0)
        controls = frozenset[str]().union(*(control_tokens(team.tokenizer(agent)) for agent in readers))
        yield ApiSpeaker(
            self.endpoint, self.role_formatters(team) or team.formatters, phase, team.counts, controls, self.thoughts
        )


@dataclass(frozen=True)
class _Question:
    row: int
    item: TaskItem
    item_index: int
    agent: int
    prompt: Any


def _question(row: int, item: TaskItem, item_index: int, agent: int, formatter: Formatter) -> _Question:
    try:
        prompt = made_prompt(formatter, item)
    except Exception as error:
        raise ConfigurationError(
            f"the comparator's formatter for agent {agent} failed on task item {item_index}: {error}"
        ) from error
    return _Question(row, item, item_index, agent, prompt)


class ApiSpeaker:
    """Answers task items with a remote model's texts.

    Args:
        endpoint: Where the model is.
        formatters: Item to prompt, one per role.
        phase: The collection: its journal and progress.
        counts: Where candidates that did not come are counted.
        controls: Control tokens of the team, which are text in an answer.
        thoughts: See :class:`ApiComparator`.
    """

    def __init__(
        self,
        endpoint: ApiEndpoint,
        formatters: list[Formatter],
        phase: CollectionPhase,
        counts: dict[str, int],
        controls: Collection[str] = (),
        thoughts: Thoughts = "strip",
    ) -> None:
        self.endpoint = endpoint
        self.formatters = formatters
        self._phase = phase
        self._counts = counts
        self._controls = controls
        self._thoughts = thoughts
        self._failures_in_a_row = 0
        self._left_out: Counter[str] = Counter()

    def sample(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        *,
        num_candidates: int,
        sampling: SamplingConfig,
        **_: Any,
    ) -> list[TeamSample]:
        """See :meth:`AgentTeam.sample`; remote models draw their own random numbers."""
        asked = [
            _question(row, item, index, agent, formatter)
            for row, (item, index) in enumerate(zip(items, item_indices, strict=True))
            for agent, formatter in enumerate(self.formatters)
        ]
        answers = iter(self._ask(asked, num_candidates, sampling))
        return [TeamSample.of(index, [next(answers) for _ in self.formatters]) for index in item_indices]

    def answer(
        self,
        agent: int,
        formatter: Formatter,
        items: list[TaskItem],
        item_indices: list[int],
        *,
        num_candidates: int,
        sampling: SamplingConfig,
        **_: Any,
    ) -> list[AgentAnswer]:
        """See :meth:`AgentTeam.answer`."""
        asked = [
            _question(row, item, index, agent, formatter)
            for row, (item, index) in enumerate(zip(items, item_indices, strict=True))
        ]
        return self._ask(asked, num_candidates, sampling)

    def _ask(self, questions: Sequence[_Question], num_candidates: int, sampling: SamplingConfig) -> list[AgentAnswer]:
        open_questions = Counter(question.row for question in questions)
        indices = range(num_candidates)

        async def one(question: _Question, client: ApiClient) -> None:
            missing = [index for index in indices if _key(question, index) not in self._phase.journal]
            if missing:
                await self._complete(client, question, missing, sampling)
            open_questions[question.row] -= 1
            if not open_questions[question.row]:
                self._phase.progress(1)

        async def every() -> None:
            async with ApiClient(self.endpoint) as client:
                await each(partial(one, client=client), questions, self.endpoint.max_concurrency)

                self._left_out += client.left_out

        run_to_end(every)
        return [self._found(question, indices) for question in questions]

    async def _complete(
        self, client: ApiClient, question: _Question, missing: list[int], sampling: SamplingConfig
    ) -> None:
        request = ApiRequest(
            question.prompt,
            len(missing),
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            question.agent,
            question.item,
            (self._phase.round_number, question.item_index, question.agent),
        )
        if request.is_empty:
            warn_once(
                self._counts,
                "empty_prompts",
                f"the comparator's prompt for agent {question.agent} and task item {question.item_index} is empty and "
                "is not sent; further ones are counted as `empty_prompts`",
            )
            return

        def arrived(texts: dict[int, str | None]) -> None:
            self._failures_in_a_row = 0
            self._phase.journal.add((_key(question, index), text) for index, text in texts.items())

        def failed(error: ApiUnavailableError) -> None:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= 2 * self.endpoint.max_concurrency:
                raise ApiUnavailableError(
                    f"{self._failures_in_a_row} requests in a row got no usable answer; what came before is kept, and "
                    f"a run that is started again asks only for the rest. The last one: {error}",
                    endpoint=error.endpoint,
                    status=error.status,
                )

        await client.answer(request, missing, arrived, failed)

    def _found(self, question: _Question, indices: range) -> AgentAnswer:
        journal = self._phase.journal
        keys = {index: _key(question, index) for index in indices}
        texts = {index: self._gated(journal[key]) for index, key in keys.items() if key in journal}
        responses = {index: Response(text, [], True) for index, text in texts.items() if text is not None}
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._left_out.most_common())
        for _ in range(len(indices) - len(responses)):
            warn_once(
                self._counts,
                "missing_comparator_responses",
                f"{self.endpoint.address} gave no response for agent {question.agent} and task item "
                f"{question.item_index} where one was asked for ({reasons or 'no usable answer'}): it is left out; "
                "further ones are counted as `missing_comparator_responses`",
            )
        return AgentAnswer(plain_text(question.prompt), responses)

    def _gated(self, answer: str | None) -> str | None:
        if answer is None:
            return None
        text = encodable_text(answer)
        if text != answer:
            warn_once(
                self._counts,
                "unencodable_texts",
                f"an answer of {self.endpoint.address} holds half a character or NUL, which becomes U+FFFD; further "
                "ones are counted as `unencodable_texts`",
            )
        if self._thoughts == "strip":
            thoughts, rest = split_thoughts(text)
            if thoughts:
                warn_once(
                    self._counts,
                    "stripped_thoughts",
                    f"an answer of {self.endpoint.address} begins with thoughts, which are taken away (`thoughts`: "
                    "keep leaves them); further ones are counted as `stripped_thoughts`",
                )
                if not rest:
                    return None
                text = rest
        inert = neutralize(text, self._controls)
        if inert != text:
            warn_once(
                self._counts,
                "neutralized_texts",
                f"an answer of {self.endpoint.address} writes out a control token, which is kept as text; further "
                "ones are counted as `neutralized_texts`",
            )
        return inert


def _key(question: _Question, index: int) -> tuple[str | int, ...]:
    return ("answer", question.item_index, question.agent, index)
