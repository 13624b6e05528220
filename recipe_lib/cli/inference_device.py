"""The device and the dtype that a checkpoint is run with outside of training. Torch is imported with this file."""

from typing import Any

import torch

from recipe_lib.errors import SetupError

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def choose_device(name: str) -> torch.device:
    """The device that `--device` means on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("--device: found cuda, but torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    """The dtype that `--dtype` means; `auto`: the one in config.json, fp32 if it names none."""
    if name == "auto":
        own = {**config, **config.get("text_config", {})}  # multimodal configs have a part for the text
        name = DTYPE_NAMES.get(str(own.get("dtype") or own.get("torch_dtype")), "fp32")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[name]
