"""Run a step's micro-batches through the stages of a rank, in the order of its schedule.

`split_pipeline` makes a `Pipeline`. `Parallel.micro_batches` runs it: a loop over `train`, whose
body calls `backward` with the loss on the rank with the last stage. A stage is consecutive layers
of one rank. An action is what a stage does with one micro-batch: forward, backward, the gradient
of its input or of its weights alone, a send, a receive. A place is a rank's index in its pipeline.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from recipe_lib.config.mesh import SCHEDULES, count_stages, find_stage_rank
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.models.language_model import LanguageModel, replace_entries
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.deferred import DeferredGradients, defer_weight_gradients, enable_split_backward
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.dtensor_shards import get_local
from recipe_lib.ops.head_losses import HeadLoss
from recipe_lib.parallel.gradient_accumulation import DeferredReduction, GradientAccumulation
from recipe_lib.parallel.pipeline import schedules as kinds
from recipe_lib.parallel.pipeline.schedules import (
    Action,
    compute_forward_orders,
    compute_orders,
    count_moments,
    get_exchange,
    get_receive,
    list_pairs,
)
from recipe_lib.parallel.pipeline.simulation import add_transfers, find_taken, get_partner, simulate
from recipe_lib.parallel.world import World

# The stages and runtime of torch.distributed.pipelining are not used. In 2.13 they keep receive
# buffers, input gradients and sent tensors through a step, and their split backward leaves out
# gradients of stages after frozen ones and of resharded parameters. Here a tensor is received into
# new memory one action before its use, and a sent one is held until the other rank has taken it.


@dataclass(frozen=True, eq=False)
class PendingTensor:
    """A tensor that is being received or sent, kept alive until `wait` was called."""

    _tensor: Tensor
    _work: Any = None  # a `dist.Work` of irecv or isend; None: the tensor is there

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, or been taken.

        With gloo the host waits until then; with NCCL the device's stream does, and this returns.
        """
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Transport:
    """Sends and receives tensors between one rank of a pipeline and the others.

    Two ranks exchange their tensors in one order, that of the schedule, since NCCL has no tags.
    gloo has tags and gets them, so that it notices a wrong order. Transfers with different ranks
    must not wait for each other, or interleaved schedules would hang. NCCL gives each pair of ranks
    a communicator and a stream of its own, as long as the process group was not made with
    `device_id` and transfers are not batched.
    """

    def __init__(self, world: World, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the communicator of each pair of ranks that exchange tensors. A collective.

        pairs: the places of the two ranks, the lower one first, for all pairs of the pipeline.
        Raise SetupError for a process group with one communicator for all pairs.
        """
        assert world.pipeline is not None
        self._group = world.mesh.get_group("pipeline")
        self._ranks = world.pipeline.ranks  # by place, the rank among all processes
        self._heartbeat = world.heartbeat
        self._device = world.device
        if any(
            getattr(group, "bound_device_id", None) is not None
            for group in (self._group, dist.group.WORLD)
        ):
            raise SetupError(
                "parallel.pipeline: found a process group that was made with device_id, expected"
                " one without: NCCL would exchange all tensors on one stream, and interleaved"
                " schedules would hang; remove device_id from init_process_group"
            )
        # NCCL makes a communicator in the first exchange of a pair. In the middle of the first step
        # a rank's host would wait for the other while kernels of other pairs run. All ranks go
        # through the pairs in one order, so that none wait in a circle.
        for low, high in sorted(pairs):
            if world.pipeline.rank == low:
                self.send(torch.zeros(1, device=self._device), high, tag=0).wait()
            elif world.pipeline.rank == high:
                self.receive(shape=(1,), dtype=torch.float32, place=low, tag=0).wait()

    def receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        place: int,
        tag: int,
        device: torch.device | None = None,
    ) -> PendingTensor:
        """Start to receive a tensor from the rank at a place in the pipeline.

        tag: that of its send. device: where the tensor is made; None for the device that computes.
        """
        tensor = torch.empty(shape, dtype=dtype, device=device or self._device)
        peer = self._ranks[place]
        with self._heartbeat.exchange(peer):
            return PendingTensor(tensor, dist.irecv(tensor, peer, group=self._group, tag=tag))

    def send(self, tensor: Tensor, place: int, tag: int) -> PendingTensor:
        """Start to send a tensor to the rank at a place in the pipeline."""
        tensor = tensor.contiguous()
        peer = self._ranks[place]
        with self._heartbeat.exchange(peer):
            return PendingTensor(tensor, dist.isend(tensor, peer, group=self._group, tag=tag))


def _sum_with(peer: int, parameter: Tensor, transport: Transport) -> None:
    """Add the gradient that the rank at place `peer` has of the same parameter to this rank's.

    Both ranks call it, and one of them is at place 0. Nothing is done without a gradient, which
    both ranks have or neither.
    """
    if parameter.grad is None:
        return
    gradient = get_local(parameter.grad)
    # In one order on both, as NCCL has no tags: first the gradient of the rank at place 0.
    pending_send = transport.send(gradient, peer, tag=0) if peer != 0 else None
    pending_receive = transport.receive(
        shape=tuple(gradient.shape),
        dtype=gradient.dtype,
        place=peer,
        tag=0,
        device=gradient.device,
    )
    peer_gradient = pending_receive.wait()
    (pending_send or transport.send(gradient, peer, tag=0)).wait()  # before `add_` overwrites it
    gradient.add_(peer_gradient)


# Called with each action that begins, and with None at the end of a step's actions. The planner
# sets it while it simulates a step, to note the actions in its trace; else None.
on_action: Callable[[Action | None], None] | None = None


@dataclass
class _Kept:
    """Tensors of a micro-batch that a stage holds from forward to backward."""

    # The stage's input, whose gradient backward sends; None if no stage before it is trained.
    received: Tensor | None
    # Where backward begins in the graph, since the output itself is freed; None if nothing is
    # trained up to here.
    graph: GradientEdge | None
    hidden: Tensor | None = None  # the output of the last stage, for the head; None for others


class Pipeline:
    """The stages of one rank; runs micro-batches through them for training and evaluation."""

    def __init__(
        self,
        model: LanguageModel,
        cfg: FullFinetuneConfig,
        world: World,
        layers: dict[int, range],
        dtype: torch.dtype,
    ) -> None:
        """Prepare a model that has only these layers, and `run_part` as its forward.

        layers: by stage of this rank, the indices of its layers in the whole model. dtype: of
        hidden states. Nothing is sent before the first step.
        """
        assert world.pipeline is not None
        self.layers = layers
        self._model = model
        self._parallel = cfg.parallel
        self._world = world
        self._place = world.pipeline.rank
        self._stages = count_stages(cfg.parallel)  # of all ranks
        # Backward is split into the gradients of input and weights, which are deferred.
        self._splits = SCHEDULES[cfg.parallel.pipeline_schedule].splits
        self._transport: Transport | None = None  # made in the first step
        # By stage, and then for the head, True if a parameter of it is trained; empty before the
        # first training step.
        self._trains: list[bool] = []
        # What `_get_orders` returns, by (training, number of micro-batches).
        self._orders: dict[tuple[bool, int], tuple[list[Action], dict[int, list[Action]]]] = {}
        self._dtype = dtype
        # Names of modules: those before the layers, the layers, and those behind them.
        self._parts = model.find_stage_parts()
        # The part that a call of the model runs: the head on the hidden states `_hidden`, or else
        # the stage of this index on these tokens `[b, s]`. Both are None outside of a step.
        self._current: tuple[int, Tensor] | None = None
        self._hidden: Tensor | None = None
        self._reduction: DeferredReduction | None = None  # of the training step that runs

    @property
    def has_last(self) -> bool:
        """Return True on the rank with the last stage, the only one that computes losses."""
        return self._stages - 1 in self.layers

    def run_part(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
        cache: None = None,
    ) -> Tensor:
        """Run the part of the model that the schedule has come to, in place of its forward.

        That is the layers of a stage, or the final norm and the output head. tokens: `[b, s]` for
        the first stage and the head; for other stages the hidden states of the stage before, of the
        shape that `_Step._get_shape` returns. Other arguments are the model's. Raise RuntimeError
        outside of `train` and `evaluate`.
        """
        if self._hidden is not None:
            return self._model.run_head(self._hidden, tokens, labels=labels, head_loss=head_loss)
        if self._current is None:
            raise RuntimeError(
                "a model that is divided among the ranks of a pipeline runs by `train` or"
                " `evaluate`"
            )
        stage, stage_tokens = self._current
        return self._model.run_stage(
            tokens if stage else None,
            tokens=stage_tokens,
            positions=positions,
            attention=attention,
            layers=self.layers[stage],
        )

    def train(
        self, batches: Sequence[Batch], accumulation: GradientAccumulation | None = None
    ) -> Iterator[Batch]:
        """Run forward and backward of all micro-batches. A collective of the pipeline.

        On the rank with the last stage, yield each micro-batch when its loss is to go `backward`.
        While the caller has it, a call of the model runs norm and head on its hidden states. Other
        ranks yield nothing. accumulation: adds up the gradients; the caller calls its `finish`.
        None: they are added to `grad` and reduced in each backward. Raise ConfigError if nothing is
        trained.
        """
        # In each step anew, since a recipe may freeze or unfreeze parameters between steps.
        self._trains = self._agree_on_training()
        self._reduction = DeferredReduction(self._model, accumulation)
        step = _Step(self, batches, trains=True, accumulation=accumulation)
        try:
            with enable_split_backward() if self._splits else torch.enable_grad():
                for _, batch in step.run(*self._get_orders(len(batches), training=True)):
                    yield batch
        finally:
            self._reduction = None
        if accumulation is not None:
            accumulation.add()  # the gradients that were reduced after the last action

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the head and of its hidden states.

        Called in the loop over `train`. loss: `[]`, of the micro-batch that was yielded last. Raise
        RuntimeError outside of the loop.
        """
        if self._reduction is None:
            raise RuntimeError("the head of a pipeline goes backward in the loop over `train`")
        # Not sooner: the head's weights may have to stay gathered until its last micro-batch.
        self._reduction.reduce_if_last(self.get_head_modules())
        loss.backward()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], compute: Callable[[int, Any], Any]) -> list[Any]:
        """Run all forwards; return `compute(index, micro_batch)` of each. A collective.

        While `compute` runs, a call of the model runs norm and head. On ranks without the last
        stage `compute` is not called, and the list has None for each micro-batch.
        """
        results: list[Any] = [None] * len(batches)
        step = _Step(self, batches, trains=False)
        with self._world.heartbeat.name_action_in_errors():
            for index, batch in step.run(*self._get_orders(len(batches), training=False)):
                results[index] = compute(index, batch)
        return results

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of a tied embedding over the first and the last rank.

        Called once a step by all ranks of the pipeline.
        """
        last = find_stage_rank(self._parallel, self._stages - 1)
        if self._model.spec.tied and last != 0 and self._place in (0, last):
            _sum_with(
                last - self._place,  # the other of 0 and `last`
                self._model.get_parameter(f"{self._parts.embedding}.weight"),
                self._use_transport(),
            )

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Return the tied embedding on the last rank, if the first rank has it too; else None.

        Norms of gradients leave it out, so that it counts once.
        """
        last = find_stage_rank(self._parallel, self._stages - 1)
        is_copy = self._model.spec.tied and last != 0 and self._place == last
        return self._model.get_parameter(f"{self._parts.embedding}.weight") if is_copy else None

    def list_in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """Return how many micro-batches this rank holds at once, without repeats, over a step.

        Each entry is, by stage, the number of micro-batches between forward and backward at some
        moment. micro_batches: number of the step.
        """
        moments: list[dict[int, int]] = []
        for counts in count_moments(compute_orders(self._parallel, micro_batches)[self._place]):
            moment = {stage: counts.get(stage, (0, 0))[0] for stage in self.layers}
            if moment not in moments:
                moments.append(moment)
        return moments

    def _use_transport(self) -> Transport:
        if self._transport is None:
            self._transport = Transport(
                self._world, list_pairs(self._parallel, tied=self._model.spec.tied)
            )
        return self._transport

    def _get_orders(
        self, micro_batches: int, *, training: bool
    ) -> tuple[list[Action], dict[int, list[Action]]]:
        """Return this rank's actions, and by index of an action the sends to wait for before it.

        The other rank has taken these sends by then if all ranks are equally fast; otherwise this
        rank waits there. That cannot deadlock: in the simulation that gives these indices, all
        ranks run all of their actions. micro_batches: number of the step.
        """
        key = (training, micro_batches)
        if key not in self._orders:
            compute = compute_orders if training else compute_forward_orders
            orders = add_transfers(compute(self._parallel, micro_batches), self._parallel)
            timeline = simulate(orders, self._parallel, lambda action: kinds.UNITS[action.kind])
            order = orders[self._place]
            taken: dict[int, list[Action]] = {}
            for send, index in find_taken(
                timeline, order=order, rank=self._place, parallel=self._parallel
            ).items():
                taken.setdefault(index, []).append(send)
            self._orders[key] = (order, taken)
        return self._orders[key]

    def _agree_on_training(self) -> list[bool]:
        """Return for each stage, and then for the head, True if a parameter of it is trained.

        All ranks then know which gradients are sent. A collective. Raise ConfigError if nothing is
        trained.
        """
        own_stages = {stage: _has_trained(self.get_stage_modules(stage)) for stage in self.layers}
        if self.has_last:
            own_stages[self._stages] = _has_trained(self.get_head_modules())
        if not holds_values(self._world.device) or dist.get_backend() == "fake":
            # The planner simulates one rank, and takes the other ranks' stages to be like its own.
            default = any(own_stages.values())
            return [own_stages.get(stage, default) for stage in range(self._stages + 1)]
        # By index of a stage, which JSON makes a str.
        is_trained: dict[str, bool] = reduce(or_, self._world.gather_json(own_stages))
        if not any(is_trained.values()):
            raise ConfigError(
                "optimizer: found no parameter that requires a gradient; leave at least one"
                " unfrozen"
            )
        return [is_trained[str(stage)] for stage in range(self._stages + 1)]

    def get_stage_modules(self, stage: int) -> list[nn.Module]:
        """Return the layers of one of this rank's stages; of the first stage also the embedding."""
        names = [self._parts.layers[layer] for layer in self.layers[stage]]
        names += self._parts.first if stage == 0 else ()
        return [self._model.get_submodule(name) for name in names]

    def get_head_modules(self) -> list[nn.Module]:
        """Return the modules behind the last layer: the final norm and the output head."""
        return [self._model.get_submodule(name) for name in self._parts.last]


