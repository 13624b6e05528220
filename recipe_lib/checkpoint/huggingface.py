"""Hugging Face model folders: found, checked, read and written."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from recipe_lib.checkpoint.model_export import check_room, export_model
from recipe_lib.checkpoint.tensor_matching import check_weights
from recipe_lib.checkpoint.weight_loading import load_weights
from recipe_lib.config.local_files import (
    MODEL_FILES,
    NEVER_DOWNLOADED,
    describe_missing_model,
    find_model_folder,
)
from recipe_lib.config.paths import list_presets
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError

__all__ = [
    "check_room",
    "check_weights",
    "export_model",
    "find_adapter_base",
    "find_checkpoint",
    "load_weights",
]


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """The folder of a checkpoint: a path, or a hub id that `tune download` has fetched into the
    local hub cache.

    Nothing is downloaded. Raises CheckpointError if there is no such folder.
    """
    folder = find_model_folder(path_or_hub_id)
    if folder is not None:
        return folder
    name = str(path_or_hub_id)
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=MODEL_FILES,
                ignore_patterns=NEVER_DOWNLOADED,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(describe_missing_model(name)) from error


def find_adapter_base(folder: str | Path, name: str, *, is_preset: bool = False) -> Path:
    """The folder of the base that an adapter in `folder` names, perhaps by a path of another
    machine. CheckpointError.

    is_preset: it is known to be an architecture; else that is seen by its name, where no folder has
    it.
    """
    try:
        if not is_preset:
            return find_checkpoint(name)
    except CheckpointError as error:
        if name not in list_presets() and not name.endswith(".json"):
            raise CheckpointError(
                f"{show(str(folder))}: its base is {error}, or say where it is with --base"
            ) from error
    raise CheckpointError(
        f"{show(str(folder))}: was trained with random weights (model.preset={name}), which are in"
        " no checkpoint; start from model.path to have an adapter that others can load"
    )
