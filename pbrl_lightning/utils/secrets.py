"""One rule for what may be a key: by the name that it stands under, and by its look."""

from __future__ import annotations

import base64
import re
from itertools import groupby
from typing import Any, Final
from urllib.parse import quote

MASKED: Final = "(not shown)"
"""Stands for a value that may be a key."""

_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_FROM_ENVIRONMENT = re.compile(rf"(\w+ +)?{_VARIABLE.pattern}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORDS: Final = frozenset(
    (
        *(
            "apikey",
            "auth",
            "authorization",
            "bearer",
            "cookie",
            "credential",
            "credentials",
            "jwt",
            "key",
            "keys",
            "oauth",
        ),
        *("passphrase", "passwd", "password", "pwd", "secret", "secrets", "sig", "signature", "token"),
    )
)
_ENDINGS: Final = ("apikey", "password", "secret", "token")
_OF_TEXTS: Final = frozenset("bos cls end eos image mask pad sep special start stop unk".split())  # noqa: SIM905
_HOLDERS: Final = ("value", "values", "data")
_OF_TABLES: Final = frozenset("cache column group primary response sort".split())  # noqa: SIM905
_ABOUT: Final = frozenset(
    "count counts env file id ids index length limit name names path size type version".split()  # noqa: SIM905
)
_PREFIXED = re.compile(
    r"\b(?:(?:sk|glpat|xox[abeprs]|xapp|xai|nvapi|pplx|pypi)-|(?:hf|gh[oprsu]|github_pat|gsk|r8|whsec|npm|dop_v1)_"
    r"|AKIA|ASIA|AIza|ya29\.)[\w-]{8,}"
    r"|\beyJ[\w-]+\.eyJ[\w-]+|\bBearer\s+\S+|\bBasic\s+[\w+/=]{8,}|://[^/\s:@]+:[^/\s@]+@"
)
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_MIXED = re.compile(r"(?=\D*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")


def names_secret(name: str) -> bool:
    """True if a name says that a key, a password or the like stands there, in any spelling: ``hf_token``, ``XApiKey``.

    Names of special tokens, of columns, and of what a key or token is like (``key_env``, ``token_type``) do not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    for place, word in enumerate(words):
        if word not in _WORDS and not word.endswith(_ENDINGS):
            continue
        before, after = words[place - 1] if place else "", words[place + 1] if place + 1 < len(words) else ""
        about = (word == "token" and before in _OF_TEXTS) or (word in ("key", "keys") and before in _OF_TABLES)
        if not about and after not in _ABOUT:
            return True
    return False


def looks_secret(text: str) -> bool:
    """True if a text has the look of a key: a known beginning, a user and password, or a long run of mixed characters.

    Digests, UUIDs and names of models have not: they hold no upper case, or whole words of it.
    """
    return bool(_PREFIXED.search(text)) or any(map(_is_random, _RUN.findall(text)))


def may_be_secret(name: str, value: Any) -> bool:
    """True if a value may be a key, by its name or its look; one that ``${NAME}`` stands for is not there."""
    if not isinstance(value, str) or not value:
        return False
    return (names_secret(name) and not _FROM_ENVIRONMENT.fullmatch(value)) or looks_secret(_VARIABLE.sub("", value))


def masked(value: Any, name: str = "") -> Any:
    """Nested data in which :data:`MASKED` stands for whatever may be a key."""
    if isinstance(value, dict):
        return {key: masked(entry, _inner_name(name, str(key))) for key, entry in value.items()}
    if isinstance(value, list):
        return [masked(entry, name) for entry in value]
    return MASKED if may_be_secret(name, value) else value


def secret_places(value: Any, place: str, name: str = "") -> list[str]:
    """Where in nested data a key may stand.

    Args:
        value: Mappings, lists and scalars.
        place: What to call it, such as ``extra_body``.
        name: The name that it stands under, if any.

    Returns:
        Places such as ``extra_body['options']['hf_token']``.
    """
    if isinstance(value, dict):
        found = []
        for key, entry in value.items():
            inner = f"{place}[{_shown(str(key))}]"
            below = secret_places(entry, inner, _inner_name(name, str(key)))
            found += [inner] if looks_secret(str(key)) else below
        return found
    if isinstance(value, list | tuple):
        return [inner for index, entry in enumerate(value) for inner in secret_places(entry, f"{place}[{index}]", name)]
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return [place] if isinstance(text, str) and text and (names_secret(name) or looks_secret(text)) else []


def path_holds_secret(path: str) -> bool:
    """True if a URL's path holds a key: by its look, as ``name=value``, or as letters and digits after a key's name."""
    before = ""
    for segment in re.split("[/;]", path):
        name, _, value = segment.partition("=")
        named = bool(value) and names_secret(name)
        if named or looks_secret(segment) or (names_secret(before) and _MIXED.fullmatch(segment)):
            return True
        before = segment
    return False


def without_secret(text: str, secret: str, shown: str = "***") -> str:
    """The text without a key in any spelling: split over lines, escaped as in JSON or a URL, as base64 or hex.

    Args:
        text: Any text.
        secret: The key; at least one character.
        shown: What stands in its place.
    """
    return _spellings(secret).sub(shown, text)


def _spellings(secret: str) -> re.Pattern[str]:
    data = secret.encode()
    gap = r"(?:\s|\\[nrt])*"
    characters = gap.join(rf"(?:{re.escape(c)}|\\u00{_any_case(f'{ord(c):02x}')})" for c in secret)
    others = {quote(secret, safe=""), quote(secret)} - {secret}
    # In the middle of a longer text its base64 depends on where it begins, and the characters at its ends on others.
    for before in range(3):
        whole = base64.b64encode(bytes(before) + data).decode().rstrip("=")
        core = whole[(0, 2, 3)[before] : len(whole) - bool((before + len(data)) % 3)]
        others |= {core, core.replace("+", "-").replace("/", "_")}
    written = [characters, _any_case(data.hex()), *map(re.escape, sorted(others, key=len, reverse=True))]
    return re.compile("|".join(spelling for spelling in written if len(spelling) >= 4))


def _any_case(digits: str) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in digits)


def _is_random(run: str) -> bool:
    """True if lower case, upper case and digits change about as often as in random characters."""
    kinds = [kind for kind, _ in groupby(run, key=lambda c: "digit" if c.isdigit() else c.isupper())]
    return len(set(kinds)) == 3 and 3 * len(kinds) >= len(run)


def _inner_name(outer: str, name: str) -> str:
    """What counts as the name of an entry: ``value`` and the like take the name of the mapping that they stand in."""
    return outer if name.lower() in _HOLDERS else name


def _shown(name: str) -> str:
    return "…" if looks_secret(name) else repr(name)
