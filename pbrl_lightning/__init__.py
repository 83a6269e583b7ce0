"""Multi-agent preference-based RL of LLM teams on PyTorch Lightning.

The public names are imported when they are first asked for: ``import pbrl_lightning`` alone loads neither torch nor
Lightning, so that ``pbrl --help`` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pbrl_lightning.agents.adapters import LoraOptions
    from pbrl_lightning.agents.prompts import ChatTemplate, PromptTemplate
    from pbrl_lightning.agents.reference import ReferenceKL
    from pbrl_lightning.agents.roles import JointAdapter, TagAdapter
    from pbrl_lightning.agents.sampling import SamplingConfig
    from pbrl_lightning.agents.team import AgentTeam
    from pbrl_lightning.batches import PairBatch, PreferencePair, RolloutBatch
    from pbrl_lightning.comparators.api import ApiComparator
    from pbrl_lightning.comparators.base import CentralizedGeneration, Comparator
    from pbrl_lightning.comparators.history import HistoryComparator
    from pbrl_lightning.comparators.local import CurrentComparator, CurrentCopyComparator, ModelComparator
    from pbrl_lightning.data import PreferenceDataModule
    from pbrl_lightning.losses import bradley_terry_loss, madpo_loss
    from pbrl_lightning.models.critic import AttachedCritics, JointCritic, SeparateCritics
    from pbrl_lightning.models.reward import JointRewardModel
    from pbrl_lightning.modules.joint_reward import JointRewardModule
    from pbrl_lightning.modules.madpo import MADPOModule
    from pbrl_lightning.modules.marl import MARLModule
    from pbrl_lightning.modules.marlhf import MARLHFModule
    from pbrl_lightning.preferences.judges import PairwiseJudge, ScoreJudge
    from pbrl_lightning.preferences.replay import (
        AllHistoryReplay,
        CurrentReplay,
        LambdaDecayReplay,
        NearestKReplay,
        ReplayBuffer,
    )
    from pbrl_lightning.preferences.scoring import PreferenceJudge
    from pbrl_lightning.remote import ApiEndpoint
    from pbrl_lightning.sharding import ShardedStrategy

__all__ = [
    "AgentTeam",
    "AllHistoryReplay",
    "ApiComparator",
    "ApiEndpoint",
    "AttachedCritics",
    "CentralizedGeneration",
    "ChatTemplate",
    "Comparator",
    "CurrentComparator",
    "CurrentCopyComparator",
    "CurrentReplay",
    "HistoryComparator",
    "JointAdapter",
    "JointCritic",
    "JointRewardModel",
    "JointRewardModule",
    "LambdaDecayReplay",
    "LoraOptions",
    "MADPOModule",
    "MARLHFModule",
    "MARLModule",
    "ModelComparator",
    "NearestKReplay",
    "PairBatch",
    "PairwiseJudge",
    "PreferenceDataModule",
    "PreferenceJudge",
    "PreferencePair",
    "PromptTemplate",
    "ReferenceKL",
    "ReplayBuffer",
    "RolloutBatch",
    "SamplingConfig",
    "ScoreJudge",
    "SeparateCritics",
    "ShardedStrategy",
    "TagAdapter",
    "bradley_terry_loss",
    "madpo_loss",
]

_MODULES = {
    "agents.adapters": "LoraOptions",
    "agents.prompts": "ChatTemplate PromptTemplate",
    "agents.reference": "ReferenceKL",
    "agents.roles": "JointAdapter TagAdapter",
    "agents.sampling": "SamplingConfig",
    "agents.team": "AgentTeam",
    "batches": "PairBatch PreferencePair RolloutBatch",
    "comparators.api": "ApiComparator",
    "comparators.base": "CentralizedGeneration Comparator",
    "comparators.history": "HistoryComparator",
    "comparators.local": "CurrentComparator CurrentCopyComparator ModelComparator",
    "data": "PreferenceDataModule",
    "losses": "bradley_terry_loss madpo_loss",
    "models.critic": "AttachedCritics JointCritic SeparateCritics",
    "models.reward": "JointRewardModel",
    "modules.joint_reward": "JointRewardModule",
    "modules.madpo": "MADPOModule",
    "modules.marl": "MARLModule",
    "modules.marlhf": "MARLHFModule",
    "preferences.judges": "PairwiseJudge ScoreJudge",
    "preferences.replay": "AllHistoryReplay CurrentReplay LambdaDecayReplay NearestKReplay ReplayBuffer",
    "preferences.scoring": "PreferenceJudge",
    "remote": "ApiEndpoint",
    "sharding": "ShardedStrategy",
}
"""Public names by their module."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, on first use (PEP 562)."""
    if module := _MODULE_OF.get(name):
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    elif name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
