"""The joint reward model: its scores against a literal forward, what it trains, what it cuts, how it is renewed."""

import warnings

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from helpers import assert_close, live_tensor_bytes, save_model, tiny
from pbrl_lightning import AgentTeam, JointRewardModel, LoraOptions, MADPOModule, PairBatch, PreferencePair
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.batches import TokenBatch
from pbrl_lightning.models.scalar import ScalarModel
from pbrl_lightning.preferences.pair_tokens import collate_rows
from training_runs import perturb, same_weights, weights_of

LORA = LoraOptions(r=2, alpha=8)
ROWS = [[0, 10, 11, 12, 70, 71], [0, 20, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90], [0, 30, 91]]
PROMPTS = "### Prompt of agent 0\n{}\n\n### Prompt of agent 1\n{}\n\n"
RESPONSES = "### Response of agent 0\n{}\n\n### Response of agent 1\n{}"
TRAINABLE = ("full", "lora", "freeze", "team", "team freeze")


def pair(prompts, winner, loser):
    return PreferencePair(prompts, winner, loser, 1.0, 0.0, 0.5)


def reward_of(architecture="llama", dtype=torch.float64, tokenizer=None, model_options=None, **options):
    """A reward model on a random backbone, with a head that is not small."""
    backbone = tiny(architecture, dtype, **(model_options or {}))
    reward = JointRewardModel(backbone, tokenizer=tokenizer or tiny_tokenizer(), **options).load()
    with torch.no_grad():
        reward.head.weight.mul_(20)
    return backbone, reward


def make_kind(kind, dtype="float32", **options):
    """A loaded reward model of the built-in model, and its LoRA team if it has one."""
    options = {"freeze_backbone": "freeze" in kind, **options}
    if not kind.startswith("team"):
        return JointRewardModel("builtin:tiny", lora=LORA if kind == "lora" else None, dtype=dtype, **options).load()
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LORA, dtype=dtype).load()
    return JointRewardModel("team", lora=LORA if kind == "team" else None, **options).bind(perturb(team, 5)).load()


