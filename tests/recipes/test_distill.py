"""Distillation runs: a plain loop over transformers models in float64, two ranks against one,
levers, errors.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_lib.config.flat_schema import read_schema
from recipe_lib.memory import layer_stream
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from tests.distributed.ranks import run_ranks
from tests.recipes.distill_models import RECORDED, SEQUENCES, STEPS, build_arguments, make_folder
from tests.recipes.runs import DISTILL, read_metrics, run_here
from tests.selection import mark_slow_except, select_cases

KINDS: dict[str, tuple[str, ...]] = {
    "forward": ("distill.temperature=2",),
    "reverse": ("distill.divergence=reverse_kl", "distill.weight=1"),
    "jensen shannon": (
        "distill.divergence=jensen_shannon",
        "distill.beta=0.3",
        "distill.temperature=0.5",
    ),
    "lora": ("distill.trainable=adapters", "lora.target_modules=[q,v]", "distill.weight=0.7"),
    "lora head": (
        "distill.trainable=adapters",
        "lora.target_modules=[q,head]",
        "distill.divergence=reverse_kl",
    ),
}
# Of two ranks. A teacher whose head is in the root, tied, or of another number of rows.
LEVERS: dict[str, tuple[str, ...]] = {
    "fsdp": ("memory.loss_chunks=3", "parallel.fsdp_wrap_policy=layers"),
    "tied": (
        "distill.teacher={tied}",
        "parallel.fsdp_wrap_policy=memory_efficient",
        "parallel.reshard_after_forward=false",
        "gradient_accumulation_steps=2",
        "validation",
    ),
    "padded tensor": ("parallel.tensor=2", "distill.teacher={padded}"),
    "context": ("parallel.context=2", "data.packing=true"),
    "packed": (
        "data.packing=true",
        "parallel.strategy=ddp",
        "memory.activation_checkpointing=full",
        "distill.quantize_teacher=nf4",
        "dtype=fp32",
    ),
}
# What also changes the numbers of one rank.
ALIKE = ("data.packing", "distill.teacher", "distill.quantize_teacher", "dtype", "validation")
QUICK = [("forward", "fsdp")]
CASES = [
    *QUICK,
    ("reverse", "padded tensor"),
    ("jensen shannon", "tied"),
    ("lora head", "context"),
    ("lora", "packed"),
]


def train(folder: Path, kind: str, words: tuple[str, ...], ranks: int) -> list[dict[str, Any]]:
    output = folder / f"{kind} {' '.join(words).replace('/', '')} {ranks}"
    split = (
        ranks
        if not any(word.startswith(("parallel.tensor", "parallel.context")) for word in words)
        else 1
    )
    split *= 2 if "gradient_accumulation_steps=2" in words else 1
    run = run_here(
        build_arguments(folder, output, f"batch_size={SEQUENCES // split}", *KINDS[kind], *words),
        recipe=DISTILL,
    )
    assert run.code == 0, run.said
    if dist.is_initialized():
        dist.barrier()
    return read_metrics(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("distill"))


def alike(lever: str) -> tuple[str, ...]:
    """What of a lever's words one rank has to have as well."""
    return tuple(word for word in LEVERS[lever] if word.startswith(ALIKE))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[Any, list[dict[str, Any]]]:
    together: list[tuple[str, str]] = select_cases(request, "case")
    alone = list(dict.fromkeys((kind, alike(lever)) for kind, lever in together))

    def train_all(
        cases: list[tuple[str, tuple[str, ...]]], ranks: int
    ) -> list[list[dict[str, Any]]]:
        return [train(folder, kind, words, ranks) for kind, words in cases]

    found: dict[Any, list[dict[str, Any]]] = {}
    recorded = run_ranks(train_all, 1, alone, 1, timeout=300)[0]
    found |= {(*case, 1): lines for case, lines in zip(alone, recorded, strict=True)}
    recorded = run_ranks(
        train_all, 2, [(kind, LEVERS[lever]) for kind, lever in together], 2, timeout=300
    )[0]
    return found | {(*case, 2): lines for case, lines in zip(together, recorded, strict=True)}


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK), ids=" ".join)
def test_two_ranks_record_what_one_records(results: dict[Any, Any], case: tuple[str, str]) -> None:
    kind, lever = case
    found, wanted = results[kind, lever, 2], results[kind, alike(lever), 1]
    assert len(found) == len(wanted) >= STEPS
    for mine, other in zip(found, wanted, strict=True):
        names = (
            RECORDED
            if "loss" in mine
            else [f"validation_{name}" for name in ("loss", *RECORDED[2:])]
        )
        for name in names:
            assert mine[name] == pytest.approx(
                other[name], rel=1e-4 if "dtype=fp32" in LEVERS[lever] else 1e-10
            ), name


