"""Whole runs against a remote comparator: right pairs, nothing paid for twice whatever dies, no key told to anybody."""

import itertools
import json
import logging
import os
import pickle
import random
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

import training_runs as runs
from fake_api import FakeApi, Reply
from pbrl_lightning import ApiComparator, ApiEndpoint
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.journal import CollectionJournal
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.remote import ApiRejectedError, ApiUnavailableError
from pbrl_lightning.rounds import RoundCallback

ROOT = Path(__file__).parent.parent
FORMATS = ("generic", "openai", "anthropic", "openai_responses")
SEVERAL = FORMATS[:2]  # these can ask for several candidates at once
TEMPLATES = ["first {prompt}", "second {prompt}"]
MANY = [{"prompt": letter} for letter in "abcdefghijkl"]
LEFT_OUT = "collect/missing_comparator_responses"


class Notes(Logger):
    """The last value of everything that is logged."""

    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.last = {}

    def log_metrics(self, metrics, step=None):
        self.last |= metrics

    def log_hyperparams(self, *_):
        pass


class Watch(RoundCallback):
    """What the actors say to each item in each round, and the progress that is reported."""

    def __init__(self):
        self.said, self.progress = {}, {}

    def on_round_start(self, trainer, pl_module, round_number):
        options = {"num_candidates": 4, "sampling": runs.SAMPLING, "seed": 0, "stream": "actors", "step": round_number}
        items = trainer.datamodule.items
        samples = pl_module.team.sample(items, list(range(len(items))), **options)
        self.progress[round_number] = []
        self.said[round_number] = [[sample.completions(index) for index in range(4)] for sample in samples]

    def on_collection_progress(self, trainer, pl_module, done, total):
        self.progress[max(self.progress)].append((done, total))


def endpoint(api, api_format="openai", **options):
    waits = {"timeout": 5.0, "max_attempts": 3, "wait_initial": 0.01, "wait_max": 0.02, "max_concurrency": 2}
    return ApiEndpoint(api.url_of(api_format), format=api_format, model="m", **{**waits, **options})


def fit(root, comparator, rounds=1, items=runs.ITEMS):
    """One fit with logs of its own."""
    comparator = ApiComparator(comparator) if isinstance(comparator, ApiEndpoint) else comparator
    watch, notes, logger = Watch(), Notes(), CSVLogger(root, "logs")
    data = runs.make_data(items=items, comparator=comparator, eval_items=None)
    trainer = runs.make_trainer(root, [watch], logger=[logger, notes], max_epochs=-1)
    trainer.fit(runs.make_module(runs.make_team(True, formatters=TEMPLATES), rounds), data)
    return [file["pairs"] for file in runs.round_files(Path(logger.log_dir) / "replay").values()], watch, notes.last


def prompts_of(item):
    return [template.format(**item) for template in TEMPLATES]


def expected_pairs(items, said, texts):
    """The records of a round, from the actors' texts and from the server's by prompt and candidate index."""
    records = []
    for item, own in zip(items, said, strict=True):
        prompts, rows = prompts_of(item), []
        for index in range(4):
            other = [texts.get(prompt, {}).get(index) for prompt in prompts]
            if None not in other:
                rows.append((index, own[index], other, *runs.text_reward(*zip(own[index], other, strict=True))))
        for _, mine, theirs, a, c in sorted(rows, key=lambda row: (-row[4], -abs(row[3] - row[4]), row[0])):
            if a != c:
                record = {
                    "prompts": prompts,
                    "winner_completions": mine if a > c else theirs,
                    "loser_completions": theirs if a > c else mine,
                    "winner_reward": max(a, c),
                    "loser_reward": min(a, c),
                    "candidate_reward_mean": pytest.approx(fmean(score for row in rows for score in row[3:])),
                    "raw_rewards": [max(a, c), min(a, c)],
                    "target_raw_reward": a,
                    "comparator_raw_reward": c,
                }
                records.append(record)
    return records


def texts_by_prompt(requests):
    """What the server said, by prompt and by the place in the order in which it said it."""
    texts = {}
    for seen in requests:
        texts.setdefault(seen.prompt, []).extend(seen.texts)
    return {prompt: dict(enumerate(said)) for prompt, said in texts.items()}


