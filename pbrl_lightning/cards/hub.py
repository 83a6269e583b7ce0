"""What a run exported as repositories of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from lightning.pytorch.utilities import rank_zero_info

from pbrl_lightning.utils.errors import ConfigurationError

_LONGEST: Final = "reward_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"


def check_hub_id(hub_id: str) -> None:
    """Finds a name that the hub would refuse, and a missing login, before anything is trained. Asks nobody.

    Raises:
        ConfigurationError: If the name is malformed or there is no token.
    """
    try:
        validate_repo_id(f"{hub_id}-{_LONGEST}")
    except HFValidationError as error:
        raise ConfigurationError(
            f"`hub_id` must be a name such as `my-name/rain-team`, to which `-agent_0` is added, got {hub_id!r}: "
            f"{error}"
        ) from error
    if get_token() is None:
        raise ConfigurationError(
            "`hub_id` uploads to the Hugging Face hub, and there is no login: run `hf auth login` or set HF_TOKEN in "
            "the environment"
        )


def push_to_hub(directory: Path, hub_id: str, *, private: bool = True) -> list[str]:
    """Uploads each exported directory with its card to a repository of its own, ``HUB_ID-agent_0`` and so on.

    A repository that does not exist is created. The token is the environment's or the stored login.

    Args:
        directory: What a run exported to.
        hub_id: What the repositories' names begin with.
        private: Who may read repositories that are created; existing ones stay as they are.

    Returns:
        The repositories' ids.

    Raises:
        ConfigurationError: If the directory holds nothing exported, or the name or the login is missing.
    """
    folders = sorted(path for path in directory.glob("*") if (path / "config.json").exists() or _adapter(path))
    if not folders:
        raise ConfigurationError(f"the directory {str(directory)!r} holds no exported model")
    check_hub_id(hub_id)
    hub, pushed = HfApi(), []
    for folder in folders:
        repository = f"{hub_id}-{folder.name}"
        hub.create_repo(repository, private=private, exist_ok=True)
        adapter = _adapter(folder) or {}
        base = adapter.get("base_model_name_or_path")
        if base and (Path(base).is_absolute() or Path(base).is_dir()):
            # No path of this machine is published; the card says how to load the adapter then.
            adapter["base_model_name_or_path"] = Path(base).name
            content = json.dumps(adapter, indent=2).encode()
            hub.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[_ADAPTER_CONFIG])
            hub.upload_file(repo_id=repository, path_or_fileobj=content, path_in_repo=_ADAPTER_CONFIG)
        else:
            hub.upload_folder(repo_id=repository, folder_path=folder)
        pushed.append(repository)
    rank_zero_info(f"uploaded to the hub: {', '.join(pushed)}")
    return pushed


def _adapter(folder: Path) -> dict[str, Any] | None:
    path = folder / _ADAPTER_CONFIG
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
