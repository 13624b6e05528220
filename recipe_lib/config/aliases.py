"""List the names that other tools, and earlier releases, have for our keys, sections and values.

They are for hints in errors (`did you mean optimizer.lr?`); no setting is read by them.
`check_settings.py` looks up keys and sections (through `paths.read_aliases`), `convert_values.py`
values. Names for the keys of `dpo`, `reward` and `distill` are with these recipes' config classes.
"""

from collections.abc import Mapping

# Our key -> what it was called here before, parted by spaces as in all tables below. A name without
# a dot is looked up for a key at the top level, and for the last word of a key in any section.
_EARLIER = {
    "model.implementation": "model.source",
    "parallel.pipeline_max_deferred_weight_grads": "pipeline_put_off",
    "parallel.tensor_replicate_kv_heads": "tensor_copy_kv_heads",
    "parallel.tensor_regather_in_backward": "tensor_recompute_gather",
    "parallel.pipeline_balance": "pipeline_split",
    "parallel.fsdp_wrap_policy": "wrapping",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler.type": "lr_schedule.kind lr_scheduler.kind lr_schedule.type lr_schedule.name",
    "lr_scheduler.warmup_steps": "lr_schedule.warmup_steps",
    "lr_scheduler.warmup_ratio": "lr_schedule.warmup_ratio",
    "lr_scheduler.min_lr_ratio": "final_share",
    "data.check_label_mask": "trained_share",
    "data.truncation": "long_rows",
    "data.on_invalid": "bad_rows",
    "data.num_proc": "data.workers",
    "data.num_workers": "loader_workers",
    "data.pad_to_multiple_of": "pad_to_multiple",
    "data.max_samples": "data.max_rows",
    "validation.max_samples": "validation.max_rows",
    "data.max_sample_mib": "max_row_mib",
    "lora.target_modules": "lora.modules targets",
    "lora.quantize_base": "lora.quantize",
    "lora.adapter_path": "lora.adapter",
    "lora.merge_on_save": "lora.merge",
    "memory.host_memory_limit_gib": "host_memory",
    "memory.activation_budget_gib": "activation_budget",
    "memory.activation_offload_prefetch_layers": "activation_offload_ahead",
    "memory.mlp_tiles": "mlp_chunks",
    "checkpoint.keep_last_n": "checkpoint.keep",
    "checkpoint.save_every_n_steps": "save_every_steps",
    "log.every_n_steps": "log.every_steps",
    "validation.every_n_steps": "validation.every_steps",
    "overwrite_output_dir": "overwrite",
}

