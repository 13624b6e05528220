"""Open exports: compare them with what was trained, and quantize them.

Compared are names, counts, and the logits of a fixed prompt: first as this library reads the export
(`load_model_with_adapter`, `compare_logits`), then as the libraries do that it is for,
transformers and PEFT (`check_with_transformers`, `check_with_peft`).

`write_quantized` has torchao keep the linears of a model's layers in 4 or 8 bits, in a folder that
transformers and vLLM load, and compares its logits with the model's.

    int4   symmetric, a scale for each `group_size` weights of a row
    int8   symmetric, a scale for each row

Codes of 4 bits have a byte each in the file: torchao 0.18 packs two into one for GPUs only, and by
other rounding. Embedding and output head stay as they are.
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

_ROWS = 2  # of the fixed prompt
_LENGTH = 32
# What rounding may change, as a share of the largest logit: sums in another order, or weights
# rounded once more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Comparison:
    """The difference of an exported model's logits from those of the trained one."""

    # Largest difference.
    difference: float
    # Largest logit.
    largest: float
    # How much the adapters change the base's logits at most; None: there are none.
    change: float | None

    def is_within_rounding(self, dtype: torch.dtype) -> bool:
        """Return True if rounding explains the difference. NaN never is."""
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
    """Return the section `lora` that makes a model for an adapter.

    It has the adapter's largest rank, and its usual scaling.
    """
    modules = adapter.list_modules(spec)
    rank = max(adapter.config.get_rank(module) for module in modules)
    names = [module.name for module in modules]
    return LoraConfig(
        rank=rank,
        # What the scaling is divided by is the same for all alphas.
        alpha=find_usual_scaling(adapter, spec) / compute_scaling(1.0, rank, adapter.config.rslora),
        rslora=adapter.config.rslora,
        dora=adapter.config.dora,
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
    """Return a model folder's model, ready to evaluate. lora: gives it new adapters."""
    model = build_meta(spec, dtype)
    if lora is not None:
        add_adapters(model, lora, dtype)
    allocate(model, device)
    load_weights(model, spec, folder)
    if lora is not None:
        with phase("making adapters"):
            init_adapters(model, 0)
    return model.eval()


def load_model_with_adapter(
    folder: Path,
    spec: ModelSpec,
    base: Path,
    dtype: torch.dtype,
    device: torch.device,
    storage: str | None = None,
) -> tuple[Decoder, int]:
    """Return the base with an adapter from its folder, and the number of modules it was put on.

    The adapter is in full precision. It may be one of some layers only: it is looked at, merged and
    generated with, not trained on.

    storage: how the frozen weights are kept (`none`, `nf4`, `int8`); None: as the adapter's file
    says.
    """
    adapter = read_adapter(folder)
    check_fits(adapter, spec)
    cfg = make_adapter_settings(adapter, spec)
    cfg.quantize_base = storage or cfg.quantize_base
    cfg.dtype = "fp32" if dtype != torch.float64 else None  # None: the model's own
    model = load_model(spec, folder=base, dtype=dtype, device=device, lora=cfg)
    return model, load_adapter(model, spec, folder, some=True)


def make_prompt(vocabulary: int, max_positions: int) -> torch.Tensor:
    """Return the fixed prompt of random tokens `[2, 32]`, shorter where positions are fewer."""
    shape = (_ROWS, min(_LENGTH, max_positions))
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def compute_prompt_logits(model: Decoder, with_adapters: bool = True) -> torch.Tensor:
    """Return logits `[2, 32, v]` of the fixed prompt, on the host.

    The prompt is the same for all models of one vocabulary.
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

    base: of the base alone, if the model has adapters.
    """
    trained = trained.double()
    return Comparison(
        difference=float((trained - exported.double()).abs().max()),
        largest=float(trained.abs().max()),
        change=None if base is None else float((trained - base.double()).abs().max()),
    )


# What other libraries raise for a model that they cannot open.
_FAULTS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, IndexError)


