"""Makes the bad model folders under tests/bad_inputs/models, each with its command; run it from the repository root.

    python tests/bad_inputs/make_models.py

The expected lines beside them are written by hand.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

ROOT = Path(__file__).parent / "models"
COMMAND = (
    "tune run full_finetune_distributed --config demo/full model.preset=null model.path={case}/model "
    "output_dir={tmp}/out\n"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 12,
}
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    """Every weight of CONFIG's model."""
    layer = "model.layers.0."
    square = {f"{layer}self_attn.{part}_proj.weight": (8, 8) for part in "qkvo"}
    square |= {f"{layer}mlp.{part}_proj.weight": (8, 8) for part in ("gate", "up", "down")}
    norms = {f"{layer}input_layernorm.weight": (8,), f"{layer}post_attention_layernorm.weight": (8,)}
    outer = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,), "lm_head.weight": (12, 8)}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in (outer | square | norms).items()
    }


def write(folder: Path, weights: dict[str, torch.Tensor] | bytes | None, **changes: Any) -> None:
    """config.json with changes, and one file of weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=2) + "\n")
    if weights is not None:
        data = weights if isinstance(weights, bytes) else save(weights, {"format": "pt"})
        (folder / "model.safetensors").write_bytes(data)


def write_sharded(folder: Path) -> dict[str, str]:
    """Two files and their index, all right; returns the weight map."""
    write(folder, None)
    everything = tensors()
    names = list(everything)
    weight_map = {}
    for number, part in enumerate((names[:6], names[6:]), start=1):
        file_name = f"model-{number:05d}-of-00002.safetensors"
        (folder / file_name).write_bytes(save({name: everything[name] for name in part}, {"format": "pt"}))
        weight_map |= dict.fromkeys(part, file_name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """The index file."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")


def missing_tensors(folder: Path) -> None:
    weights = tensors()
    for part in ("q", "k", "v"):
        del weights[f"model.layers.0.self_attn.{part}_proj.weight"]
    write(folder, weights)


def unknown_tensors(folder: Path) -> None:
    write(folder, tensors() | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16)})


def other_shape(folder: Path) -> None:
    write(folder, tensors(), vocab_size=16)


def several_faults(folder: Path) -> None:
    weights = tensors()
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:, :4].contiguous()
    write(folder, weights)


def quantized_tensors(folder: Path) -> None:
    weights = tensors()
    for name in weights:
        if "mlp" in name:
            weights[name] = torch.zeros(8, 8, dtype=torch.uint8)
    write(folder, weights)


def quantized_config(folder: Path) -> None:
    write(folder, tensors(), quantization_config={"quant_method": "gptq", "bits": 4})


def other_architecture(folder: Path) -> None:
    write(folder, tensors(), model_type="mamba", architectures=["MambaForCausalLM"])


def no_config(folder: Path) -> None:
    write(folder, tensors())
    (folder / "config.json").unlink()


def only_pickled_weights(folder: Path) -> None:
    write(folder, None)
    (folder / "pytorch_model.bin").write_bytes(b"not read by anyone\n")


def only_gguf(folder: Path) -> None:
    (folder / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF, read by nobody\n")


def only_consolidated_pth(folder: Path) -> None:
    (folder / "params.json").write_text('{"dim": 8, "n_layers": 1}\n')
    for part in range(2):
        (folder / f"consolidated.{part:02}.pth").write_bytes(b"read by nobody\n")


def only_consolidated_safetensors(folder: Path) -> None:
    write(folder, None)
    (folder / "consolidated.safetensors").write_bytes(save(tensors(), {"format": "pt"}))


def parts_without_index(folder: Path) -> None:
    write_sharded(folder)
    (folder / INDEX).unlink()


def no_weights(folder: Path) -> None:
    write(folder, None)


def missing_file(folder: Path) -> None:
    write_sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_of_other_files(folder: Path) -> None:
    weight_map = write_sharded(folder)
    first = weight_map["model.embed_tokens.weight"]
    for part in ("gate", "up"):
        weight_map[f"model.layers.0.mlp.{part}_proj.weight"] = first
    write_index(folder, weight_map)


def index_without_map(folder: Path) -> None:
    write_sharded(folder)
    (folder / INDEX).write_text('{"metadata": {}}\n')


def path_out_of_the_folder(folder: Path) -> None:
    weight_map = write_sharded(folder)
    write_index(folder, weight_map | {"lm_head.weight": "../../../../weights.safetensors"})


def cut_short(folder: Path) -> None:
    write(folder, save(tensors(), {"format": "pt"})[:-300])


def git_lfs_pointer(folder: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    write(folder, text.encode())


def header_too_long(folder: Path) -> None:
    write(folder, struct.pack("<Q", 2**40) + b"{}" + b"\0" * 64)


def overlapping_tensors(folder: Path) -> None:
    header = {
        "lm_head.weight": {"dtype": "BF16", "shape": [12, 8], "data_offsets": [0, 192]},
        "model.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [100, 116]},
    }
    text = json.dumps(header).encode()
    write(folder, struct.pack("<Q", len(text)) + text + b"\0" * 192)


CASES: list[Callable[[Path], None]] = [
    missing_tensors, unknown_tensors, other_shape, several_faults, quantized_tensors, quantized_config,
    other_architecture, no_config, only_pickled_weights, only_gguf,
    only_consolidated_pth, only_consolidated_safetensors, parts_without_index, no_weights, missing_file, index_of_other_files,
    index_without_map, path_out_of_the_folder, cut_short, git_lfs_pointer, header_too_long, overlapping_tensors,
]  # fmt: skip


def main() -> None:
    """Writes every case anew; `expected` files are left as they are."""
    for make in CASES:
        case = ROOT / make.__name__
        shutil.rmtree(case / "model", ignore_errors=True)
        (case / "model").mkdir(parents=True)
        make(case / "model")
        (case / "command").write_text(COMMAND)
    no_folder = ROOT / "no_such_folder"
    no_folder.mkdir(parents=True, exist_ok=True)
    (no_folder / "command").write_text("tune generate no-such-folder --prompt x\n")
    file = ROOT / "a_file"
    (file / "model").mkdir(parents=True, exist_ok=True)
    (file / "model" / "weights.txt").write_text("not a folder\n")
    (file / "command").write_text("tune generate {case}/model/weights.txt --prompt x\n")


if __name__ == "__main__":
    main()
