"""A simulation's bytes against formulas written out from a model's shapes, to the byte.

The model is Llama 3 8B with few layers. FSDP2 cuts a parameter's rows into equal parts, the last of
them padded.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from recipe_lib.config import load_config
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import FULL, LORA, PLAIN, ROOT, get_recipe_class, import_recipe_module
from tests.selection import mark_slow_but, mark_slow_except

WIDTH = 4096
MLP_WIDTH = 14336
VOCABULARY = 128256
LAYERS = 2
# heads x head width
QUERIES = 32 * 128
KEYS = 8 * 128
ADAPTER_RANK = 16
BF16 = 2
Shapes = list[tuple[int, int]]  # rows and columns, of which a norm has one
LINEARS = [
    (QUERIES, WIDTH),
    (KEYS, WIDTH),
    (KEYS, WIDTH),
    (WIDTH, QUERIES),
    (MLP_WIDTH, WIDTH),
    (MLP_WIDTH, WIDTH),
    (WIDTH, MLP_WIDTH),
]
NORMS = [(WIDTH, 1), (WIDTH, 1)]
LAYER = LINEARS + NORMS
LAST_NORM = [(WIDTH, 1)]
ADAPTERS = [
    shape for rows, columns in LINEARS for shape in ((ADAPTER_RANK, columns), (rows, ADAPTER_RANK))
]

CASES: dict[str, tuple[Any, ...]] = {
    # Ranks, traced rank, recipe, overrides
    "two": (2, 0, FULL, "parallel.fsdp_wrap_policy=memory_efficient"),
    "eight": (8, 0, FULL, "parallel.fsdp_wrap_policy=layers", "gradient_accumulation_steps=4"),
    "odd, last": (8, 7, FULL, "parallel.fsdp_wrap_policy=layers", "odd"),
    "kept": (
        4,
        0,
        FULL,
        "parallel.fsdp_wrap_policy=memory_efficient",
        "parallel.reshard_after_forward=false",
    ),
    "once": (
        4,
        0,
        FULL,
        "parallel.fsdp_wrap_policy=memory_efficient",
        "gradient_accumulation_steps=6",
        "parallel.reduce_gradients=step",
    ),
    "zero-1": (
        4,
        0,
        FULL,
        "parallel.fsdp_wrap_policy=memory_efficient",
        "gradient_accumulation_steps=6",
        "parallel.reduce_gradients=step",
        "parallel.reshard_after_forward=false",
        "parallel.accumulate_grad_in_fp32=true",
    ),
    "copies": (
        8,
        0,
        FULL,
        "parallel.fsdp_wrap_policy=memory_efficient",
        "parallel.data_replicate=2",
    ),
    "context": (
        8,
        0,
        FULL,
        "parallel.fsdp_wrap_policy=layers",
        "parallel.context=4",
        "batch_size=2",
    ),
    "tensor": (4, 0, FULL, "parallel.tensor=4", "memory.loss_chunks=4"),
    "lora": (
        4,
        0,
        LORA,
        "parallel.fsdp_wrap_policy=memory_efficient",
        "gradient_accumulation_steps=4",
    ),
    "nf4": (4, 0, LORA, "parallel.fsdp_wrap_policy=memory_efficient", "lora.quantize_base=nf4"),
}


@dataclass
class Found:
    """What is read from a trace.

    most: bytes of each kind of memory, the most at a time in the second step. collectives: of that
    step, (operation, mesh dimension, bytes of the whole tensor) and how often; small: those of a
    few bytes, in all. made_by_optimizer: bytes that the optimizer took in the first step, in the
    second. peak: of the second step. saving: the most bytes that a save takes at a time beside what
    stays.
    """

    most: dict[str, int]
    collectives: dict[tuple[str, str, int], int]
    small: int
    made_by_optimizer: tuple[int, int]
    peak: int
    saving: int


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("closed_forms")
    write_models(folder)

    class Traces(dict[str, Found]):
        """Each case is traced, in a process of its own, when a test asks for it."""

        def __missing__(self, name: str) -> Found:
            (fields,) = run_ranks(lambda: vars(trace(CASES[name], folder)), 1, process_group=False)
            self[name] = Found(**fields)
            return self[name]

    return Traces()


def write_models(folder: Path) -> None:
    """The config.json files that `trace` takes."""
    shipped = json.loads(
        (ROOT / "recipe_lib" / "models" / "presets" / "llama3" / "8B.json").read_text()
    )
    for name, vocabulary in (("even", VOCABULARY), ("odd", VOCABULARY + 1)):
        model = shipped | {"num_hidden_layers": LAYERS, "vocab_size": vocabulary}
        (folder / f"{name}.json").write_text(json.dumps(model))


def trace(case: tuple[Any, ...], folder: Path) -> Found:
    """One simulation, as a GPU's."""
    ranks, rank, name, *overrides = case
    model = folder / ("odd.json" if "odd" in overrides else "even.json")
    overrides = [override for override in overrides if override != "odd"]
    overrides += [f"model.preset={model}", f"output_dir={folder / 'none'}", f"recipe={name}"]
    overrides += ["tokenizer.path=unread", "data.source=unread", "max_seq_len=128"]
    overrides += ["memory.activation_checkpointing=full"]
    overrides += [f"lora.rank={ADAPTER_RANK}"] if name == LORA else []
    module = import_recipe_module(name)
    cfg = load_config(PLAIN, overrides, module.Config)
    shape = SimpleNamespace(tokens=cfg.max_seq_len, documents=1)
    return read(
        simulate(
            get_recipe_class(module), cfg, shape, rank=rank, ranks=ranks, phases=("save",)
        ).trace
    )


