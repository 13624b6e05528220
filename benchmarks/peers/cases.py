"""List the runs that are compared, the sides that make them, and each side's packages.

`gpu_peers.py` runs each of `list_cases` by every one of `SIDES`; `report.py` judges the losses by
`choose_tolerances`. A side is a tool with its settings: a column of the report. Rows are sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.planted.torchtune import Torchtune
from benchmarks.peers.planted.trl import Trl

# A small model whose every matrix is whole groups of 256 blocks of 64 numbers: torchao's NF4 takes
# no other.
WIDE = "wide.json"
# Of the adapters, which are on all linears of the layers.
RANK = 16
ALPHA = 32
OURS = "ours"
# Tool -> folder of its environment.
ENVIRONMENTS = {"transformers": "trl", "trl": "trl", "torchtune": "torchtune", "unsloth": "unsloth"}
# Folder of an environment -> groups of packages, installed in order. The first are those of the
# planted faults, another benchmark that shares the environments.
PACKAGES: dict[str, Sequence[Sequence[str]]] = {
    "trl": (*Trl.packages, ("bitsandbytes", "liger-kernel")),
    "torchtune": Torchtune.packages,
    "unsloth": (("unsloth",),),
}


@dataclass(frozen=True)
class PeerCase:
    """Hold a run in no tool's words.

    Every side trains all tokens of the same rows, in the same order, from the same weights.
    """

    method: str  # `full`, `lora` or `qlora`
    sequence: int  # tokens of a row
    batch_size: int  # rows of a step
    checkpointing: str  # `none`, or `full` (each layer's input is kept)
    lr: float  # constant
    steps: int = 20
    warmup: int = 8  # first steps, whose time is not counted
    # File in this folder: shape of a model of the case's own. Empty: the model of all cases.
    preset: str = ""

    @property
    def name(self) -> str:
        """Return the case's name, such as `full-2048`."""
        return f"{self.method}-{self.sequence}"

    @property
    def own_model(self) -> str | None:
        """Return the path of `preset`; None if it is empty."""
        return str(Path(__file__).parent / self.preset) if self.preset else None


@dataclass(frozen=True)
class Side:
    """Hold a tool with its settings, one column of the report."""

    name: str  # of the column
    tool: str  # key of ENVIRONMENTS, or OURS
    told: str  # the documented way that it is run in, in words for the report
    compiled: bool = False  # by torch.compile
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
        """Return the packages whose versions the report shows."""
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
        """Return the modules that its environment must be able to import for a case, in order."""
        if self.tool == OURS:
            return ("recipe_lib",)
        if self.tool == "torchtune":
            return ("torchtune",)
        # First, since it patches the others as they are imported.
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


# Parts of the sides' descriptions.
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
    """Return the runs; without a GPU short ones of a tiny model."""
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
    # Full fine-tuning keeps layer inputs alone, as its optimizer states leave no room for more.
    # Beside frozen weights there is room.
    return [
        PeerCase("full", sequence=2048, batch_size=8, checkpointing="full", lr=1e-5),
        PeerCase("lora", sequence=4096, batch_size=2, checkpointing="none", lr=2e-4),
        PeerCase("qlora", sequence=4096, batch_size=2, checkpointing="none", lr=2e-4),
        PeerCase("full", sequence=8192, batch_size=2, checkpointing="full", lr=1e-5),
        PeerCase("lora", sequence=2048, batch_size=4, checkpointing="none", lr=2e-4),
        PeerCase("lora", sequence=8192, batch_size=1, checkpointing="none", lr=2e-4),
    ]


def choose_tolerances(case: PeerCase, dtype: str) -> tuple[float, float]:
    """Return the largest relative differences of (loss, gradient norm) at a step of equal work.

    dtype: `bf16` or `fp32`.
    """
    if dtype == "bf16":  # numbers of 8 bits
        return (1e-2, 5e-2)
    # fp32 sums in another order. With NF4 the frozen weights differ too: torchao and bitsandbytes
    # round its levels and the scales of its blocks differently.
    return (5e-3, 2e-2) if case.method == "qlora" else (1e-4, 1e-3)
