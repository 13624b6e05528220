"""Measure what decoder layers keep for backward under tensor parallel, ours and DTensor styles.

    python benchmarks/tp_memory.py --output docs/measurements/tp_memory.md

Layers of real widths run as rank 0 of t on the simulated device, whose tensors have sizes and no
bytes. A variant is torch's DTensor styles, or our layer with some of its savings taken away.
tests/parallel/test_tensor_memory.py measures other models here; `tp_ways.py` imports
`parallelize_stock_layer` and `multiply_written_out`.
"""

import argparse
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.tables import format_markdown_table  # noqa: E402
from recipe_lib.config.schema import (  # noqa: E402
    FullFinetuneConfig,
    MemoryConfig,
    ParallelConfig,
)
from recipe_lib.memory import apply_activation_checkpointing, compile_layers  # noqa: E402
from recipe_lib.memory.apply_levers import recompute_cheap_tensors  # noqa: E402
from recipe_lib.models import (  # noqa: E402
    DecoderSpec,
    build_meta,
    build_spec,
    decoder,
    read_preset_config,
)
from recipe_lib.ops.mlp import ACTIVATIONS  # noqa: E402
from recipe_lib.parallel import World, shard_tensors, tensor_forwards  # noqa: E402
from recipe_lib.plan.simulated_world.simulated_device import NAME  # noqa: E402
from recipe_lib.plan.simulated_world.simulated_ranks import (  # noqa: E402
    enter_simulated_world,
    use_fake_tensors,
)
from recipe_lib.units import MIB  # noqa: E402

