"""What the command line says of a wrong option, class, value or file: one sentence, nearest names, no keys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import pbrl_lightning
from pbrl_lightning import AgentTeam
from pbrl_lightning.__main__ import main as entry
from pbrl_lightning.cli import PreferenceCLI, main
from pbrl_lightning.commands import expected, help_texts, templates
from pbrl_lightning.preferences.oracle import OracleError
from pbrl_lightning.remote.errors import ApiUnavailableError
from pbrl_lightning.utils.errors import ConfigurationError, FileError, RunError, UserError, file_error

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "configs/debug/madpo_iter.yaml")
FORMATTERS = "--model.init_args.team.init_args.formatters"
FIRST_MISTAKES = [
    (["--model.learning_rate", "-1"], "`learning_rate` must be > 0, got -1.0"),
    (["--model.lerning_rate", "1"], "`--model.lerning_rate` is not an option of MADPOModule; did you mean "
                                    "`--model.init_args.learning_rate`?"),
    (["--data.comparator", "HistoryComparater"], "got 'HistoryComparater'; did you mean `HistoryComparator`?"),
    (["--data.num_candidate", "4"], "`--data.num_candidate` is not an option; did you mean `--data.num_candidates`?"),
    (["--ckpt_path", "nowhere.ckpt"], "`--ckpt_path` must be a checkpoint (.ckpt), the directory of a run, or `last`, "
                                      "and 'nowhere.ckpt' does not exist"),
    ([f"{FORMATTERS}=['a {{prompt}}', 'b {{prompt}}', 'c {{prompt}}']"],
     "`formatters` must be one for all or one per agent (2 agents), got 3"),
]  # fmt: skip
MORE_MISTAKES = [
    (["--data.num_candidates", "abc"], "`--data.num_candidates` must be an integer or null, got 'abc'"),
    (["--data.pair_selection", "gap"], "must be one of reward_gap, random, all, comparator_reward or null, got 'gap'"),
    (["--data.sampling.temperature_=1"], "option of SamplingConfig; did you mean `--data.sampling.temperature`?"),
    (["--data.sampling.temperature=hot"], "`--data.sampling.temperature` must be a number, got 'hot'"),
    (["--model.init_args.learning_rate=high"], "`--model.init_args.learning_rate` must be a number or null, got"),
    (["--learning_rate=1"], "`--learning_rate` is not an option; did you mean `--model.init_args.learning_rate`?"),
    (["--model", "MADPOModul"], "got 'MADPOModul'; did you mean `MADPOModule`?"),
    (["--data.comparator=HistoryComparator", "--data.comparator.kk=1"], "not an option of HistoryComparator, which"),
    (["--data.replay.decay=1"], "must name a class before `decay` can be set: AllHistoryReplay, CurrentReplay"),
    (["--trainer.max_epoch", "4"], "did you mean `--trainer.max_epochs`?"),
    (["--trainer.logger", "TensorBoardLoger"], "got 'TensorBoardLoger'; did you mean `TensorBoardLogger`?"),
    (["--trainer.accelerator", "abacus"], "invalid accelerator name"),
    (["--trainer.callbacks=EarlyStopping"], "must be given to EarlyStopping"),
    (
        ["--trainer.callbacks={class_path: EarlyStopping, init_args: {monitor: x, mode: wide}}"],
        "`EarlyStopping` cannot",
    ),
    (["--optimizer", "Adam"], "`--optimizer` is not supported"),
    (["--data.num_candidates"], "`--data.num_candidates` expected one argument"),
    ([f"{FORMATTERS}=# Title: {{prompt}}"], "a template must not begin with `#`, which YAML reads as a comment"),
    (["extra"], "`extra` is not expected: options begin with `--`"),
    (["--model.init_args.team.init_args.models=./no_such_model"], "'./no_such_model' does not exist"),
]


def refused(arguments, capfd):
    """What is printed, and the exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    printed = "".join(capfd.readouterr())
    for unwanted in ("Union subtypes", "Namespace(", "usage:", "Traceback"):
        assert unwanted not in printed
    return printed, caught.value.code


