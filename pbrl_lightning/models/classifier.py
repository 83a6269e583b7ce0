"""Transformers' sequence classifiers as the form in which a scalar model's backbone is loaded and saved."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from pbrl_lightning.agents.adapters import check_adapter_files
from pbrl_lightning.agents.loading import Source
from pbrl_lightning.agents.reading import reading
from pbrl_lightning.utils.errors import ConfigurationError


def score_head(classifier: Any) -> nn.Linear:
    """The layer of a sequence classifier that gives the one number.

    Raises:
        ConfigurationError: If the architecture has none of the usual form.
    """
    if not has_score_head(classifier):
        raise ConfigurationError(
            f"{type(classifier).__name__} has no head `score` with one output and no bias, which a reward model needs"
        )
    return classifier.score


def has_score_head(classifier: Any) -> bool:
    """True if the one number is a linear map, without bias, of the last token's state, as for causal models."""
    head = getattr(classifier, "score", None)
    return isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None


def _is_classifier(model: Any) -> bool:
    return "ForSequenceClassification" in type(model).__name__


def _check_kind(name: str, config: Any) -> None:
    """Refuses what cannot give one number for one text."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{name} is an encoder-decoder ({config.model_type}), and a reward model reads prompts and responses as "
            "one text: name a causal language model, or a classifier on an encoder such as BERT's"
        )


def load_classifier(source: Source, dtype: str) -> tuple[Any, Tensor | None]:
    """A sequence classifier of one output, and its trained ``score``; None if the source has none.

    A classifier with another head (:func:`has_score_head`) is in float32 at least and runs its own forward.

    Args:
        source: Where from; an adapter is merged into the backbone.
        dtype: Of the weights.

    Raises:
        OSError: If the source cannot be loaded.
        ConfigurationError: If it is a classifier of several outputs, a saved reward model without its head, or of an
            architecture without a sequence classifier.
    """
    with reading(f"the model {source.base!r}"):
        config = AutoConfig.from_pretrained(source.base)
    _check_kind(repr(source.base), config)
    is_classifier = any("SequenceClassification" in name for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise ConfigurationError(
            f"{source.base!r} is a classifier of {config.num_labels} outputs; a reward model has one"
        )
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigurationError(
            f"{source.base!r} is of the architecture {config.model_type!r}, of which transformers has no sequence "
            "classifier, the form in which reward models and critics are kept; name another `model`"
        )
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # a causal LM has no head, and that is no news here
    transformers_logging.disable_progress_bar()
    try:
        # A trained head is read in full precision; a causal LM has none, and needs no detour over float32.
        first = torch.promote_types(getattr(torch, dtype), torch.float32) if is_classifier else getattr(torch, dtype)
        # Transformers draws a head, even if nobody uses it.
        with torch.random.fork_rng(devices=[]), reading(f"the model {source.base!r}"):
            classifier, info = AutoModelForSequenceClassification.from_pretrained(
                source.base, num_labels=1, dtype=first, output_loading_info=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing and (is_classifier or any(not key.startswith("score.") for key in missing)):
        if not is_classifier and not has_score_head(classifier):
            raise _untrained(source, classifier)
        raise ConfigurationError(f"the model {source.base!r} lacks {', '.join(missing[:3])}")
    trained = is_classifier
    if source.adapter is not None:
        with reading(f"the adapter {source.adapter!r}"):
            check_adapter_files(source.adapter)
            trained |= str(PeftConfig.from_pretrained(source.adapter).task_type).endswith("SEQ_CLS")
            classifier = _with_adapter(classifier, source.adapter)
    if not has_score_head(classifier):
        if not trained:
            raise _untrained(source, classifier)
        return classifier, None  # with its own head, in full precision
    head = score_head(classifier).weight.detach().clone() if trained else None
    return classifier.to(getattr(torch, dtype)), head


def _untrained(source: Source, classifier: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{source.base!r} has no trained head, and a {type(classifier).__name__} needs more than the `score` that a "
        "new reward model gets: name a classifier that was trained with one output, or a causal language model"
    )


def _with_adapter(classifier: Any, directory: str) -> Any:
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 for a property under its old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        try:
            return PeftModel.from_pretrained(classifier, directory).merge_and_unload()
        except KeyError as error:
            raise ConfigurationError(f"the adapter {directory!r} lacks {error} (a reward model's head?)") from error


def has_classifier(model: Any) -> bool:
    """True if transformers has a sequence classifier of a model's architecture."""
    return hasattr(model, "score") or type(model.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def classifier_around(model: Any) -> tuple[Any, Tensor | None]:
    """A sequence classifier with a loaded model's own backbone in it, and the model's head if it is a classifier.

    Raises:
        ConfigurationError: If transformers has no sequence classifier of the architecture.
    """
    _check_kind(f"the {type(model).__name__}", model.config)
    if hasattr(model, "score"):
        return model, score_head(model).weight.detach().clone()
    if _is_classifier(model):
        if model.config.num_labels != 1:
            outputs = model.config.num_labels
            raise ConfigurationError(f"the {type(model).__name__} has {outputs} outputs; a reward model has one")
        return model, None
    config = deepcopy(model.config)  # the model's own stays a language model's
    config.num_labels = 1
    if not has_classifier(model):
        raise ConfigurationError(f"{type(model).__name__} has no sequence classifier in transformers")
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    like = next(model.parameters())
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    size = score_head(classifier).in_features
    classifier.score = nn.Linear(size, 1, bias=False, device=like.device, dtype=like.dtype)
    return classifier, None