def read(trace: Trace) -> Found:
    """The figures."""
    steady = trace.phases.index(STEADY)
    held: Counter[str] = Counter()
    most: Counter[str] = Counter()
    phase = -1
    for event, number in trace.events:
        if event == PHASE:
            phase = number
        elif event in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            held[storage.kind] += storage.bytes if event == ALLOC else -storage.bytes
        if phase == steady:
            most |= held
    collectives: Counter[tuple[str, str, int]] = Counter()
    small = 0
    for op in trace.ops:
        if op.collective is not None and op.phase == steady:
            if op.collective.bytes <= 64:
                small += op.repeats
            else:
                collectives[(op.collective.operation, op.collective.dim, op.collective.bytes)] += (
                    op.repeats
                )
    first, second = (
        sum(
            storage.bytes
            for storage in trace.storages
            if storage.part == "optimizer" and storage.phase == phase
        )
        for phase in (steady - 1, steady)
    )
    peaks = trace.find_active_peaks()
    saving = peaks["save"] - sum(held.values())
    return Found(dict(most), dict(collectives), small, (first, second), peaks[STEADY], saving)


def part(shapes: Shapes, ranks: int) -> int:
    """Elements that a rank keeps of matrices, padding included."""
    return sum(math.ceil(rows / ranks) * columns for rows, columns in shapes)


def gathered(shapes: Shapes, ranks: int, size: int = BF16) -> int:
    """Bytes of the parts of all ranks."""
    return ranks * part(shapes, ranks) * size


def own(shapes: Shapes, ranks: int, rank: int) -> int:
    """Elements that a rank keeps, without padding."""
    return sum(
        max(0, min(math.ceil(rows / ranks), rows - rank * math.ceil(rows / ranks))) * columns
        for rows, columns in shapes
    )


def model(vocabulary: int = VOCABULARY) -> Shapes:
    """All parameters: embedding and output projection, layers, the last norm."""
    return [(vocabulary, WIDTH)] * 2 + LAYER * LAYERS + LAST_NORM


