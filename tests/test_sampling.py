"""Sampling: the filtered distribution, the draw, and the decode loop against a literal slow one."""

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from helpers import ARCHITECTURES, assert_close, tiny
from pbrl_lightning.agents import sampling as sampling_module
from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.decoding import rows_for
from pbrl_lightning.agents.sampling import SampledIds, SamplingConfig, draw, filtered_distribution, sample_responses
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.randomness import counted_uniforms

PROMPTS = [[0, 40], [0, 7, 99, 140, 31, 8, 66], [0, 250, 251, 17], [5]]
# See `helpers.tiny`: with padding on the left, Gemma2 cannot be run in float64.
SAMPLING_DTYPES = {"gemma2": torch.float32}
NEAR_ONE = 1 - 2.0**-53


def uniforms_for(prompts: list[list[int]], candidates: int, tokens: int, seed: int = 0) -> list[Tensor]:
    return [counted_uniforms(candidates, tokens, seed, "actors", item=item) for item in range(len(prompts))]


def dense(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Our filtered distribution over the whole vocabulary, normalised."""
    ids, probs = filtered_distribution(logits, temperature, top_k, top_p)
    for row, mass in zip(ids, probs, strict=True):
        count = 1 + int((row.diff() > 0).cumprod(0).sum())
        assert not row[count:].any(), "tokens must stand in token-id order, and only filling behind them"
        assert not mass[count:].any()
    full = torch.zeros(logits.shape, dtype=torch.float64).scatter_add(1, ids, probs)
    return full / full.sum(1, keepdim=True)


def transformers_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.double().softmax(1)


def tied_logits() -> Tensor:
    """Ties at the k-th token (k = 2, 3), at the edge of top-p, everywhere, and none."""
    return torch.tensor(
        [
            [1.0, 3.0, 2.0, 2.0, 2.0, 0.0, -1.0, 2.0],
            [0.0] * 8,
            [2.0, 2.0, 2.0, 2.0, -9.0, -9.0, -9.0, -9.0],
            [-math.inf, 1.0, 1.0, -math.inf, 4.0, 0.5, 0.25, -2.0],
            [0.3, -0.2, 1.7, 0.9, -1.1, 2.2, 0.05, 1.3],
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 8, 50])
@pytest.mark.parametrize("top_p", [1e-4, 0.25, 0.5, 0.6, 0.75, 0.95, 1.0])
def test_filtered_distribution_is_that_of_transformers(temperature, top_k, top_p):
    random = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    for logits in (tied_logits(), random):
        expected = transformers_distribution(logits, temperature, top_k, top_p)
        ours = dense(logits, temperature, top_k, top_p)
        assert ((ours > 0) == (expected > 0)).all()
        assert_close(ours, expected, 1e-12)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.6, 50, 0.6), (1.0, None, 0.9), (1.3, 20, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filtered_distribution_on_a_large_vocabulary(temperature, top_k, top_p, dtype):
    # transformers gets the logits as float32, as in generate().
    logits = (torch.randn(8, 50_000, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    expected = transformers_distribution(logits.float(), temperature, top_k, top_p)
    ours = dense(logits, temperature, top_k, top_p)
    if dtype == torch.bfloat16:
        # Many ties, among which their sort (not a stable one) picks any: the same number of equal probability.
        ours, expected = ours.sort(dim=1).values, expected.sort(dim=1).values
    # Their cumulative sum is float32: without top-k a token on its edge may differ, no more.
    assert ((ours > 0) != (expected > 0)).sum(1).max() <= (0 if top_k else 5)
    assert_close(ours, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 16, 17, 1000, 50_000])
def test_of_tokens_tied_at_the_edge_of_top_p_the_larger_ids_stay(size, dtype):
    """transformers sorts without keeping the order of ties: as many tokens of the same mass, but not always these."""
    logits = torch.zeros(2, size, dtype=dtype)
    logits[:, 3], logits[1, 5] = 1.0, -8.0  # one that is always kept, one that never is
    ids, probs = filtered_distribution(logits, 1.0, None, 0.5)
    for row, (kept, mass) in enumerate(zip(ids, probs, strict=True)):
        tied = [token for token in range(size) if token != 3 and not (row and token == 5)]
        found = [token for token in kept[mass > 0].tolist() if token != 3]
        assert 0 < len(found) < len(tied)
        assert found == tied[-len(found) :]
        assert 3 in kept[mass > 0]
    theirs = transformers_distribution(logits.float() if dtype == torch.bfloat16 else logits, 1.0, None, 0.5)
    rounding = 1 + size // 10_000  # their sum is of the logits' precision, and added up in an order of the CPU's
    assert (((probs > 0).sum(1) - (theirs > 0).sum(1)).abs() <= rounding).all()


@pytest.mark.parametrize("size", [640, 700, 1024, 50_000])
def test_all_tokens_equal_to_the_kth_stay_wherever_they_stand(size):
    """Ties within blocks of a large vocabulary, across them, and in what is left over at its end."""
    random = torch.Generator().manual_seed(size)
    logits = torch.randint(-9, 10, (12, size), generator=random).float()
    logits[0], logits[1], logits[2, 7:] = 1.0, torch.arange(size).float(), -math.inf
    for k in (1, 3, 9, 10, 100):
        ids, probs = filtered_distribution(logits, 1.0, k, 1.0)
        for row, kept, mass in zip(logits.tolist(), ids.tolist(), probs.tolist(), strict=True):
            kth = sorted(row, reverse=True)[k - 1]
            expected = [token for token, value in enumerate(row) if value >= kth and value > -math.inf]
            assert [token for token, weight in zip(kept, mass, strict=True) if weight > 0] == expected


def test_draw_matches_the_distribution():
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -0.5, 0.7]], dtype=torch.float64)
    ids, probs = filtered_distribution(logits, 0.8, 6, 0.93)
    expected = transformers_distribution(logits, 0.8, 6, 0.93)[0]
    uniforms = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    drawn = draw(ids.expand(len(uniforms), -1), probs.expand(len(uniforms), -1), uniforms)
    counts = drawn.bincount(minlength=8).double()
    kept = expected > 0
    assert 2 < kept.sum() < 8
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept].numpy(), (expected[kept] * len(uniforms)).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_sampled_tokens_match_the_models_filtered_distribution(architecture):
    model = tiny(architecture)
    prompt = [0, 40, 7]
    config = SamplingConfig(temperature=1.5, top_p=0.8, top_k=6, max_new_tokens=1)
    uniforms = [counted_uniforms(4000, 1, 5, "actors")]
    rows = sample_responses(model, [prompt], uniforms, config, eos_ids=set())[0]
    counts = torch.tensor([row.token_ids[0] for row in rows]).bincount(minlength=259).double()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[:, -1]
    expected = transformers_distribution(logits, 1.5, 6, 0.8)[0]
    kept = expected > 0
    assert kept.sum() >= 2
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept].numpy(), (expected[kept] * 4000).numpy()).pvalue > 1e-3


def test_tokens_without_mass_are_never_drawn():
    ids = torch.tensor([[3, 5, 8, 9, 12]])
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.1, 0.0]], dtype=torch.float64)

    def drawn(uniform: float) -> int:
        return int(draw(ids, probs, torch.tensor([uniform], dtype=torch.float64)))

    assert drawn(0.0) == 5
    assert drawn(0.7499) == 5
    assert drawn(0.7501) == 9
    assert drawn(NEAR_ONE) == 9
    assert drawn(1.0) == 9  # what rounding to float32 could make of it
    # A total that the product rounds up to.
    many = torch.full((1, 1000), 0.1, dtype=torch.float64)
    many[:, 990:] = 0
    position = draw(torch.arange(1000)[None], many, torch.tensor([NEAR_ONE], dtype=torch.float64))
    assert int(position) == 989


def reference_decode(model, prompt, uniforms, config, eos_ids) -> SampledIds:
    """One candidate: a full forward for every token, nothing cached, the CDF inverted by a loop over token ids."""
    tokens: list[int] = []
    for uniform in uniforms.tolist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[:, -1]
        if config.temperature == 0:
            token = int(logits[0].argmax())
        else:
            probs = transformers_distribution(logits, config.temperature, config.top_k, config.top_p)[0].tolist()
            total, token, summed = math.fsum(probs), -1, 0.0
            for index, probability in enumerate(probs):
                summed += probability
                if probability > 0 and summed > uniform * total:
                    token = index
                    break
        tokens.append(token)
        if token in eos_ids:
            return SampledIds(tokens, True)
    return SampledIds(tokens, False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.3, None, 1.0), (0.8, 20, 0.9), (0.0, 50, 0.6)])
def test_decode_loop_equals_the_literal_one(architecture, temperature, top_k, top_p):
    model = tiny(architecture, SAMPLING_DTYPES.get(architecture, torch.float64))
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=14)
    eos_ids = set(range(0, 40))  # one token in seven ends a response: rows leave at different steps
    uniforms = uniforms_for(PROMPTS, 4, 14)
    expected = [
        [reference_decode(model, prompt, row, config, eos_ids) for row in rows]
        for prompt, rows in zip(PROMPTS, uniforms, strict=True)
    ]
    assert sample_responses(model, PROMPTS, uniforms, config, eos_ids) == expected
    flat = [row for rows in expected for row in rows]
    if temperature > 1:
        assert {row.finished for row in flat} == {True, False} or len({len(row.token_ids) for row in flat}) > 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_generate(architecture):
    model = tiny(architecture, SAMPLING_DTYPES.get(architecture, torch.float64))
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    config = SamplingConfig(temperature=0, max_new_tokens=12)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    generated = model.generate(input_ids=ids, attention_mask=mask, **options)
    ours = sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 1, 12), config, set())
    assert [rows[0].token_ids for rows in ours] == generated[:, width:].tolist()
    assert not any(rows[0].finished for rows in ours)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fault_B18_a_batch_of_unequal_prompts_equals_one_by_one(architecture):
    model = tiny(architecture, SAMPLING_DTYPES.get(architecture, torch.float64))
    config = SamplingConfig(temperature=1.2, top_p=0.95, top_k=None, max_new_tokens=10)
    uniforms = uniforms_for(PROMPTS, 3, 10)
    together = sample_responses(model, PROMPTS, uniforms, config, {1, 33})
    for prompt, rows, expected in zip(PROMPTS, uniforms, together, strict=True):
        assert sample_responses(model, [prompt], [rows], config, {1, 33}) == [expected]


@pytest.mark.parametrize("token_budget", [1, 40, 100, 10**6])
def test_candidates_depend_on_their_own_uniforms_only(token_budget):
    model = tiny("llama")
    eos_ids = set(range(0, 60))
    options = {"temperature": 1.2, "top_p": 0.95, "top_k": None, "max_new_tokens": 12}
    uniforms = uniforms_for(PROMPTS, 6, 12)
    expected = sample_responses(model, PROMPTS, uniforms, SamplingConfig(**options), eos_ids)
    config = SamplingConfig(**options, token_budget=token_budget)
    assert sample_responses(model, PROMPTS, uniforms, config, eos_ids) == expected
    # Fewer candidates (the uniforms of K = 2 are the first rows of those of K = 6), other items, another order.
    fewer = sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 2, 12), config, eos_ids)
    assert fewer == [rows[:2] for rows in expected]
    order = [3, 1, 0]
    some = sample_responses(model, [PROMPTS[i] for i in order], [uniforms[i] for i in order], config, eos_ids)
    assert some == [expected[i] for i in order]
    # Unequal numbers of candidates, none at all for one item.
    counts = [1, 0, 5, 2]
    uneven = [rows[:count] for rows, count in zip(uniforms, counts, strict=True)]
    assert sample_responses(model, PROMPTS, uneven, config, eos_ids) == [
        rows[:count] for rows, count in zip(expected, counts, strict=True)
    ]


def test_fault_B45_token_budget_bounds_every_forward_and_prompts_are_encoded_once():
    model, shapes = tiny("llama"), []
    rows_for(model, 20)  # tries a few tokens, once
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: shapes.append(tuple(args[0].shape)))
    config = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=6, token_budget=60)
    sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 5, 6), config, set())
    batches = [shapes[start : start + 6] for start in range(0, len(shapes), 6)]  # the prompts, then 5 more tokens
    assert sum(batch[1][0] for batch in batches) == 4 * 5
    for (encoded, width), *steps in batches:
        assert all(shape == steps[0] for shape in steps)
        assert steps[0][0] * 6 + encoded * width <= 60
    shapes.clear()
    sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 5, 6), SamplingConfig(max_new_tokens=6), set())
    assert [shape for shape in shapes if shape[1] > 1] == [(4, 7)]  # 4 prompts, not 20 rows
    assert shapes[1:] == [(20, 1)] * 5


def test_finished_rows_leave_the_batch():
    model, rows = tiny("llama"), []
    rows_for(model, 40)  # tries a few tokens, once
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    config = SamplingConfig(temperature=1.5, top_p=1.0, top_k=None, max_new_tokens=30)
    responses = sample_responses(model, [[0, 9]], [counted_uniforms(32, 30, 0, "actors")], config, set(range(90)))[0]
    assert min(rows[1:]) < 8 < 24 <= rows[1]
    # A quarter at most of the rows in a forward may be finished ones.
    open_rows = [sum(len(response.token_ids) > step for response in responses) for step in range(1, len(rows))]
    assert all(0.75 * used <= count or used == count for used, count in zip(rows[1:], open_rows, strict=True))


def test_several_eos_ids_each_end_a_response():
    model = tiny("llama")
    config = SamplingConfig(temperature=1.5, top_p=1.0, top_k=None, max_new_tokens=20)
    uniforms = [counted_uniforms(200, 20, 0, "actors")]
    free = sample_responses(model, [[0, 9]], uniforms, config, set())[0]
    eos_ids = {free[0].token_ids[3], free[1].token_ids[5]}
    stopped = sample_responses(model, [[0, 9]], uniforms, config, eos_ids)[0]
    seen = set()
    for without, response in zip(free, stopped, strict=True):
        first = next((i for i, token in enumerate(without.token_ids) if token in eos_ids), None)
        length = 20 if first is None else first + 1
        assert response == SampledIds(without.token_ids[:length], first is not None)
        seen.update(eos_ids.intersection(response.token_ids))
    assert seen == eos_ids


def test_fault_B01_length_comes_from_where_sampling_stopped_when_pad_is_eos():
    model = tiny("llama")
    model.config.pad_token_id = model.config.eos_token_id = 33
    config = SamplingConfig(temperature=0, max_new_tokens=9)
    [[free]] = sample_responses(model, [[0, 9]], uniforms_for([[0]], 1, 9), config, set())
    eos = free.token_ids[4]
    end = free.token_ids.index(eos) + 1
    [[response]] = sample_responses(model, [[0, 9]], uniforms_for([[0]], 1, 9), config, {eos})
    assert response == SampledIds(free.token_ids[:end], True)
    assert response.token_ids[-1] == eos
    # The same token within the prompt stays attended, wherever it stands.
    prompts = [[eos, eos, 40], [0, 7, eos, 31, eos], [eos]]
    uniforms = uniforms_for(prompts, 2, 9)
    config = SamplingConfig(temperature=1.2, top_p=1.0, max_new_tokens=9)
    expected = [
        [reference_decode(model, prompt, row, config, {eos}) for row in rows]
        for prompt, rows in zip(prompts, uniforms, strict=True)
    ]
    assert sample_responses(model, prompts, uniforms, config, {eos}) == expected
    # EOS as the very last token that fits is still an end, and a response may be EOS alone.
    first_only = SamplingConfig(temperature=0, max_new_tokens=1)
    assert sample_responses(model, [[0, 9]], uniforms_for([[0]], 1, 1), first_only, {free.token_ids[0]}) == [
        [SampledIds(free.token_ids[:1], True)]
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_fault_B30_temperatures_near_zero_are_greedy(architecture):
    model = tiny(architecture, torch.float32)
    uniforms = uniforms_for(PROMPTS, 2, 6)
    greedy = sample_responses(model, PROMPTS, uniforms, SamplingConfig(temperature=0, max_new_tokens=6), {1})
    cold = SamplingConfig(temperature=1e-4, top_p=1.0, top_k=None, max_new_tokens=6)
    assert sample_responses(model, PROMPTS, uniforms, cold, {1}) == greedy


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e-300])
def test_fault_B30_no_nan_at_any_temperature(temperature):
    try:
        SamplingConfig(temperature=temperature)
    except ValueError as error:
        assert "temperature" in str(error)  # noqa: PT017 - either a clear error or a distribution
        return
    logits = torch.tensor([[30.0, -80.0, 29.0], [-5.0, -4.0, -4.5]])
    ids, probs = filtered_distribution(logits, temperature, None, 1.0)
    assert bool(torch.isfinite(probs).all())
    drawn = draw(ids, probs, torch.tensor([0.5, 0.999], dtype=torch.float64))
    assert drawn.tolist() == [0, 1]


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)])
def test_fault_B18_B32_B44_B51_sampling_leaves_the_models_as_they_were(lora):
    team = AgentTeam("builtin:tiny", num_agents=2, lora=lora, gradient_checkpointing=True).load()
    for agent in range(2):
        team.model(agent).config.use_cache = agent == 0
        team.model(agent).activation_checkpointing_enable()

    def state() -> list[object]:
        modules = [(name, m.training, getattr(m, "_active_adapter", None)) for name, m in team.named_modules()]
        gradients = [(name, parameter.requires_grad) for name, parameter in team.named_parameters()]
        forwards = [name for name, module in team.named_modules() if "forward" in module.__dict__]
        caches = [(team.model(agent).config.use_cache, team.tokenizer(agent).padding_side) for agent in range(2)]
        return [modules, gradients, forwards, caches]

    before, weights = state(), {name: value.clone() for name, value in team.state_dict().items()}
    rng = torch.random.get_rng_state()
    config = SamplingConfig(max_new_tokens=5)
    items = [{"prompt": "a"}, {"prompt": "bcd"}]
    team.sample(items, [0, 1], num_candidates=3, sampling=config, seed=0, stream="actors")
    assert state() == before
    assert all(torch.equal(weights[name], value) for name, value in team.state_dict().items())
    assert torch.equal(rng, torch.random.get_rng_state())


@pytest.mark.filterwarnings("error")
def test_fault_B44_the_cache_is_used_with_gradient_checkpointing_on(caplog):
    model, lengths = tiny("llama"), []
    config = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=8)
    expected = sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 2, 8), config, {1})
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
    assert sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 2, 8), config, {1}) == expected
    assert lengths == [7] + [1] * 7
    assert model.is_activation_checkpointing
    assert not caplog.records


def test_team_samples_are_one_function_of_the_counted_draws():
    """Item order, item set, K and the other agent's settings change no sample; stream, seed and step do."""
    team = AgentTeam("builtin:tiny", num_agents=2, dtype="float64")
    items = [{"prompt": "one"}, {"prompt": "two and more"}, {"prompt": ""}]
    config = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=6)

    def sample(indices, candidates=3, **options):
        options = {"seed": 0, "stream": "actors", "step": 1} | options
        chosen = [items[index] for index in indices]
        return team.sample(chosen, list(indices), num_candidates=candidates, sampling=config, **options)

    everything = sample([0, 1, 2])
    assert sample([2, 0]) == [everything[2], everything[0]]
    assert [s.responses[1][0] for s in sample([0, 1, 2], candidates=1)] == [s.responses[1][0] for s in everything]
    assert everything[0].responses[0] != everything[0].responses[1]  # the agents' draws differ, though not the weights
    for other in ({"seed": 1}, {"stream": "comparator"}, {"step": 2}):
        assert sample([0], **other) != everything[:1]
    response = everything[1].responses[1][2]
    assert response.text == team.tokenizer(1).decode(response.token_ids, skip_special_tokens=True)
    assert everything[1].prompt_ids[0] == [0, *team.tokenizer(0)("two and more", add_special_tokens=False)["input_ids"]]


