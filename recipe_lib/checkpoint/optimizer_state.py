"""An optimizer's state by parameter name: tensors for the tensor files, everything else as JSON.

Names are `optimizer/STATE/PARAMETER`, e.g. `optimizer/exp_avg/model.norm.weight`. The tensors are
those of the optimizer itself, sharded as its parameters are, so that nothing is copied and any
world size can read them again.
"""

import hashlib
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.peft_names import TARGETS, get_target
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.rank_groups import (
    BASE_WEIGHT,
    TRAINED,
    Holders,
    RankGroup,
    find_holders,
    run_on_all_ranks,
)
from recipe_lib.errors import CheckpointError

PlaceState = (
    Callable[[torch.Tensor], torch.Tensor] | None
)  # a state's memory where it waits, without values

MODEL, OPTIMIZER = "model", "optimizer"
# How a step is computed belongs to the machine it runs on, not to the state.
_IMPLEMENTATION_KEYS = {"params", "fused", "foreach", "capturable", "differentiable"}

_OWN_KEYS = {"state_bits", "master_weights"}  # of optimizers that make their states themselves
_OWN = (  # each of them decides which states there are
    "resume with the run's own optimizer.name, optimizer.state_bits, optimizer.master_weights and "
    "optimizer.stochastic_rounding"
)


