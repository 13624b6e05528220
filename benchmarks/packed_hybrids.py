"""Measure a training step of hybrids whose rows hold packed documents, on this machine.

python -m benchmarks.packed_hybrids [KIND ...]

A row of 2048 tokens with 8 documents of 256, and one with documents of mixed lengths, against one
document of 2048; and the tokens a second of 8 documents of 256, packed into one row against padded
to 2048 tokens each. Forward and backward, the fastest of several turns, taken in turn.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recipe_lib.data.batches import compute_document_positions
from recipe_lib.external.module_spec import read_spec
from recipe_lib.external.tensor_plan.small_models import randomize
from recipe_lib.models import allocate, build_meta
from recipe_lib.ops.attention import make_attention_info
from tests.external.hybrids import make_hybrid_config

LENGTH = 2048
EQUAL = [256] * 8
# Like conversations: a few long ones, and many short ones.
MIXED = [700, 411, 300, 211, 130, 97, 71, 50, 33, 25, 20]
KINDS = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2")
# Sizes at which a layer's time is that of its products: a tenth of published ones.
WIDER = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_heads": 4,
    "linear_head_dim": 64,
    "head_dim": 32,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 64,
    "mamba_head_dim": 64,
    "mamba_d_ssm": 512,
    "mamba_chunk_size": 256,
    "chunk_size": 128,
    "max_position_embeddings": LENGTH,
}
TURNS = 2


def build_model(kind: str) -> Any:
    """Build a model with random weights, wider than those of the tests."""
    config = make_hybrid_config(kind)
    config |= {key: value for key, value in WIDER.items() if key in config}
    model = build_meta(read_spec(config, kind), torch.float32)
    allocate(model, torch.device("cpu"))
    randomize(model)
    return model.train()


def run_step(model: Any, lengths: list[int] | None, rows: int = 1) -> None:
    """Run forward and backward.

    lengths: of the documents of one row; None: `rows` rows of one document each.
    """
    tokens = torch.randint(3, model.spec.vocab_size, (rows, LENGTH))
    if lengths is None:
        model(tokens, labels=tokens).sum().backward()
        return
    positions = compute_document_positions([lengths], LENGTH)
    info = make_attention_info([lengths], LENGTH)
    model(tokens, positions, info, labels=tokens).sum().backward()


def measure(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the fastest time of each step, in seconds; steps take turns."""
    seconds = dict.fromkeys(steps, float("inf"))
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first one warms up
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def main(kinds: list[str]) -> None:
    """Print a line for each kind; without kinds for all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    assert sum(MIXED) == LENGTH == sum(EQUAL)
    print(
        f"{'kind':18} {'one of 2048':>12} {'8 of 256':>9} {'mixed':>6} {'padded':>7}"
        " packed / padded, tokens/s"
    )
    for kind in kinds or KINDS:
        model = build_model(kind)
        seconds = measure(
            {
                "one": partial(run_step, model, None),
                "equal": partial(run_step, model, EQUAL),
                "mixed": partial(run_step, model, MIXED),
                "padded": partial(run_step, model, None, rows=len(EQUAL)),
            }
        )
        one = seconds["one"]
        print(
            f"{kind:18} {one:10.3f} s {seconds['equal'] / one:8.2f}x {seconds['mixed'] / one:5.2f}x"
            f" {seconds['padded'] / one:6.2f}x {seconds['padded'] / seconds['equal']:6.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
