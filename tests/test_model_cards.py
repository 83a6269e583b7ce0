"""Model cards: what they say, that what they say is so, and what they keep to themselves."""

import contextlib
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from helpers import save_model
from pbrl_lightning import (
    AgentTeam,
    ApiComparator,
    ApiEndpoint,
    AttachedCritics,
    ChatTemplate,
    HistoryComparator,
    JointRewardModel,
    JointRewardModule,
    LambdaDecayReplay,
    LoraOptions,
    MARLHFModule,
    MARLModule,
    ModelComparator,
    PairwiseJudge,
    PreferenceDataModule,
    PromptTemplate,
    ReferenceKL,
    ScoreJudge,
)
from pbrl_lightning.agents.loading import tiny_model, tiny_tokenizer
from pbrl_lightning.callbacks import AgentExport, JointEvaluation
from pbrl_lightning.cards import facts, writing
from pbrl_lightning.cards.names import callable_name, code, formatter_name, model_name, with_numbers
from pbrl_lightning.cards.page import table
from pbrl_lightning.data_items import source_names
from pbrl_lightning.preferences.processors import ScaleAndShift
from training_runs import (
    Killer,
    StopError,
    make_data,
    make_module,
    make_team,
    make_trainer,
    same_weights,
    text_reward,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning"
)  # PEFT's own; Lightning's of runs as short as these


def fit(root, module, data, *, logger=True, callbacks=(), **options):
    trainer = make_trainer(root, callbacks, logger=CSVLogger(root, version=0) if logger else False, **options)
    trainer.fit(module, data)
    return Path(trainer.log_dir or root) / "export"


def read(directory):
    return (directory / "README.md").read_text(encoding="utf-8")


def section(card, heading):
    return card.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def run_code(directory, monkeypatch, placeholder="a"):
    """What the card's own Python leaves behind when it is run where the card lies."""
    (python,) = re.findall(r"```python\n(.*?)```", read(directory), re.DOTALL)
    monkeypatch.chdir(directory)
    names = {}
    exec(compile(python.replace("…", placeholder), "card", "exec"), names)
    return names


# -- what a card says ----------------------------------------------------------------------------------------------


