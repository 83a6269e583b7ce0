"""Preference pairs from JSONL lines: our own records and the chosen/rejected formats of TRL."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from pbrl_lightning.agents.prompts import render_plainly
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.preferences._records import (
    _NUMBER_KEYS,
    _TEXT_KEYS,
    RoundFileError,
    _unique_keys,
    describe,
    pair_from_record,
)
from pbrl_lightning.text_gate import encodable

Render: TypeAlias = Callable[[list[dict[str, str]], bool], str]
_Messages: TypeAlias = list[dict[str, str]]

_RECORD_KEYS = (*_TEXT_KEYS, *_NUMBER_KEYS)
_SIDES = ("chosen", "rejected")


def read_pair_lines(path: str | Path, render: Render | None = None) -> list[tuple[str, PreferencePair]]:
    r"""Read a JSONL file of pairs, each with the place where it stands.

    A line that is not blank is one of

    - a record of our own. A line that has all six keys a record must have is always read as one;
    - ``{"prompt": str, "chosen": str, "rejected": str}``. Without ``prompt`` it is empty and both whole texts are
      the completions;
    - the same with lists of messages, ``{"role": str, "content": str}``. Without ``prompt`` it is the messages that
      both sides begin with. A text ``prompt`` beside messages is the user's message, and may be theirs, too; a text
      ``chosen`` and ``rejected`` after messages are the assistant's.

    Further keys are ignored. A chosen/rejected pair is of one agent. It holds no scores (``has_rewards`` is False): the
    winner's is 1, the loser's 0 and the candidates' mean 0.5.

    Args:
        path: The file, UTF-8; a name that ends with ``.gz`` is a gzipped one.
        render: Makes text of messages, the second argument says whether the beginning of an answer is to follow
            (``add_generation_prompt``). What it adds after an answer stays part of the completion. None writes
            ``"role: content\n"`` for each message and begins an answer with ``"assistant: "``.

    Returns:
        ``(place, pair)`` in order, the place for messages: ``"pairs.jsonl, line 3"``.

    Raises:
        RoundFileError: If a line is none of these or ``render`` fails on it; the message names file and line.
        OSError: If the file cannot be read.
    """
    pairs = []
    opener = gzip.open if str(path).lower().endswith(".gz") else open
    with opener(path, "rb") as file:  # as bytes, a line ends at "\n" only: JSON texts may hold U+2028
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    pairs.append((where, pair_from_row(where, _decode(where, line), render)))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RoundFileError(f"{path} is not a whole gzip file: {error}") from error
    return pairs


def check_same_agents(places: list[tuple[str, PreferencePair]]) -> None:
    """Check that all pairs are of one team.

    Args:
        places: Pairs, each with the place where it stands.

    Raises:
        RoundFileError: If a pair is of another number of agents than the first; names the first such place.
    """
    for where, pair in places:
        first, expected = places[0][0], len(places[0][1].prompts)
        if len(pair.prompts) != expected:
            raise RoundFileError(
                f"{where}: the pair must be of the same number of agents as the first one, "
                f"{expected} ({first}), got {len(pair.prompts)}"
            )


def pair_from_row(where: str, record: object, render: Render | None = None) -> PreferencePair:
    """The pair of one of the formats that :func:`read_pair_lines` lists; its keys say which.

    Args:
        where: Its place, for messages.
        record: What was read.
        render: As there.

    Raises:
        RoundFileError: If it has none of the formats.
    """
    try:
        pair = _pair_of_object(where, record, render or render_plainly)
    except RecursionError as error:
        raise RoundFileError(f"{where}: lists or objects are nested too deeply") from error
    return replace(pair, **{key: encodable(getattr(pair, key)) for key in _TEXT_KEYS})


def _pair_of_object(where: str, record: object, render: Render) -> PreferencePair:
    if not isinstance(record, dict):
        raise RoundFileError(f"{where}: a pair must be an object, got {describe(record)}")
    if all(key in record for key in _RECORD_KEYS):
        return _pair_of_record(where, record)
    if any(key in record for key in _SIDES):
        return _pair_of_sides(where, record, render)
    if any(key in record for key in _RECORD_KEYS):
        return _pair_of_record(where, record)
    raise RoundFileError(
        f"{where}: a pair must have `chosen` and `rejected` (and may have `prompt`), or {_listed(_RECORD_KEYS)}; "
        f"got {', '.join(record) or 'no keys'}"
    )


def _decode(where: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:  # its own message would count lines from here
        raise RoundFileError(f"{where}: not a whole JSON text: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise RoundFileError(f"{where}: not a whole JSON text: {error}") from error
    except RecursionError as error:
        raise RoundFileError(f"{where}: lists or objects are nested too deeply") from error


def _pair_of_record(where: str, record: object) -> PreferencePair:
    try:
        return pair_from_record(record, file=where, index=0)
    except RoundFileError as error:
        raise RoundFileError(where + str(error).removeprefix(f"{where}, pair 0")) from None


def _pair_of_sides(where: str, record: dict[str, Any], render: Render) -> PreferencePair:
    missing = [key for key in _SIDES if key not in record]
    if missing:
        raise RoundFileError(f"{where}: `{missing[0]}` is missing; the line has {', '.join(record)}")
    given = {key: record[key] for key in ("prompt", *_SIDES) if key in record}
    for key, value in given.items():
        if not isinstance(value, str | list):
            raise RoundFileError(f"{where}: `{key}` must be a text or a list of messages, got {describe(value)}")
    if all(isinstance(value, str) for value in given.values()):
        prompt, winner, loser = given.get("prompt", ""), given["chosen"], given["rejected"]
    elif type(given["chosen"]) is not type(given["rejected"]):
        kinds = ", ".join(f"`{key}` {type(given[key]).__name__}" for key in _SIDES)
        raise RoundFileError(f"{where}: {_listed(_SIDES)} must be both texts or both lists of messages, got {kinds}")
    else:
        messages = {key: _messages(where, key, value) for key, value in given.items()}
        if isinstance(given.get("prompt"), str):
            _place_prompt(where, given["prompt"], messages)
        prompt, winner, loser = _render_sides(where, messages, render)
    if winner == loser:
        raise RoundFileError(f"{where}: `chosen` and `rejected` must differ, got twice {describe(winner)}")
    return PreferencePair([prompt], [winner], [loser], 1.0, 0.0, candidate_reward_mean=0.5, has_rewards=False)


def _place_prompt(where: str, prompt: str, messages: dict[str, _Messages]) -> None:
    """A text prompt beside messages: left out where it is the user's message that both sides begin with."""
    for key in _SIDES:
        first = next((message for message in messages[key] if message["role"] != "system"), messages[key][0])
        if first["role"] == "user":
            if first["content"].strip() != prompt.strip():
                raise RoundFileError(
                    f"{where}: `prompt` is a text, and `{key}` begins with a user's message that is another one; leave "
                    "out one of them"
                )
            messages.pop("prompt", None)


