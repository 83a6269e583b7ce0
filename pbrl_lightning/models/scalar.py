"""ScalarModel: a causal language model's backbone with one number as its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from peft import inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from pbrl_lightning.acceleration.precision import AUTO, dtype_problem, resolve_auto
from pbrl_lightning.agents.adapters import (
    LoraOptions,
    adapter_active,
    adapter_parameters,
    add_adapter,
    explained,
    kept_precise,
    merge_adapter,
)
from pbrl_lightning.agents.forward import checkpointed_layers
from pbrl_lightning.agents.loading import (
    context_length_of,
    load_tokenizer_of,
    resolve_source,
    vocabulary_of,
    warn_once,
    write_directory,
)
from pbrl_lightning.agents.packing import lay_out
from pbrl_lightning.agents.products import scoring_products
from pbrl_lightning.agents.prompts import encode_prompt, encode_response, joint_prompt, without_end, without_starts
from pbrl_lightning.agents.self_check import check_decoder
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.models.classifier import classifier_around, has_score_head, load_classifier, score_head
from pbrl_lightning.models.head import ClassifierHead, ScalarHead, head_dtype
from pbrl_lightning.models.text_end import KEY as TEXT_END_KEY
from pbrl_lightning.sharding import assign, deepcopy_detached, small_adapter_parameters
from pbrl_lightning.utils.errors import ConfigurationError, RunError
from pbrl_lightning.utils.options import record_options

TEAM = "team"
"""The ``model`` that stands for an adapter of its own on the team's frozen backbone."""


