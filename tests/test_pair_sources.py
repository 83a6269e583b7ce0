"""Whatever `pairs` can be given as: the same pairs, errors that name the place, and the command line."""

import functools
import gzip
import json
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from pbrl_lightning import JointRewardModel, JointRewardModule, PreferenceDataModule
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.cli import main
from pbrl_lightning.data_items import source_names
from pbrl_lightning.preferences.pair_sources import pair_sources, read_pairs
from pbrl_lightning.preferences.round_files import RoundFileError, pair_to_record, write_round_file
from training_runs import Killer, StopError, make_module, make_team, make_trainer, same_weights, weights_of

ROWS = [{"prompt": letter, "chosen": f"{letter}!", "rejected": letter} for letter in "abcd"]
PAIRS = [PreferencePair([letter], [f"{letter}!"], [letter], 1.0, 0.0, 0.5, has_rewards=False) for letter in "abcd"]
RECORDS = [PreferencePair(["p", "q"], ["w", letter], ["l", ""], 2.0, 1.0, 1.5) for letter in "ab"]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    library = pytest.importorskip("datasets", reason="optional: the `datasets` library is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    return library


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(directory):
    """The four rows as a file of each kind that needs no library."""
    (directory / "a.jsonl").write_text(lines(ROWS))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (directory / "c.json").write_text(json.dumps(ROWS, indent=1))
    return [directory / name for name in ("a.jsonl", "b.jsonl.gz", "c.json")]


def make_rows(rows=tuple(ROWS)):
    return list(rows)


class Pairs:
    """Counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return iter(ROWS)


# -- the same pairs ------------------------------------------------------------------------------------------------


def test_files_lists_and_callables_hold_the_same_pairs(tmp_path):
    for path in written(tmp_path):
        assert read_pairs(path) == read_pairs(str(path)) == read_pairs([str(path)]) == PAIRS
    for given in (ROWS, tuple(ROWS), iter(ROWS), PAIRS, [*ROWS[:2], *PAIRS[2:]], make_rows):
        assert read_pairs(given) == PAIRS
    assert read_pairs(f"{__name__}:make_rows") == read_pairs(f"{__name__}.make_rows") == PAIRS
    assert read_pairs(functools.partial(str, tmp_path / "a.jsonl")) == PAIRS  # a callable may also name a file
    assert read_pairs([tmp_path / "a.jsonl", str(tmp_path / "c.json")]) == PAIRS * 2


def test_records_in_a_list_are_those_of_a_round_file(tmp_path):
    write_round_file(tmp_path / "iteration_0001.json", 1, RECORDS)
    (tmp_path / "list.json").write_text(json.dumps([pair_to_record(pair) for pair in RECORDS]))
    assert read_pairs(tmp_path / "iteration_0001.json") == read_pairs(tmp_path / "list.json") == RECORDS
    assert read_pairs([pair_to_record(pair) for pair in RECORDS]) == RECORDS
    assert read_pairs("package:pbrl_lightning/tasks/data/writing_pairs.json")[0].has_rewards


def test_data_sets_hold_the_same_pairs(tmp_path, datasets):
    data = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "folder"
    folder.mkdir()
    data.to_parquet(folder / "train.parquet")
    data.select([3, 1]).to_parquet(folder / "test.parquet")
    data.to_csv(tmp_path / "rows.csv")
    assert read_pairs(data) == read_pairs(lambda: data) == PAIRS
    assert read_pairs(data.select([2, 0])) == [PAIRS[2], PAIRS[0]]
    assert read_pairs(folder / "train.parquet") == read_pairs(str(tmp_path / "rows.csv")) == PAIRS
    assert read_pairs(f"datasets:{folder}") == PAIRS
    assert read_pairs(f"datasets:{folder}::test") == [PAIRS[3], PAIRS[1]]
    assert read_pairs([f"datasets:{folder}::train[:1]", str(folder / "test.parquet"), data.select([2])]) == [
        *(PAIRS[0], PAIRS[3], PAIRS[1], PAIRS[2])
    ]


def test_a_column_without_a_value_is_a_key_that_is_not_there(datasets):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    other = [chat[0], {"role": "assistant", "content": "No."}]
    data = datasets.Dataset.from_list([{"prompt": None, "chosen": chat, "rejected": other, "score": None}])
    (pair,) = read_pairs(data)
    assert (pair.prompts, pair.winner_completions) == (["user: Hi\nassistant: "], ["Yes?\n"])
    record = {**pair_to_record(RECORDS[0]), "target_raw_reward": None}
    assert read_pairs(datasets.Dataset.from_list([record])) == RECORDS[:1]
    with pytest.raises(RoundFileError, match=r"`pairs`, row 0: `rejected` is missing; the line has chosen"):
        read_pairs(datasets.Dataset.from_list([{"chosen": "a", "rejected": None}]))


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "`pairs` must name at least one file or hold at least one pair, got an empty list"),
        (3, r"`pairs` must be a file, `datasets:NAME`, .* got int 3"),
        (ROWS[0], r"`pairs` must be a file, .* got dict \{'prompt'"),
        (lambda: 3, "`pairs` must be a file, .* got int 3"),
        (
            [ROWS[0], "a.jsonl"],
            r"list either files or pairs, but `pairs\[0\]` is dict .* `pairs\[1\]` is str 'a.jsonl'",
        ),
        (["a.jsonl", 3], r"`pairs\[1\]` must be a file or a pair, got int 3"),
        (
            [{"chosen": "a", "rejected": "b"}, {"chosen": "a"}],
            "`pairs`, pair 1: `rejected` is missing; the line has chosen",
        ),
        (
            [{"chosen": "a", "rejected": 3}],
            "`pairs`, pair 0: `rejected` must be a text or a list of messages, got int 3",
        ),
        (
            [pair_to_record(RECORDS[0]), ROWS[0]],
            r"`pairs`, pair 1: .* same number of agents .* 2 \(`pairs`, pair 0\), got 1",
        ),
        ("no_such.module:pairs", "there is no module `no_such.module`"),
        (f"{__name__}:nothing", "has no attribute `nothing`"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(given, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(given)


def test_errors_of_files_name_the_file(tmp_path):
    written(tmp_path)
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode())[:-9])
    (tmp_path / "no.jsonl.gz").write_text(lines(ROWS))
    (tmp_path / "bad.json").write_text(json.dumps([*ROWS, {"chosen": "a"}]))
    (tmp_path / "half.json").write_text(json.dumps(ROWS)[:-5])
    for name, message in (
        ("torn.jsonl.gz", r"torn.jsonl.gz is not a whole gzip file"),
        ("no.jsonl.gz", r"no.jsonl.gz is not a whole gzip file"),
        ("bad.json", r"bad.json, pair 4: `rejected` is missing"),
        ("half.json", r"half.json is not a whole JSON file"),
    ):
        with pytest.raises(RoundFileError, match=message):
            read_pairs(tmp_path / name)
    missing = [str(tmp_path / "x.parquet"), str(tmp_path / "a.jsonl"), "y.jsonl.gz"]
    with pytest.raises(FileNotFoundError, match=r"`eval_pairs` must name existing files, got .*x.parquet, y.jsonl.gz$"):
        read_pairs(missing, name="eval_pairs")
    with pytest.raises(ValueError, match=r"`pairs` must name each file once, got .*a.jsonl again"):
        read_pairs([tmp_path / "a.jsonl", tmp_path / "." / "a.jsonl"])


def test_errors_of_data_sets_name_what_to_do(tmp_path, datasets, monkeypatch):
    data = datasets.Dataset.from_list([*ROWS, {"prompt": "e", "chosen": "same", "rejected": "same"}])
    with pytest.raises(
        RoundFileError, match="`pairs`, row 4: `chosen` and `rejected` must differ, got twice str 'same'"
    ):
        read_pairs(data)
    data.to_parquet(tmp_path / "e.parquet")
    with pytest.raises(RoundFileError, match=r"e.parquet, row 4: `chosen` and `rejected` must differ"):
        read_pairs(str(tmp_path / "e.parquet"))
    with pytest.raises(ValueError, match=r"`pairs` must be one split of a data set, such as `data\['train'\]`"):
        read_pairs(datasets.DatasetDict(train=data))
    with pytest.raises(ValueError, match="`pairs` must be a data set with a length"):
        read_pairs(data.to_iterable_dataset())
    with pytest.raises(ValueError, match="`pairs` must hold at least one pair, got none"):
        read_pairs(data.select([]))
    with pytest.raises(FileNotFoundError, match="must name a data set of the hub or a directory"):
        read_pairs("datasets:./nowhere")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the `datasets` library: pip install 'pbrl-lightning\[datasets\]'"):
        read_pairs(str(tmp_path / "e.parquet"))


# -- runs ----------------------------------------------------------------------------------------------------------


def train(root, pairs, *, callbacks=(), ckpt_path=None, **options):
    module = make_module(make_team(num_agents=1), num_train_epochs=2)
    options = {"enable_checkpointing": bool(callbacks), **options}
    make_trainer(root, callbacks, **options).fit(module, PreferenceDataModule(pairs=pairs), ckpt_path=ckpt_path)
    return weights_of(module.team)


def test_runs_on_the_same_pairs_end_with_the_same_weights(tmp_path, datasets):
    paths = written(tmp_path)
    expected = train(tmp_path / "0", str(paths[0]))
    asked = Pairs()
    for number, given in enumerate((paths, ROWS, datasets.Dataset.from_list(ROWS), asked), start=1):
        given = given[1:2] if given is paths else given
        assert same_weights(train(tmp_path / str(number), given), expected)
    assert asked.calls == 1  # by the data module: another order could not move pairs over the border of a split


def test_a_run_on_a_data_set_resumes_inside_an_epoch(tmp_path, datasets):
    data = datasets.Dataset.from_list(ROWS * 3)
    whole = train(tmp_path / "whole", data)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "cut", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(StopError):
        train(tmp_path / "run", data, callbacks=[checkpoint, Killer(4)])
    (path,) = (tmp_path / "cut").glob("*step=4.ckpt")
    assert same_weights(train(tmp_path / "run", data, ckpt_path=path), whole)


def test_an_error_of_given_pairs_comes_before_any_model_is_loaded(tmp_path):
    team = make_team(num_agents=1)
    for options, message in (
        ({"pairs": [ROWS[0], {"chosen": 1}]}, "`pairs`, pair 1: `rejected` is missing"),
        ({"pairs": ROWS, "eval_pairs": ["gone.jsonl"]}, "`eval_pairs` must name existing files, got gone.jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path).fit(make_module(team), PreferenceDataModule(**options))
    assert not team.is_loaded


def test_what_pairs_are_called_in_model_cards(tmp_path, datasets):
    assert source_names(
        pairs=[tmp_path / "a.jsonl", "datasets:org/name::train"], eval_pairs=datasets.Dataset.from_list(ROWS)
    ) == {
        "pairs": "the file `a.jsonl`; `datasets:org/name::train`",
        "eval_pairs": "given in Python as a `Dataset`",
    }
    assert pair_sources("datasets:org/name::train[:10]", "pairs") == [
        "datasets:org/name::train[:10]"
    ]  # nothing is read


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one", "list", "rows"])
def test_pairs_on_the_command_line_go_round_through_the_saved_config(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    given = {"one": "a.jsonl", "list": "[a.jsonl, b.jsonl.gz]", "rows": json.dumps(ROWS)}[form]
    config = str(ROOT / "configs/debug/reward.yaml")
    short = ["--trainer.max_steps=1", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=one"]
    held_out = ["--data.eval_pairs=[c.json]"] if form == "one" else []
    main(["fit", "--config", config, "--data.pairs", given, *held_out, *short])
    (saved,) = Path("one").rglob("config.yaml")
    data = yaml.safe_load(saved.read_text())["data"]
    assert data["pairs"] == {"one": "a.jsonl", "list": ["a.jsonl", "b.jsonl.gz"], "rows": ROWS}[form]
    assert data["eval_pairs"] == (["c.json"] if held_out else None)
    if form != "one":
        return
    main(["fit", "--config", str(saved), "--trainer.logger.init_args.save_dir=two"])
    metrics = [next(Path(run).rglob("metrics.csv")).read_text().splitlines() for run in ("one", "two")]
    assert [len(text) for text in metrics] == [len(metrics[0])] * 2
    assert "reward/loss" in metrics[0][0]


def test_a_wrong_kind_is_one_sentence_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs/debug/reward.yaml"), "--data.pairs", "gone.jsonl"])
    assert "`pairs` must name existing files, got gone.jsonl" in capsys.readouterr().err


def test_a_reward_model_takes_them_too(tmp_path):
    data = PreferenceDataModule(pairs=ROWS, val_fraction=0.5, batch_size=2)
    trainer = make_trainer(tmp_path)
    trainer.fit(JointRewardModule(JointRewardModel("builtin:tiny")), data)
    assert len(data.training_pairs) == 2
    assert "reward/val_accuracy" in trainer.callback_metrics
