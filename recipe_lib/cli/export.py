"""Write what was trained as other programs load it, for `tune export CHECKPOINT`.

main.py calls `run(words)`, which reads the command line. export_trained.py (--merge, --adapter,
--hf) and exported_model.py (--gguf, --quantize), which import torch, export.
"""

import argparse

from recipe_lib.checkpoint.model_folders import GGUF_KINDS, GROUP_SIZE, QUANTIZED_KINDS
from recipe_lib.cli.arguments import SWITCH, Parser
from recipe_lib.errors import DONE, ConfigError, raise_faults
from recipe_lib.units import choose_lines

DESCRIPTION = """Writes what was trained in a form that other programs load, loads it again and \
compares logits.

CHECKPOINT is a run's output_dir, one of its state/step_N, or the folder of a PEFT adapter.

  --adapter  the adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors)
  --merge    base and adapter as one Hugging Face model
  --hf       the model of a run that trained all weights, as a Hugging Face folder

and for these also a model folder, of a run or not:

  --gguf KIND      one file for llama.cpp and Ollama; of an adapter's folder, the adapter by itself
  --quantize KIND  a Hugging Face folder with linears in 4 or 8 bits, by torchao

An adapter's folder is only checked by --adapter without --out. The exit code is not 0 if the \
export differs."""
PARSER = Parser(
    "export",
    DESCRIPTION,
    {
        "checkpoint": {
            "metavar": "CHECKPOINT",
            "help": "output_dir, state/step_N, or an adapter's folder",
        },
        "--merge": SWITCH | {"help": "base and adapter as one model"},
        "--adapter": SWITCH | {"help": "the adapter"},
        "--hf": SWITCH | {"help": "all weights"},
        "--gguf": {"choices": GGUF_KINDS, "help": "a GGUF file, its matrices in this type"},
        "--pre": {
            "metavar": "NAME",
            "help": "--gguf: llama.cpp's pre-tokenizer, if it is not recognized",
        },
        "--quantize": {
            "choices": QUANTIZED_KINDS,
            "help": "a Hugging Face folder with quantized linears",
        },
        "--group-size": {
            "type": int,
            "metavar": "N",
            "help": (
                f"--quantize int4: weights that share a scale; default: {GROUP_SIZE}, or a run's"
                " qat_group_size"
            ),
        },
        "--out": {
            "metavar": "PATH",
            "help": (
                "a new folder (--gguf: file); default: next to the checkpoint, in the run's folder"
            ),
        },
        "--base": {
            "metavar": "MODEL",
            "help": "the adapter's base; default: the one that run or adapter names",
        },
        "--dtype": {
            "choices": ("fp32", "bf16"),
            "help": "--merge: type of what is written; default: the run's",
        },
        "--device": {
            "default": "cpu",
            "choices": ("auto", "cpu", "cuda"),
            "help": "for the check; default: cpu",
        },
        "--recipe": {"help": "a recipe of your own that the run was made with"},
    },
)


def run(words: list[str]) -> int:
    """Export and check; print what was written and how it compares."""
    arguments = read(words)
    if arguments.gguf or arguments.quantize:
        from recipe_lib.cli.exported_model import export_gguf, export_quantized

        (export_gguf if arguments.gguf else export_quantized)(arguments)
    else:
        from recipe_lib.cli.export_source import find_export_source
        from recipe_lib.cli.export_trained import export_adapted, export_hf

        (export_hf if arguments.hf else export_adapted)(find_export_source(arguments), arguments)
    return DONE


def read(words: list[str]) -> argparse.Namespace:
    """Return the command line.

    Raises ConfigError unless it has exactly one kind of export, and for options of another kind.
    """
    arguments = PARSER.parse(words)
    kinds = ("merge", "adapter", "hf", "gguf", "quantize")
    if sum(bool(getattr(arguments, kind)) for kind in kinds) != 1:
        *first_kinds, last = (f"--{kind}" for kind in kinds)
        raise ConfigError(
            f"tune export: expected one of {', '.join(first_kinds)} and {last}; see `tune export"
            " --help`"
        )
    # Each pair is a condition and its line; all lines that hold are raised together.
    raise_faults(
        ConfigError,
        choose_lines(
            (
                arguments.pre and not arguments.gguf,
                (
                    "--pre: only a GGUF file names a pre-tokenizer; use it with --gguf, or leave it"
                    " out"
                ),
            ),
            (
                arguments.group_size is not None and arguments.quantize != "int4",
                "--group-size: is for --quantize int4; leave it out",
            ),
            (
                arguments.device != "cpu" and (arguments.gguf or arguments.quantize),
                (
                    f"--device: found {arguments.device}, but this export is made and checked on"
                    " cpu; leave it out"
                ),
            ),
            (
                arguments.dtype and not arguments.merge,
                (
                    "--dtype: only a merged model may have another type; use it with --merge, or"
                    " leave it out"
                ),
            ),
            (
                arguments.base and arguments.hf,
                "--base: a run that trained all weights has no base; leave it out",
            ),
        ),
    )
    return arguments
