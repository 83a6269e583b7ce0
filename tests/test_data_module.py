"""The data module: which rounds are collected when, their files, empty rounds, items and bad input."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pbrl_lightning import (
    AgentTeam,
    AllHistoryReplay,
    CurrentComparator,
    CurrentReplay,
    HistoryComparator,
    LambdaDecayReplay,
    MADPOModule,
    NearestKReplay,
    PreferenceDataModule,
    SamplingConfig,
)
from pbrl_lightning.data_items import load_items
from pbrl_lightning.preferences.oracle import OracleError
from pbrl_lightning.preferences.round_files import ForeignReplayError, RoundFileError
from training_runs import (
    EVAL_ITEMS,
    ITEMS,
    SAMPLING,
    CountingReward,
    Recorder,
    make_data,
    make_module,
    make_team,
    make_trainer,
    round_files,
    same_weights,
    text_reward,
    weights_of,
)


def fit(root, data, module=None, callbacks=(), **options):
    module = module or make_module(make_team(True), rounds=2 if data.iterative else None)
    recorder = Recorder()
    trainer = make_trainer(root, [recorder, *callbacks], **options)
    trainer.fit(module, data)
    return trainer, recorder


# -- one collection per round --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterative", "rounds", "epochs", "calls", "expected"),
    # Reward calls: one per item and side. Evaluation has an oracle of its own and is left out here.
    [
        (False, None, 1, 3, [1]),
        (False, None, 4, 3, [1]),
        (True, 1, 1, 6, [1]),
        (True, 3, 1, 18, [1, 2, 3]),
        (True, 2, 3, 12, [1, 2]),
    ],
)
def test_fault_B68_one_collection_per_round(tmp_path, iterative, rounds, epochs, calls, expected):
    reward = CountingReward()
    data = make_data(reward, iterative=iterative, eval_items=None, batch_size=100)
    module = make_module(make_team(True), rounds=rounds, num_train_epochs=epochs)
    trainer, recorder = fit(tmp_path, data, module)
    assert reward.calls == calls
    assert trainer.current_epoch == len(expected) * epochs
    assert trainer.global_step == len(expected) * epochs  # a batch holds all pairs
    assert recorder.events == [
        event
        for number in expected
        for event in (f"start {number}", f"collected {number}", *["batch"] * epochs, f"end {number}")
    ]
    files = round_files(tmp_path / "replay")
    assert list(files) == [f"iteration_{number:04d}.json" for number in expected]
    for number, content in zip(expected, files.values(), strict=True):
        assert set(content) == {"iteration", "num_pairs", "pairs"}
        assert content["iteration"] == number
        assert content["num_pairs"] == len(content["pairs"]) == data.rounds[number - 1].collected_pairs > 0
    assert data.env_step == len(expected) * 3 * 4 * (2 if iterative else 1)
    assert data.current_round == len(expected)


def test_fault_B68_evaluation_and_sanity_checks_collect_nothing_twice(tmp_path):
    reward = CountingReward()
    _, recorder = fit(tmp_path, make_data(reward), make_module(make_team(True), rounds=2), num_sanity_val_steps=2)
    # 2 rounds of 6 calls, an evaluation before the first update and one at the end.
    assert reward.calls == 12 + 2
    assert [event for event in recorder.events if event.startswith("collected")] == ["collected 1", "collected 2"]


def test_every_round_samples_anew_with_the_current_weights(tmp_path):
    fit(tmp_path, make_data(), make_module(make_team(True), rounds=2, learning_rate=1e-9))
    first, second = (content["pairs"] for content in round_files(tmp_path / "replay").values())
    assert first != second


def test_a_fit_is_a_function_of_its_seed(tmp_path):
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(found))  # the global generator is nobody's business
        team = make_team()
        fit(tmp_path / name, make_data(seed=seed), make_module(team, rounds=2))
        found.append((weights_of(team), round_files(tmp_path / name / "replay")))
    assert same_weights(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not same_weights(found[0][0], found[2][0])


def test_a_second_fit_of_the_same_objects_is_a_run_of_its_own(tmp_path):
    data = make_data(comparator=HistoryComparator(1))
    module = make_module(make_team(True), rounds=2)
    fit(tmp_path / "a", data, module)
    _, recorder = fit(tmp_path / "b", data, module)
    assert [event for event in recorder.events if event != "batch"] == [
        f"{what} {number}" for number in (1, 2) for what in ("start", "collected", "end")
    ]
    assert [record.round for record in data.rounds] == [1, 2]
    assert list(round_files(tmp_path / "b" / "replay")) == ["iteration_0001.json", "iteration_0002.json"]
    assert (tmp_path / "b" / "history" / "iteration_0001").is_dir()
    assert data.env_step == 2 * 3 * 8


# -- defaults ------------------------------------------------------------------------------------------------------


def test_defaults_of_base_and_iterative_runs():
    base = PreferenceDataModule(ITEMS, text_reward)
    iterative = PreferenceDataModule(ITEMS, text_reward, comparator=CurrentComparator())
    assert (base.num_candidates, base.pairs_per_sample, base.pair_selection) == (80, 16, "reward_gap")
    assert (iterative.num_candidates, iterative.pairs_per_sample, iterative.pair_selection) == (
        20,
        4,
        "comparator_reward",
    )
    assert base.batch_size is iterative.batch_size is None  # the module's: 2 pairs for MADPO
    assert MADPOModule.pair_batch_size == 2
    assert isinstance(base.replay, CurrentReplay)
    assert base.sampling == SamplingConfig(0.6, 0.6, 50, 256)
    module = make_module()
    assert module.make_schedule(False).total_epochs == 20
    assert (module.make_schedule(True).num_rounds, module.make_schedule(True).total_epochs) == (6, 6)
    assert PreferenceDataModule(ITEMS, text_reward, pair_selection="all").pairs_per_sample is None
    assert PreferenceDataModule(ITEMS, text_reward, pairs_per_sample=None).pairs_per_sample is None


def test_the_number_of_candidates_and_pairs_is_what_was_asked(tmp_path):
    data = make_data(iterative=False, num_candidates=6, pairs_per_sample=2)
    fit(tmp_path, data, make_module(num_train_epochs=1))
    pairs = round_files(tmp_path / "replay")["iteration_0001.json"]["pairs"]
    assert data.env_step == 18
    by_prompt = {letter: sum(pair["prompts"] == [letter, letter] for pair in pairs) for letter in "abc"}
    assert max(by_prompt.values()) == 2


# -- configuration errors, before a model is loaded -----------------------------------------------------------------


def test_rounds_without_a_comparator_are_an_error_before_anything_is_loaded(tmp_path):
    team = make_team()
    with pytest.raises(ValueError, match=r"`num_iterations` is 1, but .* `comparator`"):
        fit(tmp_path, make_data(iterative=False), make_module(team, rounds=1))
    assert not team.is_loaded
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": ["x.json"], "comparator": CurrentComparator()}, "neither `comparator` nor `replay`"),
        ({"pairs": ["x.json"], "replay": CurrentReplay()}, "neither `comparator` nor `replay`"),
        ({"pairs": ["x.json"], "eval_items": EVAL_ITEMS}, "`reward_func` must be given with `eval_items`"),
        ({"items": ITEMS, "reward_func": text_reward, "replay": NearestKReplay(2)}, "needs a `comparator`"),
        ({"items": ITEMS, "reward_func": text_reward, "num_candidates": 0}, "`num_candidates` must be >= 1, got 0"),
        ({"items": ITEMS, "reward_func": text_reward, "num_candidates": 1}, "one candidate makes no pair"),
        ({"items": ITEMS, "reward_func": text_reward, "batch_size": 0}, "`batch_size` must be >= 1, got 0"),
        ({"items": ITEMS, "reward_func": text_reward, "num_turns": 2}, "`num_turns` must be 1"),
        ({"items": ITEMS, "reward_func": text_reward, "joint_mode": "cross"}, "`joint_mode` must be 'aligned'"),
        ({"items": ITEMS, "reward_func": text_reward, "pair_selection": "comparator_reward"}, "comparator_reward"),
        ({"items": ITEMS, "reward_func": text_reward, "pairs_per_sample": 0}, "`pairs_per_sample` must be"),
        (
            {"items": ITEMS, "reward_func": text_reward, "pair_selection": "all", "pairs_per_sample": 3},
            "must be null with pair_selection 'all'",
        ),
        ({"items": ITEMS, "reward_func": 3}, "`reward_func` must be a callable"),
        ({"items": ITEMS, "reward_func": "no.such:reward"}, "`reward_func`: .*no module `no"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PreferenceDataModule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": ITEMS}, "`reward_func` must be given"),
        ({"items": ITEMS, "reward_func": text_reward, "pairs": ["x.json"]}, "`items` and `pairs` exclude"),
        ({"items": ITEMS, "reward_func": text_reward, "val_fraction": 0.5}, "a run that collects its pairs takes `ev"),
        (
            {"items": ITEMS, "reward_func": text_reward, "preference_scoring_reward": "reward_model"},
            "needs a MARLHFModule and a `comparator`",
        ),
    ],
)
def test_options_that_do_not_fit_the_module_are_found_before_it_is_loaded(tmp_path, options, message):
    team = make_team()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, PreferenceDataModule(**options), make_module(team))
    assert not team.is_loaded


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)batch_size.*num_turns.*joint_mode"):
        PreferenceDataModule(ITEMS, text_reward, batch_size=0, num_turns=3, joint_mode="x")


def test_fault_B24_one_candidate_is_enough_against_a_comparator(tmp_path):
    data = make_data(num_candidates=1)
    fit(tmp_path, data, make_module(make_team(True), rounds=2))
    assert 0 < data.rounds[0].collected_pairs <= 3


def test_nothing_to_fit(tmp_path):
    team = make_team()
    with pytest.raises(ValueError, match=r"`items` .* or `pairs` must be given"):
        fit(tmp_path, PreferenceDataModule(), make_module(team))
    assert not team.is_loaded


# -- items ---------------------------------------------------------------------------------------------------------


def some_items():
    return ITEMS


def test_items_from_everywhere(tmp_path):
    odd = [{"prompt": "a\u2028b\x85c"}, {"prompt": "é"}]
    (tmp_path / "items.json").write_text(json.dumps(odd), encoding="utf-8")
    lines = "\n".join(json.dumps(item, ensure_ascii=False) for item in odd)
    (tmp_path / "items.jsonl").write_text(f"\n{lines}\n\n", encoding="utf-8")
    (tmp_path / "windows.jsonl").write_bytes(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert load_items(str(tmp_path / "items.json"), "items") == odd
    assert load_items(tmp_path / "items.jsonl", "items") == odd
    assert load_items(tmp_path / "windows.jsonl", "items") == ITEMS[:2]
    assert load_items(some_items, "items") == ITEMS
    assert load_items(iter(ITEMS), "items") == ITEMS
    assert len(load_items("pbrl_lightning.tasks.coordination:train_items", "items")) == 16
    assert load_items("pbrl_lightning.tasks.coordination.eval_items", "items")[0] == {"prompt": "q"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "`items` must hold at least one task item"),
        (lambda: [], "`items` must hold at least one task item"),
        (["a"], "item 0 is str: 'a'"),
        ([{"prompt": "a"}, None], "item 1 is NoneType"),
        ({"prompt": "a"}, "`items` must be a list of dicts, got dict"),
        (3, "`items` must be a list of dicts, got int"),
        ("no_such_module.items", "no module `no_such_module"),
        ("pbrl_lightning.tasks.coordination.train_item", "did you mean `train_items`"),
    ],
)
def test_bad_items(given, message):
    with pytest.raises(ValueError, match=message):
        make_data(items=given)


def test_fault_B83_bad_item_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        load_items(tmp_path / "missing.json", "items")
    (tmp_path / "a.json").write_text('[{"prompt": "a"}')
    with pytest.raises(ValueError, match=r"a.json: not valid JSON"):
        load_items(tmp_path / "a.json", "items")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n\n{"prompt"\n')
    with pytest.raises(ValueError, match=r"b.jsonl, line 3: not valid JSON"):
        load_items(tmp_path / "b.jsonl", "items")
    (tmp_path / "c.jsonl").write_text('{"prompt": "a"}\n7\n')
    with pytest.raises(ValueError, match=r"`eval_items` .*c.jsonl.* item 1 is int: 7"):
        make_data(eval_items=str(tmp_path / "c.jsonl"))
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(ValueError, match=r"d.json.* at least one"):
        load_items(tmp_path / "d.json", "items")


def test_a_formatter_that_fails_names_agent_and_item(tmp_path):
    team = make_team(formatters=["{prompt}", "{prompt} {topic}"])
    items = [{"prompt": "a", "topic": "t"}, {"prompt": "b", "topic": "u"}, {"prompt": "c"}]
    with pytest.raises(ValueError, match=r"agent 1 failed on task item 2: .*'topic'.*'prompt'"):
        fit(tmp_path, make_data(items=items), make_module(team, rounds=1))


# -- rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *c: [1.0], r"4 numbers, got 1 in .* for task item 0"),
        (lambda *c: 1 / 0, r"raised ZeroDivisionError for task item 0"),
        (lambda *c: ["good"] * len(c[0]), r"got an element that is str 'good'"),
        (lambda *c: None, r"got NoneType"),
    ],
)
def test_fault_B41_a_reward_that_fails_stops_the_run_with_its_words(tmp_path, reward, message):
    with pytest.raises(OracleError, match=message):
        fit(tmp_path, make_data(reward, eval_items=None), make_module(make_team(True), rounds=1))
    assert not round_files(tmp_path / "replay")


@pytest.mark.parametrize("convert", [torch.tensor, np.array, tuple, lambda s: [np.float32(v) for v in s]])
def test_fault_B93_rewards_of_every_numeric_type_are_the_same(tmp_path, convert):
    fit(
        tmp_path / "a",
        make_data(lambda *c: convert(text_reward(*c)), eval_items=None),
        make_module(make_team(True), rounds=1),
    )
    fit(tmp_path / "b", make_data(text_reward, eval_items=None), make_module(make_team(True), rounds=1))
    assert round_files(tmp_path / "a" / "replay") == round_files(tmp_path / "b" / "replay")


def test_fault_B39_scores_that_are_missing_are_counted_and_the_run_goes_on(tmp_path):
    def reward(*completions):
        return [None if k % 2 else s for k, s in enumerate(text_reward(*completions))]

    data = make_data(reward, eval_items=None)
    with pytest.warns(UserWarning, match="dropped, not scored 0"):
        fit(tmp_path, data, make_module(make_team(True), rounds=1))
    assert data.oracle.num_dropped == 3 * 2 * 2
    assert data.rounds[0].collected_pairs > 0


# -- rounds without pairs ------------------------------------------------------------------------------------------


def test_fault_B83_a_base_run_of_ties_ends_normally_and_says_so(tmp_path):
    team = make_team().load()
    before = weights_of(team)
    with pytest.warns(UserWarning, match="round 1 has no pairs to train on"):
        trainer, recorder = fit(tmp_path, make_data(lambda *c: [1.0] * len(c[0]), iterative=False), make_module(team))
    assert trainer.state.finished
    assert trainer.global_step == 0
    assert same_weights(weights_of(team), before)
    assert round_files(tmp_path / "replay") == {"iteration_0001.json": {"iteration": 1, "num_pairs": 0, "pairs": []}}
    assert recorder.events == ["start 1", "collected 1", "end 1"]


EMPTY = [{1}, {2}, {4}, {3, 4}, {1, 4}, {1, 2, 3, 4}]


@pytest.mark.parametrize(("empty", "epochs"), [*((empty, 1) for empty in EMPTY), ({1, 3}, 2), ({4}, 2)], ids=str)
def test_fault_B83_rounds_without_pairs_are_passed_over_and_counted(tmp_path, empty, epochs):
    # Six reward calls a round: three items, two sides.
    reward = CountingReward(ties={6 * (number - 1) + call for number in empty for call in range(6)})
    data = make_data(reward, eval_items=None, comparator=HistoryComparator(1), batch_size=100)
    team = make_team(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, recorder = fit(tmp_path, data, make_module(team, rounds=4, num_train_epochs=epochs))
    assert reward.calls == 24
    assert trainer.global_step == (4 - len(empty)) * epochs
    expected = []
    for number in range(1, 5):
        steps = [] if number in empty else ["batch"] * epochs
        expected += [f"start {number}", f"collected {number}", *steps, f"end {number}"]
    assert recorder.events == expected
    files = round_files(tmp_path / "replay")
    assert [files[f"iteration_{number:04d}.json"]["num_pairs"] == 0 for number in range(1, 5)] == [
        number in empty for number in range(1, 5)
    ]
    assert [record.train_pairs == 0 for record in data.rounds] == [number in empty for number in range(1, 5)]
    # The last policy checkpoint is the final policy; that of an empty round is the one before it.
    saved = AgentTeam(str(tmp_path / "history" / "iteration_0003")).load()
    assert same_weights(weights_of(saved), weights_of(team))
    assert (tmp_path / "export" / "agent_1" / "adapter_config.json").exists()


@pytest.mark.parametrize("replay", [LambdaDecayReplay(0.5), AllHistoryReplay(), NearestKReplay(1)])
def test_fault_B37_with_history_replay_an_empty_round_trains_on_earlier_pairs(tmp_path, replay):
    ties = set(range(6)) | set(range(12, 18))  # rounds 1 and 3
    data = make_data(CountingReward(ties), eval_items=None, replay=replay, batch_size=100)
    trainer, recorder = fit(tmp_path, data, make_module(make_team(True), rounds=3))
    assert [record.collected_pairs > 0 for record in data.rounds] == [False, True, False]
    assert [record.train_pairs for record in data.rounds] == [
        0,
        data.rounds[1].collected_pairs,
        data.rounds[1].collected_pairs,
    ]
    assert trainer.global_step == 2
    assert recorder.events.count("batch") == 2


def test_fault_B14_B83_a_round_whose_pairs_are_all_the_same_tokens_is_passed_over(tmp_path):
    # A reward with moods: greedy agents say the same on both sides and get different scores.
    class Moody(CountingReward):
        def __call__(self, *completions):
            scores = super().__call__(*completions)
            return [score + self.calls for score in scores]

    greedy = SamplingConfig(temperature=0, max_new_tokens=2)
    team = make_team()
    data = make_data(Moody(), eval_items=None, sampling=greedy, num_candidates=1)
    with pytest.warns(UserWarning, match="same tokens on both sides"):
        trainer, recorder = fit(tmp_path, data, make_module(team, rounds=2))
    assert recorder.events == [f"{what} {number}" for number in (1, 2) for what in ("start", "collected", "end")]
    assert [record.collected_pairs for record in data.rounds] == [3, 3]
    assert [record.train_pairs for record in data.rounds] == [0, 0]
    assert trainer.global_step == 0
    assert team.counts["identical_pairs"] == 6


# -- directories ---------------------------------------------------------------------------------------------------


def test_a_foreign_replay_directory_stops_the_run_before_anything_is_sampled(tmp_path):
    fit(tmp_path / "one", make_data(replay_dir=str(tmp_path / "shared")), make_module(make_team(True), rounds=1))
    before = {path: path.read_bytes() for path in (tmp_path / "shared").iterdir()}
    team, reward = make_team(), CountingReward()
    with pytest.raises(ForeignReplayError, match="belongs to run"):
        fit(tmp_path / "two", make_data(reward, replay_dir=str(tmp_path / "shared")), make_module(team, rounds=1))
    assert reward.calls == 0
    assert {path: path.read_bytes() for path in (tmp_path / "shared").iterdir()} == before


def test_an_unwritable_replay_directory_is_named_before_anything_is_sampled(tmp_path):
    (tmp_path / "file").write_text("")
    reward = CountingReward()
    with pytest.raises(OSError, match="`replay_dir` must be a directory that can be written to"):
        fit(
            tmp_path,
            make_data(reward, replay_dir=str(tmp_path / "file" / "replay")),
            make_module(make_team(True), rounds=1),
        )
    assert reward.calls == 0


@pytest.mark.skipif(os.name == "nt", reason="no permission bits")
def test_fast_dev_run_is_short_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = CountingReward()
    replay = tmp_path / "replay"
    for _ in range(2):
        data = make_data(
            reward, items=ITEMS * 2, eval_items=None, comparator=HistoryComparator(1), replay_dir=str(replay)
        )
        trainer, _ = fit(tmp_path, data, make_module(make_team(True), rounds=3), fast_dev_run=True)
        assert trainer.global_step == 1
    assert reward.calls == 2 * 2 * 2  # twice, two items, two sides
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    fit(tmp_path, make_data(replay_dir=str(replay)), make_module(make_team(True), rounds=1))


# -- pair files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def collected(tmp_path):
    """Two round files."""
    fit(tmp_path / "source", make_data(), make_module(make_team(True), rounds=2))
    return [str(path) for path in sorted((tmp_path / "source" / "replay").glob("iteration_*.json"))]


def test_training_on_pair_files(tmp_path, collected):
    count = sum(len(json.loads(Path(path).read_text())["pairs"]) for path in collected)
    data = PreferenceDataModule(pairs=collected, batch_size=count)
    team = make_team()
    batches = []
    module = make_module(team, num_train_epochs=3)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: batches.append(batch) or step(batch, batch_idx)
    trainer, _ = fit(tmp_path / "run", data, module)
    assert trainer.global_step == 3
    assert [len(batch) for batch in batches] == [count] * 3
    assert not (tmp_path / "run" / "replay").exists()
    tokenizer = team.tokenizer(0)
    pairs = [pair for path in collected for pair in json.loads(Path(path).read_text())["pairs"]]
    for agent in range(2):
        rows = batches[0].agents[agent]
        said = sorted(
            row[mask].tolist() for row, mask in zip(rows.input_ids[:count], rows.response_mask[:count], strict=True)
        )
        texts = [pair["winner_completions"][agent] for pair in pairs]
        assert said == sorted(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)


def test_fault_B89_bad_pair_files_are_found_before_a_model_is_loaded(tmp_path, collected):
    missing = str(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text(Path(collected[0]).read_text()[:-40])
    lacking = tmp_path / "lacking.json"
    content = json.loads(Path(collected[0]).read_text())
    del content["pairs"][2]["loser_reward"]
    lacking.write_text(json.dumps(content))
    empty = tmp_path / "empty.json"
    empty.write_text('{"iteration": 1, "num_pairs": 0, "pairs": []}')
    for paths, error, message in (
        ([missing], FileNotFoundError, "none.json"),
        ([str(broken)], RoundFileError, "broken.json"),
        ([str(lacking)], RoundFileError, "lacking.json.* 2.*loser_reward"),
        ([str(empty)], ValueError, "at least one pair"),
        ([], ValueError, "must name at least one file"),
    ):
        team = make_team()
        with pytest.raises(error, match=message):
            fit(tmp_path / "run", PreferenceDataModule(pairs=paths), make_module(team))
        assert not team.is_loaded


def test_pair_files_of_another_number_of_agents(tmp_path, collected):
    with pytest.raises(ValueError, match="a pair of 2 agents cannot train a team of 3"):
        fit(tmp_path / "run", PreferenceDataModule(pairs=collected), make_module(make_team(num_agents=3)))


# -- trainer options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
def test_a_users_smaller_max_epochs_is_kept(tmp_path, empty):
    ties = set(range(6)) if empty else ()
    data = make_data(CountingReward(ties), eval_items=None, batch_size=100)
    trainer, recorder = fit(tmp_path, data, make_module(make_team(True), rounds=5), max_epochs=2)
    assert trainer.global_step == 2
    assert data.current_round == (3 if empty else 2)
    assert recorder.events[-1] == f"end {data.current_round}"


def test_stopping_inside_a_round_does_not_end_it(tmp_path):
    data = make_data(batch_size=2, comparator=HistoryComparator(1))
    _, recorder = fit(tmp_path, data, make_module(make_team(True), rounds=3, num_train_epochs=2), max_epochs=3)
    assert [event for event in recorder.events if event.startswith("end")] == ["end 1"]
    assert not (tmp_path / "history" / "iteration_0001").exists()


def test_max_steps_stops_in_the_middle_and_at_the_end_of_a_round(tmp_path):
    data = make_data(batch_size=100)
    _, recorder = fit(tmp_path / "end", data, make_module(make_team(True), rounds=3), max_steps=2)
    assert [event for event in recorder.events if event != "batch"][-1] == "end 2"
    assert data.current_round == 2
    data = make_data(batch_size=1)
    trainer, recorder = fit(tmp_path / "middle", data, make_module(make_team(True), rounds=3), max_steps=3)
    assert trainer.global_step == 3
    assert recorder.events[-1] == "batch"


def test_max_epochs_larger_than_the_run_or_without_end(tmp_path):
    for name, epochs in (("a", 100), ("b", -1)):
        trainer, _ = fit(
            tmp_path / name, make_data(batch_size=100), make_module(make_team(True), rounds=2), max_epochs=epochs
        )
        assert trainer.global_step == 2


def test_no_evaluation_items_warn_and_training_items_are_not_taken(tmp_path):
    reward = CountingReward()
    with pytest.warns(UserWarning, match="no `eval_items` are given"):
        fit(tmp_path, make_data(reward, eval_items=None), make_module(make_team(True), rounds=1))
    assert reward.calls == 6


# -- validate ------------------------------------------------------------------------------------------------------


def test_validate_scores_all_items_with_the_evaluation_stream(tmp_path):
    team = make_team().load()
    trainer = make_trainer(tmp_path)
    (found,) = trainer.validate(make_module(team), make_data(batch_size=2), verbose=False)
    samples = team.sample(EVAL_ITEMS, list(range(5)), num_candidates=1, sampling=SAMPLING, seed=0, stream="evaluation")
    scores = torch.tensor([text_reward(*[[text] for text in sample.completions(0)])[0] for sample in samples])
    assert found["eval/n"] == 5
    assert found["eval/turn_1/reward_mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
    assert found["eval/turn_1/expected_return"] == found["eval/turn_1/reward_mean"]
    assert found["eval/turn_1/reward_standard_error"] == pytest.approx((scores.std() / 5**0.5).item(), abs=1e-5)


def test_validate_after_fit_with_the_same_trainer(tmp_path):
    trainer, module, data = make_trainer(tmp_path), make_module(make_team(True), rounds=1), make_data()
    trainer.fit(module, data)
    (found,) = trainer.validate(module, data, verbose=False)
    assert found["eval/n"] == 5
    (alone,) = make_trainer(tmp_path / "other").validate(module, make_data(), verbose=False)
    assert alone == found


def test_validate_without_items_or_scores(tmp_path):
    with pytest.raises(ValueError, match="`eval_items` and `reward_func`"):
        make_trainer(tmp_path).validate(make_module(), make_data(eval_items=None), verbose=False)
    with (
        pytest.warns(UserWarning, match="dropped"),
        pytest.raises(RuntimeError, match=r"no joint response .* got a score"),
    ):
        make_trainer(tmp_path).validate(make_module(), make_data(lambda *c: [None] * len(c[0])), verbose=False)
