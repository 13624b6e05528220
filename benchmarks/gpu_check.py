"""Measure on a machine with a CUDA GPU what fine-tuning Llama 3 takes, in memory and in time.

`python benchmarks/gpu_check.py [PART]`: a part is one of PARTS; without one, `streams` and
`kernels` run, then the cases of `gpu_cases.list_cases`. A case is one measurement, in a process of
its own, so that running out of memory spoils no other. Without a GPU, tiny models on the CPU check
the code alone. `run_apart`, `describe_device` and `fill_weights` serve the parts too.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

REPOSITORY = Path(__file__).resolve().parents[1]
# Run as a file, not as a module, so that it works where nothing is installed.
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu_cases import CAP_GIB, RECIPES, Case, describe, list_cases  # noqa: E402
from benchmarks.gpu_report import write_report  # noqa: E402
from recipe_lib.adapters import is_adapter  # noqa: E402
from recipe_lib.config.schema import (  # noqa: E402
    FullFinetuneConfig,
    LoraConfig,
    LoraFinetuneConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from recipe_lib.data.batches import Batch, StepBatches  # noqa: E402
from recipe_lib.memory import PeakMemory  # noqa: E402
from recipe_lib.models import DecoderSpec  # noqa: E402
from recipe_lib.models.weight_names import compute_parameter_shapes  # noqa: E402
from recipe_lib.parallel import (  # noqa: E402
    Parallel,
    describe_units,
    resolve_wrapping,
    start_world,
)
from recipe_lib.units import GIB  # noqa: E402

TOTAL_SECONDS = 9 * 60  # of all cases
LEAST_SECONDS = 5  # a process cannot start and measure in less
# Modules with a main(words), imported only when their part is asked for.
PARTS = {
    "streams": "benchmarks.gpu_streams",  # races and waits, next to torch's sanitizer
    "kernels": "benchmarks.gpu_kernels",  # fused kernels at the shapes of 8B
    "plan": "benchmarks.gpu_plan",  # planned peaks against measured ones
    "times": "benchmarks.gpu_times",  # planned seconds of a step against measured ones
    "ladder": "benchmarks.gpu_ladder",  # what each memory-saving setting saves and costs
    "cards": "benchmarks.gpu_cards",  # settings of docs/fit.md, under a 24 GB card's cap
    "tensor": "benchmarks.gpu_tensor",  # tensor parallelism beside torch's own styles
    "doctor": "benchmarks.gpu_doctor",  # `tune doctor`: GPUs, links, copies, folders
    "peers": "benchmarks.peers.gpu_peers",  # this tool and others, head to head
}
# Dense bf16 matmul rates that datasheets give, FLOP/s, by a part of the device's name. The first
# part that the name contains counts.
DATASHEET_RATES = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def main(argv: list[str] | None = None) -> int:
    """Run a part; or all cases, with the report written after each, so that nothing is lost.

    Return 1 if a part or a case failed.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in PARTS:
        return int(importlib.import_module(PARTS[arguments[0]]).main(arguments[1:]))
    parser = argparse.ArgumentParser(
        description="Measure what fine-tuning takes on a GPU. Parts: streams, kernels, plan, times,"
        " ladder, cards, tensor, doctor, peers; PART --help describes one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "docs" / "measurements",
        help="folder of the report",
    )
    options = parser.parse_args(arguments)
    # First, since a race would make every other figure worth nothing; in a process of its own that
    # has no device yet.
    part_failed = _run_part("streams", options.output) != 0
    started = time.monotonic()
    # Imported once and inherited by every case's process; this one never touches the device.
    for method in RECIPES:
        load_recipe(method)
    device = run_apart(describe_device, 60)
    gpu = device.get("type") == "cuda"
    # A GPU's cases run with the fused kernels, so these are checked before.
    if gpu and _run_part("kernels", options.output) != 0:
        part_failed = True
    report: dict[str, Any] = {
        "kind": "GPU check" if gpu else "dry run, CPU",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/gpu_check.py", *arguments]),
        "device": device,
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "cap_gib": CAP_GIB,
        "cases": [],
    }
    case_queue = list_cases(gpu)
    while case_queue:
        case = case_queue.pop(0)
        seconds_left = TOTAL_SECONDS - (time.monotonic() - started)
        result = {"failed": "no time left"}
        if seconds_left > LEAST_SECONDS:
            result = run_apart(functools.partial(measure, case), min(case.seconds, seconds_left))
        print(
            f"{time.monotonic() - started:5.0f} s  {describe(case)}: {summarize(result)}",
            flush=True,
        )
        report["cases"].append({"case": dataclasses.asdict(case), "result": result})
        # What does not fit a 24 GB card is measured once more, with all of this GPU's memory.
        if gpu and case.capped and "out_of_memory" in result:
            case_queue.append(dataclasses.replace(case, capped=False))
        report["seconds"] = round(time.monotonic() - started)
        paths = write_report(report, options.output)
    print("\n".join(map(str, paths)))
    case_failed = any("failed" in entry["result"] for entry in report["cases"])
    return 1 if part_failed or case_failed else 0


