"""Preference pairs as token ids, and as batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pbrl_lightning.agents.loading import warn_once
from pbrl_lightning.agents.prompts import encode_response
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairBatch, PairTokens, PreferencePair, TokenBatch
from pbrl_lightning.randomness import counted_generator, counted_permutation
from pbrl_lightning.utils.errors import ConfigurationError


def tokenise_pair(team: AgentTeam, pair: PreferencePair) -> PairTokens:
    """Token ids of a pair: as sampled where they are known, else from the texts with each agent's tokenizer.

    Both sides share the prompt's ids. A response that alone fills the context is cut on the right, a prompt that
    does not fit beside the longer response on the left; both are counted and warned of once.

    Raises:
        ConfigurationError: If the pair is of another number of agents.
    """
    if len(pair.prompts) != team.num_agents:
        raise ConfigurationError(f"a pair of {len(pair.prompts)} agents cannot train a team of {team.num_agents}")
    if pair.tokens is not None:
        return pair.tokens
    prompts, winners, losers = [], [], []
    for agent in range(team.num_agents):
        sides = [
            _response_ids(team, agent, texts[agent]) for texts in (pair.winner_completions, pair.loser_completions)
        ]
        prompts.append(team.prompt_ids(agent, pair.prompts[agent], max(map(len, sides))))
        winners.append(sides[0])
        losers.append(sides[1])
    return PairTokens(prompts, winners, losers)


def _response_ids(team: AgentTeam, agent: int, text: str) -> list[int]:
    ids = encode_response(team.tokenizer(agent), text)
    context = team.context_length(agent)
    if context is not None and len(ids) > context - 1:
        warn_once(
            team.counts,
            "truncated_responses",
            f"a response for agent {agent} has {len(ids)} tokens and was cut to the {context - 1} that its model "
            "can read; further ones are counted as `truncated_responses`",
        )
        ids = ids[: context - 1]
    return ids


def trainable_pairs(team: AgentTeam, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
    """The pairs whose sides differ as tokens, with their tokens; the others are counted and warned of once."""
    return drop_identical(pairs, [tokenise_pair(team, pair) for pair in pairs], team.counts)


def drop_identical(
    pairs: list[PreferencePair], tokens: list[PairTokens], counts: dict[str, int]
) -> tuple[list[PreferencePair], list[PairTokens]]:
    """Leaves out the pairs whose sides have the same tokens; counts them as ``identical_pairs``, warns once."""
    kept = []
    for index, encoded in enumerate(tokens):
        if encoded.winner != encoded.loser:
            kept.append(index)
            continue
        warn_once(
            counts,
            "identical_pairs",
            "a pair has the same tokens on both sides (after cutting to the context) and was dropped; "
            "further ones are counted as `identical_pairs`",
        )
    return [pairs[index] for index in kept], [tokens[index] for index in kept]


def used_batches(num_batches: int, limit: int | float) -> int:
    """Batches of an epoch that Lightning uses.

    Args:
        num_batches: Length of the loader.
        limit: ``limit_train_batches``: a number of batches as an int, or a share of them as a float.

    Example:
        >>> used_batches(5, 3), used_batches(5, 0.5), used_batches(5, 1.0)
        (3, 2, 5)
    """
    return min(limit, num_batches) if isinstance(limit, int) else int(num_batches * limit)


def collate_rows(prompts: list[list[int]], responses: list[list[int]], pad_id: int) -> TokenBatch:
    """Rows of prompt + response, padded on the right. Masks come from lengths, never from ids.

    Args:
        prompts: ``R`` lists of token ids.
        responses: ``R`` lists of token ids; may be empty.
        pad_id: Fills the padding; any id will do.
    """
    width = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    attention = torch.zeros(len(prompts), width, dtype=torch.bool)
    response_mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        attention[row, :end] = True
        response_mask[row, start:end] = True
    return TokenBatch(ids, attention, response_mask)


@dataclass
class PairLoader:
    """Batches of one epoch over a round's pairs, in a counted order.

    Every rank walks through the same order and takes its share of each global batch; a short batch is filled up with
    rows of weight 0, so that all ranks make the same number of steps and nothing is dropped or counted twice. It has
    a length and no workers: Lightning would sample a loader without length one batch ahead.

    Attributes:
        pad_ids: What fills up the rows of each reader (an agent, or a reward model).
        pairs: The round's training pairs.
        tokens: Their token ids.
        batch_size: Pairs per batch and rank.
        seed: The run's seed.
        round_number: 1-based.
        epoch: Epoch within the round; each has an order of its own.
        accumulation: Batches per optimizer step.
        rank: This process.
        world_size: Number of processes.
        limit: Lightning's ``limit_train_batches``: the batches of an epoch that are used, or their share.
    """

    pad_ids: list[int]
    pairs: list[PreferencePair]
    tokens: list[PairTokens]
    batch_size: int
    seed: int
    round_number: int = 1
    epoch: int = 0
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1
    limit: int | float = 1.0

    def __post_init__(self) -> None:
        self._start = self._position = 0

    def __len__(self) -> int:
        return -(-len(self.pairs) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[PairBatch]:
        generator = counted_generator(self.seed, "order", self.round_number, self.epoch)
        order = counted_permutation(len(self.pairs), generator)
        start, self._start = self._start, 0
        for index in range(start, len(self)):
            self._position = index + 1
            yield self._batch(order, index)

    def state_dict(self) -> dict[str, Any]:
        """How many batches of the epoch were handed out."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after that many batches; a finished epoch starts the next one from its beginning."""
        self._start = self._position = state["position"] % max(1, len(self))

    def _batch(self, order: list[int], index: int) -> PairBatch:
        size = self.batch_size * self.world_size
        rows = order[index * size : (index + 1) * size]
        own = rows[self.rank :: self.world_size]
        filled = own + [rows[0]] * (self.batch_size - len(own)) if self.world_size > 1 else own
        weights = torch.tensor([1.0] * len(own) + [0.0] * (len(filled) - len(own)))
        # Rows of this optimizer step, over ranks and accumulated batches.
        first = index - index % self.accumulation
        last = min(first + self.accumulation, used_batches(len(self), self.limit))
        step_rows = len(order[first * size : last * size])
        pairs = [self.pairs[row] for row in filled]
        means = [pair.candidate_reward_mean if pair.has_rewards else math.nan for pair in pairs]
        return PairBatch(
            agents=[self._rows(reader, filled) for reader in range(len(self.pad_ids))],
            weights=weights,
            loss_scale=self.world_size * self.accumulation / step_rows,
            candidate_reward_means=torch.tensor(means, dtype=torch.float64),
        )

    def _rows(self, reader: int, rows: list[int]) -> TokenBatch:
        prompts = [self.tokens[row].prompts[reader] for row in rows]
        responses = [self.tokens[row].winner[reader] for row in rows] + [self.tokens[row].loser[reader] for row in rows]
        return collate_rows(prompts * 2, responses, self.pad_ids[reader])


def pairs_to_state(pairs: list[PreferencePair]) -> list[dict[str, Any]]:
    """Pairs in plain containers for a checkpoint, with the token ids that round files do not hold."""
    return [asdict(pair) for pair in pairs]


def pairs_from_state(state: list[dict[str, Any]]) -> list[PreferencePair]:
    """What :func:`pairs_to_state` wrote."""
    return [
        PreferencePair(**{**entry, "tokens": PairTokens(**entry["tokens"]) if entry["tokens"] is not None else None})
        for entry in state
    ]
