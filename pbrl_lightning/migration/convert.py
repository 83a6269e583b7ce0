"""From a CoMLRL configuration to ours: values are moved by the table of names, classes are chosen by what fits them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pbrl_lightning.migration.names import COMPARATORS, PLACED, REPLAYS, ROUNDS, RUNS, names_of
from pbrl_lightning.migration.reading import Left, Reading, read_configuration
from pbrl_lightning.migration.rules import broken_rules, devices_of, endpoint_of, says_something
from pbrl_lightning.utils.errors import ConfigurationError

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_CRITIC_OPTIONS = ("use_separate_critic", "critic_model_name", "critic_type", "critic_learning_rate", "value_loss_coef",
                   "value_clip_range")  # fmt: skip
_IN_CODE = {
    "data.items": "task items: a JSON or JSONL file, or the import path of a callable; in CoMLRL the data set",
    "data.reward_func": "the import path of the reward, such as my_rewards:score; it gets the responses as "
    "CoMLRL's does: one list per agent",
    "data.eval_items": "held-out task items; without them the run is not evaluated",
    "model.team.formatters": "a template such as 'Summarise: {prompt}' or an import path, one for all agents or one "
    "each; without it an item's `prompt` is the prompt",
}
Parts = dict[str, dict[str, Any]]


class MigrationError(ConfigurationError):
    """The configuration is not one that CoMLRL takes, or asks for what does not exist here.

    Attributes:
        problems: A message each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass
class Migration:
    """A converted configuration.

    Attributes:
        run: The section that was converted.
        config: What `pbrl fit --config` takes.
        left: What has no counterpart.
        to_do: Options that stand in code with CoMLRL and must be given here, with what they are.
    """

    run: str
    config: dict[str, Any]
    left: list[Left] = field(default_factory=list)
    to_do: dict[str, str] = field(default_factory=dict)


def migrate(
    document: Any,
    *,
    items: str | None = None,
    eval_items: str | None = None,
    reward_func: str | None = None,
    formatters: str | list[str] | None = None,
) -> Migration:
    """Converts a CoMLRL configuration.

    Args:
        document: What YAML gave: sections by name.
        items: Task items, which CoMLRL has in code.
        eval_items: Held-out task items.
        reward_func: Import path of the reward.
        formatters: Of the agents' prompts.

    Returns:
        The configuration, and what could not be taken over.

    Raises:
        MigrationError: If a value is wrong or options do not fit together; all problems are named at once.

    Example:
        >>> migrate({"agent_model": {"name": "gpt2"}, "madpo": {"top_p": 0.9}}).config["data"]
        {'sampling': {'top_p': 0.9}}
    """
    reading = read_configuration(document)
    problems = list(reading.problems)
    agents, name = reading.others.get(("agents", "")), reading.others.get(("agent_model", "name"))
    if reading.run:
        broken = broken_rules(reading.run, reading.options, agents, name)
        # What is wrong for itself is named once.
        problems += [said for said in broken if not any(f"`{option}`" in said for option in reading.wrong)]
    if problems:
        raise MigrationError(problems)
    given = {"data.items": items, "data.eval_items": eval_items, "data.reward_func": reward_func}
    found = _Parts(reading, agents or [name])
    found.parts["data"] |= {place.partition(".")[2]: value for place, value in given.items() if value is not None}
    if formatters is not None:
        found.parts["team"]["formatters"] = formatters
    config = found.assemble()
    present = {*(f"data.{name}" for name in config["data"])}
    present |= {f"model.team.{name}" for name in found.parts["team"]}
    to_do = {place: what for place, what in _IN_CODE.items() if place not in present}
    return Migration(reading.run, config, found.left, to_do)


