"""The page of results is what its numbers say, and the script that makes it resumes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from benchmarks.results_parts import page, plots, record
from benchmarks.results_parts.rows import ROWS, TABLES, Row
from benchmarks.results_parts.running import digest_of
from benchmarks.results_parts.server import serving
from benchmarks.results_parts.summary import Summary
from benchmarks.results_parts.why import WHY
from pbrl_lightning import AgentTeam
from pbrl_lightning.agents.prompts import encode_response
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.tasks.coordination import close_last_letters

ROOT = Path(__file__).parent.parent
RESULTS = record.read(ROOT / "docs/results.json")
PAGE = (ROOT / "docs/results.md").read_text(encoding="utf-8")
ROW = Row("sparse", "a row", "configs/debug/madpo_iter.yaml")


def entry(seed, before, after, error=0.01, name=ROW.name):
    numbers = {"before": before, "after": after, "gain": after - before, "error": error, "samples": 8, "seconds": 1.0}
    curve = [[0, before], [4 * (1 + seed), after], [8, after]]
    return {"name": name, "seed": seed, "digest": "", "curve": curve, "hardware": "1 core", **numbers}


def test_the_page_is_what_its_numbers_give():
    assert page.render(PAGE, RESULTS) == PAGE


def test_the_numbers_are_those_of_the_configurations_and_rows_that_there_are():
    digests = {row.name: digest_of(row) for row in ROWS}
    assert {key[0] for key in RESULTS} <= digests.keys()
    assert [key for key, run in RESULTS.items() if run["digest"] != digests[key[0]]] == []


def test_every_row_stands_in_the_page_with_its_command():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert f"\n| {row.title} | " in PAGE
        assert f"\n{row.command(0)}\n" in PAGE
        assert (ROOT / row.config).exists()


def test_what_does_not_learn_has_a_reason_and_reasons_are_of_rows():
    assert page.NO_REASON not in PAGE
    assert WHY.keys() <= {row.name for row in ROWS}


def test_learning_is_claimed_beyond_two_errors_alone():
    gains = Summary(ROW, [entry(0, 0.2, 0.5), entry(1, 0.2, 0.6), entry(2, 0.2, 0.7)])
    assert gains.of("gain") == (pytest.approx(0.4), pytest.approx(0.1))
    assert gains.error == pytest.approx(0.1 / 3**0.5)
    assert gains.learns
    agreeing = Summary(ROW, [entry(seed, 0.2, 0.3, error=0.3) for seed in range(3)])
    assert agreeing.error == pytest.approx(0.3 / 3**0.5)  # of the responses: 3 seeds of the same luck
    assert not agreeing.learns
    assert not Summary(ROW, [entry(0, 0.2, 0.5), entry(1, 0.2, 0.5)]).learns  # too few seeds
    assert not Summary(ROW, [entry(0, 0.5, 0.2), entry(1, 0.5, 0.2), entry(2, 0.5, 0.2)]).learns


def test_curves_of_seeds_are_averaged_at_the_same_samples():
    samples, mean, std = Summary(ROW, [entry(0, 0.0, 1.0), entry(1, 0.0, 1.0)]).curve()
    assert samples.tolist() == [0, 4, 8]
    assert mean.tolist() == [0.0, 0.75, 1.0]  # the second reaches 1 at 8 only
    assert std.tolist() == pytest.approx([0.0, 0.5 / 2**0.5, 0.0])


def test_lines_say_what_is_there():
    unlearned = {(ROWS[0].name, seed): entry(seed, 0.2, 0.2, name=ROWS[0].name) for seed in range(3)}
    made = page.render(PAGE, unlearned)
    assert f"| {ROWS[0].title} | 0.200 ± 0.000 | 0.200 ± 0.000 | +0.000 | 0.006 | 8 | 1 s | no |" in made
    assert f"- **{ROWS[0].title}**: {WHY.get(ROWS[0].name, page.NO_REASON)}" in made
    assert f"| {ROWS[1].title} | | | | | | | not run yet |" in made
    with pytest.raises(ValueError, match="must have `<!-- sparse pictures -->`"):
        page.render("no markers", {})


def test_the_record_is_one_line_per_run_and_lacks_what_changed(tmp_path):
    path = tmp_path / "results.json"
    row = ROWS[0]
    runs = {(row.name, seed): entry(seed, 0.2, 0.5, name=row.name) | {"digest": digest_of(row)} for seed in (1, 0)}
    record.write(path, runs | {("gone", 0): entry(0, 0, 0, name="gone")})
    assert [json.loads(line.rstrip(","))["seed"] for line in path.read_text().splitlines()[1:-1]] == [0, 1]
    assert record.missing(record.read(path), [row], [0, 1, 2]) == [(row, 2)]
    runs[row.name, 0]["digest"] = "another"
    assert record.missing(runs, [row], [0, 1]) == [(row, 0)]
    name = "results_sparse_madpo_and_comparators.png"  # of the group of the only row that has runs
    assert [picture.name for picture in plots.draw(tmp_path, runs)] == [name]
    assert (tmp_path / name).stat().st_size > 5000
    assert page.render(PAGE, runs).count("](pictures/") == 1
    assert f"](pictures/{name})" in page.render(PAGE, runs)
    assert tuple(dict.fromkeys(row.table for row in ROWS)) == TABLES


def test_the_dense_reward_says_how_near_the_last_letters_are():
    three = (["xa", "b", "", "z"], ["a", "f", "a", "z"], ["a", "d", "a", "!"])
    assert close_last_letters(*three) == [1, 1 - 4 / 64, 0, 0]
    rewards = close_last_letters([chr(code) for code in range(32, 123)], ["z"] * 91)
    assert rewards == sorted(rewards)
    assert Oracle("pbrl_lightning.tasks.coordination:close_last_letters").reward_range() == (0.0, 1.0)


def test_what_the_letters_team_says_becomes_the_same_tokens_again():
    team = AgentTeam("builtin:letters", num_agents=1).load()
    tokenizer = team.tokenizer(0)
    special = set(tokenizer.all_special_ids)
    ids = [index for index in range(len(tokenizer)) if index not in special]
    assert len(ids) == team.model(0).config.vocab_size - 3 == 96
    for said in itertools.product(ids, repeat=2):
        text = tokenizer.decode(said, skip_special_tokens=True)
        assert encode_response(tokenizer, text) == list(said)


def test_the_server_answers_by_role_and_anew():
    with serving() as url:
        asked = {"prompt": "q", "agent_idx": 0, "num_return_sequences": 20}
        request = Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        first, second = (json.loads(urlopen(request).read())["completions"] for _ in range(2))
    assert len(first) == 20
    assert set(first) == set("abcd")
    assert first != second


@pytest.mark.slow
def test_a_run_is_made_once(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/results.py"), "--results", str(tmp_path / "r.json"), "--no-page"]
    command += ["--only", "dense/iterative_MADPO_ApiComparator", "--seeds", "7", "--model.init_args.num_iterations=1"]
    command += ["--data.num_candidates=2", "--trainer.limit_train_batches=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].startswith("1 of 1 runs to go")
    assert said[1] == "0 of 1 runs to go\n"
    ((key, run),) = record.read(tmp_path / "r.json").items()
    assert key == ("dense/iterative_MADPO_ApiComparator", 7)
    assert run["samples"] == 64  # 16 items, 2 candidates, 2 sides
    assert [point[0] for point in run["curve"]] == [0, 64]
    assert run["gain"] == pytest.approx(run["after"] - run["before"], abs=1e-3)
