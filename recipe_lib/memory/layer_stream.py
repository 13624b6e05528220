"""Stream layers: keep them in pinned host memory, and on the device only while they run.

`apply_memory_levers` calls `stream_layers(model, cfg.memory, device)`, which marks the parameters
and wraps the forwards. A unit is what is copied at once: a decoder layer, its experts alone, or an
embedding or output head. The device holds at most two units: the one that computes, and the next
(in backward the one before), whose copy is under way.
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

EXPERTS = "experts"  # value of `memory.stream_layers` that streams experts alone

# `step(host, stand_in)` runs the optimizer for one parameter. The stand-in is the parameter on the
# device. It is changed in place, by its own gradient and the optimizer's states of the parameter in
# host memory. `LayerStream` then copies the new values to the host.
StepParameter = Callable[[nn.Parameter, nn.Parameter], None]


class StreamedUnit:
    """Parameters that are on the device at the same time.

    Each parameter in host memory has one stand-in, a parameter on the device. As in FSDP2, its
    memory is freed and allocated again while the tensor object stays. So a tensor that autograd
    saved of it in forward has its values again in backward. Between uses the module has the
    parameters in host memory, which checkpoints, exports and optimizers see.
    """

    def __init__(
        self, name: str, entries: Mapping[str, tuple[dict[str, Any], str]], *, is_layer: bool
    ) -> None:
        """Describe the parameters of a unit; nothing is copied or allocated.

        name: of the module in the model. entries: by a parameter's name in the model, (the
        `_parameters` of the module that has it, its name there). is_layer: a decoder layer, or its
        experts; else an embedding or an output head.
        """
        self.name = name
        self.is_layer = is_layer
        self.in_use = False  # True while the stand-ins are the module's parameters
        # Four lists with an item for each parameter, in the same order:
        self.names = list(entries)  # names in the model
        self._entries = list(entries.values())
        # The parameters in host memory, while the stand-ins are the module's; else empty.
        self._hosts: list[nn.Parameter] = []
        # The stand-ins; None: not made yet.
        self._on_device: list[nn.Parameter | None] = [None] * len(entries)

    def list_host_parameters(self) -> list[nn.Parameter]:
        if self.in_use:
            return self._hosts
        return [parameters[name] for parameters, name in self._entries]

    def get_device_parameter(self, index: int, device: torch.device) -> nn.Parameter:
        """Return a parameter's stand-in; the first call makes it, without memory.

        index: of the parameter in `names`.
        """
        parameter = self._on_device[index]
        if parameter is None:
            host = self.list_host_parameters()[index]
            tensor = torch.empty(get_detached_local(host).shape, dtype=host.dtype, device=device)
            # Before `_allocate` resizes it: even to the size that it has, torch would allocate
            # again, and copy.
            tensor.untyped_storage().resize_(0)
            if isinstance(host, DTensor):
                tensor = DTensor(tensor, host._spec, requires_grad=False)  # type: ignore[call-arg]
            parameter = nn.Parameter(tensor, requires_grad=host.requires_grad)
            self._on_device[index] = parameter
        return parameter

    def get_device_parameters(self) -> dict[str, nn.Parameter]:
        """Return name -> stand-in, of those that were made so far."""
        pairs = zip(self.names, self._on_device, strict=True)
        return {name: parameter for name, parameter in pairs if parameter is not None}

    def trains(self) -> bool:
        """Return True if a parameter is trained; it is then stepped on the device in backward."""
        return any(host.requires_grad for host in self.list_host_parameters())

    def begin_use(self) -> None:
        """Make the stand-ins the module's parameters; their values must have been copied."""
        if not self.in_use:
            self._hosts = self.list_host_parameters()
            self.in_use = True
            for (parameters, name), parameter in zip(self._entries, self._on_device, strict=True):
                parameters[name] = parameter

    def end_use(self) -> None:
        if self.in_use:
            for (parameters, name), host in zip(self._entries, self._hosts, strict=True):
                parameters[name] = host
            self._hosts = []
            self.in_use = False


