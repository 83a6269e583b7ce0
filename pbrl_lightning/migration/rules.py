"""CoMLRL's rules about options that must fit together. What it refuses is refused here, all problems at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from pbrl_lightning.migration.names import CRITICS, GROUPS, MARL, RLHF, ROUNDS
from pbrl_lightning.migration.reading import Reading
from pbrl_lightning.preferences.selection import validate_selection
from pbrl_lightning.remote import ApiEndpoint

Options = Mapping[str, Any]

NEUTRAL = {  # CoMLRL's defaults, which its own examples spell out
    "comparator_api_format": "generic",
    "comparator_api_timeout": 120.0,
    "comparator_api_key_header": "Authorization",
    "comparator_api_key_prefix": "Bearer",
    "comparator_api_response_field": "completions",
    "comparator_centralized_agent_index": 0,
}
_ENDPOINT = (
    "url",
    "format",
    "model",
    "max_n_per_request",
    "timeout",
    "headers",
    "key_env",
    "response_field",
    "extra_body",
)


def says_something(options: Options, name: str) -> bool:
    """True if an option is given and is not the default."""
    value = options.get(name)
    return value is not None and value != NEUTRAL.get(name)


def broken_rules(reading: Reading) -> list[str]:
    """Everything that does not fit together.

    Args:
        reading: The configuration; each value in it is valid.

    Returns:
        A message per problem that names option, value and what is allowed. Problems with an option whose value
        is wrong anyway are left out.
    """
    run, options = reading.run, reading.options
    found = _model_source_rules(reading) + _turn_rules(options) + _device_rules(options)
    if run not in MARL:
        found += _selection_rules(run, options)
    if run in (*RLHF, *MARL):
        found += _policy_rules(reading)
    if run in ROUNDS:
        found += _replay_rules(options) + _comparator_rules(options) + _api_rules(options)
    return [problem for problem in found if not _subjects(problem) & reading.wrong]


def _subjects(problem: str) -> set[str]:
    """The options that a problem is about, and those on whose values it depends."""
    conditions = re.findall(r"`([\w.]+): ", problem)
    return {*re.findall(r"`([\w.]+)`", problem.partition(" must ")[0]), *conditions}


def devices_of(value: Any) -> list[str] | None:
    """A device or a list of them as a list; None if it is neither."""
    devices = value if isinstance(value, list) else [value]
    return devices if devices and all(isinstance(device, str) for device in devices) else None


def algorithm_of(run: str, options: Options) -> str:
    """The policy-gradient algorithm of a run that has one."""
    return options.get("rl_algorithm", "magrpo") if run in RLHF else run


def _model_source_rules(reading: Reading) -> list[str]:
    options, found = reading.options, []
    agents, model = reading.others.get(("agents", "")), reading.others.get(("agent_model", "name"))
    count = options.get("num_agents", 2)
    central = options.get("collaboration_mode") == "centralized"
    if agents is None and model is None:
        found.append("`agent_model.name` or `agents` must name the agents' models, got neither")
    if agents is not None and model is not None and set(agents) != {model}:
        found.append(f"`agents` and `agent_model.name` must not name different models, got {agents} and {model!r}")
    if agents is not None and len(agents) != (1 if central else count):
        wanted = "one model with `collaboration_mode: centralized`" if central else f"one model per agent ({count})"
        found.append(f"`agents` must name {wanted}, got {len(agents)}")
    return found


def _turn_rules(options: Options) -> list[str]:
    found = []
    if options.get("num_turns", 1) != 1:
        found.append(f"`num_turns` must be 1 (runs have one turn), got {options['num_turns']}")
    if options.get("joint_mode", "aligned") != "aligned":
        found.append(f"`joint_mode` must be 'aligned', got {options['joint_mode']!r}")
    return found


def _device_rules(options: Options) -> list[str]:
    found = []
    if options.get("parallel_training") == "mp" and "agent_devices" not in options:
        found.append("`agent_devices` must be given with `parallel_training: mp`, got none")
    for name in ("agent_devices", "reference_devices", "comparator_devices", "critic_devices"):
        if name in options and devices_of(options[name]) is None:
            found.append(f"`{name}` must be a device such as cuda:0 or a list of them, got {options[name]!r}")
    return found


def _selection_rules(run: str, options: Options) -> list[str]:
    rounds = run in ROUNDS
    selection = options.get("pair_selection", "comparator_reward" if rounds else "reward_gap")
    limit = options.get("preference_pairs_per_sample", 4 if rounds else 16)
    try:
        validate_selection(selection, limit, rounds)
    except ValueError as error:
        problem = str(error).replace("`pairs_per_sample`", "`preference_pairs_per_sample`")
        return [problem + ("" if "preference_pairs_per_sample" in options else f" ({limit} is CoMLRL's default)")]
    return []


def _policy_rules(reading: Reading) -> list[str]:
    options, found = reading.options, []
    algorithm = algorithm_of(reading.run, options)
    generations = options.get("num_generations", 1 if reading.run in CRITICS else 4)
    if algorithm in GROUPS and generations < 2:
        found.append(f"`num_generations` must be >= 2 with `{algorithm}`, got {generations}")
    if algorithm in CRITICS and options.get("critic_type") == "q" and generations < 2:
        found.append(f"`num_generations` must be >= 2 with `critic_type: q`, got {generations}")
    critics = reading.others.get(("critics", ""))
    count = 1 if algorithm == "maac" else options.get("num_agents", 2)
    if critics is not None and algorithm in CRITICS and len(critics) != count:
        found.append(f"`critics` must name {count} with `{algorithm}`, got {len(critics)}")
    return found


def _replay_rules(options: Options) -> list[str]:
    mode, found = options.get("preference_replay_mode", "current"), []
    k, decay, size = (options.get(f"preference_replay_{name}") for name in ("k", "lambda", "sample_size"))
    if mode == "current" and k not in (None, 1):
        found.append(f"`preference_replay_k` must be null or 1 with `preference_replay_mode: current`, got {k}")
    if mode in ("all_history", "lambda_decay") and k is not None:
        found.append(f"`preference_replay_k` must be left out with `preference_replay_mode: {mode}` (only nearest_k "
                     f"has it), got {k}")  # fmt: skip
    if mode == "nearest_k" and k is None:
        found.append("`preference_replay_k` must be an integer >= 1 with `preference_replay_mode: nearest_k`, got null")
    if mode != "lambda_decay" and decay is not None:
        found.append(f"`preference_replay_lambda` must be left out with `preference_replay_mode: {mode}` (only "
                     f"lambda_decay has it), got {decay}")  # fmt: skip
    if mode == "lambda_decay" and decay is None:
        found.append("`preference_replay_lambda` must be a number from 0 to 1 with `preference_replay_mode: "
                     "lambda_decay`, got null")  # fmt: skip
    if mode == "current" and size is not None:
        found.append("`preference_replay_sample_size` must be left out with `preference_replay_mode: current` (only "
                     f"nearest_k, all_history and lambda_decay have it), got {size}")  # fmt: skip
    return found


def _comparator_rules(options: Options) -> list[str]:
    policy, count = options.get("comparator_policy", "current"), options.get("num_agents", 2)
    central_team = options.get("collaboration_mode") == "centralized"
    centralized = central_team or options.get("comparator_generation_mode") == "centralized"
    owners = {
        "comparator_history_k": ("history",),
        "comparator_model_name": ("model", "api"),  # the API ignores them
        "comparator_agents": ("model", "api"),
    }
    found = [
        f"`{name}` must be left out with `comparator_policy: {policy}` (only {allowed[0]} has it), "
        f"got {options[name]!r}"
        for name, allowed in owners.items()
        if policy not in allowed and says_something(options, name)
    ]
    if policy == "model":
        found += _model_rules(options, 1 if central_team else count, centralized)
    index = options.get("comparator_centralized_agent_index", 0)
    if central_team and index:
        found.append(
            f"`comparator_centralized_agent_index` must be 0 with `collaboration_mode: centralized`, got {index}"
        )
    elif centralized and index >= count:
        found.append(f"`comparator_centralized_agent_index` must be from 0 to {count - 1}, got {index}")
    return found


def _model_rules(options: Options, count: int, centralized: bool) -> list[str]:
    name, names = options.get("comparator_model_name"), options.get("comparator_agents")
    if name is None and names is None:
        return [
            "`comparator_model_name` or `comparator_agents` must be given with `comparator_policy: model`, got neither"
        ]
    if name is not None and names is not None and set(names) != {name}:
        return [f"`comparator_agents` and `comparator_model_name` must not differ, got {names} and {name!r}"]
    if names is not None and len(names) != count and not (centralized and len(names) == 1):
        return [f"`comparator_agents` must name one model per role ({count}), got {len(names)}"]
    return []


def _api_rules(options: Options) -> list[str]:
    """What an endpoint refuses; keys are looked for with every comparator."""
    found, used = [], options.get("comparator_policy") == "api"
    if used and "comparator_api_url" not in options:
        found.append("`comparator_api_url` must be given with `comparator_policy: api`, got null")
    given = [name for name in ("key_header", "key_prefix") if says_something(options, f"comparator_api_{name}")]
    if used and given and "comparator_api_key_env" not in options:
        found += [f"`comparator_api_{name}` must be left out without `comparator_api_key_env`" for name in given]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ApiEndpoint(**{"url": "http://localhost/", **endpoint_of(options)})
    except ValueError as error:  # shows no key
        problems = [re.sub(r"`(?=\w+[`[])", "`comparator_api_", problem) for problem in str(error).split("; ")]
        found += [problem for problem in problems if used or "key" in problem]
    return found


def endpoint_of(options: Options) -> dict[str, Any]:
    """The options of an :class:`ApiEndpoint`."""
    found = {name: options[key] for name in _ENDPOINT if says_something(options, key := f"comparator_api_{name}")}
    header = options.get("comparator_api_key_header", "Authorization")
    prefix, variable = options.get("comparator_api_key_prefix", "Bearer"), found.get("key_env")
    # Anthropic's header, without a prefix, is our own default for that format.
    usual = (("authorization", "x-api-key"), ("bearer", "")) if found.get("format") == "anthropic" else (
        ("authorization",), ("bearer",))  # fmt: skip
    if variable and (header.lower() not in usual[0] or prefix.lower() not in usual[1]):
        found["headers"] = {**found.get("headers", {}), header: f"{prefix} ${{{variable}}}".strip()}
        found["key_env"] = ""
    return found
