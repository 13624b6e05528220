"""Run a combination on its ranks, on one process without levers, and by hand; compare the three.

`try_case` does so for `python -m tests.fuzz`: it compares losses, gradient norms and every exported
tensor. A lever is a setting that must not change them; "by hand" is the plain loop of `ByHand`.
"""

import json
import math
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_lib.config import parse_arguments
from tests.distributed.ranks import RankFailure, run_ranks
from tests.external.published_layouts import make_config
from tests.fuzz.by_hand import ByHand
from tests.fuzz.cases import (
    CLASSES,
    CONFIGS,
    KEEP_BEST,
    LENGTH,
    MIXTURES,
    MODELS,
    RANK,
    STEPS,
    TEACHER,
    Case,
)
from tests.recipes.runs import REWARD, ROOT, offload_on_a_cpu, read_steps, run_here
from tests.recipes.watched import Watch

SECONDS = 240.0  # that a run may take
_SHAPE = {  # of every model, in config.json
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_CLASSES = {  # family -> its config class in transformers
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "qwen3moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
}
_EXPERTS = {  # of both mixtures: each reads its own key for the number of experts
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


@dataclass(frozen=True)
class Limit:
    """The largest differences that are allowed, or that were measured."""

    loss: float  # relative, of a step
    norm: float  # relative, of a step's gradient norm
    weights: float  # L2 distance of a tensor, relative to its change from the start


# dtype -> limit between ranks and one process. In fp64 nothing but the order of sums differs.
RANKS = {
    "fp64": Limit(loss=1e-9, norm=1e-8, weights=1e-6),
    "fp32": Limit(loss=1e-4, norm=1e-3, weights=2e-2),
    "bf16": Limit(loss=3e-2, norm=0.15, weights=0.6),
}
# Between one process and the same by hand: transformers computes norms and rotation angles in fp32,
# whatever the weights.
BY_HAND = Limit(loss=1e-4, norm=1e-3, weights=2e-2)
# Low-bit states, and Muon's iteration in bf16, magnify a difference in the last place.
ROUNDED = Limit(loss=2e-3, norm=2e-2, weights=0.1)
MUON = Limit(loss=2e-2, norm=0.1, weights=0.35)
# A reward's loss is of differences of scores, each of which bf16 rounds: one process in bf16 is as
# far from the same in fp32.
CHOICES = Limit(loss=3e-2, norm=0.15, weights=0.9)  # of experts, in bf16
SCORES = Limit(loss=0.1, norm=0.15, weights=0.6)


@dataclass
class Outcome:
    """The result of a case."""

    case: Case
    verdict: str  # "equal", "refused" (one line, exit code 2) or "wrong"
    said: list[str] = field(default_factory=list)  # messages: what is wrong, why it was refused
    # Largest differences from the plain run, by what was compared with it: "ranks", "by hand".
    far: dict[str, Limit] = field(default_factory=dict)
    seconds: float = 0.0  # that all its runs took


def write_models_and_samples(
    folder: Path, layers: Mapping[str, int] = dict.fromkeys((*MODELS, TEACHER), 4)
) -> None:
    """Write the models, by transformers, and files of samples, the same every time.

    folder: gets a folder for each model and a .jsonl file for each kind of samples.
    layers: name -> number of layers of the models to write; a pipeline of four ranks needs four.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, count) in enumerate(layers.items()):
        family, _, tied = name.partition("_")
        options: dict[str, Any] = _SHAPE | {"num_hidden_layers": count}
        if family.startswith("gemma"):
            options |= {"sliding_window": 16, "query_pre_attn_scalar": 16}
        elif family in MIXTURES:
            options |= _EXPERTS
        else:
            options |= {"tie_word_embeddings": bool(tied)}
        torch.manual_seed(number)
        if name in CLASSES:
            config = make_config(name)
            config.initializer_range = _SHAPE["initializer_range"]
        else:
            config = getattr(transformers, _CLASSES[family])(**options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                # With weights of 1 a norm that is left out would not be noticed.
                if "norm" in key:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    # A run compares the teacher's tokenizer with the student's.
    for file in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
        (folder / TEACHER / file.name).write_bytes(file.read_bytes())
    chance = random.Random(0)

    def write_words(most: int) -> str:
        return " ".join(str(chance.randrange(10000)) for _ in range(chance.randint(1, most)))

    # Prompts and answers, also with each other's, have at most LENGTH tokens: none is truncated.
    samples: dict[str, list[dict[str, Any]]] = {
        "rows": [
            {"instruction": write_words(6), "input": "", "output": write_words(8)}
            for _ in range(160)
        ],
        "pairs": [
            {"prompt": write_words(5), "chosen": write_words(5), "rejected": write_words(5)}
            for _ in range(80)
        ],
        "labeled": [
            {
                "prompt": write_words(4),
                "completion": write_words(4),
                "label": chance.random() < 0.6,
            }
            for _ in range(120)
        ],
        "classes": [
            {"text": write_words(10), "label": f"class {chance.randrange(3)}"} for _ in range(120)
        ],
    }
    for name, rows in samples.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def try_case(case: Case, folder: Path) -> Outcome:
    """Run and compare a case.

    folder: has what `write_models_and_samples` writes; the runs write to a folder in it.
    """
    start = time.monotonic()
    case_folder = folder / f"seed{case.seed}"
    outcome = _compare_runs(case, case_folder)
    outcome.seconds = time.monotonic() - start
    if outcome.verdict == "wrong":
        outcome.said.append(case.format_command(case_folder))
    return outcome


def _compare_runs(case: Case, folder: Path) -> Outcome:
    """Do the runs of a case and compare them.

    bf16 is not compared with the plain loop, which computes in fp64 or fp32.
    """
    try:
        plain = run_ranks(_train, 1, case, folder, True, timeout=SECONDS)[0]
        ranks = []
        if not plain["code"]:
            ranks = run_ranks(_train, case.ranks, case, folder, False, timeout=SECONDS)
    except RankFailure as failure:
        return Outcome(case, "wrong", [str(failure)[-3000:]])
    for result in (plain, *ranks):
        if result["code"]:  # 2: the run refused its settings
            return Outcome(case, "refused" if result["code"] == 2 else "wrong", result["said"])
    outcome = Outcome(case, "equal")
    check = Check(outcome, plain)
    check.compare(
        "ranks",
        lines=ranks[0]["steps"],
        weights=_read_weights(case, folder / "run", check.start),
        limit=_widen_limit(case, RANKS[case.dtype]),
    )
    check.compare_with_formula(case)
    if case.dtype != "bf16":
        try:
            losses, norms, weights = run_ranks(
                _train_by_hand, 1, case, folder, plain, process_group=False, timeout=SECONDS
            )[0]
        except RankFailure as failure:
            return Outcome(case, "wrong", [str(failure)[-3000:]])
        lines = list(zip(range(1, len(losses) + 1), losses, norms, strict=True))
        limit = _widen_limit(case, BY_HAND)
        check.compare("by hand", lines=lines, weights=weights, limit=limit)
    return outcome


def _widen_limit(case: Case, limit: Limit) -> Limit:
    """Return the limit, in each of its parts as wide as the case's settings need."""
    limits = [limit]
    if case.model in CLASSES:
        # They sum gradients of norms over tokens in fp32, in batches that levers change. In fp32 and
        # bf16 another expert may be chosen by such a difference.
        limits.append({"fp64": RANKS["fp32"], "fp32": ROUNDED, "bf16": CHOICES}[case.dtype])
    if {"optimizer.state_bits=4", "optimizer.state_bits=8"} & set(case.numerics):
        limits.append(ROUNDED)
    if "optimizer.name=muon" in case.numerics:
        limits.append(MUON)
    if case.recipe == REWARD and case.dtype == "bf16":
        limits.append(SCORES)
    return Limit(
        loss=max(limit.loss for limit in limits),
        norm=max(limit.norm for limit in limits),
        weights=max(limit.weights for limit in limits),
    )


def _train(case: Case, folder: Path, plain: bool) -> dict[str, Any]:
    """Run the case on this rank; return what it recorded, by key.

    code: the exit code. said: the last messages. steps: (step, loss, gradient norm) of each step.
    Of the plain run also formula: `Watch.report`, how it differs from its optimizer's formula;
    rows, validation: of each step and of a validation, as tuples of (tokens, labels, value).
    """
    if not plain:
        offload_on_a_cpu()
    watch = Watch() if plain else None
    run = run_here(
        case.build_arguments(folder, plain=plain), recipe=case.recipe, before_training=watch
    )
    torch.distributed.barrier()
    result: dict[str, Any] = {"code": run.code, "said": run.said[-3:]}
    if run.code == 0:
        steps = read_steps(folder / ("plain" if plain else "run"))
        result["steps"] = [list(line) for line in steps]
    if run.code == 0 and watch:
        data = run.recipe.data
        result["formula"] = watch.report(run.recipe)
        result["rows"] = [
            _read_rows(data.dataset, _list_step_items(data, step)) for step in range(STEPS)
        ]
        result["validation"] = []
        if KEEP_BEST in case.numerics:
            validation = data.validation_dataset
            result["validation"].append(_read_rows(validation, range(len(validation))))
            # The run's weights are those of its best step, the formulas' those of the last.
            result["formula"] |= {"errors": {}, "still": []}
    return result


def _list_step_items(data: Any, step: int) -> list[int]:
    """Return the indices of a step's items, sequences or pairs, also of those in packs."""
    items: list[int] = []
    for slot in data.plan.list_slots(step):
        items += map(int, slot)
    return items


def _read_rows(dataset: Any, items: Iterable[int]) -> list[tuple[Tensor, Tensor, float]]:
    """Return (tokens, labels, value) of every sequence of these items; a pair has two."""
    rows = []
    for item in items:
        value = float(dataset.values[item])
        for number in range(dataset.group):
            row = dataset[item * dataset.group + number]
            assert len(row.tokens) <= LENGTH
            rows.append((torch.tensor(row.tokens).long(), torch.tensor(row.labels).long(), value))
    return rows


def _train_by_hand(case: Case, folder: Path, plain: dict[str, Any]) -> list[Any]:
    """Train by hand on the rows that `_train` returned; return losses, norms and weights."""
    cfg = parse_arguments(case.build_arguments(folder, plain=True), CONFIGS[case.recipe])
    training = ByHand(cfg, plain["formula"]["start"])
    training.train(plain["rows"], plain["validation"])
    return [training.losses, training.norms, training.weights]


def read_exported(output: Path) -> dict[str, Tensor]:
    """Return every tensor of the model or adapter that a run wrote, by the parameter's name."""
    tensors: dict[str, Tensor] = {}
    for folder in ("adapter", "model"):
        for file in sorted((output / folder).glob("*.safetensors")):
            tensors |= load_file(file)
    return {name.removeprefix("base_model.model."): value for name, value in tensors.items()}


def _read_weights(case: Case, output: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return every tensor of the model or adapter that a run wrote, by the parameter's name.

    names: of the run's parameters. Files of transformers' classes have other names for experts.
    """
    if case.model not in CLASSES:
        return read_exported(output)
    if (output / "model").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(output / "model", dtype="auto")
        return {name: value.detach() for name, value in model.named_parameters()}
    exported = read_exported(output)
    for name in names:
        prefix, _, leaf = name.partition(".experts.")
        if not leaf:
            continue
        # PEFT's module of the first parameter is inside of the second one's.
        inner = "" if leaf.startswith("down_proj") else ".base_layer"
        kind = ".lora_A.weight" if ".lora_A." in leaf else ".lora_B.weight"
        value = exported.pop(f"{prefix}.experts{inner}{kind}")
        if kind == ".lora_A.weight":  # [E r, i]
            exported[name] = value.unflatten(0, (-1, RANK))
        else:  # [o, r E]
            exported[name] = value.unflatten(1, (RANK, -1)).permute(2, 0, 1)
    return exported


class Check:
    """Compares with the plain run, and notes in the outcome what is too far from it."""

    def __init__(self, outcome: Outcome, plain: dict[str, Any]) -> None:
        self.outcome = outcome
        self.plain = plain  # what `_train` returned of the plain run
        self.start = plain["formula"]["start"]  # trained parameters before the first step
        self.weights = plain["formula"]["weights"]  # and after the last

    def compare(
        self, name: str, *, lines: list[Any], weights: dict[str, Tensor], limit: Limit
    ) -> None:
        """Compare another run with the plain one, and note what is over the limit.

        name: for messages. lines: (step, loss, gradient norm). weights: every exported tensor.
        """
        expected = self.plain["steps"]
        steps = [line[0] for line in lines]
        if steps != [line[0] for line in expected] or weights.keys() != self.weights.keys():
            unshared_names = sorted(weights.keys() ^ self.weights.keys())[:5]
            self.note(f"{name}: found steps {steps}, and not in both: {unshared_names}")
            return
        pairs = list(zip(lines, expected, strict=True))
        far = Limit(
            loss=max(abs(line[1] - plain[1]) / abs(plain[1]) for line, plain in pairs),
            norm=max(abs(line[2] - plain[2]) / abs(plain[2]) for line, plain in pairs),
            weights=self.compute_largest_distance(weights),
        )
        self.outcome.far[name] = far
        for kind in ("loss", "norm", "weights"):
            # Negated, so that NaN is wrong.
            if not getattr(far, kind) <= getattr(limit, kind):
                self.note(
                    f"{name}: {kind} {getattr(far, kind):.1e}, at most {getattr(limit, kind):.0e};"
                    f" {lines}, {expected}"
                )

    def compute_largest_distance(self, weights: dict[str, Tensor]) -> float:
        """Return the largest distance of a tensor from the plain run's, relative to its change.

        The change counts as at least a tenth of the tensors' average change.
        """
        changes = {
            name: float((value.double() - self.start[name]).norm())
            for name, value in self.weights.items()
        }
        # A tensor that has hardly moved would make any rounding a large difference.
        least = 0.1 * math.sqrt(sum(change**2 for change in changes.values()) / len(changes))
        distances = [
            float((weights[name].double() - self.weights[name].double()).norm())
            / max(change, least)
            for name, change in changes.items()
        ]
        return max(distances)

    def compare_with_formula(self, case: Case) -> None:
        """Check that the plain run moved every tensor as its optimizer's formula says."""
        report = self.plain["formula"]
        # Of `Formula.measure_error`, relative to the formula's whole change.
        tolerance = {"fp64": 1e-6, "fp32": 2e-3, "bf16": 0.15}[case.dtype]
        if "optimizer.name=muon" in case.numerics:
            tolerance = 0.4
        # Negated, so that NaN is wrong.
        wrong = {name: error for name, error in report["errors"].items() if not error <= tolerance}
        if wrong or report["still"]:
            self.note(
                f"the plain run is not what its optimizer's formula says: {wrong} {report['still']}"
            )

    def note(self, line: str) -> None:
        """Set the outcome's verdict to "wrong" and add a line to its messages."""
        self.outcome.verdict = "wrong"
        self.outcome.said.append(line)
