"""What decoder layers keep for backward under tensor parallel: torch's own DTensor styles beside
ours, and by formula.

    python benchmarks/tp_memory.py --output docs/measurements/tp_memory.md

Layers of real widths run forward and backward as rank 0 of t on the simulated device: the code is
the same, tensors have sizes and no bytes. Ours is also run without what it does beyond gathering
twice, to show what each part gives.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
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

from recipe_lib.config.schema import MemoryConfig, ParallelConfig  # noqa: E402
from recipe_lib.memory import apply_activation_checkpointing, compile_layers  # noqa: E402
from recipe_lib.models import DecoderSpec, build_meta, build_spec, read_preset_config  # noqa: E402
from recipe_lib.ops import gathered  # noqa: E402
from recipe_lib.ops.mlp import ACTIVATIONS  # noqa: E402
from recipe_lib.parallel import World, shard_tensors, tensor_forwards  # noqa: E402
from recipe_lib.plan.simulated_world.simulated_device import NAME  # noqa: E402
from recipe_lib.plan.simulated_world.simulated_ranks import (  # noqa: E402
    enter_simulated_world,
    use_fake_tensors,
)
from recipe_lib.units import MIB  # noqa: E402

TOKENS, LAYERS = 8192, 4
RANDOM_STATE = (
    24  # bytes: the seed and the offset that the kernel of attention hands on, used or not
)
MODELS = ("llama3/8B", "llama3/70B", "qwen3/8B")
SIZES = (2, 4, 8)
STOCK, CACHED, TWICE, FUSED, OURS = (
    "DTensor styles",
    "gathered once",
    "gathered again",
    "+ product",
    "+ norm (ours)",
)
AUTO = "auto"  # ours, as `parallel.tensor_regather_in_backward: auto` has it
WAYS = (STOCK, CACHED, TWICE, FUSED, OURS)


@dataclass(frozen=True)
class Measured:
    """Of rank 0. kept: bytes of one layer when backward begins. peak: bytes over all layers.
    collectives: of a layer, by (`forward` or `backward`, operator).
    """

    kept: int
    peak: int
    collectives: dict[tuple[str, str], int]

    def count(self, part: str) -> int:
        """Collectives of a layer in one part."""
        return sum(number for (where, _), number in self.collectives.items() if where == part)


def build_spec_of_layers(name: str, layers: int = LAYERS) -> DecoderSpec:
    """The spec of a shipped preset with so many layers."""
    spec = build_spec(read_preset_config(name), name)
    return replace(spec, num_layers=layers, windows=spec.windows[:1] * layers)


def build_stock_layer(layer: nn.Module, world: World) -> nn.Module:
    """The layer under torch's styles: sequence-parallel norms, one gather for each group of
    linears.
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
    """While entered, notes the most bytes alive of storages that operators made, and counts
    collectives by `part`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part, self.peak = "forward", 0
        self.collectives: Counter[tuple[str, str]] = Counter()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it is about the ranks' own parts
        before = {leaf.untyped_storage()._cdata for leaf in _list_tensors((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "_c10d_functional" and operator._opname != "wait_tensor":
            self.collectives[self.part, operator._opname] += 1
        for found in _list_tensors(result):
            storage = found.untyped_storage()
            if storage._cdata not in before:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of the storages that are there now."""
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        return sum(size for _, size in self._alive.values())


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def measure_kept_storages(parameters: list[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that the graph made in the block keeps, by its address; not those of
    parameters.
    """
    own = {_take_local(parameter).untyped_storage()._cdata for parameter in parameters}
    found: dict[int, int] = {}
    held = []

    def pack(saved: Tensor) -> Tensor:
        storage = _take_local(saved).untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            held.append(storage)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield found


def _take_local(of: Tensor) -> Tensor:
    """A rank's own part."""
    return of._local_tensor if isinstance(of, DTensor) else of


@contextmanager
def change_layer(how: str) -> Iterator[None]:
    """Takes from ours what `how` does not have."""

    def shard_kept(*args: Any, normed: Any = None, **kwargs: Any) -> list[Tensor]:
        return gathered.gather_linears(*args, **kwargs)

    def product_kept(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
        return F.linear(ACTIVATIONS[activation][0](gate) * up, weight)

    names: dict[str, Any] = {"gather_linears": shard_kept} if how in (TWICE, FUSED) else {}
    names |= {"gated_linear": product_kept} if how in (CACHED, TWICE) else {}
    originals = {name: getattr(tensor_forwards, name) for name in names}
    try:
        for name, function in names.items():
            setattr(tensor_forwards, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(tensor_forwards, name, function)


def measure(
    spec: DecoderSpec,
    size: int,
    how: str,
    *,
    rows: int = 1,
    length: int = TOKENS,
    checkpointing: str = "none",
    compiled: bool = False,
    change: Callable[[nn.Module], None] | None = None,
) -> Measured:
    """The layers of `spec` forward and backward in bf16. change: what is done to the meta model
    first.

    Compiled layers are measured without peak and collectives: torch compiles nothing while a
    tracker looks on.
    """
    gather_again = {CACHED: "false", AUTO: "auto"}.get(how, "true")
    parallel = ParallelConfig(tensor=size, tensor_regather_in_backward=gather_again)
    with enter_simulated_world(parallel, 0, size) as world, use_fake_tensors(), change_layer(how):
        model = build_meta(spec, torch.bfloat16)
        if change is not None:
            change(model)
        _prepare(model, parallel, world, how, checkpointing, compiled)
        shape = (
            (rows, length // size, spec.width)
            if how == STOCK
            else (rows * length // size, spec.width)
        )
        hidden = torch.empty(shape, dtype=torch.bfloat16, device=NAME, requires_grad=True)
        positions = torch.zeros(rows, length, dtype=torch.int64, device=NAME)
        turn = model.model.rotary[0](positions)
        info = model.model.prepare(
            None, rows=rows, queries=length, keys=length, dtype=torch.bfloat16, device=hidden.device
        )
        gradient = torch.empty_like(hidden)
        tracker = Tracker()
        with nullcontext() if compiled else tracker:
            with measure_kept_storages([*model.parameters(), *turn]) as kept:
                out = hidden * 1
                for layer in model.model.layers:
                    out = layer(out, turn, info, None)
            tracker.part = "backward"
            out.backward(gradient)
    return Measured(
        _compute_layer_share(sum(kept.values()), spec), tracker.peak, _count_by_kind(tracker, spec)
    )


def _compute_layer_share(number: int, spec: DecoderSpec) -> int:
    """A layer's share of what alike layers have together."""
    if number % spec.num_layers:
        raise ValueError(
            f"{number} is no multiple of the {spec.num_layers} layers, which should be alike"
        )
    return number // spec.num_layers


def _count_by_kind(tracker: Tracker, spec: DecoderSpec) -> dict[tuple[str, str], int]:
    return {
        key: _compute_layer_share(number, spec)
        for key, number in sorted(tracker.collectives.items())
    }


def _prepare(
    model: nn.Module, parallel: ParallelConfig, world: World, how: str, mode: str, compiled: bool
) -> None:
    """Shares the layers out, checkpoints and compiles them, and gives the model its memory."""
    if how != STOCK:
        shard_tensors(model, parallel, MemoryConfig(activation_checkpointing=mode), world)
    else:
        for layer in model.model.layers:
            build_stock_layer(layer, world)
    apply_activation_checkpointing(model, mode)
    if compiled:
        torch._dynamo.reset()
    if compiled and how != STOCK:
        compile_layers(model, "aot_eager")
    elif compiled:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    model.to_empty(device=NAME)


def compute_formula(
    spec: DecoderSpec, size: int, how: str, *, tokens: int = TOKENS, compiled: bool = False
) -> int:
    """Bytes that a layer keeps in bf16: elements a token over t, and the small terms of norms and
    attention.

    Compiled, what is not an operator of ours keeps no output of its activation: of gate, product
    and silu, two.
    """
    h, f = spec.width, spec.mlp_width
    q, k = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    product = f if compiled else 2 * f
    gathered_tokens = 2 * h * size
    more = {
        STOCK: gathered_tokens + product,
        CACHED: gathered_tokens + product,
        TWICE: 2 * h + product,
    }
    more |= {FUSED: 2 * h, OURS: 0}
    elements = 2 * h + 2 * q + 2 * k + 2 * f + more[how]
    numbers = (
        spec.num_heads + 2
    )  # the log of each head's sums, and the root mean square of both norms
    if spec.head_norms:
        elements += q + k  # queries and keys before their norms
        numbers += spec.num_heads + spec.num_kv_heads
    return tokens * (2 * elements + 4 * numbers) // size + RANDOM_STATE


PAGE = """# What a decoder layer keeps under tensor parallel

Made by `python benchmarks/tp_memory.py --output docs/measurements/tp_memory.md`: {layers} layers of each model's real
widths run forward and backward as rank 0 of t, on the simulated device, whose tensors have sizes and no bytes. b = 1,
s = {tokens}, bf16, no activation checkpointing. Every number is measured; a run whose kept bytes are not those of the
formula, to the byte, writes no page. No time is measured here.

- **{stock}**: torch's own `SequenceParallel`, `ColwiseParallel`, `RowwiseParallel`, one gather for each group of
  linears.
- **{cached}**: our nodes, the gathered tokens kept, the MLP's product kept.
- **{twice}**: the tokens are gathered a second time in backward (`parallel.tensor_regather_in_backward`).
- **{fused}**: and the MLP keeps gate and up only; their product is made again.
- **{ours}**: and the norm's output is made again before the second gather. This is what `parallel.tensor` does.

Elements a token that a rank keeps, times t: `2h + 2q + 2k + 2F`, and for {stock} and {cached} `2ht + 2F` more, for
{twice} `2h + 2F`, for {fused} `2h`; h: the width, q and k: of all query and key heads, F: of the MLP. Compiled, an
MLP that keeps its product keeps F less: torch makes the activation again. To that come, in bytes: 4 for each head and
each norm of a token over t, and {random} for the state of attention's random numbers. A model that norms its heads
keeps q + k elements more, and 4 bytes for each of these heads.

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


def page() -> str:
    """The page's text. ValueError where a layer keeps other bytes than the formula's."""
    kept, peak, specs = [], [], {name: build_spec_of_layers(name) for name in MODELS}
    for name, spec in specs.items():
        for size in SIZES:
            eager = {how: measure(spec, size, how) for how in WAYS}
            compiled = {how: measure(spec, size, how, compiled=True) for how in (STOCK, OURS)}
            for how, found in [*eager.items(), *compiled.items()]:
                expected = compute_formula(spec, size, how, compiled=found is not eager[how])
                if found.kept != expected:
                    raise ValueError(
                        f"{name}, t={size}, {how}: {found.kept} bytes kept, {expected} by formula"
                    )
            cells = [eager[how].kept for how in WAYS] + [
                compiled[how].kept for how in (STOCK, OURS)
            ]
            share = f"{eager[OURS].kept / eager[STOCK].kept:.0%}"
            kept.append([name, str(size), *(f"{number / MIB:.1f}" for number in cells), share])
            peak.append([name, str(size), *(f"{eager[how].peak / MIB:.0f}" for how in WAYS)])
            print(" ".join(kept[-1]), "|", " ".join(peak[-1]), flush=True)
    counts = []
    for mode in ("none", "full"):
        counted = [
            measure(specs[MODELS[0]], 8, how, checkpointing=mode)
            for how in (STOCK, CACHED, OURS, AUTO)
        ]
        counts.append(
            [mode, *(f"{one.count('forward')} + {one.count('backward')}" for one in counted)]
        )
    names = {"stock": STOCK, "cached": CACHED, "twice": TWICE, "fused": FUSED, "ours": OURS}
    return PAGE.format(
        kept=_format_table(["model", "t", *WAYS, f"{STOCK}, compiled", f"{OURS}, compiled", f"{OURS} / {STOCK}"], kept),
        peak=_format_table(["model", "t", *WAYS], peak),
        collectives=_format_table(["checkpointing", STOCK, CACHED, OURS, AUTO], counts),
        layers=LAYERS, tokens=TOKENS, random=RANDOM_STATE, first=MODELS[0], **names,
    )  # fmt: skip


def _format_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the page")
    arguments = parser.parse_args()
    text = page()
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
