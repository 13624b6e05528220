"""Train a task by TRL's SFTTrainer; with `unsloth` in the task, on Unsloth's model.

`gpu_peers.py` runs this with the path of a task, see `recorder.read_task`, by the interpreter of
the peer's environment.
"""

import sys
from pathlib import Path
from typing import Any

from recorder import Recorder, read_task
from trainer_parts import build_arguments, build_callback, cast_trained, load_model, read_rows


def main(path: str) -> None:
    """Train on rows of token ids, packed by the strategy `wrapped`, which fills every row.

    TRL's other strategies flatten a batch into one row, whose documents only an attention kernel of
    another package keeps apart.
    """
    task = read_task(path)
    # Before the imports below: Unsloth has to be imported before transformers.
    model = load_unsloth_model(task) if task["unsloth"] else load_model(task)
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    recorder = Recorder(task)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(task["tokenizer"]) / "tokenizer.json"), eos_token="2", pad_token="0"
    )
    packing = {"packing": True, "packing_strategy": "wrapped", "max_length": task["sequence"]}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**build_arguments(task), **packing),
        train_dataset=Dataset.from_dict({"input_ids": read_rows(task)}),
        processing_class=tokenizer,
        callbacks=[build_callback(recorder)],
    )
    trainer.train()
    recorder.write()


def load_unsloth_model(task: dict[str, Any]) -> Any:
    """Load the model as Unsloth's notebooks do, with the task's adapter.

    It has to be called before transformers is imported. Checkpointing is Unsloth's own, if the task
    asks for any.
    """
    import torch
    from unsloth import FastLanguageModel

    dtype = torch.bfloat16 if task["dtype"] == "bf16" else torch.float32
    model, _ = FastLanguageModel.from_pretrained(
        model_name=task["model"],
        max_seq_length=task["sequence"],
        dtype=dtype,
        load_in_4bit=task["method"] == "qlora",
        full_finetuning=task["method"] == "full",
    )
    if task["method"] != "full":
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        model = FastLanguageModel.get_peft_model(
            model,
            r=task["rank"],
            lora_alpha=task["alpha"],
            lora_dropout=0,
            bias="none",
            target_modules=[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
            use_gradient_checkpointing="unsloth" if task["checkpointing"] == "full" else False,
        )
        set_peft_model_state_dict(
            model, load_file(Path(task["adapter"]) / "adapter_model.safetensors")
        )
        cast_trained(model, dtype)
    return model


if __name__ == "__main__":
    main(sys.argv[1])
