"""Find and load the model that a name on the command line stands for.

The name is of a model, an adapter with its base, or a run that wrote one of them. `tune generate`,
`eval` and `export` call `find_source`, which checks headers alone; `load_source` reads the weights.
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
)
from recipe_lib.checkpoint.model_folders import find_exported_folder
from recipe_lib.checkpoint.open_exports import load_model, load_model_with_adapter
from recipe_lib.checkpoint.side_files import TOKENIZER_FILES
from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.models import (
    Decoder,
    ModelSpec,
    read_config,
    read_trained_spec,
)

# torch's name of a dtype, as config.json has it -> that of the config key `dtype`
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True)
class GenerationSource:
    """A model on the disk, its headers checked."""

    folder: Path  # of the model, or of the base of an adapter
    config: dict[str, Any]  # its config.json
    spec: ModelSpec  # of the model with the adapter, which may have added tokens
    tokenizer: Path  # the folder with the tokenizer
    adapter: Path | None = None  # the adapter's folder; None: a model
    # How the base was kept while the adapter was trained, if the adapter's file says it.
    dtype: str = ""  # torch's name; empty: not known
    storage: str = "none"  # as `lora.quantize_base`
    base_spec: ModelSpec | None = None  # of an adapter's base, as it is in the folder; else None


def find_source(name: str, base: str | None = None) -> GenerationSource:
    """Return the model that a folder or a hub id names; of a run, its newer model or adapter.

    base: folder or hub id of an adapter's base, in place of the one it names. Raises
    CheckpointError if there is no model, its headers are damaged, or an adapter is of another base.
    """
    folder = find_exported_folder(find_checkpoint(name))
    if (folder / ADAPTER_CONFIG).is_file():
        return _find_adapter_source(folder, base)
    if base is not None:
        raise CheckpointError(f"--base: {show(name)} is a model, not an adapter; leave --base out")
    config, spec = _read_checked_spec(folder)
    return GenerationSource(folder=folder, config=config, spec=spec, tokenizer=folder)


def _read_checked_spec(
    folder: Path, implementation: str | None = None
) -> tuple[dict[str, Any], ModelSpec]:
    config = read_config(folder)
    spec = read_trained_spec(config, str(folder), implementation)
    check_weights(spec, folder)
    return config, spec


def _find_adapter_source(folder: Path, base: str | None) -> GenerationSource:
    adapter = read_adapter(folder)
    base_name = base or adapter.config.base
    if not base_name:
        raise CheckpointError(
            f"{show(str(folder))}: adapter_config.json names no base; give it with --base"
        )
    base_folder = find_checkpoint(base) if base else find_adapter_base(folder, base_name)
    # The base of an adapter cannot be an adapter itself.
    if not (base_folder / "config.json").is_file() and (base_folder / ADAPTER_CONFIG).is_file():
        trained_on = "the model that it was trained on"
        if base:
            raise CheckpointError(
                f"--base: {show(base)} is an adapter, not a model; name {trained_on}"
            )
        raise CheckpointError(
            f"{show(str(folder))}: adapter_config.json names the base {show(base_name)}, which is"
            f" an adapter; give {trained_on} with --base"
        )
    config, spec = _read_checked_spec(base_folder, adapter.metadata.get(BASE_IMPLEMENTATION))
    adapter = read_adapter(folder, spec)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base_folder)
    # An adapter that was trained with tokens of its own brings its tokenizer.
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return GenerationSource(
        folder=base_folder,
        config=config,
        spec=saved.spec,
        tokenizer=folder if has_tokenizer else base_folder,
        adapter=folder,
        dtype=adapter.metadata.get(BASE_DTYPE, ""),
        storage=adapter.metadata.get(BASE_STORAGE, "none"),
        base_spec=spec,
    )


def load_source(
    source: GenerationSource, dtype: torch.dtype, device: torch.device, storage: str
) -> Decoder:
    """Return the model with its weights on the device, in eval mode.

    storage: how the frozen weights beside an adapter are kept: `none` (in `dtype`), `nf4` or
    `int8`. Raises CheckpointError if the weights cannot be read.
    """
    if source.adapter is not None:
        model, _ = load_model_with_adapter(
            source.adapter,
            spec=source.base_spec or source.spec,
            base=source.folder,
            dtype=dtype,
            device=device,
            storage=storage,
        )
        return model
    return load_model(source.spec, folder=source.folder, dtype=dtype, device=device)


def choose_device(name: str) -> torch.device:
    """Return the device that `--device` means here; `auto`: cuda if there is one.

    Raises SetupError for cuda without a CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "--device: found cuda, but torch sees no CUDA device here; use --device cpu"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    """Return the dtype that `--dtype` means; `auto`: config.json's, fp32 if it names none."""
    if name == "auto":
        # Multimodal configs have a part for the text.
        text_config = config | config.get("text_config", {})
        dtype = text_config.get("dtype") or text_config.get("torch_dtype")
        name = DTYPE_NAMES.get(str(dtype), "fp32")
    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp64": torch.float64,
    }[name]
