"""Compare the losses of the same tiny runs on the CPU and on CUDA, and write a page.

Run `python -m benchmarks.cpu_and_cuda` on a GPU (ten minutes); `--second cpu` is a dry run. A case
is a pair of runs, three steps on each device. Levers (config keys that trade memory for time or
precision) and their values are those of `tests/recipes`. A row is a case's entry in the report.
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
from collections.abc import Iterable, Mapping
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

MINUTES = 9.0  # default limit of all cases together
CASE_SECONDS = 75  # limit of one case, both runs together
STEPS = 3  # of each run
PROCESSES = 3  # default, that run cases side by side
# The config.json of a tiny Llama. The dicts after it are what other families change in it.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Sliding windows of 24 tokens are shorter than the sequences, so that they have an effect.
GEMMA = {
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "tie_word_embeddings": True,
}
# Llama 3.1's RoPE scaling.
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# By name of a model: changes of LLAMA.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama31": {"rope_scaling": SCALED},
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 24,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        **GEMMA,
    },
    "gemma3_text": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **GEMMA},
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
}
# Overrides, as on a command line.
ADAPTERS = ("recipe=lora_finetune_distributed", "lora.rank=8", "lora.alpha=16")
PACKED = ("data.packing=true", "data.max_samples=300")
OFFLOADED_EXPERTS = "memory.stream_layers=experts"
# Layers in host memory, trained in full, need the other three; for frozen ones the first will do.
STREAMED = (
    "memory.stream_layers=true",
    "memory.optimizer_in_backward=true",
    "clip_grad_norm=null",
    "memory.optimizer_offload=true",
)


@dataclass(frozen=True)
class RunPair:
    """Hold a run that both devices make."""

    name: str
    recipe: str  # the recipe's name, such as FULL
    words: tuple[str, ...]  # overrides, with `{folder}` for the folder of the case's files
    tolerance: float  # largest relative difference of losses that counts as equal
    model: str = "llama"  # name of a config.json that `write_files` writes
    basis: tuple[str, ...] = ()  # overrides of the CPU's run alone, for what a CPU cannot do
    data: str = ""  # file name of labeled examples; empty: the demo's data


def list_cases() -> list[RunPair]:
    """Return all cases in an order drawn once, so that what a cut run has reached is a sample."""
    pairs = [
        *_list_lever_cases(),
        *_list_family_cases(),
        *_list_mixture_cases(),
        *_list_adapter_cases(),
        *_list_low_precision_cases(),
        *_list_labeled_cases(),
        *_list_distilled_cases(),
    ]
    random.Random(1).shuffle(pairs)
    return pairs


def _drop_device(words: Iterable[str]) -> tuple[str, ...]:
    """Return overrides without the device, since the two runs of a pair differ in it."""
    return tuple(word for word in words if not word.startswith("device="))


def _list_lever_cases() -> list[RunPair]:
    """Return each lever that one process can have, and the tests' runs of many levers at once."""
    pairs = []
    for setting in LEVERS:
        # 2 is the default of the tests. HALVING are settings that divide the ranks in two.
        if setting.ranks == 2 and not HALVING & set(setting.overrides):
            pair = RunPair(
                f"full {setting}",
                FULL,
                words=_drop_device(setting.overrides),
                # The tests' tolerances are for two runs on one device.
                tolerance=max(2e-4, setting.tolerance),
            )
            pairs.append(pair)
    for index, settings in enumerate(TOGETHER):
        words: dict[str, None] = {}  # an ordered set: levers may share an override
        tolerance = 2e-4
        for setting in keep_one_rank(settings):
            words |= dict.fromkeys(setting.overrides)
            tolerance = max(tolerance, setting.tolerance)
        pair = RunPair(
            f"full together {index}", FULL, words=_drop_device(words), tolerance=tolerance
        )
        pairs.append(pair)
    return pairs


def _list_family_cases() -> list[RunPair]:
    """Return the runs of every family of dense models."""
    pairs = []
    for model in FAMILIES:
        pairs += _list_cases_of_family(model)
    return pairs


