"""Modules and teams from checkpoints: `load_from_checkpoint`, `AgentTeam.from_checkpoint`; what a checkpoint holds."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pbrl_lightning import (
    AgentTeam,
    CurrentComparator,
    JointAdapter,
    JointRewardModel,
    JointRewardModule,
    LoraOptions,
    MADPOModule,
    MARLHFModule,
    MARLModule,
    PreferenceDataModule,
    PromptTemplate,
    ReferenceKL,
    SamplingConfig,
)
from pbrl_lightning.agents.loading import tiny_model, tiny_tokenizer
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError
from training_runs import ITEMS, make_data, make_module, make_team, make_trainer, same_weights, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KEY = "sk-canary0123456789"


def saved(root, module, data=None, **options):
    """The checkpoint at the end of a short fit."""
    trainer = make_trainer(root, [ModelCheckpoint(root / "checkpoints")], enable_checkpointing=True, **options)
    trainer.fit(module, data or make_data(iterative=False, eval_items=None))
    return trainer.checkpoint_callback.best_model_path


def logits(team, agent=0):
    """What an agent says of a fixed text."""
    with torch.no_grad(), team.active(agent):
        return team.model(agent)(torch.tensor([[5, 6, 7, 8]])).logits


def texts(team):
    """What a team answers."""
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=4)
    samples = team.sample(ITEMS, [0, 1, 2], num_candidates=2, sampling=sampling, seed=0, stream="evaluation")
    return [sample.completions(index) for sample in samples for index in sample.joint_indices]


class Halves(JointAdapter):
    """Roles by the halves of a text."""

    def __init__(self, sep="/"):
        self.sep = sep

    def build(self, item, prompts):
        return self.sep.join(prompts)

    def parse(self, text, num_roles):
        return [text[0::2], text[1::2]]


TEAMS = {
    "full": {},
    "lora": {"lora": LoraOptions(r=4), "formatters": ["Say {prompt}", PromptTemplate("Tell {prompt}")]},
    "central": {"collaboration": "centralized", "joint_adapter": Halves("+")},
}


@pytest.mark.parametrize("kind", TEAMS)
def test_a_team_from_a_checkpoint_has_the_logits_and_prompts_of_the_one_that_was_trained(kind, tmp_path):
    options = TEAMS[kind]
    team = AgentTeam("builtin:tiny", num_agents=2, **options)
    fresh = logits(AgentTeam("builtin:tiny", num_agents=2, **options))
    path = saved(tmp_path, make_module(team, num_train_epochs=1))
    again = AgentTeam.from_checkpoint(path)
    assert same_weights(weights_of(again), weights_of(team))
    for agent in range(team.num_agents):
        assert torch.equal(logits(again, agent), logits(team, agent))
    assert not torch.equal(logits(again), fresh)
    assert texts(again) == texts(team)
    assert torch.equal(logits(AgentTeam.from_checkpoint(tmp_path)), logits(team))  # a run's directory: its newest
    assert all(parameter.requires_grad for agent in again._agents for parameter in again.agent_parameters(0).values())


def module_of(kind, team):
    own = {"learning_rate": 2e-3, "weight_decay": 0.5}
    if kind == "madpo":
        return MADPOModule(team, dpo_beta=0.7, score_last_token=True, num_train_epochs=1, **own)
    if kind == "marl":
        kl = ReferenceKL(coef=0.2)
        return MARLModule(team, rl_algorithm="maac", num_train_epochs=1, reference_kl=kl, num_generations=3, **own)
    reward = JointRewardModel("builtin:tiny", lora=LoraOptions(r=2), max_length=64)
    if kind == "reward":
        return JointRewardModule(reward, num_train_epochs=1, **own)
    return MARLHFModule(team, reward_model=reward, num_reward_epochs=1, num_train_epochs=1, num_generations=3, **own)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    make_trainer(root).fit(make_module(num_train_epochs=1), make_data(iterative=False, eval_items=None))
    return [str(next(root.rglob("iteration_0001.json")))]


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("madpo", False), ("madpo", True), ("marl", False), ("marl", True), ("reward", False), ("marlhf", True)],
)
def test_a_module_from_a_checkpoint_has_its_options_and_weights(kind, lora, pairs, tmp_path):
    team = make_team(lora)
    module = module_of(kind, team)
    path = saved(tmp_path, module, PreferenceDataModule(pairs=pairs) if kind == "reward" else None)
    given = {} if kind == "reward" else {"team": make_team(lora)}
    for arguments in (given, {}):
        again = type(module).load_from_checkpoint(path, **arguments)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        restored = dict(again.named_parameters())
        assert trained
        assert all(torch.equal(restored[name], value) for name, value in trained.items())
        assert (again.learning_rate, again.weight_decay) == (2e-3, 0.5)
    if kind == "madpo":
        assert (again.dpo_beta, again.score_last_token) == (0.7, True)
    if kind == "marl":
        assert (again.rl_algorithm, again.num_generations, again.kl_coef) == ("maac", 3, 0.2)
    if kind in ("reward", "marlhf"):
        assert again.reward_model.fitted
        text = (["yes"], ["no"], ["a"])
        prompts = [["p"]] * len(text)
        assert again.reward_model.score_texts(*text, prompts=prompts) == module.reward_model.score_texts(
            *text, prompts=prompts
        )
    if kind == "marlhf":
        assert again.policy.num_generations == 3


def test_options_that_are_given_replace_the_saved_ones(tmp_path):
    path = saved(tmp_path, make_module(num_train_epochs=1, dpo_beta=0.7))
    again = MADPOModule.load_from_checkpoint(path, dpo_beta=0.3)
    assert (again.dpo_beta, again.learning_rate) == (0.3, 1e-3)
    with pytest.raises(ConfigurationError, match="MADPOModule has no option `beta`"):
        MADPOModule.load_from_checkpoint(path, beta=0.3)
    with pytest.raises(ConfigurationError, match=r"a checkpoint of a MADPOModule: call MADPOModule.load_from_check"):
        MARLModule.load_from_checkpoint(path)
    with pytest.raises(ConfigurationError, match=r"another team: it does not hold 'backbones\.2"):
        AgentTeam.from_checkpoint(path, team=AgentTeam("builtin:tiny", num_agents=3))
    with pytest.raises(ConfigurationError, match="another team: it does not hold"):
        AgentTeam.from_checkpoint(path, team=make_team(lora=True))


def test_what_is_no_plain_data_is_asked_for(tmp_path, monkeypatch):
    model, tokenizer = tiny_model(3), tiny_tokenizer()
    team = AgentTeam([model], tokenizers=[tokenizer], formatters=[lambda item: f"Q {item['prompt']}"])
    path = saved(tmp_path, make_module(team, num_train_epochs=1))
    with pytest.raises(ConfigurationError, match=r"does not hold `models` \(a loaded LlamaForCausalLM.*give `models=`"):
        AgentTeam.from_checkpoint(path)
    given = {"models": [tiny_model(4)], "tokenizers": [tokenizer]}
    with pytest.raises(ConfigurationError, match=r"does not hold `formatters` \(the function .*lambda.*: give `format"):
        AgentTeam.from_checkpoint(path, **given)
    again = AgentTeam.from_checkpoint(path, **given, formatters="Q {prompt}")
    assert torch.equal(logits(again), logits(team))


def test_a_checkpoint_imports_and_calls_nothing_of_others(tmp_path, monkeypatch):
    prompts = types.ModuleType("my_prompts")
    exec("def shout(item): return item['prompt'].upper()", prompts.__dict__)
    monkeypatch.setitem(sys.modules, "my_prompts", prompts)
    team = AgentTeam("builtin:tiny", num_agents=2, formatters=[prompts.shout, "my_prompts:shout"])
    path = saved(tmp_path, make_module(team, num_train_epochs=1))
    assert AgentTeam.from_checkpoint(path).formatters == [prompts.shout, prompts.shout]
    monkeypatch.delitem(sys.modules, "my_prompts")
    with pytest.raises(ConfigurationError, match="names 'my_prompts:shout' for `formatters`: import its module"):
        AgentTeam.from_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    for wrong in ({"import_path": "os:system"}, {"class_path": "pbrl_lightning:SamplingConfig", "init_args": {}}):
        checkpoint["options"]["team"]["formatters"] = wrong
        torch.save(checkpoint, tmp_path / "evil.ckpt")
        with pytest.raises(ConfigurationError, match="give `formatters=`"):
            AgentTeam.from_checkpoint(tmp_path / "evil.ckpt")


def test_checkpoints_of_earlier_versions_say_what_to_give(tmp_path):
    team = make_team(lora=True)
    path = saved(tmp_path, make_module(team, num_train_epochs=1))
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["options"]
    torch.save(checkpoint, old := tmp_path / "old.ckpt")
    with pytest.raises(ConfigurationError, match="kept no options: give `team=`, an AgentTeam"):
        AgentTeam.from_checkpoint(old)
    with pytest.raises(ConfigurationError, match="kept no options: give `team=`"):
        MADPOModule.load_from_checkpoint(old)
    assert torch.equal(logits(AgentTeam.from_checkpoint(old, team=make_team(lora=True))), logits(team))
    again = MADPOModule.load_from_checkpoint(old, team=make_team(lora=True))
    assert torch.equal(logits(again.team, 1), logits(team, 1))


def test_wrong_files_are_one_sentence(tmp_path, pairs):
    with pytest.raises(MissingFileError, match=r"the checkpoint '.*nowhere\.ckpt' does not exist"):
        AgentTeam.from_checkpoint(tmp_path / "nowhere.ckpt")
    (tmp_path / "text.ckpt").write_text("no archive")
    with pytest.raises(ConfigurationError, match=r"text\.ckpt is (damaged|not a whole checkpoint)"):
        MADPOModule.load_from_checkpoint(tmp_path / "text.ckpt")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match=r"other\.ckpt is no checkpoint of a run"):
        AgentTeam.from_checkpoint(tmp_path / "other.ckpt")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").touch()
    with pytest.raises(ConfigurationError, match="is a sharded checkpoint: make one file of it"):
        AgentTeam.from_checkpoint(tmp_path / "sharded")
    path = saved(tmp_path / "reward", module_of("reward", None), PreferenceDataModule(pairs=pairs))
    with pytest.raises(ConfigurationError, match="a checkpoint of a JointRewardModule, which has no team"):
        AgentTeam.from_checkpoint(path)


class Remembering(MADPOModule):
    """A user's module that calls Lightning's ``save_hyperparameters``."""

    def __init__(self, team, api_key="", size=3, **options):
        super().__init__(team, **options)
        self.api_key = api_key
        self.save_hyperparameters()


def test_a_checkpoint_holds_plain_data_and_no_key(tmp_path):
    module = Remembering(make_team(), KEY, num_train_epochs=1, learning_rate=1e-3)
    path = saved(tmp_path, module)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["options"]["init_args"] == {"api_key": {"left_out": "(not shown)"}}
    assert checkpoint["hyper_parameters"]["size"] == 3
    assert "team" not in checkpoint["hyper_parameters"]
    json.dumps(checkpoint["options"])
    again = AgentTeam.from_checkpoint(path)
    assert torch.equal(logits(again), logits(module.team))


def test_a_run_that_is_gone_on_with_from_python_needs_no_options(tmp_path):
    path = saved(tmp_path, make_module(rounds=1), make_data(comparator=CurrentComparator(), eval_items=None))
    assert Path(path).is_file()
    again = MADPOModule.load_from_checkpoint(path, num_iterations=2)
    trainer = make_trainer(tmp_path / "more")
    trainer.fit(again, make_data(comparator=CurrentComparator(), eval_items=None), ckpt_path=path)
    assert trainer.datamodule.current_round == 2
