"""The API client against a server on loopback: bodies, odd answers, retries, limits, top-up, keys kept secret."""

import asyncio
import logging
import pickle
import random
import time
import traceback
from collections import Counter
from email.utils import formatdate
from itertools import product
from types import SimpleNamespace

import pytest

from fake_api import BODIES, SHAPES, TRANSPORTS, FakeApi, Reply, error_reply, rejects
from pbrl_lightning.remote import ApiClient, ApiEndpoint, ApiError, ApiRejectedError, ApiRequest, ApiUnavailableError

FORMATS = ("generic", "openai", "anthropic", "openai_responses")
CHAT = ("generic", "openai")  # the formats that can ask for several candidates at once
KEY = "sk-canary-0123456789abcdef"
TEAM = KEY[:14]  # blotting this one out first must not leave the rest of the other
RETRIED = ("408", "409", "429", "500", "502", "503", "504", "529")
BROKEN = ("reset", "close", "cut", "half_json", "html", "sse", "not_utf8", "deep", "large", "gzip_bomb", "endless")
REJECTED = ("400", "401", "402", "403", "404", "405", "413", "422", "301", "302", "303", "307", "308")
SAMPLING = {"temperature": 0.6, "top_p": 0.9}
RAW = {"agent_idx": 1, "top_k": 50, "batch_item": {"prompt": "from the data"}}  # of the generic format alone
USER = [{"role": "user", "content": "p"}]
TABLE = {  # of the specification
    "generic": {"prompt": "p", "num_return_sequences": 4, "max_new_tokens": 16, **SAMPLING, **RAW},
    "openai": {"model": "m", "messages": USER, "n": 4, "max_tokens": 16, **SAMPLING, "stream": False},
    "anthropic": {"model": "m", "max_tokens": 16, "messages": USER, "temperature": 0.6, "stream": False},
    "openai_responses": {"model": "m", "input": "p", "max_output_tokens": 16, "stream": False},
}
CHOICES = [{"message": message} for message in ({"content": "a"}, None, {"content": None, "refusal": "No."})]
ITEMS = ["a", {"text": "b"}, {"content": "c"}, {"message": {"content": "d"}}, None, {"text": None}]
TALK = [{"type": "message", "content": [{"type": "output_text", "text": text}]} for text in "ab"]
REFUSED = [TALK[0], {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]
PARTS = [
    ("openai", {"choices": [*CHOICES, {"message": {"content": "d"}}]}, ["a", None, None, "d"]),
    ("openai_responses", {"output": [TALK[0], {"type": "reasoning", "content": None}, TALK[1]]}, ["ab"]),
    ("openai_responses", {"output": REFUSED}, [None]),
    ("anthropic", {"content": [{"type": "text", "text": "half"}], "stop_reason": "refusal"}, [None]),
    ("generic", {"data": {"outputs": ITEMS}}, ["a", "b", "c", "d", None, None]),
]
ODD = [{"hello": 1}, [], "x", None, {"completions": 3, "choices": {}, "output": "x"}, {"choices": [{"message": "a"}]}]
ODD += [{"type": "error", "error": {"message": "their words", "code": code}} for code in (None, 503, "²", ["a"])]
# Numbers are dates, so many seconds from now and cut to the second; past the deadline is an error at once.
WAITS = [("1", 1, 1.5), (2, 1, 3), ("3600", None, 0.5), (3600, None, 0.5), ("1e400", None, 0.5)]
WAITS += [(value, 0, 0.4) for value in ("0", "soon", "", "-5", "nan", -9)]
SPLITS = [("openai", None, [5]), ("openai", 2, [1, 2, 2]), ("generic", 9, [5]), ("generic", 3, [2, 3])]
SPLITS += [("anthropic", None, [1] * 5), ("openai_responses", 3, [1] * 5)]
AGAIN = [("one", [4, 3, 2, 1]), (["fewer", "ok"], [4, 1]), (["empty", "ok"], [4, 4])]
AGAIN += [("more", [4]), ("duplicates", [4])]
NAMES = [("openai", name) for name in ("max_tokens", "temperature", "top_p", "n", "stream")]
NAMES += [("anthropic", "temperature"), ("openai_responses", "max_output_tokens"), ("generic", "top_k")]
GOOD, FINAL = ("stale", *SHAPES), (*REJECTED[:5], "307")
MIX = [*GOOD * 2, *TRANSPORTS, *BODIES, *RETRIED, *FINAL]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY, "OWN_KEY": KEY, "TEAM": TEAM}.items():
        monkeypatch.setenv(name, value)


