"""List the cases of `python benchmarks/gpu_check.py`: what it measures, and with which recipe.

`list_cases` gives those for a GPU, or a dry run's with a tiny model. `gpu_check.measure` measures
each in a process of its own. A row is one sequence of a batch.
"""

import dataclasses

CAP_GIB = 24 - 0.8  # a 24 GB card, less what context and kernels take outside the allocator
# By method: (name of the recipe's file, the class in it).
RECIPES = {
    "full": ("full_finetune_distributed", "FullFinetune"),
    "lora": ("lora_finetune_distributed", "LoraFinetune"),
    "qlora": ("lora_finetune_distributed", "LoraFinetune"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold one measurement, and the settings that it is made with."""

    # `memory`: peaks as rank 0 of `ranks` in torch's fake process group. `speed`: tokens a second
    # of one process. `matmul`: the device's bf16 rate, for which no setting counts.
    kind: str
    preset: str  # the model's family and size
    sequence: int = 0  # tokens of a row
    wrapping: str = "memory_efficient"  # parallel.fsdp_wrap_policy
    ranks: int = 1  # of which rank 0 runs
    batch_size: int = 1  # rows of the micro-batch
    activation_checkpointing: str = "full"
    compile: bool = False
    capped: bool = False  # the allocator may take CAP_GIB and no more
    steps: int = 3  # optimizer steps
    seconds: int = 90  # time limit of the case's process
    method: str = "full"  # `full`, `lora` or `qlora`


def list_cases(gpu: bool) -> list[Case]:
    """Return the cases, the most telling first, in case time runs out.

    gpu: False for the dry run's.
    """
    return _list_gpu_cases() if gpu else _list_dry_cases()


def _list_dry_cases() -> list[Case]:
    """Return a case of each kind and method, with a tiny model."""
    tiny = "demo/0.5M"
    return [
        Case("matmul", tiny),
        Case("memory", tiny, sequence=32, wrapping="layers", ranks=4, capped=True),
        Case("memory", tiny, sequence=32, ranks=4, capped=True),
        Case("memory", tiny, sequence=32, ranks=1, method="qlora"),
        Case("memory", tiny, sequence=32, ranks=2, method="qlora"),
        Case("speed", tiny, sequence=32, method="lora"),
        Case("speed", tiny, sequence=32),
    ]


def _list_gpu_cases() -> list[Case]:
    """Return the cases of 8B, and of QLoRA of 70B."""
    preset = "llama3/8B"
    return [
        Case("matmul", preset),
        *_list_full_memory_cases(preset, ranks=4),
        *_list_adapter_cases(preset, "qlora"),
        *_list_large_qlora_cases(),
        *_list_adapter_cases(preset, "lora"),
        Case("speed", preset, sequence=8192, batch_size=2, steps=10, seconds=120),
        Case(
            "speed",
            preset,
            sequence=8192,
            activation_checkpointing="selective",
            steps=10,
            seconds=120,
        ),
        Case("speed", preset, sequence=8192, batch_size=2, compile=True, steps=10, seconds=180),
        *_list_full_memory_cases(preset, ranks=2),
    ]


def _list_full_memory_cases(preset: str, ranks: int) -> list[Case]:
    """Return memory cases of full fine-tuning, by tokens of a row and wrapping."""
    cases = []
    for sequence in (512, 2048, 4096, 8192):
        for wrapping in ("layers", "memory_efficient"):
            case = Case(
                "memory", preset, sequence=sequence, wrapping=wrapping, ranks=ranks, capped=True
            )
            cases.append(case)
    return cases


def _list_adapter_cases(preset: str, method: str) -> list[Case]:
    """Return memory and speed cases of LoRA or QLoRA on one GPU."""
    return [
        Case("memory", preset, sequence=2048, capped=True, method=method),
        Case("memory", preset, sequence=8192, capped=True, method=method),
        Case("speed", preset, sequence=8192, batch_size=2, steps=6, seconds=120, method=method),
    ]


def _list_large_qlora_cases() -> list[Case]:
    """Return memory cases of QLoRA of 70B on two and four GPUs."""
    cases = []
    for ranks in (2, 4):
        for sequence in (512, 4096):
            case = Case(
                "memory", "llama3/70B", sequence=sequence, ranks=ranks, capped=True, method="qlora"
            )
            cases.append(case)
    return cases


def describe(case: Case) -> str:
    """Describe a case in a few words, for the log."""
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
    if case.compile:
        words.append("compiled")
    return ", ".join(words)
