"""The configs that `gpu_check.py plan` and `gpu_check.py times` plan and measure.

Each is a shipped config with overrides, as a command line of `tune plan` would have them.
`list_cases` gives those for a GPU, or a dry run's with the demo's model.
"""

import dataclasses
from typing import Any, Protocol

from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

TINY = "demo"
LLAMA_8B = "llama3/8B"
LLAMA_3B = "llama3_2/3B"
LLAMA_1B = "llama3_2/1B"
QWEN_MOE = "qwen3_moe/30B"
GPT_OSS = "gpt_oss/20B"
OLMOE = "olmoe/7B"
# Methods without a config of the demo: one of 8B is taken, with the demo's model.
LABELED = ("dpo", "kto", "reward")
UNREAD = ("~model.path", "model.preset=demo/0.5M", "tokenizer.path=unread")
IN_BACKWARD = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")
# Offloaded states are on the host only where a GPU computes; on a CPU the lever changes nothing.
STEPPING = (
    ("memory.optimizer_offload=true",),
    (*IN_BACKWARD, "memory.optimizer_offload=true"),
    (*IN_BACKWARD, "memory.optimizer_offload=true", "optimizer.state_bits=8"),
)
# Frozen layers need the first of these alone.
STREAMED = ("memory.stream_layers=true", *STEPPING[1])
# A sequence that all ranks share.
TILED = ("memory.mlp_tiles=4", "memory.activation_offload=true")
# A step of several micro-batches whose gradients are whole until the last one.
ZERO_1 = (
    "parallel.reduce_gradients=step",
    "parallel.reshard_after_forward=false",
    "gradient_accumulation_steps=4",
)
REDUCED_ONCE = (
    ("parallel.reduce_gradients=step", "gradient_accumulation_steps=4"),
    ZERO_1,
    (*ZERO_1, "parallel.accumulate_grad_in_fp32=true"),
)
STATES = (
    ("optimizer.state_bits=8",),
    ("optimizer.state_bits=4",),
    ("optimizer.master_weights=true",),
)


class Runnable(Protocol):
    """What can be planned and measured: one rank of a config, with the rows that it gets."""

    @property
    def rank(self) -> int:
        """Return which of the ranks runs."""

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""

    @property
    def rows(self) -> PlannedSequence:
        """Return the rows that it is planned for, and run with."""

    def load(self) -> tuple[type, Any]:
        """Return the recipe's class and a plannable config."""


@dataclasses.dataclass(frozen=True)
class PlanCase:
    """A shipped config, the settings that are changed in it, and the rank that runs."""

    method: str  # `full`, `lora`, `qlora`, `distill`, `qat` or one of LABELED
    model: str  # family and size, or `demo`
    ranks: int
    sequence: int  # tokens of a row
    checkpointing: str = "full"
    wrapping: str = "memory_efficient"
    optimizer: str = "fused"  # its kernels; AdamW's, or SGD's after `sgd `
    documents: int = 0  # in a packed row; 0: no packing
    batch_size: int = 1
    chunks: int = 8  # of the loss
    threshold: bool = False  # it is also run just below and above its smallest cap
    rank: int = 0  # the one that runs
    schedule: str = ""  # of a pipeline through all ranks, with twice as many micro-batches; or none
    levers: tuple[str, ...] = ()  # further overrides

    @property
    def config(self) -> str:
        """Return the name of its shipped config."""
        if self.model != TINY:
            return f"{self.model}_{self.method}"
        if self.method in LABELED:
            return f"llama3/8B_{self.method}"
        demo_methods = {"qat": "full", "qlora": "lora"}
        return f"demo/{demo_methods.get(self.method, self.method)}"

    @property
    def overrides(self) -> list[str]:
        """Return what it changes in the config."""
        optimizer_name, _, kernels = self.optimizer.rpartition(" ")
        words = [
            f"max_seq_len={self.sequence}",
            f"batch_size={self.batch_size}",
            f"gradient_accumulation_steps={2 * self.ranks if self.schedule else 1}",
            "device=auto",
            "dtype=bf16",
            f"memory.activation_checkpointing={self.checkpointing}",
            f"memory.loss_chunks={self.chunks}",
        ]
        # DDP wraps nothing in units.
        if "parallel.strategy=ddp" not in self.levers:
            words.append(f"parallel.fsdp_wrap_policy={self.wrapping}")
        # A lever of the optimizer brings a step of its own.
        if not any(lever.startswith("optimizer.") for lever in self.levers):
            words.append(f"optimizer.implementation={kernels}")
        words.append(f"data.packing={str(self.documents > 0).lower()}")
        if optimizer_name == "sgd":
            words += ["optimizer.name=sgd", "optimizer.momentum=0.9"]
        if self.schedule:
            words.append(f"parallel.pipeline={self.ranks}")
            words.append(f"parallel.pipeline_schedule={self.schedule}")
        if self.method == "qlora" and self.model == TINY:
            words.append("lora.quantize_base=nf4")
        if self.method == "qat":
            words += ["qat=int4", "qat_start_step=0"]
        if self.method in LABELED and self.model == TINY:
            words += UNREAD
        return [*words, *self.levers]

    @property
    def rows(self) -> PlannedSequence:
        """Return the rows that it is planned for, and run with."""
        return PlannedSequence(
            self.sequence, "as the case says", pack=float(max(1, self.documents))
        )

    def load(self) -> tuple[type, Any]:
        """Return the recipe's class, and the config with nothing but the model's shape.

        Imports the recipe's module.
        """
        recipe = find_config_recipe(self.config)
        cfg, _ = make_plannable(load_config(self.config, self.overrides, recipe.schema()))
        return find_recipe_class(recipe), cfg