def test_greedy_with_several_candidates_warns_once():
    team = AgentTeam("builtin:tiny", num_agents=1)
    greedy = SamplingConfig(temperature=0, max_new_tokens=2)

    def sample(candidates: int) -> None:
        team.sample([{"prompt": "a"}], [0], num_candidates=candidates, sampling=greedy, seed=0, stream="actors")

    sample(1)
    with pytest.warns(UserWarning, match="temperature 0") as record:
        assert [sample(2), sample(2)] == [None, None]
    assert len(record) == 1


def test_team_stops_at_every_eos_id_of_the_generation_config():
    model = tiny("llama")
    model.generation_config.eos_token_id = [77, 78]
    from pbrl_lightning.agents.loading import tiny_tokenizer

    team = AgentTeam([model], tokenizers=tiny_tokenizer())
    assert team.eos_ids(0) == {1, 77, 78}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "`temperature` must be"),
        ({"temperature": float("nan")}, "`temperature` must be"),
        ({"temperature": float("inf")}, "`temperature` must be"),
        ({"top_p": 0.0}, "`top_p` must be in"),
        ({"top_p": 1.01}, "`top_p` must be in"),
        ({"top_k": 0}, "`top_k` must be >= 1 or null"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be >= 1"),
        ({"token_budget": 0}, "`token_budget` must be >= 1"),
    ],
)
def test_sampling_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


