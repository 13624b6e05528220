"""Hugging Face model folders: found, checked, read and written."""

import re
from pathlib import Path

from recipe_lib.checkpoint.hub_files import MODEL_FILES, NEVER
from recipe_lib.checkpoint.weights_in import check_weights, load_weights
from recipe_lib.checkpoint.weights_out import check_room, export_model
from recipe_lib.errors import CheckpointError

__all__ = ["check_room", "check_weights", "export_model", "find_checkpoint", "load_weights"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """The folder of a checkpoint: a path, or a hub id that `tune download` has fetched into the local hub cache.

    Nothing is downloaded. Raises CheckpointError if there is no such folder.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: is a file; expected the folder of a model (config.json and safetensors files)")
    name = str(path_or_hub_id)
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise CheckpointError(f"{name}: no such folder; expected a model folder, or a hub id such as OWNER/NAME")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES, ignore_patterns=NEVER, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and not in the hub cache; fetch it with `tune download {name}`"
        ) from error
