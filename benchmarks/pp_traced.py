"""Train a small decoder in a pipeline of gloo processes, and note what is alive after each action.

Used by pp_memory.py and tests/parallel/pipeline/test_memory.py: `run_ours` traces a step,
`compute_expected_held` says what theory expects of it. Storages are followed by weak references from
the operator that made them, so that what is alive is known whoever holds it.
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

VOCABULARY = 64
WIDTH = 32
HEADS = 4
KV_HEADS = 2
MLP_WIDTH = 48
ROWS = 2
LENGTH = 24
_FP32 = 4


def build_small_spec(layers: int) -> DecoderSpec:
    """Return the spec of a Llama with small matrices."""
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
    """Return random micro-batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, VOCABULARY, (count, 2, ROWS, LENGTH), generator=generator)
    return [Batch(tokens.clone(), labels.clone()) for tokens, labels in drawn]


def count_boundary_bytes() -> int:
    """Return the bytes of a micro-batch's tensor between two stages, fp32."""
    return ROWS * LENGTH * WIDTH * _FP32


def compute_stage_bytes(
    spec: DecoderSpec, layers: int, checkpointing: str, *, last: bool, splits: bool
) -> StageBytes:
    """Return by formula what a stage keeps of a micro-batch, in fp32 on the CPU.

    Without checkpointing a layer keeps 6 d + 2 h e + 2 k e + 4 f elements a token: two norms, which
    are composite on the CPU and keep their input, their input over its mean square, and their
    output; queries, keys, values and output of attention; gate, up, gate through the activation,
    product. And one number for each norm, one for each head. With checkpointing: d. Either way the
    layers of a stage share cosines and sines, e / 2 each. The last stage's output waits for the
    head.
    """
    tokens = ROWS * LENGTH
    queries, keys = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    if checkpointing == "full":
        layer_elements = spec.width
    else:
        layer_elements = 6 * spec.width + 2 * queries + 2 * keys + 4 * spec.mlp_width
        layer_elements += 2 + spec.num_heads
    kept = tokens * _FP32 * (layers * layer_elements + spec.head_width)
    if last:
        kept += count_boundary_bytes()
    deferred_bytes = layers * count_deferred_elements(spec) * tokens * _FP32 if splits else 0
    return StageBytes(kept, deferred_bytes)


_MESSAGE_BYTES = 256  # of what the host tells other ranks, at most


class Storages(TorchDispatchMode):
    """Follows, while entered, the storages that operators make.

    peaks: `most` is kept as well, for which every operator looks how much is alive.
    """

    def __init__(self, *, peaks: bool = False) -> None:
        super().__init__()
        self._peaks = peaks
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage: itself and its bytes
        self._upper_bound = 0  # bytes alive, of which some may be gone
        self.most = 0  # bytes at once, apart from those of `list_ignored`
        self.list_ignored: Callable[[], Iterable[Tensor]] = tuple

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
        results = [
            tensor.untyped_storage()
            for tensor in _list_tensors(result)
            if tensor.is_floating_point() or tensor.nbytes > _MESSAGE_BYTES
        ]
        if results:
            inputs = {tensor.untyped_storage()._cdata for tensor in _list_tensors((args, kwargs))}
            for storage in results:
                if storage._cdata not in inputs:  # else a view of an input, or it in place
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._upper_bound += storage.nbytes()
        # Below `most` it is no peak, however much is gone by now.
        if self._peaks and self._upper_bound > self.most:
            self._upper_bound = sum(self.measure_alive().values())
            self.most = max(self.most, self._upper_bound)
        return result

    def measure_alive(self) -> dict[int, int]:
        """Return the bytes of each storage that is there now and not ignored."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        ignored = {tensor.untyped_storage()._cdata for tensor in self.list_ignored()}
        return {key: size for key, (_, size) in self._alive.items() if key not in ignored}


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def list_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@dataclass
class TracedStep:
    """Bytes that were alive in one step of one rank, and how often its layers ran."""

    held: list[tuple[str, int]] = field(default_factory=list)
    """Of each action, its name and what is alive when the next one begins."""
    left: int = 0
    """Bytes after the step."""
    most: int = 0
    """Bytes at once."""
    forwards: dict[str, int] = field(default_factory=dict)
    """Forwards of each layer, recomputation included."""
    first: dict[str, int] = field(default_factory=dict)
    """Forwards of each layer in the step before."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, for the process that started the ranks."""
        return vars(self)


def build_config(
    schedule: str, ranks: int, count: int, checkpointing: str, stages: int = 2
) -> FullFinetuneConfig:
    """Return the config of a pipeline. count: micro-batches a step. stages: of each rank."""
    cfg = FullFinetuneConfig()
    cfg.device = "cpu"
    cfg.dtype = "fp32"
    cfg.batch_size = ROWS
    cfg.gradient_accumulation_steps = count
    cfg.max_seq_len = LENGTH
    cfg.parallel.pipeline = ranks
    cfg.parallel.pipeline_schedule = schedule
    cfg.parallel.pipeline_stages_per_rank = stages
    cfg.memory.activation_checkpointing = checkpointing
    cfg.memory.loss_chunks = 2
    return cfg