def nf4_bytes(rows: int, columns: int, ranks: int) -> int:
    """Of a matrix on one rank: codes of 4 bits for blocks of 64 numbers, a scale of a byte for each
    block, an fp32 factor for each 256 scales, and one more.
    """
    blocks = rows * columns // 64
    assert blocks % 256 == 0
    return math.ceil(blocks / ranks) * (32 + 1) + math.ceil((blocks // 256 + 1) / ranks) * 4


@pytest.mark.parametrize(
    ("name", "ranks", "rank", "vocabulary"),
    [
        ("two", 2, 0, VOCABULARY),
        pytest.param("eight", 8, 0, VOCABULARY, marks=pytest.mark.slow),
        ("odd, last", 8, 7, VOCABULARY + 1),
        ("copies", 4, 0, VOCABULARY),
    ],
)
def test_a_rank_holds_its_part_of_parameters_gradients_and_states(
    found: dict[str, Found], name: str, ranks: int, rank: int, vocabulary: int
) -> None:
    shapes = model(vocabulary)
    assert found[name].most["parameters"] == part(shapes, ranks) * BF16
    assert found[name].most["gradients"] == part(shapes, ranks) * BF16
    # Two states like the rank's own numbers, and a count of steps in fp32 for each parameter.
    assert found[name].most["optimizer"] == own(shapes, ranks, rank) * BF16 * 2 + 4 * len(shapes)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "layer_gathers"),
    mark_slow_but([("two", 2, 1, 2), ("kept", 4, 1, 1)], 1),
)
def test_memory_efficient_units_are_gathered_and_reduced(
    found: dict[str, Found], name: str, ranks: int, micro_batches: int, layer_gathers: int
) -> None:
    """Embedding and output projection are gathered in forward alone, each a unit; a layer in
    backward again.
    """
    matrix, layer, norm = (
        gathered(shapes, ranks) for shapes in ([(VOCABULARY, WIDTH)], LAYER, LAST_NORM)
    )
    assert found[name].collectives == {
        ("all_gather", "data_shard", matrix): 2 * micro_batches,
        ("all_gather", "data_shard", layer): layer_gathers * LAYERS * micro_batches,
        ("all_gather", "data_shard", norm): micro_batches,
        ("reduce_scatter", "data_shard", matrix): 2 * micro_batches,
        ("reduce_scatter", "data_shard", layer): LAYERS * micro_batches,
        ("reduce_scatter", "data_shard", norm): micro_batches,
    }
    assert found[name].small == 2  # the gradient norm and the loss


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "layer_gathers", "vocabulary"),
    [
        pytest.param("eight", 8, 4, 2, VOCABULARY, marks=pytest.mark.slow),
        ("odd, last", 8, 1, 2, VOCABULARY + 1),
    ],
)
def test_layer_units_are_gathered_and_reduced(
    found: dict[str, Found],
    name: str,
    ranks: int,
    micro_batches: int,
    layer_gathers: int,
    vocabulary: int,
) -> None:
    """What is not in a layer is one unit, which stays from forward to backward."""
    rest = gathered([(vocabulary, WIDTH)] * 2 + LAST_NORM, ranks)
    assert found[name].collectives == {
        ("all_gather", "data_shard", rest): micro_batches,
        ("all_gather", "data_shard", gathered(LAYER, ranks)): (
            layer_gathers * LAYERS * micro_batches
        ),
        ("reduce_scatter", "data_shard", rest): micro_batches,
        ("reduce_scatter", "data_shard", gathered(LAYER, ranks)): LAYERS * micro_batches,
    }


@pytest.mark.parametrize(
    ("name", "size", "gathers"), mark_slow_but([("once", BF16, 6), ("zero-1", 4, 1)], 1)
)
def test_gradients_are_whole_until_they_are_reduced_once_a_step(
    found: dict[str, Found], name: str, size: int, gathers: int
) -> None:
    """The second in fp32, with weights that stay gathered too. The head's are reduced first: beside
    all that are whole its part is there, unless torch has let go of the head's whole ones by then,
    as newer releases do.
    """
    matrix, layer, norm = ([(VOCABULARY, WIDTH)], LAYER, LAST_NORM)
    part_beside = (
        0
        if hasattr(_fsdp_collectives, "_default_reduce_scatter_input_fn")
        else part(matrix, 4) * BF16
    )
    assert found[name].most["gradients"] == part(model(), 1) * size + part_beside
    assert found[name].most["parameters"] == part(model(), 4) * BF16
    assert found[name].most["gathered"] == (
        gathered(matrix, 4) + 8192 if gathers > 1 else gathered(model(), 4)
    )
    layer_gathers = 2 * gathers if gathers > 1 else 1
    assert found[name].collectives == {
        ("all_gather", "data_shard", gathered(matrix, 4)): 2 * gathers,
        ("all_gather", "data_shard", gathered(layer, 4)): layer_gathers * LAYERS,
        ("all_gather", "data_shard", gathered(norm, 4)): gathers,
        ("reduce_scatter", "data_shard", gathered(matrix, 4, size)): 2,
        ("reduce_scatter", "data_shard", gathered(layer, 4, size)): LAYERS,
        ("reduce_scatter", "data_shard", gathered(norm, 4, size)): 1,
    }


def test_copies_sum_the_part_that_is_reduced_already(found: dict[str, Found]) -> None:
    summed = {
        size: count
        for (operation, dim, size), count in found["copies"].collectives.items()
        if dim == "data_replicate"
    }
    assert summed == {
        part([(VOCABULARY, WIDTH)], 4) * BF16: 2,
        part(LAYER, 4) * BF16: LAYERS,
        part(LAST_NORM, 4) * BF16: 1,
    }
    operations = {
        operation for operation, dim, _ in found["copies"].collectives if dim == "data_replicate"
    }
    assert operations == {"all_reduce"}


