"""What became of an answer: whether the model that gave it was done."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any, Final

from pbrl_lightning.remote.endpoint import ApiKind

WHOLE: Final = "whole"
CUT: Final = "cut"

_CHAT: Final = {
    "stop": WHOLE,
    "eos": WHOLE,  # this to "end_turn": servers beside OpenAI's
    "eos_token": WHOLE,
    "stop_sequence": WHOLE,
    "end_turn": WHOLE,
    "length": CUT,
    "max_tokens": CUT,
    "model_length": CUT,
    "content_filter": "filtered",
    "tool_calls": "a tool is called",
    "function_call": "a tool is called",
    "insufficient_system_resource": "failed",
    "error": "failed",
    "abort": "cancelled",
}
STATES: Final[dict[ApiKind, dict[str, str]]] = {
    "openai": _CHAT,
    "anthropic": {
        "end_turn": WHOLE,
        "stop_sequence": WHOLE,
        "max_tokens": CUT,
        "model_context_window_exceeded": CUT,
        "refusal": "refused",
        "tool_use": "a tool is called",
        "pause_turn": "paused",
    },
    "openai_responses": {
        "completed": WHOLE,
        "max_output_tokens": CUT,  # this and the next: why one is incomplete
        "content_filter": "filtered",
        "incomplete": "incomplete",
        "failed": "failed",
        "cancelled": "cancelled",
        "queued": "unfinished",
        "in_progress": "unfinished",
    },
    "generic": _CHAT
    | {
        "completed": WHOLE,
        "max_new_tokens": CUT,
        "incomplete": "incomplete",
        "failed": "failed",
        "cancelled": "cancelled",
        "refusal": "refused",
    },
}
"""What each format's word for an answer's end says: that it is whole, that it was cut at the limit of tokens, or why it
is not to be used. An answer without such a word counts as whole."""


@dataclass(frozen=True)
class Answer:
    """One candidate of a remote model.

    Attributes:
        content: What it wrote, as far as it got; None for nothing.
        state: ``whole``, ``cut``, or why it is not to be used.
    """

    content: str | None
    state: str = WHOLE

    @property
    def text(self) -> str | None:
        """The completion: only of an answer that is whole or cut, and never a blank one; None otherwise."""
        usable = self.state in (WHOLE, CUT) and self.content is not None and not _is_blank(self.content)
        return self.content if usable else None

    @property
    def reason(self) -> str:
        """Why there is no text."""
        if self.state == CUT:
            return "cut before its first word"
        return "empty" if self.state == WHOLE else self.state


def _is_blank(text: str) -> bool:
    """True if nothing of it can be seen: white space, controls, characters of no width."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


def state_of(kind: ApiKind, word: Any) -> str:
    """What an answer's own word for its end says.

    Args:
        kind: The format.
        word: The word; None or an empty one where the server gives none.
    """
    if word is None or word == "":
        return WHOLE
    return STATES[kind].get(str(word).lower(), f"in the unknown state {str(word)[:40]!r}")
