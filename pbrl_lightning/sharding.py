"""Weights, gradients and optimizer state shared out over processes (FSDP2, ``torch.distributed.fsdp.fully_shard``).

Training runs on the shares: a layer's weights are put together when its forward or backward comes, and given up after
it. Everything else (sampling, scoring, copying, saving) happens inside :func:`gathered`, where the weights are whole
and each process goes at its own pace: a layer at a time would mean as many exchanges per sampled token as there are
layers, and processes that wait for the longest response of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import override

from pbrl_lightning.agents.forward import decoder_of
from pbrl_lightning.utils.errors import ConfigurationError


class ShardedStrategy(ModelParallelStrategy):
    """Shares out every model of a run over all processes: ``--trainer.strategy pbrl_lightning.ShardedStrategy``.

    Checkpoints are the same single files as without it, so that a run goes on with another strategy or number of
    processes; each process reads the whole file.

    Args:
        process_group_backend: ``nccl`` or ``gloo``; default by device.
        timeout: How long a process waits for the others.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        # Models were converted before they were shared out; once more would take adapters and heads their precision.
        convert = self.precision_plugin.convert_module
        self.precision_plugin.convert_module = lambda module: module  # type: ignore[method-assign]
        try:
            super().setup(trainer)
        finally:
            self.precision_plugin.convert_module = convert  # type: ignore[method-assign]

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        _average_gradients(self.lightning_module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        state = module.state_dict()
        # What is frozen stays in its shares, because checkpoints leave it out.
        return {name: whole(value).cpu() if name in trained else value for name, value in state.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        values = {index: {k: _whole_on_cpu(v) for k, v in own.items()} for index, own in state["state"].items()}
        return {**state, "state": values}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, self.broadcast(filepath), storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, self.broadcast(checkpoint_path), weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        own = module.state_dict()
        state = {name: _like(value, own[name]) for name, value in checkpoint["state_dict"].items()}
        module.load_state_dict(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            values = {
                index: {k: _like(v, parameters[index]) for k, v in own.items()} for index, own in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": values})


def share_out(module: L.LightningModule) -> None:
    """Shares out a module's models over the processes, where its trainer's strategy is a :class:`ShardedStrategy`.

    Raises:
        ConfigurationError: If the strategy is another one that leaves no process with whole weights to sample from.
    """
    trainer: Any = module.trainer
    strategy = trainer.strategy
    if isinstance(strategy, ShardedStrategy):
        # Sharded over all processes: the mesh has a second dimension, for tensor parallelism, of size 1.
        shard_models(trainer.precision_plugin.convert_module(module), strategy.device_mesh["data_parallel"])
    elif splits_weights(strategy):
        raise ConfigurationError(
            f"`strategy` is a {type(strategy).__name__} that shares out weights, which here is done by "
            "`pbrl_lightning.ShardedStrategy` (configs/trainer/fsdp.yaml)"
        )


def splits_weights(strategy: Strategy) -> bool:
    """True for the strategies of Lightning that leave no process with whole weights to sample from."""
    if isinstance(strategy, DeepSpeedStrategy):
        return bool(strategy.zero_stage_3)
    return isinstance(strategy, (ModelParallelStrategy, FSDPStrategy)) and not isinstance(strategy, ShardedStrategy)


def whole(value: Tensor) -> Tensor:
    """A tensor put together from its shares, by all processes at once; any other as it is."""
    if not isinstance(value, DTensor):
        return value
    # Not by `full_tensor`: under gloo its asynchronous exchange was seen to crash a process.
    own = value.to_local()
    size = -(-len(value) // value.device_mesh.size())
    padded = own.new_zeros(size, *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(value.device_mesh.size())]
    dist.all_gather(parts, padded, value.device_mesh.get_group())
    return torch.cat(parts)[: len(value)]


def _whole_on_cpu(value: Any) -> Any:
    return whole(value).cpu() if isinstance(value, Tensor) else value


def _like(value: Any, example: Tensor) -> Any:
    """This process's share of a whole tensor, if the example is shared out and of the same shape."""
    if not isinstance(example, DTensor) or not isinstance(value, Tensor) or value.shape != example.shape:
        return value  # such as AdamW's count of steps
    value = value.to(example.device)
    return distribute_tensor(value, example.device_mesh, example.placements, src_data_rank=None)


@torch.no_grad()
def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Writes a whole value, which all processes have, into a parameter or this process's share of it."""
    parameter.copy_(_like(value.to(parameter.dtype), parameter) if isinstance(parameter, DTensor) else value)


def shard_models(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shares out all language models below a module; does nothing the second time.

    Adapters, and heads that are trained with them or alone, stay whole on every process: they are small, and of another
    precision than the weights around them. Their gradients are averaged after the backward.

    Raises:
        ConfigurationError: If a model has no decoder layers that can be told apart.
    """
    if in_shares(module):
        return
    models = list(_language_models(module))
    inside = {id(child) for model in models for child in model.modules()}
    for model in models:
        # FSDP modules cannot be copied; this one, without memory for its weights, can.
        model.__dict__["_blank"] = (_blank_copy(model),)
        _shard_language_model(model.get_base_model() if isinstance(model, PeftModel) else model, mesh)
    for owner in [child for child in module.modules() if child is not module and id(child) not in inside]:
        if any(isinstance(p, DTensor) and p.requires_grad for p in owner.parameters()):
            # An optimizer group is shared out as a whole, the head of a full model included.
            for head in [c for c in owner.children() if id(c) not in inside and list(c.parameters(recurse=False))]:
                fully_shard(head, mesh=mesh)


def in_shares(module: nn.Module) -> bool:
    """True if the module was shared out, whether it is gathered now or not."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def _language_models(module: nn.Module) -> Iterator[PeftModel | PreTrainedModel]:
    """The outermost ones."""
    if isinstance(module, (PeftModel, PreTrainedModel)):
        yield module
    else:
        for child in module.children():
            yield from _language_models(child)


def _shard_language_model(model: Any, mesh: DeviceMesh) -> None:
    # The decoder is the root, not the whole model: scalar models and the first half of a split forward call it alone.
    decoder = decoder_of(model)
    layers = [child for child in model.modules() if isinstance(child, GradientCheckpointingLayer)]
    if decoder is None or not layers:
        raise ConfigurationError(
            f"{type(model).__name__} shows no decoder layers, by which a sharded strategy shares it out"
        )
    adapters = set(all_adapter_parameters(model))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False, ignored_params=adapters)
    head = model.get_output_embeddings()
    if head is not None and not isinstance(head.weight, DTensor):  # not tied to the embeddings
        fully_shard(head, mesh=mesh, reshard_after_forward=False)


def all_adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Of all adapters below a module, whether they are trained or not."""
    return [
        parameter
        for child in module.modules()
        if isinstance(child, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for name, parameter in child.named_parameters()
        if not {"base_layer", "original_module"} & set(name.split("."))
    ]


def small_adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The same without whole modules (`modules_to_save`), which compute in the model's type, as those they replace."""
    whole = {
        parameter
        for child in module.modules()
        if isinstance(child, ModulesToSaveWrapper)
        for parameter in child.modules_to_save.parameters()
    }
    return [parameter for parameter in all_adapter_parameters(module) if parameter not in whole]


def _average_gradients(module: nn.Module) -> None:
    """The mean over all processes of the gradients that no sharding averages; idle parameters are idle on all."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        joined = torch.cat([gradient.reshape(-1) for gradient in same]) / dist.get_world_size()
        dist.all_reduce(joined)
        for gradient, mean in zip(same, joined.split([gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(mean.view_as(gradient))


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Context in which the weights below these modules are whole; entered by all processes at once.

    Nothing inside waits for another process, and no gradients are taken. Does nothing without a sharded strategy.
    """
    found = {id(child): child for module in modules for child in module.modules() if isinstance(child, FSDPModule)}
    for child in found.values():
        child.set_reshard_after_forward(False, recurse=False)
        child.unshard()
    try:
        yield
    finally:
        for child in found.values():
            child.reshard()
            child.set_reshard_after_forward(isinstance(child, GradientCheckpointingLayer), recurse=False)


def _blank_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters have shapes and no memory; buffers are copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    return deepcopy(module, memo)


def deepcopy_detached(module: nn.Module) -> Any:
    """A deep copy without gradients; parameters right after a backward can be copied too, and those in shares."""
    blank: nn.Module = module.__dict__.get("_blank", (module,))[0]
    memo: dict[int, Any] = {
        id(there): nn.Parameter(whole(parameter.detach()).clone(), requires_grad=False)
        for there, parameter in zip(blank.parameters(), module.parameters(), strict=True)
    }
    copy = deepcopy(blank, memo)
    if blank is not module:
        copy.to(next(module.parameters()).device)  # buffers are where they were before the sharding
    return copy