def test_ranks_that_share_matrices_hold_and_send_their_parts(found: dict[str, Found]) -> None:
    """Norms are whole on every rank; layers are checkpointed, and a second forward ends before the
    last sum.
    """
    ranks, tokens, chunks, norms = 4, 128, 4, 2 * LAYERS + 1
    matrices = sum(rows * columns for rows, columns in model()) - norms * WIDTH
    elements = matrices // ranks + norms * WIDTH
    assert (
        found["tensor"].most["parameters"] == found["tensor"].most["gradients"] == elements * BF16
    )
    assert found["tensor"].most["optimizer"] == elements * BF16 * 2 + 4 * len(model())
    hidden = tokens * WIDTH * BF16
    assert found["tensor"].collectives == {
        ("all_gather", "tensor", hidden): (
            (2 + 2 + 2) * LAYERS + 1
        ),  # forward, again, gradients; the embedding's
        ("reduce_scatter", "tensor", hidden): (2 + 1 + 2) * LAYERS + 1,
        ("all_gather", "tensor", hidden // chunks): chunks,
        ("reduce_scatter", "tensor", hidden // chunks): chunks,
        ("all_reduce", "tensor", tokens // chunks * 4): chunks,  # the largest logits
        (
            "all_reduce",
            "tensor",
            2 * tokens // chunks * 4,
        ): chunks,  # sums of exponentials, and the labels' logits
        ("all_reduce", "tensor", norms * WIDTH * 4): 1,
    }
    assert found["tensor"].small == 1  # the gradient norm


def test_ranks_that_share_sequences_exchange_their_tokens_for_heads(
    found: dict[str, Found],
) -> None:
    """Parameters are cut over both dimensions. Layers are checkpointed: a second forward exchanges
    again.
    """
    shards, context, rows, tokens = 8, 4, 2, 128
    of_a_vector = rows * tokens // context * BF16  # bytes of one channel of this rank's tokens
    assert found["context"].most["parameters"] == part(model(), shards) * BF16
    assert {
        call: count for call, count in found["context"].collectives.items() if call[1] == "context"
    } == {
        ("all_to_all", "context", (QUERIES + 2 * KEYS) * of_a_vector): 3 * LAYERS,
        ("all_to_all", "context", QUERIES * of_a_vector): 3 * LAYERS,
    }
    assert {dim for _, dim, _ in found["context"].collectives} == {"context", "data_shard"}
    assert (
        found["context"].small == 3
    )  # sums of the losses, over tokens and over batches; the gradient norm


def test_adapters_alone_have_gradients_states_and_a_reduction(found: dict[str, Found]) -> None:
    ranks, micro_batches = 4, 4
    adapters = ADAPTERS * LAYERS
    assert found["lora"].most["parameters"] == part(model() + adapters, ranks) * BF16
    assert found["lora"].most["gradients"] == part(adapters, ranks) * BF16
    assert found["lora"].most["optimizer"] == part(adapters, ranks) * BF16 * 2 + 4 * len(adapters)
    assert found["lora"].collectives == {
        ("all_gather", "data_shard", gathered([(VOCABULARY, WIDTH)], ranks)): 2 * micro_batches,
        ("all_gather", "data_shard", gathered(LAYER + ADAPTERS, ranks)): 2 * LAYERS * micro_batches,
        ("all_gather", "data_shard", gathered(LAST_NORM, ranks)): micro_batches,
        ("reduce_scatter", "data_shard", gathered(ADAPTERS, ranks)): LAYERS * micro_batches,
    }


@pytest.mark.parametrize(("name", "shapes"), [("two", model()), ("lora", ADAPTERS)])
def test_a_save_holds_one_whole_parameter_at_a_time(
    found: dict[str, Found], name: str, shapes: Shapes
) -> None:
    assert found[name].saving == max(rows * columns for rows, columns in shapes) * BF16


@pytest.mark.slow
def test_a_base_in_four_bits_has_codes_scales_and_factors(found: dict[str, Found]) -> None:
    ranks = 4
    quantized = LAYERS * sum(nf4_bytes(rows, columns, ranks) for rows, columns in LINEARS)
    plain = [(VOCABULARY, WIDTH)] * 2 + NORMS * LAYERS + LAST_NORM + ADAPTERS * LAYERS
    assert found["nf4"].most["parameters"] == quantized + part(plain, ranks) * BF16
    assert found["nf4"].most["gradients"] == part(ADAPTERS * LAYERS, ranks) * BF16
    layer = sum(nf4_bytes(rows, columns, ranks) for rows, columns in LINEARS) * ranks
    size = layer + gathered(NORMS + ADAPTERS, ranks)
    assert found["nf4"].collectives[("all_gather", "data_shard", size)] == 2 * LAYERS


@pytest.mark.parametrize(
    "name", mark_slow_except(["two", "odd, last", "lora", "nf4", "copies"], ["two", "lora"])
)
def test_tensors_by_which_shapes_are_found_out_are_no_memory(
    found: dict[str, Found], name: str
) -> None:
    """The optimizer takes its states and nothing else, and nothing in a later step; with shapes of
    whole parameters it would be a multiple of the model.
    """
    assert found[name].made_by_optimizer == (found[name].most["optimizer"], 0)
