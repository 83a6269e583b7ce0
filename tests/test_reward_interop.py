"""Reward models saved, loaded by plain transformers in a new process, of TRL's form, renewed; wrong options."""

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from helpers import assert_close, save_model, tiny
from pbrl_lightning import AgentTeam, JointRewardModel, JointRewardModule, LoraOptions
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.preferences.pair_tokens import collate_rows
from training_runs import perturb

LORA = LoraOptions(r=2, alpha=8)
PROMPTS = [["Sum up: rain", "p", "a</s>b"], ["Explain: rain", "q", "c"]]
TEXTS = [["Wet.", "a", "xyz"], ["Water falls from clouds.", "", "</s>z"]]
ROWS = collate_rows([[0, 10, 11], [0, 20], [0]], [[70, 71, 72, 73], [80], [90, 91, 92, 93, 94, 95]], 2)
KINDS = ("full", "lora", "freeze", "team", "team freeze", "object", "gpt2 full", "gpt2 lora", "gpt2 team")


def make_kind(kind, directory, seed=0, dtype="float32"):
    """A loaded reward model of each form, as it starts."""
    options = {"freeze_backbone": "freeze" in kind, "lora": LORA if "lora" in kind else None, "seed": seed}
    name = "builtin:tiny"
    if "gpt2" in kind:
        name = str(directory / "gpt2")
        if not (directory / "gpt2").exists():
            save_model(tiny("gpt2", torch.float32, n_positions=256), directory / "gpt2")
    if "team" in kind:
        team = AgentTeam(name, num_agents=2, lora=LORA, dtype=dtype).load()
        return JointRewardModel("team", **options).bind(perturb(team, 5)).load()
    if kind == "object":
        return JointRewardModel(tiny("llama", getattr(torch, dtype)), tokenizer=tiny_tokenizer(), **options).load()
    return JointRewardModel(name, dtype=dtype, **options).load()