def describe(case: PlanCase) -> str:
    """Describe a case in a few words."""
    packed = f", {case.documents} documents packed" if case.documents else ""
    ranks = f"{case.rank} of {case.ranks} {case.schedule}".strip()
    return (
        f"{case.method} {case.model}, {ranks}, {case.batch_size} x {case.sequence}{packed}, "
        f"{case.checkpointing}, {case.wrapping}, {', '.join((case.optimizer, *case.levers))}"
    )


def list_cases(gpu: bool) -> list[PlanCase]:
    """Return the configs, the most telling first, in case time runs out."""
    if not gpu:
        return _list_dry_cases()
    return [
        *_list_telling_cases(),
        *_list_method_cases(),
        *_list_lever_cases(),
        *_list_mixture_cases(),
        *_list_compiled_cases(),
        *_list_pipeline_cases(),
        *_list_full_cases(),
        *_list_adapter_cases(),
    ]


# The lists below are tables. Positional: method, model, ranks, sequence, checkpointing, wrapping,
# optimizer.


def _list_dry_cases() -> list[PlanCase]:
    """Return configs of the demo's model: of each method, and of levers of the optimizer."""
    return [
        PlanCase("full", model=TINY, ranks=4, sequence=64),
        PlanCase(
            "full",
            model=TINY,
            ranks=1,
            sequence=64,
            checkpointing="selective",
            wrapping="layers",
            optimizer="foreach",
        ),
        PlanCase("lora", model=TINY, ranks=2, sequence=64, checkpointing="none", documents=3),
        PlanCase("qlora", model=TINY, ranks=1, sequence=64),
        PlanCase("full", model=TINY, ranks=4, sequence=64, levers=("parallel.context=2",)),
        PlanCase("full", model=TINY, ranks=2, sequence=64, rank=1, schedule="1f1b"),
        PlanCase("lora", model=TINY, ranks=2, sequence=64, checkpointing="none", schedule="gpipe"),
        *(
            PlanCase("full", model=TINY, ranks=2, sequence=64, levers=levers)
            for levers in (*STEPPING, *STATES, *REDUCED_ONCE)
        ),
        *(
            PlanCase(method, model=TINY, ranks=2, sequence=64)
            for method in ("distill", "qat", *LABELED)
        ),
    ]


def list_recorded_cases() -> list[PlanCase]:
    """Return the cases whose allocator's events are kept as fixtures.

    Small models with tensors of all sizes.
    """
    return [
        PlanCase(
            "full", model=TINY, ranks=4, sequence=2048, checkpointing="none", batch_size=2, chunks=1
        ),
        PlanCase(
            "full",
            model=TINY,
            ranks=1,
            sequence=1024,
            checkpointing="full",
            optimizer="foreach",
            documents=5,
        ),
        PlanCase(
            "qlora",
            model=TINY,
            ranks=2,
            sequence=2048,
            checkpointing="selective",
            wrapping="layers",
        ),
    ]