@pytest.mark.parametrize(
    ("api_format", "shape"),
    [*((name, "ok") for name in FORMATS), ("generic", "other_blocks_first"), ("openai", "two_blocks"),
     ("anthropic", "other_blocks_first"), ("anthropic", "two_blocks"), ("openai_responses", "two_blocks")],
)  # fmt: skip
def test_fault_B95_the_servers_texts_meet_the_actors_at_their_index(tmp_path, api_format, shape):
    # Where a request gives one candidate, their order is known when there is one request at a time.
    several = api_format in SEVERAL
    with FakeApi(shape, latency=lambda seen: 0.005 * (seen.number % 3 == 0)) as api:
        target = endpoint(api, api_format, max_concurrency=4 if several else 1)
        found, watch, logged = fit(tmp_path, target, rounds=2)
    count = 6 if several else 24
    assert len(api.requests) == 2 * count
    for number in (1, 2):
        texts = texts_by_prompt(api.requests[(number - 1) * count : number * count])
        assert found[number - 1] == expected_pairs(runs.ITEMS, watch.said[number], texts)
        assert sorted(watch.progress[number])[-1] == watch.progress[number][-1] == (6, 6)
    assert (len(found[0]) > 6, logged["env_step"], logged.get(LEFT_OUT, 0)) == (True, 2 * 3 * (4 + 4), 0)


def ragged(seen):
    """Of four candidates: some null, one refused; all null; one at a time; none."""
    null = {"first a": (1, 2), "second a": (3,), "first b": (0, 1, 2, 3)}.get(seen.prompt)
    if null is None:
        return {"second c": "one", "first d": "empty"}.get(seen.prompt, "ok")
    said = [None if index in null else f"{index} to {seen.prompt}" for index in range(4)]
    refused = {"content": None, "refusal": "I cannot help with that."}
    messages = [refused if index == 2 and text is None else {"content": text} for index, text in enumerate(said)]
    seen.texts = said
    return Reply({"choices": [{"index": index, "message": message} for index, message in enumerate(messages)]})


def nasty(seen):
    said = ["<think>Hm.</think> Rain.", "half \ud83d", "end</s>of", "<think>Hm"]
    return Reply({"choices": [{"index": index, "message": {"content": text}} for index, text in enumerate(said)]})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fault_B92_B108_B110_nasty_answers_are_gated_and_counted(tmp_path):
    with FakeApi(nasty) as api:
        (found,), _, logged = fit(tmp_path / "strip", ApiComparator(endpoint(api)))
        (kept,), _, kept_counts = fit(tmp_path / "keep", ApiComparator(endpoint(api), thoughts="keep"))
    texts = {text for pair in found for side in ("winner", "loser") for text in pair[f"{side}_completions"]}
    assert texts >= {"Rain.", "half \ufffd", "end<\u200b/s>of"}
    assert not any("think" in text for text in texts)
    assert logged["collect/unencodable_texts"] == logged["collect/neutralized_texts"] == 6
    assert (logged["collect/stripped_thoughts"], logged[LEFT_OUT]) == (12, 6)
    assert any("<think>" in text for pair in kept for text in pair["winner_completions"] + pair["loser_completions"])
    assert "collect/stripped_thoughts" not in kept_counts


def test_fault_B96_B98_candidates_that_do_not_come_leave_their_index_out(tmp_path, recwarn):
    items = MANY[:4]
    with FakeApi(ragged) as api:
        (found,), watch, logged = fit(tmp_path, endpoint(api), items=items)
    asked = Counter(seen.prompt for seen in api.requests)
    assert asked == {**{prompt: 1 for item in items for prompt in prompts_of(item)}, "second c": 4, "first d": 2}
    texts = texts_by_prompt(api.requests)
    assert [len(texts[prompt]) for prompt in ("second c", "first d")] == [4, 0]
    assert found == expected_pairs(items, watch.said[1], texts)
    assert {tuple(pair["prompts"]) for pair in found} == {("first a", "second a"), ("first c", "second c")}
    assert logged[LEFT_OUT] == 2 + 1 + 4 + 4
    assert (logged["collect/items_without_comparator"], logged["env_step"]) == (2, 4 * 4 + 1 + 4)
    assert any("no response to task item 1" in str(warning.message) for warning in recwarn)
    assert watch.progress[1][-1] == (8, 8)


