"""Responses to the same prompt behind one copy of it: the prompt is computed once.

A pack is a prompt and then several responses, each with the positions it would have alone; a row holds one pack, or
several short ones in the place of padding. A 4-D mask lets a response see its prompt and itself only, so that every
hidden state is the one of an unpacked row, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from pbrl_lightning.agents.forward import accepts
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.sharding import in_shares

_PACKS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """What a decoder reads, and where in its output the tokens of the ``R`` rows of ``T`` columns are.

    Attributes:
        inputs: ``input_ids``, ``attention_mask`` and, where the model takes them, ``position_ids``.
        row: Shape ``(R, T)``; for padding any.
        column: The same.
    """

    inputs: dict[str, Tensor]
    row: Tensor
    column: Tensor

    def pick(self, states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The states of these tokens, given by their places in the unpacked rows; shape ``(M, H)``."""
        return states[self.row[rows, columns], self.column[rows, columns]]


def lay_out(decoder: nn.Module, batch: TokenBatch) -> Layout:
    """How rows are read: packed where prompts are shared and that is less work, otherwise as they are.

    Args:
        decoder: Maps the inputs to hidden states, as a tuple's first entry.
        batch: ``R`` rows, padded on either side.
    """
    count, plain_width = batch.input_ids.shape
    if count < 2 or not may_exchange_attention(decoder, plain_width):
        return _as_it_is(decoder, batch)
    rows = _Rows.of(batch)
    size = hidden_size(decoder)
    bins = _into_bins(rows.packs(size))
    width = _width(bins)
    pays = len(bins) * _cost(width, size) < 0.95 * count * _cost(plain_width, size)
    # The processes of a sharded run must run the same forwards, so there it is looked at whether it pays now or not.
    possible = (pays or in_shares(decoder)) and _packs_truly(decoder, batch.input_ids.device)
    if not (possible and pays):
        return _as_it_is(decoder, batch)
    return _packed(batch, rows, bins, _dtype(decoder))


@dataclass
class _Pack:
    """A prompt and responses to it, one behind the other."""

    prompt: tuple[int, ...]
    responses: list[tuple[int, ...]]

    @property
    def width(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))


def _into_bins(packs: list[_Pack]) -> list[list[_Pack]]:
    """Rows of several packs, none wider than the widest pack: what padding would fill, short packs do (first fit)."""
    packs = sorted(packs, key=lambda pack: pack.width, reverse=True)
    bins: list[list[_Pack]] = []
    left: list[int] = []
    for pack in packs:
        place = next((index for index, room in enumerate(left) if room >= pack.width), len(bins))
        if place == len(bins):
            bins.append([])
            left.append(packs[0].width)
        bins[place].append(pack)
        left[place] -= pack.width
    return bins


def _width(bins: list[list[_Pack]]) -> int:
    return max(sum(pack.width for pack in packs) for packs in bins)


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

    def packs(self, hidden_size: int) -> list[_Pack]:
        """Equal responses to a prompt stand once."""
        by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            by_prompt.setdefault(prompt, {})[response] = None
        packs = []
        for prompt, said in by_prompt.items():
            responses = list(said)
            size = _responses_per_pack(len(prompt), max(map(len, responses)), len(responses), hidden_size)
            packs += [_Pack(prompt, responses[at : at + size]) for at in range(0, len(responses), size)]
        return packs


def _cost(width: int, hidden_size: int) -> float:
    """Of a row, in a token's work outside of attention; a matrix product of attention is slower than those outside."""
    return width * (1 + width / (2 * hidden_size))


