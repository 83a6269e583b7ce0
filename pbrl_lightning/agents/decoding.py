"""Decoding several responses to each prompt, token by token: the prompt's keys and values are held and read once.

``DecodedRows`` is what sampling asks of a model: logits after the prompts, then a step with one token per row, and rows
that leave. Where the model's attention can be exchanged, a step lets all rows of a prompt read its keys in one matrix
product, and keeps only the responses' own keys row by row; otherwise each row has a copy of its prompt's.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from pbrl_lightning.agents.attention import attention_exchanged, check_options, may_exchange_attention
from pbrl_lightning.agents.forward import SplitForward, accepts, decoder_of, reading_of, without_extras
from pbrl_lightning.utils.errors import ConfigurationError

_ATTENTION = "pbrl_shared_prompts"
_SHARED: ContextVar[_SharedPrompts] = ContextVar("shared_prompts")
_SHARES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class DecodedRows:
    """Responses being decoded, each with a copy of its prompt's keys and values.

    Args:
        model: A causal LM in eval mode.
        prompts: ``B`` lists of token ids.
        source: The prompt of each row, shape ``(R,)``, ascending.
        room: Most tokens that a response can have.

    Attributes:
        logits: Of each row's next token, shape ``(R, V)``.

    Raises:
        ConfigurationError: If the model does not fill the cache it is given.
    """

    shares_prompts = False

    def __init__(self, model: nn.Module, prompts: list[list[int]], source: Tensor, room: int) -> None:
        self.model = model
        logits, self.cache, self.prompt_mask = _encode(model, prompts, source.device)
        self.logits = logits[source]
        self.positions = self.prompt_mask.sum(1)[source]
        self._expand(source, room)

    def _expand(self, source: Tensor, room: int) -> None:
        self.mask = self.prompt_mask[source]
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:
                assert layer.keys is not None
                assert layer.values is not None
                self.cache.layers[index] = _RoomyLayer(layer.keys, layer.values, source, room)
            else:  # those of a sliding window stay short by themselves
                layer.batch_select_indices(source)

    def keep(self, rows: Tensor) -> None:
        """Lets the other rows leave; ``rows`` are ascending indices."""
        self.cache.batch_select_indices(rows)
        self.positions, self.mask = self.positions[rows], self.mask[rows]

    def step(self, tokens: Tensor) -> None:
        """Appends one token to each row, shape ``(R,)``."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        self._forward(tokens, self.mask)

    def _forward(self, tokens: Tensor, mask: Tensor | None) -> None:
        inputs = _step_inputs(self.model, tokens[:, None], mask, self.positions[:, None], self.cache)
        inputs |= without_extras(self.model)
        self.logits = self.model(**inputs).logits[:, -1]
        self.positions = self.positions + 1


class SharingRows(DecodedRows):
    """The same with one copy of each prompt's keys and values for all of its rows."""

    shares_prompts = True

    @override
    def _expand(self, source: Tensor, room: int) -> None:
        dtype = self.logits.dtype
        # A CPU's small products in bfloat16 are slow, and the attention of a step is made of small products.
        exact = torch.float32 if source.device.type == "cpu" and torch.finfo(dtype).bits == 16 else None
        self.shared = _SharedPrompts(source, self.prompt_mask)
        for index, layer in enumerate(self.cache.layers):
            self.cache.layers[index] = _SharingLayer(self.shared, layer.keys, layer.values, len(source), room, exact)

    @override
    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.positions = self.positions[rows]
        self.shared.keep(rows)

    @override
    def step(self, tokens: Tensor) -> None:
        with attention_exchanged(self.model, _ATTENTION, _SHARED, self.shared):
            self._forward(tokens, None)


