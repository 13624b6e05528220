"""Plan what the ranks of a pipeline hold of a 7B, with our runtime and with torch's.

`pp_memory.py` puts `format_section` into its page. Everything runs on the simulated device, whose
tensors have sizes and no bytes. What torch's runtime held before its #138119 and #138504 is planned
too, by planting back what they took away ("the fix").
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

# No dataset is read: the length of sequences is given. Set before the imports that look at it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.planner_stacks import compute_product_written_out
from benchmarks.pp_torch_stages import RECIPE, make_recipe_class
from benchmarks.tables import format_markdown_table
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.models import decoder
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB

CONFIG = "llama2/7B_full"
RANKS = 4  # places in the pipeline
COUNT = 8  # micro-batches of a step, of one sequence each
TOKENS = 4096  # of a sequence
CARD = "h100"  # as `tune plan --device` takes it
SCHEDULES = ("1f1b", "interleaved_zero_bubble", "zbv")
MODES = ("none", "full")  # of activation checkpointing
# Schedule that the fix changed -> the rank with its last stage, which holds the losses.
LAST_STAGE = {"interleaved_zero_bubble": RANKS - 1, "zbv": 0}
# Kinds of simulations: what runs the stages.
OURS = "ours"
TORCH = "torch"
BEFORE = "torch before the fix"
_HELD = ("parameters", "gradients", "optimizer")  # kinds of storages that are there throughout

SECTION = """## A 7B, planned

Llama 2 7B in bf16 with AdamW, {ranks} ranks, {count} micro-batches of one sequence of {tokens} tokens, no clipping: the
second step of each rank, traced on the simulated device of `tune plan`, whose tensors have sizes and no bytes
(`benchmarks/pp_torch_stages.py`). **Nothing here is measured on a GPU.** torch {torch}'s `PipelineStage` and schedule
classes run the same layers on the same device with the same optimizer; shapes are given to them, and stages are even.

- **held**: parameters, gradients and AdamW's two states, all bf16, of ours. **ours, torch**: the most live bytes at a
  time, held ones included. **besides held**: the peaks less what parameters, gradients and states take at that moment.
- **before**: torch's runtime with what [#138119](https://github.com/pytorch/pytorch/pull/138119) and #138504 changed
  planted back: outputs and losses keep their graphs, and the losses are held until the next step has returned its own,
  as a training loop that logs them does. **saved**: what the change saves of the peak.

{tables}

What #138119 reports is 10 % saved without activation checkpointing and 50 % with it, "7B model on titan"; schedule,
ranks, micro-batches and the rank are not stated, so these are other runs. Here the change saves, on the rank with the
last stage, whose graphs the losses hold, {none} of the peak without checkpointing and {full} with it
(`interleaved_zero_bubble` and `zbv`): a held graph has each checkpointed block's recomputation once for each group of
weights. Other ranks return no losses: not planned here. `1f1b` does not split its backward: it was not changed.

