"""Plan the runs of torchtune's pull request 865, Llama 3 8B on four GPUs, beside its figures.

`planner_replications.py` calls `build_group` for the rows of its page, and `list_further_runs`. A
row is a published figure with what `tune plan` says of the run. A stack is the training program
that is planned, imitated where it holds other memory than ours; a wrapping is the policy that
decides which modules FSDP gathers as one.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from benchmarks.planner_rows import GB, OURS, Group, Row, Run, plan_run, trace_run
from benchmarks.planner_stacks import FSDP1, FSDP2, Stack
from benchmarks.planner_streams import MarkedTrace, replay_with_marks
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.timing.cost import HOST_SECONDS
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB

# Values of parallel.fsdp_wrap_policy: the layers alone, or embedding and output projection too.
# Savings are of the second over the first.
WRAPPINGS = ("layers", "memory_efficient")
# torchtune's stack at the time, see `Stack`.
TUNE = Stack(
    sharding=FSDP1, logits="through backward", shifted=True, norms=True, expanded_keys=True
)
CHECKPOINTED = replace(TUNE, checkpointed_ends=True)
# The pull request's peaks in GB, by wrapping and metric of torch's allocator.
PUBLISHED = {
    "layers": {"allocated": 21.988, "active": 24.170, "reserved": 27.909},
    "memory_efficient": {"allocated": 19.085, "active": 20.830, "reserved": 23.700},
}
CHECKPOINTED_PUBLISHED = {"allocated": 19.135, "active": 20.880, "reserved": 24.138}  # GB
ITERATIONS = {"layers": 1.08, "memory_efficient": 1.06}  # published, a second
CARDS = ("a100-80gb", "a100-80gb-pcie", "a10g", "rtx3090", "rtx4090")  # which ran is not stated
HOST_MICROSECONDS = (0, 6, 12, 20, 30)  # that the host takes for an operator: not known
LAYER = 218_112_000 * 2  # bytes of a layer's parameters in bf16
# (change as the page names it, stack with it): from the stack of #865 to ours.
STEPS = [
    ("their stack: FSDP1", TUNE),
    ("FSDP2 as it comes", replace(TUNE, sharding=FSDP2)),
    (
        "logits given up before backward, not held through it",
        replace(TUNE, sharding=FSDP2, logits="until backward", shifted=False),
    ),
    ("one kernel for a norm, keys not copied", Stack(sharding=FSDP2, logits="until backward")),
    ("our handling of embedding and output, our loss", OURS),
]
# Kinds of a traced storage that get a column; all others are summed in the last.
KINDS = ("parameters", "gradients", "optimizer", "gathered", "communication")


def run_865(wrapping: str, tokens: int = 512) -> Run:
    """Return the pull request's run: Llama 3 8B on four GPUs.

    tokens: of a sequence. The pull request does not say; 512 is the most that its config allows.
    """
    settings = (
        f"max_seq_len={tokens} batch_size=1 gradient_accumulation_steps=1 clip_grad_norm=null"
        " memory.loss_chunks=1 optimizer.implementation=single"
        f" parallel.fsdp_wrap_policy={wrapping}"
    )
    return Run(
        "llama3/8B_full",
        ranks=4,
        device="a100-80gb",
        tokens=tokens,
        overrides=tuple(settings.split()),
    )


def run_lora(ranks: int, wrapping: str) -> Run:
    """Return the run of `run_865` with LoRA, on so many ranks."""
    settings = (
        "max_seq_len=512 batch_size=1 gradient_accumulation_steps=1 clip_grad_norm=null"
        " memory.loss_chunks=1 data.packing=false optimizer.implementation=single"
        f" parallel.strategy=fsdp parallel.fsdp_wrap_policy={wrapping}"
    )
    return Run(
        "llama3/8B_lora",
        ranks=ranks,
        device="a100-80gb",
        tokens=512,
        overrides=tuple(settings.split()),
        recipe="lora_finetune_distributed",
    )


def run_70b(tokens: int, *settings: str) -> Run:
    """Return a run of Llama 3 70B on eight GPUs of 80 GB.

    tokens: of the one sequence of a rank. settings: overrides, `key=value`.
    """
    common_settings = (
        f"max_seq_len={tokens} batch_size=1 gradient_accumulation_steps=1 clip_grad_norm=null"
        " memory.loss_chunks=16 optimizer.implementation=single"
        " parallel.fsdp_wrap_policy=memory_efficient"
    )
    return Run(
        "llama3/70B_full",
        ranks=8,
        device="a100-80gb",
        tokens=tokens,
        overrides=(*common_settings.split(), *settings),
    )


def build_group() -> Group:
    """Return the rows of the pull request and the tables after them."""
    rows = []
    for wrapping, figures in PUBLISHED.items():
        stored = {metric: figures[metric] for metric in ("allocated", "reserved")}
        rows += [
            Row(
                wrapping,
                whose="theirs",
                run=run_865(wrapping),
                stack=TUNE,
                published=figures,
                goal=True,
            ),
            Row(
                wrapping,
                whose="theirs, rows of 256",
                run=run_865(wrapping, 256),
                stack=TUNE,
                published=stored,
            ),
            Row(wrapping, whose="ours", run=run_865(wrapping), stack=OURS, published=figures),
        ]
    name = "memory_efficient, embedding and output checkpointed"
    rows.append(
        Row(
            name,
            whose="theirs",
            run=run_865("memory_efficient"),
            stack=CHECKPOINTED,
            published=CHECKPOINTED_PUBLISHED,
            goal=True,
        )
    )
    return Group(
        "torchtune: Llama 3 8B, full, on 4 GPUs",
        source="github.com/pytorch/torchtune/pull/865: bf16, AdamW without foreach, batch 1, activation"
        " checkpointing; wrapped are the layers alone, or embedding and output projection too",
        unit="GB",
        rows=rows,
        differs=[
            (
                "Theirs is FSDP1, ours is built on FSDP2; theirs keeps fp32 logits of all tokens,"
                " by a local variable even through backward; its norms and keys are written out."
                " The table below takes the differences one by one."
            ),
            (
                "FSDP1 concatenates the gradients of a unit into a flat one while they are still"
                " there. With the layers alone wrapped, embedding and output projection are in the"
                f" root, and that one is {2 * 2 * 128256 * 4096 / GB:.2f} GB (2 matrices of 128256"
                " x 4096 in bf16)."
            ),
            (
                "The rows' length is not stated. 512 is the most that the config allowed; 256,"
                " nearer to the data's, was tried afterwards: one free number, which no claim"
                " rests on."
            ),
            (
                "FSDP1 marks memory as used by other streams (record_stream): freed, it is active"
                " until they are done. Reserved memory is planned here as if it came back at once,"
                " and so too low; active memory is planned with the marks, as far as a host is"
                f" ahead that takes {HOST_SECONDS * 1e6:.0f} us for an operator, the planner's"
                " figure, on an A100 with NVLink. The second table below has more of that."
            ),
            (
                "The card is not stated. Without the change 27.9 GB were reserved, so it had more"
                " than 24 GB."
            ),
        ],
        more=format_tables,
    )


def format_tables() -> list[str]:
    """Return the lines of all tables after the rows."""
    return [
        *format_decomposition(),
        *format_marked(),
        *format_savings(),
        *format_speeds(),
        *format_lora(),
        *format_70b(),
    ]


def format_decomposition() -> list[str]:
    """Return the table of the allocated peak after each change, and what the change saves."""
    lines = ["", "From their stack to ours, allocated GB:", ""]
    lines += [
        "| change | layers | change | memory_efficient | change |",
        "| --- | --- | --- | --- | --- |",
    ]
    previous: dict[str, float] = {}  # by wrapping, GB with the stack of the line before
    for name, stack in STEPS:
        cells = []
        for wrapping in WRAPPINGS:
            amount = plan_run(run_865(wrapping), stack).peak.allocated / GB
            change = f"{amount - previous[wrapping]:+.2f}" if wrapping in previous else ""
            cells += [f"{amount:.2f}", change]
            previous[wrapping] = amount
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def format_marked() -> list[str]:
    """Return the table of active and reserved memory by the host's time for an operator.

    Marked memory is what FSDP1 has handed to another stream by `record_stream`: freed, it stays
    active until that stream is done, and so the longer the further the host is ahead.
    """
    pending_layers = f"{_count_pending_layers('layers'):.2f}"
    pending_memory_efficient = f"{_count_pending_layers('memory_efficient'):.2f}"
    lines = [
        "",
        (
            "Marked memory in their stack, by what the host takes for an operator (A100, NVLink)."
            f" Published active memory is allocated memory and {pending_layers} (layers) or"
            f" {pending_memory_efficient} (memory_efficient) times the {LAYER / 1e6:.0f} MB"
            " of one layer's parameters, or gradients: so many of them were freed and still"
            " marked. How many depends on how far the host was ahead, which nobody measured; a"
            " host time that gives both is one free number, and no claim rests on it:"
        ),
        "",
        (
            "| us | layers, active | layers' worth | error | reserved | error | "
            "memory_efficient, active | layers' worth | error | reserved | error |"
        ),
        f"|{' --- |' * 11}",
    ]
    # By microseconds, the cells of both wrappings: a trace is replayed with all host times.
    cells: dict[int, list[str]] = {microseconds: [] for microseconds in HOST_MICROSECONDS}
    for wrapping, figures in PUBLISHED.items():
        plan, trace = trace_run(run_865(wrapping), TUNE)
        assert isinstance(trace, MarkedTrace)
        allocated = next(peak.allocated for peak in plan.heaviest.peaks if peak.phase == STEADY)
        for microseconds in HOST_MICROSECONDS:
            hardware = find_hardware("a100-80gb")
            peaks = replay_with_marks(trace, STEADY, hardware, host_seconds=microseconds * 1e-6)
            cells[microseconds] += [
                f"{peaks.active / GB:.2f}",
                f"{(peaks.active - allocated) / LAYER:.2f}",
                f"{peaks.active / GB / figures['active'] - 1:+.1%}",
                f"{peaks.reserved / GB:.2f}",
                f"{peaks.reserved / GB / figures['reserved'] - 1:+.1%}",
            ]
    for microseconds, row_cells in cells.items():
        lines.append(f"| {microseconds} | {' | '.join(row_cells)} |")
    return lines


def _count_pending_layers(wrapping: str) -> float:
    """Return published active less allocated bytes, in layers' parameters: freed, still marked."""
    return (PUBLISHED[wrapping]["active"] - PUBLISHED[wrapping]["allocated"]) * GB / LAYER


