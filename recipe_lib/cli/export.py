"""`tune export CHECKPOINT --merge | --adapter | --hf | --gguf | --quantize`: what was trained, as others load it."""

import argparse

from recipe_lib.checkpoint.export_kinds import GGUF_KINDS, GROUP_SIZE, QUANTIZED_KINDS
from recipe_lib.cli.arguments import Parser
from recipe_lib.errors import DONE, ConfigError

DESCRIPTION = """Writes what was trained in a form that other programs load, loads it again and compares logits.

CHECKPOINT is a run's output_dir, one of its state/step_N, or the folder of a PEFT adapter.

  --adapter  the adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors)
  --merge    base and adapter as one Hugging Face model
  --hf       the model of a run that trained all weights, as a Hugging Face folder

and for these also a model folder, of a run or not:

  --gguf KIND      one file for llama.cpp and Ollama; of an adapter's folder, the adapter by itself
  --quantize KIND  a Hugging Face folder with linears in 4 or 8 bits, by torchao

An adapter's folder is only checked by --adapter without --out. The exit code is not 0 if the export differs."""


def run(words: list[str]) -> int:
    """Exports and checks; prints what was written and how it compares."""
    arguments = read(words)
    if arguments.gguf or arguments.quantize:
        from recipe_lib.cli.exported_model import export_gguf, export_quantized

        (export_gguf if arguments.gguf else export_quantized)(arguments)
    else:
        from recipe_lib.cli.export_trained import export_trained

        export_trained(arguments)
    return DONE


def parser() -> Parser:
    """The options of the verb."""
    options = Parser("export", DESCRIPTION)
    options.add_argument("checkpoint", metavar="CHECKPOINT", help="output_dir, state/step_N, or an adapter's folder")
    for name, text in (("merge", "base and adapter as one model"), ("adapter", "the adapter"), ("hf", "all weights")):
        options.add_argument(f"--{name}", action="store_true", help=text)
    options.add_argument("--gguf", choices=GGUF_KINDS, help="a GGUF file, its matrices in this type")
    options.add_argument("--pre", metavar="NAME", help="--gguf: llama.cpp's pre-tokenizer, if it is not recognized")
    options.add_argument("--quantize", choices=QUANTIZED_KINDS, help="a Hugging Face folder with quantized linears")
    size = f"--quantize int4: weights that share a scale; default: {GROUP_SIZE}, or a run's qat_group_size"
    options.add_argument("--group-size", type=int, metavar="N", help=size)
    options.add_argument(
        "--out",
        metavar="PATH",
        help="a new folder (--gguf: file); default: next to the checkpoint, in the run's folder",
    )
    options.add_argument(
        "--base", metavar="MODEL", help="the adapter's base; default: the one that run or adapter names"
    )
    options.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="--merge: type of what is written; default: the run's"
    )
    options.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="for the check; default: cpu")
    options.add_argument("--recipe", help="a recipe of your own that the run was made with")
    return options


def read(words: list[str]) -> argparse.Namespace:
    """The command line."""
    arguments = parser().parse(words)
    kinds = ("merge", "adapter", "hf", "gguf", "quantize")
    if sum(bool(getattr(arguments, kind)) for kind in kinds) != 1:
        *others, last = (f"--{kind}" for kind in kinds)
        raise ConfigError(f"tune export: expected one of {', '.join(others)} and {last}; see `tune export --help`")
    if arguments.pre and not arguments.gguf:
        raise ConfigError("--pre: only a GGUF file names a pre-tokenizer; use it with --gguf, or leave it out")
    if arguments.group_size is not None and arguments.quantize != "int4":
        raise ConfigError("--group-size: is for --quantize int4; leave it out")
    if arguments.device != "cpu" and (arguments.gguf or arguments.quantize):
        raise ConfigError(
            f"--device: found {arguments.device}, but this export is made and checked on cpu; leave it out"
        )
    if arguments.dtype and not arguments.merge:
        raise ConfigError("--dtype: only a merged model may have another type; use it with --merge, or leave it out")
    if arguments.base and arguments.hf:
        raise ConfigError("--base: a run that trained all weights has no base; leave it out")
    return arguments