@pytest.mark.parametrize("shape", ["null_content", "null_message", "refusal", "empty"])
@pytest.mark.parametrize("api_format", ["generic", "anthropic", "openai_responses"])
def test_fault_B95_B96_an_item_without_answers_costs_only_itself(tmp_path, api_format, shape):
    with FakeApi(lambda seen: shape if seen.prompt == "first b" else "ok") as api:
        (found,), watch, logged = fit(tmp_path, endpoint(api, api_format, max_concurrency=1))
    texts = texts_by_prompt(seen for seen in api.requests if seen.behaviour == "ok")
    assert found == expected_pairs(runs.ITEMS, watch.said[1], texts)
    assert (logged[LEFT_OUT], logged["collect/items_without_comparator"]) == (4, 1)


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_without_any_answer_is_an_error(tmp_path, number):
    answers = ["ok"] * 6 * (number - 1) + ["refusal"]
    with FakeApi(answers) as api, pytest.raises(RuntimeError, match=f"no joint response to any .* round {number}"):
        fit(tmp_path, endpoint(api), rounds=2)


def test_fault_B101_an_empty_prompt_is_not_sent_and_counted(tmp_path):
    with FakeApi() as api:
        formatters = ["{prompt} first", lambda item: {"a": "something", "b": "", "c": " \n"}[item["prompt"]]]
        (found,), watch, logged = fit(tmp_path, ApiComparator(endpoint(api), formatters=formatters))
    assert Counter(seen.prompt for seen in api.requests) == Counter(["a first", "b first", "c first", "something"])
    assert {tuple(pair["prompts"]) for pair in found} == {("first a", "second a")}  # the actors' own
    assert (logged["collect/empty_prompts"], logged["collect/items_without_comparator"]) == (2, 2)
    assert watch.progress[1][-1] == (6, 6)


def test_fault_B99_B100_retries_are_told_and_a_request_without_an_answer_is_left_out(tmp_path, caplog):
    ends = iter(["429", "503", "529", "reset", "silent", "half_json", "error_200"])
    with FakeApi(lambda seen: "500" if seen.prompt == "second b" else next(ends, "ok")) as api:
        (found,), watch, logged = fit(tmp_path, endpoint(api, timeout=1.0, max_attempts=9))
        told = [record for record in caplog.records if record.name.startswith("pbrl_lightning.remote")]
        assert (len(told), {record.levelno for record in told}) == (7 + 8, {logging.WARNING})
        assert all(re.search(rf"attempt \d of 9 at {api.url}", record.getMessage()) for record in told)
        assert all(word in caplog.text for word in ("429", "503", "529", "500", "within 1 s", "no JSON"))
    assert len(api.requests) == 5 + 7 + 9
    texts = texts_by_prompt(seen for seen in api.requests if seen.behaviour == "ok")
    assert found == expected_pairs(runs.ITEMS, watch.said[1], texts)
    assert (len(found) > 3, logged[LEFT_OUT]) == (True, 4)


@pytest.mark.parametrize(
    ("status", "api_format", "error", "change"),
    [("503", "openai", ApiUnavailableError, {}), ("503", "anthropic", ApiUnavailableError, {}),
     ("401", "openai", ApiRejectedError, {}), ("402", "anthropic", ApiRejectedError, {}),
     ("503", "openai", ApiUnavailableError, {"max_concurrency": 1, "timeout": 9.0, "max_attempts": 7})],
)  # fmt: skip
def test_an_endpoint_that_goes_away_stops_the_run_and_what_came_is_kept(tmp_path, status, api_format, error, change):
    well, per_request = [], 4 if api_format in SEVERAL else 1
    with FakeApi(lambda seen: "ok" if well or seen.number < 5 else status) as api:
        with pytest.raises(error, match=f"{status}: (words on|Insufficient)") as raised:
            fit(tmp_path, endpoint(api, api_format), items=MANY)
        assert (raised.value.endpoint, raised.value.status) == (api.url_of(api_format), int(status))
        assert api.url_of(api_format) in str(raised.value)
        # In a row: twice the two at once, with their attempts, and those that were under way.
        assert len(api.requests) <= 5 + (4 if error is ApiRejectedError else (4 + 2) * 3)
        before = len(api.requests)
        well.append(True)
        (found,), watch, _ = fit(tmp_path, endpoint(api, api_format, **change), items=MANY)
        again = len(api.requests) - before - (2 * 4 * len(MANY) / per_request - 5)
        # A refusal stops at once: the one request that was under way beside it may be asked again, and no other.
        assert 0 <= again <= (error is ApiRejectedError)
    assert len({text for seen in api.requests for text in seen.texts}) == 2 * 4 * len(MANY) + again * per_request
    if per_request > 1:
        # An answer that was under way at the refusal is lost: what came last for a prompt counts.
        taken = {seen.prompt: seen for seen in api.requests if seen.texts}
        assert found == expected_pairs(MANY, watch.said[1], texts_by_prompt(taken.values()))
    assert watch.progress[1][-1] == (2 * len(MANY), 2 * len(MANY))


