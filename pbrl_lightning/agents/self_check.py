"""A model is tried before it is trusted: what this library computes is compared with the model's plain forward.

Log-probabilities come from padded rows and from hidden states and head taken apart, responses from a cache that is
filled in a batch. All of that assumes something about the inside of a model. On a few tokens each assumption is tried;
what differs from ``model(input_ids)`` is done the plain way, with one warning, and a model for which there is no right
way is refused. Whether attention may be exchanged is tried likewise, in ``packing`` and ``decoding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from pbrl_lightning.agents.decoding import KINDS, DecodedRows, OwnCacheRows
from pbrl_lightning.agents.forward import READINGS, Reading, SplitForward, base_decoder_of, decoder_of, without_extras
from pbrl_lightning.agents.loading import vocabulary_of
from pbrl_lightning.agents.packing import plain_layout
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.sharding import in_shares
from pbrl_lightning.utils.errors import ConfigurationError

_LENGTH, _PREFIX = 7, 4
_SAMPLING: tuple[Literal["batched", "own_cache", "own_positions", "recomputed"], ...]
_SAMPLING = "batched", "own_cache", "own_positions", "recomputed"
_KNOWN: dict[object, Reading] = {}


@dataclass
class Trial:
    """What the self-check found.

    Attributes:
        reading: How the model is to be read.
        off: Difference of each way that was tried: norm of the logits' error by the norm of the centered logits, at the
            worst token (in 16 bits at the median one of the worst text); infinite for one that raised an error.
        errors: What these raised.
    """

    reading: Reading = field(default_factory=Reading)
    off: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def check_model(model: nn.Module, name: str = "the model") -> Reading:
    """Tries a causal LM once, and notes for :func:`pbrl_lightning.agents.forward.reading_of` how it is to be read.

    Models of the same classes, configuration, dtype and device are tried once in a process. A model that cannot be
    tried where it is (float16 on some CPUs, weights on no device, logits that are not finite) is left for later.

    Args:
        model: A causal LM in eval mode.
        name: What to call it in messages.

    Raises:
        ConfigurationError: If tokens are predicted from later ones, a forward changes the weights, or there is no way
            to score or sample the model that agrees with its plain forward.
    """
    if model in READINGS:
        return READINGS[model]
    if in_shares(model) or _device(model) is None:
        return Reading()
    key = _kind(model)
    if key is None or key not in _KNOWN:
        trial = try_model(model, name)
        if trial is None:
            return Reading()
        _warn(model, name, trial)
        reading = trial.reading
        if key is not None:
            _KNOWN[key] = reading
    else:
        reading = _KNOWN[key]
        _note(model, reading)
    return reading


def check_decoder(decoder: nn.Module, name: str = "the backbone") -> None:
    """The same for a decoder of which hidden states alone are read: how rows of unequal length may be in one batch.

    Raises:
        ConfigurationError: If there is no way that agrees with its plain forward.
    """
    if decoder in READINGS or in_shares(decoder) or _device(decoder) is None:
        return
    key = _kind(decoder)
    if key is None or key not in _KNOWN:
        with _quietly(decoder):
            trial = _tried_decoder(decoder, name)
        if trial is None:
            return
        _warn(decoder, name, trial)
        READINGS[decoder] = trial.reading
        if key is not None:
            _KNOWN[key] = trial.reading
    else:
        READINGS[decoder] = _KNOWN[key]


def _tried_decoder(decoder: nn.Module, name: str) -> Trial | None:
    batch = _padded_rows(decoder)
    try:
        plain = decoder(input_ids=batch.input_ids[:1])[0][0]
    except Exception as error:
        _raise_if_memory(error)
        return None  # whatever it is, the run will meet it where it reads the first text
    if not plain.isfinite().all():
        return None
    trial = Trial()
    for way, reading in {"padded rows": Reading(), "token ids alone": Reading(padded=False)}.items():
        READINGS[decoder] = trial.reading = reading
        _try(trial, way, decoder, lambda: _padded_states(decoder, batch), *_expected(plain, batch))
        if _agrees(trial, way, decoder):
            return trial
    del READINGS[decoder]
    raise ConfigurationError(
        f"{name} ({type(decoder).__name__}) reads a text differently beside other texts ({_differences(trial)}): "
        "scores would depend on the batch; use a causal decoder"
    )


def try_model(model: nn.Module, name: str = "the model") -> Trial | None:
    """Compares ways of reading a model with its plain forward until a right one is found, and notes that one.

    Returns:
        What was found; None if nothing can be said.

    Raises:
        ConfigurationError: If there is no right way.
    """
    with _quietly(model):
        trial = _tried(model, name)
    if trial is not None:
        _note(model, trial.reading)
    return trial


def _tried(model: nn.Module, name: str) -> Trial | None:
    batch = _padded_rows(model)
    weights = _fingerprint(model)
    try:
        plain, prefix = _plain(model, batch.input_ids[0]), _plain(model, batch.input_ids[0, :_PREFIX])
    except Exception as error:
        _raise_if_memory(error)
        if not isinstance(model, PreTrainedModel) or _is_narrow(model):
            return None  # 16 bits on a CPU: it may be able to on the device it is meant for
        raise ConfigurationError(
            f"{name} ({type(model).__name__}) cannot be run on token ids alone, as a causal language model of text can "
            f"(dtype {next(model.parameters()).dtype}, on {_device(model)}): {_sentence(error)}"
        ) from error
    if not plain.isfinite().all():
        return None
    if _fingerprint(model) != weights:
        raise ConfigurationError(
            f"the forward of {name} ({type(model).__name__}) changes the model's own weights outside of training, so "
            "that it can be neither trained nor saved from there; use a model of another architecture"
        )
    trial = Trial()
    _try(trial, "a text's beginning", model, lambda: prefix, plain[:_PREFIX], [0] * _PREFIX)
    if not _agrees(trial, "a text's beginning", model):
        change = trial.off["a text's beginning"]
        _try(trial, "the same again", model, lambda: _plain(model, batch.input_ids[0]), plain, [0] * _LENGTH)
        if not _agrees(trial, "the same again", model):
            raise ConfigurationError(
                f"{name} ({type(model).__name__}) gives other logits whenever it is asked: its forward is random or "
                "keeps a state, and log-probabilities of responses would mean nothing"
            )
        raise ConfigurationError(
            f"{name} ({type(model).__name__}) predicts tokens from those after them (logits change by "
            f"{change:.2g} of their size where a text goes on): responses can only be learned "
            "with a causal model; architectures such as BERT's need `is_decoder: true` in their config.json"
        )
    trial.reading = _scoring(model, batch, plain, trial, name)
    trial.reading = replace(trial.reading, sampling=_sampling(model, batch.input_ids[0], plain, trial, name))
    return trial


def _fingerprint(model: nn.Module) -> list[list[float]]:
    """The first few numbers of each weight."""
    return [parameter.detach().flatten()[:8].tolist() for parameter in model.parameters()]


def _scoring(model: nn.Module, batch: TokenBatch, plain: Tensor, trial: Trial, name: str) -> Reading:
    """The first way of computing logits of several rows that is right."""
    readings = {"padded rows, hidden states and head apart": Reading()}
    alternative = _other_decoder(model)
    if alternative is not None:
        readings["padded rows, the inner decoder and head apart"] = Reading(decoder=alternative)
    readings["padded rows"] = Reading(split=False)
    readings["token ids alone, hidden states and head apart"] = Reading(padded=False)
    if alternative is not None:
        readings["token ids alone, the inner decoder and head apart"] = Reading(padded=False, decoder=alternative)
    readings["token ids alone"] = Reading(padded=False, split=False)
    for way, reading in readings.items():
        _note(model, reading)
        _try(trial, way, model, lambda: _split_logits(model, batch), *_expected(plain, batch))
        if _agrees(trial, way, model):
            return reading
    raise ConfigurationError(
        f"{name} ({type(model).__name__}) cannot be scored: next to its plain forward its logits are wrong in every "
        f"way of reading several texts ({_differences(trial)})"
    )


def _sampling(
    model: nn.Module, ids: Tensor, plain: Tensor, trial: Trial, name: str
) -> Literal["batched", "own_cache", "own_positions", "recomputed"]:
    # Rows of two prompts of unequal length, of which the first leaves after a step.
    expected, prompts = plain[[3, 1, 4, 4, 2, 5, 3]], [0, 1, 0, 0, 1, 0, 1]
    for sampling in _SAMPLING:
        kind, way = KINDS[sampling], f"sampling, {sampling}"
        if issubclass(kind, OwnCacheRows) and not isinstance(model, PreTrainedModel):
            continue
        _try(trial, way, model, lambda kind=kind: _decoded(kind, model, ids), expected, prompts)  # type: ignore[misc]
        if _agrees(trial, way, model):
            return sampling
        if not isinstance(model, PreTrainedModel) and way in trial.errors:
            return "batched"  # a wrapper that does not pass a cache on is told so where it is sampled
    raise ConfigurationError(
        f"{name} ({type(model).__name__}) cannot be sampled: next to its plain forward its logits are wrong in every "
        f"way of decoding ({_differences(trial)})"
    )


def _decoded(kind: type[DecodedRows], model: nn.Module, ids: Tensor) -> Tensor:
    given = ids.tolist()
    rows = kind(model, [given[:4], given[:2]], torch.tensor([0, 0, 1], device=ids.device), 2)
    found = [rows.logits[[0, 2]]]
    rows.step(ids[[4, 4, 2]])
    found.append(rows.logits)
    rows.keep(torch.tensor([1, 2], device=ids.device))
    rows.step(ids[[5, 3]])
    return torch.cat([*found, rows.logits])


def _plain(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], **without_extras(model)).logits[0]
    return logits


def _split_logits(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Logits of all real tokens, as :func:`pbrl_lightning.agents.logprobs.response_logps` computes them."""
    layout = plain_layout(decoder_of(model) or model, batch)
    inputs: dict[str, Any] = dict(layout.inputs)
    split = SplitForward(model, **inputs)
    return split.logits(layout.pick(split.states, *batch.attention_mask.nonzero(as_tuple=True)))


