"""List the rows of docs/five_systems.md, the page that five_systems.py writes.

A system is a public piece of work that this library builds on. A row has what its authors showed,
our command, and a pattern that finds the answer in the command's output, or in a page that the
command writes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Hold a thing that authors showed, and where our answer is read."""

    shown: str  # by its authors; empty: as in the row above
    command: str  # as it is typed; of several rows, it is run once
    # Regular expression of the lines that answer, in the command's output or on `page`. Groups, if
    # it has some, are what the cell shows of a line.
    pattern: str
    page: str | None = None  # written by the command; None: its output has the answer
    lines: int = 1  # how many must match `pattern`
    note: str = ""  # put after the lines as it is
    section: str = ""  # beginning of the heading on `page` under which the lines are; empty: any
    against: str = ""  # a command whose tokens a second those of `command` are divided by
    differs: str = ""  # what our run does otherwise than theirs; empty: the same


@dataclass(frozen=True)
class System:
    """Hold one public piece of work."""

    title: str  # heading of its section
    link: str  # in Markdown
    text: str  # of its section
    rows: tuple[Row, ...]
    missing: tuple[tuple[str, str], ...] = ()  # (what is not shown here, why)


# Pages and commands that several rows have.
PLANNER = "docs/measurements/planner.md"
TRACE = "docs/measurements/tp_trace.md"
REPLICATE = "python benchmarks/planner_replications.py"
TP_TRACE = "python -m benchmarks.tp_trace --output docs/measurements/tp_trace.md"
TP_MEMORY = "python benchmarks/tp_memory.py --output docs/measurements/tp_memory.md"
PP_MEMORY = "python benchmarks/pp_memory.py --output docs/measurements/pp_memory.md"
PP_PAGE = "docs/measurements/pp_memory.md"
PASSED = "all passed"  # what five_systems.py keeps of tests' output
FOUR_CARDS = (
    "tune plan --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full --device"
    " rtx4090 batch_size=1"
)
SIXTEEN = (
    "tune plan --nnodes 2 --nproc_per_node 8 full_finetune_distributed --config llama2/7B_full"
    " --device h100 parallel.tensor=2 parallel.pipeline=2 batch_size=4"
    " gradient_accumulation_steps=32 memory.activation_checkpointing=none --full"
)
ALL_RANKS = "docs/measurements/all_ranks.md"
PLANS = "docs/measurements/tensor_plans.md"
LOSSES = "docs/measurements/tp_losses.md"
TP_PLANS = "python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md"
INFERRED = (
    "python -m benchmarks.inferred_tp_memory --output docs/measurements/inferred_tp_memory.md"
)
INFERRED_PAGE = "docs/measurements/inferred_tp_memory.md"
TP_LOSSES = "python -m benchmarks.tp_losses --output docs/measurements/tp_losses.md"
ZERO_1 = "python -m benchmarks.gradient_reduction --output docs/measurements/gradient_reduction.md"
ZERO_1_PAGE = "docs/measurements/gradient_reduction.md"


SEVEN_BILLION = (
    "tune plan --nproc_per_node {ranks} full_finetune_distributed --config llama2/7B_full --device"
    " h100"
)
AS_THEIRS = SEVEN_BILLION + " model.implementation=transformers"
ZERO_3 = AS_THEIRS.format(ranks=4) + " batch_size=4 --full"
TENSOR_4 = AS_THEIRS.format(ranks=4) + " parallel.tensor=4 batch_size=16 --full"
TENSOR_4_SMALL = (
    AS_THEIRS.format(ranks=4)
    + " parallel.tensor=4 batch_size=4 gradient_accumulation_steps=32 --full"
)
TENSOR_8 = AS_THEIRS.format(ranks=8) + " parallel.tensor=8 batch_size=16"
TOKENS = r"^ +(tokens +[\d.]+ \w? ?a step.*)"
VERDICT = r"^(?:FITS|RISKY|DOES NOT FIT) .*"

