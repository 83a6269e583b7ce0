"""`pbrl compare`: what it reads of a run's directory, the table, the options that differ, the page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from pbrl_lightning.cli import main
from pbrl_lightning.reporting.comparison import as_text, missing_lines, option_rows, page, table
from pbrl_lightning.reporting.runs import RunRecord, Series, find_runs, read_run
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError

HOSTILE = "<script>alert(1)</script>&\x00$x$"
EVAL = "eval/turn_1/reward_mean"


def write_events(directory, points, start=1000.0):
    """One file of TensorBoard's: ``(name, step, value, seconds)``."""
    with SummaryWriter(str(directory), filename_suffix=f".{start}") as writer:
        for name, step, value, seconds in points:
            writer.add_scalar(name, value, step, walltime=start + seconds)
    newest = max(directory.glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    newest.rename(directory / f"events.out.tfevents.{start:.0f}.host")


def make_run(directory, evaluations=(0.25, 0.75), rate=1e-3, **options):
    """A run as it would lie there, by hand."""
    directory.mkdir(parents=True)
    points = [(EVAL, 4 * place, value, 10.0 * place) for place, value in enumerate(evaluations)]
    points += [("iter/current_iteration", 0, 1, 0.0), ("iter/current_iteration", 4, 2, 10.0)]
    points += [("collect/reward_mean", 0, 0.5, 0.0), ("collect/reward_mean", 4, 0.625, 10.0)]
    points += [
        ("env_step", 0, 20, 0.0),
        ("env_step", 4, 50, 10.0),
        ("train/loss", 3, 0.5, 7.0),
        ("train/loss", 8, 0.25, 20.0),
    ]
    write_events(directory, points)
    module = {"class": "MADPOModule", "learning_rate": rate} | options
    (directory / "hparams.yaml").write_text(yaml.safe_dump({"module": module, "team": {"models": "m"}, "data": {}}))
    return directory


def test_the_row_of_a_run_by_hand(tmp_path):
    run = read_run(make_run(tmp_path / "runs/madpo/lightning_logs/version_0", (0.25, 0.75, 0.5)))
    head, row = table([run])
    assert dict(zip(head, row, strict=True)) == {
        "run": "madpo/version_0", "module": "MADPOModule", "rounds": "2", "updates": "8", "first evaluation": "0.250",
        "last evaluation": "0.500", "best evaluation": "0.750 at 4", "last round's reward": "0.625", "time": "0:20",
    }  # fmt: skip
    assert run.missing == []
    assert run.responses_at(3) == 20.0
    assert run.responses_at(4) == 50.0
    assert run.series["train/loss"] == Series([3, 8], [0.5, 0.25], [7.0, 20.0])


def test_evaluations_have_their_standard_errors_where_they_were_logged(tmp_path):
    directory = make_run(tmp_path / "a")
    write_events(directory, [("eval/turn_1/reward_standard_error", 4, 0.125, 0.0)], start=2000.0)
    row = table([read_run(directory)])[1]
    assert row[4:7] == ("0.250", "0.750 ± 0.125", "0.750 ± 0.125 at 4")


def test_pauses_of_a_resumed_run_are_no_time_of_it(tmp_path):
    directory = make_run(tmp_path / "a")
    # Resumed an hour later from step 4; step 8 is logged again.
    write_events(directory, [("train/loss", 8, 0.5, 0.0), ("train/loss", 12, 0.125, 30.0)], start=4600.0)
    run = read_run(directory)
    assert run.series["train/loss"] == Series([3, 8, 12], [0.5, 0.5, 0.125], [7.0, 20.0, 50.0])
    assert run.seconds == 50.0
    write_events(directory, [("time/round", 4, 11.0, 0.0), ("time/round", 12, 20.0, 1.0)], start=9000.0)
    assert read_run(directory).seconds == 31.0  # as the rounds were timed


def test_rows_of_a_csv_logger(tmp_path):
    text = f"{EVAL},env_step,step,train/loss\n0.25,,0,\n,8,3,0.5\n0.5,,3,\n,16,6,nan\n"
    (tmp_path / "metrics.csv").write_text(text)
    run = read_run(tmp_path, "mine")
    assert run.name == "mine"
    assert run.series[EVAL] == Series([0, 3], [0.25, 0.5])
    assert run.series["train/loss"] == Series([3], [0.5])
    assert (run.updates, run.seconds) == (6, None)
    assert missing_lines([run]) == ["mine: no options (no readable hparams.yaml or config.yaml)"]


def test_files_of_two_loggers_of_one_run_are_read_together(tmp_path):
    directory = make_run(tmp_path / "a")
    (directory / "metrics.csv").write_text(f"{EVAL},step,train/margin\n0.125,-4,\n,3,2.5\n")
    run = read_run(directory)
    assert run.series[EVAL].values == [0.125, 0.25, 0.75]
    assert run.series["train/margin"].values == [2.5]


def test_curves_that_a_run_left_itself(tmp_path):
    (tmp_path / "curves.json").write_text(json.dumps({EVAL: {"steps": [0.0, 4.0], "values": [0.5, 0.75]}}))
    assert read_run(tmp_path).series[EVAL] == Series([0, 4], [0.5, 0.75])


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "config.yaml").write_text("model: [no mapping")
    assert read_run(tmp_path, "a").missing == [
        "no logged numbers (no TensorBoard files, metrics.csv or curves.json)",
        "no options (no readable hparams.yaml or config.yaml)",
    ]
    (tmp_path / "metrics.csv").write_text("train/loss,step\n1.0,2\n")
    assert read_run(tmp_path, "a").missing[0] == "no evaluation was logged"
    assert table([read_run(tmp_path, "a")])[1] == ("a", "-", "-", "2", "-", "-", "-", "-", "-")


