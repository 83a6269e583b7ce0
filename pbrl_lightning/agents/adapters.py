"""LoRA adapters on one frozen backbone: options, activation, saved form."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import (
    INCLUDE_LINEAR_LAYERS_SHORTHAND,
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
)
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pbrl_lightning.agents.reading import reading
from pbrl_lightning.sharding import assign
from pbrl_lightning.utils.errors import ConfigurationError, MissingModelError

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""What PEFT's form of an adapter may be called."""


@dataclass(frozen=True)
class LoraOptions:
    """A LoRA adapter per agent (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
        r: Rank.
        alpha: The update is scaled by ``alpha / r``.
        target_modules: Names of the layers that get an adapter, or ``all-linear`` for all linear layers but the head;
            None takes PEFT's choice for the architecture, and ``all-linear`` where PEFT has none.
        lora_dropout: Must be 0: the log-probabilities of a policy must not be random.
    """

    r: int = 16
    alpha: int = 32
    target_modules: list[str] | str | None = None
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigurationError(f"`r` must be >= 1, got {self.r}")
        if self.lora_dropout != 0:
            raise ConfigurationError(
                f"`lora_dropout` must be 0 (dropout is off in every policy), got {self.lora_dropout}"
            )

    def to_peft(self, model: nn.Module) -> LoraConfig:
        """The same as PEFT's configuration of a causal LM.

        Args:
            model: What gets the adapter.
        """
        targets = self.target_modules
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if targets is None and kind not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            targets = INCLUDE_LINEAR_LAYERS_SHORTHAND
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )


@contextmanager
def explained(model: nn.Module, lora: LoraOptions) -> Iterator[None]:
    """Says in a sentence of ours that options do not fit a model.

    Raises:
        ConfigurationError: If PEFT refuses them inside.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (ValueError, NotImplementedError) as error:
        linear = {name.rsplit(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigurationError(
            f"a LoRA adapter with `target_modules` {lora.target_modules or 'unset'} does not fit "
            f"{type(model).__name__} ({error}); its linear layers are named {', '.join(sorted(linear)) or 'nothing'}"
        ) from error


def attach_adapters(
    model: PreTrainedModel,
    base: str | None,
    names: list[str],
    lora: LoraOptions | None,
    directories: list[str | None],
    seed: int,
) -> PeftModel:
    """Puts one trainable adapter per name on a frozen backbone.

    Args:
        model: The backbone; its weights are frozen.
        base: Where the backbone comes from, written into saved adapters; None for what the model says itself.
        names: Adapter names.
        lora: Options of new adapters.
        directories: Where each adapter is loaded from; None makes a new one, which changes nothing yet (B = 0).
        seed: Seed of the new adapters' A matrices.

    Raises:
        ConfigurationError: If a saved adapter is damaged, has dropout or does not fit beside the others, a new one does
            not fit the model, or one is asked for without options.
    """
    peft_model: PeftModel | None = None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 for a property under its old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(seed)
        for name, directory in zip(names, directories, strict=True):
            if directory is not None:
                with reading(f"the adapter {directory!r}"):
                    check_adapter_files(directory)
                    if getattr(PeftConfig.from_pretrained(directory), "lora_dropout", 0):
                        raise ConfigurationError(
                            f"the adapter {directory!r} has lora_dropout > 0; set it to 0 in its config"
                        )
                    if peft_model is None:
                        peft_model = PeftModel.from_pretrained(model, directory, adapter_name=name, is_trainable=True)
                    else:
                        peft_model.load_adapter(directory, adapter_name=name, is_trainable=True)
            else:
                if lora is None:
                    raise ConfigurationError("agents without a saved adapter need `lora`")
                with explained(model, lora):
                    if peft_model is None:
                        peft_model = get_peft_model(model, lora.to_peft(model), adapter_name=name)
                    else:
                        peft_model.add_adapter(name, lora.to_peft(peft_model))
    assert peft_model is not None  # names are never empty
    # PEFT leaves all but the active adapter without gradients.
    for parameter in peft_model.parameters():
        parameter.requires_grad_(False)
    for name in names:
        if base is not None:
            peft_model.peft_config[name].base_model_name_or_path = base
        for parameter in adapter_parameters(peft_model, name).values():
            parameter.requires_grad_(True)
    return peft_model.eval()


def check_adapter_files(directory: str) -> None:
    """Finds a local adapter without its weights, which PEFT would look for on the hub.

    Raises:
        MissingModelError: If it has none.
    """
    path = Path(directory)
    if path.is_dir() and not any((path / name).is_file() for name in _WEIGHTS):
        raise MissingModelError(f"the adapter directory {directory!r} has no weights (none of {', '.join(_WEIGHTS)})")


def add_adapter(peft_model: PeftModel, name: str, lora: LoraOptions, seed: int) -> None:
    """Puts one more adapter that changes nothing yet on a backbone; replaces one of the same name.

    Which of the other adapters' parameters are trained stays as it is: PEFT would change it.
    """
    trained = {parameter: parameter.requires_grad for parameter in peft_model.parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in peft_model.peft_config:
            peft_model.delete_adapter(name)
        with explained(peft_model, lora):
            peft_model.add_adapter(name, lora.to_peft(peft_model))
    for parameter, requires_grad in trained.items():
        parameter.requires_grad_(requires_grad)
    peft_model.eval()


def adapter_parameters(peft_model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter, by full name."""
    return {key: parameter for key, parameter in peft_model.named_parameters() if f".{name}." in f"{key}."}