def _has_trained(modules: Sequence[nn.Module]) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


class _Step:
    """One run of a rank's actions over the micro-batches, and the tensors alive between them.

    It is a part of `Pipeline`, and uses its private attributes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Batch],
        *,
        trains: bool,
        accumulation: GradientAccumulation | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._trains = trains  # False in an evaluation
        self._accumulation = accumulation
        self._transport = pipeline._use_transport()
        self._heartbeat = pipeline._world.heartbeat
        self._reduction = pipeline._reduction or DeferredReduction(pipeline._model, None)
        self._arriving: dict[Action, PendingTensor] = {}  # inputs of actions to come, by receive
        self._leaving: dict[Action, Tensor] = {}  # made, but not sent yet, by send
        self._sent: dict[Action, PendingTensor] = {}  # sent and perhaps not taken yet, by send
        # By (stage, index of a micro-batch): the tensors for its backward, and the weight gradients
        # that its input gradient has deferred.
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._deferred: dict[tuple[int, int], list[DeferredGradients]] = {}

    def run(
        self, actions: Sequence[Action], taken: Mapping[int, Sequence[Action]]
    ) -> Iterator[tuple[int, Batch]]:
        """Run all actions; yield each micro-batch, with its index, when the head is to run on it.

        Then the caller calls the model, which runs the head on its hidden states. At the end no
        tensor of the step is alive. taken: by index of an action, the sends to wait for before it.
        """
        # Indices of the actions in which a stage reduces its gradients, if it does so once a step.
        reducing_indices = self._reduction.begin(actions)
        notify = on_action or (lambda action: None)
        with self._heartbeat.name_action_in_errors():
            for index, action in enumerate(actions):
                for send in taken.get(index, ()):
                    self._finish_send(send)
                self._note_action(action)
                notify(action)
                self._reduction.is_last = index in reducing_indices
                yield from self._run_action(action)
                if self._accumulation and action.kind in kinds.MAKING_GRADIENTS:
                    self._accumulation.add()
            self._reduction.end()
            for send in list(self._sent):
                self._finish_send(send)
        notify(None)

    def _run_action(self, action: Action) -> Iterator[tuple[int, Batch]]:
        match action.kind:
            case kinds.FORWARD:
                yield from self._run_forward(action)
            case kinds.BACKWARD:
                yield from self._run_backward(action)
            case kinds.INPUT:
                yield from self._run_input_gradient(action)
            case kinds.WEIGHT:
                self._run_weight_gradients(action)
            case kinds.RECEIVE_ACTIVATION | kinds.RECEIVE_GRADIENT:
                self._receive(action)
            case kinds.SEND_ACTIVATION | kinds.SEND_GRADIENT:
                self._send(action)

    def _note_action(self, action: Action) -> None:
        """Tell the heartbeat which action this rank is at, for errors and reports of hangs."""
        words = f"the {kinds.WORDS[action.kind]} of micro-batch {action.micro_batch}"
        self._heartbeat.action = f"{words} in stage {action.stage}"

    def _run_forward(self, action: Action) -> Iterator[tuple[int, Batch]]:
        """Run the forward of a stage, and hand its output to the next stage.

        In the last stage of an evaluation, let the caller run the head on the output.
        """
        stage = action.stage
        index = action.micro_batch
        pipeline = self._pipeline
        batch = self._batches[index]
        received = None if stage == 0 else self._take(action)
        if received is not None and self._trains and self._has_input_gradient(stage):
            received.requires_grad_()
        with replace_entries([(vars(pipeline), "_current", (stage, batch.tokens))]):
            # A call of the model is `Pipeline.run_part`.
            output = pipeline._model(
                batch.tokens if received is None else received, batch.positions, batch.attention
            )
        if self._trains:
            self._kept[stage, index] = _Kept(
                received=received if self._has_input_gradient(stage) else None,
                graph=get_gradient_edge(output) if output.requires_grad else None,
            )
        if stage < pipeline._stages - 1:
            self._hand_on(action, output.detach())
        elif self._trains:
            # The head runs at the beginning of backward, so that its gradients, as large as the
            # vocabulary, never wait for other micro-batches.
            self._kept[stage, index].hidden = output.detach().requires_grad_(output.requires_grad)
        else:
            yield from self._lend(index, output)

    def _lend(self, index: int, hidden: Tensor) -> Iterator[tuple[int, Batch]]:
        """Yield a micro-batch; meanwhile a call of the model runs the head on `hidden`."""
        with replace_entries([(vars(self._pipeline), "_hidden", hidden)]):
            yield index, self._batches[index]

    def _run_backward(self, action: Action) -> Iterator[tuple[int, Batch]]:
        """Run the backward of a stage, and hand the gradient of its input to the stage before.

        In the last stage the caller runs the head first.
        """
        kept = self._kept.pop((action.stage, action.micro_batch))
        if action.stage == self._pipeline._stages - 1:
            gradient = yield from self._run_head(action.micro_batch, kept)
        else:
            gradient = self._take(action) if kept.graph is not None else None
        self._reduction.reduce_if_last(self._pipeline.get_stage_modules(action.stage))
        if kept.graph is not None:
            torch.autograd.backward((kept.graph,), (gradient,))  # type: ignore[arg-type]
        # Freed before the input gradient is handed on.
        del gradient
        received = kept.received
        del kept
        if received is not None:
            input_gradient = received.grad
            received.grad = None  # so that `received` does not keep it alive
            assert input_gradient is not None
            self._hand_on(action, input_gradient)

    def _run_head(
        self, index: int, kept: _Kept
    ) -> Generator[tuple[int, Batch], None, Tensor | None]:
        """Let the caller run the head; return the gradient of the last stage's output."""
        hidden = kept.hidden
        kept.hidden = None
        assert hidden is not None
        yield from self._lend(index, hidden)
        return hidden.grad

    def _run_input_gradient(self, action: Action) -> Iterator[tuple[int, Batch]]:
        """Run backward without the weight gradients of linears, which are deferred."""
        with self._reduction.postpone_reduction(), defer_weight_gradients() as deferred:
            yield from self._run_backward(action)
        self._deferred[action.stage, action.micro_batch] = deferred

    def _run_weight_gradients(self, action: Action) -> None:
        """Compute the weight gradients that the stage's input gradient has deferred."""
        pipeline = self._pipeline
        head = pipeline.get_head_modules() if action.stage == pipeline._stages - 1 else []
        self._reduction.reduce_if_last([*pipeline.get_stage_modules(action.stage), *head])
        self._reduction.add(self._deferred.pop((action.stage, action.micro_batch)))

    def _receive(self, action: Action) -> None:
        if action.kind == kinds.RECEIVE_GRADIENT and not self._has_input_gradient(action.stage + 1):
            return  # nothing before the next stage is trained, so it sends no gradient
        shape, dtype = self._get_shape(action.micro_batch)
        place = find_stage_rank(self._pipeline._parallel, get_partner(action).stage)
        self._arriving[action] = self._transport.receive(
            shape=shape, dtype=dtype, place=place, tag=self._make_tag(action)
        )

    def _take(self, action: Action) -> Tensor:
        """Wait for the tensor from another stage that is the input of an action, and return it."""
        receive = get_receive(action, self._pipeline._stages)
        assert receive is not None
        return self._arriving.pop(receive).wait()

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """Hand on the output of an action: to a stage of this rank at once, else to `_send`."""
        exchange = get_exchange(action, self._pipeline._stages)
        assert exchange is not None
        send, receive = exchange
        if receive.stage in self._pipeline.layers:
            self._arriving[receive] = PendingTensor(tensor)
        else:
            self._leaving[send] = tensor

    def _send(self, action: Action) -> None:
        tensor = self._leaving.pop(action, None)  # None: a gradient that no stage before needs
        if tensor is not None:
            receive = get_partner(action)
            place = find_stage_rank(self._pipeline._parallel, receive.stage)
            self._sent[action] = self._transport.send(tensor, place, self._make_tag(receive))

    def _finish_send(self, send: Action) -> None:
        """Free a tensor that was sent, when the other rank has taken it."""
        pending_send = self._sent.pop(send, None)  # None: `_send` has sent nothing
        if pending_send is not None:
            self._note_action(send)
            pending_send.wait()

    def _has_input_gradient(self, stage: int) -> bool:
        """Return True if a stage's input has a gradient, since a stage before it is trained."""
        return any(self._pipeline._trains[:stage])

    def _get_shape(self, index: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a micro-batch's hidden states between stages.

        They are those of this rank's tokens `[b, s / context]`, as the model divides them among a
        tensor-parallel group.
        """
        pipeline = self._pipeline
        rows, length = self._batches[index].tokens.shape
        local_shape = torch.Size((rows, length // pipeline._parallel.context))
        shape = pipeline._model.compute_hidden_shape(local_shape, pipeline._parallel.tensor)
        return shape, pipeline._dtype

    def _make_tag(self, receive: Action) -> int:
        """Return the tag of a transfer, a different one for each receive of a step."""
        is_gradient = receive.kind == kinds.RECEIVE_GRADIENT
        return 2 * (receive.micro_batch * self._pipeline._stages + receive.stage) + is_gradient
