"""A small decoder going through a pipeline of gloo processes, with every byte that is alive after
each action noted.

Used by pp_memory.py and by the tests of the same. Storages are followed by weak references from the
operator that made them, so that what is alive is known whoever holds it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.config.mesh import SCHEDULES, count_stages
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import Decoder, DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.ops import deferred
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import split_pipeline, start_world
from recipe_lib.parallel.pipeline import driver
from recipe_lib.parallel.pipeline.balance import count_deferred_elements
from recipe_lib.parallel.pipeline.driver import Pipeline
from recipe_lib.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    UNITS,
    WEIGHT,
    Action,
    compute_orders,
)
from recipe_lib.parallel.pipeline.simulation import (
    Live,
    StageBytes,
    add_transfers,
    compute_live_bytes,
    find_taken,
    simulate,
)

VOCABULARY, WIDTH, HEADS, KV_HEADS, MLP_WIDTH = 64, 32, 4, 2, 48
ROWS, LENGTH = 2, 24
_FP32 = 4


def build_small_spec(layers: int) -> DecoderSpec:
    """A Llama with small matrices."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return build_spec(config, "small")


def make_micro_batches(count: int) -> list[Batch]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, VOCABULARY, (count, 2, ROWS, LENGTH), generator=generator)
    return [Batch(tokens.clone(), labels.clone()) for tokens, labels in drawn]


def count_boundary_bytes() -> int:
    """A micro-batch's tensor between two stages, fp32."""
    return ROWS * LENGTH * WIDTH * _FP32


def stage_bytes(
    spec: DecoderSpec, layers: int, checkpointing: str, *, last: bool, splits: bool
) -> StageBytes:
    """By formula, of a micro-batch in fp32 on the CPU, for a stage with so many layers.

    Without checkpointing a layer keeps 6 d + 2 h e + 2 k e + 4 f elements a token: two norms, which
    are composite on the CPU and keep their input, their input over its mean square, and their
    output; queries, keys, values and output of attention; gate, up, gate through the activation,
    product. And one number for each norm, one for each head. With checkpointing: d. Either way the
    layers of a stage share cosines and sines, e / 2 each. The last stage's output waits for the
    head.
    """
    tokens = ROWS * LENGTH
    queries, keys = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    whole = 6 * spec.width + 2 * queries + 2 * keys + 4 * spec.mlp_width + 2 + spec.num_heads
    each = spec.width if checkpointing == "full" else whole
    kept = tokens * _FP32 * (layers * each + spec.head_width) + (
        count_boundary_bytes() if last else 0
    )
    return StageBytes(
        kept, layers * count_deferred_elements(spec) * tokens * _FP32 if splits else 0
    )


_TOLD = 256  # bytes of a message, at most


class Storages(TorchDispatchMode):
    """While entered, follows the storages that operators make. peaks: looks at every operator how
    much is alive.
    """

    def __init__(self, *, peaks: bool = False) -> None:
        super().__init__()
        self._peaks = peaks
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0  # bytes alive, of which some may be gone
        self.most = 0  # bytes at once, apart from those of `ignored`
        self.ignored: Callable[[], Iterable[Tensor]] = tuple

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        # What the host tells other ranks as JSON, whole numbers all of it, gloo's threads may hold
        # a moment longer.
        counted = (
            leaf
            for leaf in _list_tensors(result)
            if leaf.is_floating_point() or leaf.nbytes > _TOLD
        )
        made = [leaf.untyped_storage() for leaf in counted]
        if made:
            given = {leaf.untyped_storage()._cdata for leaf in _list_tensors((args, kwargs))}
            for storage in made:
                if storage._cdata not in given:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._at_most += storage.nbytes()
        if (
            self._peaks and self._at_most > self.most
        ):  # else it is no peak, however much is gone by now
            self._at_most = sum(self.alive().values())
            self.most = max(self.most, self._at_most)
        return result

    def alive(self) -> dict[int, int]:
        """Bytes by storage, of those that are there now and not ignored."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        ignored = {tensor.untyped_storage()._cdata for tensor in self.ignored()}
        return {key: size for key, (_, size) in self._alive.items() if key not in ignored}


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class Traced:
    """Of one rank and one step. held: bytes when the action behind each begins. left: bytes after
    the step. most: bytes at once. forwards: by layer; first: in the step before.
    """

    held: list[tuple[str, int]] = field(default_factory=list)
    left: int = 0
    most: int = 0
    forwards: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the process that started the ranks: numbers, strings, tuples, lists and dicts."""
        return vars(self)


