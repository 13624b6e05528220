"""Open exported models again to check that they compute what was trained, and quantize them.

`tune export` compares logits of a fixed prompt: first as this library reads the export
(`load_model_with_adapter`, `compare_logits`), then as transformers and PEFT do
(`check_with_transformers`, `check_with_peft`). With `--quantize` it calls `write_quantized`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from recipe_lib import files
from recipe_lib.adapters import add_adapters, disable_adapters, init_adapters
from recipe_lib.adapters.peft_names import list_targets
from recipe_lib.checkpoint.adapter_config import (
    AdapterConfig,
    compute_scaling,
    find_first_matches,
)
from recipe_lib.checkpoint.adapter_files import (
    BASE_STORAGE,
    AdapterFile,
    check_fits,
    find_usual_scaling,
    read_adapter,
)
from recipe_lib.checkpoint.huggingface import load_weights, make_unknown_extras_error
from recipe_lib.checkpoint.model_export import SideFiles, spell_config, stage_folder
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.side_files import CARD, GENERATION, list_tokenizer_files
from recipe_lib.checkpoint.tensor_matching import read_headers
from recipe_lib.config.local_files import format_install_line, has_package
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, SetupError, StorageError, get_first_line
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.peaks import find_free_host_memory
from recipe_lib.memory.qat import build_torchao_config
from recipe_lib.models import (
    Decoder,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    allocate,
    build_meta,
    has_score_head,
    read_config,
    read_trained_spec,
)
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB, format_bytes

_ROWS = 2  # sequences of the fixed prompt
_LENGTH = 32  # tokens of each
# Dtype of the models -> the most that rounding may change a logit, as a share of the largest one.
# Sums in another order round differently, and weights may be rounded once more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Comparison:
    """The difference of an exported model's logits from those of the trained one."""

    # Largest absolute difference of a logit from the trained model's.
    difference: float
    # Largest absolute logit of the trained model.
    largest: float
    # The most by which the adapter changes a logit of the base; None: no adapter.
    change: float | None

    def is_within_rounding(self, dtype: torch.dtype) -> bool:
        """Return True if rounding explains the difference; False if that is NaN.

        dtype: in which the models computed.
        """
        return self.difference <= _TOLERANCE[dtype] * max(self.largest, 1e-3)

    def __str__(self) -> str:
        change = (
            "" if self.change is None else f"; the adapter changes them by up to {self.change:.2g}"
        )
        return (
            f"logits differ by {self.difference:.2g} at most (the largest is"
            f" {self.largest:.3g}{change})"
        )


def make_adapter_settings(adapter: AdapterFile, spec: ModelSpec) -> LoraConfig:
    """Return the config section `lora` that adds adapters of the same shapes to a model.

    Its rank is the largest of the adapter's, its alpha gives the scaling of most modules.
    """
    modules = adapter.list_modules(spec)
    rank = max(adapter.config.get_rank(module) for module in modules)
    names = [module.name for module in modules]
    return LoraConfig(
        rank=rank,
        # The scaling is alpha times that of alpha 1, which depends on the rank alone.
        alpha=find_usual_scaling(adapter, spec) / compute_scaling(1.0, rank, adapter.config.rslora),
        rslora=adapter.config.rslora,
        dora=adapter.config.dora,
        # A model of another library has no short names for its modules.
        target_modules=names if isinstance(spec, ExternalSpec) else list_targets(modules),
        quantize_base=adapter.metadata.get(BASE_STORAGE, "none"),
    )