@pytest.mark.parametrize(("arguments", "sentence"), FIRST_MISTAKES + MORE_MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    printed, code = refused(["fit", "--config", CONFIG, *arguments], capfd)
    assert sentence in printed
    assert code == 2
    lines = [line for line in printed.splitlines() if "available" not in line and "Tip" not in line]
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert len(lines) <= 6


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "`--config` must be a file, and 'mine.yaml' does not exist; did you mean `mines.yaml`?"),
        ("model: [1, {a: 2\ndata:", "mine.yaml, line 2, column 5: the file is not YAML"),
        ("- sk-canary\n- 2\n", "mine.yaml: the file must hold options (`name: value`), got a list"),
        ("dta:\n  seed: 1\n", "`dta.seed` is not an option; did you mean `data.seed`?"),
        ("data:\n  itemz: x.jsonl\n", "`data.itemz` is not an option; did you mean `data.items`?"),
        ("data:\n  seed: 1\n", "`model` must be given: as `--model`, or in a file that `--config` names"),
        ("model:\n  class_path: MADPOModule\n", "`model.init_args.team` must be given to MADPOModule"),
    ],
)
def test_a_wrong_file_is_one_sentence(content, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("mines.yaml").touch()
    if content is not None:
        Path("mine.yaml").write_text(content, encoding="utf-8")
    printed, code = refused(["fit", "--config", "mine.yaml"], capfd)
    assert sentence in printed
    assert code == 2
    assert "sk-canary" not in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a command must follow `pbrl`: fit, validate, collect"),
        (["fitt"], "there is no command `fitt`; did you mean `fit`?"),
        (["test"], "there is no command `test`: `pbrl validate` evaluates a team"),
        (["predict"], "there is no command `predict`: `pbrl sample` writes a team's responses"),
        (["sample", "--num_cand", "3"], "`--num_cand` is not an option; did you mean `--num_candidates`?"),
        (["sample"], "`team.models` must be given"),
        (["completion", "fish"], "must be one of bash, zsh, got 'fish'"),
    ],
)
def test_a_wrong_command_is_one_sentence(arguments, sentence, capfd):
    printed, code = refused(arguments, capfd)
    assert sentence in printed
    assert code == 2
    with pytest.raises(SystemExit):
        entry(arguments)
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    "endpoint",
    ["{url: u, headers: [sk-canary]}", "{url: u, key_env: [sk-canary]}", "{url: [sk-canary]}", "sk-canary"],
)
def test_values_that_may_hold_a_key_are_not_shown(endpoint, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    comparator = f"{{class_path: ApiComparator, init_args: {{endpoint: {endpoint}}}}}"
    printed, _ = refused(["fit", "--config", CONFIG, f"--data.comparator={comparator}"], capfd)
    assert "must be" in printed
    assert "sk-canary" not in printed


def test_only_errors_addressed_to_the_user_are_sentences(monkeypatch):
    monkeypatch.delenv(expected.TRACEBACK, raising=False)
    for error in (ConfigurationError("x"), OracleError("x"), RunError("x"), FileError("x"),
                  ApiUnavailableError("x", endpoint="e")):  # fmt: skip
        assert isinstance(error, UserError)
        assert expected.sentence(error) == "error: x\n(PBRL_TRACEBACK=1 shows the traceback)"
    for error in (ValueError("x"), OSError("x"), KeyError("x")):
        assert expected.sentence(error) is None
    assert ConfigurationError.exit_code == 2
    assert OracleError.exit_code == RunError.exit_code == 1


def test_causes_of_other_libraries_are_named_once():
    error = RunError("the reward failed")
    error.__cause__ = KeyError("answer")
    assert expected.sentence(error).splitlines()[0] == "error: the reward failed (KeyError: 'answer')"
    error.__cause__ = ValueError("the reward failed!")
    assert expected.sentence(error).splitlines()[0] == "error: the reward failed"


def test_errors_of_the_operating_system_keep_their_class():
    error = file_error(PermissionError(13, "denied"), 13, "cannot be written", "a.txt")
    assert isinstance(error, (PermissionError, UserError))
    assert isinstance(error, PermissionError)
    assert error.errno == 13
    assert isinstance(file_error(error, "again"), PermissionError)


def test_an_error_of_the_users_reward_names_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text("def score(*texts):\n    return 1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["fit", "--config", CONFIG, "--data.reward_func=failing:score"]
    printed, code = refused(arguments, capfd)
    assert "raised ZeroDivisionError" in printed
    assert code == 1
    monkeypatch.setenv(expected.TRACEBACK, "1")
    with pytest.raises(OracleError) as caught:
        main(arguments)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("command", ["pbrl", *help_texts.COMMANDS])
def test_stored_help_is_the_live_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "61")  # the width of the terminal does not matter
    if help_texts.stored(command) is None:
        pytest.skip("other versions of Lightning or jsonargparse: the live help is printed")
    again = "python -m pbrl_lightning.commands.help_texts writes the texts again"
    assert help_texts.stored(command) == help_texts.live(command), again


def test_help_is_readable():
    texts = {command: help_texts.live(command) for command in ("pbrl", "fit", "sample")}
    assert len(texts["sample"].splitlines()) < 80
    assert texts["fit"].startswith("usage: pbrl fit --config FILE [options]\n")
    for text in texts.values():
        assert max(map(len, text.splitlines())) <= 110
        assert "``" not in text
        assert ":class:" not in text
        assert "known subclasses" not in text


def test_help_and_version_import_no_torch_and_are_faster():
    script = (
        "import sys, time\n"
        "from pbrl_lightning.__main__ import main\n"
        "begun = time.process_time()\n"
        "for arguments in (['--help'], ['--version'], ['fit', '--help'], ['sample', '-h']):\n"
        "    main(arguments)\n"
        "helped = time.process_time() - begun\n"
        "assert 'torch' not in sys.modules and 'jsonargparse' not in sys.modules\n"
        "begun = time.process_time()\n"
        "import torch\n"
        "assert helped < time.process_time() - begun\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: pbrl COMMAND [options]\n")


@pytest.mark.slow
def test_a_wrong_configuration_is_refused_soon_after_the_imports(tmp_path):
    script = (
        "import sys, time\n"
        "begun = time.process_time()\n"
        "import lightning.pytorch.cli\n"
        "imported = time.process_time()\n"
        "from pbrl_lightning.cli import main\n"
        f"try: main(['fit', '--config', {CONFIG!r}, '--model.learning_rate', '-1'])\n"
        "except SystemExit: pass\n"
        "refused = time.process_time()\n"
        "assert refused - imported < max(2, 0.6 * (imported - begun)), (imported - begun, refused - imported)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_lazy_and_complete():
    script = "import sys, pbrl_lightning as p; assert 'torch' not in sys.modules and 'MADPOModule' in dir(p)"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert sorted(pbrl_lightning._MODULE_OF) == sorted(pbrl_lightning.__all__)
    for name in pbrl_lightning.__all__:
        assert getattr(pbrl_lightning, name).__module__.startswith("pbrl_lightning."), name
    with pytest.raises(AttributeError, match="has no attribute 'MADPOModul'"):
        pbrl_lightning.MADPOModul  # noqa: B018
    names = {}
    exec("from pbrl_lightning import *", names)
    assert names["AgentTeam"] is AgentTeam


class ParsedError(Exception):
    """The classes would be made now."""


@pytest.mark.parametrize(
    "given",
    [
        "Q: {question}",
        "Sum up: {prompt}",
        "{prompt}",
        "text: {prompt}",
        "- {prompt}",
        "Article:\n{prompt}\nSummary:",
        ["Q: {question}", "Sum up: {prompt}"],
    ],
)
def test_templates_stay_texts(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []

    def stop(self):
        seen.append(self.config.fit.model.init_args.team.init_args.formatters)
        raise ParsedError

    monkeypatch.setattr(PreferenceCLI, "instantiate_classes", stop)
    typed = given if isinstance(given, str) else str(given)
    config = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    config["model"]["init_args"]["team"]["init_args"]["formatters"] = given
    Path("own.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["fit", "--config", CONFIG, f"{FORMATTERS}={typed}", "--print_config"])
    Path("saved.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    for arguments in (
        ["--config", CONFIG, f"{FORMATTERS}={typed}"],
        ["--config", "own.yaml"],
        ["--config", "saved.yaml"],
    ):
        with pytest.raises(ParsedError):
            main(["fit", *arguments])
    assert seen == [given] * 3


def test_other_values_are_read_as_before():
    assert templates.load("{a: 1, b: [x, null]}") == {"a": 1, "b": ["x", None]}
    assert templates.load("model:\n  formatters: {prompt}\n") == {"model": {"formatters": "{prompt}"}}
    assert templates.load("{top_k: null}") == {"top_k": None}
    assert templates.load("{class_path: X, init_args: {user: 'Q: {q}'}}")["init_args"] == {"user": "Q: {q}"}


@pytest.mark.parametrize(("command", "name"), [("check", "paths"), ("compare", "runs")])
def test_a_missing_argument_that_has_no_dashes_is_not_asked_for_with_them(command, name):
    with pytest.raises(SystemExit, match=f"`{name}` must be given\n"):
        main([command])