def test_an_answer_that_is_asked_for_again_is_scored_again(tmp_path):
    team = runs.make_team(formatters=TEMPLATES).load()
    with FakeApi() as api:
        collector = Collector(Oracle(runs.text_reward), runs.SAMPLING, 4, "all", None, 0, ApiComparator(endpoint(api)))
        for _ in range(2):
            parts = collector.collect(team, runs.ITEMS, [0, 1, 2], 1, journal=CollectionJournal(tmp_path))
            for path in tmp_path.glob("rank_*.jsonl"):  # one agent's answers are damaged
                lines = path.read_bytes().splitlines(True)
                path.write_bytes(b"".join(line for line in lines if not line.startswith(b'[["answer", 0, 0')))
    for pair in (pair for part in parts for pair in part.pairs):
        scores = runs.text_reward(*zip(pair.winner_completions, pair.loser_completions, strict=True))
        assert scores == [pair.winner_reward, pair.loser_reward]


NURSERY = """
import json, logging, os, sys, traceback
from pbrl_lightning.cli import main

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(job["directory"])
        os.environ.update(job["variables"])
        for descriptor in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        if job["debug"]:
            logging.basicConfig(level=logging.DEBUG)
        code = 1
        try:
            main(job["arguments"])
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def nursery():
    """Starts `pbrl` in processes of its own at the price of one import; a function that starts, and one that waits."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    process = subprocess.Popen([sys.executable, "-c", NURSERY], env={**os.environ, "PYTHONPATH": path}, **pipes)

    def start(directory, arguments, debug=False, **variables):
        job = {"directory": str(directory), "arguments": arguments, "variables": variables, "debug": debug}
        process.stdin.write(json.dumps(job) + "\n")
        return int(process.stdout.readline())

    yield start, lambda: int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


def command(directory, api, api_format, rounds, num_items, **options):
    """A fit whose comparator wins every comparison."""
    (directory / "judged.py").write_text(
        "def score(*texts):\n    return [float(all('text' in t for t in joint)) for joint in zip(*texts)]\n"
    )
    (directory / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in MANY[:num_items]))
    target = vars(endpoint(api, api_format, max_concurrency=4, **options))
    return [
        "fit", "--config", str(ROOT / "configs/debug/madpo_iter.yaml"), "--trainer.default_root_dir=run",
        "--data.items=items.jsonl", "--data.eval_items=items.jsonl", "--data.reward_func=judged.score",
        "--data.num_candidates=4", f"--model.init_args.num_iterations={rounds}",
        f"--model.init_args.team.init_args.formatters={json.dumps(TEMPLATES)}",
        f"--data.comparator={json.dumps({'class_path': 'ApiComparator', 'init_args': {'endpoint': target}})}",
    ]  # fmt: skip


