"""Prompts: templates, chat templates, special tokens, cutting, and errors that say where."""

import warnings

import pytest
from tokenizers.processors import TemplateProcessing

from helpers import tiny
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.agents.prompts import (
    ChatTemplate,
    PromptTemplate,
    encode_prompt,
    encode_response,
    render_chat,
    render_prompt,
    resolve_formatters,
)
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam

ITEM = {"prompt": "rain", "topic": "weather"}
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
)


def tokenizer_with(template: str | None = None, single: str | None = None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    if single is not None:
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


def team_of(formatters=None, num_agents=2, tokenizer=None, **options) -> AgentTeam:
    models = [tiny("llama", seed=seed) for seed in range(num_agents)]
    return AgentTeam(models, tokenizers=tokenizer or tiny_tokenizer(), formatters=formatters, **options)


def shout(item):
    return item["prompt"].upper()


def fails_on_item_7(item):
    if item.get("index") == 7:
        raise RuntimeError("division of the sea")
    return "ok"


PAIR_OF_FORMATTERS = ["One: {prompt}", shout]


def byte_ids(text: str) -> list[int]:
    """Ids of the byte tokenizer for ASCII, from its own alphabet: found without our code."""
    tokenizer = tiny_tokenizer()
    return [tokenizer.convert_tokens_to_ids("Ġ" if char == " " else "Ċ" if char == "\n" else char) for char in text]


# Formatters


def test_templates_fill_in_fields():
    assert PromptTemplate("{topic}: {prompt}!")(ITEM) == "weather: rain!"
    assert PromptTemplate("{{literal}} {prompt}")(ITEM) == "{literal} rain"
    nested = {"data": {"x": [3, 4]}, "prompt": "{topic}"}
    assert PromptTemplate("{data[x][1]} {prompt}")(nested) == "4 {topic}"  # braces in a field are text


@pytest.mark.parametrize(
    ("formatters", "expected"),
    [
        (None, ["rain", "rain"]),
        ("Explain: {prompt}", ["Explain: rain", "Explain: rain"]),
        (shout, ["RAIN", "RAIN"]),
        (["{topic}", shout], ["weather", "RAIN"]),
        ((shout, "{topic}"), ["RAIN", "weather"]),
        (f"{__name__}:shout", ["RAIN", "RAIN"]),
        (f"{__name__}.PAIR_OF_FORMATTERS", ["One: rain", "RAIN"]),
        ([f"{__name__}:shout", "{prompt}"], ["RAIN", "rain"]),
    ],
)
def test_formatters_one_for_all_or_one_each(formatters, expected):
    tokenizer = tiny_tokenizer()
    resolved = resolve_formatters(formatters, 2)
    assert [render_prompt(formatter, ITEM, tokenizer) for formatter in resolved] == expected


@pytest.mark.parametrize(
    ("formatters", "message"),
    [
        (["{prompt}"], r"one per agent \(2 agents\), got 1"),
        (["{prompt}"] * 3, r"one per agent \(2 agents\), got 3"),
        (["{prompt}", 5], r"`formatters\[1\]` must be a template string or a callable .*, got 5"),
        (5, r"one per agent \(2 agents\), got 5"),
        ("no_such_module_x:f", "no_such_module_x"),
        ("Summarise", "import path"),
    ],
)
def test_wrong_formatters_are_refused(formatters, message):
    with pytest.raises(ValueError, match=message):
        AgentTeam("builtin:tiny", num_agents=2, formatters=formatters)


def test_a_missing_field_lists_the_fields_there_are():
    team = team_of(["{prompt}", "{request}"])
    assert team.prompt(0, ITEM, 3) == "rain"
    with pytest.raises(ValueError, match=r"agent 1 failed on task item 3.*'request'.*'prompt', 'topic'"):
        team.prompt(1, ITEM, 3)
    with pytest.raises(ValueError, match=r"'prompt', 1|1, 'prompt'"):
        PromptTemplate("{x}")({"prompt": "a", 1: "b"})  # keys of several types


@pytest.mark.parametrize("template", ["{prompt.nothing}", "{prompt[key]}", "{}", "{prompt", "{topic[9]}"])
def test_templates_that_cannot_be_filled_name_agent_and_item(template):
    team = team_of([template, "{prompt}"])
    with pytest.raises(ValueError, match="formatter of agent 0 failed on task item 2"):
        team.prompt(0, ITEM, 2)


def test_a_formatter_that_fails_on_item_7_names_agent_and_item():
    team = team_of(["{prompt}", fails_on_item_7])
    items = [{"prompt": "x", "index": index} for index in range(9)]
    with pytest.raises(ValueError, match="formatter of agent 1 failed on task item 7: division of the sea") as caught:
        team.sample(
            items, list(range(9)), num_candidates=1, sampling=SamplingConfig(max_new_tokens=1), seed=0, stream="actors"
        )
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("returned", [None, 7, [], ["text"], b"bytes"])
def test_what_a_formatter_may_return(returned):
    with pytest.raises(ValueError, match="must return a string or a list of chat messages"):
        team_of(lambda item: returned).prompt(0, ITEM, 0)


# Chat templates


def test_chat_template_with_system_role():
    tokenizer = tokenizer_with(CHATML)
    text = render_prompt(ChatTemplate("Say {prompt}", system="Of {topic}."), ITEM, tokenizer)
    assert text == "<|system|>Of weather.</s>\n<|user|>Say rain</s>\n<|assistant|>"
    assert render_prompt(ChatTemplate(), ITEM, tokenizer) == "<|user|>rain</s>\n<|assistant|>"


def test_fault_B17_chat_template_without_system_role_folds_it_into_the_user_turn():
    tokenizer = tokenizer_with(NO_SYSTEM)
    with pytest.warns(UserWarning, match="takes no system role"):
        text = render_prompt(ChatTemplate("{prompt}", system="Be brief."), ITEM, tokenizer)
    assert text == "<s><|user|>Be brief.\n\nrain</s>\n<|assistant|>"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert render_prompt(ChatTemplate("{prompt}"), ITEM, tokenizer) == "<s><|user|>rain</s>\n<|assistant|>"


def test_a_chat_template_that_fails_otherwise_shows_its_own_error():
    tokenizer = tokenizer_with("{{ raise_exception('roles must alternate') }}")
    for messages in ([{"role": "user", "content": "a"}], [{"role": "system", "content": "a"}]):
        with pytest.raises(Exception, match="roles must alternate"):
            render_chat(messages, tokenizer)


def test_a_chat_formatter_needs_a_chat_template():
    with pytest.raises(ValueError, match=r"agent 0 failed on task item 4.*has none; use a template string"):
        team_of(ChatTemplate()).prompt(0, ITEM, 4)


def test_callables_may_return_chat_messages():
    def formatter(item):
        turns = [("user", item["topic"]), ("assistant", "Yes?"), ("user", "Go")]
        return [{"role": role, "content": content} for role, content in turns]

    assert render_prompt(formatter, ITEM, tokenizer_with(CHATML)).count("<|user|>") == 2


# Special tokens


def test_fault_B07_plain_prompts_begin_with_bos():
    assert encode_prompt(tiny_tokenizer(), "ab") == [0, *byte_ids("ab")]


def test_fault_B06_bos_in_the_template_is_not_added_again():
    tokenizer = tokenizer_with(NO_SYSTEM)
    text = render_prompt(ChatTemplate(), ITEM, tokenizer)
    ids = encode_prompt(tokenizer, text)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert ids == [0, *tokenizer(text.removeprefix("<s>"), add_special_tokens=False)["input_ids"]]
    # The same ids are what is sampled from and what is learned from.
    team = team_of(ChatTemplate(), tokenizer=tokenizer)
    config = SamplingConfig(max_new_tokens=1)
    [sample] = team.sample([ITEM], [0], num_candidates=1, sampling=config, seed=0, stream="actors")
    assert sample.prompt_ids == [ids, ids]


def test_fault_B15_a_rendered_chat_has_as_many_tokens_as_its_text():
    tokenizer = tokenizer_with(CHATML)
    text = render_prompt(ChatTemplate(), ITEM, tokenizer)
    assert len(encode_prompt(tokenizer, text)) == 1 + len("<|user|>rain") + 1 + 1 + len("<|assistant|>")


def test_an_eos_that_the_tokenizer_appends_is_not_part_of_a_prompt():
    tokenizer = tokenizer_with(single="<s> $A </s>")
    assert tokenizer("ab")["input_ids"][-1] == 1
    assert encode_prompt(tokenizer, "ab") == [0, *byte_ids("ab")]
    # One that the text itself ends with is kept.
    assert encode_prompt(tiny_tokenizer(), "ab</s>") == [0, *byte_ids("ab"), 1]
    assert encode_response(tokenizer, "ab") == byte_ids("ab")


@pytest.mark.parametrize("text", ["", "<s>"])
def test_an_empty_prompt_is_one_bos(text):
    assert encode_prompt(tiny_tokenizer(), text) == [0]


def test_an_empty_prompt_without_bos_starts_from_eos():
    tokenizer = tokenizer_with(single="$A")
    tokenizer.bos_token = None
    assert encode_prompt(tokenizer, "") == [1]
    assert encode_prompt(tokenizer, "a") == byte_ids("a")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="BOS or EOS"):
        encode_prompt(tokenizer, "")


