"""What a run prints: lines without a terminal, nothing that a user cannot act on, and what its end says."""

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pbrl_lightning import JointRewardModel, MARLHFModule, MARLModule
from pbrl_lightning.callbacks import CollectionProgress
from pbrl_lightning.cli import PreferenceCLI
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.preferences.collector import Collection
from pbrl_lightning.reporting import bars, quiet
from pbrl_lightning.reporting.empty_rounds import why_no_pairs
from pbrl_lightning.reporting.log_interval import LogInterval, log_interval
from pbrl_lightning.reporting.progress_lines import THREAD_NAME, ProgressLines, Work
from pbrl_lightning.utils.errors import ConfigurationError
from training_runs import (
    CountingReward,
    make_data,
    make_module,
    make_team,
    make_trainer,
    same_weights,
    text_reward,
    weights_of,
)

ROOT = Path(__file__).parent.parent


def progress_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert progress_threads() == []


@pytest.fixture
def printed(caplog):
    """What was printed by way of Lightning's logger, line by line; also of another thread."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    return lambda: [
        line
        for record in caplog.records
        if record.name == "lightning.pytorch.utilities.rank_zero"
        for line in record.getMessage().splitlines()
    ]


def slow(reward, seconds):
    def score(*completions):
        time.sleep(seconds)
        return reward(*completions)

    return score


# -- lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "arguments", "line"),
    [
        (
            Work("collecting", 10.0, unit="item", total=64, done=12),
            (40.0, 0),
            "collecting: 12 of 64 items, 0.4 items/s, 0:02:10 remaining",
        ),
        # Half of them came from an earlier start: they tell nothing of the rate.
        (
            Work("collecting", 0.0, unit="item", total=64, done=36, first=32),
            (80.0, 0),
            "collecting: 36 of 64 items, 20 s per item, 0:09:20 remaining",
        ),
        # The first step takes long: tokens show that it goes on, and what it can take at most.
        (
            Work("collecting", 0.0, tokens=100, unit="item", total=8, most_tokens=3000),
            (60.0, 1600, "sampling"),
            "collecting: 0 of 8 items, 0:01:00 so far, 1500 tokens sampled, 25 tokens/s, at most 0:01:00 remaining "
            "(now sampling)",
        ),
        (
            Work("training", 0.0, unit="step", total=500, done=250),
            (2.0, 99, None, "train/loss 0.68"),
            "training: 250 of 500 steps, 125 steps/s, 0:00:02 remaining, train/loss 0.68",
        ),
        (
            Work("collecting", 0.0, unit="item", total=4, done=4),
            (90.0, 900, "scoring"),
            "collecting: 4 of 4 items, 0:01:30 so far (now scoring)",
        ),
        (Work("loading models", 5.0), (5.0, 0), "loading models: 0:00:00 so far"),
        (Work("loading models", 0.0), (3700.0, 0), "loading models: 1:01:40 so far"),
    ],
)
def test_a_line_says_what_how_far_the_rate_and_the_time_remaining(work, arguments, line):
    assert work.describe(*arguments) == line


def test_lines_come_at_the_interval_also_within_one_long_step():
    lines, now = [], [0.0]
    progress = ProgressLines(0.05, lines.append, clock=lambda: now[0])
    progress.begin("loading models")
    now[0] = 65.0
    progress.start()
    time.sleep(0.4)
    progress.stop()
    count = len(lines)
    assert 2 <= count <= 8
    assert set(lines) == {"[0:01:05] loading models: 0:01:05 so far"}
    time.sleep(0.12)
    assert len(lines) == count


def test_the_thread_ends_with_its_run_even_if_nobody_stops_it():
    running = [True]
    progress = ProgressLines(0.02, lambda line: None, running=lambda: running[0])
    progress.start()
    assert len(progress_threads()) == 1
    running[0] = False
    progress_threads()[0].join(timeout=5)
    assert progress_threads() == []


@pytest.mark.parametrize("interval", [-1.0, float("inf"), float("nan")])
def test_the_interval_is_a_number_of_seconds(interval):
    with pytest.raises(ConfigurationError, match=r"`interval` must be a number of seconds >= 0"):
        CollectionProgress(interval=interval)


# -- lines of runs -------------------------------------------------------------------------------------------------


def test_each_phase_of_an_iterative_run_has_lines(tmp_path, printed):
    team = make_team()
    module = MARLHFModule(
        team, reward_model=JointRewardModel("builtin:tiny"), num_iterations=2, num_train_epochs=2, num_reward_epochs=2
    )

    class Slow(L.Callback):
        def on_train_batch_end(self, *args):
            time.sleep(0.01)

    data = make_data(slow(text_reward, 0.03), num_candidates=2)
    make_trainer(tmp_path, [CollectionProgress(interval=0.005), Slow()], max_epochs=6).fit(module, data)
    lines = [line for line in printed() if line.startswith("[0:")]
    assert all("\r" not in line and "\x1b" not in line for line in printed())
    assert any("] loading models: 0:0" in line for line in lines)
    counted = r"\] round %s, %s: \d+ of %d %ss, .*"
    for round_name in ("1 of 2", "2 of 2"):
        for what, total, unit in (
            ("collecting from agents and comparator", 6, "item"),
            ("training the policy", 4, "step"),
        ):
            if (round_name, what) != ("2 of 2", "training the policy"):  # `max_epochs` ends before
                assert any(re.search(counted % (round_name, what, total, unit), line) for line in lines), (what, lines)
    assert any("fitting the reward model: " in line and "steps/s" in line and " remaining" in line for line in lines)
    assert any(re.search(r"fitting the reward model: .*epoch [12] of 2, reward/loss \d", line) for line in lines)
    assert any(re.search(r"training the policy: .*policy/loss ", line) for line in lines)
    assert any(line.endswith("(now scoring)") for line in lines)
    assert any(line.endswith("(now evaluating)") for line in lines)


def test_collecting_and_validating_have_lines(tmp_path, printed):
    trainer = PreferenceTrainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        callbacks=[CollectionProgress(interval=0.005)],
    )
    trainer.collect(make_module(), make_data(slow(text_reward, 0.03), iterative=False))
    assert any(re.search(r"\] round 1, collecting: \d of 3 items, ", line) for line in printed())

    trainer = make_trainer(tmp_path, [CollectionProgress(interval=0.005)])
    trainer.validate(make_module(), make_data(slow(text_reward, 0.03), batch_size=2), verbose=False)
    assert any(re.search(r"\] validating: \d of 3 batchs?e?s, ", line) for line in printed())


class BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
def test_the_thread_ends_when_a_run_fails_or_is_stopped(error, tmp_path):
    class Fail(L.Callback):
        def on_train_batch_start(self, *args):
            assert len(progress_threads()) == 1
            raise error

    with pytest.raises((BoomError, SystemExit)):
        make_trainer(tmp_path, [Fail()]).fit(make_module(rounds=1), make_data())
    assert progress_threads() == []


def test_no_lines_and_no_thread_where_they_are_switched_off(tmp_path, printed):
    counts = []

    class Count(L.Callback):
        def on_train_batch_start(self, *args):
            counts.append(len(progress_threads()))

    make_trainer(tmp_path, [CollectionProgress(interval=0), Count()]).fit(make_module(rounds=1), make_data())
    assert set(counts) == {0}


def test_lightnings_bar_is_off_in_files_only_and_on_again_after_the_run(tmp_path):
    for bar in (RichProgressBar(), TQDMProgressBar()):
        seen = []

        class Look(L.Callback):
            def on_train_batch_start(self, trainer, *args):
                seen.append(trainer.progress_bar_callback.is_enabled)  # noqa: B023

        options = {"enable_progress_bar": True, "max_steps": 1}
        root = tmp_path / type(bar).__name__
        make_trainer(root / "1", [bar, Look()], **options).fit(make_module(rounds=1), make_data())
        assert set(seen) == {False}
        assert bar.is_enabled
        seen.clear()
        make_trainer(root / "2", [bar, Look(), CollectionProgress(interval=0)], **options).fit(
            make_module(rounds=1), make_data()
        )
        assert set(seen) == {True}


def test_where_bars_work(monkeypatch):
    class Own(RichProgressBar):
        pass

    assert not bars.works_here(None)
    assert bars.works_here(Own())  # whoever gives a bar of their own knows why
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert bars.works_here(RichProgressBar())
    assert not bars.works_here(TQDMProgressBar())  # writes to the other stream
    monkeypatch.setattr(sys, "stderr", _Terminal())
    assert bars.works_here(TQDMProgressBar())
    monkeypatch.setattr(bars, "in_notebook", lambda: True)
    monkeypatch.setattr(bars, "_has_widgets", lambda: False)
    assert not bars.works_here(RichProgressBar())
    assert bars.works_here(TQDMProgressBar())
    monkeypatch.setattr(bars, "_has_widgets", lambda: True)
    assert bars.works_here(RichProgressBar())


class _Terminal:
    def isatty(self):
        return True


# -- noise ---------------------------------------------------------------------------------------------------------

EXAMPLE = """
import lightning as L
from pbrl_lightning import AgentTeam, CurrentComparator, MADPOModule, PreferenceDataModule, SamplingConfig
from pbrl_lightning.tasks.coordination import same_last_letter

