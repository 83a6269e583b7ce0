"""Writes the configurations and settings that `test_migrate_peer.py` reads. Runs where CoMLRL 1.4.3 is installed.

    python tests/comlrl/write_configs.py MODEL

``MODEL`` is the directory of a tiny model, such as the one of ``builtin:tiny``. Each configuration is an instance of
CoMLRL's own config class, written out with all its fields, beside the other sections of its example files. Its
trainer is then run on four task items, and what it really did is recorded: rates, sampling options after transformers
has filled them in, sizes of batches, numbers of updates.
"""

import ast
import dataclasses
import inspect
import json
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import torch
import yaml
from comlrl.trainers import (
    IACConfig,
    MAACConfig,
    MAACTrainer,
    MADPOConfig,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLHFConfig,
    MARLHFTrainer,
    MARLOOConfig,
)
from comlrl.trainers.preference import iterative, marlhf
from comlrl.trainers.preference.iterative import MADPOIterConfig, MADPOIterTrainer, MARLHFIterConfig
from transformers import GenerationMixin

HERE = Path(__file__).parent
ITEMS = [{"prompt": word} for word in ("a", "b", "c", "d")]
SAMPLING = {"max_new_tokens": 4, "temperature": 0.9, "top_p": 0.95, "top_k": None}
SMALL = {**SAMPLING, "eval_interval": 2, "eval_num_samples": 2, "agent_devices": "cpu", "logging_steps": 8}
PAIRS = {"preference_num_candidates": 6, "preference_pairs_per_sample": 2}

CLASSES = {
    "madpo": MADPOConfig,
    "madpo_iter": MADPOIterConfig,
    "marlhf": MARLHFConfig,
    "marlhf_iter": MARLHFIterConfig,
    "magrpo": MAGRPOConfig,
    "mareinforce": MAREINFORCEConfig,
    "marloo": MARLOOConfig,
    "maremax": MAReMaxConfig,
    "maac": MAACConfig,
    "iac": IACConfig,
}

RUNS = {
    "madpo_iter": (
        MADPOIterTrainer,
        MADPOIterConfig(
            **SMALL,
            **PAIRS,
            num_iterations=2,
            num_train_epochs=2,
            agent_learning_rate=1e-4,
            dpo_beta=0.2,
            rollout_buffer_size=4,
            train_batch_size=2,
            preference_replay_mode="last_k",
            preference_replay_k=2,
            comparator_policy="previous",
            comparator_history_k=1,
            comparator_num_candidates=5,
        ),
    ),
    "marlhf": (
        MARLHFTrainer,
        MARLHFConfig(
            **SMALL,
            **PAIRS,
            rl_algorithm="IAC",
            use_separate_critic=False,
            critic_learning_rate=1e-2,
            num_generations=2,
            num_train_epochs=1,
            agent_learning_rate=1e-4,
            rollout_buffer_size=4,
            train_batch_size=2,
            reward_model_device="cpu",
            reward_learning_rate=3e-4,
            reward_train_batch_size=2,
            reward_num_train_epochs=2,
            reward_max_length=256,
            reference_kl_enabled=True,
            reference_kl_coef=0.05,
            value_clip_range=0.3,
            value_loss_coef=0.5,
        ),
    ),
    "maac": (
        MAACTrainer,
        MAACConfig(
            **SMALL,
            num_turns=1,
            num_generations=4,
            num_train_epochs=1,
            rollout_buffer_size=8,
            train_batch_size=4,
            agent_learning_rate=2e-4,
            critic_learning_rate=1e-3,
            value_loss_coef=0.4,
            advantage_normalization=False,
        ),
    ),
    "magrpo": (
        MAGRPOTrainer,
        MAGRPOConfig(
            **SMALL,
            num_turns=1,
            num_generations=3,
            num_train_epochs=2,
            rollout_buffer_size=2,
            train_batch_size=1,
            agent_learning_rate=2e-4,
            advantage_mode="rloo",
        ),
    ),
}


def more_letters(first, second):
    """Joint responses with more different characters are better."""
    return [float(len(set(a)) + 0.1 * len(set(b))) for a, b in zip(first, second, strict=True)]