def endpoint(url, api_format="openai", **options):
    usual = {"timeout": 2.0, "deadline": 5.0, "max_attempts": 3, "wait_initial": 0.01, "wait_max": 0.03}
    usual |= {"max_response_bytes": 2**19, "model": None if api_format == "generic" else "m"}
    return ApiEndpoint(url, format=api_format, **{**usual, **options})


def request_of(prompt="p", num_candidates=4):
    sampling = {"max_new_tokens": 16, "top_k": 50, **SAMPLING}
    return ApiRequest(prompt=prompt, num_candidates=num_candidates, agent_index=1, item=RAW["batch_item"], **sampling)


def together(target, *starts):
    """What coroutines, made from one client, come to when they run at once; an ApiError is also an end."""

    async def main():
        async with ApiClient(target) as client:
            ends = asyncio.gather(*(start(client) for start in starts), return_exceptions=True)
            return await asyncio.wait_for(ends, 60)

    ends = asyncio.run(main())
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, ApiError):
            raise end
    return ends


def run(behaviour="ok", api_format="openai", prompt="p", n=None, indices=None, latency=0.0, query="", **options):
    """One request, or with `indices` all that it takes to answer them."""
    calls, n = [], n or (4 if api_format in CHAT else 1)

    def start(client):
        if indices is None:
            return client.ask(request_of(prompt, n))
        return client.answer(request_of(prompt), indices=list(indices), arrived=calls.append)

    with FakeApi(behaviour, latency) as api:
        url, begin = api.url_of(api_format), time.monotonic()
        (end,) = together(endpoint(url + query, api_format, **options), start)
        seconds = time.monotonic() - begin
        assert_idle(api)
    return SimpleNamespace(end=end, seen=api.requests, calls=calls, url=url, seconds=seconds, most=api.most_in_flight)


def assert_idle(api):
    until = time.monotonic() + 1  # the server is told about closed connections a little later
    while api.in_flight and time.monotonic() < until:
        time.sleep(0.005)
    assert api.in_flight == 0


@pytest.mark.parametrize("api_format", FORMATS)
def test_requests_of_each_format(api_format):
    (seen,) = run(api_format=api_format).seen
    assert (seen.method, seen.body, seen.headers["content-type"]) == ("POST", TABLE[api_format], "application/json")
    assert ("authorization" in seen.headers) == (api_format.startswith("openai"))
    headers, extra = {"X-Team": "of ${TEAM}!", "X-Plain": "y"}, {"top_p": 0.1, "more": {"a": [1]}}
    options = {"key_env": "OWN_KEY", "headers": headers, "extra_body": extra, "query": "?v=1", "model": "other"}
    (seen,) = run(api_format=api_format, **options).seen
    assert seen.body == {**TABLE[api_format], "model": "other", **extra}
    sent = [seen.headers.get(name) for name in ("authorization", "x-api-key", "anthropic-version")]
    assert sent == ([None, KEY, "2023-06-01"] if api_format == "anthropic" else [f"Bearer {KEY}", None, None])
    assert (seen.path[-4:], seen.headers["x-team"], seen.headers["x-plain"]) == ("?v=1", f"of {TEAM}!", "y")


def test_chat_messages_and_aliases():
    chat, bodies = [{"role": "system", "content": "S"}, *USER], []
    with FakeApi() as api:
        for name in ("openai", "openai_responses", "responses", "codex", "anthropic"):
            target = endpoint(api.url_of("openai_responses" if name in ("responses", "codex") else name), name)
            assert together(target, lambda client: client.ask(request_of(chat, 1))) == [api.requests[-1].texts]
            bodies.append(api.requests[-1].body)
    assert [body.get("messages", body.get("input")) for body in bodies] == [chat] * 4 + [USER]
    assert [body.get("system") for body in bodies] == [None] * 4 + ["S"]


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fault_B95_B96_shapes_of_answers(api_format, shape):
    got = run(shape, api_format)
    if shape in ("null_message", "null_content", "refusal"):
        assert got.end == [None] * 4 if api_format in CHAT else got.end in ([], [None])
    elif (shape, api_format) != ("two_blocks", "generic"):  # the specification knows no blocks there
        assert [text for text in got.end if text is not None] == got.seen[0].texts[: got.seen[0].n]


@pytest.mark.parametrize(("api_format", "body", "texts"), PARTS)
def test_fault_B95_B96_parts_of_an_answer_keep_their_places(api_format, body, texts):
    path = {"response_field": "data.outputs"} if api_format == "generic" else {}
    assert run(Reply(body), api_format, n=len(texts), **path).end == texts
    got = run(Reply(body), api_format, indices=range(5, 5 + len(texts)), **path)
    assert got.calls == [dict(enumerate(texts, start=5))]
    assert got.end == {index: text for index, text in got.calls[0].items() if text is not None}


