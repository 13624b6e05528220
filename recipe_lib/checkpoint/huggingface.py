"""Hugging Face model folders: found, checked, read and written."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from recipe_lib.checkpoint.weights_in import check_weights, load_weights
from recipe_lib.checkpoint.weights_out import check_room, export_model
from recipe_lib.config.local_files import MODEL_FILES, NEVER_DOWNLOADED, model_folder, not_downloaded
from recipe_lib.errors import CheckpointError

__all__ = ["check_room", "check_weights", "export_model", "find_checkpoint", "load_weights"]


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """The folder of a checkpoint: a path, or a hub id that `tune download` has fetched into the local hub cache.

    Nothing is downloaded. Raises CheckpointError if there is no such folder.
    """
    folder = model_folder(path_or_hub_id)
    if folder is not None:
        return folder
    name = str(path_or_hub_id)
    try:
        return Path(
            snapshot_download(name, allow_patterns=MODEL_FILES, ignore_patterns=NEVER_DOWNLOADED, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(not_downloaded(name)) from error
