"""What Axolotl and LLaMA-Factory share: keys of transformers' Trainer, of PEFT's LoRA and of accelerate's FSDP."""

from typing import Any

from recipe_lib.config.other_configs.conversion import ConfigImport, is_off
from recipe_lib.config.other_configs.methods import is_here
from recipe_lib.config.other_configs.warm_up import WARM_UP

PAGED = (
    "states are on the device, none is paged out when it is full: memory.optimizer_offload=true has them on the host"
)
BLOCKS = (
    "blocks of other sizes have a scale each, so the states are rounded otherwise; as there, a gradient under a "
    "thousandth of its block's largest takes too short steps"
)
NO_ZEROS = "no second moment is rounded to 0, which there makes too long steps of small gradients"
FOUR_BITS = "as there, a gradient far below its block's largest hardly moves its weight"
# `optim` of the Trainer -> bits of a state (None: the states have the parameters' type), what is to be known of it, and
# whether that is an effect that it does not have there.
ADAMW: dict[str, tuple[int | None, str, bool]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "optimi_adamw"), (None, "", False)
    ),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), (32, PAGED, True)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), (8, BLOCKS, True)),
    "paged_adamw_8bit": (8, f"{PAGED}; {BLOCKS}", True),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), (8, NO_ZEROS, True)),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"), (4, FOUR_BITS, False)),
}
_MUON = "AdamW steps what is no matrix here; the rates of the two are scaled otherwise there"
_NO_OPTIMIZER = f"no such optimizer; known are {', '.join(ADAMW)}, sgd and muon"

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
_DECAY = "here of every parameter, there not of norms and biases"
_ENDS_RUN = "there it alone ends the run, however many epochs that is; so epochs is 1000 here"
_MANY_EPOCHS = 1000
_PATIENCE = "early_stopping_patience"

# PEFT's names of linears are ours.
EVERY_LINEAR = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))

FSDP_WITHOUT = {
    **dict.fromkeys(("version", "use_orig_params", "limit_all_gathers", "sync_module_states", "forward_prefetch",
                     "backward_prefetch", "backward_prefetch_policy", "cpu_ram_efficient_loading"),
                    "FSDP2 is always used; each rank reads its own slices"),
    "state_dict_type": "each rank writes its own part of a state, and the model is a folder of Hugging Face's layout",
    "final_state_dict_type": "the model is a folder of Hugging Face's layout",
    "auto_wrap_policy": "every layer is a unit: parallel.fsdp_wrap_policy",
    "transformer_layer_cls_to_wrap": "every layer is a unit: parallel.fsdp_wrap_policy",
    "min_num_params": "every layer is a unit: parallel.fsdp_wrap_policy",
}  # fmt: skip
SHARDING: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "auto_wrap": {},
    "shard_grad_op": {"parallel.reshard_after_forward": False},
    "no_shard": {"parallel.strategy": "ddp"},
    "offload": {"memory.cpu_offload": True},
    "1": {},
    "2": {"parallel.reshard_after_forward": False},
    "3": {"parallel.strategy": "ddp"},
}


def convert_optimizer(c: ConfigImport, key: str) -> None:
    """`optimizer`, `optim`."""
    name = str(c.value(key))
    if name in ADAMW:
        bits, why, is_other = ADAMW[name]
        ours = {"optimizer.name": "adamw"} | ({"optimizer.state_bits": bits} if bits else {})
        (c.change if is_other else c.carry)(key, ours, why)
    elif name in ("sgd", "muon"):
        (c.change if name == "muon" else c.carry)(key, {"optimizer.name": name}, _MUON if name == "muon" else "")
    else:
        c.refuse(key, _NO_OPTIMIZER, may_be_left_out=False)


def convert_beta(c: ConfigImport, key: str) -> None:
    """`adam_beta1` and `adam_beta2`: one list of ours."""
    first, second = c.value("adam_beta1"), c.value("adam_beta2")
    c.carry(key, {"optimizer.betas": [first, second]})


