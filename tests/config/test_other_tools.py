"""Keys as other tools call them: each leads to ours, or to nothing, and never to a key that means
something else.
"""

import re

import pytest

from recipe_lib.config import FullFinetuneConfig
from recipe_lib.config.aliases import GENERIC, NOTHING_LIKE_IT
from recipe_lib.config.check_settings import find_hint, find_meant_keys, find_misspelled_name
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import read_aliases, read_recipe_configs
from recipe_lib.methods.dpo.config import DpoFinetuneConfig

SCHEMA = read_schema(DpoFinetuneConfig)
TOOLS = ("torch", "HF", "PEFT", "TRL", "torchtitan", "Megatron", "torchtune", "Axolotl", "LLaMA-Factory", "DeepSpeed",
         "Soup")  # fmt: skip
OTHERWISE = {"max_samples": "validation.max_samples"}  # bare, it is that of the training data

# From the documentation of each tool; none: there is nothing like it here.
TITAN = {
    "job.dump_folder": "output_dir", "metrics.log_freq": "log.every_n_steps",
    "metrics.enable_tensorboard": "log.trackers", "model.flavor": "model.preset",
    "model.hf_assets_path": "model.path", "optimizer.name": "optimizer.name", "optimizer.beta1": "optimizer.betas",
    "optimizer.early_step_in_backward": "memory.optimizer_in_backward",
    "lr_scheduler.min_lr_factor": "lr_scheduler.min_lr_ratio", "lr_scheduler.decay_type": "lr_scheduler.type",
    "training.dataset": "data.source", "training.dataset_path": "data.source",
    "training.local_batch_size": "batch_size", "training.global_batch_size": None, "training.seq_len": "max_seq_len",
    "training.max_norm": "clip_grad_norm", "training.steps": "max_steps", "training.seed": "seed",
    "training.enable_cpu_offload": "memory.cpu_offload", "training.mixed_precision_param": "dtype",
    "training.mixed_precision_reduce": "parallel.reduce_dtype", "training.compile": "compile",
    "parallelism.data_parallel_replicate_degree": "parallel.data_replicate",
    "parallelism.data_parallel_shard_degree": "parallel.data_shard",
    "parallelism.fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "parallelism.tensor_parallel_degree": "parallel.tensor",
    "parallelism.pipeline_parallel_degree": "parallel.pipeline",
    "parallelism.pipeline_parallel_schedule": "parallel.pipeline_schedule",
    "parallelism.module_fqns_per_model_part": "parallel.pipeline_layers_per_stage",
    "parallelism.context_parallel_degree": "parallel.context", "parallelism.expert_parallel_degree": None,
    "checkpoint.interval": "checkpoint.save_every_n_steps", "checkpoint.keep_latest_k": "checkpoint.keep_last_n",
    "checkpoint.initial_load_path": "model.path", "activation_checkpoint.mode": "memory.activation_checkpointing",
    "validation.freq": "validation.every_n_steps", "comm.train_timeout_seconds": "parallel.heartbeat_timeout_seconds",
}  # fmt: skip
MEGATRON = {
    "tensor_model_parallel_size": "parallel.tensor", "pipeline_model_parallel_size": "parallel.pipeline",
    "num_layers_per_virtual_pipeline_stage": None,
    "virtual_pipeline_model_parallel_size": "parallel.pipeline_stages_per_rank",
    "context_parallel_size": "parallel.context",
    "sequence_parallel": "parallel.tensor", "micro_batch_size": "batch_size", "global_batch_size": None,
    "train_iters": "max_steps", "min_lr": None, "lr_decay_style": "lr_scheduler.type",
    "lr_warmup_iters": "lr_scheduler.warmup_steps", "lr_warmup_fraction": "lr_scheduler.warmup_ratio",
    "clip_grad": "clip_grad_norm", "save_interval": "checkpoint.save_every_n_steps",
    "eval_interval": "validation.every_n_steps", "log_interval": "log.every_n_steps",
    "recompute_granularity": "memory.activation_checkpointing", "seq_length": "max_seq_len",
    "distributed_timeout_minutes": "parallel.heartbeat_timeout_seconds", "expert_model_parallel_size": None,
    "optimizer_cpu_offload": "memory.optimizer_offload", "data_path": "data.source", "lr": "optimizer.lr",
}  # fmt: skip
HUGGING_FACE = {
    "learning_rate": "optimizer.lr", "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "validation.batch_size", "num_train_epochs": "epochs", "warmup_ratio":
    "lr_scheduler.warmup_ratio", "warmup_steps": "lr_scheduler.warmup_steps", "lr_scheduler_type": "lr_scheduler.type",
    "max_grad_norm": "clip_grad_norm", "save_strategy": None, "eval_strategy": None, "logging_strategy": None,
    "save_steps": "checkpoint.save_every_n_steps", "save_total_limit": "checkpoint.keep_last_n",
    "logging_steps": "log.every_n_steps", "eval_steps": "validation.every_n_steps", "report_to": "log.trackers",
    "gradient_checkpointing": "memory.activation_checkpointing", "bf16": "dtype", "torch_compile": "compile",
    "label_smoothing_factor": None, "deepspeed": None, "push_to_hub": None,
    "dataloader_num_workers": "data.num_workers", "fsdp_auto_wrap_policy": "parallel.fsdp_wrap_policy",
    "tp_size": "parallel.tensor", "cp_size": "parallel.context", "dp_replicate_size": "parallel.data_replicate",
    "load_best_model_at_end": "checkpoint.keep_best", "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "checkpoint.greater_is_better", "early_stopping_patience": "validation.patience",
    "early_stopping_threshold": "validation.min_delta",
    "eval_accumulation_steps": None, "overwrite_output_dir": "overwrite_output_dir",
    "dataset_num_proc": "data.num_proc", "max_length": "max_seq_len", "assistant_only_loss": "data.train_on",
    "dataset_text_field": "data.columns", "loss_type": "dpo.loss", "beta": "dpo.beta", "reference_free":
    "dpo.reference_free", "truncation_mode": "data.truncation", "attn_implementation": None, "r": "lora.rank",
    "lora_alpha": "lora.alpha", "target_modules": "lora.target_modules", "use_dora": "lora.dora", "tf32": None,
    "modules_to_save": None, "load_in_4bit": "lora.quantize_base", "packing_strategy": None,
}  # fmt: skip
AXOLOTL_AND_OTHERS = {
    "base_model": "model.path", "datasets": "data.sources", "sequence_len": "max_seq_len",
    "sample_packing": "data.packing", "pad_to_sequence_len": "data.pad_to_multiple_of", "val_set_size": None,
    "micro_batch_size": "batch_size", "num_epochs": "epochs", "train_on_inputs": "data.train_on",
    "cosine_min_lr_ratio": "lr_scheduler.min_lr_ratio", "excess_length_strategy": "data.truncation",
    "tensor_parallel_size": "parallel.tensor", "tiled_mlp": "memory.mlp_tiles", "wandb_project": "log.project",
    "lora_target_linear": "lora.target_modules", "flash_attention": None, "saves_per_epoch":
    "checkpoint.save_every_n_steps", "cutoff_len": "max_seq_len", "finetuning_type": "dpo.trainable",
    "quantization_bit": "lora.quantize_base", "pref_beta": "dpo.beta", "preprocessing_num_workers": "data.num_proc",
    "dataset.path": "data.source", "dataset.packed": "data.packing", "dataset.split": "data.split",
    "dataset.column_map": "data.columns", "checkpointer.checkpoint_dir": "model.path", "tensor_parallel_dim":
    "parallel.tensor", "parallel.tp": "parallel.tensor", "optimizer_in_bwd": "memory.optimizer_in_backward",
    "enable_activation_offloading": "memory.activation_offload", "num_output_chunks": "memory.loss_chunks",
    "memory_efficient_fsdp_wrap": "parallel.fsdp_wrap_policy", "memory_efficient_wrapping":
    "parallel.fsdp_wrap_policy", "fsdp_cpu_offload": "memory.cpu_offload", "stream_layers": "memory.stream_layers",
    "run_val_every_n_steps": "validation.every_n_steps", "keep_last_n_checkpoints": "checkpoint.keep_last_n",
    "model.lora_attn_modules": "lora.target_modules", "model.lora_rank": "lora.rank", "lr_scheduler.num_warmup_steps":
    "lr_scheduler.warmup_steps", "max_steps_per_epoch": "max_steps", "log_peak_memory_stats": None,
}  # fmt: skip
MORE = {
    "zero_optimization.offload_optimizer.device": "memory.optimizer_offload",
    "zero_optimization.offload_param.device": "memory.cpu_offload", "zero_optimization.stage": None,
    "zero_stage": None, "train_batch_size": None, "steps_per_print": "log.every_n_steps", "bf16.enabled": "dtype",
    "pipeline.stages": "parallel.pipeline", "pipeline.partition_method": "parallel.pipeline_balance",
    "tensor_parallel.autotp_size": "parallel.tensor", "aio.block_size": None,
    "activation_checkpointing.cpu_checkpointing": None, "parallelism_config_dp_shard_size": "parallel.data_shard",
    "megatron_lm_tp_degree": "parallel.tensor",
    "parallelism_config_dp_replicate_size": "parallel.data_replicate", "megatron_lm_pp_degree": "parallel.pipeline",
    "megatron_lm_num_micro_batches": "parallel.pipeline_microbatches", "fsdp_sharding_strategy": None,
    "compile.enable": "compile", "float8.recipe_name": "matmul_dtype", "model.dtype": "dtype", "param_dtype": "dtype",
    "tokens.batch_accumulation_per_replica": "gradient_accumulation_steps", "data.num_loading_workers":
    "data.num_workers", "eval.dataset": "validation.source", "lighteval.batch_size": None, "vllm.batch_size": None,
    "generation.max_length": None, "profiler.device": None, "pipeline_parallel_microbatch_size": None,
    "adapter": None, "wandb_run_id": None, "dataset_config": None, "init_timeout_seconds": None, "mask_history":
    "data.train_on", "steps": "max_steps", "num_epoch": "epochs", "memory.checkpointing":
    "memory.activation_checkpointing", "z_loss": None, "add_eos": "data.add_eos", "overwrite_cache": None,
    "recompute_modules": "memory.recompute_cheap", "moe": None, "mode": None, "function": None, "trace": None,
    "end_weight_decay": None, "name": None, "zero_bubble_max_pending_backward":
    "parallel.pipeline_max_deferred_weight_grads", "distributed_type": "parallel.strategy", "gamma_beta_ratio": None,
}  # fmt: skip
KEYS = [
    (name, ours)
    for table in (TITAN, MEGATRON, HUGGING_FACE, AXOLOTL_AND_OTHERS, MORE)
    for name, ours in table.items()
]


