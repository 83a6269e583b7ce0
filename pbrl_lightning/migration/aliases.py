"""Other spellings that CoMLRL takes for the values of an option."""

from __future__ import annotations

from typing import Any, Final

from pbrl_lightning.migration.names import CRITICS, GROUPS

_SPELLINGS: Final[dict[str, dict[str, str]]] = {
    "comparator_policy": {
        "self online": "current",
        "copy online_copy current-offload current_offload": "current_copy",
        "external comparator reference ref": "model",
        "checkpoint previous previous_iteration": "history",
        "http endpoint": "api",
    },
    "comparator_generation_mode": {
        "decentralised multi_agent multi-agent": "decentralized",
        "centralised single_agent single-agent": "centralized",
    },
    "preference_replay_mode": {
        "latest new": "current",
        "recent_k last_k k": "nearest_k",
        "lambda td_lambda td-lambda": "lambda_decay",
    },
    "preference_scoring_reward": {"oracle environment env": "task", "model learned": "reward_model"},
    "comparator_api_format": {"openai_chat chat": "openai", "anthropic_messages messages": "anthropic"},
    "rl_algorithm": {"mareforce": "mareinforce"},
    "parallel_training": {"null": "none"},
    "joint_mode": {"align": "aligned", "crossed": "cross"},
    "pair_selection": {},
    "critic_type": {},
    "advantage_mode": {},
}
"""Option to other spellings, separated by spaces, and what they mean. Case and spaces around them do not count."""

ADVANTAGE_MODES: Final = {"mean": "magrpo", "raw": "mareinforce", "max": "maremax", "rloo": "marloo"}
"""`advantage_mode` of the runs without preferences, and the algorithm it makes of them."""


def canonical(option: str, value: Any) -> Any:
    """A value in the one spelling that the table of names has.

    Args:
        option: The option's name.
        value: Its value, of any type.

    Returns:
        The value as it is where no other spelling exists; None for an empty string.

    Example:
        >>> canonical("preference_replay_mode", "last_k"), canonical("rl_algorithm", "MAGRPO"), canonical("seed", 3)
        ('nearest_k', 'magrpo', 3)
    """
    if option not in _SPELLINGS or not isinstance(value, str):
        return value
    value = value.strip().lower()
    for spellings, meaning in _SPELLINGS[option].items():
        if value in spellings.split():
            return meaning
    return value or None


def run_section(section: Any) -> Any:
    """The section of a run in lower case, as in ``MAGRPO``; any other as it is."""
    lower = section.lower() if isinstance(section, str) else section
    return lower if lower in ("madpo", "madpo_iter", "marlhf", "marlhf_iter", *GROUPS, *CRITICS) else section
