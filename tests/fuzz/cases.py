"""Draw random combinations of settings that a run may have, each a function of its seed alone.

`draw_case(seed)` is for `python -m tests.fuzz`, which runs them. A combination has two parts:
`numerics`, which change what is computed (the run of one process that it is compared with has them
too), and `levers`, which must not: they trade memory for time or divide the work over ranks.
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

STEPS = 3  # of each run
SLOTS = 8  # sequences, pairs or packs of a step, over all ranks
LEAST = 3  # settings that a combination has drawn at least, of both parts
RANK = 8  # of adapters
LENGTH = 64  # max_seq_len: tokens of the longest row
MIXTURES = ("qwen3moe", "mixtral")  # mixtures of experts: adapters change their attention alone
# Names of folders that `tests.fuzz.compare` writes: a family, and `_tied` for one whose head is the
# embedding (Gemma's always is).
MODELS = ("llama", "llama_tied", "qwen3", "qwen3_tied", "gemma2", "gemma3", *MIXTURES)
# Classes of transformers: hybrids, whose layers carry a state along the sequence, and mixtures. Each
# with what its adapters may be put on beside the default, all linears of its layers.
CLASSES = {
    "qwen3_next": ("q_proj, o_proj", "in_proj_qkvz, experts", "experts", "v_proj, router"),
    "lfm2_moe": ("q_proj, v_proj", "in_proj, experts", "experts, router"),
    "nemotron_h": ("q_proj, o_proj", "in_proj, experts", "experts, router"),
    "granitemoehybrid": ("q_proj, o_proj", "in_proj, experts", "experts"),
    "falcon_h1": ("q_proj, v_proj", "in_proj, down_proj"),
    "qwen3_5_text": ("q_proj, v_proj", "in_proj_qkv, down_proj"),
    "gemma4_text": ("q_proj, o_proj", "experts", "experts, proj"),
    "glm4_moe_lite": ("kv_b_proj, o_proj", "experts", "experts, router"),
    "gpt_oss": ("q_proj, v_proj", "experts", "experts, router"),
    "olmoe": ("q_proj, v_proj", "experts", "experts, router"),
}
# A model of its own: one that is distilled from itself would learn nothing. Its head is tied.
TEACHER = "qwen3_teacher"
CONFIGS = {  # recipe -> its schema
    FULL: FullFinetuneConfig,
    LORA: LoraFinetuneConfig,
    DPO: DpoFinetuneConfig,
    REWARD: RewardFinetuneConfig,
    DISTILL: DistillFinetuneConfig,
}
# Each recipe as often as it is to be drawn.
_RECIPES = [FULL] * 4 + [LORA] * 2 + [DPO] * 3 + [REWARD] * 2 + [DISTILL] * 2
_PAIRS = "data.format=preference"
_LABELED = "data.format=kto"
_CLASSES = "data.format=classification"
# Override of a format -> name of the file of samples; "rows" for the other formats.
_ROWS = {_PAIRS: "pairs", _LABELED: "labeled", _CLASSES: "classes"}
KEEP_BEST = "checkpoint.keep_best=true"
# Overrides beside KEEP_BEST, which chooses the exported step by its validation.
_VALIDATION = ("validation.every_n_steps=1", "validation.max_samples=8")
Overrides = Sequence[str]


@dataclass(frozen=True)
class Case:
    """A combination of settings."""

    seed: int
    recipe: str  # a key of CONFIGS
    model: str  # of MODELS
    ranks: int
    numerics: tuple[str, ...]  # overrides that change what is computed
    levers: tuple[str, ...]  # overrides that must not
    drawn: int  # settings that were drawn, LEAST or more
    redrawn: int = 0  # combinations of this seed that were drawn before it and refused

    def __str__(self) -> str:
        overrides = " ".join((*self.numerics, *self.levers))
        return (
            f"seed {self.seed}: {self.recipe.partition('_')[0]} {self.model} on {self.ranks}:"
            f" {overrides}"
        )

    @cached_property
    def dtype(self) -> str:
        """Return the value of `dtype`: fp64, fp32 or bf16."""
        (dtype,) = (word for word in self.numerics if word.startswith("dtype="))
        return dtype.removeprefix("dtype=")

    def build_arguments(self, folder: Path, *, plain: bool) -> list[str]:
        """Return the command line behind the recipe's name.

        folder: where the runs of this seed write; models and samples are beside it.
        plain: for the run of one process without levers.
        """
        # Both files set the recipe alone.
        config = "adapters.yaml" if self.recipe == LORA else "plain.yaml"
        samples = "rows"
        for data_format, name in _ROWS.items():
            if data_format in self.numerics:
                samples = name
        words = [
            "--config",
            str(ROOT / "tests" / "recipes" / config),
            f"recipe={self.recipe}",
            f"model.path={folder.parent / self.model}",
            f"tokenizer.path={ROOT / 'examples' / 'demo' / 'tokenizer'}",
            f"data.source={folder.parent / samples}.jsonl",
        ]
        if samples in ("pairs", "labeled"):
            words.append("data.template=plain")
        if KEEP_BEST in self.numerics:
            words += [f"validation.source={folder.parent / samples}.jsonl", *_VALIDATION]
        if self.model in CLASSES:
            words.append("model.implementation=transformers")
        if self.recipe == DISTILL:
            words.append(f"distill.teacher={folder.parent / TEACHER}")
        words += [
            "data.cache=false",
            f"max_seq_len={LENGTH}",
            f"max_steps={STEPS}",
            "epochs=20",
            f"seed={self.seed}",
            "overwrite_output_dir=true",
            "log.every_n_steps=1000",
            f"output_dir={folder / ('plain' if plain else 'run')}",
            *self.numerics,
        ]
        words += [f"batch_size={SLOTS}"] if plain else self.levers
        return words

    def format_command(self, folder: Path) -> str:
        """Return the command that runs the combination from a shell.

        Offloading copies nothing there, unless the machine has a GPU.
        """
        quoted = [
            f"'{word}'" if set(word) & set("[]~* ") else word
            for word in self.build_arguments(folder, plain=False)
        ]
        ranks = f"--nproc_per_node {self.ranks} " if self.ranks > 1 else ""
        return f"tune run {ranks}{self.recipe} {' '.join(quoted)}"


def draw_case(seed: int, models: Sequence[str] = MODELS) -> Case:
    """Return the combination of a seed: the first drawn one that the config's checks accept.

    models: those to draw from: MODELS, or of CLASSES. Raises AssertionError if none of 1000 is
    accepted.
    """
    chance = random.Random(seed)
    for redrawn in range(1000):
        case = _draw(chance, seed, redrawn, models)
        if case is None:
            continue
        try:
            for plain in (False, True):
                parse_arguments(
                    case.build_arguments(Path("folder"), plain=plain), CONFIGS[case.recipe]
                )
        except ConfigError:
            continue
        return case
    raise AssertionError(f"seed {seed}: nothing that the validator takes in 1000 draws")


class _Draw:
    """Chooses settings at random and counts those of `choose_or_skip`."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance  # the generator, seeded
        self.count = 0  # settings chosen by `choose_or_skip`

    def choose(self, options: Sequence[Any]) -> Any:
        """Return one of the options."""
        return self.chance.choice(options)

    def choose_or_skip(self, probability: float, options: Sequence[Overrides]) -> Overrides:
        """Return one of the options with this probability and count it, else no overrides."""
        if self.chance.random() >= probability:
            return ()
        self.count += 1
        return self.choose(options)


