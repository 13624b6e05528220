"""Build plans and traces by hand, for the tests of what is printed of them.

A plan is what `tune plan` computes of a run: peaks of memory, communication and time. A trace is
its simulation: allocations and frees in order.
"""

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

LAYERS = 32
WIDTH = 4096  # of hidden states
LAYER = 436_224_000  # bytes of a layer's weights, a multiple of the 4 ranks
VOCABULARY = 1_050_673_152  # bytes of the embedding, and of the head


def build_example_plan(**changed: object) -> Plan:
    """Return a plan of 4 ranks whose figures are odd enough to show rounding.

    changed: fields of `Plan` to replace.
    """
    alive = list_alive_storages()
    active = sum(storage.bytes for storage in alive)
    peaks = [
        PhasePeak(
            phase="setup",
            active=active // 3,
            allocated=active // 3 + 1000,
            reserved=active // 2,
            reserved_expandable=active // 2,
            host=3 * GIB + 7,
            part="setup",
        ),
        PhasePeak(
            phase="step",
            active=active,
            allocated=active + 12345,
            reserved=active + GIB,
            reserved_expandable=active + GIB // 3,
            host=11 * MIB,
            part="backward",
            module="model.norm",
        ),
        PhasePeak(
            phase="save",
            active=active // 2,
            allocated=active // 2,
            reserved=active + GIB,
            reserved_expandable=active + GIB // 3,
            host=5 * GIB + 3,
        ),
    ]
    for peak in peaks:
        peak.requested = peak.active
    rank = RankPlan(rank=0, coordinates={"data_shard": 0}, peaks=peaks, alive=alive, events=30_000)
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
            name="rtx4090",
            memory=memory,
            usable=usable,
            architecture="sm89",
            flops=165e12,
            bandwidth=1.008e12,
            link="pcie_no_p2p",
            link_bandwidth=10e9,
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
            compute=1.25,
            communication=3.5,
            exposed=2.75,
            launch=0.05,
            step=4.0,
            tokens_per_step=2048,
            tokens_per_second=512.0,
            mfu=0.123,
            steps=1000,
            total=4000.0,
            calibrated=False,
            error="-50 % to +20 %",
            matmuls=1.0,
            attention=0.125,
            memory_bound=0.125,
            operators=1234,
        ),
        "advice": [
            Advice(
                override="memory.checkpointing=full",
                bytes=-2 * GIB - 5,
                seconds=0.31,
                fits=True,
                note="Layers run twice.",
            ),
            Advice(override="batch_size=2", bytes=900 * MIB, seconds=None, fits=False),
        ],
        "assumptions": ["Attention runs in the flash kernel.", "Row length 512."],
        "not_modeled": ["torch.compile."],
        "versions": {"torch": "2.13.0", "tune-recipes": "0.1.0"},
        "seconds": 19.2,
    }
    return Plan(**(fields | changed))  # type: ignore[arg-type]


def build_example_pipeline(ranks: int = 2, micro_batches: int = 3) -> PipelinePlan:
    """Return a GPipe schedule in which a forward takes 1 s and a backward 2 s, for every stage."""
    # A stage works 3 s on each micro-batch, and waits 3 s for each other stage.
    end = 3.0 * (micro_batches + ranks - 1)
    bubble = 1 - 3 * micro_batches / end
    spans = []
    stages = []
    for rank in range(ranks):
        for number in range(micro_batches):
            starts = {  # of a forward and a backward, in seconds
                "F": float(rank + number),
                "B": end - 2 * (rank + micro_batches - number),
            }
            for kind, seconds in (("F", 1.0), ("B", 2.0)):
                spans.append(
                    ActionSpan(
                        place=rank,
                        stage=rank,
                        kind=kind,
                        micro_batch=number,
                        start=starts[kind],
                        end=starts[kind] + seconds,
                    )
                )
        stages.append(
            StagePlan(
                place=rank,
                rank=rank,
                stages=[rank],
                layers=[[16 * rank, 16 * rank + 15]],
                parameters=3_490_000_000,
                trained=3_490_000_000,
                in_flight=micro_batches,
                deferred=0,
                compute=3.0 * micro_batches,
                idle=bubble,
                sends=micro_batches,
                sent=micro_batches * MIB,
            )
        )
    return PipelinePlan(
        schedule="gpipe",
        stages_per_rank=1,
        micro_batches=micro_batches,
        micro_batch_size=4,
        places=stages,
        seconds=end,
        bubble=bubble,
        ideal=bubble,
        spans=spans,
    )