def shake(reward, scale=0.05, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reward.trained_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return reward


def literal_score(model, head, ids):
    """The last hidden state of one row without padding, times the head."""
    with torch.no_grad():
        states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
    return (states[0, len(ids) - 1].to(head.weight.dtype) * head.weight[0]).sum().detach()


def padded(rows, pad_id, left=0, right=0):
    """Rows with this much padding besides what brings them to one width; on both sides if so asked."""
    width = max(map(len, rows)) + left + right
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = width - right - len(row) if left else 0
        ids[index, start : start + len(row)] = torch.tensor(row)
        mask[index, start : start + len(row)] = True
    return TokenBatch(ids, mask, torch.zeros_like(mask))


# Scores


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_fault_B02_B03_a_score_does_not_depend_on_padding(architecture, dtype):
    model, reward = reward_of(architecture, dtype)
    expected = torch.stack([literal_score(model, reward.head, row) for row in ROWS])
    assert expected.std() > 0.1
    alone = torch.cat([reward(padded([row], 2)) for row in ROWS])
    assert alone.dtype == dtype
    # Gemma 2's attention has its softmax in float32, and turns rows that see padding alone into NaN in float64.
    tolerance = 1e-6 if (architecture, dtype) == ("gemma2", torch.float64) else None
    assert_close(alone, expected, tolerance)
    for pad_id in (2, 1, 12):  # pad, EOS, a token of the text
        for left, right in ((0, 0), (0, 5)) if tolerance else ((0, 0), (0, 5), (3, 0), (3, 5)):
            assert_close(reward(padded(ROWS, pad_id, left, right)), expected, tolerance)


def test_granite_on_a_teams_backbone(tmp_path):
    # Transformers has no sequence classifier of it, so that it cannot stand alone.
    path = save_model(tiny("granite", torch.float32), tmp_path / "granite")
    options = LoraOptions(r=2, target_modules=["q_proj"])
    team = AgentTeam(path, num_agents=2, lora=options, dtype="float64").load()
    model = ScalarModel("team", lora=options).bind(team).load()
    expected = torch.stack([literal_score(tiny("granite"), model.head, row) for row in ROWS])
    assert_close(model(padded(ROWS, 2, right=4)), expected, 1e-6)  # saved in float32
    # A reward model is exported, which is found out before the run.
    for reward in (JointRewardModel("team").bind(team), JointRewardModel(tiny("granite"), tokenizer=tiny_tokenizer())):
        with pytest.raises(ValueError, match=r"Granite.* has no sequence classifier in transformers"):
            reward.load()


@pytest.mark.parametrize("pad_token", ["<pad>", "</s>", None])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_fault_B02_B04_texts_are_scored_by_their_last_token(architecture, pad_token):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad_token
    options = {"pad_token_id": None, "n_positions": 256} if architecture == "gpt2" else {}
    model, reward = reward_of(architecture, tokenizer=tokenizer, model_options=options)
    model.config.pad_token_id = None
    prompts = ["a</s>\nb", "</s></s>c"]
    answers = [["x", "y"], ["x", "z"], ["xx", "y"], ["a rather long answer", "</s> and more"], ["", ""]]
    scores = reward.score_texts(*map(list, zip(*answers, strict=True)), prompts=[[p] * 5 for p in prompts])
    for answer, score in zip(answers, scores, strict=True):
        ids = [0, *byte_ids(PROMPTS.format(*prompts)), *byte_ids(RESPONSES.format(*answer))]
        assert_close(torch.tensor(score, dtype=torch.float64), literal_score(model, reward.head, ids))
    # Only the last response is another one.
    assert abs(scores[0] - scores[1]) > 1e-2
    assert len(set(scores)) == 5


def byte_ids(text):
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_scores_of_many_texts_come_in_the_order_of_the_texts(monkeypatch):
    monkeypatch.setattr("pbrl_lightning.models.reward.TOKEN_BUDGET", 30)
    model, reward = reward_of(max_length=100)
    texts = ["bb", "ccccc", "a", "dddddddddddddddddddddddddddddddddddddddd", "", "ee"]
    scores = reward.score_texts(texts, prompts=[list("uvwxyz")])
    for prompt, text, score in zip("uvwxyz", texts, scores, strict=True):
        ids = [0, *byte_ids(prompt), *byte_ids(text)]
        assert_close(torch.tensor(score, dtype=torch.float64), literal_score(model, reward.head, ids))
    assert reward.score_texts([], prompts=[[]]) == []


@pytest.mark.parametrize("adapted", [True, False])
def test_on_a_teams_backbone_only_its_own_adapter_speaks(adapted):
    reward = shake(make_kind("team" if adapted else "team freeze", "float64"))
    (team,) = reward._team
    literal = AgentTeam("builtin:tiny", num_agents=1, dtype="float64").load().model(0)
    with torch.no_grad():
        for name, module in literal.named_modules():
            layer = team.model(0).get_submodule(name)
            if adapted and hasattr(layer, "lora_A"):
                update = layer.lora_B["reward_0"].weight.double() @ layer.lora_A["reward_0"].weight.double()
                module.weight += 8 / 2 * update  # alpha / r
    expected = torch.stack([literal_score(literal, reward.head, row) for row in ROWS])
    assert_close(reward(padded(ROWS, 2)), expected, 1e-6)
    assert_close(reward(padded(ROWS, 2, 3, 3)), reward(padded(ROWS, 2)))


def test_a_score_is_the_same_in_training_with_checkpointing_and_under_autocast():
    _, reward = reward_of(dtype=torch.float32)
    expected = reward(padded(ROWS, 2))
    assert torch.equal(reward.train()(padded(ROWS, 2)), expected)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = reward(padded(ROWS, 2))
    assert mixed.dtype == torch.float32
    assert_close(mixed, expected, 0.1)
    _, recomputed = reward_of(dtype=torch.float32, gradient_checkpointing=True)
    assert_close(recomputed(padded(ROWS, 2)), expected)
    # In float64: without checkpoints the last layer is computed for last tokens only, and sums are others.
    exact = [reward_of(dtype=torch.float64, gradient_checkpointing=checkpointing)[1] for checkpointing in (False, True)]
    for some in exact:
        some(padded(ROWS, 2)).square().sum().backward()
    for one, other in zip(*(some.trained_parameters() for some in exact), strict=True):
        assert_close(one.grad, other.grad, 1e-9)


# What is trained


def steps(reward, count=3, learning_rate=1e-5):
    optimizer = torch.optim.AdamW(reward.trained_parameters(), lr=learning_rate)
    for _ in range(count):
        optimizer.zero_grad()
        scores = reward(padded(ROWS, 2))
        (-torch.nn.functional.logsigmoid(scores[0] - scores[1])).backward()
        optimizer.step()


def state_of(reward):
    modules = [reward, *reward._team]
    named = [(f"{index}.{name}", p) for index, module in enumerate(modules) for name, p in module.named_parameters()]
    return {name: (p.detach().clone(), p.requires_grad) for name, p in named}


@pytest.mark.parametrize("kind", TRAINABLE)
def test_fault_B57_exactly_what_is_meant_trains_in_float32_and_moves(kind):
    reward = make_kind(kind, "bfloat16" if kind != "full" else "float32")
    before = state_of(reward)
    trained = {id(parameter) for parameter in reward.trained_parameters()}
    assert len(trained) == len(reward.trained_parameters())
    meant = {"full": "0.classifier.model.", "lora": ".reward_0.", "team": ".reward_0."}.get(kind, "nothing")
    steps(reward)
    moved = set()
    for name, (value, requires_grad) in before.items():
        is_meant = meant in name or name == "0.head.weight"
        parameter = dict(reward.named_parameters()).get(name[2:]) if name[0] == "0" else None
        if parameter is None:
            parameter = dict(reward._team[0].named_parameters())[name[2:]]
        assert (id(parameter) in trained) == is_meant, name
        assert requires_grad == (is_meant or ".agent_" in name), name
        if is_meant:
            assert parameter.dtype == torch.float32, name
        if not torch.equal(value, parameter):
            moved.add(name)
        assert is_meant or name not in moved, name
    expected = {name for name in before if meant in name or name == "0.head.weight"}
    assert moved == expected
    assert len(expected) == {"full": 21, "lora": 9, "team": 9}.get(kind, 1)


@pytest.mark.parametrize("kind", ["full", "lora", "freeze"])
def test_fault_B57_the_head_stays_float32_whatever_the_module_is_cast_to(kind):
    reward = make_kind(kind, "bfloat16").to(torch.bfloat16)
    before = reward.head.weight.detach().clone()
    steps(reward, 20)
    assert reward.head.weight.dtype == torch.float32
    assert (reward.head.weight != before).all()
    assert reward(padded(ROWS, 2)).dtype == torch.float32
    assert reward.half().head.weight.dtype == torch.float32
    assert reward.double().head.weight.dtype == torch.float64


def test_fault_B57_an_adapter_stays_float32_when_the_module_is_cast():
    # Trainer(precision="bf16-true") casts the module; all that is trained must be float32.
    reward = make_kind("lora", "bfloat16").to(torch.bfloat16)
    assert {parameter.dtype for parameter in reward.trained_parameters()} == {torch.float32}


def test_fault_B63_a_reward_model_on_a_lora_team_leaves_the_agents_alone_and_they_it():
    reward = make_kind("team")
    (team,) = reward._team
    batch = PairBatch(
        [collate_rows([[0, 5, 6]] * 2, [[70, 71, 72], [80, 81]], 2)] * 2, torch.ones(1), 1.0, torch.zeros(1)
    )
    agents = weights_of(team)
    logps = [team.response_logps(agent, batch.agents[0]) for agent in range(2)]
    steps(reward, learning_rate=1e-2)
    assert same_weights(weights_of(team), agents)
    assert [len(values) for values in agents] == [8, 8]
    assert all(p.grad is None for agent in range(2) for p in team.agent_parameters(agent).values())
    for agent in range(2):
        assert torch.equal(team.response_logps(agent, batch.agents[0]), logps[agent])
    # And the other way round.
    values, scores = [p.detach().clone() for p in reward.trained_parameters()], reward(padded(ROWS, 2))
    for parameter in reward.trained_parameters():
        parameter.grad = None
    module = MADPOModule(team, learning_rate=1e-2)
    optimizer = module.configure_optimizers()
    loss, _ = module.step(batch, "batch 0")
    loss.backward()
    optimizer.step()
    assert not same_weights(weights_of(team), agents)
    assert all(p.grad is None for p in reward.trained_parameters())
    assert all(torch.equal(p, value) for p, value in zip(reward.trained_parameters(), values, strict=True))
    assert torch.equal(reward(padded(ROWS, 2)), scores)


def test_fault_B63_the_frozen_backbone_is_in_memory_once():
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LORA).load()
    backbone = {p.data_ptr() for p in team.parameters() if not p.requires_grad}
    before = live_tensor_bytes()
    reward = JointRewardModel("team", lora=LORA).bind(team).load()
    trained = sum(p.nbytes for p in reward.trained_parameters())
    assert live_tensor_bytes() - before <= 2 * trained  # their first values are kept for the next rounds
    assert trained < sum(p.nbytes for p in team.parameters()) / 10
    assert {p.data_ptr() for p in reward._decoder.parameters() if not p.requires_grad} < backbone
    assert [name for name, _ in reward.named_parameters()] == ["head.weight"]


