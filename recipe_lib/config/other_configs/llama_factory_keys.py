"""LLaMA-Factory's keys: which are ours under another name, which are not needed, which are missing here."""

from typing import Any

from recipe_lib.config.other_configs import trainer_keys as trainer

NULL_MEANS = ()

DEFAULTS: dict[str, Any] = {
    **trainer.DEFAULTS,
    "dataset_dir": "data",
    "stage": "sft",
    "finetuning_type": "lora",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "cutoff_len": 2048,
    "seed": 42,
    "logging_steps": 500,
    "disable_gradient_checkpointing": False,
    "pure_bf16": False,
    "lora_rank": 8,
    "lora_target": "all",
    "lora_alpha": None,
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
}

OF_ADAPTERS = ("lora_rank", "lora_target", "lora_alpha")

OF_PAIRS = ("pref_beta", "pref_loss")

# Keys that only configs for another purpose have.
OTHER_PURPOSES = (
    ("export_dir", "it merges an adapter; `tune export RUN` does"),
    ("infer_backend", "it generates; `tune generate MODEL` does"),
    ("predict_with_generate", "it generates; `tune generate MODEL --prompts FILE` does"),
    ("do_predict", "it generates; `tune generate MODEL --prompts FILE` does"),
    ("task", "it measures a model; `tune eval MODEL` does"),
)

# Methods: a key that asks for one, the key of ours that it needs, what is missing without that.
METHODS = (
    ("use_galore", "", "there is no GaLore; optimizer.state_bits=8 takes less memory"),
    ("use_apollo", "", "there is no APOLLO; optimizer.state_bits=8 takes less memory"),
    ("use_badam", "", "there is no BAdam; memory.stream_layers trains all layers with the memory of few"),
    ("use_adam_mini", "", "there is no Adam-mini; optimizer.state_bits=8 takes less memory"),
    ("use_llama_pro", "", "there is no training of some layers; choose full or lora"),
    ("mixture_of_depths", "", "there are no mixtures of depths"),
    ("use_dft_loss", "", "the loss is cross-entropy"),
    ("use_eaft_loss", "", "the loss is cross-entropy"),
    ("use_asft_loss", "", "the loss is cross-entropy"),
    ("quantize_aware_training", "", "there is no quantization-aware training"),
    ("image_max_pixels", "", "there are no images here, only text"),
    ("video_max_pixels", "", "there are no images here, only text"),
    ("freeze_vision_tower", "", "there are no images here, only text"),
)

NO_STAGES = {
    "ppo": "there is no recipe for reinforcement learning; stage dpo trains on pairs",
    "kto": "there is no KTO; stage dpo trains on pairs",
    "rm": "there is no recipe for reward models",
}

# `stage`, and the key of ours that it needs.
STAGES = {"sft": "", "pt": "", "dpo": "", "kto": "dpo.desirable_weight", "rm": "reward.loss"}

_IMAGES = "there are no images here, only text"
_GENERATES = "`tune generate` takes what a generation needs"
_CACHE = "tokenized samples are kept in data.cache_dir"
_REPORT = "output_dir/report.html has the curves"
_MODEL = "the model's files say it"

