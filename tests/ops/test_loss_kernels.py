"""Other kernels of the loss: the sums and gradients of ours, the bytes a plan gives them, and who can have them."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import check_loss_kernel, loss_kernel
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops.cross_entropy import cross_entropy
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.ops.loss_kernels import has_torch_kernel, liger_cross_entropy, liger_rows, on_paper, torch_cross_entropy
from recipe_lib.parallel import materialize, shard_model, start_world
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import ROWS, gradients, plain_gradients, small_batch, small_spec

N, D, V = 37, 24, 101
CPU = torch.device("cpu")
needs_torch_kernel = pytest.mark.skipif(not has_torch_kernel(), reason="this torch has no linear_cross_entropy")


def made(dtype: torch.dtype, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    return hidden, weight, labels.masked_fill_(torch.rand(N, generator=generator) < ignored, -100)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> list[Tensor]:
    """Loss and gradients of three times the loss, by plain operators in fp64 from the same numbers."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))]


def found(loss: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))]


def assert_near(values: list[Tensor], wanted: list[Tensor], share: float) -> None:
    for value, other in zip(values, wanted, strict=True):
        assert float((value.double() - other).abs().max()) <= share * float(other.abs().max())


@needs_torch_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [0.3, 1.0])
def test_torchs_kernel(dtype: torch.dtype, ignored: float) -> None:
    hidden, weight, labels = made(dtype, ignored)
    loss = torch_cross_entropy(hidden, weight, labels, chunks=5, loss=cross_entropy)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.requires_grad
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5 * 2**-8}  # bf16: a rounding for each chunk
    assert_near(found(loss, hidden, weight), reference(hidden, weight, labels), near[dtype])
    with torch.no_grad():
        assert not torch_cross_entropy(hidden, weight, labels, chunks=5).requires_grad