class RecomputedRows(DecodedRows):
    """The same without a cache, prompt by prompt: each step reads the whole texts, as a plain forward does."""

    @override
    def __init__(self, model: nn.Module, prompts: list[list[int]], source: Tensor, room: int) -> None:
        del room
        self.model = model
        counts = source.bincount(minlength=len(prompts)).tolist()
        texts = [
            torch.tensor([prompt] * count, device=source.device) for prompt, count in zip(prompts, counts, strict=True)
        ]
        self._groups = [self._group(ids) for ids in texts if len(ids)]
        self._read()

    def _group(self, ids: Tensor) -> _Group:
        return _Group(ids, torch.arange(len(ids), device=ids.device), {})

    def _read(self) -> None:
        self.logits = torch.cat([self._next_logits(group)[group.wanted] for group in self._groups])

    def _next_logits(self, group: _Group) -> Tensor:
        """Of the token after each of the group's texts, shape ``(rows, V)``."""
        options = {"use_cache": False} if accepts(self.model, "use_cache") else {}
        logits: Tensor = self.model(input_ids=group.ids, **options, **without_extras(self.model)).logits
        return logits[:, -1]

    @override
    def keep(self, rows: Tensor) -> None:
        wanted = torch.zeros(sum(len(group.wanted) for group in self._groups), dtype=torch.bool, device=rows.device)
        wanted[rows] = True
        kept = wanted.split([len(group.wanted) for group in self._groups])
        for group, mask in zip(self._groups, kept, strict=True):
            group.wanted = group.wanted[mask]
        self._groups = [group for group in self._groups if len(group.wanted)]

    @override
    def step(self, tokens: Tensor) -> None:
        parts = tokens.split([len(group.wanted) for group in self._groups])
        for group, part in zip(self._groups, parts, strict=True):
            # Rows that have left stay in the group, since not every cache can lose a row: any token will do for them.
            column = group.ids[:, -1].index_copy(0, group.wanted, part)
            group.ids = torch.cat([group.ids, column[:, None]], 1)
        self._read()


