"""The same small runs on the CPU and on CUDA: levers, families, mixtures, adapters and methods,
loss by loss.

    python -m benchmarks.cpu_and_cuda                   on a GPU; ten minutes at most, in three processes
    python -m benchmarks.cpu_and_cuda --second cpu      a dry run: the CPU twice
    python -m benchmarks.cpu_and_cuda --only "family"   the cases whose name has these words

Each case trains a tiny model for three steps, in a process of its own. The levers are those of
`tests/recipes`. Cases come in an order drawn once, so that what a cut run has reached is a sample.
"""

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import REPOSITORY, describe_device, run_apart
from benchmarks.gpu_plan import begin_report, look_up_hardware
from benchmarks.gpu_plan_report import format_head, name_device, write_pair
from recipe_lib.config.registry import register
from tests.recipes import distill_models, labeled_runs, test_adapter_levers
from tests.recipes.levers import HALVING, LEVERS, LOSS, TOGETHER, keep_one_rank
from tests.recipes.mixtures import MIXTURES, write_mixture
from tests.recipes.runs import (
    DISTILL,
    DPO,
    FULL,
    LORA,
    REWARD,
    build_arguments,
    keep_latest,
    read_metrics,
    run_here,
)
from tests.recipes.test_levers import smoothed

MINUTES = 9.0
CASE_SECONDS = 75
STEPS = 3
PROCESSES = 3
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 256, "initializer_range": 0.05, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32, "sliding_window": 24,
         "tie_word_embeddings": True}  # fmt: skip
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama31": {"rope_scaling": SCALED},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, **GEMMA},
    "gemma3_text": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **GEMMA},
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
}  # fmt: skip
ADAPTERS = ("recipe=lora_finetune_distributed", "lora.rank=8", "lora.alpha=16")
PACKED = ("data.packing=true", "data.max_samples=300")
OFFLOADED_EXPERTS = "memory.stream_layers=experts"
STREAMED = ("memory.stream_layers=true", "memory.optimizer_in_backward=true", "clip_grad_norm=null",
            "memory.optimizer_offload=true")  # fmt: skip


@dataclass(frozen=True)
class RunPair:
    """A run that both devices make. words: its overrides, with `{folder}` for the case's files.
    tolerance: of the losses, relative. model: a file of the folder. basis: overrides of the CPU's
    run alone, which cannot have the same. data: for labeled rows, their file.
    """

    name: str
    recipe: str
    words: tuple[str, ...]
    tolerance: float
    model: str = "llama"
    basis: tuple[str, ...] = ()
    data: str = ""


def list_cases() -> list[RunPair]:
    """Return all of them, in the order in which they are run."""
    found = [
        *_list_lever_cases(),
        *_list_family_cases(),
        *_list_mixture_cases(),
        *_list_adapter_cases(),
        *_list_low_precision_cases(),
        *_list_labeled_cases(),
        *_list_distilled_cases(),
    ]
    random.Random(1).shuffle(found)
    return found


def _move_to_any_device(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.startswith("device="))


def _list_lever_cases() -> list[RunPair]:
    """Each lever that one process can have, and the tests' runs of many together."""
    singles = [
        setting for setting in LEVERS if setting.ranks == 2 and not HALVING & set(setting.overrides)
    ]
    pairs = [
        RunPair(
            f"full {setting}",
            FULL,
            _move_to_any_device(setting.overrides),
            max(2e-4, setting.tolerance),
        )
        for setting in singles
    ]
    for number, row in enumerate(TOGETHER):
        settings = keep_one_rank(row)
        words = tuple(dict.fromkeys(word for setting in settings for word in setting.overrides))
        tolerance = max([2e-4, *(setting.tolerance for setting in settings)])
        pairs.append(
            RunPair(f"full together {number}", FULL, _move_to_any_device(words), tolerance)
        )
    return pairs


def _list_family_cases() -> list[RunPair]:
    pairs = []
    for model in FAMILIES:
        for dtype, tolerance in (("fp32", 2e-4), ("bf16", 2e-2)):
            words = (f"dtype={dtype}",)
            pairs.append(RunPair(f"family {model} {dtype}", FULL, words, tolerance, model))
            packed = (*words, *PACKED, "memory.activation_checkpointing=full")
            pairs.append(
                RunPair(
                    f"family {model} {dtype} packed checkpointed", FULL, packed, tolerance, model
                )
            )
        for name, words in {
            "compiled": ("compile=true",),
            "transformers": ("model.implementation=transformers",),
        }.items():
            pairs.append(
                RunPair(f"family {model} {name} bf16", FULL, ("dtype=bf16", *words), 2e-2, model)
            )
        nf4 = (*ADAPTERS, "dtype=bf16", "lora.quantize_base=nf4")
        pairs.append(RunPair(f"family {model} nf4 bf16", LORA, nf4, 2e-2, model))
    return pairs


