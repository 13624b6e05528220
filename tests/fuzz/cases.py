"""Random combinations of settings that a run may have, each a function of its seed alone.

What a combination consists of is in two parts: `numbers`, which change what is computed (the run of
one process that it is compared with has them too), and `levers`, which must not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig, parse_arguments
from recipe_lib.errors import ConfigError
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.methods.reward.config import RewardFinetuneConfig
from tests.recipes.runs import DISTILL, DPO, FULL, LORA, REWARD, ROOT

STEPS = 3
SLOTS = 8  # rows, pairs or packs of a step, over all ranks
LEAST = 3  # levers of a combination
LENGTH = 64  # tokens of the longest row
MIXTURES = ("qwen3moe", "mixtral")  # of experts, which adapters do not change here
MODELS = ("llama", "llama_tied", "qwen3", "qwen3_tied", "gemma2", "gemma3", *MIXTURES)
TEACHER = (  # tied as well, and no model that is trained: from itself it would learn nothing
    "qwen3_teacher"
)
CONFIGS = {
    FULL: FullFinetuneConfig,
    LORA: LoraFinetuneConfig,
    DPO: DpoFinetuneConfig,
    REWARD: RewardFinetuneConfig,
    DISTILL: DistillFinetuneConfig,
}
# Of these, which rows they take by default, and how much of what is drawn is of them.
_RECIPES = [FULL] * 4 + [LORA] * 2 + [DPO] * 3 + [REWARD] * 2 + [DISTILL] * 2
_PAIRS, _LABELED, _CLASSES = (
    f"data.format={name}" for name in ("preference", "kto", "classification")
)
_ROWS = {_PAIRS: "pairs", _LABELED: "labeled", _CLASSES: "classes"}
KEEP_BEST = "checkpoint.keep_best=true"
_VALIDATION = ("validation.every_n_steps=1", "validation.max_samples=8")
Chosen = Sequence[str]


@dataclass(frozen=True)
class Case:
    """A combination. numbers, levers: overrides, as described above; drawn: how many settings were
    chosen. redrawn: combinations of this seed before it that the validator refused.
    """

    seed: int
    recipe: str
    model: str
    ranks: int
    numbers: tuple[str, ...]
    levers: tuple[str, ...]
    drawn: int
    redrawn: int = 0

    def __str__(self) -> str:
        levers = " ".join((*self.numbers, *self.levers))
        return (
            f"seed {self.seed}: {self.recipe.partition('_')[0]} {self.model} on {self.ranks}:"
            f" {levers}"
        )

    @cached_property
    def dtype(self) -> str:
        """The type of the weights that are computed with."""
        return next(one for one in self.numbers if one.startswith("dtype=")).removeprefix("dtype=")

    def arguments(self, folder: Path, *, plain: bool) -> list[str]:
        """The command line behind the recipe's name. folder: of what the runs of this seed read and
        write. plain: of the run of one process.
        """
        kind = next((kind for chosen, kind in _ROWS.items() if chosen in self.numbers), "rows")
        return [
            "--config",
            str(
                ROOT
                / "tests"
                / "recipes"
                / ("adapters.yaml" if self.recipe == LORA else "plain.yaml")
            ),
            f"recipe={self.recipe}",
            f"model.path={folder.parent / self.model}",
            f"tokenizer.path={ROOT / 'examples' / 'demo' / 'tokenizer'}",
            f"data.source={folder.parent / kind}.jsonl",
            *(["data.template=plain"] if kind in ("pairs", "labeled") else []),
            *(
                [f"validation.source={folder.parent / kind}.jsonl", *_VALIDATION]
                if KEEP_BEST in self.numbers
                else []
            ),
            *([f"distill.teacher={folder.parent / TEACHER}"] if self.recipe == DISTILL else []),
            "data.cache=false",
            f"max_seq_len={LENGTH}",
            f"max_steps={STEPS}",
            "epochs=20",
            f"seed={self.seed}",
            "overwrite_output_dir=true",
            "log.every_n_steps=1000",
            f"output_dir={folder / ('plain' if plain else 'run')}",
            *self.numbers,
            *([f"batch_size={SLOTS}"] if plain else self.levers),
        ]

    def command(self, folder: Path) -> str:
        """What to run from a shell. What offloads copies nothing there, unless the machine has a
        GPU.
        """
        quoted = [
            f"'{one}'" if set(one) & set("[]~* ") else one
            for one in self.arguments(folder, plain=False)
        ]
        ranks = f"--nproc_per_node {self.ranks} " if self.ranks > 1 else ""
        return f"tune run {ranks}{self.recipe} {' '.join(quoted)}"


def draw(seed: int) -> Case:
    """The combination of a seed: the first that the validator takes, of those that are drawn one
    after the other.
    """
    chance = random.Random(seed)
    for redrawn in range(1000):
        case = _draw(chance, seed, redrawn)
        if case is None:
            continue
        try:
            for plain in (False, True):
                parse_arguments(case.arguments(Path("folder"), plain=plain), CONFIGS[case.recipe])
        except ConfigError:
            continue
        return case
    raise AssertionError(f"seed {seed}: nothing that the validator takes in 1000 draws")


class _Draw:
    """Chooses settings and counts them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.count = chance, 0

    def one(self, options: Sequence[Any]) -> Any:
        return self.chance.choice(options)

    def maybe(self, share: float, options: Sequence[Chosen]) -> Chosen:
        """One of the options with a probability of `share`, else none."""
        if self.chance.random() >= share:
            return ()
        self.count += 1
        return self.one(options)