LONG = {  # command -> the letter that stands for it in the tables
    SIXTEEN: "A",
    FOUR_CARDS: "B",
    REPLICATE: "C",
    TP_TRACE: "D",
    TP_MEMORY: "E",
    PP_MEMORY: "F",
    TP_LOSSES: "G",
}
# Command -> what it reads of the folder that REALDATA_DIR names.
NEEDS = {TP_TRACE: "datasets/tinystories/tinystories_train_head.txt", TP_LOSSES: "stories260K-hf"}
# Headings of sections on the pages, and texts that several rows have.
TRACED = "## Peaks"
NONE = "## Activation checkpointing: none"
FULL = "## Activation checkpointing: full"
NO_MARKS = "planned as if memory that FSDP1 marks came back at once, which is too low"


def build_planner_row(run: str, metric: str, stack: str = "theirs") -> str:
    """Return the pattern of a line of planner.md: published and planned figure, and the error.

    stack: the program whose allocations are planned, as the page names it.
    """
    return rf"^\| ({quote_pattern(run)} \| {stack} \| {metric} \| .*) \|$"


def quote_pattern(text: str) -> str:
    """Return the text with `|/+().` escaped; other characters of patterns may stay in it."""
    return "".join(f"\\{letter}" if letter in "|/+()." else letter for letter in text)


# `# fmt: skip` at each system: ruff would make some 670 lines of these tables.

TORCHTUNE = System(
    "torchtune #865: embedding and output projection in their own FSDP units",
    link="[pytorch/torchtune#865](https://github.com/pytorch/torchtune/pull/865)",
    text="Rows of planner.md read: run, stack, metric, published GB, planned GB, error.",
    rows=(
        Row("a wrapping policy with units for embedding and output, set in the config",
            "tune cat llama3/8B_full --resolved", r"fsdp_wrap_policy: .*",
            note=": decided by sizes; `layers`, `memory_efficient` or patterns set it"),
        Row("unit tests of the policy", "pytest tests/parallel/test_fsdp_wrap_policy.py -q -m \"not slow\"", PASSED),
        Row("full fine-tuning of 8B on 4 x 24 GB with batch_size=1", FOUR_CARDS, VERDICT,
            differs="planned for cards of 24 GB; theirs was measured, with a card that is not stated"),
        Row("peak active memory 24.17 / 20.83 GB", command=REPLICATE, pattern=build_planner_row("layers", "active"), page=PLANNER),
        Row("", command=REPLICATE, pattern=build_planner_row("memory_efficient", "active"), page=PLANNER,
            note="; freed memory that FSDP1 still marks counts, and depends on the host's speed"),
        Row("peak allocated 21.99 / 19.09 GB", command=REPLICATE, pattern=build_planner_row("layers", "allocated"), page=PLANNER),
        Row("", command=REPLICATE, pattern=build_planner_row("memory_efficient", "allocated"), page=PLANNER),
        Row("peak reserved 27.91 / 23.70 GB", command=REPLICATE,
            pattern=r"^\| 6 \| [\d.]+ \| [\d.]+ \| \S+ \| (.*? \| .*?) \| [\d.]+ \| [\d.]+ \| \S+ \| (.*) \|$", page=PLANNER,
            note=" (planned and error, layers, then memory_efficient), with the marks of FSDP1",
            differs="how far their host was ahead is not stated; planned with 6 us an operator"),
        Row("", command=REPLICATE, pattern=build_planner_row("layers", "reserved"), page=PLANNER, differs=NO_MARKS),
        Row("", command=REPLICATE, pattern=build_planner_row("memory_efficient", "reserved"), page=PLANNER, differs=NO_MARKS),
        Row("1.08 / 1.06 iterations a second: wrapping takes 1.9 % of the time", command=REPLICATE,
            pattern=r"^\| (published|a100-80gb|a100-80gb-pcie) \| .* \| ([+-][\d.]+%) \|$", page=PLANNER, lines=3,
            note=" slower",
            differs="their card is not stated, so that the iterations themselves answer nothing; planned by data "
            "sheets for two cards"),
        Row("13 % of allocated, 15 % of reserved memory saved (published, their stack, ours)", command=REPLICATE,
            pattern=r"^\| ((?:allocated|reserved) \| [\d.]+% \| .*) \|$", page=PLANNER, lines=2,
            differs="reserved memory is " + NO_MARKS),
        Row("checkpointing embedding and output too gains nothing: 20.88 / 19.14 / 24.14 GB", command=REPLICATE,
            pattern=r"^\| memory_efficient, embedding and output checkpointed \| theirs \| (.*) \|$", page=PLANNER, lines=3,
            differs="reserved memory is " + NO_MARKS),
        Row("LoRA: \"memory savings were less pronounced there\", to be investigated", command=REPLICATE,
            pattern=r"^\| ((?:full|LoRA), 4 ranks \| theirs \| memory_efficient \| [\d.]+ \| [\d.]+ \| [\d.%]+)", page=PLANNER, lines=2,
            note="; a frozen embedding has no gradient to keep whole"),
        Row("other models with large vocabularies: follow-up work",
            FOUR_CARDS.replace("llama3/8B_full", "gemma3/4B_full"),
            VERDICT, note="; the policy looks at sizes, not at names"),
        Row("70B on 8 x 80 GB without CPU offload: does not fit", command=REPLICATE,
            pattern=r"^\| ((?:their stack, rows of 512|ours, rows of 2048|\+ 8-bit states|\+ both) \| .*) \|$", page=PLANNER, lines=4,
            note=" (GiB allocated, active, reserved, expandable, usable)"),
    ),
)  # fmt: skip

