"""List the configs that `gpu_check.py plan` and `gpu_check.py times` plan and then measure.

A case is a shipped config with overrides `key=value`, as `tune plan` takes them. `list_cases` gives
the cases of a GPU, or those of a dry run on a CPU with the demo's tiny model. A lever is a config
key that trades memory for time or precision. A row is one sequence; packed, it holds several
documents.
"""

import dataclasses
from typing import Any, Protocol

from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable

# Shipped configs by family and size; PlanCase.config adds the method.
TINY = "demo"
LLAMA_8B = "llama3/8B"
LLAMA_3B = "llama3_2/3B"
LLAMA_1B = "llama3_2/1B"
QWEN_MOE = "qwen3_moe/30B"
GPT_OSS = "gpt_oss/20B"
OLMOE = "olmoe/7B"
# Methods without a config of the demo: the 8B config is taken, with UNREAD for the demo's model.
LABELED = ("dpo", "kto", "reward")
# `~key` removes a key. Planned data is not tokenized, so no tokenizer is opened.
UNREAD = ("~model.path", "model.preset=demo/0.5M", "tokenizer.path=unread")
# A gradient is freed before the others exist, so there is no norm of all to clip by.
IN_BACKWARD = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")
# Three ways to run the optimizer, each a tuple of overrides. Offloaded states are on the host only
# where a GPU computes; on a CPU that lever changes nothing.
STEPPING = (
    ("memory.optimizer_offload=true",),
    (*IN_BACKWARD, "memory.optimizer_offload=true"),
    (*IN_BACKWARD, "memory.optimizer_offload=true", "optimizer.state_bits=8"),
)
# Layers in host memory, each on the GPU while it runs. Frozen layers need the first of these alone.
STREAMED = ("memory.stream_layers=true", *STEPPING[1])
# For long sequences that context-parallel ranks share.
TILED = ("memory.mlp_tiles=4", "memory.activation_offload=true")
# Every rank has the unsharded gradients of several micro-batches; they are reduced once a step.
ZERO_1 = (
    "parallel.reduce_gradients=step",
    "parallel.reshard_after_forward=false",
    "gradient_accumulation_steps=4",
)
# Gradients that are reduced once a step: with parameters sharded, whole, and summed in fp32.
REDUCED_ONCE = (
    ("parallel.reduce_gradients=step", "gradient_accumulation_steps=4"),
    ZERO_1,
    (*ZERO_1, "parallel.accumulate_grad_in_fp32=true"),
)
# The optimizer's states in other precisions.
STATES = (
    ("optimizer.state_bits=8",),
    ("optimizer.state_bits=4",),
    ("optimizer.master_weights=true",),
)


class Runnable(Protocol):
    """Describe what `gpu_plan.measure` needs: a config, its rank that runs, and its sequences."""

    @property
    def rank(self) -> int:
        """Return which of the ranks runs, from 0."""

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""

    @property
    def rows(self) -> PlannedSequence:
        """Return the length and packing of the sequences, planned and measured alike."""

    def load(self) -> tuple[type, Any]:
        """Return (the recipe's class, a config that can be set up without any files)."""


