"""List the levers of a run, the values that they are tried with, and which are refused together.

A lever is a key that trades memory for time or precision, or divides the work over ranks.
`test_levers` runs few rows, each the settings of one run, in which every pair of values that is
not refused meets (`join_settings`). `python -m benchmarks.levers` writes the table to docs.
"""

from dataclasses import dataclass
from itertools import combinations

STEPS = 2  # of each run
ROWS = 8  # sequences of a step, over all ranks
LOSS = "smoothed_for_tests"  # registered name of the test's own loss
# Most levers of one run: if all were in all runs, a lever that hides what another does would hide
# it everywhere.
MOST = 12
FINE = 1e-6  # relative tolerance where only the order of sums differs


@dataclass(frozen=True)
class Setting:
    """A lever's value."""

    lever: str  # name of the lever in the table
    overrides: tuple[str, ...]  # `{folder}` stands for the tests' own files
    basis: tuple[str, ...] = ()  # overrides of the run of one process that it is compared with
    tolerance: float = FINE  # largest relative difference of the losses
    ranks: int = 2  # fewest ranks that it is tried on

    def __str__(self) -> str:
        return " ".join(self.overrides)

    @property
    def keys(self) -> set[str]:
        """Return every key that it sets."""
        return {override.partition("=")[0] for override in self.overrides}


def _make_same(lever: str, *overrides: str, tolerance: float = FINE, ranks: int = 2) -> Setting:
    """Return a setting that must not change the plain run's losses."""
    return Setting(lever, overrides, tolerance=tolerance, ranks=ranks)


def _make_other(lever: str, *overrides: str, tolerance: float = FINE) -> Setting:
    """Return a setting that changes the losses: it is compared with one process that has it too."""
    return Setting(lever, overrides, basis=overrides, tolerance=tolerance)


# Tolerance in bf16, which has 8 bits: sums in another order differ by 2^-8 of a gradient, which two
# steps carry into the losses.
BF16 = 1e-2
# Tolerance where sums in another order are rounded to 8 or 4 bits, or to bf16, afterwards.
LOW_BITS = 1e-3

