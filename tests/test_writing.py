"""The writing task: its reward by hand, and the data that comes with it."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

import pbrl_lightning.tasks
from pbrl_lightning.tasks import writing
from pbrl_lightning.tasks.writing import WritingReward, band_score, content_words, words, writing_reward

DATA = Path(pbrl_lightning.tasks.__file__).parent / "data"


def numbered(count: int, start: int = 0) -> str:
    """A text of ``count`` different content words."""
    return " ".join(f"word{index}" for index in range(start, start + count))


@pytest.mark.parametrize(
    ("brief", "detailed", "expected"),
    [
        # 10 words; 30/10 = 3; 30/10 = 3: all in their bands 8-14, 3-5, 2.5-4.
        (numbered(10), numbered(30), (1.0, 1.0, 1.0)),
        # 4/8; 4/4 = 1 of 3; 1 of 2.5.
        (numbered(4), numbered(4), (0.5, 1 / 3, 0.4)),
        # 2 - 21/14; 21/21 = 1 of 3; 1 of 2.5.
        (numbered(21), numbered(21), (0.5, 1 / 3, 0.4)),
        # 10 words; 60/10 = 6: 2 - 6/5; 2 - 6/4.
        (numbered(10), numbered(60), (1.0, 0.8, 0.5)),
        # The detailed answer repeats one word 30 times: vocabulary ratio 1/10 of 2.5.
        (numbered(10), "word0 " * 30, (1.0, 1.0, 0.04)),
        # 40 words are more than twice 14; 280/40 = 7: 2 - 7/5; 2 - 7/4.
        (numbered(40), numbered(280), (0.0, 0.6, 0.25)),
        # 9 words, 3 of them content; 18/9 = 2 of 3; 9 content words over 3.
        (
            "The cat is on the mat and the sofa.",
            "On the farm there are hens, ducks, geese, horses, cows, pigs, and also some bees as well, mostly.",
            (1.0, 2 / 3, 1.0),
        ),
    ],
)
def test_components_by_hand(brief: str, detailed: str, expected: tuple[float, float, float]) -> None:
    assert writing_reward.components(brief, detailed) == pytest.approx(expected, abs=1e-12)
    assert writing_reward([brief], [detailed]) == pytest.approx([sum(expected)], abs=1e-12)


@pytest.mark.parametrize(("brief", "detailed"), [("", numbered(30)), (numbered(10), ""), ("", ""), (" \n", "?! …")])
def test_an_answer_without_words_earns_nothing(brief: str, detailed: str) -> None:
    assert writing_reward([brief], [detailed]) == [0.0]


def test_brief_of_stopwords_only_loses_the_vocabulary_term() -> None:
    brief = "it is on and we are so very"  # 8 words
    assert content_words(brief) == set()
    assert writing_reward.components(brief, numbered(24)) == (1.0, 1.0, 0.0)
    assert writing_reward.components(numbered(8), " ".join([brief] * 3)) == (1.0, 1.0, 0.0)


def test_words_are_unicode_and_case_folded() -> None:
    assert words("Don't — GROSSE Straße, naïve 東京 42!") == ["don't", "grosse", "strasse", "naïve", "東京", "42"]
    assert words("it’s") == ["it’s"]
    assert words("🙂 !? ...") == []


def test_band_score_rises_stays_and_falls_without_a_jump() -> None:
    values = [step / 100 for step in range(2001)]
    scores = [band_score(value, 3.0, 7.0) for value in values]
    assert scores[0] == 0.0
    assert scores[1400:] == pytest.approx([0.0] * 601, abs=1e-12)
    assert all(a <= b for a, b in pairwise(scores[:301]))
    assert scores[300:701] == [1.0] * 401
    assert all(a >= b for a, b in pairwise(scores[700:]))
    assert max(abs(a - b) for a, b in pairwise(scores)) <= 0.01 / 3 + 1e-12


def test_every_shorter_brief_answer_above_the_band_earns_more() -> None:
    detailed = numbered(36)
    rewards = writing_reward([numbered(length) for length in range(36, 9, -1)], [detailed] * 27)
    assert all(later >= earlier for earlier, later in pairwise(rewards))
    assert rewards[0] < 1.0
    assert rewards[-1] == 3.0


def test_rewards_stay_in_their_range_and_do_not_depend_on_the_batch() -> None:
    draw = random.Random(0)
    alphabet = "ab é'’.,_-\n\t0東🙂 the"
    brief = ["".join(draw.choices(alphabet, k=draw.randrange(120))) for _ in range(500)]
    detailed = ["".join(draw.choices(alphabet, k=draw.randrange(400))) for _ in range(500)]
    rewards = writing_reward(brief, detailed)
    low, high = writing_reward.reward_range
    assert (low, high) == (0.0, 3.0)
    assert all(low <= reward <= high for reward in rewards)
    assert len(set(rewards)) > 200
    assert rewards == [writing_reward([b], [d])[0] for b, d in zip(brief, detailed, strict=True)]
    assert writing_reward([], []) == []


def test_bands_can_be_set_and_are_checked() -> None:
    # 2 words in 2-4, ratio 4/2 = 2 of 4, vocabulary ratio 2 of 8.
    reward = WritingReward(brief_words=(2, 4), length_ratio=(4, 5), vocabulary_ratio=(8, 9))
    assert reward([numbered(2)], [numbered(4)]) == [1.0 + 0.5 + 0.25]
    with pytest.raises(ValueError, match=r"`brief_words` must be 0 < low <= high, got \(0, 4\); `length_ratio` must"):
        WritingReward(brief_words=(0, 4), length_ratio=(3, 2))


def test_answers_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="`detailed` must have 2 answers, as `brief` has, got 1"):
        writing_reward(["a", "b"], ["c"])


def test_items_of_both_splits() -> None:
    train, evaluation = writing.train_items(), writing.eval_items()
    assert len(train) == len(evaluation) == 12
    for key in ("id", "prompt"):
        assert len({item[key] for item in train + evaluation}) == 24
    assert all(set(item) == {"id", "prompt"} for item in train + evaluation)
    assert all(0 < len(item["prompt"]) <= 250 for item in train + evaluation)
    assert writing.load_items() == train
    assert writing.load_items("eval", limit=3) == evaluation[:3]
    assert writing.load_items("eval", limit=100) == evaluation


def test_wrong_split_and_limit() -> None:
    with pytest.raises(ValueError, match="`split` must be 'train' or 'eval', got 'test'"):
        writing.load_items("test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`limit` must be None or at least 1, got 0"):
        writing.load_items(limit=0)


def test_data_files_come_with_licence_and_source() -> None:
    assert "Apache License" in (DATA / "LICENSE-self-instruct").read_text(encoding="utf-8")
    sources = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    files = sorted(DATA.glob("*.jsonl"))
    assert len(files) == 6
    assert "Permission is hereby granted" in (DATA / "LICENSE-human-eval").read_text(encoding="utf-8")
    for path in files:
        assert path.name in sources
        assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def test_the_two_roles_are_given_the_task() -> None:
    brief, detailed = (formatter({"prompt": "Bake bread."}) for formatter in writing.FORMATTERS)
    assert [message["role"] for message in brief] == ["system", "user"]
    assert brief[1] == detailed[1] == {"role": "user", "content": "Bake bread."}
    assert "one short sentence" in brief[0]["content"]
    assert "detailed" in detailed[0]["content"]