def format_savings() -> list[str]:
    """Return the table of the share of memory that wrapping embedding and output saves."""
    lines = ["", "What wrapping embedding and output too saves:", ""]
    lines += [
        "| memory | published | planned, their stack | planned, ours |",
        "| --- | --- | --- | --- |",
    ]
    for metric in ("allocated", "active", "reserved"):
        published = _compute_savings(PUBLISHED[wrapping][metric] for wrapping in WRAPPINGS)
        theirs = _compute_planned_savings(TUNE, metric)
        ours = _compute_planned_savings(OURS, metric)
        lines.append(f"| {metric} | {published:.1%} | {theirs:.1%} | {ours:.1%} |")
    return lines


def _compute_planned_savings(stack: Stack, metric: str) -> float:
    """Return the share of a metric that is planned to be saved. metric: field of `PhasePeak`."""
    return _compute_savings(
        float(getattr(plan_run(run_865(wrapping), stack).peak, metric)) for wrapping in WRAPPINGS
    )


def _compute_savings(amounts: Iterable[float]) -> float:
    """Return the share saved. amounts: two, in the order of `WRAPPINGS`."""
    before, after = amounts
    return 1 - after / before


def format_speeds() -> list[str]:
    """Return the table of planned iterations a second, on the cards that may have been theirs."""
    lines = [
        "",
        (
            "Iterations a second in their stack, by data sheets, on cards that may have been meant"
            " (of 512 tokens each; `tune plan` calls such a figure good for ranking only). Between"
            " NVLink and PCIe is all the difference, and the published ones lie between the two"
            " A100:"
        ),
        "",
        (
            "| card | link | layers, s | it/s | error | memory_efficient, s | it/s | error | slower"
            " by |"
        ),
        f"|{' --- |' * 9}",
        (
            f"| published | | | {ITERATIONS['layers']:.2f} | | |"
            f" {ITERATIONS['memory_efficient']:.2f} | |"
            f" {ITERATIONS['layers'] / ITERATIONS['memory_efficient'] - 1:+.1%} |"
        ),
    ]
    seconds: dict[str, list[float]] = {card: [] for card in CARDS}  # of a step, by wrapping
    for wrapping in WRAPPINGS:
        _, trace = trace_run(run_865(wrapping), TUNE)
        for card in CARDS:
            seconds[card].append(schedule(trace, STEADY, find_hardware(card)).step)
    for card, (first, second) in seconds.items():
        cells = [
            f"{step:.2f} | {1 / step:.2f} | {1 / step / ITERATIONS[wrapping] - 1:+.0%}"
            for step, wrapping in zip((first, second), WRAPPINGS, strict=True)
        ]
        lines.append(
            f"| {card} | {find_hardware(card).link.kind} | {' | '.join(cells)} |"
            f" {second / first - 1:+.1%} |"
        )
    return lines