def build_config(
    schedule: str, ranks: int, count: int, checkpointing: str, stages: int = 2
) -> FullFinetuneConfig:
    """Of a pipeline that takes so many micro-batches a step."""
    cfg = FullFinetuneConfig()
    cfg.device, cfg.dtype = "cpu", "fp32"
    cfg.batch_size, cfg.gradient_accumulation_steps, cfg.max_seq_len = ROWS, count, LENGTH
    cfg.parallel.pipeline, cfg.parallel.pipeline_schedule = ranks, schedule
    cfg.parallel.pipeline_stages_per_rank = stages
    cfg.memory.activation_checkpointing, cfg.memory.loss_chunks = checkpointing, 2
    return cfg


def compute_expected(
    cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int
) -> list[Live]:
    """What a rank holds after each action, by theory; layers are even."""
    parallel = cfg.parallel
    stages, each = count_stages(parallel), spec.num_layers // count_stages(parallel)
    order, taken = list_taken_sends(cfg, rank, count)
    splits, mode = SCHEDULES[parallel.pipeline_schedule].splits, cfg.memory.activation_checkpointing
    sizes = {}
    for stage in {action.stage for action in order}:
        sizes[stage] = stage_bytes(spec, each, mode, last=stage == stages - 1, splits=splits)
    return compute_live_bytes(order, parallel, sizes, count_boundary_bytes(), taken=taken)


def list_taken_sends(
    cfg: FullFinetuneConfig, rank: int, count: int
) -> tuple[list[Action], dict[Action, int]]:
    """A rank's list, and until when the driver holds what it sends: as `find_taken` has it."""
    orders = add_transfers(compute_orders(cfg.parallel, count), cfg.parallel)
    timeline = simulate(orders, cfg.parallel, lambda action: UNITS[action.kind])
    return orders[rank], find_taken(timeline, orders[rank], rank, cfg.parallel)


def sum_live(live: Live) -> int:
    """All that is counted of a moment."""
    return live.kept + live.deferred + live.received + live.handed + live.waiting + live.sent


def compute_expected_held(
    cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int
) -> list[tuple[str, int]]:
    """As `Traced.held`: what is there when the next action begins, for which sends that are done by
    then are let go.
    """
    lives, gone = (
        compute_expected(cfg, spec, rank, count),
        Counter(list_taken_sends(cfg, rank, count)[1].values()),
    )
    return [
        (str(live.action), sum_live(live) - gone[number + 1] * count_boundary_bytes())
        for number, live in enumerate(lives)
    ]


def compute_expected_most(cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int) -> int:
    """The most bytes that are alive at once, during an action or after it."""
    work = compute_work_bytes(cfg, spec)
    before = most = 0
    lives = compute_expected(cfg, spec, rank, count)
    for live, (_, held) in zip(lives, compute_expected_held(cfg, spec, rank, count), strict=True):
        needs = work[live.action.stage].get(live.action.kind, 0)
        most = max(most, before + needs, sum_live(live))
        before = held
    return most


def compute_work_bytes(cfg: FullFinetuneConfig, spec: DecoderSpec) -> dict[int, dict[str, int]]:
    """By stage and kind of action: the most bytes that it has alive beyond what is there before.

    Measured on each stage by itself, without a pipeline; of the second micro-batch, when gradients
    are there already.
    """
    stages = count_stages(cfg.parallel)
    each = spec.num_layers // stages
    splits = SCHEDULES[cfg.parallel.pipeline_schedule].splits
    model = build_meta(spec, torch.float32)
    apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
    model.to_empty(device="cpu")
    init_weights(model, 1, spec)
    for module in model.modules():
        if splits and type(module) is nn.Linear:
            module.forward = MethodType(_list_deferred, module)  # type: ignore[method-assign]
    alone = _Alone(model, cfg.memory.loss_chunks)
    found: dict[int, dict[str, int]] = {stage: {} for stage in range(stages)}
    with deferred.enable_split_backward() if splits else nullcontext():
        for stage in range(stages):
            layers = range(stage * each, (stage + 1) * each)
            for defers in (False, True) if splits else (False,):
                for rows in make_micro_batches(2):
                    sizes = alone.work(
                        rows, layers, defers, first=stage == 0, last=stage == stages - 1
                    )
                names = (FORWARD, INPUT if defers else BACKWARD, WEIGHT)
                found[stage] |= dict(zip(names, sizes, strict=True))
    return found


def _list_deferred(module: nn.Linear, hidden: Tensor) -> Tensor:
    return deferred.linear(hidden, module.weight, module.bias)