# The tests let `auto` offload by copies; with `device=cpu` offloading has no effect.
ON_ANY_DEVICE = "device=auto"
NO_CLIPPING = "clip_grad_norm=null"
REDUCED_ONCE = "parallel.reduce_gradients=step"
COMPILE = _make_same("compile", "compile=true")
LEVERS = [
    COMPILE,
    _make_same("wrapping", "parallel.fsdp_wrap_policy=layers"),
    _make_same("wrapping", "parallel.fsdp_wrap_policy=memory_efficient"),
    _make_same(
        "wrapping", "parallel.fsdp_wrap_policy=[model.layers.*, model.layers.*.mlp, lm_head]"
    ),
    _make_same("resharding", "parallel.reshard_after_forward=false"),
    _make_same("shards", "parallel.data_shard=2"),
    _make_same("replicas", "parallel.data_replicate=2", ranks=4),
    _make_same("tensor", "parallel.tensor=2", ranks=4),
    _make_same("context", "parallel.context=2", ranks=4),
    _make_same("pipeline", "parallel.pipeline=2", "parallel.pipeline_microbatches=2", ranks=4),
    _make_same("reduction", "parallel.reduce_dtype=fp32"),
    _make_same("reduction", "parallel.reduce_dtype=bf16", tolerance=BF16),
    _make_same("checkpointing", "memory.activation_checkpointing=full"),
    _make_same("checkpointing", "memory.activation_checkpointing=selective"),
    _make_same(
        "checkpointing",
        "memory.activation_checkpointing=budget",
        "memory.activation_budget_gib=0.01",
    ),
    _make_same("activation offload", "memory.activation_offload=true", ON_ANY_DEVICE),
    _make_same(
        "activation offload",
        "memory.activation_offload=true",
        "memory.activation_offload_prefetch_layers=2",
        ON_ANY_DEVICE,
    ),
    _make_same("offload", "memory.cpu_offload=true", ON_ANY_DEVICE),
    _make_same("optimizer offload", "memory.optimizer_offload=true", ON_ANY_DEVICE),
    Setting(
        "in backward", ("memory.optimizer_in_backward=true", NO_CLIPPING), basis=(NO_CLIPPING,)
    ),
    _make_same("recomputing", "memory.recompute_cheap=false"),
    _make_same("MLP chunks", "memory.mlp_tiles=3"),
    _make_same("strategy", "parallel.strategy=ddp"),
    _make_same("loss chunks", "memory.loss_chunks=5"),
    _make_same("accumulation", "gradient_accumulation_steps=2"),
    _make_same("gradient reduction", REDUCED_ONCE, "gradient_accumulation_steps=2"),
    _make_other(
        "gradient sums",
        "parallel.accumulate_grad_in_fp32=true",
        "gradient_accumulation_steps=2",
        "dtype=bf16",
        tolerance=BF16,
    ),
    _make_same("kernels", "optimizer.implementation=single"),
    _make_same("kernels", "optimizer.implementation=foreach"),
    _make_same("kernels", "optimizer.implementation=fused"),
    _make_same(
        "validation",
        "validation.source=examples/demo/heldout.jsonl",
        "validation.format=alpaca",
        "validation.every_n_steps=1",
        "validation.max_samples=5",
        "validation.batch_size=2",
        "validation.metrics=[token_accuracy, exact_match]",
    ),
    _make_same("saving", "checkpoint.save_every_n_steps=1", "checkpoint.keep_last_n=3"),
    _make_other("packing", "data.packing=true", "data.max_samples=300"),
    _make_other("tying", "model.preset={folder}/untied.json"),
    # At a rate that changes bf16 weights, so that a step that does nothing is noticed.
    _make_other("optimizer", "optimizer.name=sgd", "optimizer.lr=1", "~optimizer.betas"),
    _make_other("optimizer", "optimizer.name=sgd", "optimizer.lr=1", "optimizer.momentum=0.9"),
    _make_other("optimizer", "optimizer.name=muon", tolerance=LOW_BITS),
    _make_other("state bits", "optimizer.state_bits=32"),
    _make_other("state bits", "optimizer.state_bits=16", tolerance=LOW_BITS),
    _make_other("state bits", "optimizer.state_bits=8", tolerance=LOW_BITS),
    _make_other("state bits", "optimizer.state_bits=4", tolerance=LOW_BITS),
    _make_other("rounding", "optimizer.stochastic_rounding=true", "dtype=bf16", tolerance=BF16),
    _make_other("rounding", "optimizer.master_weights=true", "dtype=bf16", tolerance=BF16),
    _make_other("matmuls", "matmul_dtype=int8", tolerance=BF16),
    # Sums in another order round some weights to the next code.
    _make_other("qat", "qat=int4", "qat_group_size=16", tolerance=BF16),
    _make_other("decay", "optimizer.weight_decay=0.1"),
    _make_other("clipping", "clip_grad_norm=0.1"),
    _make_other("clipping", "clip_grad_norm=null"),
    _make_other("dtype", "dtype=bf16", tolerance=BF16),
    _make_other("loss", f"loss={LOSS}"),
]

# Keys that act before the first batch or beside the training, `section.*` for all others of a
# section -> why no pair with them can matter, or which tests they have.
NOT_LEVERS = {
    "memory.stream_layers": (
        "frozen layers with every lever: test_adapter_levers; trained ones: test_layer_stream_runs"
    ),
    "router_aux_loss_coef": (
        "of models with experts; tests/recipes/test_mixture_runs, tests/models/test_mixture"
    ),
    "fused_kernels": "there are none on a CPU; test_fused_runs",
    "checkpoint.carry": "what an export has beside what was trained; test_published_models",
    "qat_start_step": "when rounding begins; test_qat_runs",
    "recipe": "a name",
    "model.path": "where weights come from; test_worlds",
    "model.implementation": (
        "another model; test_external_runs runs those of transformers on one rank and on two"
    ),
    "tokenizer.*": "how rows are read",
    "data.*": "which rows there are",
    "validation.split": "which rows of the hub there are; tests/data/test_dataset",
    "validation.max_new_tokens": "of a plugin's metric; test_validation_metrics",
    "parallel.tensor_regather_in_backward": (
        "both values with every kind of model; tests/parallel/test_tensor"
    ),
    "parallel.tensor_replicate_kv_heads": (
        "for models with few kv heads; tests/parallel/test_tensor"
    ),
    "parallel.pipeline_schedule": (
        "each with every kind of model; tests/parallel/pipeline, test_pipeline_runs"
    ),
    "parallel.pipeline_stages_per_rank": "of two schedules; tests/parallel/pipeline",
    "parallel.pipeline_balance": "which rank has which layers; tests/parallel/pipeline",
    "parallel.pipeline_layers_per_stage": "which rank has which layers; tests/parallel/pipeline",
    "parallel.pipeline_max_deferred_weight_grads": (
        "the order of a step's work; tests/parallel/pipeline"
    ),
    "checkpoint.extra_parameters": "whether a file has what a recipe adds; test_extra_runs",
    "parallel.heartbeat_timeout_seconds": "when a run ends; tests/recipes/test_heartbeat",
    "lr_scheduler.*": "one number a step, a function of the step alone",
    "memory.host_memory_limit_gib": (
        "a limit, looked at before; tests/memory/test_host, tests/training/test_host_needs"
    ),
    "optimizer.lr": "a number of the optimizer's formula",
    "optimizer.betas": "a number of the optimizer's formula",
    "optimizer.eps": "a number of the optimizer's formula",
    "checkpoint.keep_best": "which weights are exported; tests/recipes/test_best_runs",
    "checkpoint.best_metric": "which step is best; tests/training/test_best_step",
    "checkpoint.greater_is_better": "which step is best; tests/training/test_best_step",
    "validation.patience": "how many steps; tests/recipes/test_best_runs",
    "validation.min_delta": "how many steps; tests/training/test_best_step",
    "checkpoint.save_model": "written after the last step; test_worlds",
    "checkpoint.max_shard_gib": "written after the last step; tests/checkpoint",
    "log.*": "what is shown",
    "seed": "a number",
    "device": "there is one device here",
    "batch_size": "test_equality",
    "epochs": "how many steps",
    "max_steps": "how many steps",
    "max_seq_len": "how rows are read",
    "output_dir": "a name",
    "overwrite_output_dir": "of one start only",
    "resume": "of one start only; test_resume",
}

