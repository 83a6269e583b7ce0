"""What a run was, from its trainer, module and data, as the facts of a card."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import lightning as L

from pbrl_lightning.cards.names import callable_name, code, model_name, options, remote_model, with_numbers
from pbrl_lightning.cards.page import Facts, table
from pbrl_lightning.comparators.api import ApiComparator
from pbrl_lightning.comparators.local import ModelComparator
from pbrl_lightning.curves import Curve
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.modules.joint_reward import JointRewardModule
from pbrl_lightning.modules.madpo import MADPOModule
from pbrl_lightning.modules.marl import MARLModule
from pbrl_lightning.modules.marlhf import MARLHFModule

if TYPE_CHECKING:
    from pbrl_lightning.data import PreferenceDataModule

PACKAGES: Final = ("pbrl-lightning", "torch", "lightning", "transformers", "peft")


@dataclass(frozen=True)
class RunResults:
    """What callbacks gathered.

    Attributes:
        evaluations: Optimizer step and mean task reward of each evaluation.
        samples: Most evaluation items of one.
        rounds: Rows of the table of rounds, its head first.
        curves: By what is logged; empty for a run without a logger.
        metrics: The last values of what was logged.
    """

    evaluations: list[tuple[int, float]] = field(default_factory=list)
    samples: int = 0
    rounds: list[tuple[str, ...]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def tags(module: LearnerModule, several: bool) -> list[str]:
    """Words to find the model by."""
    found = ["pbrl-lightning", *(["multi-agent"] if several else [])]
    found += ["preference-learning"] if module.collects_pairs else []
    kind = next((name for kind, name in _KINDS if isinstance(module, kind)), None)
    found += [kind] if kind else []
    return found


def policy_tags(module: LearnerModule) -> list[str]:
    """More words, for an agent."""
    policy = module.policy_stage
    return ["reinforcement-learning", policy.rl_algorithm] if policy is not None else []


_KINDS: Final = ((MADPOModule, "madpo"), (MARLHFModule, "marlhf"), (MARLModule, "marl"))


def training(trainer: L.Trainer, module: LearnerModule, data: PreferenceDataModule) -> Facts:
    """How it was trained: the algorithm and its options, and how much of everything there was."""
    schedule = module.make_schedule(data.iterative)
    rates = {group["name"]: group["lr"] for group in module.parameter_groups()}
    rate = "; ".join(f"{names} {value:g}" for value, names in _by_value(rates).items())
    scheduled = ", with a schedule" if module.lr_scheduler is not None else ""
    processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    clipped = f", gradients clipped at {trainer.gradient_clip_val:g}" if trainer.gradient_clip_val else ""
    epochs = ", ".join(f"{count} of {code(phase)}" for phase, count in schedule.phases)
    moved = module.policy_updates if isinstance(module, MARLHFModule) else None
    updates = f"{trainer.global_step} optimizer steps" + (
        f", {moved} of them of the agents" if moved is not None else ""
    )
    return [
        ("module", code(type(module).__name__)),
        *_algorithm(module),
        ("rounds", f"{data.current_round} of {schedule.num_rounds}" if data.iterative else "one: not iterative"),
        ("epochs of a round", epochs),
        ("updates", updates),
        ("preference pairs", _pairs(module, data)),
        ("joint responses sampled for training (`env_step`)", str(data.env_step or "")),
        ("batch", _batch(trainer, module, data)),
        ("optimizer", f"AdamW, weight decay {module.weight_decay:g}, learning rates: {rate}{scheduled}{clipped}"),
        ("precision", f"{trainer.precision}{processes}"),
        ("sampling", "" if isinstance(module, JointRewardModule) else _sampling(data)),
        ("seed", str(data.seed)),
    ]


def _algorithm(module: LearnerModule) -> Facts:
    facts: Facts = []
    if isinstance(module, MADPOModule):
        given = {"dpo_beta": module.dpo_beta, "score_last_token": module.score_last_token}
        facts.append(
            ("algorithm", f"MADPO, on the summed log-probability margins of all agents; {code(options(given))}")
        )
    if isinstance(module, MARLHFModule | JointRewardModule):
        facts.append(("reward model", "fitted to the pairs by Bradley–Terry"))
    policy = module.policy_stage
    if policy is not None:
        given = {"num_generations": policy.num_generations, "advantage_normalization": policy.advantage_normalization}
        facts.append(("policy learning", f"{code(policy.rl_algorithm)}; {code(options(given))}"))
        if policy.critic is not None:
            kind = {"critic_type": policy.critic.critic_type, "value_loss_coef": policy.value_loss_coef}
            facts.append(("critic", f"{code(type(policy.critic).__name__)}; {code(options(kind))}"))
        kl = f"a penalty on the KL against the start of the run; coef={policy.kl_coef:g}" if policy.kl_coef else "none"
        facts.append(("reference", kl))
    return facts


def _by_value(rates: dict[str, float]) -> dict[float, str]:
    names: dict[float, list[str]] = {}
    for name, value in rates.items():
        names.setdefault(value, []).append(code(name))
    return {value: ", ".join(found) for value, found in names.items()}


def _pairs(module: LearnerModule, data: PreferenceDataModule) -> str:
    if not module.collects_pairs:
        return ""
    if data.given_pairs is not None:
        return f"{len(data.training_pairs)} that were given, after those that were held out"
    collected = sum(record.collected_pairs for record in data.rounds)
    return f"{collected} collected, {sum(record.train_pairs for record in data.rounds)} trained on, over all rounds"


def _batch(trainer: L.Trainer, module: LearnerModule, data: PreferenceDataModule) -> str:
    parts = []
    if module.collects_pairs:
        size = data.batch_size or module.pair_batch_size
        parts.append(f"{size} pair{'s' * (size > 1)}")
    if module.policy_stage is not None:
        size = data.train_batch_size or data.rollout_batch_size
        parts.append(f"rollouts of {data.rollout_batch_size} items in batches of {size}")
    steps = trainer.accumulate_grad_batches
    return "; ".join(parts) + (f"; {steps} batches per optimizer step" if steps > 1 else "")


def _sampling(data: PreferenceDataModule) -> str:
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    return code(options({name: getattr(data.sampling, name) for name in names}))


def items(module: LearnerModule, data: PreferenceDataModule, results: RunResults) -> Facts:
    """What it was trained and evaluated on, and how pairs were chosen."""
    facts: Facts = []
    if data.items:
        facts.append(("task items", f"{len(data.items)}: {data.sources.get('items', 'given in Python')}"))
    if data.evaluator is not None:
        total = len(data.evaluator.items)
        source = data.sources.get("eval_items", "given in Python")
        used = min(results.samples, total)
        facts.append(("evaluation items", f"{total}: {source}; {used} of them in each evaluation"))
    elif isinstance(module, TeamModule):
        facts.append(("evaluation items", "none: the run was not evaluated"))
    if data.given_pairs is not None:
        facts.append(("pairs", data.sources["pairs"]))
    elif module.collects_pairs:
        chosen = {"num_candidates": data.num_candidates, "pair_selection": data.pair_selection}
        facts.append(("pairs", code(options({**chosen, "pairs_per_sample": data.pairs_per_sample}))))
    facts.append(("evaluation pairs", data.sources.get("eval_pairs", "")))
    if data.comparator is not None:
        facts += [("compared against", _comparator(data.comparator)), ("replay", with_numbers(data.replay))]
    cut = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in _counts(module, data).items() if count)
    return [*facts, ("cut or dropped", cut)]


def _counts(module: LearnerModule, data: PreferenceDataModule) -> dict[str, int]:
    dropped = data.oracle.num_dropped if data.oracle is not None else 0
    return {
        **{name: count for name, count in module.counts().items() if name != "greedy"},
        "dropped candidates": dropped,
    }


def _comparator(comparator: Any) -> str:
    if isinstance(comparator, ApiComparator):
        return with_numbers(comparator) + remote_model(comparator)
    if not isinstance(comparator, ModelComparator):
        return with_numbers(comparator)
    models = comparator.models if isinstance(comparator.models, list) else [comparator.models]
    named = [model_name(model if isinstance(model, str) else None).words for model in models]
    return f"{with_numbers(comparator)}: {'; '.join(dict.fromkeys(named))}"


def reward(module: LearnerModule, data: PreferenceDataModule) -> Facts:
    """Who scored what."""
    facts: Facts = []
    if data.oracle is not None:
        facts.append(("task reward", callable_name(data.oracle.reward_func)))
        processor = data.oracle.reward_processor
        named = callable_name if hasattr(processor, "__qualname__") else with_numbers
        facts.append(("processor", named(processor) if processor is not None else "none"))
        try:
            scale = data.oracle.reward_range()
        except ValueError:  # said when it was needed
            scale = None
        facts.append(
            ("range before the processor", f"{scale[0]:g} to {scale[1]:g}" if scale is not None else "not said")
        )
    if data.judge is not None:
        facts.append(("judge of the comparisons", with_numbers(data.judge) + remote_model(data.judge)))
    if isinstance(module, MARLHFModule):
        facts.append(("rollouts scored by", "the reward model that this run fitted"))
        scorer = "the task reward" if data.preference_scoring_reward == "task" else "the last fitted reward model"
        facts.append(
            ("comparisons scored by", "" if data.judge is not None or data.given_pairs is not None else scorer)
        )
    elif isinstance(module, MARLModule) and module.reward_model is not None:
        facts.append(("rollouts scored by", f"a reward model, {model_name(module.reward_model.given_name).words}"))
    return facts


def evaluations(results: RunResults) -> str:
    """The table of evaluations, and what came out."""
    if not results.evaluations:
        return ""
    (step, first), (_, last) = results.evaluations[0], results.evaluations[-1]
    begun = "before training" if step == 0 else f"at step {step}"
    said = f"Mean task reward on the evaluation items: {first:.3f} {begun}, {last:.3f} at the end."
    rows = [("optimizer step", "mean task reward")]
    rows += [(str(step), f"{value:.3f}") for step, value in results.evaluations]
    return f"{said}\n\n{table(rows)}" if len(results.evaluations) > 1 else ""


def held_out(results: RunResults) -> Facts:
    """What a reward model said of pairs that it was not fitted to."""
    prefix = "reward/val_"
    found = sorted((name, value) for name, value in results.metrics.items() if name.startswith(prefix))
    return [(name.removeprefix(prefix).replace("_", " "), f"{value:.3f}") for name, value in found]


def versions() -> Facts:
    """What it was trained with."""
    found = []
    for package in PACKAGES:
        try:
            found.append((package, re.sub(r"\+.*", "", version(package))))
        except PackageNotFoundError:  # a source tree that was not installed
            found.append((package, "not installed"))
    return [*found, ("Python", platform.python_version())]