Ours makes logits and loss at the beginning of the last stage's backward, in pieces; torch's last stage makes whole
logits in its forward, {logits:.2f} GiB a micro-batch in bf16 and twice that in fp32, which are in its figures.
"""
HEAD = [
    "schedule", "rank", "held, GiB", "ours, GiB", "torch, GiB", "torch / ours", "ours besides held, GiB",
    "torch besides held, GiB", "torch / ours besides held", "before, GiB", "saved",
]  # fmt: skip


def simulate_peak(
    kind: str, schedule: str, mode: str, rank: int, config: str = CONFIG
) -> tuple[int, int]:
    """Simulate a rank; return its steady step's peak of live bytes, and those of _HELD in it.

    kind: OURS, TORCH or BEFORE. mode: of activation checkpointing. A steady step is any but the
    first.
    """
    overrides = (
        f"max_seq_len={TOKENS}", f"parallel.pipeline={RANKS}", f"parallel.pipeline_schedule={schedule}", "batch_size=1",
        f"gradient_accumulation_steps={COUNT}", f"memory.activation_checkpointing={mode}", "clip_grad_norm=null",
        "fused_kernels=false", "memory.recompute_cheap=false",
    )  # fmt: skip
    cfg, _ = make_plannable(load_config(config, overrides, FullFinetuneConfig))
    settings = PlanSettings(
        find_hardware(CARD), choose_sequence(cfg, str(TOKENS)), RANKS, phases=()
    )
    if kind == OURS:
        recipe = load_module(RecipeFile.find(RECIPE).path).FullFinetune
    else:
        recipe = make_recipe_class(attached=kind == BEFORE)
    # A kernel for each operator, as in the published runs.
    with mock.patch.object(decoder, "gated_activation", compute_product_written_out):
        trace = simulate_rank(recipe, cfg=cfg, settings=settings, rank=rank, traced=COUNT).trace
    storages = [trace.storages[number] for number in trace.list_alive_at_peak(STEADY)]
    held_bytes = sum(storage.bytes for storage in storages if storage.kind in _HELD)
    return trace.find_active_peaks()[STEADY], held_bytes


Job = tuple[str, str, str, int]  # kind, schedule, mode and rank of a simulation


def _list_jobs() -> list[Job]:
    """List all simulations; before the fix, only the rank with the last stage."""
    jobs: list[Job] = []
    for mode in MODES:
        for schedule in SCHEDULES:
            for rank in range(RANKS):
                jobs.append((OURS, schedule, mode, rank))
                jobs.append((TORCH, schedule, mode, rank))
    for mode in MODES:
        for schedule, rank in LAST_STAGE.items():
            jobs.append((BEFORE, schedule, mode, rank))
    return jobs


def _run_job(job: Job) -> tuple[int, int]:
    """Run a simulation in a process of the pool, print its peak, and return `simulate_peak`'s."""
    peak, held_bytes = simulate_peak(*job)
    print("7B", *job, f"{peak / GIB:.2f} GiB", flush=True)
    return peak, held_bytes


def _build_row(peaks: dict[Job, tuple[int, int]], schedule: str, mode: str, rank: int) -> list[str]:
    """Return the cells of a rank under HEAD. peaks: what `_run_job` returned for each job."""
    ours, ours_held = peaks[OURS, schedule, mode, rank]
    torch, torch_held = peaks[TORCH, schedule, mode, rank]
    ours_besides = ours - ours_held
    torch_besides = torch - torch_held
    cells = [f"`{schedule}`", str(rank)]
    cells += [f"{size / GIB:.2f}" for size in (ours_held, ours, torch)]
    cells.append(f"{torch / ours:.2f}x")
    cells += [f"{size / GIB:.2f}" for size in (ours_besides, torch_besides)]
    cells.append(f"{torch_besides / ours_besides:.2f}x")
    if (BEFORE, schedule, mode, rank) not in peaks:
        return [*cells, "", ""]  # another rank, or 1f1b
    before, _ = peaks[BEFORE, schedule, mode, rank]
    return [*cells, f"{before / GIB:.2f}", f"{1 - torch / before:.0%}"]


def format_section(version: str) -> str:
    """Simulate everything and return the page's section. version: of torch."""
    jobs = _list_jobs()
    # Forked, so that no process repeats the imports.
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        peaks = dict(zip(jobs, pool.map(_run_job, jobs), strict=True))
    tables = []
    shares = {}  # by mode, the page's text of what the fix saves
    for mode in MODES:
        rows = []
        for schedule in SCHEDULES:
            rows += [
                _build_row(peaks, schedule=schedule, mode=mode, rank=rank) for rank in range(RANKS)
            ]
        tables.append(
            f"### Activation checkpointing: {mode}\n\n{format_markdown_table(HEAD, rows)}"
        )
        shares[mode] = " and ".join(cells[-1] for cells in rows if cells[-1])
    logits = TOKENS * 32000 * 2 / GIB  # of the vocabulary of 32000, in bf16
    return SECTION.format(
        ranks=RANKS,
        count=COUNT,
        tokens=TOKENS,
        torch=version,
        tables="\n\n".join(tables),
        logits=logits,
        **shares,
    )
