"""Counts the held-out questions that a model answers exactly, letter for letter, by its likeliest
tokens.

python examples/demo/score.py                        # the untrained model that the demo starts from
python examples/demo/score.py outputs/demo/model     # after training
python examples/demo/score.py outputs/demo/model --show 5
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_lib.checkpoint.huggingface import find_checkpoint, load_weights
from recipe_lib.config import load_config
from recipe_lib.data import render_prompt
from recipe_lib.errors import run_for_exit_code
from recipe_lib.generation.sample import generate
from recipe_lib.models import (
    Decoder,
    DecoderSpec,
    build_meta,
    build_spec,
    init_weights,
    read_config,
    read_preset_config,
)
from recipe_lib.tokenizers import StreamDecoder, Tokenizer, load_tokenizer
from recipe_lib.training import derive_seed

FOLDER = Path(__file__).resolve().parent


@dataclass
class Answer:
    """A held-out question, its right answer, and what the model said until it was wrong or done."""

    question: str
    expected: str
    said: str

    @property
    def right(self) -> bool:
        """Whether every letter is right."""
        return self.said == self.expected


def read_heldout() -> list[dict[str, str]]:
    """Read the rows of heldout.jsonl."""
    return [
        json.loads(line)
        for line in (FOLDER / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def load_model(folder: str | None) -> tuple[Decoder, DecoderSpec, Tokenizer]:
    """Load the model of a checkpoint folder.

    None: the demo's model as training finds it, random from the seed.
    """
    demo = load_config("demo/full")
    if folder is None:
        spec = build_spec(read_preset_config(demo.model.preset), where=demo.model.preset)
        model = build_meta(spec, torch.float32).to_empty(device="cpu")
        init_weights(model, derive_seed(demo.seed, "model"), spec)
        return model.eval(), spec, load_tokenizer(FOLDER / "tokenizer")
    checkpoint = find_checkpoint(folder)
    spec = build_spec(read_config(checkpoint), where=str(checkpoint))
    model = build_meta(spec, torch.float32).to_empty(device="cpu")
    load_weights(model, spec, checkpoint)
    return model.eval(), spec, load_tokenizer(checkpoint)


def answer(model: Decoder, spec: DecoderSpec, tokenizer: Tokenizer, row: dict[str, str]) -> Answer:
    """Generate greedily; stop at the first token that cannot be part of the right answer."""
    prompt = render_prompt(tokenizer, [{"role": "user", "content": row["instruction"]}])
    text, said = StreamDecoder(tokenizer, prompt), ""
    for token in generate(model, spec, prompt, max_new_tokens=64, stop_ids=tokenizer.stop_ids):
        said += text.push(token)
        if not row["output"].startswith(said):
            break
    return Answer(row["instruction"], row["output"], said)


def main() -> int:
    """Print the share, and with --show some questions with their answers.

    Return 1 if the share is below --at-least.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", nargs="?", help="model folder; without it: the untrained model"
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="also print the first N answers"
    )
    parser.add_argument(
        "--at-least", type=float, default=0, metavar="PERCENT", help="exit code 1 below this share"
    )
    arguments = parser.parse_args()
    model, spec, tokenizer = load_model(arguments.checkpoint)
    answers = [answer(model, spec, tokenizer, row) for row in read_heldout()]
    for shown in answers[: arguments.show]:
        print(f"  {'right' if shown.right else 'wrong'}: {shown.question}  ->  {shown.said}")
    right = sum(shown.right for shown in answers)
    percent = 100 * right / len(answers)
    print(f"{right} of {len(answers)} held-out questions answered exactly ({percent:.1f} %)")
    if percent < arguments.at_least:
        print(f"error: expected at least {arguments.at_least:g} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_for_exit_code(main))