def _list_mixture_cases() -> list[RunPair]:
    pairs = []
    for model in MIXTURES:
        for dtype, tolerance in (("fp32", 2e-4), ("bf16", 3e-2)):
            pairs.append(
                RunPair(f"moe {model} full {dtype}", FULL, (f"dtype={dtype}",), tolerance, model)
            )
        targets = "lora.target_modules=[q, v, router, experts]"
        for base in ("none", "nf4", "int8"):
            words = (*ADAPTERS, targets, "dtype=bf16", f"lora.quantize_base={base}")
            pairs.append(RunPair(f"moe {model} lora {base} bf16", LORA, words, 3e-2, model))
            if base != "none":
                offloaded = (*words, OFFLOADED_EXPERTS)
                pairs.append(
                    RunPair(
                        f"moe {model} lora {base} bf16 {OFFLOADED_EXPERTS}",
                        LORA,
                        offloaded,
                        3e-2,
                        model,
                    )
                )
        pairs.append(
            RunPair(
                f"moe {model} full compiled bf16", FULL, ("dtype=bf16", "compile=true"), 3e-2, model
            )
        )
    return pairs


def _list_adapter_cases() -> list[RunPair]:
    pairs = []
    for kind, lever in test_adapter_levers.CASES:
        if lever.ranks == 2 and not lever.refuses(kind):
            more_rows = PACKED if lever.overrides == test_adapter_levers.PACKED else ()
            own = _move_to_any_device((*ADAPTERS, *kind.overrides, *lever.overrides))
            words = tuple(keep_latest(*own, *more_rows))
            tolerance = max(kind.tolerance, lever.tolerance, 5e-4)
            pairs.append(RunPair(f"adapter {kind}: {lever or 'alone'}", LORA, words, tolerance))
    more = {"compiled": "compile=true", "fused off": "fused_kernels=false", "streamed": STREAMED[0],
            "transformers": "model.implementation=transformers"}  # fmt: skip
    for base in ("none", "nf4", "int8"):
        for name, word in more.items():
            words = (*ADAPTERS, "dtype=bf16", f"lora.quantize_base={base}", word)
            pairs.append(RunPair(f"adapter {name} {base} bf16", LORA, words, 2e-2))
    return pairs


def _list_low_precision_cases() -> list[RunPair]:
    """Matmuls and codes of 8 and 4 bits, and what exists on a GPU alone, which the CPU's run has no
    like of.
    """
    bf16 = ("dtype=bf16",)
    pairs = [
        RunPair("streamed full fp32", FULL, STREAMED, 2e-4),
        RunPair(
            "streamed full bf16, states of 8 bits",
            FULL,
            (*STREAMED, *bf16, "optimizer.state_bits=8"),
            2e-2,
        ),
        RunPair(
            "matmul fp8", FULL, (*bf16, "matmul_dtype=fp8"), 5e-2, basis=("matmul_dtype=null",)
        ),
        RunPair("matmul int8", FULL, (*bf16, "matmul_dtype=int8"), 5e-2),
    ]
    for bits in ("int4", "int8", "fp8"):
        words = (*bf16, f"qat={bits}", *(["qat_group_size=32"] if bits == "int4" else []))
        pairs.append(
            RunPair(f"qat {bits}", FULL, words, 5e-2, basis=("qat=null",) if bits == "fp8" else ())
        )
    return pairs


def _list_labeled_cases() -> list[RunPair]:
    preference = "data.format=preference"
    kinds = {
        "dpo": (DPO, "pairs", (preference,)),
        "ipo lora": (DPO, "pairs", (preference, "dpo.loss=ipo", "dpo.trainable=adapters")),
        "simpo": (DPO, "pairs", (preference, "dpo.loss=simpo")),
        "kto": (DPO, "answers", ("data.format=kto", "dpo.loss=kto")),
        "reward": (REWARD, "pairs", (preference,)),
        "classes": (REWARD, "classes", ("data.format=classification", "reward.loss=classification",
                                            "reward.num_labels=3")),
    }  # fmt: skip
    return [
        RunPair(
            f"{name} {dtype}", recipe, (*words, f"dtype={dtype}"), tolerance, data=f"{data}.jsonl"
        )
        for name, (recipe, data, words) in kinds.items()
        for dtype, tolerance in (("fp32", 1e-3), ("bf16", 5e-2))
    ]


def _list_distilled_cases() -> list[RunPair]:
    teachers = (
        (),
        ("distill.quantize_teacher=nf4",),
        ("distill.quantize_teacher=none", "distill.stream_teacher=true"),
        ("distill.divergence=jensen_shannon", "distill.trainable=adapters"),
    )
    return [
        RunPair(f"distill {' '.join(words) or 'plain'}", DISTILL, ("dtype=fp32", *words), 2e-3)
        for words in teachers
    ]


