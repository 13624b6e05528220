"""What sending activations to the host leaves on the device, and takes there: a simulation against
closed formulas.

The model is Llama 3 8B with 4 layers, in bf16, with the kernels that CUDA has.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config import load_config
from recipe_lib.plan.hardware import HOST_MEMORY_OF_ONE, find_hardware
from recipe_lib.plan.timing.cost import compute_op_seconds
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing.trace import ALLOC, FREE, HOST, OP, PHASE, WAIT, Op, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.plan.test_closed_forms import BF16, KEYS, MLP_WIDTH, QUERIES, WIDTH
from tests.recipes.runs import FULL, PLAIN, ROOT, get_recipe_class, import_recipe_module

LAYERS = 4
TOKENS = 192
HEADS = 32
RTX4090 = find_hardware("rtx4090")

# What a layer keeps of each token, bytes. Widths: inputs of both norms, queries and
# attention, keys and values, gate and up; in fp32 the log-sum-exp of attention. All is a
# tensor of its own.
TENSORS = [
    TOKENS * width * BF16 for width in [WIDTH] * 2 + [QUERIES] * 2 + [KEYS] * 2 + [MLP_WIDTH] * 2
]
TENSORS.append(TOKENS * HEADS * 4)
SMALL = (
    2 * TOKENS * 4 + 24
)  # scales of the norms, seed and offset of attention: less than a KiB each, they stay
INPUT = TOKENS * WIDTH * BF16
OFFLOAD = "memory.activation_offload=true"
CASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "none, 1": (OFFLOAD,),
    "none, 2": (OFFLOAD, "memory.activation_offload_prefetch_layers=2"),
    "full": ("memory.activation_checkpointing=full",),
    "full, 1": ("memory.activation_checkpointing=full", OFFLOAD),
    "on the host": ("memory.cpu_offload=true",),
}


def power_of_two(size: int) -> int:
    """What torch's allocator of pinned memory takes."""
    block = 1
    while block < size:
        block *= 2
    return block


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("offload")
    model = json.loads(
        (ROOT / "recipe_lib" / "models" / "presets" / "llama3" / "8B.json").read_text()
    )
    (folder / "model.json").write_text(json.dumps(model | {"num_hidden_layers": LAYERS}))
    return run_ranks(
        lambda: {name: read(folder, case) for name, case in CASES.items()}, 1, process_group=False
    )[0]


