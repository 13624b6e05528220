"""The collectives of all ranks compared, for every mesh of 2 to 16 ranks with every pipeline schedule.

python -m benchmarks.collective_orders --output docs/measurements/collective_orders.md
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_lib.config.mesh import fewest_micro_batches
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.plan.streams.collective_order import order_faults
from recipe_lib.plan.streams.stream_checker import StreamChecker
from recipe_lib.plan.tracing.simulate import FIRST, simulate
from recipe_lib.plan.world.simulated_device import NAME
from tests.plan.apart import settings

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
TEXT = """# Collectives of all ranks, compared

By `python -m benchmarks.collective_orders --output docs/measurements/collective_orders.md`, torch {torch}, in {seconds}
s: every mesh of {fewest} to {most} ranks, pipeline x data_replicate x data_shard x tensor, with every pipeline
schedule where there is a pipeline. Of each the first step of all ranks is simulated, on a decoder of one layer for each
stage and at least two, with the fewest micro-batches that the schedule is made for; the calls of each group are
compared, and all groups searched for a circle of waits, by NCCL's rules
([what is checked](../plan.md#streams-waits-and-collectives)). Races and works that nobody waits for are counted, too.

| ranks | meshes | with schedules | calls compared | do not meet | circles | races |
|---:|---:|---:|---:|---:|---:|---:|
{rows}
"""


@dataclass(frozen=True)
class Mesh:
    """pipeline x replicate x shard x tensor; schedule: "" without a pipeline."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    schedule: str

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pipeline * self.replicate * self.shard * self.tensor


def meshes(fewest: int, most: int) -> Iterator[Mesh]:
    """All of so many ranks."""
    for ranks in range(fewest, most + 1):
        for pipeline in _divisors(ranks):
            for replicate in _divisors(ranks // pipeline):
                for shard in _divisors(ranks // pipeline // replicate):
                    tensor = ranks // pipeline // replicate // shard
                    for schedule in SCHEDULES if pipeline > 1 else ("",):
                        yield Mesh(pipeline, replicate, shard, tensor, schedule)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def compare(mesh: Mesh) -> tuple[int, list[str], int]:
    """(calls, faults of their order, races and the like) of all ranks of a mesh."""
    stages = mesh.pipeline * (1 if mesh.schedule in ("", "gpipe", "1f1b") else 2)
    heads = mesh.tensor * (2 if mesh.tensor < 4 else 1)
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64 * mesh.tensor,
        "hidden_size": 8 * heads, "intermediate_size": 32 * mesh.tensor, "num_hidden_layers": max(2, stages),
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    overrides = [
        f"parallel.pipeline={mesh.pipeline}",
        f"parallel.data_replicate={mesh.replicate}",
        f"parallel.data_shard={mesh.shard}",
        f"parallel.tensor={mesh.tensor}",
    ]
    count = 1
    if mesh.schedule:
        count = fewest_micro_batches(ParallelConfig(pipeline=mesh.pipeline, pipeline_schedule=mesh.schedule))
        overrides += [f"parallel.pipeline_schedule={mesh.schedule}", f"gradient_accumulation_steps={count}"]
    with tempfile.TemporaryDirectory() as folder:
        preset = Path(folder) / "model.json"
        preset.write_text(json.dumps(model))
        fixed = ("batch_size=1", f"max_seq_len={16 * mesh.tensor}", "device=auto")
        recipe, cfg, wanted = settings("demo/full", mesh.ranks, f"model.preset={preset}", *fixed, *overrides)
        calls, races = {}, 0
        for rank in range(mesh.ranks):
            checker = StreamChecker(NAME)
            simulate(
                recipe, cfg, wanted.sequence, rank=rank, ranks=mesh.ranks, phases=(), steps=(FIRST,), traced=count,
                checker=checker,
            )  # fmt: skip
            calls[rank] = checker.calls
            races += len(checker.faults())
    return sum(map(len, calls.values())), order_faults(calls), races


def main() -> None:
    """Prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ranks", nargs=2, type=int, default=(2, 16), metavar=("FEWEST", "MOST"))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    begin, wanted = time.monotonic(), list(meshes(*arguments.ranks))
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with multiprocessing.get_context("spawn").Pool(arguments.workers, maxtasksperchild=20) as pool:
        for number, (mesh, (calls, faults, races)) in enumerate(zip(wanted, pool.imap(compare, wanted), strict=True)):
            circles = sum("circle" in fault for fault in faults)
            found = (calls, len(faults) - circles, circles, races)
            sums[mesh.ranks] = [one + more for one, more in zip(sums[mesh.ranks], found, strict=True)]
            if faults or races:
                print(mesh, faults, races, flush=True)
            if number % 20 == 0:
                print(f"{number} of {len(wanted)}, {time.monotonic() - begin:.0f} s", flush=True)
    rows = []
    for ranks, numbers in sums.items():
        own = [mesh for mesh in wanted if mesh.ranks == ranks]
        shapes = len({(mesh.pipeline, mesh.replicate, mesh.shard, mesh.tensor) for mesh in own})
        rows.append(f"| {ranks} | {shapes} | {len(own)} | " + " | ".join(f"{one:,}" for one in numbers) + " |")
    seconds = f"{time.monotonic() - begin:.0f}"
    fewest, most = arguments.ranks
    page = TEXT.format(torch=torch.__version__, seconds=seconds, fewest=fewest, most=most, rows="\n".join(rows))
    print(page)
    if arguments.output:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()