def trained(reward, seed=1):
    """As after training: all that is trained has moved, and scores are not small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reward.trained_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        reward.head.weight.mul_(10)
    return reward


def texts_of(reward):
    """The three joint texts as ids, by hand."""

    def joined(word, rows):
        numbered = [[f"### {word} of agent {agent}\n{text}" for text in row] for agent, row in enumerate(rows)]
        return ["\n\n".join(texts) for texts in zip(*numbered, strict=True)]

    tokenizer = reward.tokenizer
    return [
        tokenizer(prompt + "\n\n")["input_ids"] + tokenizer(text, add_special_tokens=False)["input_ids"]
        for prompt, text in zip(joined("Prompt", PROMPTS), joined("Response", TEXTS), strict=True)
    ]


# Saved, and loaded by others

FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from pbrl_lightning import JointRewardModel

plan, found = json.load(open(sys.argv[1])), {}
for kind, (directory, ids, prompts, texts) in plan["models"].items():
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    scores = {"alone": [model(torch.tensor([row])).logits.item() for row in ids]}
    tokenizer.padding_side = "right"
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    scores["batch"] = model(**batch).logits[:, 0].tolist()
    scores["ours"] = JointRewardModel(directory).load().score_texts(*texts, prompts=prompts)
    scores["pad"] = [model.config.pad_token_id, tokenizer.pad_token_id, model.config.num_labels]
    found[kind] = scores
print("END OF OURS", file=sys.stderr)
AutoModelForSequenceClassification.from_pretrained(plan["control"], num_labels=1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """Scores here, scores in a new process, and what that process wrote to stderr while it loaded reward models."""
    root = tmp_path_factory.mktemp("saved")
    plan, expected = {}, {}
    for kind in KINDS:
        reward = trained(make_kind(kind, root))
        if kind == "freeze":  # what SmolLM2 and GPT-2 do: no pad token of their own
            reward.tokenizer.pad_token = reward.tokenizer.eos_token
        reward.save(root / "reward" / kind)
        expected[kind] = reward.score_texts(*TEXTS, prompts=PROMPTS)
        plan[kind] = (str(root / "reward" / kind), texts_of(reward), PROMPTS, TEXTS)
    control = save_model(tiny("llama", torch.float32), root / "control")
    (root / "plan.json").write_text(json.dumps({"models": plan, "control": control}))
    command = [sys.executable, "-c", FRESH, str(root / "plan.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    ours, _, control = done.stderr.partition("END OF OURS")
    return root, expected, json.loads(done.stdout.splitlines()[-1]), ours, control


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fault_B55_B59_a_saved_reward_model_scores_the_same_in_a_new_process(fresh_process, kind):
    root, expected, found, _, _ = fresh_process
    scores = torch.tensor(expected[kind])
    assert scores.std() > 0.05
    for name in ("alone", "batch", "ours"):
        assert_close(torch.tensor(found[kind][name]), scores, 1e-4)
    assert found[kind]["pad"] == ([1, 1, 1] if kind == "freeze" else [2, 2, 1])
    tensors = load_file(root / "reward" / kind / "model.safetensors")
    assert not [name for name in tensors if "lora" in name or "lm_head" in name]
    assert sum(name.endswith("score.weight") for name in tensors) == 1
    assert sum("embed_tokens" in name or "wte" in name for name in tensors) == 1


def test_fault_B55_loading_a_reward_model_says_nothing_of_new_weights(fresh_process, caplog, capfd, recwarn):
    root, _, _, stderr, control = fresh_process
    assert "newly initialized" in control  # what transformers says of a model without a head
    assert "initiali" not in stderr
    assert "MISSING" not in stderr
    with caplog.at_level(logging.DEBUG):
        JointRewardModel(str(root / "reward" / "lora")).load()
        JointRewardModel("builtin:tiny").load()
    printed = "".join(capfd.readouterr())
    for text in (caplog.text, printed, *(str(warning.message) for warning in recwarn.list)):
        assert "initiali" not in text
        assert "MISSING" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_saving_changes_nothing_and_loading_back_gives_the_very_scores(tmp_path, kind):
    reward = trained(make_kind(kind, tmp_path))
    scores = reward(ROWS)
    scores.sum().backward()  # in the middle of training
    state = [(p, p.detach().clone(), p.requires_grad, p.grad) for p in reward.trained_parameters()]
    agents = [(p, p.detach().clone()) for team in reward._team for p in team.parameters()]
    reward.save(tmp_path / "saved")
    assert torch.equal(reward(ROWS), scores)
    for now, (parameter, value, requires_grad, grad) in zip(reward.trained_parameters(), state, strict=True):
        assert now is parameter
        assert torch.equal(now, value)
        assert (now.requires_grad, now.grad) == (requires_grad, grad)
    assert all(torch.equal(parameter, value) for parameter, value in agents)
    back = JointRewardModel(str(tmp_path / "saved")).load()
    assert torch.equal(back.head.weight, reward.head.weight)
    merged = "lora" in kind or kind in ("team", "gpt2 team")
    assert_close(back(ROWS), scores, 1e-5 if merged else 1e-9)
    back.save(tmp_path / "saved")  # over the old one
    assert torch.equal(JointRewardModel(str(tmp_path / "saved")).load()(ROWS), back(ROWS))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_fault_B55_B57_a_head_comes_back_as_it_was_saved(tmp_path, dtype):
    reward = trained(make_kind("freeze", tmp_path, dtype=dtype))
    assert reward.head.weight.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    reward.save(tmp_path / "saved")
    back = JointRewardModel(str(tmp_path / "saved"), dtype=dtype).load()
    assert torch.equal(back.head.weight, reward.head.weight)
    assert torch.equal(back(ROWS), reward(ROWS))


def test_fault_B55_a_saved_reward_model_without_its_head_is_refused(tmp_path):
    make_kind("lora", tmp_path).save(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    del tensors["score.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"saved.* lacks score\.weight"):
        JointRewardModel(str(tmp_path / "saved")).load()


# What TRL's reward trainer saves


def trl_model(root, num_labels=1, dtype=torch.float32):
    base = save_model(tiny("llama", dtype), root / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.config.pad_token_id = 2
    return model.eval()


def trl_adapter(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT's own
        return get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS", modules_to_save=["score"]))


def logits(model):
    rows = [ids[mask][None] for ids, mask in zip(ROWS.input_ids, ROWS.attention_mask, strict=True)]
    with torch.no_grad():
        return torch.cat([model(input_ids=row).logits[0] for row in rows])


def test_a_full_model_of_trl(tmp_path):
    model = trl_model(tmp_path)
    save_model(model, tmp_path / "trl")
    expected = logits(model)
    assert expected.std() > 0.05
    reward = JointRewardModel(str(tmp_path / "trl")).load()
    assert_close(reward(ROWS), expected)
    assert_close(JointRewardModel(model, tokenizer=tiny_tokenizer()).load()(ROWS), expected)
    # It can be trained on: nothing of it is drawn anew before.
    assert_close(JointRewardModel(str(tmp_path / "trl"), lora=LORA).load()(ROWS), expected)


@pytest.mark.parametrize("base", ["language model", "classifier"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_an_adapter_of_trl(tmp_path, base, with_tokenizer):
    model = trl_model(tmp_path)
    if base == "classifier":
        save_model(model, tmp_path / "trained")
        model = LlamaForSequenceClassification.from_pretrained(tmp_path / "trained")
    adapted = trl_adapter(model)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    adapted.eval().save_pretrained(tmp_path / "trl")
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(tmp_path / "trl")
    expected = logits(adapted)
    plain = AutoModelForSequenceClassification.from_pretrained(model.config.name_or_path, num_labels=1)
    with warnings.catch_warnings(action="ignore"):
        assert_close(logits(PeftModel.from_pretrained(plain, tmp_path / "trl").eval()), expected)
    reward = JointRewardModel(str(tmp_path / "trl")).load()
    assert_close(reward(ROWS), expected)
    reward.save(tmp_path / "ours")
    assert_close(logits(AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()), expected, 1e-4)


def test_fault_B55_an_adapter_of_trl_without_its_head_is_refused(tmp_path):
    adapted = trl_adapter(trl_model(tmp_path))
    adapted.save_pretrained(tmp_path / "trl")
    tiny_tokenizer().save_pretrained(tmp_path / "trl")
    path = tmp_path / "trl" / "adapter_model.safetensors"
    tensors = load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if "score" not in name}
    assert len(kept) == len(tensors) - 1
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises((KeyError, ValueError), match="score"):  # PEFT finds it first
        JointRewardModel(str(tmp_path / "trl")).load()


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    model = trl_model(tmp_path, num_labels=2)
    save_model(model, tmp_path / "two")
    with pytest.raises(ValueError, match="two' is a classifier of 2 outputs; a reward model has one"):
        JointRewardModel(str(tmp_path / "two")).load()
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no head `score` with one output"):
        JointRewardModel(model, tokenizer=tiny_tokenizer()).load()


# Newly initialised


def values(reward):
    return [parameter.detach().clone() for parameter in reward.trained_parameters()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_renewed_for_a_round(tmp_path, kind):
    reward = make_kind(kind, tmp_path)
    start = values(reward)
    assert 0.01 < reward.head.weight.std() < 0.03
    parameters = reward.trained_parameters()
    heads = {}
    for round_number in (1, 2, 3):
        trained(reward, round_number)
        reward.renew(round_number)
        assert same(values(reward)[:-1], start[:-1])  # all but the head, which comes last
        heads[round_number] = reward.head.weight.detach().clone()
    assert torch.equal(heads[1], start[-1])
    assert len({tuple(head[0].tolist()) for head in heads.values()}) == 3
    assert all(now is then for now, then in zip(reward.trained_parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)
    # Another process, a round that begins after a resume: a function of seed and round alone.
    other = make_kind(kind, tmp_path)
    torch.manual_seed(99)
    trained(other, 7)
    other.load_state_dict(trained(reward, 8).state_dict())
    for round_number in (2, 1):
        other.renew(round_number)
        assert same(values(other), [*start[:-1], heads[round_number]])
    seeded = make_kind(kind, tmp_path, seed=1)
    assert not torch.equal(seeded.head.weight, heads[1])
    if "lora" in kind:  # and its A matrices, but B is zero: it says nothing yet
        assert not same(values(seeded)[:-1], start[:-1])
        assert torch.equal(make_kind(kind.replace("lora", "full"), tmp_path)(ROWS), make_kind(kind, tmp_path)(ROWS))


def test_a_renewed_reward_model_of_trl_has_a_new_head_on_the_backbone_as_loaded(tmp_path):
    save_model(trl_model(tmp_path), tmp_path / "trl")
    reward = JointRewardModel(str(tmp_path / "trl")).load()
    before = values(reward)
    trained(reward).renew(2)
    assert same(values(reward)[:-1], before[:-1])
    assert torch.equal(reward.head.weight, _second_head(tmp_path))


def _second_head(directory):
    reward = make_kind("object", directory, dtype="float32")
    reward.renew(2)
    return reward.head.weight


# Wrong options


def test_loaded_agents_without_a_name_need_a_model(tmp_path):
    team = AgentTeam([tiny("llama"), tiny("llama", seed=1)], tokenizers=tiny_tokenizer())
    with pytest.raises(ValueError, match="reward model needs `model`: agent 0 is a loaded model without a name"):
        JointRewardModel().bind(team)
    named = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama", torch.float32), tmp_path / "named"))
    team = AgentTeam([named, tiny("llama")], tokenizers=tiny_tokenizer())
    reward = JointRewardModel().bind(team).load()
    backbone = dict(reward.classifier.base_model.named_parameters())
    for name, parameter in team.load().model(0).base_model.named_parameters():
        assert torch.equal(backbone[name], parameter)
        assert backbone[name].data_ptr() != parameter.data_ptr()  # loaded once more


def test_a_model_is_needed_where_there_is_no_team():
    for model in (None, "team"):
        with pytest.raises(ValueError, match="the reward model needs `model`"):
            JointRewardModel(model).bind(None)


def test_a_teams_backbone_must_be_one_and_frozen(tmp_path):
    other = save_model(tiny("llama", torch.float32, seed=1), tmp_path / "other")
    for team in (
        AgentTeam("builtin:tiny", num_agents=2),
        AgentTeam(["builtin:tiny", other], lora=LORA),
    ):
        with pytest.raises(ValueError, match="needs a LoRA team on one frozen backbone"):
            JointRewardModel("team").bind(team)
        assert not team.is_loaded


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ValueError, match=r"`freeze_backbone` .* `lora`.*`max_length` .* got 0.*`dtype` .* got 'int8'"):
        JointRewardModel("builtin:tiny", freeze_backbone=True, lora=LORA, max_length=0, dtype="int8")
    with pytest.raises(ValueError, match="`tokenizer` must be given with a loaded `model`"):
        JointRewardModel(tiny("llama"))
    for options, message in (
        ({"num_train_epochs": 0}, "`num_train_epochs` must be >= 1, got 0"),
        ({"learning_rate": 0.0}, "`learning_rate` must be > 0, got 0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            JointRewardModule(JointRewardModel("builtin:tiny"), **options)
    with pytest.raises(FileNotFoundError, match="'/no/such/model' does not exist"):
        JointRewardModel("/no/such/model").load()


def test_a_model_directory_without_a_tokenizer_says_so(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(OSError, match=r"bare.* has no tokenizer"):
        JointRewardModel(str(tmp_path / "bare")).load()
    assert JointRewardModel(str(tmp_path / "bare"), tokenizer=tiny_tokenizer()).load().pad_id == 2


def test_fault_B58_a_backbone_without_a_language_model_head(tmp_path):
    headless = tiny("llama", torch.float32).model
    reward = trained(JointRewardModel(headless, tokenizer=tiny_tokenizer(), lora=LORA).load())
    reward.save(tmp_path / "saved")
    again = JointRewardModel(str(tmp_path / "saved")).load()
    assert_close(again(ROWS), reward(ROWS), 1e-4)
