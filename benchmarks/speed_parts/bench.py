"""What every measurement needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pbrl_lightning import AgentTeam, SamplingConfig
from speed_parts.limit import Matrices, Products, seconds_of
from speed_parts.peer import Peer
from speed_parts.rows import Turns
from speed_parts.workload import Workload

PAIRS_PER_ITEM = 4
ENOUGH_CALLS, ENOUGH_SECONDS = 5, 20.0


@dataclass(frozen=True)
class Variant:
    """How a team is held.

    Attributes:
        precision: ``fp32``, ``bf16`` (weights too) or ``mixed`` (fp32 weights, autocast).
        lora: Adapters on one frozen backbone instead of full models.
    """

    precision: str
    lora: bool = False

    def __str__(self) -> str:
        return f"{self.precision} LoRA" if self.lora else self.precision

    def autocast(self) -> torch.autocast:
        """The context of a forward and its loss."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "mixed")

    def sampling(self, work: Workload) -> SamplingConfig:
        """How responses are sampled: ``mixed`` makes the matrix products in bfloat16."""
        return replace(work.sampling, dtype="bfloat16" if self.precision == "mixed" else None)

    def matrices(self, team: AgentTeam) -> list[Matrices]:
        """Each agent's weight matrices."""
        dtype = torch.bfloat16 if self.precision == "mixed" else None
        return [Matrices(team.model(agent), dtype) for agent in range(team.num_agents)]


@dataclass(frozen=True)
class Bench:
    """What every measurement needs.

    Attributes:
        work: Sizes.
        repeats: How often each thing is timed.
        precisions: See :class:`Variant`.
        peer: The peer, or None.
        candidates: ``few``, ``many``, or both: the workloads of a collection.
        beside: Rows without a peer's or a wanted number beside them too: LoRA, items apart.
        known_peer: Its seconds in fp32, by what it was asked for.
    """

    work: Workload
    repeats: int
    precisions: tuple[str, ...]
    peer: Peer | None
    candidates: tuple[str, ...] = ("few", "many")
    beside: bool = True
    known_peer: dict[str, list[float]] = field(default_factory=dict)

    @property
    def lengths(self) -> list[str]:
        """Names of the prompt lengths."""
        return [name for name, _ in self.work.prompt_lengths]

    def variants(self, lora: bool = False) -> Iterator[Variant]:
        """All precisions, and with ``lora`` a LoRA team in the first of them."""
        yield from map(Variant, self.precisions)
        if lora and self.beside:
            yield Variant(self.precisions[0], lora=True)

    def turns(
        self, variant: Variant, products: list[tuple[Matrices, list[Products]]], what: str, **request: Any
    ) -> Turns:
        """Turns with the limit, and with the peer where it can do the same: full models in fp32.

        Other precisions of full models are set beside what the peer took for the same in fp32 before.
        """
        key = f"{what} {sorted(request.items(), key=str)}"
        if self.peer is None or variant.lora:
            return Turns(products)
        if variant.precision != "fp32":
            return Turns(products, known=self.known_peer.get(key))
        turns = Turns(products, partial(self.peer.seconds, what, **request))
        self.known_peer[key] = turns.peers
        return turns

    def repeat(self, turns: Turns, ours: Callable[[], object], warm_up: int) -> Turns:
        """Adds our calls: ``repeats``, and more of what takes seconds; after some on both sides to warm up."""
        for _ in range(warm_up):
            ours()
            turns.warm_up()
        spent, calls = 0.0, 0
        while calls < self.repeats or (calls < ENOUGH_CALLS and spent < ENOUGH_SECONDS):
            spent += turns.add(seconds_of(ours))
            calls += 1
        return turns


def prompt_lengths(team: AgentTeam, work: Workload, items: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens of each agent's prompts."""
    return [
        [len(team.prompt_ids(agent, team.prompt(agent, item, i), work.new_tokens)) for i, item in enumerate(items)]
        for agent in range(team.num_agents)
    ]