# Our key -> names of torchtitan, Megatron, HF's Trainer and accelerate, TRL, PEFT, Axolotl,
# LLaMA-Factory, torchtune.
_ELSEWHERE = {
    "model": "model_args model_config",
    "model.path": (
        "model.name model.name_or_path model_name model_name_or_path pretrained_model_name_or_path"
        " base_model base_model_config checkpoint_dir hf_assets_path initial_load_path"
        " load_checkpoint_path pretrained_checkpoint"
    ),
    "model.preset": "model.flavor model_flavor model_size",
    "router_aux_loss_coef": "moe_aux_loss_coeff aux_loss_coef moe_aux_loss_coef",
    "model.implementation": "model_impl model_class auto_model_class",
    "tokenizer": "tokenizer_config",
    "tokenizer.path": (
        "tokenizer.name tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model "
        "processor_name_or_path"
    ),
    "tokenizer.chat_template": (
        "chat_template chat_template_jinja chat_template_path jinja_template"
    ),
    "data": "data_args data_module datamodule",
    "data.source": (
        "dataset dataset_name dataset_path dataset_dir data_files data_path data_dir train_file"
        " train_data train_data_path train_dataset training_dataset data.path data.name"
        " data.dataset data.train_path dataset.path dataset.name dataset.train_path"
        " dataset.data_files train_dataset.path training_dataset.path"
    ),
    "data.sources": (
        "datasets datasets_mix dataset_mixer dataset_mix mix train_datasets data.datasets data.mix "
        "interleave_probs "
        "mix_strategy data_weights dataset_weights blend"
    ),
    "data.format": "data.type dataset_format dataset_type data_format",
    "data.split": "train_split dataset_train_split dataset_split",
    "data.columns": (
        "column_map field_mapping column_mapping dataset_text_field text_column field_messages"
    ),
    "data.template": "template prompt_template",
    "data.train_on": (
        "roles_to_train masking_strategy mask_history assistant_only_loss completion_only_loss "
        "train_on_responses_only mask_prompt train_on_input train_on_inputs train_on_prompt"
    ),
    "data.packing": (
        "packed pack sample_packing pack_sequences neat_packing padding_free packed_sequence"
    ),
    "data.pad_to_multiple_of": "pad_to_sequence_len",
    "data.truncation": "truncation_mode excess_length_strategy",
    "data.shuffle": "shuffle_dataset shuffle_merged_datasets",
    "data.add_bos": "add_bos_token prepend_bos",
    "data.add_eos": "add_eos_token append_eos",
    "data.parse_special_tokens": "split_special_tokens",
    "data.max_samples": "max_train_samples",
    "data.num_proc": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "data.num_workers": "dataloader_num_workers num_data_workers num_loading_workers",
    "data.cache_dir": "dataset_prepared_path tokenized_path dataset_cache_dir",
    "validation": "eval evaluation validator",
    "validation.source": (
        "eval_dataset eval_file validation_file test_datasets eval_data_path dataset_val"
        " val_dataset valid_data_path validation.dataset validation.path validation.dataset_path"
        " dataset_validation"
    ),
    "validation.split": "dataset_test_split eval_split dataset_eval_split",
    "validation.metrics": "compute_metrics eval_metrics",
    "validation.max_new_tokens": (
        "generation_max_length generation_max_new_tokens eval_max_new_tokens"
    ),
    "validation.every_n_steps": (
        "eval_steps eval_interval eval_freq val_check_interval run_val_every_n_steps "
        "validation.freq validation.interval evals_per_epoch val_every_n_steps"
    ),
    "validation.patience": "early_stopping_patience early_stopping_steps early_stopping",
    "validation.min_delta": "early_stopping_threshold early_stopping_min_delta",
    "validation.max_samples": "max_eval_samples max_val_samples",
    "validation.batch_size": (
        "per_device_eval_batch_size eval_batch_size batch_size_val validation.local_batch_size"
    ),
    "optimizer": "optim_args",
    "optimizer.name": "optimizer.type optim optimizer_type optimizer_name",
    "optimizer.lr": "learning_rate base_lr max_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas optimizer.beta",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.momentum": "sgd_momentum muon_momentum",
    "optimizer.implementation": "fused foreach optim_fused adam_fused",
    "optimizer.state_bits": (
        "optim_bits exp_avg_dtype exp_avg_sq_dtype optimizer_state_dtype use_8bit_optimizer"
    ),
    "optimizer.master_weights": (
        "use_master_weights fp32_master_weights main_params_dtype master_dtype"
    ),
    "optimizer.stochastic_rounding": "bf16_stochastic_round use_stochastic_rounding",
    "lr_scheduler": "scheduler lr_scheduler_kwargs",
    "lr_scheduler.type": (
        "lr_scheduler_type lr_scheduler.name lr_scheduler.decay_type decay_type lr_decay_style "
        "scheduler_type"
    ),
    "lr_scheduler.warmup_steps": (
        "num_warmup_steps lr_warmup_iters warmup_iters lr_warmup_steps warmup "
        "scheduler.num_warmup_steps"
    ),
    "lr_scheduler.warmup_ratio": "lr_warmup_fraction warmup_fraction warmup_proportion",
    "lr_scheduler.min_lr_ratio": "min_lr_factor cosine_min_lr_ratio min_lr_rate",
    "parallel": "parallelism fsdp fsdp_config distributed dist parallel_dims parallelism_config",
    "parallel.strategy": (
        "ddp parallel.fsdp distributed_strategy parallel_strategy dp_mode distributed_type"
    ),
    "parallel.data_shard": (
        "data_parallel_shard_degree parallelism_config_dp_shard_size data_parallel_shard_dim"
        " dp_shard dp_shard_size dp_shard_degree fsdp_size data_parallel_size dp_size"
        " data_parallel_degree dp dp_degree data_parallel"
    ),
    "parallel.data_replicate": (
        "data_parallel_replicate_degree data_parallel_replicate_dim dp_replicate "
        "dp_replicate_size dp_replicate_degree hsdp_size parallelism_config_dp_replicate_size"
    ),
    "parallel.context": (
        "context_parallel_degree context_parallel_dim context_parallel_size context_parallel"
        " cp_size cp cp_degree sequence_parallel_size sequence_parallel_degree"
        " parallelism_config_cp_size parallelism_config_sp_size ulysses_sequence_parallel_size"
        " ulysses_size ulysses_degree sp_size sp_degree"
    ),
    "parallel.tensor": (
        "tp_size tp tp_degree tensor_parallel tensor_parallel_degree tensor_parallel_size"
        " tensor_parallel_dim tensor_model_parallel_size model_parallel_size sequence_parallel"
        " parallelism_config_tp_size megatron_lm_tp_degree tensor_parallel.autotp_size autotp_size"
    ),
    "parallel.pipeline": (
        "pp_size pp pp_degree pipeline_parallel pipeline_parallel_degree pipeline_parallel_size "
        "pipeline_model_parallel_size megatron_lm_pp_degree pipeline.stages"
    ),
    "parallel.pipeline_schedule": "pipeline_parallel_schedule pp_schedule schedule_type",
    "parallel.pipeline_microbatches": (
        "num_microbatches n_microbatches megatron_lm_num_micro_batches "
        "pipeline_parallel_microbatches num_micro_batches pp_microbatches"
    ),
    "parallel.pipeline_stages_per_rank": (
        "virtual_pipeline_model_parallel_size "
        "num_virtual_stages_per_pipeline_rank virtual_pp_size vpp_size vpp virtual_stages"
    ),
    "parallel.pipeline_max_deferred_weight_grads": (
        "delay_wgrad_compute zero_bubble_max_pending_backward"
    ),
    "parallel.pipeline_balance": "partition_method pipeline.partition_method",
    "parallel.pipeline_layers_per_stage": (
        "pipeline_parallel_split_points module_fqns_per_model_part"
        " pipeline_parallel_layers_per_stage pipeline_model_parallel_layout"
        " decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
        " num_layers_in_first_pipeline_stage split_points layers_per_stage"
    ),
    "parallel.fsdp_wrap_policy": (
        "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap "
        "custom_sharded_layers auto_wrap_policy fsdp_auto_wrap_policy memory_efficient_fsdp_wrap "
        "memory_efficient_wrapping min_num_params fsdp_min_num_params"
    ),
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallel.reduce_dtype": (
        "mixed_precision_reduce grad_reduce_dtype grad_reduce_in_fp32 reduce_type"
    ),
    "parallel.reduce_gradients": (
        "set_requires_gradient_sync sync_each_batch no_sync require_backward_grad_sync "
        "use_no_sync gradient_sync"
    ),
    "parallel.accumulate_grad_in_fp32": (
        "accumulate_allreduce_grads_in_fp32 optimizer.accumulate_grad_in_fp32 grad_accum_dtype"
        " gradient_accumulation_dtype data_types.grad_accum_dtype accumulate_grad_fp32"
    ),
    "parallel.heartbeat_timeout_seconds": (
        "pipeline_timeout ddp_timeout dist_timeout nccl_timeout heartbeat_timeout "
        "distributed_timeout_minutes train_timeout_seconds timeout"
    ),
    "memory.activation_checkpointing": (
        "gradient_checkpointing activation_checkpoint enable_activation_checkpointing"
        " activation_checkpoint.mode memory.checkpointing fsdp_activation_checkpointing"
        " recompute_granularity recompute_method recompute_activations selective_ac_option ac_mode"
        " use_gradient_checkpointing"
    ),
    "memory.activation_budget_gib": "memory_budget activation_memory_budget",
    "memory.activation_offload": (
        "activation_offloading enable_activation_offloading cpu_offloading activation_cpu_offload"
    ),
    "memory.cpu_offload": (
        "zero_optimization.offload_param.device fsdp_cpu_offload offload_params "
        "fsdp_offload_params enable_cpu_offload offload_param "
        "param_offload"
    ),
    "memory.optimizer_in_backward": (
        "optimizer_in_bwd early_step_in_backward optim_in_bwd fused_backward"
    ),
    "memory.optimizer_offload": (
        "zero_optimization.offload_optimizer.device optimizer_cpu_offload offload_optimizer "
        "optimizer_offload_fraction optim_offload"
    ),
    "memory.recompute_cheap": "recompute_modules",
    "memory.mlp_tiles": "tiled_mlp tiled_mlp_num_shards mlp_num_shards",
    "memory.loss_chunks": "num_output_chunks num_chunks loss_num_chunks chunked_cross_entropy",
    "checkpoint": "checkpointer checkpointing",
    "checkpoint.save_every_n_steps": (
        "save_steps save_interval saves_per_epoch save_freq checkpoint.interval "
        "checkpoint.every_n_steps "
        "checkpoint_interval checkpoint_every checkpoint.every checkpoint.freq ckpt_interval"
    ),
    "checkpoint.keep_last_n": (
        "save_total_limit keep_last_n_checkpoints keep_latest_k max_to_keep "
        "checkpoint.keep_last num_checkpoints_to_keep keep_last_n_steps"
    ),
    "checkpoint.keep_best": "load_best_model_at_end save_best_model keep_best_checkpoint",
    "checkpoint.best_metric": "metric_for_best_model monitor best_model_metric",
    "checkpoint.greater_is_better": "metric_greater_is_better",
    "checkpoint.save_model": "save_final_model save_hf_model export_model last_save_model_only",
    "checkpoint.max_shard_gib": "max_shard_size shard_size",
    "log": "logging metrics metric_logger_config",
    "log.every_n_steps": (
        "logging_steps log_every_n_steps log_freq log_interval metrics.log_freq log_every "
        "steps_per_print"
    ),
    "log.trackers": (
        "metric_logger report_to wandb tensorboard use_wandb enable_wandb enable_tensorboard "
        "tensorboard_dir trackers log_with"
    ),
    "log.project": "wandb_project project_name wandb.project",
    "log.run_name": "wandb_name wandb_run_name wandb_exp_name experiment_name",
    "log.progress": "disable_tqdm progress_bar",
    "seed": "random_seed shuffle_seed data_seed training.seed",
    "dtype": (
        "bf16 fp16 bf16.enabled fp16.enabled model.dtype param_dtype mixed_precision.param_dtype"
        " precision torch_dtype mixed_precision mixed_precision_param params_dtype compute_dtype"
        " training_precision"
    ),
    "device": "device_type use_cpu no_cuda device_map",
    "batch_size": (
        "micro_batch_size micro_batch local_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu device_batch_size per_gpu_batch_size"
    ),
    "gradient_accumulation_steps": (
        "grad_accum gradient_accumulation gradient_accumulation_iters"
        " tokens.batch_accumulation_per_replica batch_accumulation_per_replica"
        " grad_accumulation_steps accumulate_grad_batches grad_accum_steps grad_acc_steps"
        " accumulation_steps"
    ),
    "epochs": "num_epoch num_epochs num_train_epochs n_epochs max_epochs train_epochs",
    "max_steps": (
        "steps max_steps_per_epoch training_steps train_iters training.steps train_steps num_steps"
        " num_training_steps total_steps max_train_steps max_iters training.max_steps"
        " num_train_steps"
    ),
    "max_seq_len": (
        "max_length max_seq_length model_max_length sequence_len sequence_length seq_len seq_length"
        " block_size max_len seqlen cutoff_len context_length training.seq_len max_tokens"
        " max_sequence_length"
    ),
    "clip_grad_norm": (
        "max_grad_norm gradient_clipping max_norm clip_grad grad_clip gradient_clip_val "
        "gradient_clip grad_clip_norm"
    ),
    "loss": "loss_fn criterion loss_function",
    "output_dir": (
        "output_path out_dir dump_folder job.dump_folder save_dir save_path save default_root_dir "
        "checkpointer.output_dir"
    ),
    "overwrite_output_dir": "overwrite_dir",
    "resume": (
        "resume_from_checkpoint resume_from auto_resume_from_checkpoints load checkpoint.load_step"
    ),
    "compile": "compile.enable torch_compile enable_compile compile_model use_compile",
    "fused_kernels": (
        "use_fused_kernels use_kernels use_triton triton_kernels use_unsloth liger_rope "
        "liger_glu_activation lora_mlp_kernel"
    ),
    "matmul_dtype": (
        "float8 fp8 enable_fp8_training fp8_recipe fp8_format float8_recipe enable_fp8 "
        "float8.recipe_name quantize.linear.float8.recipe_name"
    ),
    "qat": (
        "qat_scheme qat_quantizer quantization_aware_training quantizer fake_quant qat.weight_dtype"
    ),
    "qat_group_size": "qat.group_size quantizer.groupsize groupsize",
    "qat_start_step": "fake_quant_after_n_steps qat.fake_quant_after_n_steps quantization_delay",
    "lora": "peft peft_config lora_config",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": (
        "lora_target lora_targets lora_target_modules lora_target_linear lora_attn_modules "
        "lora_modules apply_lora_to_mlp apply_lora_to_output lora.target"
    ),
    "lora.rslora": "use_rslora peft_use_rslora lora_use_rslora",
    "lora.dora": "use_dora peft_use_dora lora_use_dora",
    "lora.quantize_base": (
        "load_in_4bit load_in_8bit quantization quantization_bit quantization_config "
        "bnb_4bit_quant_type quantize_type"
    ),
    "lora.dtype": "lora_dtype adapter_dtype autocast_adapter_dtype",
    "lora.adapter_path": (
        "lora_model_dir adapter_name_or_path adapter_dir adapter_model resume_adapter"
    ),
    "lora.merge_on_save": "merge_adapter merge_lora merge_and_unload merge_weights",
}

