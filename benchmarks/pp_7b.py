"""Plan what the ranks of a pipeline hold of a 7B, with our runtime and with torch's.

Used by pp_memory.py, which puts the section into its page. Both run on the simulated device. What
torch's runtime held before its #138119 and #138504 is planned too, by planting back what they took
away.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the length of sequences is given

from benchmarks.pp_torch_stages import RECIPE, make_recipe_class
from recipe_lib.cli.recipes import RecipeFile, load_module
from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.plan.build_plan import PlanSettings, simulate_rank
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB

CONFIG = "llama2/7B_full"
RANKS = 4
COUNT = 8
TOKENS = 4096
CARD = "h100"
SCHEDULES = ("1f1b", "interleaved_zero_bubble", "zbv")
MODES = ("none", "full")  # of activation checkpointing
LAST_STAGE = {"interleaved_zero_bubble": RANKS - 1, "zbv": 0}  # whose schedules the fix changed
OURS = "ours"
TORCH = "torch"
BEFORE = "torch before the fix"
_HELD = ("parameters", "gradients", "optimizer")

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
    """Return the most live bytes of a rank's steady step, and those held throughout among them.

    Held throughout are parameters, gradients and the optimizer's states.
    """
    overrides = (
        f"max_seq_len={TOKENS}", f"parallel.pipeline={RANKS}", f"parallel.pipeline_schedule={schedule}", "batch_size=1",
        f"gradient_accumulation_steps={COUNT}", f"memory.activation_checkpointing={mode}", "clip_grad_norm=null",
        "fused_kernels=false",
    )  # fmt: skip
    cfg, _ = make_plannable(load_config(config, overrides, FullFinetuneConfig))
    settings = PlanSettings(
        find_hardware(CARD), choose_sequence(cfg, str(TOKENS)), RANKS, phases=()
    )
    if kind == OURS:
        recipe = load_module(RecipeFile.find(RECIPE).path).FullFinetune
    else:
        recipe = make_recipe_class(attached=kind == BEFORE)
    trace = simulate_rank(recipe, cfg=cfg, settings=settings, rank=rank, traced=COUNT).trace
    storages = [trace.storages[number] for number in trace.list_alive_at_peak(STEADY)]
    held_bytes = sum(storage.bytes for storage in storages if storage.kind in _HELD)
    return trace.find_active_peaks()[STEADY], held_bytes


Job = tuple[str, str, str, int]  # kind, schedule, mode and rank of a simulation


def _list_jobs() -> list[Job]:
    """List all simulations; those before the fix are of the rank with the last stage alone."""
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
    peak, held = simulate_peak(*job)
    print("7B", *job, f"{peak / GIB:.2f} GiB", flush=True)
    return peak, held


def _build_row(peaks: dict[Job, tuple[int, int]], schedule: str, mode: str, rank: int) -> list[str]:
    """Return the cells of a rank. peaks: what `_run_job` returned for each job."""
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
        return [*cells, "", ""]
    before, _ = peaks[BEFORE, schedule, mode, rank]
    return [*cells, f"{before / GIB:.2f}", f"{1 - torch / before:.0%}"]


def format_section(version: str) -> str:
    """Simulate everything and return the page's section. version: of torch."""
    jobs = _list_jobs()
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        peaks = dict(zip(jobs, pool.map(_run_job, jobs), strict=True))
    tables = []
    shares = {}
    for mode in MODES:
        rows = []
        for schedule in SCHEDULES:
            rows += [
                _build_row(peaks, schedule=schedule, mode=mode, rank=rank) for rank in range(RANKS)
            ]
        tables.append(f"### Activation checkpointing: {mode}\n\n{_format_table(HEAD, rows)}")
        shares[mode] = " and ".join(cells[-1] for cells in rows if cells[-1])
    logits = TOKENS * 32000 * 2 / GIB
    return SECTION.format(
        ranks=RANKS,
        count=COUNT,
        tokens=TOKENS,
        torch=version,
        tables="\n\n".join(tables),
        logits=logits,
        **shares,
    )


def _format_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])
