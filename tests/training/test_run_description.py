"""The derived numbers: each line word for word, for plain and for sharded models."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe_lib.config.mesh import MESH_DIMS
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.models import DecoderSpec, build_meta, decoder
from recipe_lib.models.decoder import describe_attention
from recipe_lib.parallel import Parallel
from recipe_lib.training.run_description import list_derived_numbers
from tests.checkpoint.tiny import build_tiny_spec
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


class Rows:
    report = DataReport("rows.json", "alpaca", 512, tokens=1000, trained_tokens=250)

    items, group = 20, 1


class Plan:
    """Two steps an epoch."""

    def count_steps(self, epoch: int) -> int:
        return 2

    def count_total_steps(self, epochs: int, max_steps: int | None) -> int:
        return min(2 * epochs, max_steps or 2 * epochs)


DATA: Any = SimpleNamespace(dataset=Rows(), plan=Plan())


def config() -> FullFinetuneConfig:
    cfg = FullFinetuneConfig(
        batch_size=2, gradient_accumulation_steps=4, epochs=3, max_seq_len=512, dtype="fp32"
    )
    cfg.lr_scheduler.warmup_steps = 2
    cfg.lr_scheduler.min_lr_ratio = 0.1
    return cfg


def model() -> nn.Module:
    tied = nn.Linear(256, 1024, bias=False)
    network = nn.Sequential(nn.Linear(256, 256, bias=False), tied, nn.Linear(256, 1024, bias=False))
    network[2].weight = tied.weight
    network[0].weight.requires_grad_(False)
    return network


def test_every_line_word_for_word() -> None:
    world = SimpleNamespace(size=1, device=CPU, data_ranks=1, pipeline=None)
    assert list_derived_numbers(config(), world, model(), Parallel(), DATA) == [
        "devices: 1 cpu",
        "global batch: 8 sequences = batch_size 2 x gradient_accumulation_steps 4 x data ranks 1",
        (
            "tokens per step: 400 on average, 100 label tokens (25.0%); at most 4.1 K (8 sequences"
            " x max_seq_len 512)"
        ),
        "steps: 6 (2 per epoch of 20 sequences x 3 epochs)",
        (
            "learning rate: warm-up over 2 steps to 2.00e-05, then cosine over 4 steps towards"
            " 2.00e-06"
        ),
        "parameters: 327.7 K, trainable 262.1 K (80.00%), fp32",
        (
            "memory per rank: parameters 1.25 MiB, gradients 1.00 MiB, optimizer state 2.00 MiB;"
            " together 4.25 MiB before activations"
        ),
    ]


def read_attention_line(spec: DecoderSpec) -> str:
    """Return what the log says of attention, of a model of this shape in fp32 on the CPU."""
    world = SimpleNamespace(size=1, device=CPU, data_ranks=1, pipeline=None)
    lines = list_derived_numbers(config(), world, build_meta(spec, torch.float32), Parallel(), DATA)
    return next(line for line in lines if line.startswith("attention: "))


def test_attention_is_by_the_kernel_that_torch_chooses() -> None:
    spec = build_tiny_spec()
    packed = "(with packed documents or windows: by a mask)"
    assert read_attention_line(spec) == f"attention: flash attention on cpu {packed}"
    with sdpa_kernel(SDPBackend.MATH):
        assert read_attention_line(spec) == f"attention: math on cpu {packed}"
    capped = replace(spec, attention_softcap=50.0)
    assert read_attention_line(capped) == (
        "attention: this library's, for soft-capped scores or sinks"
    )


@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_torch_is_asked_as_layers_ask_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_heads: int
) -> None:
    """Keys have fewer heads in half precision alone; torch's choice is the log's, cuDNN too."""
    asked = []

    def choose(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, enable_gqa: bool) -> int:
        asked.append((q.shape[1], k.shape[1], v.shape[1], q.requires_grad, *arguments, enable_gqa))
        return int(SDPBackend.CUDNN_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(decoder, "has_varlen", lambda device, dtype, width: width == 64)
    spec = replace(build_tiny_spec(), num_heads=4, num_kv_heads=2, head_width=64)
    assert describe_attention(spec, dtype, torch.device("meta")) == (
        "cudnn attention on meta (with packed documents or windows: varlen flash)"
    )
    assert asked == [(4, kv_heads, kv_heads, True, None, 0.0, True, kv_heads < 4)]


def test_what_is_freed_and_what_is_on_the_host() -> None:
    cfg = config()
    cfg.memory.optimizer_in_backward = cfg.memory.optimizer_offload = True
    world = SimpleNamespace(size=1, device=CPU, data_ranks=1, pipeline=None)
    assert (
        list_derived_numbers(cfg, world, model(), Parallel(), DATA)[-1]
        == "memory per rank: parameters 1.25 MiB, gradients 1.00 MiB at a time, optimizer state"
        " 2.00 MiB in host memory; together 2.25 MiB before activations"
    )


def test_other_settings_are_said() -> None:
    cfg = config()
    cfg.max_steps, cfg.lr_scheduler.type, cfg.memory.cpu_offload, cfg.optimizer.name = (
        5,
        "constant",
        True,
        "mine",
    )
    cfg.parallel.data_replicate = 2
    mesh = SimpleNamespace(mesh_dim_names=MESH_DIMS, shape=(1, 2, 4, 1))
    world = SimpleNamespace(size=8, device=CPU, data_ranks=8, mesh=mesh, pipeline=None)
    lines = list_derived_numbers(cfg, world, model(), Parallel(), DATA)
    assert lines[0] == "devices: 8 cpu = data_replicate 2 x data_shard 4"
    cfg.parallel.context = 2
    shared = list_derived_numbers(cfg, world, model(), Parallel(), DATA)
    assert shared[0] == "devices: 8 cpu = data_replicate 2 x data_shard 2 x context 2"
    cfg.parallel.context = 1
    assert "steps: 5 (2 per epoch of 20 sequences x 3 epochs, cut by max_steps from 6)" in lines
    assert "learning rate: warm-up over 2 steps to 2.00e-05, constant for 3 steps" in lines
    assert lines[-1].startswith("host memory per rank: ")
    assert "optimizer state not known before the first step;" in lines[-1]
    cfg.lr_scheduler.warmup_steps = 9
    lines = list_derived_numbers(cfg, world, model(), Parallel(), DATA)
    assert "learning rate: warm-up over 9 steps to 2.00e-05, constant for 0 steps" in lines
    cfg.lr_scheduler.warmup_steps = 5
    lines = list_derived_numbers(cfg, world, model(), Parallel(), DATA)
    assert "learning rate: warm-up over 5 steps to 2.00e-05, constant for 0 steps" in lines


def test_a_pipeline_is_said() -> None:
    cfg, network = config(), model()
    cfg.parallel.pipeline, cfg.parallel.pipeline_schedule = 2, "zbv"
    cfg.parallel.pipeline_microbatches = 8
    pipeline: Any = SimpleNamespace(layers={1: range(2, 4), 2: range(4, 5)})
    mesh = SimpleNamespace(mesh_dim_names=MESH_DIMS, shape=(2, 1, 2, 1))
    lines = list_derived_numbers(
        cfg,
        SimpleNamespace(
            size=4,
            device=CPU,
            data_ranks=2,
            mesh=mesh,
            pipeline=0,
            gather_json=lambda value: [value],
        ),
        network,
        Parallel(pipeline),
        DATA,
    )
    assert lines[0] == "devices: 4 cpu = pipeline 2 x data_replicate 1 x data_shard 2"
    assert (
        lines[1]
        == "global batch: 16 sequences = batch_size 2 x gradient_accumulation_steps 4 x data"
        " ranks 2"
    )
    assert (
        lines[3]
        == "pipeline: 8 micro-batches of 1 sequence through 4 stages, zbv; here stage 1 (layers 2"
        " to 3) and stage 2 (layer 4)"
    )


def test_a_rank_counts_its_own_shards() -> None:
    def work() -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        network = nn.Linear(256, 1024, bias=False)
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
        mesh = SimpleNamespace(mesh_dim_names=MESH_DIMS, shape=(1, 1, 2, 1))
        world = SimpleNamespace(size=2, device=CPU, data_ranks=2, mesh=mesh, pipeline=None)
        return list_derived_numbers(config(), world, network, Parallel(), DATA)

    for lines in run_ranks(work, 2):
        assert lines[0] == "devices: 2 cpu = data_replicate 1 x data_shard 2"
        assert lines[1].startswith("global batch: 16 sequences = ")
        assert lines[-2:] == [
            "parameters: 262.1 K, trainable 262.1 K (100.00%), fp32",
            (
                "memory per rank: parameters 512.00 KiB, gradients 512.00 KiB, optimizer state 1.00"
                " MiB; together 2.00 MiB before activations"
            ),
        ]


def test_a_limit_beyond_the_epochs_is_said() -> None:
    cfg = config()
    cfg.max_steps = 100
    lines = list_derived_numbers(
        cfg,
        SimpleNamespace(size=1, device=CPU, data_ranks=1, pipeline=None),
        model(),
        Parallel(),
        DATA,
    )
    assert (
        "steps: 6 (2 per epoch of 20 sequences x 3 epochs; max_steps 100 needs more epochs)"
        in lines
    )
