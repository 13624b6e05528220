"""Train a small decoder in a pipeline of gloo processes, and note what is alive after each action.

Used by pp_memory.py and tests/parallel/pipeline/test_memory.py: `run_ours` measures a step,
`compute_expected_alive` computes the same bytes from the sizes of a stage and the schedule. An
action is a forward, a backward, or its input or weight half, of one micro-batch in one stage. Ranks
are places in the pipeline; `count` is the micro-batches of a step.
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

# Sizes of the model.
VOCABULARY = 64
WIDTH = 32
HEADS = 4
KV_HEADS = 2
MLP_WIDTH = 48
ROWS = 2  # sequences of a micro-batch
LENGTH = 24  # tokens of a sequence
_FP32 = 4  # bytes


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
    """Return random micro-batches, tokens and labels `[ROWS, LENGTH]`, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, VOCABULARY, (count, 2, ROWS, LENGTH), generator=generator)
    # Copies: a view would keep the storage of all micro-batches alive.
    return [Batch(tokens.clone(), labels.clone()) for tokens, labels in drawn]


def count_boundary_bytes() -> int:
    """Return the bytes of a micro-batch's hidden states between two stages, in fp32."""
    return ROWS * LENGTH * WIDTH * _FP32


def compute_stage_bytes(
    spec: DecoderSpec, layers: int, checkpointing: str, *, last: bool, splits: bool
) -> StageBytes:
    """Compute what a stage keeps of a micro-batch, in fp32 on the CPU.

    Without checkpointing a layer keeps, in elements a token, with width d, MLP width f, h query and
    k key heads of width e:
    - 4 d: input and output of both norms, as `memory.recompute_cheap` is not applied here;
    - 2 h e + 2 k e: queries, keys, values and output of attention;
    - 3 f: gate, up and their product;
    - h: one number for each head.
    With full checkpointing it keeps its input, d. Cosine and sine, e together, are the stage's.

    layers: how many the stage has. last: its output waits for the head, which runs in backward.
    splits: the schedule runs weight gradients as actions of their own.
    """
    tokens = ROWS * LENGTH
    queries, keys = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    if checkpointing == "full":
        layer_elements = spec.width
    else:
        layer_elements = 4 * spec.width + 2 * queries + 2 * keys + 3 * spec.mlp_width
        layer_elements += spec.num_heads
    kept = tokens * _FP32 * (layers * layer_elements + spec.head_width)
    if last:
        kept += count_boundary_bytes()
    deferred_bytes = layers * count_deferred_elements(spec) * tokens * _FP32 if splits else 0
    return StageBytes(kept, deferred_bytes)


_MESSAGE_BYTES = 256  # at most, of the JSON messages that ranks send to each other


class Storages(TorchDispatchMode):
    """Follows, while entered, the storages that operators make, by weak references.

    So a storage counts until it is freed, whoever holds it.

    peaks: also keep `peak`, for which every operator looks how much is alive.
    """

    def __init__(self, *, peaks: bool = False) -> None:
        super().__init__()
        self._peaks = peaks
        # By the storage's address: a weak reference to it, and its bytes.
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper_bound = 0  # bytes; counts storages that have been freed since it was last exact
        self.peak = 0  # peak of the bytes alive, without those of `list_ignored`
        # Returns tensors whose storages are not counted.
        self.list_ignored: Callable[[], Iterable[Tensor]] = tuple

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note the storages that it has made."""
        result = operator(*args, **(kwargs or {}))
        # Small integer tensors are left out: they are JSON messages between ranks, which gloo's
        # threads may hold a moment longer than the step, by chance.
        results = [
            tensor.untyped_storage()
            for tensor in _list_tensors(result)
            if tensor.is_floating_point() or tensor.nbytes > _MESSAGE_BYTES
        ]
        if results:
            inputs = {tensor.untyped_storage()._cdata for tensor in _list_tensors((args, kwargs))}
            for storage in results:
                if storage._cdata not in inputs:  # else a view of an input, or changed in place
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._upper_bound += storage.nbytes()
        # The exact sum is slow: it is taken only where the bound is above the peak so far.
        if self._peaks and self._upper_bound > self.peak:
            self._upper_bound = sum(self.measure_alive().values())
            self.peak = max(self.peak, self._upper_bound)
        return result

    def measure_alive(self) -> dict[int, int]:
        """Return the bytes of each storage that is alive and not ignored, by its address."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        ignored = {tensor.untyped_storage()._cdata for tensor in self.list_ignored()}
        return {key: size for key, (_, size) in self._alive.items() if key not in ignored}


