"""Print the trained texts of the first rows of LitGPT's dataset, as JSON: a list of pieces each.

`planted/litgpt.py` runs it by LitGPT's own interpreter.
"""

import json
import sys
from pathlib import Path


def main(model: Path, pairs: Path, max_len: int) -> None:
    """Decode the labels of the first batch, a token at a time.

    pairs: folder of train.jsonl and val.jsonl. max_len: tokens of a row.
    """
    from litgpt.data import JSON
    from litgpt.tokenizer import Tokenizer

    tokenizer = Tokenizer(model)
    data = JSON(json_path=pairs, mask_prompt=True, prompt_style="platypus", num_workers=0)
    data.connect(tokenizer, batch_size=4, max_seq_length=max_len)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    label_tokens = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
    # The end token by the name that the benchmark looks for.
    texts = [
        [
            "</s>" if token == tokenizer.eos_id else tokenizer.processor.id_to_token(token)
            for token in row
        ]
        for row in label_tokens
    ]
    print(json.dumps(texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
