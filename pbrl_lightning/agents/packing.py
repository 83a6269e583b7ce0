"""Responses to the same prompt behind one copy of it: the prompt is computed once, and nothing is padded.

A pack is a prompt and then the responses to it, each with the positions it would have alone; what all of them begin
with stands once too. All packs stand in one row. An attention of our own lets a response see its prompt and itself
only, so that every hidden state is the one of an unpacked row, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from pbrl_lightning.agents.attention import (
    attention_exchanged,
    attention_of,
    check_options,
    may_exchange_attention,
    precision_of_the_model,
)
from pbrl_lightning.agents.forward import ContextPair, accepts, reading_of, without_extras
from pbrl_lightning.agents.last_layer import Hearing, last_layer_narrowed, last_layer_of
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.sharding import in_shares

_ATTENTION = "pbrl_packs"
_READ: ContextVar[list[_Span]] = ContextVar("packs_being_read")
_PACKS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_NARROWS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """What a decoder reads, and where in its output the tokens of the ``R`` rows of ``T`` columns are.

    Attributes:
        inputs: ``input_ids``, ``attention_mask`` and, where the model takes them, ``position_ids``.
        row: Shape ``(R, T)``; for padding any.
        column: The same.
        spans: Of the packs in the one row of the inputs; none if the rows are read as they are.
        kept: Places in that row whose states the decoder gives, ascending; None for all.
        hearings: What the kept ones see in the last layer.
    """

    inputs: dict[str, Any]
    row: Tensor
    column: Tensor
    spans: list[_Span]
    kept: Tensor | None = None
    hearings: list[Hearing] = field(default_factory=list)

    def states(self, decoder: nn.Module) -> Tensor:
        """What the decoder gives, inside of :meth:`reading`: shape ``(rows read, tokens read, H)``."""
        states: Tensor = decoder(**self.inputs, **without_extras(decoder), use_cache=False)[0]
        return states

    def pick(self, states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The states of these tokens, given by their places in the unpacked rows; shape ``(M, H)``."""
        return states[self.row[rows, columns], self.column[rows, columns]]

    def reading(self, decoder: nn.Module) -> AbstractContextManager[None]:
        """What must surround the decoder's forward."""
        if not self.spans:
            return nullcontext()
        kept, exchanged = self.kept, lambda: attention_exchanged(decoder, _ATTENTION, _READ, self.spans)
        if kept is None:
            return exchanged()
        return _Both(exchanged, lambda: last_layer_narrowed(decoder, kept, self.hearings))

    def recomputing(self, decoder: nn.Module, contexts: Callable[[], ContextPair]) -> Callable[[], ContextPair]:
        """Contexts of what is checkpointed: the decoder's second forward needs to be surrounded too."""
        return lambda: (contexts()[0], _Both(lambda: contexts()[1], lambda: self.reading(decoder)))


