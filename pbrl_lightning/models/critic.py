"""Critics: what a policy's advantages are measured against.

A critic gives ``C`` values per response: one per agent, or one for the team. ``v`` reads the prompt alone, ``q`` the
prompt and the response.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from pbrl_lightning.acceleration.precision import AUTO
from pbrl_lightning.advantages import CriticType
from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.models.head import ScalarHead, head_dtype
from pbrl_lightning.models.scalar import ScalarModel
from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.utils.options import record_options

Texts = Sequence[Sequence[str]]
Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of what follows it."""


class Critic(nn.Module):
    """Base of the critics.

    Args:
        critic_type: ``v`` or ``q``.
    """

    attached = False
    """True if it reads the actors' own hidden states instead of texts."""

    value_clip_range: float | None = None

    def __init__(self, critic_type: CriticType = "v") -> None:
        super().__init__()
        if critic_type not in get_args(CriticType):
            raise ConfigurationError(f"`critic_type` must be 'v' or 'q', got {critic_type!r}")
        self.critic_type = critic_type

    @abstractmethod
    def bind(self, team: AgentTeam) -> Self:
        """Says whose models are meant where none is named; loads nothing."""

    @abstractmethod
    def load(self, team: AgentTeam) -> Self:
        """Brings the weights into memory; does nothing the second time."""

    @property
    def dtype(self) -> str:
        """The type of the weights that it loads itself."""
        return "float32"

    @property
    def chooses_dtype(self) -> bool:
        """True if ``dtype`` is ``auto`` and nothing is chosen yet."""
        return self.dtype == AUTO

    def settle_dtype(self, dtype: str) -> None:
        """Takes a type in the place of ``auto``."""

    def unload(self) -> None:
        """Gives up the weights, so that the next ``load`` reads them again."""

    @abstractmethod
    def renew(self, round_number: int) -> None:
        """Newly initialised for a round."""

    @abstractmethod
    def trained_parameters(self) -> list[nn.Parameter]:
        """What value learning moves, the actors' weights left out."""

    @override
    def train(self, mode: bool = True) -> Self:
        del mode
        return super().train(False)


class _ScalarModel(ScalarModel):
    role = "critic"


def _options(
    lora: LoraOptions | None,
    freeze_backbone: bool,
    max_length: int | None,
    dtype: str,
    gradient_checkpointing: bool,
    seed: int,
) -> dict[str, Any]:
    return dict(locals())


class TextCritic(Critic):
    """Base of the critics with models of their own, which read texts with their own tokenizers."""

    models: nn.ModuleList
    _options: dict[str, Any]

    @property
    @override
    def dtype(self) -> str:
        return str(self._options["dtype"])

    @override
    def settle_dtype(self, dtype: str) -> None:
        self._options["dtype"] = dtype
        for model in self.models:
            model.settle_dtype(dtype)  # type: ignore[operator]

    @override
    def unload(self) -> None:
        for model in self.models:
            model.unload()  # type: ignore[operator]

    @abstractmethod
    def views(self, texts: Texts) -> list[list[Sequence[str]]]:
        """What each of the ``C`` models sees of ``N`` lists of ``B`` texts: for each model, ``B`` groups of texts."""

    @override
    def load(self, team: AgentTeam) -> Self:
        self.bind(team)
        for model in self.models:
            model.load()  # type: ignore[operator]
        return self

    @override
    def renew(self, round_number: int) -> None:
        for model in self.models:
            model.renew(round_number)  # type: ignore[operator]

    @override
    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for model in self.models for parameter in model.trained_parameters()]  # type: ignore[operator]

    def pad_ids(self) -> list[int]:
        """What fills up the rows of each model."""
        return [model.pad_id for model in self.models]  # type: ignore[misc]

    def rows(self, prompts: Texts, completions: Texts, num_generations: int) -> list[list[Row]]:
        """What the critic reads of a rollout.

        Args:
            prompts: ``N`` lists of ``B`` texts.
            completions: ``N`` lists of ``B * G`` texts, the ``G`` of an item together.
            num_generations: ``G``.

        Returns:
            For each of the ``C`` models ``B`` rows (``v``) or ``B * G`` (``q``).
        """
        found: list[list[Row]] = []
        seen, said = self.views(prompts), self.views(completions)
        for model, model_prompts, model_responses in zip(self.models, seen, said, strict=True):
            rows: list[Row] = []
            for item, item_prompts in enumerate(model_prompts):
                sides = model_responses[item * num_generations : (item + 1) * num_generations]
                prefix, responses = model.joint_tokens(item_prompts, sides if self.critic_type == "q" else [()])  # type: ignore[operator]
                rows += [(prefix, response) for response in responses]
            found.append(rows)
        return found

    @override
    def forward(self, rows: list[TokenBatch], num_generations: int) -> Tensor:
        """Values of shape ``(C, B * G)``; a prompt's value stands for each response to it."""
        values = [model(batch) for model, batch in zip(self.models, rows, strict=True)]
        if self.critic_type == "v":
            values = [value.repeat_interleave(num_generations) for value in values]
        return torch.stack(values)