def _list_cases_of_family(model: str) -> list[RunPair]:
    """Return the runs of one of FAMILIES."""
    pairs = []

    def add(name: str, *words: str, tolerance: float = 2e-2, recipe: str = FULL) -> None:
        pairs.append(
            RunPair(f"family {model} {name}", recipe, words, tolerance=tolerance, model=model)
        )

    checkpointed = (*PACKED, "memory.activation_checkpointing=full")
    add("fp32", "dtype=fp32", tolerance=2e-4)
    add("fp32 packed checkpointed", "dtype=fp32", *checkpointed, tolerance=2e-4)
    add("bf16", "dtype=bf16")
    add("bf16 packed checkpointed", "dtype=bf16", *checkpointed)
    add("compiled bf16", "dtype=bf16", "compile=true")
    add("transformers bf16", "dtype=bf16", "model.implementation=transformers")
    add("nf4 bf16", *ADAPTERS, "dtype=bf16", "lora.quantize_base=nf4", recipe=LORA)
    return pairs


def _list_mixture_cases() -> list[RunPair]:
    """Return the runs of every mixture of experts."""
    pairs = []
    for model in MIXTURES:
        pairs += _list_cases_of_mixture(model)
    return pairs


def _list_cases_of_mixture(model: str) -> list[RunPair]:
    """Return the runs of one of the tests' MIXTURES."""
    pairs = []

    def add(name: str, *words: str, tolerance: float = 3e-2, recipe: str = FULL) -> None:
        pairs.append(
            RunPair(f"moe {model} {name}", recipe, words, tolerance=tolerance, model=model)
        )

    add("full fp32", "dtype=fp32", tolerance=2e-4)
    add("full bf16", "dtype=bf16")
    adapted = (*ADAPTERS, "lora.target_modules=[q, v, router, experts]", "dtype=bf16")
    for base in ("none", "nf4", "int8"):
        words = (*adapted, f"lora.quantize_base={base}")
        add(f"lora {base} bf16", *words, recipe=LORA)
        if base != "none":
            name = f"lora {base} bf16 {OFFLOADED_EXPERTS}"
            add(name, *words, OFFLOADED_EXPERTS, recipe=LORA)
    add("full compiled bf16", "dtype=bf16", "compile=true")
    return pairs


def _list_adapter_cases() -> list[RunPair]:
    """Return the tests' runs of adapters that one process can have, and levers for each base."""
    pairs = []
    # A kind is a set of adapter settings, such as the base's quantization.
    for kind, lever in test_adapter_levers.CASES:
        if lever.ranks != 2 or lever.refuses(kind):
            continue
        words = _drop_device((*ADAPTERS, *kind.overrides, *lever.overrides))
        if lever.overrides == test_adapter_levers.PACKED:
            # The tests' few examples fill too few packed sequences.
            words = (*words, *PACKED)
        pair = RunPair(
            f"adapter {kind}: {lever or 'alone'}",
            LORA,
            words=tuple(keep_latest(*words)),
            tolerance=max(kind.tolerance, lever.tolerance, 5e-4),
        )
        pairs.append(pair)
    more_levers = {
        "compiled": "compile=true",
        "fused off": "fused_kernels=false",
        "streamed": STREAMED[0],
        "transformers": "model.implementation=transformers",
    }
    for base in ("none", "nf4", "int8"):
        for name, word in more_levers.items():
            words = (*ADAPTERS, "dtype=bf16", f"lora.quantize_base={base}", word)
            pairs.append(RunPair(f"adapter {name} {base} bf16", LORA, words=words, tolerance=2e-2))
    return pairs


def _list_low_precision_cases() -> list[RunPair]:
    """Return runs with matmuls, optimizer states and weights of 8 and 4 bits.

    A CPU has no FP8: its run leaves that setting out, and the losses are compared all the same.
    """
    pairs = []

    def add(name: str, *words: str, tolerance: float, basis: tuple[str, ...] = ()) -> None:
        pairs.append(RunPair(name, FULL, words, tolerance=tolerance, basis=basis))

    bf16 = "dtype=bf16"
    add("streamed full fp32", *STREAMED, tolerance=2e-4)
    states = "optimizer.state_bits=8"
    add("streamed full bf16, states of 8 bits", *STREAMED, bf16, states, tolerance=2e-2)
    add("matmul fp8", bf16, "matmul_dtype=fp8", tolerance=5e-2, basis=("matmul_dtype=null",))
    add("matmul int8", bf16, "matmul_dtype=int8", tolerance=5e-2)
    add("qat int4", bf16, "qat=int4", "qat_group_size=32", tolerance=5e-2)
    add("qat int8", bf16, "qat=int8", tolerance=5e-2)
    add("qat fp8", bf16, "qat=fp8", tolerance=5e-2, basis=("qat=null",))
    return pairs