def convert_schedule(c: ConfigImport, key: str) -> None:
    """`lr_scheduler_type`; `constant` of the Trainer has no warm-up."""
    name = str(c.value(key))
    if name not in SCHEDULES:
        c.refuse(key, f"no such schedule; known are {', '.join(SCHEDULES)}", may_be_left_out=False)
        return
    c.carry(key, {"lr_scheduler.type": SCHEDULES[name]})
    if name == "constant":
        for warm_up in ("warmup_steps", "warmup_ratio"):
            c.drop(warm_up, f"{key}: constant has no warm-up; constant_with_warmup has")


def convert_warmup(c: ConfigImport, key: str) -> None:
    """`warmup_steps`, `warmup_ratio`: of the two the steps count, where there are any; below 1 they are a share."""
    value, steps = c.value(key), c.value("warmup_steps")
    if c.noted(key):
        return
    if key == "warmup_ratio" and steps:
        c.drop(key, "warmup_steps takes its place, there too")
    elif is_off(value):
        c.drop(key, "is off, as here")
    elif key == "warmup_ratio" or value < 1:
        c.change(key, {"lr_scheduler.warmup_ratio": value}, WARM_UP)
    else:
        c.change(key, {"lr_scheduler.warmup_steps": value}, WARM_UP)


def convert_weight_decay(c: ConfigImport, key: str) -> None:
    """`weight_decay`: adapters have neither norms nor biases."""
    trained = [value for name, value in c.ours.items() if name.endswith(".trainable")]
    decays_all = c.recipe == "lora_finetune_distributed" or trained == ["adapters"]
    value = c.value(key)
    if value and not decays_all:
        c.change(key, {"optimizer.weight_decay": value}, _DECAY)
    else:
        c.carry(key, {"optimizer.weight_decay": value})


def convert_clipping(c: ConfigImport, key: str) -> None:
    """`max_grad_norm`: 0 is none."""
    c.carry(key, {"clip_grad_norm": c.value(key) or None})


def convert_epochs(c: ConfigImport, key: str) -> None:
    """Epochs, which may be a part of one there."""
    epochs, steps = c.value(key), c.value("max_steps")
    if steps and steps > 0:
        c.drop(key, "max_steps ends the run, there too")
    elif epochs != int(epochs):
        c.refuse(key, "epochs are whole here; set max_steps", may_be_left_out=False)
    else:
        c.carry(key, {"epochs": int(epochs)})


def convert_max_steps(c: ConfigImport, key: str) -> None:
    """`max_steps`: -1 and 0 are none."""
    steps = c.value(key)
    if steps > 0:
        c.change(key, {"max_steps": steps, "epochs": _MANY_EPOCHS}, _ENDS_RUN)
    else:
        c.drop(key, "is off, as here")


def convert_save_steps(c: ConfigImport, key: str) -> None:
    """Steps between states."""
    steps = c.value(key)
    if str(c.value("save_strategy")).lower() in ("no", "false", "epoch"):
        c.drop(key, "save_strategy takes its place; checkpoint.save_every_n_steps saves states")
    elif isinstance(steps, int) and steps >= 1:
        c.carry(key, {"checkpoint.save_every_n_steps": steps})
    else:
        c.drop(key, "a share of the steps; checkpoint.save_every_n_steps is a number of them")


def convert_eval_steps(c: ConfigImport, key: str) -> None:
    """Steps between validations, where there are any."""
    steps = c.value(key)
    if "validation.source" not in c.ours:
        c.drop(key, "nothing is validated")
    elif isinstance(steps, int) and steps >= 1:
        c.carry(key, {"validation.every_n_steps": steps})
    else:
        c.drop(key, "a share of the steps; validation.every_n_steps is a number of them")


def convert_eval_batch_size(c: ConfigImport, key: str) -> None:
    """Sequences of a validation batch, where there is one."""
    if "validation.source" in c.ours:
        c.carry(key, {"validation.batch_size": c.value(key)})
    else:
        c.drop(key, "nothing is validated")


def convert_trackers(c: ConfigImport, key: str) -> None:
    """`report_to`."""
    value = c.value(key)
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if str(name).lower() != "none"]
    known = [name for name in names if name in ("wandb", "tensorboard", "trackio")]
    if known == names and known:
        c.carry(key, {"log.trackers": known})
    elif known:
        c.change(key, {"log.trackers": known}, "output_dir/metrics.jsonl has every step for the others")
    else:
        c.drop(key, "output_dir/metrics.jsonl has every step")