def _padded_states(decoder: nn.Module, batch: TokenBatch) -> Tensor:
    layout = plain_layout(decoder, batch)
    return layout.pick(layout.states(decoder), *batch.attention_mask.nonzero(as_tuple=True))


def _padded_rows(model: nn.Module) -> TokenBatch:
    """A text, and its beginning twice: padded on the left and on the right."""
    config: Any = getattr(model, "config", None)
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
    special = {index for ids in named for index in (ids if isinstance(ids, list) else [ids])}
    ordinary = [index for index in range(vocabulary_of(model) or 64) if index not in special][1 : _LENGTH + 1]
    text = torch.tensor((ordinary * _LENGTH)[:_LENGTH] or [0] * _LENGTH, device=_device(model))
    beginning, rest = text[:_PREFIX], torch.zeros_like(text[_PREFIX:])
    mask = torch.ones(3, _LENGTH, dtype=torch.bool, device=text.device)
    mask[1, : _LENGTH - _PREFIX] = False
    mask[2, _PREFIX:] = False
    ids = torch.stack([text, torch.cat([rest, beginning]), torch.cat([beginning, rest])])
    return TokenBatch(ids, mask, mask)


def _expected(plain: Tensor, batch: TokenBatch) -> tuple[Tensor, list[int]]:
    """What the tokens of these rows should give, and the row of each."""
    lengths = batch.attention_mask.sum(1).tolist()
    return torch.cat([plain[:length] for length in lengths]), [
        r for r, length in enumerate(lengths) for _ in range(length)
    ]


