"""What lies in a run's output folder, and whether a run may start in it. Nothing is written here."""

import os
from pathlib import Path
from typing import Any

from recipe_lib.errors import ConfigError

STATE_FOLDER = "state"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
EARLIER_FOLDER = "earlier"  # of a run that `overwrite_output_dir=true` replaces, until the new model is whole
_HALF_EXCHANGED = ".{}.*.old"  # what an exchange of folders left, if a process ended in its midst


def check_folder(folder: Path) -> None:
    """ConfigError if output_dir is a file, or if nothing can be written there."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        what = "a file" if os.path.exists(folder) else "a link that leads nowhere"
        raise ConfigError(f"output_dir: {folder} is {what}, expected a folder or a new name; choose another output_dir")
    there = folder.absolute()
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {folder}: {there} cannot be written to; choose another output_dir")


def check_earlier_run(cfg: Any) -> None:
    """ConfigError if output_dir holds the work of an earlier run that this one would mix with."""
    folder = Path(cfg.output_dir)
    if cfg.overwrite_output_dir:
        return
    has_state = any((folder / STATE_FOLDER).glob("step_*"))
    kept = any(folder.glob(f"{EARLIER_FOLDER}*/{STATE_FOLDER}/step_*"))
    has_model = any(
        (folder / name).exists() or any(folder.glob(_HALF_EXCHANGED.format(name)))
        for name in (MODEL_FOLDER, ADAPTER_FOLDER)
    )
    if cfg.resume is None and (has_state or has_model or kept):
        held = "saved states" if has_state or (kept and not has_model) else "a trained model"
        remedy = "resume=latest goes on from them, " if has_state else ""
        raise ConfigError(
            f"output_dir: {folder} holds {held} of an earlier run; {remedy}overwrite_output_dir=true replaces what "
            "is there, "
            "or choose another output_dir"
        )
    if cfg.resume == "latest" and has_model and not has_state:
        raise ConfigError(
            f"resume=latest: {folder} holds a trained model and no saved state to go on from; "
            "overwrite_output_dir=true trains "
            "anew, or choose another output_dir (checkpoint.save_every_n_steps saves states)"
        )


def no_whole_state(resume: str, damage: str) -> str:
    """The line for a `resume` folder that cannot be gone on from."""
    return f"resume={resume}: {damage}; expected a whole state folder: resume=latest takes the newest whole one"
