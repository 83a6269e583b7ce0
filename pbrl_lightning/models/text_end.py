"""Whether the texts that a reward model was trained on ended with EOS, as far as what was saved says so.

TRL's reward trainer closes every plain text with EOS. Transformers' causal classifiers read the last token that is not
padding: with a pad token of its own that is EOS, with ``pad_token == eos_token`` the token before it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub.repocard import metadata_load
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

KEY: Final = "joint_text_eos"
"""What this library writes into the configuration of a reward model."""

_TRL_TAG: Final = "reward-trainer"


@dataclass(frozen=True)
class TextEnd:
    """How the texts of a trained reward model ended.

    Attributes:
        eos: True if it was read at an EOS.
        doubt: Why that is not certain, None if it is.
    """

    eos: bool
    doubt: str | None = None


def detect_text_end(
    config: Any, tokenizer: PreTrainedTokenizerBase, saved: list[str], reads_both_ways: bool
) -> TextEnd:
    """Finds out how the texts of a trained classifier ended.

    Args:
        config: The classifier's.
        tokenizer: Of its texts.
        saved: Directories or hub ids that it was loaded from; none for a model in memory.
        reads_both_ways: True for an encoder, whose tokenizer closes every text.
    """
    said = getattr(config, KEY, None)
    if isinstance(said, bool):
        return TextEnd(said)
    if reads_both_ways:
        return TextEnd(True)
    pad, eos = config.pad_token_id, tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if pad is None else pad
    if eos is None or pad == eos:
        return TextEnd(False)
    if not any(_trained_by_trl(source) for source in saved):
        return TextEnd(False, "what trained it is not known, and it has a pad token of its own")
    if tokenizer.chat_template:
        return TextEnd(True, "TRL closes plain texts with EOS, and conversations as their chat template does")
    return TextEnd(True)


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The id of EOS or, for encoders without one, of the separator; empty if there is neither."""
    ids = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return [next(token for token in ids if token is not None)] if any(token is not None for token in ids) else []


def _trained_by_trl(source: str) -> bool:
    """True if the model card beside a model, or beside the run of a checkpoint, is of TRL's reward trainer."""
    directory = Path(source)
    cards = [directory / "README.md"]
    if directory.name.startswith("checkpoint-"):  # the trainer writes its card one level up
        cards.append(directory.parent / "README.md")
    if not directory.is_dir():
        found = cached_file(
            source,
            "README.md",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        cards = [Path(found)] if found is not None else []
    for card in filter(Path.is_file, cards):
        with contextlib.suppress(ValueError, yaml.YAMLError):  # somebody's own card
            tags = (metadata_load(card) or {}).get("tags") or []
            if _TRL_TAG in tags:
                return True
    return False
