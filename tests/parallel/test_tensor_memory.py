"""What tensor-parallel layers keep, how often they communicate, and their bits: beside torch's own
DTensor styles.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from benchmarks.tp_memory import (
    AUTO,
    CACHED,
    OURS,
    RANDOM_STATE,
    STOCK,
    build_spec_of_layers,
    compute_kept_bytes,
    measure_memory,
    parallelize_stock_layer,
)
from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.decoder import Norm
from recipe_lib.ops.norm import rms_norm
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    shard_tensors,
    start_world,
)
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import LENGTH, WIDTH, build_small_spec
from tests.parallel.test_tensor import BIASES, Case, backward, batch, build
from tests.plan.apart import call_in_fork

pytestmark = pytest.mark.slow  # test_tensor has losses and gradients

T = 8
LLAMA = {"h": 4096, "q": 4096, "k": 1024, "f": 14336, "heads": 32}  # of an 8B
RANK = 16
STEPS = 4


def freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def adapt(model: nn.Module) -> None:
    add_adapters(model, LoraConfig(rank=RANK), torch.bfloat16)


@cache
def measured() -> dict[str, Any]:
    """(bytes kept, collectives) of a layer, by what was run; and how many graphs torch compiled for
    alike layers.
    """
    return call_in_fork(measure_all)


def measure_all() -> dict[str, Any]:
    llama, qwen = build_spec_of_layers("llama3/8B", 2), build_spec_of_layers("qwen3/8B", 2)
    found = {how: measure_memory(llama, T, how) for how in (STOCK, CACHED, OURS)}
    found |= {
        f"{how} checkpointed": measure_memory(llama, T, how, checkpointing="full")
        for how in (STOCK, AUTO, OURS)
    }
    found |= {
        f"{how} with head norms": measure_memory(qwen, 4, how, rows=3, length=512)
        for how in (STOCK, OURS)
    }
    found |= {
        "frozen": measure_memory(llama, T, OURS, change=freeze),
        "adapted": measure_memory(llama, T, OURS, change=adapt),
        "experts checkpointed": measure_memory(
            build_spec_of_layers("olmoe/7B", 2), T, OURS, length=512, checkpointing="full"
        ),
    }
    torch._dynamo.utils.counters.clear()
    found[f"{OURS} compiled"] = measure_memory(llama, T, OURS, compiled=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {name: (one.kept, one.collectives) for name, one in found.items()} | {"graphs": graphs}


def test_kept_bytes_are_those_of_the_formula() -> None:
    """In elements a token over t, 2 bytes each, and per head and norm of a token 4 bytes over t.
    Compiled, a norm's 4 bytes are made again with its output.
    """
    found = {name: one[0] for name, one in measured().items() if name != "graphs"}
    h, q, k, f = (LLAMA[name] for name in "hqkf")
    minimum = 2 * h + 2 * q + 2 * k + 2 * f

    def kept_bytes(elements: int, numbers: int = LLAMA["heads"] + 2) -> int:
        return 8192 * (2 * elements + 4 * numbers) // T + RANDOM_STATE

    assert found[OURS] == kept_bytes(minimum)
    assert found[f"{OURS} compiled"] == kept_bytes(minimum, LLAMA["heads"])
    assert measured()["graphs"] == 1, "alike layers share one compilation"
    assert found[STOCK] == kept_bytes(minimum + 2 * h * T + 2 * f)
    assert found[CACHED] == found[STOCK]
    assert found["frozen"] == kept_bytes(minimum)
    # What A made of the normed tokens, of all tokens, and of o's and down's inputs, of a rank's. The
    # A of both groups read normed tokens, and down's the product, which are made again.
    assert found["adapted"] == kept_bytes(minimum + RANK * (5 * T + 2))
    h, q, k, f, heads, kv_heads = 4096, 4096, 1024, 12288, 32, 8
    elements, numbers = 2 * h + 2 * q + 2 * k + 2 * f, 2 * heads + kv_heads + 2
    # Ours keeps no query and key twice: those behind norm and rotation are made again.
    more = {STOCK: 2 * h * 4 + 2 * f + q + k, OURS: 0}
    for how in (STOCK, OURS):
        bytes_ = 3 * 512 * (2 * (elements + more[how]) + 4 * numbers) // 4 + RANDOM_STATE
        assert found[f"{how} with head norms"] == bytes_
        assert (
            compute_kept_bytes(build_spec_of_layers("qwen3/8B"), 4, how, tokens=3 * 512) == bytes_
        )


def counted(gathers: int, scatters: int, again: int, back: int) -> dict[tuple[str, str], int]:
    return {
        ("backward", "all_gather_into_tensor"): again,
        ("backward", "reduce_scatter_tensor"): back,
        ("forward", "all_gather_into_tensor"): gathers,
        ("forward", "reduce_scatter_tensor"): scatters,
    }


def test_collectives_of_a_layer() -> None:
    found = {name: one[1] for name, one in measured().items() if name != "graphs"}
    assert found[STOCK] == found[CACHED] == counted(2, 2, 2, 2)
    # No more than stock: a checkpointed layer's second forward ends before its last reduce-scatter.
    assert found[f"{STOCK} checkpointed"] == found[f"{AUTO} checkpointed"] == counted(2, 2, 4, 3)
    # Two gathers more in backward are the price of the memory.
    assert found[OURS] == counted(2, 2, 4, 2)
    assert found[f"{OURS} checkpointed"] == counted(2, 2, 6, 3)
    # With experts and norms over all heads, too: nothing is saved when the layer ends, neither the
    # router's weight nor rotated heads for a second time.
    assert found["experts checkpointed"] == counted(6, 4, 11, 8)
    # Frozen weights need no tokens in backward; adapters exchange numbers of their rank's width
    # besides.
    assert found["frozen"] == counted(2, 2, 2, 2)
    assert found["adapted"] == counted(4, 4, 4, 4)


def one_node_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A norm of a rank's own tokens whose gradient is summed before it meets the stream's, as a
    fused kernel's is.

    On a CPU torch has no such kernel, and plain tensors and DTensors go through different chains of
    operators.
    """
    if not isinstance(hidden, DTensor):
        return rms_norm(hidden.view_as(hidden), weight, eps)
    own = weight.to_local(grad_placements=[Partial()])
    return DTensor.from_local(
        rms_norm(hidden.to_local(), own, eps), hidden.device_mesh, hidden.placements
    )