# Our key -> names of torchtune, whose configs name Python code by `_component_`.
_TORCHTUNE = {
    "model.path": "model._component_",
    "tokenizer.path": "tokenizer._component_",
    "data.format": "dataset._component_",
    "data.columns": "conversation_column",
    "validation.source": "dataset_val._component_",
    "validation.split": "dataset_val.split",
    "optimizer.name": "optimizer._component_",
    "lr_scheduler.type": "lr_scheduler._component_",
    "log.trackers": "metric_logger._component_",
    "memory.loss_chunks": "loss.num_output_chunks loss._component_",
    "compile": "compile.model compile.loss",
    "resume": "recipe_checkpoint",
}


def invert_aliases(table: Mapping[str, str]) -> dict[str, str]:
    """Return name -> our key, for a table of our key -> names parted by spaces."""
    return {name: ours for ours, names in table.items() for name in names.split()}


# Another tool's name of a key -> our key.
KEY_ALIASES = invert_aliases(_ELSEWHERE) | invert_aliases(_TORCHTUNE) | invert_aliases(_EARLIER)

# Our section -> sections of other tools; "": our keys of that kind stand at the top level.
_SECTIONS = {
    "": "training trainer train job training_args training_arguments run",
    "data": "dataset datasets train_dataset training_dataset data_config dataloader",
    "optimizer": "optim",
    "lr_scheduler": "scheduler lr_schedule",
    "validation": "eval evaluation validator dataset_val",
    "parallel": "parallelism distributed dist fsdp comm fsdp_config parallelism_config",
    "memory": "activation_checkpoint activation_checkpointing",
    "checkpoint": "checkpointer checkpointing",
    "log": "metrics logging metric_logger wandb",
    "lora": "peft peft_config lora_config",
}

