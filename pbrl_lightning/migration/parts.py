"""The parts of our configuration, filled from a CoMLRL configuration that was read and found valid."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from pbrl_lightning.migration.aliases import ADVANTAGE_MODES
from pbrl_lightning.migration.checkpoint_files import checkpoint_dtype, dtype_name, generation_top_k
from pbrl_lightning.migration.collection import add_comparator, add_replay
from pbrl_lightning.migration.logger import wandb_logger
from pbrl_lightning.migration.names import (
    CRITICS,
    GROUPS,
    MARL,
    PLACED,
    RLHF,
    ROUNDS,
    RUNS,
    Name,
    names_of,
)
from pbrl_lightning.migration.policy import add_critic, add_loss_options, add_reference
from pbrl_lightning.migration.reading import Left, Reading
from pbrl_lightning.migration.rules import algorithm_of, devices_of
from pbrl_lightning.migration.units import rollout_items, update_items, updates_of_items, updates_of_steps

TRANSFORMERS_TOP_K = 50
"""What transformers' ``generate`` takes where neither its caller nor the model's files name a ``top_k``."""

_FILES = (".json", ".jsonl", ".jsonl.gz", ".parquet", ".csv")
Parts = dict[str, dict[str, Any]]


class ConfigParts:
    """The parts of a config.

    Args:
        reading: A valid configuration.
        data: Options of the data module that CoMLRL has in code; they override the document.

    Attributes:
        config: Options by part, as in :data:`pbrl_lightning.migration.names.PARTS`.
        left: Options without a counterpart.
        remarks: Options whose value or default differs here.
    """

    def __init__(self, reading: Reading, data: dict[str, Any]) -> None:
        self.run, self.options, self.others = reading.run, reading.options, reading.others
        self.sections = reading.sections
        self.left = list(reading.left)
        self.remarks: list[str] = []
        self.classes: dict[str, str] = {}
        self.config: Parts = defaultdict(dict)
        self.on_policy = self.run in (*RLHF, *MARL)
        self.algorithm = self._algorithm() if self.on_policy else ""
        self._move()
        self._team()
        self._precision()
        self._top_k()
        self._items(data)
        self._one_turn()
        rollout, update, steps = self._policy_batches() if self.on_policy else self._pair_batches()
        self._schedule(rollout, update, steps)
        self._devices()
        self._reward_processor()
        if self.on_policy:
            add_critic(self)
        add_loss_options(self)
        add_reference(self)
        if self.run in ROUNDS:
            add_replay(self)
            add_comparator(self)

    def leave(self, name: str, why: str) -> None:
        """Notes that a given option has no counterpart."""
        if self.options.get(name) is not None:
            self.left.append(Left(f"{self.run}.{name}", self.options[name], why))

    def leave_other(self, section: str, option: str, why: str) -> None:
        """Notes that a given option of another section has no counterpart."""
        value = self.others.get((section, option))
        if value is not None:
            self.left.append(Left(f"{section}.{option}".rstrip("."), value, why))

    def _move(self) -> None:
        """Values that the table moves as they are."""
        for (section, option), value in self.others.items():
            self._put(names_of(section)[option], value)
        known = names_of("run")
        for option, value in self.options.items():  # after the other sections: the run's own values win
            self._put(known[option], value)

    def _put(self, name: Name, value: Any) -> None:
        if name.moved and name.ours is not None:
            part, _, option = name.ours.partition(".")
            self.config[part][option] = value

    def _algorithm(self) -> str:
        algorithm, mode = algorithm_of(self.run, self.options), self.options.get("advantage_mode")
        if self.run in GROUPS and mode is not None:
            algorithm = ADVANTAGE_MODES[mode]
            if algorithm != self.run:
                self.remarks.append(f"`advantage_mode: {mode}` makes `{self.run}` train as `rl_algorithm: {algorithm}`")
        elif mode is not None:
            self.leave("advantage_mode", "CoMLRL sets it by `rl_algorithm`")
        if self.run in MARL:
            self.config["model"]["rl_algorithm"] = algorithm
        return algorithm

    @property
    def models(self) -> list[str]:
        """The agents' models: one for all, or one each."""
        return self.others.get(("agents", "")) or [self.others["agent_model", "name"]]

    def _team(self) -> None:
        models = self.models
        source = models if len(models) > 1 else models[0]
        team = self.config["team"] = {"models": source, "num_agents": 2, **self.config["team"]}
        if team.get("collaboration") == "decentralized":
            del team["collaboration"]

    def given_dtype(self, section: str) -> tuple[str, str] | None:
        """The option that names a type in the section of a model, with its value; None if there is none."""
        for option in ("torch_dtype", "dtype"):  # CoMLRL reads them in this order
            value = self.others.get((section, option))
            if value is not None:
                return option, value
        return None

    def _precision(self) -> None:
        """The type of all weights: CoMLRL loads every model in the agents' type, or else in its checkpoint's own."""
        given = self.given_dtype("agent_model")
        dtype = dtype_name(given[1]) if given is not None else None
        if dtype is None:
            shown = f"`agent_model.{given[0]}: {given[1]}`" if given is not None else "No `agent_model.torch_dtype`"
            dtype = checkpoint_dtype(self.models)
            unknown = (
                "which could not be read here: check `model.team.dtype` (default float32; `auto` fits the machine)"
            )
            found = f"{dtype}, which is written out" if dtype else unknown
            self.remarks.append(f"{shown}: CoMLRL loads weights in the type of the checkpoint, {found}")
        if dtype is None:
            return
        self.config["team"]["dtype"] = dtype
        if self.run in RLHF:
            self.config["reward_model"]["dtype"] = dtype
        if self.options.get("comparator_policy") == "model":
            self.config["comparator"]["dtype"] = dtype

    def _top_k(self) -> None:
        """Null is no value of ``generate`` there: it takes what the model's files say, or 50."""
        if "top_k" in self.options:
            value, written = self.options["top_k"], f"{self.run}.top_k"
        elif ("agent_model", "top_k") in self.others:
            value, written = self.others["agent_model", "top_k"], "agent_model.top_k"
        else:
            return
        if value is None:
            own = generation_top_k(self.models[0])
            value = own or TRANSFORMERS_TOP_K
            source = "the model's generation_config.json" if own else "transformers' default"
            unless = "" if own else " unless the model's generation_config.json has another"
            self.remarks.append(
                f"`{written}: null` leaves it to transformers, which samples with {value} ({source}){unless}; null "
                "here would turn the filter off"
            )
        self.config["sampling"]["top_k"] = value

    def _items(self, given: dict[str, Any]) -> None:
        data, name = self.config["data"], self.others.get(("dataset", "name"))
        train, evaluation = (self.others.get(("dataset", f"{part}_split")) for part in ("train", "eval"))
        if name is not None and name.endswith(_FILES):
            data["items"] = name
            for part in ("train_split", "eval_split"):
                self.leave_other("dataset", part, "a file is read whole; give a file per split")
        elif name is not None:
            data["items"] = f"datasets:{name}" + (f"::{train}" if train else "")
            if evaluation is not None:
                data["eval_items"] = f"datasets:{name}::{evaluation}"
        else:
            for part in ("train_split", "eval_split"):
                self.leave_other("dataset", part, "a split of no data set: `dataset.name` is missing")
        data |= given

    def _one_turn(self) -> None:
        if self.run in MARL and "num_turns" not in self.options:
            threshold = self.options.get("early_termination_threshold", -0.2)
            self.remarks.append(
                f"`num_turns` is not given, and CoMLRL's default for `{self.run}` is 2 (with "
                f"`early_termination_threshold: {threshold}`): runs here have one turn"
            )

    def _pair_batches(self) -> tuple[int, int, int]:
        """MADPO's batches are of pairs."""
        rollout, train = self.options.get("rollout_buffer_size"), self.options.get("train_batch_size")
        if train or rollout:
            self.config["data"]["batch_size"] = train or rollout
        if train is not None:
            self.leave("rollout_buffer_size", "MADPO has no rollouts; `train_batch_size` sets the batch")
        steps = self.options.get("environment_steps_per_pair", 2) * (train or rollout or 2)
        return 1, 1, steps if self.options.get("use_environment_step", True) else 0

    def _policy_batches(self) -> tuple[int, int, int]:
        """Task items per rollout, per update, and environment steps per update."""
        data, actor_critic = self.config["data"], self.run in CRITICS
        generations = self.options.get("num_generations", 1 if actor_critic else 4)
        rollout = self.options.get("rollout_buffer_size", 8 if actor_critic else 2)
        update = self.options.get("train_batch_size") or rollout
        if actor_critic:
            self.write_defaults({"num_train_epochs": 40, "num_generations": 1})
        if self.algorithm in CRITICS:
            rollout, update = self._responses_as_items(rollout, update, generations)
        elif update > rollout:
            self.leave("train_batch_size", "a rollout has fewer items, and is one batch by default")
            update = rollout
        if "rollout_buffer_size" in self.options or rollout != 2:
            data["rollout_batch_size"] = rollout
        if update < rollout:
            data["train_batch_size"] = update
        return rollout, update, update * generations

    def write_defaults(self, defaults: dict[str, Any]) -> None:
        """Options that are not given and whose default differs here."""
        missing = {name: value for name, value in defaults.items() if name not in self.options}
        self.config["model"] |= missing
        if missing:
            listed = " and ".join(f"`{name}: {value}`" for name, value in missing.items())
            verb = "are CoMLRL's defaults" if len(missing) > 1 else "is CoMLRL's default"
            self.remarks.append(f"{listed} {verb} for `{self.run}`, written out because ours differs")

    def _responses_as_items(self, rollout: int, update: int, generations: int) -> tuple[int, int]:
        """Task items per rollout and per update, where CoMLRL counts the responses of one agent."""
        items = rollout_items(rollout, generations)
        responses = min(update, items * generations)
        per_update = min(items, update_items(responses, generations))
        names = [name for name in ("rollout_buffer_size", "train_batch_size") if self.options.get(name) is not None]
        if generations > 1 or "rollout_buffer_size" not in names:
            default = f"CoMLRL's default `rollout_buffer_size: {rollout}`"
            counted = " and ".join(f"`{name}: {self.options[name]}`" for name in names) or default
            here = per_update * generations
            rounded = "" if responses == here else f"; an update has {here} responses instead of {responses}"
            self.remarks.append(
                f"{counted} {'count' if len(names) > 1 else 'counts'} responses, {generations} per task item: here "
                f"a rollout has {_counted(items, 'item')} and an update {per_update}{rounded}"
            )
        return items, per_update

    def _schedule(self, rollout: int, update: int, steps: int) -> None:
        """Evaluation and logging, here counted in updates."""
        interval = self.options.get("eval_interval", 16)
        if self.on_policy and interval:
            updates = updates_of_items(interval, rollout, update)
            self.config["evaluation"]["interval"] = updates
            source = "" if "eval_interval" in self.options else ", CoMLRL's default,"
            self.remarks.append(
                f"`eval_interval: {interval}`{source} counts task items: here {_counted(updates, 'update')}"
            )
        elif "eval_interval" in self.options:
            self.config["evaluation"]["interval"] = interval
        samples = self.options.get("eval_num_samples")
        if samples == 0:
            self.leave("eval_num_samples", "leave out `data.eval_items`, and nothing is evaluated")
        elif samples is not None:
            self.config["evaluation"]["num_samples"] = samples
        logging = self.options.get("logging_steps")
        if logging is not None and steps:
            every = updates_of_steps(logging, steps)
            self.config["trainer"]["log_every_n_steps"] = every
            if every != logging:
                self.remarks.append(
                    f"`logging_steps: {logging}` counts environment steps, {steps} per update: here "
                    f"{_counted(every, 'update')}"
                )
        elif logging is not None:
            self.leave("logging_steps", "without `use_environment_step` CoMLRL logs once; every update is logged here")
            self.config["trainer"]["log_every_n_steps"] = 1

    def _devices(self) -> None:
        devices = set(devices_of(self.options.get("agent_devices")) or [])
        kind, _, index = next(iter(devices), "").partition(":")
        if len(devices) == 1 and kind in ("cpu", "cuda") and (not index or index.isdigit()):
            trainer = self.config["trainer"]
            trainer["accelerator"] = "cpu" if kind == "cpu" else "gpu"
            trainer["devices"] = 1 if kind == "cpu" else [int(index or 0)]
        else:
            self.leave("agent_devices", PLACED)

    def _reward_processor(self) -> None:
        given = {option: value for (section, option), value in self.others.items() if section == "reward_processor"}
        scale, shift = given.get("scale_factor", 1.0), given.get("shift", 0.0)
        if given.get("enabled", True) and (scale != 1 or shift != 0):
            self.classes["reward_processor"] = "pbrl_lightning.preferences.processors.ScaleAndShift"
            self.config["reward_processor"] = {"scale": scale, "shift": shift}

    def _logger(self, directory: str) -> dict[str, Any] | None:
        if "wandb" not in self.sections:
            return None
        section = {option: value for (part, option), value in self.others.items() if part == "wandb"}
        logger = wandb_logger(section, directory)
        if logger is None:
            self.remarks.append("`wandb` is switched off: TensorBoard's files are written instead")
        else:
            self.remarks.append("`wandb` becomes `trainer.logger`: needs `pip install wandb`")
        return logger

    def assemble(self) -> dict[str, Any]:
        """The parts as one config."""
        model = {"team": _as_class("AgentTeam", self.config["team"]), **self.config["model"]}
        data = {**self.config["data"]}
        if self.config["reward_model"]:
            model["reward_model"] = _as_class("JointRewardModel", self.config["reward_model"])
        for part, into in (("critic", model), ("comparator", data), ("replay", data), ("reward_processor", data)):
            if part in self.classes:
                into[part] = _as_class(self.classes[part], self.config[part])
        if self.config["reference_kl"]:
            model["reference_kl"] = self.config["reference_kl"]
        if self.config["sampling"]:
            data["sampling"] = self.config["sampling"]
        trainer = {**self.config["trainer"]}
        trainer.setdefault("default_root_dir", str(Path("runs") / self.run))
        logger = self._logger(trainer["default_root_dir"])
        if logger is not None:
            trainer["logger"] = logger
        callbacks = {"JointEvaluation": self.config["evaluation"], "ComparatorHistory": self.config["history"]}
        given = [_as_class(name, options) for name, options in callbacks.items() if options]
        if self.run in ROUNDS and self.options.get("log_reward_distribution"):
            given.append(_as_class("RewardDistribution", {}))
        if given:
            trainer["callbacks"] = given
        return {"model": _as_class(RUNS[self.run], model), "data": data, "trainer": trainer}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _as_class(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": name, **({"init_args": options} if options else {})}
