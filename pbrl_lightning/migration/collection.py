"""Replay and comparator of a converted run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pbrl_lightning.migration.names import COMPARATORS, REPLAYS
from pbrl_lightning.migration.rules import devices_of, endpoint_of, says_something

if TYPE_CHECKING:
    from pbrl_lightning.migration.parts import ConfigParts


def add_replay(parts: ConfigParts) -> None:
    """Adds the replay buffer and what is drawn from it."""
    mode = parts.options.get("preference_replay_mode", "current")
    parts.classes["replay"] = REPLAYS[mode]
    for option in {"nearest_k": ("k", "sample_size"), "lambda_decay": ("lambda", "sample_size"),
                   "all_history": ("sample_size",)}.get(mode, ()):  # fmt: skip
        value = parts.options.get(f"preference_replay_{option}")
        if value is not None:
            parts.config["replay"]["decay" if option == "lambda" else option] = value


def add_comparator(parts: ConfigParts) -> None:
    """Adds the comparator."""
    options, policy = parts.options, parts.options.get("comparator_policy", "current")
    devices = devices_of(options.get("comparator_devices"))
    if policy == "current_copy" and devices is None:
        parts.leave("comparator_policy", "a copy on the actors' own devices is the current policy: "
                   "CurrentComparator")  # fmt: skip
        policy = "current"
    parts.classes["comparator"] = COMPARATORS[policy]
    comparator = parts.config["comparator"]
    if devices is not None and policy not in ("current", "api"):
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
    _ignored_by_comparator(parts, policy)
    central_team = options.get("collaboration_mode") == "centralized"
    if options.get("comparator_generation_mode") == "centralized" and not central_team:
        comparator["centralized"] = {"agent_index": options.get("comparator_centralized_agent_index", 0)}
    elif says_something(options, "comparator_centralized_agent_index"):
        parts.leave("comparator_centralized_agent_index", "no effect with decentralized generation")
    if policy == "history" and says_something(options, "policy_checkpoint_dir"):
        parts.config["history"]["dirpath"] = options["policy_checkpoint_dir"]
    else:
        parts.leave("policy_checkpoint_dir", "policies are kept for a `HistoryComparator` only")


def _ignored_by_comparator(parts: ConfigParts, policy: str) -> None:
    """What CoMLRL takes and does not use."""
    why = f"no effect with `comparator_policy: {policy}` in CoMLRL either"
    if policy in ("current", "api"):
        parts.leave("comparator_devices", why)
    if policy == "api":
        parts.leave("comparator_model_name", why)
        parts.leave("comparator_agents", why)
        return
    for name in parts.options:
        if name.startswith("comparator_api_") and says_something(parts.options, name):
            parts.leave(name, why)
