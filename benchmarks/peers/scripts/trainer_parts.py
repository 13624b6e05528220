"""Build what the sides on transformers' Trainer share: model, rows, arguments, recording callback.

`run_transformers.py` and `run_trl.py` call these functions; a task is what `recorder.read_task`
returns.
"""

from pathlib import Path
from typing import Any

from recorder import Recorder


def load_model(task: dict[str, Any]) -> Any:
    """Load the task's model, for qlora in bitsandbytes' NF4, with the task's adapter.

    The adapter is in the run's dtype, as on every side; PEFT by itself keeps it in fp32.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if task["dtype"] == "bf16" else torch.float32
    options: dict[str, Any] = {}
    if task["method"] == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.uint8,
        )
        options["device_map"] = {"": 0 if task["device"] == "cuda" else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=dtype, attn_implementation="sdpa", **options
    )
    model.config.use_cache = False
    if task["method"] != "full":
        from peft import PeftModel

        model = PeftModel.from_pretrained(
            model, task["adapter"], is_trainable=True, autocast_adapter_dtype=False
        )
        cast_trained(model, dtype)
    return model


def cast_trained(model: Any, dtype: Any) -> None:
    """Cast the trained parameters to the dtype of the run, in place."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def read_rows(task: dict[str, Any]) -> list[list[int]]:
    """Return the rows of token ids, in the order in which they are trained."""
    import numpy as np

    return [list(map(int, row)) for row in np.load(task["rows"], allow_pickle=False)]


def build_arguments(task: dict[str, Any]) -> dict[str, Any]:
    """Return the TrainingArguments of the task, by name.

    `bf16`, which is autocast, is off: weights are in bf16 already, and autocast would only cost.
    """
    return {
        "output_dir": str(Path(task["folder"]) / "output"),
        "per_device_train_batch_size": task["batch_size"],
        "max_steps": task["steps"],
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "use_cpu": task["device"] == "cpu",
        "gradient_checkpointing": task["checkpointing"] == "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": task["liger"],
        "torch_compile": task["compiled"],
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": task["device"] == "cuda",
        "remove_unused_columns": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_callback(recorder: Recorder) -> Any:
    """Return a callback that records the trainer's log lines, one a step."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """A callback for log lines: a step's has `loss` and `grad_norm`, the run's last neither."""

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
        ) -> None:
            """Record one line."""
            if logs and "loss" in logs and "grad_norm" in logs:
                recorder.step(logs["loss"], logs["grad_norm"])

    return Watch()
