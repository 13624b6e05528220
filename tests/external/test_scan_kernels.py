"""Scans run by kernels on a GPU and by torch's loops elsewhere; kernels get the documents of a row;
packages that do not serve are refused.
"""

import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

from recipe_lib.config import scan_packages
from recipe_lib.errors import SetupError
from recipe_lib.external import scan_kernels
from recipe_lib.external.planned_scans import PLANNED
from recipe_lib.external.scan_kernels import (
    ScanKernel,
    choose_scans_by_device,
    find_scans,
)
from recipe_lib.plan.tracing.trace_rank import STEADY
from tests.external.hybrids import build_hybrid, make_hybrid_config, make_hybrid_spec
from tests.external.test_packed_hybrids import check_equal, compute
from tests.plan.apart import build_settings, call_in_fork
from tests.selection import mark_slow_except

PACKAGE = "kernels_of_a_test"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    scan_kernels._takes_documents.cache_clear()


def split_row(bounds: list[int], tensors: tuple[Tensor, ...], run: Callable[..., Tensor]) -> Tensor:
    """Run a loop on each document of one row, as the kernels do; tensors: `[1, s, ...]`."""
    assert all(tensor.shape[0] == 1 for tensor in tensors)
    parts = [
        run(*(tensor[:, start:stop] for tensor in tensors))
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return torch.cat(parts, 1)


def find_bounds(numbers: Tensor) -> list[int]:
    """Bounds of the documents whose numbers the tokens have, `[1, s]`."""
    assert numbers.dtype == torch.int32
    changes = (numbers[0, 1:] != numbers[0, :-1]).nonzero().flatten() + 1
    return [0, *changes.tolist(), numbers.shape[1]]


def make_delta_rule(loop: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Fla's function, with the parameters of its version 0.6."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            normalized = use_qk_l2norm_in_kernel
            output, _ = loop(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalized)
            assert isinstance(output, Tensor)
            return output

        calls.append("delta rule")
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        if cu_seqlens is None:
            return run(q, k, v, g, beta), None
        return split_row(bounds, (q, k, v, g, beta), run), None

    return chunk_gated_delta_rule


def make_convolution(loop: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """That of causal-conv1d."""

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        def run(x: Tensor) -> Tensor:
            output = loop(x.transpose(1, 2), weight, bias, activation).transpose(1, 2)
            assert isinstance(output, Tensor)
            return output

        calls.append("convolution")
        rows = x.transpose(1, 2)
        if seq_idx is None:
            return run(rows).transpose(1, 2)
        return split_row(find_bounds(seq_idx), (rows,), run).transpose(1, 2)

    return causal_conv1d_fn


def make_mamba_scan(loop: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Mamba-ssm's."""

    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Tensor:
        def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
            settings = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            output = loop(x, dt, A, b, c, chunk_size, D=D, **settings)
            assert isinstance(output, Tensor)
            return output

        calls.append("mamba")
        if seq_idx is None:
            return run(x, dt, B, C)
        return split_row(find_bounds(seq_idx), (x, dt, B, C), run)

    return mamba_chunk_scan_combined


def make_fused_mamba(loop: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Mamba-ssm's function for a whole mixer; None: the class goes on with its parts."""

    def mamba_split_conv1d_scan_combined(
        zxbcdt: Tensor,
        *args: Any,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str = "silu",
        rmsnorm_weight: Tensor | None = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Tensor | None = None,
        outproj_bias: Tensor | None = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
    ) -> None:
        calls.append("mixer")

    return mamba_split_conv1d_scan_combined


MAKERS = {
    "chunk_gated_delta_rule": make_delta_rule,
    "causal_conv1d_fn": make_convolution,
    "mamba_chunk_scan_combined": make_mamba_scan,
    "mamba_split_conv1d_scan_combined": make_fused_mamba,
}
CLASSES = {
    "qwen3_5_text": (modeling_qwen3_5, {"delta rule", "convolution"}),
    "lfm2": (modeling_lfm2, {"convolution"}),
    "nemotron_h": (modeling_nemotron_h, {"mamba", "convolution", "mixer"}),
}


def install(
    file: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[ScanKernel, list[str]], Callable[..., Any] | None],
) -> list[str]:
    """Put functions of a package in place of a file's scans, as transformers does on import.

    make: of a scan, its function in the package; None: it has none. Returns the list of calls.
    """
    calls: list[str] = []
    module = ModuleType(PACKAGE)
    module.__spec__ = ModuleSpec(PACKAGE, None)
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    for key, function in list(vars(file).items()):
        scan = getattr(function, "scan", None)
        if isinstance(scan, ScanKernel) and scan.name in MAKERS:
            if kernel := make(scan, calls):
                monkeypatch.setattr(module, scan.name, kernel, raising=False)
            wrap = use_kernel_func_from_hub_with_fallback(scan.name, PACKAGE, "")
            monkeypatch.setattr(file, key, wrap(scan.loop))
    return calls


def make_kernel(scan: ScanKernel, calls: list[str]) -> Callable[..., Any]:
    return MAKERS[scan.name](scan.loop, calls)


@pytest.mark.parametrize("name", mark_slow_except(CLASSES, ("qwen3_5_text", "lfm2")))
def test_kernels_get_the_documents_of_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows by functions with the kernels' arguments are the documents by loops."""
    file, expected_calls = CLASSES[name]
    model = build_hybrid(name, torch.float64).train()
    expected = compute(model, torch.float64, packed=False)
    calls = install(file, monkeypatch, make_kernel)
    choose_scans_by_device(model)
    scan_kernels._takes_documents.cache_clear()
    assert all(scan.kernel for scan in find_scans(model))
    # On a CPU loops run, and in plans.
    check_equal(compute(model, torch.float64, packed=True), expected, torch.float64)
    assert not calls
    monkeypatch.setattr(scan_kernels, "uses_kernels", lambda values: True)
    check_equal(compute(model, torch.float64, packed=True), expected, torch.float64)
    assert set(calls) == expected_calls


def test_documents_run_in_batches_if_a_kernel_does_not_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(scan: ScanKernel, calls: list[str]) -> Callable[..., Any]:
        kernel = make_kernel(scan, calls)
        if scan.name != "causal_conv1d_fn":
            return kernel
        return lambda x, weight, bias=None, activation=None: kernel(
            x, weight, bias, activation=activation
        )

    model = build_hybrid("qwen3_5_text", torch.float64).train()
    expected = compute(model, torch.float64, packed=False)
    calls = install(modeling_qwen3_5, monkeypatch, make)
    choose_scans_by_device(model)
    scan_kernels._takes_documents.cache_clear()
    monkeypatch.setattr(scan_kernels, "uses_kernels", lambda values: True)
    check_equal(compute(model, torch.float64, packed=True), expected, torch.float64)
    assert set(calls) == {"delta rule", "convolution"}


@pytest.mark.parametrize(
    "make, fault",
    (
        (lambda scan, calls: None, "it has no "),
        (
            lambda scan, calls: (
                make_kernel(scan, calls)
                if scan.name == "causal_conv1d_fn"
                else lambda q, k, v, g, beta, initial_state=None: None
            ),
            "its chunk_gated_delta_rule takes no output_final_state",
        ),
    ),
)
def test_a_package_that_does_not_serve_is_refused(
    make: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_hybrid_spec("qwen3_5_text")
    install(modeling_qwen3_5, monkeypatch, make)
    monkeypatch.setitem(scan_packages.SCAN_PACKAGES, "flash-linear-attention", PACKAGE)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(SetupError) as error:
        make_hybrid_spec("qwen3_5_text")
    text = str(error.value)
    assert text.startswith("flash-linear-attention: found version 0.1.0, which Qwen3_5ForCausalLM")
    assert fault in text and "pip install --upgrade flash-linear-attention" in text
    assert "\n" not in text
    assert spec.scan_packages == (("causal-conv1d", None), ("flash-linear-attention", None))


@pytest.mark.parametrize(
    "versions, device, text",
    (
        ({"a": None, "b": None}, "cuda", "torch's loops, without the kernels of a and b"),
        ({"a": "1.2"}, "cuda", "kernels of a 1.2"),
        ({"a": "1.2", "b": None}, "cuda", "kernels of a 1.2, and torch's loops without b"),
        ({"a": "1.2"}, "cpu", "torch's loops, as the kernels of a 1.2 run on a GPU alone"),
    ),
)
def test_the_text_on_scans(versions: dict[str, str | None], device: str, text: str) -> None:
    assert scan_packages.describe_scans(versions, device) == text


SCANS = {"qwen3_5_text": "gated_delta_rule", "nemotron_h": "mamba_scan"}


def plan_tiny(name: str, folder: Path, install_in: ModuleType | None) -> tuple[dict[str, int], Any]:
    """Plan a full run on a simulated GPU: (operator -> how often a step runs it, the plan)."""
    from recipe_lib.plan.build_plan import make_plan

    if install_in is not None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            install(install_in, monkeypatch, make_kernel)
            return plan_tiny(name, folder, None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(make_hybrid_config(name)))
    words = ("model.path=null", f"model.preset={path}", "model.implementation=transformers")
    small = (
        "tokenizer.path=unread",
        "gradient_accumulation_steps=1",
        "max_seq_len=128",
        "data.packing=false",
        "memory.activation_checkpointing=none",
    )
    plan, trace = make_plan(*build_settings("llama3_2/1B_full", 1, *words, *small))
    counts = Counter[str]()
    for op in trace.iterate_ops(STEADY):
        counts[op.name] += op.repeats
    return counts, plan


@pytest.mark.parametrize("name", mark_slow_except(SCANS, ("qwen3_5_text",)))
def test_kernels_are_planned_on_a_gpu(name: str, tmp_path: Path) -> None:
    file, _ = CLASSES[name]
    build_hybrid(name, torch.float32)  # its functions become those that are chosen by device
    loops, plan_of_loops = call_in_fork(plan_tiny, name, tmp_path, None)
    kernels, plan_of_kernels = call_in_fork(plan_tiny, name, tmp_path, file)
    operator = f"tune_recipes::{SCANS[name]}"
    assert operator not in loops
    # Of the one layer with a scan.
    assert (kernels[operator], kernels[f"{operator}_backward"]) == (1, 1)
    assert sum(kernels.values()) < sum(loops.values())
    assert plan_of_kernels.time.compute < plan_of_loops.time.compute
    notes = " ".join(plan_of_kernels.assumptions)
    assert "scans: kernels of" in notes and "no run was compared" in notes
    assert "scans: torch's loops, without" in " ".join(plan_of_loops.assumptions)


def test_what_a_planned_delta_rule_keeps() -> None:
    """By the list of what fla 0.6 saves for backward, in bytes."""
    batch = 1
    length = 256
    heads = 2
    value_heads = 4
    width = 128
    with FakeTensorMode():
        sizes = dict.fromkeys(("query", "key"), (heads, width)) | {"value": (value_heads, width)}
        arguments = {
            name: torch.empty(batch, length, *size, dtype=torch.bfloat16)
            for name, size in sizes.items()
        } | {name: torch.empty(batch, length, value_heads) for name in ("g", "beta")}
        for tensor in arguments.values():
            tensor.requires_grad_()
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = PLANNED["chunk_gated_delta_rule"](arguments)
        tokens = batch * length
        normalized = tokens * heads * (2 * width + 4)  # queries or keys, and their norms
        sums = 4 * tokens * value_heads
        inverses = 2 * tokens * value_heads * 64
        kept = [tensor for tensor in saved if all(tensor is not x for x in arguments.values())]
        assert sum(tensor.nbytes for tensor in kept) == 2 * normalized + sums + inverses
        # Values and betas themselves; of the others what the kernel makes of them.
        assert len(saved) == len(kept) + 2
        output.sum().backward()
        assert all(tensor.grad is not None for tensor in arguments.values())
