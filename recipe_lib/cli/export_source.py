"""Find the adapter or the state that CHECKPOINT of `tune export` names, its run and its base.

`find_export_source(arguments)` reads folders only: nothing is loaded or written. A state is a
folder to resume from, state/step_N; `arguments` is the parsed command line.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe_lib.checkpoint.adapter_config import read_adapter_config
from recipe_lib.checkpoint.adapter_files import BASE_IMPLEMENTATION, read_adapter
from recipe_lib.checkpoint.huggingface import find_adapter_base, find_checkpoint
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.resumable_state import find_state
from recipe_lib.checkpoint.run_files import find_best_state, read_record
from recipe_lib.cli.recipes import load_run_config
from recipe_lib.config.local_files import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    BEST_FOLDER,
    CONFIG_FILE,
    MODEL_FOLDER,
    STATE_FOLDER,
    STATE_MANIFEST,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import print_wrapped


@dataclass(frozen=True)
class ExportSource:
    """The adapter or the state that CHECKPOINT names; of a run, the one to export."""

    run: Path | None = None  # output_dir of the run that it is in; None: it is in no run's folder
    cfg: Any = None  # config of the run that made it; None: not known
    records: Path | None = None  # folder with that config and the run's metrics; None: not known
    # One of these two is set, once it is found.
    adapter: Path | None = None  # the adapter's folder; None: it is a state
    state: Path | None = None  # the state's folder; None: it is an adapter


def find_run(name: str) -> Path | None:
    """Return a run's output_dir, given itself or its model/ or adapter/; None for other folders."""
    folder = Path(name).expanduser()
    if (folder / CONFIG_FILE).is_file():
        return folder
    if (
        folder.absolute().name in (MODEL_FOLDER, ADAPTER_FOLDER)
        and (folder.absolute().parent / CONFIG_FILE).is_file()
    ):
        return folder.absolute().parent
    return None


def find_export_source(arguments: argparse.Namespace) -> ExportSource:
    """Find the adapter or state that CHECKPOINT names; verify the hashes of a state.

    Of a run it is the exported adapter, else (and with --hf) the best or newest state. Raises
    CheckpointError if there is none or it is damaged, ConfigError for an invalid config of the run.
    """
    path = Path(arguments.checkpoint).expanduser()
    # `.` and `..` have no name and no parent to find their run by.
    path = path.resolve() if path.name in ("", "..") else path
    name = show(arguments.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{name}: no such folder; expected a run's output_dir, a state/step_N, or an adapter"
        )
    if (path / ADAPTER_CONFIG).is_file():
        # The run's records tell of the adapter in its adapter/, not of a copy under another name.
        source = _open_run(path.parent, arguments, adapter=path.name == ADAPTER_FOLDER)
        return replace(source, adapter=path)
    if (path / STATE_MANIFEST).is_file():  # in each state: its files with their hashes
        # OUTPUT_DIR/state/step_N, or OUTPUT_DIR/state/best/step_N.
        is_best = path.absolute().parent.name == BEST_FOLDER
        folder = path.parent.parent.parent if is_best else path.parent.parent
        source = _open_run(folder, arguments)
        if source.cfg is None:
            raise CheckpointError(
                f"{name}: {CONFIG_FILE} of its run is missing; expected the state inside its"
                " output_dir"
            )
        return replace(source, state=find_state(path.parent, str(path), SingleRank()))
    source = _open_run(path, arguments)
    if source.run is None:
        is_model = (path / "config.json").is_file()
        reason = "is a model folder already" if is_model else "is no run, state or adapter"
        raise CheckpointError(
            f"{name}: {reason}; expected a run's output_dir, a state/step_N, or an adapter's folder"
        )
    adapter = path / ADAPTER_FOLDER
    has_adapter = (adapter / ADAPTER_CONFIG).is_file()
    if has_adapter and not arguments.hf:
        source = _open_run(path, arguments, adapter=True)
        states = {  # time of writing -> folder
            file.stat().st_mtime: file.parent
            for file in path.glob(f"{STATE_FOLDER}/step_*/{STATE_MANIFEST}")
        }
        # Newer states: the run was resumed after it exported its adapter, and has not ended.
        if states and max(states) > (adapter / ADAPTER_CONFIG).stat().st_mtime:
            print_wrapped(
                f"note: {states[max(states)]} is newer than {adapter}, which is taken; name the"
                " state to export it"
            )
        return replace(source, adapter=adapter)
    has_states = (path / STATE_FOLDER).is_dir()
    state = _find_state_of_run(path / STATE_FOLDER, source.cfg) if has_states else None
    if state is None:
        reason = (
            "holds neither an adapter nor a state; run it again, with checkpoint.save_every_n_steps"
            " to have states"
        )
        if (path / MODEL_FOLDER / "config.json").is_file():
            reason = (
                f"has no state to export; {path / MODEL_FOLDER} is its trained model, exported"
                " already"
            )
        elif has_adapter:
            reason = "is a run of adapters; --hf is for runs that trained all weights, use --merge"
        raise CheckpointError(f"{name}: {reason}")
    return replace(source, state=state)


