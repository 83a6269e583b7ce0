"""The oracle: one checked number per joint response."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import reprlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from pbrl_lightning.batches import RoleView, TaskItem
from pbrl_lightning.concurrency import each, opened, run_to_end
from pbrl_lightning.importing import resolve_callable
from pbrl_lightning.preferences.fingerprint import fingerprint
from pbrl_lightning.utils.errors import ConfigurationError, OptionTypeError, RunError

__all__ = ["Oracle", "OracleError", "Score", "resolve_callable"]

_PREVIEW = reprlib.Repr()
_PREVIEW.maxother = _PREVIEW.maxstring = 80


class OracleError(RunError):
    """The reward function or processor failed, or gave something that is not one number per joint response."""


@dataclass(frozen=True)
class Score:
    """What the oracle says about one joint response.

    Attributes:
        value: The score that comparisons use.
        raw: The score before ``reward_processor``; equal to ``value`` without one.
    """

    value: float
    raw: float


class Oracle:
    """Scores joint responses with the user's task reward and checks every number.

    The function is called as ``reward_func(*completions, prompts=..., batch_items=...)``, each keyword only if its
    signature has it. It returns one number per joint response; None, NaN and infinite ones drop that response.
    An async function is awaited once per joint response, on a new event loop per call of the oracle; if it is an async
    context manager, it is entered for that time (a judge keeps its connections open).

    Args:
        reward_func: Function, callable object, async function, or an import path (`resolve_callable`).
        reward_processor: Maps one raw score to the score that is used (scale, shift, clip), or its import path.
        max_concurrency: Most calls of an async function in flight at once.

    Attributes:
        num_dropped: Joint responses without a score so far.
        view: How joint responses are shown to the function: by role, where one model speaks for all. Set by the data
            module for the task reward.

    Raises:
        TypeError: If ``reward_func`` or ``reward_processor`` cannot be called.
        ConfigurationError: If ``max_concurrency`` is not a positive integer or an import path leads nowhere.

    Example:
        >>> oracle = Oracle(lambda drafts, edits: [len(d) - len(e) for d, e in zip(drafts, edits)])
        >>> oracle.score([{}], [0], [["p"], ["q"]], [["abc"], ["a"]])
        [Score(value=2.0, raw=2.0)]
    """

    def __init__(
        self,
        reward_func: str | Callable[..., Any],
        reward_processor: str | Callable[[float], Any] | None = None,
        *,
        max_concurrency: int = 8,
    ) -> None:
        self.reward_func = _callable_argument("reward_func", reward_func)
        self.reward_processor = (
            None if reward_processor is None else _callable_argument("reward_processor", reward_processor)
        )
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise ConfigurationError(f"`max_concurrency` must be an integer >= 1, got {max_concurrency!r}")
        self.max_concurrency = max_concurrency
        self.num_dropped = 0
        self.view: RoleView | None = None
        self._keywords = accepted_keywords(self.reward_func, ("prompts", "batch_items"))
        self.is_async = _is_async(self.reward_func)
        if not isinstance(getattr(self.reward_func, "__self__", None), nn.Module):
            _ = self.identity  # as it was given: a function may count its calls

    @functools.cached_property
    def identity(self) -> str:
        """Tells this function, as it was given, from another or a corrected one, for the journal."""
        return fingerprint(self.reward_func)

    def reward_range(self) -> tuple[float, float] | None:
        """The function's ``reward_range``, or the one beside it in its module; None without.

        Raises:
            ConfigurationError: If it is not two numbers in ascending order.
        """
        function = self.reward_func
        while isinstance(function, functools.partial):
            function = function.func
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        given = getattr(function, "reward_range", None)
        if given is None and inspect.isfunction(function):
            given = getattr(module, "reward_range", None)
        if given is None:
            return None
        try:
            low, high = map(float, given)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"`reward_range` of `{self.reward_name}` must be two numbers, got {given!r}"
            ) from error
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigurationError(f"`reward_range` of `{self.reward_name}` must ascend and be finite, got {given!r}")
        return low, high

    @property
    def reward_name(self) -> str:
        """The reward function's name, for messages."""
        return _name_of(self.reward_func)

    def score(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        prompts: list[list[str]],
        completions: list[list[str]],
    ) -> list[Score | None]:
        """Score ``B`` joint responses.

        Args:
            items: The ``B`` task items, one per joint response (an item may stand several times).
            item_indices: Their ``B`` indices in the dataset, for messages.
            prompts: ``N`` lists of ``B`` prompt texts.
            completions: ``N`` lists of ``B`` response texts.

        Returns:
            ``B`` scores, None where the response is dropped.

        Raises:
            ConfigurationError: If the lists are not aligned.
            OracleError: If the function or the processor raises or returns anything but ``B`` numbers.
        """
        raw = self.raw_scores(items, item_indices, prompts, completions)
        return [self.processed(value, index) for value, index in zip(raw, item_indices, strict=True)]

    def raw_scores(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        prompts: list[list[str]],
        completions: list[list[str]],
        arrived: Callable[[dict[int, float | None]], None] | None = None,
    ) -> list[float | None]:
        """What the function says, checked but before the processor; see :meth:`score`.

        Args:
            items: As in :meth:`score`.
            item_indices: As in :meth:`score`.
            prompts: As in :meth:`score`.
            completions: As in :meth:`score`.
            arrived: Called with the row and number of every response as soon as they are known.

        Returns:
            ``B`` numbers, which may be NaN or infinite, or None.

        Raises:
            ConfigurationError: If the lists are not aligned.
            OracleError: If the function raises or returns anything but ``B`` numbers.
        """
        size = len(items)
        for name, columns in (("item_indices", [item_indices]), ("prompts", prompts), ("completions", completions)):
            if any(len(column) != size for column in columns):
                lengths = ", ".join(str(len(column)) for column in columns)
                raise ConfigurationError(f"`{name}` must have {size} entries, one per task item, got {lengths}")
        if size == 0:
            return []
        if self.view is not None:
            prompts, completions = self.view(items, prompts, completions)
        arrived = arrived or _ignore
        if self.is_async:
            return run_to_end(lambda: self._score_concurrently(items, item_indices, prompts, completions, arrived))
        try:
            returned = self.reward_func(*map(list, completions), **self._extras(items, prompts))
        except Exception as error:
            raise self._failure(error, item_indices) from error
        raw = self._check(returned, item_indices)
        arrived(dict(enumerate(raw)))
        return raw

    async def _score_concurrently(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        prompts: list[list[str]],
        completions: list[list[str]],
        arrived: Callable[[dict[int, float | None]], None],
    ) -> list[float | None]:
        async def one(row: int) -> float | None:
            arguments = [[column[row]] for column in completions]
            extras = self._extras([items[row]], [[column[row]] for column in prompts])
            try:
                returned = await self.reward_func(*arguments, **extras)
            except Exception as error:
                raise self._failure(error, [item_indices[row]]) from error
            raw = self._check(returned, [item_indices[row]])[0]
            arrived({row: raw})
            return raw

        async with opened(self.reward_func):
            return await each(one, range(len(items)), self.max_concurrency)

    def _extras(self, items: list[TaskItem], prompts: list[list[str]]) -> dict[str, Any]:
        """The keyword arguments that the reward function asks for."""
        offered = {"prompts": [list(column) for column in prompts], "batch_items": list(items)}
        return {name: offered[name] for name in self._keywords}

    def _failure(self, error: Exception, item_indices: list[int]) -> OracleError:
        return OracleError(
            f"`{self.reward_name}` raised {type(error).__name__} for {_where(item_indices)} "
            f"({_numbers(len(item_indices))} expected): {error}"
        )

    def _check(self, returned: object, item_indices: list[int]) -> list[float | None]:
        """One number or None per joint response, or an error that says what came back."""
        expected = f"`{self.reward_name}` must return a list, tuple, tensor or array of {_numbers(len(item_indices))}"
        values = _as_list(returned)
        if values is None:
            raise OracleError(f"{expected}, got {_describe(returned)} for {_where(item_indices)}")
        if len(values) != len(item_indices):
            got = f"{len(values)} in {_describe(returned)}"
            raise OracleError(f"{expected}, got {got} for {_where(item_indices)}")
        checked: list[float | None] = []
        for value, index in zip(values, item_indices, strict=True):
            try:
                checked.append(_as_float(value))
            except TypeError as error:
                raise OracleError(f"{expected}, got an element that is {error} for {_where([index])}") from error
        return checked

    def processed(self, raw: float | None, item_index: int) -> Score | None:
        """A raw score and what the processor makes of it; None, counted and announced, where there is none."""
        if raw is None or not math.isfinite(raw):
            self._drop(raw, self.reward_func, item_index)
            return None
        if self.reward_processor is None:
            return Score(raw, raw)
        name = _name_of(self.reward_processor)
        try:
            processed = self.reward_processor(raw)
        except Exception as error:
            message = f"`{name}` raised {type(error).__name__} on the score {raw} of {_where([item_index])}"
            raise OracleError(f"{message} (1 number expected): {error}") from error
        try:
            value = _as_float(processed)
        except TypeError as error:
            message = f"`{name}` must return 1 number, got {error} for the score {raw} of {_where([item_index])}"
            raise OracleError(message) from error
        if value is None or not math.isfinite(value):
            self._drop(value, self.reward_processor, item_index)
            return None
        return Score(value, raw)

    def _drop(self, value: float | None, source: Callable[..., Any], item_index: int) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            warnings.warn(
                f"`{_name_of(source)}` gave {value} for {_where([item_index])}: a joint response without a finite "
                "score is dropped, not scored 0. Later ones are only counted (`num_dropped`).",
                stacklevel=4,
            )


