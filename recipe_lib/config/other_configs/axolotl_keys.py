"""Axolotl's keys: which are ours under another name, which are not needed, which are missing here."""

from typing import Any

from recipe_lib.config.other_configs import trainer_keys as trainer

NULL_MEANS = ()

DEFAULTS: dict[str, Any] = {
    **trainer.DEFAULTS,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "sequence_len": 512,
    "sample_packing": False,
    "output_dir": "./model-out",
    "bf16": "auto",
    "excess_length_strategy": "drop",
    "seed": 42,
    "lora_r": 8,
    "lora_dropout": 0.0,
    "rl_beta": 0.1,
}

OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules")

OF_PAIRS = ("rl_beta",)

# Methods: a key or section that asks for one, the key of ours that it needs, what is missing without that.
METHODS = (
    ("reward_model", "reward.loss", "there is no recipe for reward models"),
    ("process_reward_model", "", "there is no recipe for rewards of steps"),
    ("gkd_trainer", "", "there is no recipe for distillation on a student's own samples"),
    ("kd_trainer", "", "distill_distributed reads what `tune teach` writes, no dataset of logprobs"),
    ("ebft", "", "there is no recipe for it"),
    ("qat", "qat", "there is no quantization-aware training"),
    ("relora_steps", "", "adapters are not merged and restarted while they train"),
    ("relora", "", "adapters are not merged and restarted while they train"),
    ("gptq", "", "weights in GPTQ's format are not trained on; lora.quantize_base quantizes while it reads"),
    ("is_multimodal", "", "there are no images here, only text"),
    ("processor_type", "", "there are no images here, only text"),
    ("trl", "", "there is no recipe for reinforcement learning; dpo_distributed trains on pairs"),
)

NO_RL = {
    "kto": "there is no KTO; dpo_distributed trains on pairs",
    "orpo": "there is no ORPO; dpo.loss=simpo needs no reference either",
    "grpo": "there is no recipe for reinforcement learning; dpo_distributed trains on pairs",
    "gdpo": "there is no recipe for reinforcement learning; dpo_distributed trains on pairs",
}

# `rl` -> dpo.loss, and the key of ours that it needs.
PAIR_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "kto": "kto"}
NEEDS = {"kto": "dpo.desirable_weight"}
QAT_TYPES = {"int4": "int4", "int8": "int8", "float8": "fp8", "float8_e4m3fn": "fp8", "fp8": "fp8"}

_KERNELS = "kernels compute the same: fused_kernels"
_ATTENTION = "attention takes the fastest kernel that is right"
_PADDING = "padding is not trained on; data.pad_to_multiple_of pads"
_CACHE = "tokenized samples are kept in data.cache_dir"
_WANDB = "log.project and log.run_name are what the tracker is given"

