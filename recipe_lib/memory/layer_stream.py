"""Layers in pinned host memory, on the device only while they run: each is copied there while the
one before computes.

A unit is a decoder layer, or the embedding or output head, if these are two matrices or frozen; or,
of a mixture, the experts of a layer alone, which are most of its weights. Between its uses a unit's
parameters are the ones in host memory, which is what checkpoints, exports and optimizers see. For
its forward, and again for its backward, they change places with tensors on the device. There is one
such tensor a parameter, whose memory is given and taken (as FSDP2 does it), so that what autograd
saved of a weight in forward has its values again in backward. On the device there are two units at
most: the one that computes, and the next, or in backward the one before.

What is frozen is never copied back. A trained parameter is stepped when backward has made its
gradient, on the device; then its new values go back to the host, and its memory is free: neither is
its gradient ever in host memory, nor are there two layers' gradients at a time.

How copies and waits are ordered: `recipe_lib/ops/host_copies.py`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from recipe_lib.adapters import is_adapter
from recipe_lib.adapters.layers import QuantizedExperts
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.language_model import LanguageModel, list_layer_names
from recipe_lib.models.mixture import ExpertLinear
from recipe_lib.ops.device import has_host
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.ops.head_losses import makes_gradients_in_forward
from recipe_lib.ops.host_copies import HostCopies, Pair, Prefetch
from recipe_lib.units import format_bytes, pluralize

EXPERTS = "experts"  # value of the key that streams these alone

StepParameter = Callable[
    [nn.Parameter, nn.Parameter], None
]  # of a parameter in host memory, with the one on the device


class StreamedUnit:
    """Parameters that are on the device at the same time. places: by name, `(module._parameters,
    name there)`.
    """

    def __init__(
        self, name: str, places: Mapping[str, tuple[dict[str, Any], str]], *, is_layer: bool
    ) -> None:
        self.name, self.is_layer = name, is_layer
        self.names, self.places = list(places), list(places.values())
        self.in_use = False  # the tensors on the device are in their places
        self._hosts: list[nn.Parameter] = []
        self._on_device: list[nn.Parameter | None] = [None] * len(self.places)

    def hosts(self) -> list[nn.Parameter]:
        """The parameters in host memory."""
        return self._hosts if self.in_use else [place[name] for place, name in self.places]

    def on_device(self, number: int, device: torch.device) -> nn.Parameter:
        """The tensor that stands for a parameter on the device; it has memory when it is made."""
        found = self._on_device[number]
        if found is None:
            host = self.hosts()[number]
            local = torch.empty(get_detached_local(host).shape, dtype=host.dtype, device=device)
            whole = (
                DTensor(local, host._spec, requires_grad=False)
                if isinstance(host, DTensor)
                else local
            )  # type: ignore[call-arg]
            found = self._on_device[number] = nn.Parameter(whole, requires_grad=host.requires_grad)
        return found

    def trains(self) -> bool:
        """Return whether there are trained parameters, which backward has to have here for their
        step.
        """
        return any(host.requires_grad for host in self.hosts())

    def made(self) -> dict[str, nn.Parameter]:
        """Those tensors on the device that there are, with memory or without, by their parameters'
        names.
        """
        return {
            name: one
            for name, one in zip(self.names, self._on_device, strict=True)
            if one is not None
        }

    def begin_use(self) -> None:
        """The module computes with the tensors on the device, which have their values."""
        if not self.in_use:
            self._hosts, self.in_use = self.hosts(), True
            for (place, name), parameter in zip(self.places, self._on_device, strict=True):
                place[name] = parameter

    def end_use(self) -> None:
        """The module's parameters are those in host memory."""
        if self.in_use:
            for (place, name), host in zip(self.places, self._hosts, strict=True):
                place[name] = host
            self._hosts, self.in_use = [], False