def _open_run(folder: Path, arguments: argparse.Namespace, adapter: bool = False) -> ExportSource:
    """Return a source with a run's folder, config and records, still without what to export.

    It is empty for a folder without a run's config. adapter: return the records of the run that
    made the folder's adapter, which may be an earlier run in the same folder.
    """
    records = folder
    output_record = read_record(folder) if adapter else None
    # `earlier`: exports that a later run in this folder has not replaced yet. `kept`: where the
    # records of the run that made them are now.
    if output_record is not None and ADAPTER_FOLDER in output_record.earlier and output_record.kept:
        records = folder / output_record.kept[0]
        print_wrapped(
            f"note: {folder / ADAPTER_FOLDER} is of the run before the one in {folder}; see"
            f" {records}"
        )
    if not (records / CONFIG_FILE).is_file():
        return ExportSource()
    cfg = load_run_config(records / CONFIG_FILE, arguments.recipe)
    return ExportSource(run=folder, cfg=cfg, records=records)


def _find_state_of_run(root: Path, cfg: Any) -> Path | None:
    """Return the best state of a run with checkpoint.keep_best, else the newest; None: no state."""
    best = find_best_state(root) if cfg.checkpoint.keep_best else None
    if best is None:
        return find_state(root, "latest", SingleRank())
    print_wrapped(f"note: {best} is the best step of the run, and is taken")
    for manifest in root.glob(f"{BEST_FOLDER}/step_*/{STATE_MANIFEST}"):
        path = manifest.parent
        if path != best and path.stat().st_mtime > best.stat().st_mtime:
            print_wrapped(
                f"note: {path} is newer, of steps after the last state; name it to export it"
            )
    return find_state(best.parent, str(best), SingleRank())


def get_implementation(source: ExportSource) -> str | None:
    """Return the `model.implementation` of the run or of the adapter's file; None: not known."""
    if source.cfg is not None:
        return str(source.cfg.model.implementation)
    if source.adapter is None:
        return None
    return read_adapter(source.adapter).metadata.get(BASE_IMPLEMENTATION)


def find_base(source: ExportSource, arguments: argparse.Namespace) -> Path:
    """Return the base's folder: by --base, else by the adapter's files, else by the run's config.

    Raises CheckpointError if none of them names one, or it is not on this machine.
    """
    if arguments.base:
        return find_checkpoint(arguments.base)
    # The adapter's file names the base independently of the current folder; the config may have a
    # path relative to where the run was started.
    name = "" if source.adapter is None else read_adapter_config(source.adapter).base
    if source.cfg is not None and not name:
        model = source.cfg.model
        return find_adapter_base(
            arguments.checkpoint, model.path or str(model.preset), is_preset=not model.path
        )
    if not name:
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: adapter_config.json names no base; give it with --base"
        )
    return find_adapter_base(arguments.checkpoint, name)