@pytest.mark.parametrize("body", [*ODD, {"error": "their words"}])
@pytest.mark.parametrize("api_format", FORMATS)
def test_fault_B96_errors_and_other_json_with_status_200(api_format, body):
    end = run(Reply(body), api_format).end
    assert "their words" in str(end) if "their words" in str(body) else isinstance(end, ApiError) or not any(end)


@pytest.mark.parametrize("behaviour", [*RETRIED, *BROKEN])
def test_fault_B100_what_passes_is_retried(behaviour):
    got = run([behaviour, behaviour, "ok"])
    assert got.end == got.seen[2].texts
    got = run(behaviour, max_attempts=2)
    assert (type(got.end), len(got.seen), got.end.endpoint) == (ApiUnavailableError, 2, got.url)
    assert got.end.status == int(behaviour) if behaviour.isdigit() else got.url in str(got.end)


@pytest.mark.parametrize(("status", "transport"), [*product(REJECTED, ["whole"]), ("401", "cut"), ("401", "endless")])
def test_fault_B100_what_stays_is_not_retried(status, transport):
    with FakeApi() as elsewhere:
        target = {"Location": elsewhere.url_of("openai")} if status[0] == "3" else {}
        got = run(Reply({"error": {"message": "their words"}}, int(status), target, transport), query="?v=1")
        assert elsewhere.connections == 0  # redirects are not followed either
    assert (type(got.end), len(got.seen), got.end.status) == (ApiRejectedError, 1, int(status))
    assert (got.end.endpoint, f"{got.url} " in str(got.end), status in str(got.end)) == (got.url, True, True)
    assert "their words" in str(got.end) or target or transport != "whole"


def test_fault_B100_a_sequence_of_faults_and_how_long_it_waits():
    got = run(["429", "503", "529", "reset", "silent", "ok"], max_attempts=6, timeout=0.3)
    assert got.end == got.seen[5].texts
    got = run(lambda seen: error_reply(seen, "429", "insufficient_quota", "their words"))
    assert (type(got.end), len(got.seen), got.end.status) == (ApiRejectedError, 1, 429)
    assert isinstance(*together(endpoint(got.url), lambda away: away.ask(request_of())), ApiUnavailableError)
    times = [seen.time for seen in run("500", wait_initial=0.05, wait_max=0.1, max_attempts=6).seen]
    assert 0.1 < times[-1] - times[0] < 1.0


@pytest.mark.parametrize(("value", "least", "most"), WAITS)
def test_retry_after(value, least, most):
    def busy(seen):
        later = value if isinstance(value, str) else formatdate(time.time() + value, usegmt=True)
        return "ok" if seen.number else error_reply(seen, "429", headers={"Retry-After": later})

    got = run(busy)
    assert got.seconds < most
    if least is None:
        assert (type(got.end), len(got.seen), got.end.status) == (ApiUnavailableError, 1, 429)
    else:
        assert (got.end, got.seen[1].time - got.seen[0].time >= least) == (got.seen[1].texts, True)


@pytest.mark.parametrize("behaviour", ["silent", "trickle", "trickle_head"])
def test_fault_B99_no_answer_ends_in_time_and_is_logged(behaviour, caplog):
    got = run(behaviour, timeout=0.25)
    assert (type(got.end), len(got.seen), got.end.status) == (ApiUnavailableError, 3, None)
    assert 0.7 < got.seconds < 2
    assert sum(record.name.startswith("pbrl_lightning") for record in caplog.records) >= 2
    got = run(behaviour, timeout=30.0, deadline=0.4)
    assert (type(got.end), len(got.seen), 0.3 < got.seconds < 1.2) == (ApiUnavailableError, 1, True)


def test_the_concurrency_limit_is_kept_and_used_and_waiting_is_no_delay():
    got = run(api_format="anthropic", indices=range(16), latency=0.1, max_concurrency=4, deadline=0.35)
    assert (got.most, len(got.end)) == (4, 16)


def test_a_cancelled_request_leaves_its_place():
    async def cancel_then_ask(client):
        tasks = [asyncio.create_task(client.ask(request_of(prompt))) for prompt in ("held", "queued")]
        await asyncio.sleep(0.1)
        assert all(task.cancel() for task in tasks)
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        return await asyncio.wait_for(client.ask(request_of("second")), 1)

    with FakeApi(lambda seen: "silent" if seen.prompt == "held" else "ok") as api:
        assert together(endpoint(api.url_of("openai"), max_concurrency=1), cancel_then_ask) == [api.requests[1].texts]
    assert [seen.prompt for seen in api.requests] == ["held", "second"]