@contextmanager
def adapter_active(model: nn.Module, name: str | None) -> Iterator[None]:
    """Makes one adapter, or none, the active one inside; touches neither ``requires_grad`` nor anything else.

    PEFT's own ``set_adapter`` turns gradients off for all other adapters, which would silently leave all but the
    last agent untrained.
    """
    # Besides LoRA layers, a saved adapter may hold whole modules (`modules_to_save`) or rows of the embedding.
    layers = [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    earlier = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [] if name is None else [name]
    try:
        yield
    finally:
        for layer, adapter in zip(layers, earlier, strict=True):
            layer._active_adapter = adapter


def mixes_adapters(model: nn.Module) -> bool:
    """True if rows of one batch can go through different adapters: plain LoRA, and none on the head."""
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules()):
        return False
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    plain = all(type(layer) is LoraLinear and not layer.lora_variant and not layer.merged for layer in layers)
    return plain and not isinstance(head, BaseTunerLayer)


@contextmanager
def adapters_by_row(model: nn.Module) -> Iterator[list[str]]:
    """Inside, row ``r`` of a batch goes through the adapter that the ``r``-th entry of the yielded list names.

    The list is to be changed in place before each forward. Without gradients.
    """
    names: list[str] = []

    def choose(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "adapter_names": names}

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    hooks = [layer.register_forward_pre_hook(choose, with_kwargs=True) for layer in layers]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def kept_precise(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Parameters that a conversion of their module inside (``.to(torch.bfloat16)``) moves, but leaves in float32.

    In bfloat16 a small learning rate does not move weights.
    """
    earlier = [parameter.detach() for parameter in parameters]
    yield
    for parameter, value in zip(parameters, earlier, strict=True):
        if parameter.dtype in (torch.float16, torch.bfloat16) and value.dtype not in (torch.float16, torch.bfloat16):
            parameter.data = value.to(parameter.device)


def merge_adapter(model: nn.Module, name: str) -> None:
    """Adds one adapter to the weights below it and takes all adapters away, in place."""
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if not isinstance(child, BaseTunerLayer):
                continue
            if name in getattr(child, "lora_A", ()) or name in getattr(child, "lora_embedding_A", ()):
                child.merge(adapter_names=[name])
            setattr(parent, child_name, child.get_base_layer())


def save_adapter(peft_model: PeftModel, name: str, directory: Path) -> None:
    """Writes one adapter in PEFT's form, under PEFT's default adapter name."""
    tensors = {key: value.detach().cpu().contiguous() for key, value in _saved_form(peft_model, name).items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_model.peft_config[name]
    inference_mode, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(directory))
    finally:
        config.inference_mode = inference_mode


def _saved_form(peft_model: nn.Module, name: str) -> dict[str, Tensor]:
    """An adapter's parameters and buffers under the names that they have in its file."""
    # Not by `state_dict`, which gives up what a sharded strategy has gathered.
    everything: dict[str, Any] = {**dict(peft_model.named_parameters()), **dict(peft_model.named_buffers())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`|Could not find a config file")
        state: dict[str, Tensor] = get_peft_model_state_dict(peft_model, everything, adapter_name=name)
    return state


@contextmanager
def adapter_values(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values for these parameters inside; the own ones are back after it, bit for bit."""
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    _copy(parameters, values)
    try:
        yield
    finally:
        _copy(parameters, own)


@torch.no_grad()
def _copy(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Any]) -> None:
    missing = sorted(set(parameters) - set(values))
    if missing:
        raise ConfigurationError(
            f"the saved adapter lacks {', '.join(missing[:3])} … ({len(missing)} of {len(parameters)})"
        )
    for name, parameter in parameters.items():
        assign(parameter, values[name])


def read_adapter(
    directory: Path, peft_model: nn.Module, name: str, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """A saved adapter's values under the names that its parameters have on a backbone.

    Args:
        directory: What :func:`save_adapter` wrote.
        peft_model: The backbone.
        name: The adapter's name on it.
        parameters: Those of the adapter's parameters that are wanted.

    Raises:
        ConfigurationError: If the file has no value for one of them.
    """
    with reading(f"the adapter {str(directory)!r}"):
        saved = load_file(directory / "adapter_model.safetensors")
    # Each kind of adapter has file names of its own (whole modules, rows of the embedding, magnitudes of DoRA).
    key_of = {id(tensor): key for key, tensor in _saved_form(peft_model, name).items()}
    keys = {parameter: key_of.get(id(tensor), parameter) for parameter, tensor in parameters.items()}
    missing = [key for key in keys.values() if key not in saved]
    if missing:
        raise ConfigurationError(
            f"the adapter in {str(directory)!r} has no {missing[0]} ({len(missing)} of {len(keys)} weights are missing)"
        )
    return {parameter: saved[key] for parameter, key in keys.items()}
