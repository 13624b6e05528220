"""The model folder that `tune export --gguf` and `--quantize` start from, and the name of what they write."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_lib.cli.export_source import base_of, find_export, write_merged
from recipe_lib.config.local_files import ADAPTER_CONFIG, MODEL_FOLDER, is_hub_snapshot
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.logs import print_wrapped

if TYPE_CHECKING:
    from recipe_lib.generation.source import GenerationSource


@dataclass(frozen=True)
class ExportedModel:
    """What was named: a model's folder, or an adapter's with its base's.

    alone: the adapter's own folder was named, not its run. name: for who looks at the file.
    """

    folder: Path
    base: Path
    adapter: Path | None
    alone: bool
    name: str


def find_exported(arguments: argparse.Namespace) -> ExportedModel:
    """The model or adapter that CHECKPOINT is, or the newer of those of a run. CheckpointError."""
    from recipe_lib.checkpoint.weight_accounts import tell_left_out
    from recipe_lib.generation.source import find_source

    named = Path(arguments.checkpoint).expanduser()
    source: GenerationSource = find_source(str(named) if named.exists() else arguments.checkpoint, arguments.base)
    if source.adapter is None:
        tell_left_out(source.spec, source.folder, "export")
    folder = source.adapter or source.folder
    own = folder.absolute()
    if is_hub_snapshot(folder, arguments.checkpoint):
        name = arguments.checkpoint.rpartition("/")[2]
    else:
        name = own.parent.name if own.name in (MODEL_FOLDER, "adapter") else own.name
    alone = source.adapter is not None and (named / ADAPTER_CONFIG).is_file()
    return ExportedModel(folder, source.folder, source.adapter, alone, name)


def target_of_export(found: ExportedModel, arguments: argparse.Namespace, ending: str) -> Path:
    """Where to write: --out, or next to the folder, its name with the ending. ConfigError: something is there."""
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif is_hub_snapshot(found.folder, arguments.checkpoint):
        out = Path(found.name + ending)
    else:
        own = MODEL_FOLDER if found.adapter and not found.alone else found.folder.absolute().name
        out = found.folder.parent / (own + ending)
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; choose another name with --out, or remove it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: {show(str(out.parent))}: no such folder; make it, or choose another name")
    return out


@contextmanager
def merged_folder(found: ExportedModel, arguments: argparse.Namespace, out: Path) -> Iterator[Path]:
    """The model's folder; of a run of adapters, a temporary one next to `out` with base and adapter merged."""
    if found.adapter is None:
        yield found.folder
        return
    from recipe_lib import files
    from recipe_lib.cli.inference_device import choose_dtype
    from recipe_lib.models import read_config
    from recipe_lib.parallel import DTYPES

    source = find_export(arguments)
    if source.adapter is None:
        raise CheckpointError(f"{show(arguments.checkpoint)}: has no adapter; write it from its states with --adapter")
    base = base_of(source, arguments)
    dtype = DTYPES[source.cfg.dtype] if source.cfg is not None else choose_dtype("auto", read_config(base))
    final = out.with_name(f"{out.name}.merged")
    with files.storage_faults():
        files.remove_leftovers(out.parent, final.name)
    temporary = files.temporary_path(final)
    try:
        write_merged(source, base, source.adapter, temporary, dtype, dtype)
        print_wrapped(f"merged: {source.adapter} into its base, for this export alone")
        yield temporary
    finally:
        files.discard(temporary)
