"""`tune export WHAT --quantize KIND`: a Hugging Face folder with linears in 4 or 8 bits, opened again and compared."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from recipe_lib.checkpoint.weight_files import GROUP_SIZE
from recipe_lib.cli.eval_config import CONFIG, run_of
from recipe_lib.cli.exported_model import find_exported, merged_folder, target_of_export
from recipe_lib.config.read_yaml import read_file
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
    kind, trained = arguments.quantize, _rounding_of(run_of(arguments.checkpoint))
    usual = trained.group_size if trained is not None and trained.kind == "int4" else GROUP_SIZE
    group_size = usual if arguments.group_size is None else arguments.group_size
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
    if trained is not None:
        print_wrapped(_compared(trained, kind, group_size))
    print_wrapped(f"check: {report.check}")
    print_next(quantized_commands(out))


@dataclass(frozen=True)
class _Rounding:
    """What a run was trained with: `qat`, and `qat_group_size`."""

    kind: str
    group_size: int


def _rounding_of(run: Path | None) -> _Rounding | None:
    """Of the run's config as it is written, whatever other keys its recipe has; None without `qat`."""
    entries = {} if run is None else read_file(run / CONFIG, str(run / CONFIG)).top.entries
    found = {name: entries[name][1].text for name in ("qat", "qat_group_size") if name in entries}
    if found.get("qat", "null") == "null":
        return None
    return _Rounding(found["qat"], int(found.get("qat_group_size", GROUP_SIZE)))


def _compared(trained: _Rounding, kind: str, group_size: int) -> str:
    """Whether the weights are rounded as they were in training."""
    if trained == _Rounding(kind, group_size if kind == "int4" else trained.group_size):
        return f"rounded as in training (qat={kind})"
    group = f" qat_group_size={trained.group_size}" if trained.kind == "int4" else ""
    return f"note: not rounded as in training, which was with qat={trained.kind}{group}"