def put_exact_norms(model: torch.nn.Module) -> None:
    """Replace transformers' norms, which compute in fp32, by torch's with the same weight; in
    place.
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)


def by_hand(folder: Path, kind: str) -> list[list[float]]:
    """The same steps of transformers' models with plain torch: full logits, one batch, autograd,
    AdamW.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # SDPA, since eager attention has its softmax in fp32.
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float64, attn_implementation="sdpa"
        )
        for name in ("student", "teacher")
    )
    put_exact_norms(student)
    put_exact_norms(teacher)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    found = []
    for step in range(STEPS):
        losses, divergences, tokens = [], [], 0
        for row in rows[step * SEQUENCES : (step + 1) * SEQUENCES]:
            prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
            answer = [
                *tokenizer(row["completion"], add_special_tokens=False).input_ids,
                tokenizer.eos_token_id,
            ]
            ids = torch.tensor([[*prompt, *answer]])
            first = len(prompt) - 1
            own = student(ids[:, :-1]).logits[0, first:]
            with torch.no_grad():
                other = teacher(ids[:, :-1]).logits[0, first:]
            losses.append(
                torch.nn.functional.cross_entropy(own, ids[0, first + 1 :], reduction="sum")
            )
            divergences.append(hand_divergence(own, other, kind))
            tokens += len(answer)
        divergence, entropy = (torch.stack(parts).sum() / tokens for parts in (divergences, losses))
        weight = 1.0 if kind == "reverse" else 0.5
        loss = weight * divergence + (1 - weight) * entropy
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        found.append([float(each.detach()) for each in (loss, norm, divergence, entropy)])
    return found


