"""Configurations that CoMLRL's own classes wrote: converted and trained here, with the settings that they have there.

`comlrl/write_configs.py` wrote the files, and `settings.json` with the defaults of its classes and with what its
trainers were seen to do.
"""

import json
from pathlib import Path

import pytest
import yaml

from pbrl_lightning.callbacks import JointEvaluation
from pbrl_lightning.cli import PreferenceCLI, main
from pbrl_lightning.migration.names import COMPARATORS, CRITICS, RLHF, RUNS

PEER = Path(__file__).parent / "comlrl"
SETTINGS = json.loads((PEER / "settings.json").read_text(encoding="utf-8"))
WRITTEN = sorted(path.stem for path in PEER.glob("*.yaml"))
ITEMS = [{"prompt": word} for word in ("a", "b", "c", "d")]
# Without a counterpart: devices, what only runs of several turns have, and names that only other comparators have.
ELSEWHERE = {
    *("parallel_training", "agent_devices", "critic_devices", "reference_devices", "reward_model_device"),
    *("discount", "early_termination_threshold", "external_prompt_passthrough", "eval_batch_size", "logging_steps"),
    *("use_environment_step", "environment_steps_per_pair", "joint_mode", "advantage_mode"),
    *("critic_value_head_hidden_dim", "value_head_hidden_dim", "critic_model_name", "reward_model_name"),
    *("preference_replay_dir", "policy_checkpoint_dir", "log_reward_distribution"),
    *("comparator_devices", "comparator_model_name", "comparator_agents", "comparator_centralized_agent_index"),
}


