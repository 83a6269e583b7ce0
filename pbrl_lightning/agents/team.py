"""AgentTeam: N policies with their tokenizers and formatters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from pbrl_lightning.acceleration.precision import AUTO, resolve_auto, warn_if_emulated
from pbrl_lightning.agents.adapters import (
    LoraOptions,
    adapter_active,
    adapter_parameters,
    kept_precise,
    save_adapter,
)
from pbrl_lightning.agents.answering import Draws, answer
from pbrl_lightning.agents.assembly import (
    Agent,
    TeamSettings,
    assemble,
    check_collaboration,
    count_agents,
)
from pbrl_lightning.agents.forward import ContextPair
from pbrl_lightning.agents.loading import expand_sources, vocabulary_of, warn_once, write_directory
from pbrl_lightning.agents.logprobs import ResponseLogps, response_logps
from pbrl_lightning.agents.products import scoring_products
from pbrl_lightning.agents.prompts import Formatter, encode_prompt, gated_item, render_gated, resolve_formatters
from pbrl_lightning.agents.restoring import load_team_weights, team_options
from pbrl_lightning.agents.roles import JointAdapter, JointRoles, TagAdapter
from pbrl_lightning.agents.sampling import SamplingConfig, SamplingFields, replace_fields
from pbrl_lightning.agents.self_check import check_model
from pbrl_lightning.batches import AgentAnswer, TaskItem, TeamSample, TokenBatch
from pbrl_lightning.checkpoints import read_checkpoint
from pbrl_lightning.randomness import Stream
from pbrl_lightning.sharding import deepcopy_detached, in_shares, small_adapter_parameters
from pbrl_lightning.utils.errors import ConfigurationError, raise_together
from pbrl_lightning.utils.options import record_options


class AgentTeam(nn.Module):
    """``N`` causal language models that answer the same task item, each from its own prompt.

    Two kinds of team: full models, one per agent (same or different architectures and tokenizers), or, with
    ``lora``, one frozen backbone with one LoRA adapter per agent. Models are loaded on first use or by
    :meth:`load`, so that a wrong configuration is reported before. The models are always in eval mode: dropout
    would make log-probabilities random.

    Args:
        models: One name for ``num_agents`` separate copies (with ``lora``: for the shared backbone), a list of one
            name or loaded model per agent, or a directory with ``agent_0``, ``agent_1`` … as an export has. Names
            are described in :func:`pbrl_lightning.agents.loading.resolve_source`.
        num_agents: Number of agents; may be left out when ``models`` is a list or such a directory.
        lora: Adapter options; None trains all weights (or the saved adapters that ``models`` names).
        formatters: Task item to prompt, one for all agents or one per agent: a template such as
            ``"Summarise: {prompt}"``, a callable, a :class:`ChatTemplate`, or an import path. Default: ``{prompt}``.
        tokenizers: One for all agents or one per agent; needed when ``models`` holds loaded models.
        dtype: Weights of loaded models: ``float32``, ``bfloat16``, ``float16``, ``float64``, or ``auto``: bfloat16
            where the device multiplies it natively, else float32. The device is the run's; outside of a run that of
            :meth:`load`. A run keeps the choice in its config and checkpoints, and resumes in it anywhere. Adapters
            stay in float32 at least.
        max_prompt_length: Longer prompts are cut on the left, counted and warned of once. Default: what the context
            leaves beside ``max_new_tokens``.
        gradient_checkpointing: Recompute activations in the backward: less memory, about a third more time.
        seed: Seed of new adapters.
        frozen: A team that nothing trains, such as a comparator: agents with the same source share one model.
        collaboration: ``decentralized``: every agent has a policy of its own. ``centralized``: one policy writes the
            responses of all ``num_agents`` roles in one text, which is what it learns from; roles are told apart only
            for the task reward and in evaluation. The team then has one agent, and ``formatters`` are the roles'.
        joint_adapter: How a centralised team is asked for all responses at once, and how they are taken apart; default
            :class:`pbrl_lightning.agents.roles.TagAdapter`.

    Raises:
        ConfigurationError: If counts do not fit together, two agents share a model object, or a formatter is wrong.
    """

    def __init__(
        self,
        models: str | list[Any] | nn.Module,
        *,
        num_agents: int | None = None,
        lora: LoraOptions | None = None,
        formatters: Any = None,
        tokenizers: Any = None,
        dtype: str = "float32",
        max_prompt_length: int | None = None,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        frozen: bool = False,
        collaboration: Literal["decentralized", "centralized"] = "decentralized",
        joint_adapter: JointAdapter | None = None,
    ) -> None:
        record_options(self, locals())
        super().__init__()
        models = expand_sources(models)
        self.roles: JointRoles | None = None
        check_collaboration(collaboration, joint_adapter is not None, models, num_agents)
        if collaboration == "centralized" and num_agents is not None:
            self.roles = JointRoles(resolve_formatters(formatters, num_agents), joint_adapter or TagAdapter())
            formatters, num_agents = self.roles, 1
        count = count_agents(models, num_agents)
        self.formatters = resolve_formatters(formatters, count)
        self.max_prompt_length = max_prompt_length
        self.gradient_checkpointing = gradient_checkpointing
        self.counts: dict[str, int] = {}
        self.backbones = nn.ModuleList()
        self._agents: list[Agent] = []
        self.attached: dict[str, Any] = {}
        self._settings = TeamSettings(models, count, lora, tokenizers, dtype, seed, frozen)
        problems = self._settings.problems()
        if max_prompt_length is not None and max_prompt_length < 1:
            problems.append(f"`max_prompt_length` must be >= 1, got {max_prompt_length}")
        raise_together(problems)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        team: AgentTeam | None = None,
        models: Any = None,
        formatters: Any = None,
        tokenizers: Any = None,
        joint_adapter: JointAdapter | None = None,
        dtype: str | None = None,
    ) -> AgentTeam:
        """The agents of a run's checkpoint, to sample from, evaluate or train on.

        A checkpoint holds the team's options and trained weights. Frozen backbones are loaded by their names, and what
        is no plain data is to be given: models and tokenizers that were objects, formatters that are functions of a
        notebook. Modules that formatters are in must be imported before.

        Args:
            path: A ``.ckpt`` file, or a run's directory for its newest one.
            team: Gets the weights in the place of a new team; needed where the checkpoint holds no options.
            models: Replaces the saved option, as do the others.
            formatters: Item to prompt.
            tokenizers: Of models that are objects.
            joint_adapter: Of a centralized team.
            dtype: Weights of loaded models.

        Raises:
            MissingFileError: If the checkpoint does not exist.
            ConfigurationError: If it has no team, another one, or not all of the options; says what to give.
        """
        file, checkpoint = read_checkpoint(path, "cpu")
        if team is None:
            given = {"models": models, "formatters": formatters, "tokenizers": tokenizers}
            given |= {"joint_adapter": joint_adapter, "dtype": dtype}
            options = team_options(checkpoint, file, {k: value for k, value in given.items() if value is not None})
            team = cls(**options)
        load_team_weights(team.load(), checkpoint, file)
        return team

    @property
    def num_agents(self) -> int:
        """Number of policies ``N``; 1 in a centralised team."""
        return self._settings.num_agents

    def role_view(
        self,
        items: Sequence[TaskItem],
        prompts: list[list[str]],
        completions: list[list[str]],
        counts: dict[str, int] | None = None,
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Prompts and responses by role, as the task reward sees them: those of a centralised team taken apart.

        Args:
            items: ``B`` task items.
            prompts: ``N`` lists of ``B`` prompts.
            completions: ``N`` lists of ``B`` responses.
            counts: Where texts without a tag are counted; None for the team's own counts.

        Returns:
            As many lists as there are roles, of ``B`` prompts and of ``B`` responses.
        """
        if self.roles is None:
            return prompts, completions
        return self.roles.view(items, completions[0], self.counts if counts is None else counts)

    @property
    def dtype(self) -> str:
        """The type of loaded weights, ``auto`` as long as none is chosen."""
        return self._settings.dtype

    @property
    def chooses_dtype(self) -> bool:
        """True if ``dtype`` is ``auto`` and nothing is chosen yet."""
        return self.dtype == AUTO

    def settle_dtype(self, dtype: str) -> None:
        """Takes a type in the place of ``auto``, before the models are loaded."""
        self._settings = replace(self._settings, dtype=dtype)

    def unload(self) -> None:
        """Gives up the weights, so that the next :meth:`load` reads them again; given objects are kept."""
        if not any(isinstance(model, nn.Module) for model in self._settings.models_given()):
            self.backbones, self._agents, self.attached = nn.ModuleList(), [], {}

    def load(self, device: torch.device | str = "cpu") -> Self:
        """Loads models and tokenizers into the CPU's memory; does nothing the second time.

        Args:
            device: Where they will compute, for ``dtype: auto``; :meth:`place` brings them there.
        """
        if not self._agents:
            if self.chooses_dtype:
                self.settle_dtype(resolve_auto(device))
            backbones, self._agents = assemble(self._settings)
            self.backbones.extend(backbones)
            self._check_models()
            if self._settings.frozen:
                self.requires_grad_(False)
            else:
                self._check_ownership()
        return self

    @property
    def shares_one_backbone(self) -> bool:
        """True if every agent is an adapter on the same frozen backbone; known without loading a model."""
        return self._settings.shares_one_backbone()

    def holds(self, model: nn.Module) -> bool:
        """True if one of the agents' models was given as this object."""
        return any(model is given for given in self._settings.models_given())

    def source_name(self, agent: int) -> str | None:
        """The name that the agent's model was given by or says of itself; None for a loaded model without one."""
        return self._settings.source_name(agent)

    def given_name(self, agent: int) -> str | None:
        """The name that the agent's model was given by; None for a loaded model."""
        given = self._settings.models
        model = given[agent] if isinstance(given, list) else given
        return model if isinstance(model, str) else None

    @property
    def is_loaded(self) -> bool:
        """True once the models are in memory."""
        return bool(self._agents)

    @override
    def train(self, mode: bool = True) -> Self:
        # Policies stay in eval mode whatever the trainer asks for: no dropout, in any forward.
        del mode
        return super().train(False)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Reward models and critics may have adapters on the same backbone, too.
        with kept_precise(small_adapter_parameters(self)):
            return super()._apply(fn, recurse)

    def tokenizer(self, agent: int) -> PreTrainedTokenizerBase:
        """The tokenizer of one agent."""
        return self.load()._agents[agent].tokenizer

    def eos_ids(self, agent: int) -> set[int]:
        """Ids that end a response of this agent."""
        return self.load()._agents[agent].eos_ids

    def context_length(self, agent: int) -> int | None:
        """Most positions of the agent's model."""
        return self.load()._agents[agent].context_length

    def model(self, agent: int) -> Any:
        """The agent's causal LM; for an adapter, the shared backbone (use :meth:`active` around it)."""
        backbone = self.load().backbones[self._agents[agent].backbone]
        return backbone.get_base_model() if isinstance(backbone, PeftModel) else backbone

    def backbone(self, agent: int) -> Any:
        """What was loaded for the agent: its model, or the PEFT model that holds its adapter."""
        return self.load().backbones[self._agents[agent].backbone]

    def adapter(self, agent: int) -> str | None:
        """Name of the agent's adapter on its backbone, None for a full model."""
        return self.load()._agents[agent].adapter

    def active(self, agent: int) -> AbstractContextManager[None]:
        """Context in which :meth:`model` speaks as this agent."""
        adapter = self.adapter(agent)
        return nullcontext() if adapter is None else adapter_active(self.backbone(agent), adapter)

    def agent_parameters(self, agent: int) -> dict[str, nn.Parameter]:
        """The agent's trainable parameters, by their name in its backbone."""
        adapter, backbone = self.adapter(agent), self.backbone(agent)
        named = dict(backbone.named_parameters()) if adapter is None else adapter_parameters(backbone, adapter)
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def prompt(self, agent: int, item: TaskItem, item_index: int, formatter: Formatter | None = None) -> str:
        """The prompt text of a task item for one agent, by its own formatter or another one.

        Raises:
            ConfigurationError: If the formatter fails; names the agent and the item.
        """
        try:
            gated = gated_item(item, self.tokenizer(agent))
            if gated is not item:
                warn_once(
                    self.counts,
                    "neutralized_texts",
                    f"task item {item_index} writes out a control token of agent {agent}'s tokenizer (or half a "
                    "character), which is kept as text; further ones are counted as `neutralized_texts`",
                )
            return render_gated(formatter or self.formatters[agent], gated, self.tokenizer(agent))
        except Exception as error:
            raise ConfigurationError(
                f"the formatter of agent {agent} failed on task item {item_index}: {error}"
            ) from error

    def prompt_ids(self, agent: int, text: str, num_response_tokens: int) -> list[int]:
        """Token ids of a prompt, cut on the left to leave room for the response.

        Raises:
            ConfigurationError: If the context has no room for a prompt token, or the model does not know a token.
        """
        ids = encode_prompt(self.tokenizer(agent), text)
        vocabulary = vocabulary_of(self.model(agent))
        if vocabulary is not None and max(ids) >= vocabulary:
            raise ConfigurationError(
                f"agent {agent}'s tokenizer gives the token id {max(ids)}, but its model has {vocabulary} embeddings: "
                "give the tokenizer that belongs to the model, or resize the model's embeddings and save it"
            )
        limits = [limit for limit in (self.max_prompt_length,) if limit is not None]
        context = self.context_length(agent)
        if context is not None:
            if context <= num_response_tokens:
                raise ConfigurationError(
                    f"agent {agent}'s model has {context} positions, which leaves no room for a prompt beside "
                    f"{num_response_tokens} response tokens; lower `max_new_tokens`"
                )
            limits.append(context - num_response_tokens)
        if limits and len(ids) > min(limits):
            warn_once(
                self.counts,
                "truncated_prompts",
                f"a prompt of agent {agent} has {len(ids)} tokens and was cut on the left to {min(limits)}; "
                "further ones are counted as `truncated_prompts`",
            )
            ids = ids[-min(limits) :]
        return ids

    def sample(
        self,
        items: list[TaskItem],
        item_indices: list[int],
        *,
        num_candidates: int,
        sampling: SamplingConfig,
        seed: int,
        stream: Stream,
        step: int = 0,
    ) -> list[TeamSample]:
        """Samples ``num_candidates`` responses of every agent to every item.

        Args:
            items: ``B`` task items.
            item_indices: Their ``B`` indices in the dataset; with the four options below they fix every draw.
            num_candidates: Responses per agent and item.
            sampling: Sampling options.
            seed: The run's seed.
            stream: Random stream.
            step: Round or rollout number.

        Returns:
            ``B`` team samples.
        """
        draws = Draws(num_candidates, sampling, seed, stream, step)
        answers = answer(self, dict(enumerate(self.formatters)), items, item_indices, draws)
        return [TeamSample.of(index, said) for index, *said in zip(item_indices, *answers, strict=True)]

    def generate(
        self,
        items: Iterable[TaskItem | str],
        num_responses: int = 1,
        *,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        **fields: Unpack[SamplingFields],
    ) -> list[list[list[str]]]:
        """The team's responses as texts, the same as ``pbrl sample`` writes with this seed.

        The team is loaded if it is not, and stays on its devices. Global random states are neither used nor changed.

        Args:
            items: Task items: dicts, or texts that become the items' ``prompt``.
            num_responses: Joint responses per item.
            sampling: How responses are sampled; default :class:`SamplingConfig`.
            seed: Every draw is a function of it and of the item's place.
            **fields: Fields of :class:`SamplingConfig` that replace those of ``sampling``: ``temperature``, ``top_p``,
                ``top_k``, ``max_new_tokens``, ``token_budget``, ``dtype``.

        Returns:
            For each item ``num_responses`` joint responses, each a list of one text per agent (of a centralized team:
            per role): ``texts[item][response][agent]``.

        Raises:
            ConfigurationError: If an item is neither a dict nor a text, or a sampling option is unknown or out of
                range.

        Example:
            >>> team = AgentTeam("builtin:tiny", num_agents=2)
            >>> texts = team.generate(["rain", "snow"], num_responses=3, max_new_tokens=4)
            >>> len(texts), len(texts[0]), len(texts[0][0])
            (2, 3, 2)
        """
        from pbrl_lightning.generation import generated_texts, task_items

        tasks = task_items(items)
        if num_responses < 1:
            raise ConfigurationError(f"`num_responses` must be >= 1, got {num_responses}")
        options = replace_fields(sampling or SamplingConfig(), fields)
        return generated_texts(self, tasks, range(len(tasks)), num_responses=num_responses, sampling=options, seed=seed)

    def answer(
        self,
        agent: int,
        formatter: Formatter,
        items: list[TaskItem],
        item_indices: list[int],
        *,
        num_candidates: int,
        sampling: SamplingConfig,
        seed: int,
        stream: Stream,
        step: int = 0,
    ) -> list[AgentAnswer]:
        """What one agent says to prompts of this formatter; the other arguments are those of :meth:`sample`."""
        draws = Draws(num_candidates, sampling, seed, stream, step)
        return answer(self, {agent: formatter}, items, item_indices, draws)[0]

    def score_responses(
        self,
        agent: int,
        batch: TokenBatch,
        score_last_token: bool = True,
        adapted: bool = True,
        with_states: bool = False,
    ) -> ResponseLogps:
        """Log-probabilities of each row's response under one agent, token by token; differentiable.

        Args:
            agent: Index of the agent.
            batch: ``R`` rows of its prompts and responses.
            score_last_token: False leaves out each response's last token.
            adapted: False asks the backbone without the agent's adapter.
            with_states: Whether the hidden states of the rows are asked for.
        """

        def speaking() -> AbstractContextManager[None]:
            return self.active(agent) if adapted else adapter_active(self.backbone(agent), None)

        def contexts() -> ContextPair:
            return nullcontext(), speaking()

        check_model(self.model(agent), f"the model of agent {agent}")
        with speaking(), scoring_products(self.model(agent)):
            return response_logps(
                self.model(agent),
                batch,
                score_last_token=score_last_token,
                layer_context=contexts if self.gradient_checkpointing else None,
                head_context=contexts,
                with_states=with_states,
            )

    def response_logps(self, agent: int, batch: TokenBatch, score_last_token: bool = True) -> Tensor:
        """Summed log-probability of each row's response under one agent, nats, shape ``(R,)``; differentiable."""
        return self.score_responses(agent, batch, score_last_token).sums

    def save(self, directory: Path | str) -> None:
        """Writes ``agent_0``, ``agent_1`` …: directories that plain transformers (or PEFT, for adapters) loads."""
        for agent in range(self.num_agents):

            def write(target: Path, agent: int = agent) -> None:
                adapter, backbone = self.adapter(agent), self.backbone(agent)
                if adapter is None:
                    (deepcopy_detached(backbone) if in_shares(backbone) else backbone).save_pretrained(target)
                else:
                    save_adapter(backbone, adapter, target)
                self.tokenizer(agent).save_pretrained(target)

            write_directory(Path(directory) / f"agent_{agent}", write)

    def frozen_copy(self, devices: list[str] | None = None) -> AgentTeam:
        """A copy with the current weights that nothing trains, agent ``i`` on ``devices[i % len(devices)]``."""
        self.load()
        copy = AgentTeam.__new__(AgentTeam)
        nn.Module.__init__(copy)
        for name in ("formatters", "roles", "max_prompt_length", "gradient_checkpointing", "_settings", "_agents"):
            setattr(copy, name, getattr(self, name))
        copy.counts, copy.attached = {}, {}
        copy.backbones = nn.ModuleList(deepcopy_detached(backbone) for backbone in self.backbones)
        if devices:
            copy.place(devices)
        return copy.requires_grad_(False).train(False)

    def place(self, devices: list[str]) -> None:
        """Moves the models, the ``i``-th to ``devices[i % len(devices)]``."""
        for index, backbone in enumerate(self.load(devices[0]).backbones):
            device = devices[index % len(devices)]
            backbone.to(device)
            warn_if_emulated("`dtype` of the models", next(backbone.parameters()).dtype, device)

    def _check_models(self) -> None:
        """Tries each model once; one that cannot be tried yet, such as float16 on a CPU, is tried at its first use."""
        for place in range(len(self.backbones)):
            agents = [agent for agent, known in enumerate(self._agents) if known.backbone == place]
            name = f"the model of agent{'s' * (len(agents) > 1)} {', '.join(map(str, agents))}"
            check_model(self.model(agents[0]), name)

    def _check_ownership(self) -> None:
        owner: dict[int, int] = {}
        for agent in range(self.num_agents):
            parameters = self.agent_parameters(agent).values()
            if not parameters:
                raise ConfigurationError(f"agent {agent} has no trainable parameters (all have requires_grad=False)")
            for parameter in parameters:
                if owner.setdefault(id(parameter), agent) != agent:
                    raise ConfigurationError(
                        f"agents {owner[id(parameter)]} and {agent} share trainable weights; give them `lora` "
                        "(one adapter each on a frozen backbone) or separate copies"
                    )