@dataclasses.dataclass(frozen=True)
class PlanCase:
    """Hold a shipped config, the settings that are changed in it, and the rank that runs."""

    method: str  # `full`, `lora`, `qlora`, `distill`, `qat` or one of LABELED
    model: str  # one of the constants above, such as `llama3/8B`
    ranks: int
    sequence: int  # tokens of a row
    checkpointing: str = "full"  # memory.activation_checkpointing
    wrapping: str = "memory_efficient"  # parallel.fsdp_wrap_policy: which modules are FSDP units
    # AdamW's `optimizer.implementation` (`fused`, `foreach`, `single`), or SGD's after `sgd `.
    optimizer: str = "fused"
    documents: int = 0  # in a packed row; 0: no packing
    batch_size: int = 1  # rows of a micro-batch
    chunks: int = 8  # memory.loss_chunks: parts in which the logits are computed
    threshold: bool = False  # it also runs just below and above the least memory it is planned for
    rank: int = 0  # the one that runs
    # Of a pipeline through all ranks, with two micro-batches a rank; empty: no pipeline.
    schedule: str = ""
    levers: tuple[str, ...] = ()  # further overrides

    @property
    def config(self) -> str:
        """Return the name of its shipped config, as `tune --config` takes it."""
        if self.model != TINY:
            return f"{self.model}_{self.method}"
        if self.method in LABELED:
            return f"llama3/8B_{self.method}"
        # Both differ from the demo's config in overrides alone.
        demo_methods = {"qat": "full", "qlora": "lora"}
        return f"demo/{demo_methods.get(self.method, self.method)}"

    @property
    def overrides(self) -> list[str]:
        """Return what it changes in the config, as `key=value`."""
        optimizer_name, _, kernels = self.optimizer.rpartition(" ")
        overrides = [
            f"max_seq_len={self.sequence}",
            f"batch_size={self.batch_size}",
            f"gradient_accumulation_steps={2 * self.ranks if self.schedule else 1}",
            "device=auto",
            "dtype=bf16",
            f"memory.activation_checkpointing={self.checkpointing}",
            f"memory.loss_chunks={self.chunks}",
        ]
        # DDP has no FSDP units.
        if "parallel.strategy=ddp" not in self.levers:
            overrides.append(f"parallel.fsdp_wrap_policy={self.wrapping}")
        # 8-bit and 4-bit states and master weights have a step of their own, without a choice.
        if not any(lever.startswith("optimizer.") for lever in self.levers):
            overrides.append(f"optimizer.implementation={kernels}")
        overrides.append(f"data.packing={str(self.documents > 0).lower()}")
        if optimizer_name == "sgd":
            overrides += ["optimizer.name=sgd", "optimizer.momentum=0.9"]
        if self.schedule:
            overrides.append(f"parallel.pipeline={self.ranks}")
            overrides.append(f"parallel.pipeline_schedule={self.schedule}")
        if self.method == "qlora" and self.model == TINY:
            overrides.append("lora.quantize_base=nf4")
        if self.method == "qat":
            overrides += ["qat=int4", "qat_start_step=0"]
        if self.method in LABELED and self.model == TINY:
            overrides += UNREAD
        return [*overrides, *self.levers]

    @property
    def rows(self) -> PlannedSequence:
        """Return the length and packing of the sequences, planned and measured alike."""
        return PlannedSequence(
            self.sequence, "as the case says", pack=float(max(1, self.documents))
        )

    def load(self) -> tuple[type, Any]:
        """Return (the recipe's class, the config with a model of random weights).

        Imports the recipe's module. Raises ConfigError if an override is refused.
        """
        recipe = find_config_recipe(self.config)
        cfg, _ = make_plannable(load_config(self.config, self.overrides, recipe.load_schema()))
        return find_recipe_class(recipe), cfg


def describe(case: PlanCase) -> str:
    """Describe a case in a few words, for logs and the report."""
    packed = f", {case.documents} documents packed" if case.documents else ""
    ranks = f"{case.rank} of {case.ranks} {case.schedule}".strip()
    return (
        f"{case.method} {case.model}, {ranks}, {case.batch_size} x {case.sequence}{packed}, "
        f"{case.checkpointing}, {case.wrapping}, {', '.join((case.optimizer, *case.levers))}"
    )


def list_cases(gpu: bool) -> list[PlanCase]:
    """Return the cases, the most telling first, in case time runs out.

    gpu: False for the dry run's.
    """
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


# The lists below are tables: each case names what differs from PlanCase's defaults.


def _list_dry_cases() -> list[PlanCase]:
    """Return cases of the demo's model: each method, and levers of the optimizer."""
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
    """Return the cases whose allocator's events are kept as fixtures of the tests.

    The demo's model, so that the files stay small; the lengths give tensors of all sizes.
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
    """Return one case of each kind; `gpu_plan.TELLING_CASES` is their number."""
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
    """Return cases of distillation, quantization-aware training and labeled data.

    The teacher is in 4 bits, streamed from host memory, or sharded.
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
    """Return cases whose levers free memory sooner, round, recompute or keep tensors on the host.

    1B where a lever is tried in all its values, 8B where its use is to fit at all.
    """
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
    """Return cases of mixtures of experts.

    Experts in bf16 and in NF4, on the GPU and in host memory, and as FSDP units of their own.
    gpt_oss has attention with sinks.
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
    """Return cases with compiled layers.

    A plan runs the module that inductor writes for them on a machine without a GPU, so with kernels
    for a CPU: what differs from a GPU's is the point of these cases.
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
    """Return ranks of pipelines, each run without the others: nothing is sent."""
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
    """Return more cases of full fine-tuning: sizes, lengths, ranks and settings crossed."""
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
    """Return more cases of LoRA and QLoRA: sizes, lengths, ranks and settings crossed."""
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
