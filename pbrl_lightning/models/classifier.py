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

from pbrl_lightning.agents.loading import Source
from pbrl_lightning.utils.errors import ConfigurationError


def score_head(classifier: Any) -> nn.Linear:
    """The layer of a sequence classifier that gives the one number.

    Raises:
        ConfigurationError: If the architecture has none of the usual form.
    """
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
        raise ConfigurationError(
            f"{type(classifier).__name__} has no head `score` with one output and no bias, which a reward model needs"
        )
    return head


def load_classifier(source: Source, dtype: str) -> tuple[Any, Tensor | None]:
    """A sequence classifier of one output, and its trained head, or None if the source is no reward model.

    Args:
        source: Where from; an adapter is merged into the backbone.
        dtype: Of the weights.

    Raises:
        OSError: If the source cannot be loaded.
        ConfigurationError: If it is a classifier of several outputs, or a saved reward model without its head.
    """
    config = AutoConfig.from_pretrained(source.base)
    is_classifier = any("SequenceClassification" in name for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        raise ConfigurationError(
            f"{source.base!r} is a classifier of {config.num_labels} outputs; a reward model has one"
        )
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # a causal LM has no head, and that is no news here
    transformers_logging.disable_progress_bar()
    try:
        # A trained head is read in full precision; a causal LM has none, and needs no detour over float32.
        first = torch.promote_types(getattr(torch, dtype), torch.float32) if is_classifier else getattr(torch, dtype)
        with torch.random.fork_rng(devices=[]):  # transformers draws a head, even if nobody uses it
            classifier, info = AutoModelForSequenceClassification.from_pretrained(
                source.base, num_labels=1, dtype=first, output_loading_info=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing and (is_classifier or any(not key.startswith("score.") for key in missing)):
        raise ConfigurationError(f"the model {source.base!r} lacks {', '.join(missing[:3])}")
    trained = is_classifier
    if source.adapter is not None:
        trained |= str(PeftConfig.from_pretrained(source.adapter).task_type).endswith("SEQ_CLS")
        classifier = _with_adapter(classifier, source.adapter)
    head = score_head(classifier).weight.detach().clone() if trained else None
    return classifier.to(getattr(torch, dtype)), head


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
    if hasattr(model, "score"):
        return model, score_head(model).weight.detach().clone()
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