def journalled(directory):
    """Rounds with a journal, and how many answers it holds by prompt."""
    files = sorted(directory.glob("run/journal/round_*/rank_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    keys = [key for key, _ in lines if key[0] == "answer"]
    return {file.parent.name for file in files}, Counter(prompts_of(MANY[key[1]])[key[2]] for key in keys)


@pytest.mark.parametrize(
    ("api_format", "rounds", "kills"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("anthropic", 1, 1), ("anthropic", 2, 6), ("openai", 2, 6))
    ],
)
def test_a_killed_run_pays_for_nothing_twice(tmp_path, nursery, api_format, rounds, kills):
    (start, wait), draw, moments = nursery, random.Random(3), []
    per_request, deadline = 4 if api_format in SEVERAL else 1, time.monotonic() + 60
    needed = rounds * 8 * 2 * 4 // per_request
    with FakeApi(lambda seen: "503" if seen.number % 9 == 4 else "ok", latency=0.06) as api:
        arguments = command(tmp_path, api, api_format, rounds, 8)
        while True:
            checkpoints = sorted(tmp_path.rglob("round_*.ckpt"), key=lambda path: path.stat().st_mtime)
            resume = [f"--ckpt_path={checkpoints[-1]}"] if checkpoints else []
            child, at = start(tmp_path, [*arguments, *resume]), len(api.requests)
            if len(moments) < kills:
                at += draw.randint(2, max(3, needed // (kills + 2)))
                while len(api.requests) < at:
                    assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
                    time.sleep(0.002)
                time.sleep(0.06 * draw.random())
                os.kill(child, signal.SIGKILL)
            if (status := wait()) != signal.SIGKILL:
                break
            time.sleep(0.1)  # what was sent arrives
            moments.append((len(api.requests), *journalled(tmp_path)))
    output = (tmp_path / "output.txt").read_text()
    assert (status, len(moments)) == (0, kills), output
    retries = sum(seen.behaviour == "503" for seen in api.requests)
    assert needed <= len(api.requests) - retries <= needed + 4 * kills
    assert output.count("again in") == pytest.approx(retries, abs=4 * kills)
    for (first, rounds_then, known), (last, rounds_after, _) in itertools.pairwise(moments):
        if rounds_then == rounds_after:
            asked = Counter(seen.prompt for seen in api.requests[first:last] if seen.behaviour == "ok")
            assert all(count * per_request <= 4 - known[prompt] for prompt, count in asked.items())
    files = {path.name: json.loads(path.read_text()) for path in sorted(tmp_path.glob("run/**/iteration_????.json"))}
    assert sorted(files) == [f"iteration_{number:04d}.json" for number in range(1, rounds + 1)]
    by_text = {text: seen.prompt for seen in api.requests for text in seen.texts}
    for file in files.values():
        prompts = [tuple(pair["prompts"]) for pair in file["pairs"]]
        assert (file["num_pairs"], Counter(prompts)) == (32, {tuple(prompts_of(item)): 4 for item in MANY[:8]})
        used = [text for pair in file["pairs"] for text in pair["winner_completions"]]
        assert len(set(used)) == 64
        assert [by_text[text] for text in used] == [prompt for both in prompts for prompt in both]
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["items.jsonl"]  # no journal is left


@pytest.mark.slow
def test_a_key_is_told_to_the_server_and_to_nobody_else(tmp_path, nursery, monkeypatch, caplog):
    (start, wait), told = nursery, {}
    keys = {name: f"sk-canary-{secrets.token_hex(16)}" for name in ("CANARY_KEY", "CANARY_TEAM")}
    secret = {"key_env": "CANARY_KEY", "headers": {"X-Team": "team ${CANARY_TEAM}"}}
    words = " ".join([*keys.values()] * 40)
    with FakeApi() as elsewhere, FakeApi() as api:
        answers = {"ok": "ok", "wrong": Reply({"error": {"message": words, "code": words}}, 401)}
        answers |= {"moved": Reply(b"", 307, {"Location": elsewhere.url_of("openai")}), "page": Reply(words.encode())}
        for name, api.behaviour in answers.items():
            (directory := tmp_path / name).mkdir()
            start(directory, command(directory, api, "openai", 1, 2, **secret), debug=True, **keys)
            assert (wait() == 0) == (name == "ok"), (directory / "output.txt").read_text()
        for name, key in keys.items():
            monkeypatch.setenv(name, key)
        caplog.set_level(logging.DEBUG)
        comparator = ApiComparator(endpoint(api, **secret))
        # A message is cut somewhere: of two such, one is cut within a key.
        for case in itertools.product((0, 21), (200, 401, 429), ("words", "JSON")):
            shifted = "x" * case[0] + words
            api.behaviour = Reply({"error": {"message": shifted}} if case[2] == "JSON" else shifted.encode(), case[1])
            with pytest.raises(RuntimeError) as raised:
                fit(tmp_path / "here", comparator, items=MANY[:1])
            told[str(case)] = f"{caplog.text} {traceback.format_exception(raised.value)} {vars(raised.value)}".encode()
            caplog.clear()
    assert elsewhere.requests == []
    sent = {(seen.headers["authorization"], seen.headers["x-team"]) for seen in api.requests}
    assert sent == {(f"Bearer {keys['CANARY_KEY']}", f"team {keys['CANARY_TEAM']}")}
    told |= {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in told} >= {".ckpt", ".yaml", ".json", ".txt", ".0"}
    told["objects"] = repr([comparator, comparator.endpoint, vars(comparator), pickle.dumps(comparator)]).encode()
    assert [name for name, text in told.items() if any(key[:16].encode() in text for key in keys.values())] == []