NANOTRON = System(
    "nanotron #203: tensor parallel that gathers again in backward",
    link="[huggingface/nanotron#203](https://github.com/huggingface/nanotron/pull/203)",
    text="Others' ways are imitated for the planner's tracer; none of their programs has run here.",
    rows=(
        Row("a fused gated activation keeps one tensor less", command=TP_MEMORY,
            pattern=r"^(Elements a token that a rank keeps, times t: `[^`]*`)", page="docs/measurements/tp_memory.md",
            note=": gate and up alone, 2F; activation and product are made again"),
        Row("gathers and reduce-scatters without memory that lives through forward", command=TP_MEMORY,
            pattern=r"^\| (llama3/70B \| 8 \| .*) \|$", page="docs/measurements/tp_memory.md", section="## Kept MiB of one layer",
            note=" MiB a layer (DTensor styles, ..., ours)"),
        Row("memory traces of rank 0, 70B, tensor 8, pipeline 4, 8k tokens, accumulation 4: the old way is out of "
            "memory", command=TP_TRACE, pattern=r"^\| (DTensor styles \| .*) \|$", page=TRACE, section=TRACED,
            note="; the picture: [tp_trace.svg](measurements/tp_trace.svg)",
            differs="imitated by torch's DTensor styles, which keep what the old way kept"),
        Row("theirs and Megatron's fit", command=TP_TRACE, pattern=r"^\| ((?:nanotron|Megatron|ours|ours, gather kept) \| `.*) \|$",
            page=TRACE, lines=4, note=" (kept elements; MiB a layer; active, reserved GiB; fits; the same with fp32 sums)",
            differs="theirs and Megatron's are imitated on the simulated device"),
        Row("the first version's loss was wrong, which a curve of a tiny Llama at tensor 4 showed", command=TP_TRACE,
            pattern=r"^\| (4 ranks, one buffer, gather kept \| .*) \|$", page=TRACE, note="; planted here"),
        Row("gather and linear in one node, gathered again or kept by a switch, on by default",
            "tune cat llama3/8B_full --resolved", r"tensor_regather_in_backward: .*"),
        Row("100 steps: all right versions have the baseline's losses", command=TP_TRACE,
            pattern=r"^\| ((?:one process|4 ranks, gathered again|4 ranks, gather kept) \| .*) \|$", page=TRACE, lines=3),
        Row("recomputing is on average as fast as the baseline; a reviewer: faster", command=TP_TRACE,
            pattern=r"^\| ((?:DTensor styles|ours, gather kept|ours) \| [\d.]+ \| .*) \|$", page=TRACE, lines=3,
            note=" (s a step, tokens/s, to DTensor styles, to ours with the gather kept)",
            differs="planned by data sheets; theirs was measured"),
        Row("contiguity before a reduce-scatter", "pytest tests/parallel/test_tensor.py -q -m \"not slow\"", PASSED),
        Row("REDUCE_SCATTER and ALL_REDUCE modes, asynchronous or not", command=TP_TRACE, pattern=r"^\| (`tp_mode.*) \|$", page=TRACE, lines=2),
        Row("`accumulate_grad_in_fp32`",
            "pytest tests/parallel/test_gradient_accumulation.py -q -k fp32", PASSED,
            note="; sums of 32 gradients that bf16 would lose, on 1 and 2 ranks"),
    ),
    missing=(("8B: measured tokens a second of all versions", "takes several GPUs; only planned seconds are here"),),
)  # fmt: skip

