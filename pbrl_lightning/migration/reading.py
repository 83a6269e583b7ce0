"""A CoMLRL configuration, read: which run it is, and every value checked for itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pbrl_lightning.migration.names import NAMES, RUNS, SECTIONS, Name, names_of

_RL_SECTIONS = ("magrpo", "mareinforce", "marloo", "maremax", "maac", "iac")
_KEY = "comparator_api_key"
_NOT_SHOWN = ("comparator_api_headers", "comparator_api_extra_body")  # they may hold a key


class Left(NamedTuple):
    """What has no counterpart here.

    Attributes:
        name: Section and name.
        value: As it was given.
        why: Why, and what to do in its place.
    """

    name: str
    value: Any
    why: str


@dataclass
class Reading:
    """What a configuration says.

    Attributes:
        run: The section of the run, empty where there is none.
        options: The run's options that are given, by name.
        others: The values of the other sections that are given, by section and name.
        left: What has no counterpart.
        problems: What is wrong with single values and names.
        wrong: The run's options whose values are wrong.
    """

    run: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[tuple[str, str], Any] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)


def read_configuration(document: Any) -> Reading:
    """Reads a document that YAML gave.

    Args:
        document: Sections by name.

    Returns:
        All that could be read; ``problems`` is empty if that is everything.
    """
    reading = Reading()
    if not isinstance(document, dict):
        reading.problems.append(f"the file must hold sections such as `agent_model` and `madpo`, got {document!r:.60}")
        return reading
    for section, content in document.items():
        if section in RUNS:
            _read_run(reading, str(section), content)
        elif section in _RL_SECTIONS:
            reading.problems.append(
                f"the section `{section}` learns from the task reward and has no preferences, so it is not converted; "
                f"start from configs/marl_{section}.yaml"
            )
        elif section in SECTIONS:
            _read_section(reading, str(section), content)
        elif content is not None:
            why = "an unknown section; what a task needs belongs into its reward, formatters and items"
            reading.left.append(Left(str(section), content, why))
    found = [section for section in RUNS if section in document]
    if len(found) != 1:
        said = " and ".join(f"`{section}`" for section in found) or "none"
        reading.problems.append(f"the file must have exactly one section of {', '.join(RUNS)}, got {said}")
    return reading


def _read_run(reading: Reading, section: str, content: Any) -> None:
    reading.run = section
    known = names_of("run")
    if not isinstance(content, dict | None):
        reading.problems.append(f"`{section}` must hold options, got {content!r:.60}")
        return
    for option, value in (content or {}).items():
        name = known.get(option)
        if name is None:
            hint = _hint(str(option), known)
            reading.problems.append(f"`{section}.{option}` is not an option of CoMLRL's preference runs{hint}")
        elif section not in name.runs and value is not None:
            runs = ", ".join(name.runs)
            shown = "" if option.startswith(_KEY[:-3]) else f", got {value!r}"
            reading.problems.append(f"`{option}` must be left out of `{section}` (only {runs} have it){shown}")
        elif value is not None or name.null_counts:
            _take(reading, name, f"{section}.{option}", value)


def _read_section(reading: Reading, section: str, content: Any) -> None:
    known = names_of(section)
    if "" in known:  # a section that is one value
        if content is not None:
            _take(reading, known[""], section, content)
        return
    if not isinstance(content, dict | None):
        reading.problems.append(f"`{section}` must hold options, got {content!r:.60}")
        return
    for option, value in (content or {}).items():
        name = known.get(option)
        if name is not None and (value is not None or name.null_counts):
            _take(reading, name, f"{section}.{option}", value)
        elif name is None and value is not None:
            reading.left.append(Left(f"{section}.{option}", value, f"an unknown option{_hint(str(option), known)}"))


def _take(reading: Reading, name: Name, written: str, value: Any) -> None:
    if value is not None and name.name != _KEY:  # a key is refused with the rules, and never shown
        try:
            value = checked(name, value)
        except ValueError:
            shown = f"a {type(value).__name__}" if name.name in _NOT_SHOWN else repr(value)
            reading.problems.append(f"`{written}` must be {name.limits}, got {shown}")
            reading.wrong.add(name.name)
            return
    if name.ours is None and name.name != _KEY:
        reading.left.append(Left(written, value, name.note))
    if name.section == "run":
        reading.options[name.name] = value
    else:
        reading.others[name.section, name.name] = value


def checked(name: Name, value: Any) -> Any:
    """A value as its kind.

    Raises:
        ValueError: If it is not what the name allows.

    Example:
        >>> checked(names_of("run")["agent_learning_rate"], "5e-6")  # a text to YAML
        5e-06
    """
    limits = name.limits
    if limits.choices and value not in limits.choices:
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
    kinds: dict[str, type] = {"yes or no": bool, "text": str, "texts": list, "mapping": dict}
    if kind in kinds and not isinstance(value, kinds[kind]):
        raise ValueError
    if kind == "texts" and not (value and all(isinstance(entry, str) for entry in value)):
        raise ValueError
    return value


def _hint(wanted: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wanted, [*known, *(name.name for name in NAMES)], n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