def _run_part(part: str, output: Path) -> int:
    """Run another part of this program in a process of its own and return its exit code."""
    command = [sys.executable, __file__, part, "--output", str(output)]
    return subprocess.run(command, check=False).returncode


def run_apart(fn: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Run `fn` in a forked process and return its dict, which JSON must be able to carry.

    Returns {"failed": why} if the process crashes, raises or takes longer than `seconds`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        answer_file = Path(folder) / "answer.json"

        def write_answer() -> None:
            # The fork has no threads of torch's pool. Make them here, before several callers do.
            torch.set_num_threads(torch.get_num_threads())
            answer_file.write_text(json.dumps(fn()))

        process = context.Process(target=write_answer)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return {"failed": f"not done after {seconds:.0f} s"}
        if process.exitcode or not answer_file.exists():
            return {"failed": f"process ended with {process.exitcode}"}
        return json.loads(answer_file.read_text())


def parse_minutes(text: str) -> float:
    """Parse a time limit that was typed.

    Raises ArgumentTypeError unless it is a finite number above 0.
    """
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"found {text}, expected more than 0")
    return minutes


def describe_device() -> dict[str, Any]:
    """Return what is measured: `type` (`cuda` or `cpu`) and `name`, of a GPU more.

    `memory_gib`, `driver`, `power_limit` (text), `cuda` (version) and `datasheet_rate` (bf16
    FLOP/s; None of a GPU that DATASHEET_RATES does not have).
    """
    accelerator = torch.get_device_module("cuda")
    if not accelerator.is_available():
        return {"type": "cpu", "name": platform.processor() or platform.machine()}
    properties = accelerator.get_device_properties(0)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,power.limit",
        "--format=csv,noheader",
        "--id=0",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        driver, power_limit = answer.stdout.split(",")
    except (OSError, subprocess.SubprocessError, ValueError):
        driver = "unknown"
        power_limit = "unknown"
    datasheet_rate = next(
        (rate for name, rate in DATASHEET_RATES.items() if name in properties.name), None
    )
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 2),
        "driver": driver.strip(),
        "power_limit": power_limit.strip(),
        "cuda": torch.version.cuda,
        "datasheet_rate": datasheet_rate,
    }


