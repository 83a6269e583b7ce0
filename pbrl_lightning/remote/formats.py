"""Requests and answers of the four formats, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pbrl_lightning.agents.prompts import plain_text
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.remote.answers import STATES, WHOLE, Answer, state_of
from pbrl_lightning.remote.endpoint import ApiEndpoint, ApiKind

_STATE_NAMES: Final = ("finish_reason", "stop_reason", "status")
_SEEDS: Final = ("seed", "randomseed")


class UnreadableAnswerError(ValueError):
    """An answer that is not of its format; another attempt may bring a good one."""


class ErrorAnswerError(ValueError):
    """An answer that says it is an error, whatever its status.

    Attributes:
        code: The status or code in it, if any.
    """

    def __init__(self, message: str, code: object) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ApiRequest:
    """What a remote model is asked.

    Attributes:
        prompt: A text, or chat messages.
        num_candidates: Answers wanted.
        max_new_tokens: Most tokens of an answer.
        temperature: Sampling temperature.
        top_p: Nucleus.
        top_k: Most probable tokens kept, or None.
        agent_index: Which agent's prompt it is.
        item: The task item.
        stream: Numbers and words that tell this request from all others of a run; a seed in ``extra_body`` becomes
            another one for each.
    """

    prompt: str | list[dict[str, Any]]
    num_candidates: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.6
    top_p: float = 0.6
    top_k: int | None = 50
    agent_index: int = 0
    item: TaskItem | None = None
    stream: tuple[str | int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if a message has no text; several providers refuse such a request."""
        if isinstance(self.prompt, str):
            return not self.prompt.strip()
        said = [message["content"].strip() or message.get("tool_calls") for message in self.prompt]
        return not said or not all(said)


def request_body(endpoint: ApiEndpoint, request: ApiRequest, num_candidates: int) -> dict[str, Any]:
    """The JSON of a request for so many candidates.

    Raises:
        ValueError: If the task item cannot be written as JSON (``generic`` sends it).
    """
    usual = _BODIES[endpoint.kind](request, num_candidates)
    if endpoint.model is not None:
        usual = {"model": endpoint.model, **usual}
    renamed = {endpoint.parameter_names.get(name, name): value for name, value in usual.items()}
    further = seeded(endpoint.extra_body, request.stream)
    body = {name: value for name, value in renamed.items() if name is not None} | further
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a request must be JSON: the task item or `extra_body` is not ({error})") from None
    return body


def seeded(value: Any, stream: tuple[str | int, ...]) -> Any:
    """``extra_body`` with each seed in it counted on, so that no two requests of a run have the same one.

    Args:
        value: Any JSON; whole numbers named ``seed``, ``random_seed`` or ``randomSeed`` in it, at any depth, are seeds,
            also those written as texts.
        stream: What tells the request from others; empty leaves seeds as they are.

    Returns:
        The same with seeds in [0, 2^31), the range that all providers take.
    """
    if not stream:
        return value
    if isinstance(value, list | tuple):
        return [seeded(entry, stream) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _seed(entry, stream) if str(name).replace("_", "").lower() in _SEEDS else seeded(entry, stream)
        for name, entry in value.items()
    }


def _seed(value: Any, stream: tuple[str | int, ...]) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return str(_counted_seed(int(value), stream))
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return _counted_seed(int(value), stream)
    return seeded(value, stream)


