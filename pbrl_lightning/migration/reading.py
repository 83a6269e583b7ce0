"""Reads a CoMLRL configuration: which run it is, and whether each value alone is valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pbrl_lightning.migration.aliases import canonical, run_section
from pbrl_lightning.migration.names import NAMES, RUNS, SECTIONS, Name, names_of

_KEY = "comparator_api_key"
_LITERAL_KEY = (
    f"`{_KEY}` must not hold a key: put it into an environment variable and name that in `comparator_api_key_env`"
)
_SHOWN = 60  # characters of a wrong value
_OFF = {  # what is off loses nothing by having no counterpart
    "external_prompt_passthrough": False,
    "parallel_training": "none",
    "reference_kl_enabled": False,
    "log_reward_distribution": False,
    "special_tokens": {},
}


class Left(NamedTuple):
    """An option without a counterpart here.

    Attributes:
        name: Section and name.
        value: As it was given.
        why: Why, and what to do instead.
    """

    name: str
    value: Any
    why: str


@dataclass
class Reading:
    """The content of a configuration.

    Attributes:
        run: The section of the run, empty if there is none.
        options: The run's options that are given, by name.
        others: The values of the other sections that are given, by section and name.
        sections: The sections that are given.
        left: Options without a counterpart.
        problems: What is wrong with single values and names.
        wrong: Options whose values are wrong, as problems name them.
    """

    run: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[tuple[str, str], Any] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)


def read_configuration(document: Any) -> Reading:
    """Reads a YAML document.

    Args:
        document: Sections by name.

    Returns:
        Everything that could be read; ``problems`` is empty if the document is valid.
    """
    reading = Reading()
    if not isinstance(document, dict):
        reading.problems.append(
            f"the file must hold sections such as `agent_model` and `madpo`, got {_shown(document)}"
        )
        return reading
    runs = []
    for given, content in document.items():
        section = run_section(given)
        if section in RUNS:
            runs.append(section)
            _read_run(reading, section, content)
        elif isinstance(section, str) and section in SECTIONS:
            _read_section(reading, section, content)
        elif content is not None:
            hint = "" if isinstance(content, dict) else _hint(str(section), {*RUNS, *SECTIONS})
            why = f"unknown section{hint or '; what a task needs belongs in its reward, formatters and items'}"
            reading.left.append(Left(str(section), content, why))
    if len(runs) != 1:
        shown = " and ".join(f"`{section}`" for section in runs) or "none"
        reading.problems.append(f"the file must have exactly one section of {', '.join(RUNS)}, got {shown}")
    return reading


def _read_run(reading: Reading, section: str, content: Any) -> None:
    reading.run = section
    known = names_of("run")
    if not isinstance(content, dict | None):
        reading.problems.append(f"`{section}` must hold options, got {_shown(content)}")
        return
    if (content or {}).get(_KEY):  # whatever else is wrong, and never shown
        reading.problems.append(_LITERAL_KEY)
    for option, value in (content or {}).items():
        name = known.get(option)
        if name is None:
            reading.problems.append(f"`{section}.{option}` is not an option of CoMLRL{_hint(str(option), known)}")
        elif option == _KEY:
            continue
        elif section not in name.runs and value is not None:
            shown = "" if option.startswith(_KEY[:-3]) else f", got {_shown(value)}"
            verb = "has" if len(name.runs) == 1 else "have"
            reading.problems.append(
                f"`{option}` must be left out of `{section}` (only {', '.join(name.runs)} {verb} it){shown}"
            )
        elif section in name.runs and (value is not None or name.null_counts):
            _take(reading, name, f"{section}.{option}", value)


def _read_section(reading: Reading, section: str, content: Any) -> None:
    known = names_of(section)
    if "" in known:  # a section that is one value
        if content is not None:
            _take(reading, known[""], section, content)
        return
    if not isinstance(content, dict | None):
        reading.problems.append(f"`{section}` must hold options, got {_shown(content)}")
        reading.wrong.add(f"{section}.name")
        return
    if content is not None:
        reading.sections.add(section)
    for option, value in (content or {}).items():
        name = known.get(option)
        if name is not None and (value is not None or name.null_counts):
            _take(reading, name, f"{section}.{option}", value)
        elif name is None and value is not None:
            why = f"unknown option{_hint(str(option), known)}"
            reading.left.append(Left(f"{section}.{option}", value, why))


def _take(reading: Reading, name: Name, written: str, value: Any) -> None:
    value = canonical(name.name, value) if name.section == "run" else value
    if (value is None and not name.null_counts) or (name.name in _OFF and value == _OFF[name.name]):
        return
    if value is not None:
        try:
            value = checked(name, value)
        except (ValueError, OverflowError):
            # A URL, headers and a body may hold a key.
            secret = name.name.startswith(_KEY[:-3]) and not isinstance(value, int | float)
            shown = f"a value of type {type(value).__name__}" if secret else _shown(value)
            reading.problems.append(f"`{written}` must be {name.limits}, got {shown}")
            reading.wrong |= {name.name, written}
            return
    if name.ours is None:
        reading.left.append(Left(written, value, name.note))
    if name.section == "run":
        reading.options[name.name] = value
    else:
        reading.others[name.section, name.name] = value


def checked(name: Name, value: Any) -> Any:
    """A value, converted to the type of its option.

    Raises:
        ValueError: If it is not what the name allows.

    Example:
        >>> checked(names_of("run")["agent_learning_rate"], "5e-6")  # a string to YAML
        5e-06
    """
    limits = name.limits
    if limits.choices and not (isinstance(value, str) and value in limits.choices):
        raise ValueError
    value = _as_kind(limits.kind, value)
    if limits.kind in ("integer", "number"):
        low = limits.at_least is not None and value < limits.at_least
        shut = limits.above is not None and value <= limits.above
        high = limits.at_most is not None and value > limits.at_most
        if low or shut or high or value != value or value in (float("inf"), float("-inf")):
            raise ValueError
    return value


def _as_kind(kind: str, value: Any) -> Any:
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
        if kind == "number":
            return number
        if not number.is_integer():
            raise ValueError
        return int(number)
    kinds: dict[str, type] = {"boolean": bool, "string": str, "strings": list, "mapping": dict}
    if kind in kinds and not isinstance(value, kinds[kind]):
        raise ValueError
    if kind == "strings" and not (value and all(isinstance(entry, str) for entry in value)):
        raise ValueError
    return value


def _hint(wanted: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wanted, [*known, *(name.name for name in NAMES)], n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def _shown(value: Any) -> str:
    """A value on one short line; of containers only the type, since they may hold a key."""
    if isinstance(value, dict):
        return "a mapping"
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