def _list_telling_cases() -> list[PlanCase]:
    """Return one config of each kind."""
    return [
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=512, wrapping="layers", threshold=True),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=512, threshold=True),
        PlanCase("qlora", model=LLAMA_8B, ranks=1, sequence=2048, threshold=True),
        PlanCase(
            "full",
            model=LLAMA_3B,
            ranks=1,
            sequence=2048,
            checkpointing="none",
            optimizer="foreach",
        ),
        PlanCase("lora", model=LLAMA_8B, ranks=1, sequence=2048, checkpointing="none"),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=1,
            sequence=2048,
            checkpointing="selective",
            threshold=True,
        ),
        PlanCase("full", model=LLAMA_8B, ranks=8, sequence=8192, documents=12),
        PlanCase(
            "lora",
            model=LLAMA_3B,
            ranks=2,
            sequence=8192,
            checkpointing="selective",
            threshold=True,
        ),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=4,
            sequence=8192,
            checkpointing="none",
            wrapping="layers",
            documents=16,
        ),
        PlanCase(
            "qlora", model=LLAMA_1B, ranks=2, sequence=512, checkpointing="none", wrapping="layers"
        ),
        PlanCase(
            "full",
            model=LLAMA_8B,
            ranks=2,
            sequence=2048,
            checkpointing="selective",
            optimizer="single",
        ),
        PlanCase("full", model=LLAMA_3B, ranks=8, sequence=512, optimizer="sgd foreach"),
    ]


def _list_method_cases() -> list[PlanCase]:
    """Return configs of the other methods.

    A teacher in 4 bits, in host memory, whole and sharded; rounded weights; pairs, labels and score
    heads.
    """
    teacher = ("distill.quantize_teacher=none", "distill.stream_teacher=true")
    return [
        PlanCase("distill", model=LLAMA_1B, ranks=1, sequence=2048),
        PlanCase("distill", model=LLAMA_1B, ranks=1, sequence=2048, levers=teacher),
        PlanCase(
            "distill",
            model=LLAMA_1B,
            ranks=4,
            sequence=2048,
            levers=("distill.divergence=jensen_shannon", "distill.trainable=adapters"),
        ),
        PlanCase("qat", model=LLAMA_1B, ranks=1, sequence=2048),
        PlanCase(
            "qat",
            model=LLAMA_1B,
            ranks=4,
            sequence=2048,
            checkpointing="selective",
            levers=("qat=fp8",),
        ),
        *(PlanCase(method, model="llama3/8B", ranks=1, sequence=2048) for method in LABELED),
    ]


def _list_lever_cases() -> list[PlanCase]:
    """Return configs whose levers free sooner, round, recompute or keep on the host."""
    return [
        *(
            PlanCase("full", model=LLAMA_8B, ranks=1, sequence=2048, levers=levers)
            for levers in STEPPING[1:]
        ),
        PlanCase(
            "full",
            model=LLAMA_8B,
            ranks=2,
            sequence=8192,
            levers=("memory.optimizer_offload=true",),
        ),
        *(
            PlanCase("full", model=LLAMA_1B, ranks=1, sequence=2048, levers=levers)
            for levers in (*STEPPING, *STATES)
        ),
        *(
            PlanCase("full", model=LLAMA_1B, ranks=4, sequence=2048, levers=levers)
            for levers in REDUCED_ONCE
        ),
        PlanCase("full", model=LLAMA_8B, ranks=8, sequence=2048, levers=ZERO_1),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=1,
            sequence=8192,
            checkpointing="none",
            levers=("memory.activation_offload=true",),
        ),
        PlanCase(
            "full",
            model=LLAMA_8B,
            ranks=2,
            sequence=8192,
            levers=("memory.activation_offload=true", "memory.optimizer_offload=true"),
        ),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=1,
            sequence=8192,
            checkpointing="budget",
            levers=("memory.activation_budget_gib=4",),
        ),
        PlanCase("qlora", model=LLAMA_8B, ranks=1, sequence=32768, levers=("memory.mlp_tiles=8",)),
        *(
            PlanCase("full", model=LLAMA_8B, ranks=1, sequence=2048, levers=(*STREAMED, *levers))
            for levers in ((), STATES[1])
        ),
        *(
            PlanCase(kind, model=LLAMA_8B, ranks=1, sequence=2048, levers=STREAMED[:1])
            for kind in ("lora", "qlora")
        ),
        PlanCase(
            "full",
            model=LLAMA_8B,
            ranks=8,
            sequence=262144,
            chunks=32,
            levers=("parallel.context=8", *TILED),
        ),
        PlanCase(
            "lora",
            model=LLAMA_8B,
            ranks=4,
            sequence=65536,
            levers=("parallel.context=4", "memory.mlp_tiles=2"),
        ),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=4,
            sequence=32768,
            checkpointing="selective",
            documents=5,
            levers=("parallel.context=4",),
        ),
        PlanCase("full", model=LLAMA_1B, ranks=1, sequence=2048, levers=("matmul_dtype=int8",)),
        PlanCase("full", model=LLAMA_1B, ranks=1, sequence=2048, levers=("matmul_dtype=fp8",)),
        PlanCase("lora", model=LLAMA_1B, ranks=2, sequence=2048, levers=("parallel.strategy=ddp",)),
    ]