@pytest.mark.parametrize(("name", "ours"), KEYS)
def test_another_tools_key(name: str, ours: str | None) -> None:
    assert find_meant_keys(name, SCHEMA) == ([] if ours is None else [ours])


def test_there_are_many() -> None:
    assert len(KEYS) >= 140 and sum(ours is None for _, ours in KEYS) >= 20


def test_an_unknown_section_says_what_is_there(faults) -> None:
    found = faults("", "parallelism.disable_loss_parallel=true")
    assert found[0].startswith(
        "command line: parallelism.disable_loss_parallel=true: unknown key; the keys of parallel"
        " are "
    )
    assert faults("", "profiling.freq=3") == [
        "command line: profiling.freq=3: unknown key; `tune cat CONFIG --describe` lists all keys"
    ]


@pytest.mark.parametrize("found", ["tp_size", "eval_size", "group_size", "save_policy", "val_batches", "num_heads",
                                   "warmup", "log_level", "hub_token", "step_size", "min_size"])  # fmt: skip
def test_what_is_far_is_not_near(found: str) -> None:
    assert find_misspelled_name(found, [key.rpartition(".")[2] for key in SCHEMA.keys]) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [("lora.r", "lora.rank"), ("lora.lora_alpha", "lora.alpha"), ("target_modules", "lora.target_modules"),
     ("quantize_base", "lora.quantize_base"), ("lora_r", "lora.rank"), ("loss_type", ""), ("beta", ""), ("gamma", ""),
     ("label_smoothing", ""), ("finetuning_type", ""), ("ref_model", "")],
)  # fmt: skip
def test_keys_of_another_recipe(name: str, found: str) -> None:
    hint, _ = find_hint(name, read_schema(FullFinetuneConfig))
    assert (
        hint.startswith(f"; {found} is a key of the recipe lora_finetune_distributed")
        if found
        else "; `tune" in hint
    )


def test_names_of_the_reference_are_known() -> None:
    """What the column `known as` says, typed at us; but for what is no key there, and names of
    other matters too.
    """
    missing = {}
    for schema in read_recipe_configs().values():
        for key in read_schema(schema).keys.values():
            for part in key.limits.get("known_as", "").split("; "):
                tool, _, name = part.partition(" ")
                words = [
                    word
                    for word in name.split(", ")
                    if re.fullmatch(r"[a-z_0-9.]+", word) and "_" in word
                ]
                for word in words if tool in TOOLS else []:
                    if find_meant_keys(word, read_schema(schema)) != [key.name]:
                        missing[word] = key.name
    assert missing == OTHERWISE


def test_tables_fit_together() -> None:
    assert set(read_aliases().sections.values()) <= set(SCHEMA.sections)
    assert not NOTHING_LIKE_IT & set(read_aliases().keys)
    assert not NOTHING_LIKE_IT & {name.rpartition(".")[2] for name in SCHEMA.keys}
    assert all(word.islower() for word in GENERIC)
