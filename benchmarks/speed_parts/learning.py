"""Speed of collections, updates and policy steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pbrl_lightning import AgentTeam, JointRewardModel, JointRewardModule, MADPOModule, MARLModule
from pbrl_lightning.batches import PairTokens
from pbrl_lightning.modules.base import LearnerModule
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.pair_tokens import PairLoader
from pbrl_lightning.rollouts import RolloutLoader
from speed_parts.bench import PAIRS_PER_ITEM, Bench, Variant, prompt_lengths
from speed_parts.limit import FROZEN, TRAINED, Matrices, Products, sampling_products
from speed_parts.rows import Row, Rows
from speed_parts.shared import reward
from speed_parts.workload import DTYPES, pair_records

WARM_UP = {"short": 2, "long": 1}
"""Calls before updates are timed: in the first ones the process takes its memory, page by page."""
CANDIDATES = {"few": "num_candidates", "many": "many_candidates"}


def sampling(bench: Bench) -> Rows:
    """Collection: sample, score, keep pairs."""
    for variant in bench.variants(lora=True):
        team = bench.work.team(variant.precision, lora=variant.lora)
        counts = [getattr(bench.work, CANDIDATES[name]) for name in bench.candidates]
        for number, (length, count) in enumerate(itertools.product(bench.lengths, counts)):
            yield _sampling_row(bench, variant, team, length, count, warm_up=int(number == 0))


def _sampling_row(bench: Bench, variant: Variant, team: AgentTeam, length: str, count: int, warm_up: int) -> Row:
    work = bench.work
    items, rounds = work.items(team, length), itertools.count(1)
    lengths = prompt_lengths(team, work, items)
    collector = Collector(Oracle(reward), variant.sampling(work), count, "reward_gap", PAIRS_PER_ITEM, seed=0)

    def collect() -> None:
        collected = collector.collect(team, items, list(range(len(items))), next(rounds))
        tokens = sum(part.num_tokens for part in collected)
        if tokens != len(items) * count * team.num_agents * work.new_tokens:
            raise RuntimeError(f"a response ended early: {tokens} tokens were sampled")

    products = [
        (matrices, sampling_products(prompts, count, work.new_tokens))
        for matrices, prompts in zip(variant.matrices(team), lengths, strict=True)
    ]
    turns = bench.turns(variant, products, "collect", items=items, candidates=count, new_tokens=work.new_tokens)
    bench.repeat(turns, collect, warm_up)
    name = f"sampling {length} {variant} K={count}"
    return turns.row(name, len(items) * count, "joint responses/s", extra={"prompt_tokens": lengths})


def update_of(module: LearnerModule, variant: Variant) -> Callable[[Any], None]:
    """One optimizer step on a batch, as the Trainer makes it."""
    optimizer = module.configure_optimizers()

    def update(batch: Any) -> None:
        optimizer.zero_grad()
        with variant.autocast():
            loss, _ = module.step(batch, "the benchmark's batch")
        loss.backward()
        optimizer.step()

    return update


def pair_batch(module: LearnerModule, pairs: list[Any]) -> Any:
    """All pairs as the one batch that the data module makes of them."""
    kept, tokens = module.encode_pairs(pairs)
    return next(iter(PairLoader(module.pair_pad_ids(), kept, tokens, len(pairs), seed=0)))


def madpo(bench: Bench) -> Rows:
    """MADPO update of a team."""
    for variant in bench.variants(lora=True):
        module = MADPOModule(bench.work.team(variant.precision, lora=variant.lora))
        update = update_of(module, variant)
        for length, apart in _kinds_of_batch(bench):
            yield _madpo_row(bench, variant, module, update, length, apart)


def _kinds_of_batch(bench: Bench) -> Iterator[tuple[str, bool]]:
    """Prompt lengths, and whether each pair is of an item of its own: asked where the prompt is most of the work."""
    for length in bench.lengths:
        yield length, False
        if length == "long" and bench.beside:
            yield length, True


def _distinct(pairs: list[PairTokens], agent: int) -> tuple[int, int]:
    """Tokens of the distinct prompts and responses of an agent, and the number of these responses."""
    prompts = {tuple(pair.prompts[agent]) for pair in pairs}
    said = {(tuple(pair.prompts[agent]), tuple(side[agent])) for pair in pairs for side in (pair.winner, pair.loser)}
    return sum(map(len, prompts)) + sum(len(response) for _, response in said), len(said)


def _madpo_row(
    bench: Bench,
    variant: Variant,
    module: MADPOModule,
    update: Callable[[Any], None],
    length: str,
    apart: bool,
) -> Row:
    work = bench.work.of_items_apart() if apart else bench.work
    pairs = work.pairs(module.team, length)
    passes, products = FROZEN if variant.lora else TRAINED, []
    for agent, matrices in enumerate(variant.matrices(module.team)):
        read, responses = _distinct([pair.tokens for pair in pairs if pair.tokens is not None], agent)
        scored = responses * (bench.work.new_tokens - 1)  # MADPO leaves out the last token
        products.append((matrices, [Products(read, scored, passes)]))
    turns = bench.turns(variant, products, "madpo", pairs=pair_records(pairs))
    bench.repeat(turns, partial(update, pair_batch(module, pairs)), WARM_UP[length])
    return turns.row(f"MADPO update {length} {variant}{', items apart' * apart}", len(pairs), "pairs/s")


def reward_model(bench: Bench) -> Rows:
    """Joint reward model update."""
    for variant in bench.variants():
        module = JointRewardModule(JointRewardModel(bench.work.directory, dtype=DTYPES[variant.precision]))
        module.load()
        update = update_of(module, variant)
        for length, apart in _kinds_of_batch(bench):
            yield _reward_model_row(bench, variant, module, update, length, apart)


def _reward_model_row(
    bench: Bench,
    variant: Variant,
    module: JointRewardModule,
    update: Callable[[Any], None],
    length: str,
    apart: bool,
) -> Row:
    work = bench.work.of_items_apart() if apart else bench.work
    team = work.team()  # for its tokenizer, and for matrices of the same shapes
    pairs = work.pairs(team, length)
    tokens = module.encode_pairs(pairs)[1]
    rows, _ = _distinct(tokens, 0)
    matrices = Matrices(team.model(0), torch.float32 if variant.precision == "fp32" else torch.bfloat16)
    turns = bench.turns(variant, [(matrices, [Products(rows, 0, TRAINED)])], "reward", pairs=pair_records(pairs))
    bench.repeat(turns, partial(update, pair_batch(module, pairs)), WARM_UP[length])
    return turns.row(f"reward model update {length} {variant}{', items apart' * apart}", len(pairs), "pairs/s")


def policy(bench: Bench) -> Rows:
    """Policy step: sample a rollout, score it, update."""
    for variant in bench.variants():
        module = MARLModule(bench.work.team(variant.precision), num_generations=bench.work.num_generations)
        update = update_of(module, variant)
        for number, length in enumerate(bench.lengths):
            yield _policy_row(bench, variant, module, update, length, warm_up=int(number == 0))


def _policy_row(
    bench: Bench, variant: Variant, module: MARLModule, update: Callable[[Any], None], length: str, warm_up: int
) -> Row:
    work, team, count = bench.work, module.team, module.num_generations
    items, epochs = work.items(team, length), itertools.count()

    def step() -> None:
        how = (module, team, items, Oracle(reward), variant.sampling(work), len(items), len(items))
        update(next(iter(RolloutLoader(*how, seed=0, epoch=next(epochs)))))

    said = len(items) * count * work.new_tokens
    products = [
        (
            matrices,
            [*sampling_products(prompts, count, work.new_tokens), Products(sum(prompts) + said, said, TRAINED)],
        )
        for matrices, prompts in zip(variant.matrices(team), prompt_lengths(team, work, items), strict=True)
    ]
    turns = bench.turns(variant, products, "policy", items=items, generations=count, new_tokens=work.new_tokens)
    bench.repeat(turns, step, warm_up)
    return turns.row(f"policy step {length} {variant}", len(items) * count, "joint responses/s")