def _list_mixture_cases() -> list[PlanCase]:
    """Return configs of mixtures of experts.

    Experts in bf16 and in NF4, on the card and on the host, as FSDP units of their own, and
    attention with sinks.
    """
    offloaded = ("memory.stream_layers=experts",)
    return [
        PlanCase("qlora", model=QWEN_MOE, ranks=1, sequence=2048),
        PlanCase("qlora", model=QWEN_MOE, ranks=1, sequence=2048, levers=offloaded),
        PlanCase(
            "qlora",
            model=QWEN_MOE,
            ranks=1,
            sequence=2048,
            levers=("lora.target_modules=[q,k,v,o,experts]",),
        ),
        PlanCase("qlora", model=GPT_OSS, ranks=1, sequence=2048),
        PlanCase(
            "qlora",
            model=GPT_OSS,
            ranks=1,
            sequence=8192,
            checkpointing="selective",
            levers=offloaded,
        ),
        PlanCase("lora", model=OLMOE, ranks=1, sequence=2048, checkpointing="none"),
        PlanCase("full", model=OLMOE, ranks=4, sequence=2048),
        PlanCase("full", model=OLMOE, ranks=4, sequence=8192, levers=("memory.mlp_tiles=8",)),
        PlanCase("full", model=QWEN_MOE, ranks=8, sequence=2048),
        PlanCase(
            "full", model=GPT_OSS, ranks=8, sequence=2048, checkpointing="selective", documents=6
        ),
    ]


def _list_compiled_cases() -> list[PlanCase]:
    """Return configs with compiled layers.

    A plan runs the module that inductor writes for them, whose code is for a CPU there.
    """
    compiled = ("compile=true",)
    return [
        PlanCase(
            "full", model=LLAMA_1B, ranks=1, sequence=2048, checkpointing="none", levers=compiled
        ),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=1,
            sequence=2048,
            checkpointing="selective",
            levers=compiled,
        ),
        PlanCase(
            "full", model=LLAMA_1B, ranks=1, sequence=2048, checkpointing="full", levers=compiled
        ),
        PlanCase(
            "full", model=LLAMA_3B, ranks=4, sequence=2048, checkpointing="none", levers=compiled
        ),
        PlanCase(
            "lora", model=LLAMA_8B, ranks=1, sequence=2048, checkpointing="none", levers=compiled
        ),
        PlanCase("qlora", model=LLAMA_8B, ranks=1, sequence=2048, levers=compiled),
    ]


def _list_pipeline_cases() -> list[PlanCase]:
    """Return stages of pipelines, each run by itself."""
    return [
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, rank=0, schedule="1f1b"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, rank=3, schedule="1f1b"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, rank=0, schedule="zbv"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, rank=3, schedule="zbv"),
        *(
            PlanCase(
                "full",
                model=LLAMA_1B,
                ranks=4,
                sequence=2048,
                checkpointing="none",
                rank=rank,
                schedule="zbv",
            )
            for rank in range(4)
        ),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=2,
            sequence=2048,
            checkpointing="selective",
            rank=1,
            schedule="interleaved_zero_bubble",
        ),
        PlanCase("qlora", model=LLAMA_8B, ranks=2, sequence=2048, rank=1, schedule="1f1b"),
    ]


