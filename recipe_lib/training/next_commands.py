"""The commands that go on from an export, ready to be copied: only such as work with what was
written.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from recipe_lib.checkpoint.side_files import CHAT_TEMPLATE
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig
from recipe_lib.logs import get_logger

ANYWHERE = Path("FOLDER")  # of an export, in the model card that travels with it
_SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what `--max-lora-rank` of vLLM may be
_SERVED = {"q", "k", "v", "o", "gate", "up", "down"}


def model_commands(folder: Path) -> list[str]:
    """Return what to do with a model folder of one of our families."""
    return [_line("tune", "generate", folder), _line("vllm", "serve", folder)]


def adapter_commands(
    folder: Path,
    base: str,
    lora: LoraConfig,
    *,
    rank: int,
    with_base: bool = False,
    template: bool = False,
) -> list[str]:
    """Return what to do with an adapter. base: what it was trained on. rank: of the file, which may
    stack adapters. with_base: the adapter does not find its base by itself. template: it has a chat
    template of its own.
    """
    commands = [_line("tune", "generate", folder, *(["--base", base] if with_base else []))]
    room = next((allowed for allowed in _SERVED_RANKS if allowed >= rank), None)
    if not lora.dora and room is not None and set(lora.targets) <= _SERVED:  # what vLLM loads
        served = ["--enable-lora", "--lora-modules", f"mine={folder}", "--max-lora-rank", room]
        if template:  # the server takes the base's own
            served += ["--chat-template", folder / CHAT_TEMPLATE]
        commands.append(_line("vllm", "serve", base, *served))
    return commands


def gguf_commands(file: Path, *, is_adapter: bool = False) -> list[str]:
    """Return what to do with a GGUF file; an adapter goes with the file of its base."""
    if is_adapter:
        return [_line("llama-cli", "-m", "BASE.gguf", "--lora", file)]
    return [_line("llama-cli", "-m", file)]


def quantized_commands(folder: Path) -> list[str]:
    """Return what to do with a folder whose linears are quantized, which `tune` itself does not
    read.
    """
    return [_line("vllm", "serve", folder)]


def run_commands(cfg: FullFinetuneConfig) -> list[str]:
    """Return what to do with a run: evaluate it, where it has held-out answers; quantize it as it
    was trained to be.
    """
    output, recipe = Path(cfg.output_dir), own_recipe(cfg)
    options = [] if recipe is None else ["--recipe", recipe]
    found = []
    if cfg.validation.source is not None and cfg.samples == "answers":
        found.append(_line("tune", "eval", output, *options))
    if cfg.qat in ("int4", "int8"):
        found.append(_line("tune", "export", output, "--quantize", cfg.qat, *options))
    return found


def merge_command(checkpoint: Path, base: str | None = None, recipe: str | None = None) -> str:
    """Return how the adapter of a run or a folder is merged. base: given where it is not found.
    recipe: of one's own.
    """
    options = [
        word
        for option, value in (("--base", base), ("--recipe", recipe))
        if value
        for word in (option, value)
    ]
    return _line("tune", "export", checkpoint, "--merge", *options)


def own_recipe(cfg: FullFinetuneConfig) -> str | None:
    """Return the file of the recipe whose config has keys of its own, which reading the run again
    takes; None for others.
    """
    module = type(cfg).__module__
    return (
        None
        if module.startswith("recipe_lib.")
        else getattr(sys.modules.get(module), "__file__", None)
    )


def tell_next(commands: Iterable[str]) -> None:
    """A log line each, which a terminal does not break."""
    for command in commands:
        get_logger().info("next: %s", command, extra={"is_command": True})


def print_next(commands: Iterable[str]) -> None:
    """A line each on standard output."""
    for command in commands:
        print(f"next: {command}")


def _line(*words: object) -> str:
    return shlex.join(
        f"./{word}" if isinstance(word, Path) and str(word)[0] == "-" else str(word)
        for word in words
    )
