"""What a recipe's step costs beside the bare model: the same batches through both, step by step in
turn.

    python -m benchmarks.step_overhead --output docs/measurements/step_overhead.md

Bare: forward, backward, torch's clipping and AdamW on a copy of the model, nothing else. The
recipe's side also takes its batches from the data order, sets the learning rate, writes
metrics.jsonl and looks for signals. Losses and norms of both stand in the report: they do the same
work. Run it on a machine that does nothing else.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recipe_lib
from recipe_lib import training
from recipe_lib.config import load_config
from recipe_lib.data import StepBatches
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import start_world
from recipe_lib.training.training_data import prepare_data
from tests.recipes.runs import get_recipe_class, import_recipe_module

ROOT = Path(__file__).parent.parent
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
ROWS, WARM_UP = 8, 5

TEXT = """# What a recipe's step costs beside the bare model

`{command}`, torch {torch}, {threads} threads, {machine}; {steps} steps after {warm} to warm up, {rows} packed rows of
128 tokens in fp32, {parameters:.1f} M parameters. Steps of both sides alternate on the same batches.

| | median seconds a step | losses | gradient norms |
|---|---:|---|---|
| bare: forward, backward, clipping, AdamW | {bare:.4f} | {bare_losses} | {bare_norms} |
| `full_finetune_distributed` | {own:.4f} | {own_losses} | {own_norms} |

Ratio of paired steps, median: **{ratio:.4f}** (quartiles {low:.4f} to {high:.4f}). Losses are those of the first, the
middle and the last step.
"""


def main() -> None:
    """Runs both sides and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        lines, parameters = run_both(Path(folder), arguments.steps + WARM_UP)
    timed = lines[WARM_UP:]
    ratios = [own["seconds"] / bare["seconds"] for bare, own in timed]
    low, middle, high = statistics.quantiles(ratios, n=4)
    shown = [timed[0], timed[len(timed) // 2], timed[-1]]
    sides = {
        f"{side}_{name}": ", ".join(f"{pair[number][key]:.6f}" for pair in shown)
        for number, side in enumerate(("bare", "own"))
        for name, key in (("losses", "loss"), ("norms", "grad_norm"))
    }
    arguments.output.write_text(
        TEXT.format(
            command=(
                "python -m benchmarks.step_overhead --output docs/measurements/step_overhead.md"
            ),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            machine=f"{platform.machine()}, tune-recipes {recipe_lib.__version__}",
            steps=arguments.steps,
            warm=WARM_UP,
            rows=ROWS,
            parameters=parameters / 1e6,
            bare=statistics.median(bare["seconds"] for bare, _ in timed),
            own=statistics.median(own["seconds"] for _, own in timed),
            ratio=middle,
            low=low,
            high=high,
            **sides,
        )
    )
    print(f"{middle:.4f}")


def run_both(
    folder: Path, steps: int
) -> tuple[list[tuple[dict[str, float], dict[str, float]]], int]:
    """(bare, recipe) for each step, and the number of parameters."""
    cfg = build_config(folder, steps)
    prepare_data(cfg)
    found = []
    with start_world(cfg) as world:
        recipe = get_recipe_class(import_recipe_module())(cfg, world)
        for part in (
            partial(recipe.setup_data, None),
            recipe.setup_model,
            recipe.load_weights,
            recipe.setup_optimizer,
        ):
            part()
        model = copy.deepcopy(recipe.model)
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        loop = training.TrainingLoop(
            cfg, world, recipe.model, recipe.optimizer, recipe.data, done=0
        )
        with loop:
            batches_of = loop.steps()
            schedule = training.build_lr_schedule(cfg, loop.total_steps)
            for _ in range(steps):
                began = time.perf_counter()
                batches = next(batches_of)
                taking = time.perf_counter() - began
                lr = schedule(loop.step)
                bare = run_bare_step(model, optimizer, batches, cfg, lr)
                began = time.perf_counter()
                training.set_learning_rate(recipe.optimizer, lr)
                step = recipe.train_step(batches)
                loop.finish(step, batches, learning_rate=lr, validate=recipe.validate)
                seconds = time.perf_counter() - began + taking
                own = {
                    "seconds": seconds,
                    "loss": float(step.loss),
                    "grad_norm": float(step.grad_norm),
                }
                found.append((bare, own))
    return found, sum(parameter.numel() for parameter in model.parameters())


def run_bare_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: StepBatches, cfg: Any, lr: float
) -> dict[str, float]:
    """A step without anything of ours but the model."""
    began = time.perf_counter()
    optimizer.param_groups[0]["lr"] = lr
    (batch,) = batches.micro_batches
    head_loss = CrossEntropy(cfg.memory.loss_chunks)
    loss = model(
        batch.tokens, batch.positions, batch.attention, labels=batch.labels, head_loss=head_loss
    )
    loss = loss / batches.num_label_tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"seconds": time.perf_counter() - began, "loss": loss.item(), "grad_norm": norm.item()}


def build_config(folder: Path, steps: int) -> Any:
    """The demo's rows, packed, for a model of 15 M parameters; everything is written into the
    folder.
    """
    (folder / "model.json").write_text(json.dumps(MODEL))
    overrides = [
        f"model.preset={folder}/model.json",
        f"output_dir={folder}/run",
        f"data.cache_dir={folder}/cache",
        f"data.source={ROOT}/examples/demo/train.jsonl",
        f"tokenizer.path={ROOT}/examples/demo/tokenizer",
        "data.packing=true",
        "~validation",
        f"batch_size={ROWS}",
        f"max_steps={steps}",
        "optimizer.lr=1e-3",
        "checkpoint.save_model=false",
    ]
    return load_config("demo/full", overrides)


if __name__ == "__main__":
    main()