def _list_full_cases() -> list[PlanCase]:
    """Return more configs of full fine-tuning, in many settings."""
    return [
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, wrapping="layers"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=8192, wrapping="layers"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=8192),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=8192, checkpointing="selective"),
        PlanCase("full", model=LLAMA_8B, ranks=4, sequence=2048, checkpointing="none", chunks=1),
        PlanCase("full", model=LLAMA_8B, ranks=8, sequence=2048, checkpointing="none"),
        PlanCase(
            "full",
            model=LLAMA_8B,
            ranks=8,
            sequence=512,
            checkpointing="none",
            wrapping="layers",
            optimizer="single",
        ),
        PlanCase("full", model=LLAMA_8B, ranks=2, sequence=8192, documents=8),
        PlanCase("full", model=LLAMA_8B, ranks=2, sequence=512, optimizer="foreach"),
        PlanCase("full", model=LLAMA_8B, ranks=1, sequence=512),
        PlanCase("full", model=LLAMA_3B, ranks=1, sequence=512, checkpointing="none"),
        PlanCase("full", model=LLAMA_3B, ranks=1, sequence=2048, checkpointing="selective"),
        PlanCase("full", model=LLAMA_3B, ranks=1, sequence=8192),
        PlanCase("full", model=LLAMA_3B, ranks=2, sequence=2048, wrapping="layers"),
        PlanCase(
            "full", model=LLAMA_3B, ranks=2, sequence=8192, checkpointing="selective", documents=10
        ),
        PlanCase("full", model=LLAMA_3B, ranks=4, sequence=8192, checkpointing="none"),
        PlanCase("full", model=LLAMA_1B, ranks=1, sequence=512, checkpointing="none"),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=1,
            sequence=2048,
            checkpointing="none",
            optimizer="foreach",
            batch_size=2,
        ),
        PlanCase("full", model=LLAMA_1B, ranks=1, sequence=8192, optimizer="single"),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=2,
            sequence=2048,
            checkpointing="selective",
            documents=4,
            batch_size=2,
        ),
        PlanCase("full", model=LLAMA_1B, ranks=8, sequence=512, chunks=1),
        PlanCase(
            "full",
            model=LLAMA_1B,
            ranks=2,
            sequence=2048,
            checkpointing="none",
            optimizer="sgd single",
        ),
    ]


def _list_adapter_cases() -> list[PlanCase]:
    """Return more configs of LoRA and QLoRA, in many settings."""
    return [
        PlanCase("lora", model=LLAMA_8B, ranks=1, sequence=8192),
        PlanCase("lora", model=LLAMA_8B, ranks=2, sequence=8192, checkpointing="selective"),
        PlanCase("lora", model=LLAMA_8B, ranks=4, sequence=2048, wrapping="layers"),
        PlanCase("lora", model=LLAMA_8B, ranks=1, sequence=2048, documents=4),
        PlanCase(
            "lora", model=LLAMA_1B, ranks=1, sequence=512, checkpointing="none", optimizer="foreach"
        ),
        PlanCase("lora", model=LLAMA_1B, ranks=8, sequence=2048),
        PlanCase("qlora", model=LLAMA_8B, ranks=1, sequence=512),
        PlanCase("qlora", model=LLAMA_8B, ranks=1, sequence=8192),
        PlanCase(
            "qlora", model=LLAMA_8B, ranks=1, sequence=8192, checkpointing="selective", documents=8
        ),
        PlanCase("qlora", model=LLAMA_8B, ranks=2, sequence=2048),
        PlanCase("qlora", model=LLAMA_8B, ranks=4, sequence=8192),
        PlanCase("qlora", model=LLAMA_3B, ranks=1, sequence=2048, checkpointing="none"),
        PlanCase(
            "qlora", model=LLAMA_1B, ranks=1, sequence=512, checkpointing="none", batch_size=2
        ),
    ]
