"""Runs a step's micro-batches through the stages of a rank, in the order of its schedule, and holds
no tensor for longer than that order needs.

What lives, besides parameters and gradients: of a micro-batch that has gone forward what autograd
keeps for backward; of one whose input gradient is made what its weight gradients take; a tensor
from another rank from just before it is used; one that was sent until it has been taken. The last
stage's head and loss run at the beginning of its backward, so that their gradients, as large as the
vocabulary, never wait for other micro-batches.

torch's own stages and their runtime are not used: in 2.13 they keep receive buffers, input
gradients and sent tensors through a step, and their split backward leaves out gradients of stages
after frozen ones and of resharded parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from recipe_lib.config.mesh import SCHEDULES, count_stages, find_stage_rank
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Batch
from recipe_lib.errors import ConfigError, SetupError, UserError
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.deferred import DeferredGradients, defer_weight_gradients, enable_split_backward
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.head_losses import HeadLoss
from recipe_lib.parallel.gradient_accumulation import DeferredReduction, GradientAccumulation
from recipe_lib.parallel.pipeline import schedules as kinds
from recipe_lib.parallel.pipeline.schedules import (
    Action,
    compute_orders,
    count_moments,
    exchange_of,
    forward_orders,
    pairs_of,
    received_for,
)
from recipe_lib.parallel.pipeline.simulation import partner_of, simulate, taken_in, with_transfers
from recipe_lib.parallel.world import World

# Tensors on their way between the ranks of a pipeline: received into new memory, and held until
# they are taken.


class OnItsWay:
    """A tensor that is being received or sent, held until somebody has waited for it."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        """The tensor, when it is there, or taken: the host waits for gloo, the device's stream for
        NCCL.
        """
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Transport:
    """What one rank of a pipeline sends to and receives from the others.

    Two ranks have to exchange their tensors in one order, which is the schedule's affair: NCCL
    knows no tags. gloo does, and gets them, so that there a mistake would be noticed. Ranks that
    wait for different ones must not wait for each other: NCCL gives each pair a communicator and a
    stream each, as long as the process group was not made with `device_id` and transfers are not
    batched; with one stream for all, interleaved schedules would hang.
    """

    def __init__(self, world: World, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: places of all ranks of the pipeline that exchange tensors, the lower first.

        Makes the communicator of each pair: else this would be in the middle of the first step,
        where a rank's host waits for the other while kernels of other pairs run. In one order for
        all, so that no ranks wait in a circle. Raises SetupError for a process group with one
        communicator for all.
        """
        assert world.pipeline is not None
        self._group = world.mesh.get_group("pipeline")
        self._ranks = world.pipeline.ranks
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
        for low, high in sorted(pairs):
            if world.pipeline.rank == low:
                self.send(torch.zeros(1, device=self._device), high, tag=0).wait()
            elif world.pipeline.rank == high:
                self.receive((1,), torch.float32, low, tag=0).wait()

    def receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        place: int,
        tag: int,
        device: torch.device | None = None,
    ) -> OnItsWay:
        """Asks the rank at `place` of the pipeline for a tensor, on the rank's device or the one
        where it was sent.
        """
        tensor = torch.empty(shape, dtype=dtype, device=device or self._device)
        with self._heartbeat.exchange(self._ranks[place]):
            return OnItsWay(
                tensor, dist.irecv(tensor, self._ranks[place], group=self._group, tag=tag)
            )

    def send(self, tensor: Tensor, place: int, tag: int) -> OnItsWay:
        """Sends it to the rank at `place`."""
        tensor = tensor.contiguous()
        with self._heartbeat.exchange(self._ranks[place]):
            return OnItsWay(
                tensor, dist.isend(tensor, self._ranks[place], group=self._group, tag=tag)
            )


def sum_with(other: int, parameter: Tensor, transport: Transport) -> None:
    """Adds the gradient that the rank at another place has of the same parameter to this rank's;
    both call it.

    One of the two is at place 0. Without a gradient, which is so on both, nothing is done.
    """
    if parameter.grad is None:
        return
    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    # In one order for the two, as everywhere: first the first rank's, then the last one's.
    sent = transport.send(own, other, tag=0) if other != 0 else None
    received = transport.receive(tuple(own.shape), own.dtype, other, 0, own.device).wait()
    (sent or transport.send(own, other, tag=0)).wait()  # before it is written to
    own.add_(received)


# Told of each action that begins, and by None of the end of a run of them: who simulates a step
# sets it.
on_action: Callable[[Action | None], None] | None = None


@dataclass
class _Kept:
    """What a stage keeps of a micro-batch from forward to backward, besides autograd's graph.

    received: its input, for the gradient of it. graph: the way into the graph from its output,
    which itself is gone. hidden: of the last stage, its output, for the head.
    """

    received: Tensor | None
    graph: GradientEdge | None
    hidden: Tensor | None


