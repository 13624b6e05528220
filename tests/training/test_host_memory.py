"""Host memory that a run's offloading takes, by formula, and the refusal before it is taken."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_lib.config import load_config
from recipe_lib.errors import SetupError
from recipe_lib.memory import activation_offload, apply_activation_checkpointing, layer_stream
from recipe_lib.memory.apply_levers import MemoryLevers
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import Parallel, materialize, parallelize, start_world
from recipe_lib.training import check_host_memory, run_description
from recipe_lib.training.run_description import count_calls_at_once, count_offloaded_bytes
from recipe_lib.units import GIB
from tests.distributed.ranks import run_in_fork, run_ranks
from tests.memory.late_copies import LateCopies
from tests.parallel.small_models import LENGTH, ROWS, WIDTH, build_small_spec, make_small_batch
from tests.recipes.runs import PLAIN

LAYERS = 5
STEPPING = ("memory.optimizer_in_backward=true", "clip_grad_norm=null")


def config(*overrides: str) -> Any:
    settings = [
        "model.preset=demo/0.5M",
        "tokenizer.path=unread",
        "data.source=unread",
        "output_dir=/none",
    ]
    return load_config(
        PLAIN, [*settings, f"batch_size={2 * ROWS}", f"max_seq_len={3 * LENGTH}", *overrides]
    )


def on_a_gpu(device: str = "cuda") -> Any:
    return SimpleNamespace(device=torch.device(device), any=bool, agree=lambda fn: fn())


def power_of_two(size: int) -> int:
    block = 1
    while block < size:
        block *= 2
    return block


def test_parameters_gradients_and_states_on_the_host() -> None:
    model = build_meta(build_small_spec(), torch.bfloat16)
    sizes = [parameter.numel() * 2 for parameter in model.parameters()]
    largest = max(sizes)
    pinned = sum(map(power_of_two, sizes))
    assert count_offloaded_bytes(model, config()) == {}
    assert count_offloaded_bytes(model, config("memory.cpu_offload=true")) == {
        "cpu_offload": 2 * pinned + 2 * sum(sizes)
    }
    # Micro-batches that are reduced one by one are added up on the host.
    for override, more in (
        (
            "gradient_accumulation_steps=3 parallel.accumulate_grad_in_fp32=true dtype=bf16",
            2 * sum(sizes),
        ),
        ("gradient_accumulation_steps=3 parallel.reduce_gradients=step", 0),
    ):
        found = count_offloaded_bytes(model, config("memory.cpu_offload=true", *override.split()))
        assert found == {"cpu_offload": 2 * pinned + more + 2 * sum(sizes)}
    single = config(
        "memory.cpu_offload=true", "memory.optimizer_in_backward=true", "clip_grad_norm=null"
    )
    assert count_offloaded_bytes(model, single) == {
        "cpu_offload": pinned + power_of_two(largest) + 2 * sum(sizes)
    }
    assert count_offloaded_bytes(model, config("memory.optimizer_offload=true")) == {
        "optimizer_offload": 2 * pinned
    }
    reference = build_meta(build_small_spec(), torch.bfloat16).requires_grad_(False)
    beside = count_offloaded_bytes(model, config("memory.cpu_offload=true"), reference)
    assert beside == {"cpu_offload": 3 * pinned + 2 * sum(sizes)}
    # Each state is memory of its own, of which codes, scales and master weights have different
    # sizes.
    few = ("dtype=bf16", "optimizer.state_bits=32", "optimizer.master_weights=true")
    several = config("memory.optimizer_offload=true", *few)
    assert count_offloaded_bytes(model, several) == {
        "optimizer_offload": 3 * sum(power_of_two(2 * size) for size in sizes)
    }


def arriving() -> list[int]:
    """Of each unit the gradients that are pinned, and what is said to be on the host."""
    cfg = config("device=cpu", "dtype=bf16", "parallel.fsdp_wrap_policy=layers")
    judged = config("memory.cpu_offload=true", "gradient_accumulation_steps=3")
    with start_world(cfg) as world:
        model = build_meta(build_small_spec(layers=LAYERS), torch.bfloat16)
        parallelize(model, cfg, world)
        layers = [
            [each for name, each in model.named_parameters() if f"layers.{at}." in name]
            for at in range(LAYERS)
        ]
        rest = [each for name, each in model.named_parameters() if "layers." not in name]
        units = [
            sum(power_of_two(each.to_local().numel() * 2) for each in unit)
            for unit in (*layers, rest)
        ]  # type: ignore[attr-defined]
        states = sum(2 * 2 * each.to_local().numel() for each in model.parameters())  # type: ignore[attr-defined]
        return [*units, count_offloaded_bytes(model, judged)["cpu_offload"] - states]


def test_two_units_arrive_where_gradients_are_added_up() -> None:
    """Next to parameters and sums."""
    for *units, found in run_ranks(arriving, 2):
        assert found == 2 * sum(units) + sum(sorted(units)[-2:])


def test_streamed_layers_are_pinned_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the final norm, and states of what is trained."""
    monkeypatch.setattr(layer_stream, "has_host", lambda device: True)
    cfg = config(
        "memory.stream_layers=true", "memory.optimizer_offload=true", *STEPPING, "dtype=bf16"
    )
    for frozen in (False, True):
        model = build_meta(build_small_spec(), torch.bfloat16).requires_grad_(not frozen)
        layer_stream.stream_layers(model, cfg.memory, torch.device("cpu"))
        sizes = {name: parameter.numel() * 2 for name, parameter in model.named_parameters()}
        streamed = [size for name, size in sizes.items() if name != "model.norm.weight"]
        expected = {"stream_layers": sum(map(power_of_two, streamed))}
        expected["optimizer_offload"] = 0 if frozen else 2 * sum(map(power_of_two, sizes.values()))
        assert count_offloaded_bytes(model, cfg) == expected
    allowed = "memory.host_memory_limit_gib=0.0001"
    with pytest.raises(
        SetupError, match="found 104.86 KiB allowed .*stream_layers .* choose lora.quant"
    ):
        limited = config(
            "memory.stream_layers=true", "memory.optimizer_offload=true", *STEPPING, allowed
        )
        check_host_memory(model, Parallel(), limited, on_a_gpu())


