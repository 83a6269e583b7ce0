"""A server on loopback that speaks the four API formats and misbehaves to order, down to single bytes.

with FakeApi(["503", "reset", "ok"]) as api:
    ...  # ApiEndpoint(api.url_of("openai"), format="openai", model="any")

A behaviour is a status ("429": an error with the provider's words), a name of `SHAPES` or `TRANSPORTS`, a `Reply`, or a
function of the request (`Seen`) that gives one of these. Texts are counted, so that no two candidates are equal.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

PATHS = {
    "generic": "/generate",
    "openai": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "openai_responses": "/v1/responses",
}
ASKED = {"generic": "num_return_sequences", "openai": "n"}
WORDS = {"402": "Insufficient Balance", "429": "slow down", "529": "the servers are overloaded"}
REFUSAL = "I cannot help with that."


@dataclass
class Reply:
    """What is sent and how; a body that is not bytes is sent as JSON."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    transport: str = "whole"


@dataclass
class Seen:
    """One request as it arrived, and what was done with it."""

    number: int
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: dict
    time: float  # time.monotonic() when it was complete
    in_flight: int = 1  # how many were being answered then, itself included
    behaviour: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def format(self) -> str:
        return next((name for name, path in PATHS.items() if path == self.path.partition("?")[0]), "generic")

    @property
    def n(self) -> int:
        return self.body.get(ASKED.get(self.format, ""), 1)

    @property
    def prompt(self) -> str:
        """The text of the last message, or of the whole prompt."""
        prompt = next((self.body[name] for name in ("prompt", "messages", "input") if name in self.body), "")
        return prompt if isinstance(prompt, str) else prompt[-1]["content"]


Behaviour = str | Reply | Callable[[Seen], "Behaviour"]


THINKING = {"type": "thinking", "thinking": "hm", "text": "hm"}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


def blocks(kind: str, *texts: str | None) -> list[dict]:
    return [{"type": kind, "text": text} for text in texts]


def chat_message(shape: str, text: str) -> dict | None:
    return {
        "null_message": None,
        "null_content": {"role": "assistant", "content": None},
        "refusal": {"role": "assistant", "content": None, "refusal": REFUSAL},
        "other_blocks_first": {"role": "assistant", "reasoning_content": "hm", "content": text},
        "two_blocks": {"role": "assistant", "content": blocks("text", text[:3], text[3:])},
    }.get(shape, {"role": "assistant", "content": text, "refusal": None})


def content(kind: str, shape: str, text: str) -> list[dict] | None:
    return {
        "null_message": None,
        "null_content": blocks(kind, None),
        "refusal": [] if kind == "text" else [{"type": "refusal", "refusal": REFUSAL}],
        "other_blocks_first": [THINKING, *blocks(kind, text)],
        "two_blocks": blocks(kind, text[:3], text[3:]),
    }.get(shape, blocks(kind, text))


def answer(api_format: str, shape: str, texts: list[str]) -> dict:
    """A body of the format; candidates look good unless the shape says otherwise."""
    messages = [chat_message(shape, text) for text in texts]
    if api_format == "generic":
        odd = shape.startswith(("null", "refusal", "other", "two"))
        return {"completions": [{"message": message} for message in messages] if odd else texts}
    if api_format == "openai":
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i, message in enumerate(messages)]
        return {"id": "c-1", "object": "chat.completion", "choices": choices}
    if api_format == "anthropic":
        inner = content("text", shape, texts[0]) if texts else []
        stop = "refusal" if shape == "refusal" else "end_turn"
        return {"id": "m-1", "type": "message", "role": "assistant", "content": inner, "stop_reason": stop}
    output = [{"type": "message", "role": "assistant", "content": content("output_text", shape, t)} for t in texts]
    # A good answer of the real service says `"error": null` too, and reasoning comes first.
    return {"id": "r-1", "object": "response", "error": None, "output": [REASONING, *output] if output else []}


# How many candidates come back for n asked; the formats without n give at most one.
COUNTS = {"empty": lambda n: 0, "one": lambda n: 1, "fewer": lambda n: n - 1, "more": lambda n: n + 2}
SHAPES = ("ok", *COUNTS, "duplicates", "null_message", "null_content", "refusal", "other_blocks_first", "two_blocks")
TRANSPORTS = ("reset", "close", "silent", "trickle", "trickle_head", "cut", "endless", "stale")
BODIES = ("half_json", "html", "sse", "not_utf8", "deep", "error_200", "large", "gzip_bomb")


def error_reply(seen: Seen, status: str, code=None, words=None, headers=None) -> Reply:
    """An error as the provider of the format words it."""
    inner = {"message": words or WORDS.get(status, f"words on {status}"), "type": "an_error", "code": code}
    body = {"generic": {"detail": inner["message"]}, "anthropic": {"type": "error", "error": inner}}
    return Reply(body.get(seen.format, {"error": inner}), int(status), headers or {})


def rejects(parameter: str) -> Callable[[Seen], Behaviour]:
    """An endpoint that does not know a parameter."""
    words = f"Unsupported parameter: '{parameter}' is not supported with this model."
    return lambda seen: error_reply(seen, "400", "unsupported_parameter", words) if parameter in seen.body else "ok"