def _responses_per_pack(prompt: int, response: int, count: int, hidden_size: int) -> int:
    """How many responses behind one prompt cost least: attention grows with the square of the row."""
    sizes = {-(-count // packs) for packs in range(1, count + 1)}
    return min(sizes, key=lambda size: -(-count // size) * _cost(prompt + size * response, hidden_size))


def _packed(batch: TokenBatch, rows: _Rows, bins: list[list[_Pack]], dtype: torch.dtype) -> Layout:
    device, shape = batch.input_ids.device, (len(bins), _width(bins))
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    # Which pack of its row a token belongs to (-1: padding), and which response of it (0: the prompt).
    packs, segments = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int, int]] = {}
    for index, row_packs in enumerate(bins):
        at = 0
        for number, pack in enumerate(row_packs):
            length = len(pack.prompt)
            packs[index, at : at + pack.width] = number
            ids[index, at : at + pack.width] = torch.tensor(
                [*pack.prompt, *(i for said in pack.responses for i in said)]
            )
            positions[index, at : at + length] = torch.arange(length)
            start = at + length
            for segment, response in enumerate(pack.responses, 1):
                stop = start + len(response)
                positions[index, start:stop] = torch.arange(length, length + len(response))
                segments[index, start:stop] = segment
                places[pack.prompt, response] = index, at, start
                start = stop
            at += pack.width
    row = torch.zeros_like(batch.input_ids, device="cpu")
    column = torch.zeros_like(row)
    for at, (prompt, response, first) in enumerate(zip(rows.prompts, rows.responses, rows.first_columns, strict=True)):
        index, begin, start = places[prompt, response]
        row[at] = index
        middle = first + len(prompt)
        column[at, first:middle] = torch.arange(begin, begin + len(prompt))
        column[at, middle : middle + len(response)] = torch.arange(start, start + len(response))
    inputs = {"input_ids": ids, "attention_mask": _mask(packs, segments, dtype), "position_ids": positions}
    return Layout({name: value.to(device) for name, value in inputs.items()}, row.to(device), column.to(device))


def _mask(packs: Tensor, segments: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores, shape ``(B, 1, T, T)``; padding sees itself, so that no row is empty."""
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same_pack = (packs[:, None, :] == packs[:, :, None]) & (packs >= 0)[:, None, :]
    own = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    allowed = (causal & same_pack & own) | torch.eye(width, dtype=torch.bool)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def _as_it_is(decoder: nn.Module, batch: TokenBatch) -> Layout:
    mask = batch.attention_mask.long()
    inputs = {"input_ids": batch.input_ids, "attention_mask": mask}
    if accepts(decoder, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    count, width = mask.shape
    row = torch.arange(count, device=mask.device)[:, None].expand(count, width)
    return Layout(inputs, row, torch.arange(width, device=mask.device).expand(count, width))


def may_exchange_attention(decoder: nn.Module, width: int) -> bool:
    """True if nothing in its configuration speaks against a mask or an attention of ours for rows of this width."""
    if not isinstance(decoder, PreTrainedModel) or not accepts(decoder, "position_ids"):
        return False
    config: Any = decoder.config.get_text_config()
    window = getattr(config, "sliding_window", None) or width
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and window < width):
        return False
    return getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa")


@torch.no_grad()
def _packs_truly(decoder: nn.Module, device: torch.device) -> bool:
    """Whether the decoder gives the same states for packed rows: looked at once, on three short ones."""
    if decoder not in _PACKS:
        rows = _Rows([(1, 2, 3), (1, 2, 3), (8, 9, 5)], [(4, 5), (6, 7), (6, 4)], [0, 0, 0])
        ids = torch.tensor([[*p, *r] for p, r in zip(rows.prompts, rows.responses, strict=True)])
        small = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(5).expand(3, 5) >= 3).to(device)
        packs = [_Pack(rows.prompts[0], rows.responses[:2]), _Pack(rows.prompts[2], rows.responses[2:])]
        packed = _packed(small, rows, [packs], _dtype(decoder))
        places = small.attention_mask.nonzero(as_tuple=True)
        plain = _as_it_is(decoder, small)
        limit = 0.05 if torch.finfo(_dtype(decoder)).bits == 16 else 1e-3
        with torch.autocast(device.type, enabled=False):
            expected = plain.pick(decoder(**plain.inputs, use_cache=False)[0], *places).float()
            try:
                found = packed.pick(decoder(**packed.inputs, use_cache=False)[0], *places).float()
                _PACKS[decoder] = bool((found - expected).abs().max() < limit * expected.abs().max())
            except (RuntimeError, ValueError, TypeError, IndexError):
                _PACKS[decoder] = False
        if not _PACKS[decoder]:
            rank_zero_warn(
                f"{type(decoder).__name__} does not take a 4-D attention mask: a prompt that responses share is "
                "computed once for each of them"
            )
    return _PACKS[decoder]


def _dtype(decoder: nn.Module) -> torch.dtype:
    return next(decoder.parameters()).dtype


def hidden_size(decoder: Any) -> int:
    """Width of a decoder's states."""
    return int(decoder.config.get_text_config().hidden_size)