class Pipeline:
    """The stages of one rank. `layers`: by stage, the numbers of its layers."""

    def __init__(
        self,
        model: LanguageModel,
        cfg: FullFinetuneConfig,
        world: World,
        layers: dict[int, range],
        dtype: torch.dtype,
    ) -> None:
        """model: cut down to these layers; it runs by `run_part` from now on. dtype: of hidden
        states.
        """
        assert world.pipeline is not None
        self.layers = layers
        self._model, self._parallel, self._world = model, cfg.parallel, world
        self._place, self._stages = world.pipeline.rank, count_stages(cfg.parallel)
        self._splits = SCHEDULES[cfg.parallel.pipeline_schedule].splits
        self._transport: Transport | None = None
        self._trains: list[bool] = []  # by stage; nothing is known before the first training step
        self._known: dict[tuple[bool, int], tuple[list[Action], dict[int, list[Action]]]] = {}
        self._dtype = dtype
        self._parts = model.find_stage_parts()
        self._turn: tuple[int, Tensor] | None = None
        self._hidden: Tensor | None = None

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which alone knows losses."""
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
        """The model's forward: the part whose turn it is. Behind the last stage's layers, norm and
        head.

        tokens: of the first stage and the head; of another stage what the one before gave.
        """
        if self._hidden is not None:
            return self._model.run_head(self._hidden, tokens, labels=labels, head_loss=head_loss)
        if self._turn is None:
            raise RuntimeError(
                "a model that is divided among the ranks of a pipeline runs by `train` or"
                " `evaluate`"
            )
        stage, own = self._turn
        return self._model.run_stage(
            tokens if stage else None, own, positions, attention, self.layers[stage]
        )

    def train(
        self,
        batches: Sequence[Batch],
        loss_of: Callable[[int, Any], Tensor],
        accumulation: GradientAccumulation | None = None,
    ) -> None:
        """Forward and backward of all micro-batches, gradients added to the parameters'. Collective
        in a pipeline.

        loss_of: the number of a micro-batch and itself, to the loss that goes backward, by calling
        the model; it is called on the last stage's rank alone. accumulation: how gradients are
        added up; whoever gives it finishes it.
        """
        self._trains = (
            self._agree_on_training()
        )  # each step: a recipe may freeze or thaw between them
        step = _Step(self, batches, loss_of, None, accumulation)
        with enable_split_backward() if self._splits else torch.enable_grad():
            step.run(*self._orders(len(batches), training=True))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], result_of: Callable[[int, Any], Any]) -> list[Any]:
        """Forward alone; what `result_of` makes of each micro-batch on the last stage's rank, None
        on the others.
        """
        results: list[Any] = [None] * len(batches)
        step = _Step(self, batches, result_of, results)
        step.run(*self._orders(len(batches), training=False))
        return results

    def sum_tied_gradients(self) -> None:
        """Adds up the gradients of an embedding that is the head on another rank, on both; once a
        step.
        """
        last = find_stage_rank(self._parallel, self._stages - 1)
        if self._model.spec.tied and last != 0 and self._place in (0, last):
            sum_with(
                last - self._place,
                self._model.get_parameter(f"{self._parts.embedding}.weight"),
                self._use_transport(),
            )

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The tied embedding, where another rank has it too and this is the last: one of them
        counts in norms.
        """
        last = find_stage_rank(self._parallel, self._stages - 1)
        is_copy = self._model.spec.tied and last != 0 and self._place == last
        return self._model.get_parameter(f"{self._parts.embedding}.weight") if is_copy else None

    def in_flight(self, micro_batches: int) -> list[dict[int, int]]:
        """What this rank may keep at once: by stage, the micro-batches between their forward and
        their backward.
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
                self._world, pairs_of(self._parallel, tied=self._model.spec.tied)
            )
        return self._transport

    def _orders(
        self, micro_batches: int, *, training: bool
    ) -> tuple[list[Action], dict[int, list[Action]]]:
        """This rank's actions, and by number of an action the sends that the others have taken when
        it begins.

        They have if every rank is as fast as the others; where one is not, a rank waits there for
        those behind it. Each rank waits so in an order that the simulation has shown to come to its
        end.
        """
        key = (training, micro_batches)
        if key not in self._known:
            orders = (compute_orders if training else forward_orders)(self._parallel, micro_batches)
            lists = with_transfers(orders, self._parallel)
            timeline, own = (
                simulate(lists, self._parallel, lambda action: kinds.UNITS[action.kind]),
                lists[self._place],
            )
            taken: dict[int, list[Action]] = {}
            for send, number in taken_in(timeline, own, self._place, self._parallel).items():
                taken.setdefault(number, []).append(send)
            self._known[key] = own, taken
        return self._known[key]

    def _agree_on_training(self) -> list[bool]:
        """By stage, whether any of its parameters is trained: which gradients have to be sent is
        known by all.

        The last entry is the head's. Raises ConfigError if nothing is.
        """
        mine = {stage: _are_trained(self.layers_of(stage)) for stage in self.layers}
        if self.has_last:
            mine[self._stages] = _are_trained(self.head())
        if (
            not holds_values(self._world.device) or dist.get_backend() == "fake"
        ):  # alone: the others' are like ours
            return [mine.get(stage, any(mine.values())) for stage in range(self._stages + 1)]
        found: dict[str, bool] = {}
        for others in self._world.gather_json(mine):
            found |= others
        if not any(found.values()):
            raise ConfigError(
                "optimizer: found no parameter that requires a gradient; leave at least one"
                " unfrozen"
            )
        return [found[str(stage)] for stage in range(self._stages + 1)]

    def layers_of(self, stage: int) -> list[nn.Module]:
        """The layers of one of this rank's stages, and of the first the embedding: the head is
        after all stages.
        """
        names = [self._parts.layers[number] for number in self.layers[stage]]
        names += self._parts.first if stage == 0 else ()
        return [self._model.get_submodule(name) for name in names]

    def head(self) -> list[nn.Module]:
        """What is behind the last layer."""
        return [self._model.get_submodule(name) for name in self._parts.last]


def _are_trained(modules: Sequence[nn.Module]) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


class _Step:
    """One run of a rank's actions over the micro-batches, and what is alive between them."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Batch],
        finish: Callable[[int, Any], Any],
        results: list[Any] | None,
        accumulation: GradientAccumulation | None = None,
    ) -> None:
        """finish: what the last stage's output goes to; results: where it is put, or None: it is
        trained on.
        """
        self._pipeline, self._batches, self._finish, self._results = (
            pipeline,
            batches,
            finish,
            results,
        )
        self._transport, self._accumulation = pipeline._use_transport(), accumulation
        self._heartbeat = pipeline._world.heartbeat
        self._arriving: dict[Action, OnItsWay] = {}  # by receive
        self._leaving: dict[Action, Tensor] = {}  # by send
        self._sent: dict[Action, OnItsWay] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._later: dict[tuple[int, int], list[DeferredGradients]] = {}
        self._held = DeferredReduction(pipeline._model, accumulation)
        self._do = {
            kinds.FORWARD: self._forward,
            kinds.BACKWARD: self._backward,
            kinds.INPUT: self._input_gradient,
            kinds.WEIGHT: self._weight_gradients,
            kinds.RECEIVE_ACTIVATION: self._receive,
            kinds.RECEIVE_GRADIENT: self._receive,
            kinds.SEND_ACTIVATION: self._send,
            kinds.SEND_GRADIENT: self._send,
        }

    def run(self, actions: Sequence[Action], taken: Mapping[int, Sequence[Action]]) -> None:
        """All actions; at the end nothing of it is alive. taken: by number of an action, the sends
        done before it.
        """
        reducing, note = self._held.begin(actions), on_action or (lambda action: None)
        with self._tell_action_in_errors():
            for place, action in enumerate(actions):
                for send in taken.get(place, ()):
                    self._let_go(send)
                self._begin(action)
                note(action)
                self._held.is_last = place in reducing
                self._do[action.kind](action)
                if self._accumulation and action.kind in kinds.MAKING_GRADIENTS:
                    self._accumulation.add()
            self._held.end()
            for send in list(self._sent):
                self._let_go(send)
        note(None)
        self._do.clear()  # which refers to this object: a cycle would keep the batches alive

    def _begin(self, action: Action) -> None:
        """Tell the heartbeat what this rank is at."""
        what = f"the {kinds.WORDS[action.kind]} of micro-batch {action.micro_batch}"
        self._heartbeat.action = f"{what} in stage {action.stage}"

    @contextmanager
    def _tell_action_in_errors(self) -> Iterator[None]:
        """Say in what is raised inside which action it was."""
        try:
            yield
        except Exception as error:
            place = f"rank {self._pipeline._world.rank}, {self._heartbeat.action}"
            if isinstance(error, UserError):
                error.faults = [f"{fault} ({place})" for fault in error.faults]
            else:
                error.add_note(place)
            raise
        finally:
            self._heartbeat.action = ""

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        pipeline, batch = self._pipeline, self._batches[number]
        received = None if stage == 0 else self._take(action)
        if received is not None and self._results is None and self._is_wanted(stage):
            received.requires_grad_()
        pipeline._turn = stage, batch.tokens
        try:
            output = pipeline._model(
                batch.tokens if received is None else received, batch.positions, batch.attention
            )
        finally:
            pipeline._turn = None
        if self._results is None:
            graph = get_gradient_edge(output) if output.requires_grad else None
            wanted = received if self._is_wanted(stage) else None
            self._kept[stage, number] = _Kept(wanted, graph, None)
        if stage < pipeline._stages - 1:
            self._hand_on(action, output.detach())
        elif self._results is None:
            self._kept[stage, number].hidden = output.detach().requires_grad_(output.requires_grad)
        else:
            self._results[number] = self._run_finish(number, output)

    def _run_finish(self, number: int, hidden: Tensor) -> Any:
        """Return what `finish` makes of a micro-batch whose last hidden states these are."""
        pipeline = self._pipeline
        pipeline._hidden = hidden
        try:
            return self._finish(number, self._batches[number])
        finally:
            pipeline._hidden = None

    def _backward(self, action: Action) -> None:
        """The whole backward, nothing deferred."""
        kept = self._kept.pop((action.stage, action.micro_batch))
        gradient = self._output_gradient(action, kept)
        self._held.reduce_if_last(self._pipeline.layers_of(action.stage))
        if kept.graph is not None:
            torch.autograd.backward((kept.graph,), (gradient,))  # type: ignore[arg-type]
        del gradient
        received = kept.received
        del kept
        if received is not None:
            found, received.grad = received.grad, None
            assert found is not None
            self._hand_on(action, found)

    def _output_gradient(self, action: Action, kept: _Kept) -> Tensor | None:
        """The gradient of a stage's output: from the next stage, or through the head and its loss,
        made here.
        """
        if action.stage < self._pipeline._stages - 1:
            return self._take(action) if kept.graph is not None else None
        hidden, kept.hidden = kept.hidden, None
        assert hidden is not None
        loss = self._run_finish(action.micro_batch, hidden)
        self._held.reduce_if_last(self._pipeline.head())
        loss.backward()
        return hidden.grad

    def _input_gradient(self, action: Action) -> None:
        """Backward without the weight gradients of linears, which are deferred."""
        with self._held.unreduced(), defer_weight_gradients() as later:
            self._backward(action)
        self._later[action.stage, action.micro_batch] = later

    def _weight_gradients(self, action: Action) -> None:
        pipeline = self._pipeline
        head = pipeline.head() if action.stage == pipeline._stages - 1 else []
        self._held.reduce_if_last([*pipeline.layers_of(action.stage), *head])
        self._held.add(self._later.pop((action.stage, action.micro_batch)))

    def _receive(self, action: Action) -> None:
        if action.kind == kinds.RECEIVE_GRADIENT and not self._is_wanted(action.stage + 1):
            return
        shape, dtype = self._shape(action.micro_batch)
        place = self._place_of(partner_of(action))
        self._arriving[action] = self._transport.receive(shape, dtype, place, self._tag(action))

    def _take(self, action: Action) -> Tensor:
        """What the action needs of another stage, when it is there."""
        receive = received_for(action, self._pipeline._stages)
        assert receive is not None
        return self._arriving.pop(receive).wait()

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """To a stage of this rank as it is; for another rank's it waits for its turn to be sent."""
        exchange = exchange_of(action, self._pipeline._stages)
        assert exchange is not None
        send, receive = exchange
        if receive.stage in self._pipeline.layers:
            self._arriving[receive] = OnItsWay(tensor, None)
        else:
            self._leaving[send] = tensor

    def _send(self, action: Action) -> None:
        tensor = self._leaving.pop(action, None)
        if tensor is not None:
            receive = partner_of(action)
            self._sent[action] = self._transport.send(
                tensor, self._place_of(receive), self._tag(receive)
            )

    def _let_go(self, send: Action) -> None:
        """Drops what was sent; if the other rank has not taken it, waits until it has."""
        sent = self._sent.pop(send, None)  # None: a gradient that nobody wants
        if sent is not None:
            self._begin(send)
            sent.wait()

    def _is_wanted(self, stage: int) -> bool:
        """Whether a stage's input has a gradient: a stage before it is trained."""
        return any(self._pipeline._trains[:stage])

    def _shape(self, number: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of hidden states between stages."""
        pipeline, tokens = self._pipeline, self._batches[number].tokens
        own = torch.Size((tokens.shape[0], tokens.shape[1] // pipeline._parallel.context))
        return pipeline._model.compute_hidden_shape(own, pipeline._parallel.tensor), pipeline._dtype

    def _place_of(self, action: Action) -> int:
        return find_stage_rank(self._pipeline._parallel, action.stage)

    def _tag(self, receive: Action) -> int:
        """By the stage that receives."""
        number = receive.micro_batch * self._pipeline._stages + receive.stage
        return number * 2 + (receive.kind == kinds.RECEIVE_GRADIENT)
