"""Asks a remote model, with retries, limits and no surprises."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httpx2
import tenacity

from pbrl_lightning.concurrency import all_of
from pbrl_lightning.remote.answers import Answer
from pbrl_lightning.remote.endpoint import ApiEndpoint
from pbrl_lightning.remote.errors import ApiRejectedError, ApiUnavailableError
from pbrl_lightning.remote.formats import (
    ApiRequest,
    ErrorAnswerError,
    UnreadableAnswerError,
    provider_words,
    read_answer,
    request_body,
    short,
)
from pbrl_lightning.utils.errors import ConfigurationError

_log = logging.getLogger(__name__)

_RETRIED_STATUSES = (408, 409, 429)
_REJECTED_CODES = ("insufficient_quota", "billing_hard_limit_reached", "invalid_api_key")
_EMPTY_ANSWERS = 2
_HINTS = {
    400: "a parameter that it does not take can be renamed or left out by `parameter_names`; for one candidate per "
    "request set `max_n_per_request: 1`",
    401: "is the key's environment variable (`key_env`) the right one?",
    402: "the account has no balance",
    403: "the key may not use this model or address",
    404: "are `url` and `model` right?",
}


class _FailedAttemptError(Exception):
    """An attempt that is worth another one."""

    def __init__(self, reason: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


class ApiClient:
    """Asks one endpoint from one event loop: ``async with ApiClient(endpoint) as client: …``.

    Args:
        endpoint: Where and how.

    Attributes:
        left_out: How many candidates have no text, by the reason that their answer gave.
    """

    def __init__(self, endpoint: ApiEndpoint) -> None:
        self.endpoint = endpoint
        self.left_out: Counter[str] = Counter()
        self._limit = asyncio.Semaphore(endpoint.max_concurrency)
        # Redirects would carry the key to another host; time is limited as a whole, per attempt.
        self._http = httpx2.AsyncClient(
            timeout=None,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=endpoint.max_concurrency),
            trust_env=not endpoint.is_loopback,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, traceback)

    async def answer(
        self,
        request: ApiRequest,
        indices: Sequence[int],
        arrived: Callable[[dict[int, str | None]], None] | None = None,
        failed: Callable[[ApiUnavailableError], None] | None = None,
    ) -> dict[int, str]:
        """Answers for these candidate indices, in as few requests as the endpoint allows.

        Where fewer come than asked for, the rest is asked for again; refused, unfinished and blank ones came too.

        Args:
            request: What is asked; its ``num_candidates`` is not read.
            indices: Candidate indices.
            arrived: Called with each answer's texts by index, None where there is no text, as it arrives.
            failed: Called with each request's failure; without it the first is raised when the others have ended.

        Returns:
            Text by candidate index; an index without one is left out.

        Raises:
            ApiRejectedError: If the endpoint refuses such requests.
            ApiUnavailableError: If a request got no usable answer.
        """
        size = self.endpoint.max_n or max(1, len(indices))
        parts = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
        found: dict[int, str] = {}
        failures: list[ApiUnavailableError] = []

        async def one(missing: list[int]) -> None:
            try:
                await fill(missing)
            except ApiUnavailableError as error:  # the other requests are paid for, and go on
                (failed or failures.append)(error)

        async def fill(missing: list[int]) -> None:
            empty = 0
            while missing and empty < _EMPTY_ANSWERS:
                stream = (*request.stream, missing[0]) if request.stream else ()
                texts = await self.ask(replace(request, stream=stream), len(missing))
                empty += not texts
                answers = dict(zip(missing, texts, strict=False))
                missing = missing[len(texts) :]
                found.update({index: text for index, text in answers.items() if text is not None})
                if arrived is not None and answers:
                    arrived(answers)

        await all_of(one(part) for part in parts)
        if failures:
            raise failures[0]
        return found

    async def ask(self, request: ApiRequest, num_candidates: int | None = None) -> list[str | None]:
        """One request, repeated until it is answered.

        Args:
            request: What is asked.
            num_candidates: Answers wanted; None takes the request's.

        Returns:
            The answers that came, at most as many as wanted; None for one whose state does not say that it is one, or
            that is blank (:class:`pbrl_lightning.remote.answers.Answer`).

        Raises:
            ConfigurationError: If the prompt is empty, which several providers refuse.
            ApiRejectedError: If the endpoint refuses such requests.
            ApiUnavailableError: If attempts or deadline ran out.
        """
        if request.is_empty:
            raise ConfigurationError("the prompt of a request must not be empty")
        wanted = num_candidates or request.num_candidates
        body = request_body(self.endpoint, request, wanted)
        # Held through the waits: while an endpoint is overloaded, others do not use up their attempts.
        async with self._limit:
            answers = (await self._repeat(body))[:wanted]
        self.left_out.update(answer.reason for answer in answers if answer.text is None)
        return [answer.text for answer in answers]

    async def _repeat(self, body: dict[str, Any]) -> list[Answer]:
        endpoint, started = self.endpoint, time.monotonic()
        last: _FailedAttemptError | None = None

        def wait(state: tenacity.RetryCallState) -> float:
            backoff = min(endpoint.wait_max, endpoint.wait_initial * 2 ** (state.attempt_number - 1))
            jittered = backoff * random.uniform(0.5, 1.0)
            named = last.retry_after if last is not None else None
            return jittered if named is None else named + min(jittered, 1.0)

        def announce(state: tenacity.RetryCallState) -> None:
            pause = state.next_action.sleep if state.next_action is not None else 0.0
            _log.warning(
                "attempt %d of %d at %s failed (%s); again in %.1f s",
                state.attempt_number,
                endpoint.max_attempts,
                endpoint.address,
                last,
                pause,
            )

        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_FailedAttemptError),
            stop=tenacity.stop_after_attempt(endpoint.max_attempts),
            wait=wait,
            before_sleep=announce,
            reraise=True,
        )
        number = 0
        try:
            async with asyncio.timeout(endpoint.deadline):
                async for attempt in attempts:
                    with attempt:
                        number += 1
                        try:
                            return read_answer(endpoint, await self._post(body))
                        except (UnreadableAnswerError, ErrorAnswerError) as error:
                            last = self._failed_answer(error)
                        except _FailedAttemptError as error:
                            last = error
                        if time.monotonic() - started + (last.retry_after or 0.0) > endpoint.deadline:
                            raise TimeoutError
                        raise last from None
        except (TimeoutError, _FailedAttemptError):
            pass
        seconds = time.monotonic() - started
        reason = "no answer" if last is None else str(last)
        if last is not None and last.retry_after is not None:
            reason += f" (it asks to wait {last.retry_after:.0f} s)"
        raise ApiUnavailableError(
            f"{endpoint.address} gave no usable answer in {number} attempts and {seconds:.1f} s: {reason}",
            endpoint=endpoint.address,
            status=last.status if last is not None else None,
        )

    async def _post(self, body: dict[str, Any]) -> Any:
        """The JSON of one answer."""
        endpoint = self.endpoint
        kind = {"content-type": "application/json"}
        content = json.dumps(body, allow_nan=False)  # ASCII: a lone surrogate of a text can be sent
        status, answered, data = 0, dict[str, str](), b""
        failure: _FailedAttemptError | None = None
        try:
            async with (
                asyncio.timeout(endpoint.timeout),
                self._http.stream(
                    "POST", endpoint.url, content=content, headers=kind | endpoint.request_headers()
                ) as response,
            ):
                status, answered = response.status_code, dict(response.headers)
                data = await self._read(response)
        except TimeoutError:
            failure = _FailedAttemptError(f"no whole answer within {endpoint.timeout:g} s")
        except httpx2.HTTPError as error:
            words = endpoint.redact(str(error) or "the connection broke")
            failure = _FailedAttemptError(f"{type(error).__name__}: {words}")
        except _FailedAttemptError as error:
            failure = error
        if status >= 300:  # whatever became of its body
            self._raise_for_status(status, answered, data)
        if failure is not None:
            raise failure
        try:
            # Only what looks like a key: "EMPTY", the key of many servers, may be a word of an answer too.
            return self._clean(json.loads(data), 16)
        except (ValueError, RecursionError):
            start = short(" ".join(endpoint.redact(data.decode(errors="replace")).split()), 120)
            said = endpoint.redact(answered.get("content-type", "unknown content"))
            raise _FailedAttemptError(f"the answer is no JSON ({said}): {start!r}", status) from None

    def _clean(self, value: Any, shortest: int) -> Any:
        """An answer without the keys that its request was sent with, which a server may repeat."""
        if isinstance(value, str):
            return self.endpoint.redact(value, shortest)
        if isinstance(value, list):
            return [self._clean(entry, shortest) for entry in value]
        if isinstance(value, dict):
            return {name: self._clean(entry, shortest) for name, entry in value.items()}
        return value

    async def _read(self, response: httpx2.Response) -> bytes:
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > self.endpoint.max_response_bytes:
                limit = self.endpoint.max_response_bytes
                raise _FailedAttemptError(f"the answer has more than `max_response_bytes` ({limit})")
        return bytes(data)

    def _raise_for_status(self, status: int, headers: dict[str, str], data: bytes) -> None:
        try:
            body = self._clean(json.loads(data), 4)
        except (ValueError, RecursionError):
            body = self.endpoint.redact(data.decode(errors="replace"))
        words = short(self.endpoint.redact(provider_words(body))) or "nothing more"
        error = body.get("error") if isinstance(body, dict) else None
        code = error.get("code") or error.get("type") if isinstance(error, dict) else None
        if (status >= 500 or status in _RETRIED_STATUSES) and code not in _REJECTED_CODES:
            raise _FailedAttemptError(f"status {status}: {words}", status, _retry_after(headers.get("retry-after")))
        if status < 400:
            target = self.endpoint.redact(headers.get("location", "nowhere"))
            words = f"it redirects to {target}, and redirects are not followed: give the final `url`"
        raise self._rejected(status, words)

    def _failed_answer(self, error: UnreadableAnswerError | ErrorAnswerError) -> _FailedAttemptError:
        """What an answer with status 200 that is none counts as; raises for one that another attempt will not mend."""
        words = short(self.endpoint.redact(str(error)))
        if isinstance(error, ErrorAnswerError):
            digits = str(error.code)
            code = int(digits) if digits.isascii() and digits.isdecimal() else error.code
            final = isinstance(code, int) and 400 <= code < 500 and code not in _RETRIED_STATUSES
            if final or code in _REJECTED_CODES:
                raise self._rejected(code if isinstance(code, int) else 200, words)
        return _FailedAttemptError(words, 200)

    def _rejected(self, status: int, words: str) -> ApiRejectedError:
        hint = f" ({_HINTS[status]})" if status in _HINTS else ""
        address = self.endpoint.address
        return ApiRejectedError(f"{address} answered {status}: {words}{hint}", endpoint=address, status=status)


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None
