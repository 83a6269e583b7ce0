"""Task items that are chats: their messages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.utils.errors import ConfigurationError

Message: TypeAlias = dict[str, Any]
"""``{"role": …, "content": …}``; further entries go to the chat template as they are."""


def is_chat(value: object) -> bool:
    """True if a field's value is meant as chat messages, well-formed or not."""
    if not isinstance(value, list):
        return False
    return any(isinstance(entry, dict) and not entry.keys().isdisjoint(("role", "content")) for entry in value)


def checked_messages(where: str, messages: Sequence[Any]) -> list[Message]:
    """Chat messages without their empty entries, such as the ``tool_calls: null`` of tables.

    A role is any text: which ones there are is the chat template's to say.

    Args:
        where: What to call them in errors.
        messages: At least one.

    Raises:
        ConfigurationError: If one has no role or no text; names the message.

    Example:
        >>> checked_messages("`prompt`", [{"role": "user", "content": "Hi", "tool_calls": None}])
        [{'role': 'user', 'content': 'Hi'}]
        >>> checked_messages("`prompt`", [{"role": "user", "content": "Hi"}, {"role": "user"}])
        Traceback (most recent call last):
        pbrl_lightning.utils.errors.ConfigurationError: `prompt`, message 1: `content` must be a text, got None
    """
    if not messages:
        raise ConfigurationError(f"{where} must have at least one chat message, got none")
    return [_checked(f"{where}, message {index}", message) for index, message in enumerate(messages)]


def _checked(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigurationError(f"{where}: a dict with `role` and `content` is needed, got {_short(message)}")
    kept = {name: value for name, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str) or not kept["role"]:
        raise ConfigurationError(f"{where}: `role` must be a text such as 'user', got {_short(message.get('role'))}")
    if kept.get("tool_calls") and "content" not in kept:
        kept["content"] = ""  # an assistant that only called tools said nothing
    if not isinstance(kept.get("content"), str):
        hint = " (images and sound are not supported)" if isinstance(kept.get("content"), list) else ""
        raise ConfigurationError(f"{where}: `content` must be a text, got {_short(message.get('content'))}{hint}")
    return kept


def conversation_of(item: TaskItem, field: str = "prompt") -> list[Message] | None:
    """The messages that an agent is to answer, if the task item's field holds some; None if it is a text or so.

    Args:
        item: The task item.
        field: Where they are; for ``prompt``, an item that has none of it may have ``messages``.

    Raises:
        ConfigurationError: If a message is malformed, or the last one is the assistant's: there is nothing to answer.
    """
    if field == "prompt" and field not in item:
        field = "messages"
    if not is_chat(item.get(field)) and item.get(field) != []:
        return None
    messages = checked_messages(f"`{field}`", item[field])
    if messages[-1]["role"] == "assistant":
        raise ConfigurationError(
            f"`{field}`, message {len(messages) - 1}: the last message is the assistant's, which leaves nothing to "
            "answer; take it out, or give a formatter that does"
        )
    return messages


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"