# Cutting and tokens


def test_fault_B11_B16_texts_are_cut_on_the_left_counted_and_warned_of_once():
    reward = JointRewardModel("builtin:tiny", max_length=80).load()
    prompts, short, long = ["pqrst", "uvwxyz"], ["a", "b"], ["c" * 10, "d" * 4]
    prefix = [0, *byte_ids(PROMPTS.format(*prompts))]
    ids = {name: byte_ids(RESPONSES.format(*texts)) for name, texts in (("short", short), ("long", long))}
    room = 80 - len(ids["long"])
    assert 0 < room < len(prefix)
    pairs = [pair(prompts, short, long), pair(prompts, long, short)]
    with pytest.warns(UserWarning, match=f"of {len(prefix) + len(ids['long'])} tokens was cut .* 80") as caught:
        _, tokens = reward.encode_pairs(pairs)
    assert [encoded.prompts for encoded in tokens] == [[prefix[-room:]]] * 2
    assert [encoded.winner for encoded in tokens] == [[ids["short"]], [ids["long"]]]
    assert [encoded.loser for encoded in tokens] == [[ids["long"]], [ids["short"]]]
    assert len(caught) == 1
    assert reward.counts == {"truncated_joint_texts": 2}


def test_fault_B11_nothing_is_cut_where_all_fits():
    prompts, winner, loser = ["pq", "r"], ["aaa", "b"], ["c", "d"]
    whole = [0, *byte_ids(PROMPTS.format(*prompts)), *byte_ids(RESPONSES.format(*winner))]
    for max_length in (len(whole), None):
        reward = JointRewardModel("builtin:tiny", max_length=max_length).load()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept, (tokens,) = reward.encode_pairs([pair(prompts, winner, loser)])
        assert len(kept) == 1
        assert tokens.prompts[0] + tokens.winner[0] == whole
        assert tokens.prompts[0] + tokens.loser[0] == whole[: len(tokens.prompts[0])] + byte_ids(
            RESPONSES.format(*loser)
        )
        assert reward.counts == {}


