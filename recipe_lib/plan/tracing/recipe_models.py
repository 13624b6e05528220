"""The models of a recipe in a trace: which parameter what is alive belongs to, and the sizes of their modules."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.models.meta_init import stored_weights
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.plan.result import LayerRow
from recipe_lib.plan.tracing.plain_tensors import plain_parts
from recipe_lib.plan.tracing.tracer import Tracer


def models_of(recipe: Any) -> dict[str, nn.Module]:
    """The recipe's modules by the prefix of their names: none for `model`, which comes last, else the attribute's."""
    found = {name: value for name, value in vars(recipe).items() if isinstance(value, nn.Module)}
    main = "model" if "model" in found else next(reversed(found), "")
    others = {f"{name}.": value for name, value in found.items() if name != main and value is not found[main]}
    return others | ({"": found[main]} if main else {})


def label_models(tracer: Tracer, models: dict[str, nn.Module]) -> None:
    """Says of what is alive which parameter it belongs to."""
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            names[id(parameter)] = prefix + name
            tracer.labels.label(parameter, "parameters", prefix + name)
            if parameter.grad is not None:
                tracer.labels.label(parameter.grad, "gradients", prefix + name)
        for name, buffer in model.named_buffers():
            tracer.labels.label(buffer, "parameters", prefix + name)
        _label_gathered(tracer, prefix, model)
    tracer.parameter_names = names
    for optimizer in tracer.optimizers.values():
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    tracer.labels.label(value, "optimizer", names.get(id(parameter), ""))


def _entries(module: nn.Module) -> list[Any]:
    """The parameters of an FSDP unit, as FSDP keeps them."""
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None) if isinstance(module, FSDPModule) else None
    return [] if group is None else list(group.fsdp_params)


def _label_gathered(tracer: Tracer, prefix: str, model: nn.Module) -> None:
    """FSDP keeps the tensors that it gathers into, with no memory in between; private names of torch's."""
    for module in model.modules():
        for held in _entries(module):
            label = prefix + (getattr(held, "_param_fqn", None) or "")
            for gathered in getattr(held, "all_gather_outputs", ()):
                tracer.labels.label(gathered, "gathered", label)
            tracer.labels.label(held._sharded_param_data, "parameters", label)


def label_sums(tracer: Tracer, recipe: Any, models: dict[str, nn.Module]) -> None:
    """Says of gradients that are added up over a step's micro-batches whose they are: whole ones, which FSDP reduces
    once a step, and sums in fp32; and the same of tensors that stand for parameters in host memory."""
    for divided in vars(recipe).values():
        if isinstance(divided, Parallel) and divided.accumulation is not None:
            for parameter, total in divided.accumulation.sums.items():
                tracer.labels.label(total, "gradients", tracer.parameter_names.get(id(parameter), ""))
        if isinstance(divided, Parallel) and divided.layers is not None:
            for name, there in divided.layers.on_device().items():
                tracer.labels.label(there, "gathered", name)
    for prefix, model in models.items():
        for held in (entry for module in model.modules() for entry in _entries(module)):
            whole = getattr(held, "_unsharded_param", None)
            for gradient in (getattr(whole, "grad", None), getattr(held, "unsharded_accumulated_grad", None)):
                if gradient is not None:
                    tracer.labels.label(gradient, "gradients", prefix + (getattr(held, "_param_fqn", None) or ""))


def module_facts(prefix: str, model: nn.Module) -> list[LayerRow]:
    """The modules that hold parameters and no list of layers, in order; tied parameters count at their first owner."""
    facts: list[LayerRow] = []
    stored = stored_weights(model)
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    for name, module in model.named_modules():
        if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            continue
        inside = f"{name}."
        own = [
            value for value in module.parameters() if owners[id(value)] == name or owners[id(value)].startswith(inside)
        ]
        if own:
            packed = {key: weight for key, weight in stored.items() if key.startswith(inside)}
            carriers = sum(
                value.numel()
                for key in packed
                for part, value in model.get_submodule(key.rpartition(".")[0]).named_parameters(recurse=False)
                if part.startswith("weight_")
            )
            weights = sum(weight.in_features * weight.out_features for weight in packed.values())
            facts.append(
                LayerRow(
                    prefix + name,
                    type(module).__name__.removeprefix("FSDP"),
                    sum(value.numel() for value in own) - carriers + weights,
                    sum(value.numel() for value in own if value.requires_grad),
                    sum(value.numel() * value.element_size() for value in own),
                    sum(part.nbytes for value in own for part in plain_parts(value)),
                    weights=_weight_shapes(module),
                )
            )
    return facts


def _weight_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Name to shape of a module's own parameters, as this rank computes with them; of a quantized linear that of what
    it dequantizes."""
    found = {}
    if quantized := isinstance(module, QuantizedLinear):
        found["weight"] = [last - first for first, last in (module.rows, module.columns)]
    for name, value in module.named_parameters(recurse=False):
        if not (quantized and name.startswith("weight_")):
            found[name] = _computed_shape(value)
    return found


def _computed_shape(value: torch.Tensor) -> list[int]:
    """Of a parameter, divided where tensor parallel shards it; FSDP gathers it before it is used."""
    shape = list(value.shape)
    if isinstance(value, DTensor):
        names = value.device_mesh.mesh_dim_names or ()
        for name, size, placement in zip(names, value.device_mesh.shape, value.placements, strict=True):
            if name == "tensor" and placement.is_shard():
                shape[placement.dim] //= size
    return shape
