"""`tune generate CHECKPOINT --prompt TEXT`: a completion, as it is made.

Standard output carries the completion and one newline after it; everything else goes to standard error.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, CheckpointError, ConfigError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

    from recipe_lib.models import Decoder, DecoderSpec
    from recipe_lib.tokenizers import Tokenizer

DESCRIPTION = """Completes a prompt with a checkpoint and streams the text to standard output.

The prompt is a user's message: it is put into the tokenizer's chat template, or without one into the plain template
that training uses. --raw takes it as the beginning of the text itself; --raw --prompt '' begins from nothing."""

DTYPES = ("auto", "fp32", "bf16", "fp16", "fp64")


def run(words: list[str]) -> int:
    """Loads the checkpoint and prints the completion."""
    arguments = read(words)
    check(arguments)

    from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
    from recipe_lib.models import read_config, spec_from_config
    from recipe_lib.tokenizers import StreamDecoder, load_tokenizer

    folder = find_checkpoint(arguments.checkpoint)
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        raise CheckpointError(f"{show(str(folder))}: has no config.json; did you mean {show(str(folder / 'model'))}?")
    config = read_config(folder)
    spec = spec_from_config(config, where=str(folder / "config.json"))
    check_weights(spec, folder)
    tokenizer = load_tokenizer(folder)
    prompt = prompt_tokens(tokenizer, arguments.prompt, arguments.raw)
    if len(prompt) >= spec.max_positions:
        raise ConfigError(f"--prompt: {len(prompt)} tokens; the model takes {spec.max_positions}, completion included")
    if max(prompt) >= spec.vocab_size:
        raise CheckpointError(
            f"{show(str(folder))}: the tokenizer writes the prompt with the id {max(prompt)}, the model knows ids up "
            f"to {spec.vocab_size - 1}; check that tokenizer and weights are of one model"
        )
    text = StreamDecoder(tokenizer, prompt)
    for token in complete(folder, spec, config, prompt, tokenizer, arguments):
        sys.stdout.write(text.push(token))
        sys.stdout.flush()
    print(text.finish(), flush=True)
    return DONE


def read(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser("generate", DESCRIPTION)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="model folder, or a hub id that was downloaded")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to answer or to continue")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    temperature = "0 (default): always the likeliest token; 1: draw as the model was trained"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=temperature)
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest likeliest that sum to P")
    parser.add_argument("--seed", type=int, default=42, help="of the draws; default: 42")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: the checkpoint's")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if there is one")
    return parser.parse(words)


def check(arguments: argparse.Namespace) -> None:
    """Refuses numbers that make no sense, all at once."""
    temperature, top_k, top_p = arguments.temperature, arguments.top_k, arguments.top_p
    faults = []
    if arguments.max_new_tokens < 1:
        faults.append(f"--max-new-tokens: found {arguments.max_new_tokens}, expected a number >= 1")
    if not 0 <= temperature < float("inf"):
        faults.append(f"--temperature: found {temperature}, expected a number >= 0")
    if top_k is not None and top_k < 1:
        faults.append(f"--top-k: found {top_k}, expected a number >= 1")
    if top_p is not None and not 0 < top_p <= 1:
        faults.append(f"--top-p: found {top_p}, expected a number above 0 and up to 1")
    if temperature == 0 and (top_k is not None or top_p is not None):
        given = " and ".join(name for name, value in (("--top-k", top_k), ("--top-p", top_p)) if value is not None)
        faults.append(f"{given}: without effect at temperature 0, which takes the likeliest token; add --temperature 1")
    if not 0 <= arguments.seed < 2**63:
        faults.append(f"--seed: found {arguments.seed}, expected a number from 0 to 2^63 - 1")
    if arguments.prompt == "" and not arguments.raw:
        faults.append("--prompt: is empty; give a text, or begin from nothing with --raw")
    if any("\ud800" <= letter <= "\udfff" for letter in arguments.prompt):
        faults.append("--prompt: is not UTF-8; give it in UTF-8 text")
    if faults:
        raise ConfigError(*faults)


def prompt_tokens(tokenizer: "Tokenizer", prompt: str, raw: bool) -> list[int]:
    """The ids that the model reads first."""
    if raw:
        tokens = tokenizer.encode(prompt, add_bos=tokenizer.add_bos_by_default or not prompt)
        if not tokens:
            raise ConfigError("--prompt: is empty and the tokenizer has no BOS token to begin from; give a text")
        return tokens
    from recipe_lib.data import render_prompt

    return render_prompt(tokenizer, [{"role": "user", "content": prompt}])


def complete(
    folder: Path,
    spec: "DecoderSpec",
    config: dict[str, Any],
    prompt: list[int],
    tokenizer: "Tokenizer",
    arguments: argparse.Namespace,
) -> Iterator[int]:
    """Loads the model and yields the ids of the completion."""
    import torch

    from recipe_lib.cli.inference_device import choose_device, choose_dtype
    from recipe_lib.generation.sample import generate

    device = choose_device(arguments.device)
    try:
        model = load_model(folder, spec, choose_dtype(arguments.dtype, config), device)
        generator = torch.Generator(device).manual_seed(arguments.seed)
        yield from generate(
            model,
            spec,
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=generator,
        )
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{show(str(folder))}: the model does not fit on {device}; try --dtype bf16, fewer --max-new-tokens, "
            "or --device cpu"
        ) from error


def load_model(folder: Path, spec: "DecoderSpec", dtype: "torch.dtype", device: "torch.device") -> "Decoder":
    """The checkpoint's model with its weights, ready to complete."""
    from recipe_lib.checkpoint.huggingface import load_weights
    from recipe_lib.models import build_meta

    model = build_meta(spec, dtype).to_empty(device=device)
    load_weights(model, spec, folder)
    return model.eval()