def test_a_run_is_refused_before_its_model_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of a rank of two; on a CPU, and in a simulation, nothing is judged."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = build_meta(build_small_spec(), torch.bfloat16)
    cfg = config("memory.cpu_offload=true", "memory.host_memory_limit_gib=0.0001")
    check_host_memory(model, Parallel(), cfg, on_a_gpu("cpu"))
    with pytest.raises(
        SetupError, match=r"^host memory: found 104\.86 KiB allowed .* for 2 ranks .*cpu_offload"
    ):
        check_host_memory(model, Parallel(), cfg, on_a_gpu())


@run_in_fork
def test_a_model_with_cpu_offload_has_its_host_memory_when_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP pins the model then, without values: what the check of a second model counts as taken."""
    pinned_bytes: dict[int, int] = {}

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        storage = copy.untyped_storage()
        pinned_bytes[storage.data_ptr()] = storage.nbytes()
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(
        torch.Tensor,
        "is_pinned",
        lambda tensor: tensor.untyped_storage().data_ptr() in pinned_bytes,
    )
    cfg = config("memory.cpu_offload=true", "dtype=bf16")
    policy = build_meta(build_small_spec(), torch.bfloat16)
    reference = build_meta(build_small_spec(), torch.bfloat16).requires_grad_(False)
    with start_world(cfg) as world:
        on_gpu = replace(world, device=torch.device("cuda"))
        parallelize(reference, cfg, on_gpu, for_training=False)
        needs = count_offloaded_bytes(policy, cfg, reference)
        materialize(reference, cfg.memory, world.device)
    counted = needs["cpu_offload"] - count_offloaded_bytes(policy, cfg)["cpu_offload"]
    assert sum(map(power_of_two, pinned_bytes.values())) == counted > 0


def judge_both(folder: Path) -> str:
    """Judge and allocate a reference, then a policy, the second rank later; return the refusal.

    In `folder` are files of as many bytes as there are, and as each model has taken when it is
    allocated.
    """
    cfg = config("memory.cpu_offload=true")
    reference = build_meta(build_small_spec(), torch.bfloat16).requires_grad_(False)
    policy = build_meta(build_small_spec(), torch.bfloat16)
    other = None
    with start_world(cfg) as world, pytest.MonkeyPatch.context() as patch:

        def read_free() -> tuple[int, str]:
            time.sleep(0.2 * world.rank)
            taken = sum(path.stat().st_size for path in folder.glob("taken*"))
            return (folder / "there").stat().st_size - taken, "free on this machine"

        patch.setattr(run_description, "find_free_host_memory", read_free)
        for model in (reference, policy):
            try:
                run_description.check_host_memory(
                    model, Parallel(), cfg, replace(world, device=torch.device("cuda")), other
                )
            except SetupError as error:
                return str(error)
            time.sleep(0.2 * world.rank)
            size = sum(count_offloaded_bytes(model, cfg).values())
            (folder / f"taken {world.rank} {other is None}").write_bytes(bytes(size))
            other = model
    return ""


def test_what_is_allocated_already_is_counted_once_by_all_ranks(tmp_path: Path) -> None:
    """All ranks read how much is free when no rank is allocating."""
    reference = build_meta(build_small_spec(), torch.bfloat16).requires_grad_(False)
    policy = build_meta(build_small_spec(), torch.bfloat16)
    needs = count_offloaded_bytes(policy, config("memory.cpu_offload=true"), reference)
    (tmp_path / "there").write_bytes(bytes(2 * needs["cpu_offload"]))
    assert run_ranks(judge_both, 2, tmp_path) == ["", ""]
    for path in tmp_path.glob("taken*"):
        path.unlink()
    (tmp_path / "there").write_bytes(bytes(2 * needs["cpu_offload"] - 1))
    for refusal in run_ranks(judge_both, 2, tmp_path):
        assert refusal.startswith("host memory: found ")


def test_activations_are_judged_by_the_first_layer_of_the_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With checkpointing: inputs of the layers that are sent, of rows twice as many and three times
    as long.
    """
    monkeypatch.setattr(activation_offload, "has_host", lambda device: True)
    longest = 2 * ROWS * 3 * LENGTH
    expected = (LAYERS - 1) * power_of_two(ROWS * LENGTH * WIDTH * 4) * longest // (ROWS * LENGTH)
    for allowed, refused in ((expected, False), (expected - 1, True)):
        cfg = config(
            "memory.activation_offload=true",
            "memory.activation_checkpointing=full",
            f"memory.host_memory_limit_gib={allowed / GIB!r}",
        )
        spec = build_small_spec(layers=LAYERS)
        model = build_meta(spec, torch.float32)
        apply_activation_checkpointing(model, "full")
        window = activation_offload.offload_activations(model, cfg.memory, torch.device("cpu"))
        assert window is not None and count_calls_at_once(Parallel(), cfg, window) == LAYERS - 1
        check_host_memory(
            model,
            Parallel(levers=MemoryLevers(offload=window)),
            cfg,
            on_a_gpu(),
        )
        model.to_empty(device="cpu")
        init_weights(model, 3, spec)
        tokens, labels = make_small_batch()
        window._copies._module = late = LateCopies()
        with late:
            if refused:
                with pytest.raises(SetupError, match="memory.activation_offload"):
                    model(tokens, labels=labels)
                assert late.copied == 0
            else:
                model(tokens, labels=labels)
                assert late.copied > 0


def test_a_pipeline_has_several_micro_batches_under_way() -> None:
    moments = [{0: 1, 3: 0}, {0: 2, 3: 1}, {0: 1, 3: 2}]
    pipeline = SimpleNamespace(
        layers={0: range(0, 2), 3: range(9, 12)}, list_in_flight=lambda count: moments[:count]
    )
    parallel = Parallel(pipeline)
    cfg = config("memory.activation_offload=true", "gradient_accumulation_steps=3")
    assert count_calls_at_once(parallel, cfg, SimpleNamespace(sent=9)) == 2 * 1 + 3 * 2