def load_model(
    spec: ModelSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> Decoder:
    """Return the model of a folder in evaluation mode. lora: adds new adapters; None: adds none."""
    model = build_meta(spec, dtype)
    if lora is not None:
        add_adapters(model, lora, dtype)
    allocate(model, device)
    load_weights(model, spec, folder)
    if lora is not None:
        with phase("making adapters"):
            init_adapters(model, 0)  # 0: the seed
    return model.eval()


def load_model_with_adapter(
    folder: Path,
    spec: ModelSpec,
    base: Path,
    dtype: torch.dtype,
    device: torch.device,
    storage: str | None = None,
) -> tuple[Decoder, int]:
    """Return the base model with the adapter in a folder, and the number of adapted modules.

    The adapter's matrices are fp32, or fp64 if the model is. An adapter of some layers only is
    allowed, as the model is not trained further.

    Args:
        folder: of the adapter.
        spec: of the base.
        base: folder of the base model.
        dtype: of the base.
        device: of the model.
        storage: how the frozen weights are kept (`none`, `nf4`, `int8`); None: as in training,
            which the adapter's file says.

    Raises CheckpointError if the adapter does not fit the base.
    """
    adapter = read_adapter(folder, spec)
    check_fits(adapter, spec)
    cfg = make_adapter_settings(adapter, spec)
    cfg.quantize_base = storage or cfg.quantize_base
    cfg.dtype = "fp32" if dtype != torch.float64 else None  # None: the model's dtype
    model = load_model(spec, folder=base, dtype=dtype, device=device, lora=cfg)
    return model, load_adapter(model, spec, folder, allow_missing=True)


def make_prompt(vocabulary: int, max_positions: int) -> torch.Tensor:
    """Return the fixed prompt of random token ids `[2, 32]`, shorter if max_positions is.

    vocabulary: number of token ids. All models with the same number have the same prompt.
    """
    shape = (_ROWS, min(_LENGTH, max_positions))
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def compute_prompt_logits(model: Decoder, with_adapters: bool = True) -> torch.Tensor:
    """Return logits `[2, 32, v]` of the fixed prompt, on the CPU.

    with_adapters: False: of the base alone.
    """
    tokens = make_prompt(model.spec.vocab_size, model.spec.max_positions)
    tokens = tokens.to(next(model.parameters()).device)
    adapters = nullcontext() if with_adapters else disable_adapters(model)
    with phase("computing logits of a fixed prompt"), adapters:
        return model(tokens).cpu()


def compare_logits(
    trained: torch.Tensor, exported: torch.Tensor, base: torch.Tensor | None = None
) -> Comparison:
    """Return how logits of a reloaded model differ from those of the trained one.

    trained, exported, base: logits of one shape. base: of the model without its adapters; None: no
    adapter.
    """
    trained = trained.double()
    return Comparison(
        difference=float((trained - exported.double()).abs().max()),
        largest=float(trained.abs().max()),
        change=None if base is None else float((trained - base.double()).abs().max()),
    )


# Exceptions that transformers and PEFT raise for a model that they cannot open.
_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, IndexError)


def check_with_peft(
    folder: Path,
    base: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    trained: tuple[Tensor, Tensor],
) -> str:
    """Check an adapter by opening it with PEFT on transformers' base; return a line for the log.

    Args:
        folder: of the adapter.
        base: folder of the base model.
        spec: of the base.
        dtype: of the base in the run.
        device: on which the models compute.
        trained: logits `[2, 32, v]` of the fixed prompt by this library: (with the adapter, of the
            base alone).

    Raises CheckpointError if PEFT does not open the adapter, or computes other logits. Where the
    check is not possible, the line says why.
    """
    adapter = read_adapter(folder, spec)
    # transformers computes norms and rotary embeddings in fp32 even for a model in fp64.
    dtype = torch.float32 if dtype == torch.float64 else dtype
    why_not = _why_not_opened(
        base, spec, dtype=dtype, device=device, packages=("transformers", "peft")
    )
    if why_not is None and adapter.extras:
        why_not = "PEFT does not know the parameters that the recipe added"
    if why_not is not None:
        return f"note: not opened with PEFT: {why_not}"
    if adapter.metadata.get(BASE_STORAGE, "none") != "none":
        # PEFT opens the unquantized base: ours is compared without the rounding of training too.
        model = load_model_with_adapter(
            folder, spec=spec, base=base, dtype=dtype, device=device, storage="none"
        )[0]
        trained = (compute_prompt_logits(model), compute_prompt_logits(model, with_adapters=False))
        del model
    with silence_transformers():
        try:
            with phase("opening the base with transformers"):
                model = open_with_transformers(base, dtype, device)
            vocab_size = trained[0].shape[-1]
            is_resized = vocab_size != model.config.get_text_config().vocab_size
            # With a resized vocabulary the prompt may have tokens that the base lacks.
            base_logits = (
                trained[1]
                if is_resized
                else compute_transformers_logits(model, vocab_size, spec.max_positions)
            )
        except (ImportError, *_FAULTS) as error:
            return (
                "note: not opened with PEFT: transformers does not open the base"
                f" ({get_first_line(error)})"
            )
        if is_resized:  # PEFT fills the new rows from the adapter's file
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        base_comparison = _compare_steady(trained[1], logits=base_logits, base=None, dtype=dtype)
        if not base_comparison.is_within_rounding(dtype):
            return (
                "note: not opened with PEFT: transformers computes the base otherwise:"
                f" {base_comparison}"
            )
        _check_patterns(adapter.config, model)
        peft_model = _open_adapter(model, adapter, device)
        if isinstance(peft_model, str):
            return f"note: not opened with PEFT: {peft_model}"
        logits = compute_transformers_logits(peft_model, vocab_size, spec.max_positions)
    # Logits of a resized vocabulary cannot be compared with the base's.
    trained_base = trained[1] if trained[1].shape == trained[0].shape else None
    comparison = compare_logits(trained[0], logits, trained_base)
    steady_comparison = _compare_steady(trained[0], logits=logits, base=trained_base, dtype=dtype)
    # An adapter that changes little must not pass by rounding alone: logits must be closer than
    # half of its change, or as close as the libraries are without it.
    is_missed = steady_comparison.change is not None and (
        steady_comparison.difference
        > max(steady_comparison.change / 2, 2 * base_comparison.difference)
    )
    reader = f"PEFT {version('peft')} on transformers {version('transformers')}"
    if is_missed or not steady_comparison.is_within_rounding(dtype):
        raise CheckpointError(
            f"{folder}: {reader} computes another model than was trained: {comparison}; use the"
            f" merged model (tune export {folder} --merge), or write the adapter again (--adapter"
            " --out) if an older release wrote it"
        )
    return f"check: {comparison}, read with {reader}"


