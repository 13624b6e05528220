"""`tune plan --calibrate`: a device's rates, on a CPU from small training runs whose operators are measured alone."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipe_lib.cli.plan_request import recipe_class
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.files import replace_text

_FULL, _CONFIG = "full_finetune_distributed", "llama3_2/1B_full"
# Hidden width, layers, width of the MLP, vocabulary, tokens, rows: kernels from microseconds to tens of milliseconds.
_SIZES = (
    (64, 2, 160, 512, 32, 1),
    (128, 2, 384, 1024, 128, 2),
    (256, 2, 704, 4096, 64, 4),
    (512, 2, 1408, 2048, 256, 1),
)
_DTYPES = ("fp32", "bf16")


def calibrate(path: Path) -> str:
    """Measure this machine's device and write its rates; return the line that says so."""
    from recipe_lib.plan.timing.calibrate import calibrate as measure

    rates = measure()
    if rates["dry_run"]:
        from recipe_lib.plan.timing.measure_operators import measure_operators

        with small_steps() as steps:
            rates |= measure_operators(steps)
    replace_text(path, json.dumps(rates, indent=2) + "\n")
    if rates["dry_run"]:
        return f"{path}: rates of this CPU, for `--device cpu` alone; measure on a machine with the GPU to plan for one"
    return f"{path}: rates of {rates['device']}; `tune plan --calibration {path}` uses the file"


@contextmanager
def small_steps() -> Iterator[list[tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Training steps of small Llamas in fp32 and bf16, each ready to be called again and again, in this process; with
    each the same with activation checkpointing."""
    from recipe_lib.parallel import start_world

    with tempfile.TemporaryDirectory(prefix="tune-calibrate-") as folder:
        configs = [
            [small_config(Path(folder), size, f"dtype={dtype}", f"memory.activation_checkpointing={kind}")
             for kind in ("none", "full")]
            for dtype in _DTYPES for size in _SIZES
        ]  # fmt: skip
        with start_world(configs[0][0]) as world:
            yield [(training_step(plain, world), training_step(again, world)) for plain, again in configs]


def small_config(folder: Path, size: tuple[int, ...], *more: str, recipe: str = _FULL, config: str = _CONFIG) -> Any:
    """The config of a run on the CPU, with its model's shape written in a folder.

    size: hidden width (a multiple of 64), layers, width of the MLP, vocabulary, tokens, rows. more: overrides.
    """
    from recipe_lib.config import load_config

    hidden, layers, inner, vocabulary, tokens, rows = size
    shape = folder / f"{'-'.join(map(str, size))}.json"
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "head_dim": 32,
             "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
             "vocab_size": vocabulary, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64,
             "max_position_embeddings": 8192, "tie_word_embeddings": False}  # fmt: skip
    replace_text(shape, json.dumps(llama))
    overrides = (
        "~model.path", f"model.preset={shape}", "tokenizer.path=unread", "data.source=unread", "device=cpu",
        f"max_seq_len={tokens}", f"batch_size={rows}", "gradient_accumulation_steps=1",
        f"output_dir={folder / 'none'}", "memory.activation_checkpointing=none", "data.packing=false",
        "compile=false", *more,
    )  # fmt: skip
    return load_config(config, overrides, RecipeFile.find(recipe).schema())


def training_step(cfg: Any, world: Any, recipe: str = _FULL) -> Callable[[], Any]:
    """A recipe's step on sequences of `max_seq_len` tokens, its model and optimizer set up."""
    from recipe_lib.plan.world.planned_batches import PlannedData

    run: Any = recipe_class(RecipeFile.find(recipe))(cfg, world)
    run.setup_model()
    run.setup_optimizer()
    run.data = PlannedData(cfg, world, SimpleNamespace(tokens=cfg.max_seq_len, documents=1))

    def step() -> None:
        run.train_step(next(run.data.batches())).numbers()

    return step
