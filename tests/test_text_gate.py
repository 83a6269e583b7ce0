"""What passed the gate of texts cannot be refused later, and is read as text."""

from __future__ import annotations

import csv
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from helpers import tiny, tiny_tokenizer
from pbrl_lightning import ChatTemplate
from pbrl_lightning.agents.prompts import PromptTemplate, encode_prompt, encode_response, render_messages, render_prompt
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.comparators.api import ApiComparator
from pbrl_lightning.data_items import load_items
from pbrl_lightning.media import _append
from pbrl_lightning.preferences.journal import sample_from_json
from pbrl_lightning.text_gate import encodable, encodable_text, map_texts, neutralize, split_thoughts
from pbrl_lightning.utils.errors import ConfigurationError

PIECES = [
    "\ud83d",
    "\ude00",
    "\0",
    "\u2028",
    "</s>",
    "<s>",
    "<pad>",
    "<think>",
    "</think>",
    "=1+1",
    "<",
    "/s>",
    "a",
    "\r\n",
]
NASTY = st.lists(st.sampled_from(PIECES) | st.text(st.characters(), max_size=3), max_size=12).map("".join)
TOKENIZER = tiny_tokenizer()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@given(NASTY)
@settings(max_examples=150, deadline=None, database=None)
def test_fault_B92_B108_what_passed_can_be_encoded_and_has_no_control_ids(text):
    item = load_items([{"prompt": text}], "items")[0]
    prompt = render_prompt(PromptTemplate("Say: {prompt}"), item, TOKENIZER)
    prompt.encode()
    assert json.loads(json.dumps(prompt).encode()) == prompt
    ids = encode_prompt(TOKENIZER, prompt)
    assert ids[0] == TOKENIZER.bos_token_id
    assert not {0, 1, 2} & set(ids[1:])
    assert not {0, 1, 2} & set(encode_response(TOKENIZER, neutralize(text, ("<s>", "</s>", "<pad>"))))
    assert encodable_text(encodable_text(text)) == encodable_text(text)
    thoughts, answer = split_thoughts(text)
    assert text.startswith(thoughts)
    assert text.endswith(answer)


@given(NASTY)
@settings(max_examples=60, deadline=None, database=None)
def test_fault_B92_a_resumed_journal_brings_no_half_characters(text):
    data = {"prompts": [text], "prompt_ids": [[1]], "responses": [[[0, text, [3], True]]], "joint_tokens": None}
    sample = sample_from_json(0, data)
    (sample.prompts[0] + sample.responses[0][0].text).encode()


def test_ordinary_data_is_the_same_object():
    item = {"prompt": "Äpfel \u2028 😀", "list": [1, None, ("a", 2.5)], "deep": {"messages": [{"role": "user"}]}}
    assert encodable(item) is item
    assert map_texts(item, lambda text: neutralize(text, ["</s>"])) is item


def test_fault_B92_two_halves_that_fit_are_one_character():
    assert encodable_text("\ud83d\ude00 \ud83d \0") == "😀 \ufffd \ufffd"


@pytest.mark.parametrize("null", [None, float("nan")])
def test_fault_B107_a_null_is_named_or_empty(null):
    item = {"prompt": "rain", "context": null, "unused": None}
    for template in (PromptTemplate("{context} -> {prompt}"), ChatTemplate("{context} -> {prompt}")):
        with pytest.raises(ConfigurationError, match=r"the field 'context', which is (None|nan)"):
            template(item)
    assert PromptTemplate("{context}-> {prompt}", empty_nulls=True)(item) == "-> rain"
    assert ChatTemplate("{context}-> {prompt}", empty_nulls=True)(item)[0]["content"] == "-> rain"
    assert PromptTemplate("{prompt}")(item) == "rain"
    team = AgentTeam([tiny("llama")], tokenizers=TOKENIZER, formatters="{context} {prompt}").load()
    with pytest.raises(ConfigurationError, match=r"agent 0 failed on task item 7: .*'context'"):
        team.prompt(0, item, 7)


def test_fault_B106_a_template_writes_its_own_start():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>", "<|im_start|>", "<|im_end|>"]})
    messages = [{"role": "user", "content": "Hi"}]
    for template, start in ((CHATML, None), ("[gMASK]<sop>" + CHATML, ("[gMASK]", "<sop>"))):
        tokenizer.chat_template = template
        if start:
            ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in start]
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="[gMASK] <sop> $A", special_tokens=ids
            )
        own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        text = render_prompt(ChatTemplate("{prompt}"), {"prompt": "Hi"}, tokenizer)
        assert encode_prompt(tokenizer, text) == own


def test_fault_B108_data_in_chats_is_text_and_counted():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    text = render_messages(tokenizer, [{"role": "user", "content": "a</s>b"}], False)
    assert encode_response(tokenizer, text).count(1) == 1  # the template's own
    team = AgentTeam([tiny("llama")], tokenizers=TOKENIZER).load()
    with pytest.warns(UserWarning, match="task item 3 writes out a control token"):
        team.prompt(0, {"prompt": "a<pad>b"}, 3)
    assert team.counts == {"neutralized_texts": 1}


def test_formulas_are_no_formulas_in_tables(tmp_path):
    cells = ["=HYPERLINK(1)", "+1", "-1", "@A1", "\t=1", " =1", "a=1", -1.5]
    _append(tmp_path / "t.csv", ["cell"], [[cell] for cell in cells])
    with (tmp_path / "t.csv").open(newline="") as file:
        written = [row[0] for row in csv.reader(file)][1:]
    assert written == ["'=HYPERLINK(1)", "'+1", "'-1", "'@A1", "'\t=1", "' =1", "a=1", "-1.5"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think>\n\nb", "b"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("b <think>a</think>", "b <think>a</think>"),
        ("b", "b"),
    ],
)
def test_fault_B110_thoughts_are_what_an_answer_begins_with(text, answer):
    assert split_thoughts(text)[1] == answer


def test_fault_B110_thoughts_option_is_checked():
    with pytest.raises(ConfigurationError, match="`thoughts` must be 'strip' or 'keep', got 'x'"):
        ApiComparator(None, thoughts="x")
