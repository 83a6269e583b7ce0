"""Models and tokenizers from names, directories, GGUF files, adapter directories and the built-in tiny model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from pbrl_lightning.agents.reading import reading
from pbrl_lightning.durable import held
from pbrl_lightning.importing import package_file
from pbrl_lightning.timing import spending
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, MissingModelError, UserError, file_error

TINY = "builtin:tiny"
LETTERS = "builtin:letters"
"""Name of a random 2-layer Llama with a byte tokenizer, for tests and ``configs/debug``."""


@dataclass(frozen=True)
class Source:
    """Where one policy comes from.

    Attributes:
        base: Hub id or local directory of the full model.
        adapter: Directory of a LoRA adapter on it, or None.
    """

    base: str
    adapter: str | None = None


def cache_directory() -> Path:
    """Where converted models are kept: ``$PBRL_CACHE``, else ``~/.cache/pbrl_lightning``."""
    root = os.environ.get("PBRL_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "pbrl_lightning"


def resolve_source(name: str) -> Source:
    """Finds out what a model name stands for; converts what plain transformers cannot train from.

    Args:
        name: A hub id; a local directory with a model or a LoRA adapter; a ``.gguf`` file or a directory that holds
            just one; ``package:NAME/FILE`` for a file inside an installed package; ``builtin:tiny``, or
            ``builtin:letters``, which speaks text alone. GGUF weights are dequantised once
            into :func:`cache_directory`, and adapters name that directory as their base.

    Raises:
        MissingFileError: If a path or a package's file does not exist.
        ConfigurationError: If a directory holds neither a model nor an adapter.
    """
    if name == TINY:
        return Source(_materialised("tiny", _save_tiny))
    if name == LETTERS:
        return Source(_materialised("letters", _save_letters))
    if name.startswith("package:"):
        name = str(package_file(name))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return Source(_dequantised(path))
    if not path.is_dir():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise MissingFileError(f"the model directory {name!r} does not exist")
        return Source(name)
    if (path / "adapter_config.json").exists():
        return Source(_base_of(path), str(path))
    if (path / "config.json").exists():
        return Source(str(path))
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return Source(_dequantised(gguf[0]))
    raise ConfigurationError(
        f"the directory {name!r} holds no model: it needs a config.json, an adapter_config.json or one .gguf file"
    )


def _base_of(adapter: Path) -> str:
    """The full model below an adapter, which may name another adapter's directory as its base."""
    chain: list[Path] = []
    while True:
        chain.append(adapter.resolve())
        name = _named_base(adapter)
        adapter = Path(name).expanduser()
        if not (adapter / "adapter_config.json").exists():
            return resolve_source(name).base
        if adapter.resolve() in chain:
            through = " → ".join(str(path) for path in [*chain, adapter.resolve()])
            raise ConfigurationError(
                f"the adapter {str(chain[0])!r} has no full model below it: following `base_model_name_or_path` leads "
                f"back to an adapter ({through}); name the model's directory or hub id there"
            )


def _named_base(adapter: Path) -> str:
    file = adapter / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is no JSON that can be read: {error}") from error
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise ConfigurationError(
            f"{file} must name the adapter's base in `base_model_name_or_path`, a hub id or a directory, got {base!r}"
        )
    return base


def expand_sources(models: Any) -> Any:
    """A directory that holds ``agent_0``, ``agent_1`` … (an export, a history checkpoint) as the list of these."""
    if isinstance(models, (list, tuple)):
        return [str(model) if isinstance(model, Path) else model for model in models]
    if isinstance(models, Path):
        models = str(models)
    if isinstance(models, str) and (Path(models) / "agent_0").is_dir():
        found = {path.name for path in Path(models).iterdir() if re.fullmatch(r"agent_\d+", path.name)}
        missing = sorted({f"agent_{index}" for index in range(len(found))} - found)
        if missing:
            raise ConfigurationError(
                f"the directory {models!r} lacks {', '.join(missing)}; it has {', '.join(sorted(found))}"
            )
        return [str(Path(models) / f"agent_{index}") for index in range(len(found))]
    return models


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers inside: a run has one of its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_model(name: str, dtype: str) -> PreTrainedModel:
    """A causal LM in eval mode.

    Raises:
        MissingModelError: If it is neither a local directory nor to be had from the hub.
        ConfigurationError: If its files are damaged, or of an architecture that is not known.
    """
    try:
        with _quiet(), reading(f"the model {name!r}"):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except OSError as error:
        raise MissingModelError(
            f"the model {name!r} is neither a local directory nor to be had from the hub: {error}"
        ) from error
    return model.eval()


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a model.

    Raises:
        MissingModelError: If there is none.
    """
    # A directory without tokenizer files makes AutoTokenizer invent an empty one for some architectures.
    path = Path(directory)
    if path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES):
        raise MissingModelError(
            f"the model directory {directory!r} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            "save the tokenizer there too, or pass `tokenizers`"
        )
    with reading(f"the tokenizer of {directory!r}"):
        return AutoTokenizer.from_pretrained(directory)


def load_tokenizer_of(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer beside an adapter or, if it was saved without one, its base's.

    Raises:
        MissingModelError: If there is none.
    """
    if source.adapter is not None:
        try:
            return load_tokenizer(source.adapter)
        except OSError:
            pass
    return load_tokenizer(source.base)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@spending("saving")