def convert_deepspeed(c: ConfigImport, key: str) -> None:
    """A file of DeepSpeed's, of which the name says the stage, or its stage itself."""
    name = str(c.value(key)).rpartition("/")[2].lower()
    stages = [stage for stage in "0123" if any(f"{word}{stage}" in name for word in ("zero", "z", "stage"))]
    if len(stages) != 1:
        c.refuse(key, "expected a file that is named after its stage (zero2, z3); parallel.* and memory.* say it here")
        return
    ours: dict[str, Any] = {} if stages == ["3"] else {"parallel.reshard_after_forward": False}
    if stages == ["0"]:
        ours = {"parallel.strategy": "ddp"}
    if "offload" in name or "cpu" in name:
        ours["memory.cpu_offload"] = True
    c.change(key, ours, f"FSDP in place of DeepSpeed's stage {stages[0]}, by the file's name; the file is not read")


def convert_sharding(c: ConfigImport, key: str) -> None:
    """`fsdp`: words of the Trainer; also a sharding strategy of accelerate's."""
    value = c.value(key)
    words = value if isinstance(value, list) else str(value).split()
    ours: dict[str, Any] = {}
    for word in (str(word).lower() for word in words):
        if word not in SHARDING:
            c.refuse(key, f"expected {', '.join(SHARDING)}; parallel.data_replicate has copies of the sharded model")
            return
        ours |= SHARDING[word]
    c.carry(key, ours, "" if ours else "layers are sharded: parallel.strategy=fsdp")


def convert_fsdp_config(c: ConfigImport, section: str = "fsdp_config") -> None:
    """Keys of `fsdp_config`, with and without `fsdp_` in front."""
    for key in c.theirs.under(section):
        word = key.removeprefix(section).lstrip(".").removeprefix("fsdp_")
        value = c.value(key)
        if not word or value is None:
            c.drop(key, "not set")
        elif word == "offload_params":
            c.carry(key, {"memory.cpu_offload": bool(value)})
        elif word == "reshard_after_forward":
            c.carry(key, {"parallel.reshard_after_forward": bool(value)})
        elif word == "activation_checkpointing":
            c.carry(key, {"memory.activation_checkpointing": "full"} if value else {})
        elif word == "sharding_strategy":
            convert_sharding(c, key)
        elif word in FSDP_WITHOUT:
            c.drop(key, FSDP_WITHOUT[word])
        elif is_off(value):
            c.drop(key, "is off, as here")
        else:
            c.refuse(key, "is no key of FSDP's that is known here")


def convert_best(c: ConfigImport, key: str) -> None:
    """`load_best_model_at_end` and what says which is best."""
    if key == "load_best_model_at_end" and not c.value(key):
        c.drop(key, "is off, as here")
    elif key != "load_best_model_at_end" and not (c.value("load_best_model_at_end") or c.is_on(_PATIENCE)):
        c.drop(key, "the model of the last step is saved, there too")
    elif not is_here("checkpoint.keep_best"):
        c.refuse(key, "the model of the last step is saved")
    elif key == "load_best_model_at_end":
        c.carry(key, {"checkpoint.keep_best": True})
    elif key == "greater_is_better":
        c.carry(key, {"checkpoint.greater_is_better": bool(c.value(key))})
    elif str(c.value(key)) in ("loss", "eval_loss"):
        c.carry(key, {"checkpoint.best_metric": "validation_loss"})
    else:
        c.refuse(key, "expected eval_loss; checkpoint.best_metric names numbers of our validation")


def convert_patience(c: ConfigImport, key: str) -> None:
    """`early_stopping_patience`: validations without a better one."""
    if is_off(c.value(key)):
        c.drop(key, "is off, as here")
    elif is_here("validation.patience"):
        c.carry(key, {"validation.patience": c.value(key)})
    else:
        c.refuse(key, "a run ends after its steps")


def target_modules(names: list[str]) -> list[str]:
    """PEFT's list of linears, shorter where it is all of them."""
    return ["all-linear"] if set(names) == EVERY_LINEAR else names


