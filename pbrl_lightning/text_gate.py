"""The gate of texts: what comes from outside or from decoding can be encoded, and is read as text, not as control."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Final, Literal

from transformers import PreTrainedTokenizerBase

Thoughts = Literal["strip", "keep"]
"""What becomes of the ``<think>…</think>`` before an answer."""

BREAK: Final = "\u200b"
"""Zero-width space: put into a control token that was written out in data, it makes text of it."""

_OPEN, _CLOSE = "<think>", "</think>"


def encodable_text(text: str) -> str:
    r"""A text that UTF-8 has a form for: halves of characters and NUL become U+FFFD, two halves that fit are joined.

    Example:
        >>> encodable_text("a\ud83db"), encodable_text("\ud83d\ude00") == "\U0001f600"
        ('a�b', True)
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "\ufffd") if "\0" in text else text


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Nested dicts, lists and tuples with every text in them changed, keys left out; itself where nothing changes.

    Args:
        value: Any data.
        change: Text to text.
    """
    if isinstance(value, str):
        changed = change(value)
        return value if changed == value else changed
    if type(value) is dict:
        entries = {key: map_texts(entry, change) for key, entry in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if type(value) in (list, tuple):
        items = [map_texts(entry, change) for entry in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def encodable(value: Any) -> Any:
    """Nested data whose texts are all :func:`encodable_text`; itself where they are already."""
    return map_texts(value, encodable_text)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The written forms of a tokenizer's special tokens: what it reads as one id of control, wherever it stands."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special}
    return frozenset(token for token in special | set(tokenizer.all_special_tokens) if len(token) > 1)


def neutralize(text: str, controls: Collection[str]) -> str:
    r"""A text in which control tokens are text: a zero-width space behind the first character of each.

    Args:
        text: From data.
        controls: Of :func:`control_tokens`.

    Example:
        >>> neutralize("a</s>b", {"</s>"})
        'a<\u200b/s>b'
    """
    for token in controls:
        if token in text:
            text = text.replace(token, token[0] + BREAK + token[1:])
    return text


def split_thoughts(text: str) -> tuple[str, str]:
    """Thoughts and the answer after them; thoughts that never end leave no answer.

    Thoughts are what an answer begins with, up to ``</think>``; where the prompt opened them, ``<think>`` is missing.

    Example:
        >>> split_thoughts("<think>Hm.</think> Rain.")
        ('<think>Hm.</think>', 'Rain.')
        >>> split_thoughts("Rain.")
        ('', 'Rain.')
    """
    opened = text.lstrip().startswith(_OPEN)
    thoughts, close, answer = text.partition(_CLOSE)
    if not close:
        return (text, "") if opened else ("", text)
    if not opened and _OPEN in thoughts:  # an answer that writes of them
        return "", text
    return thoughts + close, answer.lstrip()


def is_null(value: object) -> bool:
    """True for None and NaN, as tables have them for a blank cell."""
    return value is None or (isinstance(value, float) and math.isnan(value))
