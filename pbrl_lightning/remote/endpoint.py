"""Where a remote model is, how it is spoken to, and with which limits."""

from __future__ import annotations

import ipaddress
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from pbrl_lightning.utils.errors import ConfigurationError, raise_together
from pbrl_lightning.utils.secrets import (
    looks_secret,
    may_be_secret,
    names_secret,
    path_holds_secret,
    secret_places,
    without_secret,
)

ApiFormat = Literal["generic", "openai", "anthropic", "openai_responses", "responses", "codex"]
ApiKind = Literal["generic", "openai", "anthropic", "openai_responses"]

PARAMETERS: Final[dict[ApiKind, tuple[str, ...]]] = {
    "generic": (
        "model",
        "prompt",
        "agent_idx",
        "num_return_sequences",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "batch_item",
    ),
    "openai": ("model", "messages", "n", "max_tokens", "temperature", "top_p", "stream"),
    "anthropic": ("model", "system", "messages", "max_tokens", "temperature", "stream"),
    "openai_responses": ("model", "input", "max_output_tokens", "stream"),
}
"""What a request of each format holds, by its usual names."""

_KEY_ENV: Final[dict[ApiKind, str | None]] = {
    "generic": None,  # no provider's key goes to an address that is not known to be that provider's
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "openai_responses": "OPENAI_API_KEY",
}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENV = re.compile(rf"\$\{{({_ENV_NAME.pattern})\}}")
_PLAIN_NAME = re.compile(r"(?=(?:\D*\d){0,3}\D*$)[A-Za-z0-9_]{1,40}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True)
class ApiEndpoint:
    """A remote model.

    Keys are never options: they are read from environment variables when a request is sent.

    Attributes:
        url: The full address that requests are posted to.
        format: ``generic``, ``openai`` (Chat Completions), ``anthropic`` (Messages), or ``openai_responses`` (also
            called ``responses`` or ``codex``).
        model: The model's name; only ``generic`` can do without.
        key_env: Environment variable that holds the key; empty sends none. Default by format: ``ANTHROPIC_API_KEY`` or
            ``OPENAI_API_KEY``, where it is set; ``generic`` sends a key only if this names one.
        headers: Further headers; ``${NAME}`` stands for an environment variable.
        extra_body: Further parameters of a request; they win over the usual ones.
        parameter_names: Usual parameter name to the endpoint's own, or to null for one that it does not take.
        response_field: Where a generic answer has its list of completions, as a dotted path.
        max_n_per_request: Most candidates asked for at once; 1 for DeepSeek's endpoints unless set.
        max_concurrency: Most requests in flight, per process.
        timeout: Seconds for one attempt, from connecting to the last byte.
        max_attempts: Attempts per request.
        deadline: Seconds for a request with all its attempts and waits.
        wait_initial: Seconds before the second attempt; doubles each time, with jitter. ``Retry-After`` goes before.
        wait_max: Most seconds between attempts, where the endpoint names none.
        max_response_bytes: A larger answer is broken off.

    Raises:
        ConfigurationError: If options are out of range or do not fit together, or a key is given literally; names all.
    """

    url: str
    format: ApiFormat = "generic"
    model: str | None = None
    key_env: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    parameter_names: dict[str, str | None] = field(default_factory=dict)
    response_field: str = "completions"
    max_n_per_request: int | None = None
    max_concurrency: int = 8
    timeout: float = 120.0
    max_attempts: int = 6
    deadline: float = 600.0
    wait_initial: float = 0.5
    wait_max: float = 30.0
    max_response_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        problems = _url_problems(self.url)
        if self.format not in get_args(ApiFormat):
            problems.append(f"`format` must be one of {', '.join(get_args(ApiFormat))}, got {self.format!r}")
        else:
            problems += self._format_problems()
        if self.extra_body.get("stream"):
            problems.append("`extra_body` must not ask for a stream: answers are read whole")
        if not all(self.response_field.split(".")):
            problems.append(f"`response_field` must be a dotted path such as 'data.texts', got {self.response_field!r}")
        for name in ("max_concurrency", "max_attempts", "max_response_bytes", "max_n_per_request"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"`{name}` must be >= 1, got {value}")
        for name in ("timeout", "deadline"):
            if not getattr(self, name) > 0:
                problems.append(f"`{name}` must be > 0 seconds, got {getattr(self, name)}")
        for name in ("wait_initial", "wait_max"):
            if not getattr(self, name) >= 0:
                problems.append(f"`{name}` must be >= 0 seconds, got {getattr(self, name)}")
        problems += self._literal_keys()
        raise_together(problems)
        if urlsplit(self.url).scheme == "http" and not self.is_loopback:
            warnings.warn(
                f"{self.address} is plain http to another machine: prompts, answers and keys can be read on the way",
                stacklevel=3,
            )

    @property
    def kind(self) -> ApiKind:
        """The format without its aliases."""
        return "openai_responses" if self.format in ("responses", "codex") else self.format  # type: ignore[return-value]

    @property
    def address(self) -> str:
        """The address without its query, for messages."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    @property
    def is_loopback(self) -> bool:
        """True if the address is this machine's."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost" or host.endswith(".localhost")

    @property
    def max_n(self) -> int | None:
        """Most candidates per request; None for no limit."""
        if self.kind in ("anthropic", "openai_responses") or self.parameter_names.get("n", "n") is None:
            return 1  # there is no parameter for more
        host = urlsplit(self.url).hostname or ""
        if self.max_n_per_request is None and (host == "deepseek.com" or host.endswith(".deepseek.com")):
            return 1
        return self.max_n_per_request

    def check(self) -> None:
        """Finds out before the first request whether the environment holds what is named.

        Raises:
            ConfigurationError: If a variable is missing or cannot be sent; its value is not shown.
        """
        self.request_headers()

    def request_headers(self) -> dict[str, str]:
        """The headers of a request, keys included: not to be kept or shown.

        Raises:
            ConfigurationError: See :meth:`check`.
        """
        headers = {name: _ENV.sub(lambda found: _environment(found[1]), value) for name, value in self.headers.items()}
        given = {name.lower() for name in headers}
        if self.kind == "anthropic" and "anthropic-version" not in given:
            headers["anthropic-version"] = "2023-06-01"
        name = "x-api-key" if self.kind == "anthropic" else "Authorization"
        key_env = _KEY_ENV[self.kind] if self.key_env is None else self.key_env
        if key_env and name.lower() not in given and (self.key_env or os.environ.get(key_env)):
            key = _environment(key_env)
            headers[name] = key if name == "x-api-key" else f"Bearer {key}"
        return headers

    def redact(self, text: str, shortest: int = 4) -> str:
        """The text without the values of the environment variables that requests are sent with, however written.

        Args:
            text: Any text.
            shortest: Length of the shortest value that is taken out.
        """
        names = {name for value in self.headers.values() for name in _ENV.findall(value)}
        secrets = {os.environ.get(name or "", "").strip() for name in (*names, self.key_env or _KEY_ENV[self.kind])}
        for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
            if len(secret) >= shortest:
                text = without_secret(text, secret)
        return text

    def _format_problems(self) -> list[str]:
        problems = []
        if self.model is None and self.kind != "generic":
            problems.append(f"`model` must be given for the format {self.format!r}")
        unknown = sorted(set(self.parameter_names) - set(PARAMETERS[self.kind]))
        if unknown:
            known = ", ".join(PARAMETERS[self.kind])
            problems.append(f"`parameter_names` must name parameters of {self.format!r} ({known}), got {unknown}")
        names = [self.parameter_names.get(name, name) for name in PARAMETERS[self.kind]]
        twice = sorted({name for name in names if name is not None and names.count(name) > 1})
        if twice:
            problems.append(f"`parameter_names` must give every parameter a name of its own, got {twice} twice")
        return problems

    def _literal_keys(self) -> list[str]:
        parts = urlsplit(self.url)
        query = parse_qsl(parts.query) + parse_qsl(parts.fragment)
        literal = [f"`headers[{name!r}]`" for name, value in self.headers.items() if may_be_secret(name, str(value))]
        literal += [f"`{place}`" for place in secret_places(self.extra_body, "extra_body")]
        literal += [f"`{place}`" for place in secret_places(self.parameter_names, "parameter_names")]
        # `code` is the key of some clouds' functions
        named = [name for name, value in query if name == "code" or names_secret(name) or looks_secret(value)]
        literal += [f"the parameter {name!r} of `url`" for name in named]
        literal += ["the path of `url`"] if path_holds_secret(unquote(parts.path)) else []
        literal += [f"`{name}`" for name in ("model", "response_field") if looks_secret(getattr(self, name) or "")]
        bad = [name for name, value in self.headers.items() if not _is_header(name, value)]
        named_well = not self.key_env or (_ENV_NAME.fullmatch(self.key_env) and not looks_secret(self.key_env))
        pasted = [] if named_well else ["`key_env` must be the name of an environment variable, not a key"]
        where = "set `key_env` to the name of an environment variable, or write ${NAME} into a header"
        return [*pasted, *(f"{name} must not hold a key: {where}" for name in literal)] + [
            f"`headers[{name!r}]` must be a header's name and a text of printable ASCII" for name in bad
        ]


def _is_header(name: str, value: object) -> bool:
    return bool(_HEADER_NAME.fullmatch(name)) and isinstance(value, str) and _printable(value)


def _environment(name: str) -> str:
    value = os.environ.get(name, "").strip()  # a key read from a file often ends in a newline
    shown = name if _PLAIN_NAME.fullmatch(name) else "that the endpoint names (not shown: it may be a key)"
    if not value:
        raise ConfigurationError(
            f"the environment variable {shown} must hold what requests to the remote model are sent with; an endpoint "
            "that takes no key needs no `key_env`"
        )
    if not _printable(value):
        raise ConfigurationError(f"the environment variable {shown} holds characters that a header cannot have")
    return value


def _printable(characters: Iterable[str]) -> bool:
    return all(" " <= character <= "~" for character in characters)


def _url_problems(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port >= 0):
            if parts.username is None and parts.password is None:
                return [] if _printable(url) and " " not in url else ["`url` must be ASCII without spaces"]
            return ["`url` must not hold a user or password"]
    except ValueError:
        pass
    return [f"`url` must be a full http(s) address, got {url!r}"]