def format_lora() -> list[str]:
    """Return the table of the same two wrappings with LoRA, where weights are frozen."""
    matrix = 128256 * 4096 * 2 / GB  # embedding or output projection in bf16
    lines = [
        "",
        (
            'LoRA beside full fine-tuning, rows of 512, GB ("less pronounced there - this needs'
            " further investigations\"). By kind what is live at the peak; FSDP1's gathered weights"
            " are among parameters and other:"
        ),
        "",
        f"| run | stack | wrapping | allocated | saved | share | {' | '.join(KINDS)} | other |",
        f"|{' --- |' * (len(KINDS) + 7)}",
    ]
    # GB by (whose stack, name of the run); of the two LoRA runs that on 2 ranks, the later, stays.
    saved: dict[tuple[str, str], float] = {}
    for whose, stack in (("theirs", TUNE), ("ours", OURS)):
        for name, ranks, run in LORA:
            before = 0.0  # GB with the first wrapping; 0 until it is planned
            for wrapping in WRAPPINGS:
                planned = plan_run(run(wrapping), stack)
                amount = planned.peak.allocated / GB
                saved[whose, name] = before - amount
                share = f"{before - amount:.2f} | {1 - amount / before:.1%}" if before else "|"
                before = amount
                kinds = [planned.kinds.get(kind, 0) / GB for kind in KINDS]
                other_kinds = sum(planned.kinds.values()) / GB - sum(kinds)
                cells = " | ".join(f"{size:.2f}" for size in [*kinds, other_kinds])
                lines.append(
                    f"| {name}, {ranks} ranks | {whose} | {wrapping} | {amount:.2f} | {share} |"
                    f" {cells} |"
                )
    return [
        *lines,
        "",
        (
            f"- Why it is less in their stack, {saved['theirs', 'LoRA']:.2f} of"
            f" {saved['theirs', 'full']:.2f} GB: a frozen embedding and output of {matrix:.2f} GB"
            " each have no gradient and no states. With the layers alone wrapped both are gathered"
            " through the step, which wrapping ends in either case; what full fine-tuning saves"
            " beyond is the root's gradient, whole until it is reduced. As a share it is more,"
            " since everything else is smaller."
        ),
        (
            "- FSDP2 gathers through a buffer and copies out of it, so that in ours LoRA saves"
            f" {saved['ours', 'LoRA']:.2f} GB, as much on 2 ranks as on 4: what is gathered is"
            " whole on each."
        ),
    ]


