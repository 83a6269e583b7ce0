"""A speaker whose one model writes the responses of all roles."""

from __future__ import annotations

from typing import Any, Protocol

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.prompts import Formatter
from pbrl_lightning.agents.roles import JointRoles
from pbrl_lightning.batches import AgentAnswer, Response, TaskItem, TeamSample
from pbrl_lightning.utils.errors import OptionTypeError


class SingleSpeaker(Protocol):
    """Who can be asked with a prompt of another's making: an :class:`AgentTeam`, or a remote model."""

    def answer(
        self, agent: int, formatter: Formatter, items: list[TaskItem], item_indices: list[int], **options: Any
    ) -> list[AgentAnswer]:
        """See :meth:`AgentTeam.answer`."""
        ...


class JointSpeaker:
    """Asks one model for the responses of all roles at once.

    Args:
        speaker: Whose model it is.
        agent: Which of its agents.
        roles: The roles, how they are joined, and how the text is taken apart.
        counts: Where texts without a tag are counted; they are left out, as a missing candidate is.
        split: Whether to give the responses by role, or the joint text as a centralised team's one response.
    """

    def __init__(self, speaker: Any, agent: int, roles: JointRoles, counts: dict[str, int], *, split: bool) -> None:
        if not hasattr(speaker, "answer"):
            raise OptionTypeError(
                f"centralised generation needs a speaker with `answer`, as AgentTeam has, got {type(speaker).__name__}"
            )
        self.speaker: SingleSpeaker = speaker
        self.agent = agent
        self.roles = roles
        self.counts = counts
        self.split = split

    def sample(self, items: list[TaskItem], item_indices: list[int], **options: Any) -> list[TeamSample]:
        """See :meth:`AgentTeam.sample`."""
        answers = self.speaker.answer(self.agent, self.roles, items, item_indices, **options)
        return [
            self._sample(item, index, answer) for item, index, answer in zip(items, item_indices, answers, strict=True)
        ]

    def _sample(self, item: TaskItem, item_index: int, answer: AgentAnswer) -> TeamSample:
        parts: dict[int, list[str]] = {}
        for candidate, response in answer.responses.items():
            found = self.roles.split(response.text)
            if found is not None:
                parts[candidate] = found
                continue
            warn_once(
                self.counts,
                "untagged_comparator_responses",
                f"a joint response of the comparator to task item {item_index} has no tag of a role and is left out; "
                "further ones are counted as `untagged_comparator_responses`",
            )
        if not self.split:
            tagged = {candidate: answer.responses[candidate] for candidate in parts}
            return TeamSample.of(item_index, [AgentAnswer(answer.prompt, tagged, answer.prompt_ids)])
        return TeamSample(
            item_index,
            self.roles.prompts(item),
            [
                {k: Response(texts[role], [], answer.responses[k].finished) for k, texts in parts.items()}
                for role in range(len(self.roles))
            ],
            joint_tokens=sum(len(response.token_ids) for response in answer.responses.values()),
        )
