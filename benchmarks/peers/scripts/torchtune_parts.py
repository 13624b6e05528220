"""Define the components that `run_torchtune.py` names in torchtune's config.

They are rows of given token ids, a logger that keeps the record, a checkpointer that writes
nothing, and a model whose adapters start from given weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from recorder import Recorder, read_task
from torchtune.training import FullModelHFCheckpointer


class Tokenizer:
    """A stand-in for a tokenizer: rows are ids already, and the recipe asks for `pad_id` alone."""

    pad_id = 0


class Rows:
    """A dataset of token ids, all of which are label tokens; the recipe shifts the labels."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        """source: .npy of ids `[rows, sequence]`. tokenizer: torchtune gives it; not used."""
        self._rows = [list(map(int, row)) for row in np.load(source, allow_pickle=False)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"tokens": self._rows[number], "labels": self._rows[number]}


class Logger:
    """A metric logger, see `torchtune.training.metric_logging.MetricLoggerInterface`."""

    def __init__(self, task: str) -> None:
        """task: path of the task's file."""
        self._recorder = Recorder(read_task(task))

    def log_config(self, config: Any) -> None:
        """Do nothing: the config was written by us."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Record one step."""
        self._recorder.step(payload["loss"], payload["grad_norm"])

    def close(self) -> None:
        """Write the record: the run is over."""
        self._recorder.write()


class Checkpointer(FullModelHFCheckpointer):
    """torchtune's checkpointer, which reads the model and writes nothing.

    Saving at the end of a run is not measured.
    """

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""


def build_constant_schedule(optimizer: Any, num_training_steps: int, last_epoch: int) -> Any:
    """Keep the learning rate constant: torchtune's LoRA recipe cannot do without a schedule."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: 1.0, last_epoch)


def build_adapted_model(adapter: str, tied: bool, **settings: Any) -> Any:
    """Build torchtune's model with adapters that start from those of a PEFT folder.

    torchtune has the channels of a query or key head in another order. Only B would have to follow
    it, and B is zero.

    adapter: the folder. tied: the embedding is the output projection too. settings: of the builder.
    """
    import torch
    from safetensors import safe_open
    from torchtune.models import llama3, llama3_2

    build = llama3_2.lora_llama3_2 if tied else llama3.lora_llama3
    model = build(**settings)
    # torchtune's path of a linear in a layer -> PEFT's.
    module_names = {
        "attn.q_proj": "self_attn.q_proj",
        "attn.k_proj": "self_attn.k_proj",
        "attn.v_proj": "self_attn.v_proj",
        "attn.output_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.gate_proj",
        "mlp.w2": "mlp.down_proj",
        "mlp.w3": "mlp.up_proj",
    }
    with (
        safe_open(str(Path(adapter) / "adapter_model.safetensors"), framework="pt") as file,
        torch.no_grad(),
    ):
        for number, layer in enumerate(model.layers):
            for path, name in module_names.items():
                module = layer.get_submodule(path)
                prefix = f"base_model.model.model.layers.{number}.{name}"
                module.lora_a.weight.copy_(file.get_tensor(f"{prefix}.lora_A.weight"))
                module.lora_b.weight.copy_(file.get_tensor(f"{prefix}.lora_B.weight"))
    return model