def _try(
    trial: Trial, way: str, model: nn.Module, compute: Callable[[], Tensor], expected: Tensor, rows: Sequence[int]
) -> None:
    """Notes how far the numbers of one way are off; ``rows`` says which text each of the tokens is of."""
    try:
        found = compute().double()
    except Exception as error:  # of any kind: each family fails in its own
        _raise_if_memory(error)
        trial.off[way], trial.errors[way] = float("inf"), _sentence(error)
        return
    expected = expected.double()
    size = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    off = (found - expected).norm(dim=1) / size.clamp(min=1e-12)
    off = off.nan_to_num(nan=float("inf"))
    if _is_narrow(model):
        # Single tokens may end in quite other states after any other rounding, as by another expert: a fault is one
        # of most tokens of a text.
        texts = [off[[place for place, of in enumerate(rows) if of == row]] for row in set(rows)]
        off = torch.stack([text.median() for text in texts])
    trial.off[way] = float(off.max())


def _agrees(trial: Trial, way: str, model: nn.Module) -> bool:
    # Trained models of 30 layers differ by up to 1e-3 in float32; a wrong position or head by more than 0.1.
    return trial.off[way] <= (0.05 if _is_narrow(model) else 1e-2)


def _is_narrow(model: nn.Module) -> bool:
    """True if products are made in fewer bits than float32's."""
    parameter = next(model.parameters())
    short = parameter.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return torch.finfo(parameter.dtype).bits < 32 or (short and parameter.dtype == torch.float32)