def test_fault_B05_responses_are_tokenised_apart_from_prompts():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, ".": 3, "b": 4, ".b": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert tokenizer("a.b")["input_ids"] == [2, 5]  # joined, the border would vanish
    assert encode_prompt(tokenizer, "a.") + encode_response(tokenizer, "b") == [2, 3, 4]


# Cutting


def test_fault_B11_a_prompt_is_cut_on_the_left_with_one_warning_and_a_count():
    tokenizer = tokenizer_with(NO_SYSTEM)
    team = team_of(ChatTemplate(), tokenizer=tokenizer, max_prompt_length=12)
    text = team.prompt(0, {"prompt": "abcdefgh"}, 0)
    whole = encode_prompt(tokenizer, text)
    assert len(whole) > 20
    with pytest.warns(UserWarning, match=f"agent 1 has {len(whole)} tokens and was cut on the left to 12") as record:
        assert [team.prompt_ids(agent, text, 5) for agent in (1, 0)] == [whole[-12:]] * 2
    assert len(record) == 1
    assert team.counts == {"truncated_prompts": 2}


@pytest.mark.parametrize("limit", [None, 100, "exact"])
def test_fault_B11_a_limit_that_is_not_hit_changes_nothing(limit):
    tokenizer = tokenizer_with(NO_SYSTEM)
    text = render_prompt(ChatTemplate(), ITEM, tokenizer)
    whole = encode_prompt(tokenizer, text)
    team = team_of(tokenizer=tokenizer, max_prompt_length=len(whole) if limit == "exact" else limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert team.prompt_ids(0, text, 5) == whole
    assert team.counts == {}


def test_the_context_leaves_room_for_the_response():
    """512 positions: prompt and response fill them exactly, and sampling goes through."""
    team = AgentTeam("builtin:tiny", num_agents=1)
    text = "".join(chr(97 + index % 26) for index in range(600))
    with pytest.warns(UserWarning, match="cut on the left to 500"):
        ids = team.prompt_ids(0, text, 12)
    assert ids == byte_ids(text[-500:])
    config = SamplingConfig(max_new_tokens=12)
    [sample] = team.sample([{"prompt": text}], [0], num_candidates=1, sampling=config, seed=0, stream="actors")
    assert sample.prompt_ids == [ids]
    assert sample.prompts == [text]
    assert len(team.prompt_ids(0, text[:499], 12)) == 500
    with pytest.raises(ValueError, match=r"512 positions.*512 response tokens; lower `max_new_tokens`"):
        team.prompt_ids(0, "a", 512)