def letter_sum(first, second):
    """Hardly ever ties."""
    return [sum(map(ord, a)) + 0.001 * sum(map(ord, b)) for a, b in zip(first, second, strict=True)]


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """Builds what `pbrl fit` builds of a document, on the tiny team."""
    monkeypatch.chdir(tmp_path)
    Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS), encoding="utf-8")

    def build(document, *options):
        Path("theirs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        supplied = ["--items=items.jsonl", "--eval_items=items.jsonl", f"--reward_func={__name__}:letter_sum"]
        main(["migrate", "theirs.yaml", *supplied, "--output", "ours.yaml"])
        quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
        return PreferenceCLI(["--config", "ours.yaml", *quiet, *options], run=False)

    return build


def effective(cli, run):
    """What is in force here, under CoMLRL's names."""
    module, data, sampling = cli.model, cli.datamodule, cli.datamodule.sampling
    schedule = module.make_schedule(data.iterative)
    phases = dict(schedule.phases)
    evaluation = next((found for found in cli.trainer.callbacks if isinstance(found, JointEvaluation)), None)
    evaluation = evaluation or JointEvaluation()
    roles = module.team.roles
    found = {
        "num_agents": module.team.num_agents if roles is None else len(roles),
        "collaboration_mode": "decentralized" if roles is None else "centralized",
        "num_turns": 1,
        "num_train_epochs": phases.get("policy", phases.get("train", next(reversed(phases.values())))),
        "agent_learning_rate": module.agent_learning_rate(0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "eval_interval": evaluation.interval,
        "eval_num_samples": evaluation.num_samples,
    }
    if module.collects_pairs:
        names = {"preference_num_candidates": "num_candidates", "preference_pairs_per_sample": "pairs_per_sample"}
        found |= {theirs: getattr(data, ours) for theirs, ours in names.items()}
        found["pair_selection"] = data.pair_selection
    if run in RLHF:
        found |= {
            "reward_learning_rate": module.reward.learning_rate or 1e-5,
            "reward_num_train_epochs": phases["reward"],
            "reward_train_batch_size": data.batch_size or module.pair_batch_size,
            "reward_max_length": module.reward_model.max_length,
            "reward_freeze_backbone": module.reward_model.freeze_backbone,
        }
    if module.policy_stage is None:
        found |= {"dpo_beta": module.dpo_beta, "train_batch_size": data.batch_size or module.pair_batch_size}
    else:
        found |= policy_settings(module.policy_stage, data, module.agent_learning_rate(0))
    return found | (round_settings(data, schedule) if data.iterative else {})


def policy_settings(policy, data, rate):
    critic, reference = policy.critic, policy.reference_kl
    found = {
        "rl_algorithm": policy.rl_algorithm,
        "num_generations": policy.num_generations,
        "advantage_normalization": policy.advantage_normalization,
        "rollout_buffer_size": data.rollout_batch_size,
        "train_batch_size": data.train_batch_size or data.rollout_batch_size,
        "reference_kl_enabled": reference is not None,
        "reference_kl_coef": reference.coef if reference is not None else None,
    }
    if critic is None:
        return found
    return found | {
        "critic_type": critic.critic_type,
        "value_loss_coef": policy.value_loss_coef,
        "use_separate_critic": not critic.attached,
        "value_clip_range": critic.value_clip_range,
        "critic_learning_rate": None if critic.attached else policy.critic_learning_rate or rate,
    }


def round_settings(data, schedule):
    replay, comparator = data.replay, data.comparator
    policy = {name: policy for policy, name in COMPARATORS.items()}[type(comparator).__name__]
    return {
        "num_iterations": schedule.num_rounds,
        "preference_replay_mode": {"CurrentReplay": "current", "NearestKReplay": "nearest_k"}[type(replay).__name__],
        "preference_replay_k": getattr(replay, "k", None),
        "preference_replay_lambda": getattr(replay, "decay", None),
        "preference_replay_sample_size": replay.sample_size,
        "preference_scoring_reward": data.preference_scoring_reward,
        "comparator_policy": policy,
        "comparator_history_k": getattr(comparator, "k", None),
        "comparator_num_candidates": comparator.num_candidates,
        "comparator_generation_mode": "centralized" if comparator.centralized is not None else "decentralized",
    }


def in_our_units(run, theirs):
    """CoMLRL's settings as its trainers understand them, counted as here."""
    found = {name: value for name, value in theirs.items() if name not in ELSEWHERE and "_api_" not in name}
    found["top_k"] = 50 if found["top_k"] is None else found["top_k"]  # measured: see settings.json
    if run not in RLHF and "rl_algorithm" not in found and run not in ("madpo", "madpo_iter"):
        modes = {"mean": "magrpo", "raw": "mareinforce", "max": "maremax", "rloo": "marloo"}
        found["rl_algorithm"] = modes[theirs["advantage_mode"]] if "advantage_mode" in theirs else run
    algorithm = found.get("rl_algorithm")
    if algorithm is None:  # MADPO: no rollouts, no advantages, no reference
        for name in ("rollout_buffer_size", "advantage_normalization", "reference_kl_enabled", "reference_kl_coef"):
            del found[name]
        return found
    found.pop("dpo_beta", None)
    found["num_turns"] = 1
    if not found["reference_kl_enabled"]:
        found["reference_kl_coef"] = None
    rollout, update, generations = (
        found[name] for name in ("rollout_buffer_size", "train_batch_size", "num_generations")
    )
    if algorithm in CRITICS:  # responses there, task items here
        rollout = -(-rollout // generations)
        update = min(rollout, max(1, round(update / generations)))
        found |= {"rollout_buffer_size": rollout, "train_batch_size": update}
        separate = found.setdefault("use_separate_critic", True)
        rate = found["critic_learning_rate"] or found["agent_learning_rate"]
        found["critic_learning_rate"] = rate if separate else None
        found["value_clip_range"] = None if separate else found["value_clip_range"]
    else:
        critic = ("critic_type", "value_loss_coef", "use_separate_critic", "value_clip_range", "critic_learning_rate")
        found = {name: value for name, value in found.items() if name not in critic}
    found["eval_interval"] = found["eval_interval"] // update  # task items there, updates here
    return found


@pytest.mark.parametrize("run", RUNS)
def test_an_option_left_out_has_comlrls_default(run, fitted):
    cli = fitted({"agent_model": {"name": "builtin:tiny", "torch_dtype": "float32"}, run: {}})
    wanted = in_our_units(run, SETTINGS["defaults"][run])
    found = effective(cli, run)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("run", WRITTEN)
def test_a_configuration_that_its_classes_wrote_has_the_same_settings(run, fitted):
    document = yaml.safe_load((PEER / f"{run}.yaml").read_text(encoding="utf-8"))
    cli = fitted(document)
    wanted = in_our_units(run, document[run])
    found = effective(cli, run)
    assert {name: found[name] for name in wanted} == wanted
    assert cli.datamodule.seed == document["seed"]
    for sampled in SETTINGS["measured"][run]["sampling"]:  # what its `generate` was seen to use
        sampled = {name: sampled[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
        assert sampled == {name: found[name] for name in sampled}


@pytest.mark.parametrize("run", WRITTEN)
def test_it_trains_with_the_rates_and_as_many_updates(run, fitted):
    cli = fitted(yaml.safe_load((PEER / f"{run}.yaml").read_text(encoding="utf-8")))
    cli.trainer.fit(cli.model, cli.datamodule)
    groups = {group["name"]: group for group in cli.trainer.optimizers[0].param_groups}
    agents, counts = SETTINGS["defaults"][run]["num_agents"], {}
    for measured in SETTINGS["measured"][run]["updates"]:
        kinds = [name for name, group in groups.items() if group["lr"] == measured["rate"]]
        assert kinds, f"nothing is trained with {measured['rate']}"
        assert all(groups[name]["weight_decay"] == measured["weight_decay"] for name in kinds)
        counts[measured["rate"]] = measured["count"]
    assert {group["lr"] for group in groups.values()} == set(counts)
    rate = groups["agent_0"]["lr"]
    assert cli.model.policy_updates == counts[rate] // agents  # it has an optimizer per agent, here there is one
    if run == "marlhf":
        assert cli.trainer.global_step - cli.model.policy_updates == counts[groups["reward"]["lr"]]
