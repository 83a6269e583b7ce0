"""Multi-agent preference-based RL of LLM teams on PyTorch Lightning."""

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