@pytest.mark.parametrize(("api_format", "most", "sizes"), SPLITS)
def test_candidates_are_split_into_requests(api_format, most, sizes):
    indices = [7, 3, 9, 0, 4]
    got = run(api_format=api_format, indices=indices, latency=0.01, max_n_per_request=most)
    assert sorted(seen.n for seen in got.seen) == sizes == sorted(map(len, got.calls))
    assert got.end == {index: text for call in got.calls for index, text in call.items()}
    assert set(got.end) == set(indices)
    assert sorted(list(call.values()) for call in got.calls) == sorted(seen.texts for seen in got.seen)
    assert all(list(call) == [index for index in indices if index in call] for call in got.calls)


@pytest.mark.parametrize("api_format", FORMATS)
def test_an_answer_ends_early(api_format):
    got = run("401", api_format, indices=range(20), latency=0.02, max_concurrency=2, max_n_per_request=1)
    assert (type(got.end), len(got.seen) <= 4) == (ApiRejectedError, True)  # those under way, not all 20
    for shape in ("empty", "null_message", "null_content", "refusal"):
        got = run(shape, api_format, indices=range(4))
        assert (got.end, len(got.seen) <= 16) == ({}, True)


@pytest.mark.parametrize("api_format", CHAT)
@pytest.mark.parametrize(("behaviour", "asked"), AGAIN)
def test_fault_B98_missing_candidates_are_asked_for_again(api_format, behaviour, asked):
    got = run(behaviour, api_format, indices=[4, 5, 6, 7])
    assert [seen.n for seen in got.seen] == asked
    texts = [text for seen in got.seen for text in seen.texts[: seen.n]]
    assert got.end == dict(zip([4, 5, 6, 7], texts, strict=True))
    assert [index for call in got.calls for index in call] == [4, 5, 6, 7]


def test_fault_B98_one_candidate_per_request():
    def strict(seen):
        return "ok" if seen.n == 1 else error_reply(seen, "400", words="n must be 1")

    assert "n must be 1" in str(run(strict, indices=range(4)).end)
    assert len(set(run(strict, indices=range(4), max_n_per_request=1).end.values())) == 4
    assert ApiEndpoint("https://api.deepseek.com/chat/completions", format="openai", model="deepseek-chat").max_n == 1


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("api_format", FORMATS[1:])
def test_fault_B101_no_empty_text_is_sent(api_format, blank):
    for prompt in (blank, [{"role": "user", "content": blank}], [*USER, {"role": "user", "content": blank}]):
        with FakeApi() as api:
            try:
                together(endpoint(api.url_of(api_format), api_format), lambda c, p=prompt: c.ask(request_of(p)))
            except ValueError as error:
                assert "empty" in str(error)  # noqa: PT017 - leaving the text out is fine too
        parts = [part for seen in api.requests for part in seen.body.get("messages", seen.body.get("input"))]
        assert all((part if isinstance(part, str) else part["content"]).strip() for part in parts)
        assert parts or not api.requests


@pytest.mark.parametrize(("api_format", "name"), NAMES)
def test_fault_B102_parameters_are_renamed_or_left_out(api_format, name):
    assert f"'{name}' is not supported" in str(run(rejects(name), api_format).end)
    others = {key: value for key, value in TABLE[api_format].items() if key != name}
    for new, body in (("new", {**others, "new": TABLE[api_format][name]}), (None, others)):
        got = run(rejects(name), api_format, parameter_names={name: new})
        assert (got.end, got.seen[0].body) == (got.seen[0].texts, body)


@pytest.mark.parametrize("value", ["", None])
@pytest.mark.parametrize(("name", "key_env"), [("OWN_KEY", "OWN_KEY"), ("TEAM", None)])
def test_a_missing_variable_is_named(monkeypatch, name, key_env, value):
    monkeypatch.setenv(name, "") if value == "" else monkeypatch.delenv(name)
    with pytest.raises((ApiError, ValueError), match=name):
        assert run(headers={"X-Team": "${TEAM}"}, key_env=key_env).seen == []


def test_wrong_options_are_all_named_at_once():
    names = ("timeout", "deadline", "max_attempts", "max_concurrency", "max_response_bytes", "max_n_per_request")
    options = {**dict.fromkeys(names, 0), "wait_initial": -1.0, "wait_max": float("nan"), "response_field": ""}
    with pytest.raises(ValueError, match="url") as caught:
        ApiEndpoint("ftp://somewhere", format="smoke", **options)
    assert [name for name in ("format", *options) if name not in str(caught.value)] == []
    for name in ("Authorization", "authorization", "x-api-key", "X-API-Key"):
        with pytest.raises(ValueError, match=name) as caught:
            ApiEndpoint("https://example.org", headers={name: f"Bearer {KEY}"})
        assert KEY not in str(caught.value)