def load_recipe(method: str) -> ModuleType:
    """Load the recipe of a method as a module, once.

    Recipes are files to copy, not a package, so they are loaded by path. Raises ImportError if the
    file cannot be loaded.
    """
    name, _ = RECIPES[method]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "recipes" / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"recipes/{name}.py cannot be loaded")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def measure(case: Case) -> dict[str, Any]:
    """Measure one case, in a process of its own, and return its result."""
    if case.kind == "matmul":
        return measure_matmul()
    if case.kind == "memory":
        # Collectives return at once and move nothing, so values mean nothing. But every tensor is
        # allocated where a real rank of N allocates it; NCCL's own memory is missing.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        build_config: Callable[..., FullFinetuneConfig] = FullFinetuneConfig
        if case.method != "full":
            lora = LoraConfig(quantize_base="nf4" if case.method == "qlora" else "none")
            build_config = functools.partial(LoraFinetuneConfig, lora=lora)
        cfg = build_config(
            model=ModelConfig(preset=case.preset),
            optimizer=OptimizerConfig(lr=1e-5),
            parallel=ParallelConfig(fsdp_wrap_policy=case.wrapping),
            memory=MemoryConfig(activation_checkpointing=case.activation_checkpointing),
            batch_size=case.batch_size,
            max_seq_len=case.sequence,
            compile=case.compile,
            output_dir=folder,
        )
        _, class_name = RECIPES[case.method]
        recipe_class = getattr(load_recipe(case.method), class_name)
        with start_world(cfg) as world:
            return run_steps(case, cfg, recipe_class(cfg, world))


def run_steps(case: Case, cfg: FullFinetuneConfig, recipe: Any) -> dict[str, Any]:
    """Set the recipe up and run its training step as often as the case says.

    Returns `seconds`, `losses` and `grad_norms` by step, `units` (FSDP units, in words),
    `first_step` and `later_steps` (peaks, bytes) and `alloc_retries`; of a speed case also the keys
    of `measure_speed`; after running out of memory `out_of_memory` (the phase) and `at_failure`.
    """
    device = recipe.device
    module = torch.get_device_module(device)
    if case.capped and device.type != "cpu":
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, CAP_GIB * GIB / total), device)
    peak = PeakMemory(device)
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "seconds": []}
    phase = "setup"
    try:
        recipe.setup_model()
        fill_weights(recipe.model)
        recipe.setup_optimizer()
        units = resolve_wrapping(recipe.model, cfg.parallel.fsdp_wrap_policy)
        result["units"] = describe_units(recipe.model, Parallel(units=units))
        batches = make_random_batches(case, recipe)
        for step in range(1, case.steps + 1):
            phase = f"step {step}"
            # The first step is apart, since optimizer states are made at its end. The peak of all
            # later steps is one figure, so it is not reset between them.
            if step <= 2:
                peak.reset()
            with record_time(device, result["seconds"]):
                step_result = recipe.train_step(batches)
            if case.kind == "speed":
                result["losses"].append(round(step_result.loss.item(), 5))
                result["grad_norms"].append(round(step_result.grad_norm.item(), 5))
            result["first_step" if step == 1 else "later_steps"] = peak.read()
    except torch.OutOfMemoryError:
        result["out_of_memory"] = phase
        result["at_failure"] = peak.read()
    if device.type != "cpu":
        stats = module.memory_stats(device)
        result["alloc_retries"] = stats.get("num_alloc_retries", 0)
        result["allocator"] = module.memory.get_allocator_backend()
    if case.kind == "speed" and len(result["seconds"]) == case.steps:
        result |= measure_speed(
            case, spec=recipe.spec, model=recipe.model, seconds=result["seconds"]
        )
    return result


