"""An export loaded again and compared with what was trained: names, counts, and logits of a fixed prompt."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_lib.adapters import adapters_off, add_adapters, init_adapters
from recipe_lib.adapters.peft_names import HEAD, file_modules, targets_of
from recipe_lib.checkpoint.adapter_config import CONFIG_FILE, scaling
from recipe_lib.checkpoint.adapter_files import BASE_STORAGE, AdapterFile, check_fits, read_adapter, usual_scaling
from recipe_lib.checkpoint.adapter_in import load_adapter
from recipe_lib.checkpoint.weight_accounts import read_headers
from recipe_lib.checkpoint.weights_in import load_weights
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import Decoder, build_meta
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import weight_map
from recipe_lib.report.phases import phase

_ROWS, _LENGTH = 2, 32
# What rounding may change, as a share of the largest logit: sums in another order, or weights rounded once more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Comparison:
    """Largest difference of two models' logits; largest logit; how much the adapters change (None: none)."""

    difference: float
    largest: float
    change: float | None

    def agrees(self, dtype: torch.dtype) -> bool:
        """Whether the difference is what rounding explains, and no more (NaN never does)."""
        return self.difference <= _TOLERANCE[dtype] * max(self.largest, 1e-3)

    def __str__(self) -> str:
        change = "" if self.change is None else f"; the adapter changes them by up to {self.change:.2g}"
        return f"logits differ by {self.difference:.2g} at most (the largest is {self.largest:.3g}{change})"


def adapter_settings_of(adapter: AdapterFile, spec: ModelSpec) -> LoraConfig:
    """The section `lora` that makes a model for an adapter: its largest rank, and its usual scaling."""
    modules = adapter.modules(spec)
    rank = max(adapter.config.rank_of(module) for module in modules)
    return LoraConfig(
        rank=rank,
        alpha=usual_scaling(adapter, spec) / scaling(1.0, rank, adapter.config.rslora),
        rslora=adapter.config.rslora,
        dora=adapter.config.dora,
        target_modules=[one.name for one in modules] if isinstance(spec, ExternalSpec) else targets_of(modules),
        quantize_base=adapter.metadata.get(BASE_STORAGE, "none"),
    )


def model_with_adapters(
    spec: ModelSpec, base: Path, cfg: LoraConfig, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """The base with new adapters."""
    model = build_meta(spec, dtype)
    add_adapters(model, cfg, dtype)
    allocate(model, device)
    load_weights(model, spec, base)
    with phase("making adapters"):
        init_adapters(model, 0)
    return model.eval()


def model_of_adapter(
    folder: Path,
    spec: ModelSpec,
    base: Path,
    dtype: torch.dtype,
    device: torch.device,
    storage: str | None = None,
) -> tuple[Decoder, int]:
    """The base with an adapter from its folder, in full precision; and how many modules it was put on.

    storage: how the frozen weights are kept (`none`, `nf4`, `int8`); None: as the adapter's file says. An
    adapter may be one of some layers only: it is looked at, merged and generated with, not trained on.
    """
    adapter = read_adapter(folder)
    check_fits(adapter, spec)
    cfg = adapter_settings_of(adapter, spec)
    cfg.quantize_base = storage or cfg.quantize_base
    cfg.dtype = "fp32" if dtype != torch.float64 else None
    model = model_with_adapters(spec, base, cfg, dtype, device)
    return model, load_adapter(model, spec, folder, some=True)


def prompt_tokens(vocabulary: int, max_positions: int) -> torch.Tensor:
    """Return the fixed prompt of random tokens `[2, 32]`, shorter for a model of fewer positions."""
    shape = (_ROWS, min(_LENGTH, max_positions))
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def prompt_logits(model: Decoder, with_adapters: bool = True) -> torch.Tensor:
    """Logits `[2, 32, v]` of a prompt that is the same for all models of one vocabulary, on the host."""
    tokens = prompt_tokens(model.spec.vocab_size, model.spec.max_positions).to(next(model.parameters()).device)
    with phase("computing logits of a fixed prompt"), nullcontext() if with_adapters else adapters_off(model):
        return model(tokens).cpu()


def compare(trained: torch.Tensor, exported: torch.Tensor, before: torch.Tensor | None = None) -> Comparison:
    """trained, exported, before: logits of the trained and of the reloaded model, and of the base alone."""
    wide = trained.double()
    difference = float((wide - exported.double()).abs().max())
    change = None if before is None else float((wide - before.double()).abs().max())
    return Comparison(difference, float(wide.abs().max()), change)


def check_names(folder: Path, spec: ModelSpec, base: Path) -> int:
    """Compares an adapter's names with those of the base's own files, as PEFT and vLLM find modules by them.

    Returns how many modules have an adapter. Raises CheckpointError if one of them is not in the base, or if PEFT would
    put an adapter on a module that has none in the file.
    """
    adapter = read_adapter(folder)
    if isinstance(spec, ExternalSpec):  # PEFT looks for the class' own modules
        strange = sorted(adapter.tensors.keys() - spec.layout().linears.keys())
        if strange:
            raise CheckpointError(f"{folder / CONFIG_FILE}: {strange[0]} is no linear of the base; export it again")
        return len(adapter.tensors)
    found = read_headers(base)
    written = {entry.our_name: entry.file_name for entry in weight_map(spec)}
    in_base = {
        written[entry.our_name].removesuffix(".weight") for entry in weight_map(spec, found) if entry.file_name in found
    }
    if spec.tied:
        in_base.add(HEAD)
    in_base |= {name for name, module in file_modules(spec).items() if module.parameter}
    adapted = set(adapter.tensors)
    last = {name.rsplit(".", 1)[-1] for name in adapted}
    matched = {name for name in in_base & file_modules(spec).keys() if name.rsplit(".", 1)[-1] in last}
    for name in sorted(adapted ^ matched):
        fault = "is no weight of the base" if name in adapted else "has no adapter, and PEFT would make one"
        raise CheckpointError(f"{folder / CONFIG_FILE}: {name} {fault}; export the adapter again")
    return len(adapted)


def plain_model(spec: ModelSpec, folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A model folder's model."""
    model = build_meta(spec, dtype)
    allocate(model, device)
    load_weights(model, spec, folder)
    return model.eval()