@pytest.mark.parametrize(("max_length", "limit"), [(16, 16), (None, 512), (600, 512)])
def test_fault_B12_B13_a_response_that_is_longer_than_the_limit_keeps_its_end(max_length, limit):
    reward = JointRewardModel("builtin:tiny", max_length=max_length).load()
    with pytest.warns(UserWarning, match=f"cut on the left to the {limit}"):
        _, (tokens,) = reward.encode_pairs([pair(["p"], ["a" * 600 + "bc"], ["d"])])
    assert tokens.prompts == [[]]
    assert tokens.winner == [byte_ids("a" * (limit - 2) + "bc")]
    assert tokens.loser == [byte_ids("d")]


def test_fault_B12_no_row_is_empty():
    # The longer side fills the limit, and the other one is empty: there is no token left to score.
    reward = JointRewardModel("builtin:tiny", max_length=16).load()
    with pytest.warns(UserWarning, match="cut on the left"):
        _, tokens = reward.encode_pairs([pair(["p"], ["a" * 30], [""]), pair(["p"], ["bc"], ["d"])])
    for encoded in tokens:
        assert encoded.prompts[0] + encoded.winner[0]
        assert encoded.prompts[0] + encoded.loser[0]


def test_fault_B14_pairs_that_become_the_same_are_dropped_and_counted():
    reward = JointRewardModel("builtin:tiny", max_length=8).load()
    pairs = [
        pair(["p"], ["a" + "x" * 9], ["b" + "x" * 9]),
        pair(["p"], ["c"], ["d"]),
        pair(["q"], ["same"], ["same"]),
    ]
    with pytest.warns(UserWarning, match="same tokens on both sides") as caught:
        kept, tokens = reward.encode_pairs(pairs)
    assert kept == [pairs[1]]
    assert tokens[0].winner == [byte_ids("c")]
    assert reward.counts["identical_pairs"] == 2
    assert len([w for w in caught if "same tokens" in str(w.message)]) == 1


