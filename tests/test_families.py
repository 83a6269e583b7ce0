"""Model families beyond the usual ones are scored, sampled and trained as their plain forward says, or refused."""

from pathlib import Path

import pytest
import torch

from benchmarks.families import BEGIN, END, _batch, _id, _ids, plain_logps, row_of, table
from benchmarks.families_parts.tiny import families, tiny_of
from helpers import assert_close
from pbrl_lightning.agents.forward import reading_of
from pbrl_lightning.agents.loading import Source, tiny_tokenizer
from pbrl_lightning.agents.logprobs import response_logps
from pbrl_lightning.agents.sampling import SamplingConfig, sample_responses
from pbrl_lightning.agents.self_check import check_model
from pbrl_lightning.models.classifier import load_classifier
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.randomness import counted_uniforms
from pbrl_lightning.utils.errors import ConfigurationError

PAGE = (Path(__file__).parent.parent / "docs/models.md").read_text(encoding="utf-8")
LISTED = PAGE.partition(BEGIN)[2].partition(END)[0]

# The usual ones; heads reached otherwise; positions of their own; no cache of keys; both kinds of layers; experts.
SAMPLE = [
    *("llama", "opt", "bart", "mamba", "qwen3_next"),
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("gpt2", "roberta", "jamba", "lfm2", "phi3", "mixtral", "recurrent_gemma", "bloom")
    ),
]


@pytest.mark.filterwarnings("ignore:the model")
@pytest.mark.parametrize("family", SAMPLE)
def test_fault_B105_B111_families_are_read_as_the_page_says(family):
    row = row_of(family)
    assert row.right
    kind = f"| {family} | {row.scored} | {row.sampled} |"
    assert kind in table([row])
    assert kind in LISTED


def test_the_page_lists_every_family_of_the_installed_transformers():
    listed = [line.split(" | ")[0].removeprefix("| ") for line in LISTED.splitlines() if line.startswith("| ")]
    assert [name for name in listed if name != "family"] == families()
    assert " inf " not in LISTED


@pytest.mark.filterwarnings("ignore:the model")
@pytest.mark.parametrize(
    "family",
    [
        *("opt", "mamba", "jamba", "qwen3_next"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "bart", "granitemoehybrid", "lfm2")),
    ],
)
@torch.no_grad()
def test_greedy_responses_are_those_of_generate(family):
    model = tiny_of(family)
    check_model(model, "the model")
    prompts = [list(_ids(5, 1)), list(_ids(2, 6))]
    uniforms = [counted_uniforms(1, 8, 0, "actors") for _ in prompts]
    ours = sample_responses(model, prompts, uniforms, SamplingConfig(temperature=0, max_new_tokens=8), set())
    for prompt, responses in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=2)
        assert responses[0].token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore:the model")
@pytest.mark.parametrize("family", ["opt", "roberta", "mamba", "olmo_hybrid"])
def test_gradients_are_those_of_the_plain_forward(family):
    rows = [(list(_ids(4, 2)), [_id(9), _id(4)]), (list(_ids(2, 5)), [_id(1)]), (list(_ids(2, 5)), [_id(3), _id(8)])]
    gradients = []
    for ours in (True, False):
        model = tiny_of(family, torch.float64)
        check_model(model, "the model")
        if ours:
            total = response_logps(model, _batch(rows)).token_logps.sum()
        else:
            parts = []
            for prompt, response in rows:
                logps = plain_logps(model, prompt + response)[len(prompt) - 1 : -1]
                parts.append(logps[torch.arange(len(response)), torch.tensor(response)].sum())
            total = torch.stack(parts).sum()
        total.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        assert_close(gradients[0][name], gradient.to(gradients[0][name].dtype), 1e-4)


def test_fault_B105_opt_hears_its_prompt():
    """The head took the ids of a stand-in for the text: a response had the same probability after any prompt."""
    model = tiny_of("opt")
    check_model(model, "the model")
    assert reading_of(model).decoder == "model.decoder"
    scored = response_logps(model, _batch([([5, 30], [40, 41]), ([5, 91], [40, 41])])).sums
    assert abs(float(scored[0] - scored[1])) > 0.1


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "bert",
            {"is_decoder": False},
            r"agent 0 \(BertLMHeadModel\) predicts tokens from those after them .*`is_decoder",
        ),
        ("rwkv", {"num_hidden_layers": 7}, r"agent 0 \(RwkvForCausalLM\) changes the model's own weights"),
        ("xlnet", {}, r"agent 0 \(XLNetLMHeadModel\) predicts tokens from those after them"),
    ],
)
def test_fault_B111_what_cannot_be_read_rightly_is_refused(family, options, message):
    with pytest.raises(ConfigurationError, match=message):
        check_model(tiny_of(family, **options), "the model of agent 0")


def test_a_reward_model_of_an_architecture_without_classifiers_is_refused(tmp_path):
    tiny_of("mamba").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'mamba', of which transformers has no sequence classifier"):
        load_classifier(Source(str(tmp_path)), "float32")


@pytest.mark.filterwarnings("ignore:the reward model")
@pytest.mark.parametrize("family", ["opt", "mixtral", "qwen3_next"])
def test_scores_of_a_reward_model_do_not_depend_on_the_batch(family):
    model = tiny_of(family)
    reward = JointRewardModel(model, tokenizer=tiny_tokenizer(letters=True)).load()
    texts = [(list(_ids(9, 2)), [_id(9), _id(4)]), (list(_ids(3, 5)), [_id(1)])]
    with torch.no_grad():
        assert_close(reward(_batch(texts)), torch.cat([reward(_batch([text])) for text in texts]), 1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "granitemoe"])
def test_fault_B112_experts_with_router_logits_are_sampled_and_trained(family):
    values = []
    for asked in (True, False):
        model = tiny_of(family, output_router_logits=asked)
        check_model(model, "the model")
        uniforms = [counted_uniforms(2, 5, 0, "actors") for _ in range(2)]
        said = sample_responses(model, [[9, 7, 8], [30]], uniforms, SamplingConfig(max_new_tokens=5), set())
        loss = response_logps(model, _batch([([5, 30], [40, 41]), ([5], [40])])).sums.sum()
        loss.backward()
        values.append((said, loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert values[0][:2] == values[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(values[0][2], values[1][2], strict=True))