SAME = {
    **trainer.SAME,
    "model_name_or_path": "model.path",
    "per_device_train_batch_size": "batch_size",
    "overwrite_output_dir": "overwrite_output_dir",
    "preprocessing_num_workers": "data.num_proc",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "use_dora": "lora.dora",
    "use_rslora": "lora.rslora",
    "pref_beta": "dpo.beta",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "simpo_gamma": "dpo.simpo_gamma",
    "kto_chosen_weight": "dpo.desirable_weight",
    "kto_rejected_weight": "dpo.undesirable_weight",
    "sequence_parallel_size": "parallel.context",
    "moe_aux_loss_coef": "router_aux_loss_coef",
}  # fmt: skip
WITHOUT = {
    **trainer.WITHOUT,
    "dataset_dir": "the sources have their whole paths",
    "media_dir": _IMAGES,
    "trust_remote_code": "no code of a model is run",
    "overwrite_cache": _CACHE,
    "streaming": _CACHE,
    "buffer_size": _CACHE,
    "preprocessing_batch_size": _CACHE,
    "tokenized_path": _CACHE,
    "cache_dir": "HF_HOME says where the hub's files are",
    "plot_loss": _REPORT,
    "use_fast_tokenizer": _MODEL,
    "quantization_method": "there is no quantization",
    "quantization_type": "there is no quantization",
    "double_quantization": "there is no quantization",
    "quantization_device_map": "each rank has its device",
    "enable_liger_kernel": "kernels compute the same: fused_kernels",
    "use_unsloth": "kernels compute the same: fused_kernels",
    "use_unsloth_gc": "memory.activation_offload has layers' inputs in host memory",
    "use_v1_kernels": "kernels compute the same: fused_kernels",
    "use_cce": "kernels compute the same: fused_kernels",
    "use_reentrant_gc": "layers are recomputed without reentrance",
    "upcast_layernorm": "norms are computed in fp32",
    "upcast_lmhead_output": "the loss is computed in fp32",
    "ignore_pad_token_for_loss": "padding is not trained on",
    "eval_on_each_dataset": "validation has one source",
    "compute_accuracy": "`tune eval` measures a model",
    "include_effective_tokens_per_second": "every step has its tokens per second",
    "use_swanlab": "output_dir/metrics.jsonl has every step",
    "swanlab_*": "output_dir/metrics.jsonl has every step",
    "ray_*": "`tune run --nnodes` starts ranks on several machines",
    "resources_per_worker": "`tune run --nnodes` starts ranks on several machines",
    "placement_strategy": "`tune run --nnodes` starts ranks on several machines",
    "fp8_backend": "torchao's or ours, as the device has it",
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in dtype",
    "fsdp_transformer_layer_cls_to_wrap": "every layer is a unit: parallel.fsdp_wrap_policy",
    "max_new_tokens": _GENERATES,
    "top_k": _GENERATES,
    "top_p": _GENERATES,
    "temperature": _GENERATES,
    "do_sample": _GENERATES,
    "print_param_status": "`tune plan CONFIG --full` has every parameter",
    "hf_hub_token": "`hf auth login` is asked",
    "image_*": _IMAGES,
    "video_*": _IMAGES,
    "audio_*": _IMAGES,
    "pissa_iter": "part of pissa_init",
    "pissa_convert": "part of pissa_init",
    "create_new_adapter": "part of adapter_name_or_path",
    "tool_format": "the tokenizer's chat template writes tools",
    "galore_*": "part of use_galore",
    "apollo_*": "part of use_apollo",
    "badam_*": "part of use_badam",
    "ppo_*": "part of stage: ppo",
    "freeze_trainable_*": "part of finetuning_type: freeze",
    "ref_model_quantization_bit": "the reference is the model before training",
}  # fmt: skip
REFUSED = {
    **trainer.REFUSED,
    "additional_target": "nothing is trained whole next to adapters; lora.target_modules takes embedding and head",
    "pissa_init": "adapters begin at zero",
    "pref_ftx": "dpo.loss has no term for the chosen answer's likelihood",
    "pref_bco_weight": "dpo.loss has no such term",
    "ld_alpha": "dpo.loss weighs every token of an answer alike",
    "ref_model_adapters": "the reference is the model before training, no other one",
    "rope_scaling": _MODEL,
    "shift_attn": "attention is over the whole sequence",
    "resize_vocab": "no token is added; add it to the model's folder first",
    "add_tokens": "no token is added; add it to the model's folder first",
    "add_special_tokens": "no token is added; add it to the model's folder first",
    "new_special_tokens_config": "no token is added; add it to the model's folder first",
    "split_special_tokens": "special tokens are never split",
    "train_from_scratch": "model.preset=NAME begins with random weights",
    "model_revision": "`tune download MODEL --revision` fetches it",
    "default_system": "no message is put before a sample's own; write it into the samples",
    "enable_thinking": "thoughts are trained as the tokenizer's chat template writes them",
    "freeze_extra_modules": "every parameter is trained, or adapters",
}  # fmt: skip
