"""Values of options that are prompt templates: ``Q: {question}`` is a text, although YAML reads nested mappings."""

from __future__ import annotations

import re
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from pbrl_lightning.utils.errors import ConfigurationError

MODE = "yaml_with_templates"
"""The parsers' mode of reading values and files."""

_PLACEHOLDER = re.compile(r"\{\s*[A-Za-z_]\w*\s*\}")
_OPTION_NAME = re.compile(r"[a-z_][a-z0-9_.]*")
"""What options are called, unlike the beginnings of most templates."""


def load(text: str) -> Any:
    """A value of an option, or a file of options, from YAML, in which ``{name}`` is a template's placeholder.

    Example:
        >>> load("Sum up: {prompt}")
        'Sum up: {prompt}'
        >>> load("[Q: {question}, '{prompt}']")
        ['Q: {question}', '{prompt}']
        >>> load("{user: {prompt}, top_k: null}")
        {'user': '{prompt}', 'top_k': None}

    Raises:
        ConfigurationError: If a template begins with ``#``.
    """
    if text == "None":  # what becomes of null on its way to an option of a class
        return None
    named = _PLACEHOLDER.search(text) is not None
    if named and text.lstrip().startswith("#") and "\n" not in text.strip():  # the parser would drop it as a comment
        raise ConfigurationError(
            f"a template must not begin with `#`, which YAML reads as a comment, got {text!r}; begin it with another "
            "character, or give the import path of a text"
        )
    if named and _is_template(text):
        return text
    value = get_loader("yaml")(text)
    return _with_templates(value, set(_PLACEHOLDER.findall(text))) if named else value


def _is_template(text: str) -> bool:
    """True for a text with a placeholder that is neither a collection in brackets nor options with values."""
    if text.lstrip().startswith("[") or re.match(r"\s*\{\s*\w+\s*:", text):
        return False
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return False  # the parser takes a value that is not YAML as it is, and names a file that is none
    several_lines = "\n" in text.strip()
    if not isinstance(value, dict):
        return not (several_lines and isinstance(value, list))
    are_options = all(_OPTION_NAME.fullmatch(str(key)) for key in value)
    placeholders = set(_PLACEHOLDER.findall(text))
    return not are_options or (not several_lines and _with_templates(value, placeholders) != value)


def _with_templates(value: Any, placeholders: set[str]) -> Any:
    """The value with what YAML made of placeholders turned back into texts."""
    if isinstance(value, list):
        return [_with_templates(entry, placeholders) for entry in value]
    if not isinstance(value, dict):
        return value
    template = _as_template(value, placeholders)
    return template or {key: _with_templates(entry, placeholders) for key, entry in value.items()}


def _as_template(value: dict[Any, Any], placeholders: set[str]) -> str | None:
    """A mapping that was written as ``{name}`` or ``Text: {name}``; None for any other."""
    if len(value) != 1:
        return None
    ((key, entry),) = value.items()
    if entry is None:
        return f"{{{key}}}" if any(name.strip("{} \t") == key for name in placeholders) else None
    if not isinstance(entry, dict) or _OPTION_NAME.fullmatch(str(key)):
        return None
    inner = _as_template(entry, placeholders)
    return f"{key}: {inner}" if inner else None


set_loader(MODE, load, (yaml.YAMLError,))