def closing_tokenizer():
    tokenizer = tiny_tokenizer()
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [tiny_tokenizer, closing_tokenizer])
@pytest.mark.parametrize("prompts", [["p"], ["<s>p"], ["p", "q"], ["<s>p", "<s>q"]], ids="|".join)
def test_fault_B06_a_joint_text_has_one_BOS_and_no_EOS(make_tokenizer, prompts):
    _, reward = reward_of(tokenizer=make_tokenizer())
    _, (tokens,) = reward.encode_pairs([pair(prompts, ["a"] * len(prompts), ["b"] * len(prompts))])
    for side in (tokens.winner, tokens.loser):
        ids = tokens.prompts[0] + side[0]
        assert ids[0] == 0
        assert ids.count(0) == 1
        assert 1 not in ids


def test_a_joint_text_ends_without_the_EOS_that_a_chat_template_writes():
    # Sampled responses, which it scores during policy learning, are decoded without special tokens.
    _, reward = reward_of()
    _, (tokens,) = reward.encode_pairs([pair(["p"], ["a</s>"], ["b</s>"])])
    assert (tokens.winner, tokens.loser) == ([byte_ids("a")], [byte_ids("b")])


def test_fault_B05_prompts_and_responses_are_tokenised_apart():
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, ".": 3, "b": 4, ".b": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    model, reward = reward_of(tokenizer=tokenizer)
    assert tokenizer("a.b")["input_ids"] == [2, 5]  # joined, the border would vanish
    _, (tokens,) = reward.encode_pairs([pair(["a."], ["b"], ["a.b"])])
    assert (tokens.prompts, tokens.winner, tokens.loser) == ([[2, 3]], [[4]], [[2, 5]])
    (score,) = reward.score_texts(["b"], prompts=[["a."]])
    assert_close(torch.tensor(score, dtype=torch.float64), literal_score(model, reward.head, [2, 3, 4]))


def test_fault_B54_a_pad_token_that_the_model_does_not_know(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id == 259  # the model has 259 embeddings
    model, reward = reward_of(tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"token id 259, but .* 259 embeddings"):
        reward.score_texts(["<new>"], prompts=[["p"]])
    scores = reward.score_texts(["a", "bbbb"], prompts=[["p", "q"]])
    for prompt, text, score in (("p", "a", scores[0]), ("q", "bbbb", scores[1])):
        expected = literal_score(model, reward.head, [0, *byte_ids(prompt), *byte_ids(text)])
        assert_close(torch.tensor(score, dtype=torch.float64), expected)
    reward.save(tmp_path)
    assert JointRewardModel(str(tmp_path)).load().classifier.config.pad_token_id < 259
