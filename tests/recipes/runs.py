"""Small runs of the shipped recipe, for the tests of this folder."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent


@cache
def recipe_module() -> ModuleType:
    """The recipe's file as a module."""
    path = ROOT / "recipes" / "full_finetune_distributed.py"
    spec = importlib.util.spec_from_file_location("full_finetune_distributed", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def arguments(output: Path) -> list[str]:
    """Command line of a run of seconds: the demo's tokenizer and rows, a model of two layers of width 32."""
    return [
        "--config",
        "demo/full",
        f"model.preset={ROOT / 'tests' / 'recipes' / 'tiny.json'}",
        "max_seq_len=64",
        "batch_size=4",
        "gradient_accumulation_steps=1",
        "data.max_rows=24",
        f"output_dir={output}",
        "~validation",
        "lr_schedule.warmup_steps=0",
    ]
