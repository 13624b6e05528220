"""The gradient norm and clipping: against float64, over meshes, and without one operation that
waits for the device.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipe_lib.optim.optimizers import clip_grad_norm
from recipe_lib.parallel import Parallel
from tests.distributed.ranks import run_ranks

WORLD = SimpleNamespace(device=torch.device("cpu"), size=1, rank=0, pipeline=None)
SHAPES = ((7, 5), (11,), (33, 3))


def parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = []
    for shape in SHAPES:
        params.append(nn.Parameter(torch.zeros(*shape, dtype=dtype)))
        grad = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        params[-1].grad = grad.to(dtype)
    return params


def exact_norm(params: list[nn.Parameter]) -> float:
    return math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
    )


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_the_norm_is_exact_and_never_rounded_to_bf16(dtype: torch.dtype, tolerance: float) -> None:
    params = parameters(dtype)
    norm = clip_grad_norm(params, None, WORLD, Parallel(), None)
    assert norm.shape == () and norm.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert float(norm) == pytest.approx(exact_norm(params), rel=tolerance)


def test_the_norm_of_a_large_tensor_is_as_exact() -> None:
    big = nn.Parameter(torch.zeros(4000, 1000))
    big.grad = torch.randn(1000, 4000, generator=torch.Generator().manual_seed(0)).t()
    assert float(clip_grad_norm([big], None, WORLD, Parallel(), None)) == pytest.approx(
        exact_norm([big]), rel=1e-6
    )


def test_clipping_scales_all_gradients_to_the_largest_norm() -> None:
    params, before = parameters(torch.float64), parameters(torch.float64)
    norm = clip_grad_norm(params, 0.5, WORLD, Parallel(), None)
    assert float(norm) == pytest.approx(exact_norm(before))
    assert exact_norm(params) == pytest.approx(0.5, rel=1e-6)
    for ours, was in zip(params, before, strict=True):
        torch.testing.assert_close(
            ours.grad, was.grad * (0.5 / (float(norm) + 1e-6)), rtol=1e-12, atol=0
        )


def test_it_agrees_with_torch() -> None:
    params, theirs = parameters(), parameters()
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    assert float(clip_grad_norm(params, 1.0, WORLD, Parallel(), None)) == pytest.approx(
        float(expected), rel=1e-6
    )
    for our, their in zip(params, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-6, atol=1e-7)


def test_gradients_within_the_limit_and_without_a_limit_stay_bitwise() -> None:
    for limit in (None, 1e6):
        params, before = parameters(), parameters()
        clip_grad_norm(params, limit, WORLD, Parallel(), None)
        assert all(
            torch.equal(ours.grad, was.grad) for ours, was in zip(params, before, strict=True)
        )


def test_missing_gradients_and_frozen_parameters_are_left_out() -> None:
    params = parameters()
    params[0].grad = None
    params.append(nn.Parameter(torch.ones(2), requires_grad=False))
    norm = clip_grad_norm(params, 1e-3, WORLD, Parallel(), None)
    assert float(norm) > 1 and params[0].grad is None
    assert exact_norm(params) == pytest.approx(1e-3, rel=1e-3)


def test_no_gradient_at_all_has_a_norm_of_zero() -> None:
    for params in ([], [nn.Parameter(torch.ones(3))]):
        assert float(clip_grad_norm(params, 1.0, WORLD, Parallel(), None)) == 0


def test_gradients_of_zero_stay_zero() -> None:
    params = parameters(scale=0.0)
    assert float(clip_grad_norm(params, 1.0, WORLD, Parallel(), None)) == 0
    assert all(not p.grad.any() for p in params)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_returned_as_such(bad: float) -> None:
    params = parameters()
    params[1].grad[0] = bad
    assert not clip_grad_norm(params, 1.0, WORLD, Parallel(), None).isfinite()


def test_float64_anywhere_makes_the_norm_float64() -> None:
    params = [*parameters(), *parameters(torch.float64)]
    norm = clip_grad_norm(params, 1.0, WORLD, Parallel(), None)
    assert norm.dtype == torch.float64
    assert [p.grad.dtype for p in params] == [torch.float32] * 3 + [torch.float64] * 3


def test_nothing_is_read_back_to_the_host() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    called = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Calls():
        clip_grad_norm(parameters(), 1.0, WORLD, Parallel(), None)
    assert "linalg_vector_norm" in called and "_foreach_mul_" in called
    assert not called & {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero"}


def sharded(mesh_shape: tuple[int, ...], limit: float | None) -> dict[str, object]:
    """On one rank: the same gradients as `parameters`, sharded by FSDP over a mesh; plain and
    frozen ones beside.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("data_replicate", "data_shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    module = nn.Module()
    module.kept = nn.ParameterList(
        [nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in SHAPES]
    )
    fully_shard(module, mesh=mesh)
    plain = parameters(torch.float64)
    for ours, whole in zip(module.kept, plain, strict=True):
        ours.grad = ours.detach().clone()
        ours.grad.to_local().copy_(shard_of(whole.grad, ours))
    params = [*module.kept, plain[1]]
    norm = clip_grad_norm(params, limit, WORLD, Parallel(), None)
    return {
        "norm": norm,
        "grads": [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params
        ],
    }


def shard_of(whole: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements).to_local()


@pytest.mark.parametrize("mesh_shape", [(2,), (1, 2), (2, 1)])
def test_sharded_gradients_have_the_norm_of_one_process(mesh_shape: tuple[int, ...]) -> None:
    check_sharded(mesh_shape)


def test_hybrid_sharding_counts_copies_once() -> None:
    check_sharded((2, 2))


def check_sharded(mesh_shape: tuple[int, ...]) -> None:
    alone = [*parameters(torch.float64), parameters(torch.float64)[1]]
    expected = clip_grad_norm(alone, 2.0, WORLD, Parallel(), None)
    assert float(expected) == pytest.approx(
        exact_norm([*parameters(torch.float64), parameters(torch.float64)[1]])
    )
    for result in run_ranks(sharded, math.prod(mesh_shape), mesh_shape, 2.0):
        torch.testing.assert_close(result["norm"], expected, rtol=1e-14, atol=0)
        for ours, reference in zip(result["grads"], alone, strict=True):
            torch.testing.assert_close(ours, reference.grad, rtol=1e-14, atol=0)


def test_a_rank_without_a_gradient_takes_part_in_the_sum() -> None:
    def work() -> float:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
        if dist.get_rank() == 0:
            parameter.grad = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
            parameter.grad.to_local().fill_(1.0)
        else:
            distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        return float(clip_grad_norm([parameter], 1.0, WORLD, Parallel(), None))

    assert run_ranks(work, 2) == pytest.approx([2.0, 2.0])  # four elements of one rank


def test_a_gradient_that_is_not_summed_yet_is_refused() -> None:
    def work() -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
        parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with pytest.raises(ValueError, match="not summed over the ranks yet"):
            clip_grad_norm([parameter], 1.0, WORLD, Parallel(), None)
        return "refused"

    assert run_ranks(work, 2) == ["refused", "refused"]