SAME = {
    **trainer.SAME,
    "base_model": "model.path",
    "micro_batch_size": "batch_size",
    "sequence_len": "max_seq_len",
    "lora_r": "lora.rank",
    "lora_dropout": "lora.dropout",
    "lora_model_dir": "lora.adapter_path",
    "peft_use_dora": "lora.dora",
    "peft_use_rslora": "lora.rslora",
    "rl_beta": "dpo.beta",
    "dpo_beta": "dpo.beta",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "simpo_gamma": "dpo.simpo_gamma",
    "kto_desirable_weight": "dpo.desirable_weight",
    "kto_undesirable_weight": "dpo.undesirable_weight",
    "center_rewards_coefficient": "reward.center_rewards_coefficient",
    "qat.group_size": "qat_group_size",
    "qat.fake_quant_after_n_steps": "qat_start_step",
    "cosine_min_lr_ratio": "lr_scheduler.min_lr_ratio",
    "wandb_name": "log.run_name",
    "wandb_run_name": "log.run_name",
    "tensor_parallel_size": "parallel.tensor",
    "context_parallel_size": "parallel.context",
    "sequence_parallel_degree": "parallel.context",
    "dp_shard_size": "parallel.data_shard",
    "dp_replicate_size": "parallel.data_replicate",
    "tiled_mlp_num_shards": "memory.mlp_tiles",
    "dataset_processes": "data.num_proc",
    "dataset_num_proc": "data.num_proc",
}  # fmt: skip
WITHOUT = {
    **trainer.WITHOUT,
    "num_labels": "a reward model has one",
    "model_type": "the model's config.json says it",
    "tokenizer_type": "the tokenizer's files say it",
    "is_llama_derived_model": "the model's config.json says it",
    "is_mistral_derived_model": "the model's config.json says it",
    "is_falcon_derived_model": "the model's config.json says it",
    "is_qwen_derived_model": "the model's config.json says it",
    "base_model_config": "the model's config.json is used",
    "trust_remote_code": "no code of a model is run",
    "tokenizer_use_fast": "the tokenizer's files say it",
    "tokenizer_legacy": "the tokenizer's files say it",
    "tokenizer_use_mistral_common": "the tokenizer's files say it",
    "strict": "an unknown key is always an error",
    "plugins": "what they change are keys of their own; --plugin registers names of ours",
    "liger_*": _KERNELS,
    "cut_cross_entropy": _KERNELS,
    "fsdp_version": "FSDP2 is always used",
    "fsdp_final_state_dict_type": "the model is a folder of Hugging Face's layout",
    "pad_to_sequence_len": _PADDING,
    "eval_sample_packing": "validation packs as training does",
    "sample_packing_eff_est": "how full sequences are is computed",
    "sample_packing_group_size": "how full sequences are is computed",
    "sample_packing_bin_size": "how full sequences are is computed",
    "total_num_tokens": "is computed",
    "dataset_prepared_path": _CACHE,
    "dataset_keep_in_memory": _CACHE,
    "streaming": _CACHE,
    "shuffle_merged_datasets": "data.shuffle draws the order from the seed",
    "lora_fan_in_fan_out": "the model's linears say it",
    "lora_mlp_kernel": _KERNELS,
    "lora_qkv_kernel": _KERNELS,
    "lora_o_kernel": _KERNELS,
    "lora_on_cpu": "each rank reads its own slices of the weights",
    "heads_k_stride": "is a matter of speed",
    "ring_attn_func": "ranks exchange tokens for heads",
    "xformers_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "flex_attention": _ATTENTION,
    "eager_attention": _ATTENTION,
    "attention": _ATTENTION,
    "flex_attn_compile_kwargs": _ATTENTION,
    "experts_implementation": "experts' tokens are multiplied in groups",
    "flash_attn_cross_entropy": _KERNELS,
    "flash_attn_rms_norm": _KERNELS,
    "flash_attn_fuse_mlp": _KERNELS,
    "flash_attn_fuse_qkv": _KERNELS,
    "special_tokens.pad_token": _PADDING,
    "special_tokens": "those of the tokenizer's files; where another one is meant, change it there before training",
    "wandb_entity": _WANDB,
    "wandb_watch": _WANDB,
    "wandb_run_id": _WANDB,
    "wandb_log_model": _WANDB,
    "wandb_mode": _WANDB,
    "eval_table_size": "answers are not shown while a run goes; `tune generate` gives them",
    "eval_max_new_tokens": "answers are not shown while a run goes; `tune generate` gives them",
    "do_causal_lm_eval": "`tune eval` measures a model",
    "loss_watchdog_threshold": "a loss that is no finite number ends a run",
    "loss_watchdog_patience": "a loss that is no finite number ends a run",
    "debug": "`tune data show` has the samples as they are trained",
    "gc_steps": "is a matter of memory",
    "profiler_steps": "there is no profiler; `tune plan CONFIG --full` has the time of each part of a step",
    "device_map": "each rank has its device",
    "ddp": "`tune run --nproc_per_node` starts the ranks",
    "mlflow_*": "output_dir/metrics.jsonl has every step",
    "comet_*": "output_dir/metrics.jsonl has every step",
    "hf_use_auth_token": "`hf auth login` is asked",
    "push_dataset_to_hub": "nothing is sent to the hub",
    "eot_tokens": "the end of each trained turn is trained",
    "use_kernels": _KERNELS,
}  # fmt: skip
REFUSED = {
    **trainer.REFUSED,
    "qat.quantize_embedding": "the layers' linears are rounded, the embedding is not",
    "tokens": "no token is added; add it to the model's folder first",
    "added_tokens_overrides": "no token is added; add it to the model's folder first",
    "lora_modules_to_save": "nothing is trained whole next to adapters; lora.target_modules takes embedding and head",
    "peft_layers_to_transform": "every layer has adapters",
    "unfrozen_parameters": "every parameter is trained, or adapters",
    "embedding_lr": "every parameter has one learning rate",
    "embedding_lr_scale": "every parameter has one learning rate",
    "lr_groups": "every parameter has one learning rate",
    "lr_quadratic_warmup": "the warm-up is a line",
    "cosine_constant_lr_ratio": "the rate falls to the end",
    "noisy_embedding_alpha": "no noise is added to embeddings",
    "rpo_alpha": "dpo.loss has no term for the chosen answer's likelihood",
    "orpo_alpha": "there is no ORPO",
    "dpo_use_weighting": "pairs have equal weights",
    "curriculum_sampling": "samples are drawn in an order from the seed",
    "min_sample_len": "short samples are trained on; take them out of the file",
    "s2_attention": "attention is over the whole sequence",
    "expert_parallel_size": "experts are shared by parallel.tensor",
    "default_system_message": "no message is put before a sample's own; write it into the samples",
    "rope_scaling": "the model's config.json says it",
    "overrides_of_model_config": "the model's config.json says it",
    "revision_of_model": "`tune download MODEL --revision` fetches it",
    "use_dft_loss": "the loss is cross-entropy",
    "use_pose": "positions are those of the sequence",
    "llama4_linearized_experts": "there is no such model",
}  # fmt: skip
