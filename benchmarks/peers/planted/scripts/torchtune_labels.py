"""Print the label tokens of the first four rows of a torchtune config's dataset, as JSON.

`torchtune.py` runs this by the interpreter of torchtune's environment.
"""

import json
import sys


def main(config: str) -> None:
    """Decode the labels, a token at a time, and print a list of texts for each row.

    config: path of the YAML file.
    """
    from omegaconf import OmegaConf
    from torchtune import config as build

    cfg = OmegaConf.load(config)
    tokenizer = build.instantiate(cfg.tokenizer)
    rows = build.instantiate(cfg.dataset, tokenizer)
    # -100 marks tokens that are not trained.
    label_tokens = [
        [int(token) for token in rows[row]["labels"] if token != -100] for row in range(4)
    ]
    end = tokenizer.eos_id
    print(
        json.dumps(
            [
                ["</s>" if token == end else tokenizer.decode([token]) for token in tokens]
                for tokens in label_tokens
            ]
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