@contextmanager
def record_time(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Append the seconds that the block takes to a list, the device's work included."""
    began = time.perf_counter()
    yield
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    seconds.append(round(time.perf_counter() - began, 4))


@torch.no_grad()
def fill_weights(model: torch.nn.Module) -> None:
    """Fill the model with random weights, drawn on the device.

    Faster than a recipe's own initialization, which gives the same weights on any number of ranks.
    """
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        large_on_host = local.device.type == "cpu" and local.numel() > 2**22
        # Drawing would take minutes in host memory: large matrices and codes get one number there.
        if large_on_host and name.endswith("codes"):
            local.view(torch.uint8).fill_(0x5A)  # arbitrary
        elif large_on_host:
            local.fill_(0.02)
        # NF4: random codes, and scales of 0, so that all blocks have the scale of the last factor.
        elif name.endswith("weight_codes"):
            local.view(torch.uint8).random_(0, 256)
        elif name.endswith("weight_scales"):
            local.view(torch.uint8).random_(0, 1)
        elif name.endswith("weight_factors"):
            local.fill_(0.04)
        elif name.endswith("norm.weight"):
            local.fill_(1.0)
        else:
            local.normal_(0.0, 0.02)


def make_random_batches(case: Case, recipe: Any) -> StepBatches:
    """Make a step's batches: one micro-batch of random tokens, all of them label tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch_size, case.sequence + 1)
    tokens = torch.randint(0, recipe.spec.vocab_size, shape, generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).to(recipe.device)
    num_tokens = case.batch_size * case.sequence * recipe.world.data_ranks
    return StepBatches(
        [batch], num_label_tokens=num_tokens, total_tokens=num_tokens, padded_tokens=num_tokens
    )


def measure_speed(
    case: Case, spec: DecoderSpec, model: torch.nn.Module, seconds: list[float]
) -> dict[str, Any]:
    """Return tokens and model FLOP a second over the second half of the steps.

    seconds: of each step. FLOP of recomputed activations are not counted, as usual for MFU.
    """
    steady_seconds = seconds[len(seconds) // 2 :]
    tokens = case.batch_size * case.sequence
    num_matrix_parameters = sum(
        math.prod(shape) for shape in compute_parameter_shapes(spec).values() if len(shape) == 2
    )
    num_adapter_parameters = sum(
        parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name)
    )
    if not spec.tied:
        num_matrix_parameters -= spec.vocab_size * spec.width  # the embedding is looked up
    # 6 x sequence x heads x head width a layer and token: half of 12, since attention is causal.
    attention_flop = 6 * spec.num_layers * case.sequence * spec.num_heads * spec.head_width
    # A parameter in a matmul takes 2 FLOP a token in forward and 4 in backward, of which 2 are for
    # its own gradient. A frozen one has none.
    matrix_flop = (4 if num_adapter_parameters else 6) * num_matrix_parameters
    flop_per_token = matrix_flop + 6 * num_adapter_parameters + attention_flop
    tokens_per_second = tokens * len(steady_seconds) / sum(steady_seconds)
    return {
        "tokens_per_second": round(tokens_per_second, 1),
        "flop_per_token": flop_per_token,
        "flop_per_second": flop_per_token * tokens_per_second,
    }


def measure_matmul() -> dict[str, Any]:
    """Measure the device's bf16 matmul rate: the best of several runs of one large product."""
    accelerator = torch.get_device_module("cuda")
    device = torch.device("cuda" if accelerator.is_available() else "cpu")
    size, repeats = (8192, 30) if device.type != "cpu" else (256, 2)  # square matrices
    left_matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right_matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds: list[float] = []
    for _ in range(4):
        with record_time(device, seconds):
            for _ in range(repeats):
                left_matrix @ right_matrix
    best_seconds = max(min(seconds[1:]), 1e-9)  # the first run warms up
    return {"size": size, "flop_per_second": 2 * size**3 * repeats / best_seconds}


def summarize(result: dict[str, Any]) -> str:
    """Describe the result of a case in a few words, for the log."""
    if "failed" in result:
        return f"failed, {result['failed']}"
    if "out_of_memory" in result:
        return f"out of memory in {result['out_of_memory']}"
    if "tokens_per_second" in result:
        return f"{result['tokens_per_second']:.0f} tokens/s"
    if "later_steps" in result:
        return f"{result['later_steps']['active'] / GIB:.2f} GiB active at the peak"
    rate = result.get("flop_per_second", math.nan)
    return f"{rate / 1e12:.1f} TFLOP/s"


if __name__ == "__main__":
    sys.exit(main())