class _Both:
    """Two contexts, made anew each time: of a retained graph layers are computed more than once more."""

    def __init__(self, *make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for make in self._make:
            self._entered.enter_context(make())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def lay_out(decoder: nn.Module, batch: TokenBatch, wanted: Tensor | None = None) -> Layout:
    """How rows are read: packed where that is less work (prompts are shared, lengths differ), otherwise as they are.

    Args:
        decoder: Maps the inputs to hidden states, as a tuple's first entry.
        batch: ``R`` rows, padded on either side.
        wanted: Tokens whose states are asked for, shape ``(R, T)``, bool; None for all. Of packed rows the last layer
            is computed for no others, where they are few and none of its layers is to be recomputed.
    """
    device, (count, width) = batch.input_ids.device, batch.input_ids.shape
    if not reading_of(decoder).padded:
        return plain_layout(decoder, batch)
    # In train mode dropout would be told nothing of packs, and no trial says anything.
    if decoder.training or not isinstance(decoder, PreTrainedModel):
        return plain_layout(decoder, batch)
    # The processes of a sharded run must run the same forwards, so there it is tried now, whatever this one's rows are.
    if in_shares(decoder) and not _packs_truly(decoder, device):
        return plain_layout(decoder, batch)
    if count < 2 or not may_exchange_attention(decoder, width):
        return plain_layout(decoder, batch)
    rows = _Rows.of(batch)
    packs = rows.packs()
    tokens = sum(pack.width for pack in packs)
    # Each pack costs calls of its own in every layer, at least as much as a token.
    pays = tokens > 0 and tokens + len(packs) < 0.95 * count * width
    if not pays or not _packs_truly(decoder, device):
        return plain_layout(decoder, batch)
    layout = _packed(batch, rows, packs)
    if wanted is None or in_shares(decoder):
        return layout
    narrowed = _narrowed(layout, wanted)
    return narrowed if narrowed.kept is not None and _narrows_truly(decoder, device) else layout


@dataclass
class _Pack:
    """A prompt, what all responses to it begin with, and the rest of each, one behind the other."""

    prompt: tuple[int, ...]
    beginning: tuple[int, ...]
    rests: list[tuple[int, ...]]

    @property
    def shared(self) -> int:
        return len(self.prompt) + len(self.beginning)

    @property
    def width(self) -> int:
        return self.shared + sum(map(len, self.rests))


@dataclass(frozen=True)
class _Span:
    """A pack as its attention sees it: what is shared and the first rest are one causal text, others come in groups.

    Attributes:
        shared: Tokens that every response sees.
        sizes: Of the causal text and of each group.
        masks: For each group, which of the shared keys and its own it sees: shape ``(S, shared + S)``, bool.
    """

    shared: int
    sizes: list[int]
    masks: list[Tensor]

    @classmethod
    def of(cls, pack: _Pack, masks: _Masks) -> _Span:
        shared = pack.shared
        first, *others = [len(rest) for rest in pack.rests if rest] or [0]
        # Scores between the responses of a group are computed for nothing, and each group reads what is shared again.
        most = max(shared, 128)
        groups: list[list[int]] = []
        for length in others:
            if not groups or sum(groups[-1]) + length > most:
                groups.append([])
            groups[-1].append(length)
        return cls(shared, [shared + first, *map(sum, groups)], [masks.of(shared, tuple(group)) for group in groups])


class _Masks:
    """Each rest of a group sees what is shared and, causally, itself; groups of the same lengths have one mask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def of(self, shared: int, lengths: tuple[int, ...]) -> Tensor:
        if (shared, lengths) not in self._made:
            own = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
            mask = torch.cat([torch.ones(len(own), shared, dtype=torch.bool), own], 1)
            self._made[shared, lengths] = mask.to(self._device)
        return self._made[shared, lengths]


@dataclass
class _Rows:
    """Rows as prompts and responses, and the columns of their tokens in the batch."""

    prompts: list[tuple[int, ...]]
    responses: list[tuple[int, ...]]
    first_columns: list[int]

    @classmethod
    def of(cls, batch: TokenBatch) -> _Rows:
        first = batch.attention_mask.int().argmax(1).tolist()
        lengths = batch.attention_mask.sum(1).tolist()
        response_lengths = batch.response_mask.sum(1).tolist()
        prompts, responses = [], []
        for ids, start, length, said in zip(batch.input_ids.tolist(), first, lengths, response_lengths, strict=True):
            prompts.append(tuple(ids[start : start + length - said]))
            responses.append(tuple(ids[start + length - said : start + length]))
        return cls(prompts, responses, first)

    def packs(self) -> list[_Pack]:
        """Equal responses to a prompt stand once, and what all of them begin with belongs to the prompt."""
        by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            by_prompt.setdefault(prompt, {})[response] = None
        packs = []
        for prompt, responses in by_prompt.items():
            shared = _common_beginning(responses)
            packs.append(_Pack(prompt, shared, [response[len(shared) :] for response in responses]))
        return packs


def _common_beginning(sequences: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    first, last = min(sequences), max(sequences)  # what these two have in common, all between them have
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _packed(batch: TokenBatch, rows: _Rows, packs: list[_Pack]) -> Layout:
    device = batch.input_ids.device
    ids: list[int] = []
    positions: list[int] = []
    # Where the tokens of each distinct row are: first those that its pack shares, then its own.
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    for pack in packs:
        shared = torch.arange(len(ids), len(ids) + pack.shared)
        ids += pack.prompt + pack.beginning
        positions += range(pack.shared)
        for rest in pack.rests:
            own = torch.arange(len(ids), len(ids) + len(rest))
            places[pack.prompt, pack.beginning + rest] = torch.cat([shared, own])
            ids += rest
            positions += range(pack.shared, pack.shared + len(rest))
    column = torch.zeros_like(batch.input_ids, device="cpu")
    for at, (prompt, response, first) in enumerate(zip(rows.prompts, rows.responses, rows.first_columns, strict=True)):
        column[at, first : first + len(prompt) + len(response)] = places[prompt, response]
    inputs = {
        "input_ids": torch.tensor([ids], device=device),
        "attention_mask": None,
        "position_ids": torch.tensor([positions], device=device),
    }
    masks = _Masks(device)
    spans = [_Span.of(pack, masks) for pack in packs if pack.width]
    column = column.to(device)
    return Layout(inputs, torch.zeros_like(column), column, spans)


def _narrowed(layout: Layout, wanted: Tensor) -> Layout:
    kept = layout.column[wanted].unique()
    if not 0 < len(kept) < 0.75 * layout.inputs["input_ids"].shape[1]:
        return layout
    column = torch.searchsorted(kept, layout.column).clamp(max=len(kept) - 1)
    return replace(layout, column=column, kept=kept, hearings=list(_hearings(layout.spans, kept)))


def _hearings(spans: list[_Span], kept: Tensor) -> Iterator[Hearing]:
    start = 0
    for span in spans:
        first = torch.arange(start, start + span.shared, device=kept.device)
        for size, mask in zip(span.sizes, [None, *span.masks], strict=True):
            own = torch.arange(start, start + size, device=kept.device)
            asked = kept[(kept >= start) & (kept < start + size)]
            if len(asked):
                keys = own if mask is None else torch.cat([first, own])
                yield Hearing(len(asked), keys, own <= asked[:, None] if mask is None else mask[asked - start])
            start += size


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
    """Attention within the packs of one row.

    Args:
        module: The attention layer.
        query: Shape ``(1, H, T, D)``.
        key: Shape ``(1, H_kv, T, D)``.
        value: The same.
        attention_mask: None.
        scaling: Of the scores; None for ``1 / sqrt(D)``.
        softcap: Soft limit of the scores, or None.
        kwargs: What else the layer passes on.

    Returns:
        Shape ``(1, T, H, D)``, and None.
    """
    del module
    check_options(kwargs, masked=attention_mask is not None)
    spans = _READ.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sizes = [size for span in spans for size in span.sizes]
    parts = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    heard = []
    for span in spans:
        q, k, v = next(parts)
        heard.append(attention_of(q, k, v, None, scale, softcap))
        shared_keys, shared_values = k[:, :, : span.shared], v[:, :, : span.shared]
        for mask in span.masks:
            q, k, v = next(parts)
            k, v = torch.cat([shared_keys, k], 2), torch.cat([shared_values, v], 2)
            heard.append(attention_of(q, k, v, mask, scale, softcap))
    return torch.cat([part.transpose(1, 2) for part in heard], 1), None


AttentionInterface.register(_ATTENTION, _attend)


def plain_layout(decoder: nn.Module, batch: TokenBatch) -> Layout:
    """Rows as they are, with a mask and positions; or as token ids alone that begin in the first column."""
    count, width = batch.input_ids.shape
    row = torch.arange(count, device=batch.input_ids.device)[:, None].expand(count, width)
    columns = torch.arange(width, device=row.device)
    if not reading_of(decoder).padded:
        first = batch.attention_mask.int().argmax(1, keepdim=True)
        inputs = {"input_ids": batch.input_ids.gather(1, (columns + first) % width)}
        return Layout(inputs, row, (columns - first) % width, [])
    mask = batch.attention_mask.long()
    inputs = {"input_ids": batch.input_ids, "attention_mask": mask}
    if accepts(decoder, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return Layout(inputs, row, columns.expand(count, width), [])


def _packs_truly(decoder: nn.Module, device: torch.device) -> bool:
    """Whether the decoder gives the same states for packed rows: looked at once."""
    if decoder not in _PACKS:
        problem = _tried(decoder, device, narrowed=False)
        if problem is None:
            return False  # of a model that diverged nothing can be said
        _PACKS[decoder] = not problem
        if problem:
            rank_zero_warn(
                f"{type(decoder).__name__} does not let its attention be exchanged ({problem}): a prompt that "
                "responses share is computed once for each of them"
            )
    return _PACKS[decoder]


def _narrows_truly(decoder: nn.Module, device: torch.device) -> bool:
    """The same for its last layer alone; where it is not so, the layer is computed whole, and nothing need be said."""
    if decoder not in _NARROWS:
        problem = None if last_layer_of(decoder) is None else _tried(decoder, device, narrowed=True)
        _NARROWS[decoder] = problem == ""
    return _NARROWS[decoder]


@torch.no_grad()
def _tried(decoder: nn.Module, device: torch.device, *, narrowed: bool) -> str | None:
    """What is wrong with the packed states of three short rows; None if they are not finite in plain rows either."""
    config: Any = decoder.config
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [8, 9, 5, 6, 4]]) % config.get_text_config().vocab_size
    small = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(5).expand(3, 5) >= 3).to(device)
    rows = _Rows.of(small)
    packed, plain = _packed(small, rows, rows.packs()), plain_layout(decoder, small)
    wanted = small.response_mask if narrowed else small.attention_mask
    if narrowed:
        packed = _narrowed(packed, wanted)
    places = wanted.nonzero(as_tuple=True)
    limit = 0.05 if torch.finfo(next(decoder.parameters()).dtype).bits == 16 else 1e-3
    with torch.autocast(device.type, enabled=False):
        expected = plain.pick(decoder(**plain.inputs, use_cache=False)[0], *places).float()
        if not expected.isfinite().all():
            return None
        try:
            with precision_of_the_model(), packed.reading(decoder):
                found = packed.pick(decoder(**packed.inputs, use_cache=False)[0], *places).float()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
    off, size = float((found - expected).abs().max()), float(expected.abs().max())
    return "" if off < limit * size else f"states of size {size:.3g} would be off by {off:.3g}"