PLANNED_CELLS = (
    " (rank; held; ours, torch GiB; ratio; besides held: ours, torch, ratio; before; saved)"
)
NOT_STATED = (
    "schedule, ranks, micro-batches and rank of their figure are not stated; the last figure is"
    " what the change saves of the rank that returns the losses, with settings chosen here, and no"
    " second measurement of theirs"
)

ZERO_BUBBLE = System(
    "PyTorch #138119: zero-bubble schedules at their right memory",
    link="[pytorch/pytorch#138119](https://github.com/pytorch/pytorch/pull/138119)",
    text="Figures of the 7B are planned, ours and torch's own runtime on the same simulated device.",
    rows=(
        Row("outputs and losses keep no graph, so that a weight gradient needs what it needs and no more",
            "pytest tests/parallel/pipeline/test_memory.py -q -m \"not slow\"", PASSED,
            note=": bytes after every action"),
        Row("asked by a reviewer: a unit test of memory after forward, input and weight gradient, with and without "
            "checkpointing", command=PP_MEMORY, pattern=r"^\| (`zbv` \| 0 \| .*) \|$", page=PP_PAGE, section=NONE,
            note=" (KiB: theory, ours, torch; ours, torch to theory; between steps; forwards)"),
        Row("", command=PP_MEMORY, pattern=r"^\| (`zbv` \| 0 \| .*) \|$", page=PP_PAGE, section=FULL,
            note="; after each action: `pytest tests/parallel/pipeline/test_memory.py`"),
        Row("7B without checkpointing: 10 % less", command=PP_MEMORY,
            pattern=r"^\| (`(?:interleaved_zero_bubble|zbv)` \| \d \|.*%) \|$", page=PP_PAGE, lines=2, section=f"#{NONE}",
            note=PLANNED_CELLS, differs=NOT_STATED),
        Row("7B with checkpointing: 50 % less", command=PP_MEMORY,
            pattern=r"^\| (`(?:interleaved_zero_bubble|zbv)` \| \d \|.*%) \|$", page=PP_PAGE, lines=2, section=f"#{FULL}",
            note="; the same", differs=NOT_STATED),
        Row("", command=PP_MEMORY, pattern=r"^(Llama 2 7B in bf16 [^:]*):", page=PP_PAGE, note=": our settings of both"),
        Row("the last stage holds its outputs (#138504)",
            "pytest tests/parallel/pipeline/test_memory.py -q -m \"not slow\" -k \"after_a_step or held_its_outputs\"",
            PASSED),
        Row("beyond: gradients that torch's zero-bubble schedules leave out, ready to be reported",
            "python docs/upstream/zero_bubble_gradients.py", r"ScheduleZBVZeroBubble.*without gradient.*", lines=2),
        Row("beyond: recomputations with full checkpointing", "python docs/upstream/zero_bubble_recomputation.py",
            r"^checkpoint +ScheduleZBVZeroBubble.*"),
    ),
)  # fmt: skip