def compute_expected(
    cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int
) -> list[Live]:
    """Return by theory what a rank holds after each action; layers are shared out evenly."""
    num_stages = count_stages(cfg.parallel)
    order, taken = list_taken_sends(cfg, rank, count)
    sizes = {}
    for stage in {action.stage for action in order}:
        sizes[stage] = compute_stage_bytes(
            spec,
            layers=spec.num_layers // num_stages,
            checkpointing=cfg.memory.activation_checkpointing,
            last=stage == num_stages - 1,
            splits=SCHEDULES[cfg.parallel.pipeline_schedule].splits,
        )
    return compute_live_bytes(
        order, parallel=cfg.parallel, stages=sizes, boundary=count_boundary_bytes(), taken=taken
    )


def list_taken_sends(
    cfg: FullFinetuneConfig, rank: int, count: int
) -> tuple[list[Action], dict[Action, int]]:
    """Return a rank's actions, and when the driver lets go of what it sends (see `find_taken`)."""
    orders = add_transfers(compute_orders(cfg.parallel, count), cfg.parallel)
    timeline = simulate(orders, cfg.parallel, lambda action: UNITS[action.kind])
    return orders[rank], find_taken(timeline, order=orders[rank], rank=rank, parallel=cfg.parallel)


def sum_live(live: Live) -> int:
    """Return all bytes that are counted at a moment."""
    return live.kept + live.deferred + live.received + live.handed + live.waiting + live.sent


def compute_expected_held(
    cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int
) -> list[tuple[str, int]]:
    """Return what is expected in `TracedStep.held`."""
    _, taken = list_taken_sends(cfg, rank, count)
    sends_gone = Counter(taken.values())
    held = []
    for number, live in enumerate(compute_expected(cfg, spec=spec, rank=rank, count=count)):
        # The next action begins by letting go of the sends that are done by then.
        gone = sends_gone[number + 1] * count_boundary_bytes()
        held.append((str(live.action), sum_live(live) - gone))
    return held


def compute_expected_most(cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int) -> int:
    """Return the most bytes that are alive at once, during an action or after it."""
    work = compute_work_bytes(cfg, spec)
    before = most = 0
    lives = compute_expected(cfg, spec=spec, rank=rank, count=count)
    for live, (_, held) in zip(
        lives, compute_expected_held(cfg, spec=spec, rank=rank, count=count), strict=True
    ):
        needs = work[live.action.stage].get(live.action.kind, 0)
        most = max(most, before + needs, sum_live(live))
        before = held
    return most


def compute_work_bytes(cfg: FullFinetuneConfig, spec: DecoderSpec) -> dict[int, dict[str, int]]:
    """Return by stage and kind of action the most bytes alive beyond those there before it.

    Measured on each stage by itself, without a pipeline; of the second micro-batch, when gradients
    are there already.
    """
    num_stages = count_stages(cfg.parallel)
    stage_layers = spec.num_layers // num_stages
    splits = SCHEDULES[cfg.parallel.pipeline_schedule].splits
    model = build_meta(spec, torch.float32)
    apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
    model.to_empty(device="cpu")
    init_weights(model, 1, spec)
    for module in model.modules():
        if splits and type(module) is nn.Linear:
            module.forward = MethodType(_list_deferred, module)  # type: ignore[method-assign]
    stage_work = _StageWork(model, cfg.memory.loss_chunks)
    work: dict[int, dict[str, int]] = {stage: {} for stage in range(num_stages)}
    with deferred.enable_split_backward() if splits else nullcontext():
        for stage in range(num_stages):
            layers = range(stage * stage_layers, (stage + 1) * stage_layers)
            for defers in (False, True) if splits else (False,):
                for batch in make_micro_batches(2):
                    sizes = stage_work.measure(
                        batch,
                        layers,
                        defers=defers,
                        first=stage == 0,
                        last=stage == num_stages - 1,
                    )
                names = (FORWARD, INPUT if defers else BACKWARD, WEIGHT)
                work[stage] |= dict(zip(names, sizes, strict=True))
    return work


def _list_deferred(module: nn.Linear, hidden: Tensor) -> Tensor:
    return deferred.linear(hidden, module.weight, module.bias)