# Sections of other tools -> ours.
SECTION_ALIASES = invert_aliases(_SECTIONS)

# Last words of other tools' keys that get no hint: there is no such key here, and one that is
# spelled like it means something else.
NOTHING_LIKE_IT = frozenset(
    "save_strategy eval_strategy evaluation_strategy logging_strategy global_batch_size"
    " val_set_size val_size label_smoothing_factor end_weight_decay attn_implementation"
    " flash_attention flash_attn deepspeed push_to_hub hub_model_id expert_parallel_degree"
    " expert_model_parallel_size expert_parallel_size ep_size ep train_batch_size modules_to_save"
    " lora_modules_to_save zero_stage fsdp_sharding_strategy sharding_strategy min_lr lr_min"
    " pipeline_parallel_microbatch_size num_layers_per_virtual_pipeline_stage gamma_beta_ratio"
    " wandb_run_id run_id dataset_config init_timeout_seconds adapter ref_model reference_model"
    " every_steps moe z_loss overwrite_cache devices neftune_noise_alpha group_by_length"
    " special_tokens max_prompt_length max_completion_length".split()
)

_LOSS_KERNEL = (
    "the loss is always computed in memory.loss_chunks chunks, by fused_kernels on a GPU; leave"
    " it out"
)
# Key of another tool that has no key here -> what there is in its place, which ends the error.
ANSWERS = {
    "loss_kernel": _LOSS_KERNEL,
    "memory.loss_kernel": _LOSS_KERNEL,
    "use_liger_kernel": _LOSS_KERNEL,
    "use_liger": _LOSS_KERNEL,
    "enable_liger": _LOSS_KERNEL,
    "cut_cross_entropy": _LOSS_KERNEL,
    "liger_fused_linear_cross_entropy": _LOSS_KERNEL,
    "memory.expert_offload": "write memory.stream_layers=experts",
    "log_level": "`tune run -q` and `-v` say less and more",
    "log_peak_memory_stats": "every step logs its peak memory; leave it out",
    "save_adapter_weights_only": "adapter/ has the adapter alone; leave it out",
    "checkpoint_files": "the index in model.path names its files; leave it out",
    "checkpointer.model_type": "the config.json in model.path says it; leave it out",
    "metric_logger.log_dir": "metrics.jsonl and trackers/ are in output_dir; leave it out",
    "checkpointer._component_": "checkpoints are in the Hugging Face layout; leave it out",
    "profiler": (
        "there is no profiler; `tune plan CONFIG --full` has the time of each part of a step"
    ),
    "new_system_prompt": "there is none; write the system's message into the samples",
    "_component_": (
        "no config names Python code; `tune cat CONFIG --describe` lists the keys that choose"
    ),
}

