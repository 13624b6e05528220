"""Which modules FSDP gathers together: the units of a model, chosen by what its modules are and how large they are.

A unit's parameters are gathered just before it runs and freed just after, so the largest unit sets how many whole
parameters are alive at once. What is in no unit is in the root: gathered at the first forward, freed at the end of
backward, its gradients whole until then. For Llama 3 8B in bf16 embedding and output projection are 0.98 GiB each,
a layer is 0.41 GiB: in the root (`layers`) they hold 1.96 GiB throughout the step, and their gradients 1.96 GiB more
during backward; as units of their own (`memory_efficient`) each is there only while it runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.suggest import did_you_mean, nearest, quote
from recipe_lib.errors import ConfigError
from recipe_lib.models.language_model import layer_names, modules_elsewhere
from recipe_lib.models.mixture import Experts

POLICIES = ("auto", "layers", "memory_efficient")


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered and freed as one.

    names: dotted module names; several only when they share a parameter. bytes: of their whole parameters, without
    those of units inside them; of what a tensor-parallel group shares, of one rank's part (see `parameter_bytes`).
    """

    names: tuple[str, ...]
    bytes: int


def resolve_wrapping(model: nn.Module, wrapping: str | Iterable[str], *, whole_layers: bool = False) -> list[Unit]:
    """The FSDP units of a model, in module order; what they leave out is in the root.

    wrapping: `layers`: each element of the model's module lists. `memory_efficient`: also each module outside them that
    owns a matrix, in a decoder the embedding and the output projection (tied ones are one unit), and the experts of a
    layer, within the layer's. `auto`: `memory_efficient` if one of those is larger than the largest layer, or experts
    than the rest of theirs, else `layers`. whole_layers: experts are in their layer's unit. A list: patterns over
    module names, matched part by part (`model.layers.*` is every layer, not what is inside); one unit may hold another.

    Raises ConfigError for an unknown policy, a pattern that matches nothing, or nothing that can be a unit.
    """
    if isinstance(wrapping, str):
        if wrapping not in POLICIES:
            raise ConfigError(
                f"parallel.fsdp_wrap_policy: found {quote(wrapping)}, expected {', '.join(POLICIES)} or a list of "
                "module-name "
                f"patterns such as [model.layers.*]{did_you_mean(wrapping, POLICIES)}"
            )
        return _units_of_policy(model, wrapping, whole_layers)
    return _make_units(model, _match_all(model, list(wrapping)))


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's whole parameters, shared ones counted once; also before they have memory.

    Of what a tensor-parallel group shares those of one rank's part, which is what FSDP gathers.
    """
    return sum(whole_elements(parameter) * parameter.element_size() for parameter in module.parameters())


def whole_elements(parameter: Tensor) -> int:
    """Elements of a whole parameter; of what a tensor-parallel group shares, of one rank's part."""
    names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
    if not isinstance(parameter, DTensor) or "tensor" not in names:
        return parameter.numel()
    dim = names.index("tensor")
    return -(-parameter.numel() // (parameter.device_mesh.size(dim) if parameter.placements[dim].is_shard() else 1))


def _units_of_policy(model: nn.Module, policy: str, whole_layers: bool) -> list[Unit]:
    layers = layer_names(model)
    if not layers:
        raise ConfigError(
            f"parallel.fsdp_wrap_policy: found {policy}, but the model has no list of layers; name its units by "
            "patterns, "
            f"such as [{_templates(model)[0]}]"
        )
    matrices = [] if policy == "layers" else _matrices_outside(model, layers)
    experts = [] if policy == "layers" or whole_layers else _experts(model, layers)
    units = _make_units(model, layers + matrices + experts)
    if policy == "auto":
        whole = _make_units(model, layers + matrices)
        largest_layer = max(unit.bytes for unit in whole if set(unit.names) & set(layers))
        if not experts and all(unit.bytes <= largest_layer for unit in whole):
            return _make_units(model, layers)
    return units


def _experts(model: nn.Module, layers: list[str]) -> list[str]:
    """The experts of layers that are most of their layer. As a unit they are gathered while attention runs, and only
    what attention needs while they run: not two layers' experts at a time."""
    found = []
    for name, module in model.named_modules():
        layer = next((each for each in layers if name.startswith(f"{each}.")), None)
        if isinstance(module, Experts) and layer is not None:
            if 2 * parameter_bytes(module) > parameter_bytes(model.get_submodule(layer)):
                found.append(name)
    return found


def _matrices_outside(model: nn.Module, layers: list[str]) -> list[str]:
    """Names of modules outside the layers that own a parameter of two dimensions or more: embedding, output.

    What is inside of one of them, such as an adapter's matrices, is gathered with it.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in layers + found))
        matrix = any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
        if name and name not in layers and not inside and matrix:
            found.append(name)
    return found


def _match_all(model: nn.Module, patterns: list[str]) -> list[str]:
    """Names of the modules that the patterns match, in module order."""
    if not patterns:
        raise ConfigError(
            "parallel.fsdp_wrap_policy: found an empty list, expected patterns such as [model.layers.*], or one of "
            + ", ".join(POLICIES)
        )
    modules = {name: module for name, module in model.named_modules() if name}
    elsewhere = modules_elsewhere(model)  # of other stages of a pipeline
    matched: set[str] = set()
    for pattern in patterns:
        names = [name for name in modules if _matches(name, str(pattern))]
        if not names and any(_matches(name, str(pattern)) for name in elsewhere):
            continue
        if not names:
            raise ConfigError(_matches_nothing(str(pattern), model))
        usable = [name for name in names if _has_parameters(modules[name]) and not _is_container(modules[name])]
        if not usable:
            listed = any(_is_container(modules[name]) for name in names)
            kind = "lists of modules, which do not run by themselves" if listed else "modules without parameters"
            raise ConfigError(
                f"parallel.fsdp_wrap_policy: pattern {quote(str(pattern))} matches only {kind}; use one of "
                + ", ".join(_templates(model))
            )
        matched.update(usable)
    return [name for name in modules if name in matched]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _matches_nothing(pattern: str, model: nn.Module) -> str:
    """The fault of a pattern without a match: the nearest names, then the largest modules there are."""
    templates = _templates(model)
    best = nearest(pattern, templates)
    existing = ([best] if best else []) + [name for name in templates if name != best]
    return (
        f"parallel.fsdp_wrap_policy: pattern {quote(pattern)} matches no module; "
        f"{'nearest' if best else 'there are'}: {', '.join(existing[:5])}"
    )


def _templates(model: nn.Module) -> list[str]:
    """Patterns that would match: names of modules that can be units, a list's elements as `*`; larger ones first."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if name and _has_parameters(module) and not _is_container(module):
            template = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            sizes[template] = max(sizes.get(template, 0), parameter_bytes(module))
    return sorted(sizes, key=lambda template: -sizes[template])


def _make_units(model: nn.Module, names: list[str]) -> list[Unit]:
    """Units in module order. Modules that share a parameter become one, since FSDP keeps a parameter in one place."""
    modules = dict(model.named_modules())
    owned = {name: _own_parameters(modules[name], name, names) for name in modules if name in set(names)}
    in_units = {id(parameter) for parameters in owned.values() for parameter in parameters}
    covered = tuple(f"{name}." for name in owned)
    for name, module in modules.items():  # a module of the root that shares a unit's parameter joins the unit
        if name and name not in owned and not name.startswith(covered):
            parameters = list(module.parameters(recurse=False))
            if any(id(parameter) in in_units for parameter in parameters):
                owned[name] = parameters
    groups: list[tuple[list[str], dict[int, Tensor]]] = []
    for name in [name for name in modules if name in owned]:
        mine = {id(parameter): parameter for parameter in owned[name]}
        group = next((group for group in groups if group[1].keys() & mine.keys()), None)
        if group is None:
            group = ([], {})
            groups.append(group)
        group[0].append(name)
        group[1].update(mine)
    return [
        Unit(tuple(members), sum(whole_elements(tensor) * tensor.element_size() for tensor in held.values()))
        for members, held in groups
    ]


def _own_parameters(module: nn.Module, name: str, unit_names: list[str]) -> list[nn.Parameter]:
    """Parameters of a unit's module that no unit inside it holds."""
    inside = tuple(f"{other}." for other in unit_names if other.startswith(f"{name}."))
    return [
        parameter
        for local, parameter in module.named_parameters(remove_duplicate=False)
        if not f"{name}.{local}".startswith(inside)
    ]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_container(module: nn.Module) -> bool:
    """True for lists and dicts of modules: they have no forward of their own to gather for."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