def _messages(where: str, key: str, values: str | list[Any]) -> _Messages:
    """The messages of a side, without any further keys they have."""
    if isinstance(values, str):
        return [{"role": "user" if key == "prompt" else "assistant", "content": values}]
    if not values:
        raise RoundFileError(f"{where}: `{key}` must have at least one message, got none")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise RoundFileError(f"{where}: `{key}[{index}]` must have `role` and `content`, got {describe(value)}")
        for part in ("role", "content"):
            if part not in value:
                had = ", ".join(value) or "no keys"
                raise RoundFileError(f"{where}: `{key}[{index}].{part}` is missing; the message has {had}")
            if not isinstance(value[part], str):
                raise RoundFileError(f"{where}: `{key}[{index}].{part}` must be a text, got {describe(value[part])}")
    return [{"role": value["role"], "content": value["content"]} for value in values]


def _render_sides(where: str, messages: dict[str, _Messages], render: Render) -> tuple[str, str, str]:
    """Prompt, chosen and rejected completion as texts."""
    sides = [messages[key] for key in _SIDES]
    if sides[0] == sides[1]:
        raise RoundFileError(f"{where}: `chosen` and `rejected` must differ, got the same messages twice")
    prompt = messages.get("prompt")
    if prompt is None:
        prompt = _shared_messages(where, sides)
        sides = [side[len(prompt) :] for side in sides]
    start = _call(where, render, prompt, True)
    wholes = [_call(where, render, [*prompt, *side], False) for side in sides]
    if wholes[0] == wholes[1]:
        raise RoundFileError(
            f"{where}: `chosen` and `rejected` must differ, got the same text after rendering: {describe(wholes[0])}"
        )
    if not all(whole.startswith(start) for whole in wholes):
        # Templates may begin an answer otherwise than they write a given one: an empty thinking block, for one.
        start = wholes[0][: _count_shared(*wholes)]
    return start, wholes[0][len(start) :], wholes[1][len(start) :]


def _shared_messages(where: str, sides: list[_Messages]) -> _Messages:
    """The messages that both sides begin with."""
    shared = _count_shared(*sides)
    if not shared:
        raise RoundFileError(
            f"{where}: without `prompt`, `chosen` and `rejected` must begin with the same messages, but their first "
            "ones differ; give them as `prompt`"
        )
    if shared == min(map(len, sides)):
        raise RoundFileError(
            f"{where}: without `prompt`, `chosen` and `rejected` must each have a message after those they share, "
            f"but the shorter one ends after {shared}"
        )
    return sides[0][:shared]


def _call(where: str, render: Render, messages: _Messages, add_generation_prompt: bool) -> str:
    try:
        text = render([dict(message) for message in messages], add_generation_prompt)
    except Exception as error:  # a chat template that refuses a role, or anything of the user's
        raise RoundFileError(f"{where}: `render` failed: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise RoundFileError(f"{where}: `render` must return a text, got {describe(text)}")
    return text


def _count_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many characters or messages both begin with."""
    shortest = min(len(left), len(right))
    return next((index for index in range(shortest) if left[index] != right[index]), shortest)


def _listed(keys: Iterable[str]) -> str:
    *most, last = [f"`{key}`" for key in keys]
    return f"{', '.join(most)} and {last}"