def hand_divergence(own: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
    heat = {"forward": 2.0, "reverse": 1.0, "jensen shannon": 0.5}[kind]
    q, p = (each.div(heat).softmax(-1) for each in (own, other))
    if kind == "forward":
        return heat**2 * (p * (p / q).log()).sum()
    if kind == "reverse":
        return heat**2 * (q * (q / p).log()).sum()
    mixture = 0.3 * p + 0.7 * q
    return heat**2 * (0.3 * (p * (p / mixture).log()).sum() + 0.7 * (q * (q / mixture).log()).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen shannon"])
def test_steps_are_those_of_a_plain_loop_over_transformers(folder: Path, kind: str) -> None:
    output = folder / f"hand {kind}"
    words = (*KINDS[kind], "data.shuffle=false", "data.add_bos=false", "memory.loss_chunks=3")
    run = run_here(build_arguments(folder, output, *words), recipe=DISTILL)
    assert run.code == 0, run.said
    lines = [[line[name] for name in RECORDED] for line in read_metrics(output)]
    for mine, wanted in zip(lines, by_hand(folder, kind), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-6)  # transformers computes its angles in fp32


def test_a_model_that_is_its_teacher_learns_nothing_from_it(folder: Path) -> None:
    for kind in ("forward", "reverse", "jensen shannon"):
        output = folder / f"self {kind}"
        words = (*KINDS[kind], "distill.teacher={student}", "distill.weight=1")
        assert run_here(build_arguments(folder, output, *words), recipe=DISTILL).code == 0
        first = read_metrics(output)[0]
        assert (
            abs(first["divergence"]) < 1e-12
            and first["grad_norm"] < 1e-10
            and first["cross_entropy"] > 1
        )


def test_weights_of_the_teacher_are_not_rounded_with_those_of_the_model(folder: Path) -> None:
    """Else a rounded model would be its rounded teacher, from which it learns nothing."""
    found = {}
    for kind in ("int8", "int4"):
        words = (
            "distill.teacher={student}",
            "distill.weight=1",
            "dtype=fp32",
            f"qat={kind}",
            "qat_group_size=16",
        )
        run = run_here(build_arguments(folder, folder / kind, *words), recipe=DISTILL)
        assert run.code == 0 and any("14 linears computed in" in line for line in run.said), (
            run.said
        )
        found[kind] = read_metrics(folder / kind)[0]["divergence"]
    assert 1e-7 < found["int8"] < found["int4"] / 10


def test_a_streamed_teacher_is_bitwise_the_resident_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_stream, "has_host", lambda device: True)
    found, said = [], []
    for name, words in {"streamed": ("distill.stream_teacher=true",), "resident": ()}.items():
        run = run_here(
            build_arguments(folder, folder / name, "device=auto", *words), recipe=DISTILL
        )
        assert run.code == 0, run.said
        found.append([[line[name] for name in RECORDED] for line in read_metrics(folder / name)])
        said.append(" ".join(run.said))
    assert found[0] == found[1]
    assert "in host memory per rank" in said[0] and "in host memory" not in said[1]


def test_a_resumed_run_is_the_whole_one(folder: Path) -> None:
    words = (
        *KINDS["lora"],
        "checkpoint.save_every_n_steps=1",
        "validation",
        "checkpoint.save_model=true",
    )
    output = folder / "resumed"
    assert run_here(build_arguments(folder, output, *words), recipe=DISTILL).code == 0
    whole = read_metrics(output)
    again = build_arguments(folder, output, *words, f"resume={output / 'state' / 'step_1'}")
    run = run_here(again, recipe=DISTILL)
    assert run.code == 0, run.said
    last = [line for line in read_metrics(output) if "loss" in line][-1]
    assert all(
        last[name] == [line for line in whole if "loss" in line][-1][name] for name in RECORDED
    )
    assert (output / "adapter" / "adapter_model.safetensors").is_file()


def test_every_key_is_tried() -> None:
    keys = {name for name in read_schema(DistillFinetuneConfig).keys if name.startswith("distill.")}
    words = [word for of in (*KINDS.values(), *LEVERS.values()) for word in of]
    tried = {word.partition("=")[0] for word in words if word.startswith("distill.")}
    # In tests of plans, on the simulated device.
    assert keys == tried | {"distill.teacher_preset", "distill.stream_teacher"}


def test_another_tokenizer_is_refused_with_the_first_difference(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (folder / "teacher").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    path = other / "tokenizer.json"
    text = json.loads(path.read_text())
    vocabulary = text["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(text))
    run = run_here(
        build_arguments(folder, tmp_path / "run", f"distill.teacher={other}"), recipe=DISTILL
    )
    (line,) = [line for line in run.said if line.startswith("error: ")]
    assert run.code == 2 and line.startswith(f"error: distill.teacher: {path} and ")
    assert "differ: the id 300 is " in line and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_loss_is_finite_and_falls(folder: Path) -> None:
    output = folder / "longer"
    words = ("max_steps=6", "distill.weight=1", "data.shuffle=false", "optimizer.lr=1e-2")
    assert run_here(build_arguments(folder, output, *words), recipe=DISTILL).code == 0
    losses = [line["loss"] for line in read_metrics(output)]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