def test_sampling_config_names_all_problems_at_once():
    with pytest.raises(ValueError, match=r"temperature.*top_p.*top_k.*max_new_tokens"):
        SamplingConfig(temperature=-1, top_p=0, top_k=0, max_new_tokens=0)


def test_sampling_config_edges_are_allowed():
    assert SamplingConfig(temperature=0, top_p=1, top_k=None, max_new_tokens=1) == SamplingConfig(0, 1, None, 1)
    assert sampling_module.SamplingConfig() == SamplingConfig(0.6, 0.6, 50, 256)


def test_a_model_that_ignores_its_cache_is_refused():
    """B46: a wrapper that swallows ``past_key_values`` would decode every token from the last one alone."""

    class Swallows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny("llama")
            self.config = self.inner.config

        def forward(self, input_ids, attention_mask=None, **_kwargs):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    with pytest.raises(ValueError, match="key-value cache"):
        sample_responses(Swallows(), PROMPTS, uniforms_for(PROMPTS, 1, 3), SamplingConfig(max_new_tokens=3), {1})


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_diverged_model_is_an_error_not_text(temperature):
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    config = SamplingConfig(temperature=temperature, max_new_tokens=3)
    with pytest.raises(ValueError, match="NaN or infinite"):
        sample_responses(model, PROMPTS, uniforms_for(PROMPTS, 1, 3), config, {1})
