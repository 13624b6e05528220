"""torchtune (0.6.1). Its configs name no recipe: the model's builder and the loss say which is meant."""

import os
import re

from recipe_lib.config.other_configs.conversion import ConfigImport, KeyTable
from recipe_lib.config.other_configs.methods import refuse_missing
from recipe_lib.config.other_configs.their_file import TheirFile
from recipe_lib.config.other_configs.torchtune_data import convert_datasets
from recipe_lib.config.other_configs.torchtune_keys import (
    ATTENTION,
    DEFAULTS,
    DIVERGENCES,
    FOUR_BITS,
    METHODS,
    NULL_MEANS,
    OPTIMIZERS,
    OTHER_PURPOSES,
    QUANTIZERS,
    REFUSED,
    SAME,
    TRACKERS,
    WITHOUT,
)
from recipe_lib.config.other_configs.torchtune_models import FAMILIES, NO_MODELS, PRESETS
from recipe_lib.config.other_configs.warm_up import WARM_UP
from recipe_lib.config.paths import expand

__all__ = ["DEFAULTS", "NAME", "NULL_MEANS", "convert", "is_theirs"]

NAME = "torchtune"


def is_theirs(theirs: TheirFile) -> bool:
    """Whether a file is torchtune's: it names Python code."""
    return any(key.rpartition(".")[2] == "_component_" for key in theirs.values)


def convert(conversion: ConfigImport) -> None:
    """Notes every key of the file. Raises ConfigError for what does not train, or cannot be trained here."""
    _check_purpose(conversion)
    component = str(conversion.value("model._component_") or "")
    builder = component.rpartition(".")[2]
    adapted = re.match(r"q?lora_", builder) is not None
    pairs = str(conversion.value("loss._component_")).endswith(("DPOLoss", "RSOLoss"))
    recipe = "lora_finetune_distributed" if adapted else "full_finetune_distributed"
    conversion.recipe = "dpo_distributed" if pairs else recipe
    if conversion.asks_for("teacher_model"):
        conversion.recipe = "distill_distributed"
    section = {"dpo_distributed": "dpo", "distill_distributed": "distill"}.get(conversion.recipe)
    if section:
        conversion.ours[f"{section}.trainable"] = "adapters" if adapted else "all"
    if not adapted:
        del conversion.defaults["model.lora_rank"], conversion.defaults["model.lora_alpha"]
    convert_datasets(conversion)
    TABLE.apply(conversion)


def _check_purpose(conversion: ConfigImport) -> None:
    for key, purpose, instead in OTHER_PURPOSES:
        if key in conversion.theirs.values:
            raise conversion.stop(f"{key}: {purpose}; {instead}", key)
    if conversion.is_on("quantizer._component_") and not conversion.theirs.under("dataset"):
        raise conversion.stop("quantizer: it quantizes a model; `tune export MODEL --quantize int4` does", "quantizer")
    builder = str(conversion.value("model._component_") or "")
    for word, why in NO_MODELS:
        if word in builder or any(word in str(value) for key, value in conversion.theirs.values.items()
                                  if key.endswith("._component_")):  # fmt: skip
            raise conversion.stop(f"model._component_: {builder}: {why}", "model._component_")
    refuse_missing(conversion, METHODS)


def _model(c: ConfigImport, key: str) -> None:
    """The builder: family and size are the folder's, adapters and quantization are keys of ours."""
    component = str(c.value(key))
    family, _, builder = component.removeprefix("torchtune.models.").partition(".")
    if not component.startswith("torchtune.models.") or family not in FAMILIES:
        c.refuse(key, f"expected a builder of one of {', '.join(FAMILIES)}", may_be_left_out=False)
        return
    if preset := _preset(builder):
        words = f"~model.path model.preset={preset} tokenizer.path=examples/demo/tokenizer"
        teacher = _preset(str(c.value("teacher_model._component_")).rpartition(".")[2])
        if teacher:
            words += f" ~distill.teacher distill.teacher_preset={teacher}"
        c.notes.append(f"before the weights are here: tune plan CONFIG {words}")
    quantized = {"lora.quantize_base": "nf4"} if builder.startswith("qlora_") else {}
    c.carry(key, quantized, "the folder's config.json has the architecture" if not quantized else "")