# Override that needs a GPU -> words of the line that it is refused with on a CPU.
GPU_ONLY = {
    "matmul_dtype=fp8": "take a GPU of compute capability 8.9 or more",
}
PIPELINE = "parallel.pipeline=2"
TENSOR = "parallel.tensor=2"
DDP = "parallel.strategy=ddp"
IN_BACKWARD = "memory.optimizer_in_backward=true"
INT8 = "matmul_dtype=int8"
INT4 = "qat=int4"
# (overrides that are refused together, words of the line). Everything else must run.
REFUSED_TOGETHER: tuple[tuple[set[str], str], ...] = (
    (
        {"optimizer.name=sgd", "optimizer.implementation=fused"},
        "sharded parameters, for which torch has no such kernel",
    ),
    (
        {TENSOR, f"loss={LOSS}"},
        "it is called with the logits of the whole vocabulary, which no rank has",
    ),
    ({IN_BACKWARD, "clip_grad_norm=0.1"}, "before the norm of all gradients is known"),
    ({IN_BACKWARD, "gradient_accumulation_steps=2"}, "each backward would be a separate step"),
    ({IN_BACKWARD, PIPELINE}, "a pipeline adds up the gradients of several micro-batches"),
    ({IN_BACKWARD, "parallel.data_replicate=2"}, "so that no gradient would be freed"),
    ({IN_BACKWARD, DDP}, "replicas sum their gradients once a step, after backward"),
    ({DDP, "memory.cpu_offload=true"}, "it is FSDP that brings offloaded parameters to the device"),
    (
        {REDUCED_ONCE, "parallel.accumulate_grad_in_fp32=true", "parallel.reduce_dtype=bf16"},
        "FSDP reduces once a step what it has added up",
    ),
    ({INT8, TENSOR}, "gather and multiply in one, in dtype"),
    ({INT4, TENSOR}, "of rows cut in pieces none has the scale"),
    ({INT4, INT8}, "rounded once more are not those of the export"),
    *(
        (
            {"memory.activation_offload=true", f"memory.activation_checkpointing={kind}"},
            "outside the saved-tensor hooks",
        )
        for kind in ("selective", "budget")
    ),
    ({"compile=true", "memory.mlp_tiles=3"}, "could compute the tiles together again"),
)
# Overrides that each divide the ranks by two.
HALVING = {
    TENSOR,
    PIPELINE,
    "parallel.context=2",
    "parallel.data_replicate=2",
    "parallel.data_shard=2",
}


def find_refusal(settings: "Settings") -> str | None:
    """Return words of the line that refuses these settings together; None: they must run."""
    overrides = {override for setting in settings for override in setting.overrides}
    for together, words in REFUSED_TOGETHER:
        if together <= overrides:
            return words
    if len(overrides & HALVING) > 2:  # tests start four ranks at most
        return "start 8 ranks"
    return None