team = AgentTeam("builtin:tiny", num_agents=2, formatters=["{prompt}", "{prompt}"])
data = PreferenceDataModule(
    [{"prompt": letter} for letter in "abcd"], reward_func=same_last_letter, eval_items=[{"prompt": "z"}],
    comparator=CurrentComparator(), num_candidates=6,
    sampling=SamplingConfig(temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=2),
)
L.Trainer(accelerator="auto").fit(MADPOModule(team, num_iterations=2), data)
"""
LINES = [
    r"GPU available: .*",
    r"TPU available: .*",
    r"MADPOModule: 2 agents, 214 K parameters, of which 214 K are trained",
    r"\[0:\d\d:\d\d\] .*",  # only on a very slow machine
    r"round \d: \d+ pairs collected, \d+ to train on, mean reward \d\.\d+, \d+ tokens/s",
    r"`Trainer.fit` stopped: `max_epochs=2` reached.",
    r"",
    r"round  pairs  trained on  mean reward  comparator  evaluation before  evaluation after",
    r"( +[\d.]+){7}",
    r"run directory: \S+  \(tensorboard --logdir \S+\)",
    r"trained models: \S+",
    r"report: \S+",
]


@pytest.mark.slow
def test_a_python_users_run_prints_nothing_but_this(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "\r" not in text
    assert "\x1b" not in text
    unknown = [line for line in text.splitlines() if not any(re.fullmatch(known, line) for known in LINES)]
    assert unknown == []
    assert text.count("\nround ") == 3
    assert text.splitlines()[-1].startswith("report: ")


def screen(data):
    """What a terminal shows in the end; it knows CR, LF and the control sequences of Rich."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.", data, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif token.endswith("A") and len(token) > 1:
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif len(token) == 1:
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
            column += 1
    return lines