class LayerStream:
    """Copies units to the device, each before it is needed.

    Frozen parameters are never copied back. A trained one is stepped on the device as soon as
    backward has made its gradient, and only its new values go back: gradients are never in host
    memory. `HostCopies` and `Prefetch` order copies and waits.
    """

    def __init__(self, units: Sequence[StreamedUnit], device: torch.device, part: str = "") -> None:
        """Stream units to a device.

        units: in the order in which forward runs them. part: EXPERTS if these alone are streamed of
        a layer; empty: whole layers are.
        """
        self.units = list(units)
        self._part = part
        # Indices of the units that are prefetched in backward. A frozen embedding or output head is
        # none of them: the embedding's backward reads tokens alone, and the head's comes first.
        self._backward_units = [
            index for index, unit in enumerate(self.units) if unit.is_layer or unit.trains()
        ]
        self._copies = HostCopies(device)
        self._prefetch = Prefetch(self._copies, self._allocate, self._free)
        self._stepped: dict[nn.Parameter, nn.Parameter] = {}  # host parameter -> its stand-in
        self._backward = -1  # autograd's id of the backward whose end is awaited; -1: none
        # Index of the unit that stays on the device from backward to the next forward, which begins
        # with it: the first layer's, if frozen experts are streamed. None: no unit stays.
        self._first = 0 if part and not self.trains() else None

    def parameters(self) -> list[nn.Parameter]:
        """Return the streamed parameters in host memory, each once."""
        hosts = {id(host): host for unit in self.units for host in unit.list_host_parameters()}
        return list(hosts.values())

    def num_bytes(self) -> int:
        """Return the bytes of this rank's streamed parameters, which are in host memory."""
        return sum(get_detached_local(parameter).nbytes for parameter in self.parameters())

    def get_device_parameters(self) -> dict[str, nn.Parameter]:
        stand_ins: dict[str, nn.Parameter] = {}
        for unit in self.units:
            stand_ins |= unit.get_device_parameters()
        return stand_ins

    def trains(self) -> bool:
        return any(unit.trains() for unit in self.units)

    def describe(self) -> str:
        """Return a text on what is streamed, to be appended to the log's line on FSDP."""
        names = [unit.name for unit in self.units if not unit.is_layer]
        layers = pluralize(len(self.units) - len(names), "layer")
        names.insert(0, f"{self._part} of {layers}" if self._part else layers)
        listed_names = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        suffix = ", each stepped there in backward" if self.trains() else ""
        return (
            f"; {listed_names} in host memory ({format_bytes(self.num_bytes())}), copied to the"
            f" device one ahead{suffix}"
        )

    def set_step(self, step: StepParameter) -> None:
        """Let `step` update each trained parameter in backward, as soon as its gradient is made.

        step: see `StepParameter`. Call this once, when the parameters have memory.
        """
        for unit in self.units:
            for index, host in enumerate(unit.list_host_parameters()):
                if host.requires_grad:
                    stand_in = unit.get_device_parameter(index, self._copies.device)
                    self._stepped[host] = stand_in
                    stand_in.register_post_accumulate_grad_hook(
                        partial(self._step_and_send, step, host)
                    )

    def get_stepped_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the stand-in that gets a parameter's gradient; the parameter if not streamed."""
        return self._stepped.get(parameter, parameter)

    def run(
        self,
        index: int,
        forward: Callable[..., Any],
        is_needed_in_backward: Callable[..., bool],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a unit's forward with the unit on the device, in place of the module's own.

        index: of the unit. forward: the module's own. is_needed_in_backward: a function of the
        call's arguments that returns True if backward needs the unit's parameters.
        """
        # Private, as in torch's own activation checkpointing: torch has no public name for it.
        if torch._C._current_graph_task_id() != -1:  # in backward: recomputed by checkpointing
            self._use(index, backward=True)
            return forward(*args, **kwargs)
        self._use(index)
        stays = False  # True: the unit stays on the device until its backward
        try:
            output = forward(*args, **kwargs)
            differentiable = [
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            if differentiable and is_needed_in_backward(*args, **kwargs):
                for tensor in differentiable:
                    tensor.register_hook(partial(self._begin_backward, index))
                # Backward begins with the last unit, which need not be copied twice.
                stays = index >= max(self._backward_units, default=index)
            return output
        finally:
            if not stays:
                self._prefetch.drop(index)

    def _begin_backward(self, index: int, _: Tensor) -> None:
        """Put a unit on the device, as the hook of its output: backward reaches the unit."""
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            # Private, as in FSDP2: the only way to be called when a backward has ended.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._use(index, backward=True)

    def _end_backward(self) -> None:
        """Free all units but the one that stays, when a backward has ended."""
        self._backward = -1
        self._prefetch.drop_all(keep=self._first)
        if self._first is not None:
            self.units[self._first].end_use()

    def _use(self, index: int, *, backward: bool = False) -> None:
        """Put a unit on the device for the work issued from here on; begin to copy the next one."""
        self._prefetch.use(index, self._find_next(index, backward))
        self.units[index].begin_use()

    def _find_next(self, index: int, backward: bool) -> int | None:
        """Return the index of the unit that is needed after this one; None: there is none.

        Units are expected to run in their order, in backward in the opposite one.
        """
        earlier = [unit for unit in self._backward_units if unit < index]
        if backward:
            return earlier[-1] if earlier else None
        if index + 1 < len(self.units):
            return index + 1
        # The last unit of forward. Backward begins with the last layer: it stays, if it is there.
        return earlier[-1] if earlier and earlier[-1] in self._prefetch.on_device else None

    @torch.no_grad()
    def _allocate(self, index: int) -> list[Pair]:
        """Give a unit memory on the device; return (stand-in, host) pairs of tensors to copy."""
        pairs = []
        for position, host in enumerate(self.units[index].list_host_parameters()):
            stand_in = self.units[index].get_device_parameter(position, self._copies.device)
            target = get_detached_local(stand_in)
            target.untyped_storage().resize_(get_detached_local(host).nbytes)
            pairs.append((target, get_detached_local(host)))
        return pairs

    def _free(self, index: int) -> None:
        unit = self.units[index]
        unit.end_use()
        for parameter in unit.get_device_parameters().values():
            get_detached_local(parameter).untyped_storage().resize_(0)

    def _step_and_send(self, step: StepParameter, host: nn.Parameter, parameter: Tensor) -> None:
        """Update a stand-in on the device, send its values to `host`, then free its memory."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # torch calls hooks also where backward has given none
            return
        step(host, parameter)
        stepped = get_detached_local(parameter)
        free = partial(stepped.untyped_storage().resize_, 0)
        self._copies.copy_to_host([(get_detached_local(host), stepped)], free)
        # Frees the parameter that was sent before this one, and has most likely arrived by now. To
        # wait for this one would hold up the computing stream.
        self._copies.free_sent(keep=1)


def stream_layers(
    model: nn.Module,
    memory: MemoryConfig,
    device: torch.device,
    ranks: int = 1,
    *,
    is_stage: bool = False,
) -> LayerStream | None:
    """Let a model's layers be streamed as `memory.stream_layers` says, in place.

    It marks their parameters as those of the host, where `materialize` puts them, and wraps the
    layers' forwards. All frozen parameters of a unit are streamed, or those of its experts alone.
    With `memory.optimizer_in_backward` and `memory.optimizer_offload` so are the trained ones, but
    an adapter's, and a matrix that is used twice (a tied embedding). Call it when layers are
    checkpointed and compiled, before FSDP wraps the rest. Returns None if nothing is streamed, as
    on a CPU.

    ranks: number of ranks that have tokens of their own (data-parallel ranks). is_stage: the model
    is a rank's part of a pipeline, which may have no layer with experts. Raises ConfigError for a
    model without experts whose experts are to be streamed, and for trained layers on several ranks.
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
    # Each rank would step a layer by the gradient of its own tokens.
    if ranks > 1 and stream.trains():
        raise ConfigError(
            f"memory.stream_layers: found {ranks} ranks with tokens of their own for layers that"
            " are trained, expected 1, as a layer is stepped by the gradient of one rank's tokens;"
            " use memory.cpu_offload, or start one process"
        )
    model.on_host = frozenset(name for unit in units for name in unit.names)
    for index, unit in enumerate(units):
        module = model.get_submodule(unit.name)
        is_needed = _build_backward_predicate(module, always=unit.is_layer or unit.trains())
        module.forward = partial(stream.run, index, module.forward, is_needed)
        for owner in module.modules():
            if isinstance(owner, QuantizedLinear):
                # So that it quantizes its weight there, though its parameters are in host memory.
                owner.computes_on = device
    return stream


def _find_units(model: LanguageModel, memory: MemoryConfig) -> list[StreamedUnit]:
    """Return the units to stream, in the order in which forward runs them."""
    # id of a parameter -> number of modules that have it.
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    streams_trained = memory.optimizer_in_backward and memory.optimizer_offload

    def is_streamed(name: str, parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad:
            return True
        # The gradient of a matrix that is used twice is complete after the backward of both units,
        # when the first of them is no longer on the device.
        return (
            streams_trained
            and not is_adapter(name)
            and uses[id(parameter)] == 1
            and parameter.dim() > 0
        )

    only_experts = memory.stream_layers == EXPERTS
    layers = list_layer_names(model)
    units = []
    unit_names = layers if only_experts else _find_unit_names(model, layers, is_streamed)
    for name in unit_names:
        entries: dict[str, tuple[dict[str, Any], str]] = {}
        for inner, owner in model.get_submodule(name).named_modules():
            if only_experts and not _is_expert(owner):
                continue
            for local, parameter in owner._parameters.items():
                full_name = ".".join(part for part in (name, inner, local) if part)
                if parameter is not None and is_streamed(full_name, parameter):
                    entries[full_name] = (owner._parameters, local)
        if entries:
            units.append(StreamedUnit(name, entries, is_layer=name in layers))
    return units


def _is_expert(module: nn.Module) -> bool:
    return isinstance(module, (ExpertLinear, QuantizedExperts))


def list_streamed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the streamed parameters, in host memory.

    Call it between steps: in forward and backward a module may have stand-ins in their place.
    """
    names = model.on_host if isinstance(model, LanguageModel) else ()
    if not names:
        return []
    return [parameter for name, parameter in model.named_parameters() if name in names]


def _find_unit_names(
    model: LanguageModel, layers: list[str], is_streamed: Callable[[str, nn.Parameter], bool]
) -> list[str]:
    """Return the names of the layers, and of other modules all of whose matrices are streamed.

    Such modules are the embedding and the output head.
    """
    units: list[str] = []
    for name, module in model.named_modules():
        is_inside = name.startswith(tuple(f"{unit}." for unit in units))
        # Text does not run through the other parts of a multimodal model.
        is_elsewhere = name.startswith(tuple(model.other_parts)) if model.other_parts else False
        if not name or is_inside or is_elsewhere:
            continue
        matrices = [
            (f"{name}.{local}", parameter)
            for local, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and not is_adapter(local)
        ]
        if name in layers or (matrices and all(is_streamed(*matrix) for matrix in matrices)):
            units.append(name)
    return units


def _build_backward_predicate(module: nn.Module, *, always: bool) -> Callable[..., bool]:
    """Return `fn(*args, **kwargs)` of a forward: True if backward needs the unit's parameters.

    module: the unit's. always: True: it needs them whatever the arguments are.
    """
    if always:
        return lambda *args, **kwargs: True
    if isinstance(module, nn.Embedding):  # its backward reads tokens alone
        return lambda *args, **kwargs: False
    # A frozen output head that sums losses makes its gradients in forward.
    return lambda *args, **kwargs: (
        kwargs.get("labels") is None or not makes_gradients_in_forward(kwargs.get("head_loss"))
    )