def _draw(
    chance: random.Random, seed: int, redrawn: int, models: Sequence[str] = MODELS
) -> Case | None:
    """Draw a combination; return None if it has too few settings or its mesh does not fit.

    chance: the generator of the seed, so that every call draws another combination.
    """
    draw = _Draw(chance)
    recipe = draw.choose(_RECIPES)
    model = draw.choose(models)
    dtype = draw.choose(["fp64", "fp64", "fp64", "fp32", "fp32", "bf16"])
    ranks = draw.choose([1, 2, 2, 4, 4])
    numerics = [f"dtype={dtype}", *_draw_numerics(draw, recipe, model, dtype)]
    if model in CLASSES and recipe == REWARD:  # its file would need another class to be read
        return None
    is_adapted = f"lora.rank={RANK}" in numerics
    if model in MIXTURES and not is_adapted:  # mixtures run with adapters alone
        return None
    in_backward = draw.choose_or_skip(0.2, [["memory.optimizer_in_backward=true"]])
    if in_backward:
        numerics.append("clip_grad_norm=null")  # no norm is known during backward
    else:
        numerics += draw.choose_or_skip(0.4, [["clip_grad_norm=0.3"]])
    levers = [*in_backward, "device=auto"]
    mesh = _draw_mesh(draw, ranks, bool(in_backward))
    if mesh is None:
        return None
    levers += [*mesh, *_draw_levers(draw, dtype, ranks)]
    if draw.count < LEAST:
        return None
    return Case(
        seed=seed,
        recipe=recipe,
        model=model,
        ranks=ranks,
        numerics=tuple(numerics),
        levers=tuple(levers),
        drawn=draw.count,
        redrawn=redrawn,
    )


