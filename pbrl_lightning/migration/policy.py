"""Critic, reference and loss of a converted run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pbrl_lightning.migration.checkpoint_files import checkpoint_dtype, dtype_name
from pbrl_lightning.migration.names import CRITICS
from pbrl_lightning.migration.rules import devices_of

if TYPE_CHECKING:
    from pbrl_lightning.migration.parts import ConfigParts

_CRITIC_OPTIONS = (
    "use_separate_critic",
    "critic_model_name",
    "critic_type",
    "critic_learning_rate",
    "value_loss_coef",
    "value_clip_range",
)
_SOURCES = (("critics", ""), ("critic_model", "name"))
_COMLRL_RATE, _COMLRL_COEF = 5e-6, 0.1


def add_critic(parts: ConfigParts) -> None:
    """Adds the critic of `maac` and `iac`."""
    algorithm = parts.algorithm
    if algorithm not in CRITICS:
        for name in _CRITIC_OPTIONS:
            parts.leave(name, f"{algorithm} has no critic")
        for section, option in _SOURCES:
            parts.leave_other(section, option, f"{algorithm} has no critic")
        return
    critic = parts.config["critic"]
    if parts.options.get("value_loss_coef") is not None:
        parts.config["model"]["value_loss_coef"] = parts.options["value_loss_coef"]
    if "critic_type" in parts.options:
        critic["critic_type"] = parts.options["critic_type"]
    if algorithm == "iac" and not parts.options.get("use_separate_critic", True):
        parts.classes["critic"] = "AttachedCritics"
        none_of_its_own = "value heads on the actors have no model of their own"
        parts.leave("critic_model_name", none_of_its_own)
        for section, option in _SOURCES:
            parts.leave_other(section, option, none_of_its_own)
        parts.leave("critic_learning_rate", "value heads on the actors train at the actors' rate in CoMLRL as well")
        if "value_clip_range" in parts.options:
            critic["value_clip_range"] = parts.options["value_clip_range"]
        return
    _critic_rate(parts)
    _critic_source(parts)
    parts.leave("value_clip_range", "only the values of heads on the actors are clipped")
    if algorithm == "maac":
        parts.leave("use_separate_critic", "maac has one critic of its own")


def _critic_rate(parts: ConfigParts) -> None:
    rate, model = parts.options.get("critic_learning_rate"), parts.config["model"]
    if rate is not None:
        model["critic_learning_rate"] = rate
        return
    fixed = parts.run == "maac" or (parts.run == "iac" and "critic_learning_rate" not in parts.options)
    if fixed and parts.options.get("agent_learning_rate", _COMLRL_RATE) != _COMLRL_RATE:
        parts.write_defaults({"critic_learning_rate": _COMLRL_RATE})
        model["critic_learning_rate"] = _COMLRL_RATE


def _critic_source(parts: ConfigParts) -> None:
    critic = parts.config["critic"]
    names = parts.others.get(("critics", ""))
    name = parts.others.get(("critic_model", "name")) or parts.options.get("critic_model_name")
    if parts.algorithm == "maac":
        parts.classes["critic"] = "JointCritic"
        source = names[0] if names else name
    else:
        parts.classes["critic"] = "SeparateCritics"
        source = names or name
    if source is not None:
        critic["model" if parts.algorithm == "maac" else "models"] = source
    given = parts.given_dtype("critic_model")
    sources = names or [name or parts.models[0]]
    dtype = (dtype_name(given[1]) or checkpoint_dtype(sources)) if given else parts.config["team"].get("dtype")
    if dtype is not None:
        critic["dtype"] = dtype


def add_loss_options(parts: ConfigParts) -> None:
    """Adds the options that only some losses have."""
    if parts.on_policy:
        parts.leave("dpo_beta", "MARLHF's loss has none")
        if "advantage_normalization" in parts.options:
            parts.config["model"]["advantage_normalization"] = parts.options["advantage_normalization"]
        return
    if "dpo_beta" in parts.options:
        parts.config["model"]["dpo_beta"] = parts.options["dpo_beta"]
    parts.leave("advantage_normalization", "MADPO has no advantages")
    parts.leave("advantage_mode", "MADPO has no advantages")


def add_reference(parts: ConfigParts) -> None:
    """Adds the KL penalty against a reference."""
    names = ["reference_kl_enabled", "reference_kl_coef", "reference_devices"]
    enabled, coef = (
        parts.options.get("reference_kl_enabled", False),
        parts.options.get("reference_kl_coef", _COMLRL_COEF),
    )
    if not enabled and coef == _COMLRL_COEF:
        names.remove("reference_kl_coef")
    if not parts.on_policy:
        for name in names:
            parts.leave(name, "MADPO has no reference in CoMLRL either")
    elif not enabled or not coef:
        for name in names:
            parts.leave(name, "there is no reference unless `model.reference_kl` is given, with a `coef` above 0")
    else:
        parts.config["reference_kl"]["coef"] = coef
        devices = devices_of(parts.options.get("reference_devices"))
        if devices is not None:
            parts.config["reference_kl"]["devices"] = devices
