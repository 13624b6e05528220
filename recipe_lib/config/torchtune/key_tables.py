"""List torchtune's keys and values (0.6.1) with what stands for them in this project's configs.

`import_file.py` looks a key up in these tables, in this order: MEANINGS has keys whose values are
translated, SAME those with another name alone, WITHOUT those that nothing is needed for, REFUSED
those that are missing here. The last two have reasons, for a key or for all keys of a section.
"Ours" is this project's, "theirs" and "there" torchtune's.
"""

from typing import Any

from recipe_lib.config.torchtune.conversion import VALUE, Meaning

# In MEANINGS, stands for every value that has no entry of its own.
ANY = "any value"

# Key -> what torchtune takes for it if a file leaves it out, where our default is another one.
DEFAULTS: dict[str, Any] = {
    "clip_grad_norm": None,
    "lr_scheduler._component_": "none",
    "tokenizer.max_seq_len": None,
    "model.lora_alpha": 16,
    "model.lora_rank": 8,
}

_NO_REINFORCEMENT = "there is none; dpo_distributed trains on pairs"
# Key that only configs of another purpose have -> this purpose, and what serves it here.
OTHER_PURPOSES = {
    "tasks": (
        "it measures a model (eleuther_eval) and trains none; `tune eval MODEL --lm-eval TASKS`"
        " does"
    ),
    "ppo_epochs": f"it is for reinforcement learning (PPO); {_NO_REINFORCEMENT}",
    "grpo_samples": f"it is for reinforcement learning (GRPO); {_NO_REINFORCEMENT}",
    "max_new_tokens": "it generates and trains nothing; `tune generate MODEL` does",
}

