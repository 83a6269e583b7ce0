"""Lightning callbacks of a run; importable as ``pbrl_lightning.callbacks``."""

from pbrl_lightning.callbacks.agent_export import AgentExport
from pbrl_lightning.callbacks.collection_progress import CollectionProgress
from pbrl_lightning.callbacks.comparator_history import ComparatorHistory
from pbrl_lightning.callbacks.graceful_stop import GracefulStop
from pbrl_lightning.callbacks.joint_evaluation import JointEvaluation
from pbrl_lightning.callbacks.reward_distribution import RewardDistribution
from pbrl_lightning.callbacks.round_checkpoint import RoundCheckpoint
from pbrl_lightning.callbacks.round_figures import RoundFigures
from pbrl_lightning.callbacks.round_times import RoundTimes
from pbrl_lightning.callbacks.run_directory import RunDirectory
from pbrl_lightning.callbacks.run_report import RunReport
from pbrl_lightning.callbacks.sample_table import SampleTable

__all__ = [
    "AgentExport",
    "CollectionProgress",
    "ComparatorHistory",
    "GracefulStop",
    "JointEvaluation",
    "RewardDistribution",
    "RoundCheckpoint",
    "RoundFigures",
    "RoundTimes",
    "RunDirectory",
    "RunReport",
    "SampleTable",
]