class OwnCacheRows(RecomputedRows):
    """The same with the cache, and the inputs, that the model's own ``generate`` makes: state spaces and hybrids."""

    model: Any
    passes_positions = True

    @override
    def _group(self, ids: Tensor) -> _Group:
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": True}
        if self.model._supports_default_dynamic_cache():
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            options["cache" if accepts(self.model, "cache") else "past_key_values"] = cache
        if self.passes_positions and accepts(self.model, "position_ids"):
            options["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return _Group(ids, torch.arange(len(ids), device=ids.device), options)

    @override
    def _next_logits(self, group: _Group) -> Tensor:
        more: dict[str, Any] = {"next_sequence_length": 1} if group.is_begun else {"is_first_iteration": True}
        inputs = self.model.prepare_inputs_for_generation(group.ids, **more, **group.options)
        output = self.model(**inputs, **without_extras(self.model), return_dict=True)
        group.options = self.model._update_model_kwargs_for_generation(output, group.options)
        group.is_begun = True
        logits: Tensor = output.logits
        return logits[:, -1]


class OwnPositionsRows(OwnCacheRows):
    """The same for models that count positions by themselves, and otherwise than others."""

    passes_positions = False


KINDS: dict[str, type[DecodedRows]] = {
    "batched": DecodedRows,
    "own_cache": OwnCacheRows,
    "own_positions": OwnPositionsRows,
    "recomputed": RecomputedRows,
}
"""By :attr:`pbrl_lightning.agents.forward.Reading.sampling`."""


@dataclass
class _Group:
    """The rows of one prompt, which have the same length.

    Attributes:
        ids: The texts so far, shape ``(rows, T)``.
        wanted: The rows that have not left, ascending.
        options: What ``generate`` would pass on from step to step.
        is_begun: Whether the prompt was read.
    """

    ids: Tensor
    wanted: Tensor
    options: dict[str, Any]
    is_begun: bool = False


def rows_for(model: nn.Module, width: int) -> type[DecodedRows]:
    """How rows of at most so many tokens are decoded: prompts are shared where the model's attention allows it."""
    reading = reading_of(model)
    if reading.sampling != "batched":
        return KINDS[reading.sampling]
    decoder = decoder_of(model)
    shares = decoder is not None and may_exchange_attention(decoder, width) and _shares_truly(model)
    return SharingRows if shares else DecodedRows


def _encode(model: nn.Module, prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Any, Tensor]:
    """Logits after each prompt ``(B, V)``, the cache, and the left-padded attention mask ``(B, P)``."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    split = SplitForward(model, **_step_inputs(model, ids, mask, positions, cache))
    if cache.get_seq_length() != width:
        raise ConfigurationError(
            f"{type(model).__name__}.forward does not fill the key-value cache it is given, which sampling needs; "
            "let a wrapper pass `past_key_values` and `position_ids` on"
        )
    return split.logits(split.states[:, -1]), cache, mask


def _step_inputs(model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> dict[str, Any]:
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    inputs["cache" if accepts(model, "cache") else "past_key_values"] = cache  # renamed in transformers 5.24
    if accepts(model, "position_ids"):
        inputs["position_ids"] = positions
    return inputs


class _RoomyLayer(DynamicLayer):
    """Keys and values of one decoder layer with room for a whole response: a token is written, nothing is copied."""

    def __init__(self, keys: Tensor, values: Tensor, source: Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        heads, width = keys.shape[1:3]
        self._memory = [x.new_empty(len(source), heads, width + room, x.shape[3]) for x in (keys, values)]
        for memory, states in zip(self._memory, (keys, values), strict=True):
            memory[:, :, :width] = states[source]
        self._show(width)

    def _show(self, end: int) -> None:
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values  # type: ignore[return-value]

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        assert self.keys is not None
        self._memory = [memory[indices] for memory in self._memory]
        self._show(self.keys.shape[2])


class _SharedPrompts:
    """Which rows belong to which prompt: row ``r`` is the ``place[r]``-th of prompt ``source[r]``.

    Attributes:
        bias: Added to the scores of the prompts' keys, shape ``(B, 1, 1, P)``: -inf for padding.
        layer: The one whose attention comes next.
    """

    layer: _SharingLayer

    def __init__(self, source: Tensor, prompt_mask: Tensor) -> None:
        self.num_prompts = len(prompt_mask)
        self.bias = torch.zeros(prompt_mask.shape, device=source.device)
        self.bias = self.bias.masked_fill(prompt_mask == 0, -torch.inf)[:, None, None]
        self._place(source)

    def _place(self, source: Tensor) -> None:
        counts = source.bincount(minlength=self.num_prompts)
        self.source, self.most = source, int(counts.max())
        self.place = torch.arange(len(source), device=source.device) - (counts.cumsum(0) - counts)[source]
        self.even = len(source) == self.num_prompts * self.most

    def keep(self, rows: Tensor) -> None:
        """Lets the other rows leave."""
        self._place(self.source[rows])

    def by_prompt(self, rows: Tensor) -> Tensor:
        """From ``(R, H, g, X)`` to ``(B, H, C * g, X)``, where C is the most rows of a prompt; zeros where none is."""
        _, heads, group, size = rows.shape
        if self.even:
            table = rows.reshape(self.num_prompts, self.most, heads, group, size)
        else:
            table = rows.new_zeros(self.num_prompts, self.most, heads, group, size)
            table[self.source, self.place] = rows
        return table.transpose(1, 2).reshape(self.num_prompts, heads, -1, size)

    def by_row(self, table: Tensor, group: int) -> Tensor:
        """The way back: from ``(B, H, C * g, X)`` to ``(R, H, g, X)``."""
        count, heads, _, size = table.shape
        table = table.reshape(count, heads, self.most, group, size).transpose(1, 2)
        return table.reshape(-1, heads, group, size) if self.even else table[self.source, self.place]


class _SharingLayer(DynamicLayer):
    """Keys and values of one decoder layer: the prompts' once, and room for those of the rows' responses."""

    def __init__(
        self, shared: _SharedPrompts, keys: Tensor, values: Tensor, rows: int, room: int, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._shared, self._length = shared, 0
        self.prompt_keys, self.prompt_values = keys.to(dtype or keys.dtype), values.to(dtype or values.dtype)
        prompts = (self.prompt_keys, self.prompt_values)
        self._memory = [x.new_empty(rows, x.shape[1], room, x.shape[3]) for x in prompts]

    @override
    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[2] + self._length

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, self._length] = states[:, :, 0]
        self._length += 1
        self._shared.layer = self
        keys, values = (memory[:, :, : self._length] for memory in self._memory)
        return keys, values

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        self._memory = [memory[indices] for memory in self._memory]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per row to its prompt and its response so far: one softmax over both.

    Args:
        module: The attention layer.
        query: Shape ``(R, H, 1, D)``.
        key: Of the responses so far, shape ``(R, H_kv, T, D)``.
        value: The same.
        attention_mask: None.
        scaling: Of the scores; None for ``1 / sqrt(D)``.
        softcap: Soft limit of the scores, or None.
        kwargs: What else the layer passes on.

    Returns:
        Shape ``(R, 1, H, D)``, and None.
    """
    del module
    check_options(kwargs, masked=attention_mask is not None)
    shared = _SHARED.get()
    layer, groups = shared.layer, query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = (query[:, :, 0] * scale).to(key.dtype).reshape(len(query), key.shape[1], groups, -1)
    to_prompt = shared.by_prompt(asked) @ layer.prompt_keys.transpose(2, 3)
    to_response = asked @ key.transpose(2, 3)
    if softcap is not None:
        to_prompt, to_response = (torch.tanh(scores / softcap) * softcap for scores in (to_prompt, to_response))
    to_prompt = shared.by_row(to_prompt + shared.bias.to(to_prompt.dtype), groups)
    exact = torch.promote_types(key.dtype, torch.float32)
    weights = torch.cat([to_prompt, to_response], -1).softmax(-1, dtype=exact).to(value.dtype)
    width = to_prompt.shape[-1]
    from_prompt = shared.by_row(shared.by_prompt(weights[..., :width]) @ layer.prompt_values, groups)
    heard = from_prompt + weights[..., width:] @ value
    return heard.to(query.dtype).reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(_ATTENTION, _attend)


@dataclass(frozen=True)
class _Trial:
    """Two short prompts of unequal length with unequal numbers of rows."""

    prompts = ([1, 2, 3, 4], [5, 6])
    source = (0, 0, 1)
    tokens = (7, 8, 9)

    def logits(self, kind: type[DecodedRows], model: nn.Module, device: torch.device) -> Tensor:
        """After two steps, of which the second is made without the first row."""
        rows = kind(model, [list(prompt) for prompt in self.prompts], torch.tensor(self.source, device=device), 2)
        rows.step(torch.tensor(self.tokens, device=device))
        kept = torch.tensor([1, 2], device=device)
        rows.keep(kept)
        first = rows.logits[kept]
        rows.step(torch.tensor(self.tokens, device=device)[kept])
        return torch.cat([first, rows.logits]).float()


@torch.no_grad()
def _shares_truly(model: nn.Module) -> bool:
    """Whether the model gives the same logits when prompts are shared: looked at once, on two short ones."""
    if model not in _SHARES:
        device = next(model.parameters()).device
        expected = _Trial().logits(DecodedRows, model, device)
        try:
            found = _Trial().logits(SharingRows, model, device)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            _SHARES[model] = False
        else:
            limit = 0.1 if torch.finfo(next(model.parameters()).dtype).bits == 16 else 1e-3
            _SHARES[model] = bool((found - expected).abs().max() <= limit * expected.abs().max())
    return _SHARES[model]