def _list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def list_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@dataclass
class TracedStep:
    """Bytes that were alive in one step of one rank, and how often its layers ran."""

    alive_after_action: list[tuple[str, int]] = field(default_factory=list)
    """(name, bytes that are alive when the next action begins) of each action."""
    alive_after_step: int = 0
    """Bytes alive after the step, before the optimizer."""
    peak: int = 0
    """Peak of the bytes alive; 0 unless `run_ours(peaks=True)`."""
    forwards: dict[str, int] = field(default_factory=dict)
    """By layer, its forwards, recomputation included."""
    first_forwards: dict[str, int] = field(default_factory=dict)
    """The same in the step before, the first."""


# Ranks return it to the process that starts them, which loads it with `weights_only`.
torch.serialization.add_safe_globals([TracedStep])


def build_config(
    schedule: str, ranks: int, count: int, checkpointing: str, stages: int = 2
) -> FullFinetuneConfig:
    """Return the config of a pipeline.

    checkpointing: the value of memory.activation_checkpointing. stages: of each rank.
    """
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
    """Compute by formula what a rank holds after each action; all stages have as many layers."""
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
    """Return a rank's actions, and by send the index of the action before which it is freed.

    The driver decides that by the same simulation, in which UNITS are the lengths of actions.
    """
    orders = add_transfers(compute_orders(cfg.parallel, count), cfg.parallel)
    timeline = simulate(orders, cfg.parallel, lambda action: UNITS[action.kind])
    return orders[rank], find_taken(timeline, order=orders[rank], rank=rank, parallel=cfg.parallel)


def sum_live(live: Live) -> int:
    """Return all bytes that a rank holds after an action."""
    return live.kept + live.deferred + live.received + live.handed + live.waiting + live.sent


def compute_expected_alive(
    cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int
) -> list[tuple[str, int]]:
    """Compute what is expected in `TracedStep.alive_after_action`."""
    _, taken = list_taken_sends(cfg, rank, count)
    num_freed_sends = Counter(taken.values())  # by the index of the action that begins with it
    bytes_after_actions = []
    for index, live in enumerate(compute_expected(cfg, spec=spec, rank=rank, count=count)):
        # The next action frees sends before it is measured; `live` is from before that.
        freed = num_freed_sends[index + 1] * count_boundary_bytes()
        bytes_after_actions.append((str(live.action), sum_live(live) - freed))
    return bytes_after_actions


def compute_expected_peak(cfg: FullFinetuneConfig, spec: DecoderSpec, rank: int, count: int) -> int:
    """Compute the most bytes that are alive at once, during an action or after it."""
    work = compute_work_bytes(cfg, spec)
    before = most = 0  # before: bytes alive when the action begins
    lives = compute_expected(cfg, spec=spec, rank=rank, count=count)
    for live, (_, alive) in zip(
        lives, compute_expected_alive(cfg, spec=spec, rank=rank, count=count), strict=True
    ):
        needs = work[live.action.stage].get(live.action.kind, 0)  # 0: a send or a receive
        most = max(most, before + needs, sum_live(live))
        before = alive
    return most


