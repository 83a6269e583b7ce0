"""Sampling responses: each prompt is encoded once, its candidates are decoded together.

A candidate depends on its own uniforms only, not on what else is in the batch: the cumulative distribution of
the filtered distribution, in token-id order, is inverted at one uniform per (candidate, token) drawn in advance.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from pbrl_lightning.agents.adapters import adapters_by_row
from pbrl_lightning.agents.decoding import DecodedRows, rows_for
from pbrl_lightning.agents.loading import vocabulary_of
from pbrl_lightning.agents.products import device_memory, ready_products
from pbrl_lightning.timing import count_sampled_tokens
from pbrl_lightning.utils.errors import ConfigurationError, raise_together
from pbrl_lightning.utils.nearest import hint, nearest

LOGIT_BUDGET = 2**26
"""Most logits of one step of sampling, over all rows (256 MiB in fp32), whatever the vocabulary."""


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled: temperature, then top-k, then top-p, then the draw.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Most probable tokens kept; None keeps all.
        max_new_tokens: Tokens after which a response is cut.
        token_budget: Most tokens whose keys and values one batch holds; bounds memory. None for a sixteenth of the
            device's memory (of its size, not of what is free, so that the same run does the same again).
        dtype: ``bfloat16`` or ``float16`` for matrix products in that precision while sampling, whatever the weights
            have; None for the weights' own. The tokens are then those of a slightly different policy.

    Raises:
        ConfigurationError: If a value is out of range; all of them are named at once.
    """

    temperature: float = 0.6
    top_p: float = 0.6
    top_k: int | None = 50
    max_new_tokens: int = 256
    token_budget: int | None = None
    dtype: Literal["bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        problems = []
        # Below, logits divided by it leave the range of float32.
        if self.temperature != 0 and not 1e-6 <= self.temperature < float("inf"):
            problems.append(f"`temperature` must be 0 (greedy) or finite and >= 1e-6, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            problems.append(f"`top_p` must be in (0, 1] (1 = off), got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"`top_k` must be >= 1 or null (off), got {self.top_k}")
        if self.max_new_tokens < 1:
            problems.append(f"`max_new_tokens` must be >= 1, got {self.max_new_tokens}")
        if self.token_budget is not None and self.token_budget < 1:
            problems.append(f"`token_budget` must be >= 1 or null (by the device's memory), got {self.token_budget}")
        if self.dtype not in (None, "bfloat16", "float16"):
            problems.append(f"`dtype` must be 'bfloat16', 'float16' or null (the weights' own), got {self.dtype!r}")
        raise_together(problems)


class SamplingFields(TypedDict, total=False):
    """Fields of :class:`SamplingConfig` as keyword arguments."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    token_budget: int | None
    dtype: Literal["bfloat16", "float16"] | None


def replace_fields(sampling: SamplingConfig, fields: SamplingFields) -> SamplingConfig:
    """A copy with some fields replaced.

    Raises:
        ConfigurationError: If there is no field of a name, with the nearest one; or a value is out of range.

    Example:
        >>> replace_fields(SamplingConfig(), {"temperature": 1.0}).temperature
        1.0
    """
    known = SamplingFields.__annotations__
    raise_together(
        f"`{name}` is not a sampling option ({', '.join(known)}){hint(nearest(name, known))}"
        for name in fields
        if name not in known
    )
    return replace(sampling, **fields)


@dataclass(frozen=True)
class SampledIds:
    """Sampled ids of one response (EOS included) and whether it ended at EOS."""

    token_ids: list[int]
    finished: bool


def filtered_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The distribution that is sampled from: temperature, then top-k, then top-p.

    Tokens equal to the k-th logit all stay, as in transformers. Of equally probable tokens at the edge of top-p, those
    with the larger ids stay, because the sort is stable. The sort in transformers is not: from 17 tokens on, it keeps
    other tokens of the same probability.

    Args:
        logits: Shape ``(R, V)``.
        temperature: Above 0.
        top_k: Most probable tokens kept, or None.
        top_p: In (0, 1].

    Returns:
        Token ids in ascending order and their probabilities (float64, 0 for removed tokens and where a row has fewer
        tokens than another, not normalised), both of shape ``(R, C)`` with ``C <= V``.

    Example:
        >>> ids, probs = filtered_distribution(torch.tensor([[0.0, 2.0, 1.0]]), 1.0, 2, 1.0)
        >>> ids.tolist(), [round(p, 3) for p in (probs / probs.sum()).flatten().tolist()]
        ([[1, 2]], [0.731, 0.269])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1:
        logits = logits / temperature
    if top_k is not None and top_k < logits.shape[1]:
        ids, logits = _at_least(logits, _kth_largest(logits, top_k))
    else:
        ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    probs = logits.double().softmax(1)
    if top_p < 1:
        # Ascending and stable: what is removed first is the least probable token with the smallest id.
        ascending, order = probs.sort(dim=1, stable=True)
        removed = ascending.cumsum(1) <= 1 - top_p
        removed[:, -1] = False
        probs = probs.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), 0.0)
    return ids, probs


def _kth_largest(logits: Tensor, k: int, block: int = 64) -> Tensor:
    """Each row's k-th largest number, shape ``(R, 1)``; of a large vocabulary most blocks are looked at once only.

    The k blocks with the largest maxima hold k numbers that are at least the least of these maxima, and all that are
    larger.
    """
    count = logits.shape[1] // block
    if count > k:
        whole, rest = logits[:, : count * block].unflatten(1, (count, block)), logits[:, count * block :]
        best = whole.amax(2).topk(k, 1, sorted=False).indices
        logits = torch.cat([whole.gather(1, best[:, :, None].expand(-1, -1, block)).flatten(1), rest], 1)
    return logits.topk(k, 1).values[:, -1:]


def _at_least(logits: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Ids, ascending, and values of each row's numbers that are no less; a row that has fewer ends in -inf."""
    row, token = (logits >= least).nonzero(as_tuple=True)
    counts = row.bincount(minlength=len(logits))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    ids = token.new_zeros(len(logits), int(counts.max()))
    values = torch.full_like(ids, -torch.inf, dtype=logits.dtype)
    ids[row, place], values[row, place] = token, logits[row, token]
    return ids, values


def draw(ids: Tensor, probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts each row's cumulative distribution: the first token with ``cdf > u * cdf[-1]``.

    Args:
        ids: Token ids, shape ``(R, C)``.
        probs: Their probabilities up to a factor, shape ``(R, C)``, float64.
        uniforms: In [0, 1), shape ``(R,)``, float64.

    Returns:
        Shape ``(R,)``; a token of zero probability is never drawn.
    """
    cdf = probs.cumsum(1)
    index = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
    # Rounding may put the last product on the total: then the last token that has mass is meant.
    last = probs.shape[1] - 1 - (probs.flip(1) > 0).int().argmax(1, keepdim=True)
    return ids.gather(1, torch.minimum(index, last))[:, 0]


def next_tokens(logits: Tensor, uniforms: Tensor, config: SamplingConfig) -> Tensor:
    """The next token of each row, shape ``(R,)``.

    Raises:
        ConfigurationError: If logits are NaN or +inf, as those of a diverged model.
    """
    if not bool(logits.amax(1).isfinite().all()):
        raise ConfigurationError(
            "the model's logits are NaN or infinite: its weights have diverged, or its dtype is too narrow"
        )
    if config.temperature == 0:
        return logits.max(1).indices
    # The distribution is made in float64, several times as large as the logits.
    chunk = max(1, LOGIT_BUDGET // 4 // logits.shape[1])
    parts = zip(logits.split(chunk), uniforms.split(chunk), strict=True)
    return torch.cat(
        [
            draw(*filtered_distribution(rows, config.temperature, config.top_k, config.top_p), drawn)
            for rows, drawn in parts
        ]
    )


@torch.inference_mode()
def sample_responses(
    model: nn.Module,
    prompts: list[list[int]],
    uniforms: list[Tensor],
    config: SamplingConfig,
    eos_ids: set[int],
    adapters: list[str] | None = None,
) -> list[list[SampledIds]]:
    """Samples candidates for each prompt.

    Args:
        model: A causal LM in eval mode.
        prompts: ``B`` lists of token ids, none empty.
        uniforms: ``B`` tensors of shape ``(K, max_new_tokens)``; ``K`` is the candidate count of that prompt.
        config: Sampling options.
        eos_ids: Ids that end a response.
        adapters: Who answers each of the ``B`` prompts, for a model that :func:`mixes_adapters`; None for the model
            as it is.

    Returns:
        ``B`` lists of ``K`` responses.
    """
    results: list[list[SampledIds]] = [[] for _ in prompts]
    lengths, counts = [len(prompt) for prompt in prompts], [len(drawn) for drawn in uniforms]
    kind = rows_for(model, max(lengths, default=0) + config.max_new_tokens)
    phase = _Phase(kind, model, prompts, uniforms, config, eos_ids)
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    with ready_products(model, dtype), nullcontext() if adapters is None else adapters_by_row(model) as speakers:
        for rows in _batches(phase, lengths, counts):
            for (prompt, _), response in zip(rows, _decode(phase, rows, adapters, speakers), strict=True):
                results[prompt].append(response)
    return results


@dataclass(frozen=True)
class _Phase:
    """What all batches of a call have in common."""

    kind: type[DecodedRows]
    model: nn.Module
    prompts: list[list[int]]
    uniforms: list[Tensor]
    config: SamplingConfig
    eos_ids: set[int]


def _batches(phase: _Phase, lengths: list[int], counts: list[int]) -> list[list[tuple[int, int]]]:
    """Rows (prompt, candidate) grouped under the token budget, prompts of similar length together."""
    budget = phase.config.token_budget or default_token_budget(phase.model)
    most_rows = max(1, LOGIT_BUDGET // (vocabulary_of(phase.model) or 1))
    batches: list[list[tuple[int, int]]] = []
    current: list[tuple[int, int]] = []
    held_prompts, width = 0, 0
    for prompt in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        for candidate in range(counts[prompt]):
            # A row of its own, or the first of a prompt that others share.
            new = not (phase.kind.shares_prompts and current and current[-1][0] == prompt)
            tokens = (held_prompts + new) * width + (len(current) + 1) * phase.config.max_new_tokens
            if current and (tokens > budget or len(current) >= most_rows):
                batches.append(current)
                current = []
            if not current:  # longest first, so the first row's prompt sets the width of the batch
                held_prompts, width, new = 0, lengths[prompt], True
            held_prompts += new
            current.append((prompt, candidate))
    return [*batches, current] if current else batches


def default_token_budget(model: Any) -> int:
    """Tokens whose keys and values take a sixteenth of the memory of the model's device; 2048 to 65536."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameter = next(model.parameters())
    all_heads = getattr(config, "num_attention_heads", None) or 32
    heads = getattr(config, "num_key_value_heads", None) or all_heads
    size = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", None) or 4096) // all_heads
    layers = getattr(config, "num_hidden_layers", None) or 32
    per_token = 2 * layers * heads * size * parameter.dtype.itemsize
    return min(65536, max(2048, device_memory(parameter.device) // 16 // per_token))


def _decode(
    phase: _Phase, rows: list[tuple[int, int]], adapters: list[str] | None, speakers: list[str] | None
) -> list[SampledIds]:
    config, device = phase.config, next(phase.model.parameters()).device
    unique = list(dict.fromkeys(prompt for prompt, _ in rows))
    source = torch.tensor([unique.index(prompt) for prompt, _ in rows], device=device)

    def speak(asked: list[int]) -> None:
        if adapters is not None and speakers is not None:
            speakers[:] = [adapters[prompt] for prompt in asked]

    speak(unique)
    decoded = phase.kind(phase.model, [phase.prompts[prompt] for prompt in unique], source, config.max_new_tokens)
    speak([prompt for prompt, _ in rows])
    draws = torch.stack([phase.uniforms[prompt][candidate] for prompt, candidate in rows]).to(device)
    stop = torch.tensor(sorted(phase.eos_ids), dtype=torch.long, device=device)
    tokens = torch.zeros(len(rows), config.max_new_tokens, dtype=torch.long)
    lengths = torch.full((len(rows),), config.max_new_tokens)
    finished = torch.zeros(len(rows), dtype=torch.bool)
    alive = torch.arange(len(rows))  # rows still in the batch
    for step in range(config.max_new_tokens):
        drawn = next_tokens(decoded.logits, draws[:, step], config)
        open_rows = ~finished[alive]
        tokens[alive[open_rows], step] = drawn.cpu()[open_rows]
        count_sampled_tokens(int(open_rows.sum()))
        ended = torch.isin(drawn, stop).cpu() & open_rows
        finished[alive[ended]] = True
        lengths[alive[ended]] = step + 1
        open_rows &= ~ended
        if step + 1 == config.max_new_tokens or not open_rows.any():
            break
        # Leaving rows copies the cache, so it is done once a quarter of them has ended.
        if int(open_rows.sum()) <= 0.75 * len(alive):
            kept = open_rows.nonzero()[:, 0]
            alive, kept = alive[kept], kept.to(device)
            decoded.keep(kept)
            speak([rows[row][0] for row in alive.tolist()])
            drawn, draws = drawn[kept], draws[kept]
        decoded.step(drawn)
    return [SampledIds(tokens[row, : lengths[row]].tolist(), bool(finished[row])) for row in range(len(rows))]