def _preset(builder: str) -> str | None:
    """The shipped architecture of a builder such as `lora_llama3_2_1b`."""
    return PRESETS.get(re.sub(r"^q?lora_", "", builder))


def _teacher(c: ConfigImport, key: str) -> None:
    c.carry(key, {}, "the folder's config.json has the architecture")


def _divergence(c: ConfigImport, key: str) -> None:
    name = str(c.value(key)).rpartition(".")[2].removesuffix("WithChunkedOutputLoss").removesuffix("Loss")
    if name in DIVERGENCES:
        c.carry(key, {"distill.divergence": DIVERGENCES[name]})
    else:
        c.refuse(key, "no such divergence; there are the losses of ForwardKL and ReverseKL", may_be_left_out=False)


def _quantizer(c: ConfigImport, key: str) -> None:
    name = str(c.value(key)).rpartition(".")[2]
    if name not in QUANTIZERS:
        c.refuse(key, f"no such quantizer; known are {', '.join(QUANTIZERS)}", may_be_left_out=False)
        return
    kind, why = QUANTIZERS[name]
    c.defaults["quantizer.groupsize"] = 256
    (c.change if why else c.carry)(key, {"qat": kind}, why)


def _checkpoint_dir(c: ConfigImport, key: str) -> None:
    """A folder that is here stays; of one that is not, the hub's name, if the file's `tune download` line has it."""
    folder, ours = str(c.value(key)).rstrip("/"), "distill.teacher" if key.startswith("teacher") else "model.path"
    outer = folder.removesuffix("/original")  # Meta's own files, in a folder of Hugging Face's
    if os.path.isdir(expand(outer)):
        note = c.change if outer != folder else c.carry
        note(key, {ours: outer}, "the folder above has the same weights in Hugging Face's layout")
        return
    named = hub_name(c.theirs, outer)
    if named is None:
        c.change(key, {ours: outer}, f"there is no such folder here; {ours}=OWNER/NAME has it from the hub")
    else:
        c.change(key, {ours: named}, "there is no such folder here; the file's own download line has the name")


def hub_name(theirs: TheirFile, folder: str) -> str | None:
    """The name on the hub that the comments' `tune download NAME --output-dir FOLDER` brings into a folder: into this
    one, or one that has the model's own name."""
    for line in theirs.comments:
        found = re.search(r"tune download (\S+/(\S+))(.*)", line)
        if found is None:
            continue
        into = re.search(r"--output-dir[ =](\S+)", found[3])
        if folder.rpartition("/")[2] == found[2] or (into and into[1].rstrip("/") == folder):
            return found[1]
    return None


def _reference(c: ConfigImport, key: str) -> None:
    if str(c.value(key)).rstrip("/") == str(c.value("checkpointer.checkpoint_dir")).rstrip("/"):
        c.carry(key, {}, "the reference is the model before training")
    else:
        c.refuse(key, "the reference is the model before training, no other one")


def _tokenizer(c: ConfigImport, key: str) -> None:
    path, folder = str(c.value(key)), str(c.value("checkpointer.checkpoint_dir")).rstrip("/").removesuffix("/original")
    if path.startswith(f"{folder}/"):
        c.drop(key, "the tokenizer in the model's folder is used")
    elif path.endswith((".json", ".txt")):
        c.change(key, {"tokenizer.path": path.rpartition("/")[0]}, "the folder, for its tokenizer.json")
    else:
        c.carry(key, {"tokenizer.path": path})


def _prompt_template(c: ConfigImport, key: str) -> None:
    c.refuse(key, "text is written by the tokenizer's chat template; tokenizer.chat_template takes a Jinja file")