def write_directory(target: Path, write: Callable[[Path], None], *, replace: bool = True) -> None:
    """Writes a directory under a temporary name and renames it, so that a half-written one is never found.

    Args:
        target: Where it goes.
        write: Fills the directory that it is given.
        replace: False keeps a directory that another process has put there meanwhile (and may be reading).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with held(temporary):
            (temporary / "new").mkdir()
            with _quiet():
                write(temporary / "new")
            try:
                if replace and target.exists():
                    target.rename(temporary / "old")
                (temporary / "new").rename(target)
            except OSError:
                if (temporary / "old").exists():
                    (temporary / "old").rename(target)
                if replace or not target.exists():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def eos_ids_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a response: the generation config may name several."""
    ids: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return ids


def context_length_of(model: Any) -> int | None:
    """Most positions the model has, or None if it does not say.

    Where the configuration says that positions are read otherwise beyond some length (`longrope`), it is that length: a
    token's logits would depend on how long its text becomes.
    """
    config = getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in _POSITIONS]
    limits = [next((limit for limit in limits if limit), None), switch_of(config), _learned_positions(model)]
    return min((limit for limit in limits if limit), default=None)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")


def switch_of(config: Any) -> int | None:
    """Tokens up to which `longrope` reads positions in one way, or None."""
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    lengths = [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((length for length in lengths if length), default=None)


def _learned_positions(model: Any) -> int | None:
    """Positions in the table of a model of RoBERTa's kind, whose first ones are of padding."""
    modules = dict(model.named_modules()) if hasattr(model, "named_modules") else {}
    tables = [module for name, module in modules.items() if name.endswith("position_embeddings")]
    sizes = [(table.num_embeddings, table.padding_idx) for table in tables if isinstance(table, torch.nn.Embedding)]
    return min((size - padding - 1 for size, padding in sizes if padding is not None), default=None)


def vocabulary_of(model: Any) -> int | None:
    """How many token ids the model can read, or None if it does not say."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(embeddings, "num_embeddings", None)


def _materialised(key: str, save: Callable[[Path], None]) -> str:
    target = cache_directory() / key
    if not (target / "config.json").exists():
        try:
            write_directory(target, save, replace=False)
        except OSError as error:
            if isinstance(error, UserError):
                raise
            message = (
                f"`PBRL_CACHE` must be a directory that can be written to, got {cache_directory()}: {error.strerror}"
            )
            raise file_error(error, message) from error
    return str(target)


def _save_here(model: Any, directory: Path) -> None:
    # In several processes transformers writes in the first alone. Here any may be the first to need the files, and each
    # machine has a cache of its own.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(directory)


def _dequantised(path: Path) -> str:
    if not path.exists():
        raise MissingFileError(f"the GGUF file {str(path)!r} does not exist")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)

    def save(directory: Path) -> None:
        from transformers import GgufConfig

        source, file = str(path.parent), path.name
        with reading(f"the GGUF file {str(path)!r}"):
            model = AutoModelForCausalLM.from_pretrained(
                source, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        _save_here(model, directory)
        tokenizer.save_pretrained(directory)

    return _materialised(f"{path.stem}-{digest.hexdigest()[:12]}", save)


def tiny_tokenizer(letters: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, with ``<s>``, ``</s>`` and ``<pad>``; 259 tokens. Adds BOS to a text.

    Args:
        letters: Printable ASCII and the newline alone, 99 tokens: what is sampled is always text, and becomes the same
            tokens again. A lone byte does not: it is decoded to U+FFFD, whatever it was.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if letters:
        alphabet = [*filter(str.isascii, alphabet), "Ċ", "Ġ"]  # newline and space
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )


def tiny_model(seed: int = 0, vocab_size: int = 259) -> LlamaForCausalLM:
    """A random Llama (hidden 64, 2 layers, 4 heads, 512 positions) for the byte tokenizer; float32, eval mode."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def _save_tiny(directory: Path) -> None:
    _save_here(tiny_model(), directory)
    tiny_tokenizer().save_pretrained(directory)


def _save_letters(directory: Path) -> None:
    tokenizer = tiny_tokenizer(letters=True)
    _save_here(tiny_model(vocab_size=len(tokenizer)), directory)
    tokenizer.save_pretrained(directory)


def warn_once(counts: dict[str, int], key: str, message: str) -> None:
    """Counts an event, and warns of its first occurrence."""
    counts[key] = counts.get(key, 0) + 1
    if counts[key] == 1:
        warnings.warn(message, stacklevel=3)
