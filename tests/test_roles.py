"""One model that writes for all roles: tags, adapters of the user's own, comparators that generate centrally."""

import random
import re
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fake_api import FakeApi
from helpers import save_model, tiny
from pbrl_lightning import AgentTeam, ApiEndpoint, CentralizedGeneration, ChatTemplate, JointAdapter, TagAdapter
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.batches import AgentAnswer, Response
from pbrl_lightning.cli import main
from pbrl_lightning.comparators.api import ApiComparator
from pbrl_lightning.comparators.base import CollectionPhase, Comparator
from pbrl_lightning.comparators.history import HistoryComparator
from pbrl_lightning.comparators.local import CurrentComparator, CurrentCopyComparator, ModelComparator
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.randomness import counted_uniforms
from pbrl_lightning.text_gate import encodable_text
from training_runs import (
    ITEMS,
    SAMPLING,
    CountingReward,
    make_data,
    make_module,
    make_team,
    make_trainer,
    perturb,
    round_files,
    text_reward,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CONFIG = str(Path(__file__).parent.parent / "configs/debug/madpo_iter.yaml")
ROLES = ["one {prompt}", "two {prompt}"]
SAME_DRAWS = {"num_candidates": 5, "sampling": SAMPLING, "seed": 0, "stream": "actors", "step": 1}
PARSED = [
    ("<agent_0>Rain.</agent_0><agent_1>Wet.</agent_1>", ["Rain.", "Wet."]),
    ("<AGENT_0>a</Agent_0> <aGeNt_1>b</AGENT_1>", ["a", "b"]),
    ("<agent_0>a< / agent_0><agent _ 1>b</agent_ 1>", ["a", "b"]),
    ("<agent_0\n>a</agent_0><\tagent_1>b</agent_1>", ["a", "b"]),
    ("<agent_0>  a b \t</agent_0><agent_1> c</agent_1>", ["a b", "c"]),
    ("<agent_0>\nline 1\n\nline 2\n</agent_0>\n<agent_1>\nb\n</agent_1>\n", ["line 1\n\nline 2", "b"]),
    ("<agent_0>\r\na\r\nb\r\n</agent_0>\r\n<agent_1>c", ["a\r\nb", "c"]),
    ("<agent_0>a<agent_1>b</agent_1>", ["a", "b"]),
    ("<agent_0>a</agent_0><agent_1>b", ["a", "b"]),
    ("<agent_0>a</agent_0>", ["a", ""]),
    ("<agent_1>b</agent_1>", ["", "b"]),
    ("<agent_1>b</agent_1><agent_0>a</agent_0>", ["a", "b"]),
    ("<agent_0></agent_0><agent_1> \n</agent_1>", ["", ""]),
    ("<agent_1>", ["", ""]),
    ("", None),
    ("Rain falls.", None),
    ("</agent_0>", None),
    ("<agent_0>a</agent_0><agent_0>b</agent_0>", ["a", ""]),
    ("<agent_0>a<agent_0>b</agent_0><agent_1>c", ["a", "c"]),
    ("<agent_2>c</agent_2>", None),
    ("<agent_0>a</agent_0><agent_2>c</agent_2><agent_1>b</agent_1>", ["a", "b"]),
    (f"<agent_{'9' * 5000}>x</agent_0><agent_1>b</agent_1>", ["", "b"]),
    ("<agent_0>a<agent_1>b</agent_1>c</agent_0>", ["a", "b"]),
    ("Sure! Here it is: <agent_0>a</agent_0> and then <agent_1>b</agent_1> Anything else?", ["a", "b"]),
    ("<p><agent_0><i>a</i> 1 < 2 > 0 &amp; <br/></agent_0></p><agent_1><!-- b --></agent_1>",
     ["<i>a</i> 1 < 2 > 0 &amp; <br/>", "<!-- b -->"]),
    ("<agent>a</agent><agent_x>b</agent_x><agents_0>c</agents_0><my_agent_0>d", None),
    ("&lt;agent_0&gt;a&lt;/agent_0&gt;", None),
    ("<agent_0>雨 ☔\u200b</agent_0><agent_1>naïve 𝄞 é\u0301</agent_1>", ["雨 ☔\u200b", "naïve 𝄞 é\u0301"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PARSED)
def test_texts_between_tags(text, expected):
    assert TagAdapter().parse(text, 2) == expected


def test_the_role_count_decides_which_tags_count():
    text = "<agent_10>k</agent_10><agent_1>b</agent_1><agent_0>a</agent_0>"
    assert TagAdapter().parse(text, 1) == ["a"]
    assert TagAdapter().parse(text, 11) == ["a", "b", *[""] * 8, "k"]


def test_what_is_written_between_tags_is_read_back():
    draw = random.Random(0)
    alphabet = "abz019 \n\t<>/_&;:{}\\\"'éß雨☔\u00a0-agent"
    for _ in range(300):
        texts = ["".join(draw.choices(alphabet, k=draw.randrange(30))) for _ in range(draw.randrange(1, 13))]
        if any(re.search(r"agent[\s_]*\d", text) for text in texts):
            continue
        joint = "".join(f"<agent_{role}>{text}</agent_{role}>" for role, text in enumerate(texts))
        assert TagAdapter().parse(joint, len(texts)) == [text.strip() for text in texts]


def test_any_text_gives_as_many_texts_as_roles_or_none():
    draw = random.Random(1)
    pieces = [*"</agent_01> x", "<agent_0>", "</agent_0>", "< Agent_1 >", "</agent_1>", "<agent_2>"]
    seen = set()
    for _ in range(1000):
        found = TagAdapter().parse("".join(draw.choices(pieces, k=draw.randrange(12))), 2)
        assert found is None or (len(found) == 2 and all(text == text.strip() for text in found))
        seen.add(None if found is None else tuple(map(bool, found)))
    assert len(seen) == 5


@pytest.mark.parametrize("start", ["<", "</", "<agent_", "<agent_0", "<agent_0>"])
def test_a_degenerate_text_is_read_in_linear_time(start):
    started = time.process_time()  # not the clock: other processes may be at work
    for filler in (" ", "<", "_", "0", "</agent_1>"):
        TagAdapter().parse(start + filler * 24_000, 2)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("num_roles", [1, 2, 5])
def test_the_joint_prompt_has_every_role_prompt_once_and_every_tag(num_roles):
    prompts = [f"Do {role} of {{it}}.\nWell & <b>{role}</b>." for role in range(num_roles)]
    joint = TagAdapter().build({"prompt": "unused"}, prompts)
    assert [joint.count(prompt) for prompt in prompts] == [1] * num_roles
    tags = {f"<{end}agent_{role}>" for role in range(num_roles) for end in ("", "/")}
    assert set(re.findall(r"</?agent_\d+>", joint)) == tags


class Cut(JointAdapter):
    """Takes apart what a random model says: its characters decide.

    >>> [Cut().parse(text, 2) for text in ("", "ab", "ac", "ad")]
    [None, None, ['ac', ''], ['a', 'd']]
    """

    def build(self, item, prompts):
        return f"{item['prompt']}? " + "/".join(prompts)

    def parse(self, text, num_roles):
        kind = sum(map(ord, text)) % 3
        return [None, [text, *[""] * (num_roles - 1)], [text[:1], *[text[1:]] * (num_roles - 1)]][kind]


def by_hand(model, text, index, agent):
    """12 responses of one model to one prompt, token by token without a cache: comparator stream, round 2."""
    said = []
    for row in counted_uniforms(12, 2, 0, "comparator", 2, index, agent):
        ids, start = list(tiny_tokenizer()(text)["input_ids"]), len(tiny_tokenizer()(text)["input_ids"])
        for uniform in row:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            kept = logits.topk(8).indices.sort().values
            cumulative = logits[kept].double().softmax(0).cumsum(0)
            ids.append(int(kept[int((cumulative <= uniform * cumulative[-1]).sum())]))
            if ids[-1] == 1:
                break
        said.append(encodable_text(tiny_tokenizer().decode(ids[start:], skip_special_tokens=True)))
    return said


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("name", ["current", "current_lora", "current_copy", "model", "history", "history_lora"])
def test_one_model_writes_every_role_and_no_other_speaks(name, agent, tmp_path):
    team = perturb(make_team("lora" in name, "float64", formatters=ROLES).load(), 1, 0.2)
    central = CentralizedGeneration(agent, Cut())
    with team.active(agent):
        own = [by_hand(team.model(agent), f"{p}? one {p}/two {p}", index, agent) for index, p in enumerate("ab")]
    if name == "model":
        paths = [save_model(tiny("llama", seed=5), tmp_path / "l"), save_model(tiny("gpt2", seed=6), tmp_path / "g")]
        comparator = ModelComparator(paths, dtype="float64", centralized=central)
        model = AutoModelForCausalLM.from_pretrained(paths[agent], dtype=torch.float64)
        expected = [by_hand(model, f"{p}? one {p}/two {p}", index, agent) for index, p in enumerate("ab")]
        assert expected != own
    elif "history" in name:
        team.save(tmp_path / "initial")
        perturb(team, 9, 0.5)
        comparator, expected = HistoryComparator(2, centralized=central), own
    else:
        make = partial(CurrentCopyComparator, ["cpu:0"]) if name == "current_copy" else CurrentComparator
        comparator, expected = make(centralized=central), own
    options = {**SAME_DRAWS, "num_candidates": 12, "stream": "comparator", "step": 2}
    with comparator.open(team, CollectionPhase(2, tmp_path)) as speaker:
        samples = speaker.sample(ITEMS[:2], [0, 1], **options)
    untagged = 0
    for sample, letter, texts in zip(samples, "ab", expected, strict=True):
        roles = [{}, {}]
        for k, text in enumerate(texts):
            parts = Cut().parse(text, 2)
            untagged += parts is None
            for role in range(2) if parts is not None else ():
                roles[role][k] = parts[role]
        assert [{k: said.text for k, said in responses.items()} for responses in sample.responses] == roles
        assert sample.prompts == [f"one {letter}", f"two {letter}"]
    assert team.counts["untagged_comparator_responses"] == untagged > 0


@pytest.mark.parametrize("api_format", ["generic", "openai"])
def test_a_remote_model_is_asked_once_per_item_and_its_texts_are_taken_apart(api_format):
    written = ["<agent_0>a</agent_0><agent_1>b</agent_1>", "nothing", "<Agent_1>c", "</agent_0>"]
    team = make_team(formatters=[ChatTemplate("one {prompt}", system="Be brief."), "two {prompt}"])
    with FakeApi(write=lambda number, prompt, seen: written[len(seen.texts)]) as api:
        endpoint = ApiEndpoint(api.url_of(api_format), api_format, "any")
        comparator = ApiComparator(endpoint, centralized=CentralizedGeneration(1))
        with comparator.open(team, CollectionPhase(1)) as speaker:
            samples = speaker.sample(ITEMS, [0, 1, 2], num_candidates=4, sampling=SAMPLING)
    for sample, letter in zip(samples, "abc", strict=True):
        roles = [{k: said.text for k, said in responses.items()} for responses in sample.responses]
        assert roles == [{0: "a", 2: ""}, {0: "b", 2: "c"}]
        assert sample.prompts == [f"Be brief.\n\none {letter}", f"two {letter}"]
    assert team.counts["untagged_comparator_responses"] == 6
    joint = [TagAdapter().build({}, [f"Be brief.\n\none {letter}", f"two {letter}"]) for letter in "abc"]
    assert sorted(seen.prompt for seen in api.requests) == joint
    assert {seen.n for seen in api.requests} == {4}
    assert {seen.body.get("agent_idx", 1) for seen in api.requests} == {1}
    assert not team.is_loaded


class Scripted(Comparator):
    """Says given texts: per item, candidate index to text. Remembers who was asked what."""

    def __init__(self, script, **options):
        super().__init__(**options)
        self.script, self.asked = script, []

    @contextmanager
    def session(self, team, phase):
        yield self

    def answer(self, agent, formatter, items, item_indices, **_):
        self.asked += [(agent, formatter(item)) for item in items]
        return [
            AgentAnswer(formatter(item), {k: Response(text, [], True) for k, text in self.script[index].items()})
            for item, index in zip(items, item_indices, strict=True)
        ]


def collect(team, comparator, reward, count=5):
    collector = Collector(Oracle(reward), SAMPLING, count, "all", None, 0, comparator)
    return collector.collect(team, ITEMS, [0, 1, 2], 1)


def test_texts_without_a_tag_are_missing_indices_and_are_not_scored():
    whole = "<agent_0>{}</agent_0><agent_1>{}</agent_1>"
    script = {
        0: {0: whole.format("a", "b"), 1: "no tag", 2: "<agent_1>c", 4: "<AGENT_0>d", 7: whole.format("e", "f")},
        1: dict.fromkeys(range(5), "no tag"),
        2: {3: whole.format("x", "y")},
    }
    team, calls = perturb(make_team(formatters=ROLES).load(), 1), []

    def reward(first, second, prompts, batch_items):
        calls.append((first, second, prompts, [item["prompt"] for item in batch_items]))
        return text_reward(first, second)

    comparator = Scripted(script, centralized=CentralizedGeneration(1))
    collected = collect(team, comparator, reward)
    assert comparator.asked == [(1, TagAdapter().build({}, [f"one {p}", f"two {p}"])) for p in "abc"]
    assert team.counts["untagged_comparator_responses"] == 6
    assert team.counts["items_without_comparator"] == 1
    own = [sample.responses for sample in team.sample(ITEMS, [0, 1, 2], **SAME_DRAWS)]
    theirs = {0: {0: ["a", "b"], 2: ["", "c"], 4: ["d", ""]}, 1: {}, 2: {3: ["x", "y"]}}
    for item, letter in enumerate("abc"):
        size = len(theirs[item])
        mine = [[own[item][role][k].text for k in theirs[item]] for role in range(2)]
        shown = [[texts[role] for texts in theirs[item].values()] for role in range(2)]
        prompts = [[f"one {letter}"] * size, [f"two {letter}"] * size]
        expected = [(*side, prompts, [letter] * size) for side in (mine, shown)]
        assert [call for call in calls if letter in call[3]] == (expected if size else [])
    assert [len(part.pairs) > 0 for part in collected] == [True, False, True]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_comparators_mode_and_count_change_no_actor_sample(lora, monkeypatch):
    team, drawn, sample = perturb(make_team(lora).load(), 1), [], AgentTeam.sample
    central = [CurrentComparator(n, centralized=CentralizedGeneration(i, Cut())) for n in (1, 9) for i in (0, 1)]
    silent = Scripted({0: {}, 1: {}, 2: {}}, centralized=CentralizedGeneration())

    def spy(self, *arguments, stream, **options):
        said = sample(self, *arguments, stream=stream, **options)
        if stream == "actors":
            drawn[-1] += [(row.item_index, row.prompts, row.token_ids(k)) for row in said for k in row.joint_indices]
        return said

    monkeypatch.setattr(AgentTeam, "sample", spy)
    for comparator in (None, *map(CurrentComparator, (1, 5, 9)), *central, silent):
        drawn.append([])
        collect(team, comparator, text_reward)
    assert len(drawn[0]) == 3 * 5
    assert all(other == drawn[0] for other in drawn[1:])


def test_tokens_of_joint_texts_are_counted_as_sampled():
    team, central = make_team().load(), CentralizedGeneration(0, Cut())
    alone, both = (collect(team, c, text_reward) for c in (None, CurrentComparator(centralized=central)))
    assert sum(part.num_tokens for part in both) > sum(part.num_tokens for part in alone)


MAKERS = {
    "current": CurrentComparator,
    "current_copy": partial(CurrentCopyComparator, ["cpu"]),
    "model": partial(ModelComparator, "builtin:tiny"),
    "history": HistoryComparator,
    "api": partial(ApiComparator, ApiEndpoint("http://localhost/")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_centralised_generation_in_a_run(name, tmp_path):
    team = make_team(formatters=ROLES)
    with FakeApi(write=lambda number, **_: f"<agent_0>{number}</agent_0>" if number % 3 else "none") as api:
        make = partial(ApiComparator, ApiEndpoint(api.url_of("generic"))) if name == "api" else MAKERS[name]
        central = CentralizedGeneration(1, None if name == "api" else Cut())
        data = make_data(comparator=make(centralized=central, num_candidates=6), num_candidates=6, eval_items=None)
        with pytest.warns(UserWarning, match=r"joint response of the comparator .* no tag"):
            make_trainer(tmp_path).fit(make_module(team, rounds=2), data)
    assert team.counts["untagged_comparator_responses"] > 1
    files = round_files(tmp_path / "replay")
    assert [file["num_pairs"] > 0 for file in files.values()] == [True, True]
    for pair in (pair for file in files.values() for pair in file["pairs"]):
        assert pair["prompts"] in [[f"one {letter}", f"two {letter}"] for letter in "abc"]
        assert [len(pair[side]) for side in ("winner_completions", "loser_completions")] == [2, 2]


def test_a_remote_model_that_never_uses_tags_stops_the_run(tmp_path):
    with FakeApi(write="no tag, {number}".format) as api:
        comparator = ApiComparator(ApiEndpoint(api.url_of("generic")), centralized=CentralizedGeneration())
        with pytest.raises(RuntimeError, match="no joint response to any task item of round 1"):
            make_trainer(tmp_path).fit(make_module(rounds=1), make_data(comparator=comparator))


WRONG = {
    "a negative index": (-1, "decentralized", "`centralized.agent_index` must be from 0 to 1 in a team of 2, got -1"),
    "a third agent": (2, "decentralized", "`centralized.agent_index` must be from 0 to 1 in a team of 2, got 2"),
    "centralised anyway": (0, "centralized", "`centralized` must be left out"),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_found_before_anything_is_loaded_or_scored(name, wrong, tmp_path):
    index, collaboration, message = WRONG[wrong]
    team, reward = make_team(collaboration=collaboration), CountingReward()
    data = make_data(reward, comparator=MAKERS[name](centralized=CentralizedGeneration(index)))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(make_module(team, rounds=1), data)
    assert not team.is_loaded
    assert reward.calls == 0


@pytest.mark.parametrize("count", [1, 3])
def test_one_model_for_all_roles_is_a_name_and_not_a_list_of_one(count):
    comparator = ModelComparator(["builtin:tiny"] * count, centralized=CentralizedGeneration())
    with pytest.raises(ValueError, match=f"`models` must be one for all roles or 2, got {count}"):
        comparator.check(make_team())


@pytest.mark.parametrize("given", [["a"], ["a", "b", "c"], [], "ab", ["a", None]])
@pytest.mark.parametrize("whose", ["comparator", "team"])
def test_an_adapter_that_does_not_give_one_text_per_role_is_named(whose, given, tmp_path):
    adapter = Cut()
    adapter.parse = lambda text, num_roles: given
    options = {"collaboration": "centralized", "joint_adapter": adapter} if whose == "team" else {}
    central = CentralizedGeneration(0, adapter) if whose == "comparator" else None
    data = make_data(comparator=CurrentComparator(centralized=central))
    with pytest.raises((TypeError, ValueError), match=r"`Cut.parse` must give 2 "):
        make_trainer(tmp_path).fit(make_module(make_team(**options), rounds=1), data)


class Marked(JointAdapter):
    def __init__(self, mark: str):
        self.mark = mark

    def build(self, item, prompts):
        return self.mark.join([item["prompt"], *prompts])

    def parse(self, text, num_roles):
        return [self.mark + text[role : role + 1] for role in range(num_roles)]


ADAPTER = "{class_path: test_roles.Marked, init_args: {mark: '+'}}"
TEAM = "--model.init_args.team.init_args"
GIVEN = {
    "comparator": ["--data.comparator=CurrentComparator", f"--data.comparator.centralized={{adapter: {ADAPTER}}}"],
    "team": [f"{TEAM}.collaboration=centralized", f"{TEAM}.joint_adapter={ADAPTER}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("whose", GIVEN)
def test_an_adapter_of_the_users_own_by_class_path(whose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model.init_args.num_iterations=1", "--data.num_candidates=6", "--trainer.default_root_dir=one"]
    main(["fit", "--config", CONFIG, *options, *GIVEN[whose]])
    main(["fit", "--config", str(next(Path("one").rglob("config.yaml"))), "--trainer.default_root_dir=two"])
    first, second = (round_files(next(Path(root).rglob("replay")))["iteration_0001.json"] for root in ("one", "two"))
    assert first == second
    assert first["num_pairs"] > 0
    for pair in first["pairs"]:
        letter = pair["prompts"][0][0]
        assert pair["prompts"] == ([f"{letter}+{letter}+{letter}"] if whose == "team" else [letter, letter])
        sides = [pair["winner_completions"], pair["loser_completions"]]
        assert whose == "team" or any(text.startswith("+") for side in sides for text in side)