@runtime_checkable
class MakesStates(Protocol):
    """An optimizer that makes its states itself, before they are read."""

    def make_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Every state tensor of a parameter, by its key."""


def list_model_tensors(model: nn.Module, holders: Holders) -> dict[str, torch.Tensor]:
    """`model/NAME` -> this rank's parameter or buffer, tied ones once; where some are frozen, only
    the trained ones.

    Sharded models are resharded first.
    """
    everything = (
        model.state_dict()
    )  # FSDP's hook frees gathered parameters, so that what follows sees the shards
    saved = set(holders.list_saved_names())  # of a model that is only looked at everything
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    buffers = {
        name: value for name, value in everything.items() if name not in parameters.keys() | tied
    }
    kept = {name: parameter for name, parameter in parameters.items() if name in saved}
    return {f"{MODEL}/{name}": tensor for name, tensor in (kept | buffers).items()}


def get_parameter_name(full_name: str) -> str:
    """The parameter or buffer that a saved tensor belongs to."""
    return full_name.split("/", 1 if full_name.startswith(f"{MODEL}/") else 2)[-1]


def _map_parameter_names(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError("the optimizer holds a tensor that is no parameter of the model")
    return names


def list_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """`optimizer/STATE/PARAMETER` -> tensor, for every state tensor there is (none before the first
    step).
    """
    tensors: dict[str, torch.Tensor] = {}
    for parameter, name in _map_parameter_names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                if (
                    isinstance(parameter, DTensor)
                    and not isinstance(value, DTensor)
                    and value.dim()
                ):
                    raise ValueError(
                        f"state {key} of {name} is not sharded as its parameter is; it cannot be"
                        " saved"
                    )
                tensors[f"{OPTIMIZER}/{key}/{name}"] = value.detach()
    return tensors


def gather_optimizer_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: RankGroup, holders: Holders
) -> dict[str, Any]:
    """The rest as JSON: per group its parameters' names and its numbers, and states that are no
    tensors. Collective.

    In a pipeline each rank's optimizer has its own parameters; groups at the same place are one.
    """
    parts = holders.gather(run_on_all_ranks(world, lambda: _list_settings(model, optimizer)), world)
    if not holders.is_divided:
        return parts[0]
    states: dict[str, dict[str, Any]] = {}
    for part in reversed(parts):  # of a parameter that two of them have, the first one's counts
        states |= part["states"]
    groups = []
    for same in zip_longest(*(part["groups"] for part in parts)):
        found = [group for group in same if group is not None]
        held = {name for group in found for name in group["parameters"]}
        groups.append(
            {
                "parameters": [name for name in holders.first if name in held],
                "values": found[0]["values"],
            }
        )
    return {
        "groups": groups,
        "states": {name: states[name] for name in holders.first if name in states},
    }


def _list_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = _map_parameter_names(model, optimizer)
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "values": {
                key: _convert_to_json(value)
                for key, value in group.items()
                if key not in _IMPLEMENTATION_KEYS
            },
        }
        for group in optimizer.param_groups
    ]
    states: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        values = optimizer.state.get(parameter, {})
        plain = {
            key: _convert_to_json(value)
            for key, value in values.items()
            if not isinstance(value, torch.Tensor)
        }
        if plain:
            states[name] = plain
    return {"groups": groups, "states": states}


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # a learning rate may be held in a tensor
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_convert_to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"an optimizer value of type {type(value).__name__} cannot be saved as JSON")


def make_optimizer_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    where: str,
    holders: Holders,
    place_state: PlaceState = None,
) -> dict[str, torch.Tensor]:
    """Replaces the optimizer's states by empty tensors as they were saved, and returns them by
    name, to be filled.

    saved: `optimizer/STATE/PARAMETER` -> type and global shape, those of other ranks' parameters
    too. where: the state's folder, named in errors. place_state: memory for a state where it waits;
    None: next to its parameter.
    """
    parameters = {
        name: parameter for parameter, name in _map_parameter_names(model, optimizer).items()
    }
    made: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    is_torchs = type(optimizer).__module__.startswith(
        "torch."
    )  # whose states are of their parameters' type
    optimizer.state.clear()
    targets: dict[str, torch.Tensor] = {}
    for full_name, (dtype, shape) in saved.items():
        key, name = full_name.split("/", 2)[1:]
        parameter = parameters.get(name)
        if parameter is None and holders.kinds.get(name) == TRAINED:
            continue  # another rank of the pipeline has it
        if parameter is None or parameter not in groups:
            raise CheckpointError(
                f"{where}: holds optimizer state of {name}, which is not trained here; resume with"
                " the run's own config"
            )
        if isinstance(optimizer, MakesStates):
            if parameter not in made:
                made[parameter] = optimizer.make_states(parameter)
            value = _check_own_state(made[parameter].pop(key, None), full_name, dtype, shape, where)
        else:
            value = _make_empty_state(parameter, groups[parameter], dtype, shape)
        if value is None or (is_torchs and shape and dtype != parameter.dtype):
            raise CheckpointError(
                f"{where}: optimizer state {key} of {name} is {describe_tensor(dtype, shape)}, its"
                f" parameter {describe_tensor(parameter.dtype, tuple(parameter.shape))}; {_OWN}"
            )
        if place_state is not None:
            value = place_state(
                value
            )  # states that wait in host memory would not fit on the device together
        optimizer.state[parameter][key] = value
        targets[full_name] = value
    missing = next(((key, parameter) for parameter, left in made.items() for key in left), None)
    if missing is not None:
        name = next(name for name, parameter in parameters.items() if parameter is missing[1])
        raise _make_states_fault(f"holds no optimizer state {missing[0]} of {name}", where)
    return targets


def _check_own_state(
    value: torch.Tensor | None,
    full_name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    where: str,
) -> torch.Tensor:
    """The state that an optimizer has made, which must be as the saved one."""
    key, name = full_name.split("/", 2)[1:]
    if value is None:
        raise _make_states_fault(
            f"holds optimizer state {key} of {name}, which this run's optimizer does not keep",
            where,
        )
    if (value.dtype, tuple(value.shape)) != (dtype, shape):
        here = describe_tensor(value.dtype, tuple(value.shape))
        what = (
            f"optimizer state {key} of {name} is {describe_tensor(dtype, shape)}, this run's is"
            f" {here}"
        )
        if tuple(value.shape) == shape and (
            bits := {torch.bfloat16: 16, torch.float32: 32}.get(dtype)
        ):
            # Before master weights had states in fp32, a run without state_bits had them in its
            # dtype.
            raise CheckpointError(f"{where}: {what}; resume with optimizer.state_bits={bits}")
        raise _make_states_fault(what, where)
    return value


def _make_states_fault(what: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where}: {what}; {_OWN}")


def describe_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """`bfloat16 [4, 8]`."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _make_empty_state(
    parameter: torch.Tensor, group: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor | None:
    if shape and shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if (
        not shape
    ):  # a step counter: torch keeps it on the host unless the kernel reads it on the device
        on_device = bool(group.get("fused")) or bool(group.get("capturable"))
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    return None


def restore_settings(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    where: str,
    found: list[dict[str, Any]],
) -> None:
    """Sets what `optimizer_settings` gave; CheckpointError if the optimizer's groups are others.

    found: the groups that it gives now, of all ranks.
    """
    if [set(group["parameters"]) for group in found] != [
        set(group["parameters"]) for group in saved["groups"]
    ]:
        raise CheckpointError(
            f"{where}: the optimizer has {len(saved['groups'])} groups of other parameters than"
            f" this run's {len(found)}; resume with the run's own config"
        )
    for group, old in zip(
        optimizer.param_groups, saved["groups"], strict=False
    ):  # without groups of other ranks
        for key, value in old["values"].items():
            if key not in group:
                ours = key in _OWN_KEYS or _OWN_KEYS & group.keys()
                raise CheckpointError(
                    f"{where}: was saved by another optimizer (it has {key}); resume with the run's"
                    " own optimizer.name"
                    f"{', state_bits, master_weights and stochastic_rounding' if ours else ''}"
                )
            current = group[key]
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
    parameters = {
        name: parameter for parameter, name in _map_parameter_names(model, optimizer).items()
    }
    for name, values in saved["states"].items():
        if name in parameters:
            optimizer.state[parameters[name]].update(values)