def _device(model: nn.Module) -> torch.device | None:
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    return None if parameter is None or parameter.device.type == "meta" else parameter.device


def _other_decoder(model: nn.Module) -> str | None:
    """Name of the decoder that the model names itself, if that is not the one below its head by convention."""
    named = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    if named is None or named is model or named is base_decoder_of(model):
        return None
    return next((name for name, module in model.named_modules() if module is named), None)


def _kind(model: nn.Module) -> object:
    """What models have in common of which one is tried for all; None for one that says nothing of itself."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return None
    parts = frozenset(type(module) for module in model.modules())
    parameter = next(model.parameters())
    return type(model), parts, repr(config), config._attn_implementation, parameter.dtype, parameter.device.type


def _note(model: nn.Module, reading: Reading) -> None:
    for module in model.modules():
        READINGS.pop(module, None)
    READINGS[model] = reading
    decoder = decoder_of(model)
    if decoder is not None:
        READINGS[decoder] = reading


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """No gradients, no mixed precision, and random states as they were."""
    device = _device(model) or torch.device("cpu")
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _warn(model: nn.Module, name: str, trial: Trial) -> None:
    reading, plain = trial.reading, []
    if not reading.padded:
        plain.append("it is given token ids padded on the right, without mask and positions")
    if not reading.split:
        plain.append("logits are computed for all tokens, since its head cannot be applied apart")
    if reading.sampling in ("own_cache", "own_positions"):
        plain.append("responses are decoded prompt by prompt with its own cache")
    if reading.sampling == "recomputed":
        plain.append("responses are decoded without a cache, each token from the whole text")
    if plain:
        rank_zero_warn(
            f"{name} ({type(model).__name__}) was tried against its plain forward: {'; '.join(plain)}. "
            f"This is right and slower (differences: {_differences(trial)})."
        )


def _differences(trial: Trial) -> str:
    found = {way: f"{off:.2g}" if off < float("inf") else "not finite" for way, off in trial.off.items()}
    found |= {way: f"fails with {error.partition(':')[0]}" for way, error in trial.errors.items()}
    return ", ".join(f"{way} {off}" for way, off in found.items())


def _sentence(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text[:200]}"


def _raise_if_memory(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        raise error
