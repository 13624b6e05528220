"""What optimizers of few bits, with master weights, and Muon hold and take: a simulation's bytes
against formulas.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.optim.low_bit_adamw import CHUNK_ELEMENTS
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY
from tests.distributed.ranks import run_ranks
from tests.plan import test_closed_forms
from tests.plan.test_closed_forms import ADAPTERS, BF16, LAYER, LINEARS, WIDTH, Shapes
from tests.recipes.runs import FULL, LORA, ROOT

pytestmark = pytest.mark.slow  # test_real_runs has states of 8 bits
VOCABULARY = 4352

CASES: dict[str, tuple[Any, ...]] = {
    # Ranks, traced rank, recipe, overrides
    "8": (2, 0, FULL, "optimizer.state_bits=8"),
    "4": (2, 1, FULL, "optimizer.state_bits=4"),
    "odd": (8, 7, FULL, "optimizer.state_bits=8", "odd"),
    "tensor": (4, 0, FULL, "parallel.tensor=2", "optimizer.state_bits=8"),
    "master": (2, 0, FULL, "optimizer.master_weights=true", "optimizer.state_bits=8"),
    "master in fp32": (2, 0, FULL, "optimizer.master_weights=true"),
    "chance": (2, 0, FULL, "optimizer.stochastic_rounding=true"),
    "muon": (2, 0, FULL, "optimizer.name=muon"),
    "muon, tensor": (4, 0, FULL, "optimizer.name=muon", "parallel.tensor=2"),
    "adapters": (2, 0, LORA, "optimizer.state_bits=8"),
    "on host": (2, 0, FULL, "optimizer.name=muon", "memory.cpu_offload=true"),
}


@dataclass
class Taken:
    """Of the second step. states: bytes. beside: the most that the optimizer took besides, at a
    time. exchanged: bytes of all-to-alls and gathers in the optimizer, by mesh dimension.
    """

    states: int
    beside: int
    exchanged: dict[str, int]


def read(trace: Trace, *, device: bool) -> Taken:
    steady = trace.phases.index(STEADY)
    beside = most = 0
    states: Counter[int] = Counter()
    phase = -1
    for event, number in trace.events:
        if event == PHASE:
            phase = number
        if event not in (ALLOC, FREE):
            continue
        storage = trace.storages[number]
        sign = 1 if event == ALLOC else -1
        if storage.kind == "optimizer" and storage.device == device:
            states[phase] += sign * storage.bytes
        elif storage.part == "optimizer" and storage.phase == steady and storage.device:
            beside += sign * storage.bytes
            most = max(most, beside)
    exchanged: Counter[str] = Counter()
    for op in trace.ops:
        if op.part == "optimizer" and op.phase == steady and op.collective is not None:
            exchanged[op.collective.dim] += op.collective.bytes
    return Taken(sum(states.values()), most, dict(exchanged))


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Taken]:
    folder: Path = tmp_path_factory.mktemp("optimizers")

    def work() -> dict[str, dict[str, Any]]:
        write_models(folder)
        found = {}
        for name, case in CASES.items():
            test_closed_forms.read = lambda traced, name=name: read(
                traced, device=name != "on host"
            )
            found[name] = vars(test_closed_forms.trace(case, folder))
        return found

    return {
        name: Taken(**fields) for name, fields in run_ranks(work, 1, process_group=False)[0].items()
    }


def model(vocabulary: int = VOCABULARY) -> Shapes:
    """All parameters: embedding and output projection, one layer, the last norm."""
    return [(vocabulary, WIDTH)] * 2 + LAYER + [(WIDTH, 1)]


def write_models(folder: Path) -> None:
    """One layer of Llama 3 8B, with few words."""
    shipped = json.loads(
        (ROOT / "recipe_lib" / "models" / "presets" / "llama3" / "8B.json").read_text()
    )
    for name, vocabulary in (("even", VOCABULARY), ("odd", VOCABULARY + 1)):
        changed = shipped | {"num_hidden_layers": 1, "vocab_size": vocabulary}
        (folder / f"{name}.json").write_text(json.dumps(changed))


def of_rows(shapes: Shapes, ranks: int, each: Callable[[int, int], int], rank: int = 0) -> int:
    """The sum over a rank's parts of `each(elements, columns)`; FSDP gives the last ranks fewer
    rows.
    """
    total = 0
    for rows, columns in shapes:
        length = math.ceil(rows / ranks)
        total += each(max(0, min(length, rows - rank * length)) * columns, columns)
    return total


def coded(bits: int, elements: int, columns: int) -> int:
    """Bytes of a state: codes and a scale for each block of a matrix, 4 B for each element of a
    norm.
    """
    block = math.gcd(columns, {8: 256, 4: 128}[bits])
    return elements * bits // 8 + 4 * elements // block if columns > 1 else 4 * elements


@pytest.mark.parametrize(("bits", "rank"), [(8, 0), (4, 1)])
def test_states_of_few_bits_are_codes_and_scales(
    taken: dict[str, Taken], bits: int, rank: int
) -> None:
    expected = of_rows(
        model(), 2, lambda elements, columns: 2 * coded(bits, elements, columns), rank
    )
    assert taken[str(bits)].states == expected
    matrices = of_rows(
        [shape for shape in model() if shape[1] > 1], 2, lambda elements, _: elements
    )
    assert expected < matrices * 2 * bits / 8 * 1.07


def test_master_weights_have_4_bytes_and_rounding_none(taken: dict[str, Taken]) -> None:
    elements = of_rows(model(), 2, lambda elements, _: elements)
    assert taken["chance"].states == 2 * BF16 * elements
    assert taken["master"].states == taken["8"].states + 4 * elements
    assert (
        taken["master in fp32"].states == 3 * 4 * elements
    )  # both means beside them, unless state_bits says otherwise


def test_uneven_parts_and_parts_of_columns(taken: dict[str, Taken]) -> None:
    odd = [
        (VOCABULARY + 1, columns) if rows == VOCABULARY else (rows, columns)
        for rows, columns in model()
    ]
    assert taken["odd"].states == of_rows(
        odd, 8, lambda elements, columns: 2 * coded(8, elements, columns), 7
    )
    matrices = [shape for shape in model() if shape[1] > 1]
    norms = [shape for shape in model() if shape[1] == 1]
    expected = of_rows(matrices, 4, lambda elements, columns: 2 * coded(8, elements, columns))
    assert taken["tensor"].states == expected + of_rows(norms, 2, lambda elements, _: 8 * elements)


def test_adapters_have_short_blocks_where_their_rows_are_short(taken: dict[str, Taken]) -> None:
    assert taken["adapters"].states == of_rows(
        ADAPTERS, 2, lambda elements, columns: 2 * coded(8, elements, columns)
    )


@pytest.mark.parametrize("name", ["8", "4", "odd", "tensor", "master", "master in fp32", "chance"])
def test_a_step_takes_a_fixed_number_of_bytes(taken: dict[str, Taken], name: str) -> None:
    """16 B for an element of a piece, whatever the model: the two means, one of them being encoded,
    or rounded by chance; or the weights, and what is drawn for them. Means that are kept in fp32
    take 8 B: gradient and its square.
    """
    assert 8 * CHUNK_ELEMENTS <= taken[name].beside <= 20 * CHUNK_ELEMENTS


def test_muon_has_one_state_of_a_matrix_and_two_of_the_rest(taken: dict[str, Taken]) -> None:
    matrices = LINEARS
    others = [(VOCABULARY, WIDTH)] * 2 + [shape for shape in model() if shape[1] == 1]
    for name, ranks, state in (
        ("muon", 2, lambda elements, columns: BF16 * elements),
        ("on host", 2, lambda elements, columns: BF16 * elements),
    ):
        expected = of_rows(matrices, ranks, state) + 2 * of_rows(others, ranks, state)
        assert taken[name].states == expected, name


def test_muon_exchanges_each_matrix_twice_and_holds_one(taken: dict[str, Taken]) -> None:
    """A rank sends its parts of as many matrices as there are ranks, receives one whole matrix, and
    sends it back.

    Of the largest, `[m, n]`: three in bf16 beside what is sent, and two of m^2.
    """
    matrices = LINEARS
    count = sum(rows * columns for rows, columns in matrices)
    largest, square = 14336 * WIDTH * BF16, WIDTH * WIDTH * BF16
    for name, ranks in (("muon", 2), ("on host", 2)):
        # What arrives there, the first one's whole matrices, and its parts of all that come back.
        received = taken[name].exchanged["data_shard"]
        assert abs(received - 2 * count * BF16 / ranks) < 2 * largest, name
        assert largest < taken[name].beside <= 4 * largest + 2 * square, name
    assert taken["muon, tensor"].exchanged["tensor"] > 0
    assert taken["muon, tensor"].beside < 5 * largest + 2 * square