# Running


def build_command(pair: RunPair, folder: Path) -> list[str]:
    """Return the recipe's words, whose files are in the folder."""
    output = folder / "out"
    words = [word.format(folder=folder) for word in pair.words]
    if pair.recipe == DISTILL:
        return distill_models.build_arguments(folder, output, *words)
    common = [
        f"model.preset={folder}/{pair.model}.json",
        f"max_steps={STEPS}",
        "overwrite_output_dir=true",
    ]
    if pair.data:
        labeled = labeled_runs.build_arguments(
            folder / pair.data, output, pair.recipe, "batch_size=4"
        )
        return keep_latest(*labeled, *common, *words)
    common += ["batch_size=8", "checkpoint.save_model=false", "log.every_n_steps=1000", "optimizer.lr=1e-2",
               "lr_scheduler.type=constant", "dtype=fp32"]  # fmt: skip
    return keep_latest(*build_arguments(output), *common, *words)


def write_files(pair: RunPair, folder: Path) -> None:
    """Write what the words of a case name."""
    if pair.recipe == DISTILL:
        distill_models.make_folder(folder)
        return
    shapes = FAMILIES | {"untied": {}, "tied": {"tie_word_embeddings": True}}
    for name, changes in shapes.items():
        (folder / f"{name}.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    for name in MIXTURES:
        write_mixture(name, folder)
    labeled_runs.write_margins(folder)
    labeled_runs.write_answers(folder)
    labeled_runs.write_classes(folder)


def run_pair(pair: RunPair, second: str) -> dict[str, Any]:
    """Return what each device recorded: its exit code, then losses and gradient norms, or what it
    said last.
    """
    register("loss", LOSS)(smoothed)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # of this process, which is the case's alone
    os.dup2(silent, 2)
    result: dict[str, Any] = {
        "name": pair.name,
        "words": list(pair.words),
        "tolerance": pair.tolerance,
    }
    with tempfile.TemporaryDirectory(prefix="cpu-and-cuda-") as temporary:
        folder = Path(temporary)
        write_files(pair, folder)
        for number, device in enumerate(("cpu", second)):
            torch._dynamo.reset()
            words = keep_latest(
                *build_command(pair, folder), f"device={'auto' if device == 'cuda' else device}"
            )
            run = run_here(
                keep_latest(*words, *(pair.basis if number == 0 else ())), recipe=pair.recipe
            )
            lines = (
                [line for line in read_metrics(folder / "out") if "loss" in line]
                if run.code == 0
                else []
            )
            result["cpu" if number == 0 else "second"] = {
                "device": device,
                "code": run.code,
                "losses": [line["loss"] for line in lines],
                "norms": [line["grad_norm"] for line in lines],
                "said": "" if run.code == 0 else str(run.said[-1]).replace(temporary, "FOLDER"),
            }
    return result


def compute_difference(row: Mapping[str, Any]) -> float | None:
    """Return the largest relative difference of the losses; None where a run has none."""
    pairs = (
        list(zip(row["cpu"]["losses"], row["second"]["losses"], strict=False))
        if "cpu" in row
        else []
    )
    return max(abs(ours - other) / max(abs(ours), 1e-9) for ours, other in pairs) if pairs else None


def main(argv: list[str]) -> int:
    """Run the cases and write the report; 1 if two runs differ by more than their tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--second", choices=("cpu", "cuda"), help="the device beside the CPU; default: a GPU's"
    )
    parser.add_argument("--only", default="", help="words of the names of the cases to run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all of it")
    parser.add_argument(
        "--processes", type=int, default=PROCESSES, help="how many run cases side by side"
    )
    parser.add_argument(
        "--part", type=int, help="of these, the one that this process is; it writes no page"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "docs" / "measurements",
        help="folder of the report",
    )
    options = parser.parse_args(argv)
    second = options.second or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.part is not None:
        _run_part(options, second)
        return 0
    device = (
        run_apart(describe_device, CASE_SECONDS)
        if second == "cuda"
        else {"type": "cpu", "name": "cpu"}
    )
    report = begin_report("cpu_and_cuda", argv, device=device, hardware=look_up_hardware(device))
    report["command"] = " ".join(["python -m benchmarks.cpu_and_cuda", *argv])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cpu-and-cuda-") as folder:
        words = [
            sys.executable,
            "-m",
            "benchmarks.cpu_and_cuda",
            *argv,
            "--second",
            second,
            "--output",
            folder,
        ]
        parts = [
            subprocess.Popen([*words, "--part", str(number)], cwd=REPOSITORY)
            for number in range(options.processes)
        ]
        for part in parts:
            part.wait()
        for number in range(options.processes):
            report["rows"] += json.loads(
                (Path(folder) / f"{number}.json").read_text(encoding="utf-8")
            )
    report["seconds"] = round(time.monotonic() - started)
    paths = write_pair(
        options.output / f"cpu-and-cuda-{name_device(device)}", report, format_page(report)
    )
    print(summarize(report), *paths, sep="\n")
    return 1 if any(judge_row(row) == DIFFERS for row in report["rows"]) else 0


def _run_part(options: argparse.Namespace, second: str) -> None:
    """Run every so many-th case, as long as there is time, and leave the rows in the folder."""
    torch.set_num_threads(2)
    started = time.monotonic()
    rows = []
    for pair in [pair for pair in list_cases() if options.only in pair.name][
        options.part :: options.processes
    ]:
        left = options.minutes * 60 - (time.monotonic() - started)
        if left <= 0:
            rows.append({"name": pair.name, "skipped": "no time left"})
            continue
        found = run_apart(functools.partial(run_pair, pair, second), min(CASE_SECONDS, left))
        rows.append(found if "name" in found else {"name": pair.name, **found})
        print(
            f"{time.monotonic() - started:5.0f} s  {pair.name}: {judge_row(rows[-1])}", flush=True
        )
    (options.output / f"{options.part}.json").write_text(json.dumps(rows), encoding="utf-8")


# The page

EQUAL, DIFFERS, REFUSED, ONE_SIDE, NOT_RUN = (
    "equal",
    "differs",
    "refused by both",
    "refused by one",
    "not run",
)


def judge_row(row: Mapping[str, Any]) -> str:
    """Return what came of a row, in one of five words."""
    if "cpu" not in row:
        return NOT_RUN
    apart = compute_difference(row)
    if apart is not None:
        return EQUAL if apart <= row["tolerance"] else DIFFERS
    return REFUSED if row["cpu"]["code"] and row["second"]["code"] else ONE_SIDE


def summarize(report: Mapping[str, Any]) -> str:
    """Return how many rows came out how, in a line."""
    verdicts = [judge_row(row) for row in report["rows"]]
    compared = [row for row in report["rows"] if compute_difference(row) is not None]
    fp32 = [
        compute_difference(row) or 0.0
        for row in compared
        if row["tolerance"] <= 1e-3 and judge_row(row) == EQUAL
    ]
    line = f"{verdicts.count(EQUAL)} of {len(compared)} equal within their tolerances"
    line += f" (those of at most 1e-3 to {max(fp32):.1e})" if fp32 else ""
    apart = [
        f"{row['name']} by {compute_difference(row):.1e}"
        for row in compared
        if judge_row(row) == DIFFERS
    ]
    line += f"; differs: {', '.join(apart)}" if apart else ""
    told = [
        f"{verdicts.count(word)} {word}"
        for word in (REFUSED, ONE_SIDE, NOT_RUN)
        if verdicts.count(word)
    ]
    return "; ".join([line, *told])


def format_page(report: Mapping[str, Any]) -> str:
    """Return the page."""
    gpu = report["device"].get("type") == "cuda"
    lines = [
        f"# The same runs on the CPU and on {'CUDA' if gpu else 'the CPU again: a dry run'}",
        "",
    ]
    lines += [*format_head(dict(report)), "", HOW, "", f"- {summarize(report)}", ""]
    lines += ["| run | losses on the CPU | differ by | tolerance | |", "|---|---|---:|---:|---|"]
    for row in sorted(report["rows"], key=lambda row: (judge_row(row) != DIFFERS, row["name"])):
        apart = compute_difference(row)
        if apart is None:
            continue
        losses = ", ".join(f"{loss:.5f}" for loss in row["cpu"]["losses"])
        lines.append(
            f"| {_format_row(row)} | {losses} | {apart:.1e} | {row['tolerance']:g} | {judge_row(row)} |"
        )
    rest = [row for row in report["rows"] if compute_difference(row) is None]
    if rest:
        lines += ["", "## Not compared", "", "| run | | CPU | second |", "|---|---|---|---|"]
    for row in sorted(rest, key=lambda row: row["name"]):
        said = [_describe_side(row[side]) if side in row else "" for side in ("cpu", "second")]
        why = row.get("skipped") or row.get("failed") or judge_row(row)
        lines.append(f"| {_format_row(row)} | {why} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


HOW = f"""{STEPS} steps of a tiny model on one process, the same rows in the same order, weights \
from the same seed. `{{folder}}` is the run's own files. A difference is the largest of the steps' \
losses, relative to the CPU's."""


def _format_row(row: Mapping[str, Any]) -> str:
    words = " ".join(row.get("words", ()))
    return f"{row['name']}: `{words}`" if words and words not in row["name"] else row["name"]


def _describe_side(side: Mapping[str, Any]) -> str:
    return side["said"].replace("|", "/") if side["code"] else "trains"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
