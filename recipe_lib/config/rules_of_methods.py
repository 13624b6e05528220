"""What preference, reward and distillation recipes do not go together with: rows of `recipe_lib.config.rules`."""

from typing import Any

from recipe_lib.config.idle import formats
from recipe_lib.config.recipe_facts import SAMPLES
from recipe_lib.config.registry import BUILT_IN
from recipe_lib.config.rule import Rule

_DPO, _REWARD, _DISTILL = "dpo_distributed", "reward_distributed", "distill_distributed"
_EXTERNAL = "model.implementation=transformers"
_FORMATS = ("data.source", "data.sources", "data.format", "validation.source", "validation.format")


def _unused_formats(cfg: Any, samples: str) -> set[str]:
    """The formats that a recipe for such samples has no use for; empty for another recipe."""
    others = formats(cfg) & {*BUILT_IN["data.format"][1]} - {*SAMPLES[samples]}
    return others if getattr(cfg, "samples", "answers") == samples else set()


def is_external(cfg: Any) -> bool:
    """Return whether the model is another library's."""
    return bool(cfg.model.implementation != "native")


# fmt: off
METHOD_RULES: tuple[Rule, ...] = (
    Rule(("data.format",), lambda cfg: "preference" in _unused_formats(cfg, "answers"),
         "this recipe has no use for pairs of a chosen and a rejected answer",
         "choose another format, or run dpo_distributed", ("data.format=preference",), reads=_FORMATS),
    Rule(("data.format",), lambda cfg: _unused_formats(cfg, "answers") & {"kto", "classification"},
         "this recipe has no use for the labels of such samples",
         "choose another format, or run dpo_distributed with dpo.loss=kto, or reward_distributed with "
         "reward.loss=classification", ("data.format=kto",), reads=_FORMATS),
    Rule(("dpo.loss", "data.format"), lambda cfg: _unused_formats(cfg, "pairs"),
         "the loss compares a chosen with a rejected answer, which samples of this format do not have",
         "set data.format to preference", ("data.format=alpaca",), recipe=_DPO, reads=_FORMATS),
    Rule(("dpo.loss", "data.format"), lambda cfg: _unused_formats(cfg, "labeled answers"),
         "the loss is one of answers that are wanted or not, which samples of this format do not say",
         "set data.format to kto, or to preference, whose pairs are taken apart",
         ("dpo.loss=kto", "data.format=alpaca"), recipe=_DPO, reads=_FORMATS),
    Rule(("reward.loss", "data.format"), lambda cfg: _unused_formats(cfg, "pairs"),
         "the loss compares a chosen with a rejected answer, which samples of this format do not have",
         "set data.format to preference, or reward.loss=classification", ("data.format=alpaca",), _REWARD, _FORMATS),
    Rule(("reward.loss", "data.format"), lambda cfg: _unused_formats(cfg, "classes"),
         "samples of this format have no class", "set data.format to classification, or reward.loss=pairwise",
         ("reward.loss=classification", "data.format=preference"), recipe=_REWARD, reads=_FORMATS),
    Rule(("model.implementation", "reward.loss"), is_external,
         "the score head is one of our own decoder", "set model.implementation=native", (_EXTERNAL,), recipe=_REWARD),
    Rule(("lora.target_modules", "reward.loss"), lambda cfg: "head" in cfg.lora.target_modules,
         "a score head is in the place of the output head, and is trained whole",
         "leave head out of lora.target_modules", ("lora.target_modules=[q, head]",), recipe=_REWARD),
    Rule(("distill.teacher", "distill.teacher_preset"),
         lambda cfg: len(cfg.distill.sources) != 1,
         "there is one teacher", "set one",
         ("distill.teacher_preset=llama3/8B",), recipe=_DISTILL,
         found=lambda cfg: f"found {' and '.join(cfg.distill.sources) or 'none of them'}, expected one; set "
         "distill.teacher to a checkpoint with the model's tokenizer, and no other (~KEY removes KEY)"),
    Rule(("distill.divergence", "parallel.pipeline"), lambda cfg: cfg.parallel.pipeline > 1,
         "the teacher would need stages and a schedule of its own",
         "set parallel.pipeline=1; a teacher that is too large is smaller with distill.quantize_teacher, and on the "
         "host with distill.stream_teacher",
         ("parallel.pipeline=2", "gradient_accumulation_steps=4"), recipe=_DISTILL),
    Rule(("distill.divergence", "model.implementation"), is_external,
         "teacher and model hand hidden states to each other's output heads, which those of model.implementation="
         "native do", "remove model.implementation", (_EXTERNAL,), recipe=_DISTILL),
    Rule(("dtype", "distill.quantize_teacher"),
         lambda cfg: cfg.distill.quantize_teacher != "none" and cfg.dtype == "fp64",
         "rounding the teacher's weights would undo what fp64 is for",
         "remove distill.quantize_teacher, or choose bf16 or fp32", ("dtype=fp64", "distill.quantize_teacher=nf4"),
         recipe=_DISTILL),)
# fmt: on
