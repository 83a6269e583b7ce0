"""Multi-agent preference-based RL of LLM teams on PyTorch Lightning."""

from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.prompts import ChatTemplate, PromptTemplate
from pbrl_lightning.agents.reference import ReferenceKL
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairBatch, PreferencePair, RolloutBatch
from pbrl_lightning.comparators.base import Comparator
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
from pbrl_lightning.preferences.replay import (
    AllHistoryReplay,
    CurrentReplay,
    LambdaDecayReplay,
    NearestKReplay,
    ReplayBuffer,
)

__all__ = [
    "AgentTeam",
    "AllHistoryReplay",
    "AttachedCritics",
    "ChatTemplate",
    "Comparator",
    "CurrentComparator",
    "CurrentCopyComparator",
    "CurrentReplay",
    "HistoryComparator",
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
    "PreferenceDataModule",
    "PreferencePair",
    "PromptTemplate",
    "ReferenceKL",
    "ReplayBuffer",
    "RolloutBatch",
    "SamplingConfig",
    "SeparateCritics",
    "bradley_terry_loss",
    "madpo_loss",
]