def _counted_seed(base: int, stream: tuple[str | int, ...]) -> int:
    key = json.dumps([base, *stream]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def read_answer(endpoint: ApiEndpoint, body: Any) -> list[Answer]:
    """The candidates in an answer, each with what became of it.

    Raises:
        ErrorAnswerError: If the answer says it is an error.
        UnreadableAnswerError: If it is not of the endpoint's format.
    """
    if endpoint.kind == "generic":
        return _read_generic(body, endpoint.response_field)
    if not isinstance(body, dict):
        raise UnreadableAnswerError(f"the answer must be a JSON object, got {type(body).__name__}")
    raise_error_in(body)
    return _READERS[endpoint.kind](body)


def raise_error_in(body: dict[str, Any]) -> None:
    """Raises an ErrorAnswerError if an answer holds an error."""
    error = body.get("error")
    if error:
        details = error if isinstance(error, dict) else {}
        code = details.get("code") or details.get("status") or details.get("type")
        raise ErrorAnswerError(provider_words(body), code)


def short(text: str, length: int = 400) -> str:
    """A text for a message, not longer than it is useful."""
    return text if len(text) <= length else text[: length - 1] + "…"


def provider_words(body: Any) -> str:
    """What an error answer says, in one line."""
    words = body
    if isinstance(body, dict):
        words = next((body[name] for name in ("error", "message", "detail") if body.get(name)), body)
        if isinstance(words, dict):
            words = words.get("message") or words
    text = words if isinstance(words, str) else json.dumps(words, ensure_ascii=False)
    return " ".join(text.split())


def _generic_body(request: ApiRequest, num_candidates: int) -> dict[str, Any]:
    return {
        "prompt": request.prompt if isinstance(request.prompt, str) else plain_text(request.prompt),
        "agent_idx": request.agent_index,
        "num_return_sequences": num_candidates,
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "batch_item": request.item,
    }


def _openai_body(request: ApiRequest, num_candidates: int) -> dict[str, Any]:
    return {
        "messages": _messages(request),
        "n": num_candidates,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": False,
    }


def _anthropic_body(request: ApiRequest, _: int) -> dict[str, Any]:
    said = _messages(request)
    messages = [message for message in said if message["role"] != "system"]
    system = "\n\n".join(message["content"] for message in said if message["role"] == "system")
    if not messages:  # a request needs one
        messages, system = [{"role": "user", "content": system}], ""
    return {
        **({"system": system} if system else {}),
        "messages": messages,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "stream": False,
    }


def _responses_body(request: ApiRequest, _: int) -> dict[str, Any]:
    return {"input": request.prompt, "max_output_tokens": request.max_new_tokens, "stream": False}


_BODIES: dict[ApiKind, Callable[[ApiRequest, int], dict[str, Any]]] = {
    "generic": _generic_body,
    "openai": _openai_body,
    "anthropic": _anthropic_body,
    "openai_responses": _responses_body,
}


def _messages(request: ApiRequest) -> list[dict[str, Any]]:
    return [{"role": "user", "content": request.prompt}] if isinstance(request.prompt, str) else request.prompt


def _read_generic(body: Any, response_field: str) -> list[Answer]:
    found = body
    for name in response_field.split("."):
        if not isinstance(found, dict) or name not in found:
            if isinstance(body, dict):
                raise_error_in(body)
            there = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
            raise UnreadableAnswerError(
                f"the answer must have a list at `response_field` {response_field!r}, and has: {there}"
            )
        found = found[name]
    if not isinstance(found, list):
        raise UnreadableAnswerError(
            f"`response_field` {response_field!r} must be a list of completions, got {type(found).__name__}"
        )
    if not found and isinstance(body, dict):
        raise_error_in(body)
    answers, odd = [], []
    around = _state_around(body)
    for entry in found:
        try:
            state = _generic_state(entry)
            answers.append(Answer(_generic_text(entry), around if state == WHOLE else state))
        except UnreadableAnswerError as error:  # the others are paid for, and good
            answers.append(Answer(None, "unreadable"))
            odd.append(error)
    if odd and len(odd) == len(found):
        raise odd[0]
    return answers


def _generic_state(entry: Any) -> str:
    """By the words that servers of the other formats use, where an entry has one."""
    if not isinstance(entry, dict):
        return WHOLE
    message = entry.get("message")
    holders = (entry, message if isinstance(message, dict) else {})
    if any(holder.get("refusal") for holder in holders):
        return "refused"
    words = (holder.get(name) for name in _STATE_NAMES for holder in holders)
    return state_of("generic", next((word for word in words if isinstance(word, str) and word), None))


def _state_around(body: Any) -> str:
    """What a generic answer says of all its completions; words that are not known, such as ``ok``, say nothing."""
    words = [body.get(name) for name in _STATE_NAMES] if isinstance(body, dict) else []
    states = [STATES["generic"].get(word.lower(), WHOLE) for word in words if isinstance(word, str)]
    return next((state for state in states if state != WHOLE), WHOLE)


def _generic_text(entry: Any) -> str | None:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        for name in ("text", "content"):
            if isinstance(entry.get(name), str | list):
                return _block_text(entry[name], "text")
        if "message" in entry:
            return _generic_text(entry["message"])
        if entry.get("text", "") is None or entry.get("content", "") is None:
            return None
    got = short(json.dumps(entry), 100)
    raise UnreadableAnswerError(
        f"a completion must be a string or have `text`, `content` or `message.content`, got {got}"
    )


def _read_openai(body: dict[str, Any]) -> list[Answer]:
    if "choices" not in body:
        raise UnreadableAnswerError(f"the answer has no `choices`, but: {', '.join(map(repr, body)) or 'nothing'}")
    answers = []
    for choice in _objects(body["choices"], "choices"):
        (message,) = _objects([choice.get("message")], "message")
        state = "refused" if message.get("refusal") else state_of("openai", choice.get("finish_reason"))
        answers.append(Answer(_block_text(message.get("content"), "text"), state))
    return answers


def _read_anthropic(body: dict[str, Any]) -> list[Answer]:
    if "content" not in body:
        raise UnreadableAnswerError(f"the answer has no `content`, but: {', '.join(map(repr, body)) or 'nothing'}")
    return [Answer(_block_text(body["content"], "text"), state_of("anthropic", body.get("stop_reason")))]


def _read_responses(body: dict[str, Any]) -> list[Answer]:
    if "output" not in body:
        raise UnreadableAnswerError(f"the answer has no `output`, but: {', '.join(map(repr, body)) or 'nothing'}")
    entries = _objects(body["output"], "output")
    messages = [entry for entry in entries if entry.get("type", "message") == "message"]  # others: reasoning, tools
    blocks = [block for entry in messages for block in _objects(entry.get("content"), "content")]
    word, details = body.get("status"), body.get("incomplete_details")
    if word == "incomplete" and isinstance(details, dict):
        word = details.get("reason") or word
    state = "refused" if any(block.get("type") == "refusal" for block in blocks) else state_of("openai_responses", word)
    if state == WHOLE:  # a message has a status of its own
        states = [state_of("openai_responses", message.get("status")) for message in messages]
        state = next((own for own in states if own != WHOLE), WHOLE)
    if state == WHOLE and not messages and any(str(entry.get("type")).endswith("_call") for entry in entries):
        state = "a tool is called"
    return [Answer(_block_text(blocks, "output_text"), state)]


_READERS: dict[ApiKind, Callable[[dict[str, Any]], list[Answer]]] = {
    "openai": _read_openai,
    "anthropic": _read_anthropic,
    "openai_responses": _read_responses,
}


def _block_text(content: Any, kind: str) -> str | None:
    """The text blocks of a content, joined; None where there is none."""
    if content is None or isinstance(content, str):
        return content
    texts = [block.get("text") for block in _objects(content, "content") if block.get("type") == kind]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if found else None


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict | None) for entry in value):
        raise UnreadableAnswerError(f"`{name}` must be a list of objects, got {short(json.dumps(value), 100)}")
    return [entry or {} for entry in value]
