"""The frozen reference of a policy: the team as it was when the run started."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pbrl_lightning.agents.adapters import adapter_values
from pbrl_lightning.agents.logprobs import ResponseLogps
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.utils.errors import ConfigurationError


@dataclass(frozen=True)
class ReferenceKL:
    """Keeps policies near the team that the run started from: a KL penalty subtracted from each agent's reward.

    Attributes:
        coef: Reward per nat of the sampled KL, above 0.
        devices: Where the reference lives; None for the actors' own devices.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    coef: float = 0.1
    devices: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.coef > 0:
            raise ConfigurationError(
                f"the reference's `coef` must be > 0 (leave `reference_kl` out for none), got {self.coef}"
            )
        if self.devices is not None and not self.devices:
            raise ConfigurationError(
                "the reference's `devices` must name at least one device or be null, got an empty list"
            )


class ReferencePolicies:
    """Log-probabilities under the start of the run. Never a parameter of anything, never in a checkpoint.

    Made right after the team is loaded and before a checkpoint is restored, so that a resumed run has the same one.
    What it costs: nothing for new adapters (they are left out, and the backbone speaks), one copy of the adapters for
    saved ones, one copy of the models otherwise or on other devices.
    """

    def __init__(self, team: AgentTeam, devices: list[str] | None) -> None:
        self._team = team.load()
        self._follows = devices is None
        self._copy: AgentTeam | None = None
        self._values: list[dict[str, Tensor] | None] = []
        adapted = all(team.adapter(agent) is not None for agent in range(team.num_agents))
        if devices is not None or not adapted:
            self._copy = team.frozen_copy(devices)
            return
        for agent in range(team.num_agents):
            start = {name: p.detach().clone() for name, p in team.agent_parameters(agent).items()}
            self._values.append(None if _changes_nothing(start) else start)

    def follow(self) -> None:
        """Puts a copy where the team was put after it was made, and in its precision."""
        if self._copy is not None and self._follows:
            for own, copied in zip(self._team.backbones, self._copy.backbones, strict=True):
                like = next(own.parameters())
                copied.to(like.device, like.dtype)

    def state_dict(self) -> list[dict[str, Tensor] | None]:
        """The start of saved adapters, None where it is read anew: new adapters and full models."""
        return self._values

    def load_state_dict(self, state: list[dict[str, Tensor] | None]) -> None:
        """What :meth:`state_dict` gave."""
        self._values = state

    @torch.no_grad()
    def score_responses(self, agent: int, rows: TokenBatch) -> ResponseLogps:
        """Log-probabilities of the responses under one agent's reference, on the rows' device."""
        device = rows.input_ids.device
        if self._copy is not None:
            there = next(self._copy.backbone(agent).parameters()).device
            scored = self._copy.score_responses(agent, rows.to(there))
            return replace(scored, token_logps=scored.token_logps.to(device), rows=scored.rows.to(device))
        values = self._values[agent]
        if values is not None:
            with adapter_values(self._team.agent_parameters(agent), values):
                return self._team.score_responses(agent, rows)
        return self._team.score_responses(agent, rows, adapted=False)


def _changes_nothing(start: dict[str, Tensor]) -> bool:
    """True if an adapter is plain LoRA whose every update is zero: one factor of each is, of an embedding the first."""
    plain = all(".lora_A." in n or ".lora_B." in n or ".lora_embedding_" in n for n in start)
    zero = ("lora_B", "lora_embedding_A")
    return plain and all(not value.any() for name, value in start.items() if any(factor in name for factor in zero))
