"""Runs of seconds whose batches are padded further, by every kind of batch, model and division
among ranks.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipe_lib.config.mesh import MODEL_DIMS
from tests.recipes.distill_models import write_models
from tests.recipes.labeled_runs import write_answers, write_classes, write_margins
from tests.recipes.mixtures import MIXTURES, write_mixture
from tests.recipes.runs import (
    DISTILL,
    DPO,
    FULL,
    LORA,
    REWARD,
    ROOT,
    expect_done,
    keep_latest,
    list_parameters,
    read_metrics,
    run_here,
)

STEPS, SEQUENCES, LONGEST = 2, 4, 128
# Of a line of metrics.jsonl, what is measured and not computed.
MEASURED = (
    "seconds",
    "tokens_per_second",
    "peak_memory",
    "memory_kind",
    "communication",
    "scaling",
    "host_memory",
)
FURTHER = (  # of sequences of 10 to 100 tokens, and of packs of up to LONGEST
    "data.pad_to_multiple_of=120"
)
ACCUMULATED = "gradient_accumulation_steps=2"
ALONE = (
    "batch_size=1",
    "gradient_accumulation_steps=4",
    "validation.batch_size=1",
)  # no longer neighbor


@dataclass(frozen=True)
class Kind:
    """A kind of batch. recipe: that takes it. rows: the file of samples. words: of the command
    line.
    """

    recipe: str
    rows: str
    words: tuple[str, ...] = ()


KINDS = {
    "messages": Kind(FULL, "messages"),
    "packed": Kind(FULL, "messages", ("data.packing=true",)),
    "lora": Kind(LORA, "messages"),
    "dpo": Kind(DPO, "pairs", ("data.format=preference", "dpo.beta=0.5")),
    "packed dpo": Kind(DPO, "pairs", ("data.format=preference", "data.packing=true")),
    "ipo": Kind(DPO, "pairs", ("data.format=preference", "dpo.loss=ipo", "dpo.trainable=all")),
    "kto": Kind(DPO, "answers", ("dpo.loss=kto", "dpo.trainable=all")),
    "reward": Kind(REWARD, "pairs", ("reward.center_rewards_coefficient=0.1",)),
    "classes": Kind(REWARD, "classes", ("reward.loss=classification", "reward.num_labels=3")),
    "distillation": Kind(DISTILL, "messages", ("distill.temperature=2",)),
}
BALANCED, INT8 = "router_aux_loss_coef=0.5", "matmul_dtype=int8"
# Whose rotations go by the longest position; sequences are shorter, padded ones longer
LONG_ROPE = "phi3"


@dataclass(frozen=True)
class Case:
    """A run that is compared with itself, padded further. model: of `write_presets`. words: beside
    the kind's.
    """

    kind: str
    model: str = "tiny"
    ranks: int = 1
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.model} {self.ranks}"
            f" {' '.join(word.rpartition('.')[2] for word in self.words)}"
        )


def write_presets(folder: Path) -> None:
    """A config.json for each model of the cases, and each kind's samples."""
    for family in MIXTURES:
        write_mixture(family, folder)
    tiny = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text()) | {
        "initializer_range": 0.2
    }
    factors = [1.0 + 0.1 * at for at in range(4)]
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": [8 * each for each in factors],
    }
    long_rope = {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": scaling,
    }
    long_rope |= {
        "original_max_position_embeddings": 112,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    (folder / "tiny.json").write_text(json.dumps(tiny))
    (folder / f"{LONG_ROPE}.json").write_text(json.dumps(tiny | long_rope))
    for write in (write_answers, write_classes, write_margins, write_messages):
        write(folder)


def write_messages(folder: Path) -> None:
    """Conversations of unlike lengths."""
    words = [" ".join(["cat", "dog", "sees", "it", "a tree"][at % 5] for at in range(1 + 7 * number % 23))
             for number in range(24)]  # fmt: skip
    turns = [
        [{"role": "user", "content": "Say"}, {"role": "assistant", "content": text}]
        for text in words
    ]
    (folder / "messages.jsonl").write_text(
        "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)
    )


def build_arguments(case: Case, folder: Path, output: Path) -> list[str]:
    """The command line of a case."""
    kind = KINDS[case.kind]
    config = folder / f"{kind.recipe}.yaml"
    if not config.exists():
        config.write_text(f"recipe: {kind.recipe}\n")
    shared = math.prod(2 for name in MODEL_DIMS if f"parallel.{name}=2" in case.words)
    accumulated = 2 if ACCUMULATED in case.words else 1
    rows = folder / f"{kind.rows}.jsonl"
    teacher = (f"distill.teacher={folder / 'teacher'}",) if kind.recipe == DISTILL else ()
    metrics_kept = (
        ("validation.metrics=[token_accuracy, exact_match]",) if kind.recipe in (FULL, LORA) else ()
    )
    return keep_latest(
        "--config",
        str(config),
        f"model.preset={folder / case.model}.json",
        f"tokenizer.path={ROOT / 'examples' / 'demo' / 'tokenizer'}",
        f"data.source={rows}",
        f"validation.source={rows}",
        "validation.max_samples=7",
        "validation.every_n_steps=2",
        "data.template=plain",
        "data.cache=false",
        f"max_seq_len={LONGEST}",
        "dtype=fp64",
        "device=auto",
        "optimizer.name=sgd",
        "optimizer.lr=1e-2",
        "lr_scheduler.type=constant",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        f"max_steps={STEPS}",
        f"batch_size={SEQUENCES // (case.ranks // shared) // accumulated}",
        f"output_dir={output}",
        *teacher,
        *metrics_kept,
        *kind.words,
        *case.words,
    )


def train(
    case: Case, folder: Path, *more: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The numbers of each line of metrics.jsonl, and how far each parameter moved: its gradients
    times the rate.
    """
    if KINDS[case.kind].recipe == DISTILL and not (folder / "teacher").exists():
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_models(folder)
        if dist.is_initialized():
            dist.barrier()
    output = folder / re.sub(r"\W+", "_", f"{case} {more}")
    start: dict[str, torch.Tensor] = {}
    argv = keep_latest(*build_arguments(case, folder, output), *more)
    run = expect_done(
        run_here(
            argv,
            lambda recipe: start.update(list_parameters(recipe)),
            recipe=KINDS[case.kind].recipe,
        )
    )
    moved = {name: tensor - start[name] for name, tensor in list_parameters(run.recipe).items()}
    lines = [
        {name: value for name, value in line.items() if not name.startswith(MEASURED)}
        for line in read_metrics(output)
    ]
    return lines, moved


def train_padded(folder: Path, cases: list[Case]) -> list[Any]:
    """Of each case the run as it is, padded further, and of one process each sequence alone.

    Not of what goes by micro-batches: the loss of routers is their mean, and products in 8 bits
    have scales of each.
    """
    found = []
    for case in cases:
        is_divided = case.ranks == 1 and not {BALANCED, INT8} & {*case.words}
        found.append(
            [train(case, folder, *more) for more in ((), (FURTHER,), *[ALONE] * is_divided)]
        )
        if dist.is_initialized():
            dist.barrier()
    return found
