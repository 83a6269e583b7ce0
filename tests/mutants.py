"""Planted faults: each must make at least one fast test fail. Run by ``make test``, or ``python tests/mutants.py``."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    fault: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "loss sign flipped",
        "losses.py",
        "return -logsigmoid(winner - loser)",
        "return logsigmoid(winner - loser)",
        "tests/test_losses.py",
    ),
    Mutant(
        "winner and loser swapped",
        "preferences/pair_tokens.py",
        "[self.tokens[row].winner[reader] for row in rows] + [self.tokens[row].loser[reader] for row in rows]",
        "[self.tokens[row].loser[reader] for row in rows] + [self.tokens[row].winner[reader] for row in rows]",
        "tests/test_pair_tokens.py",
    ),
    Mutant(
        "other agents' margins not counted",
        "losses.py",
        "bradley_terry_losses(beta * winner_logps.sum(0), beta * loser_logps.sum(0))",
        "bradley_terry_losses(beta * winner_logps[0], beta * loser_logps[0])",
        "tests/test_madpo.py",
    ),
    Mutant(
        "last-token rule off by one",
        "agents/logprobs.py",
        "has_next[:, :-1] = response_mask[:, 1:]",
        "has_next[:, 1:] = response_mask[:, :-1]",
        "tests/test_madpo.py",
    ),
    Mutant(
        "agents at once: a thread without mixed precision",
        "agents/at_once.py",
        'torch.autocast("cpu", dtype=dtype, enabled=mixed)',
        'torch.autocast("cpu", dtype=dtype, enabled=False)',
        "tests/test_at_once.py",
    ),
    Mutant(
        "agents at once: the last agent's gradients for all",
        "agents/at_once.py",
        "torch.autograd.grad(outputs, self.trained[agent], gradients, allow_unused=True)",
        "torch.autograd.grad(outputs, self.trained[-1], gradients, allow_unused=True)",
        "tests/test_at_once.py",
    ),
    Mutant(
        "packed responses see each other",
        "agents/packing.py",
        "own = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()",
        "own = torch.ones(sum(lengths), sum(lengths)).tril().bool()",
        "tests/test_packing.py",
    ),
    Mutant(
        "positions of packed responses not restarted",
        "agents/packing.py",
        "range(pack.shared, pack.shared + len(rest))",
        "range(len(ids) - len(rest), len(ids))",
        "tests/test_packing.py",
    ),
    Mutant(
        "a group of packed responses sees the first of them",
        "agents/packing.py",
        "k[:, :, : span.shared], v[:, :, : span.shared]",
        "k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]",
        "tests/test_packing.py",
    ),
    Mutant(
        "what responses begin with stands once although they differ",
        "agents/packing.py",
        "first, last = min(sequences), max(sequences)",
        "first, last = min(sequences), min(sequences)",
        "tests/test_packing.py",
    ),
    Mutant(
        "recomputed layers of packed rows without their attention",
        "agents/packing.py",
        "_Both(lambda: contexts()[1], lambda: self.reading(decoder))",
        "contexts()[1]",
        "tests/test_packing.py",
    ),
    Mutant(
        "a narrowed last layer without the keys of what is shared",
        "agents/packing.py",
        "keys = own if mask is None else torch.cat([first, own])",
        "keys = own if mask is None else torch.cat([own[: span.shared], own])",
        "tests/test_last_layer.py",
    ),
    Mutant(
        "attention between bfloat16 products is rounded",
        "agents/attention.py",
        'if _EXACT.get() and device == "cpu" and (',
        'if _EXACT.get() and device == "none" and (',
        "tests/test_attention.py",
    ),
    Mutant(
        "padding of a shared prompt is attended to",
        "agents/decoding.py",
        "masked_fill(prompt_mask == 0, -torch.inf)",
        "masked_fill(prompt_mask == 2, -torch.inf)",
        "tests/test_decoding.py",
    ),
    Mutant(
        "rows that stay read another prompt",
        "agents/decoding.py",
        "self._place(self.source[rows])",
        "self._place(self.source[: len(rows)])",
        "tests/test_decoding.py",
    ),
    Mutant(
        "an agent in a shared batch speaks through the first one's adapter",
        "agents/sampling.py",
        "speakers[:] = [adapters[prompt] for prompt in asked]",
        "speakers[:] = [adapters[0] for prompt in asked]",
        "tests/test_decoding.py",
    ),
    Mutant(
        "time counts twice",
        "timing.py",
        "_seconds[_doing[-1]] += now - _since",
        "_seconds[_doing[0]] += now - _since",
        "tests/test_timing.py",
    ),
    Mutant(
        "response mask shifted by one",
        "preferences/pair_tokens.py",
        "response_mask[row, start:end] = True",
        "response_mask[row, start - 1 : end - 1] = True",
        "tests/test_madpo.py",
    ),
    Mutant(
        "an unseeded stream",
        "randomness.py",
        "torch.rand(num_candidates, num_tokens, generator=generator,",
        "torch.rand(num_candidates, num_tokens,",
        "tests/test_sampling.py",
    ),
    Mutant(
        "pair ties kept",
        "preferences/selection.py",
        "if scores[first] == scores[second]:",
        "if scores[first] is scores[second] is None:",
        "tests/test_selection.py",
    ),
    Mutant(
        "replay weights reversed",
        "preferences/replay.py",
        "for age in reversed(range(count))]",
        "for age in range(count)]",
        "tests/test_replay.py",
    ),
    Mutant(
        "prompt cut on the right",
        "agents/team.py",
        "ids = ids[-min(limits) :]",
        "ids = ids[: min(limits)]",
        "tests/test_prompts.py",
    ),
    Mutant(
        "reward head reads the first pad",
        "models/scalar.py",
        "last = (mask * columns).argmax(1)",
        "last = (~mask).int().argmax(1)",
        "tests/test_reward_model.py",
    ),
    Mutant(
        "advantage sign flipped",
        "losses.py",
        "return -(advantages.detach() * logps).sum(0)",
        "return (advantages.detach() * logps).sum(0)",
        "tests/test_rl_losses.py",
    ),
    Mutant(
        "baseline over the batch instead of the group",
        "advantages.py",
        '"magrpo": _centred,',
        '"magrpo": lambda rewards, kept: _centred(rewards, kept, (-2, -1)),',
        "tests/test_advantages.py",
    ),
    Mutant(
        "reward model left trainable in the policy phase",
        "models/reward.py",
        "    @torch.no_grad()\n    def score_texts",
        "    def score_texts",
        "tests/test_reference.py",
    ),
    Mutant(
        "reference KL subtracted from the team's reward",
        "rollouts.py",
        "returns = rewards - self.learner.kl_coef * kl",
        "returns = rewards - self.learner.kl_coef * kl.mean(0).expand_as(kl)",
        "tests/test_reference.py",
    ),
    Mutant(
        "a reference that moves",
        "agents/reference.py",
        "{name: p.detach().clone() for",
        "{name: p.detach() for",
        "tests/test_reference.py",
    ),
    Mutant(
        "candidates of a remote answer given to other indices",
        "remote/client.py",
        "answers = dict(zip(missing, texts, strict=False))",
        "answers = dict(zip(missing[::-1], texts, strict=False))",
        "tests/test_remote.py",
    ),
    Mutant(
        "a key in an error text",
        "remote/client.py",
        "words = short(self.endpoint.redact(provider_words(body)))",
        "words = short(str(data))",
        "tests/test_remote.py",
    ),
    Mutant(
        "contradicting verdicts averaged into a preference",
        "preferences/judges.py",
        "return there if there == 1 - back else 0.5",
        "return there",
        "tests/test_judges.py",
    ),
    Mutant(
        "an untagged text of the comparator kept as empty responses",
        "comparators/centralized.py",
        "            if found is not None:\n",
        "            found = found or [''] * len(self.roles)\n            if found is not None:\n",
        "tests/test_roles.py",
    ),
    Mutant(
        "scores of the journal given to another candidate",
        "preferences/scoring.py",
        "found[row][index] = score",
        "found[row][(index + 1) % 4] = score",
        "tests/test_journal.py",
    ),
    Mutant(
        "a collection begun again from nothing",
        "preferences/journal.py",
        "            self._entries.update(_read(path))\n",
        "            _read(path)\n",
        "tests/test_journal.py",
    ),
    Mutant(
        "a checkpoint that is not synced",
        "durable.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/test_checkpoints.py",
    ),
    Mutant(
        "a test of a program that raises counts as passed",
        "tasks/_examiner.py",
        "        except Exception:\n            outcomes.append(False)",
        "        except Exception:\n            outcomes.append(True)",
        "tests/test_examiner.py",
    ),
    Mutant(
        "a program ends its tests' loop early",
        "tasks/_examiner.py",
        " and not issubclass(kind, StopIteration)",
        "",
        "tests/test_examiner.py",
    ),
    Mutant(
        "a helper without which as much passes counts as used",
        "tasks/coding.py",
        "self._examine(pair.item, _STUB, pair.main).passed < verdict.passed",
        "self._examine(pair.item, _STUB, pair.main).passed <= verdict.passed",
        "tests/test_coding.py",
    ),
    Mutant(
        "what a model wrote stands in the report as it is",
        "report.py",
        "return escape(clean(value))",
        "return clean(value)",
        "tests/test_report.py",
    ),
    Mutant(
        "a model card names a local model by its path",
        "cards/names.py",
        "the local directory {code(path.resolve().name)}",
        "the local directory {code(str(path))}",
        "tests/test_model_cards.py",
    ),
    Mutant(
        "a card that fails ends the run",
        "callbacks/agent_export.py",
        'except Exception as error:\n            rank_zero_warn(f"what',
        'except OSError as error:\n            rank_zero_warn(f"what',
        "tests/test_model_cards.py",
    ),
    Mutant(
        "a conversation loses its history",
        "agents/prompts.py",
        "messages = [*before, {**last,",
        "messages = [{**last,",
        "tests/test_conversations.py",
    ),
    Mutant(
        "a data set's own split is not asked for",
        "dataset_items.py",
        "split=part or split)",
        "split=split)",
        "tests/test_levels.py",
    ),
    Mutant(
        "a reward model is right where the loser scores more",
        "distributions.py",
        "(array > 0).astype",
        "(array < 0).astype",
        "tests/test_report.py",
    ),
    Mutant(
        "a level at the threshold stops the next",
        "tasks/levels.py",
        "            if level < self.threshold:",
        "            if level <= self.threshold:",
        "tests/test_levels.py",
    ),
    Mutant(
        "bfloat16 instructions count though oneDNN may not use them",
        "acceleration/precision.py",
        "if present and max_isa.upper() not in _ISA_WITHOUT[dtype]:",
        "if present:",
        "tests/test_precision.py",
    ),
    Mutant(
        "emulated products are emulated while sampling too",
        "agents/products.py",
        'return torch.float32 if is_emulated(wanted, "cpu") else wanted',
        "return wanted",
        "tests/test_precision.py",
    ),
    Mutant(
        "CoMLRL's responses taken for task items",
        "migration/parts.py",
        "items = rollout_items(rollout, generations)",
        "items = rollout",
        "tests/test_migrate_peer.py",
    ),
]


def survives(mutant: Mutant) -> str | None:
    """None if a test fails because of the fault, else what went wrong. For a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("pbrl_lightning", "callbacks", "tests", "configs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        source = copy / "pbrl_lightning" / mutant.file
        text = source.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return f"the code to change stands {text.count(mutant.old)} times in {mutant.file}, not once"
        source.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        os.chdir(copy)
        os.environ["PYTHONPATH"] = directory
        sys.path.insert(0, directory)
        output = copy / "output.txt"
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(300)  # ends the process, and with it the wait for it
        code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", mutant.tests])
        signal.alarm(0)
        sys.stdout.flush()
        # 1: tests ran and some failed. Anything else (collection errors, nothing run) shows nothing.
        said = output.read_text(encoding="utf-8", errors="replace")
        if code == pytest.ExitCode.TESTS_FAILED and " failed" in said:
            return None
        return f"pytest exit code {code}: {said[-400:]}"


def tried(mutant: Mutant) -> str | None:
    """:func:`survives` in a fork, which has imported already what takes the longest, and nothing of ours."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(survives(mutant)))
    process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return f"the tests ended with {process.exitcode}"


def main() -> int:
    """Tries all mutants, two at a time."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    for name in ("torch", "transformers", "peft", "lightning.pytorch.cli", "torchmetrics", "tensorboard"):
        importlib.import_module(name)
    assert "pbrl_lightning" not in sys.modules
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(tried, MUTANTS))
    for mutant, problem in zip(MUTANTS, results, strict=True):
        print(
            f"{'caught' if problem is None else 'SURVIVED'}  {mutant.fault}{'' if problem is None else ': ' + problem}"
        )
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
