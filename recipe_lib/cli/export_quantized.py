"""`tune export WHAT --quantize KIND`: a Hugging Face folder with linears in 4 or 8 bits, opened again and compared."""

import argparse

from recipe_lib.checkpoint.export_kinds import GROUP_SIZE
from recipe_lib.cli.eval_config import config_of_run, run_of
from recipe_lib.cli.exported_model import find_exported, merged_folder, target_of_export
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.files import bytes_in
from recipe_lib.logs import print_wrapped
from recipe_lib.units import format_bytes


def export_quantized(arguments: argparse.Namespace) -> None:
    """Writes the folder and prints what it is and how far it is from the model. CheckpointError, StorageError,
    SetupError without transformers."""
    from recipe_lib.checkpoint.quantized_out import check_quantizable, write_quantized
    from recipe_lib.training.next_commands import print_next, quantized_commands

    found = find_exported(arguments)
    if found.alone:
        raise CheckpointError(
            f"{found.adapter}: is an adapter; merge it first (tune export {found.adapter} --merge), and quantize the "
            "merged model"
        )
    trained = config_of_run(run_of(arguments.checkpoint), arguments.recipe)
    kind, group_size = arguments.quantize, _group_size(arguments, trained)
    if group_size < 1:
        raise CheckpointError(f"--group-size: found {group_size}, expected a number >= 1")
    out = target_of_export(found, arguments, f"-{kind}")
    check_quantizable(found.base, kind, group_size)  # before it is merged
    with merged_folder(found, arguments, out) as folder:
        report = write_quantized(folder, out, kind, group_size)
    scales = f"a scale for {group_size} weights" if kind == "int4" else "a scale for each row"
    print_wrapped(f"model: {out} ({kind}, {scales}, {format_bytes(bytes_in(out))})")
    if kind == "int4":
        print_wrapped("note: torchao keeps codes of 4 bits in a byte each where there is no GPU")
    if trained is not None and trained.qat is not None:
        print_wrapped(_compared(trained, kind, group_size))
    print_wrapped(f"check: {report.check}")
    print_next(quantized_commands(out))


def _group_size(arguments: argparse.Namespace, trained: FullFinetuneConfig | None) -> int:
    """--group-size, or that of a run with qat=int4, or the default."""
    if arguments.group_size is not None:
        return int(arguments.group_size)
    return trained.qat_group_size if trained is not None and trained.qat == "int4" else GROUP_SIZE


def _compared(trained: FullFinetuneConfig, kind: str, group_size: int) -> str:
    """Whether the weights are rounded as they were in training."""
    same = trained.qat == kind and (kind != "int4" or trained.qat_group_size == group_size)
    if same:
        return f"rounded as in training (qat={kind})"
    group = f" qat_group_size={trained.qat_group_size}" if trained.qat == "int4" else ""
    return f"note: not rounded as in training, which was with qat={trained.qat}{group}"