SMALL_STATES = "optimizer.state_bits=8"
IN_BACKWARD = "memory.optimizer_in_backward=true"
# (name in the table, run, stack) of the 70B.
SEVENTY = [
    ("their stack, rows of 512", run_70b(512), TUNE),
    ("ours, rows of 512", run_70b(512), OURS),
    ("ours, rows of 2048", run_70b(2048), OURS),
    ("+ 8-bit states", run_70b(2048, SMALL_STATES), OURS),
    ("+ optimizer in backward", run_70b(2048, IN_BACKWARD), OURS),
    ("+ both", run_70b(2048, SMALL_STATES, IN_BACKWARD), OURS),
]
# (name in the table, ranks, what makes the run of a wrapping).
LORA: list[tuple[str, int, Callable[[str], Run]]] = [
    ("full", 4, run_865),
    ("LoRA", 4, partial(run_lora, 4)),
    ("LoRA", 2, partial(run_lora, 2)),
]


def list_further_runs() -> list[Run]:
    """Return the runs of our stack that are in no row, for the page's list of commands."""
    runs = []
    for name, _, run in LORA:
        if name == "LoRA":
            runs += [run(wrapping) for wrapping in WRAPPINGS]
    return runs + [run for _, run, stack in SEVENTY if stack == OURS]


def format_70b() -> list[str]:
    """Return the table of full fine-tuning of 70B on 8 x 80 GB, without any offload."""
    weights = 70_553_706_496 * 2 / 8 / GIB  # the 70B's parameters in bf16, a rank of 8
    lines = [
        "",
        (
            "Llama 3 70B, full, on 8 GPUs of 80 GB without offload (\"unfortunately won't allow"
            ' 70B on 8x80GB"), GiB of a rank, embedding and output wrapped. Parameters, gradients'
            f" and AdamW's two states in bf16 are {weights:.2f} each. Usable is what CUDA's context"
            " and NCCL leave of 79.14. In their stack the default allocator needs more, even as if"
            " all memory that FSDP1 marks came back at once (reserved, verdict); with it (active),"
            " more than the card has. `risky`: only with expandable segments, or with less than 3"
            " % to spare:"
        ),
        "",
        "| run | allocated | active | reserved | with expandable segments | usable | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run, stack in SEVENTY:
        planned = plan_run(run, stack)
        peak = planned.peak
        amounts = (
            peak.allocated,
            peak.active,
            peak.reserved,
            peak.reserved_expandable,
            planned.usable,
        )
        cells = " | ".join(f"{size / GIB:.2f}" for size in amounts)
        lines.append(f"| {name} | {cells} | {planned.verdict} |")
    return lines