def _list_labeled_cases() -> list[RunPair]:
    """Return runs that train on preference pairs, judged answers or classes."""
    pairs = []

    def add(name: str, *words: str, recipe: str, data: str) -> None:
        for dtype, tolerance in (("fp32", 1e-3), ("bf16", 5e-2)):
            pair = RunPair(
                f"{name} {dtype}",
                recipe,
                words=(*words, f"dtype={dtype}"),
                tolerance=tolerance,
                data=f"{data}.jsonl",
            )
            pairs.append(pair)

    preference = "data.format=preference"
    lora = "dpo.trainable=adapters"
    add("dpo", preference, recipe=DPO, data="pairs")
    add("ipo lora", preference, "dpo.loss=ipo", lora, recipe=DPO, data="pairs")
    add("simpo", preference, "dpo.loss=simpo", recipe=DPO, data="pairs")
    add("kto", "data.format=kto", "dpo.loss=kto", recipe=DPO, data="answers")
    add("reward", preference, recipe=REWARD, data="pairs")
    classification = ("data.format=classification", "reward.loss=classification")
    add("classes", *classification, "reward.num_labels=3", recipe=REWARD, data="classes")
    return pairs


def _list_distilled_cases() -> list[RunPair]:
    """Return runs of distillation."""
    pairs = []
    for overrides in (
        (),
        ("distill.quantize_teacher=nf4",),
        ("distill.quantize_teacher=none", "distill.stream_teacher=true"),
        ("distill.divergence=jensen_shannon", "distill.trainable=adapters"),
    ):
        name = f"distill {' '.join(overrides) or 'plain'}"
        pairs.append(RunPair(name, DISTILL, words=("dtype=fp32", *overrides), tolerance=2e-3))
    return pairs


# Running


def build_command(pair: RunPair, folder: Path) -> list[str]:
    """Return the arguments of the recipe's command line for a case.

    folder: where `write_files` has written; the run's output goes below it.
    """
    output = folder / "out"
    overrides = [word.format(folder=folder) for word in pair.words]
    if pair.recipe == DISTILL:
        return distill_models.build_arguments(folder, output, *overrides)
    common = [
        f"model.preset={folder}/{pair.model}.json",
        f"max_steps={STEPS}",
        "overwrite_output_dir=true",
    ]
    if pair.data:
        labeled = labeled_runs.build_arguments(
            folder / pair.data, output, pair.recipe, "batch_size=4"
        )
        return keep_latest(*labeled, *common, *overrides)
    common += [
        "batch_size=8",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        "optimizer.lr=1e-2",
        "lr_scheduler.type=constant",
        "dtype=fp32",
    ]
    return keep_latest(*build_arguments(output), *common, *overrides)


def write_files(pair: RunPair, folder: Path) -> None:
    """Write the models and data that any case may name into the folder."""
    if pair.recipe == DISTILL:
        distill_models.make_folder(folder)
        return
    # The tests' overrides name the last two by file.
    shapes = FAMILIES | {"untied": {}, "tied": {"tie_word_embeddings": True}}
    for name, changes in shapes.items():
        (folder / f"{name}.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    for name in MIXTURES:
        write_mixture(name, folder)
    labeled_runs.write_margins(folder)
    labeled_runs.write_answers(folder)
    labeled_runs.write_classes(folder)


def run_pair(pair: RunPair, second: str) -> dict[str, Any]:
    """Run a case on the CPU and on the second device and return its row of the report.

    Keys: `name`, `words`, `tolerance`, and `cpu` and `second` as `_run_on` returns them. Silences
    this process for good, so call it in a process of its own.
    """
    register("loss", LOSS)(smoothed)  # the tests' settings name this loss
    # Two runs' logs a case would bury the one line that is printed for it.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    result: dict[str, Any] = {
        "name": pair.name,
        "words": list(pair.words),
        "tolerance": pair.tolerance,
    }
    with tempfile.TemporaryDirectory(prefix="cpu-and-cuda-") as temporary:
        folder = Path(temporary)
        write_files(pair, folder)
        result["cpu"] = _run_on(pair, folder, device="cpu", more_words=pair.basis)
        result["second"] = _run_on(pair, folder, device=second)
    return result


