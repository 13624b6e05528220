"""What a recipe adds to a model starts as torch would start it, the same on any number of ranks, or
is refused.
"""

import hashlib
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import SetupError
from recipe_lib.models import Decoder, build_meta, init_weights
from recipe_lib.models.language_model import check_written
from recipe_lib.models.meta_init import (
    check_extra,
    find_extra_modules,
    find_extra_tensors,
    reset_extra,
)
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.parallel import materialize, shard_model, start_world
from tests.checkpoint.tiny import build_tiny_spec
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 7),
    "embedding": lambda: nn.Embedding(5, 6),
    "norm": lambda: nn.LayerNorm(6),
    "running statistics": lambda: nn.BatchNorm1d(6),
    "convolution": lambda: nn.Conv1d(6, 6, 3),
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "recurrent": lambda: nn.GRU(6, 5, num_layers=2),
    "several": lambda: nn.ModuleList(
        [nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 6))]
    ),
}


class Zero(nn.Module):
    """A linear inside of it that it makes zero, a number of its own, and a buffer that is in no
    file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5, bias=False)
        self.gate = nn.Parameter(torch.empty(5))
        self.register_buffer("turns", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.up.weight)
        nn.init.normal_(self.gate)
        self.turns = 10.0 ** -torch.arange(3.0)


def model_with(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_meta(build_tiny_spec(), dtype)
    with torch.device("meta"):
        model.model.layers[1].mlp.extra = make().to(dtype)
    return model


def started(model: Decoder, seed: int = 4) -> Decoder:
    materialize(model, MemoryConfig(), CPU)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    reset_extra(model, seed)
    return model


def seed_of(path: str, seed: int = 4) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "big") >> 1


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_as_its_constructor_would(kind: str) -> None:
    model = started(model_with(KINDS[kind]))
    extra = model.model.layers[1].mlp.extra
    path = "model.layers.1.mlp.extra"
    reseeded = {"several": ["0", "1.0", "1.2"]}.get(
        kind, [""]
    )  # what has a method of its own, outermost
    for inside in reseeded:
        torch.manual_seed(seed_of(f"{path}.{inside}".rstrip(".")))
        fresh = (
            KINDS[kind]().get_submodule(inside)
            if not inside
            else _fresh_part(KINDS[kind], inside, path)
        )
        for name, value in fresh.state_dict().items():
            assert torch.equal(extra.get_submodule(inside).state_dict()[name], value), name


def _fresh_part(make: Callable[[], nn.Module], inside: str, path: str) -> nn.Module:
    part = make().get_submodule(inside)
    torch.manual_seed(seed_of(f"{path}.{inside}"))
    part.reset_parameters()
    return part


def test_a_module_around_others_has_the_last_word() -> None:
    extra = started(model_with(Zero)).model.layers[1].mlp.extra
    assert not extra.up.weight.any()
    assert extra.gate.std() > 0.1
    assert extra.turns.tolist() == pytest.approx([1, 0.1, 0.01])


def test_the_start_is_that_of_fp32_rounded_and_differs_between_layers_and_seeds() -> None:
    wide, narrow, other = (
        started(model_with(KINDS["linear"], dtype), seed).model.layers[1].mlp.extra.weight
        for dtype, seed in ((torch.float32, 4), (torch.bfloat16, 4), (torch.float32, 5))
    )
    assert narrow.dtype == torch.bfloat16 and torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, other)


def test_a_random_start_takes_the_same_rule() -> None:
    model, plain = model_with(KINDS["norm"]), build_meta(build_tiny_spec(), torch.float32)
    for each in (model, plain):
        materialize(each, MemoryConfig(), CPU)
        init_weights(each, 4, build_tiny_spec())
        check_written(each)
    assert (model.model.layers[1].mlp.extra.weight == 1).all()
    own = dict(plain.named_parameters())
    assert all(
        torch.equal(value, own[name]) for name, value in model.named_parameters() if name in own
    )


def test_other_random_numbers_go_on_as_before() -> None:
    model = model_with(KINDS["linear"])
    before = torch.get_rng_state(), random.getstate()
    started(model)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_what_is_extra() -> None:
    model = model_with(Zero)
    add_adapters(
        model,
        LoraConfig(rank=2, target_modules=["q", "embedding"], quantize_base="int8"),
        torch.float32,
    )
    names = [f"model.layers.1.mlp.extra.{name}" for name in ("gate", "up.weight", "turns")]
    assert list(find_extra_tensors(model)) == names
    assert list(find_extra_tensors(model, saved=True)) == names[:2]
    assert find_extra_modules(model) == ["model.layers.1.mlp.extra"]
    assert not find_extra_tensors(build_meta(build_tiny_spec(), torch.float32))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale[:3] = 1


def test_what_nothing_starts_is_refused_before_there_is_memory() -> None:
    line = (
        r"^model.layers.1.mlp.extra.scale: no checkpoint has it, .* \(Bare\) has no"
        r" reset_parameters .* that method"
    )
    with pytest.raises(SetupError, match=line):
        check_extra(model_with(Bare))
    model = build_meta(build_tiny_spec(), torch.float32)
    model.model.layers[0].self_attn.q_proj.scale = nn.Parameter(torch.empty(2, device="meta"))
    check_extra(model)  # a linear has the method
    with pytest.raises(
        SetupError, match=r"q_proj.scale: .* reset_parameters of its module leaves nothing in it"
    ):
        started(model)
    model = model_with(KINDS["linear"])
    model.model.layers[0].lora_gate = nn.Linear(6, 6, device="meta")
    check_extra(model)
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    with pytest.raises(
        SetupError, match=r"layers.0.lora_gate.weight: lora_ begins the names of adapters"
    ):
        check_extra(model)


def test_a_method_that_leaves_numbers_out_is_refused() -> None:
    with pytest.raises(
        SetupError, match=r"extra.scale: .* leaves nothing in it; give it every number there"
    ):
        started(model_with(Forgetful))


def test_values_before_load_weights_are_refused_but_computed_buffers_stay() -> None:
    model = build_meta(build_tiny_spec(), torch.float32)
    model.model.layers[0].mlp.extra = nn.Linear(6, 6)
    with pytest.raises(
        SetupError,
        match=r"mlp.extra.weight: found values on cpu .*; make the module on the meta device",
    ):
        materialize(model, MemoryConfig(), CPU)
    model = build_meta(build_tiny_spec(), torch.float32)
    model.model.layers[0].turns = nn.Module()
    model.model.layers[0].turns.register_buffer("angles", torch.arange(4.0))
    materialize(model, MemoryConfig(), CPU)
    init_weights(model, 4, build_tiny_spec())
    check_written(model)
    assert model.model.layers[0].turns.angles.tolist() == [0, 1, 2, 3]


def test_a_parameter_that_was_never_written_is_found() -> None:
    model = build_meta(build_tiny_spec(), torch.float32)
    add_adapters(model, LoraConfig(rank=2, target_modules=["q"]), torch.float32)
    materialize(model, MemoryConfig(), CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" not in name:
                parameter.fill_(1.0)
    with pytest.raises(
        SetupError, match=r"layers.0.self_attn.q_proj.lora_B.weight and 1 more have no values after"
    ):
        check_written(model)


def test_every_rank_has_its_part_of_the_same_start() -> None:
    """Sharded, replicated and sharded, on the host, and cut along another dimension."""
    torch.manual_seed(seed_of("model.layers.1.mlp.extra"))
    expected = nn.Linear(6, 7)

    def parts(parallel: ParallelConfig, memory: MemoryConfig) -> list[bool]:
        with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
            model = model_with(KINDS["linear"])
            shard_model(model, parallel, memory, world)
            materialize(model, memory, world.device)
            init_weights(model, 4, build_tiny_spec())
            check_written(model)
            extra = model.model.layers[1].mlp.extra
            assert isinstance(extra.weight, DTensor) and extra.weight.to_local().shape[0] < 7
            alike = [_is_part(extra.weight, expected.weight), _is_part(extra.bias, expected.bias)]
            columns = model_with(KINDS["linear"])
            held = DTensor.from_local(
                torch.empty(7, 3), world.mesh["data_shard"], [Shard(1)], run_check=False
            )
            columns.model.layers[1].mlp.extra.weight = nn.Parameter(held)
            columns.model.layers[1].mlp.extra.bias = None
            reset_extra(columns, 4)
            return [*alike, _is_part(columns.model.layers[1].mlp.extra.weight, expected.weight)]

    for options in ({}, {"cpu_offload": True}):
        for alike in run_ranks(parts, 2, ParallelConfig(), MemoryConfig(**options)):
            assert all(alike)


def _is_part(tensor: Tensor, whole: Tensor) -> bool:
    local, offset = locate_local_part(tensor)
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))]
    return torch.equal(local.detach(), part.detach())
