"""List what a saved state holds of model and optimizer, and put it back into an optimizer.

`resumable_state` calls all of it. Tensors are named `model/PARAMETER` and
`optimizer/STATE/PARAMETER`, e.g. `optimizer/exp_avg/model.norm.weight`; everything else is JSON. A
state has a hash of the frozen weights and the settings of the adapters, so that it is never loaded
with others. `Holders` says which ranks have which parameters. "Collective": all ranks must call.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_lib.adapters.layers import AdaptedModule
from recipe_lib.adapters.peft_names import TARGETS, get_target
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.checkpoint.rank_groups import (
    FROZEN,
    TRAINED,
    Holders,
    RankGroup,
    run_on_all_ranks,
)
from recipe_lib.errors import CheckpointError

# Function for an offloaded optimizer: given a state on the device, returns an empty tensor for it
# in the memory where it stays between steps. None: it stays on the device.
PlaceState = Callable[[torch.Tensor], torch.Tensor] | None

# First parts of the names of saved tensors.
MODEL = "model"
OPTIMIZER = "optimizer"
# Keys of parameter groups that are not saved: the parameters, which are saved by name, and how a
# step is computed, which belongs to the machine.
_IMPLEMENTATION_KEYS = {"params", "fused", "foreach", "capturable", "differentiable"}
_OUR_KEYS = {"state_bits", "master_weights"}  # of this library's optimizers alone
# End of error lines. Each of these config keys decides which states there are.
_SAME_OPTIMIZER = (
    "resume with the run's own optimizer.name, optimizer.state_bits, optimizer.master_weights and "
    "optimizer.stochastic_rounding"
)


@dataclass(frozen=True)
class DtypeAndShape:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor, also if it is sharded

    def describe(self) -> str:
        """Return type and shape for a message, as in `bfloat16 [4, 8]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@runtime_checkable
class MakesStates(Protocol):
    """An optimizer that allocates its states itself, in forms of its own (fewer bits)."""

    def make_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return every state tensor of a parameter, by its key."""


def list_model_tensors(model: nn.Module, holders: Holders) -> dict[str, torch.Tensor]:
    """Return `model/NAME` -> this rank's parameter or persistent buffer, tied ones once.

    If some parameters are frozen, only trained ones are returned. The tensors are the model's own,
    sharded as they are. Sharded models are resharded first.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards.
    state_dict = model.state_dict()
    saved_names = set(holders.list_saved_names())
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name in saved_names
    }
    # What is left in the state_dict are the persistent buffers.
    tensors |= {name: value for name, value in state_dict.items() if name not in all_names}
    return {f"{MODEL}/{name}": tensor for name, tensor in tensors.items()}


def get_parameter_name(full_name: str) -> str:
    """Return the name of the parameter or buffer that a saved tensor belongs to."""
    # `model/NAME` has one part before the name, `optimizer/STATE/NAME` two.
    return full_name.split("/", 1 if full_name.startswith(f"{MODEL}/") else 2)[-1]


def _map_parameter_names(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, str]:
    """Return parameter -> name; raise ValueError if the optimizer has other tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimized = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if any(parameter not in names for parameter in optimized):
        raise ValueError("the optimizer holds a tensor that is no parameter of the model")
    return names


def list_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return `optimizer/STATE/PARAMETER` -> the optimizer's own tensor, for every state there is.

    Before the first step there is none. Raises ValueError if a state is not sharded as its
    parameter is.
    """
    tensors: dict[str, torch.Tensor] = {}
    for parameter, name in _map_parameter_names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            # A plain tensor of a sharded parameter would be saved once for all ranks. A step
            # counter is the same on all of them.
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim():
                raise ValueError(
                    f"state {key} of {name} is not sharded as its parameter is; it cannot be saved"
                )
            tensors[f"{OPTIMIZER}/{key}/{name}"] = value.detach()
    return tensors


def gather_optimizer_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: RankGroup, holders: Holders
) -> dict[str, Any]:
    """Return the values of an optimizer that are no tensors, as JSON. Collective.

    `groups` is a list with a dict for each parameter group: `parameters` (names) and `values` (key
    -> value, such as lr). `states` is parameter -> the states that are no tensors. In a pipeline
    each rank's optimizer has the parameters of its stages; groups of the same index are one.
    """
    # Each rank lists its own; a value that JSON cannot hold raises on all ranks.
    parts = holders.gather(run_on_all_ranks(world, lambda: _list_settings(model, optimizer)), world)
    if not holders.is_divided:
        return parts[0]
    # Of a parameter that two stages have, the first one's counts.
    states = dict(chain.from_iterable(part["states"].items() for part in reversed(parts)))
    groups = []
    for groups_by_part in zip_longest(*(part["groups"] for part in parts)):
        same_groups = [group for group in groups_by_part if group is not None]
        names = set[str]().union(*(group["parameters"] for group in same_groups))
        groups.append(
            {
                "parameters": [name for name in holders.first_ranks if name in names],
                "values": same_groups[0]["values"],
            }
        )
    # In the order of the whole model, which does not depend on the number of stages.
    return {
        "groups": groups,
        "states": {name: states[name] for name in holders.first_ranks if name in states},
    }


def _list_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what `gather_optimizer_settings` returns, for this rank's parameters."""
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
        non_tensor_states = {
            key: _convert_to_json(value)
            for key, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        if non_tensor_states:
            states[name] = non_tensor_states
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
    saved_tensors: dict[str, DtypeAndShape],
    *,
    path: Path,
    holders: Holders,
    place_state: PlaceState = None,
) -> dict[str, torch.Tensor]:
    """Replace the optimizer's states by empty tensors as they were saved; return them by full name.

    The caller fills them. A full name is `optimizer/STATE/PARAMETER`.

    saved_tensors: by full name, those of other ranks' parameters too. path: the state's folder,
    named in errors. Raises CheckpointError for states of another optimizer.
    """
    parameters = {
        name: parameter for parameter, name in _map_parameter_names(model, optimizer).items()
    }
    # Parameter -> the states that its optimizer has made and the loop has not met so far.
    unsaved: dict[str, dict[str, torch.Tensor]] = {}
    groups: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        groups |= dict.fromkeys(group["params"], group)
    # States of torch's optimizers have the type of their parameters.
    is_torch_optimizer = type(optimizer).__module__.startswith("torch.")
    optimizer.state.clear()  # the former states are gone before the new ones take memory
    targets: dict[str, torch.Tensor] = {}
    for full_name, saved_tensor in saved_tensors.items():
        key, name = full_name.split("/", 2)[1:]
        parameter = parameters.get(name)
        if parameter is None and holders.kinds.get(name) == TRAINED:
            continue  # another rank of the pipeline has it
        if parameter is None or parameter not in groups:
            raise CheckpointError(
                f"{path}: holds optimizer state of {name}, which is not trained here; resume with"
                " the run's own config"
            )
        if isinstance(optimizer, MakesStates):
            if name not in unsaved:
                unsaved[name] = optimizer.make_states(parameter)
            value = _check_own_state(
                unsaved[name].pop(key, None),
                key=key,
                name=name,
                saved_tensor=saved_tensor,
                path=path,
            )
        else:
            value = _make_empty_state(parameter, group=groups[parameter], saved_tensor=saved_tensor)
        has_other_dtype = (
            is_torch_optimizer
            and bool(saved_tensor.shape)  # not a step counter
            and saved_tensor.dtype != parameter.dtype
        )
        if value is None or has_other_dtype:
            raise CheckpointError(
                f"{path}: optimizer state {key} of {name} is {saved_tensor.describe()}, its"
                f" parameter {DtypeAndShape(parameter.dtype, tuple(parameter.shape)).describe()};"
                f" {_SAME_OPTIMIZER}"
            )
        if place_state is not None:
            # Now, since all states together would not fit on the device.
            value = place_state(value)
        optimizer.state[parameter][key] = value
        targets[full_name] = value
    for name, states in unsaved.items():
        for key in states:
            raise _make_other_optimizer_error(f"holds no optimizer state {key} of {name}", path)
    return targets


def _check_own_state(
    value: torch.Tensor | None,
    *,
    key: str,
    name: str,
    saved_tensor: DtypeAndShape,
    path: Path,
) -> torch.Tensor:
    """Return the state that an optimizer has made; raise CheckpointError if it is not as saved.

    value: None: it has made none. key: of the saved state. name: of its parameter.
    """
    if value is None:
        raise _make_other_optimizer_error(
            f"holds optimizer state {key} of {name}, which this run's optimizer does not keep",
            path,
        )
    made_tensor = DtypeAndShape(value.dtype, tuple(value.shape))
    if made_tensor != saved_tensor:
        fault = (
            f"optimizer state {key} of {name} is {saved_tensor.describe()}, this run's is"
            f" {made_tensor.describe()}"
        )
        bits = {torch.bfloat16: 16, torch.float32: 32}.get(saved_tensor.dtype)
        if made_tensor.shape == saved_tensor.shape and bits:
            # Before master weights had states in fp32, a run without state_bits had them in its
            # dtype.
            raise CheckpointError(f"{path}: {fault}; resume with optimizer.state_bits={bits}")
        raise _make_other_optimizer_error(fault, path)
    return value


def _make_other_optimizer_error(fault: str, path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: {fault}; {_SAME_OPTIMIZER}")


def _make_empty_state(
    parameter: torch.Tensor, *, group: dict[str, Any], saved_tensor: DtypeAndShape
) -> torch.Tensor | None:
    """Return zeros for a state of an optimizer of torch, sharded as its parameter.

    None if the state has another shape than its sharded parameter.
    """
    if saved_tensor.shape and saved_tensor.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=saved_tensor.dtype)
    if not saved_tensor.shape:
        # A step counter: torch keeps it on the host unless the kernel reads it on the device.
        on_device = bool(group.get("fused")) or bool(group.get("capturable"))
        return torch.zeros(
            (), dtype=saved_tensor.dtype, device=parameter.device if on_device else "cpu"
        )
    if not isinstance(parameter, DTensor):
        return torch.zeros(saved_tensor.shape, dtype=saved_tensor.dtype, device=parameter.device)
    return None


def restore_settings(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved_settings: dict[str, Any],
    *,
    path: Path,
    current_groups: list[dict[str, Any]],
) -> None:
    """Set the optimizer's values that are no tensors, as `gather_optimizer_settings` returned them.

    saved_settings: of the state. path: its folder, named in errors. current_groups: the `groups` of
    this run. Raises CheckpointError if groups have other parameters or keys.
    """
    current_names = [set(group["parameters"]) for group in current_groups]
    saved_names = [set(group["parameters"]) for group in saved_settings["groups"]]
    if current_names != saved_names:
        raise CheckpointError(
            f"{path}: the optimizer has {len(saved_names)} groups of other parameters than"
            f" this run's {len(current_names)}; resume with the run's own config"
        )
    # Not strict: the saved ones may have further groups, of other ranks of a pipeline.
    for group, saved_group in zip(optimizer.param_groups, saved_settings["groups"], strict=False):
        for key, value in saved_group["values"].items():
            if key not in group:
                is_ours = key in _OUR_KEYS or bool(_OUR_KEYS & group.keys())
                more_keys = (
                    ", state_bits, master_weights and stochastic_rounding" if is_ours else ""
                )
                raise CheckpointError(
                    f"{path}: was saved by another optimizer (it has {key}); resume with the run's"
                    f" own optimizer.name{more_keys}"
                )
            current = group[key]
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:  # of a tuple, as betas are, JSON has made a list
                group[key] = tuple(value) if isinstance(current, tuple) else value
    for parameter, name in _map_parameter_names(model, optimizer).items():
        if name in saved_settings["states"]:
            optimizer.state[parameter].update(saved_settings["states"][name])


_PIECE_ELEMENTS = 2**22  # elements whose bits are added up at a time
# Bytes of an element -> integer type of that size, as which its bits are added up.
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_frozen_parameters(model: nn.Module, world: RankGroup, holders: Holders) -> str | None:
    """Return a hash of the frozen parameters, the same for any sharding; None if none is frozen.

    It is made of the sum of every parameter's bits: each rank adds up its own part in place, and
    the sums alone travel. Collective.
    """
    # FSDP's hook frees gathered parameters, so that what follows sees the shards.
    model.state_dict()
    parameters = dict(model.named_parameters())
    totals = dict.fromkeys((name for name, kind in holders.kinds.items() if kind == FROZEN), 0)
    if not totals:
        return None
    # Ranks with the same parameters are a group, and its first rank is the leader of them all;
    # `holders.leaders` has it for each rank. Leader -> the parameters that its group counts.
    frozen_names: dict[int, list[str]] = {leader: [] for leader in holders.leaders}
    for name in totals:
        frozen_names[holders.first_ranks[name]].append(name)
    local_names = frozen_names[holders.leader]

    def sum_local_bits() -> list[int]:
        sums = [_sum_bits(name, parameters[name].detach(), holders) for name in local_names]
        # One copy to the host, which waits for the device once.
        return [int(bit_sum) for bit_sum in torch.stack(sums).tolist()] if sums else []

    sums_by_rank = world.gather_json(run_on_all_ranks(world, sum_local_bits))
    for leader, sums in zip(holders.leaders, sums_by_rank, strict=True):
        for name, bit_sum in zip(frozen_names[leader], sums, strict=True):
            totals[name] = (totals[name] + bit_sum) % 2**64
    local_dtypes = [(name, str(parameters[name].dtype)) for name in local_names]
    dtypes = dict(chain.from_iterable(holders.gather(local_dtypes, world)))
    text = " ".join(f"{name}:{dtypes[name]}:{total}" for name, total in totals.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _sum_bits(name: str, parameter: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Return the sum of this rank's part of a parameter as integers, int64 `[]`.

    It is 0 if another rank counts the part. Integers wrap, so the sum does not depend on the order,
    as one of floats would.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if holders.is_counted_here(name, parameter):
        for piece in local.reshape(-1).split(_PIECE_ELEMENTS):
            total += piece.view(_INTEGER_TYPES[piece.element_size()]).sum(dtype=torch.int64)
    return total


def gather_adapter_settings(
    model: nn.Module, world: RankGroup, holders: Holders
) -> dict[str, Any] | None:
    """Return the settings without which the adapters' weights mean nothing. Collective.

    They are `rank`, `scaling`, `dora`, `targets` (of lora.target_modules) and `quantize` (kind of
    the frozen weights, or `none`). None if the model has no adapters.
    """
    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, AdaptedModule)
    }
    local_settings = [
        [module.settings.rank, module.settings.scaling, module.settings.dora]
        for module in adapted.values()
    ]
    local_part: dict[str, list[Any]] = {
        "settings": local_settings[:1],  # all adapters of a model have the same
        "targets": sorted({get_target(name) or name.rpartition(".")[2] for name in adapted}),
        "kinds": sorted(
            {module.kind for module in model.modules() if isinstance(module, QuantizedLinear)}
        ),
    }
    parts = holders.gather(local_part, world)
    settings = list(chain.from_iterable(part["settings"] for part in parts))
    if not settings:
        return None
    targets = set(chain.from_iterable(part["targets"] for part in parts))
    rank, scaling, dora = settings[0]
    return {
        "rank": rank,
        "scaling": scaling,
        "dora": dora,
        # Our targets in their own order, then the names of an external model's modules.
        "targets": [name for name in TARGETS if name in targets] + sorted(targets - set(TARGETS)),
        "quantize": min(chain.from_iterable(part["kinds"] for part in parts), default="none"),
    }


def check_adapter_settings(
    path: Path, saved: dict[str, Any] | None, current: dict[str, Any] | None
) -> None:
    """Raise CheckpointError unless the state at `path` was saved with the model's own adapters.

    saved, current: see `gather_adapter_settings`; of the state, and of the model.
    """
    if (saved is None) != (current is None):
        # (in the run that saved, in this run).
        trained_parts = (
            ("all weights", "adapters") if saved is None else ("adapters", "all weights")
        )
        raise CheckpointError(
            f"{path}: is the state of a run that trained {trained_parts[0]}, this run trains"
            f" {trained_parts[1]}; resume with the run's own recipe and config"
        )
    if saved is None or current is None:
        return
    changed_keys = [key for key in current if saved[key] != current[key]]
    if changed_keys:
        raise CheckpointError(
            f"{path}: was saved with lora {_format_adapter_settings(saved, changed_keys)}, found"
            f" {_format_adapter_settings(current, changed_keys)}; resume with the run's own section"
            " lora"
        )


def _format_adapter_settings(settings: dict[str, Any], keys: list[str]) -> str:
    texts = {
        key: ", ".join(value) if isinstance(value, list) else value
        for key, value in settings.items()
    }
    return " and ".join(f"{key} {texts[key]}" for key in keys)


def check_frozen_hash(path: Path, saved: str | None, current: str | None) -> None:
    """Raise CheckpointError unless the state at `path` was saved with the same frozen weights.

    saved, current: see `hash_frozen_parameters`; of the state, and of the model.
    """
    if saved != current:
        raise CheckpointError(
            f"{path}: was saved with other frozen weights than this run has loaded; resume with the"
            " run's own model, dtype and lora.quantize_base"
        )