def _ignore(_: dict[int, float | None]) -> None:
    """Scores that nobody waits for."""


def _callable_argument(name: str, given: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(given, str) and not callable(given):
        raise OptionTypeError(f"`{name}` must be a callable or an import path, got {_describe(given)}")
    try:
        return resolve_callable(given)
    except ValueError as error:
        raise ConfigurationError(f"`{name}`: {error}") from error


def accepted_keywords(function: Callable[..., Any], names: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that may be given by keyword; none where the signature cannot be read."""
    # A module's `__call__` takes everything and passes it to `forward`, which may not.
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(names)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name in names if name in parameters and parameters[name].kind in by_keyword]


def _is_async(function: Callable[..., Any]) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    while isinstance(function, functools.partial):
        function = function.func
    call = function.forward if isinstance(function, torch.nn.Module) else type(function).__call__
    return inspect.iscoroutinefunction(call)


def _as_list(returned: object) -> list[Any] | None:
    """The elements of what a reward function returned; None if it is no list, tuple, tensor or array."""
    if isinstance(returned, torch.Tensor):
        returned = returned.detach().cpu()
    elif isinstance(returned, list | tuple):
        return list(returned)
    elif not isinstance(returned, np.ndarray):
        if inspect.iscoroutine(returned):
            returned.close()
        return None
    if returned.ndim == 0:
        return None
    return returned.tolist() if returned.ndim == 1 else list(returned)


def _as_float(value: object) -> float | None:
    """A plain float, or None for None; what is too large for a float is infinite."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else _refuse(value)
    elif isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else _refuse(value)
    if value is None:
        return None
    if not isinstance(value, numbers.Real | Decimal | np.bool_):
        _refuse(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:  # Decimal("sNaN")
        return math.nan


def _refuse(value: object) -> NoReturn:
    raise TypeError(_describe(value))


def _describe(value: object) -> str:
    return f"{type(value).__name__} {_PREVIEW.repr(value)}"


def _where(item_indices: list[int]) -> str:
    low, high = min(item_indices), max(item_indices)
    return f"task item {low}" if low == high else f"task items {low} to {high}"


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__