def compute_work_bytes(cfg: FullFinetuneConfig, spec: DecoderSpec) -> dict[int, dict[str, int]]:
    """Measure, by stage and kind of action, the most bytes alive beyond those before the action.

    Each stage runs by itself, without a pipeline.
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
                # The second micro-batch's sizes stay: the first allocates the gradients.
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
    """Run a linear whose weight gradient can be deferred."""
    return deferred.linear(hidden, module.weight, module.bias)


class _StageWork:
    """A decoder without a pipeline, of which one stage at a time is run and measured."""

    def __init__(self, model: Decoder, chunks: int) -> None:
        """chunks: of the tokens, whose logits the loss makes one after another."""
        self._model = model
        self._chunks = chunks
        self._storages = Storages(peaks=True)
        self._storages.list_ignored = lambda: list_gradients(model.parameters())

    def measure(
        self, batch: Batch, layers: range, *, defers: bool, first: bool, last: bool
    ) -> tuple[int, int, int]:
        """Return the most bytes beyond those before: in forward, in backward, in weight gradients.

        defers: backward makes the input gradient alone, and the weight gradients come after it;
        else their bytes are 0. first, last: of the model's stages.
        """
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
            # As the driver does: backward starts at the edge, so that a stage's output can be
            # freed once it is sent. The last stage's goes into the head, in backward.
            graph = get_gradient_edge(hidden)
            hidden = hidden.detach().requires_grad_() if last else hidden.detach()
            forward = self._storages.peak - before
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
            backward = self._storages.peak - before
            del gradient, graph, received
            before = self._begin()
            # The first deferred runs first. Each is popped, so that what it held is freed.
            deferred_work.reverse()
            while deferred_work:
                deferred_work.pop().run()
            return forward, backward, self._storages.peak - before

    def _begin(self) -> int:
        """Return the bytes alive, and measure the peak from here on."""
        before = sum(self._storages.measure_alive().values())
        self._storages.peak = before
        return before


def run_ours(
    cfg: FullFinetuneConfig,
    spec: DecoderSpec,
    count: int,
    *,
    peaks: bool = False,
    spoil: Callable[[nn.Module, Pipeline], None] | None = None,
) -> TracedStep:
    """Measure this rank's second step of a training.

    peaks: fill `TracedStep.peak` as well, which is slow. spoil: changes model and pipeline before
    they run, to plant a fault that a test must see.
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
    """Count from now on how often each layer of a decoder runs forward, recomputation included.

    calls: is added to, by the layer's name.
    """
    for name, layer in model.model.layers.named_children():
        # A hook of the layer itself would be outside of the checkpoint, and miss recomputation.
        norm = layer.input_layernorm
        norm.register_forward_pre_hook(lambda module, args, name=name: calls.update([name]))


class _Tracing:
    """Runs the steps of a rank and measures what is alive in them."""

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
        self._next = 0  # index in the order of the action that begins next
        self._calls: Counter[str] = Counter()  # forwards, by layer

    def run(self, batches: list[Batch]) -> TracedStep:
        """Train on the micro-batches twice, and return what was alive in the second step."""
        traced = self._traced
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        count_forwards(self._model, self._calls)
        self._storages.list_ignored = lambda: list_gradients(self._model.parameters())
        for _ in range(2):
            self._next = 0
            self._storages.peak = 0
            self._calls.clear()
            traced.alive_after_action = []
            driver.on_action = self._note_action
            with self._storages:
                for batch in self._pipeline.train(batches):
                    self._pipeline.backward(self._compute_loss(batch))
                driver.on_action = None
                traced.alive_after_step = sum(self._storages.measure_alive().values())
            traced.peak = self._storages.peak
            traced.first_forwards = traced.forwards
            traced.forwards = dict(self._calls)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return traced

    def _compute_loss(self, batch: Batch) -> Tensor:
        """Return the summed loss of a micro-batch, scaled down."""
        head_loss = CrossEntropy(self._cfg.memory.loss_chunks)
        return self._model(batch.tokens, labels=batch.labels, head_loss=head_loss) / 100

    def _note_action(self, action: Action | None) -> None:
        """Note what is alive when an action begins, for the one before it.

        action: that begins; None: the last has ended.
        """
        done = self._next - 1
        self._next += 1
        if action is not None:
            assert action == self._order[done + 1]
        if done < 0:
            return
        alive = sum(self._storages.measure_alive().values())
        self._traced.alive_after_action.append((str(self._order[done]), alive))
