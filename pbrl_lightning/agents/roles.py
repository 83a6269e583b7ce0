"""One model that writes the responses of several roles as one text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.prompts import Formatter, made_prompt, plain_text
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.utils.errors import ConfigurationError


class JointAdapter(ABC):
    """How one model is asked for the responses of all roles, and how its text is taken apart; subclass it for your own.

    ``N`` is the number of roles.
    """

    @abstractmethod
    def build(self, item: TaskItem, prompts: Sequence[str]) -> str | list[dict[str, str]]:
        """The joint prompt, as a text or as chat messages.

        Args:
            item: The task item.
            prompts: The ``N`` prompts that separate agents would get.
        """

    @abstractmethod
    def parse(self, text: str, num_roles: int) -> list[str] | None:
        """The ``N`` responses in a joint text; None if it holds none, so that it is not one."""


class TagAdapter(JointAdapter):
    r"""Responses between indexed tags, ``<agent_0> … </agent_0>``.

    Tags are found in any case and with spaces in them. A response ends at its closing tag, at the next role's opening
    tag, or at the end of the text; where a role answers twice, its first response counts.

    Example:
        >>> TagAdapter().parse("<Agent_0>Rain.</agent_0> < agent_1 > Water\nfalls.", 2)
        ['Rain.', 'Water\nfalls.']
        >>> TagAdapter().parse("<agent_1>Water falls.</agent_1>", 2)
        ['', 'Water falls.']
        >>> TagAdapter().parse("Water falls.", 2) is None
        True
    """

    # Nothing optional between two runs of spaces: the time is linear in the text.
    _TAG = re.compile(r"<\s*(?:(/)\s*)?agent[\s_]*(\d{1,9})\s*>", re.IGNORECASE)

    @override
    def build(self, item: TaskItem, prompts: Sequence[str]) -> str:
        del item
        form = "\n".join(f"<agent_{role}>response of agent {role}</agent_{role}>" for role in range(len(prompts)))
        tasks = "\n\n".join(f"### Task of agent {role}\n{prompt}" for role, prompt in enumerate(prompts))
        return (
            f"You write the responses of {len(prompts)} agents that work together. Put the response of each agent "
            f"between its own tags, in this form, and write nothing else:\n{form}\n\n{tasks}"
        )

    @override
    def parse(self, text: str, num_roles: int) -> list[str] | None:
        tags = [tag for tag in self._TAG.finditer(text) if int(tag[2]) < num_roles]
        found: dict[int, str] = {}
        for position, tag in enumerate(tags):
            role = int(tag[2])
            if tag[1] or role in found:
                continue
            ends = (later.start() for later in tags[position + 1 :] if not later[1] or int(later[2]) == role)
            found[role] = text[tag.end() : next(ends, len(text))].strip()
        return [found.get(role, "") for role in range(num_roles)] if found else None


@dataclass(frozen=True)
class JointRoles:
    """The roles that one model speaks for. Called with a task item, it is the formatter of their joint prompt.

    Attributes:
        formatters: Task item to prompt, one per role.
        adapter: Joins their prompts and takes their responses apart.
    """

    formatters: list[Formatter]
    adapter: JointAdapter

    def __len__(self) -> int:
        return len(self.formatters)

    def prompts(self, item: TaskItem) -> list[str]:
        """What separate agents would be asked, as plain texts; ``N`` of them."""
        return [plain_text(made_prompt(formatter, item)) for formatter in self.formatters]

    def __call__(self, item: TaskItem) -> Any:
        """The joint prompt: chat messages if the adapter makes some or a role's own prompt is some, else a text."""
        own = [made_prompt(formatter, item) for formatter in self.formatters]
        joint = self.adapter.build(item, [plain_text(prompt) for prompt in own])
        if isinstance(joint, str) and not all(isinstance(prompt, str) for prompt in own):
            return [{"role": "user", "content": joint}]
        return joint

    def split(self, text: str) -> list[str] | None:
        """The ``N`` responses in a joint text, None if it holds none.

        Raises:
            ConfigurationError: If the adapter gives anything but ``N`` texts.
        """
        parts = self.adapter.parse(text, len(self))
        if parts is None:
            return None
        texts = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
        if not texts or len(parts) != len(self):
            name, got = type(self.adapter).__name__, len(parts) if texts else repr(parts)
            raise ConfigurationError(f"`{name}.parse` must give {len(self)} responses or None, got {got}")
        return list(parts)

    def view(
        self, items: Sequence[TaskItem], joint_texts: Sequence[str], counts: dict[str, int]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Joint responses as the task reward sees them; a text without any tag is ``N`` empty responses, and counted.

        Args:
            items: The ``B`` task items.
            joint_texts: Their ``B`` joint texts.
            counts: Where such texts are counted.

        Returns:
            ``N`` lists of ``B`` prompts, and ``N`` lists of ``B`` responses.
        """
        parts = []
        for text in joint_texts:
            found = self.split(text)
            if found is None:
                warn_once(
                    counts,
                    "untagged_responses",
                    f"a joint response has no tag of a role, and counts as {len(self)} empty responses; "
                    "further ones are counted as `untagged_responses`",
                )
            parts.append(found if found is not None else [""] * len(self))
        by_item = {id(item): self.prompts(item) for item in {id(item): item for item in items}.values()}
        prompts = [by_item[id(item)] for item in items]  # an item stands here once per candidate
        return [list(column) for column in zip(*prompts, strict=True)], [
            list(column) for column in zip(*parts, strict=True)
        ]
