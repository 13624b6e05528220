"""Make checkpoint folders with one fault, and compare how we and transformers load them.

`explain_unaccounted(folder, fault)` returns why a user could not rely on the outcome: every tensor
has to be used as transformers uses it, named in the log, or refused.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe_lib.checkpoint.huggingface import check_weights, load_weights
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config, read_spec
from recipe_lib.models.meta_init import allocate

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, Tensor]
_TOKENS = torch.arange(3, 17).view(2, 7)  # that logits are compared on


@dataclass
class Fault:
    """The changes that a folder gets."""

    # Changes the tensors (by name) and config.json in place.
    change: Callable[[Tensors, dict[str, Any]], None] = lambda tensors, config: None
    names: tuple[str, ...] = ()  # tensors or files: a refusal or the log has to name one of them
    files: tuple[str, ...] = ()  # names of further files, copies of the weights without the change
    # Returns the tensors of each file by its name, for a folder with an index; None: one file.
    shards: Callable[[Tensors], dict[str, Tensors]] | None = None
    # Changes the index (the file of each tensor, by its name) in place.
    index: Callable[[dict[str, str]], None] = lambda names: None


@dataclass
class Outcome:
    """How loading a folder ended."""

    refused: tuple[str, ...] = ()  # lines of the refusal; empty if it was loaded
    logits: Tensor | None = None  # of _TOKENS; None if it was refused
    said: list[str] = field(default_factory=list)  # lines of the log


def make_folder(source: Path, fault: Fault, folder: Path) -> None:
    """Copy the model folder `source`, which has one file of weights, and put the fault in."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    fault.change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    for name in fault.files:
        shutil.copyfile(source / SINGLE, folder / name)
    if fault.shards is None:
        save_file(tensors, folder / SINGLE, {"format": "pt"})
        return
    (folder / SINGLE).unlink()
    shards = fault.shards(tensors)
    weight_map: dict[str, str] = {}
    for file, shard in shards.items():
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    fault.index(weight_map)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@torch.no_grad()
def load(folder: Path, implementation: str = "native") -> Outcome:
    """Load a folder as a run and `tune generate` do, and compute logits.

    implementation: "native" for our decoder, "transformers" for its own code.
    """
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("tune")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        spec = read_spec(read_config(folder), str(folder), implementation)
        check_weights(spec, folder)
        model = build_meta(spec, torch.float32)
        allocate(model, torch.device("cpu"))
        load_weights(model, spec, folder)
        logits = model.eval()(_TOKENS)
    except CheckpointError as error:
        return Outcome(refused=tuple(str(error).splitlines()))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return Outcome(logits=logits, said=[record.getMessage() for record in records])


@torch.no_grad()
def load_theirs(folder: Path) -> Tensor:
    """Return the logits of the model that transformers loads.

    Weights that it does not find are random, so that the logits differ from ours.
    """
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()(_TOKENS).logits


def explain_unaccounted(folder: Path, fault: Fault, implementation: str = "native") -> str | None:
    """Return why a user cannot rely on the outcome; None if all tensors are accounted for."""
    outcome = load(folder, implementation)
    if outcome.refused:
        text = "\n".join(outcome.refused)
        if not any(name in text for name in fault.names):
            return f"refused without a name of {fault.names}: {text}"
        # By convention an error is `problem; remedy`.
        if not all("; " in line for line in outcome.refused):
            return f"refused without a remedy: {text}"
        return None
    assert outcome.logits is not None
    theirs = load_theirs(folder)
    difference = float((outcome.logits - theirs).abs().max())
    if not difference <= 1e-5 * max(1.0, float(theirs.abs().max())):
        return f"other logits than transformers', by {difference}; said {outcome.said}"
    lines = [
        line for line in outcome.said if "left out" in line or "not read" in line or "keep" in line
    ]
    text = "\n".join(lines)
    # Lines may name the tensors of all layers at once.
    patterns = [re.sub(r"\.\d+\.", ".*.", name) for name in fault.names]
    is_named = any(name in text for name in (*fault.names, *patterns))
    if fault.names and not is_named and not _is_used(outcome, folder, fault, implementation):
        return f"nothing says {fault.names}: {outcome.said}"
    return None


def _is_used(outcome: Outcome, folder: Path, fault: Fault, implementation: str) -> bool:
    """Return True if other values in the fault's tensors give other logits than `outcome` has."""
    files = [path for path in folder.glob("model*.safetensors") if path.name not in fault.files]
    for path in files:
        tensors = load_file(path)
        names = set(tensors) & set(fault.names)
        if names:
            changed = folder.with_name(folder.name + "-changed")
            shutil.rmtree(changed, ignore_errors=True)
            shutil.copytree(folder, changed)
            for name in names:
                tensors[name] = tensors[name].float() * -1.5
            save_file(tensors, changed / path.name, {"format": "pt"})
            logits = load(changed, implementation).logits
            assert outcome.logits is not None
            return logits is not None and not torch.equal(logits, outcome.logits)
    return False
