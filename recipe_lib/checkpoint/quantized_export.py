"""Export a Hugging Face folder with the linears of its layers in 4 or 8 bits, by torchao.

transformers and vLLM load such a folder.

    int4   symmetric, a scale for each `group_size` weights of a row
    int8   symmetric, a scale for each row

Codes of 4 bits have a byte each in the file: torchao 0.18 packs two into one for GPUs only, and by
other rounding. Embedding and output head stay as they are.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from recipe_lib import files
from recipe_lib.checkpoint.model_export import SideFiles, spell_config, stage_folder
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.side_files import CARD, GENERATION, list_tokenizer_files
from recipe_lib.checkpoint.tensor_matching import read_headers
from recipe_lib.checkpoint.verify import compute_logits, open_model, silence_transformers
from recipe_lib.checkpoint.weight_loading import make_unknown_extras_error
from recipe_lib.config.local_files import format_install_line
from recipe_lib.errors import CheckpointError, SetupError, StorageError, get_first_line
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.qat import build_torchao_config
from recipe_lib.models import read_config, read_trained_spec
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

_LENGTH = 32  # of the prompt that both models are compared on


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
        staging = stage_folder(
            out.absolute(),
            shards={},
            contents={"config.json": config},
            side_files=SideFiles(folder),
            world=SingleRank(),
        )
        with staging as temporary:
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
