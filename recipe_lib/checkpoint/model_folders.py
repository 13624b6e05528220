"""Find the files of a model folder that hold its weights, without opening them. No torch.

`find_weights` reads the index of a checkpoint folder; `find_exported_folder` finds the model or
adapter that a run has written. The kinds that a model can be exported in are here too, since the
command line lists them without loading torch.
"""

import os
from pathlib import Path
from typing import Any

from recipe_lib.config.local_files import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    CONFIG_FILE,
    MODEL_FOLDER,
    STATE_FOLDER,
    STATE_MANIFEST,
)
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.models.spec import describe_other_weights
from recipe_lib.reading import read_json, suggest_remedy
from recipe_lib.units import MIB

INDEX = "model.safetensors.index.json"  # says which file has which tensor, if there are several
SINGLE = "model.safetensors"  # the only file of a model without an index
MAX_INDEX_BYTES = 64 * MIB  # the largest that is read
GGUF_KINDS = ("f16", "bf16", "f32", "q8_0", "q4_k_m")  # types of weights for `tune export --gguf`
ADAPTER_KINDS = ("f16", "bf16", "f32")  # those for an adapter alone
QUANTIZED_KINDS = ("int4", "int8")  # types of weights for `tune export --quantize`
GROUP_SIZE = 32  # by default, weights of a row that share a scale in int4


def has_weights(folder: Path) -> bool:
    """Return True if a folder has weights, or an index of them; False: its config.json at most."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def find_weights(folder: Path) -> dict[str, str]:
    """Return tensor -> name of its file, as the folder's index has them.

    Empty if the folder has the single file model.safetensors. Raises CheckpointError if there are
    no weights, and for an index that cannot be read or names files that are missing or elsewhere.
    """
    # transformers prefers the single file too where a folder has both.
    if (folder / SINGLE).is_file():
        return {}
    if not (folder / INDEX).is_file():
        fault = (
            f"{folder}: has neither {SINGLE} nor {INDEX}; download the weights with `tune download`"
        )
        raise CheckpointError(describe_other_weights(folder, SINGLE) or fault)
    index = _read_index(folder / INDEX)
    for name in sorted(set(index.values())):
        # An index comes with a checkpoint and may not name files elsewhere. Links are the user's.
        is_plain = name == Path(name).name and "\\" not in name and "\0" not in name
        if not (is_plain and name.endswith(".safetensors")):
            raise CheckpointError(
                f"{folder / INDEX}: names the file {show(name)!r}; expected plain names of"
                " .safetensors files in its own folder; take the checkpoint from a source you"
                " trust"
            )
        if not os.path.exists(folder / name):
            raise CheckpointError(
                f"{folder / INDEX}: names {show(name)}, which is missing; download it with `tune"
                " download`"
            )
    return index


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: Any = read_json(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); {suggest_remedy(error)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a readable JSON file; download it again") from error
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    is_map = isinstance(weight_map, dict) and bool(weight_map)
    if not is_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: has no weight_map of names to files; download it again")
    return weight_map


def find_exported_folder(folder: Path) -> Path:
    """Return the folder of a model or adapter, given it or the output_dir of the run that wrote it.

    In an output_dir it is the newer one of the run's model and adapter. A folder that is none of
    these is returned as it is. Raises CheckpointError for a run that has written neither, and for a
    state.
    """
    if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return folder
    candidates = (folder / MODEL_FOLDER / "config.json", folder / ADAPTER_FOLDER / ADAPTER_CONFIG)
    written = [path for path in candidates if path.is_file()]
    if written:
        # A model that was merged from the adapter is newer, unless the run was resumed since.
        return max(written, key=lambda path: path.stat().st_mtime_ns).parent
    if (folder / STATE_FOLDER).is_dir() or (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{show(str(folder))}: is a run without {MODEL_FOLDER}/ and {ADAPTER_FOLDER}/; write"
            " one from its states with `tune export` (--hf, or --adapter)"
        )
    if (folder / STATE_MANIFEST).is_file():
        raise CheckpointError(
            f"{show(str(folder))}: is a state to resume from, no model; write one with `tune"
            " export` (--hf, --adapter)"
        )
    return folder
