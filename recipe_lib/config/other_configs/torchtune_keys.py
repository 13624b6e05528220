"""torchtune's keys (0.6.1): which are ours under another name, which are not needed, which are missing here."""

from typing import Any

from recipe_lib.config.other_configs.trainer_keys import BLOCKS, FOUR_BITS, NO_ZEROS, PAGED

NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")

DEFAULTS: dict[str, Any] = {
    "clip_grad_norm": None,
    "lr_scheduler._component_": "none",
    "tokenizer.max_seq_len": None,
    "model.lora_alpha": 16,
    "model.lora_rank": 8,
}

# A key that only such configs have, what they are for, what does that here.
OTHER_PURPOSES = (
    (
        "tasks",
        "it measures a model (eleuther_eval) and trains none",
        "`tune eval MODEL --lm-eval TASKS` does",
    ),
    ("ppo_epochs", "it is for reinforcement learning (PPO)", "there is none; dpo_distributed trains on pairs"),
    ("grpo_samples", "it is for reinforcement learning (GRPO)", "there is none; dpo_distributed trains on pairs"),
    ("max_new_tokens", "it generates and trains nothing", "`tune generate MODEL` does"),
)

# Methods: a key that asks for one, the key of ours that it needs, what is missing without that.
METHODS = (
    ("teacher_model", "distill.teacher", "there is no recipe for distillation"),
    ("quantizer", "qat", "there is no quantization-aware training"),
)
# Divergences, and fake quantizers: what is rounded there besides the weights.
DIVERGENCES = {"ForwardKL": "forward_kl", "ReverseKL": "reverse_kl"}
QUANTIZERS = {
    "Int8DynActInt4WeightQATQuantizer": ("int4", "weights alone are rounded; there inputs too, to int8 token by token"),
    "Int4WeightOnlyQATQuantizer": ("int4", ""),
}

OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # component: our keys; torch's or bitsandbytes' defaults; what is different, or of 4 bits to be known
    "torch.optim.AdamW": ({"optimizer.name": "adamw"}, {"weight_decay": 0.01, "betas": [0.9, 0.999]}, ""),
    "torch.optim.Adam": ({"optimizer.name": "adamw"}, {"weight_decay": 0.0, "betas": [0.9, 0.999]}, ""),
    "torch.optim.SGD": ({"optimizer.name": "sgd"}, {}, ""),
    "bitsandbytes.optim.AdamW8bit": (
        {"optimizer.name": "adamw", "optimizer.state_bits": 8},
        {"weight_decay": 0.01, "betas": [0.9, 0.999]},
        BLOCKS,
    ),
    "bitsandbytes.optim.PagedAdamW": (
        {"optimizer.name": "adamw", "optimizer.state_bits": 32},
        {"weight_decay": 0.01, "betas": [0.9, 0.999]},
        PAGED,
    ),
    "bitsandbytes.optim.PagedAdamW8bit": (
        {"optimizer.name": "adamw", "optimizer.state_bits": 8},
        {"weight_decay": 0.01, "betas": [0.9, 0.999]},
        f"{PAGED}; {BLOCKS}",
    ),
}

for _bits, _why in ((8, NO_ZEROS), (4, FOUR_BITS)):
    for _module in ("prototype.low_bit_optim", "optim"):
        OPTIMIZERS[f"torchao.{_module}.AdamW{_bits}bit"] = (
            {"optimizer.name": "adamw", "optimizer.state_bits": _bits},
            {"weight_decay": 0.01, "betas": [0.9, 0.999]},
            _why,
        )

TRACKERS = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o"}

_FROM_FOLDER = "the model's folder says it: config.json, and the index of its files"
_RESUMED = "states are read from output_dir/state: resume=latest goes on with a run of ours"
_PROFILER = "there is no profiler; `tune plan CONFIG --full` has the time of each part of a step"
_CHECKPOINTER = {
    "_component_": "checkpoints are folders in the Hugging Face layout",
    "checkpoint_files": _FROM_FOLDER,
    "model_type": _FROM_FOLDER,
    "output_dir": "what a run writes is in output_dir",
    "safe_serialization": "files are safetensors",
}

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
}  # fmt: skip
WITHOUT = {
    **{f"{section}.{word}": why for section in ("checkpointer", "ref_checkpointer", "teacher_checkpointer")
       for word, why in _CHECKPOINTER.items()},
    "tokenizer._component_": "the folder's tokenizer files say what it is",
    "tokenizer.merges_file": "tokenizer.json has the merges",
    "tokenizer.merges_path": "tokenizer.json has the merges",
    "tokenizer.vocab_path": "tokenizer.json has the vocabulary",
    "tokenizer.special_tokens_path": "tokenizer.json has the special tokens",
    "save_adapter_weights_only": "output_dir/adapter has the adapter alone, a state what a run goes on with",
    "metric_logger.log_dir": "output_dir has metrics.jsonl and trackers/",
    "metric_logger.organize_logs": "each run has its own output_dir",
    "log_peak_memory_stats": "every step has its peak memory",
    "log_level": "`tune run -q` and `-v` say less and more",
    "ac_option": "part of ac_mode",
    "tensor_parallel_plan": "tensor parallel needs no plan",
    "profiler": _PROFILER,
    "cudnn_deterministic_mode": "a run that is resumed is bitwise the same without it",
    "enable_async_checkpointing": "a state is written between two steps",
    "collate_fn": "batches are padded to their longest sequence",
    "kd_loss.num_output_chunks": "the divergence is computed in memory.loss_chunks pieces",
    "low_cpu_ram": "weights are read one by one",
}  # fmt: skip
REFUSED = {
    "resume_from_checkpoint": f"a state of torchtune's cannot be gone on with; {_RESUMED}",
    "checkpointer.recipe_checkpoint": f"a state of torchtune's cannot be gone on with; {_RESUMED}",
    "checkpointer.adapter_checkpoint": "is torchtune's; lora.adapter_path goes on with a folder of PEFT's",
    "teacher_checkpointer.recipe_checkpoint": "the teacher is a folder in the Hugging Face layout",
    "ref_checkpointer.recipe_checkpoint": "the reference is the model before training",
    "data_parallel_dim": "expected data_parallel_shard_dim or data_parallel_replicate_dim",
}  # fmt: skip
