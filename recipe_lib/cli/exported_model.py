"""Export a model as a GGUF file or a quantized folder: `tune export CHECKPOINT --gguf|--quantize`.

cli/export.py parses the command line and calls `export_gguf(arguments)` or
`export_quantized(arguments)`. Both start from a model's folder, an adapter's, or that of a run with
either, and read back and compare what they write.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipe_lib.checkpoint.gguf.gguf_adapter import write_gguf_adapter, write_gguf_model
from recipe_lib.checkpoint.gguf.gguf_file import import_gguf
from recipe_lib.checkpoint.model_folders import ADAPTER_KINDS, GROUP_SIZE
from recipe_lib.checkpoint.open_exports import check_quantizable, write_quantized
from recipe_lib.checkpoint.tensor_matching import log_left_out
from recipe_lib.cli.arguments import check_output_path
from recipe_lib.cli.export_source import find_base, find_export_source, find_run
from recipe_lib.cli.export_trained import write_merged
from recipe_lib.config.convert_values import is_null
from recipe_lib.config.local_files import ADAPTER_CONFIG, CONFIG_FILE, MODEL_FOLDER, is_hub_snapshot
from recipe_lib.config.read_yaml import read_file
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.files import (
    count_folder_bytes,
    discard,
    make_temporary_path,
    remove_leftovers,
    report_storage_faults,
)
from recipe_lib.generation.source import choose_dtype, find_source
from recipe_lib.logs import print_wrapped
from recipe_lib.models import read_config
from recipe_lib.parallel import DTYPES
from recipe_lib.training.export_model import (
    list_gguf_commands,
    list_quantized_commands,
    print_next_commands,
)
from recipe_lib.units import format_bytes


@dataclass(frozen=True)
class ExportedModel:
    """The model or adapter that CHECKPOINT is."""

    folder: Path  # the model's, or the adapter's
    base: Path  # the folder of the adapter's base; of a model its own
    adapter: Path | None  # the adapter's folder; None for a model
    # CHECKPOINT is the adapter's own folder, not its run's: export it without a base.
    is_adapter_folder: bool
    name: str  # of the model, in the exported file


def find_exported_model(arguments: argparse.Namespace) -> ExportedModel:
    """Return the model or adapter that CHECKPOINT is, or the newer of a run's.

    Raises CheckpointError if CHECKPOINT is no model, adapter or run, or is damaged.
    """
    checkpoint_path = Path(arguments.checkpoint).expanduser()
    source = find_source(
        str(checkpoint_path) if checkpoint_path.exists() else arguments.checkpoint, arguments.base
    )
    if source.adapter is None:
        # Tensors and files of the folder that the export does not use.
        log_left_out(source.spec, source.folder, "export")
    folder = source.adapter or source.folder
    path = folder.absolute()
    if is_hub_snapshot(folder, arguments.checkpoint):
        # The snapshot's folder is named after its commit.
        name = arguments.checkpoint.rpartition("/")[2]
    else:
        # Every run's model is called `model`: its run's name tells more.
        name = path.parent.name if path.name in (MODEL_FOLDER, "adapter") else path.name
    return ExportedModel(
        folder=folder,
        base=source.folder,
        adapter=source.adapter,
        is_adapter_folder=source.adapter is not None
        and (checkpoint_path / ADAPTER_CONFIG).is_file(),
        name=name,
    )


def choose_export_path(exported: ExportedModel, arguments: argparse.Namespace, ending: str) -> Path:
    """Return the path to write: --out, or next to the folder, its name with the ending.

    Raises ConfigError if something is there, or nothing can be written there.
    """
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif is_hub_snapshot(exported.folder, arguments.checkpoint):
        # Not into the hub's cache.
        out = Path(exported.name + ending)
    else:
        # A run of adapters is merged first: what is written is a model.
        is_merged = exported.adapter and not exported.is_adapter_folder
        stem = MODEL_FOLDER if is_merged else exported.folder.absolute().name
        out = exported.folder.parent / (stem + ending)
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; choose another name with --out, or remove it")
    check_output_path("--out", str(out))
    return out


@contextmanager
def provide_merged_folder(
    exported: ExportedModel, arguments: argparse.Namespace, out: Path
) -> Iterator[Path]:
    """Yield the model's folder; of a run of adapters a temporary one, with base and adapter merged.

    out: path of the export. The temporary folder is next to it, and is removed. Raises
    CheckpointError if the adapter cannot be merged, and StorageError if the disk is full.
    """
    if exported.adapter is None:
        yield exported.folder
        return
    # The adapter once more, now with the config of its run, which has the dtype of training.
    source = find_export_source(arguments)
    if source.adapter is None:
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: has no adapter; write it from its states with --adapter"
        )
    base = find_base(source, arguments)
    # An adapter without a run's config: the dtype is that of the base's config.json.
    dtype = (
        DTYPES[source.cfg.dtype]
        if source.cfg is not None
        else choose_dtype("auto", read_config(base))
    )
    # Next to `out`, where leftovers of an export that was killed are looked for.
    merged = out.with_name(f"{out.name}.merged")
    with report_storage_faults():
        remove_leftovers(out.parent, merged.name)
    temporary = make_temporary_path(merged)
    try:
        write_merged(
            source, base=base, adapter=source.adapter, out=temporary, dtype=dtype, out_dtype=dtype
        )
        print_wrapped(f"merged: {source.adapter} into its base, for this export alone")
        yield temporary
    finally:
        discard(temporary)


def export_gguf(arguments: argparse.Namespace) -> None:
    """Write the GGUF file; print what it is, what differs in llama.cpp, and the check.

    Raises CheckpointError for a model or an option that the format does not take, StorageError if
    the file cannot be written, and SetupError without the package gguf.
    """
    # First, as merging may take minutes.
    import_gguf()
    exported = find_exported_model(arguments)
    kind = arguments.gguf
    out = choose_export_path(exported, arguments, f"-{kind}.gguf")
    if exported.adapter is not None and exported.is_adapter_folder:
        if kind not in ADAPTER_KINDS:
            raise CheckpointError(
                f"--gguf: found {kind}, expected one of {', '.join(ADAPTER_KINDS)} for an adapter"
                f" by itself; merge it first (tune export {exported.adapter} --merge), and export"
                " the merged model"
            )
        if arguments.pre:  # llama.cpp's name of the pre-tokenizer
            raise CheckpointError("--pre: the file of an adapter has no tokenizer; leave it out")
        report = write_gguf_adapter(
            exported.adapter, base=exported.base, out=out, kind=kind, name=exported.name
        )
    else:
        with provide_merged_folder(exported, arguments, out) as folder:
            report = write_gguf_model(folder, out, kind, name=exported.name, pre=arguments.pre)
    print_wrapped(
        f"{'adapter' if exported.is_adapter_folder else 'model'}: {out} ({kind},"
        f" {format_bytes(out.stat().st_size)})"
    )
    for note in report.notes:
        print_wrapped(f"note: {note}")
    print_wrapped(f"check: {report.check}")
    print_next_commands(list_gguf_commands(out, is_adapter=exported.is_adapter_folder))


def export_quantized(arguments: argparse.Namespace) -> None:
    """Write the quantized folder; print what it is and how far it is from the model.

    Raises CheckpointError for an adapter alone, a group size that does not fit, or a model that
    torchao cannot quantize, StorageError if the folder cannot be written, and SetupError without
    transformers.
    """
    exported = find_exported_model(arguments)
    if exported.is_adapter_folder:
        raise CheckpointError(
            f"{exported.adapter}: is an adapter; merge it first (tune export {exported.adapter}"
            " --merge), and quantize the merged model"
        )
    kind = arguments.quantize
    qat = _read_qat_settings(find_run(arguments.checkpoint))
    # By default as in quantization-aware training, if there was any.
    group_size = qat.group_size if qat is not None and qat.kind == "int4" else GROUP_SIZE
    if arguments.group_size is not None:
        group_size = arguments.group_size
    if group_size < 1:
        raise CheckpointError(f"--group-size: found {group_size}, expected a number >= 1")
    out = choose_export_path(exported, arguments, f"-{kind}")
    check_quantizable(exported.base, kind, group_size)  # before it is merged
    with provide_merged_folder(exported, arguments, out) as folder:
        report = write_quantized(folder, out=out, kind=kind, group_size=group_size)
    scales = f"a scale for {group_size} weights" if kind == "int4" else "a scale for each row"
    print_wrapped(f"model: {out} ({kind}, {scales}, {format_bytes(count_folder_bytes(out))})")
    if kind == "int4":
        print_wrapped("note: torchao keeps codes of 4 bits in a byte each where there is no GPU")
    if qat is not None:
        print_wrapped(_compare_with_qat(qat, kind, group_size))
    print_wrapped(f"check: {report.check}")
    print_next_commands(list_quantized_commands(out))


@dataclass(frozen=True)
class _QatSettings:
    kind: str  # as the config key `qat`: int4, int8 or fp8
    group_size: int  # weights that share a scale; counts for int4 alone


def _read_qat_settings(run: Path | None) -> _QatSettings | None:
    """Return `qat` and `qat_group_size` of a run's config; None without a run or without `qat`."""
    # From the file's text: a recipe of the user's own may have other keys, and is not imported.
    entries = (
        {} if run is None else read_file(run / CONFIG_FILE, str(run / CONFIG_FILE)).top.entries
    )
    nodes = {name: entries[name][1] for name in ("qat", "qat_group_size") if name in entries}
    if "qat" not in nodes or is_null(nodes["qat"]):
        return None
    group_size = nodes["qat_group_size"].text if "qat_group_size" in nodes else GROUP_SIZE
    return _QatSettings(kind=nodes["qat"].text, group_size=int(group_size))


def _compare_with_qat(qat: _QatSettings, kind: str, group_size: int) -> str:
    """Return a line on whether the weights are rounded as they were in training.

    kind, group_size: those of the export.
    """
    is_same_group = qat.kind != "int4" or qat.group_size == group_size
    if qat.kind == kind and is_same_group:
        return f"rounded as in training (qat={kind})"
    group = f" qat_group_size={qat.group_size}" if qat.kind == "int4" else ""
    return f"note: not rounded as in training, which was with qat={qat.kind}{group}"
