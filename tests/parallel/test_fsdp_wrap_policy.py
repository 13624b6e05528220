"""Which modules become FSDP units, and what is said when they cannot."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters import add_adapters, nf4
from recipe_lib.config.schema import (
    FullFinetuneConfig,
    LoraConfig,
    LoraFinetuneConfig,
    MemoryConfig,
    ParallelConfig,
)
from recipe_lib.errors import ConfigError
from recipe_lib.memory import layer_stream
from recipe_lib.models import build_meta, build_spec, read_config, read_preset_config
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.parallel import (
    Parallel,
    describe_units,
    materialize,
    parallelize,
    shard_model,
    shard_tensors,
    start_world,
)
from recipe_lib.parallel.fsdp import count_parameter_bytes, resolve_wrapping
from recipe_lib.units import MIB, format_bytes
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import MLP_WIDTH, VOCABULARY, WIDTH, build_small_spec
from tests.recipes.mixtures import write_mixture

LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]
MATRIX = VOCABULARY * WIDTH * 4
LAYER = (2 * WIDTH * WIDTH + 2 * 16 * WIDTH + 3 * MLP_WIDTH * WIDTH + 2 * WIDTH) * 4


def small(tied: bool = False, vocabulary: int = VOCABULARY) -> nn.Module:
    return build_meta(build_small_spec(tied=tied, vocabulary=vocabulary), torch.float32)


def names(model: nn.Module, wrapping: str | list[str]) -> list[tuple[str, ...]]:
    return [unit.names for unit in resolve_wrapping(model, wrapping)]


def test_layers_leaves_the_rest_in_the_root() -> None:
    units = resolve_wrapping(small(), "layers")
    assert [unit.names for unit in units] == [(name,) for name in LAYERS]
    assert {unit.bytes for unit in units} == {LAYER}


def test_memory_efficient_adds_embedding_and_output() -> None:
    units = resolve_wrapping(small(), "memory_efficient")
    assert [unit.names for unit in units] == [
        ("model.embed_tokens",),
        *((name,) for name in LAYERS),
        ("lm_head",),
    ]
    assert [unit.bytes for unit in units] == [MATRIX, LAYER, LAYER, LAYER, MATRIX]


def test_tied_embedding_and_output_are_one_unit() -> None:
    units = resolve_wrapping(small(tied=True), "memory_efficient")
    assert [unit.names for unit in units] == [
        ("model.embed_tokens", "lm_head"),
        *((name,) for name in LAYERS),
    ]
    assert units[0].bytes == MATRIX
    assert names(small(tied=True), ["model.layers.*", "model.embed_tokens"])[0] == (
        "model.embed_tokens",
        "lm_head",
    )
    assert names(small(tied=True), ["lm_head"]) == [("model.embed_tokens", "lm_head")]


def test_auto_goes_by_size() -> None:
    tokens = LAYER // (WIDTH * 4)
    assert names(small(), "auto") == names(small(), "memory_efficient")
    larger, equal = small(vocabulary=tokens + 1), small(vocabulary=tokens)
    assert len(names(larger, "auto")) == 5 and len(names(equal, "auto")) == 3


def test_auto_for_shipped_models() -> None:
    def units(preset: str) -> dict[tuple[str, ...], int]:
        spec = build_spec(read_preset_config(preset), preset)
        found = resolve_wrapping(
            build_meta(replace(spec, num_layers=2, windows=spec.windows[:2]), torch.bfloat16),
            "auto",
        )
        return {unit.names: unit.bytes for unit in found}

    llama3 = units("llama3/8B")
    assert (
        llama3[("lm_head",)] == llama3[("model.embed_tokens",)] == 128256 * 4096 * 2 == 1002 * MIB
    )
    assert llama3[("model.layers.0",)] == 416 * MIB + 2 * 4096 * 2
    llama2 = units("llama2/7B")
    assert list(llama2) == [("model.layers.0",), ("model.layers.1",)]


def test_patterns_match_part_by_part_and_may_nest() -> None:
    model = small()
    assert names(model, ["model.layers.*"]) == [(name,) for name in LAYERS]
    assert names(model, ["lm_head", "model.layers.[01]"]) == [
        ("model.layers.0",),
        ("model.layers.1",),
        ("lm_head",),
    ]
    nested = resolve_wrapping(model, ["model.layers.*.mlp", "model.layers.*"])
    assert [unit.names for unit in nested[:2]] == [("model.layers.0",), ("model.layers.0.mlp",)]
    mlp = 3 * MLP_WIDTH * WIDTH * 4
    assert [unit.bytes for unit in nested[:2]] == [LAYER - mlp, mlp]
    assert names(model, ["model.layers.*", "model.layers.0"]) == [(name,) for name in LAYERS]


def test_layers_are_found_by_type_not_by_name() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(500, 8)
            self.stem = nn.ModuleList([nn.Linear(8, 8), nn.Identity()])
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])) for _ in "ab"
            )
            self.last = nn.LayerNorm(8)

    model = Tower()
    assert list_layer_names(model) == ["stem.0", "blocks.0", "blocks.1"]
    assert names(model, "memory_efficient") == [
        ("words",),
        ("stem.0",),
        ("blocks.0",),
        ("blocks.1",),
    ]


def test_bytes_and_the_line_of_the_log() -> None:
    model = small()
    assert count_parameter_bytes(model) == 3 * LAYER + 2 * MATRIX + WIDTH * 4
    assert count_parameter_bytes(small(tied=True)) == 3 * LAYER + MATRIX + WIDTH * 4
    assert (
        describe_units(model, Parallel(units=resolve_wrapping(model, "auto")))
        == "FSDP units: model.embed_tokens 64.00 KiB, lm_head 64.00 KiB, 3 x 36.25 KiB; always"
        " gathered: 128 B"
    )
    tied = small(tied=True)
    assert (
        describe_units(tied, Parallel(units=resolve_wrapping(tied, "auto")))
        == "FSDP units: model.embed_tokens + lm_head 64.00 KiB, 3 x 36.25 KiB; always gathered:"
        " 128 B"
    )


@pytest.mark.parametrize(
    ("wrapping", "line"),
    [
        ("layer", "parallel.fsdp_wrap_policy: found 'layer', expected auto, layers, memory_efficient or a list of "
         "module-name patterns such as [model.layers.*]; did you mean layers?"),
        ([], "parallel.fsdp_wrap_policy: found an empty list, expected patterns such as [model.layers.*], or one of "
         "auto, layers, memory_efficient"),
        (["model.layers.*", "decoder.tok_embeddings"],
         "parallel.fsdp_wrap_policy: pattern 'decoder.tok_embeddings' matches no unit; there are: model, "
         "model.embed_tokens, "
         "lm_head, model.layers.*, model.layers.*.mlp"),
        (["model.layer.*"],
         "parallel.fsdp_wrap_policy: pattern 'model.layer.*' matches no unit; nearest: model.layers.*, model, "
         "model.embed_tokens, lm_head, model.layers.*.mlp"),
        (["zzz"], "parallel.fsdp_wrap_policy: pattern 'zzz' matches no unit; there are: model, model.embed_tokens, "
         "lm_head, model.layers.*, model.layers.*.mlp"),
        ([3], "parallel.fsdp_wrap_policy: pattern '3' matches no unit; there are: model, model.embed_tokens, "
         "lm_head, model.layers.*, model.layers.*.mlp"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrapping: str | list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_wrapping(small(), wrapping)
    assert str(caught.value) == line


@pytest.mark.parametrize("pattern", ["model.layers", "model.layers.*.self_attn.q_norm"])
def test_modules_that_cannot_be_units_are_refused(pattern: str) -> None:
    """Lists of modules, which do not run by themselves, and modules without parameters."""
    with pytest.raises(ConfigError) as caught:
        resolve_wrapping(small(), [pattern])
    start, _, remedy = str(caught.value).partition("; nearest: ")
    assert start == f"parallel.fsdp_wrap_policy: pattern '{pattern}' matches no unit"
    assert remedy.startswith("model.layers.*")


def test_a_policy_without_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError) as caught:
        resolve_wrapping(model, "layers")
    assert (
        str(caught.value)
        == "parallel.fsdp_wrap_policy: found layers, but the model has no list of layers; name its"
        " units by patterns, such as [*]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_what_stays_gathered_under_tensor_parallel(tied: bool) -> None:
    """Of four ranks, two by two: a rank's half of embedding and output, and the last norm, which no
    unit holds.
    """

    def line() -> str:
        parallel = ParallelConfig(tensor=2, fsdp_wrap_policy="layers")
        with start_world(FullFinetuneConfig(parallel=parallel, device="cpu")) as world:
            model = build_meta(build_small_spec(tied=tied), torch.float32)
            shard_tensors(model, parallel, MemoryConfig(), world)
            return describe_units(
                model, Parallel(units=shard_model(model, parallel, MemoryConfig(), world))
            )

    halves = (1 if tied else 2) * VOCABULARY * WIDTH * 4 // 2
    layer = (WIDTH * (32 + 2 * 16) + 32 * WIDTH + 3 * WIDTH * MLP_WIDTH) * 4 // 2 + 2 * WIDTH * 4
    assert (
        run_ranks(line, 4)
        == [
            f"FSDP units: 3 x {format_bytes(layer)}; always gathered:"
            f" {format_bytes(halves + WIDTH * 4)}"
        ]
        * 4
    )


def test_experts_are_units_within_their_layers() -> None:
    spec = build_spec(read_preset_config("qwen3_moe/30B"), "qwen3_moe/30B")
    spec = replace(
        spec,
        num_layers=3,
        windows=(None,) * 3,
        mixture=replace(spec.mixture, layers=(True, False, True)),
    )
    model = build_meta(spec, torch.bfloat16)
    units = {unit.names: unit.bytes for unit in resolve_wrapping(model, "auto")}
    experts = 2 * 128 * 3 * 768 * 2048
    assert {name: units[name] for name in units if "experts" in name[0]} == {
        (f"model.layers.{layer}.mlp.experts",): experts for layer in (0, 2)
    }
    assert sum(units.values()) + 2 * 2048 == count_parameter_bytes(model)
    assert units[("model.layers.0",)] < experts // 10
    for policy, whole in (("layers", False), ("memory_efficient", True), ("auto", True)):
        found = resolve_wrapping(model, policy, whole_layers=whole)
        assert not any("experts" in name for unit in found for name in unit.names)


def hosted(folder: Path) -> str:
    """What the log says of a model whose experts lie on the host, on ranks that shard the rest of
    it.
    """
    spec = build_spec(read_config(folder), "qwen3_moe")
    cfg = LoraFinetuneConfig(device="cpu", lora=LoraConfig(rank=4, quantize_base="nf4"))
    cfg.memory.stream_layers = "experts"
    layer_stream.has_host = lambda device: True
    with start_world(cfg) as world:
        model = build_meta(spec, torch.float32)
        add_adapters(model, cfg.lora, torch.float32)
        parallel = parallelize(model, cfg, world)
        materialize(model, cfg.memory, world.device)
        on_host = {id(parameter) for parameter in layer_stream.list_streamed_parameters(model)}
        sharded = [
            name
            for name, each in model.named_parameters()
            if isinstance(each, DTensor) and id(each) in on_host
        ]
        assert sharded == [] and parallel.levers.layers is not None
        assert parallel.levers.layers.num_bytes() == sum(
            each.nbytes for name, each in model.named_parameters() if "experts" in name
        )
        return describe_units(model, parallel)


def test_experts_on_the_host_stay_whole_on_each_rank(tmp_path: Path) -> None:
    config = write_mixture("qwen3_moe", tmp_path)
    lines = run_ranks(hosted, 2, config)
    codes = 6 * 3 * 128 * 64 // 2 * 3  # of three layers
    blocks = 6 * 128 * 64 // nf4.BLOCK
    factors = (
        3 * 4 * (nf4.count_factors(2 * blocks) + nf4.count_factors(blocks))
    )  # gate and up are one matrix
    size = format_bytes(codes + codes // 32 + factors)
    assert lines[0].endswith(
        f"; experts of 3 layers in host memory ({size}), copied to the device one ahead"
    )
    assert "experts" not in lines[0].partition(";")[0]
    assert run_ranks(hosted, 1, config)[0].startswith(
        "FSDP: off, each rank holds its parameters at all times; experts of 3"
    )
