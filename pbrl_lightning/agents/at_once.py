"""Several models at the same time on a CPU, each with a share of torch's threads.

The operations of a step are short, and two threads make one of them half as fast again, not twice; two models at a
time need not wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

if TYPE_CHECKING:
    from pbrl_lightning.agents.team import AgentTeam

T = TypeVar("T")


_workers: list[ThreadPoolExecutor] = []
"""Of one thread each, kept: what a thread allocates, it finds free again when the same agent comes back to it."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # a child has none of its parent's threads


def in_threads(tasks: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """Runs tasks, so many at a time with a share of torch's threads each, and gives their results in order.

    The i-th task goes to the same thread every time. An error is raised when the others are done.
    """
    if workers < 2:
        return [task() for task in tasks]
    threads = torch.get_num_threads()

    def run(task: Callable[[], T]) -> T:
        torch.set_num_threads(threads // workers)  # of this thread, and of those that it starts
        return task()

    _workers.extend(ThreadPoolExecutor(1) for _ in range(workers - len(_workers)))
    futures = [_workers[index % workers].submit(run, task) for index, task in enumerate(tasks)]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
        torch.set_num_threads(threads)


def for_each_agent(team: AgentTeam, compute: Callable[[int], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """What is computed for each agent with its model; differentiable.

    Where each agent has a model of its own on the CPU, their forwards run at the same time, and so do their
    backwards. Otherwise, and in a run of several processes, one agent follows the other.

    Args:
        team: The team.
        compute: Agent to tensors, which depend on no trained parameter but this agent's.
    """
    tasks = [partial(compute, agent) for agent in range(team.num_agents)]
    workers = min(torch.get_num_threads(), _separate_models(team))
    if workers < 2:
        return [task() for task in tasks]
    tasks = [partial(_as_here(), task) for task in tasks]
    if not torch.is_grad_enabled():
        return in_threads(tasks, workers)
    trained = [[p for p in team.model(agent).parameters() if p.requires_grad] for agent in range(team.num_agents)]
    graphs = _Graphs(tasks, trained, workers)
    flat = iter(_Apart.apply(graphs, *(parameter for some in trained for parameter in some)))
    return [tuple(next(flat) for _ in outputs) for outputs in graphs.outputs]


def _separate_models(team: AgentTeam) -> int:
    """How many models may compute at once: one, if any is shared, not on the CPU, or of a run of several processes.

    A shared configuration counts as a shared model: attention is exchanged by way of it.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 1
    models = [team.model(agent) for agent in range(team.num_agents)]
    on_cpu = all(parameter.device.type == "cpu" for model in models for parameter in model.parameters())
    apart = all(len(set(map(id, own))) == len(own) for own in (models, [getattr(m, "config", m) for m in models]))
    return len(models) if on_cpu and apart else 1


def _as_here() -> Callable[[Callable[[], T]], T]:
    """Runs a task with this thread's modes of gradients and of mixed precision, which a new thread lacks."""
    gradients = torch.is_grad_enabled()
    mixed, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(task: Callable[[], T]) -> T:
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype=dtype, enabled=mixed):
            return task()

    return run


class _Graphs:
    """The agents' graphs, which know nothing of each other: what makes them, and their ends."""

    def __init__(
        self, tasks: Sequence[Callable[[], tuple[Tensor, ...]]], trained: list[list[torch.nn.Parameter]], workers: int
    ) -> None:
        self.tasks, self.trained, self.workers = tasks, trained, workers
        self.outputs: list[tuple[Tensor, ...]] = []

    def gradients(self, agent: int, of_outputs: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of one agent's trained parameters."""
        ends = [(end, grad) for end, grad in zip(self.outputs[agent], of_outputs, strict=True) if grad is not None]
        ends = [(end, grad) for end, grad in ends if end.requires_grad]
        if not ends:
            return [None] * len(self.trained[agent])
        outputs, gradients = zip(*ends, strict=True)
        return list(torch.autograd.grad(outputs, self.trained[agent], gradients, allow_unused=True))


class _Apart(torch.autograd.Function):
    """Graphs of their own behind one node, so that the backward, too, can take them at the same time."""

    @staticmethod
    @override
    def forward(ctx: Any, graphs: _Graphs, *parameters: Tensor) -> tuple[Tensor, ...]:
        del parameters  # named so that autograd knows of them; the tasks have them
        ctx.graphs = graphs
        graphs.outputs = in_threads(graphs.tasks, graphs.workers)
        return tuple(output.detach() for outputs in graphs.outputs for output in outputs)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graphs: _Graphs = ctx.graphs
        ctx.graphs = None
        flat = iter(gradients)
        of_outputs = [[next(flat) for _ in outputs] for outputs in graphs.outputs]
        tasks = [partial(graphs.gradients, agent, grads) for agent, grads in enumerate(of_outputs)]
        found = in_threads(tasks, graphs.workers)
        return None, *(gradient for some in found for gradient in some)
