"""Damage or rewrite a model's safetensors files, on their bytes.

`faults.py` plants faults with these functions. A file is 8 bytes of header length (little-endian),
the header as JSON (by tensor name: dtype, shape, data_offsets), and the bytes of the tensors.
"""

import json
import struct
from pathlib import Path
from typing import Any

# The tensors that are damaged; the messages that `words.py` looks for name them.
_MATRIX = "model.layers.1.mlp.up_proj.weight"
_NORM = "model.layers.1.input_layernorm.weight"


def read(path: Path) -> tuple[dict[str, Any], bytearray]:
    """Read a file; return (header without `__metadata__`, bytes of the tensors)."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, bytearray(content[8 + length :])


def write(path: Path, header: dict[str, Any], content: bytes) -> None:
    """Write a safetensors file; the header's offsets have to fit the content already."""
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def select_tensors(
    header: dict[str, Any], content: bytes | bytearray, names: list[str]
) -> tuple[dict[str, Any], bytes]:
    """Return header and bytes of the named tensors, in their order."""
    selected_header = {}
    selected = bytearray()
    for name in names:
        first, last = header[name]["data_offsets"]
        offsets = [len(selected), len(selected) + last - first]
        selected_header[name] = header[name] | {"data_offsets": offsets}
        selected += content[first:last]
    return selected_header, bytes(selected)


def put_nan(path: Path) -> None:
    """Make the first number of a norm's weight NaN. Raises SystemExit if it is not in fp32."""
    header, content = read(path)
    _check_fp32(header, _NORM)
    first = header[_NORM]["data_offsets"][0]
    content[first : first + 4] = struct.pack("<f", float("nan"))
    write(path, header, bytes(content))


def flip_exponent_bit(path: Path) -> None:
    """Flip the highest exponent bit of a matrix's first number.

    A number below 2 becomes 2^128 times as large. Raises SystemExit if it is not in fp32.
    """
    header, content = read(path)
    _check_fp32(header, _MATRIX)
    content[header[_MATRIX]["data_offsets"][0] + 3] ^= 0x40  # little-endian: the last byte
    write(path, header, bytes(content))


def _check_fp32(header: dict[str, Any], name: str) -> None:
    """Raise SystemExit if a tensor is not in fp32."""
    if header[name]["dtype"] != "F32":
        raise SystemExit(
            f"error: {name}: found {header[name]['dtype']}, expected a model in fp32; give --model"
            " another"
        )


def drop_tensor(path: Path) -> None:
    """Remove one of the matrices from the file."""
    header, content = read(path)
    write(path, *select_tensors(header, content, [name for name in header if name != _MATRIX]))


def split_with_a_missing_shard(folder: Path) -> None:
    """Replace a model's one file by the first of two and an index that names both."""
    path = folder / "model.safetensors"
    header, content = read(path)
    names = list(header)
    half = len(names) // 2
    first = "model-00001-of-00002.safetensors"
    second = "model-00002-of-00002.safetensors"
    write(folder / first, *select_tensors(header, content, names[:half]))
    weights = {name: first if number < half else second for number, name in enumerate(names)}
    index = {"metadata": {"total_size": len(content)}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    path.unlink()


def resize_embedding(path: Path, count: int) -> None:
    """Give the embedding, and an output head that is not tied, `count` rows.

    They are the first rows, or all and zeros behind them. config.json stays as it is.
    """
    header, content = read(path)
    kept = bytearray()
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        part = bytes(content[first:last])
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows, width = entry["shape"]
            row = len(part) // rows
            part = part[: row * count] + bytes(row * max(0, count - rows))
            entry["shape"] = [count, width]
        entry["data_offsets"] = [len(kept), len(kept) + len(part)]
        kept += part
    write(path, header, bytes(kept))


def make_mixture(folder: Path, experts: int) -> None:
    """Make a Mixtral of a Llama: each layer's MLP becomes `experts` copies of itself.

    A router needs some weights that differ by expert: it gets the embedding's first rows. Weights
    and config.json are rewritten. Raises SystemExit if a weight is not in fp32.
    """
    path = folder / "model.safetensors"
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    header, content = read(path)
    _check_fp32(header, _MATRIX)
    parts = {name: bytes(content[slice(*entry["data_offsets"])]) for name, entry in header.items()}
    shapes = {name: entry["shape"] for name, entry in header.items()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for old, new in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
            # Llama's names of the MLP's matrices -> Mixtral's.
            part = parts.pop(f"{prefix}mlp.{old}.weight")
            shape = shapes.pop(f"{prefix}mlp.{old}.weight")
            for expert in range(experts):
                name = f"{prefix}block_sparse_moe.experts.{expert}.{new}.weight"
                parts[name] = part
                shapes[name] = shape
        width = config["hidden_size"]
        name = f"{prefix}block_sparse_moe.gate.weight"
        parts[name] = parts["model.embed_tokens.weight"][: 4 * experts * width]  # 4 bytes: fp32
        shapes[name] = [experts, width]
    offset = 0
    entries = {}
    for name, part in parts.items():
        entries[name] = {
            "dtype": "F32",
            "shape": shapes[name],
            "data_offsets": [offset, offset + len(part)],
        }
        offset += len(part)
    write(path, entries, b"".join(parts.values()))
    config |= {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
    }
    config_file.write_text(json.dumps(config | {"num_experts_per_tok": 2}), encoding="utf-8")
