"""Learning-rate schedules that count, per parameter group, the updates in which the group took part."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from pbrl_lightning.utils.errors import ConfigurationError, OptionTypeError


class GroupSchedules(LRScheduler):
    """One schedule per named parameter group; a group that rests in an update stays where it is on its schedule.

    A subclass of torch's scheduler only so that Lightning steps it as any other; like torch's `ChainedScheduler` it
    schedules nothing itself.

    Args:
        optimizer: Its groups have a `name` each.
        factory: Makes a schedule for an optimizer that holds a single group. It is called once per group, and again
            for each restart; lists with an entry per group have no place in it.

    Raises:
        OptionTypeError: If the factory makes something else than a schedule of steps, `ReduceLROnPlateau` among it.
        ConfigurationError: If a group lacks a name, two share one, or a schedule belongs to another optimizer.

    Example:
        >>> from torch import ones
        >>> from torch.optim import SGD
        >>> from torch.optim.lr_scheduler import ExponentialLR
        >>> agent, reward = (ones(1, requires_grad=True) for _ in range(2))
        >>> groups = [{"params": [agent], "name": "agent_0"}, {"params": [reward], "name": "reward"}]
        >>> optimizer = SGD(groups, lr=1.0)
        >>> schedules = GroupSchedules(optimizer, lambda single: ExponentialLR(single, gamma=0.5))
        >>> agent.sum().backward()
        >>> optimizer.step()
        >>> schedules.step()
        >>> schedules.get_last_lr()
        [0.5, 1.0]
    """

    def __init__(self, optimizer: Optimizer, factory: Callable[[Optimizer], LRScheduler]) -> None:
        names = [group.get("name") for group in optimizer.param_groups]
        if None in names or len(set(names)) < len(names):
            raise ConfigurationError(f"every parameter group must have a `name` of its own, got {names}")
        self.optimizer = optimizer
        self.names = [str(name) for name in names]
        self._factory = factory
        self._initial_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._schedules = [self._make(index) for index in range(len(names))]

    @override
    def step(self, epoch: Any = None) -> None:
        """Steps the schedules of the groups that took part in the last update: those with a gradient.

        To be called after the update and before its gradients are freed, as Lightning does.

        Args:
            epoch: Ignored; Lightning may pass a metric.
        """
        for index, group in enumerate(self.optimizer.param_groups):
            if any(parameter.grad is not None for parameter in group["params"]):
                self._schedules[index].step()
                self._set_lr(index, group["lr"])

    def restart(self, name: str) -> None:
        """Begins a group's schedule anew.

        Raises:
            ConfigurationError: If no group has this name.
        """
        if name not in self.names:
            raise ConfigurationError(f"`name` must be one of {', '.join(self.names)}, got {name!r}")
        index = self.names.index(name)
        self._set_lr(index, self._initial_lrs[index])
        self._schedules[index] = self._make(index)

    @override
    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rates as last scheduled, in the order of the groups."""
        return [float(schedule.get_last_lr()[0]) for schedule in self._schedules]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Per group its schedule's state, its initial and its current learning rate; no functions."""
        groups = {}
        for index, name in enumerate(self.names):
            groups[name] = {
                "schedule": deepcopy(_without_functions(self._schedules[index].state_dict())),
                "initial_lr": self._initial_lrs[index],
                "lr": float(self.optimizer.param_groups[index]["lr"]),
            }
        return {"groups": groups}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the state was taken.

        Raises:
            ConfigurationError: If the state has other groups.
        """
        groups = state_dict.get("groups", {})
        if list(groups) != self.names:
            raise ConfigurationError(
                f"`state_dict` must have schedules of the groups {', '.join(self.names)}, got "
                f"{', '.join(groups) or 'none'}; resume with the options of the run that was saved"
            )
        for index, saved in enumerate(groups.values()):
            # A copy: torch's schedules keep what they are given, and `CyclicLR` takes entries out of it.
            self._schedules[index].load_state_dict(deepcopy(saved["schedule"]))
            self._initial_lrs[index] = saved["initial_lr"]
            self._set_lr(index, saved["lr"])

    def _make(self, index: int) -> LRScheduler:
        """A new schedule; its construction sets the group's first learning rate."""
        view = _SingleGroup(self.optimizer, index)
        schedule = self._factory(view)
        kind = type(schedule).__name__
        if isinstance(schedule, ReduceLROnPlateau):
            raise OptionTypeError(
                "`lr_scheduler` must depend on the number of updates alone; ReduceLROnPlateau, which follows a "
                "metric, is not supported"
            )
        if not isinstance(schedule, LRScheduler):
            raise OptionTypeError(f"`lr_scheduler` must make a torch LRScheduler, got {kind}")
        if schedule.optimizer is not view:
            raise ConfigurationError(
                f"`lr_scheduler` must schedule the optimizer it is called with, but its {kind} has another"
            )
        self._set_lr(index, self.optimizer.param_groups[index]["lr"])
        return schedule

    def _set_lr(self, index: int, lr: float | Tensor) -> None:
        group = self.optimizer.param_groups[index]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(float(lr))
        else:
            group["lr"] = float(lr)  # a schedule with numpy in it gives numpy's, which no safe checkpoint can hold


class _SingleGroup(Optimizer):
    """What a schedule sees of an optimizer: one group, the optimizer's own. It makes no updates.

    Everything is looked up at each access, because loading a state gives an optimizer new group objects.
    """

    _opt_called = True  # torch warns of a schedule stepped before this; the updates are the whole optimizer's

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self._whole = optimizer
        self._index = index

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [self._whole.param_groups[self._index]]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._whole.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._whole.state


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """A torch schedule's state as a weights-only load accepts it; the factory makes the functions again."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":  # of SequentialLR and ChainedScheduler
            kept[key] = [_without_functions(inner) for inner in value]
        elif key == "_last_lr":
            kept[key] = [float(lr) for lr in value]
        elif not callable(value) and not (isinstance(value, (list, tuple)) and any(map(callable, value))):
            kept[key] = value
    return kept
