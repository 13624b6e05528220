"""Print the label tokens of the first batch of the trainer that a TRL config makes, as JSON.

`trl.py` runs this by the interpreter of TRL's environment.
"""

import json
import sys


def main(config: str) -> None:
    """Make the trainer as `trl sft` does, and decode the labels of its first batch.

    Prints a list of texts for each row, a token each. config: path of the YAML file.
    """
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config(["--config", config])
    rows = load_dataset(script.dataset_name)["train"]
    training.per_device_train_batch_size = 4
    trainer = SFTTrainer(model=model.model_name_or_path, args=training, train_dataset=rows)
    batch = next(iter(trainer.get_train_dataloader()))
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    texts = [
        [tokenizer.decode([token]) for token in row.tolist() if token != -100]
        for row in batch["labels"]
    ]
    print(json.dumps(texts))


if __name__ == "__main__":
    main(sys.argv[1])