def check_with_peft(
    folder: Path,
    base: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    trained: tuple[Tensor, Tensor],
) -> str:
    """Return the line about an adapter's folder opened by PEFT on transformers' base.

    spec: of the base. dtype: of the base in the run. trained: logits of the fixed prompt as the run
    computes them, with the adapter and of the base alone. Raises CheckpointError where PEFT does
    not open it, or computes something else.
    """
    adapter = read_adapter(folder)
    # transformers has norms and rotations in fp32.
    dtype = torch.float32 if dtype == torch.float64 else dtype
    why_not = _why_not_opened(
        base, spec, dtype=dtype, device=device, packages=("transformers", "peft")
    )
    if why_not is None and adapter.extras:
        why_not = "PEFT does not know the parameters that the recipe added"
    if why_not is not None:
        return f"note: not opened with PEFT: {why_not}"
    if adapter.metadata.get(BASE_STORAGE, "none") != "none":
        # PEFT gets the base's own numbers, not those that they were rounded to in training.
        model = load_model_with_adapter(
            folder, spec=spec, base=base, dtype=dtype, device=device, storage="none"
        )[0]
        trained = (compute_prompt_logits(model), compute_prompt_logits(model, with_adapters=False))
        del model
    with silence_transformers():
        try:
            with phase("opening the base with transformers"):
                model = open_model(base, dtype, device)
            vocab_size = trained[0].shape[-1]
            is_resized = vocab_size != model.config.get_text_config().vocab_size
            # Not computed where the prompt may have tokens that the base lacks.
            base_logits = (
                trained[1] if is_resized else compute_logits(model, vocab_size, spec.max_positions)
            )
        except (ImportError, *_FAULTS) as error:
            return (
                "note: not opened with PEFT: transformers does not open the base"
                f" ({get_first_line(error)})"
            )
        if is_resized:  # its new rows have no numbers before PEFT brings them
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        alone = _compare_steady(trained[1], logits=base_logits, base=None, dtype=dtype)
        if not alone.is_within_rounding(dtype):
            return f"note: not opened with PEFT: transformers computes the base otherwise: {alone}"
        _check_patterns(adapter.config, model)
        opened = _open_adapter(model, adapter, device)
        if isinstance(opened, str):
            return f"note: not opened with PEFT: {opened}"
        logits = compute_logits(opened, vocab_size, spec.max_positions)
    trained_base = trained[1] if trained[1].shape == trained[0].shape else None
    comparison = compare_logits(trained[0], logits, trained_base)
    steady = _compare_steady(trained[0], logits=logits, base=trained_base, dtype=dtype)
    # An adapter that changes little must not pass by rounding alone: logits must be closer than
    # half of its change, or as close as the libraries are without it.
    is_missed = steady.change is not None and (
        steady.difference > max(steady.change / 2, 2 * alone.difference)
    )
    reader = f"PEFT {version('peft')} on transformers {version('transformers')}"
    if is_missed or not steady.is_within_rounding(dtype):
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
    """Return the line about a model's folder opened by transformers.

    Raises CheckpointError if that computes another model.

    dtype: of what is compared. trained, base: logits of the fixed prompt; `base` are those of a
    merged adapter's base alone.
    """
    dtype = torch.float32 if dtype == torch.float64 else dtype
    why_not = _why_not_opened(folder, spec, dtype=dtype, device=device, packages=("transformers",))
    if why_not is not None:
        return f"note: not opened with transformers: {why_not}"
    with silence_transformers():
        try:
            with phase("opening the model with transformers"):
                model = open_model(folder, dtype, device)
            logits = compute_logits(model, trained.shape[-1], spec.max_positions)
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


def open_model(
    folder: Path, dtype: torch.dtype | str, device: torch.device | None = None, **more: Any
) -> Any:
    """Return transformers' model of a folder.

    Nothing of the folder's own code is run, no pickled weights are read.
    """
    import transformers

    # Where trust_remote_code is not given, transformers asks on the terminal whether to run code.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, **more
    )
    return model.eval().to(device or "cpu")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Keep the bars, advice and warnings of transformers and PEFT away from the user."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _why_not_opened(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packages: Sequence[str],
) -> str | None:
    """Return why the other libraries cannot say anything about a model; None if they can."""
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
    """Return PEFT's model on a base, or a text, why PEFT itself cannot be used."""
    try:
        from peft import PeftModel

        with phase("opening the adapter with PEFT"):
            return PeftModel.from_pretrained(
                model, str(adapter.folder), torch_device=str(device)
            ).eval()
    except ImportError as error:  # as of a torchao that it does not go with
        return f"it says {get_first_line(error)}"
    except _FAULTS as error:
        raise CheckpointError(
            f"{adapter.folder}: PEFT {version('peft')} does not open it ({get_first_line(error)});"
            f" use the merged model (tune export {adapter.folder} --merge)"
        ) from error


def _check_patterns(config: AdapterConfig, model: nn.Module) -> None:
    """Raise CheckpointError for a pattern that does not come to an end with a name of the model's.

    PEFT matches them without a limit of time.
    """
    names = (*dict(model.named_modules()), *dict(model.named_parameters()))
    selections = [config.selection.get(key) for key in ("target_modules", "exclude_modules")]
    patterns = tuple(pattern for pattern in selections if isinstance(pattern, str))
    where = f"{config.path}: a pattern"
    find_first_matches(patterns, names, where, whole=True)
    find_first_matches((*config.rank_pattern, *config.alpha_pattern), names, where)


@torch.no_grad()
def compute_logits(model: nn.Module, vocab_size: int, max_positions: int) -> Tensor:
    """Return logits of the fixed prompt by transformers' model, on the host."""
    tokens = make_prompt(vocab_size, max_positions).to(next(model.parameters()).device)
    with phase("computing logits of a fixed prompt"):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.cpu()


