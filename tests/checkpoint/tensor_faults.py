"""Checkpoint folders with one thing wrong or unusual, and what loading them comes to, here and in
transformers.
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

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, Tensor]
_TOKENS = torch.arange(3, 17).view(2, 7)


@dataclass
class Fault:
    """A folder's change. change: the tensors and the config, in place. names: what a refusal or a
    line has to name.

    files: more files of the folder, by name; `b""` stands for a copy of the weights. shards:
    tensors of each file, in place of one file; index: what the index says otherwise than the files.
    """

    change: Callable[[Tensors, dict[str, Any]], None] = lambda tensors, config: None
    names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    shards: Callable[[Tensors], dict[str, Tensors]] | None = None
    index: Callable[[dict[str, str]], None] = lambda names: None


@dataclass
class Outcome:
    """What became of a folder: the lines of its refusal, or logits and the lines of the log."""

    refused: tuple[str, ...] = ()
    logits: Tensor | None = None
    said: list[str] = field(default_factory=list)


def make_folder(source: Path, fault: Fault, folder: Path) -> None:
    """Copies a model folder of one file, with the fault."""
    shutil.copytree(source, folder)
    tensors, config = load_file(folder / SINGLE), json.loads((folder / "config.json").read_text())
    fault.change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    for name in fault.files:
        shutil.copyfile(source / SINGLE, folder / name)
    if fault.shards is None:
        save_file(tensors, folder / SINGLE, {"format": "pt"})
        return
    (folder / SINGLE).unlink()
    shards = fault.shards(tensors)
    names = {name: file for file, held in shards.items() for name in held}
    fault.index(names)
    for file, held in shards.items():
        save_file(held, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@torch.no_grad()
def load(folder: Path, implementation: str = "native") -> Outcome:
    """Loads it as a run and `tune generate` do."""
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
    """The logits of what transformers loads; what it has to make up is random, and so differs."""
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()(_TOKENS).logits


def explain_unaccounted(folder: Path, fault: Fault, implementation: str = "native") -> str | None:
    """Why the outcome is none that a user can rely on; None: all is used as transformers does,
    said, or refused.
    """
    outcome = load(folder, implementation)
    if outcome.refused:
        text = "\n".join(outcome.refused)
        if not any(name in text for name in fault.names):
            return f"refused without a name of {fault.names}: {text}"
        return (
            None
            if all("; " in line for line in outcome.refused)
            else f"refused without a remedy: {text}"
        )
    assert outcome.logits is not None
    theirs = load_theirs(folder)
    difference = float((outcome.logits - theirs).abs().max())
    if not difference <= 1e-5 * max(1.0, float(theirs.abs().max())):
        return f"other logits than transformers', by {difference}; said {outcome.said}"
    lines = [
        line for line in outcome.said if "left out" in line or "not read" in line or "keep" in line
    ]
    shown = "\n".join(lines)
    said = any(re.sub(r"\.\d+\.", ".*.", name) in shown or name in shown for name in fault.names)
    if fault.names and not said and not _is_used(outcome, folder, fault, implementation):
        return f"nothing says {fault.names}: {outcome.said}"
    return None


def _is_used(outcome: Outcome, folder: Path, fault: Fault, implementation: str) -> bool:
    """Whether the tensors that the fault is about are what the model has: other numbers in them,
    other logits.
    """
    files = [path for path in folder.glob("model*.safetensors") if path.name not in fault.files]
    for path in files:
        tensors = load_file(path)
        held = set(tensors) & set(fault.names)
        if held:
            changed = folder.with_name(folder.name + "-changed")
            shutil.rmtree(changed, ignore_errors=True)
            shutil.copytree(folder, changed)
            for name in held:
                tensors[name] = tensors[name].float() * -1.5
            save_file(tensors, changed / path.name, {"format": "pt"})
            other = load(changed, implementation)
            assert outcome.logits is not None
            return other.logits is not None and not torch.equal(other.logits, outcome.logits)
    return False