class _Alone:
    """One stage at a time of a whole decoder, and how much its actions take."""

    def __init__(self, model: Decoder, chunks: int) -> None:
        self._model, self._chunks = model, chunks
        self._storages = Storages(peaks=True)
        self._storages.ignored = lambda: [
            one.grad for one in model.parameters() if one.grad is not None
        ]

    def work(
        self, rows: Batch, layers: range, defers: bool, *, first: bool, last: bool
    ) -> tuple[int, int, int]:
        """Of forward, of backward or input gradient, of what was deferred."""
        model = self._model
        with self._storages:
            shape = (*rows.tokens.shape, WIDTH)
            received = None if first else torch.zeros(shape).requires_grad_()
            given = None if last else torch.zeros(shape)
            before = self._begin()
            hidden = model.model.embed_tokens(rows.tokens) if received is None else received
            hidden = model.model.run_layers(hidden, rows.tokens.shape, None, None, layers=layers)
            graph = get_gradient_edge(hidden)
            hidden = hidden.detach().requires_grad_() if last else hidden.detach()
            forward = self._storages.most - before
            if not last:
                del hidden
            before = self._begin()
            inside: Any = deferred.defer_weight_gradients() if defers else nullcontext([])
            with inside as later:
                if last:
                    loss = model.lm_head(
                        model.model.norm(hidden),
                        labels=rows.labels,
                        head_loss=CrossEntropy(self._chunks),
                    )
                    loss.backward()
                    given = hidden.grad
                    del hidden, loss
                torch.autograd.backward((graph,), (given,))  # type: ignore[arg-type]
            backward = self._storages.most - before
            del given, graph, received
            before = self._begin()
            later.reverse()
            while later:
                later.pop().run()
            return forward, backward, self._storages.most - before

    def _begin(self) -> int:
        self._storages.most = before = sum(self._storages.alive().values())
        return before


def run_ours(
    cfg: FullFinetuneConfig,
    spec: DecoderSpec,
    count: int,
    *,
    peaks: bool = False,
    spoil: Callable[[nn.Module, Pipeline], None] | None = None,
) -> Traced:
    """A rank's second step, traced. peaks: also `Traced.most`. spoil: is given model and pipeline
    first.
    """
    cfg.parallel.pipeline_layers_per_stage = [
        spec.num_layers // count_stages(cfg.parallel)
    ] * count_stages(cfg.parallel)
    with start_world(cfg) as world:
        model = build_meta(spec, torch.float32)
        pipeline = split_pipeline(model, cfg, world)
        assert pipeline is not None
        apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
        model.to_empty(device="cpu")
        init_weights(model, 1, spec)
        assert world.pipeline is not None
        order = add_transfers(compute_orders(cfg.parallel, count), cfg.parallel)[
            world.pipeline.rank
        ]
        if spoil is not None:
            spoil(model, pipeline)
        return _Tracing(model, pipeline, cfg, order, peaks).run(make_micro_batches(count))


def count_forwards(model: nn.Module, calls: Counter[str]) -> None:
    """Counts, from now on, how often each layer of a decoder runs forward, recomputation
    included.
    """
    for name, layer in model.model.layers.named_children():
        norm = layer.input_layernorm  # inside of what is checkpointed
        norm.register_forward_pre_hook(lambda module, args, name=name: calls.update([name]))


class _Tracing:
    """Runs steps of a rank and notes what is alive in the last of them."""

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        cfg: FullFinetuneConfig,
        order: list[Action],
        peaks: bool,
    ) -> None:
        self._model, self._pipeline, self._cfg, self._order = model, pipeline, cfg, order
        self._found, self._storages = Traced(), Storages(peaks=peaks)
        self._next = 0
        self._calls: Counter[str] = Counter()

    def run(self, batches: list[Batch]) -> Traced:
        model, found = self._model, self._found
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        count_forwards(model, self._calls)
        self._storages.ignored = lambda: [
            one.grad for one in model.parameters() if one.grad is not None
        ]
        for _ in range(2):
            self._next = 0
            self._storages.most = 0
            self._calls.clear()
            found.held = []
            driver.on_action = self._note
            with self._storages:
                for batch in self._pipeline.train(batches):
                    self._pipeline.backward(self._loss(batch))
                driver.on_action = None
                found.left = sum(self._storages.alive().values())
            found.most, found.first = self._storages.most, found.forwards
            found.forwards = dict(self._calls)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return found

    def _loss(self, batch: Batch) -> Tensor:
        head_loss = CrossEntropy(self._cfg.memory.loss_chunks)
        return self._model(batch.tokens, labels=batch.labels, head_loss=head_loss) / 100

    def _note(self, action: Action | None) -> None:
        """Called when an action begins: notes what the one before has left."""
        done, self._next = self._next - 1, self._next + 1
        if action is not None:
            assert action == self._order[done + 1]
        if done < 0:
            return
        self._found.held.append((str(self._order[done]), sum(self._storages.alive().values())))
