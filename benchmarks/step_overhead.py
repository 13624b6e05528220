"""Measure what a recipe's step costs beside the bare model, on the same batches in turn.

    python -m benchmarks.step_overhead --output docs/measurements/step_overhead.md

Bare: forward, backward, torch's clipping and AdamW on a copy of the model. The recipe's side also
takes its batches from the data order, writes metrics.jsonl and looks for signals. That both do the
same work is shown by their losses and norms. Run it on a machine that does nothing else.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
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
MODEL = {  # a config.json; 15 M parameters
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
ROWS = 8  # packed sequences of a batch
WARM_UP = 5  # steps that are not counted

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
    """Run both sides and write the page."""
    parser = argparse.ArgumentParser(
        description="Measure what a recipe's step costs beside the bare model."
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        steps, num_parameters = run_both(Path(folder), arguments.steps + WARM_UP)
    bare_steps = [bare for bare, _ in steps[WARM_UP:]]
    recipe_steps = [recipe for _, recipe in steps[WARM_UP:]]
    ratios = [
        recipe.seconds / bare.seconds for bare, recipe in zip(bare_steps, recipe_steps, strict=True)
    ]
    low, median, high = statistics.quantiles(ratios, n=4)
    text = TEXT.format(
        command="python -m benchmarks.step_overhead --output docs/measurements/step_overhead.md",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        machine=f"{platform.machine()}, tune-recipes {recipe_lib.__version__}",
        steps=arguments.steps,
        warm=WARM_UP,
        rows=ROWS,
        parameters=num_parameters / 1e6,
        bare=statistics.median(step.seconds for step in bare_steps),
        bare_losses=format_first_middle_last([step.loss for step in bare_steps]),
        bare_norms=format_first_middle_last([step.grad_norm for step in bare_steps]),
        own=statistics.median(step.seconds for step in recipe_steps),
        own_losses=format_first_middle_last([step.loss for step in recipe_steps]),
        own_norms=format_first_middle_last([step.grad_norm for step in recipe_steps]),
        ratio=median,
        low=low,
        high=high,
    )
    arguments.output.write_text(text)
    print(f"{median:.4f}")


def format_first_middle_last(values: list[float]) -> str:
    """Return the first, the middle and the last value, as text."""
    return ", ".join(f"{values[index]:.6f}" for index in (0, len(values) // 2, -1))


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step of a side."""

    seconds: float
    loss: float
    grad_norm: float


def run_both(folder: Path, steps: int) -> tuple[list[tuple[TimedStep, TimedStep]], int]:
    """Run both sides in turn on the same batches.

    Returns (bare, recipe) for each step, the first included, and the number of parameters. folder:
    for everything that the run writes.
    """
    cfg = build_config(folder, steps)
    prepare_data(cfg)
    timed = []
    with start_world(cfg) as world:
        recipe = get_recipe_class(import_recipe_module())(cfg, world)
        recipe.setup_data(None)
        recipe.setup_model()
        recipe.load_weights()
        recipe.setup_optimizer()
        model = copy.deepcopy(recipe.model)  # the same weights, trained apart
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        loop = training.TrainingLoop(
            cfg,
            world=world,
            model=recipe.model,
            optimizer=recipe.optimizer,
            data=recipe.data,
            done=0,
        )
        with loop:
            data = loop.steps()
            schedule = training.build_lr_schedule(cfg, loop.total_steps)
            for _ in range(steps):
                began = time.perf_counter()
                batches = next(data)
                data_seconds = time.perf_counter() - began
                lr = schedule(loop.step)
                bare = run_bare_step(model, optimizer=optimizer, batches=batches, cfg=cfg, lr=lr)
                began = time.perf_counter()
                training.set_learning_rate(recipe.optimizer, lr)
                step = recipe.train_step(batches)
                loop.finish(step, batches, learning_rate=lr, validate=recipe.validate)
                # The batches of both sides were taken before the bare step: the recipe's cost.
                seconds = time.perf_counter() - began + data_seconds
                recipe_step = TimedStep(seconds, float(step.loss), float(step.grad_norm))
                timed.append((bare, recipe_step))
    return timed, sum(parameter.numel() for parameter in model.parameters())


def run_bare_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: StepBatches, cfg: Any, lr: float
) -> TimedStep:
    """Run a step without anything of ours but model and loss. batches: one micro-batch."""
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
    return TimedStep(time.perf_counter() - began, loss.item(), norm.item())


def build_config(folder: Path, steps: int) -> Any:
    """Return the config of the demo's rows, packed, for the model MODEL.

    folder: where model.json is written now, and everything else by the run.
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