@pytest.mark.figures
def test_a_card_of_an_iterative_run(tmp_path):
    data = make_data(
        comparator=HistoryComparator(k=2), replay=LambdaDecayReplay(decay=0.5), reward_processor=ScaleAndShift(2.0)
    )
    evaluation = JointEvaluation(interval=2, num_samples=3)
    team = make_team(formatters=["One: {prompt}", str])
    target = fit(tmp_path, make_module(team, rounds=2), data, callbacks=[evaluation])
    card = read(target / "agent_1")
    head = ModelCard.load(target / "agent_1" / "README.md").data.to_dict()
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pbrl-lightning", "multi-agent", "preference-learning", "madpo"],
    }  # no base on the hub, no data set of the hub, and no licence that nobody chose
    assert "# Agent 1 of a team of 2" in card
    trained = section(card, "How it was trained")
    pairs = sum(record.collected_pairs for record in data.rounds)
    for fact in (
        "- **module:** `MADPOModule`",
        "`dpo_beta=0.1, score_last_token=False`",
        "- **rounds:** 2 of 2",
        "- **epochs of a round:** 1 of `madpo`",
        f"- **updates:** {evaluation.results[-1][0]} optimizer steps",
        f"- **preference pairs:** {pairs} collected, {sum(r.train_pairs for r in data.rounds)} trained on",
        f"(`env_step`):** {data.env_step}",
        "- **batch:** 2 pairs",
        "learning rates: `agent_0`, `agent_1` 0.001",
        "`temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=2`",
    ):
        assert fact in trained
    assert "resumed" not in trained
    assert "- **agent 0:** from the random model `builtin:tiny`" in section(card, "The team")
    assert "formatter `PromptTemplate('One: {prompt}')`" in section(card, "The team")
    assert "- **agent 1 (this one):**" in section(card, "The team")
    assert "- **task items:** 3: given in Python" in section(card, "Data")
    assert "- **evaluation items:** 5: given in Python; 3 of them in each evaluation" in section(card, "Data")
    assert "`HistoryComparator(k=2)`" in section(card, "Data")
    assert "`LambdaDecayReplay(decay=0.5)`" in section(card, "Data")
    assert "`training_runs:text_reward`" in section(card, "Reward")
    assert "`ScaleAndShift(scale=2.0, shift=0.0)`" in section(card, "Reward")
    results = section(card, "Results")
    first, last = evaluation.results[0][1], evaluation.results[-1][1]
    assert f"{first:.3f} before training, {last:.3f} at the end" in results
    assert all(f"| {step} | {value:.3f} |" in results for step, value in evaluation.results)
    assert "| round | pairs |" in results
    assert (target / "agent_1" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert f"- **torch:** {torch.__version__.partition('+')[0]}" in section(card, "Versions")
    other = read(target / "agent_0")
    assert "# Agent 0 of a team of 2" in other
    assert "- **agent 0 (this one):**" in other


def test_cards_of_marlhf(tmp_path):
    module = MARLHFModule(
        make_team(True), num_iterations=2, num_train_epochs=1, rl_algorithm="maac", reference_kl=ReferenceKL(0.2)
    )
    target = fit(tmp_path, module, make_data(num_candidates=3), logger=False)
    agent, reward = read(target / "agent_0"), read(target / "reward_model")
    assert {path.name for path in target.iterdir()} == {"agent_0", "agent_1", "reward_model"}
    head = ModelCard.load(target / "agent_0" / "README.md").data
    assert head.library_name == "peft"
    assert head.tags == [
        *("pbrl-lightning", "multi-agent", "preference-learning", "marlhf", "reinforcement-learning", "maac", "lora")
    ]
    assert f"{module.policy_updates} of them of the agents" in agent
    assert "- **policy learning:** `maac`; `num_generations=4, advantage_normalization=True`" in agent
    assert "- **critic:** `JointCritic`; `critic_type='v', value_loss_coef=0.6`" in agent
    assert "- **reference:** a penalty on the KL against the start of the run; coef=0.2" in agent
    assert "`r=4, alpha=32, target_modules=['q_proj', 'v_proj']`" in agent
    assert "- **rollouts scored by:** the reward model that this run fitted" in agent
    assert "no logger, so there are no curves" in agent
    assert "before training" in agent  # evaluations need no logger
    assert not (target / "agent_0" / "curves.png").exists()
    assert ModelCard.load(target / "reward_model" / "README.md").data.pipeline_tag == "text-classification"
    assert "- **backbone:** from the random model `builtin:tiny`, which is for tests; all weights trained" in reward


def test_a_card_of_policy_learning_on_a_reward_model(tmp_path):
    own = JointRewardModel(save_model(tiny_model(3), tmp_path / "secret" / "scorer"))
    own.load().fitted = True
    module = MARLModule(
        make_team(True, num_agents=1),
        num_train_epochs=1,
        reward_model=own,
        rl_algorithm="iac",
        critic=AttachedCritics(),
    )
    card = read(fit(tmp_path, module, make_data(iterative=False, eval_items=None), logger=False) / "agent_0")
    assert "A language model that was trained as a team of one." in card
    assert "multi-agent" not in card
    assert "- **rollouts scored by:** a reward model, the local directory `scorer`" in card
    assert "- **evaluation items:** none: the run was not evaluated" in card
    assert "- **rounds:** one: not iterative" in card
    assert "preference" not in section(card, "How it was trained")


def test_a_centralised_team(tmp_path):
    formatters = ["{prompt}", str, PromptTemplate("Three: {prompt}")]
    team = AgentTeam("builtin:tiny", collaboration="centralized", num_agents=3, formatters=formatters)
    card = read(fit(tmp_path, make_module(team, rounds=1), make_data(), logger=False) / "agent_0")
    assert "# One model for 3 roles" in card
    assert "- **role 2:** formatter `PromptTemplate('Three: {prompt}')`" in card
    assert "- **joint adapter:** `TagAdapter`" in card


# -- code that works -----------------------------------------------------------------------------------------------


CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_code_of_a_card_loads_the_trained_agent(tmp_path, monkeypatch, lora):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    formatters = [
        'Say "{prompt}" and `{prompt}`:\n{{1}}',
        ChatTemplate("{prompt}?", system="It's {prompt}"),
        "{prompt[0]}",
    ]
    team = make_team(lora, num_agents=3, formatters=formatters, tokenizers=tokenizer)
    target = fit(tmp_path, make_module(team, rounds=1), make_data(), logger=False, max_steps=2)
    ids = torch.tensor([[0, 70, 71, 72, 73]])
    for agent in range(3):
        names = run_code(target / f"agent_{agent}", monkeypatch)
        with torch.no_grad(), team.active(agent):
            assert torch.equal(names["model"](input_ids=ids).logits, team.model(agent)(input_ids=ids).logits)
        assert isinstance(names["response"], str)
        shown = names["tokenizer"].decode(names["inputs"]["input_ids"][0], skip_special_tokens=True)
        assert shown == team.prompt(agent, {"prompt": "a"}, 0)
        assert names["inputs"]["input_ids"][0].tolist() == team.prompt_ids(agent, shown, 2)


def test_the_code_of_a_card_scores_as_the_reward_model_did(tmp_path, monkeypatch):
    module = MARLHFModule(make_team(True), num_train_epochs=1)
    target = fit(tmp_path, module, make_data(iterative=False, num_candidates=3), logger=False)
    names = run_code(target / "reward_model", monkeypatch, placeholder="ab")
    (expected,) = module.reward_model.score_texts(["ab"], ["ab"], prompts=[["ab"], ["ab"]])
    assert names["score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_agents", [1, 2])
def test_a_reward_model_of_pair_files(tmp_path, monkeypatch, num_agents):
    scores = {"raw_rewards": [], "winner_reward": 1, "loser_reward": 0, "candidate_reward_mean": 0.5}
    lines = [
        {
            **scores,
            "prompts": [prompt] * num_agents,
            "winner_completions": [winner] * num_agents,
            "loser_completions": [loser] * num_agents,
        }
        for prompt, winner, loser in ("wab", "xcd", "uef", "sgh")
    ]
    path = tmp_path / "hidden" / "mine.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    module = JointRewardModule(JointRewardModel("builtin:tiny"))
    data = PreferenceDataModule(pairs=[str(path)], val_fraction=0.5)
    target = fit(tmp_path, module, data)
    card = read(target / "reward_model")
    assert "- **preference pairs:** 2 that were given, after those that were held out" in card
    assert "- **pairs:** the file `mine.jsonl`" in card
    assert re.search(r"- \*\*accuracy:\*\* [\d.]+\n", section(card, "Held-out pairs"))
    assert ("multi-agent" in card) == (num_agents > 1)
    assert "## Reward\n" not in card  # there was none
    names = run_code(target / "reward_model", monkeypatch)
    (expected,) = module.reward_model.score_texts(*[["a"]] * num_agents, prompts=[["a"]] * num_agents)
    assert names["score"] == pytest.approx(expected, abs=1e-4)


# -- what a card keeps to itself -----------------------------------------------------------------------------------


def test_a_card_holds_no_path_key_address_or_item(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    base = save_model(tiny_model(), tmp_path / "private" / "base")
    in_memory = tiny_model(1)
    in_memory.config.name_or_path = str(tmp_path / "gone" / "org")
    items = tmp_path / "private" / "items.jsonl"
    items.write_text('{"prompt": "confidential"}\n{"prompt": "b"}\n')
    endpoint = ApiEndpoint("http://127.0.0.1:9/inner-host/v1?user=me", format="openai", model="gpt-x", key_env="MY_KEY")

    def reward(first, second, token):
        return text_reward(first, second)

    data = make_data(
        functools.partial(reward, token="sk-very-secret"),
        items=str(items),
        eval_items=str(items),
        comparator=ModelComparator([base, base]),
    )
    formatter = functools.partial(reward_formatter, "sk-very-secret")
    team = AgentTeam([base, in_memory], tokenizers=tiny_tokenizer(), formatters=formatter)
    module = make_module(team, rounds=1)
    target = fit(tmp_path / "run", module, data)
    data.oracle.reward_func = ScoreJudge(endpoint, criteria="confidential")
    data.judge = PairwiseJudge(endpoint, criteria="confidential")
    data.comparator = ApiComparator(endpoint)
    AgentExport(str(tmp_path / "again")).export(module.trainer, module)
    found = [*target.rglob("README.md"), *(tmp_path / "again").rglob("README.md")]
    assert len(found) == 4
    secrets = ("private", "gone", "sk-very-secret", "MY_KEY", "127.0.0.1", "inner-host", "confidential")
    for card in (path.read_text(encoding="utf-8") for path in found):
        assert [secret for secret in (str(tmp_path), *secrets) if secret in card] == []
    card = read(tmp_path / "again" / "agent_0")
    assert "from the local directory `base`" in card
    assert "from a model that was given in memory" in card
    assert "the file `items.jsonl`" in card
    assert "ScoreJudge`, which asks the remote model `gpt-x` (openai)" in card
    assert "PairwiseJudge(max_new_tokens=" in card
    assert "`ApiComparator()`, which asks the remote model `gpt-x` (openai)" in card
    assert "`ModelComparator()`: the local directory `base`" in read(target / "agent_0")
    assert "base_model" not in read(target / "agent_0")


def reward_formatter(secret, item):
    return item["prompt"]


def test_names_of_models(tmp_path, monkeypatch):
    directory = save_model(tiny_model(), tmp_path / "mine")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    monkeypatch.chdir(tmp_path)
    expected = {
        "org/model-1.5B": ("`org/model-1.5B`", "org/model-1.5B"),
        "gpt2": ("`gpt2`", "gpt2"),
        directory: ("the local directory `mine`", None),
        "mine": ("the local directory `mine`", None),
        "./mine": ("the local directory `mine`", None),
        "/no/longer/there": ("the local directory `there`", None),
        "~/x/y.gguf": ("the GGUF file `y.gguf`", None),
        "package:llm/m.gguf": ("`package:llm/m.gguf`, a file of an installed package", None),
        "adapter": ("an earlier adapter, `adapter`, on `org/base`", "org/base"),
    }
    for name, (words, hub) in expected.items():
        assert (model_name(name).words, model_name(name).hub) == (words, hub), name
    assert model_name("org/model", in_memory=True).hub == "org/model"
    for name in (None, "/home/me/org/model", "model", "./model"):
        assert model_name(name, in_memory=True).words == "a model that was given in memory"
    assert model_name("mine/deeper", in_memory=True).hub == "mine/deeper"


def test_names_of_everything_else():
    assert callable_name(functools.partial(text_reward)) == "`training_runs:text_reward`"
    assert callable_name(ScaleAndShift(2.0)) == "`pbrl_lightning.preferences.processors:ScaleAndShift`"
    assert with_numbers(object()) == "`object()`"
    assert formatter_name(ChatTemplate("a `b`", system="c")) == "``ChatTemplate('a `b`', system='c')``"
    assert len(formatter_name(ChatTemplate("a" * 10_000))) < 400
    assert code("`a`\n|<b>") == "`` `a` |<b> ``"
    assert source_names(items=lambda: [], pairs=["/x/a.json", "package:p/b.jsonl"]) == {
        "items": f"given in Python by `{__name__}:test_names_of_everything_else.<locals>.<lambda>`",
        "pairs": "the file `a.json`; `package:p/b.jsonl`",
    }
    assert source_names(items="datasets:org/name::train[:10]") == {"items": "`datasets:org/name::train[:10]`"}
    rows = [("step",), *((str(step),) for step in range(100))]
    assert [line.strip("| ") for line in table(rows).splitlines()[2:]][::19] == ["0", "99"]


def test_the_hubs_names_stand_in_the_head_of_a_card(tmp_path):
    in_memory = tiny_model(1)
    in_memory.config.name_or_path = "some-org/some-model"
    team = AgentTeam([in_memory], tokenizers=tiny_tokenizer(), lora=LoraOptions(r=2))
    data = make_data(iterative=False, eval_items=None)
    module = make_module(team)
    fit(tmp_path, module, data, logger=False, max_steps=1)
    data.sources["items"] = "`datasets:org/name:config:train[:10]`"
    head = ModelCard.load(AgentExport(str(tmp_path)).export(module.trainer, module) / "agent_0" / "README.md").data
    assert (head.base_model, head.base_model_relation) == ("some-org/some-model", "adapter")
    assert head.datasets == ["org/name"]
    data.sources["items"] = "the directory `name`, by the `datasets` library"
    AgentExport(str(tmp_path)).export(module.trainer, module)
    assert ModelCard.load(tmp_path / "agent_0" / "README.md").data.datasets is None


# -- what a card does not change -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_come_first_and_a_card_that_fails_is_only_warned_of(tmp_path, monkeypatch):
    def run(name, **options):
        team = make_team(True)
        export = AgentExport(str(tmp_path / name), **options)
        fit(tmp_path / f"{name}_run", make_module(team, rounds=1), make_data(), callbacks=[export])
        files = {path.name: path.read_bytes() for path in (tmp_path / name / "agent_1").iterdir()}
        return weights_of(team), files

    weights, files = run("with")
    others, bare = run("without", model_cards=False)
    assert same_weights(weights, others)
    assert files.keys() - bare.keys() == {"README.md", "curves.png"}
    assert bare == {name: files[name] for name in bare}

    monkeypatch.setattr(writing, "learning_panels", lambda curves: 1 / 0)
    with pytest.warns(UserWarning, match="without model cards: ZeroDivisionError: division by zero"):
        _, failed = run("failed")
    assert failed == bare


def test_a_team_that_is_saved_by_hand_has_no_card_and_none_that_is_old(tmp_path):
    team = make_team()
    target = fit(tmp_path, make_module(team, rounds=1), make_data(), logger=False)
    assert (target / "agent_0" / "README.md").exists()
    team.save(target)
    assert list(target.rglob("README.md")) == []


@pytest.mark.slow
def test_the_card_of_a_resumed_run_tells_of_the_whole_run(tmp_path):
    def run(name, killers=(), ckpt_path=None):
        kept = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        trainer = make_trainer(
            tmp_path / name,
            [JointEvaluation(interval=1), kept, *killers],
            logger=CSVLogger(tmp_path / name, version=0),
            enable_checkpointing=True,
        )
        with contextlib.suppress(StopError):
            trainer.fit(make_module(make_team(True), rounds=2), make_data(num_candidates=3), ckpt_path=ckpt_path)
        return Path(trainer.log_dir) / "export"

    whole = read(run("whole") / "agent_0")
    killed = run("killed", [Killer(3)])
    resumed = read(run("resumed", ckpt_path=str(tmp_path / "killed" / "step=3.ckpt")) / "agent_0")
    assert not killed.exists()
    told = "\n\nThe run was stopped and resumed."
    assert told in resumed
    assert told not in whole
    for heading in ("How it was trained", "Results", "Data", "Reward", "The team"):
        assert section(resumed, heading).partition(told)[0].strip() == section(whole, heading).strip()


def test_a_trainer_that_has_no_run_gives_weights_and_a_warning(tmp_path):
    module = make_module()
    trainer = make_trainer(tmp_path)
    trainer.strategy.connect(module)
    with pytest.warns(UserWarning, match="without model cards"):
        target = AgentExport(str(tmp_path / "out")).export(trainer, module)
    assert (target / "agent_0" / "model.safetensors").exists()


def test_a_package_that_is_not_installed_is_said_to_be_so(monkeypatch):
    monkeypatch.setattr(facts, "PACKAGES", ("torch", "no-such-package"))
    assert facts.versions()[1] == ("no-such-package", "not installed")
