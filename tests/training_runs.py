"""Short runs of the tiny team, for tests of whole fits."""

import json
from pathlib import Path

import lightning as L
import torch

from pbrl_lightning import AgentTeam, CurrentComparator, LoraOptions, MADPOModule, PreferenceDataModule, SamplingConfig
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.run_directory import pin_run_directory

SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=2)
ITEMS = [{"prompt": letter} for letter in "abc"]
EVAL_ITEMS = [{"prompt": letter} for letter in "vwxyz"]


def text_reward(*completions):
    """A number from 0 to 10 that depends on every agent's text."""
    return [float(sum(map(ord, "|".join(texts))) % 11) for texts in zip(*completions, strict=True)]


class CountingReward:
    """``text_reward`` that counts its calls; ``ties`` are the calls (0-based) in which all scores are equal."""

    def __init__(self, ties=()):
        self.calls, self.ties = 0, ties

    def __call__(self, *completions):
        self.calls += 1
        if self.calls - 1 in self.ties:
            return [1.0] * len(completions[0])
        return text_reward(*completions)


class Recorder(RoundCallback):
    """Everything that happens, in order, and the weights where rounds start."""

    def __init__(self):
        self.events, self.round_weights = [], {}

    def on_round_start(self, trainer, pl_module, round_number):
        self.events.append(f"start {round_number}")
        self.round_weights[round_number] = weights_of(pl_module.team)

    def on_round_collected(self, trainer, pl_module, record):
        self.events.append(f"collected {record.round}")

    def on_round_end(self, trainer, pl_module, round_number):
        self.events.append(f"end {round_number}")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.events.append("batch")


class StopError(Exception):
    """What kills a run."""


class Killer(L.Callback):
    """Raises after a number of optimizer steps, after the checkpoint of that step was written."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise StopError

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_step == self.step:
            raise StopError


def make_team(lora=False, dtype="float32", **options):
    options = {"num_agents": 2, **options}
    return AgentTeam("builtin:tiny", lora=LoraOptions(r=4) if lora else None, dtype=dtype, **options)


def make_data(reward=text_reward, items=None, iterative=True, **options):
    if iterative:
        options.setdefault("comparator", CurrentComparator())
    options = {"num_candidates": 4, "sampling": SAMPLING, "eval_items": EVAL_ITEMS, **options}
    return PreferenceDataModule(ITEMS if items is None else items, reward, **options)


def make_module(team=None, rounds=None, **options):
    return MADPOModule(team or make_team(), num_iterations=rounds, **{"learning_rate": 1e-3, **options})


def make_trainer(root, callbacks=(), **options):
    quiet = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    options = {**quiet, **options}
    trainer = L.Trainer(**options, callbacks=list(callbacks))
    if options["logger"] is False:
        pin_run_directory(trainer, root)  # where tests look
    return trainer


def weights_of(team):
    """The trainable values of every agent, copied."""
    return [
        {name: value.detach().clone() for name, value in team.agent_parameters(agent).items()}
        for agent in range(team.num_agents)
    ]


def same_weights(first, second):
    """True if all values are bit for bit the same."""
    assert [agent.keys() for agent in first] == [agent.keys() for agent in second]
    return all(
        torch.equal(values[name], other[name]) for values, other in zip(first, second, strict=True) for name in values
    )


def perturb(team, seed, scale=0.05):
    """Moves every trainable value, so that agents differ and adapters do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for agent in range(team.num_agents):
            for parameter in team.agent_parameters(agent).values():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return team


def round_files(directory):
    """Round files by name, parsed."""
    return {path.name: json.loads(path.read_text()) for path in sorted(Path(directory).glob("iteration_*.json"))}