def _run_on(
    pair: RunPair, folder: Path, *, device: str, more_words: Iterable[str] = ()
) -> dict[str, Any]:
    """Run a case on a device and return its exit code, losses and gradient norms by step.

    more_words: overrides that come last. `said` is the last line of a run that failed, else empty.
    """
    torch._dynamo.reset()  # nothing compiled for the other device is used again
    device_word = f"device={'auto' if device == 'cuda' else device}"
    arguments = keep_latest(*build_command(pair, folder), device_word, *more_words)
    run = run_here(arguments, recipe=pair.recipe)
    steps = []
    error = ""
    if run.code == 0:
        steps = [line for line in read_metrics(folder / "out") if "loss" in line]
    else:
        error = str(run.said[-1]).replace(str(folder), "FOLDER")
    return {
        "device": device,
        "code": run.code,
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "said": error,
    }


def compute_difference(row: Mapping[str, Any]) -> float | None:
    """Return the largest relative difference of a step's losses; None where a run has none."""
    if "cpu" not in row:  # skipped or failed as a process
        return None
    # Not strict: a run that was refused has no losses.
    differences = [
        abs(cpu_loss - second_loss) / max(abs(cpu_loss), 1e-9)
        for cpu_loss, second_loss in zip(
            row["cpu"]["losses"], row["second"]["losses"], strict=False
        )
    ]
    return max(differences, default=None)


