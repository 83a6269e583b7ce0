"""Remote answers: which are used (B97), seeds of their own (B109), and none to an empty request (B115)."""

import asyncio
import json
from itertools import pairwise

import pytest

from fake_api import FakeApi, Reply
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.comparators.api import ApiSpeaker
from pbrl_lightning.comparators.base import CollectionPhase
from pbrl_lightning.remote import ApiClient, ApiEndpoint, ApiRequest
from pbrl_lightning.remote.formats import read_answer, request_body, seeded

URL = "https://example.org/v1"


def endpoint(api_format, **options):
    return ApiEndpoint(URL, format=api_format, model="m", **options)


def chat(finish_reason, content="half a sen", **message):
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish_reason}]}


def messages(stop_reason, *blocks):
    texts = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    return {"content": texts, "stop_reason": stop_reason}


def responses(status, text="half a sen", **more):
    output = [] if text is None else [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    return {"status": status, "output": output, **more}


def generic(**entry):
    return {"completions": [{"text": "half a sen", **entry}]}


THINKING = {"type": "thinking", "thinking": "Let me see …"}
REASONING = {"type": "reasoning", "content": None}
HALF = {
    "type": "message",
    "status": "incomplete",
    "content": [{"type": "output_text", "text": "half a sen"}],
}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
# What came, and whether its text is used; why not otherwise.
STATES = [
    ("openai", chat("stop"), None),
    ("openai", chat(None), None),
    ("openai", {"choices": [{"message": {"content": "half a sen"}}]}, None),
    ("openai", chat("eos_token"), None),
    ("openai", chat("STOP"), None),
    ("openai", chat("length"), None),
    ("openai", chat("length", "", reasoning_content="Let me see"), "cut before its first word"),
    ("openai", chat("length", " \n", reasoning="Let me see"), "cut before its first word"),
    ("openai", chat("length", None), "cut before its first word"),
    ("openai", chat("stop", ""), "empty"),
    ("openai", chat("stop", None), "empty"),
    ("openai", chat("content_filter"), "filtered"),
    ("openai", chat("tool_calls"), "a tool is called"),
    ("openai", chat("insufficient_system_resource"), "failed"),
    ("openai", chat("error"), "failed"),
    ("openai", chat("stop", refusal="No."), "refused"),
    ("openai", chat("something_new"), "in the unknown state 'something_new'"),
    ("openai", chat({"odd": 1}), "in the unknown state \"{'odd': 1}\""),
    ("anthropic", messages("end_turn", "half a sen"), None),
    ("anthropic", messages("stop_sequence", THINKING, "half a sen"), None),
    ("anthropic", messages("max_tokens", "half a sen"), None),
    ("anthropic", messages(None, "half a sen"), None),
    ("anthropic", messages("max_tokens", THINKING, ""), "cut before its first word"),
    ("anthropic", messages("max_tokens", THINKING), "cut before its first word"),
    ("anthropic", messages("end_turn"), "empty"),
    ("anthropic", messages("refusal", "half a sen"), "refused"),
    ("anthropic", messages("pause_turn", "half a sen"), "paused"),
    ("anthropic", messages("tool_use", "half a sen"), "a tool is called"),
    ("openai_responses", responses("completed"), None),
    ("openai_responses", {"output": responses("")["output"]}, None),
    ("openai_responses", responses("incomplete", incomplete_details={"reason": "max_output_tokens"}), None),
    (
        "openai_responses",
        responses("incomplete", "", incomplete_details={"reason": "max_output_tokens"}),
        "cut before its first word",
    ),
    ("openai_responses", responses("incomplete", incomplete_details={"reason": "content_filter"}), "filtered"),
    ("openai_responses", responses("incomplete", incomplete_details=None), "incomplete"),
    ("openai_responses", responses("failed"), "failed"),
    ("openai_responses", responses("cancelled"), "cancelled"),
    ("openai_responses", responses("in_progress"), "unfinished"),
    ("openai_responses", responses("queued", None), "unfinished"),
    ("openai_responses", {"status": "completed", "output": [REASONING]}, "empty"),
    ("openai_responses", {"status": "completed", "output": [REASONING, CALL]}, "a tool is called"),
    ("openai_responses", {"output": [{"type": "message", "status": "incomplete", "content": []}]}, "incomplete"),
    ("openai_responses", responses("completed", None) | {"output": [HALF]}, "incomplete"),
    (
        "openai_responses",
        responses("incomplete", None, incomplete_details={"reason": "max_output_tokens"}) | {"output": [HALF]},
        None,
    ),
    ("openai", chat("stop", "\u200b\ufeff \x00"), "empty"),
    ("generic", generic(), None),
    ("generic", generic() | {"status": "ok"}, None),
    ("generic", generic() | {"status": "length"}, None),
    ("generic", generic() | {"status": "incomplete"}, "incomplete"),
    ("generic", generic() | {"finish_reason": "content_filter"}, "filtered"),
    ("generic", generic(finish_reason="refusal") | {"status": "completed"}, "refused"),
    ("generic", {"completions": ["half a sen"]}, None),
    ("generic", generic(finish_reason="stop"), None),
    ("generic", generic(finish_reason="length"), None),
    ("generic", generic(stop_reason="end_turn", finish_reason=None), None),
    ("generic", generic(finish_reason=0), None),  # of a server's own numbers nothing is known
    ("generic", {"completions": [""]}, "empty"),
    ("generic", {"completions": ["  "]}, "empty"),
    ("generic", {"completions": [None]}, "empty"),
    ("generic", generic(text="", finish_reason="length"), "cut before its first word"),
    ("generic", generic(finish_reason="content_filter"), "filtered"),
    ("generic", generic(status="failed"), "failed"),
    ("generic", {"completions": [{"message": {"content": "half a sen", "refusal": "No."}}]}, "refused"),
]


@pytest.mark.parametrize(("api_format", "body", "why"), STATES)
def test_fault_B97_only_what_says_that_it_is_an_answer_is_one(api_format, body, why):
    (answer,) = read_answer(endpoint(api_format), json.loads(json.dumps(body)))
    assert answer.text == ("half a sen" if why is None else None)
    if why is not None:
        assert answer.reason == why


def test_fault_B97_what_is_left_out_is_counted_with_its_reason():
    both = {"choices": [*chat("length", "")["choices"], *chat("stop", "good")["choices"]]}
    with FakeApi([Reply(both)]) as api:
        counts = {}
        where = ApiEndpoint(api.url_of("openai"), format="openai", model="m", key_env="")
        speaker = ApiSpeaker(where, [lambda item: item["prompt"]], CollectionPhase(1), counts)
        with pytest.warns(UserWarning, match=r"gave no response .*\(1 cut before its first word\): it is left out"):
            (sample,) = speaker.sample([{"prompt": "p"}], [0], num_candidates=2, sampling=SamplingConfig())
    assert counts == {"missing_comparator_responses": 1}
    assert [response.text for response in sample.responses[0].values()] == ["good"]


def test_fault_B109_each_request_has_a_seed_of_its_own():
    body = {
        "seed": 7,
        "options": {"seed": 3, "top_k": 2},
        "list": [{"random_seed": 1}],
        "seeds": 5,
        "is": {"seed": True},
    }
    streams = [
        (round_number, item, agent, index)
        for round_number in (1, 2)
        for item in range(3)
        for agent in range(2)
        for index in (0, 2)
    ]
    found = [seeded(body, stream) for stream in streams]
    assert found == [seeded(body, stream) for stream in streams]  # the same after a restart
    for pick in (lambda b: b["seed"], lambda b: b["options"]["seed"], lambda b: b["list"][0]["random_seed"]):
        seeds = [pick(one) for one in found]
        assert len(set(seeds)) == len(streams)
        assert all(0 <= seed < 2**31 for seed in seeds)
        assert not any(b == a + 1 for a, b in pairwise(seeds))
    assert all((one["seeds"], one["is"], one["options"]["top_k"]) == (5, {"seed": True}, 2) for one in found)
    assert seeded(body, streams[0]) != seeded(body | {"seed": 8}, streams[0])
    assert seeded(body, ()) == body


@pytest.mark.parametrize("name", ["seed", "Seed", "random_seed", "randomSeed"])
@pytest.mark.parametrize("base", [7, 7.0, "7", -7, 2**70])
def test_fault_B109_a_seed_is_counted_on_however_it_is_written(name, base):
    found = [seeded({name: base}, (1, 0, 0, index))[name] for index in range(4)]
    assert len(set(found)) == 4
    assert {type(seed) for seed in found} == {str if isinstance(base, str) else int}


@pytest.mark.parametrize("value", [None, True, "auto", 0.5, float("inf"), float("nan"), {"type": "integer"}])
def test_what_is_no_seed_is_sent_as_it_is(value):
    assert repr(seeded({"seed": value}, (1, 0, 0, 0))) == repr({"seed": value})


def test_fault_B109_one_candidate_per_request_is_a_new_answer_each_time():
    """The example of the documentation: `extra_body: {seed: 7}` with `max_n_per_request: 1`."""
    with FakeApi(lambda seen: Reply(chat("stop", f"drawn with {seen.body['seed']}"))) as api:
        options = {"extra_body": {"seed": 7}, "max_n_per_request": 1, "key_env": ""}
        where = ApiEndpoint(api.url_of("openai"), format="openai", model="m", **options)

        async def ask(round_number):
            async with ApiClient(where) as client:
                return await client.answer(ApiRequest("p", stream=(round_number, 0, 0)), range(4))

        found = [asyncio.run(ask(number)) for number in (1, 1, 2)]
    first, again, second = ([texts[index] for index in range(4)] for texts in found)
    assert first == again
    assert len({*first, *second}) == 8


@pytest.mark.parametrize("api_format", ["openai", "anthropic", "openai_responses", "generic"])
def test_fault_B115_a_system_message_alone_is_sent(api_format):
    request = ApiRequest([{"role": "system", "content": "Be brief."}])
    body = request_body(endpoint(api_format), request, 1)
    said = body.get("messages") or body.get("input") or body.get("prompt")
    assert "Be brief." in str(said)
    if api_format == "anthropic":
        assert said == [{"role": "user", "content": "Be brief."}]
        assert "system" not in body