def test_options_of_a_config_and_of_what_a_run_wrote_compare(tmp_path):
    first = make_run(tmp_path / "a", rate=0.5)
    second = make_run(tmp_path / "b")
    (second / "hparams.yaml").unlink()
    team = {"class_path": "pbrl_lightning.AgentTeam", "init_args": {"models": "m"}}
    module = {"class_path": "pbrl_lightning.MADPOModule", "init_args": {"learning_rate": 0.25, "team": team}}
    (second / "config.yaml").write_text(yaml.safe_dump({"model": module, "data": {"replay_dir": "x"}, "trainer": {}}))
    assert option_rows([read_run(first, "a"), read_run(second, "b")]) == [
        ("option", "a", "b"),
        ("module.learning_rate", "0.5", "0.25"),
    ]
    assert option_rows([read_run(first, "a"), read_run(first, "same")]) == []


def test_runs_are_found_by_folder_by_name_and_once(tmp_path, monkeypatch):
    for number in (0, 1):
        (make_run(tmp_path / f"runs/x/version_{number}") / "export/agent_0").mkdir(parents=True)
        (tmp_path / f"runs/x/version_{number}/export/agent_0/config.yaml").touch()  # of an export, not of a run
    monkeypatch.chdir(tmp_path)
    found = find_runs(["runs", "short=" + str(make_run(tmp_path / "other"))])
    assert [(name, str(path)) for name, path in found] == [
        (None, "runs/x/version_0"), (None, "runs/x/version_1"), ("short", str(tmp_path / "other"))
    ]  # fmt: skip
    make_run(tmp_path / "a=b")
    assert find_runs(["a=b"]) == [(None, Path("a=b"))]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFileError, match=r"the run 'nowhere' does not exist; 'empty' holds no run: no events"):
        find_runs(["nowhere", "empty"])
    with pytest.raises(ConfigurationError, match=r"each run must be named once, got runs/x/version_0 again"):
        find_runs(["runs", "x=runs/x/version_0"])


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_each_curve_by_each_axis_and_runs_nothing(tmp_path):
    runs = [read_run(make_run(tmp_path / "a"), HOSTILE), read_run(make_run(tmp_path / "b", (0.5, 1.0)), "other")]
    runs[0].series[HOSTILE] = Series([0, 1], [0.0, 1.0])
    runs[0].options["module.learning_rate"] = HOSTILE
    text = page(runs)
    shown = Page(text)
    assert "script" not in shown.tags
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert all(value.startswith("#") for name, value in shown.attributes if name in ("src", "href", "xlink:href"))
    assert "default-src 'none'" in text
    assert "\x00" not in text
    drawn = [value for name, value in shown.attributes if name == "aria-label"]
    clean = HOSTILE.replace("\x00", "\ufffd")
    assert drawn[:3] == [f"{EVAL} by {axis}" for axis in ("optimizer steps", "joint responses sampled", "minutes")]
    assert f"{clean} by optimizer steps" in drawn
    assert f"{clean} by minutes" not in drawn  # it has no times
    assert [value for name, value in shown.attributes if name == "id" and value in ("update", "responses", "time")] == [
        "update", "responses", "time"
    ]  # fmt: skip
    assert clean in "".join(shown.texts)
    first = text[text.index("<figure") : text.index("</figure>")]
    assert {"#1f6fb4", "#d9822b"} <= set(re.findall(r"#\w{6}", first))  # both runs in one picture
    # Without times and counts there is one axis.
    alone = page([RunRecord("a", tmp_path, {"x": Series([0, 1], [0.0, 1.0])}, {}, [])])
    assert 'id="time"' not in alone
    assert 'id="responses"' not in alone


def test_a_page_of_runs_without_numbers(tmp_path):
    text = page([RunRecord("a", tmp_path, {}, {}, ["no logged numbers"])])
    assert "a: no logged numbers" in text
    assert "<figure" not in text


def test_aligned_text():
    assert as_text([("run", "x"), ("long name", "12")]) == "run         x\nlong name  12"


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/x/version_0", rate=0.5)
    make_run(tmp_path / "runs/x/version_1", (0.5, 1.0), rate=0.25)
    main(["compare", "runs", "--output", "out/page.html"])
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[1].split() == [
        "x/version_0",
        "MADPOModule",
        "2",
        "8",
        "0.250",
        "0.750",
        "0.750",
        "at",
        "4",
        "0.625",
        "0:20",
    ]
    assert lines[2].split()[4:6] == ["0.500", "1.000"]
    assert lines[5].split() == ["module.learning_rate", "0.5", "0.25"]
    assert "curves: out/page.html" in shown.err
    main(["compare", "runs/x/version_0", "--output", "out/page.html"])  # in the place of an earlier one
    assert "version_1" not in Path("out/page.html").read_text(encoding="utf-8")
    Path("mine.html").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(["compare", "runs", "--output", "mine.html"])
    assert caught.value.code not in (0, None)
    assert Path("mine.html").read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["compare", "nowhere"])
    assert "the run 'nowhere' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_what_lightning_loggers_write_is_read(kind, tmp_path):
    logger = kind(tmp_path)
    logger.log_metrics({EVAL: 0.5, "train/loss": 1.0}, step=0)
    logger.log_metrics({EVAL: 0.75}, step=8)
    logger.finalize("success")
    run = read_run(Path(logger.log_dir))
    assert run.series[EVAL].values == [0.5, 0.75]
    assert run.updates == 8