MEGATRON = System(
    "Megatron-LM's analysis tool: memory and communication before the run",
    link="[NVIDIA/Megatron-LM#482](https://github.com/NVIDIA/Megatron-LM/pull/482)",
    text="Figures are of data sheets and shapes.",
    rows=(
        Row("measured peaks of Llama 2 7B on 8 H800, 69.1 / 55.7 / 49.8 / 28.8 GB, predicted within 0.7 %", command=REPLICATE,
            pattern=r"^\| (\d / \d+ / \d / \d / \d \| [\d.]+ \| [\d.]+ \| -.*) \|$", page=PLANNER, lines=4,
            note=" (measured, their tool, its error, planned, error)"),
        Row("their mean error and ours", command=REPLICATE, pattern=r"^\| (mean of the errors' sizes .*) \|$", page=PLANNER),
        Row("parameters, gradients, states and activations of each GPU", command=SIXTEEN,
            pattern=r"^ +((?:parameters|gradients|optimizer|activations) .*)$", page=ALL_RANKS, lines=4,
            note=" (full model, rank 0, share)"),
        Row("the full model without parallelism: 12.4 + 24.7 + 74.2 + 44.8 = 156.2 GB", command=SIXTEEN,
            pattern=r"^ +(all at a time .*)$", page=ALL_RANKS,
            differs="bf16 gradients and states here, fp32 there; Llama 2 7B here, GPT with 50,432 words there"),
        Row("each submodule: shape, parameters, activations", command=SIXTEEN,
            pattern=r"^ +((?:q_proj|o_proj|gate_proj|down_proj|input_layernorm) .*)$", page=ALL_RANKS, lines=5,
            note=" (weights, parameters, this rank, kept)"),
        Row("the least memory that a GPU needs", command=SIXTEEN, pattern=r"^ +(smallest card .*)$", page=ALL_RANKS),
        Row("communication of the cluster by dimension and iteration: 2,048 / 2 / 32,768 operations", command=SIXTEEN,
            pattern=r"^ +((?:pipeline|data_shard|tensor|all)  +step, all ranks .*)$", page=ALL_RANKS, lines=4,
            note="; operations, bytes, on the wire",
            differs="FSDP gathers at every micro-batch, and tensor ranks share tokens here"),
        Row("data parallel with a distributed optimizer: 2 operations, 12.8 GB", command=ZERO_1,
            pattern=r"^\| ((?:and weights gathered once a step \(ZeRO-1\)|the same, sums in fp32) \| .*) \|$", page=ZERO_1_PAGE, lines=2,
            section="## Llama 2 7B on 16 H100",
            note=" (peak GiB, verdict, collectives of a rank, GiB that it sends, s, times faster): the tool's shape, "
            "one gather and one reduction of each unit; theirs are sums in fp32"),
        Row("pipeline: stages and their devices", command=SIXTEEN, pattern=r"^ +([01]  \d+-\d+ .*)$", page=ALL_RANKS, lines=2),
        Row("members of all 8 pipeline, 4 data and 8 tensor groups", command=SIXTEEN,
            pattern=r"^ +((?:pipeline|data_shard|tensor): \d+ groups of \d)$", page=ALL_RANKS, lines=3),
        Row("", command=SIXTEEN, pattern=r"^ +(\[n0_g0 n1_g0\] .*)$", page=ALL_RANKS),
        Row("", command=SIXTEEN, pattern=r"^ +(\[n0_g0 n0_g2 n0_g4 n0_g6\] .*)$", page=ALL_RANKS),
        Row("", command=SIXTEEN, pattern=r"^ +(\[n0_g0 n0_g1\] .*)$", page=ALL_RANKS),
        Row("tensor: of each micro-batch and of each transformer layer, on a GPU and in the cluster", command=SIXTEEN,
            pattern=r"^  tensor .*\n.*\n +(micro-batch, all ranks .*)\n +(micro-batch, rank 0 .*)\n +(layer, rank 0 .*)$",
            page=ALL_RANKS),
        Row("how sizes change the use of a GPU", FOUR_CARDS + " --full",
            TOKENS),
        Row("asked in the thread: the training command's own parser, and sequence parallel, virtual stages, recompute",
            "tune plan --nproc_per_node 8 full_finetune_distributed --config llama2/7B_full --device h100 "
            "parallel.tensor=2 parallel.pipeline=2 parallel.pipeline_schedule=interleaved_1f1b "
            "gradient_accumulation_steps=8 memory.activation_checkpointing=selective",
            VERDICT),
    ),
    missing=(("memory of every cudaMalloc, line by line", "tensors are traced and an allocator replayed; "
      "[recordings of an H200's allocator](measurements/gpu-plan-nvidia-h200.md) are replayed exactly"),),
)  # fmt: skip

