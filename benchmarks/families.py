"""Which model families are read rightly, and how?

    python benchmarks/families.py [--only llama mamba …] [--write docs/models.md]

Every decoder family of the installed transformers, as a tiny random model made from its configuration, is scored and
sampled by this library and compared with its plain forward ``model(input_ids)``, token by token; once as it is, and
once with windows of 16 tokens and texts that are longer, or with 16 positions and texts that fill them. Prints a table,
or writes it into the page between its markers.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.families_parts.tiny import families, tiny_config, tiny_of  # noqa: E402
from pbrl_lightning.agents.decoding import rows_for  # noqa: E402
from pbrl_lightning.agents.forward import reading_of  # noqa: E402
from pbrl_lightning.agents.loading import context_length_of  # noqa: E402
from pbrl_lightning.agents.logprobs import response_logps  # noqa: E402
from pbrl_lightning.agents.self_check import check_model  # noqa: E402
from pbrl_lightning.batches import TokenBatch  # noqa: E402

SHORT = 16
LIMIT = 5e-3
"""Nats by which a token's log-probability may differ in float32. Most differ by 1e-5; in NemotronH and Zamba2
transformers' own scan and single steps differ by 2e-3."""

BEGIN, END = "<!-- families -->", "<!-- /families -->"

_WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size", "local_attention")
_ROTARY = ("llama", "mistral", "qwen2", "phi3", "phimoe", "minicpm3", "smollm3", "olmo2", "gpt_neox")
_ROPES: list[dict[str, Any]] = [
    {"max_position_embeddings": SHORT, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    {
        "max_position_embeddings": 4 * SHORT,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0, 1.0, 1.0, 1.0],
            "long_factor": [4.0, 3.0, 2.0, 1.0],
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            "original_max_position_embeddings": SHORT,
        },
    },
]
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")


@dataclass(frozen=True)
class Row:
    """What was found of one family.

    Attributes:
        family: Transformers' model type.
        scored: ``packed``, ``padded``, ``ids alone`` or ``refused``.
        sampled: ``shared prompts``, ``batched``, ``own cache``, ``recomputed``, or nothing.
        off: Largest difference of a log-probability from the plain forward's, nats.
        windows: The same with windows of 16 tokens, None for a family without.
        positions: The same with 16 positions, None for a family that has no limit.
        ropes: The same with rotary embeddings that change with the length, `dynamic` and `longrope`; None where these
            are not tried.
        why: Why it is refused.
    """

    family: str
    scored: str
    sampled: str = ""
    off: float = 0.0
    windows: float | None = None
    positions: float | None = None
    ropes: float | None = None
    why: str = ""

    @property
    def right(self) -> bool:
        """True if it is refused, or nothing is off."""
        return all(off is None or off <= LIMIT for off in (self.off, self.windows, self.positions, self.ropes))


def row_of(family: str) -> Row:
    """Tries one family."""
    scored = "not built"
    try:
        model = tiny_of(family, **({"num_hidden_layers": 7} if family == "rwkv" else {}))
        scored = "refused"
        reading = check_model(model, "the model")
    except Exception as error:  # each family that cannot be built or read fails in its own way
        return Row(family, scored, why=next(iter(str(error).splitlines()), type(error).__name__))
    with no_warnings():
        scored, off = scores_off(model, [12, 3, 7])
        sampled, sampled_off = samples_off(model, [9, 4], 6)
        scored = scored if reading.padded else "ids alone"
        windows = _limit_off(family, _shrunk(family, _WINDOWS), 40)
        positions = _limit_off(family, _shrunk(family, _POSITIONS), None)
        ropes = [_limit_off(family, options, None) for options in _ROPES] if family in _ROTARY else []
    offs = [off for off in ropes if off is not None]
    return Row(family, scored, sampled, max(off, sampled_off), windows, positions, max(offs, default=None))


@torch.no_grad()
def scores_off(model: PreTrainedModel, lengths: list[int]) -> tuple[str, float]:
    """How rows are read, and the largest difference of a response token's log-probability.

    Two responses to each prompt of these lengths, of which the longer one has as many tokens as the shortest prompt.
    """
    prompts = [list(_ids(length, start=start)) for start, length in enumerate(lengths)]
    said = min(lengths)
    rows = [(prompt, list(_ids(length, start=7 + length))) for prompt in prompts for length in (said, max(1, said - 1))]
    batch = _batch(rows)
    scored = response_logps(model, batch)
    expected = []
    for prompt, response in rows:
        logps = plain_logps(model, prompt + response)
        # A prompt's first token is predicted from nothing, and so is a response's without one.
        places = torch.arange(len(prompt), len(prompt) + len(response))
        expected.append(logps[places - 1, torch.tensor(response)])
    off = (scored.token_logps - torch.cat(expected)).abs().max()
    return "packed" if scored.layout.spans else "padded", float(off)


