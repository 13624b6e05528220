"""Runs a combination on its ranks, its plain run on one process, and the same by hand; and compares
all they recorded.

Losses, gradient norms and every exported tensor.
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
from tests.fuzz.by_hand import ByHand
from tests.fuzz.cases import CONFIGS, KEEP_BEST, LENGTH, MIXTURES, MODELS, STEPS, TEACHER, Case
from tests.recipes.runs import REWARD, ROOT, offload_on_a_cpu, read_steps, run_here
from tests.recipes.watched import Watch

SECONDS = 240.0  # of a run
_SHAPE = {
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
_CLASSES = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "qwen3moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


@dataclass(frozen=True)
class Limit:
    """Largest differences: of losses and norms, relative; of weights, in parts of the way that they
    have come.
    """

    loss: float
    norm: float
    weights: float


# Of ranks and one process. In fp64 nothing but the order of sums differs.
RANKS = {
    "fp64": Limit(1e-9, 1e-8, 1e-6),
    "fp32": Limit(1e-4, 1e-3, 2e-2),
    "bf16": Limit(3e-2, 0.15, 0.6),
}
# Of one process and the same by hand, where transformers has norms and angles in fp32, whatever the
# weights.
BY_HAND = Limit(1e-4, 1e-3, 2e-2)
# Codes of few bits, and Muon's iteration in bf16, make a difference in the last place a larger one.
ROUNDED = Limit(2e-3, 2e-2, 0.1)
MUON = Limit(2e-2, 0.1, 0.35)
# A loss of differences of scores, each of which bf16 rounds: one process is as far from itself in
# fp32.
SCORES = Limit(0.1, 0.15, 0.6)


@dataclass
class Outcome:
    """What came of a case. verdict: equal, refused (one line, exit code 2) or wrong. said: what is
    to be shown. far: the largest differences that were found.
    """

    case: Case
    verdict: str
    said: list[str] = field(default_factory=list)
    far: dict[str, Limit] = field(default_factory=dict)
    seconds: float = 0.0


def prepare(folder: Path, layers: Mapping[str, int] = dict.fromkeys((*MODELS, TEACHER), 4)) -> None:
    """The models that transformers makes, and rows and pairs of all lengths; the same every time.

    layers: of each model that is made; a pipeline of four ranks takes four.
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
        config = getattr(transformers, _CLASSES[family])(**options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if (
                    "norm" in key
                ):  # a norm whose weight is left out would not be seen with weights of 1
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    for file in (
        ROOT / "examples" / "demo" / "tokenizer"
    ).iterdir():  # which is compared with the model's
        (folder / TEACHER / file.name).write_bytes(file.read_bytes())
    chance = random.Random(0)

    def words(most: int) -> str:
        return " ".join(str(chance.randrange(10000)) for _ in range(chance.randint(1, most)))

    rows = [{"instruction": words(6), "input": "", "output": words(8)} for _ in range(160)]
    pairs = [{"prompt": words(5), "chosen": words(5), "rejected": words(5)} for _ in range(80)]
    # Prompts and answers that take no more than LENGTH tokens with each other's, and so are never
    # cut.
    labeled = [
        {"prompt": words(4), "completion": words(4), "label": chance.random() < 0.6}
        for _ in range(120)
    ]
    classes = [{"text": words(10), "label": f"class {chance.randrange(3)}"} for _ in range(120)]
    for name, found in (
        ("rows", rows),
        ("pairs", pairs),
        ("labeled", labeled),
        ("classes", classes),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def try_case(case: Case, folder: Path) -> Outcome:
    """Runs and compares a case. folder: what `prepare` has written to; the case's own is made in
    it.
    """
    began, own = time.monotonic(), folder / f"seed{case.seed}"
    outcome = _try_case(case, own)
    outcome.seconds = time.monotonic() - began
    if outcome.verdict == "wrong":
        outcome.said.append(case.command(own))
    return outcome


def _try_case(case: Case, own: Path) -> Outcome:
    try:
        plain = run_ranks(_train, 1, case, own, True, timeout=SECONDS)[0]
        found = (
            run_ranks(_train, case.ranks, case, own, False, timeout=SECONDS)
            if not plain["code"]
            else []
        )
    except RankFailure as failure:
        return Outcome(case, "wrong", [str(failure)[-3000:]])
    for each in (plain, *found):
        if each["code"]:
            return Outcome(case, "refused" if each["code"] == 2 else "wrong", each["said"])
    outcome = Outcome(case, "equal")
    check = _Check(outcome, plain)
    check.compare(
        "ranks", found[0]["steps"], read_exported(own / "run"), _limit(case, RANKS[case.dtype])
    )
    check.formula(case)
    if case.dtype != "bf16":
        try:
            losses, norms, weights = run_ranks(
                _train_by_hand, 1, case, own, plain, process_group=False, timeout=SECONDS
            )[0]
        except RankFailure as failure:
            return Outcome(case, "wrong", [str(failure)[-3000:]])
        lines = [
            (step, loss, norm)
            for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
        ]
        check.compare("by hand", lines, weights, _limit(case, BY_HAND))
    return outcome


def _limit(case: Case, limit: Limit) -> Limit:
    wider = [limit]
    if any(one in case.numbers for one in ("optimizer.state_bits=4", "optimizer.state_bits=8")):
        wider.append(ROUNDED)
    if "optimizer.name=muon" in case.numbers:
        wider.append(MUON)
    if case.recipe == REWARD and case.dtype == "bf16":
        wider.append(SCORES)
    return Limit(
        *(max(getattr(one, name) for one in wider) for name in ("loss", "norm", "weights"))
    )


def _train(case: Case, own: Path, plain: bool) -> dict[str, Any]:
    """A run, on this rank. Of the plain one also what it began with and its steps' rows."""
    if not plain:
        offload_on_a_cpu()
    watch = Watch() if plain else None
    run = run_here(case.arguments(own, plain=plain), recipe=case.recipe, before_training=watch)
    torch.distributed.barrier()
    found: dict[str, Any] = {"code": run.code, "said": run.said[-3:]}
    if run.code == 0:
        found["steps"] = [list(line) for line in read_steps(own / ("plain" if plain else "run"))]
    if run.code == 0 and watch:
        data = run.recipe.data
        found |= {
            "formula": watch.report(run.recipe),
            "rows": [_read_rows(data.dataset, _step_items(data, step)) for step in range(STEPS)],
        }
        found["validation"] = []
        if (
            KEEP_BEST in case.numbers
        ):  # the weights are those of a step that `watch` has left behind
            found["validation"].append(
                _read_rows(data.validation_dataset, range(len(data.validation_dataset)))
            )
            found["formula"] |= {"errors": {}, "still": []}
    return found


def _step_items(data: Any, step: int) -> list[int]:
    return [int(item) for slot in data.plan.slots(step) for item in slot]


def _read_rows(dataset: Any, items: Iterable[int]) -> list[tuple[Tensor, Tensor, float]]:
    found = []
    for item in items:
        for at in range(dataset.group):
            row = dataset[item * dataset.group + at]
            assert len(row.tokens) <= LENGTH
            value = float(dataset.values[item])
            found.append((torch.tensor(row.tokens).long(), torch.tensor(row.labels).long(), value))
    return found


def _train_by_hand(case: Case, own: Path, plain: dict[str, Any]) -> list[Any]:
    cfg = parse_arguments(case.arguments(own, plain=True), CONFIGS[case.recipe])
    training = ByHand(cfg, plain["formula"]["start"])
    training.train(plain["rows"], plain["validation"])
    return [training.losses, training.norms, training.weights]


def read_exported(output: Path) -> dict[str, Tensor]:
    """Every tensor of the model or adapter that a run wrote, by our names of the parameters."""
    found: dict[str, Tensor] = {}
    for file in sorted(
        [*output.glob("model/*.safetensors"), *output.glob("adapter/*.safetensors")]
    ):
        found |= load_file(file)
    return {name.removeprefix("base_model.model."): value for name, value in found.items()}


class _Check:
    """Compares with the plain run, and notes what is too far from it."""

    def __init__(self, outcome: Outcome, plain: dict[str, Any]) -> None:
        self.outcome, self.plain = outcome, plain
        self.start = plain["formula"]["start"]
        self.weights = plain["formula"]["weights"]

    def compare(
        self, name: str, lines: list[Any], weights: dict[str, Tensor], limit: Limit
    ) -> None:
        wanted = self.plain["steps"]
        if [line[0] for line in lines] != [
            line[0] for line in wanted
        ] or weights.keys() != self.weights.keys():
            odd = sorted(weights.keys() ^ self.weights.keys())[:5]
            self.note(f"{name}: found steps {[line[0] for line in lines]}, and not in both: {odd}")
            return
        pairs = list(zip(lines, wanted, strict=True))
        far = Limit(
            max(abs(mine[1] - theirs[1]) / abs(theirs[1]) for mine, theirs in pairs),
            max(abs(mine[2] - theirs[2]) / abs(theirs[2]) for mine, theirs in pairs),
            self.furthest(weights),
        )
        self.outcome.far[name] = far
        for kind in ("loss", "norm", "weights"):
            if not getattr(far, kind) <= getattr(limit, kind):
                self.note(
                    f"{name}: {kind} {getattr(far, kind):.1e}, at most {getattr(limit, kind):.0e};"
                    f" {lines}, {wanted}"
                )

    def furthest(self, weights: dict[str, Tensor]) -> float:
        """The distance of the tensor that is furthest off, in parts of its way; of one that has
        come a short way only, in parts of a tenth of the way that they have come on average.
        """
        ways = {
            name: float((value.double() - self.start[name]).norm())
            for name, value in self.weights.items()
        }
        least = 0.1 * math.sqrt(sum(way**2 for way in ways.values()) / len(ways))
        return max(
            float((weights[name].double() - self.weights[name].double()).norm()) / max(way, least)
            for name, way in ways.items()
        )

    def formula(self, case: Case) -> None:
        """The plain run itself moves every tensor as its optimizer's formula says."""
        found = self.plain["formula"]
        loose = {"fp64": 1e-6, "fp32": 2e-3, "bf16": 0.15}[case.dtype]
        if "optimizer.name=muon" in case.numbers:
            loose = 0.4
        bad = {name: error for name, error in found["errors"].items() if not error <= loose}
        if bad or found["still"]:
            self.note(
                f"the plain run is not what its optimizer's formula says: {bad} {found['still']}"
            )

    def note(self, line: str) -> None:
        self.outcome.verdict = "wrong"
        self.outcome.said.append(line)