def document(run, args, model):
    """The sections of a configuration file, as in CoMLRL's examples."""
    sections = {
        "agent_model": {"name": model, "type": "llama", "torch_dtype": "float32", "special_tokens": {}},
        "agents": None,
        "seed": 42,
        "output": {"base_dir": f"output_{run}", "verbose": False, "save_final_model": False},
        run: dataclasses.asdict(args),
        "reward_processor": {"enabled": True, "scale_factor": 1.0, "shift": 0.0},
    }
    return sections | ({"critic_model": {"name": model, "type": "llama"}} if run == "maac" else {})


def measured(run, trainer_class, args, model):
    """What a trainer does with its configuration."""
    steps, sampled = Counter(), set()
    prepare, step = GenerationMixin._prepare_generation_config, torch.optim.AdamW.step

    def recording_prepare(self, *given, **options):
        found = prepare(self, *given, **options)
        config = found[0] if isinstance(found, tuple) else found
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "num_return_sequences")
        sampled.add(tuple((name, getattr(config, name)) for name in names))
        return found

    def recording_step(self, *given, **options):
        group = self.param_groups[0]
        steps[group["lr"], group["weight_decay"]] += 1
        return step(self, *given, **options)

    GenerationMixin._prepare_generation_config, torch.optim.AdamW.step = recording_prepare, recording_step
    torch.manual_seed(1)
    options = {"critic_model": model} if run == "maac" else {}
    if run != "maac":
        options["num_agents"] = args.num_agents
    trainer = trainer_class(agent_model=model, reward_func=more_letters, train_dataset=ITEMS, args=args, **options)
    trainer.verbose = False
    trainer.train()
    GenerationMixin._prepare_generation_config, torch.optim.AdamW.step = prepare, step
    return {
        "updates": [{"rate": rate, "weight_decay": decay, "count": n} for (rate, decay), n in sorted(steps.items())],
        "sampling": [dict(names) for names in sorted(sampled)],
    }


def spellings():
    """Every spelling that CoMLRL's code compares the value of an option with, and what it makes of it."""
    normalizers = {
        "comparator_policy": iterative._normalize_comparator_policy,
        "comparator_generation_mode": iterative._normalize_comparator_generation_mode,
        "preference_replay_mode": iterative._normalize_preference_replay_mode,
        "preference_scoring_reward": iterative._normalize_preference_scoring_reward,
    }
    found = {option: {name: of(name) for name in _compared(of)} for option, of in normalizers.items()}
    found["rl_algorithm"] = {name: marlhf._normalize_rl_algorithm(name) for name in marlhf._RL_ALGORITHM_ALIASES}
    groups = _sets(MADPOIterTrainer._call_comparator_api)  # the first of each is the name in the documentation
    documented = ("openai", "anthropic", "openai_responses")
    found["comparator_api_format"] = {
        name: next(one for one in documented if one in group) for group in groups for name in group
    }
    return found


def _sets(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [{node.value for node in found.elts} for found in ast.walk(tree) if isinstance(found, ast.Set)]


def _compared(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    right = [part for found in ast.walk(tree) if isinstance(found, ast.Compare) for part in found.comparators]
    equal = {part.value for part in right if isinstance(part, ast.Constant)}
    return sorted(equal.union(*_sets(function)))


def main(model):
    """Writes the files."""
    settings = {
        "defaults": {run: dataclasses.asdict(config()) for run, config in CLASSES.items()},
        "spellings": spellings(),
        "measured": {},
    }
    for run, (trainer_class, args) in RUNS.items():
        text = yaml.safe_dump(document(run, args, "builtin:tiny"), sort_keys=False)
        (HERE / f"{run}.yaml").write_text(text, encoding="utf-8")
        with tempfile.TemporaryDirectory() as directory:
            for name in ("preference_replay_dir", "policy_checkpoint_dir"):
                if hasattr(args, name):
                    setattr(args, name, f"{directory}/{name}")
            settings["measured"][run] = measured(run, trainer_class, args, model)
    (HERE / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
