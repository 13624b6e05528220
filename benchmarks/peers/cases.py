"""The compared runs, the sides that take part in them, and what each side's environment is made of.

`gpu_peers.py` runs `list_cases` with every one of `SIDES`; `report.py` judges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.planted.torchtune import Torchtune
from benchmarks.peers.planted.trl import Trl

# Small, and every matrix is whole groups of 256 blocks of 64 numbers, which torchao's NF4 is made
# for.
WIDE = "wide.json"
# of the adapters, on all linears of the layers
RANK = 16
ALPHA = 32
OURS = "ours"
# Folder of a tool's environment, and what it is made of, in order: those of the planted faults, and
# what they lack.
ENVIRONMENTS = {"transformers": "trl", "trl": "trl", "torchtune": "torchtune", "unsloth": "unsloth"}
PACKAGES: dict[str, Sequence[Sequence[str]]] = {
    "trl": (*Trl.packages, ("bitsandbytes", "liger-kernel")),
    "torchtune": Torchtune.packages,
    "unsloth": (("unsloth",),),
}


@dataclass(frozen=True)
class PeerCase:
    """A run in no tool's words.

    Every side trains the same rows in the same order, all tokens, from the same start.
    """

    method: str  # `full`, `lora` or `qlora`
    sequence: int  # tokens
    batch_size: int
    checkpointing: str  # `none`, or `full` (each layer's input is kept)
    lr: float  # constant
    steps: int = 20
    warmup: int = 8  # steps whose time is not counted
    # File in this folder: the shape of a model of the case's own with random weights.
    preset: str = ""

    @property
    def name(self) -> str:
        """Return the case's name, such as `full-2048`."""
        return f"{self.method}-{self.sequence}"

    @property
    def own_model(self) -> str | None:
        """Return the preset's path."""
        return str(Path(__file__).parent / self.preset) if self.preset else None


@dataclass(frozen=True)
class Side:
    """A tool as one column."""

    name: str
    tool: str
    told: str  # its documented way, in a sentence
    compiled: bool = False
    liger: bool = False  # with the Liger kernels
    gpu: bool = False  # it needs one

    @property
    def script(self) -> str:
        """Return the file in `scripts` that runs it."""
        scripts = {
            "ours": "run_ours.py",
            "transformers": "run_transformers.py",
            "torchtune": "run_torchtune.py",
        }
        return scripts.get(self.tool, "run_trl.py")

    @property
    def shown(self) -> tuple[str, ...]:
        """Return the packages whose versions are told."""
        if self.tool == OURS:
            return ("torch", "torchao")
        if self.tool == "torchtune":
            return ("torch", "torchao", "torchtune")
        packages = ["torch", "transformers", "accelerate", "peft", "bitsandbytes"]
        if self.liger:
            packages.append("liger-kernel")
        if self.tool != "transformers":
            packages.append("trl")
        if self.tool == "unsloth":
            packages.append("unsloth")
        return tuple(packages)

    def list_modules(self, case: PeerCase) -> tuple[str, ...]:
        """Return what its environment has to import for a case.

        Unsloth comes first, which patches the others.
        """
        if self.tool == OURS:
            return ("recipe_lib",)
        if self.tool == "torchtune":
            return ("torchtune",)
        modules = ["unsloth"] if self.tool == "unsloth" else []
        modules += ["transformers", "accelerate"]
        if self.tool != "transformers":
            modules.append("trl")
        if case.method != "full":
            modules.append("peft")
        if case.method == "qlora":
            modules.append("bitsandbytes")
        if self.liger:
            modules.append("liger_kernel")
        return tuple(modules)


_TRAINER = "weights and states in the type of the run, without autocast, fused AdamW, SDPA"
_TUNE = "its chunked loss, fused AdamW; rows, logger and the adapter's start are components of ours"
SIDES = (
    Side(
        OURS,
        OURS,
        "`tune run RECIPE --config FILE`, fused AdamW, the loss in 16 chunks, as in the shipped"
        " configs",
    ),
    Side("ours-compiled", OURS, "the same with `compile=true`", compiled=True, gpu=True),
    Side(
        "transformers",
        "transformers",
        f"`Trainer`; adapters by PEFT, four bits by bitsandbytes; {_TRAINER}",
    ),
    Side(
        "transformers-liger",
        "transformers",
        "the same with `use_liger_kernel`",
        liger=True,
        gpu=True,
    ),
    Side(
        "trl",
        "trl",
        f"`SFTTrainer` on rows of ids, packing strategy `wrapped`; the model as above; {_TRAINER}",
    ),
    Side(
        "torchtune",
        "torchtune",
        f"`tune run {{full,lora}}_finetune_single_device --config FILE`; {_TUNE}",
    ),
    Side("torchtune-compiled", "torchtune", "the same with its `compile`", compiled=True, gpu=True),
    Side(
        "unsloth",
        "unsloth",
        "`FastLanguageModel` under `SFTTrainer`, its own checkpointing",
        gpu=True,
    ),
)
TOOLS = tuple(dict.fromkeys(side.tool for side in SIDES))


def list_cases(gpu: bool) -> list[PeerCase]:
    """Return the runs; without a GPU short ones, with and without checkpointing."""
    if not gpu:
        return [
            PeerCase(
                "full", sequence=64, batch_size=2, checkpointing="none", lr=1e-3, steps=6, warmup=2
            ),
            PeerCase(
                "full", sequence=128, batch_size=2, checkpointing="full", lr=1e-3, steps=6, warmup=2
            ),
            PeerCase(
                "lora", sequence=64, batch_size=2, checkpointing="none", lr=3e-3, steps=6, warmup=2
            ),
            PeerCase(
                "lora", sequence=128, batch_size=2, checkpointing="full", lr=3e-3, steps=6, warmup=2
            ),
            PeerCase(
                "qlora",
                sequence=64,
                batch_size=2,
                checkpointing="none",
                lr=3e-3,
                steps=6,
                warmup=2,
                preset=WIDE,
            ),
        ]
    # Full fine-tuning keeps layer inputs alone, as its states leave no room for more; beside frozen
    # weights there is.
    return [
        PeerCase("full", sequence=2048, batch_size=8, checkpointing="full", lr=1e-5),
        PeerCase("lora", sequence=4096, batch_size=2, checkpointing="none", lr=2e-4),
        PeerCase("qlora", sequence=4096, batch_size=2, checkpointing="none", lr=2e-4),
        PeerCase("full", sequence=8192, batch_size=2, checkpointing="full", lr=1e-5),
        PeerCase("lora", sequence=2048, batch_size=4, checkpointing="none", lr=2e-4),
        PeerCase("lora", sequence=8192, batch_size=1, checkpointing="none", lr=2e-4),
    ]


def choose_tolerances(case: PeerCase, dtype: str) -> tuple[float, float]:
    """Return the largest relative differences of loss and norm that equal work may show.

    They hold at every step. fp32: what another order of the same sums gives; beside NF4 more, since
    torchao and bitsandbytes round its levels and the scales of its blocks differently, which are
    other frozen weights. bf16: all has 8 bits.
    """
    if dtype == "bf16":
        return (1e-2, 5e-2)
    return (5e-3, 2e-2) if case.method == "qlora" else (1e-4, 1e-3)
