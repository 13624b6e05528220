"""Plans and traces made by hand, for the tests of what is printed of them."""

from recipe_lib.plan.plan_schema import (
    FITS,
    ActionSpan,
    Advice,
    Alive,
    CommunicationRow,
    DeviceFacts,
    LayerRow,
    OutsideTorch,
    PhasePeak,
    PipelinePlan,
    Plan,
    RankPlan,
    StagePlan,
    TimePlan,
)
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, Storage, Trace
from recipe_lib.units import GIB, MIB

LAYERS, WIDTH = 32, 4096
LAYER = 436_224_000  # bytes, a multiple of the 4 ranks
VOCABULARY = 1_050_673_152


def hand_made(**changed: object) -> Plan:
    """A plan of 4 ranks whose figures are odd enough to show rounding; `changed`: fields to
    replace.
    """
    alive = list_alive_storages()
    active = sum(found.bytes for found in alive)
    peaks = [
        PhasePeak(
            "setup", active // 3, active // 3 + 1000, active // 2, active // 2, 3 * GIB + 7, "setup"
        ),
        PhasePeak(
            "step",
            active,
            active + 12345,
            active + GIB,
            active + GIB // 3,
            11 * MIB,
            "backward",
            "model.norm",
        ),
        PhasePeak("save", active // 2, active // 2, active + GIB, active + GIB // 3, 5 * GIB + 3),
    ]
    for peak in peaks:
        peak.requested = peak.active
    rank = RankPlan(0, {"data_shard": 0}, peaks, alive, 30_000)
    outside = OutsideTorch(context=512 * MIB + 77, nccl=700 * MIB + 5, reserve=3 * MIB)
    memory = 24564 * MIB
    usable = memory - outside.total
    fields: dict[str, object] = {
        "recipe": "full_finetune_distributed",
        "config": "llama3/8B_full",
        "overrides": ["batch_size=1", "max_seq_len=512"],
        "model": "llama3/8B",
        "ranks": 4,
        "mesh": {"data_replicate": 1, "data_shard": 4},
        "device": DeviceFacts(
            "rtx4090", memory, usable, "sm89", 165e12, 1.008e12, "pcie_no_p2p", 10e9
        ),
        "sequence": {
            "tokens": 512,
            "source": "alpaca.json",
            "histogram": {"p50": 120, "p99": 480, "max": 512},
        },
        "verdict": FITS,
        "margin": usable - rank.reserved,
        "rank_plans": [rank],
        "outside": outside,
        "layers": list_layer_rows(),
        "communication": list_communication_rows(),
        "time": TimePlan(
            1.25,
            3.5,
            2.75,
            0.05,
            4.0,
            2048,
            512.0,
            0.123,
            1000,
            4000.0,
            False,
            "-50 % to +20 %",
            matmuls=1.0,
            attention=0.125,
            memory_bound=0.125,
            operators=1234,
        ),
        "advice": [
            Advice("memory.checkpointing=full", -2 * GIB - 5, 0.31, True, "Layers run twice."),
            Advice("batch_size=2", 900 * MIB, None, False),
        ],
        "assumptions": ["Attention runs in the flash kernel.", "Row length 512."],
        "not_modeled": ["torch.compile."],
        "versions": {"torch": "2.13.0", "tune-recipes": "0.1.0"},
        "seconds": 19.2,
    }
    return Plan(**(fields | changed))  # type: ignore[arg-type]


def hand_made_pipeline(ranks: int = 2, micro_batches: int = 3) -> PipelinePlan:
    """GPipe, of which a forward takes 1 s and a backward 2 s."""
    spans, places = [], []
    end = 3.0 * (micro_batches + ranks - 1)
    for place in range(ranks):
        for number in range(micro_batches):
            forward, backward = place + number, end - 2 * (place + micro_batches - number)
            spans.append(ActionSpan(place, place, "F", number, float(forward), forward + 1.0))
            spans.append(ActionSpan(place, place, "B", number, backward, backward + 2.0))
        idle = 1 - 3 * micro_batches / end
        places.append(StagePlan(place, place, [place], [[16 * place, 16 * place + 15]], 3_490_000_000, 3_490_000_000,
                                micro_batches, 0, 3.0 * micro_batches, idle, micro_batches,
                                micro_batches * MIB))  # fmt: skip
    bubble = 1 - 3 * micro_batches / end
    return PipelinePlan("gpipe", 1, micro_batches, 4, places, end, bubble, bubble, spans)


def list_alive_storages() -> list[Alive]:
    """Sharded parameters and gradients of 32 layers alike; activations of which layer 31 has
    more.
    """
    found = []
    for kind in ("parameters", "gradients"):
        for layer in range(LAYERS):
            attention, mlp = LAYER // 16, LAYER // 4 - LAYER // 16
            name = f"model.layers.{layer}"
            found.append(Alive(kind, name, f"{name}.self_attn.q_proj.weight", attention, 1))
            found.append(Alive(kind, name, f"{name}.mlp.up_proj.weight", mlp, 1))
        found.append(Alive(kind, "", "model.embed_tokens.weight", VOCABULARY // 4, 1))
        found.append(Alive(kind, "", "model.norm.weight", 2048, 1))
        found.append(Alive(kind, "", "lm_head.weight", VOCABULARY // 4, 1))
    for layer in range(LAYERS):
        found.append(Alive("activations", f"model.layers.{layer}", "", 4_194_304, 2))
    found.append(Alive("activations", "model.layers.31.mlp", "", 33_333_333, 3))
    found.append(Alive("gathered", "model.layers.31", "", LAYER, 2))
    found.append(Alive("batch", "", "tokens", 4096, 2))
    found.append(Alive("temporary", "", "", 123_456_789, 4))
    return sorted(found, key=lambda alive: -alive.bytes)


def list_layer_rows() -> list[LayerRow]:
    """The model, its layers and one module inside each."""
    rows = [
        LayerRow("model.embed_tokens", "Embedding", VOCABULARY // 2, 0, VOCABULARY, VOCABULARY // 4)
    ]
    for layer in range(LAYERS):
        name, count = f"model.layers.{layer}", LAYER // 2
        rows.append(LayerRow(name, "DecoderLayer", count, count, LAYER, LAYER // 4, 4_194_304))
        rows.append(
            LayerRow(
                f"{name}.mlp", "GatedMLP", count // 2, count // 2, LAYER // 2, LAYER // 8, 1_000_000
            )
        )
    rows.append(LayerRow("model.norm", "RMSNorm", WIDTH, WIDTH, 2 * WIDTH, WIDTH // 2))
    return rows


def list_communication_rows() -> list[CommunicationRow]:
    """Gathers and scatters of each layer, and one tiny all-reduce over all ranks."""
    rows = []
    for layer in range(LAYERS):
        for operation, where in (
            ("all_gather", "forward"),
            ("all_gather", "backward"),
            ("reduce_scatter", "backward"),
        ):
            shapes = [[LAYER // 8], [LAYER // 2]]
            rows.append(
                CommunicationRow(operation, "data_shard", [0, 1, 2, 3], where, f"model.layers.{layer}", shapes, "bf16",
                                 LAYER, LAYER * 3 // 4, 1, 0.0327)
            )  # fmt: skip
    world = [0, 1, 2, 3]
    rows.append(
        CommunicationRow(
            "all_reduce", "world", world, "optimizer", "", [[1]], "fp32", 4, 6, 3, 3e-5
        )
    )
    return rows


def hand_made_trace(steps: int = 4, per_phase: int = 40) -> Trace:
    """Two phases: a ramp of parameters that stay; then activations that come and go, and a single
    high spike.
    """
    trace = Trace(phases=["setup", "step"])
    trace.events.append((PHASE, 0))
    for _ in range(per_phase):
        _take(trace, Storage(MIB, kind="parameters", module="a <b> & c"))
    trace.events.append((PHASE, 1))
    for step in range(steps):
        taken = [
            _take(trace, Storage((number % 7 + 1) * MIB, kind="activations"))
            for number in range(per_phase)
        ]
        if step == steps // 2:
            spike = _take(trace, Storage(3 * GIB, kind="logits"))
            trace.events.append((FREE, spike))
        host = _take(trace, Storage(64 * GIB, device=False, kind="batch"))
        trace.events += [(FREE, number) for number in (*reversed(taken), host)]
    return trace


def _take(trace: Trace, storage: Storage) -> int:
    trace.storages.append(storage)
    trace.events.append((ALLOC, len(trace.storages) - 1))
    return len(trace.storages) - 1