# Last words that say little without their section: no key of another section is offered for them.
GENERIC = frozenset(
    "path name type source sources format kind dtype mode config enable enabled backend interval"
    " freq steps size loss beta alpha dropout rank split strategy data model optimizer template"
    " implementation device".split()
)

# Our choice -> what people write in other tools. ` with ` joins a second key that the choice takes.
_CHOICES = {
    "fp32": "float32 float",
    "bf16": "fp16 float16 16 bfloat16",
    "fp64": "float64 double",
    "cuda": "gpu",
    "messages": "openai chatml",
    "adamw": "adamw_torch adamw_torch_fused",
    "adamw with optimizer.state_bits=8": "adamw_8bit adamw8bit adamw_bnb_8bit",
    "adamw with optimizer.state_bits=4": "adamw_4bit adamw4bit adamw_torch_4bit",
    "preference": "dpo pairs chat_preference",
    "text": "completion",
    "assistant": "assistant_only answer responses completion_only",
    "last": "last_turn",
    "nf4": "4bit int4 fp4",
    "int8": "8bit",
    "experts": "gate_up_proj mlp.experts mlp.experts.gate_up_proj mlp.experts.down_proj moe",
    "router": "mlp.gate mlp.router",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj output_proj",
    "gate": "gate_proj w1",
    "up": "up_proj w3",
    "down": "down_proj w2",
    "embedding": "embed_tokens",
    "head": "lm_head output",
    "kto": "unpaired_preference",
    "sigmoid": "dpo_sigmoid cdpo",
    "adapters": "lora",
    "all": "full",
    "compute": "time",
    "full": "true",
    "constant": "constant_with_warmup",
    "fp8": "float8",
    "interleaved_1f1b": "interleaved1f1b",
    "interleaved_zero_bubble": "interleavedzerobubble",
    "zbv": "zbvzerobubble zb_v dualpipev zero_bubble",
    "1f1b": "one_forward_one_backward",
}

# What people write in other tools, in lower case -> the choice here, such as `bf16`, or
# `adamw with optimizer.state_bits=8`.
CHOICE_ALIASES = {word: ours for ours, words in _CHOICES.items() for word in words.split()}
