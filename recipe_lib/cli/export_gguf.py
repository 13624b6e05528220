"""`tune export WHAT --gguf KIND`: one file for llama.cpp, Ollama and others, read back and compared."""

import argparse
from pathlib import Path

from recipe_lib.checkpoint.weight_files import ADAPTER_KINDS
from recipe_lib.cli.exported_model import ExportedModel, find_exported, merged_folder, target_of_export
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import print_wrapped
from recipe_lib.units import format_bytes


def export_gguf(arguments: argparse.Namespace) -> None:
    """Writes the file and prints what it is, what differs in llama.cpp, and the check. CheckpointError, StorageError,
    SetupError without the package."""
    from recipe_lib.checkpoint.gguf import write_gguf_adapter, write_gguf_model
    from recipe_lib.checkpoint.gguf.gguf_file import package
    from recipe_lib.training.next_commands import gguf_commands, print_next

    package()
    found = find_exported(arguments)
    kind = arguments.gguf
    out = target_of_export(found, arguments, f"-{kind}.gguf")
    if found.adapter is not None and found.alone:
        _refuse_kind(found, arguments)
        report = write_gguf_adapter(found.adapter, found.base, out, kind, name=found.name)
    else:
        with merged_folder(found, arguments, out) as folder:
            report = write_gguf_model(folder, out, kind, name=found.name, pre=arguments.pre)
    print_wrapped(f"{'adapter' if found.alone else 'model'}: {out} ({kind}, {format_bytes(out.stat().st_size)})")
    for note in report.notes:
        print_wrapped(f"note: {note}")
    print_wrapped(f"check: {report.check}")
    print_next(gguf_commands(out, is_adapter=found.alone))


def _refuse_kind(found: ExportedModel, arguments: argparse.Namespace) -> None:
    folder: Path | None = found.adapter
    if arguments.gguf not in ADAPTER_KINDS:
        raise CheckpointError(
            f"--gguf: found {arguments.gguf}, expected one of {', '.join(ADAPTER_KINDS)} for an adapter by itself; "
            f"merge it first (tune export {folder} --merge), and export the merged model"
        )
    if arguments.pre:
        raise CheckpointError("--pre: the file of an adapter has no tokenizer; leave it out")