def _draw_numerics(draw: _Draw, recipe: str, model: str, dtype: str) -> list[str]:
    """Draw overrides that change what is computed.

    These are optimizer, schedule, packing, adapters, and the method's loss.
    """
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
    overrides = list(draw.choose_or_skip(0.6, optimizers)) or [rate]
    overrides += draw.choose_or_skip(0.3, [["optimizer.weight_decay=0.2"]])
    schedules = [
        ["lr_scheduler.type=linear", "lr_scheduler.min_lr_ratio=0.2"],
        ["lr_scheduler.type=constant"],
    ]
    overrides += draw.choose_or_skip(0.3, schedules)
    overrides += draw.choose_or_skip(0.35, [["data.packing=true"]])
    section = {DPO: "dpo", REWARD: "reward", DISTILL: "distill"}.get(recipe)
    if section:
        overrides += _draw_method(draw, recipe)
        overrides.append(f"{section}.trainable={draw.choose(['adapters', 'all'])}")
    if recipe == LORA or f"{section}.trainable=adapters" in overrides:
        overrides += _draw_adapters(draw, model, dtype)
    # In bf16 steps are too much alike for one to be the best.
    if recipe in (FULL, LORA) and dtype != "bf16":
        criteria = [[KEEP_BEST], [KEEP_BEST, "checkpoint.greater_is_better=true"]]
        overrides += draw.choose_or_skip(0.25, criteria)
    return overrides


def _draw_adapters(draw: _Draw, model: str, dtype: str) -> list[str]:
    """Draw overrides of the adapters, their rank always among them."""
    is_mixture = model in MIXTURES
    overrides = [f"lora.rank={RANK}"]
    overrides += draw.choose_or_skip(0.3, [["lora.dora=true"]])
    bases = [["lora.quantize_base=nf4"], ["lora.quantize_base=int8"]]
    overrides += draw.choose_or_skip(0.8 if is_mixture else 0.35, bases)
    target_sets: Sequence[str]
    if is_mixture:
        target_sets = ["q, v", "q, k, v, o"]
    elif model in CLASSES:
        target_sets = CLASSES[model]
    elif model.endswith("tied") or model.startswith("gemma"):  # whose head is the embedding
        target_sets = ["q, v, down"]
    else:
        target_sets = ["q, v, down", "o, head"]
    targets = draw.choose(target_sets)
    overrides += draw.choose_or_skip(
        1 if is_mixture else 0.7 if model in CLASSES else 0.3,
        [[f"lora.target_modules=[{targets}]"]],
    )
    overrides += draw.choose_or_skip(0.2, [["lora.rslora=true"]])
    if dtype == "bf16":
        overrides += draw.choose_or_skip(0.3, [["lora.dtype=fp32"]])
    return overrides


def _draw_method(draw: _Draw, recipe: str) -> list[str]:
    """Draw overrides of the method's loss and of the format of its rows."""
    if recipe == DISTILL:
        divergences = [
            ["distill.divergence=reverse_kl"],
            ["distill.divergence=jensen_shannon", "distill.beta=0.3"],
        ]
        overrides = list(draw.choose_or_skip(0.6, divergences))
        overrides += draw.choose_or_skip(0.5, [["distill.temperature=2"]])
        overrides += draw.choose_or_skip(0.4, [["distill.weight=0.9"], ["distill.weight=1"]])
        return overrides
    if recipe == REWARD:
        classes = ["reward.loss=classification", "reward.num_labels=3", _CLASSES]
        pairs = [_PAIRS, *draw.choose_or_skip(0.4, [["reward.center_rewards_coefficient=0.1"]])]
        return list(draw.choose([classes, pairs]))
    pair_losses = [["dpo.loss=ipo"], ["dpo.label_smoothing=0.1"], ["dpo.loss=simpo", "dpo.beta=2"]]
    unpaired_losses = [
        ["dpo.loss=kto", "dpo.undesirable_weight=0.7"],
        ["dpo.loss=apo_zero_unpaired", "dpo.beta=0.5"],
    ]
    pairs = [_PAIRS, *draw.choose_or_skip(0.6, pair_losses)]
    labeled = [_LABELED, *draw.choose_or_skip(1.0, unpaired_losses)]
    return list(draw.choose([pairs, labeled]))


