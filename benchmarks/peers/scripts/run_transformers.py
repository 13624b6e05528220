"""Train a task by transformers' Trainer; adapters by PEFT, NF4 by bitsandbytes.

`gpu_peers.py` runs this with the path of a task, by the interpreter of the peer's environment. A
task is JSON with the files, the method and the dtype of one run; `recorder.read_task` names all.
"""

import sys

from recorder import Recorder, read_task
from trainer_parts import build_arguments, build_callback, load_model, read_rows
from transformers import Trainer, TrainingArguments, default_data_collator


def main(path: str) -> None:
    """Train on rows whose labels are their tokens; transformers' model shifts them."""
    task = read_task(path)
    recorder = Recorder(task)
    rows = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": row}
        for row in read_rows(task)
    ]
    trainer = Trainer(
        model=load_model(task),
        args=TrainingArguments(**build_arguments(task)),
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[build_callback(recorder)],
    )
    trainer.train()
    recorder.write()


if __name__ == "__main__":
    main(sys.argv[1])