@needs_torch_kernel
def test_torchs_kernel_is_given_the_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is one operator: what it holds inside cannot be watched from here."""
    seen: list[Any] = []
    original = F.linear_cross_entropy

    def watched(*args: Any, options: Any, **kwargs: Any) -> Tensor:
        seen.append((options.batch_chunk_size, options.acc_policy, options.acc_dtype))
        return original(*args, options=options, **kwargs)

    monkeypatch.setattr(F, "linear_cross_entropy", watched)
    torch_cross_entropy(*made(torch.bfloat16), chunks=5)
    torch_cross_entropy(*made(torch.float32), chunks=1000)
    assert seen == [(8, "compact", torch.float32), (1, "compact", None)]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("wide", [False, True])
def test_kernels_on_paper(softcap: float | None, wide: bool) -> None:
    """What a plan runs in place of a kernel has its results too."""
    hidden, weight, labels = made(torch.float64)
    loss = on_paper(hidden, weight, labels, rows=8, wide=wide, softcap=softcap)
    assert_near(found(loss, hidden, weight), reference(hidden, weight, labels, softcap), 1e-12)
    weight.requires_grad_(False)
    loss = on_paper(hidden, weight, labels, rows=8, wide=wide, softcap=softcap)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert_near([3 * gradient], reference(hidden, weight, labels, softcap)[1:2], 1e-12)


def test_the_bytes_of_kernels_on_paper() -> None:
    """In bf16: logits of some tokens, twice, and once more in fp32 if the kernel has those; and the gradients."""
    rows, vocabulary = 64, 2048

    def peak(wide: bool) -> int:
        hidden, weight = torch.randn(256, 8).bfloat16().requires_grad_(), torch.randn(vocabulary, 8).bfloat16()
        labels = torch.zeros(256, dtype=torch.int64)
        with LiveBytes() as live:
            on_paper(hidden, weight, labels, rows=rows, wide=wide)
        return live.peak

    logits, small = rows * vocabulary, 20_000
    assert 2 * logits <= peak(wide=False) < 2 * logits + small
    assert 6 * logits <= peak(wide=True) < 6 * logits + small


def test_pieces_of_liger() -> None:
    """Logits of a piece take no more than twice what the hidden states do, in powers of two of tokens."""
    for rows, width, vocabulary in ((16384, 4096, 128256), (4096, 2048, 32000), (100, 64, 64), (3, 4096, 128256)):
        piece = liger_rows(rows, width, vocabulary)
        assert piece == rows or (
            math.log2(piece).is_integer() and piece * vocabulary < 2 * rows * width + 2 * vocabulary
        )
    assert liger_rows(16384, 4096, 32000) == 2048  # the example in Liger's source


def test_ligers_kernel_is_called_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Loss:
        def __init__(self, **settings: Any) -> None:
            calls.append(settings)

        def __call__(self, weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
            calls.append((weight.shape, hidden.shape, hidden.requires_grad, labels.shape))
            return hidden.sum()

    module = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Loss)
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.fused_linear_cross_entropy"):
        monkeypatch.setitem(__import__("sys").modules, name, module)
    hidden, weight, labels = made(torch.float32)
    liger_cross_entropy(hidden.detach(), weight, labels, chunks=8, softcap=2.0)
    assert calls == [
        {"ignore_index": -100, "reduction": "sum", "softcap": 2.0},
        ((V, D), (N, D), True, (N,)),  # Liger makes no gradient of the weight for a hidden that wants none
    ]


def test_a_loss_of_ones_own_is_not_taken() -> None:
    for kernel in (torch_cross_entropy, liger_cross_entropy):
        with pytest.raises(ValueError, match="cross-entropy and nothing else"):
            kernel(*made(torch.float32), chunks=2, loss=lambda logits, labels: logits.sum())


def ranks(tied: bool) -> dict[str, Tensor]:
    """Loss and gradients of a sharded decoder with torch's kernel."""
    spec, parallel, memory = small_spec(tied=tied), ParallelConfig(fsdp_wrap_policy="memory_efficient"), MemoryConfig()
    with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
        model = build_meta(spec, torch.float64)
        check_loss_kernel(model, "torch", CPU)
        shard_model(model, parallel, memory, world)
        materialize(model, memory, world.device)
        init_weights(model, 3, spec)
        tokens, labels = small_batch()
        mine = slice(world.rank * ROWS // 2, (world.rank + 1) * ROWS // 2)
        loss = (
            model(tokens[mine], labels=labels[mine], head_loss=CrossEntropy(3, kernel="torch")) / (labels != -100).sum()
        )
        loss.backward()
        return {"loss": world.all_reduce_sum(loss.detach()), **gradients(model)}


@needs_torch_kernel
def test_torchs_kernel_in_a_sharded_model() -> None:
    for one, tied in zip(run_ranks(lambda: [ranks(False), ranks(True)], 2)[1], (False, True), strict=True):
        loss, wanted = plain_gradients(small_spec(tied=tied))
        assert float(one.pop("loss")) == pytest.approx(loss, rel=1e-12)
        assert one.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(one[name], gradient, rtol=0, atol=1e-12, msg=name)


def refused(model: nn.Module, kernel: str, device: torch.device = CPU) -> str:
    with pytest.raises(ConfigError) as caught:
        check_loss_kernel(model, kernel, device)
    return str(caught.value)


def test_what_a_kernel_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, capped = (
        build_meta(spec, torch.float32) for spec in (small_spec(), replace(small_spec(), logit_softcap=30.0))
    )
    check_loss_kernel(model, "chunked", CPU)
    assert refused(model, "liger") == (
        "memory.loss_kernel: found liger on a device of type cpu, where its kernels do not run, expected chunked; "
        "set memory.loss_kernel=chunked"
    )
    monkeypatch.setattr(loss_kernel, "has_liger", lambda: False)
    monkeypatch.setattr(loss_kernel, "holds_values", lambda device: True)
    assert refused(model, "liger", torch.device("cuda")) == (
        "memory.loss_kernel: found liger and no liger-kernel, expected chunked; pip install 'liger-kernel<1,>=0.6', or "
        "set memory.loss_kernel=chunked"
    )
    monkeypatch.setattr(loss_kernel, "has_torch_kernel", lambda: False)
    assert refused(model, "torch").startswith(f"memory.loss_kernel: found torch with torch {torch.__version__}, which")
    monkeypatch.setattr(loss_kernel, "has_torch_kernel", lambda: True)
    assert refused(capped, "torch") == (
        "memory.loss_kernel: found torch for a model that caps its logits at 30, expected chunked or liger; "
        "set memory.loss_kernel=chunked"
    )
    model.lm_head.__class__ = type("MyHead", (type(model.lm_head),), {})
    assert "for an output head of class MyHead, expected chunked" in refused(model, "torch")
