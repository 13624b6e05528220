"""Train in seconds with batches that are padded further than needed, to compare with plain batches.

A `Case` is a kind of batch, a model and a mesh. Tests write the models and samples by
`write_presets`, and call `train_padded(folder, cases)` on each rank.
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

STEPS = 2
SEQUENCES = 4  # of a step, over all ranks
LONGEST = 128  # max_seq_len
# Beginnings of the names of metrics that are measured, not computed.
MEASURED = (
    "seconds",
    "tokens_per_second",
    "peak_memory",
    "memory_kind",
    "communication",
    "scaling",
    "host_memory",
)
# Pads almost all: sequences have 10 to 100 tokens, packs up to LONGEST.
FURTHER = "data.pad_to_multiple_of=120"
ACCUMULATED = "gradient_accumulation_steps=2"
# Overrides for micro-batches of one sequence, which no longer neighbor pads.
ALONE = ("batch_size=1", "gradient_accumulation_steps=4", "validation.batch_size=1")


@dataclass(frozen=True)
class Kind:
    """A kind of batch."""

    recipe: str  # that trains on it
    rows: str  # name of the file of samples, without .jsonl
    words: tuple[str, ...] = ()  # overrides


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
# Overrides whose results depend on how sequences are divided into micro-batches.
BALANCED = "router_aux_loss_coef=0.5"
INT8 = "matmul_dtype=int8"
# A model whose rotation angles change at position 112 (LongRoPE): sequences are shorter, padded
# ones longer.
LONG_ROPE = "phi3"


@dataclass(frozen=True)
class Case:
    """A run that is compared with the same run, padded further."""

    kind: str  # of KINDS
    model: str = "tiny"  # name of a file that `write_presets` writes, without .json
    ranks: int = 1
    words: tuple[str, ...] = ()  # overrides beside the kind's

    def __str__(self) -> str:
        words = " ".join(word.rpartition(".")[2] for word in self.words)
        return f"{self.kind} {self.model} {self.ranks} {words}"


def write_presets(folder: Path) -> None:
    """Write a config.json for each model of the cases, and the samples of each kind."""
    for family in MIXTURES:
        write_mixture(family, folder)
    tiny = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    tiny["initializer_range"] = 0.2
    factors = [1.0 + 0.1 * pair for pair in range(4)]
    long_rope = {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": [8 * factor for factor in factors],
        },
        "original_max_position_embeddings": 112,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    (folder / "tiny.json").write_text(json.dumps(tiny))
    (folder / f"{LONG_ROPE}.json").write_text(json.dumps(tiny | long_rope))
    for write in (write_answers, write_classes, write_margins, write_messages):
        write(folder)


def write_messages(folder: Path) -> None:
    """Write conversations of different lengths."""
    words = ["cat", "dog", "sees", "it", "a tree"]
    lines = []
    for number in range(24):
        num_words = 1 + 7 * number % 23
        answer = " ".join(words[index % 5] for index in range(num_words))
        messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "messages.jsonl").write_text("".join(lines))


def build_arguments(case: Case, folder: Path, output: Path) -> list[str]:
    """Return the command line of a case. folder: of `write_presets`. output: the run's folder."""
    kind = KINDS[case.kind]
    config = folder / f"{kind.recipe}.yaml"
    if not config.exists():
        config.write_text(f"recipe: {kind.recipe}\n")
    # Ranks of these dimensions read the same sequences.
    model_ranks = math.prod(2 for name in MODEL_DIMS if f"parallel.{name}=2" in case.words)
    accumulation = 2 if ACCUMULATED in case.words else 1
    rows = folder / f"{kind.rows}.jsonl"
    words = [*kind.words, *case.words]
    if kind.recipe in (FULL, LORA):
        words.insert(0, "validation.metrics=[token_accuracy, exact_match]")
    if kind.recipe == DISTILL:
        words.insert(0, f"distill.teacher={folder / 'teacher'}")
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
        f"batch_size={SEQUENCES // (case.ranks // model_ranks) // accumulation}",
        f"output_dir={output}",
        *words,
    )


def train(
    case: Case, folder: Path, *more: str
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Run a case; return the computed metrics of each logged line, and each parameter's change.

    With SGD the change is the sum of the gradients times the learning rate. more: overrides, which
    replace the case's.
    """
    if KINDS[case.kind].recipe == DISTILL and not (folder / "teacher").exists():
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_models(folder)
        if dist.is_initialized():
            dist.barrier()
    output = folder / re.sub(r"\W+", "_", f"{case} {more}")
    start: dict[str, torch.Tensor] = {}
    argv = keep_latest(*build_arguments(case, folder, output), *more)
    run = run_here(
        argv,
        before_training=lambda recipe: start.update(list_parameters(recipe)),
        recipe=KINDS[case.kind].recipe,
    )
    parameters = list_parameters(expect_done(run).recipe)
    changes = {name: tensor - start[name] for name, tensor in parameters.items()}
    lines = [
        {name: value for name, value in line.items() if not name.startswith(MEASURED)}
        for line in read_metrics(output)
    ]
    return lines, changes


def train_padded(folder: Path, cases: list[Case]) -> list[Any]:
    """Run each case as it is and padded further, on one process also with each sequence alone.

    Returns for each case what `train` returned of its runs.
    """
    results = []
    for case in cases:
        runs = [train(case, folder), train(case, folder, FURTHER)]
        # The routers' loss is a mean over micro-batches, and int8 matmuls have scales of each.
        depends_on_micro_batches = {BALANCED, INT8} & {*case.words}
        if case.ranks == 1 and not depends_on_micro_batches:
            runs.append(train(case, folder, *ALONE))
        results.append(runs)
        if dist.is_initialized():
            dist.barrier()
    return results