def main(argv: list[str]) -> int:
    """Run the cases and write the report.

    Return 1 if the losses of a case differ by more than its tolerance.
    """
    parser = argparse.ArgumentParser(
        description="Compare the losses of the same tiny runs on the CPU and on CUDA.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    device = {"type": "cpu", "name": "cpu"}
    if second == "cuda":
        device = run_apart(describe_device, CASE_SECONDS)
    report = begin_report("cpu_and_cuda", argv, device=device, hardware=look_up_hardware(device))
    report["command"] = " ".join(["python -m benchmarks.cpu_and_cuda", *argv])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cpu-and-cuda-") as folder:
        command = [sys.executable, "-m", "benchmarks.cpu_and_cuda", *argv]
        # Of an option that is given twice, argparse takes the last.
        command += ["--second", second, "--output", folder]
        parts = [
            subprocess.Popen([*command, "--part", str(number)], cwd=REPOSITORY)
            for number in range(options.processes)
        ]
        for part in parts:
            part.wait()
        for number in range(options.processes):
            part_file = Path(folder) / f"{number}.json"
            report["rows"] += json.loads(part_file.read_text(encoding="utf-8"))
    report["seconds"] = round(time.monotonic() - started)
    paths = write_pair(
        options.output / f"cpu-and-cuda-{name_device(device)}", report, format_page(report)
    )
    print(summarize(report), *paths, sep="\n")
    return 1 if any(judge_row(row) == DIFFERS for row in report["rows"]) else 0


def _run_part(options: argparse.Namespace, second: str) -> None:
    """Run every n-th case of n processes while there is time; write the rows to PART.json.

    options: as `main` parses them; `part` is this process's number, `output` the folder.
    """
    torch.set_num_threads(2)
    started = time.monotonic()
    rows = []
    selected_pairs = [pair for pair in list_cases() if options.only in pair.name]
    for pair in selected_pairs[options.part :: options.processes]:
        seconds_left = options.minutes * 60 - (time.monotonic() - started)
        if seconds_left <= 0:
            rows.append({"name": pair.name, "skipped": "no time left"})
            continue
        row = run_apart(functools.partial(run_pair, pair, second), min(CASE_SECONDS, seconds_left))
        if "name" not in row:  # the process crashed or took too long
            row = {"name": pair.name, **row}
        rows.append(row)
        print(f"{time.monotonic() - started:5.0f} s  {pair.name}: {judge_row(row)}", flush=True)
    (options.output / f"{options.part}.json").write_text(json.dumps(rows), encoding="utf-8")


# The page

# A row's verdict.
EQUAL = "equal"
DIFFERS = "differs"
REFUSED = "refused by both"
ONE_SIDE = "refused by one"
NOT_RUN = "not run"


def judge_row(row: Mapping[str, Any]) -> str:
    """Return a row's verdict, one of the five above."""
    if "cpu" not in row:
        return NOT_RUN
    difference = compute_difference(row)
    if difference is not None:
        return EQUAL if difference <= row["tolerance"] else DIFFERS
    return REFUSED if row["cpu"]["code"] and row["second"]["code"] else ONE_SIDE


def summarize(report: Mapping[str, Any]) -> str:
    """Return the number of rows of each verdict, in a line."""
    verdicts = [judge_row(row) for row in report["rows"]]
    compared_rows = [row for row in report["rows"] if compute_difference(row) is not None]
    # Tolerances up to 1e-3 are those of fp32 runs.
    fp32_differences = [
        compute_difference(row) or 0.0
        for row in compared_rows
        if row["tolerance"] <= 1e-3 and judge_row(row) == EQUAL
    ]
    line = f"{verdicts.count(EQUAL)} of {len(compared_rows)} equal within their tolerances"
    if fp32_differences:
        line += f" (those of at most 1e-3 to {max(fp32_differences):.1e})"
    differing_rows = [
        f"{row['name']} by {compute_difference(row):.1e}"
        for row in compared_rows
        if judge_row(row) == DIFFERS
    ]
    if differing_rows:
        line += f"; differs: {', '.join(differing_rows)}"
    for verdict in (REFUSED, ONE_SIDE, NOT_RUN):
        if verdicts.count(verdict):
            line += f"; {verdicts.count(verdict)} {verdict}"
    return line


def format_page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report, as `main` fills it."""
    gpu = report["device"].get("type") == "cuda"
    second = "CUDA" if gpu else "the CPU again: a dry run"
    lines = [f"# The same runs on the CPU and on {second}", ""]
    lines += [*format_head(dict(report)), "", HOW, "", f"- {summarize(report)}", ""]
    lines += ["| run | losses on the CPU | differ by | tolerance | |", "|---|---|---:|---:|---|"]
    # Those that differ come first.
    for row in sorted(report["rows"], key=lambda row: (judge_row(row) != DIFFERS, row["name"])):
        difference = compute_difference(row)
        if difference is None:
            continue
        losses = ", ".join(f"{loss:.5f}" for loss in row["cpu"]["losses"])
        lines.append(
            f"| {_format_name(row)} | {losses} | {difference:.1e} | {row['tolerance']:g}"
            f" | {judge_row(row)} |"
        )
    uncompared_rows = [row for row in report["rows"] if compute_difference(row) is None]
    if uncompared_rows:
        lines += ["", "## Not compared", "", "| run | | CPU | second |", "|---|---|---|---|"]
    for row in sorted(uncompared_rows, key=lambda row: row["name"]):
        sides = [_describe_side(row[side]) if side in row else "" for side in ("cpu", "second")]
        reason = row.get("skipped") or row.get("failed") or judge_row(row)
        lines.append(f"| {_format_name(row)} | {reason} | {' | '.join(sides)} |")
    return "\n".join(lines) + "\n"


HOW = f"""{STEPS} steps of a tiny model on one process, the same rows in the same order, weights \
from the same seed. `{{folder}}` is the run's own files. A difference is the largest of the steps' \
losses, relative to the CPU's."""


def _format_name(row: Mapping[str, Any]) -> str:
    """Return a row's name, and its overrides unless the name has them already."""
    words = " ".join(row.get("words", ()))
    return f"{row['name']}: `{words}`" if words and words not in row["name"] else row["name"]


def _describe_side(side: Mapping[str, Any]) -> str:
    """Return the last line of a run that failed, or that it trains."""
    # A bar would end the table's cell.
    return side["said"].replace("|", "/") if side["code"] else "trains"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