class JointCritic(TextCritic):
    """One critic for the team, of all prompts (``v``) or all prompts and responses (``q``): MAAC's.

    The options are those of :class:`pbrl_lightning.models.scalar.ScalarModel`.
    """

    def __init__(
        self,
        model: str | nn.Module | None = None,
        *,
        critic_type: CriticType = "v",
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora: LoraOptions | None = None,
        freeze_backbone: bool = False,
        max_length: int | None = None,
        dtype: str = "float32",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        record_options(self, locals())
        super().__init__(critic_type)
        self._options = _options(lora, freeze_backbone, max_length, dtype, gradient_checkpointing, seed)
        self.models = nn.ModuleList([_ScalarModel(model, tokenizer=tokenizer, **self._options)])

    @override
    def bind(self, team: AgentTeam) -> Self:
        self.models[0].bind(team)  # type: ignore[operator]
        return self

    @override
    def views(self, texts: Texts) -> list[list[Sequence[str]]]:
        return [list(zip(*texts, strict=True))]


class SeparateCritics(TextCritic):
    """A critic per agent, of its own prompt (``v``) or prompt and response (``q``): IAC's.

    Args:
        models: One name or ``"team"`` for all, a list of one per agent, or None for each agent's own model.
        critic_type: ``v`` or ``q``.
        tokenizers: One per agent; needed when ``models`` holds loaded models.
        lora: See :class:`pbrl_lightning.models.scalar.ScalarModel`, as all that follow.
        freeze_backbone: Train the heads alone.
        max_length: Longest text.
        dtype: Weights of loaded backbones; ``auto`` as in :class:`pbrl_lightning.agents.team.AgentTeam`.
        gradient_checkpointing: Recompute activations in the backward.
        seed: Seed of heads and adapters.
    """

    def __init__(
        self,
        models: str | list[str | nn.Module] | None = None,
        *,
        critic_type: CriticType = "v",
        tokenizers: list[PreTrainedTokenizerBase] | None = None,
        lora: LoraOptions | None = None,
        freeze_backbone: bool = False,
        max_length: int | None = None,
        dtype: str = "float32",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        record_options(self, locals())
        super().__init__(critic_type)
        self._sources, self._tokenizers = models, tokenizers
        self._options = _options(lora, freeze_backbone, max_length, dtype, gradient_checkpointing, seed)
        _ScalarModel("any", **self._options)  # wrong options are reported before any run
        self.models = nn.ModuleList()

    @override
    def bind(self, team: AgentTeam) -> Self:
        if len(self.models):
            return self
        count = team.num_agents
        sources = self._sources if isinstance(self._sources, list) else [self._sources] * count
        tokenizers: list[Any] = list(self._tokenizers) if self._tokenizers else [None] * count
        if len(sources) != count or len(tokenizers) != count:
            raise ConfigurationError(
                f"the critics' `models` and `tokenizers` must be one per agent ({count}), got {len(sources)} and "
                f"{len(tokenizers)}"
            )
        objects = [id(source) for source in sources if isinstance(source, nn.Module)]
        if len(set(objects)) < len(objects):
            raise ConfigurationError("one model object is given for two critics; give copies")
        for agent, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
            model = _ScalarModel(source, tokenizer=tokenizer, index=agent, **self._options)
            self.models.append(model.bind(team, agent))
        return self

    @override
    def views(self, texts: Texts) -> list[list[Sequence[str]]]:
        return [[(text,) for text in column] for column in texts]


class AttachedCritics(Critic):
    """A value head on each actor's own hidden states: of its last prompt token (``v``) or last response token (``q``).

    The value loss reaches the actor's weights too, with the actor's learning rate.

    Args:
        critic_type: ``v`` or ``q``.
        value_clip_range: How far a value may move from the rollout's before its error is clipped; None clips nothing.
        seed: Seed of the heads.
    """

    attached = True

    def __init__(self, critic_type: CriticType = "v", *, value_clip_range: float | None = 0.2, seed: int = 0) -> None:
        super().__init__(critic_type)
        if value_clip_range is not None and not value_clip_range > 0:
            raise ConfigurationError(f"`value_clip_range` must be > 0 or null (off), got {value_clip_range}")
        self.value_clip_range = value_clip_range
        self.seed = seed
        self.heads = nn.ModuleList()

    @override
    def bind(self, team: AgentTeam) -> Self:
        del team
        return self

    @override
    def load(self, team: AgentTeam) -> Self:
        if len(self.heads):
            return self
        for agent in range(team.load().num_agents):
            model = team.model(agent)
            like = next(model.parameters())
            size = model.get_input_embeddings().embedding_dim
            hidden = getattr(model.config.get_text_config(), "hidden_size", size)
            self.heads.append(ScalarHead(hidden, head_dtype(like), like.device))
        self.renew(1)
        return self

    @override
    def renew(self, round_number: int) -> None:
        for agent, head in enumerate(self.heads):
            head.draw(self.seed, round_number, 2, agent)  # type: ignore[operator]

    @override
    def trained_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @override
    def forward(self, agent: int, states: Tensor, rows: TokenBatch) -> Tensor:
        """Values of one agent's rows.

        Args:
            agent: Index of the agent.
            states: Its hidden states, shape ``(R, T, H)``.
            rows: What they were computed from; every row has a response.

        Returns:
            Shape ``(R,)``.
        """
        first = rows.response_mask.int().argmax(1)
        last = first - 1 if self.critic_type == "v" else first + rows.response_mask.sum(1) - 1
        return self.heads[agent](states[torch.arange(len(states), device=states.device), last])
