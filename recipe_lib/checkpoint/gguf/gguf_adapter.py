"""A LoRA adapter in PEFT's layout as a GGUF file, which llama.cpp puts on the model's own GGUF file."""

from functools import partial
from pathlib import Path

from torch import Tensor

from recipe_lib.adapters.peft_names import EMBEDDING_FIRST, EMBEDDING_SECOND, FIRST, HEAD, SECOND, FileModule
from recipe_lib.checkpoint.adapter_files import AdapterFile, check_base, check_fits, read_adapter, usual_scaling
from recipe_lib.checkpoint.gguf.architectures import Architecture, architecture_of
from recipe_lib.checkpoint.gguf.gguf_file import GgufTensor, check_gguf, package, write_gguf
from recipe_lib.checkpoint.gguf.gguf_model import GgufReport, gguf_names, permuted
from recipe_lib.checkpoint.gguf.tensor_types import TypeChoice
from recipe_lib.checkpoint.saved_weights import SavedWeights
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config, read_trained_spec
from recipe_lib.models.spec import DecoderSpec


def write_gguf_adapter(adapter_folder: Path, base: Path, out: Path, kind: str, *, name: str) -> GgufReport:
    """Writes the file `out`, reads it back and compares.

    base: the folder of the model that the adapter is for. kind: one of ADAPTER_KINDS. name: for who looks at the file.
    Raises CheckpointError, StorageError or SetupError; then there is no file.
    """
    package()
    spec = read_trained_spec(read_config(base), str(base))
    architecture = architecture_of(spec, str(base))
    assert isinstance(spec, DecoderSpec)
    adapter = read_adapter(adapter_folder)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base)
    _refuse(adapter, spec, saved)
    modules = adapter.modules(spec)
    rank = adapter.config.rank_of(modules[0])
    alpha = usual_scaling(adapter, spec) * rank
    tensors = _tensors(adapter, modules, spec, architecture, kind, alpha)
    fields = {
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
        "general.file_type": {"f32": 0, "f16": 1, "bf16": 32}[kind],
    }
    write_gguf(out, architecture.name, fields, tensors)
    return GgufReport((), tuple(check_gguf(out, fields, tensors)), len(fields))


def _refuse(adapter: AdapterFile, spec: DecoderSpec, saved: SavedWeights) -> None:
    """Raise CheckpointError for what llama.cpp has no place for."""
    fault = None
    if adapter.config.dora:
        fault = "is a DoRA adapter"
    elif adapter.extras:
        fault = f"has the extra parameter {min(adapter.extras)}"
    elif saved.parts:
        fault = f"brings {min(saved.parts)} of the base along"
    elif spec.tied and (HEAD in adapter.tensors or any(module.is_embedding for module in adapter.modules(spec))):
        fault = "adapts the embedding or the output projection of a model that has one matrix for both"
    if fault:
        raise CheckpointError(
            f"{adapter.folder}: {fault}, which llama.cpp does not load; merge it (tune export {adapter.folder} --merge)"
        )


def _tensors(
    adapter: AdapterFile,
    modules: list[FileModule],
    spec: DecoderSpec,
    architecture: Architecture,
    kind: str,
    alpha: float,
) -> list[GgufTensor]:
    """A and B of each module, named after the weight that they change."""
    names = gguf_names(architecture.name, spec.num_layers, [f"{module.name}.weight" for module in modules])
    tensors = []
    for module in modules:
        # llama.cpp multiplies with alpha / rank everywhere: a module of another scaling has the rest in its B
        factor = adapter.config.scaling_of(module) * adapter.config.rank_of(module) / alpha
        first, second = _factors(adapter, module, spec, architecture, factor)
        name, choice = names[f"{module.name}.weight"], TypeChoice(kind.upper())
        tensors.append(GgufTensor(f"{name}.lora_a", tuple(first.shape), choice, partial(_given, first)))
        tensors.append(GgufTensor(f"{name}.lora_b", tuple(second.shape), choice, partial(_given, second)))
    return tensors


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _factors(
    adapter: AdapterFile, module: FileModule, spec: DecoderSpec, architecture: Architecture, factor: float
) -> tuple[Tensor, Tensor]:
    """A `[r, in]` and B `[out, r]`; of the embedding A `[v, r]`, from which tokens' rows are taken, and B `[d, r]`."""
    if module.is_embedding:
        first, second = adapter.read(module.name, EMBEDDING_FIRST).T, adapter.read(module.name, EMBEDDING_SECOND)
    else:
        first, second = adapter.read(module.name, FIRST), adapter.read(module.name, SECOND)
    if architecture.permuted:
        second = permuted(second, spec, f"{module.name}.lora_b")
    return first.contiguous(), (second.float() * factor if factor != 1 else second).contiguous()
