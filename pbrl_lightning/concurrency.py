"""Coroutines from code that is not async, and several of them at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(start: Callable[[], Awaitable[T]]) -> T:
    """Runs a coroutine to its end, beside a loop that is already running (a notebook's) in a thread."""
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def main() -> T:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await start()

    if not _a_loop_runs():
        return asyncio.run(main())
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(contextvars.copy_context().run, lambda: asyncio.run(main()))
        try:
            return future.result()
        except BaseException:
            for loop, task in begun:  # a Ctrl-C here must not wait for everything that was begun there
                if task is not None and not future.done():
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _a_loop_runs() -> bool:
    # Asked here, so that what is raised later is not told as a consequence of there being none.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def each(work: Callable[[Any], Awaitable[T]], arguments: Iterable[Any], limit: int) -> list[T]:
    """The results of a coroutine function for many arguments, in order, at most ``limit`` at once.

    The first failure cancels the others and is raised as it is.
    """
    results: dict[int, T] = {}
    remaining = enumerate(arguments)

    async def worker() -> None:
        for place, argument in remaining:
            results[place] = await work(argument)

    await all_of(worker() for _ in range(limit))
    return [results[place] for place in range(len(results))]


async def all_of(coroutines: Iterable[Any]) -> list[Any]:
    """The results of coroutines that run at once; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


def opened(function: Any) -> AbstractAsyncContextManager[Any]:
    """What a function keeps open between its calls on one event loop, where it is an async context manager."""
    return function if hasattr(function, "__aenter__") else nullcontext()