class _Parts:
    """The parts of a config, filled from what was read."""

    def __init__(self, reading: Reading, models: list[str]) -> None:
        self.run, self.options, self.others = reading.run, reading.options, reading.others
        self.left = list(reading.left)
        self.classes: dict[str, str] = {}
        self.parts: Parts = defaultdict(dict)
        self.on_policy = self.run in ("marlhf", "marlhf_iter")
        self._move()
        self._team(models)
        self._batches()
        self._devices_and_evaluation()
        self._reward_processor()
        if self.on_policy:
            self._critic()
        self._without_effect()
        self._reference()
        if self.run in ROUNDS:
            self._replay()
            self._comparator()

    def leave(self, name: str, why: str) -> None:
        """Notes that a given option has no counterpart."""
        if name in self.options and self.options[name] is not None:
            self.left.append(Left(f"{self.run}.{name}", self.options[name], why))

    def _move(self) -> None:
        """Values that go where the table says, as they are."""
        for (section, option), value in self.others.items():
            self._put(names_of(section)[option], value)
        known = names_of("run")
        for option, value in self.options.items():  # after the other sections: the run's own values win
            self._put(known[option], value)

    def _put(self, name: Any, value: Any) -> None:
        if name.moved and name.ours is not None:
            part, _, option = name.ours.partition(".")
            self.parts[part][option] = value

    def _team(self, models: list[str]) -> None:
        team = self.parts["team"]
        team["models"] = models if len(models) > 1 else models[0]
        team.setdefault("num_agents", 2)
        if team.get("collaboration") == "decentralized":
            del team["collaboration"]
        for option in ("torch_dtype", "dtype"):
            dtype = self.others.get(("agent_model", option))
            if dtype is not None and dtype.removeprefix("torch.") in _DTYPES:
                team["dtype"] = dtype.removeprefix("torch.")
            elif dtype is not None:
                why = f"`model.team.dtype` must be one of {', '.join(_DTYPES)}; the default is float32"
                self.left.append(Left(f"agent_model.{option}", dtype, why))
        path = self.others.get(("dataset", "name"))
        if path is not None and path.endswith((".json", ".jsonl")):
            self.parts["data"]["items"] = path
        elif path is not None:
            why = "a file, or a data set of the hub with its split, `datasets:NAME::SPLIT`: give it as `data.items`"
            self.left.append(Left("dataset.name", path, why))

    def _batches(self) -> None:
        rollout, train = self.options.get("rollout_buffer_size"), self.options.get("train_batch_size")
        data = self.parts["data"]
        if not self.on_policy:
            size = train or rollout
            if size is not None:
                data["batch_size"] = size
            if train is not None:
                self.leave("rollout_buffer_size", "MADPO has no rollouts, and `train_batch_size` says the batch")
            return
        if rollout is not None:
            data["rollout_batch_size"] = rollout
        if train is not None and train < (rollout or 2):
            data["train_batch_size"] = train
        elif train is not None and train > (rollout or 2):
            self.leave("train_batch_size", "a rollout holds fewer items, and is one batch by default")

    def _devices_and_evaluation(self) -> None:
        devices = set(devices_of(self.options.get("agent_devices")) or [])
        kind, _, index = next(iter(devices), "").partition(":")
        if len(devices) == 1 and kind in ("cpu", "cuda"):
            trainer = self.parts["trainer"]
            trainer["accelerator"] = "cpu" if kind == "cpu" else "gpu"
            trainer["devices"] = 1 if kind == "cpu" else [int(index or 0)]
        else:
            self.leave("agent_devices", PLACED)
        samples = self.options.get("eval_num_samples")
        if samples == 0:
            self.leave("eval_num_samples", "give no `data.eval_items`, and nothing is evaluated")
        elif samples is not None:
            self.parts["evaluation"]["num_samples"] = samples

    def _reward_processor(self) -> None:
        given = {option: value for (section, option), value in self.others.items() if section == "reward_processor"}
        scale, shift = given.get("scale_factor", 1.0), given.get("shift", 0.0)
        if given.get("enabled", True) and (scale != 1 or shift != 0):
            self.classes["reward_processor"] = "pbrl_lightning.preferences.processors.ScaleAndShift"
            self.parts["reward_processor"] = {"scale": scale, "shift": shift}

    def _critic(self) -> None:
        algorithm = self.options.get("rl_algorithm", "magrpo")
        if algorithm not in ("maac", "iac"):
            for name in _CRITIC_OPTIONS:
                self.leave(name, f"{algorithm} has no critic")
            return
        for name in ("critic_learning_rate", "value_loss_coef"):
            if self.options.get(name) is not None:
                self.parts["model"][name] = self.options[name]
        attached = algorithm == "iac" and not self.options.get("use_separate_critic", True)
        critic = self.parts["critic"]
        if "critic_type" in self.options:
            critic["critic_type"] = self.options["critic_type"]
        if attached:
            self.classes["critic"] = "AttachedCritics"
            self.leave("critic_model_name", "value heads on the actors have no model of their own")
            if "value_clip_range" in self.options:
                critic["value_clip_range"] = self.options["value_clip_range"]
            return
        self.classes["critic"] = "JointCritic" if algorithm == "maac" else "SeparateCritics"
        if "critic_model_name" in self.options:
            critic["model" if algorithm == "maac" else "models"] = self.options["critic_model_name"]
        self.leave("value_clip_range", "only values of heads on the actors are clipped")
        if algorithm == "maac":
            self.leave("use_separate_critic", "maac has one critic of its own")

    def _without_effect(self) -> None:
        if self.on_policy:
            self.leave("dpo_beta", "MARLHF's loss has none")
            if "advantage_normalization" in self.options:
                self.parts["model"]["advantage_normalization"] = self.options["advantage_normalization"]
            return
        if "dpo_beta" in self.options:
            self.parts["model"]["dpo_beta"] = self.options["dpo_beta"]
        self.leave("advantage_normalization", "MADPO has no advantages")

    def _reference(self) -> None:
        names = ("reference_kl_enabled", "reference_kl_coef", "reference_devices")
        enabled, coef = self.options.get("reference_kl_enabled", False), self.options.get("reference_kl_coef", 0.1)
        if not self.on_policy:
            for name in names:
                self.leave(name, "MADPO is free of a reference, with CoMLRL too")
        elif not enabled or not coef:
            for name in names:
                self.leave(name, "no reference is kept unless `model.reference_kl` is given, with a `coef` above 0")
        else:
            self.parts["reference_kl"]["coef"] = coef
            devices = devices_of(self.options.get("reference_devices"))
            if devices is not None:
                self.parts["reference_kl"]["devices"] = devices

    def _replay(self) -> None:
        mode = self.options.get("preference_replay_mode", "current")
        self.classes["replay"] = REPLAYS[mode]
        if not self.options.get("log_reward_distribution"):
            self.leave("log_reward_distribution", "without a `RewardDistribution` among the callbacks none is written")
        for option in {"nearest_k": ("k", "sample_size"), "lambda_decay": ("lambda", "sample_size"),
                       "all_history": ("sample_size",)}.get(mode, ()):  # fmt: skip
            value = self.options.get(f"preference_replay_{option}")
            if value is not None:
                self.parts["replay"]["decay" if option == "lambda" else option] = value

    def _comparator(self) -> None:
        options, policy = self.options, self.options.get("comparator_policy", "current")
        devices = devices_of(options.get("comparator_devices"))
        if policy == "current_copy" and devices is None:
            self.leave(
                "comparator_policy", "a copy on the actors' own devices is the current policy: CurrentComparator"
            )
            policy = "current"
        self.classes["comparator"] = COMPARATORS[policy]
        comparator = self.parts["comparator"]
        if devices is not None:
            comparator["devices"] = devices
        if "comparator_num_candidates" in options:
            comparator["num_candidates"] = options["comparator_num_candidates"]
        if policy == "history":
            comparator["k"] = options.get("comparator_history_k", 1)
        if policy == "model":
            names = options.get("comparator_agents") or options["comparator_model_name"]
            comparator["models"] = names[0] if isinstance(names, list) and len(names) == 1 else names
        if policy == "api":
            comparator["endpoint"] = endpoint_of(options)
        central_team = options.get("collaboration_mode") == "centralized"
        if options.get("comparator_generation_mode") == "centralized" and not central_team:
            comparator["centralized"] = {"agent_index": options.get("comparator_centralized_agent_index", 0)}
        if policy == "history" and says_something(options, "policy_checkpoint_dir"):
            self.parts["history"]["dirpath"] = options["policy_checkpoint_dir"]
        else:
            self.leave("policy_checkpoint_dir", "policies are kept for a `HistoryComparator` alone")

    def assemble(self) -> dict[str, Any]:
        """The parts as one config."""
        model = {"team": _as_class("AgentTeam", self.parts["team"]), **self.parts["model"]}
        data = {**self.parts["data"]}
        if self.parts["reward_model"]:
            model["reward_model"] = _as_class("JointRewardModel", self.parts["reward_model"])
        for part, into in (("critic", model), ("comparator", data), ("replay", data), ("reward_processor", data)):
            if part in self.classes:
                into[part] = _as_class(self.classes[part], self.parts[part])
        if self.parts["reference_kl"]:
            model["reference_kl"] = self.parts["reference_kl"]
        if self.parts["sampling"]:
            data["sampling"] = self.parts["sampling"]
        trainer = {**self.parts["trainer"]}
        trainer.setdefault("default_root_dir", str(Path("runs") / self.run))
        callbacks = {"JointEvaluation": self.parts["evaluation"], "ComparatorHistory": self.parts["history"]}
        given = [_as_class(name, options) for name, options in callbacks.items() if options]
        if self.run in ROUNDS and self.options.get("log_reward_distribution"):
            given.append(_as_class("RewardDistribution", {}))
        if given:
            trainer["callbacks"] = given
        return {"model": _as_class(RUNS[self.run], model), "data": data, "trainer": trainer}


def _as_class(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": name, **({"init_args": options} if options else {})}
