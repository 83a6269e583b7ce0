"""`pbrl collect`, `sample` and `completion`; what is said of errors."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

from pbrl_lightning import AgentTeam, CurrentComparator, MADPOModule, MARLHFModule, PreferenceDataModule, SamplingConfig
from pbrl_lightning.cli import main
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.commands import expected, help_texts
from pbrl_lightning.commands.completion import script
from pbrl_lightning.commands.sample import answers
from pbrl_lightning.preferences.round_files import ForeignReplayError, read_round_file
from pbrl_lightning.tasks.coordination import eval_items, same_last_letter, train_items

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "configs/debug/madpo_iter.yaml")
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=2)
ITEMS = f"{same_last_letter.__module__}.eval_items"
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def tiny_data(directory, **options):
    options = {"items": train_items()[:3], "reward_func": same_last_letter, "num_candidates": 4} | options
    return PreferenceDataModule(sampling=SAMPLING, replay_dir=str(directory / "pairs"), **options)


def trainer(directory, kind=PreferenceTrainer, **options):
    quietly = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return kind(accelerator="cpu", default_root_dir=directory, **quietly, **options)


@quiet
@pytest.mark.parametrize(
    "comparator", [pytest.param(None, marks=pytest.mark.slow), CurrentComparator()], ids=["base", "rounds"]
)
def test_collecting_gives_the_pairs_that_a_fit_would_train_on(comparator, tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=2)
    before = {name: value.clone() for name, value in team.load().state_dict().items()}
    pairs = trainer(tmp_path / "a").collect(MARLHFModule(team), tiny_data(tmp_path / "a", comparator=comparator))
    assert pairs
    assert not list((tmp_path / "a").rglob("*.ckpt"))
    assert not list(tmp_path.rglob("round_0001-*"))  # the journal
    assert all(torch.equal(value, before[name]) for name, value in team.state_dict().items())
    data = tiny_data(tmp_path / "b", comparator=comparator)
    rounds = {"num_iterations": 1} if comparator else {}
    trainer(tmp_path / "b", L.Trainer, enable_checkpointing=False).fit(
        MADPOModule(AgentTeam("builtin:tiny", num_agents=2), num_train_epochs=1, **rounds), data
    )
    collected, trained = (tmp_path / run / "pairs" / "iteration_0001.json" for run in "ab")
    assert collected.read_bytes() == trained.read_bytes()
    assert [pair.winner_completions for pair in read_round_file(collected)] == [p.winner_completions for p in pairs]


@quiet
def test_a_collection_that_was_stopped_goes_on_where_it_was(tmp_path):
    asked = []

    def dies(*completions):
        asked.append(len(completions[0]))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [float(sum(map(ord, text)) % 7) for text in completions[0]]

    def collect(reward):
        team = AgentTeam("builtin:tiny", num_agents=2)
        return trainer(tmp_path).collect(MADPOModule(team), tiny_data(tmp_path, reward_func=reward))

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        collect(dies)
    (journal,) = (tmp_path / "journal").iterdir()
    assert any(file.stat().st_size for file in journal.rglob("*"))
    assert not list(tmp_path.rglob("iteration_*.json"))
    sampled = []
    with pytest.MonkeyPatch.context() as patch:
        real = AgentTeam.sample
        patch.setattr(AgentTeam, "sample", lambda *a, **k: sampled.append(1) or real(*a, **k))
        pairs = collect(dies)
    assert pairs
    assert not sampled  # found in the journal
    assert not journal.exists()
    with pytest.raises(ForeignReplayError, match="belongs to run"):
        collect(same_last_letter)


def test_what_collecting_needs(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=2)
    with pytest.raises(ValueError, match="`items` must be given to collect; `reward_func` or `judge` must be given"):
        trainer(tmp_path).collect(MADPOModule(team), PreferenceDataModule())
    files = PreferenceDataModule(pairs=["a.json"])
    with pytest.raises(ValueError, match="`pairs` must be left out"):
        trainer(tmp_path).collect(MADPOModule(team), files)


@quiet
def test_lines_of_answers_are_the_draws_of_an_evaluation():
    team, items = AgentTeam("builtin:tiny", num_agents=2, formatters=["a {prompt}", "b {prompt}"]), eval_items() * 6
    how = {"sampling": SAMPLING, "seed": 3}
    lines = [json.loads(line) for line in answers(team, items, num_candidates=2, **how)]
    assert [(line["item_index"], line["candidate"]) for line in lines] == [
        (i, k) for i in range(len(items)) for k in (0, 1)
    ]
    direct = team.sample(items, list(range(len(items))), num_candidates=2, stream="evaluation", **how)
    for line in lines:
        sample = direct[line["item_index"]]
        assert line["completions"] == sample.completions(line["candidate"])
        assert line["prompts"] == sample.prompts == [f"{name} {line['item']['prompt']}" for name in "ab"]
        assert line["finished"] == [said[line["candidate"]].finished for said in sample.responses]


@quiet
def test_a_centralised_teams_answers_are_taken_apart():
    options = {"collaboration": "centralized", "formatters": ["a {prompt}", "b {prompt}"]}
    team = AgentTeam("builtin:tiny", num_agents=2, **options)
    (line,) = answers(team, [{"prompt": "x"}], num_candidates=1, sampling=SAMPLING, seed=0)
    record = json.loads(line)
    assert record["prompts"] == ["a x", "b x"]
    assert record["completions"] == ["", ""]  # without any tag
    assert record["joint_completion"]


def test_an_item_that_is_not_json_is_named():
    team = AgentTeam("builtin:tiny", num_agents=1)
    for item in ({"prompt": "x", "at": {1, 2}}, {"prompt": "x", "at": float("nan")}):
        with pytest.raises(ValueError, match="task item 0 cannot be written as JSON"):
            list(answers(team, [item], num_candidates=1, sampling=SAMPLING, seed=0))


def test_the_sample_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--team.models=builtin:tiny", "--team.num_agents=2", f"--items={ITEMS}", "--sampling.max_new_tokens=2"]
    main(["sample", *options])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(eval_items())
    main(["sample", *options, "--output=deep/answers.jsonl"])
    assert Path("deep/answers.jsonl").read_text(encoding="utf-8") == printed
    with pytest.raises(SystemExit, match=r"`num_candidates` must be >= 1, got 0; `output` must not exist"):
        main(["sample", *options, "--output=deep/answers.jsonl", "--num_candidates=0"])
    main(["sample", *options, "--output=deep/answers.jsonl", "--overwrite=true", "--seed=5"])
    assert Path("deep/answers.jsonl").read_text(encoding="utf-8") != printed
    with pytest.raises(SystemExit, match="`items` must be given"):
        main(["sample", *options[:2]])
    with pytest.raises(SystemExit, match=r"must be the directory of a run that ended.*config\.yaml"):
        main(["sample", "--run", "deep"])


@pytest.mark.slow
@quiet
def test_from_pairs_to_answers_by_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.py").write_text("FORMATTERS = ['a {prompt}', 'b {prompt}']\n", encoding="utf-8")
    options = [
        "--config",
        CONFIG,
        "--data.num_candidates=4",
        "--model.init_args.team.init_args.formatters=my_prompts.FORMATTERS",
    ]
    main(["collect", *options, "--data.replay_dir=pairs"])
    assert read_round_file("pairs/iteration_0001.json")
    (saved,) = Path("runs").rglob("config*.yaml")
    assert saved.name == "config_collect.yaml"
    shutil.rmtree("runs")
    pairs = ["--data.pairs=[pairs/iteration_0001.json]", "--data.items=null", "--data.comparator=null"]
    main(["fit", *options, *pairs, "--model.init_args.num_train_epochs=1", "--model.init_args.num_iterations=null"])
    (run,) = (path.parent for path in Path("runs").rglob("config.yaml"))
    capsys.readouterr()
    main(["sample", "--run", str(run), "--num_candidates=2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2 * len(eval_items())
    assert lines[0]["prompts"] == [f"{name} {eval_items()[0]['prompt']}" for name in "ab"]
    main(["sample", f"--run={run}", "--team.formatters={prompt}", "--items", f"{ITEMS}"])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["prompts"] == [eval_items()[0]["prompt"]] * 2
    main(["collect", *options, "--trainer.fast_dev_run=true", "--data.replay_dir=trial"])
    assert not Path("trial").exists()


@pytest.mark.slow
@quiet
def test_two_processes_collect_what_one_does(tmp_path):
    found = []
    for count in (1, 2):
        command = [sys.executable, "-m", "pbrl_lightning", "collect", "--config", CONFIG, "--data.num_candidates=4"]
        command += [
            f"--trainer.devices={count}",
            "--trainer.strategy=ddp",
            f"--data.replay_dir={tmp_path / str(count)}",
        ]
        done = subprocess.run(
            [*command, f"--trainer.default_root_dir={tmp_path}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        found.append((tmp_path / str(count) / "iteration_0001.json").read_bytes())
    assert found[0] == found[1]


def test_completion_scripts(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["completion", "bash"])
    assert caught.value.code == 0
    made = tmp_path / "pbrl.bash"
    made.write_text(capsys.readouterr().out, encoding="utf-8")

    def completed(*words):
        typed = " ".join(f"'{word}'" for word in words)
        lines = f"source {made}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _pbrl; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-ec", lines], capture_output=True, text=True, check=True).stdout.split()

    assert completed("pbrl", "") == [
        "fit",
        "validate",
        "collect",
        "sample",
        "migrate",
        "compare",
        "check",
        "completion",
    ]
    assert completed("pbrl", "collect", "--data.replay") == ["--data.replay", "--data.replay.help", "--data.replay_dir"]
    assert completed("pbrl", "fit", "--data.comparator", "Cur") == ["CurrentComparator", "CurrentCopyComparator"]
    assert completed("pbrl", "fit", "--model.help", "MARLH") == ["MARLHFModule"]
    assert completed("pbrl", "migrate", "--rew") == ["--reward_func"]
    assert completed("pbrl", "fit", "configs/") == []  # left to the shell: files


def test_the_zsh_script_holds_the_same_words():
    options, values = {"fit": ["--b", "--a"], "sample": ["--run"]}, {"--b": ["X", "Y"]}
    for shell in ("bash", "zsh"):
        text = script(shell, options, values)
        assert re.findall(r'="([^"$]+)"', text) == ["fit sample", "X Y", "--a --b", "--run"]
        assert text.count("{") == text.count("}")
    assert text.startswith("#compdef pbrl\n")


def test_help_lists_all_commands_and_where_more_help_is(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for text in (
        "fit ",
        "validate ",
        "collect ",
        "sample ",
        "migrate ",
        "completion ",
        "--data.comparator.help",
        "PBRL_TRACEBACK",
    ):
        assert f"    {text}" in printed or text.startswith(("-", "P")), text
        assert text in printed


def test_an_error_of_a_check_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = ["fit", "--config", CONFIG, "--data.batch_size=0"]
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert str(caught.value).startswith("error: `batch_size` must be >= 1, got 0\n")
    monkeypatch.setenv(expected.TRACEBACK, "1")
    with pytest.raises(ValueError, match="`batch_size` must be >= 1"):
        main(wrong)


def raised(work):
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_errors_of_our_own_checks_are_expected():
    from pbrl_lightning.preferences.replay import LambdaDecayReplay, NearestKReplay

    assert expected.sentence(raised(lambda: NearestKReplay(0))).startswith("error: `k` must be an integer >= 1, got 0")
    assert expected.sentence(raised(lambda: LambdaDecayReplay(2))) is not None
    assert expected.sentence(raised(lambda: NearestKReplay())) is None  # a TypeError: a fault in a program
    assert expected.sentence(raised(lambda: int("x"))) is None
    # Raised inside a function of ours, but by Python: a fault of ours, to be shown whole.
    assert expected.sentence(raised(lambda: LambdaDecayReplay(0.5).weights(object()))) is None

    def check_of_the_users():
        raise ValueError("mine")

    assert expected.sentence(raised(check_of_the_users)) is None


def test_the_page_of_the_command_line_names_every_command():
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for command in help_texts.COMMANDS:
        assert f"| `pbrl {command}` |" in page
    assert yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