def check_with_transformers(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    trained: Tensor,
    base: Tensor | None = None,
) -> str:
    """Check a model by opening its folder with transformers; return a line for the log.

    dtype: in which the model is opened. trained: logits `[2, 32, v]` of the fixed prompt by this
    library. base: those of the base alone, if an adapter was merged. Raises CheckpointError if
    transformers computes other logits. Where the check is not possible, the line says why.
    """
    # As for PEFT: parts of transformers' models are fp32 even in fp64.
    dtype = torch.float32 if dtype == torch.float64 else dtype
    why_not = _why_not_opened(folder, spec, dtype=dtype, device=device, packages=("transformers",))
    if why_not is not None:
        return f"note: not opened with transformers: {why_not}"
    with silence_transformers():
        try:
            with phase("opening the model with transformers"):
                model = open_with_transformers(folder, dtype, device)
            logits = compute_transformers_logits(model, trained.shape[-1], spec.max_positions)
        except (ImportError, *_FAULTS) as error:
            return f"note: not opened with transformers: it says {get_first_line(error)}"
    comparison = compare_logits(trained, logits, base)
    reader = f"transformers {version('transformers')}"
    if not _compare_steady(trained, logits=logits, base=base, dtype=dtype).is_within_rounding(
        dtype
    ):
        raise CheckpointError(
            f"{folder}: {reader} computes another model than was trained: {comparison}; do not use"
            " it there, and report this"
        )
    return f"check: {comparison}, read with {reader}"


def open_with_transformers(
    folder: Path, dtype: torch.dtype | str, device: torch.device | None = None, **more: Any
) -> Any:
    """Return transformers' model of a folder, in evaluation mode.

    No code of the folder is run and no pickled weights are read. dtype: `auto` for that of the
    folder's config. device: None for the CPU. more: arguments of `from_pretrained`.
    """
    import transformers

    # Without trust_remote_code, transformers asks on the terminal whether to run code.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, **more
    )
    return model.eval().to(device or "cpu")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress progress bars, log lines and warnings of transformers and PEFT in a block."""
    from transformers.utils import logging

    has_progress_bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bars:
            logging.enable_progress_bar()


def _why_not_opened(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packages: Sequence[str],
) -> str | None:
    """Return why a model cannot be compared with other libraries; None if it can.

    folder: of the model that they would open. dtype, device: in which and on which it would be
    opened. packages: those that are needed.
    """
    missing = next((package for package in packages if not has_package(package)), None)
    if missing is not None:
        return f"found no package {missing}; {format_install_line(missing)}"
    silence_torchao()
    if isinstance(spec, ExternalSpec) and spec.implementation != "transformers":
        return f"the model is one of {spec.implementation}"
    if has_score_head(spec):
        return "it has a score head"
    if read_config(folder).get("quantization_config"):
        return "the base's files are quantized, and transformers dequantizes in its own way"
    headers = read_headers(folder)
    if any(tensor.extra for tensor in headers.values()):
        return "transformers does not know the parameters that the recipe added"
    num_bytes = dtype.itemsize * sum(
        torch.Size(tensor.entry.shape).numel() for tensor in headers.values()
    )
    free_bytes, description = find_free_host_memory()
    if device.type == "cpu" and num_bytes > free_bytes:
        return (
            f"it takes {format_bytes(num_bytes)} of host memory,"
            f" {format_bytes(free_bytes)} {description}"
        )
    return None


def _open_adapter(model: Any, adapter: AdapterFile, device: torch.device) -> Any:
    """Return PEFT's model of a base and an adapter, or a text that says why PEFT cannot be used.

    Raises CheckpointError if PEFT does not open the adapter.
    """
    try:
        from peft import PeftModel

        with phase("opening the adapter with PEFT"):
            return PeftModel.from_pretrained(
                model, str(adapter.folder), torch_device=str(device)
            ).eval()
    except ImportError as error:  # such as a version of torchao that PEFT refuses
        return f"it says {get_first_line(error)}"
    except _FAULTS as error:
        raise CheckpointError(
            f"{adapter.folder}: PEFT {version('peft')} does not open it ({get_first_line(error)});"
            f" use the merged model (tune export {adapter.folder} --merge)"
        ) from error


def _check_patterns(config: AdapterConfig, model: nn.Module) -> None:
    """Raise CheckpointError for a pattern that cannot be matched with the model's names.

    A pattern may take forever to match: it is tried here with a time limit, since PEFT then matches
    it without one.
    """
    names = (*dict(model.named_modules()), *dict(model.named_parameters()))
    selections = [config.selection.get(key) for key in ("target_modules", "exclude_modules")]
    patterns = tuple(pattern for pattern in selections if isinstance(pattern, str))
    where = f"{config.path}: a pattern"
    find_first_matches(patterns, names, where, whole=True)
    find_first_matches((*config.rank_pattern, *config.alpha_pattern), names, where)


@torch.no_grad()
def compute_transformers_logits(model: nn.Module, vocab_size: int, max_positions: int) -> Tensor:
    """Return logits `[2, 32, v]` of the fixed prompt by transformers' model, on the CPU."""
    tokens = make_prompt(vocab_size, max_positions).to(next(model.parameters()).device)
    with phase("computing logits of a fixed prompt"):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.cpu()


