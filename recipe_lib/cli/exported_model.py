"""`tune export WHAT --gguf KIND` and `--quantize KIND`: write a model as others compute with it.

Both start from a model's folder, or a run's, and read back and compare what they write.
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
from recipe_lib.cli.export_trained import CONFIG, find_base, find_export, find_run, write_merged
from recipe_lib.config.local_files import ADAPTER_CONFIG, MODEL_FOLDER, is_hub_snapshot
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
    alone: bool  # the adapter's own folder was named, not its run
    name: str  # that the exported file shows


def find_exported(arguments: argparse.Namespace) -> ExportedModel:
    """Return the model or adapter that CHECKPOINT is, or the newer of a run's.

    Raises CheckpointError.
    """
    named = Path(arguments.checkpoint).expanduser()
    source = find_source(str(named) if named.exists() else arguments.checkpoint, arguments.base)
    if source.adapter is None:
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
        alone=source.adapter is not None and (named / ADAPTER_CONFIG).is_file(),
        name=name,
    )


def choose_export_path(exported: ExportedModel, arguments: argparse.Namespace, ending: str) -> Path:
    """Return the path to write: --out, or next to the folder, its name with the ending.

    Raises ConfigError if something is there.
    """
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif is_hub_snapshot(exported.folder, arguments.checkpoint):
        # Not into the hub's cache.
        out = Path(exported.name + ending)
    else:
        # A run of adapters is merged first: what is written is a model.
        is_merged = exported.adapter and not exported.alone
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

    out: what is exported; the temporary folder is next to it.
    """
    if exported.adapter is None:
        yield exported.folder
        return
    source = find_export(arguments)
    if source.adapter is None:
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: has no adapter; write it from its states with --adapter"
        )
    base = find_base(source, arguments)
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

    Raises CheckpointError, StorageError, and SetupError without the package gguf.
    """
    # First, as merging may take minutes.
    import_gguf()
    exported = find_exported(arguments)
    kind = arguments.gguf
    out = choose_export_path(exported, arguments, f"-{kind}.gguf")
    if exported.adapter is not None and exported.alone:
        if kind not in ADAPTER_KINDS:
            raise CheckpointError(
                f"--gguf: found {kind}, expected one of {', '.join(ADAPTER_KINDS)} for an adapter"
                f" by itself; merge it first (tune export {exported.adapter} --merge), and export"
                " the merged model"
            )
        if arguments.pre:
            raise CheckpointError("--pre: the file of an adapter has no tokenizer; leave it out")
        report = write_gguf_adapter(
            exported.adapter, base=exported.base, out=out, kind=kind, name=exported.name
        )
    else:
        with provide_merged_folder(exported, arguments, out) as folder:
            report = write_gguf_model(folder, out, kind, name=exported.name, pre=arguments.pre)
    print_wrapped(
        f"{'adapter' if exported.alone else 'model'}: {out} ({kind},"
        f" {format_bytes(out.stat().st_size)})"
    )
    for note in report.notes:
        print_wrapped(f"note: {note}")
    print_wrapped(f"check: {report.check}")
    print_next_commands(list_gguf_commands(out, is_adapter=exported.alone))


def export_quantized(arguments: argparse.Namespace) -> None:
    """Write the quantized folder; print what it is and how far it is from the model.

    Raises CheckpointError, StorageError, and SetupError without transformers.
    """
    exported = find_exported(arguments)
    if exported.alone:
        raise CheckpointError(
            f"{exported.adapter}: is an adapter; merge it first (tune export {exported.adapter}"
            " --merge), and quantize the merged model"
        )
    kind = arguments.quantize
    trained = _read_rounding(find_run(arguments.checkpoint))
    # By default as in quantization-aware training, if there was any.
    group_size = trained[1] if trained is not None and trained[0] == "int4" else GROUP_SIZE
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
    if trained is not None:
        print_wrapped(_compare_rounding(trained, kind, group_size))
    print_wrapped(f"check: {report.check}")
    print_next_commands(list_quantized_commands(out))


def _read_rounding(run: Path | None) -> tuple[str, int] | None:
    """Return `qat` and `qat_group_size` of a run's config; None without `qat`."""
    # As the file has them: a recipe of the user's own may have other keys, and is not imported.
    entries = {} if run is None else read_file(run / CONFIG, str(run / CONFIG)).top.entries
    values = {name: entries[name][1].text for name in ("qat", "qat_group_size") if name in entries}
    if values.get("qat", "null") == "null":
        return None
    return values["qat"], int(values.get("qat_group_size", GROUP_SIZE))


def _compare_rounding(trained: tuple[str, int], kind: str, group_size: int) -> str:
    """Return a line on whether the weights are rounded as they were in training."""
    trained_kind, trained_size = trained
    # Only int4 has groups.
    if trained == (kind, group_size if kind == "int4" else trained_size):
        return f"rounded as in training (qat={kind})"
    group = f" qat_group_size={trained_size}" if trained_kind == "int4" else ""
    return f"note: not rounded as in training, which was with qat={trained_kind}{group}"
