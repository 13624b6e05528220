"""Which base an adapter belongs to: a mark of the weights that does not depend on how files store them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from recipe_lib.checkpoint.converted import Reader, converted_rows, hold_same_numbers
from recipe_lib.checkpoint.weight_accounts import read_headers
from recipe_lib.errors import CheckpointError
from recipe_lib.models.spec import SCORE, ModelSpec
from recipe_lib.models.weight_names import weight_map

_SAMPLE_COLUMNS = 64


def base_fingerprint(spec: ModelSpec, folder: Path) -> str:
    """A hash of some numbers of every weight, rounded to bf16: the same for files of other types, sizes or layouts."""
    digest = hashlib.sha256()
    found = read_headers(folder)
    entries = [entry for entry in weight_map(spec, found) if entry.our_name != SCORE]  # it is trained
    for entry in sorted(entries, key=lambda entry: entry.our_name):
        if entry.made is not None:
            rows = converted_rows(entry.made, entry.our_name, found)
            digest.update(_mark(entry.our_name, rows[len(rows) // 2 :][:1]))
            continue
        if entry.view is not None:
            middle, *others = entry.view.shape
            rows = (slice(middle // 2, middle // 2 + 1), *(slice(0, 1) for _ in others[1:]))
            with Reader(found) as read:
                digest.update(_mark(entry.our_name, read.opened(entry, torch.bfloat16)[rows]))
            continue
        with safe_open(str(found[entry.file_name].file), framework="pt") as file:
            source = file.get_slice(entry.file_name)
            shape = source.get_shape()
            middle = entry.start + (entry.length or shape[0]) // 2 if shape else 0
            digest.update(_mark(entry.our_name, source[middle : middle + 1] if shape else source[...]))
    return digest.hexdigest()


def _mark(name: str, rows: torch.Tensor) -> bytes:
    """A parameter's name, and the first numbers of some of its rows."""
    sample = rows.flatten()[:_SAMPLE_COLUMNS].to(torch.bfloat16)
    return f"{name} ".encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()


def check_copies(path: Path, copies: Mapping[str, str], spec: ModelSpec, base: Path) -> None:
    """Compares the frozen weights that an adapter's file holds with the base's own. Raises CheckpointError.

    PEFT saves them with an adapted embedding or head. copies: our parameter -> the tensor's name in the file.
    """
    if not copies:
        return
    found = read_headers(base)
    places = {entry.our_name: entry for entry in weight_map(spec, found)}
    for name, copy in copies.items():
        entry = places.get(name) or places["model.embed_tokens.weight"]  # a tied head
        with safe_open(str(path), framework="pt") as file, Reader(found) as read:
            rows = file.get_slice(copy)
            alike = hold_same_numbers(rows, read.opened(entry, rows[:1].dtype))
        if not alike:
            raise CheckpointError(
                f"{path}: {copy} differs from {entry.file_name} of {base}: the adapter was trained on other "
                "weights (a resized or trained embedding); use its own base model"
            )