def _max_seq_len(c: ConfigImport, key: str) -> None:
    length = c.value(key)
    if length is None:
        c.change(key, {}, "there no limit, here max_seq_len, of which longer samples are cut to: 2048 unless set")
    else:
        c.carry(key, {"max_seq_len": length})


def _lora_modules(c: ConfigImport, key: str) -> None:
    """Three keys there are one list here."""
    found = [ATTENTION.get(str(word), str(word)) for word in c.value(key)]
    mlp, output = bool(c.value("model.apply_lora_to_mlp")), bool(c.value("model.apply_lora_to_output"))
    modules = [*found, *(["gate", "up", "down"] if mlp else []), *(["head"] if output else [])]
    everything = set(modules) == {*ATTENTION.values(), "gate", "up", "down"}
    c.carry(key, {"lora.target_modules": ["all-linear"] if everything else modules})
    for other in ("model.apply_lora_to_mlp", "model.apply_lora_to_output"):
        if other in c.theirs.values:
            c.carry(other, {}, "part of lora.target_modules")


def _quantize_base(c: ConfigImport, key: str) -> None:
    c.carry(key, {"lora.quantize_base": "nf4"} if c.value(key) else {})


def _optimizer(c: ConfigImport, key: str) -> None:
    component = str(c.value(key))
    if component not in OPTIMIZERS:
        c.refuse(key, f"no such optimizer; known are {', '.join(OPTIMIZERS)}", may_be_left_out=False)
        return
    ours, defaults, why = OPTIMIZERS[component]
    c.defaults |= {f"optimizer.{word}": value for word, value in defaults.items()}
    if component == "torch.optim.Adam" and c.value("optimizer.weight_decay"):
        c.refuse(key, "its weight decay is part of the gradient, ours is decoupled; torch.optim.AdamW has that too")
        return
    (c.change if why not in ("", FOUR_BITS) else c.carry)(key, ours, why)


def _fused(c: ConfigImport, key: str) -> None:
    if c.value(key):
        c.carry(key, {"optimizer.implementation": "auto"}, "fused wherever torch's kernel is right")
    else:
        c.carry(key, {"optimizer.implementation": "foreach"})


def _schedule(c: ConfigImport, key: str) -> None:
    name = str(c.value(key)).rpartition(".")[2]
    kinds = {"get_cosine_schedule_with_warmup": "cosine", "none": "constant"}
    if name not in kinds:
        c.refuse(key, f"no such schedule; known are {', '.join(kinds)}", may_be_left_out=False)
    else:
        c.carry(key, {"lr_scheduler.type": kinds[name]})


def _warmup(c: ConfigImport, key: str) -> None:
    c.change(key, {"lr_scheduler.warmup_steps": c.value(key)}, WARM_UP)


def _cycles(c: ConfigImport, key: str) -> None:
    if c.value(key) == 0.5:
        c.carry(key, {})
    else:
        c.refuse(key, "the rate falls once, by half a cosine")


def _loss(c: ConfigImport, key: str) -> None:
    name = str(c.value(key)).rpartition(".")[2]
    if name == "DPOLoss":
        c.carry(key, {"dpo.loss": "sigmoid"})
    elif name in ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss"):
        c.carry(key, {"loss": "cross_entropy"})
    elif name == "CrossEntropyLoss":
        c.change(key, {"loss": "cross_entropy"}, "computed in memory.loss_chunks pieces, with the same value")
    else:
        c.refuse(key, "no such loss; there are cross-entropy and those of dpo.loss", may_be_left_out=False)


def _max_steps(c: ConfigImport, key: str) -> None:
    steps, epochs = c.value(key), c.value("epochs") or 1
    if epochs == 1:
        c.carry(key, {"max_steps": steps})
    else:
        why = f"there each epoch ends after {steps} steps and the next begins, here steps are of whole passes"
        c.change(key, {"max_steps": steps * epochs}, why)