DEEPSPEED = System(
    "DeepSpeed #5445: automatic tensor parallel in training",
    link="[microsoft/DeepSpeed#5445](https://github.com/microsoft/DeepSpeed/pull/5445)",
    text="Models are those of transformers; plans are inferred from one traced forward and certified.",
    rows=(
        Row("training without Megatron and without a plan by hand: matrices found and exchanged",
            "tune tp-plan llama3/8B --tensor 2,4,8", r"^llama3/8B: plan .*"),
        Row("batches that ZeRO-3 has room for and TP has not (\"TP oom\"), perhaps for want of Megatron's "
            "optimizations", command=INFERRED,
            pattern=r"^\| (llama3/8B \| .*) \|$", page=INFERRED_PAGE, lines=3, note=" (t; MiB a layer: native, inferred, ratio, all)"),
        Row("any simple model of transformers", command=TP_PLANS, pattern=r"(\d+ model types; \d+ certified[^.]*)", page=PLANS),
        Row("directly with transformers' Trainer, data parallel 1",
            "pytest tests/external/test_apply_plan.py -q", PASSED,
            note=": on 2 ranks, losses, norms, weights of one process; `infer_tensor_plan`, `certify`, `apply`"),
        Row("a data loader changed so that all ranks of a group have the same data",
            "pytest tests/recipes/test_external_runs.py -q -m \"not slow\"", PASSED,
            note="; a group is one data rank of the recipes"),
        Row("`autotp_size` in the config", "tune cat llama3/8B_full --resolved", r"^(parallel\.tensor: .*)"),
        Row("llama 7B fine-tuned from pretrained weights on 4 and 8 GPUs, the loss falls from 1.6 to 0.3", command=TP_LOSSES,
            pattern=r"^\| (stories260K, real weights \| .*) \|$", page=LOSSES, lines=2,
            note=" (type; first loss; last of one process, of 4 ranks; losses and norms differ by)",
            differs="real weights, but of 260,032 parameters, 100 steps on 4 processes of a CPU; none on 8"),
        Row("", TENSOR_4, VERDICT, note=": the 7B on 4"),
        Row("", TENSOR_8, VERDICT, note=": the 7B on 8", differs="planned, of the 7B no loss"),
        Row("backward of the exchanged modules, attributes for the norm of gradients, `requires_grad`",
            "pytest tests/external/test_tensor_parallel.py -q", PASSED),
        Row("broadcast and all-reduce groups, switched off there; compatible with ZeRO's data parallel: to be done",
            "pytest tests/recipes/test_external_tensor.py -q", PASSED,
            note="; with FSDP beside it, and quantized bases, DoRA"),
        Row("beyond: pipelines beside it", "pytest tests/external/test_external_stages.py -q", PASSED,
            note="; split at the list of layers, gradients of one process in 1F1B and ZBV, with FSDP"),
        Row("70 % of ZeRO-3's speed at the same global batch and accumulation", ZERO_3, TOKENS,
            note="; FSDP, which is ZeRO-3, 8 micro-batches of 4 rows on each of 4 ranks"),
        Row("", TENSOR_4, TOKENS, against=ZERO_3,
            note=" of that; tensor 4, 8 micro-batches of 16 rows: as many rows, as many micro-batches",
            differs="planned by data sheets for H100; their card is not stated"),
        Row("", TENSOR_4_SMALL, TOKENS, against=ZERO_3, note=" of that; tensor 4, 32 micro-batches of 4 rows",
            differs="more micro-batches"),
        Row("counting samples, and the schedule of the learning rate, by real rows: to be done",
            "pytest tests/parallel/test_world.py -q", PASSED,
            note="; which ranks count as one, and what each of them reads"),
        Row("saving and loading, sharded the other way: to be done",
            "pytest tests/recipes/test_external_outputs.py -q", PASSED,
            note="; exports open in transformers, merge as PEFT does, and answer as its greedy generate"),
    ),
)  # fmt: skip

SYSTEMS = (TORCHTUNE, NANOTRON, ZERO_BUBBLE, DEEPSPEED, MEGATRON)