TOKENS = 8192  # of a sequence
LAYERS = 4  # that are run, of each model
# Bytes: seed and offset, which attention's kernel saves for backward even without dropout.
RANDOM_STATE = 24
# Bytes: the signs of a compiled rotation that is made again.
SIGNS = 8
MODELS = ("llama3/8B", "llama3/70B", "qwen3/8B")  # presets; the last norms its heads
SIZES = (2, 4, 8)  # t, tensor-parallel ranks
# Variants of a layer, as the page names them. Each keeps less than the one before.
STOCK = "DTensor styles"
CACHED = "gathered once"  # our layer, the gathered tokens and all of the gated MLP kept
TWICE = "gathered again"  # the norm's output is kept, and gathered again in backward
FUSED = "+ product"  # activation and product of gate and up are made again, too
OURS = "+ norm (ours)"  # the norm's output is made again, too, and rotated heads behind a norm
AUTO = "auto"  # ours, with `parallel.tensor_regather_in_backward: auto`
VARIANTS = (STOCK, CACHED, TWICE, FUSED, OURS)


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory and collectives of rank 0."""

    kept: int  # bytes that one layer keeps for backward
    peak: int  # bytes alive at once, of all layers; parameters are not counted
    # How often a layer runs each, by (`forward` or `backward`, operator).
    collectives: dict[tuple[str, str], int]

    def count(self, part: str) -> int:
        """Count the collectives of a layer. part: `forward` or `backward`."""
        return sum(
            count for (operator_part, _), count in self.collectives.items() if operator_part == part
        )


def build_spec_of_layers(name: str, layers: int = LAYERS) -> DecoderSpec:
    """Return the spec of a shipped preset with so many layers."""
    spec = build_spec(read_preset_config(name), name)
    return replace(spec, num_layers=layers, windows=spec.windows[:1] * layers)


def parallelize_stock_layer(layer: nn.Module, world: World) -> nn.Module:
    """Shard a layer by torch's styles, and return it.

    Norms run on a rank's own tokens. These are gathered once for query, key and value, and once for
    gate and up.
    """
    split = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
    )
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": split,
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan |= {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    return parallelize_module(layer, world.mesh["tensor"], plan)


class Tracker(TorchDispatchMode):
    """Follows, while entered, the storages that operators make, and counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "forward"  # or `backward`: what collectives are counted for; set from outside
        self.peak = 0  # the most bytes alive at once
        self.collectives: Counter[tuple[str, str]] = Counter()  # by (part, operator)
        # By the storage's address: a weak reference to it, and its bytes.
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note the storages that it has made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operator with this rank's local tensors
        inputs = {tensor.untyped_storage()._cdata for tensor in _list_tensors((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "_c10d_functional" and operator._opname != "wait_tensor":
            self.collectives[self.part, operator._opname] += 1
        for output in _list_tensors(result):
            storage = output.untyped_storage()
            if storage._cdata not in inputs:  # else a view of an input, or changed in place
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.measure_alive())
        return result

    def measure_alive(self) -> int:
        """Return the bytes of the storages that are alive."""
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        return sum(size for _, size in self._alive.values())


def _list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def measure_kept_storages(parameters: list[Tensor]) -> Iterator[dict[int, int]]:
    """Yield a dict that gets the bytes of each storage saved for backward, by its address.

    It is filled when the block ends, with what is still saved then: a layer frees in the end what
    it makes again. parameters: tensors whose storages are not counted.
    """
    ignored = {_get_local(parameter).untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, int] = {}
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _SavedTensor:
        """Return what autograd saves in place of a tensor."""
        stand_in = _SavedTensor(tensor)
        saved.add(stand_in)
        return stand_in

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda stand_in: stand_in.tensor):
        yield kept
    for storage in (_get_local(stand_in.tensor).untyped_storage() for stand_in in saved):
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()


class _SavedTensor:
    """A stand-in for a tensor that autograd saves; it dies when that is freed."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an operator that saves its own result would keep its graph alive by it.
        self.tensor = tensor.detach()


def _get_local(maybe_shared: Tensor) -> Tensor:
    """Return the rank's part of a DTensor; a plain tensor as it is."""
    return maybe_shared._local_tensor if isinstance(maybe_shared, DTensor) else maybe_shared


@contextmanager
def change_layer(variant: str) -> Iterator[None]:
    """Take from our layers, while entered, the savings that a variant does not have.

    They are functions that modules import by name, so they are replaced there. What else a variant
    does without is up to `is_recomputing`.
    """
    replacements: list[tuple[Any, str, Any]] = []
    if variant in (STOCK, CACHED, TWICE):
        # As an MLP without a node of its own: activation and product are kept.
        replacements = [
            (module, "gated_activation", multiply_written_out)
            for module in (decoder, tensor_forwards)
        ]
    elif variant == FUSED:
        replacements = [
            (module, "run_cheap", run_and_keep) for module in (decoder, tensor_forwards)
        ]
    with ExitStack() as stack:
        for module, name, function in replacements:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def multiply_written_out(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Stand in for `gated_activation`: autograd keeps gate, up, activation and product."""
    return ACTIVATIONS[activation][0](gate) * up


def run_and_keep(function: Callable[..., Any], *args: Any) -> Any:
    """Stand in for `run_cheap`: autograd keeps the result."""
    return function(*args)


def is_recomputing(variant: str) -> bool:
    """Return True if a variant's layers compute again what is cheap (`memory.recompute_cheap`)."""
    return variant in (FUSED, OURS, AUTO)


def measure_memory(
    spec: DecoderSpec,
    size: int,
    variant: str,
    *,
    rows: int = 1,
    length: int = TOKENS,
    checkpointing: str = "none",
    compiled: bool = False,
    change: Callable[[nn.Module], None] | None = None,
) -> MeasuredMemory:
    """Run the layers of `spec` forward and backward in bf16, and measure what rank 0 needs.

    size: tensor-parallel ranks. rows, length: sequences and their tokens. checkpointing: the value
    of memory.activation_checkpointing. compiled: with torch.compile; `peak` is then 0 and
    `collectives` is empty, since torch compiles nothing while a `Tracker` is entered. change: is
    called with the meta model before it is sharded. Raises ValueError if the layers are not alike.
    """
    gather_again = {CACHED: "false", AUTO: "auto"}.get(variant, "true")
    parallel = ParallelConfig(tensor=size, tensor_regather_in_backward=gather_again)
    with (
        enter_simulated_world(parallel, 0, size) as world,
        use_fake_tensors(),
        change_layer(variant),
    ):
        model = build_meta(spec, torch.bfloat16)
        if change is not None:
            change(model)
        _prepare_model(
            model,
            parallel=parallel,
            world=world,
            variant=variant,
            mode=checkpointing,
            compiled=compiled,
        )
        # Our layers take [tokens, d], torch's styles [rows, tokens, d].
        shape: tuple[int, ...] = (rows * length // size, spec.width)
        if variant == STOCK:
            shape = (rows, length // size, spec.width)
        hidden = torch.empty(shape, dtype=torch.bfloat16, device=NAME, requires_grad=True)
        positions = torch.zeros(rows, length, dtype=torch.int64, device=NAME)
        cos_sin = model.model.rotary[0](positions)
        attention = model.model.prepare(
            None, rows=rows, queries=length, keys=length, dtype=torch.bfloat16, device=hidden.device
        )
        gradient = torch.empty_like(hidden)
        tracker = Tracker()
        with nullcontext() if compiled else tracker:
            with measure_kept_storages([*model.parameters(), *cos_sin]) as kept:
                out = hidden * 1  # made in here, so that `peak` counts the first layer's input
                for layer in model.model.layers:
                    out = layer(out, cos_sin, attention, None)
            tracker.part = "backward"
            out.backward(gradient)
    collectives = {
        key: _compute_layer_share(count, spec) for key, count in sorted(tracker.collectives.items())
    }
    return MeasuredMemory(
        kept=_compute_layer_share(sum(kept.values()), spec),
        peak=tracker.peak,
        collectives=collectives,
    )


def _compute_layer_share(total: int, spec: DecoderSpec) -> int:
    """Return a layer's share of what all layers have together.

    Raises ValueError if it is no whole number: the layers then do not have the same.
    """
    if total % spec.num_layers:
        raise ValueError(
            f"{total} is no multiple of the {spec.num_layers} layers, which should be alike"
        )
    return total // spec.num_layers


def _prepare_model(
    model: nn.Module,
    *,
    parallel: ParallelConfig,
    world: World,
    variant: str,
    mode: str,
    compiled: bool,
) -> None:
    """Shard the layers, checkpoint and compile them, and give the model its memory.

    mode: the value of memory.activation_checkpointing.
    """
    memory = MemoryConfig(activation_checkpointing=mode, recompute_cheap=is_recomputing(variant))
    if variant != STOCK:
        shard_tensors(model, parallel=parallel, memory=memory, world=world)
    else:
        for layer in model.model.layers:
            parallelize_stock_layer(layer, world)
    cfg = FullFinetuneConfig(parallel=parallel, memory=memory, compile=compiled)
    recompute_cheap_tensors(model, cfg)
    apply_activation_checkpointing(model, mode)
    if compiled:
        torch._dynamo.reset()  # drop what was compiled for another variant
    if compiled and variant != STOCK:
        compile_layers(model, "aot_eager")
    elif compiled:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    model.to_empty(device=NAME)


def compute_kept_bytes(
    spec: DecoderSpec, size: int, variant: str, *, tokens: int = TOKENS, compiled: bool = False
) -> int:
    """Compute the bytes that a layer keeps for backward in bf16.

    size: t, the tensor-parallel ranks. tokens: of the whole micro-batch. Compiled, an MLP that
    keeps its product keeps one tensor less, since torch makes the activation of gate again.
    """
    # Widths: of the model, of the MLP, of all query heads, of all key heads.
    h, f = spec.width, spec.mlp_width
    q, k = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    product = f if compiled else 2 * f
    gathered_tokens = 2 * h * size  # for attention and for the MLP; whole on every rank
    # Elements a token beyond those of OURS, times t.
    additional = {
        STOCK: gathered_tokens + product,
        CACHED: gathered_tokens + product,
        TWICE: 2 * h + product,
        FUSED: 2 * h,
        OURS: 0,
    }
    elements = 2 * h + 2 * q + 2 * k + 2 * f + additional[variant]
    num_norms = 2
    if spec.head_norms:
        num_norms += spec.num_heads + spec.num_kv_heads
        # Queries and keys are kept before their norms. Attention's, rotated, are made of them
        # again; compiled, of the norms' outputs, as torch keeps what one function that is made
        # again hands to the next one.
        if variant != OURS or compiled:
            elements += q + k
    # Attention's log-sum-exp of each head, and the inverse root mean square of each norm, which
    # compiled code makes again with the norm.
    fp32_elements = spec.num_heads + (0 if variant == OURS and compiled else num_norms)
    fixed = RANDOM_STATE
    if spec.head_norms and variant == OURS and compiled:
        fixed += SIGNS
    return tokens * (2 * elements + 4 * fp32_elements) // size + fixed


PAGE = """# What a decoder layer keeps under tensor parallel

Made by `python benchmarks/tp_memory.py --output docs/measurements/tp_memory.md`: {layers} layers of each model's real
widths run forward and backward as rank 0 of t, on the simulated device, whose tensors have sizes and no bytes. b = 1,
s = {tokens}, bf16, no activation checkpointing. Every number is measured; a run whose kept bytes are not those of the
formula, to the byte, writes no page. No time is measured here.

- **{stock}**: torch's own `SequenceParallel`, `ColwiseParallel`, `RowwiseParallel`, one gather for each group of
  linears.
- **{cached}**: our nodes, the gathered tokens kept, the MLP's activation and product kept.
- **{twice}**: the tokens are gathered a second time in backward (`parallel.tensor_regather_in_backward`).
- **{fused}**: and the MLP keeps gate and up only; activation and product are made again.
- **{ours}**: and the norm's output is made again before the second gather, as are queries and keys behind a norm. This
  is what `parallel.tensor` does with `memory.recompute_cheap`, the default.

Elements a token that a rank keeps, times t: `2h + 2q + 2k + 2F`, and for {stock} and {cached} `2ht + 2F` more, for
{twice} `2h + 2F`, for {fused} `2h`; h: the width, q and k: of all query and key heads, F: of the MLP. Compiled, an
MLP that keeps its product keeps F less: torch makes the activation again. To that come, in bytes: 4 for each head and
each norm of a token over t, and {random} for the state of attention's random numbers; {ours} compiled has none for
norms. A model that norms its heads keeps 4 bytes for each of these heads, and q + k elements more, but for {ours} in
eager mode; compiled, that keeps {signs} bytes more.

## Kept MiB of one layer

{kept}

## Peak MiB of forward and backward over {layers} layers

Gradients included, parameters not; eager.

{peak}

## Collectives of one layer, forward and backward

Gathers and reduce-scatters of hidden states, {first}, t = 8. The last column is `parallel.tensor_regather_in_backward:
auto`: without checkpointing two gathers more in backward than torch's, which is what the memory costs; in layers with
full checkpointing, which keep what they gather in backward's second forward, as many as torch's.

{collectives}
"""


def build_page() -> str:
    """Measure all models and return the page.

    Raises ValueError if a layer does not keep the bytes of `compute_kept_bytes`.
    """
    kept_rows = []
    peak_rows = []
    specs = {name: build_spec_of_layers(name) for name in MODELS}
    for name, spec in specs.items():
        for size in SIZES:
            eager = {variant: measure_memory(spec, size, variant) for variant in VARIANTS}
            compiled = {
                variant: measure_memory(spec, size, variant, compiled=True)
                for variant in (STOCK, OURS)
            }
            for variant, measured in eager.items():
                expected = compute_kept_bytes(spec, size, variant)
                _check_kept(f"{name}, t={size}, {variant}", measured.kept, expected)
            for variant, measured in compiled.items():
                expected = compute_kept_bytes(spec, size, variant, compiled=True)
                _check_kept(f"{name}, t={size}, {variant}", measured.kept, expected)
            kept = [measured.kept for measured in (*eager.values(), *compiled.values())]
            share = f"{eager[OURS].kept / eager[STOCK].kept:.0%}"
            kept_rows.append([name, str(size), *(f"{size / MIB:.1f}" for size in kept), share])
            peaks = [f"{measured.peak / MIB:.0f}" for measured in eager.values()]
            peak_rows.append([name, str(size), *peaks])
            print(" ".join(kept_rows[-1]), "|", " ".join(peak_rows[-1]), flush=True)
    collective_rows = []
    for mode in ("none", "full"):
        cells = [mode]
        for variant in (STOCK, CACHED, OURS, AUTO):
            measured = measure_memory(specs[MODELS[0]], 8, variant, checkpointing=mode)
            cells.append(f"{measured.count('forward')} + {measured.count('backward')}")
        collective_rows.append(cells)
    kept_head = ["model", "t", *VARIANTS, f"{STOCK}, compiled", f"{OURS}, compiled"]
    kept_head.append(f"{OURS} / {STOCK}")
    collective_head = ["checkpointing", STOCK, CACHED, OURS, AUTO]
    return PAGE.format(
        kept=format_markdown_table(kept_head, kept_rows),
        peak=format_markdown_table(["model", "t", *VARIANTS], peak_rows),
        collectives=format_markdown_table(collective_head, collective_rows),
        layers=LAYERS,
        tokens=TOKENS,
        random=RANDOM_STATE,
        signs=SIGNS,
        first=MODELS[0],
        stock=STOCK,
        cached=CACHED,
        twice=TWICE,
        fused=FUSED,
        ours=OURS,
    )


def _check_kept(case: str, kept: int, expected: int) -> None:
    """Raise ValueError if a layer keeps other bytes than expected."""
    if kept != expected:
        raise ValueError(f"{case}: {kept} bytes kept, {expected} by formula")


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        description="Measure what decoder layers keep for backward under tensor parallel."
    )
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = build_page()
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
