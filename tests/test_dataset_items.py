"""Task items from the optional `datasets` library itself: objects, files that it reads, and names."""

import sys
from pathlib import Path

import pytest

from pbrl_lightning import PreferenceDataModule
from pbrl_lightning.cli import PreferenceCLI
from pbrl_lightning.data_items import load_items
from pbrl_lightning.tasks import summaries
from pbrl_lightning.tasks.rows import load_rows
from training_runs import make_data, make_module, make_trainer, text_reward

datasets = pytest.importorskip("datasets", reason="optional: the `datasets` library is not installed")

ROWS = [{"prompt": letter, "level": number} for number, letter in enumerate("abcde")]
CHATS = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def folder(tmp_path):
    """A directory of data files with two splits, as one that was downloaded from the hub."""
    made = tmp_path / "folder"
    made.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[3:])):
        datasets.Dataset.from_list(rows).to_parquet(made / f"{split}.parquet")
    return made


def test_a_dataset_is_its_rows_whatever_view_of_it_is_given():
    data = datasets.Dataset.from_list(ROWS)
    assert load_items(data, "items") == ROWS
    assert load_items(data.select([4, 0]), "items") == [ROWS[4], ROWS[0]]  # by an index over the same table
    assert load_items(data.filter(lambda row: row["level"] > 2), "items") == ROWS[3:]
    shouted = data.with_transform(lambda batch: {"prompt": [text.upper() for text in batch["prompt"]]})
    assert load_items(lambda: shouted, "items")[1] == {"prompt": "B"}  # made when it is read
    assert [type(item) for item in load_items(data, "items")] == [dict] * 5
    assert load_items(datasets.Dataset.from_list(CHATS), "items") == CHATS
    with pytest.raises(ValueError, match="`items` must hold at least one task item"):
        load_items(data.select([]), "items")


def test_a_run_on_a_dataset_is_the_run_on_its_rows(tmp_path):
    rewards = []
    for number, items in enumerate((ROWS[:3], datasets.Dataset.from_list(ROWS[:3]))):
        data = make_data(items=items, iterative=False, eval_items=None)
        make_trainer(tmp_path / str(number), max_steps=1).fit(make_module(), data)
        rewards.append([(record.collected_pairs, record.reward_mean) for record in data.rounds])
    assert rewards[0] == rewards[1]


def test_streams_and_dictionaries_of_splits_are_refused_with_what_to_do():
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    for given in (stream, lambda: stream, datasets.IterableDatasetDict(train=stream)):
        with pytest.raises(ValueError, match=r"`items` must be a data set with a length.*`list\(stream.take\(1000"):
            PreferenceDataModule(given, text_reward)
    assert load_items(list(stream.take(2)), "items") == ROWS[:2]
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:1]))
    with pytest.raises(ValueError, match=r"`eval_items` must be one split.*has: 'train', 'test'"):
        load_items(splits, "eval_items")
    assert load_items(splits["test"], "eval_items") == ROWS[:1]


def test_parquet_and_csv_files(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_csv(tmp_path / "rows.csv")
    for name in ("rows.parquet", "rows.csv"):
        assert load_items(str(tmp_path / name), "items") == ROWS
        assert load_rows(str(tmp_path / name), limit=2) == ROWS[:2]
    with pytest.raises(FileNotFoundError, match=r"none\.parquet' does not exist"):
        load_items(tmp_path / "none.parquet", "items")
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"bad\.parquet' cannot be loaded: "):
        load_items(tmp_path / "bad.parquet", "items")


def test_a_name_with_its_split(tmp_path):
    made = folder(tmp_path)
    assert load_items(f"datasets:{made}", "items") == ROWS
    assert load_items(f"datasets:{made}::test", "items") == ROWS[3:]
    assert load_items(f"datasets:{made}:default:train[1:3]", "items") == ROWS[1:3]
    assert load_rows(f"datasets:{made}", "test") == ROWS[3:]
    assert load_rows(f"datasets:{made}::train", "test", limit=1) == ROWS[:1]  # the name's own goes before
    assert summaries.load_items(f"datasets:{made}", limit=2) == [{"prompt": "a"}, {"prompt": "b"}]


def test_the_command_line_takes_a_name_with_its_split(tmp_path):
    config = str(Path(__file__).parent.parent / "configs/debug/madpo.yaml")
    given = f"datasets:{folder(tmp_path)}::train[:2]"
    cli = PreferenceCLI(["--config", config, "--data.items", given], run=False)
    assert cli.datamodule.items == ROWS[:2]
    assert cli.config.data["items"] == given


def test_what_was_saved_to_disk(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    assert load_items(f"datasets:{tmp_path / 'one'}", "items") == ROWS
    assert load_items(f"datasets:{tmp_path / 'two'}", "items") == ROWS
    assert load_items(f"datasets:{tmp_path / 'two'}::test", "items") == ROWS[:1]
    with pytest.raises(ValueError, match=r"two::val' cannot be loaded: .*val"):
        load_items(f"datasets:{tmp_path / 'two'}::val", "items")


@pytest.mark.parametrize("name", ["datasets:", "datasets:/no/such/directory", "datasets:./none:config:train"])
def test_names_of_nothing(name):
    with pytest.raises(FileNotFoundError, match="must name a data set of the hub or a directory"):
        load_items(name, "items")


def test_what_the_library_refuses_is_told_in_its_words(tmp_path):
    made = folder(tmp_path)
    with pytest.raises(ValueError, match=r"::val' cannot be loaded: .*val.*train"):
        load_items(f"datasets:{made}::val", "items")
    with pytest.raises(ValueError, match=r"'datasets:some-org/not-here' cannot be loaded: "):  # offline
        load_items("datasets:some-org/not-here", "items")


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    for given in ("datasets:any", str(tmp_path / "rows.csv")):
        with pytest.raises(ImportError, match=r"pip install 'pbrl-lightning\[datasets\]'"):
            load_items(given, "items")
