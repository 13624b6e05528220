"""Make what all compared tools start from: a model, an adapter, rows of token ids, a tokenizer.

`gpu_peers.py` makes them once, so that every tool trains the same from the same weights. A row is
one sequence. The tokenizer is for tools that read texts: a text lists the ids of its row.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.peers.cases import ALPHA, RANK, PeerCase
from recipe_lib.adapters.lora import LINEARS
from recipe_lib.checkpoint.adapter_config import make_config_fields
from recipe_lib.checkpoint.adapter_files import TENSOR_FILE
from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import build_spec, read_config, read_preset_config
from recipe_lib.models.weight_names import compute_parameter_shapes

SHARD_BYTES = 4 * 2**30  # of a file of weights, at most
INDEX = "model.safetensors.index.json"


def make_model(preset: str, folder: Path, dtype: torch.dtype) -> None:
    """Make a Hugging Face folder of a Llama preset with random weights, unless it is there."""
    # The index is written last: where it is, the folder is complete.
    if (folder / INDEX).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = read_preset_config(preset)
    spec = build_spec(config, preset)
    device = "cuda" if torch.get_device_module("cuda").is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shapes = compute_parameter_shapes(spec)  # a Llama's names in files are those of its parameters
    shards = _split_into_shards(
        {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    )
    weight_map: dict[str, str] = {}  # tensor's name -> its file
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        shard: dict[str, torch.Tensor] = {}
        for name in names:
            values = torch.ones(shapes[name], dtype=dtype, device=device)
            if not name.endswith("norm.weight"):
                values.normal_(0.0, spec.init_std, generator=generator)
            shard[name] = values.cpu()
            total_bytes += values.nbytes
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _split_into_shards(sizes: dict[str, int]) -> list[list[str]]:
    """Split the names, in order, into files of at most SHARD_BYTES.

    sizes: bytes by tensor's name. A tensor that is larger has a file of its own.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, size in sizes.items():
        if shards[-1] and shard_bytes + size > SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    return shards


def make_adapter(model: Path, folder: Path) -> None:
    """Make a PEFT adapter on all linears of the layers, as PEFT initializes it.

    model: the base's folder. folder: of the adapter. `lora_A` is uniform within 1 / sqrt(inputs),
    `lora_B` zero.
    """
    spec = build_spec(read_config(model), str(model))
    shapes = compute_parameter_shapes(spec)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, int] = {}  # name -> rank
    for number in range(spec.num_layers):
        for owner, child in LINEARS.values():
            name = f"model.layers.{number}.{owner}.{child}"
            outputs, inputs = shapes[f"{name}.weight"]
            bound = 1 / math.sqrt(inputs)
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.empty(RANK, inputs).uniform_(
                -bound, bound, generator=generator
            )
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(outputs, RANK)
            modules[name] = RANK
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    fields = make_config_fields(
        lora,
        str(model),
        ranks=modules,
        target_modules=[child for _, child in LINEARS.values()],
    )
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=1), encoding="utf-8")


def make_tokenizer(size: int, folder: Path) -> None:
    """Make a tokenizer.json in which a token's text is its number: `17 93` is the ids 17 and 93.

    size: of the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {str(number): number for number in range(size)},
            "unk_token": "0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def make_rows(case: PeerCase, size: int, folder: Path) -> dict[str, str]:
    """Make a case's rows of random ids, one for each row of each step.

    size: of the vocabulary. Returns the paths `rows` (an array, int32 `[rows, s]`) and `texts`
    (JSON lines of numbers as text).
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = (case.steps * case.batch_size, case.sequence)
    # The raw stream is the same for any version of numpy.
    stream = np.random.Philox(key=2).random_raw(math.prod(shape))
    # Ids below 3 are special tokens in many vocabularies.
    rows = (3 + stream % np.uint64(size - 3)).astype(np.int32).reshape(shape)
    np.save(folder / "rows.npy", rows)
    lines = [json.dumps({"text": " ".join(map(str, row.tolist()))}) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"rows": str(folder / "rows.npy"), "texts": str(folder / "rows.jsonl")}