def _draw_mesh(draw: _Draw, ranks: int, in_backward: bool) -> list[str] | None:
    """Draw overrides that divide the work over ranks; return None if it cannot be divided so."""
    overrides: list[str] = []
    tensor = pipeline = context = 1  # ranks of these dimensions
    # The option's word is not an override: what counts is that one was chosen.
    if ranks > 1 and draw.choose_or_skip(0.3, [["tensor"]]):
        tensor = 2
        overrides.append("parallel.tensor=2")
        overrides += draw.choose_or_skip(0.2, [["parallel.tensor_regather_in_backward=true"]])
    if ranks > 1 and draw.choose_or_skip(0.35, [["pipeline"]]):
        pipeline = draw.choose([2, 2, 4])
        schedules = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
        overrides += [
            f"parallel.pipeline={pipeline}",
            f"parallel.pipeline_schedule={draw.choose(schedules)}",
        ]
        overrides += draw.choose_or_skip(0.2, [["parallel.pipeline_balance=memory"]])
    if ranks > 1 and draw.choose_or_skip(0.25, [["context"]]):
        context = draw.choose([2, 2, 4])
        overrides.append(f"parallel.context={context}")
    if ranks % (tensor * pipeline * context):
        return None
    data_ranks = ranks // (tensor * pipeline * context)
    accumulation = 1 if in_backward else draw.choose([1, 1, 2, 4])
    draw.count += accumulation > 1
    if SLOTS % (data_ranks * accumulation):
        return None
    rows = SLOTS // data_ranks
    overrides += [
        f"batch_size={rows // accumulation}",
        f"gradient_accumulation_steps={accumulation}",
    ]
    if pipeline > 1:
        divisors = [count for count in (2, 4, 8) if rows % count == 0]
        overrides.append(f"parallel.pipeline_microbatches={draw.choose(divisors or [1])}")
    if data_ranks > 1:
        strategies = [
            ["parallel.strategy=ddp"],
            ["parallel.data_replicate=2"],
            [f"parallel.data_shard={data_ranks}"],
        ]
        overrides += draw.choose_or_skip(0.4, strategies)
    return overrides


def _draw_levers(draw: _Draw, dtype: str, ranks: int) -> list[str]:
    """Draw overrides that must not change what is computed, beside the mesh."""
    memory: list[tuple[float, list[list[str]]]] = [  # (probability, options)
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
        (0.2, [[f"optimizer.implementation={name}"] for name in ("foreach", "single", "fused")]),
        (0.2, [["memory.recompute_cheap=false"]]),
    ]
    wrapping = [
        ["parallel.fsdp_wrap_policy=memory_efficient"],
        ["parallel.fsdp_wrap_policy=layers"],
        ["parallel.fsdp_wrap_policy=[model.layers.*, model.layers.*.mlp]"],
        ["parallel.reshard_after_forward=false"],
    ]
    overrides: list[str] = []
    for probability, options in memory:
        overrides += draw.choose_or_skip(probability, options)
    if ranks > 1:
        overrides += draw.choose_or_skip(0.3, wrapping)
        if dtype != "fp64":
            overrides += draw.choose_or_skip(0.2, [["parallel.reduce_dtype=fp32"]])
        once = "parallel.reduce_gradients=step"
        overrides += draw.choose_or_skip(
            0.4, [[once], [once, "parallel.reshard_after_forward=false"]]
        )
    if dtype == "bf16":
        overrides += draw.choose_or_skip(0.3, [["parallel.accumulate_grad_in_fp32=true"]])
    return list(dict.fromkeys(overrides))  # two options may have a word in common