def list_alive_storages() -> list[Alive]:
    """Return the storages that are alive at the peak, the largest first.

    Parameters and gradients of the 32 layers are alike; layer 31 has more activations.
    """
    alive = []

    def add(kind: str, module: str, label: str, num_bytes: int, count: int) -> None:
        alive.append(Alive(kind=kind, module=module, label=label, bytes=num_bytes, count=count))

    for kind in ("parameters", "gradients"):
        for layer in range(LAYERS):
            attention = LAYER // 16
            mlp = LAYER // 4 - attention
            name = f"model.layers.{layer}"
            add(kind, name, label=f"{name}.self_attn.q_proj.weight", num_bytes=attention, count=1)
            add(kind, name, label=f"{name}.mlp.up_proj.weight", num_bytes=mlp, count=1)
        add(kind, "", label="model.embed_tokens.weight", num_bytes=VOCABULARY // 4, count=1)
        add(kind, "", label="model.norm.weight", num_bytes=2048, count=1)
        add(kind, "", label="lm_head.weight", num_bytes=VOCABULARY // 4, count=1)
    for layer in range(LAYERS):
        add("activations", f"model.layers.{layer}", label="", num_bytes=4_194_304, count=2)
    add("activations", "model.layers.31.mlp", label="", num_bytes=33_333_333, count=3)
    add("gathered", "model.layers.31", label="", num_bytes=LAYER, count=2)
    add("batch", "", label="tokens", num_bytes=4096, count=2)
    add("temporary", "", label="", num_bytes=123_456_789, count=4)
    return sorted(alive, key=lambda storage: -storage.bytes)


def list_layer_rows() -> list[LayerRow]:
    """Return the rows of the model's layers and of one module inside each."""
    rows = [
        LayerRow(
            module="model.embed_tokens",
            type="Embedding",
            parameters=VOCABULARY // 2,
            trained=0,
            bytes=VOCABULARY,
            local_bytes=VOCABULARY // 4,
        )
    ]
    for layer in range(LAYERS):
        rows.append(
            LayerRow(
                module=f"model.layers.{layer}",
                type="DecoderLayer",
                parameters=LAYER // 2,
                trained=LAYER // 2,
                bytes=LAYER,
                local_bytes=LAYER // 4,
                kept=4_194_304,
            )
        )
        rows.append(
            LayerRow(
                module=f"model.layers.{layer}.mlp",
                type="GatedMLP",
                parameters=LAYER // 4,
                trained=LAYER // 4,
                bytes=LAYER // 2,
                local_bytes=LAYER // 8,
                kept=1_000_000,
            )
        )
    rows.append(
        LayerRow(
            module="model.norm",
            type="RMSNorm",
            parameters=WIDTH,
            trained=WIDTH,
            bytes=2 * WIDTH,
            local_bytes=WIDTH // 2,
        )
    )
    return rows


def list_communication_rows() -> list[CommunicationRow]:
    """Return gathers and scatters of each layer, and one tiny all-reduce over all ranks."""
    collectives = (
        ("all_gather", "forward"),
        ("all_gather", "backward"),
        ("reduce_scatter", "backward"),
    )
    rows = []
    for layer in range(LAYERS):
        for operation, part in collectives:
            rows.append(
                CommunicationRow(
                    operation=operation,
                    dim="data_shard",
                    ranks=[0, 1, 2, 3],
                    where=part,
                    module=f"model.layers.{layer}",
                    shapes=[[LAYER // 8], [LAYER // 2]],
                    dtype="bf16",
                    bytes=LAYER,
                    wire_bytes=LAYER * 3 // 4,
                    count=1,
                    seconds=0.0327,
                )
            )
    rows.append(
        CommunicationRow(
            operation="all_reduce",
            dim="world",
            ranks=[0, 1, 2, 3],
            where="optimizer",
            module="",
            shapes=[[1]],
            dtype="fp32",
            bytes=4,
            wire_bytes=6,
            count=3,
            seconds=3e-5,
        )
    )
    return rows


def build_example_trace(steps: int = 4, per_phase: int = 40) -> Trace:
    """Return a trace of two phases, of `per_phase` allocations each (the second: in each step).

    In the first, parameters are allocated and stay. In the second, activations come and go, with a
    single high spike, and a host tensor of each step is not to count.
    """
    trace = Trace(phases=["setup", "step"])
    trace.events.append((PHASE, 0))
    for _ in range(per_phase):
        _allocate(trace, Storage(MIB, kind="parameters", module="a <b> & c"))
    trace.events.append((PHASE, 1))
    for step in range(steps):
        activations = [
            _allocate(trace, Storage((number % 7 + 1) * MIB, kind="activations"))
            for number in range(per_phase)
        ]
        if step == steps // 2:
            spike = _allocate(trace, Storage(3 * GIB, kind="logits"))
            trace.events.append((FREE, spike))
        host = _allocate(trace, Storage(64 * GIB, device=False, kind="batch"))
        trace.events += [(FREE, number) for number in (*reversed(activations), host)]
    return trace


def _allocate(trace: Trace, storage: Storage) -> int:
    """Add a storage and its allocation to the trace; return its number."""
    trace.storages.append(storage)
    trace.events.append((ALLOC, len(trace.storages) - 1))
    return len(trace.storages) - 1
