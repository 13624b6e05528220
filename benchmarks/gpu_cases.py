"""What gpu_check.py measures: its cases, and the recipe that each is a run of."""

import dataclasses

CAP_GIB = 24 - 0.8  # a 24 GB card, less what context and kernels take outside the allocator
# The recipe of each method, and the class in it.
RECIPES = {
    "full": ("full_finetune_distributed", "FullFinetune"),
    "lora": ("lora_finetune_distributed", "LoraFinetune"),
    "qlora": ("lora_finetune_distributed", "LoraFinetune"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement. kind: `memory`, `speed` or `matmul`. method: `full`, `lora` or `qlora`. The
    rest: settings.
    """

    kind: str
    preset: str
    sequence: int = 0
    wrapping: str = "memory_efficient"
    ranks: int = 1
    batch_size: int = 1
    activation_checkpointing: str = "full"
    compile: bool = False
    capped: bool = False
    steps: int = 3
    seconds: int = 90
    method: str = "full"


def plan(gpu: bool) -> list[Case]:
    """The cases, the most telling first, in case time runs out."""
    if not gpu:
        tiny = "demo/0.5M"
        memory = [
            Case("memory", tiny, 32, wrapping, ranks=4, capped=True)
            for wrapping in ("layers", "memory_efficient")
        ]
        adapters = [Case("memory", tiny, 32, ranks=ranks, method="qlora") for ranks in (1, 2)]
        return [
            Case("matmul", tiny),
            *memory,
            *adapters,
            Case("speed", tiny, 32, method="lora"),
            Case("speed", tiny, 32),
        ]
    preset = "llama3/8B"
    memory = [
        Case("memory", preset, sequence, wrapping, ranks, capped=True)
        for ranks in (4, 2)
        for sequence in (512, 2048, 4096, 8192)
        for wrapping in ("layers", "memory_efficient")
    ]
    speed = [
        Case("speed", preset, 8192, batch_size=2, steps=10, seconds=120),
        Case("speed", preset, 8192, activation_checkpointing="selective", steps=10, seconds=120),
        Case("speed", preset, 8192, batch_size=2, compile=True, steps=10, seconds=180),
    ]
    lora_8b, qlora_8b = (
        [
            *(
                Case("memory", preset, sequence, capped=True, method=method)
                for sequence in (2048, 8192)
            ),
            Case("speed", preset, 8192, batch_size=2, steps=6, seconds=120, method=method),
        ]
        for method in ("lora", "qlora")
    )
    qlora_70b = [
        Case("memory", "llama3/70B", sequence, ranks=ranks, capped=True, method="qlora")
        for ranks in (2, 4)
        for sequence in (512, 4096)
    ]
    return [
        Case("matmul", preset),
        *memory[:8],
        *qlora_8b,
        *qlora_70b,
        *lora_8b,
        *speed,
        *memory[8:],
    ]


def describe(case: Case) -> str:
    """A case in a few words."""
    if case.kind == "matmul":
        return "bf16 matmul"
    words = [
        case.kind,
        case.method,
        case.preset,
        f"{case.batch_size} x {case.sequence} tokens",
        case.activation_checkpointing,
    ]
    if case.kind == "memory":
        words += [
            case.wrapping,
            f"rank 0 of {case.ranks}",
            f"{CAP_GIB} GiB" if case.capped else "no cap",
        ]
    return ", ".join(words + (["compiled"] if case.compile else []))
