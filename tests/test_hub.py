"""Uploading what was trained to the hub, here a server on this machine that answers as the hub does."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from lightning.pytorch.loggers import CSVLogger

from pbrl_lightning import JointRewardModel, MARLHFModule, PreferenceDataModule
from pbrl_lightning.callbacks import AgentExport
from pbrl_lightning.cards.hub import push_to_hub
from pbrl_lightning.cli import main
from training_runs import make_data, make_module, make_team, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning")
TOKEN = "hf_" + "x" * 34
TEXTS = [{"prompt": letter, "chosen": f"{letter}!", "rejected": letter * 3} for letter in "abcdef"]
ROOT = Path(__file__).parent.parent


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits; with ``status`` it refuses everything."""

    def __init__(self, status=200):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.private, self.files, self.tokens = status, {}, {}, set()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Silent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, parts = self.server, self.path.strip("/").split("/")
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.status != 200:
            self.answer({"error": "no"}, hub.status)
        elif parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
            self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        elif "preupload" in parts:
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer({"files": [{"path": file["path"], **how} for file in json.loads(body)["files"]]})
        elif parts == ["api", "validate-yaml"]:
            self.answer({"errors": [], "warnings": []})
        elif "commit" in parts:
            stored = hub.files.setdefault("/".join(parts[2:4]), {})
            for line in body.splitlines():
                found = json.loads(line)
                if found["key"] == "file":
                    stored[found["value"]["path"]] = base64.b64decode(found["value"]["content"])
            url = f"http://{self.headers['Host']}/{'/'.join(parts[2:4])}/commit/{'0' * 40}"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
        else:
            self.answer({}, 404)

    def do_GET(self):
        self.answer({"id": "/".join(self.path.split("/")[3:5]), "siblings": [], "sha": "0" * 40})

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


def fit(root, module, data, **export):
    export = AgentExport(**export)
    make_trainer(root, [export], logger=CSVLogger(root, version=0), max_epochs=1).fit(module, data)
    return root / "lightning_logs/version_0/export"


def test_each_exported_directory_becomes_a_repository_with_its_card(tmp_path, hub):
    module = MARLHFModule(make_team(True), reward_model=JointRewardModel("builtin:tiny"), num_train_epochs=1)
    data = make_data(iterative=False)
    target = fit(tmp_path, module, data, hub_id="me/rain", license="mit")
    assert hub.private == {"me/rain-agent_0": True, "me/rain-agent_1": True, "me/rain-reward_model": True}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    for folder in ("agent_0", "agent_1", "reward_model"):
        uploaded = hub.files[f"me/rain-{folder}"]
        local = {path.name: path.read_bytes() for path in (target / folder).iterdir()}
        if folder != "reward_model":  # its base lies on this machine
            assert json.loads(local["adapter_config.json"])["base_model_name_or_path"].startswith("/")
            assert json.loads(uploaded.pop("adapter_config.json"))["base_model_name_or_path"] == "tiny"
            del local["adapter_config.json"]
        assert uploaded == local
        assert ModelCard(uploaded["README.md"].decode()).data.license == "mit"
        assert b"No license is stated" not in uploaded["README.md"]
    assert all(TOKEN.encode() not in data for files in hub.files.values() for data in files.values())


def test_nothing_is_uploaded_unless_it_is_asked_for(tmp_path, hub):
    module = make_module(make_team(num_agents=1), num_train_epochs=1)
    target = fit(tmp_path, module, PreferenceDataModule(pairs=TEXTS))
    assert (hub.private, hub.files, hub.tokens) == ({}, {}, set())
    assert "No license is stated" in (target / "agent_0" / "README.md").read_text()
    trial = make_trainer(tmp_path / "trial", [AgentExport(hub_id="me/rain")], fast_dev_run=True)
    trial.fit(module, PreferenceDataModule(pairs=TEXTS))
    assert hub.tokens == set()
    assert push_to_hub(target, "me/later", private=False) == ["me/later-agent_0"]  # afterwards, by hand
    assert hub.private == {"me/later-agent_0": False}


def test_a_hub_that_refuses_costs_no_model(tmp_path, hub):
    hub.status = 403
    module = make_module(make_team(num_agents=1), num_train_epochs=1)
    with pytest.warns(UserWarning, match=r"what was trained is in .*export, but was not uploaded: .*403.*To try again"):
        target = fit(tmp_path, module, PreferenceDataModule(pairs=TEXTS), hub_id="me/rain")
    assert (target / "agent_0" / "model.safetensors").exists()


def test_a_wrong_name_or_a_missing_login_is_found_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("pbrl_lightning.cards.hub.get_token", lambda: None)
    team = make_team(num_agents=1)
    for hub_id, message in (
        ("me/a/b", "`hub_id` must be a name such as `my-name/rain-team`, .* got 'me/a/b'"),
        ("me/rain", "there is no login: run `hf auth login` or set HF_TOKEN in the environment"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, make_module(team), PreferenceDataModule(pairs=TEXTS), hub_id=hub_id)
    assert not team.is_loaded
    with pytest.raises(
        ValueError, match=r"`license` is stated in model cards.*; `hub_private: false` needs a `hub_id`"
    ):
        AgentExport(license="mit", model_cards=False, hub_private=False)
    with pytest.raises(ValueError, match="holds no exported model"):
        push_to_hub(tmp_path, "me/rain")


def test_cards_name_the_data_sets_of_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr("pbrl_lightning.preferences.pair_sources.named_rows", lambda source: TEXTS)
    module = make_module(make_team(num_agents=1), num_train_epochs=1)
    target = fit(tmp_path, module, PreferenceDataModule(pairs=["datasets:org/pairs::train", "datasets:org/more"]))
    head = ModelCard.load(target / "agent_0" / "README.md").data
    assert head.datasets == ["org/pairs", "org/more"]
    assert (head.library_name, head.pipeline_tag, head.license) == ("transformers", "text-generation", None)
    assert "- **pairs:** `datasets:org/pairs::train`; `datasets:org/more`" in (target / "agent_0/README.md").read_text()


def test_the_saved_config_holds_no_token(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.callbacks=AgentExport", "--trainer.callbacks.hub_id=me/rain", "--trainer.max_steps=1"]
    options += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=one"]
    main(["fit", "--config", str(ROOT / "configs/debug/reward.yaml"), *options])
    (saved,) = Path("one").rglob("config.yaml")
    (export,) = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    assert (export["init_args"]["hub_id"], export["init_args"]["hub_private"]) == ("me/rain", True)
    assert TOKEN not in saved.read_text()
    assert set(hub.files) == {"me/rain-reward_model"}