def _draw(chance: random.Random, seed: int, redrawn: int) -> Case | None:
    """A combination; None if it has too few levers, or the ranks cannot be divided so."""
    draw = _Draw(chance)
    recipe, model = draw.one(_RECIPES), draw.one(MODELS)
    dtype = draw.one(["fp64", "fp64", "fp64", "fp32", "fp32", "bf16"])
    ranks = draw.one([1, 2, 2, 4, 4])
    numbers = [f"dtype={dtype}", *_draw_numbers(draw, recipe, model, dtype)]
    if model in MIXTURES and "lora.rank=8" not in numbers:
        return None
    in_backward = draw.maybe(0.2, [["memory.optimizer_in_backward=true"]])
    numbers += ["clip_grad_norm=null"] if in_backward else draw.maybe(0.4, [["clip_grad_norm=0.3"]])
    levers = [*in_backward, "device=auto"]
    divided = _draw_mesh(draw, ranks, bool(in_backward))
    if divided is None:
        return None
    levers += [*divided, *_draw_levers(draw, dtype, ranks)]
    if draw.count < LEAST:
        return None
    return Case(seed, recipe, model, ranks, tuple(numbers), tuple(levers), draw.count, redrawn)


def _draw_numbers(draw: _Draw, recipe: str, model: str, dtype: str) -> list[str]:
    """What changes the numbers: optimizer, schedule, packing, adapters, the loss of pairs."""
    rate = "optimizer.lr=3e-3"
    optimizers: list[list[str]] = [
        ["optimizer.name=sgd", "optimizer.lr=0.1"],
        ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9"],
        ["optimizer.name=muon", rate],
        *([f"optimizer.state_bits={bits}", rate] for bits in (4, 8, 16, 32)),
        ["optimizer.master_weights=true", rate],
        ["optimizer.stochastic_rounding=true", rate],
        ["optimizer.betas=[0.8, 0.99]", rate],
    ]
    found = list(draw.maybe(0.6, optimizers)) or [rate]
    found += draw.maybe(0.3, [["optimizer.weight_decay=0.2"]])
    found += draw.maybe(
        0.3,
        [
            ["lr_scheduler.type=linear", "lr_scheduler.min_lr_ratio=0.2"],
            ["lr_scheduler.type=constant"],
        ],
    )
    found += draw.maybe(0.35, [["data.packing=true"]])
    section = {DPO: "dpo", REWARD: "reward", DISTILL: "distill"}.get(recipe)
    if section:
        found += _draw_method(draw, recipe)
        found.append(f"{section}.trainable={draw.one(['adapters', 'all'])}")
    if recipe == LORA or f"{section}.trainable=adapters" in found:
        found += ["lora.rank=8"]
        is_mixture = model in MIXTURES
        found += draw.maybe(0.3, [["lora.dora=true"]])
        found += draw.maybe(
            0.8 if is_mixture else 0.35, [["lora.quantize_base=nf4"], ["lora.quantize_base=int8"]]
        )
        others = (
            ["q, v, down"]
            if model.endswith("tied") or model.startswith("gemma")
            else ["q, v, down", "o, head"]
        )
        targets = draw.one(["q, v", "q, k, v, o"] if is_mixture else others)
        found += draw.maybe(1 if is_mixture else 0.3, [[f"lora.target_modules=[{targets}]"]])
        found += draw.maybe(0.2, [["lora.rslora=true"]])
        found += draw.maybe(0.3, [["lora.dtype=fp32"]]) if dtype == "bf16" else []
    if recipe in (FULL, LORA) and dtype != "bf16":  # whose steps are too much alike
        found += draw.maybe(0.25, [[KEEP_BEST], [KEEP_BEST, "checkpoint.greater_is_better=true"]])
    return found


