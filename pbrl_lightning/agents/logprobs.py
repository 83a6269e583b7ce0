"""Log-probabilities of responses under a policy, in one batched forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn

from pbrl_lightning.agents.forward import ContextPair, SplitForward, accepts, checkpointed_layers, decoder_of
from pbrl_lightning.agents.packing import Layout, lay_out
from pbrl_lightning.batches import TokenBatch

LOGIT_BUDGET = 2**25
"""Most logits held at once in a loss forward (128 MiB in fp32), whatever the vocabulary."""


def scored_tokens(response_mask: Tensor, score_last_token: bool) -> Tensor:
    """Which tokens count in a response's log-probability.

    Args:
        response_mask: Shape ``(R, T)``, bool; the response is one run of True per row.
        score_last_token: False leaves out each row's last response token.

    Returns:
        Shape ``(R, T)``, bool.

    Example:
        >>> scored_tokens(torch.tensor([[False, True, True, False]]), score_last_token=False).tolist()
        [[False, True, False, False]]
    """
    if score_last_token:
        return response_mask
    has_next = torch.zeros_like(response_mask)
    has_next[:, :-1] = response_mask[:, 1:]
    return response_mask & has_next


@dataclass(frozen=True)
class ResponseLogps:
    """Log-probabilities of the scored tokens of ``R`` responses, and what they were computed from.

    Attributes:
        token_logps: Of all scored tokens, row by row, shape ``(M,)``, nats, float32 (float64 for a float64 model).
        rows: Each one's row, shape ``(M,)``.
        decoded: Hidden states below the head, as the decoder gave them.
        layout: Where in it the tokens of the rows are.
    """

    token_logps: Tensor
    rows: Tensor
    decoded: Tensor
    layout: Layout

    @property
    def states(self) -> Tensor:
        """Hidden states of the rows, shape ``(R, T, H)``; those of padding are any.

        Raises:
            ValueError: If they were not asked for.
        """
        if self.layout.kept is not None:
            raise ValueError("the states of some tokens were not computed; ask for them by `with_states`")
        return self.decoded[self.layout.row, self.layout.column]

    def sum_by_row(self, per_token: Tensor) -> Tensor:
        """Sums numbers of tokens, shape ``(M,)``, over each response: shape ``(R,)``; 0 for a row without tokens."""
        zeros = torch.zeros(len(self.layout.row), dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.rows, per_token)

    @property
    def sums(self) -> Tensor:
        """Summed log-probability of each response, nats, shape ``(R,)``."""
        return self.sum_by_row(self.token_logps)


def response_logps(
    model: nn.Module,
    batch: TokenBatch,
    *,
    score_last_token: bool = True,
    layer_context: Callable[[], ContextPair] | None = None,
    head_context: Callable[[], ContextPair] = noop_context_fn,
    logit_budget: int = LOGIT_BUDGET,
    with_states: bool = True,
) -> ResponseLogps:
    """Log-probabilities of each row's response given its prompt.

    The model's own distribution: temperature 1, no filtering. Logits exist only for positions that predict a
    scored token, in chunks of at most ``logit_budget`` numbers.

    Args:
        model: A causal LM.
        batch: ``R`` rows.
        score_last_token: False leaves out each response's last token.
        layer_context: Turns on activation checkpointing of the decoder layers with these contexts.
        head_context: The same for the head, whose logits are recomputed if there is more than one chunk of them.
        logit_budget: Most logits held at once.
        with_states: False if nobody asks for the hidden states of the rows.
    """
    decoder = decoder_of(model) or model
    # A text's first token is predicted from nothing.
    predicted = scored_tokens(batch.response_mask, score_last_token)[:, 1:] & batch.attention_mask[:, :-1].bool()
    predicting = F.pad(predicted, (0, 1))
    layout = lay_out(decoder, batch, None if with_states or layer_context else predicting)
    inputs: dict[str, Any] = dict(layout.inputs)
    if accepts(model, "use_cache"):
        inputs["use_cache"] = False
    contexts = layout.recomputing(decoder, layer_context) if layer_context else None
    with checkpointed_layers(model, contexts) if contexts else nullcontext(), layout.reading(decoder):
        split = SplitForward(model, **inputs)
    rows, columns = predicted.nonzero(as_tuple=True)
    # The token in column t + 1 is predicted from the state in column t.
    targets = batch.input_ids[rows, columns + 1]
    first, same = _distinct(layout, rows, columns, targets)
    states = layout.pick(split.states, rows[first], columns[first])
    chunk, head_contexts = _chunk_length(model, split, logit_budget), layout.recomputing(decoder, head_context)
    token_logps = _token_logps(split, states, targets[first], chunk, head_contexts)
    return ResponseLogps(token_logps[same], rows, split.states, layout)


def _distinct(layout: Layout, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which predictions to make, shape ``(N,)``, and each one's place among them, shape ``(M,)``.

    A response that several rows of a pack share has its logits once.
    """
    every = torch.arange(len(targets), device=targets.device)
    if not layout.spans or not len(targets):
        return every, every
    # A packed layout has one row.
    found, same = (layout.column[rows, columns] * (targets.max() + 1) + targets).unique(return_inverse=True)
    return torch.full_like(found, len(targets)).scatter_reduce(0, same, every, "amin"), same


def _chunk_length(model: nn.Module, split: SplitForward, logit_budget: int) -> int:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or split.states.shape[-1]
    return max(1, logit_budget // vocabulary)


def _token_logps(
    split: SplitForward, states: Tensor, targets: Tensor, chunk: int, context_fn: Callable[[], ContextPair]
) -> Tensor:
    """Log-probability of each target, shape ``(M,)``; recomputes a chunk's logits in the backward if there are many."""

    def score(chunk_states: Tensor, chunk_targets: Tensor) -> Tensor:
        logits = split.logits(chunk_states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return -F.cross_entropy(logits, chunk_targets, reduction="none")

    if len(states) <= chunk:
        return score(states, targets)
    parts = zip(states.split(chunk), targets.split(chunk), strict=True)
    recomputed = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    return torch.cat([recomputed(*part) for part in parts])