def read(folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Of the second step of a rank of two. kept: by layers on the device, the most at a time; at
    head: when the output projection begins; left: at the end. all: bytes on the device when it
    begins. host: the most there. copied: by way, stream and part. copying: seconds of that on a
    4090, and those that no kernel hides.
    """
    module = import_recipe_module(FULL)
    settings = [
        f"model.preset={folder / 'model.json'}",
        f"output_dir={folder / 'none'}",
        f"recipe={FULL}",
    ]
    settings += ["tokenizer.path=unread", "data.source=unread", f"max_seq_len={TOKENS}", *overrides]
    cfg = load_config(PLAIN, settings, module.Config)
    shape = SimpleNamespace(tokens=TOKENS, documents=1)
    simulated = simulate(get_recipe_class(module), cfg, shape, ranks=2, phases=())
    trace = simulated.trace
    time = schedule(trace, STEADY, RTX4090)
    return {
        **kept_by_layers(trace),
        "host": trace.find_active_peaks(device=False)[STEADY],
        "repeats": simulated.repeats,
        "copied": copies(trace),
        "copying": [time.copies, time.copies_exposed],
        "on host": time.on_host,
        "waits": sum(
            kind == WAIT and trace.syncs[number].stream == HOST
            for kind, number in trace.iterate_events(STEADY)
        ),
    }


def kept_by_layers(trace: Trace) -> dict[str, int]:
    kept = most = at_head = alive = everything = 0
    phase = ""
    for event, number in trace.events:
        if event == PHASE:
            phase = trace.phases[number]
        elif event in (ALLOC, FREE):
            storage = trace.storages[number]
            change = (storage.bytes if event == ALLOC else -storage.bytes) if storage.device else 0
            alive += change
            if storage.kind == "activations" and storage.module.startswith("model.layers"):
                kept += change
        elif (
            event == OP
            and phase == STEADY
            and trace.ops[number].module == "lm_head"
            and not at_head
        ):
            at_head, everything = kept, alive
        most = max(most, kept) if phase == STEADY else most
    return {"kept": most, "at head": at_head, "all": everything, "left": kept}


def copies(trace: Trace) -> list[list[Any]]:
    """Way, whether on the computing stream, part of the step, bytes."""
    sums: dict[tuple[str, bool, str], int] = {}
    for event, number in trace.iterate_events(STEADY):
        op = trace.ops[number] if event == OP else None
        if op is not None and op.transfer and op.part in ("forward", "backward"):
            key = (op.transfer, op.stream == 0, op.part)
            sums[key] = sums.get(key, 0) + op.bytes // 2
    return [[*key, size] for key, size in sums.items()]


@pytest.mark.slow
def test_the_formula_is_what_layers_keep_without_it(found: dict[str, dict[str, Any]]) -> None:
    assert found["none"]["at head"] == found["none"]["kept"] == LAYERS * (sum(TENSORS) + SMALL)
    assert found["full"]["at head"] == LAYERS * INPUT
    assert found["none"]["host"] == found["full"]["host"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_the_device_holds_the_present_layer_and_those_ahead(
    ahead: int, found: dict[str, dict[str, Any]]
) -> None:
    case = found[f"none, {ahead}"]
    assert case["at head"] == INPUT + ahead * sum(TENSORS) + LAYERS * SMALL
    assert case["kept"] == (ahead + 1) * sum(TENSORS) + LAYERS * SMALL
    assert found["none"]["all"] - case["all"] == (LAYERS - ahead) * sum(TENSORS)
    assert case["host"] == (LAYERS - ahead) * sum(map(power_of_two, TENSORS))
    assert case["repeats"] and case["left"] == 0


def test_with_checkpointing_it_is_the_inputs(found: dict[str, dict[str, Any]]) -> None:
    case = found["full, 1"]
    assert case["at head"] == INPUT + INPUT
    assert found["full"]["all"] - case["all"] == (LAYERS - 1) * INPUT
    assert case["host"] == (LAYERS - 1) * power_of_two(INPUT)


def test_what_is_sent_comes_back_once_beside_the_computation(
    found: dict[str, dict[str, Any]],
) -> None:
    sent = (LAYERS - 1) * sum(TENSORS)
    assert found["none, 1"]["copied"] == [
        ["to_host", False, "forward", sent],
        ["to_device", False, "backward", sent],
    ]
    alone, exposed = found["none, 1"]["copying"]
    assert alone == pytest.approx(2 * sent / RTX4090.host_bandwidth, rel=0.05)
    assert 0 <= exposed < alone
    assert found["none"]["copying"][0] < 1e-4


def test_the_host_steps_after_it_has_the_gradients(found: dict[str, dict[str, Any]]) -> None:
    """A fused AdamW reads a parameter, its gradient and two states, and writes all but the
    gradient; clipping reads gradients for their norm, and reads and writes them: ten times the
    bytes of a rank's bf16 parameters.
    """
    layer = 2 * WIDTH * (QUERIES + KEYS) + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH
    parameters = 2 * 128_256 * WIDTH + LAYERS * layer + WIDTH
    case = found["on the host"]
    assert case["waits"] >= 1
    assert case["on host"] == pytest.approx(
        10 * BF16 * parameters / 2 / HOST_MEMORY_OF_ONE, rel=1e-3
    )
    assert all(other["on host"] < 1e-4 for name, other in found.items() if name != "on the host")


def test_a_copy_takes_the_time_of_the_link_with_the_host() -> None:
    copy = Op("aten::copy_", bytes=2 * int(RTX4090.host_bandwidth), transfer="to_host")
    assert compute_op_seconds(copy, RTX4090) == pytest.approx(1.0)
