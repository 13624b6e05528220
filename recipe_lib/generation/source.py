"""What a name on the command line stands for: a model, an adapter with its base, or the run that
wrote one of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe_lib.checkpoint.adapter_files import (
    BASE_DTYPE,
    BASE_IMPLEMENTATION,
    BASE_STORAGE,
    check_base,
    check_fits,
    read_adapter,
)
from recipe_lib.checkpoint.huggingface import (
    check_weights,
    find_adapter_base,
    find_checkpoint,
    load_weights,
)
from recipe_lib.checkpoint.model_folders import find_exported_folder
from recipe_lib.checkpoint.tokenizer_export import TOKENIZER_FILES
from recipe_lib.checkpoint.verify import load_model_with_adapter
from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.models import Decoder, build_meta, read_config, read_trained_spec
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import ModelSpec

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True)
class GenerationSource:
    """A model on the disk, its headers checked.

    folder: of the model, or of the base of an adapter. adapter: its folder, None without one.
    tokenizer: the folder with the tokenizer. dtype, storage: how the base was kept while the
    adapter was trained, as its file says; empty and `none` if it does not. spec: of the model with
    the adapter; base_spec: of the base of one, as it is in the folder.
    """

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    tokenizer: Path
    adapter: Path | None = None
    dtype: str = ""
    storage: str = "none"
    base_spec: ModelSpec | None = None


def find_source(name: str, base: str | None = None) -> GenerationSource:
    """The model that a folder or a hub id names. base: that of an adapter, in place of the one it
    names.

    Raises CheckpointError for what is none, or is damaged, by its headers.
    """
    folder = find_exported_folder(find_checkpoint(name))
    if (folder / ADAPTER_CONFIG).is_file():
        return _find_adapter_source(folder, base)
    if base is not None:
        raise CheckpointError(f"--base: {show(name)} is a model, not an adapter; leave --base out")
    config, spec = _read_checked_spec(folder)
    return GenerationSource(folder, config, spec, folder)


def _read_checked_spec(
    folder: Path, implementation: str | None = None
) -> tuple[dict[str, Any], ModelSpec]:
    config = read_config(folder)
    spec = read_trained_spec(config, str(folder), implementation)
    check_weights(spec, folder)
    return config, spec


def _find_adapter_source(folder: Path, base: str | None) -> GenerationSource:
    adapter = read_adapter(folder)
    named = base or adapter.config.base
    if not named:
        raise CheckpointError(
            f"{show(str(folder))}: adapter_config.json names no base; give it with --base"
        )
    base_folder = find_checkpoint(base) if base else find_adapter_base(folder, named)
    if not (base_folder / "config.json").is_file() and (base_folder / ADAPTER_CONFIG).is_file():
        trained_on = "the model that it was trained on"
        if base:
            raise CheckpointError(
                f"--base: {show(base)} is an adapter, not a model; name {trained_on}"
            )
        raise CheckpointError(
            f"{show(str(folder))}: adapter_config.json names the base {show(named)}, which is an"
            f" adapter; give {trained_on} with --base"
        )
    config, spec = _read_checked_spec(base_folder, adapter.metadata.get(BASE_IMPLEMENTATION))
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base_folder)
    own = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return GenerationSource(
        base_folder,
        config,
        saved.spec,
        folder if own else base_folder,
        folder,
        adapter.metadata.get(BASE_DTYPE, ""),
        adapter.metadata.get(BASE_STORAGE, "none"),
        spec,
    )


def load_source(
    source: GenerationSource, dtype: torch.dtype, device: torch.device, storage: str
) -> Decoder:
    """The model with its weights, ready to generate. storage: how the frozen weights beside an
    adapter are kept: `none`, `nf4` or `int8`.
    """
    if source.adapter is not None:
        spec = source.base_spec or source.spec
        return load_model_with_adapter(source.adapter, spec, source.folder, dtype, device, storage)[
            0
        ]
    model = build_meta(source.spec, dtype)
    allocate(model, device)
    load_weights(model, source.spec, source.folder)
    return model.eval()


def choose_device(name: str) -> torch.device:
    """The device that `--device` means on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "--device: found cuda, but torch sees no CUDA device here; use --device cpu"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    """The dtype that `--dtype` means; `auto`: the one in config.json, fp32 if it names none."""
    if name == "auto":
        own = {
            **config,
            **config.get("text_config", {}),
        }  # multimodal configs have a part for the text
        name = DTYPE_NAMES.get(str(own.get("dtype") or own.get("torch_dtype")), "fp32")
    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp64": torch.float64,
    }[name]
