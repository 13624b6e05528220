"""Label the memory in a trace with the parameters of a recipe's models, and list their modules.

A trace lists the allocations of a simulated run. `trace_rank` calls `label_models` after each step
and `label_sums` between micro-batches, as FSDP's and the optimizer's tensors come and go.
`list_module_rows` returns the rows of a plan's table of modules. Models are passed as a dict:
prefix of their parameters' names -> module.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.models.meta_init import StoredWeight, find_stored_weights
from recipe_lib.parallel.gradient_accumulation import list_param_entries
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.tracing.operator_costs import list_plain_tensors
from recipe_lib.plan.tracing.tracer import Tracer


def list_models(recipe: Any) -> dict[str, nn.Module]:
    """Return the models of a recipe: prefix of their parameters' names -> module.

    `recipe.model` has the prefix "" and comes last; another model has its attribute's name and a
    dot. A recipe without `model` has its last module in its place. {}: it has no modules.
    """
    modules = {name: value for name, value in vars(recipe).items() if isinstance(value, nn.Module)}
    if not modules:
        return {}
    main_model = modules.pop("model" if "model" in modules else next(reversed(modules)))
    models = {f"{name}.": module for name, module in modules.items() if module is not main_model}
    return models | {"": main_model}


def label_models(tracer: Tracer, models: dict[str, nn.Module]) -> None:
    """Label parameters, gradients, optimizer states and gathered tensors that are alive.

    The label is the name of the parameter that they belong to, with its model's prefix.
    """
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            names[id(parameter)] = prefix + name
            tracer.label(parameter, "parameters", prefix + name)
            if parameter.grad is not None:
                tracer.label(parameter.grad, "gradients", prefix + name)
        for name, buffer in model.named_buffers():
            tracer.label(buffer, "parameters", prefix + name)
    for label, fsdp_parameter in _list_fsdp_parameters(models):
        for gathered in getattr(fsdp_parameter, "all_gather_outputs", ()):
            tracer.label(gathered, "gathered", label)
        # FSDP pads shards: the parameter is a view of this memory.
        tracer.label(fsdp_parameter._sharded_param_data, "parameters", label)
    tracer.parameter_names = names
    for optimizer in tracer.optimizers.values():
        tracer.label_optimizer(optimizer)


def _list_fsdp_parameters(models: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (name, FSDP's private `FSDPParam`) of each parameter of FSDP's units.

    A unit is a module that FSDP gathers and frees as one.
    """
    for prefix, model in models.items():
        for module in model.modules():
            for entry in list_param_entries(module) if isinstance(module, FSDPModule) else ():
                yield prefix + (getattr(entry, "_param_fqn", None) or ""), entry


def label_sums(tracer: Tracer, recipe: Any, models: dict[str, nn.Module]) -> None:
    """Label the gradients that are summed over a step's micro-batches, and streamed layers.

    The sums are unsharded gradients that FSDP reduces once a step, and sums in fp32. Streamed
    layers keep their parameters in host memory, with copies on the device while they run. Both
    are found at the `Parallel` objects (how a model is divided) among the recipe's attributes.
    """
    for parallel in vars(recipe).values():
        if not isinstance(parallel, Parallel):
            continue
        if parallel.accumulation is not None:
            for parameter, total in parallel.accumulation.sums.items():
                tracer.label(total, "gradients", tracer.parameter_names.get(id(parameter), ""))
        if parallel.levers.layers is not None:
            for name, device_parameter in parallel.levers.layers.get_device_parameters().items():
                tracer.label(device_parameter, "gathered", name)
    for label, fsdp_parameter in _list_fsdp_parameters(models):
        # An attribute that FSDP sets at the first gather.
        unsharded_parameter = getattr(fsdp_parameter, "_unsharded_param", None)
        for gradient in (
            getattr(unsharded_parameter, "grad", None),
            getattr(fsdp_parameter, "unsharded_accumulated_grad", None),
        ):
            if gradient is not None:
                tracer.label(gradient, "gradients", label)


def list_module_rows(prefix: str, model: nn.Module) -> list[LayerRow]:
    """Return a row for each module that has parameters and contains no ModuleList, in order.

    A row counts the parameters of submodules too. prefix: of the model's names. Tied parameters
    count only in the first module that has them, and in those around it.
    """
    rows: list[LayerRow] = []
    quantized_weights = find_stored_weights(model)  # name of a quantized weight -> its module
    owners: dict[int, str] = {}  # id of a parameter -> name of the first module that has it
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    for name, module in model.named_modules():
        # The whole model, and parts with many layers.
        if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            continue
        parameters = [
            parameter
            for parameter in module.parameters()
            if f"{owners[id(parameter)]}.".startswith(f"{name}.")
        ]
        if not parameters:
            continue
        quantized = {
            key: linear for key, linear in quantized_weights.items() if key.startswith(f"{name}.")
        }
        num_unpacked = _count_unpacked(model, quantized)
        local_parts = itertools.chain.from_iterable(map(list_plain_tensors, parameters))
        rows.append(
            LayerRow(
                module=prefix + name,
                type=type(module).__name__.removeprefix("FSDP"),  # fully_shard renames classes
                parameters=sum(value.numel() for value in parameters) + num_unpacked,
                trained=sum(value.numel() for value in parameters if value.requires_grad),
                bytes=sum(value.numel() * value.element_size() for value in parameters),
                local_bytes=sum(part.nbytes for part in local_parts),
                weights=_list_weight_shapes(module),
            )
        )
    return rows


def _count_unpacked(model: nn.Module, quantized: Mapping[str, StoredWeight]) -> int:
    """Return how many more elements quantized weights have than the parameters that store them.

    quantized: name of a weight -> its module, whose parameters `weight_*` store codes and scales.
    """
    difference = 0
    for name, linear in quantized.items():
        difference += linear.in_features * linear.out_features
        owner = model.get_submodule(name.rpartition(".")[0])
        for parameter_name, value in owner.named_parameters(recurse=False):
            difference -= value.numel() if parameter_name.startswith("weight_") else 0
    return difference


def _list_weight_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of a module's own parameters, by name, that this rank computes with."""
    shapes = {}
    is_quantized = isinstance(module, QuantizedLinear)
    if is_quantized:  # it computes with the dequantized weight: this rank's rows and columns
        shapes["weight"] = [last - first for first, last in (module.rows, module.columns)]
    for name, value in module.named_parameters(recurse=False):
        if not (is_quantized and name.startswith("weight_")):
            shapes[name] = _compute_local_shape(value)
    return shapes


def _compute_local_shape(value: torch.Tensor) -> list[int]:
    shape = list(value.shape)
    # Mesh dimensions of FSDP do not divide it: it is gathered before it is used.
    if isinstance(value, DTensor):
        names = value.device_mesh.mesh_dim_names or ()
        for name, size, placement in zip(
            names, value.device_mesh.shape, value.placements, strict=True
        ):
            if name == "tensor" and placement.is_shard():
                shape[placement.dim] //= size
    return shape