@pytest.mark.slow
def test_on_a_terminal_no_bar_is_drawn_over_a_line(tmp_path):
    # Wide enough for the lines and the bar; `pty` has no size of its own.
    environment = {**os.environ, "COLUMNS": "300", "LINES": "50", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    child, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", EXAMPLE], cwd=tmp_path, stdout=terminal, stderr=terminal, env=environment
    ) as run:
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
            while part := os.read(child, 65536):
                output += part
    os.close(child)
    shown = screen(output.decode(errors="replace"))
    assert run.returncode == 0, shown
    lines = [line for line in shown if not line.startswith("Epoch 1/1 ")]
    assert len(lines) == len(shown) - 1  # the bar stands once, where it was closed
    assert "Collecting" in output.decode(errors="replace")
    unknown = [line for line in lines if not any(re.fullmatch(known, line.rstrip()) for known in LINES)]
    assert unknown == []
    assert shown.index("") > next(index for index, line in enumerate(shown) if line.startswith("Epoch 1/1 "))
    assert sum(line.startswith("round ") for line in lines) == 3


def test_lightnings_tips_are_left_out_and_nothing_else(printed, caplog):
    quiet.drop_advertisements()
    quiet.drop_advertisements()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    assert sum(type(known).__name__ == "_WithoutAdvertisements" for known in logger.filters) == 1
    L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    rank_zero_info("Tip: read the FAQ")
    assert printed()[-1] == "Tip: read the FAQ"
    assert not [line for line in printed() if "litlogger" in line or "litmodels" in line]


