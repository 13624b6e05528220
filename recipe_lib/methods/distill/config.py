"""Define the config of `distill_distributed`, which trains a model to follow a teacher.

`DistillConfig` is its section `distill`, `_RULES` are the combinations of keys that are refused,
and `DistillFinetuneConfig` is the whole, with the facts that the library asks of every recipe's
config class (`config.schema.RecipeFacts`). A field is declared by `key(default, help, limits...)`;
users see the text `help`. Imports no torch, so that configs are checked without it.
"""

from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.compatibility.rule import EXTERNAL_MODEL, TWO_STAGES, Rule, is_external_model
from recipe_lib.config.flat_schema import key
from recipe_lib.config.schema import LoraFinetuneConfig


@dataclass
class DistillConfig:
    """Distillation: a model also learns a teacher's next-token probabilities (arXiv 1503.02531)."""

    teacher: str | None = key(
        None,
        "The teacher: folder or hub id of a model with the same tokenizer, frozen, next to the"
        " model.",
        path=True,
        known_as="TRL GKDTrainer teacher_model",
    )
    teacher_preset: str | None = key(
        None,
        "In place of it an architecture with random weights: for plans.",
        known_as="none has it: others plan no teacher",
    )
    quantize_teacher: str = key(
        "none",
        "Store the linears of the teacher's layers in 4 bits (`nf4`, arXiv 2305.14314) or 8.",
        choices=("none", "nf4", "int8"),
        known_as="none has it: HF quantizes a teacher where it is loaded",
    )
    stream_teacher: bool = key(
        False,
        "Keep the teacher's layers in pinned host memory, each on the device while it runs.",
        needs=("device != cpu", "memory.cpu_offload = false"),
        known_as="none has it: accelerate's cpu_offload is nearest",
    )
    divergence: str = key(
        "forward_kl",
        "Of teacher P and model Q: `forward_kl`: KL(P || Q); `reverse_kl`: KL(Q || P);"
        " `jensen_shannon`: beta KL(P || M) + (1 - beta) KL(Q || M), with M = beta P + (1 - beta) Q"
        " (GKD, arXiv 2306.13649).",
        choices=("forward_kl", "reverse_kl", "jensen_shannon"),
        known_as="TRL GKDConfig.beta, 0 and 1 for the first two",
    )
    beta: float = key(
        0.5,
        "The teacher's share of the mixture M.",
        above=0,
        below=1,
        needs="distill.divergence = jensen_shannon",
        known_as="TRL GKDConfig.beta",
    )
    temperature: float = key(
        1.0,
        "What both models' logits are divided by; the divergence is multiplied by its square.",
        above=0,
        most=1000,
        known_as="Axolotl kd_temperature; torchtune has none",
    )
    weight: float = key(
        0.5,
        "Share of the divergence in the loss; the rest is cross-entropy of the labels.",
        minimum=0,
        maximum=1,
        known_as="Axolotl kd_alpha; torchtune kd_ratio",
    )
    trainable: str = key(
        "all", "`all`: every parameter; `adapters`: those alone.", choices=("all", "adapters"),
        known_as="none has it: others have a recipe, or one key, for each way to train",
    )  # fmt: skip

    @property
    def sources(self) -> list[str]:
        return [f"distill.{name}" for name in ("teacher", "teacher_preset") if getattr(self, name)]


def _find_teacher_fault(cfg: Any) -> str | None:
    """Return the error's text for a config with no teacher or two; None: it has one."""
    sources = cfg.distill.sources
    if len(sources) == 1:
        return None
    return (
        f"found {' and '.join(sources) or 'none of them'}, expected one; set distill.teacher to a"
        " checkpoint with the model's tokenizer, and no other (~KEY removes KEY)"
    )


# The cost of a lever (a key that trades precision for memory), as a plan that proposes it says it.
_ROUNDED = "the teacher's weights are rounded"
# Combinations that are refused. `applies` returns True, or the error's text, for a config with one;
# `example` are overrides with which the tests try the rule.
_RULES = (
    Rule(
        keys=("distill.teacher", "distill.teacher_preset"),
        applies=_find_teacher_fault,
        reason="there is one teacher",
        remedy="set one",
        example=("distill.teacher_preset=llama3/8B",),
        recipe="distill_distributed",
    ),
    Rule(
        keys=("distill.divergence", "parallel.pipeline"),
        applies=lambda cfg: cfg.parallel.pipeline > 1,
        reason="the teacher would need stages and a schedule of its own",
        remedy="set parallel.pipeline=1; a teacher that is too large is smaller with"
        " distill.quantize_teacher, and on the host with distill.stream_teacher",
        example=TWO_STAGES,
        recipe="distill_distributed",
    ),
    Rule(
        keys=("distill.divergence", "model.implementation"),
        applies=is_external_model,
        reason="teacher and model hand hidden states to each other's output heads, which those of"
        " model.implementation=native do",
        remedy="remove model.implementation",
        example=(EXTERNAL_MODEL,),
        recipe="distill_distributed",
    ),
    Rule(
        keys=("dtype", "distill.quantize_teacher"),
        applies=lambda cfg: cfg.distill.quantize_teacher != "none" and cfg.dtype == "fp64",
        reason="rounding the teacher's weights would undo what fp64 is for",
        remedy="remove distill.quantize_teacher, or choose bf16 or fp32",
        example=("dtype=fp64", "distill.quantize_teacher=nf4"),
        recipe="distill_distributed",
    ),
)


@dataclass
class DistillFinetuneConfig(LoraFinetuneConfig):
    """Config of `distill_distributed`."""

    recipe: str = key(
        "distill_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    distill: DistillConfig = field(default_factory=DistillConfig)
    # The key and the value with which adapters are trained in place of every parameter.
    adapters_instead = {"distill.trainable": "adapters"}
    # The key of a further model's checkpoint -> the key of a preset that a plan takes in its place.
    other_models = {"distill.teacher": "distill.teacher_preset"}
    # Keys by which the teacher takes less memory: their values, that of least memory first, and the
    # cost of each.
    other_model_levers = {
        "distill.quantize_teacher": {
            "nf4": _ROUNDED,
            "int8": _ROUNDED,
            "none": "the teacher's weights are not rounded",
        },
        "distill.stream_teacher": {True: "the teacher's layers are in host memory"},
    }
    # Keys of this section that change the memory of a run.
    memory_keys = (
        "distill.quantize_teacher",
        "distill.stream_teacher",
        "distill.divergence",
        "distill.trainable",
    )
    rules = _RULES
    # What other tools call these keys, parted by spaces, for the hint of an error.
    key_aliases = {
        "distill": "kd kd_config distillation",
        "distill.teacher": "teacher_model teacher_model_name_or_path teacher_model_path",
        "distill.temperature": "kd_temperature",
        "distill.weight": "kd_alpha kd_ratio",
    }
    # Key that does not exist here -> what there is in its place, which ends the error's line. Other
    # tools store a teacher's logits on disk.
    key_answers = {
        "distill.from_disk": "the teacher runs with the model: distill.teacher names it;"
        " distill.quantize_teacher and distill.stream_teacher make it fit"
    }
    runs_reference = True  # a step also evaluates micro-batches by a frozen model, the teacher
    # Names of the metrics of a validation, means over label tokens.
    validation_numbers = ("validation_loss", "validation_divergence", "validation_cross_entropy")

    @property
    def own_loss(self) -> str | None:
        return f"the loss is distillation, distill.divergence {self.distill.divergence}"
