"""What a run has written for others. No torch."""

from pathlib import Path

from recipe_lib.config.local_files import ADAPTER_CONFIG, ADAPTER_FOLDER, MODEL_FOLDER, STATE_FOLDER
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError

_MANIFEST = "manifest.json"  # of a state


def exported_folder(folder: Path) -> Path:
    """The folder itself, or what the run whose output_dir it is has written: its model or its adapter, the newer one.

    A model that was merged from an adapter is newer, unless the run was gone on with since.
    """
    if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return folder
    both = (folder / MODEL_FOLDER / "config.json", folder / ADAPTER_FOLDER / ADAPTER_CONFIG)
    written = [path for path in both if path.is_file()]
    if written:
        return max(written, key=lambda path: path.stat().st_mtime_ns).parent
    write = "write one from its states with `tune export` (--hf, or --adapter)"
    if (folder / STATE_FOLDER).is_dir() or (folder / "config.yaml").is_file():
        raise CheckpointError(f"{show(str(folder))}: is a run without {MODEL_FOLDER}/ and {ADAPTER_FOLDER}/; {write}")
    if (folder / _MANIFEST).is_file():
        raise CheckpointError(
            f"{show(str(folder))}: is a state to resume from, no model; write one with `tune export` (--hf, --adapter)"
        )
    return folder