def odd_body(name: str, good: bytes, padding: bytes) -> Reply:
    html, sse = {"Content-Type": "text/html"}, {"Content-Type": "text/event-stream"}
    return {
        "half_json": Reply(good[: len(good) // 2]),
        "html": Reply(b"<html><body>Bad gateway</body></html>", headers=html),
        "sse": Reply(b"data: " + good + b"\n\ndata: [DONE]\n\n", headers=sse),
        "not_utf8": Reply(good[:-2] + b"\xff\xfe" + good[-2:]),
        "deep": Reply(b"[" * 100_000),
        "error_200": Reply({"error": {"message": "the servers are overloaded", "type": "overloaded_error"}}),
        "large": Reply(padding + good),
        "gzip_bomb": Reply(gzip.compress(padding + good), headers={"Content-Encoding": "gzip"}),
    }[name]


class FakeApi:
    """Serves while the `with` block lasts.

    Args:
        behaviour: One behaviour, or a list with one per request of which the last one repeats.
        latency: Seconds before each reply, or a function of the request.
        write: Gives a candidate's text from the keywords `number`, `prompt` and `seen`; it must keep texts apart.
        large: Bytes of the bodies `large` and `gzip_bomb`.
    """

    def __init__(self, behaviour="ok", latency=0.0, write="text {number} for {prompt}".format, large=2**20) -> None:
        self.behaviour, self.latency, self.write, self.large = behaviour, latency, write, large
        self.requests: list[Seen] = []
        self.faults: list[Exception] = []
        self.connections = self._written = 0
        self._answering: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, api_format: str) -> str:
        return self.url + PATHS[api_format]

    @property
    def most_in_flight(self) -> int:
        return max((seen.in_flight for seen in self.requests), default=0)

    @property
    def in_flight(self) -> int:
        """Requests whose client is still there and waiting."""
        return sum(not (reader.at_eof() or writer.is_closing()) for reader, writer in [*self._answering.values()])

    def __enter__(self) -> FakeApi:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self.faults, f"the fake server itself failed: {self.faults}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()  # asyncio.run cancels the connections

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        # A client that goes away is not our fault, nor is the end of the test.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            keep = True
            while keep:
                seen = await self._read(reader)
                self._answering[number] = (reader, writer)
                seen.in_flight = self.in_flight
                keep = await self._answer(seen, reader, writer)
                del self._answering[number]
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        seen = Seen(len(self.requests), method, path, headers, json.loads(body or b"{}"), time.monotonic())
        self.requests.append(seen)
        return seen

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        try:
            reply = self._reply(seen)
            await asyncio.sleep(self.latency(seen) if callable(self.latency) else self.latency)
        except Exception as fault:
            self.faults.append(fault)
            return False
        for piece in raw_pieces(reply):
            if reader.at_eof() or writer.is_closing():
                return False
            writer.write(piece)
            await writer.drain()
            if reply.transport.startswith("trickle"):
                await asyncio.sleep(0.02)
        if reply.transport == "silent":
            await reader.read()
        if reply.transport == "reset":  # closing with a linger time of 0 sends RST instead of FIN
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return reply.transport == "whole"

    def _reply(self, seen: Seen) -> Reply:
        listed = self.behaviour if isinstance(self.behaviour, list) else [self.behaviour]
        behaviour = listed[min(seen.number, len(listed) - 1)]
        while callable(behaviour):
            behaviour = behaviour(seen)
        seen.behaviour = "reply" if isinstance(behaviour, Reply) else behaviour
        if isinstance(behaviour, Reply):
            return behaviour
        if behaviour.isdigit():
            return error_reply(seen, behaviour)
        if behaviour not in (*SHAPES, *TRANSPORTS, *BODIES):
            raise ValueError(f"no behaviour is called {behaviour!r}")
        good = self._good_answer(seen, behaviour)
        if behaviour in BODIES:
            return odd_body(behaviour, json.dumps(good).encode(), b" " * self.large)
        return Reply(good, transport=behaviour if behaviour in TRANSPORTS else "whole")

    def _good_answer(self, seen: Seen, shape: str) -> dict:
        count = COUNTS.get(shape, int)(seen.n)
        for _ in range(count if seen.format in ASKED else min(count, 1)):
            seen.texts.append(self.write(number=self._written, prompt=seen.prompt, seen=seen))
            self._written += 1
        if shape == "duplicates":
            seen.texts = seen.texts[:1] * len(seen.texts)
        return answer(seen.format, shape, seen.texts)


def raw_pieces(reply: Reply) -> Iterator[bytes]:
    """The bytes of a response, in the pieces in which they are sent."""
    if reply.transport in ("reset", "close", "silent"):
        return
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    length = {"trickle": len(body) + 10_000, "endless": 0}.get(reply.transport, len(body))
    sizes = {"Transfer-Encoding": "chunked"} if reply.transport == "endless" else {"Content-Length": str(length)}
    headers = {"Content-Type": "application/json", **sizes, **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} ", *map(": ".join, headers.items()), "", ""]
    head = "\r\n".join(lines).encode("latin-1")
    # Trickling, each byte comes in time for a timeout per read.
    yield from (bytes([byte]) for byte in head) if reply.transport == "trickle_head" else [head]
    if reply.transport == "trickle":
        for _ in range(10_000):
            yield b" "
    elif reply.transport == "endless":
        while True:
            yield b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    yield body[: len(body) // 2] if reply.transport == "cut" else body