def _compare_steady(
    trained: Tensor, logits: Tensor, base: Tensor | None, dtype: torch.dtype
) -> Comparison:
    """Return the comparison of logits that decides whether two models are the same.

    If `dtype` has 16 bits, only the half of the tokens that differ least is compared.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return compare_logits(trained, logits, base)
    # Two correct implementations round differently, and a router near a tie then sends a token to
    # other experts.
    differences = (trained.double() - logits.double()).abs().amax(dim=-1).flatten()
    steady_indexes = differences.argsort()[: max(1, len(differences) // 2)]
    if base is not None:
        base = base.flatten(0, 1)[steady_indexes]
    return compare_logits(
        trained.flatten(0, 1)[steady_indexes], logits.flatten(0, 1)[steady_indexes], base
    )


@dataclass(frozen=True)
class QuantizedReport:
    """Comparison of a quantized model with the original, on a fixed prompt of random tokens."""

    # Number of quantized linears.
    linears: int
    # Mean KL divergence of the next token's probabilities from the original's, nats.
    divergence: float
    # Largest absolute difference of two logits.
    difference: float
    # Largest absolute logit of the original.
    largest: float

    @property
    def check(self) -> str:
        """Return the comparison as a line for the log."""
        return (
            f"transformers opens it and computes what was quantized, {self.linears} linears; next"
            f" tokens diverge from the model's by {self.divergence:.2g} nats, logits by"
            f" {self.difference:.2g} at most (the largest is {self.largest:.3g})"
        )


def write_quantized(folder: Path, out: Path, kind: str, group_size: int) -> QuantizedReport:
    """Write a quantized model as the folder `out`, open it again and compare logits.

    torchao quantizes the linears of the layers; embedding and output head stay as they are.
    transformers and vLLM load the folder. Codes of 4 bits have a byte each in the file: torchao
    0.18 packs two into one for GPUs only, and rounds otherwise there. The model is in host memory,
    for a moment twice.

    Args:
        folder: a Hugging Face model that is not quantized.
        out: a folder that does not exist.
        kind: `int4`: symmetric, with a scale for each `group_size` weights of a row; `int8`:
            symmetric, with a scale for each row.
        group_size: used by int4 alone.

    Raises CheckpointError if the model cannot be quantized, or computes other logits when it is
    opened again; StorageError if it cannot be written; SetupError if transformers is missing. `out`
    exists then only if the check of the reopened folder fails.
    """
    transformers = _import_transformers()
    spec = check_quantizable(folder, kind, group_size)
    list_tokenizer_files(folder)  # transformers reads some of them too, whatever they are
    tensors = read_headers(folder)
    num_bytes = sum(tensor.entry.end - tensor.entry.start for tensor in tensors.values())
    with files.report_storage_faults(), silence_transformers():
        files.remove_leftovers(out.absolute().parent, out.name)  # first: they take the space
        # The unquantized size, and room for config.json and the tokenizer's files.
        files.require_space(out.absolute().parent, num_bytes + 64 * MIB, "the quantized model")
        quantization = transformers.TorchAoConfig(build_torchao_config(kind, group_size))
        with phase("quantizing"):
            logits = _compute_fp32_logits(_open_in_own_dtype(folder))
            model = _open_in_own_dtype(folder, quantization_config=quantization)
        quantized_logits = _compute_fp32_logits(model)
        # The weight of a quantized linear is of a tensor subclass of torchao.
        plain_types = (torch.Tensor, nn.Parameter)
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        num_quantized = sum(type(linear.weight.data) not in plain_types for linear in linears)
        config: dict[str, Any] = {}  # filled once transformers has written its own
        with stage_folder(
            out.absolute(),
            shards={},
            contents={"config.json": config},
            side_files=SideFiles(folder),
            world=SingleRank(),
        ) as temporary:
            try:
                model.save_pretrained(temporary)
            except SafetensorError as error:  # which says in words of its own what the disk refuses
                raise StorageError(
                    f"{out}: the weights cannot be written ({error}); free some space"
                ) from error
            del model, linears
            # With both names of renamed keys, which other releases of transformers read.
            config |= spell_config(read_config(temporary), spec)
            # `stage_folder` writes its own versions of these at the end.
            for name in ("config.json", GENERATION):
                files.remove_file(temporary / name)
            if (folder / CARD).is_file():
                files.copy_file(folder / CARD, temporary / CARD)
            # transformers does not flush what it writes.
            for path in temporary.iterdir():
                files.before_operation("flush", path)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        reopened_logits = _compute_fp32_logits(_open_in_own_dtype(out))
    if not torch.equal(reopened_logits, quantized_logits):
        difference = float((reopened_logits - quantized_logits).abs().max())
        raise CheckpointError(
            f"{out}: does not compute what was quantized: logits differ by {difference:.2g}; do not"
            " use it, and report this"
        )
    log_probs = logits.double().log_softmax(-1)
    quantized_log_probs = reopened_logits.double().log_softmax(-1)
    divergence = (log_probs.exp() * (log_probs - quantized_log_probs)).sum(-1).mean()
    return QuantizedReport(
        linears=num_quantized,
        divergence=float(divergence),
        difference=float((logits - reopened_logits).abs().max()),
        largest=float(logits.abs().max()),
    )


def _import_transformers() -> Any:
    silence_torchao()  # before transformers imports it
    try:
        import transformers
    except ImportError:
        raise SetupError(
            f"--quantize: found no package transformers; {format_install_line('transformers')}"
        ) from None
    return transformers


def check_quantizable(folder: Path, kind: str, group_size: int) -> ModelSpec:
    """Return the spec of a model that torchao can quantize.

    kind, group_size: as for `write_quantized`. Raises CheckpointError for a model that torchao
    would leave unquantized or fail at.
    """
    spec = read_trained_spec(read_config(folder), str(folder))
    tensors = read_headers(folder)
    extras = [name for name, tensor in tensors.items() if tensor.extra]
    if extras:
        # transformers would drop them silently.
        raise make_unknown_extras_error(folder, extras)
    if isinstance(spec, DecoderSpec) and spec.mixture is not None:
        raise CheckpointError(
            f"{folder}: is a mixture of experts, whose weights are stacked and no linears to"
            " torchao; serve it as it is"
        )
    if kind != "int4":
        return spec
    for name, tensor in tensors.items():
        shape = tensor.entry.shape
        # Such as model.layers.0.mlp.up_proj.weight.
        is_linear = ".layers." in name and name.endswith("proj.weight") and len(shape) == 2
        if is_linear and shape[1] % group_size:
            raise CheckpointError(
                f"--group-size: found {group_size} for {name}, whose rows have {shape[1]} weights,"
                " expected a divisor of them; choose one, or --quantize int8, which takes rows as"
                " they are"
            )
    return spec


def _open_in_own_dtype(folder: Path, **more: Any) -> Any:
    """Return transformers' model in its own dtype.

    more: arguments of `from_pretrained`. Raises CheckpointError if it does not open.
    """
    try:
        return open_with_transformers(folder, "auto", **more)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: transformers does not open it ({get_first_line(error)})"
        ) from error


def _compute_fp32_logits(model: Any) -> Tensor:
    """Return logits `[2, 32, v]` of the fixed prompt, fp32."""
    return compute_transformers_logits(
        model, model.config.get_text_config().vocab_size, _LENGTH
    ).float()
