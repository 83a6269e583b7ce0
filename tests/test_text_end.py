"""Reward models that others trained: where their texts end, and heads that are more than one linear map."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from helpers import assert_close, save_model, tiny
from pbrl_lightning import AgentTeam, JointRewardModel, JointRewardModule, LoraOptions, PreferenceDataModule
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.preferences.pair_tokens import collate_rows
from training_runs import make_trainer

TRL = Path(__file__).parent / "data" / "trl_reward"
LORA = LoraOptions(r=2, alpha=8)

# -- what TRL 1.16's reward trainer saved (tests/data/trl_reward/make.py) --------------------------------------------


def trl_scores(name):
    found = json.loads((TRL / name / "scores.json").read_text())
    prompts = [[pair["prompt"] for pair in found["pairs"]]]
    return prompts, [
        ([pair[side] for pair in found["pairs"]], torch.tensor(found[side])) for side in ("chosen", "rejected")
    ]


@pytest.mark.parametrize(("name", "closing"), [("own_pad", [1]), ("pad_is_eos", [])])
def test_fault_B02_B04_a_reward_model_of_trl_scores_as_in_trl(name, closing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its card says who trained it
        reward = JointRewardModel(str(TRL / name)).load()
    assert reward.closing_ids == closing
    prompts, sides = trl_scores(name)
    assert max(scores.std() for _, scores in sides) > 0.5
    for texts, scores in sides:
        assert_close(torch.tensor(reward.score_texts(texts, prompts=prompts)), scores, 1e-4)


def test_the_other_ending_gives_other_scores():
    prompts, ((texts, scores), _) = trl_scores("own_pad")
    without = JointRewardModel(str(TRL / "own_pad"), joint_text_eos=False).load()
    assert without.closing_ids == []
    assert (torch.tensor(without.score_texts(texts, prompts=prompts)) - scores).abs().max() > 0.5


@pytest.mark.parametrize("place", ["", "checkpoint-40"])
def test_the_card_of_trl_is_found_beside_a_model_and_above_a_checkpoint(tmp_path, place):
    shutil.copytree(TRL / "own_pad", tmp_path / "run" / place)
    if place:
        (tmp_path / "run" / place / "README.md").rename(tmp_path / "run" / "README.md")
    assert JointRewardModel(str(tmp_path / "run" / place)).load().closing_ids == [1]


def test_a_classifier_of_unknown_training_is_read_without_eos_and_says_so(tmp_path):
    shutil.copytree(TRL / "own_pad", tmp_path / "model")
    for card in (None, "no yaml here", "---\ntags: [reward\n---\n", "---\ntags: [other]\n---\n"):
        (tmp_path / "model" / "README.md").unlink() if card is None else (tmp_path / "model" / "README.md").write_text(
            card
        )
        with pytest.warns(
            UserWarning, match=r"what trained it is not known.* without EOS here. Set its `joint_text_eos`"
        ):
            assert JointRewardModel(str(tmp_path / "model")).load().closing_ids == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ending in (True, False):
            reward = JointRewardModel(str(tmp_path / "model"), joint_text_eos=ending).load()
            assert reward.closing_ids == [1] * ending


def test_a_model_of_trl_with_a_chat_template_may_have_read_conversations(tmp_path):
    shutil.copytree(TRL / "own_pad", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.warns(UserWarning, match=r"TRL closes plain texts with EOS, and conversations.* reads them with EOS"):
        assert JointRewardModel(str(tmp_path / "model")).load().closing_ids == [1]


@pytest.mark.parametrize("eos", [True, False])
def test_the_ending_is_saved_with_the_model(tmp_path, eos):
    reward = JointRewardModel(str(TRL / "own_pad"), joint_text_eos=eos).load()
    reward.save(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["joint_text_eos"] is eos
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = JointRewardModel(str(tmp_path / "ours")).load()
    assert again.closing_ids == reward.closing_ids
    prompts, ((texts, _), _) = trl_scores("own_pad")
    assert again.score_texts(texts, prompts=prompts) == reward.score_texts(texts, prompts=prompts)
    assert JointRewardModel(str(tmp_path / "ours"), joint_text_eos=not eos).load().closing_ids == [1] * (not eos)


def test_a_new_reward_model_reads_no_eos_whatever_its_pad_token():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward = JointRewardModel("builtin:tiny").load()
    assert reward.joint_tokens(["ab"], [["c"]])[1] == [
        [tiny_tokenizer()("c", add_special_tokens=False)["input_ids"][0]]
    ]
    asked = JointRewardModel("builtin:tiny", joint_text_eos=True).load()
    assert asked.joint_tokens(["ab"], [["c"], ["d</s>"]])[1] == [
        [*reward.joint_tokens(["ab"], [[text]])[1][0], 1] for text in "cd"
    ]
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LORA)
    assert JointRewardModel("team").bind(team).load().closing_ids == []


def test_a_cut_text_keeps_its_eos():
    reward = JointRewardModel("builtin:tiny", joint_text_eos=True, max_length=4).load()
    with pytest.warns(UserWarning, match="was cut on the left to the 4"):
        prefix, (side,) = reward.joint_tokens(["abcdef"], [["xy"]])
    assert (len(prefix), len(side), side[-1]) == (1, 3, 1)


# -- heads that are more than one linear map -------------------------------------------------------------------------

SIZES = {"vocab_size": 259, "num_labels": 1, "max_position_embeddings": 80}
BERT_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DISTIL_SIZES = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
ENCODERS = {
    "bert": (BertForSequenceClassification, BertConfig, BERT_SIZES),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, BERT_SIZES),
    "distilbert": (DistilBertForSequenceClassification, DistilBertConfig, DISTIL_SIZES),
    "deberta": (DebertaV2ForSequenceClassification, DebertaV2Config, BERT_SIZES | {"type_vocab_size": 0}),
}
IDS = [[0, 10, 11, 70, 71, 72, 73, 1], [0, 20, 80, 1], [0, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 1]]
ROWS = collate_rows([ids[:2] for ids in IDS], [ids[2:] for ids in IDS], 2)


def encoder(kind, seed=0):
    model, config, sizes = ENCODERS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(config(**SIZES, **sizes, pad_token_id=2, bos_token_id=0, eos_token_id=1))
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def own_scores(model):
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS])


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_classifier_with_another_head_scores_as_transformers(tmp_path, kind):
    model = encoder(kind)
    expected = own_scores(model)
    assert expected.std() > 0.02
    for form in ("directory", "object"):
        given = {"model": save_model(model, tmp_path / "given")} if form == "directory" else {"model": model}
        reward = JointRewardModel(**given, tokenizer=tiny_tokenizer()).load()
        assert_close(reward(ROWS), expected)  # the batch is padded, transformers' texts are alone
        assert reward.closing_ids == [1]  # an encoder's tokenizer closes every text
        assert reward.fitted
    texts = reward.joint_tokens(["ab"], [["c", "d"]])
    assert texts[1][0][-1] == 1
    reward.save(tmp_path / "saved")
    assert_close(JointRewardModel(str(tmp_path / "saved")).load()(ROWS), expected)
    assert_close(own_scores(AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()), expected)


@pytest.mark.parametrize("options", [{}, {"freeze_backbone": True}, {"lora": LORA}, {"dtype": "bfloat16"}])
def test_a_classifier_with_another_head_is_trained_further(tmp_path, options):
    directory = save_model(encoder("bert"), tmp_path / "given")
    reward = JointRewardModel(directory, **options).load()
    assert {parameter.dtype for parameter in reward.trained_parameters()} == {torch.float32}
    assert_close(reward(ROWS), own_scores(encoder("bert")))
    before = {name: value.detach().clone() for name, value in reward.named_parameters()}
    pairs = [{"prompt": letter, "chosen": f"{letter}!", "rejected": letter} for letter in "abcdef"]
    data = PreferenceDataModule(pairs=pairs, val_fraction=0)
    make_trainer(tmp_path).fit(JointRewardModule(reward, learning_rate=0.01), data)
    moved = {name for name, value in reward.named_parameters() if not torch.equal(value, before[name])}
    assert "classifier.classifier.weight" in moved
    assert any("bert.encoder" in name for name in moved) == ("freeze_backbone" not in options)
    assert all("lora" in name or "classifier.classifier" in name for name in moved) or "lora" not in options
    reward.renew(2)
    backbone = {name: value for name, value in reward.named_parameters() if "bert." in name}
    assert all(torch.equal(value, before[name]) for name, value in backbone.items())
    assert not torch.equal(reward.classifier.classifier.weight, before["classifier.classifier.weight"])
    assert reward.classifier.classifier.bias.abs().max() == 0
    other = JointRewardModel(directory, **options).load()
    other.renew(2)  # a function of seed and round
    assert torch.equal(other.classifier.classifier.weight, reward.classifier.classifier.weight)


def test_checkpointing_recomputes_the_layers_and_changes_no_gradient(tmp_path):
    directory = save_model(encoder("bert"), tmp_path / "given")
    gradients = []
    for recomputing in (False, True):
        reward = JointRewardModel(directory, gradient_checkpointing=recomputing).load()
        reward(ROWS).sum().backward()
        gradients.append([p.grad for p in reward.trained_parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


def test_roberta_counts_its_positions_from_its_padding():
    reward = JointRewardModel(encoder("roberta"), tokenizer=tiny_tokenizer()).load()
    assert reward.length_limit == 77  # 80 positions, and the first three are for padding
    with pytest.warns(UserWarning, match="cut on the left to the 77"):
        (score,) = reward.score_texts(["x" * 200], prompts=[["p"]])
    assert score == score


def test_what_cannot_be_a_reward_model_is_refused_in_one_sentence(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "eos_token_id": 1}
    bart = BartForSequenceClassification(BartConfig(**SIZES, **sizes, pad_token_id=2))
    directory = save_model(bart, tmp_path / "bart")
    for given in ({"model": directory}, {"model": bart, "tokenizer": tiny_tokenizer()}):
        with pytest.raises(ValueError, match=r"is an encoder-decoder \(bart\), and a reward model reads"):
            JointRewardModel(**given).load()
    plain = BertModel(BertConfig(vocab_size=259, **BERT_SIZES))
    with pytest.raises(ValueError, match=r"bert' has no trained head, and a BertForSequenceClassification needs more"):
        JointRewardModel(save_model(plain, tmp_path / "bert")).load()
    two = BertForSequenceClassification(BertConfig(vocab_size=259, num_labels=2, **BERT_SIZES))
    with pytest.raises(ValueError, match="two' is a classifier of 2 outputs; a reward model has one"):
        JointRewardModel(save_model(two, tmp_path / "two")).load()
    with pytest.raises(ValueError, match="the BertForSequenceClassification has 2 outputs; a reward model has one"):
        JointRewardModel(two, tokenizer=tiny_tokenizer()).load()


def test_causal_models_keep_their_own_head():
    reward = JointRewardModel(tiny("llama", torch.float32), tokenizer=tiny_tokenizer()).load()
    assert type(reward.head).__name__ == "ScalarHead"