def _draw_method(draw: _Draw, recipe: str) -> list[str]:
    """What is trained for, and on which rows: pairs, answers with labels, classes, or a teacher's
    probabilities.
    """
    if recipe == DISTILL:
        divergences = [
            ["distill.divergence=reverse_kl"],
            ["distill.divergence=jensen_shannon", "distill.beta=0.3"],
        ]
        found = [*draw.maybe(0.6, divergences), *draw.maybe(0.5, [["distill.temperature=2"]])]
        return [*found, *draw.maybe(0.4, [["distill.weight=0.9"], ["distill.weight=1"]])]
    if recipe == REWARD:
        of_classes = ["reward.loss=classification", "reward.num_labels=3", _CLASSES]
        return list(
            draw.one(
                [
                    of_classes,
                    [_PAIRS, *draw.maybe(0.4, [["reward.center_rewards_coefficient=0.1"]])],
                ]
            )
        )
    losses = [["dpo.loss=ipo"], ["dpo.label_smoothing=0.1"], ["dpo.loss=simpo", "dpo.beta=2"]]
    unpaired = [
        ["dpo.loss=kto", "dpo.undesirable_weight=0.7"],
        ["dpo.loss=apo_zero_unpaired", "dpo.beta=0.5"],
    ]
    return list(
        draw.one([[_PAIRS, *draw.maybe(0.6, losses)], [_LABELED, *draw.maybe(1.0, unpaired)]])
    )


def _draw_mesh(draw: _Draw, ranks: int, in_backward: bool) -> list[str] | None:
    """How the ranks divide the work; None if they cannot."""
    found: list[str] = []
    tensor = pipeline = 1
    if ranks > 1 and draw.maybe(0.3, [["tensor"]]):
        tensor = 2
        found += [
            "parallel.tensor=2",
            *draw.maybe(0.2, [["parallel.tensor_regather_in_backward=true"]]),
        ]
    if ranks > 1 and draw.maybe(0.35, [["pipeline"]]):
        pipeline = draw.one([2, 2, 4])
        schedules = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
        found += [
            f"parallel.pipeline={pipeline}",
            f"parallel.pipeline_schedule={draw.one(schedules)}",
        ]
        found += draw.maybe(0.2, [["parallel.pipeline_balance=memory"]])
    context = 1
    if ranks > 1 and draw.maybe(0.25, [["context"]]):
        context = draw.one([2, 2, 4])
        found += [f"parallel.context={context}"]
    if ranks % (tensor * pipeline * context):
        return None
    copies = ranks // (tensor * pipeline * context)
    accumulation = 1 if in_backward else draw.one([1, 1, 2, 4])
    draw.count += accumulation > 1
    if SLOTS % (copies * accumulation):
        return None
    rows = SLOTS // copies
    found += [f"batch_size={rows // accumulation}", f"gradient_accumulation_steps={accumulation}"]
    if pipeline > 1:
        found += [
            f"parallel.pipeline_microbatches={draw.one([n for n in (2, 4, 8) if rows % n == 0] or [1])}"
        ]
    if copies > 1:
        shards = [f"parallel.data_shard={copies}"]
        found += draw.maybe(0.4, [["parallel.strategy=ddp"], ["parallel.data_replicate=2"], shards])
    return found


def _draw_levers(draw: _Draw, dtype: str, ranks: int) -> list[str]:
    """What must not change the numbers, beside the division."""
    memory: list[tuple[float, list[list[str]]]] = [
        (
            0.4,
            [
                ["memory.activation_checkpointing=full"],
                ["memory.activation_checkpointing=selective"],
                ["memory.activation_checkpointing=budget", "memory.activation_budget_gib=0.002"],
            ],
        ),
        (
            0.25,
            [
                ["memory.activation_offload=true"],
                ["memory.activation_offload=true", "memory.activation_offload_prefetch_layers=2"],
            ],
        ),
        (0.25, [["memory.optimizer_offload=true"], ["memory.cpu_offload=true"]]),
        (0.15, [["memory.stream_layers=true"]]),
        (0.3, [["memory.mlp_tiles=3"]]),
        (0.5, [["memory.loss_chunks=1"], ["memory.loss_chunks=3"], ["memory.loss_chunks=16"]]),
        (0.2, [[f"optimizer.implementation={one}"] for one in ("foreach", "single", "fused")]),
    ]
    wrapping = [
        ["parallel.fsdp_wrap_policy=memory_efficient"],
        ["parallel.fsdp_wrap_policy=layers"],
    ]
    wrapping += [
        ["parallel.fsdp_wrap_policy=[model.layers.*, model.layers.*.mlp]"],
        ["parallel.reshard_after_forward=false"],
    ]
    found = [override for share, options in memory for override in draw.maybe(share, options)]
    found += draw.maybe(0.3, wrapping) if ranks > 1 else []
    found += (
        draw.maybe(0.2, [["parallel.reduce_dtype=fp32"]]) if dtype != "fp64" and ranks > 1 else []
    )
    once = "parallel.reduce_gradients=step"
    found += (
        draw.maybe(0.4, [[once], [once, "parallel.reshard_after_forward=false"]])
        if ranks > 1
        else []
    )
    found += draw.maybe(0.3, [["parallel.accumulate_grad_in_fp32=true"]]) if dtype == "bf16" else []
    return list(dict.fromkeys(found))