class ScalarModel(nn.Module):
    """Reads a text and gives one number: a head on the hidden state of the last real token.

    The backbone is one of its own, or, with ``model="team"``, the frozen backbone of a LoRA team with one more adapter
    on it. The head has no bias and is float32 at least, like the adapter: in bfloat16 a small learning rate would not
    move them. It is always in eval mode: dropout would make scores random.

    Prompts and responses are tokenized separately and their ids are joined. The text as one string can have other
    tokens at the boundary and therefore another score (:meth:`joint_tokens`).

    Args:
        model: A name (:func:`pbrl_lightning.agents.loading.resolve_source`; also what TRL's reward trainer saved), a
            loaded model, ``"team"``, or None for the agents' own model, loaded once more.
        tokenizer: Needed when ``model`` is a loaded one; otherwise the one beside the model.
        lora: Adapter options; None trains all weights. ``"team"`` needs one and takes the default.
        freeze_backbone: Train the head alone.
        max_length: Longer texts are cut on the left, counted and warned of once. Default: the model's context.
        dtype: Weights of a loaded backbone; ``auto`` as in :class:`pbrl_lightning.agents.team.AgentTeam`.
        joint_text_eos: True if the joint text ends with EOS, for models that were trained so. None: as a loaded reward
            model was trained, where that can be seen (:mod:`pbrl_lightning.models.text_end`); without EOS where the
            head is new.
        gradient_checkpointing: Recompute activations in the backward.
        seed: Seed of the head and of a new adapter.
        index: Its place among several of its role: heads are drawn and adapters named by it.

    Raises:
        ConfigurationError: If options do not fit together.
    """

    role = "reward"
    """Name of its parameter group, and what it is called in errors."""

    def __init__(
        self,
        model: str | nn.Module | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora: LoraOptions | None = None,
        freeze_backbone: bool = False,
        max_length: int | None = None,
        dtype: str = "float32",
        joint_text_eos: bool | None = None,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        index: int = 0,
    ) -> None:
        record_options(self, locals())
        super().__init__()
        shared = isinstance(model, str) and model == TEAM
        checks = [
            (freeze_backbone and lora is not None, "`freeze_backbone` trains the head alone and takes no `lora`"),
            (max_length is not None and max_length < 2, f"`max_length` must be >= 2, got {max_length}"),
            (isinstance(model, nn.Module) and tokenizer is None, "`tokenizer` must be given with a loaded `model`"),
        ]
        problems = [message for wrong, message in checks if wrong]
        if (wrong_dtype := dtype_problem(dtype)) is not None:
            problems.append(wrong_dtype)
        if problems:
            raise ConfigurationError(f"the {self.role} model's options: {'; '.join(problems)}")
        self.shared = shared
        self.lora = lora or (LoraOptions() if shared and not freeze_backbone else None)
        self.freeze_backbone = freeze_backbone
        self.max_length = max_length
        self.dtype = dtype
        self.joint_text_eos = joint_text_eos
        self.closing_ids: list[int] = []
        self.gradient_checkpointing = gradient_checkpointing
        self.seed = seed
        self.adapter_name = f"{self.role}_{index}"
        self.index = index
        self.counts: dict[str, int] = {}
        self.classifier: Any = None
        self.head: ScalarHead | ClassifierHead | None = None
        self._model: Any = model
        self._given_tokenizer = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        # Not registered: the team's weights are the team's, in checkpoints as in parameter lists.
        self._team: tuple[AgentTeam, ...] = ()
        self._initial: dict[str, Tensor] = {}
        self.fitted = False
        self._replaced = False

    def bind(self, team: AgentTeam | None, agent: int = 0) -> Self:
        """Says whose model is meant where none is named; loads nothing.

        Raises:
            ConfigurationError: If no model is named and the agent's has no name, or ``"team"`` is not a LoRA team on
                one backbone.
        """
        if team is not None and isinstance(self._model, nn.Module) and team.holds(self._model):
            raise ConfigurationError(
                f"the {self.role} model is the same object as an agent's model; give a copy or a name, or, on a LoRA "
                f"team, `model: {TEAM}`"
            )
        if self._team or (self._model is not None and not self.shared):
            return self
        if team is None:
            raise ConfigurationError(
                f"the {self.role} model needs `model` (a name or a directory): there is no team here"
            )
        if self.shared:
            if not team.shares_one_backbone:
                raise ConfigurationError(
                    f"the {self.role} model's `model: {TEAM}` needs a LoRA team on one frozen backbone; name a model "
                    "of its own instead"
                )
            self._team = (team,)
        else:
            self._model = team.source_name(agent)
            if self._model is None:
                raise ConfigurationError(
                    f"the {self.role} model needs `model`: agent {agent} is a loaded model without a name to load again"
                )
        return self

    @property
    def chooses_dtype(self) -> bool:
        """True if ``dtype`` is ``auto`` and nothing is chosen yet."""
        return self.dtype == AUTO

    def settle_dtype(self, dtype: str) -> None:
        """Takes a type in the place of ``auto``, before the backbone is loaded."""
        self.dtype = dtype

    def unload(self) -> None:
        """Gives up the weights, so that the next :meth:`load` reads them again; a given object is kept."""
        if isinstance(self._model, nn.Module) or (self.shared and self._team and self._team[0].is_loaded):
            return
        self.classifier, self.head, self._initial = None, None, {}

    @property
    def given_name(self) -> str | None:
        """The name of its model; None for a loaded one."""
        return self._model if isinstance(self._model, str) else None

    @property
    def is_loaded(self) -> bool:
        """True once the weights are in memory."""
        return self.head is not None

    def load(self) -> Self:
        """Loads the backbone and draws what is new; does nothing the second time."""
        if self.is_loaded:
            return self
        if not self._team:
            self.bind(None)
        if self.shared:
            team = self._team[0].load()
            weight = None
            backbone = team.backbone(0)
            if self.lora is not None:
                add_adapter(backbone, self.adapter_name, self.lora, self.seed)
                if (earlier := team.attached.get(self.adapter_name)) is not None:
                    earlier._replaced = True
                team.attached[self.adapter_name] = self
            self._tokenizer = self._given_tokenizer or team.tokenizer(0)
        else:
            self.classifier, weight, self._tokenizer = self._load_own()
        like = self._like()
        if self.classifier is not None and not has_score_head(self.classifier):
            self.head = ClassifierHead(self.classifier)  # trained: a new one is drawn for causal models only
            self.fitted = True
        else:
            self.head = ScalarHead(self._decoder.config.get_text_config().hidden_size, head_dtype(like), like.device)
            if weight is not None:
                self.head.weight.data.copy_(weight)
                self.fitted = True
            else:
                self._draw_head(1)
            check_decoder(self._decoder, f"the {self.role} model")
        self._choose_trainable()
        if self._renews_by_copy:
            self._initial = {name: value.detach().clone() for name, value in self._trained_backbone().items()}
        return self.train(False)

    def _load_own(self) -> tuple[Any, Tensor | None, PreTrainedTokenizerBase]:
        if isinstance(self._model, nn.Module):
            classifier, weight = classifier_around(self._model)
            tokenizer = self._given_tokenizer
        else:
            if self.chooses_dtype:
                self.settle_dtype(resolve_auto("cpu"))  # where it is loaded
            source = resolve_source(str(self._model))
            classifier, weight = load_classifier(source, self.dtype)
            tokenizer = self._given_tokenizer or load_tokenizer_of(source)
        if has_score_head(classifier):
            # The head is ours, in float32; the classifier is the form in which the backbone is kept and saved.
            classifier.score.weight.requires_grad_(False)
        if self.lora is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                base = classifier.base_model
                with explained(base, self.lora):
                    inject_adapter_in_model(self.lora.to_peft(base), base, adapter_name=self.adapter_name)
            for parameter in adapter_parameters(classifier, self.adapter_name).values():
                parameter.data = parameter.data.to(head_dtype(parameter))
        assert tokenizer is not None  # checked in the constructor
        return classifier.eval(), weight, tokenizer

    @property
    def _renews_by_copy(self) -> bool:
        """Full weights of a named model are read again instead: a copy would double the memory."""
        return self.lora is not None or isinstance(self._model, nn.Module)

    def _choose_trainable(self) -> None:
        if self.classifier is not None:
            self.classifier.requires_grad_(False)
        for parameter in self.trained_parameters():
            parameter.requires_grad_(True)

    def _trained_backbone(self) -> dict[str, nn.Parameter]:
        """What is trained below the head, by name."""
        if self.freeze_backbone:
            return {}
        if self.shared:
            return adapter_parameters(self._team[0].backbone(0), self.adapter_name)
        if self.lora is not None:
            return adapter_parameters(self.classifier, self.adapter_name)
        return dict(self.classifier.base_model.named_parameters())

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that reward or value learning moves."""
        assert self.load().head is not None
        return [*self._trained_backbone().values(), *self.head.parameters()]  # type: ignore[union-attr]

    def set_trained(self, trained: bool) -> Self:
        """Says whether what is trained of it (:meth:`trained_parameters`) takes gradients in this run."""
        for parameter in self.trained_parameters():
            parameter.requires_grad_(trained)
        return self

    @torch.no_grad()
    def renew(self, round_number: int) -> None:
        """Newly initialised for a round: backbone as loaded (or a zero adapter), head drawn anew; in place."""
        values: Mapping[str, Tensor] = self.load()._initial
        if not self._renews_by_copy and not self.freeze_backbone:
            values = dict(self._load_own()[0].base_model.named_parameters())
        for name, parameter in self._trained_backbone().items():
            assign(parameter, values[name])
        self._draw_head(round_number)

    def _draw_head(self, round_number: int) -> None:
        assert self.head is not None
        self.head.draw(self.seed, round_number, _ROLES.index(self.role), self.index)

    def joint_tokens(self, prompts: Sequence[str], sides: Sequence[Sequence[str]]) -> tuple[list[int], list[list[int]]]:
        """Token ids of one item's prompts and of several joint responses to it.

        Prompts come first, so that all joint responses of an item begin with the same tokens; prompts and responses are
        tokenised apart, so that no token crosses the border; there is no EOS at the end, unless ``joint_text_eos`` says
        so. All sides get the same prompt
        ids, cut on the left so that the longest side fits; a side that alone is too long is cut on the left as well.
        Both are counted (``truncated_joint_texts``) and warned of once.

        Args:
            prompts: ``N`` texts.
            sides: Joint responses, ``N`` texts each; an empty one stands for none.

        Returns:
            Ids of the prompts, and of each side.
        """
        prefix = encode_prompt(self.tokenizer, joint_prompt(without_starts(self.tokenizer, prompts)))
        ends = self.closing_ids
        responses = [encode_response(self.tokenizer, without_end(self.tokenizer, side)) + ends for side in sides]
        self._check_ids([prefix, *responses])
        limit = self.length_limit
        longest = max(map(len, responses))
        if limit is None or len(prefix) + longest <= limit:
            return prefix, responses
        warn_once(
            self.counts,
            "truncated_joint_texts",
            f"a joint text of {len(prefix) + longest} tokens was cut on the left to the {limit} that the {self.role} "
            "model reads; further ones are counted as `truncated_joint_texts`",
        )
        # An empty side needs a token of the prompt to be read from.
        most = limit if all(responses) else limit - 1
        responses = [ids[-most:] for ids in responses]
        room = limit - max(map(len, responses))
        return prefix[len(prefix) - room :] if room else [], responses

    def _check_ids(self, lists: list[list[int]]) -> None:
        vocabulary = vocabulary_of(self._decoder)
        largest = max(max(ids, default=0) for ids in lists)
        if vocabulary is not None and largest >= vocabulary:
            raise ConfigurationError(
                f"the {self.role} model's tokenizer gives the token id {largest}, but its model has {vocabulary} "
                "embeddings: give the tokenizer that belongs to the model, or resize the model's embeddings and save it"
            )

    @property
    def device(self) -> torch.device:
        """Where its backbone lies."""
        return self.load()._like().device

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the texts that it reads."""
        tokenizer = self.load()._tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def pad_id(self) -> int:
        """Fills up rows; scores do not depend on it."""
        vocabulary = vocabulary_of(self._decoder)
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None and (vocabulary is None or token < vocabulary):
                return int(token)
        return 0

    @property
    def length_limit(self) -> int | None:
        """Most tokens of a text, None if neither the options nor the model name a limit."""
        limits = [self.max_length, context_length_of(self._decoder)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def _decoder(self) -> Any:
        return self._team[0].model(0).base_model if self.shared else self.classifier.base_model

    def _like(self) -> Tensor:
        return next(self._decoder.parameters())

    def _active(self) -> AbstractContextManager[None]:
        if not self.shared:
            return nullcontext()
        backbone = self._team[0].backbone(0)
        return adapter_active(backbone, self.adapter_name if self.lora is not None else None)

    @override
    def train(self, mode: bool = True) -> Self:
        del mode
        return super().train(False)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with kept_precise(small_adapter_parameters(self)):
            return super()._apply(fn, recurse)

    @override
    def forward(self, rows: TokenBatch) -> Tensor:
        """One number per row.

        Args:
            rows: ``R`` texts, padded on either side; the last real token is found from the attention mask.

        Returns:
            Shape ``(R,)``, float32 (float64 for a float64 backbone); differentiable.
        """
        assert self.load().head is not None
        if self._replaced:
            raise RunError(
                f"another {self.role} model took this one's adapter on the team's backbone; save one before loading "
                "the next, and name the saved directory"
            )
        if isinstance(self.head, ClassifierHead):
            return self._by_own_forward(rows)
        decoder, mask = self._decoder, rows.attention_mask
        check_decoder(decoder, f"the {self.role} model")
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = (mask * columns).argmax(1)
        with self._active(), scoring_products(decoder):
            layout = lay_out(decoder, rows, None if self.gradient_checkpointing else columns == last[:, None])
            recomputing = layout.recomputing(decoder, lambda: (nullcontext(), self._active()))
            checkpointing = checkpointed_layers(decoder, recomputing) if self.gradient_checkpointing else nullcontext()
            with checkpointing, layout.reading(decoder):
                states = layout.states(decoder)
        return self.head(layout.pick(states, torch.arange(len(last), device=last.device), last))  # type: ignore[misc]

    def _by_own_forward(self, rows: TokenBatch) -> Tensor:
        """Scores as the classifier itself gives them: encoders read in both directions and pool as they were trained.

        Rows are padded on the right, as :func:`pbrl_lightning.preferences.pair_tokens.collate_rows` has them.
        """
        config = self.classifier.config
        if config.pad_token_id is None:
            config.pad_token_id = self.pad_id
        ids = rows.input_ids.masked_fill(~rows.attention_mask, config.pad_token_id)
        recomputing = checkpointed_layers(self.classifier, lambda: (nullcontext(), nullcontext()))
        with recomputing if self.gradient_checkpointing else nullcontext():
            logits = self.classifier(input_ids=ids, attention_mask=rows.attention_mask.long()).logits
        return logits[:, 0].to(head_dtype(logits))

    def save(self, directory: Path | str) -> None:
        """Writes it so that ``AutoModelForSequenceClassification.from_pretrained`` loads it; adapters are merged."""
        assert self.load().head is not None
        if self.shared:
            classifier, _ = classifier_around(deepcopy_detached(self._team[0].backbone(0)).get_base_model())
        else:
            classifier = deepcopy_detached(self.classifier)
        if self.lora is not None:
            classifier.to(torch.promote_types(self._like().dtype, torch.float32))  # merged without rounding
        merge_adapter(classifier, self.adapter_name)
        if isinstance(self.head, ScalarHead):
            score = score_head(classifier)
            score.weight.data = self.head.weight.data.detach().to(score.weight.device)
        classifier.config.pad_token_id = self.pad_id
        setattr(classifier.config, TEXT_END_KEY, bool(self.closing_ids))
        classifier.config.num_labels = 1

        def write(target: Path) -> None:
            classifier.save_pretrained(target)
            self.tokenizer.save_pretrained(target)

        write_directory(Path(directory), write)


_ROLES = ("reward", "critic")