SAME = {
    "output_dir": "output_dir",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "optimizer.lr",
    "adam_epsilon": "optimizer.eps",
    "seed": "seed",
    "logging_steps": "log.every_n_steps",
    "save_total_limit": "checkpoint.keep_last_n",
    "torch_compile": "compile",
    "dataloader_num_workers": "data.num_workers",
    "router_aux_loss_coef": "router_aux_loss_coef",
    "run_name": "log.run_name",
}
CONVERTED = {
    "adam_beta1": convert_beta,
    "adam_beta2": convert_beta,
    "weight_decay": convert_weight_decay,
    "max_grad_norm": convert_clipping,
    "warmup_steps": convert_warmup,
    "warmup_ratio": convert_warmup,
    "max_steps": convert_max_steps,
    "save_steps": convert_save_steps,
    "report_to": convert_trackers,
    "deepspeed": convert_deepspeed,
    "fsdp": convert_sharding,
    "early_stopping_patience": convert_patience,
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), convert_best),
}
DEFAULTS: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
_STATES = "states that a run goes on from: checkpoint.save_every_n_steps; the model is saved at the end"
_VALIDATES = "validation is at the end of each epoch: validation.every_n_steps"
_HUB = "nothing is sent to the hub; the model is in output_dir/model"
_KERNELS = "kernels compute the same: fused_kernels"
_BATCHES = "the order of samples comes of the seed"
WITHOUT = {
    "save_strategy": _STATES,
    "saves_per_epoch": _STATES,
    "save_only_model": _STATES,
    "save_safetensors": "files are safetensors",
    "save_first_step": _STATES,
    "eval_strategy": _VALIDATES,
    "evaluation_strategy": _VALIDATES,
    "evals_per_epoch": _VALIDATES,
    "do_eval": _VALIDATES,
    "eval_on_start": _VALIDATES,
    "logging_strategy": "log.every_n_steps",
    "logging_dir": "output_dir has metrics.jsonl and trackers/",
    "logging_first_step": "every step is in metrics.jsonl",
    "include_tokens_per_second": "every step has its tokens per second",
    "include_num_input_tokens_seen": "every step has its tokens",
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_private_repo": _HUB,
    "push_to_hub": _HUB,
    "tf32": "matrices are multiplied in dtype",
    "group_by_length": _BATCHES,
    "length_column_name": _BATCHES,
    "dataloader_pin_memory": _BATCHES,
    "dataloader_prefetch_factor": _BATCHES,
    "dataloader_drop_last": _BATCHES,
    "dataloader_persistent_workers": _BATCHES,
    "remove_unused_columns": "only the columns of the format are read",
    "ddp_timeout": "parallel.heartbeat_timeout_seconds: a rank that makes progress is never ended",
    "ddp_find_unused_parameters": "every parameter is used",
    "ddp_bucket_cap_mb": "is a matter of speed",
    "ddp_broadcast_buffers": "no model has buffers that change",
    "local_rank": "`tune run --nproc_per_node` starts the ranks",
    "world_size": "`tune run --nproc_per_node` starts the ranks",
    "gradient_checkpointing_kwargs": "layers are recomputed without reentrance",
    "low_cpu_mem_usage": "each rank reads its own slices of the weights",
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "inductor's default",
    "disable_tqdm": "log.progress says how a run is shown",
    "attn_implementation": _KERNELS,
    "flash_attention": _KERNELS,
    "use_liger_kernel": _KERNELS,
    "data_seed": "the order of samples comes of the seed",
}
REFUSED = {
    "resume_from_checkpoint": "a state of another tool cannot be gone on with; resume=latest does with ours",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "label_smoothing_factor": "labels are not smoothed",
    "optim_args": "optimizer.betas and optimizer.eps are what can be set",
    "optim_target_modules": "every parameter is trained, or adapters",
    "lr_scheduler_kwargs": "lr_scheduler.min_lr_ratio is what can be set",
    "loraplus_lr_ratio": "both matrices of an adapter have one learning rate",
    "loraplus_lr_embedding": "every parameter has one learning rate",
    "auto_find_batch_size": "`tune plan --search` finds the batch size before the run",
}