# What is not in a saved state of a run that trains adapters: the frozen weights, and how the
# adapters are used.
#
# A state says which they were, so that it is never loaded with others.


_PIECE_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_frozen_parameters(
    model: nn.Module, world: RankGroup, holders: Holders | None = None
) -> str | None:
    """A hash of the sums of every frozen parameter's bits, the same for any sharding; None: none is
    frozen. Collective.

    Each rank adds up its own part in place; the sums alone travel. holders: of the model, if they
    are known.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards
    model.state_dict()
    holders = holders or find_holders(model, world)
    parameters = dict(model.named_parameters())
    frozen: dict[int, list[str]] = {
        leader: [] for leader in holders.leaders
    }  # by the group that counts them
    for name, kind in holders.kinds.items():
        if kind == BASE_WEIGHT:
            frozen[holders.first[name]].append(name)
    if not any(frozen.values()):
        return None

    def add_up() -> list[int]:
        sums = [_sum_bits(name, parameters[name].detach(), holders) for name in frozen[holders.own]]
        return [int(number) for number in torch.stack(sums).tolist()] if sums else []

    totals = dict.fromkeys((name for name, kind in holders.kinds.items() if kind == BASE_WEIGHT), 0)
    for leader, part in zip(
        holders.leaders, world.gather_json(run_on_all_ranks(world, add_up)), strict=True
    ):
        for name, number in zip(frozen[leader], part, strict=True):
            totals[name] = (totals[name] + number) % 2**64
    types: dict[str, str] = {}
    for found in holders.gather(
        {name: str(parameters[name].dtype) for name in frozen[holders.own]}, world
    ):
        types |= found
    text = " ".join(f"{name}:{types[name]}:{total}" for name, total in totals.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _sum_bits(name: str, parameter: torch.Tensor, holders: Holders) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if holders.is_counted_here(name, parameter):
        for piece in local.reshape(-1).split(_PIECE_ELEMENTS):
            total += piece.view(_BITS[piece.element_size()]).sum(dtype=torch.int64)
    return total


def gather_adapter_use(
    model: nn.Module, world: RankGroup, holders: Holders
) -> dict[str, Any] | None:
    """What of the section `lora` decides what the adapters' numbers mean; None: the model has none.
    Collective.
    """
    adapted = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, AdaptedModule)
    ]
    own: dict[str, list[Any]] = {
        "settings": [
            [module.settings.rank, module.settings.scaling, module.settings.dora]
            for _, module in adapted[:1]
        ],
        "targets": sorted({get_target(name) or name.rpartition(".")[2] for name, _ in adapted}),
        "kinds": sorted(
            {module.kind for module in model.modules() if isinstance(module, QuantizedLinear)}
        ),
    }
    parts = holders.gather(own, world)
    settings, targets, kinds = (
        [item for part in parts for item in part[key]] for key in ("settings", "targets", "kinds")
    )
    if not settings:
        return None
    rank, scaling, dora = settings[0]
    return {
        "rank": rank,
        "scaling": scaling,
        "dora": dora,
        "targets": (
            [target for target in TARGETS if target in targets]
            + sorted(set(targets) - set(TARGETS))
        ),
        "quantize": min(kinds, default="none"),
    }


def check_adapter_use(path: Path, saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """CheckpointError unless the state at `path` was saved with the adapters that the model has
    `now`.
    """
    if (saved is None) != (now is None):
        was, here = ("all weights", "adapters") if saved is None else ("adapters", "all weights")
        raise CheckpointError(
            f"{path}: is the state of a run that trained {was}, this run trains {here}; resume with"
            " the run's own recipe and config"
        )
    if saved is None or now is None:
        return
    other = [key for key in now if saved[key] != now[key]]
    if other:
        raise CheckpointError(
            f"{path}: was saved with lora {_describe(saved, other)}, found {_describe(now, other)};"
            " resume with the run's own section lora"
        )


def _describe(use: dict[str, Any], keys: list[str]) -> str:
    shown = {
        key: ", ".join(value) if isinstance(value, list) else value for key, value in use.items()
    }
    return " and ".join(f"{key} {shown[key]}" for key in keys)


def check_frozen_hash(path: Path, saved: str | None, now: str | None) -> None:
    """CheckpointError unless the frozen weights are those of the run that saved the state at
    `path`.
    """
    if saved != now:
        raise CheckpointError(
            f"{path}: was saved with other frozen weights than this run has loaded; resume with the"
            " run's own model, dtype and lora.quantize_base"
        )
