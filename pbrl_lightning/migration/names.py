"""The table of CoMLRL's option names and ours, from which the converter works and `docs/migrating.md` is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["integer", "number", "boolean", "string", "strings", "mapping", "anything"]

RUNS: Final[dict[str, str]] = {
    "madpo": "MADPOModule",
    "madpo_iter": "MADPOModule",
    "marlhf": "MARLHFModule",
    "marlhf_iter": "MARLHFModule",
    "magrpo": "MARLModule",
    "mareinforce": "MARLModule",
    "marloo": "MARLModule",
    "maremax": "MARLModule",
    "maac": "MARLModule",
    "iac": "MARLModule",
}
"""The section that defines a run, and the module that trains it here. An iterative run has a `comparator` too."""

COMPARATORS: Final[dict[str, str]] = {
    "current": "CurrentComparator",
    "current_copy": "CurrentCopyComparator",
    "model": "ModelComparator",
    "history": "HistoryComparator",
    "api": "ApiComparator",
}
"""`comparator_policy` and our class."""

REPLAYS: Final[dict[str, str]] = {
    "current": "CurrentReplay",
    "nearest_k": "NearestKReplay",
    "all_history": "AllHistoryReplay",
    "lambda_decay": "LambdaDecayReplay",
}
"""`preference_replay_mode` and our class."""

PARTS: Final[dict[str, str]] = {
    "model": "model",
    "team": "model.team",
    "reward_model": "model.reward_model",
    "critic": "model.critic",
    "reference_kl": "model.reference_kl",
    "data": "data",
    "sampling": "data.sampling",
    "reward_processor": "data.reward_processor",
    "comparator": "data.comparator",
    "centralized": "data.comparator.centralized",
    "endpoint": "data.comparator.endpoint",
    "replay": "data.replay",
    "trainer": "trainer",
    "logger": "trainer.logger",
    "evaluation": "JointEvaluation",
    "history": "ComparatorHistory",
    "distribution": "RewardDistribution",
}
"""The parts of a config and their places, `init_args` left out. The last three are callbacks."""

ROUNDS: Final = ("madpo_iter", "marlhf_iter")
RLHF: Final = ("marlhf", "marlhf_iter")
PREFERENCE: Final = ("madpo", "madpo_iter", *RLHF)
GROUPS: Final = ("magrpo", "mareinforce", "marloo", "maremax")
CRITICS: Final = ("maac", "iac")
MARL: Final = (*GROUPS, *CRITICS)
ALL: Final = (*PREFERENCE, *MARL)


@dataclass(frozen=True)
class Limits:
    """The values that an option takes. Null always means "not given".

    Attributes:
        kind: Type of the value.
        at_least: Smallest value.
        above: Exclusive lower bound.
        at_most: Largest value.
        choices: The allowed values.
    """

    kind: Kind = "anything"
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        article = "an" if self.kind == "integer" else "a"
        words = {"boolean": "true or false", "strings": "a list of strings", "anything": "anything"}
        said = words.get(self.kind, f"{article} {self.kind}")
        if self.above is not None:
            said += f" > {self.above:g}"
        if self.at_least is not None:
            said += f" >= {self.at_least:g}"
        return said + (f" and <= {self.at_most:g}" if self.at_most is not None else "")


@dataclass(frozen=True)
class Name:
    """An option of CoMLRL.

    Attributes:
        section: Its section; ``run`` stands for the one of the run.
        name: Its name there.
        ours: Part (of :data:`PARTS`) and option here, joined by a dot; None without a counterpart.
        limits: The values it takes.
        note: What differs here, or what to do instead.
        runs: The runs that have it.
        null_counts: Null is a value of its own (no limit, off), not "not given".
        moved: False if the converter computes our option instead of copying the value.
    """

    section: str
    name: str
    ours: str | None
    limits: Limits = Limits()
    note: str = ""
    runs: tuple[str, ...] = ALL
    null_counts: bool = False
    moved: bool = True

    def place(self) -> str:
        """Its place here, as the documentation writes it."""
        if self.ours is None:
            return "–"
        part, _, option = self.ours.partition(".")
        return f"`{PARTS[part]}.{option}`" if option else f"`{PARTS[part]}`"


_ANY, _COUNT, _SIZE = Limits(), Limits("integer", at_least=0), Limits("integer", at_least=1)
_RATE, _NUMBER, _FLAG = Limits("number", above=0), Limits("number"), Limits("boolean")
_TEXT, _TEXTS, _MAP = Limits("string"), Limits("strings"), Limits("mapping")
_DEVICES = "a device or a list of devices"
_ONE_TURN = "no effect: runs here have one turn"
_OWN_TYPE = "`auto`, or none: the type in the checkpoint's own `config.json`, where that file is on this machine"
PLACED: Final = (
    "Lightning places models: `trainer.accelerator`, `trainer.devices`, `trainer.strategy` (docs/scaling.md)"
)


def _run(name: str, ours: str | None, limits: Limits = _ANY, note: str = "", **more: Any) -> Name:
    return Name("run", name, ours, limits, note, **more)


_TRAINING: Final = (
    _run("num_agents", "team.num_agents", _SIZE),
    _run("collaboration_mode", "team.collaboration", Limits(choices=("decentralized", "centralized")),
         runs=(*PREFERENCE, "magrpo")),
    _run("num_turns", "data.num_turns", _SIZE, "must be 1; CoMLRL's default is 2 for `magrpo` and the other runs "
         "without preferences", moved=False),
    _run("joint_mode", "data.joint_mode", _TEXT, "must be `aligned`", runs=(*PREFERENCE, *GROUPS), moved=False),
    _run("num_train_epochs", "model.num_train_epochs", _SIZE),
    _run("agent_learning_rate", "model.learning_rate", _RATE),
    _run("dpo_beta", "model.dpo_beta", _RATE, "MADPO only; MARLHF does not use it", runs=PREFERENCE, moved=False),
    _run("max_new_tokens", "sampling.max_new_tokens", _SIZE),
    _run("temperature", "sampling.temperature", Limits("number", at_least=0)),
    _run("top_p", "sampling.top_p", Limits("number", above=0, at_most=1)),
    _run("top_k", "sampling.top_k", _SIZE, "null becomes 50, as transformers reads it; null here would turn the filter "
         "off", null_counts=True, moved=False),
    _run("preference_num_candidates", "data.num_candidates", Limits("integer", at_least=2), runs=PREFERENCE),
    _run("preference_pairs_per_sample", "data.pairs_per_sample", _SIZE, "null keeps all pairs", runs=PREFERENCE,
         null_counts=True),
    _run("pair_selection", "data.pair_selection", Limits(choices=("reward_gap", "random", "all", "comparator_reward")),
         "the last one in iterative runs only", runs=PREFERENCE),
    _run("rollout_buffer_size", "data.rollout_batch_size", _SIZE, "in MADPO the default of `train_batch_size`; in "
         "`maac` and `iac` it counts responses, so it is divided by `num_generations` and rounded up", moved=False),
    _run("train_batch_size", "data.train_batch_size", _SIZE, "MADPO: `data.batch_size`, in pairs; otherwise in task "
         "items, at most the rollout batch; `maac` and `iac` count responses, as above", moved=False),
    _run("logging_steps", "trainer.log_every_n_steps", _SIZE, "there in environment steps, here in updates",
         moved=False),
    _run("eval_interval", "evaluation.interval", _COUNT, "in updates here; in policy learning there in task items",
         moved=False),
    _run("eval_num_samples", "evaluation.num_samples", _COUNT, "0: leave out `data.eval_items`", moved=False),
    _run("eval_batch_size", None, _SIZE, "all evaluation items are sampled together"),
    _run("parallel_training", None, Limits(choices=("none", "mp")), PLACED),
    _run("agent_devices", "trainer.devices", note=f"{_DEVICES}; one device is converted, several are not: {PLACED}",
         moved=False),
    _run("discount", None, _NUMBER, _ONE_TURN),
    _run("early_termination_threshold", None, _NUMBER, _ONE_TURN),
    _run("external_prompt_passthrough", None, _FLAG, _ONE_TURN),
    _run("use_environment_step", None, _FLAG, "`env_step` is logged beside every number", runs=PREFERENCE),
    _run("environment_steps_per_pair", None, _SIZE, "`env_step` counts the joint responses that were sampled",
         runs=PREFERENCE),
)  # fmt: skip

_POLICY: Final = (
    _run("rl_algorithm", "model.rl_algorithm", Limits(choices=(*GROUPS, *CRITICS)), "the section itself in `magrpo`, "
         "`maac` and so on", runs=RLHF),
    _run("num_generations", "model.num_generations", _SIZE, "at least 2 without a critic", runs=(*RLHF, *MARL)),
    _run("advantage_normalization", "model.advantage_normalization", _FLAG, "MADPO has no advantages", moved=False),
    _run("advantage_mode", "model.rl_algorithm", Limits(choices=("mean", "raw", "max", "rloo")), "`mean` is magrpo, "
         "`raw` mareinforce, `max` maremax, `rloo` marloo; no effect in `marlhf`", runs=(*PREFERENCE, *GROUPS),
         moved=False),
    _run("reference_kl_enabled", "reference_kl", _FLAG, "true sets `model.reference_kl`; MADPO has none", moved=False),
    _run("reference_kl_coef", "reference_kl.coef", Limits("number", at_least=0), moved=False),
    _run("reference_devices", "reference_kl.devices", note=_DEVICES, moved=False),
    _run("reward_model_name", "reward_model.model", _TEXT, "default: the agents' model; `team` is an adapter on it",
         runs=RLHF),
    _run("reward_model_device", None, _TEXT, f"on the agents' device; {PLACED}", runs=RLHF),
    _run("reward_learning_rate", "model.reward_learning_rate", _RATE, runs=RLHF),
    _run("reward_num_train_epochs", "model.num_reward_epochs", _SIZE, runs=RLHF),
    _run("reward_train_batch_size", "data.batch_size", _SIZE, "in pairs", runs=RLHF),
    _run("reward_max_length", "reward_model.max_length", Limits("integer", at_least=2), "a longer text loses its "
         "beginning here, its end there", runs=RLHF),
    _run("reward_freeze_backbone", "reward_model.freeze_backbone", _FLAG, runs=RLHF),
    _run("use_separate_critic", "critic", _FLAG, "`iac`: true `SeparateCritics`, false `AttachedCritics`; `maac` has a "
         "`JointCritic`", runs=(*RLHF, "iac"), moved=False),
    _run("critic_model_name", "critic.models", _TEXT, "`model` of a `JointCritic`; default: the agents' own", runs=RLHF,
         moved=False),
    _run("critic_type", "critic.critic_type", Limits(choices=("v", "q")), "`q` needs `num_generations` >= 2 here",
         runs=(*RLHF, *CRITICS), moved=False),
    _run("critic_learning_rate", "model.critic_learning_rate", _RATE, "no effect with `AttachedCritics`",
         runs=(*RLHF, *CRITICS), null_counts=True, moved=False),
    _run("critic_devices", None, note=f"on the agents' device; {PLACED}", runs=(*RLHF, *CRITICS)),
    _run("value_loss_coef", "model.value_loss_coef", _RATE, runs=(*RLHF, *CRITICS), moved=False),
    _run("value_clip_range", "critic.value_clip_range", _RATE, "`AttachedCritics` only; null turns clipping off",
         runs=(*RLHF, "iac"), null_counts=True, moved=False),
    _run("critic_value_head_hidden_dim", None, _SIZE, "heads are linear", runs=(*RLHF, "iac")),
    _run("value_head_hidden_dim", None, _SIZE, "heads are linear", runs=(*RLHF, "iac")),
)  # fmt: skip

_IN_ROUNDS: Final = (
    _run("num_iterations", "model.num_iterations", _SIZE, runs=ROUNDS),
    _run("preference_scoring_reward", "data.preference_scoring_reward", Limits(choices=("task", "reward_model")),
         runs=("marlhf_iter",)),
    _run("preference_replay_mode", "replay", Limits(choices=tuple(REPLAYS)), "a class, below", runs=ROUNDS,
         moved=False),
    _run("preference_replay_k", "replay.k", _SIZE, "`NearestKReplay`", runs=ROUNDS, moved=False),
    _run("preference_replay_lambda", "replay.decay", Limits("number", at_least=0, at_most=1), "`LambdaDecayReplay`",
         runs=ROUNDS, moved=False),
    _run("preference_replay_sample_size", "replay.sample_size", _SIZE, "every class but `CurrentReplay`", runs=ROUNDS,
         moved=False),
    _run("preference_replay_dir", "data.replay_dir", _TEXT, "for this run alone; another run's is refused",
         runs=ROUNDS),
    _run("log_reward_distribution", "distribution", _FLAG, "true adds the callback", runs=ROUNDS, moved=False),
    _run("policy_checkpoint_dir", "history.dirpath", _TEXT, "the policies of a `HistoryComparator`", runs=ROUNDS,
         moved=False),
    _run("comparator_policy", "comparator", Limits(choices=tuple(COMPARATORS)), "a class, below", runs=ROUNDS,
         moved=False),
    _run("comparator_num_candidates", "comparator.num_candidates", _SIZE, runs=ROUNDS, moved=False),
    _run("comparator_generation_mode", "centralized", Limits(choices=("decentralized", "centralized")),
         "`centralized` sets it; the comparator of a centralized team is always centralized", runs=ROUNDS,
         moved=False),
    _run("comparator_centralized_agent_index", "centralized.agent_index", _COUNT, runs=ROUNDS, moved=False),
    _run("comparator_model_name", "comparator.models", _TEXT, "`ModelComparator`: one for all roles", runs=ROUNDS,
         moved=False),
    _run("comparator_agents", "comparator.models", _TEXTS, "`ModelComparator`: one per role", runs=ROUNDS,
         moved=False),
    _run("comparator_devices", "comparator.devices", note=f"{_DEVICES}; `CurrentCopyComparator`, `ModelComparator`, "
         "`HistoryComparator`", runs=ROUNDS, moved=False),
    _run("comparator_history_k", "comparator.k", _SIZE, "`HistoryComparator`", runs=ROUNDS, moved=False),
)  # fmt: skip

_API: Final = tuple(
    _run(f"comparator_api_{name}", ours, limits, note, runs=ROUNDS, moved=False)
    for name, ours, limits, note in (
        ("url", "endpoint.url", _TEXT, ""),
        ("format", "endpoint.format", Limits(choices=(
            "generic", "openai", "anthropic", "openai_responses", "responses", "codex")), ""),
        ("model", "endpoint.model", _TEXT, ""),
        ("max_n_per_request", "endpoint.max_n_per_request", _SIZE, ""),
        ("timeout", "endpoint.timeout", _RATE, "seconds per attempt; `deadline` limits all attempts together"),
        ("headers", "endpoint.headers", _MAP, "`${NAME}` stands for an environment variable"),
        ("key", None, _TEXT, "a key is never an option: put it into an environment variable and name that in "
         "`comparator_api_key_env`"),
        ("key_env", "endpoint.key_env", _TEXT, ""),
        ("key_header", "endpoint.headers", _TEXT, "any other than `Authorization` becomes a header with "
         "`${NAME of the variable}`"),
        ("key_prefix", "endpoint.headers", _TEXT, "likewise any other than `Bearer`"),
        ("response_field", "endpoint.response_field", _TEXT, ""),
        ("extra_body", "endpoint.extra_body", _MAP, ""),
    )
)  # fmt: skip

_MODELS: Final = (
    Name("agent_model", "name", "team.models", _TEXT, "one for all agents", moved=False),
    Name("agent_model", "torch_dtype", "team.dtype", _TEXT, f"{_OWN_TYPE}; reward model, critics and "
         "`ModelComparator` get the same type", moved=False),
    Name("agent_model", "dtype", "team.dtype", _TEXT, "the same", moved=False),
    Name("agent_model", "temperature", "sampling.temperature", Limits("number", at_least=0),
         "the run's own section takes precedence, as for the next two"),
    Name("agent_model", "top_p", "sampling.top_p", Limits("number", above=0, at_most=1)),
    Name("agent_model", "top_k", "sampling.top_k", _SIZE, "null becomes 50", null_counts=True, moved=False),
    Name("agent_model", "type", None, note="the model's own config says it"),
    Name("agent_model", "special_tokens", None, note="set them in the saved tokenizer"),
    Name("agent_model", "attn_implementation", None, note="transformers chooses"),
    Name("agents", "", "team.models", _TEXTS, "one name per agent", moved=False),
    Name("critic_model", "name", "critic.models", _TEXT, "`model` of a `JointCritic`", moved=False),
    Name("critic_model", "torch_dtype", "critic.dtype", _TEXT, "as for the agents", moved=False),
    Name("critic_model", "dtype", "critic.dtype", _TEXT, "the same", moved=False),
    Name("critic_model", "type", None, note="the model's own config says it"),
    Name("critics", "", "critic.models", _TEXTS, "one name for `maac`, one per agent for `iac`", moved=False),
)  # fmt: skip

_OTHERS: Final = (
    *_MODELS,
    Name("dataset", "name", "data.items", _TEXT, "a file as it is, anything else as `datasets:NAME::SPLIT`",
         moved=False),
    Name("dataset", "type", None, note="the reward and the formatters define what an item means"),
    Name("dataset", "train_split", "data.items", _TEXT, "the end of `datasets:NAME::SPLIT`", moved=False),
    Name("dataset", "eval_split", "data.eval_items", _TEXT, "`datasets:NAME::SPLIT` of the same data set",
         moved=False),
    Name("tokenizer", "padding_side", None, note="no result depends on it"),
    Name("seed", "", "data.seed", Limits("integer"), "every draw is a function of it"),
    Name("output", "base_dir", "trainer.default_root_dir", _TEXT),
    Name("output", "verbose", None, _FLAG, "`trainer.enable_progress_bar`"),
    Name("output", "save_final_model", None, _FLAG, "`export/` is always written"),
    Name("output", "save_path", None, _TEXT, "agents are exported to `export/` in the run's directory"),
    Name("reward_processor", "enabled", "reward_processor", _FLAG, "false: none", moved=False),
    Name("reward_processor", "scale_factor", "reward_processor.scale", _NUMBER, moved=False),
    Name("reward_processor", "shift", "reward_processor.shift", _NUMBER, moved=False),
    Name("wandb", "enabled", "logger", note="true or false; false: no `WandbLogger`", moved=False),
    Name("wandb", "mode", "logger.offline", Limits(choices=("online", "offline", "disabled", "shared")),
         "`offline` sets it; `disabled`: no `WandbLogger`", moved=False),
    Name("wandb", "project", "logger.project", _TEXT, moved=False),
    Name("wandb", "name", "logger.name", _TEXT, moved=False),
    Name("wandb", "run_name", "logger.name", _TEXT, "the same", moved=False),
    Name("wandb", "dir", "logger.save_dir", _TEXT, "default: `trainer.default_root_dir`", moved=False),
    Name("wandb", "id", "logger.id", _TEXT, moved=False),
    Name("wandb", "entity", "logger", _TEXT, "in `dict_kwargs`, as the next two", moved=False),
    Name("wandb", "tags", "logger", _TEXTS, moved=False),
    Name("wandb", "resume", "logger", moved=False),
)  # fmt: skip

NAMES: Final[tuple[Name, ...]] = (*_TRAINING, *_POLICY, *_IN_ROUNDS, *_API, *_OTHERS)
"""Every name, in the order of the documentation."""

SECTIONS: Final[frozenset[str]] = frozenset(name.section for name in NAMES) - {"run"}
"""The sections other than that of the run."""


def names_of(section: str) -> dict[str, Name]:
    """The options of a section by name."""
    return {name.name: name for name in NAMES if name.section == section}


def names_table() -> str:
    """The table as Markdown: what `pbrl migrate --names` prints and `docs/migrating.md` holds.

    Example:
        >>> print(names_table().splitlines()[2])
        | `num_agents` | `model.team.num_agents` | an integer >= 1 |
    """
    lines = ["| CoMLRL | here | value and remarks |", "|---|---|---|"]
    for name in NAMES:
        written = name.name if name.section == "run" else f"{name.section}.{name.name}".rstrip(".")
        limits = "" if name.limits.kind == "anything" and not name.limits.choices else str(name.limits)
        lines.append(f"| `{written}` | {name.place()} | {'; '.join(filter(None, (limits, name.note)))} |")
    for option, classes in (("comparator_policy", COMPARATORS), ("preference_replay_mode", REPLAYS)):
        place = "comparator" if classes is COMPARATORS else "replay"
        lines += [f"| `{option}: {value}` | `data.{place}: {name}` | |" for value, name in classes.items()]
    return "\n".join(lines)