class _StageWork:
    """A decoder without a pipeline, of which one stage at a time is run and measured."""

    def __init__(self, model: Decoder, chunks: int) -> None:
        self._model = model
        self._chunks = chunks  # of the loss
        self._storages = Storages(peaks=True)
        self._storages.list_ignored = lambda: list_gradients(model.parameters())

    def measure(
        self, batch: Batch, layers: range, *, defers: bool, first: bool, last: bool
    ) -> tuple[int, int, int]:
        """Return the bytes of forward, of backward or input gradient, and of what was deferred."""
        model = self._model
        with self._storages:
            shape = (*batch.tokens.shape, WIDTH)
            received = None if first else torch.zeros(shape).requires_grad_()
            gradient = None if last else torch.zeros(shape)
            before = self._begin()
            hidden = model.model.embed_tokens(batch.tokens) if received is None else received
            hidden = model.model.run_layers(
                hidden, shape=batch.tokens.shape, positions=None, info=None, layers=layers
            )
            graph = get_gradient_edge(hidden)
            hidden = hidden.detach().requires_grad_() if last else hidden.detach()
            forward = self._storages.most - before
            if not last:
                del hidden
            before = self._begin()
            deferring: Any = deferred.defer_weight_gradients() if defers else nullcontext([])
            with deferring as deferred_work:
                if last:
                    loss = model.lm_head(
                        model.model.norm(hidden),
                        labels=batch.labels,
                        head_loss=CrossEntropy(self._chunks),
                    )
                    loss.backward()
                    gradient = hidden.grad
                    del hidden, loss
                torch.autograd.backward((graph,), (gradient,))  # type: ignore[arg-type]
            backward = self._storages.most - before
            del gradient, graph, received
            before = self._begin()
            deferred_work.reverse()
            while deferred_work:
                deferred_work.pop().run()
            return forward, backward, self._storages.most - before

    def _begin(self) -> int:
        before = sum(self._storages.measure_alive().values())
        self._storages.most = before
        return before


def run_ours(
    cfg: FullFinetuneConfig,
    spec: DecoderSpec,
    count: int,
    *,
    peaks: bool = False,
    spoil: Callable[[nn.Module, Pipeline], None] | None = None,
) -> TracedStep:
    """Trace a rank's second step.

    peaks: fill `TracedStep.most` as well. spoil: a function that changes model and pipeline before
    they run, to plant a fault.
    """
    num_stages = count_stages(cfg.parallel)
    cfg.parallel.pipeline_layers_per_stage = [spec.num_layers // num_stages] * num_stages
    with start_world(cfg) as world:
        model = build_meta(spec, torch.float32)
        pipeline = split_pipeline(model, cfg, world)
        assert pipeline is not None
        apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
        model.to_empty(device="cpu")
        init_weights(model, 1, spec)
        assert world.pipeline is not None
        orders = add_transfers(compute_orders(cfg.parallel, count), cfg.parallel)
        if spoil is not None:
            spoil(model, pipeline)
        tracing = _Tracing(
            model=model,
            pipeline=pipeline,
            cfg=cfg,
            order=orders[world.pipeline.rank],
            peaks=peaks,
        )
        return tracing.run(make_micro_batches(count))


def count_forwards(model: nn.Module, calls: Counter[str]) -> None:
    """Count from now on how often each layer of a decoder runs forward, recomputation included."""
    for name, layer in model.model.layers.named_children():
        norm = layer.input_layernorm  # inside of what is checkpointed
        norm.register_forward_pre_hook(lambda module, args, name=name: calls.update([name]))


class _Tracing:
    """Steps of a rank, of which the last notes what is alive."""

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        cfg: FullFinetuneConfig,
        order: list[Action],
        peaks: bool,
    ) -> None:
        self._model = model
        self._pipeline = pipeline
        self._cfg = cfg
        self._order = order  # this rank's actions
        self._traced = TracedStep()
        self._storages = Storages(peaks=peaks)
        self._next = 0  # place in the order of the action that begins next
        self._calls: Counter[str] = Counter()  # forwards, by layer

    def run(self, batches: list[Batch]) -> TracedStep:
        """Train on the micro-batches twice, and return what the second step has had alive."""
        traced = self._traced
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        count_forwards(self._model, self._calls)
        self._storages.list_ignored = lambda: list_gradients(self._model.parameters())
        for _ in range(2):
            self._next = 0
            self._storages.most = 0
            self._calls.clear()
            traced.held = []
            driver.on_action = self._note_action
            with self._storages:
                for batch in self._pipeline.train(batches):
                    self._pipeline.backward(self._compute_loss(batch))
                driver.on_action = None
                traced.left = sum(self._storages.measure_alive().values())
            traced.most = self._storages.most
            traced.first = traced.forwards
            traced.forwards = dict(self._calls)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return traced

    def _compute_loss(self, batch: Batch) -> Tensor:
        head_loss = CrossEntropy(self._cfg.memory.loss_chunks)
        return self._model(batch.tokens, labels=batch.labels, head_loss=head_loss) / 100

    def _note_action(self, action: Action | None) -> None:
        """Note what is alive when an action begins, for the one before it."""
        done = self._next - 1
        self._next += 1
        if action is not None:
            assert action == self._order[done + 1]
        if done < 0:
            return
        alive = sum(self._storages.measure_alive().values())
        self._traced.held.append((str(self._order[done]), alive))