# Reasons why an optimizer of theirs is not the same here, shown to the user.
PAGED = (
    "states are on the device, none is paged out when it is full: memory.optimizer_offload=true has"
    " them on the host"
)
BLOCKS = (
    "blocks of other sizes have a scale each, so the states are rounded otherwise; as there, a"
    " gradient under a thousandth of its block's largest takes too short steps"
)
NO_ZEROS = "no second moment is rounded to 0, which there makes too long steps of small gradients"
FOUR_BITS = "as there, a gradient far below its block's largest hardly moves its weight"
# Defaults of AdamW's classes in torch, torchao and bitsandbytes, where ours are others.
_OF_ADAMW = {"optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999]}


def _describe_adamw(state_bits: int | None, why: str = "", *, differs: bool = True) -> Meaning:
    """Return the meaning of an AdamW.

    state_bits: bits of each number of the states; None: those of the parameters' dtype. differs:
    the effect here is another one, for the reason `why`.
    """
    bits = {} if state_bits is None else {"optimizer.state_bits": state_bits}
    return Meaning(
        {"optimizer.name": "adamw", **bits}, why=why, differs=differs, defaults=_OF_ADAMW
    )


# `optimizer._component_` -> what it says here.
OPTIMIZERS = {
    "torch.optim.AdamW": _describe_adamw(None, differs=False),
    "torch.optim.Adam": Meaning(
        {"optimizer.name": "adamw"},
        defaults={"optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.999]},
    ),
    "torch.optim.SGD": Meaning({"optimizer.name": "sgd"}),
    "bitsandbytes.optim.AdamW8bit": _describe_adamw(8, BLOCKS),
    "bitsandbytes.optim.PagedAdamW": _describe_adamw(32, PAGED),
    "bitsandbytes.optim.PagedAdamW8bit": _describe_adamw(8, f"{PAGED}; {BLOCKS}"),
}
# Modules in which older and newer releases of torchao have them.
for _module in ("prototype.low_bit_optim", "optim"):
    OPTIMIZERS[f"torchao.{_module}.AdamW8bit"] = _describe_adamw(8, NO_ZEROS)
    OPTIMIZERS[f"torchao.{_module}.AdamW4bit"] = _describe_adamw(4, FOUR_BITS, differs=False)

# torchtune's schedules are transformers', whose first step has a rate of 0.
WARM_UP = (
    "each step of the warm-up has the rate that theirs has one step later: the first trains, there"
    " at a rate of 0"
)
# The default of torchtune's quantizers.
_QAT = {"quantizer.groupsize": 256}
_SELECTIVE = (
    "there some layers are recomputed whole, here in each layer attention and every second matmul"
    " are kept"
)
_CHUNKED = "computed in memory.loss_chunks pieces, with the same value"
_WRAPPED = {"parallel.fsdp_wrap_policy": "memory_efficient"}

# Key -> value -> what it says here. A value is written as text, a component by its whole path or by
# its last word; ANY: every other value.
MEANINGS: dict[str, dict[str, Meaning]] = {
    "tokenizer.max_seq_len": {
        "None": Meaning(
            {},
            "there no limit, here max_seq_len, of which longer samples are cut to: 2048 unless set",
            True,  # differs
        ),
        ANY: Meaning({"max_seq_len": VALUE}),
    },
    "lr_scheduler.num_warmup_steps": {
        ANY: Meaning({"lr_scheduler.warmup_steps": VALUE}, WARM_UP, differs=True)
    },
    "seed": {
        "None": Meaning(
            {}, "there another seed each time, here 42, so that a run can be repeated", differs=True
        ),
        ANY: Meaning({"seed": VALUE}, "other random numbers come of it"),
    },
    "clip_grad_norm": {
        "inf": Meaning({"clip_grad_norm": None}),
        ANY: Meaning({"clip_grad_norm": VALUE}),
    },
    "device": {"cuda": Meaning({"device": "cuda"}), "cpu": Meaning({"device": "cpu"})},
    "custom_sharded_layers": dict.fromkeys(
        (
            "['tok_embeddings', 'output']",
            "['output', 'tok_embeddings']",
            "['tok_embeddings']",
            "['output']",
        ),
        Meaning(
            {"parallel.fsdp_wrap_policy": "memory_efficient"},
            "embedding and output projection are units of their own",
        ),
    ),
    "optimizer._component_": OPTIMIZERS,
    "optimizer.fused": {
        "True": Meaning(
            {"optimizer.implementation": "auto"}, "fused wherever torch's kernel is right"
        ),
        "False": Meaning({"optimizer.implementation": "foreach"}),
    },
    "lr_scheduler._component_": {
        "get_cosine_schedule_with_warmup": Meaning({"lr_scheduler.type": "cosine"}),
        "none": Meaning({"lr_scheduler.type": "constant"}),
    },
    "lr_scheduler.num_cycles": {"0.5": Meaning()},
    "loss._component_": {
        "DPOLoss": Meaning({"dpo.loss": "sigmoid"}),
        "CEWithChunkedOutputLoss": Meaning({"loss": "cross_entropy"}),
        "LinearCrossEntropyLoss": Meaning({"loss": "cross_entropy"}),
        "CrossEntropyLoss": Meaning({"loss": "cross_entropy"}, _CHUNKED, differs=True),
    },
    "kd_loss._component_": {
        "ForwardKLLoss": Meaning({"distill.divergence": "forward_kl"}),
        "ForwardKLWithChunkedOutputLoss": Meaning({"distill.divergence": "forward_kl"}),
        "ReverseKLLoss": Meaning({"distill.divergence": "reverse_kl"}),
        "ReverseKLWithChunkedOutputLoss": Meaning({"distill.divergence": "reverse_kl"}),
    },
    "quantizer._component_": {
        "Int8DynActInt4WeightQATQuantizer": Meaning(
            {"qat": "int4"},
            why="weights alone are rounded; there inputs too, to int8 token by token",
            differs=True,
            defaults=_QAT,
        ),
        "Int4WeightOnlyQATQuantizer": Meaning({"qat": "int4"}, defaults=_QAT),
    },
    "model.quantize_base": {"True": Meaning({"lora.quantize_base": "nf4"}), "False": Meaning()},
    "dtype": {"bf16": Meaning({"dtype": "bf16"}), "fp32": Meaning({"dtype": "fp32"})},
    "enable_activation_checkpointing": {
        "True": Meaning({"memory.activation_checkpointing": "full"}),
        "False": Meaning({"memory.activation_checkpointing": "none"}),
    },
    "ac_mode": {
        "selective": Meaning(
            {"memory.activation_checkpointing": "selective"}, _SELECTIVE, differs=True
        ),
        "full": Meaning({"memory.activation_checkpointing": "full"}),
    },
    "memory_efficient_fsdp_wrap": {"True": Meaning(_WRAPPED), "False": Meaning()},
    "compile": {"True": Meaning({"compile": True}), "False": Meaning({"compile": False})},
    "metric_logger._component_": {
        "WandBLogger": Meaning({"log.trackers": ["wandb"]}),
        "TensorBoardLogger": Meaning({"log.trackers": ["tensorboard"]}),
    },
}
# Key -> the error for a value without a meaning, in place of `expected X or Y`.
NO_MEANING = {
    "custom_sharded_layers": "expected tok_embeddings and output",
    "optimizer._component_": f"no such optimizer; known are {', '.join(OPTIMIZERS)}",
    "lr_scheduler._component_": "no such schedule; known are get_cosine_schedule_with_warmup, none",
    "lr_scheduler.num_cycles": "the rate falls once, by half a cosine",
    "loss._component_": "no such loss; there are cross-entropy and those of dpo.loss",
    "kd_loss._component_": "no such divergence; there are the losses of ForwardKL and ReverseKL",
}
# Keys of which a value without a meaning cannot be left out by `--without KEY`.
NEEDED = (
    "optimizer._component_",
    "lr_scheduler._component_",
    "loss._component_",
    "kd_loss._component_",
    "quantizer._component_",
    "dtype",
    "device",
    "model._component_",
)

# The linears of a layer: torchtune's name in attention -> ours; our names in the MLP.
ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o"}
MLP = ("gate", "up", "down")

_FROM_FOLDER = "the model's folder says it: config.json, and the index of its files"
_RESUMED = "states are read from output_dir/state: resume=latest goes on with a run of ours"
_PROFILER = "there is no profiler; `tune plan CONFIG --full` has the time of each part of a step"
# Keys of each of the sections `checkpointer`, `ref_checkpointer`, `teacher_checkpointer`.
_CHECKPOINTER = {
    "_component_": "checkpoints are folders in the Hugging Face layout",
    "checkpoint_files": _FROM_FOLDER,
    "model_type": _FROM_FOLDER,
    "output_dir": "what a run writes is in output_dir",
    "safe_serialization": "files are safetensors",
}

# Key -> our name for it, with the same values.
SAME = {
    "output_dir": "output_dir",
    "shuffle": "data.shuffle",
    "batch_size": "batch_size",
    "epochs": "epochs",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    "optimizer.momentum": "optimizer.momentum",
    "loss.num_output_chunks": "memory.loss_chunks",
    "loss.beta": "dpo.beta",
    "loss.label_smoothing": "dpo.label_smoothing",
    "model.lora_rank": "lora.rank",
    "model.lora_alpha": "lora.alpha",
    "model.lora_dropout": "lora.dropout",
    "model.use_dora": "lora.dora",
    "enable_activation_offloading": "memory.activation_offload",
    "optimizer_in_bwd": "memory.optimizer_in_backward",
    "fsdp_cpu_offload": "memory.cpu_offload",
    "fsdp.cpu_offload": "memory.cpu_offload",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "tensor_parallel_dim": "parallel.tensor",
    "context_parallel_dim": "parallel.context",
    "data_parallel_shard_dim": "parallel.data_shard",
    "data_parallel_replicate_dim": "parallel.data_replicate",
    "run_val_every_n_steps": "validation.every_n_steps",
    "batch_size_val": "validation.batch_size",
    "log_every_n_steps": "log.every_n_steps",
    "save_every_n_steps": "checkpoint.save_every_n_steps",
    "keep_last_n_checkpoints": "checkpoint.keep_last_n",
    "metric_logger.project": "log.project",
    "metric_logger.name": "log.run_name",
    "kd_ratio": "distill.weight",
    "quantizer.groupsize": "qat_group_size",
    "fake_quant_after_n_steps": "qat_start_step",
}
# Key or section -> why nothing is missed without it.
WITHOUT = {
    **{f"checkpointer.{word}": why for word, why in _CHECKPOINTER.items()},
    **{f"ref_checkpointer.{word}": why for word, why in _CHECKPOINTER.items()},
    **{f"teacher_checkpointer.{word}": why for word, why in _CHECKPOINTER.items()},
    "tokenizer._component_": "the folder's tokenizer files say what it is",
    "tokenizer.merges_file": "tokenizer.json has the merges",
    "tokenizer.merges_path": "tokenizer.json has the merges",
    "tokenizer.vocab_path": "tokenizer.json has the vocabulary",
    "tokenizer.special_tokens_path": "tokenizer.json has the special tokens",
    "save_adapter_weights_only": (
        "output_dir/adapter has the adapter alone, a state what a run goes on with"
    ),
    "metric_logger.log_dir": "output_dir has metrics.jsonl and trackers/",
    "metric_logger.organize_logs": "each run has its own output_dir",
    "log_peak_memory_stats": "every step has its peak memory",
    "metric_logger._component_": "output_dir/metrics.jsonl has every step",
    "log_level": "`tune run -q` and `-v` say less and more",
    "ac_option": "part of ac_mode",
    "tensor_parallel_plan": "tensor parallel needs no plan",
    "profiler": _PROFILER,
    "cudnn_deterministic_mode": "a run that is resumed is bitwise the same without it",
    "enable_async_checkpointing": "a state is written between two steps",
    "collate_fn": "batches are padded to their longest sequence",
    "kd_loss.num_output_chunks": "the divergence is computed in memory.loss_chunks pieces",
    "low_cpu_ram": "weights are read one by one",
}
# Key or section -> what is missing here. A value that is off (null, false, 0, empty) is accepted.
REFUSED = {
    "resume_from_checkpoint": f"a state of torchtune's cannot be gone on with; {_RESUMED}",
    "checkpointer.recipe_checkpoint": f"a state of torchtune's cannot be gone on with; {_RESUMED}",
    "checkpointer.adapter_checkpoint": (
        "is torchtune's; lora.adapter_path goes on with a folder of PEFT's"
    ),
    "teacher_checkpointer.recipe_checkpoint": "the teacher is a folder in the Hugging Face layout",
    "ref_checkpointer.recipe_checkpoint": "the reference is the model before training",
    "data_parallel_dim": "expected data_parallel_shard_dim or data_parallel_replicate_dim",
}

# Modules of torchtune.models whose models are here.
FAMILIES = (
    "code_llama2",
    "gemma",
    "gemma2",
    "llama2",
    "llama3",
    "llama3_1",
    "llama3_2",
    "llama3_3",
    "mistral",
    "phi3",
    "phi4",
    "qwen2",
    "qwen2_5",
)

# (part of a component's path, why there is no such model here).
NO_MODELS = (
    ("vision", "there are no images here, only text"),
    ("multimodal", "there are no images here, only text"),
    ("flux", "there are no images here, only text"),
    ("clip_", "there are no images here, only text"),
    ("classifier", "there is no model with a head for classes or rewards"),
    ("reward", "there is no model with a head for classes or rewards"),
)