Settings = tuple[Setting, ...]  # of one run, each of another lever
SINGLES: list[Settings] = [(setting,) for setting in LEVERS]


def list_pairs() -> list[Settings]:
    """Return every two values of different levers."""
    return [(a, b) for a, b in combinations(LEVERS, 2) if a.lever != b.lever]


# Settings that are tried in one run of several levers each: compiling takes seconds, and four ranks
# take as long as two runs of two.
COSTLY: Settings = tuple(setting for setting in LEVERS if setting is COMPILE or setting.ranks == 4)
BESIDE = 6  # most levers of a run with a costly one


def list_tested_pairs(row: Settings) -> set[Settings]:
    """Return the pairs that a run of these settings tests.

    A run is compared with the widest of its settings' tolerances. It says nothing of a pair that
    alone would be compared with a smaller one.
    """
    widest = max(setting.tolerance for setting in row)
    return {
        (first, second)
        for first, second in combinations(row, 2)
        if max(first.tolerance, second.tolerance) == widest
    }


def extend_by_one(row: Settings) -> list[Settings]:
    """Return the row extended by one setting, for each setting that can join it.

    Such a setting is not costly, is of another lever, does not widen the tolerance, and is not
    refused with the row.
    """
    levers = {setting.lever for setting in row}
    widest = max(setting.tolerance for setting in row)
    longer_rows = []
    for setting in LEVERS:
        if setting.lever in levers or setting in COSTLY:
            continue
        longer = tuple(sorted((*row, setting), key=LEVERS.index))
        if setting.tolerance in (FINE, widest) and not find_refusal(longer):
            longer_rows.append(longer)
    return longer_rows


def join_settings() -> list[Settings]:
    """Return rows of several levers in which every pair that is not refused meets once at least.

    They are a covering array, found greedily: a row begins with a pair that no row has yet, and
    then gets the setting that adds most new pairs. Each costly setting is in one further row.
    """
    rows: list[Settings] = []
    # A dict, which keeps its order: the runs must be the same every time.
    missing_pairs = dict.fromkeys(
        pair for pair in list_pairs() if not find_refusal(pair) and not set(pair) & set(COSTLY)
    )

    def count_new_pairs(row: Settings) -> int:
        return sum(pair in missing_pairs for pair in list_tested_pairs(row))

    while missing_pairs:
        row: Settings = ()
        longer = next(iter(missing_pairs))
        while longer != row and len(longer) <= MOST:
            row = longer
            longer = max([row, *extend_by_one(row)], key=count_new_pairs)
        rows.append(row)
        for pair in list_tested_pairs(row):
            missing_pairs.pop(pair, None)
    for number, setting in enumerate(COSTLY):
        row = (setting,)
        while len(row) < BESIDE and (longer_rows := extend_by_one(row)):
            # By the costly setting's number, so that the rows of two of them differ.
            row = longer_rows[(number * BESIDE) % len(longer_rows)]
        rows.append(row)
    return rows


def cover(rows: list[Settings]) -> list[Settings]:
    """Return few of the rows that together have every setting of all rows, chosen greedily."""
    missing_settings: dict[Setting, None] = {}
    for row in rows:
        missing_settings |= dict.fromkeys(row)
    chosen = []
    while missing_settings:
        # The row with most of the settings that are missing still.
        chosen.append(max(rows, key=lambda row: len(missing_settings.keys() & set(row))))
        for setting in chosen[-1]:
            missing_settings.pop(setting, None)
    return chosen


REFUSED = [pair for pair in list_pairs() if find_refusal(pair)]
TOGETHER = join_settings()  # rows, all of which must run


def build_basis(settings: Settings) -> tuple[str, ...]:
    """Return the overrides of the run of one process that these settings are compared with."""
    basis: dict[str, None] = {}
    for setting in settings:
        basis |= dict.fromkeys(setting.basis)
    return tuple(basis)


def keep_one_rank(settings: Settings) -> Settings:
    """Return the settings that one process can have too."""
    # All that divide the ranks need four, but for `shards`.
    return tuple(
        setting for setting in settings if setting.ranks == 2 and setting.lever != "shards"
    )


def format_title(settings: Settings) -> str:
    """Return a short name of these settings for reports."""
    if settings in TOGETHER:
        return f"together {TOGETHER.index(settings)}"
    return " + ".join(map(str, settings)) or "plain"