def _compare_steady(
    trained: Tensor, logits: Tensor, base: Tensor | None, dtype: torch.dtype
) -> Comparison:
    """Return the comparison that decides whether two models are the same.

    In 16 bits it is one of the half of the tokens that differ less.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return compare_logits(trained, logits, base)
    # Two right programs round differently, and a token at a tie of a router then goes to other
    # experts.
    differences = (trained.double() - logits.double()).abs().amax(dim=-1).flatten()
    steady = differences.argsort()[: max(1, len(differences) // 2)]
    if base is not None:
        base = base.flatten(0, 1)[steady]
    return compare_logits(trained.flatten(0, 1)[steady], logits.flatten(0, 1)[steady], base)


@dataclass(frozen=True)
class QuantizedReport:
    """Comparison of a quantized model with the model, on a fixed prompt of random tokens."""

    # How many were quantized.
    linears: int
    # Mean KL divergence of the next token's probabilities from the model's, in nats.
    divergence: float
    # Largest difference of logits.
    difference: float
    # Largest logit of the model.
    largest: float

    @property
    def check(self) -> str:
        """The line that tells it."""
        return (
            f"transformers opens it and computes what was quantized, {self.linears} linears; next"
            f" tokens diverge from the model's by {self.divergence:.2g} nats, logits by"
            f" {self.difference:.2g} at most (the largest is {self.largest:.3g})"
        )


def write_quantized(folder: Path, out: Path, kind: str, group_size: int) -> QuantizedReport:
    """Write the folder `out`, open it again and compare logits.

    The model is in host memory, twice for a moment.

    folder: a Hugging Face model, not quantized. kind: `int4` or `int8`. group_size: of int4,
    weights of a row that share a scale.

    Raises CheckpointError, StorageError, or SetupError without transformers; then there is no
    `out`, but where the check of the whole folder fails.
    """
    transformers = _import_transformers()
    spec = check_quantizable(folder, kind, group_size)
    list_tokenizer_files(folder)  # transformers reads some of them too, whatever they are
    tensors = read_headers(folder)
    num_bytes = sum(tensor.entry.end - tensor.entry.start for tensor in tensors.values())
    with files.report_storage_faults(), silence_transformers():
        files.remove_leftovers(out.absolute().parent, out.name)  # first: they take the space
        files.require_space(out.absolute().parent, num_bytes + 64 * MIB, "the quantized model")
        quantization = transformers.TorchAoConfig(build_torchao_config(kind, group_size))
        with phase("quantizing"):
            logits = _compute_logits(_open(folder))
            model = _open(folder, quantization_config=quantization)
        quantized_logits = _compute_logits(model)
        # A quantized weight is of a subclass of torchao's.
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
            # With both names of renamed keys, for readers of other releases too.
            config |= spell_config(read_config(temporary), spec)
            # transformers writes these in its own way; ours come when the folder is finished.
            for name in ("config.json", GENERATION):
                files.remove_file(temporary / name)
            if (folder / CARD).is_file():
                files.copy_file(folder / CARD, temporary / CARD)
            # transformers does not flush what it writes.
            for path in temporary.iterdir():
                files.before_operation("flush", path)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        reopened_logits = _compute_logits(_open(out))
    if not torch.equal(reopened_logits, quantized_logits):
        difference = float((reopened_logits - quantized_logits).abs().max())
        raise CheckpointError(
            f"{out}: does not compute what was quantized: logits differ by "
            f"{difference:.2g}; do not use it, and report this"
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
    """Return the spec of a model.

    Raises CheckpointError for a model that torchao would leave as it is, or fail at.
    """
    spec = read_trained_spec(read_config(folder), str(folder))
    tensors = read_headers(folder)
    extras = [name for name, tensor in tensors.items() if tensor.extra]
    if extras:
        raise make_unknown_extras_error(
            folder, extras
        )  # transformers would drop them without a word
    if isinstance(spec, DecoderSpec) and spec.mixture is not None:
        raise CheckpointError(
            f"{folder}: is a mixture of experts, whose weights are stacked and no linears to"
            " torchao; serve it as it is"
        )
    if kind != "int4":
        return spec
    for name, tensor in tensors.items():
        shape = tensor.entry.shape
        is_linear = ".layers." in name and name.endswith("proj.weight") and len(shape) == 2
        if is_linear and shape[1] % group_size:
            raise CheckpointError(
                f"--group-size: found {group_size} for {name}, whose rows have {shape[1]} weights,"
                " expected a divisor of them; choose one, or --quantize int8, which takes rows as"
                " they are"
            )
    return spec


def _open(folder: Path, **more: Any) -> Any:
    try:
        return open_model(folder, "auto", **more)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: transformers does not open it ({get_first_line(error)})"
        ) from error


def _compute_logits(model: Any) -> Tensor:
    """Return logits `[2, 32, v]` of random tokens, in fp32."""
    return compute_logits(model, model.config.get_text_config().vocab_size, _LENGTH).float()
