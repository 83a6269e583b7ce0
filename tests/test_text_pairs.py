"""Pairs from JSONL lines: records, and the chosen/rejected formats of TRL."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.preferences.round_files import RoundFileError, pair_to_record, read_pairs, write_round_file

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begins an answer with an empty thinking block that is not in the answers given.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}")
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)

# The examples of TRL's documentation of dataset formats.
STANDARD = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
IMPLICIT = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
CONVERSATION = {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}
IMPLICIT_CONVERSATION = {"chosen": [USER, BLUE], "rejected": [USER, GREEN]}

TEAM_PAIR = PreferencePair(
    ["p\n0", "二"], ["w\u2028", ""], ["l", "\ud83d"], 0.1 + 0.2, -1e-300, 0.63, [1.0, 0.5], 1.0, 0.5
)
SINGLE_PAIR = PreferencePair(["p"], ["same"], ["same"], 2, 1, 1.5)


def message(role, content):
    return {"role": role, "content": content}


def text_pair(prompt, chosen, rejected):
    return PreferencePair([prompt], [chosen], [rejected], 1.0, 0.0, 0.5, has_rewards=False)


def write(path, *lines):
    """Lines are JSON values, or texts and bytes as they stand."""
    raw = (line if isinstance(line, str | bytes) else json.dumps(line) for line in lines)
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in raw))
    return path


def renderer(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template

    def render(messages, add_generation_prompt):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    return render


def refused(tmp_path, line, message, render=None):
    """The line stands third, after a good one and a blank one."""
    path = write(tmp_path / "f.jsonl", STANDARD, "", line)
    with pytest.raises(RoundFileError, match=rf"{re.escape(str(path))}, line 3: {message}") as caught:
        read_pairs(path, render)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    return caught.value


# Records


def test_records_of_any_team_round_trip(tmp_path):
    record = pair_to_record(TEAM_PAIR)
    literal = json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace")
    assert "\u2028".encode() in literal  # a line separator for `str.splitlines`, not for JSONL
    path = write(tmp_path / "r.jsonl", record, literal, {**record, "raw_rewards": None, "agent_tensors": {"k": [3]}})
    read = read_pairs(path)
    whole = replace(TEAM_PAIR, loser_completions=["l", "\ufffd"])  # half a character has no form that can be encoded
    assert read[:2] == [whole, whole]
    assert read[2].raw_rewards == []
    assert [pair_to_record(pair) for pair in read[:2]] == [pair_to_record(whole)] * 2
    write_round_file(tmp_path / "r.json", 1, read)
    assert read_pairs(tmp_path / "r.json") == read


def test_a_record_stays_a_record_whatever_else_it_has_and_may_be_of_equal_sides(tmp_path):
    record = pair_to_record(SINGLE_PAIR)
    path = write(tmp_path / "r.jsonl", record, {**record, **STANDARD}, '{"extra": NaN, ' + json.dumps(record)[1:])
    assert read_pairs(path) == [SINGLE_PAIR] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": None}, "`prompts` must be a list of texts, got NoneType None$"),
        ({"winner_completions": []}, "`winner_completions` must have 1 texts like `prompts`, got 0$"),
        ({"winner_reward": float("nan")}, "`winner_reward` must be a finite number, got float nan$"),
        ({"winner_reward": 10**400}, "`winner_reward` must be a finite number, got int 1000"),
        ({"raw_rewards": [1.0]}, r"`raw_rewards` must be a list of 0 or 2 numbers, got list \[1.0\]$"),
    ],
)
def test_a_record_has_the_checks_of_a_round_file(tmp_path, change, message):
    refused(tmp_path, {**pair_to_record(SINGLE_PAIR), **change}, message)


def test_a_key_missing_from_a_record_is_named(tmp_path):
    record = pair_to_record(SINGLE_PAIR)
    for key in ("prompts", "winner_completions", "loser_completions", "winner_reward", "candidate_reward_mean"):
        kept = {other: value for other, value in record.items() if other != key}
        refused(tmp_path, kept, f"`{key}` is missing; the record has ")


# Texts


def test_texts_with_and_without_a_prompt(tmp_path):
    further = {"id": 7, "score_chosen": 8.5, "messages": [USER, BLUE], "question": None}
    path = write(
        tmp_path / "t.jsonl", STANDARD, IMPLICIT, {**further, **STANDARD}, '{"s": NaN, ' + json.dumps(IMPLICIT)[1:]
    )
    explicit, implicit = text_pair("The sky is", " blue.", " green."), text_pair("", *IMPLICIT.values())
    read = read_pairs(path)
    assert read == [explicit, implicit, explicit, implicit]
    assert (read[0].winner_reward, read[0].loser_reward, read[0].candidate_reward_mean) == (1.0, 0.0, 0.5)
    assert (read[0].raw_rewards, read[0].target_raw_reward, read[0].comparator_raw_reward) == ([], None, None)


def test_nothing_is_stripped_and_one_side_may_be_empty(tmp_path):
    path = write(tmp_path / "t.jsonl", {"prompt": " p\n", "chosen": "\n a \r\n", "rejected": ""})
    assert read_pairs(path, renderer(CHATML)) == [text_pair(" p\n", "\n a \r\n", "")]


def test_blank_lines_windows_line_ends_and_a_missing_last_one(tmp_path):
    path = tmp_path / "T.JSONL"
    line = json.dumps(STANDARD).encode()
    path.write_bytes(b"\r\n \t\n" + line + b"\r\n\n" + line)
    assert len(read_pairs(path)) == 2


@pytest.mark.parametrize("text", [b"", b"\n \r\n"])
def test_a_file_without_pairs(tmp_path, text):
    path = tmp_path / "e.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"`pairs` must hold at least one pair, got none in .*e.jsonl"):
        read_pairs(path)
    assert len(read_pairs([path, write(tmp_path / "f.jsonl", STANDARD)])) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p", "chosen": "c"}, "`rejected` is missing; the line has prompt, chosen$"),
        ({"rejected": "c"}, "`chosen` is missing; the line has rejected$"),
        (
            {"prompt": "p", "completion": "c", "label": True},
            "a pair must have `chosen` and `rejected` .*, or `prompts`, .*; got prompt, completion, label$",
        ),
        ({}, "a pair must have `chosen` and .* and `candidate_reward_mean`; got no keys$"),
        ({**STANDARD, "prompt": None}, "`prompt` must be a text or a list of messages, got NoneType None$"),
        ({**STANDARD, "chosen": 3}, "`chosen` must be a text or a list of messages, got int 3$"),
        ('{"chosen": "a", "rejected": NaN}', "`rejected` must be a text or a list of messages, got float nan$"),
        ('{"chosen": Infinity, "rejected": "a"}', "`chosen` must be a text or a list of messages, got float inf$"),
        ({**STANDARD, "rejected": USER}, "`rejected` must be a text or a list of messages, got dict"),
        ({**STANDARD, "rejected": " blue."}, "`chosen` and `rejected` must differ, got twice str ' blue.'$"),
        ([STANDARD], r"a pair must be an object, got list \[\{"),
        ("null", "a pair must be an object, got NoneType None$"),
        (
            {**IMPLICIT_CONVERSATION, "prompt": "What else?"},
            "`prompt` is a text, and `chosen` begins with a user's message that is another one; leave out one of them$",
        ),
        (
            {**CONVERSATION, "rejected": "It is green."},
            "`chosen` and `rejected` must be both texts or both lists of messages, got `chosen` list, `rejected` str$",
        ),
        ({"chosen": "a", "rejected": [GREEN]}, "`chosen` and `rejected` must be both texts .*, got `chosen` str"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    refused(tmp_path, line, message)


@pytest.mark.parametrize("render", [None, renderer(CHATML)])
def test_a_text_prompt_beside_messages_is_the_users_message(tmp_path, render):
    question, system = USER["content"], message("system", "Be brief.")
    mixed = [
        {"prompt": question, "chosen": [BLUE], "rejected": [GREEN]},
        {"prompt": question + "\n", **IMPLICIT_CONVERSATION},  # the form of several data sets of the hub
        {"prompt": [USER], "chosen": BLUE["content"], "rejected": GREEN["content"]},
    ]
    with_system = {"prompt": question, "chosen": [system, USER, BLUE], "rejected": [system, USER, GREEN]}
    path = write(tmp_path / "m.jsonl", CONVERSATION, *mixed, with_system)
    whole, *same, longer = read_pairs(path, render)
    assert same == [whole] * 3
    assert (longer.winner_completions, longer.loser_completions) == (whole.winner_completions, whole.loser_completions)
    assert longer.prompts[0].endswith(whole.prompts[0])
    assert "Be brief." in longer.prompts[0]


# Whatever is not JSON


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"chosen": "a",', "not a whole JSON text: Expecting property name enclosed in double quotes at column 1"),
        (json.dumps(STANDARD) * 2, "not a whole JSON text: Extra data at column"),
        ('{"chosen": "a", "chosen": "b", "rejected": "c"}', "not a whole JSON text: a key stands twice: chosen$"),
        (b'{"chosen": "\xff", "rejected": "c"}', "not a whole JSON text: 'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf" + json.dumps(STANDARD).encode(), "not a whole JSON text: Unexpected UTF-8 BOM"),
        ('{"chosen": "a", "rejected": "b", "n": ' + "9" * 5000 + "}", "not a whole JSON text: Exceeds the limit"),
        ("[" * 100_000, "lists or objects are nested too deeply$"),
        ('{"chosen": ' + '{"a": ' * 100_000, "lists or objects are nested too deeply$"),
    ],
    ids=["cut", "two", "twice", "not UTF-8", "BOM", "huge", "deep lists", "deep objects"],
)
def test_a_line_that_is_not_json_is_named(tmp_path, line, message):
    refused(tmp_path, line, message)


def test_no_depth_of_nesting_gives_another_error(tmp_path):
    # Near the interpreter's limit the line can be decoded, but its description cannot be written.
    messages = set()
    for depth in range(500, 1000):
        path = write(tmp_path / "f.jsonl", '{"rejected": "a", "chosen": {"a": ' + "[" * depth + "]" * depth + "}}")
        with pytest.raises(RoundFileError, match=r"f.jsonl, line 1: ") as caught:
            read_pairs(path)
        messages.add(str(caught.value).partition(", line 1: ")[2].partition(",")[0])
    expected = "`chosen` must be a text or a list of messages"
    assert messages == {expected, "lists or objects are nested too deeply"}


# Conversations


@pytest.mark.parametrize("line", [CONVERSATION, IMPLICIT_CONVERSATION], ids=["explicit", "implicit"])
def test_conversations_written_plainly(tmp_path, line):
    expected = text_pair("user: What color is the sky?\nassistant: ", "It is blue.\n", "It is green.\n")
    assert read_pairs(write(tmp_path / "c.jsonl", line)) == [expected]


@pytest.mark.parametrize("line", [CONVERSATION, IMPLICIT_CONVERSATION], ids=["explicit", "implicit"])
def test_conversations_with_a_chat_template(tmp_path, line):
    expected = text_pair(
        "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
        "It is blue.<|im_end|>\n",
        "It is green.<|im_end|>\n",
    )
    assert read_pairs(write(tmp_path / "c.jsonl", line, STANDARD), renderer(CHATML))[0] == expected


def test_several_turns_before_and_after_the_shared_ones(tmp_path):
    shared = [message("system", "Be brief."), USER, BLUE, message("user", "Why?")]
    chosen = [message("assistant", "Rayleigh."), message("user", "Who?"), message("assistant", "A lord.")]
    line = {"chosen": shared + chosen, "rejected": [*shared, message("assistant", "Look.")]}
    prompt = "system: Be brief.\nuser: What color is the sky?\nassistant: It is blue.\nuser: Why?\nassistant: "
    expected = text_pair(prompt, "Rayleigh.\nuser: Who?\nassistant: A lord.\n", "Look.\n")
    explicit = {"prompt": shared, "chosen": chosen, "rejected": [message("assistant", "Look.")]}
    assert read_pairs(write(tmp_path / "c.jsonl", line, explicit)) == [expected, expected]


def test_further_keys_of_messages_are_ignored_also_when_sides_are_compared(tmp_path):
    line = {"chosen": [{**USER, "id": 1}, BLUE], "rejected": [{**USER, "id": 2}, {**GREEN, "name": "x"}]}
    seen = []

    def render(messages, add_generation_prompt):
        seen.append([list(one) for one in messages])
        messages[0]["content"] += "!"  # each call has a copy of its own
        return "".join(one["content"] for one in messages)

    assert read_pairs(write(tmp_path / "c.jsonl", line), render) == [
        text_pair("What color is the sky?!", "It is blue.", "It is green.")
    ]
    assert seen == [[["role", "content"]], [["role", "content"]] * 2, [["role", "content"]] * 2]


def test_a_template_that_begins_answers_otherwise_gives_the_shared_text_as_prompt(tmp_path):
    path = write(tmp_path / "c.jsonl", CONVERSATION)
    # What both wholes begin with, "It is " included.
    prompt = "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\nIt is "
    assert read_pairs(path, renderer(THINKING)) == [text_pair(prompt, "blue.<|im_end|>\n", "green.<|im_end|>\n")]


@pytest.mark.parametrize("odd", ["chosen", "rejected"])
def test_one_side_that_does_not_begin_with_the_prompt_is_enough(tmp_path, odd):
    line = {**CONVERSATION, odd: [message("tool", "42")]}
    (pair,) = read_pairs(write(tmp_path / "c.jsonl", line))
    assert pair.prompts == ["user: What color is the sky?\n"]
    wholes = {"chosen": "assistant: It is blue.\n", "rejected": "assistant: It is green.\n", odd: "tool: 42\n"}
    assert pair.winner_completions + pair.loser_completions == list(wholes.values())


def test_a_whole_that_the_other_begins_with_leaves_an_empty_completion(tmp_path):
    longer = [message("assistant", "It is blue. Always.")]

    def render(messages, add_generation_prompt):
        return "?" if add_generation_prompt else " ".join(one["content"] for one in messages)

    path = write(tmp_path / "c.jsonl", {**CONVERSATION, "rejected": longer})
    assert read_pairs(path, render) == [text_pair("What color is the sky? It is blue.", "", " Always.")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**CONVERSATION, "prompt": []}, "`prompt` must have at least one message, got none$"),
        ({**CONVERSATION, "chosen": []}, "`chosen` must have at least one message, got none$"),
        ({**CONVERSATION, "rejected": ["text"]}, r"`rejected\[0\]` must have `role` and `content`, got str 'text'$"),
        (
            {"chosen": [USER, {"role": "assistant", "value": "x"}], "rejected": [USER, GREEN]},
            r"`chosen\[1\].content` is missing; the message has role, value$",
        ),
        ({**CONVERSATION, "prompt": [{}]}, r"`prompt\[0\].role` is missing; the message has no keys$"),
        ({**CONVERSATION, "prompt": [message(1, "x")]}, r"`prompt\[0\].role` must be a text, got int 1$"),
        (
            {**CONVERSATION, "chosen": [message("assistant", [{"type": "text", "text": "x"}])]},
            r"`chosen\[0\].content` must be a text, got list \[",
        ),
        ({**CONVERSATION, "rejected": [BLUE]}, "`chosen` and `rejected` must differ, got the same messages twice$"),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, "`chosen` and `rejected` must differ, got the same"),
        (
            {"chosen": [BLUE], "rejected": [GREEN]},
            "without `prompt`, `chosen` and `rejected` must begin with the same messages, but .* as `prompt`$",
        ),
        (
            {"chosen": [USER, BLUE], "rejected": [USER]},
            "without `prompt`, .* must each have a message after those they share, but the shorter one ends after 1$",
        ),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE, USER, GREEN]}, "without `prompt`, .* ends after 2$"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path, line, message):
    refused(tmp_path, line, message)


def test_what_goes_wrong_in_rendering_names_the_line_and_keeps_its_cause(tmp_path):
    line = {**CONVERSATION, "prompt": [message("system", "Be brief."), USER]}
    error = refused(tmp_path, line, "`render` failed: TemplateError: roles must alternate$", renderer(ALTERNATING))
    assert error.__cause__ is not None
    refused(tmp_path, CONVERSATION, "`render` must return a text, got list", lambda messages, _: messages)
    with pytest.raises(KeyboardInterrupt):
        read_pairs(write(tmp_path / "c.jsonl", CONVERSATION), interrupt)


def interrupt(messages, add_generation_prompt):
    raise KeyboardInterrupt


def test_sides_that_are_rendered_the_same_are_refused(tmp_path):
    line = {**CONVERSATION, "rejected": [message("assistant", " It is blue. ")]}
    trimming = renderer(CHATML.replace("m['content']", "m['content'] | trim"))
    message_end = "got the same text after rendering: str '<|im_start|>user"
    refused(tmp_path, line, f"`chosen` and `rejected` must differ, {re.escape(message_end)}", trimming)


# Several files


def test_round_files_and_lines_mix_in_the_order_given(tmp_path):
    write_round_file(tmp_path / "a.json", 1, [SINGLE_PAIR])
    write(tmp_path / "b.jsonl", STANDARD, pair_to_record(SINGLE_PAIR), CONVERSATION)
    single, standard = [SINGLE_PAIR], [text_pair("The sky is", " blue.", " green.")]
    lines = read_pairs(tmp_path / "b.jsonl")
    assert lines[:2] == standard + single
    assert read_pairs([tmp_path / "a.json", str(tmp_path / "b.jsonl")]) == single + lines
    assert read_pairs([tmp_path / "b.jsonl", tmp_path / "a.json"]) == lines + single


def test_all_pairs_are_of_one_team(tmp_path):
    write_round_file(tmp_path / "team.json", 1, [TEAM_PAIR, TEAM_PAIR])
    write_round_file(tmp_path / "mixed.json", 1, [TEAM_PAIR, TEAM_PAIR, SINGLE_PAIR, TEAM_PAIR])
    write(tmp_path / "lines.jsonl", pair_to_record(SINGLE_PAIR), "", pair_to_record(TEAM_PAIR))
    write(tmp_path / "texts.jsonl", "", STANDARD)
    for names, place, first, numbers in (
        (["mixed.json"], "mixed.json, pair 2", "mixed.json, pair 0", (2, 1)),
        (["lines.jsonl"], "lines.jsonl, line 3", "lines.jsonl, line 1", (1, 2)),
        (["team.json", "texts.jsonl"], "texts.jsonl, line 2", "team.json, pair 0", (2, 1)),
        (["texts.jsonl", "team.json"], "team.json, pair 0", "texts.jsonl, line 2", (1, 2)),
    ):
        expected, got = numbers
        message = (
            f"{tmp_path / place}: the pair must be of the same number of agents as the first one, {expected} "
            f"({tmp_path / first}), got {got}"
        )
        with pytest.raises(RoundFileError, match=rf"^{re.escape(message)}$"):
            read_pairs([tmp_path / name for name in names])