@pytest.mark.parametrize(
    ("message", "category"),
    [
        ("Found 66 module(s) in eval mode at the start of training. This may …", UserWarning),
        ("The 'train_dataloader' does not have many workers which …", UserWarning),
        ("Total length of `list` across ranks is zero. …", UserWarning),
        ("Checkpoint directory /x/y exists and is not empty.", UserWarning),
        ("`isinstance(treespec, LeafSpec)` is deprecated, use …", FutureWarning),
    ],
)
def test_warnings_are_left_out_in_the_run_only_and_lightnings_only(message, category):
    trainer, silence = L.Trainer(accelerator="cpu", logger=False), quiet.QuietLightning()

    def heard(module):
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn_explicit(message, category, "file.py", 1, module=module)
        return len(caught)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert heard("lightning.pytorch.loops.fit_loop") == 1
        silence.start(trainer, replace_bar=True)
        assert heard("lightning.pytorch.loops.fit_loop") == 0
        assert heard("users_own") == 1
        silence.stop()
        assert heard("lightning.pytorch.loops.fit_loop") == 1


def test_the_summary_that_lightning_adds_is_replaced_by_a_line_and_one_that_was_asked_for_stays(tmp_path, printed):
    options = {"enable_model_summary": True, "max_steps": 1}
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(make_module(rounds=1), make_data())
    assert "MADPOModule: 2 agents, 214 K parameters, of which 214 K are trained" in printed()
    assert not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks)
    asked = RichModelSummary(max_depth=2)
    trainer = make_trainer(tmp_path / "asked", [asked], **options)
    trainer.fit(make_module(rounds=1), make_data())
    assert asked in trainer.callbacks


# -- curves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "steps", "interval"), [(30, 90, 1), (40, 800, 8), (5, 800, 5), (400, 80_000, 50), (1, 1, 1), (0, 0, 1)]
)
def test_the_interval_gives_about_a_hundred_points(batches, steps, interval):
    assert log_interval(batches, steps) == interval


def run_with_interval(root, **options):
    seen = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, *args):
            seen.append(trainer.log_every_n_steps)

    team = make_team()
    trainer = make_trainer(root, [Look()], logger=CSVLogger(root), **options)
    data = make_data(iterative=False, batch_size=1)
    trainer.fit(make_module(team, num_train_epochs=2), data)
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        column = file.readline().strip().split(",").index("train/loss")
        points = sum(bool(line.split(",")[column]) for line in file)
    return trainer, seen, points, weights_of(team)


def test_a_run_has_curves_unless_its_user_chose_an_interval_and_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pbrl_lightning.modules.base.writes_logs", lambda trainer: False
    )  # no pictures: they take longer
    trainer, seen, points, weights = run_with_interval(tmp_path / "default")
    assert set(seen) == {1}
    assert points == trainer.global_step > 10
    assert trainer.log_every_n_steps == 50  # for whatever it trains next
    trainer, seen, points, others = run_with_interval(tmp_path / "given", log_every_n_steps=7)
    assert set(seen) == {7}
    assert points == trainer.global_step // 7
    assert same_weights(weights, others)


def test_the_interval_of_a_short_or_accumulated_run():
    trainer, interval = L.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=4), LogInterval()
    interval.begin(trainer)
    interval.choose(trainer, batches=400, epochs=20)  # 2000 steps
    assert trainer.log_every_n_steps == 20
    trainer.fit_loop.epoch_loop.max_steps = 500
    interval.choose(trainer, batches=400, epochs=20)
    assert trainer.log_every_n_steps == 5
    interval.end(trainer)
    assert trainer.log_every_n_steps == 50
    never = L.Trainer(accelerator="cpu", logger=False, log_every_n_steps=0)
    interval.begin(never)
    interval.choose(never, batches=400, epochs=20)
    assert never.log_every_n_steps == 0


def test_the_command_line_knows_who_chose_lightnings_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.yaml"
    text = (ROOT / "configs/debug/madpo_iter.yaml").read_text(encoding="utf-8")
    config.write_text(text.replace("  log_every_n_steps: 1\n", ""), encoding="utf-8")
    for options, given in (([], False), (["--trainer.log_every_n_steps=50"], True)):
        cli = PreferenceCLI(["--config", str(config), *options], run=False)
        assert cli.trainer.log_every_n_steps == 50
        assert cli.trainer.log_interval_given is given


