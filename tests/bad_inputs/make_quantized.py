"""Makes the bad bases for adapters under tests/bad_inputs/quantized, each with its command; run it from the root.

    python -m tests.bad_inputs.make_quantized

The expected lines beside them are written by hand.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tests.bad_inputs.make_models import tensors, write

ROOT = Path(__file__).parent / "quantized"
COMMAND = (
    "tune run lora_finetune_distributed --config demo/lora lora.quantize_base=nf4 model.path={case}/model "
    "tokenizer.path=examples/demo/tokenizer output_dir={tmp}/out\n"
)
QUERY = "model.layers.0.self_attn.q_proj.weight"


def base_in_4_bits_by_its_config(folder: Path) -> None:
    write(folder, tensors(), quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def base_in_4_bits_by_its_tensors(folder: Path) -> None:
    packed = {QUERY: torch.zeros(32, 1, dtype=torch.uint8), f"{QUERY}.absmax": torch.ones(1)}
    write(folder, tensors() | packed | {f"{QUERY}.quant_map": torch.zeros(16)})


def base_in_8_bits(folder: Path) -> None:
    write(folder, {name: value.to(torch.int8) if "proj" in name else value for name, value in tensors().items()})


def base_in_fp8(folder: Path) -> None:
    write(folder, tensors() | {QUERY: tensors()[QUERY].to(torch.float8_e4m3fn)})


def base_of_another_shape(folder: Path) -> None:
    write(folder, tensors() | {QUERY: torch.zeros(8, 16, dtype=torch.bfloat16)})


def base_cut_short(folder: Path) -> None:
    write(folder, tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-40])


def base_without_a_matrix(folder: Path) -> None:
    write(folder, {name: value for name, value in tensors().items() if "down_proj" not in name})


def adapter_for_a_base(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}) + "\n")


def gguf_for_a_base(folder: Path) -> None:
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")


CASES: list[Callable[[Path], None]] = [
    base_in_4_bits_by_its_config,
    base_in_4_bits_by_its_tensors,
    base_in_8_bits,
    base_in_fp8,
    base_of_another_shape,
    base_cut_short,
    base_without_a_matrix,
    adapter_for_a_base,
    gguf_for_a_base,
]


def main() -> None:
    """Writes every case anew; `expected` files stay."""
    for case in CASES:
        folder = ROOT / case.__name__ / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case(folder)
        (folder.parent / "command").write_text(COMMAND)


if __name__ == "__main__":
    main()
