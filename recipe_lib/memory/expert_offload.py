"""Quantized experts in pinned host memory, copied to the device one layer ahead, in forward and in backward.

Experts are most of a mixture's weights, and each layer needs only its own: on the device there are the codes of the
layer that computes, and of the one after it (in backward, before it) on their way. They are frozen, so nothing is
copied back. Each rank has the experts of its layers (of a tensor-parallel group its part of them) whole on its host:
they are not sharded, and no rank waits for another one's.

The device's memory is the computing stream's. A copy begins when all that this stream was given before is done, which
includes whatever used that memory last; so copies run next to the layer that computes, without `record_stream`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.expert_layers import QuantizedExperts
from recipe_lib.config.schema import MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory.checkpointing import outside_selection
from recipe_lib.models.find_layers import layer_names
from recipe_lib.ops.device import has_host
from recipe_lib.ops.dtensor_shards import local_part

Codes = tuple[Tensor, Tensor | None]  # codes and scales of one matrix of all experts


class ExpertFetcher:
    """Copies the codes of layers to the device, each before it is needed. layers: the modules of each, in order."""

    def __init__(self, layers: Sequence[Sequence[QuantizedExperts]], device: torch.device) -> None:
        self.layers, self.device = layers, device
        self._module = torch.get_device_module(device)
        self._stream: Any = None
        self._here: dict[int, tuple[list[Codes], Any]] = {}  # by layer; the event after its copies until it is awaited

    def parameters(self) -> list[nn.Parameter]:
        """Those that lie on the host."""
        modules = [module for layer in self.layers for module in layer]
        found = [parameter for module in modules for parameter in (module.weight_codes, module.weight_scales)]
        return [parameter for parameter in found if parameter is not None]

    def num_bytes(self) -> int:
        """Of this rank's parameters on the host."""
        return sum(local_part(parameter)[0].nbytes for parameter in self.parameters())

    def fetch(self, layer: int, place: int) -> Codes:
        """The codes of one of a layer's modules, on the device; the next layer's are on their way afterwards."""
        with outside_selection():
            return self._fetch(layer)[place]

    def _fetch(self, layer: int) -> list[Codes]:
        if layer not in self._here:
            self._copy(layer)
        codes, copied = self._here[layer]
        if copied is not None:
            self._module.current_stream(self.device).wait_event(copied)
            self._here[layer] = codes, None
        following = self._following(layer)
        for other in self._here.keys() - {layer, following}:
            self._drop(other)
        if following is not None and following not in self._here:
            self._copy(following)
        return codes

    def _following(self, layer: int) -> int | None:
        """The layer that is needed next, if a rank's layers run in their order. Backward begins with the last one."""
        if torch._C._current_graph_task_id() != -1:
            return layer - 1 if layer else None
        return layer + 1 if layer + 1 < len(self.layers) else None

    def _copy(self, layer: int) -> None:
        if self._stream is None:
            self._stream = self._module.Stream()
        hosts = [(_host(module.weight_codes), _host(module.weight_scales)) for module in self.layers[layer]]
        codes = [(self._empty(first), None if second is None else self._empty(second)) for first, second in hosts]
        done = self._module.Event()
        done.record(self._module.current_stream(self.device))
        self._stream.wait_event(done)
        with self._module.stream(self._stream):
            for pair, host_pair in zip(codes, hosts, strict=True):
                for tensor, host in zip(pair, host_pair, strict=True):
                    if tensor is not None and host is not None:
                        tensor.copy_(host, non_blocking=True)
        copied = self._module.Event()
        copied.record(self._stream)
        self._here[layer] = codes, copied

    def _drop(self, layer: int) -> None:
        """Frees a layer's memory; one that nobody waited for may still be written."""
        _, copied = self._here.pop(layer)
        if copied is not None:
            self._module.current_stream(self.device).wait_event(copied)

    def _empty(self, host: Tensor) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=self.device)


def _host(parameter: Tensor | None) -> Any:
    return None if parameter is None else local_part(parameter)[0]


def offload_experts(
    model: nn.Module, memory: MemoryConfig, device: torch.device, *, is_stage: bool = False
) -> ExpertFetcher | None:
    """Says of each layer's quantized experts that they lie on the host, in place; `materialize` puts them there.

    Call it when adapters and sharded matrices are in their places. On a CPU the model is left as it is. is_stage: the
    model is a rank's part of a pipeline, which may have no layer with experts. Raises ConfigError for a model without
    quantized experts.
    """
    if not memory.expert_offload:
        return None
    layers = []
    for name in layer_names(model):
        experts = [module for module in model.get_submodule(name).modules() if isinstance(module, QuantizedExperts)]
        layers += [experts] if experts else []
    if not layers:
        if is_stage:
            return None
        raise ConfigError(
            "memory.expert_offload: found true for a model without quantized experts, expected a mixture of experts "
            "with lora.quantize_base=nf4 or int8; set that, or remove memory.expert_offload"
        )
    if not has_host(device):
        return None
    fetcher = ExpertFetcher(layers, device)
    for number, experts in enumerate(layers):
        for place, module in enumerate(experts):
            module.offload(fetcher, number, place)
    return fetcher


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of experts that lie on the host."""
    fetchers = {
        id(module.fetcher): module.fetcher for module in model.modules() if isinstance(module, QuantizedExperts)
    }
    return [parameter for fetcher in fetchers.values() if fetcher is not None for parameter in fetcher.parameters()]