def test_plain_http_warns(recwarn):
    for address in ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:80", "https://example.org"):
        ApiEndpoint(f"{address}/v1")
    assert len(recwarn) == 0
    for host in ("example.org", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1"):
        with pytest.warns(UserWarning, match="http"):
            ApiEndpoint(f"http://{host}/v1")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("status", [None, 200, 401, 500])
@pytest.mark.parametrize("api_format", FORMATS)
def test_keys_are_never_told(api_format, status, as_json, caplog):
    def echo(seen):  # so often that any cut falls into a key
        sent = " ".join(seen.headers.get(name, "") for name in ("authorization", "x-api-key", "x-team")) * 100
        return Reply({"error": {"message": sent}} if as_json else sent.encode(), status) if status else "ok"

    caplog.set_level(logging.DEBUG)
    got = run(echo, api_format, key_env="OWN_KEY", headers={"X-Team": "${TEAM}"}, max_attempts=2)
    target = endpoint(got.url, api_format, key_env="OWN_KEY", headers={"X-Team": "${TEAM}"})
    told = [caplog.text, target, pickle.dumps(target), ApiClient(target), request_of(), got.end]
    told += [vars(got.end), *traceback.format_exception(got.end)] if isinstance(got.end, ApiError) else []
    text = "\n".join(f"{thing} {thing!r}" for thing in told)
    assert [part for part in (KEY[:6], KEY[-6:]) if part in text] == []


@pytest.mark.parametrize("end", ["\n", "\r\nX-Other: 1", "é", "\x7f"])
def test_keys_that_no_header_can_hold_are_not_told(monkeypatch, end, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", KEY + end)
    try:
        assert run().seen[0].headers["authorization"] == f"Bearer {KEY}"
    except (ApiError, ValueError) as error:
        assert KEY[:6] not in "".join(traceback.format_exception(error))  # noqa: PT017 - both are fine
    assert KEY[:6] not in caplog.text


@pytest.mark.parametrize("count", [40, pytest.param(250, marks=pytest.mark.slow)])  # times four formats
@pytest.mark.parametrize("api_format", FORMATS)
def test_every_one_of_many_requests_ends_once(api_format, count):
    tries, told, calls, moments = Counter(), Counter(), [[] for _ in range(count)], {}

    def mixed(seen):
        tries[seen.prompt] += 1
        return random.Random(f"{count} {seen.prompt} {tries[seen.prompt]}").choice(MIX)

    async def start(client, i):
        request = request_of(f"item {i}", 1 + i % 4)
        try:
            if i % 2 == 0:
                return await client.ask(request)
            return await client.answer(request, indices=list(range(1 + i % 4)), arrived=calls[i].append)
        finally:
            moments[i] = time.monotonic()

    with FakeApi(mixed, latency=lambda seen: random.Random(seen.number).random() / 50) as api:
        limits = {"timeout": 0.8, "deadline": 3.0, "max_concurrency": 8, "max_n_per_request": 2}
        starts = [lambda client, i=i: start(client, i) for i in range(count)]
        ends = together(endpoint(api.url_of(api_format), api_format, **limits), *starts)
        assert_idle(api)
    assert api.most_in_flight <= 8
    for i, end in enumerate(ends):
        mine = [seen for seen in api.requests if seen.prompt == f"item {i}"]
        arrived = [pair for call in calls[i] for pair in call.items()]
        texts = {text for _, text in arrived if text is not None}
        if i % 2 == 0:  # one request: its last attempt is its end
            texts = set() if isinstance(end, ApiError) else {text for text in end if text is not None}
            assert (1 <= len(mine) <= 3, moments[i] - mine[0].time < 3.0 + 0.5) == (True, True)
            assert isinstance(end, ApiError) or mine[-1].behaviour in GOOD
            assert isinstance(end, ApiRejectedError) == (mine[-1].behaviour in FINAL)
        elif isinstance(end, dict):
            assert end == {index: text for index, text in arrived if text is not None}
        assert len(dict(arrived)) == len(arrived)  # no index twice
        assert texts <= {text for seen in mine for text in seen.texts}
        told.update(texts)
    assert set(told.values()) == {1}
    assert {type(end) for end in ends} == {list, dict, ApiRejectedError, ApiUnavailableError}