# -- rounds without pairs ------------------------------------------------------------------------------------------

TIED = (
    "round 1 has no pairs to train on, and passes without an update: all 24 joint responses have the score 1, and a "
    "tie makes no pair. Check that the reward tells responses apart and does not return a constant"
)
NO_UPDATE = "nothing was learned: the run made no update, so what it trains is as it was at the start"


def test_all_rounds_tied_one_warning_and_a_last_line(tmp_path, printed):
    trainer = make_trainer(tmp_path)
    with pytest.warns(UserWarning, match=re.escape(TIED)) as caught:
        trainer.fit(make_module(rounds=3), make_data(CountingReward(ties=range(100))))
    assert trainer.global_step == 0
    assert sum("has no pairs to train on" in str(warning.message) for warning in caught) == 1
    for number in (2, 3):
        assert f"round {number} has no pairs to train on either, and passes without an update" in printed()
    assert printed()[-1] == NO_UPDATE


def test_a_run_that_learns_after_a_tied_round_does_not_say_that_it_learned_nothing(tmp_path, printed):
    # The reward is called once per item and side: these are the calls of the first round.
    with pytest.warns(UserWarning, match="round 1 has no pairs to train on"):
        make_trainer(tmp_path).fit(make_module(rounds=2), make_data(CountingReward(ties=range(6)), eval_items=None))
    assert not any("nothing was learned" in line for line in printed())


def test_all_candidates_dropped(tmp_path, printed):
    with pytest.warns(UserWarning, match="no pairs to train on") as caught:
        make_trainer(tmp_path).fit(
            make_module(), make_data(lambda *texts: [None] * len(texts[0]), iterative=False, eval_items=None)
        )
    said = [str(warning.message) for warning in caught if "no pairs to train on" in str(warning.message)]
    assert said == [
        "round 1 has no pairs to train on, and passes without an update: no score of the joint responses (12 "
        "candidates have no finite score so far). Check that the reward returns finite numbers, and for the "
        "comparator's side that it answers"
    ]
    assert printed()[-1] == NO_UPDATE


def test_other_reasons_for_a_round_without_pairs():
    tied_by_item = Collection(actor_rewards=[1.0, 1.0, 3.0, 3.0])
    assert "the scores, from 1 to 3, differ between task items but not within a comparison" in why_no_pairs(
        2, tied_by_item, 0, compared=False
    )
    silent = Collection(actor_rewards=[1.0, 2.0])
    assert "no score of the comparator's joint responses. Check" in why_no_pairs(2, silent, 0, compared=True)
    cut = Collection(pairs=[object(), object()], actor_rewards=[1.0, 2.0])
    assert "2 pairs were collected, and none of them can be trained on" in why_no_pairs(2, cut, 0, compared=False)


def test_a_policy_without_a_gradient_is_told_of(tmp_path, printed):
    data = make_data(lambda *texts: [1.0] * len(texts[0]), iterative=False, num_candidates=None, eval_items=None)
    trainer = make_trainer(tmp_path)
    trainer.fit(MARLModule(make_team(), num_generations=2, num_train_epochs=1), data)
    assert trainer.global_step > 0
    assert printed()[-1] == (
        "nothing was learned: in every rollout all joint responses of a task item had the same reward, so no update "
        "had a gradient"
    )
    data = make_data(text_reward, iterative=False, num_candidates=None, eval_items=None)
    make_trainer(tmp_path / "other").fit(MARLModule(make_team(), num_generations=4, num_train_epochs=1), data)
    assert not printed()[-1].startswith("nothing was learned")


# -- where things are ----------------------------------------------------------------------------------------------


def closing(printed):
    return [line for line in printed() if "directory: " in line or "logdir" in line]


def test_a_trial_run_says_nothing_of_directories(tmp_path, printed):
    make_trainer(tmp_path, fast_dev_run=True, logger=True).fit(make_module(rounds=1), make_data())
    assert closing(printed) == []
    assert not any("None" in line for line in printed())


def test_tensorboard_is_not_named_where_it_was_given_nothing(tmp_path, printed):
    make_trainer(tmp_path).fit(make_module(rounds=1), make_data())
    assert closing(printed) == [f"run directory: {tmp_path}"]
