"""Level-based writing rewards by hand; their items from files and from the `datasets` library."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from pbrl_lightning.tasks import expansion, summaries, writing
from pbrl_lightning.tasks.levels import LevelReward, measure, overlap, transition_kinds
from pbrl_lightning.tasks.rows import load_rows

BANDS = {"first_words": (4, 6), "second_words": (8, 12), "length_ratio": (2, 3), "vocabulary_ratio": (2, 3)}
REWARD = LevelReward(**BANDS, overlap=(0.1, 0.5), transitions=2)


def numbered(count, start=0):
    """A text of ``count`` different content words."""
    return " ".join(f"word{index}" for index in range(start, start + count))


@pytest.mark.parametrize(
    ("first", "second", "levels", "reward"),
    [
        # 5 and 10 words; 10/5 = 2; 10/5 = 2; no transition, 5 of 10 in common = 0.5: (0 + 1)/2. 0.5 + 1 + 1 + 0.25.
        (numbered(5), numbered(10), (1, 1, 1, 0.5), 2.75),
        # Two kinds of transitions, both stopwords: 12 words; 12/5 = 2.4. (1 + 1)/2: all of 3.
        (numbered(5), "then but " + numbered(10), (1, 1, 1, 1), 3.0),
        # One kind, nothing in common: (0.5 + 0)/2 = 0.25; 11/5 = 2.2. 0.5 + 1 + 1 + 0.125.
        (numbered(5), "but " + numbered(10, start=50), (1, 1, 1, 0.25), 2.625),
        # 3 words of 4: (0.75 + 1)/2; 8/3 in band; 8/3 in band; 3/8 = 0.375: (0 + 1)/2. 0.4375 + 1 + 1 + 0.25.
        (numbered(3), numbered(8), (0.875, 1, 1, 0.5), 2.6875),
        # 1 word of 4, 4 of 8: (0.25 + 0.5)/2 is under the threshold: half of it and no more. 4/1: 2 - 4/3.
        (numbered(1), numbered(4), (0.375, 2 / 3, 2 / 3, 0.5), 0.1875),
        # (0.25 + 1)/2 lets the next level count, which is 0: 8/1 is more than twice 3.
        (numbered(1), numbered(8), (0.625, 0, 0, 0.5), 0.3125),
        # 6 and 8 words: 4/3 of 2 = 2/3; vocabulary: 2 different words to 6, 1/3 of 2 = 1/6, the last to count.
        (numbered(6), "word0 word1 " * 4, (1, 2 / 3, 1 / 6, 0.5), 0.5 + 2 / 3 + 1 / 6),
        # A text without a word.
        ("", numbered(8), (0, 0, 0, 0), 0.0),
        ("?!", "...", (0, 0, 0, 0), 0.0),
    ],
)
def test_levels_by_hand(first, second, levels, reward):
    assert REWARD.levels(first, second) == pytest.approx(levels, abs=1e-12)
    assert REWARD([first], [second]) == pytest.approx([reward], abs=1e-12)


def test_a_level_at_the_threshold_lets_the_next_count_and_one_below_does_not():
    assert REWARD.score((0.5, 1, 1, 1)) == 0.25 + 1 + 1 + 0.5
    assert REWARD.score((0.499, 1, 1, 1)) == pytest.approx(0.2495)
    assert REWARD.score((1, 1, 0, 1)) == 1.5
    assert LevelReward(**BANDS, overlap=(0.1, 0.5), threshold=0).score((0, 0, 0, 1)) == 0.5


def test_two_repeated_texts_have_no_style():
    # Both ends of the overlap: the same words give 1, twice the upper end.
    assert overlap("a bread", "bread the") == 1.0
    assert REWARD.levels(numbered(8), numbered(8))[3] == 0.0
    assert overlap("", "") == overlap("the", "of") == 0.0


def test_transitions_are_whole_words_and_count_by_kind():
    assert transition_kinds("Buttons, alsoran, thence") == set()
    assert transition_kinds("BUT yet However") == {"contrast"}
    assert len(transition_kinds("Also, but because of, for example, first, overall")) == 6


def test_wrong_numbers_are_named_together():
    with pytest.raises(
        ValueError, match=r"`length_ratio` must be 0 < low <= high.*`transitions` must be 1 to 6, got 7"
    ):
        LevelReward(**{**BANDS, "length_ratio": (3, 2)}, overlap=(0.1, 0.5), transitions=7)
    with pytest.raises(ValueError, match=r"`threshold` must be in \[0, 1\], got 2"):
        LevelReward(**BANDS, overlap=(0.1, 0.5), threshold=2)
    with pytest.raises(ValueError, match="`second` must have 1 texts"):
        REWARD(["a"], [])


def test_metrics_are_means_and_levels_reached():
    first, second = [numbered(5), numbered(1)], [numbered(10), numbered(8)]
    assert REWARD.metrics(first, second) == {
        "length_ratio": (2 + 8) / 2,
        "vocabulary_ratio": (2 + 8) / 2,
        "transitions": 0.0,
        "overlap": (0.5 + 0.125) / 2,
        "within_limits": 0.5,
        "levels_reached": (4 + 1) / 2,  # a style of 0.5 is at the threshold
    }
    assert REWARD.metrics([], []) == {}
    assert summaries.metrics([], []) == expansion.metrics([], []) == writing.writing_metrics([], []) == {}
    assert writing.writing_metrics(["the"], ["a cat"]) == {"brief_words": 1, "detailed_words": 2, "length_ratio": 2}


GOOD_SUMMARY = (
    "My neighbour plays the trumpet every evening although he promised twice to start earlier, and I wonder what to do."
)
GOOD_DETAILS = (
    "Every evening my neighbour practises his trumpet behind our common wall. I get up early, so I asked him twice to "
    "begin sooner. He agreed; however, he soon returned to his old hours. I like him because he is kind and improves. "
    "Therefore I cannot decide whether the landlord should hear of it."
)


def test_what_the_tasks_ask_for_is_rewarded_more_than_what_they_do_not():
    assert summaries.summary_reward([GOOD_SUMMARY], [GOOD_DETAILS])[0] > 2.7
    assert summaries.summary_reward([GOOD_DETAILS], [GOOD_SUMMARY])[0] < 1
    assert summaries.summary_reward([GOOD_SUMMARY], [GOOD_SUMMARY])[0] < 1.6
    one = expansion.train_items()[0]["abstract_text"]
    two = "However, cities plan such pits first by cost. " + expansion.train_items()[1]["abstract_text"]
    scores = expansion.expansion_reward([one, one, one], [two, one, one[:60]])
    assert scores[0] == max(scores)
    for reward in (summaries.summary_reward, expansion.expansion_reward):
        assert reward.reward_range == (0.0, 3.0)
        assert all(0 <= score <= 3 for score in scores)


@pytest.mark.parametrize(("task", "field"), [(summaries, "prompt"), (expansion, "abstract_text")])
def test_the_demonstration_files_are_marked_and_their_splits_are_apart(task, field):
    train, evaluation = task.train_items(), task.eval_items()
    assert (len(train), len(evaluation)) == (8, 4)
    assert all(set(item) == {field} for item in train + evaluation)
    assert len({item[field] for item in train + evaluation}) == 12
    name = "summaries_demo.jsonl" if task is summaries else "abstracts_demo.jsonl"
    rows = task.packaged_rows(name)
    assert {row["origin"] for row in rows} == {"written for this package, for demonstration"}
    first, second = (formatter(train[0]) for formatter in task.FORMATTERS)
    assert first[1] == second[1] == {"role": "user", "content": train[0][field]}
    assert first[0] != second[0]


def test_rows_from_files(tmp_path):
    rows = [{"prompt": f"post {number}", "completion": "…"} for number in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        assert load_rows(str(tmp_path / name)) == rows
        assert summaries.load_items(str(tmp_path / name), limit=2) == [{"prompt": "post 0"}, {"prompt": "post 1"}]
    with pytest.raises(ValueError, match=r"row 0 must have text in 'abstract_text', got None; it has \['completion'"):
        expansion.load_items(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"`source` must be a file of JSON, JSONL"):
        load_rows("a.txt")
    with pytest.raises(ValueError, match="`limit` must be None or at least 1, got 0"):
        load_rows("a.json", limit=0)
    with pytest.raises(FileNotFoundError):
        load_rows(str(tmp_path / "none.jsonl.gz"))


def test_rows_from_the_datasets_library_if_it_is_there(monkeypatch):
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return ({"abstract_text": f"abstract {number}", "id": number} for number in range(10**9))  # as if streamed

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert expansion.load_items("datasets:OpenMLRL/arXiv_abstract", "val", limit=1) == [{"abstract_text": "abstract 0"}]
    assert load_rows("datasets:google-research-datasets/mbpp:sanitized", "test", 1)[0]["id"] == 0
    assert load_rows("datasets:trl-lib/tldr::val[:9]", "test", 1)[0]["id"] == 0
    assert asked == [
        ("OpenMLRL/arXiv_abstract", None, "val"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
        ("trl-lib/tldr", None, "val[:9]"),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pbrl-lightning\[datasets\]'"):
        load_rows("datasets:any")


def test_measures_of_texts():
    seen = measure("Bake bread.", "But then, bake!")
    assert (seen.words, seen.length_ratio, seen.vocabulary_ratio, seen.transitions) == ((2, 3), 1.5, 0.5, 2)
    assert seen.overlap == 0.5