class LayerStream:
    """Copies units to the device, each before it is needed. See the module's text."""

    def __init__(self, units: Sequence[StreamedUnit], device: torch.device, what: str = "") -> None:
        """units: in the order of forward. what: what of a layer is streamed; "": all of it."""
        self.units = list(units)
        self._what = what
        self._backward_units = [
            number for number, unit in enumerate(self.units) if unit.is_layer or unit.trains()
        ]
        self._copies = HostCopies(device)
        self._prefetch = Prefetch(self._copies, self._allocate, self._free)
        self._stepped: dict[nn.Parameter, nn.Parameter] = {}
        self._backward = -1  # the backward whose end is awaited
        # The unit that stays on the device from backward to the next forward: frozen experts
        # of the first layer.
        self._first = 0 if what and not self.trains() else None

    def parameters(self) -> list[nn.Parameter]:
        """Those that lie on the host, each once."""
        return list({id(host): host for unit in self.units for host in unit.hosts()}.values())

    def num_bytes(self) -> int:
        """Of this rank's parameters on the host."""
        return sum(get_detached_local(parameter).nbytes for parameter in self.parameters())

    def on_device(self) -> dict[str, nn.Parameter]:
        """What has stood for parameters on the device so far, with memory or without, by their
        names.
        """
        return {name: one for unit in self.units for name, one in unit.made().items()}

    def trains(self) -> bool:
        """Whether there are trained parameters among them."""
        return any(unit.trains() for unit in self.units)

    def describe(self) -> str:
        """For the log, after the units of FSDP."""
        others = [unit.name for unit in self.units if not unit.is_layer]
        layers = pluralize(len(self.units) - len(others), "layer")
        *first, last = [f"{self._what} of {layers}" if self._what else layers, *others]
        what = f"{', '.join(first)} and {last}" if first else last
        stepped = ", each stepped there in backward" if self.trains() else ""
        return (
            f"; {what} in host memory ({format_bytes(self.num_bytes())}), copied to the device one"
            f" ahead{stepped}"
        )

    def set_step(self, step: StepParameter) -> None:
        """What steps a trained parameter when its gradient is there, on the device. Call it once,
        when parameters have memory.
        """
        for unit in self.units:
            for number, host in enumerate(unit.hosts()):
                if host.requires_grad:
                    there = self._stepped[host] = unit.on_device(number, self._copies.device)
                    get_detached_local(there).untyped_storage().resize_(0)
                    there.register_post_accumulate_grad_hook(
                        partial(self._step_and_send, step, host)
                    )

    def get_stepped_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stepped for a parameter, and has its gradient: the one on the device for one that
        is trained here.
        """
        return self._stepped.get(parameter, parameter)

    # Uses

    def run(
        self,
        number: int,
        forward: Callable[..., Any],
        needed_again: Callable[..., bool],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A unit's forward. needed_again: by the call's arguments, whether backward needs the
        parameters.
        """
        if torch._C._current_graph_task_id() != -1:  # in backward: computed again
            self._use(number, backward=True)
            return forward(*args, **kwargs)
        self._use(number)
        stays = False
        try:
            output = forward(*args, **kwargs)
            wanted = [
                one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad
            ]
            if wanted and needed_again(*args, **kwargs):
                for tensor in wanted:
                    tensor.register_hook(partial(self._begin_backward, number))
                stays = number >= max(
                    self._backward_units, default=number
                )  # backward begins with these
            return output
        finally:
            if not stays:
                self._prefetch.drop(number)

    def _begin_backward(self, number: int, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._use(number, backward=True)

    def _end_backward(self) -> None:
        self._backward = -1
        self._prefetch.drop_all(keep=self._first)
        if self._first is not None:
            self.units[self._first].end_use()

    def _use(self, number: int, *, backward: bool = False) -> None:
        """What is issued from here on finds a unit on the device; the next one is on its way."""
        self._prefetch.use(number, self._following(number, backward))
        self.units[number].begin_use()

    def _following(self, number: int, backward: bool) -> int | None:
        """The unit that is needed next, if a rank's units run in their order. Backward begins with
        its last one.
        """
        before = [unit for unit in self._backward_units if unit < number]
        if backward:
            return before[-1] if before else None
        if number + 1 < len(self.units):
            return number + 1
        stays = bool(before) and before[-1] in self._prefetch.on_device  # for backward
        return before[-1] if stays else None

    # Copies

    @torch.no_grad()
    def _allocate(self, number: int) -> list[Pair]:
        """Gives a unit memory on the device, and returns what is copied there."""
        pairs = []
        for index, host in enumerate(self.units[number].hosts()):
            target = get_detached_local(self.units[number].on_device(index, self._copies.device))
            target.untyped_storage().resize_(get_detached_local(host).nbytes)
            pairs.append((target, get_detached_local(host)))
        return pairs

    def _free(self, number: int) -> None:
        unit = self.units[number]
        unit.end_use()
        for parameter in unit.made().values():
            get_detached_local(parameter).untyped_storage().resize_(0)

    def _step_and_send(self, step: StepParameter, host: nn.Parameter, parameter: Tensor) -> None:
        """Steps a parameter on the device, and sends it to the host, where it is free when the one
        after it is sent.
        """
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # torch calls hooks also where backward has given none
            return
        step(host, parameter)
        stepped = get_detached_local(parameter)
        free = partial(stepped.untyped_storage().resize_, 0)
        self._copies.copy_to_host([(get_detached_local(host), stepped)], free)
        self._copies.free_sent(keep=1)


def stream_layers(
    model: nn.Module,
    memory: MemoryConfig,
    device: torch.device,
    ranks: int = 1,
    *,
    is_stage: bool = False,
) -> LayerStream | None:
    """Says of each layer's parameters that they lie on the host, in place; `materialize` puts them
    there.

    Of a unit all frozen parameters are streamed, or those of its experts alone, and with
    `memory.optimizer_in_backward` and `memory.optimizer_offload` the trained ones that are no
    adapter's and used once. Call it when layers are checkpointed and compiled, before FSDP wraps
    what it leaves. On a CPU the model is left as it is.

    ranks: that have tokens of their own. is_stage: the model is a rank's part of a pipeline, which
    may have no layer with experts. Raises ConfigError for a model without experts whose experts are
    to be streamed, and for trained layers on several ranks, which would each step a layer by the
    gradient of theirs.
    """
    only_experts = memory.stream_layers == EXPERTS
    if only_experts and not is_stage and not any(map(_is_expert, model.modules())):
        raise ConfigError(
            "memory.stream_layers: found experts for a model without experts of ours, expected "
            "a mixture of experts; set true, which streams whole layers, or remove the key"
        )
    if not memory.stream_layers or not has_host(device):
        return None
    assert isinstance(model, LanguageModel)
    units = _find_units(model, memory)
    if not units:
        return None
    stream = LayerStream(units, device, EXPERTS if only_experts else "")
    if ranks > 1 and stream.trains():
        raise ConfigError(
            f"memory.stream_layers: found {ranks} ranks with tokens of their own for layers that"
            " are trained, expected 1, as a layer is stepped by the gradient of one rank's tokens;"
            " use memory.cpu_offload, or start one process"
        )
    model.on_host = frozenset(name for unit in units for name in unit.names)
    for number, unit in enumerate(units):
        module = model.get_submodule(unit.name)
        needed_again = _make_needed_in_backward(module, unit.is_layer or unit.trains())
        module.forward = partial(stream.run, number, module.forward, needed_again)
        for owner in module.modules():
            if isinstance(owner, QuantizedLinear):
                owner.computes_on = device
    return stream


def _find_units(model: LanguageModel, memory: MemoryConfig) -> list[StreamedUnit]:
    """Return what is streamed, in the order of forward."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    stepped = memory.optimizer_in_backward and memory.optimizer_offload

    def is_streamed(name: str, parameter: nn.Parameter) -> bool:
        trained = (
            stepped and not is_adapter(name) and uses[id(parameter)] == 1 and parameter.dim() > 0
        )
        return trained if parameter.requires_grad else True

    only_experts = memory.stream_layers == EXPERTS
    layers = list_layer_names(model)
    units = []
    for name in layers if only_experts else _find_unit_names(model, layers, is_streamed):
        places: dict[str, tuple[dict[str, Any], str]] = {}
        for inner, owner in model.get_submodule(name).named_modules():
            if only_experts and not _is_expert(owner):
                continue
            for local, parameter in owner._parameters.items():
                full = ".".join(part for part in (name, inner, local) if part)
                if parameter is not None and is_streamed(full, parameter):
                    places[full] = (owner._parameters, local)
        if places:
            units.append(StreamedUnit(name, places, is_layer=name in layers))
    return units


def _is_expert(module: nn.Module) -> bool:
    return isinstance(module, (ExpertLinear, QuantizedExperts))


def list_streamed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of streamed units, when none of these runs."""
    names = model.on_host if isinstance(model, LanguageModel) else ()
    return (
        [parameter for name, parameter in model.named_parameters() if name in names]
        if names
        else []
    )


def _find_unit_names(
    model: LanguageModel, layers: list[str], is_streamed: Callable[[str, nn.Parameter], bool]
) -> list[str]:
    """The layers, and what owns matrices outside of them that are all streamed, in module order."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in found))
        elsewhere = name.startswith(tuple(model.other_parts)) if model.other_parts else False
        matrices = [
            (f"{name}.{local}", one)
            for local, one in module.named_parameters(recurse=False)
            if one.dim() > 1 and not is_adapter(local)
        ]
        outside = bool(matrices) and all(is_streamed(full, one) for full, one in matrices)
        if name and not inside and not elsewhere and (name in layers or outside):
            found.append(name)
    return found


def _make_needed_in_backward(module: nn.Module, always: bool) -> Callable[..., bool]:
    """By the arguments of a call, whether backward needs a unit's parameters: that of a frozen
    embedding reads tokens, and a frozen output head makes its gradients in forward if it is to sum
    losses.
    """
    if always:
        return lambda *args, **kwargs: True
    if isinstance(module, nn.Embedding):
        return lambda *args, **kwargs: False
    return lambda *args, **kwargs: (
        kwargs.get("labels") is None or not makes_gradients_in_forward(kwargs.get("head_loss"))
    )