@torch.no_grad()
def samples_off(model: PreTrainedModel, lengths: list[int], room: int) -> tuple[str, float]:
    """How responses are decoded, and the largest difference of a token's log-probability on the way.

    Two responses to each prompt of these lengths; the first one leaves halfway.
    """
    prompts = [list(_ids(length, start=3 + length)) for length in lengths]
    source = torch.arange(len(prompts)).repeat_interleave(2)
    said = [[_id(5 * step + row) for step in range(room)] for row in range(len(source))]
    texts = [prompts[place] + response for place, response in zip(source.tolist(), said, strict=True)]
    logps = [plain_logps(model, text) for text in texts]
    kind = rows_for(model, max(lengths) + room)
    rows, off, first = kind(model, prompts, source, room), 0.0, 0
    for step in range(room):
        places = [lengths[place] + step - 1 for place in source.tolist()]
        expected = torch.stack([logps[row][places[row]] for row in range(first, len(source))])
        off = max(off, float((rows.logits.float().log_softmax(-1) - expected).abs().max()))
        if step == room // 2 and not first:
            rows.keep(torch.arange(1, len(source)))
            first = 1
        if step + 1 < room:
            rows.step(torch.tensor([response[step] for response in said[first:]]))
    names = {"own_cache": "own cache", "own_positions": "own cache", "recomputed": "recomputed"}
    return names.get(reading_of(model).sampling, "shared prompts" if kind.shares_prompts else "batched"), off


def plain_logps(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Log-probabilities after each token of a text that is read alone, shape ``(T, V)``."""
    logits: Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


def _limit_off(family: str, shrunk: dict[str, Any], width: int | None) -> float | None:
    """Largest difference of rows up to so many tokens, or as many as there are positions, with short limits."""
    if not shrunk:
        return None
    try:
        model = tiny_of(family, **shrunk)
    except Exception:
        return None  # a family that does not know this kind of limit
    try:
        check_model(model, "the model")
        width = width or context_length_of(model)
        if width is None:
            return None
        said = max(1, width // 4)
        off = scores_off(model, [width - said, said])[1]
        return max(off, samples_off(model, [width - said, said], said)[1])
    except Exception as error:
        print(f"{family}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        return float("inf")


def _shrunk(family: str, names: tuple[str, ...]) -> dict[str, int]:
    """The family's limits of these names, made short."""
    config = tiny_config(family)
    found = {}
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # one per layer
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[name] = SHORT
    return found


def _id(number: int) -> int:
    return 5 + (number * 11) % 80


def _ids(length: int, start: int) -> Iterator[int]:
    return (_id(start + 3 * place) for place in range(length))


def _batch(rows: list[tuple[list[int], list[int]]]) -> TokenBatch:
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, said = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        mask[row, :end] = True
        said[row, len(prompt) : end] = True
    return TokenBatch(ids, mask, said)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| family | scored | sampled | off by | windows | positions | ropes |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row.why:
            lines.append(f"| {row.family} | {row.scored} | | | | | |")
            continue
        numbers = ["" if off is None else f"{off:.0e}" for off in (row.off, row.windows, row.positions, row.ropes)]
        lines.append(f"| {' | '.join([row.family, row.scored, row.sampled, *numbers])} |")
    refused = [f"- {row.family}: {row.why}" for row in rows if row.why]
    return "\n".join([*lines, "", "Refused, or not tried:", "", *refused] if refused else lines)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Nothing said inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Prints or writes the table; fails if a family that is not refused is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="model types; default: all")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows = []
    for family in options.only or families():
        with no_warnings():
            rows.append(row_of(family))
        print(rows[-1], flush=True)
    found = table(rows)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        page = "".join([before, BEGIN, "\n\n", found, "\n\n", END, rest.partition(END)[2]])
        options.write.write_text(page, encoding="utf-8")
    else:
        print(found)
    wrong = [row.family for row in rows if not row.right]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