def _seed(c: ConfigImport, key: str) -> None:
    if c.value(key) is None:
        c.change(key, {}, "there another seed each time, here 42, so that a run can be repeated")
    else:
        c.carry(key, {"seed": c.value(key)}, "other random numbers come of it")


def _clip(c: ConfigImport, key: str) -> None:
    value = c.value(key)
    norm = None if value in (None, "inf") else value
    c.carry(key, {"clip_grad_norm": norm})


def _dtype(c: ConfigImport, key: str) -> None:
    if c.value(key) in ("bf16", "fp32"):
        c.carry(key, {"dtype": c.value(key)})
    else:
        c.refuse(key, "expected bf16 or fp32", may_be_left_out=False)


def _device(c: ConfigImport, key: str) -> None:
    kind = str(c.value(key)).partition(":")[0]
    if kind in ("cuda", "cpu"):
        c.carry(key, {"device": kind})
    else:
        c.refuse(key, "expected cuda or cpu", may_be_left_out=False)


def _checkpointing(c: ConfigImport, key: str) -> None:
    c.carry(key, {"memory.activation_checkpointing": "full" if c.value(key) else "none"})


def _selective(c: ConfigImport, key: str) -> None:
    if c.value(key) == "selective":
        why = "there some layers are recomputed whole, here in each layer attention and every second matmul are kept"
        c.change(key, {"memory.activation_checkpointing": "selective"}, why)
    elif c.value(key) == "full":
        c.carry(key, {"memory.activation_checkpointing": "full"})
    else:
        c.refuse(key, "expected full or selective")


def _sharded_layers(c: ConfigImport, key: str) -> None:
    words = {str(word).rpartition(".")[2] for word in c.value(key)}
    if words <= {"tok_embeddings", "output"}:
        why = "embedding and output projection are units of their own"
        c.carry(key, {"parallel.fsdp_wrap_policy": "memory_efficient"}, why)
    else:
        c.refuse(key, "expected tok_embeddings and output")


def _efficient_wrap(c: ConfigImport, key: str) -> None:
    c.carry(key, {"parallel.fsdp_wrap_policy": "memory_efficient"} if c.value(key) else {})


def _compile(c: ConfigImport, key: str) -> None:
    c.carry(key, {"compile": bool(c.value(key))})


def _tracker(c: ConfigImport, key: str) -> None:
    name = str(c.value(key)).rpartition(".")[2]
    if name in TRACKERS:
        c.carry(key, {"log.trackers": [TRACKERS[name]]})
    else:
        c.drop(key, "output_dir/metrics.jsonl has every step")


TABLE = KeyTable(
    same=SAME,
    converted={
        "model._component_": _model,
        "checkpointer.checkpoint_dir": _checkpoint_dir,
        "teacher_checkpointer.checkpoint_dir": _checkpoint_dir,
        "teacher_model._component_": _teacher,
        "kd_loss._component_": _divergence,
        "quantizer._component_": _quantizer,
        "ref_checkpointer.checkpoint_dir": _reference,
        "tokenizer.path": _tokenizer,
        "tokenizer.prompt_template": _prompt_template,
        "tokenizer.max_seq_len": _max_seq_len,
        "model.lora_attn_modules": _lora_modules,
        "model.quantize_base": _quantize_base,
        "optimizer._component_": _optimizer,
        "optimizer.fused": _fused,
        "lr_scheduler._component_": _schedule,
        "lr_scheduler.num_warmup_steps": _warmup,
        "lr_scheduler.num_cycles": _cycles,
        "loss._component_": _loss,
        "max_steps_per_epoch": _max_steps,
        "seed": _seed,
        "clip_grad_norm": _clip,
        "dtype": _dtype,
        "device": _device,
        "enable_activation_checkpointing": _checkpointing,
        "ac_mode": _selective,
        "custom_sharded_layers": _sharded_layers,
        "memory_efficient_fsdp_wrap": _efficient_wrap,
        "compile": _compile,
        "metric_logger._component_": _tracker,
    },
    without=WITHOUT,
    refused=REFUSED,
)