def train(
    dtype: torch.dtype, rows: int, norms: bool, stock: bool, world: World
) -> tuple[list[float], list[Tensor]]:
    """Losses of steps of AdamW on two layers, and the weights of this rank at the end."""
    spec = replace(build_small_spec(layers=2), num_kv_heads=4)
    model = build_meta(spec, dtype)
    parallel, memory = ParallelConfig(tensor=2), MemoryConfig()
    if stock:
        for layer in model.model.layers:
            parallelize_stock_layer(layer, world)
    else:
        divided = Parallel(tensor_gradients=shard_tensors(model, parallel, memory, world))
        recompute_cheap_tensors(model, FullFinetuneConfig(parallel=parallel, memory=memory))
    materialize(model, memory, world.device)
    init_weights(model, 3, spec)
    layers, trunk = model.model.layers, model.model
    for module in layers.modules():
        if isinstance(module, Norm):
            module.norm = one_node_norm
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in name and (norms or "norm" not in name))
    trained = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    generator = torch.Generator().manual_seed(5)
    inputs, target = (
        torch.randn(rows, LENGTH, WIDTH, generator=generator).to(dtype) for _ in range(2)
    )
    turn = trunk.rotary[0](torch.arange(LENGTH).expand(rows, LENGTH))
    info = trunk.prepare(
        None, rows=rows, queries=LENGTH, keys=LENGTH, dtype=dtype, device=world.device
    )

    def own(whole: Tensor) -> Tensor:
        """This rank's tokens: of each row under torch's styles, of all rows one after another under
        ours.
        """
        return (
            whole.chunk(2, dim=1)[world.rank] if stock else whole.flatten(0, 1).chunk(2)[world.rank]
        )

    losses = []
    for _ in range(STEPS):
        out = own(inputs).contiguous().requires_grad_()
        for layer in layers:
            out = layer(out, turn, info, None)
        parts = [torch.empty_like(out) for _ in range(2)]
        dist.all_gather(parts, out.detach().contiguous())
        whole = torch.cat(parts, dim=1 if stock else 0).view(rows, LENGTH, WIDTH)
        off = (whole - target).float()
        losses.append(float(off.square().mean()))
        out.backward(own((off / 50).to(dtype)))
        if stock:
            for parameter in trained:  # a norm's is a part of the sum, until it is used
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        else:
            all_reduce_gradients(model, divided, world)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.to_local().detach() for parameter in trained]


BITWISE = [(torch.float32, 1), (torch.bfloat16, 3)]


def train_both() -> tuple[list[Any], bool, bool]:
    """Losses of both ways for each case; whether replicated parameters are the same on both ranks,
    summed and not.
    """
    found = []
    with start_world(FullFinetuneConfig(device="cpu", parallel=ParallelConfig(tensor=2))) as world:
        for dtype, rows in BITWISE:
            stock, ours = (train(dtype, rows, rows == 1, way, world) for way in (True, False))
            found.append((stock[0], ours[0], all(map(torch.equal, stock[1], ours[1]))))
        return found, alike_after_steps(world, summed=True), alike_after_steps(world, summed=False)


def alike_after_steps(world: World, *, summed: bool) -> bool:
    """After five steps in bf16 of a model with head norms and biases."""
    case = Case({"head_norms": True} | BIASES, 3, {"tensor": 2})
    model, divided = build(case, world)
    model = model.to(torch.bfloat16)
    tokens, labels = batch(case, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        backward(case, model, tokens, labels, (labels != -100).sum())
        if summed:
            all_reduce_gradients(model, divided, world)
        optimizer.step()
        optimizer.zero_grad()
    replicated = [
        p.to_local().detach() for p in model.parameters() if p.placements == (Replicate(),)
    ]
    assert len(replicated) == 3 * (4 + 2) + 1, (
        "norms, head norms, biases of o and down of each layer, the last norm"
    )
    flat = torch.cat([part.flatten() for part in replicated])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(*both)


def test_losses_are_those_of_stock_bit_by_bit_and_replicas_stay_alike() -> None:
    """With several rows the norms are frozen: ours sums their gradients over other tokens first,
    stock over its own.
    """
    for losses, summed, unsummed in run_ranks(train_both, 2, timeout=200):
        for (dtype, rows), (stock, ours, same) in zip(BITWISE, losses, strict=True):
            assert stock == ours, (dtype, rows)
            assert same and len(set(stock)) > STEPS / 2, (dtype, rows)
        assert summed
        assert not unsummed
