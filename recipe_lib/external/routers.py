"""Record what routers of transformers' classes choose, for the load of experts and its loss.

A class of transformers names the modules that return its routers' logits, and the logits' index in
what they return (`_can_record_outputs`). Where the scores and indices of the chosen experts are,
and what the scores are made of, is read off one forward of a small copy of the model.
`models.mixture` counts and computes the loss, as for our own mixtures.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.errors import ConfigError
from recipe_lib.external.inspection import TRANSFORMERS, format_one_line, list_other_parts
from recipe_lib.external.layer_values import carry_values, make_variable, set_inside
from recipe_lib.external.stage_parts import get_logits, make_random_tokens
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.models import allocate, build_meta
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.models.mixture import ChoiceCounter, Routers
from recipe_lib.ops.attention import AttentionInfo, RealTokens
from recipe_lib.ops.mlp import group_tokens

if TYPE_CHECKING:
    from recipe_lib.external.module_spec import ModuleSpec  # which imports this module

# Of the forward that runs; None: all tokens are.
_real: ContextVar[RealTokens | None] = make_variable("real_tokens")


@dataclass(frozen=True)
class _Reading:
    """The places in the tuple that the forward of a class of routers returns, and what is there."""

    logits: int  # `[n, E]`
    scores: int  # of the chosen experts, `[n, k]`; without indices of all, `[n, E]`, others being 0
    chosen: int | None  # the indices of the chosen experts, `[n, k]`; None: it returns none
    top_k: int  # k
    kind: str  # of the probabilities of the balance loss, a key of `PROBABILITIES`


class _RecordedRouter(ChoiceCounter):
    """A router's forward that records what it returns."""

    shares_tokens = False

    def __init__(self, forward: Callable[..., Any], reading: _Reading) -> None:
        self.forward = forward  # the class' own
        self.reading = reading
        self.kind = reading.kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return outputs
        index = self.reading.scores
        real = _real.get()
        # Without gradients, so that no layer holds these tensors until it ends.
        with torch.no_grad():
            chosen = _find_chosen(self.reading, outputs)
            groups = group_tokens(chosen, outputs[self.reading.logits].shape[1])
        scores = self.record_choices(
            outputs[self.reading.logits], outputs[index], groups, real=real, own_real=real
        )
        return (*outputs[:index], scores, *outputs[index + 1 :])


def _find_chosen(reading: _Reading, outputs: Any) -> Tensor:
    """Return the indices of the experts that each token chose, `[n, k]`."""
    if reading.chosen is not None:
        chosen: Tensor = outputs[reading.chosen]
        return chosen
    return outputs[reading.scores].topk(reading.top_k, dim=1).indices  # type: ignore[no-any-return]


@contextmanager
def note_real_tokens(attention: AttentionInfo | None) -> Iterator[None]:
    """Let routers know inside the block which tokens are no padding; None: all are."""
    with set_inside(_real, None if attention is None else attention.real):
        yield


def record_routers(model: Any) -> Routers:
    """Let the routers of a model record their choices, in place: `ExternalSpec.record_routers`."""
    indices = list_routers(model)
    if not indices:
        return Routers()
    spec = model.spec
    readings, convention = _read_small_routers(spec)
    sizes = {}
    counters = {}
    for name in indices:
        router = model.get_submodule(name)
        # One with an adapter has a class of its own, derived from that of the small copy.
        reading = next((readings[kind] for kind in type(router).__mro__ if kind in readings), None)
        if reading is None:
            raise _make_refusal(spec, f"a small copy of it has no {type(router).__name__}")
        sizes[name] = _count_experts(spec, name)
        counters[name] = _RecordedRouter(router.forward, reading)
        router.forward = counters[name]
    carry_values(model, sizes)
    return Routers(sizes, counters, convention)


def _make_refusal(spec: "ModuleSpec", reason: str) -> ConfigError:
    return ConfigError(
        f"router_aux_loss_coef: {spec.architecture} has no balance loss here: {reason}; set"
        " router_aux_loss_coef=0"
    )


def find_router_weights(model: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameter `weight`, of the routers that have one."""
    weights = {
        name: model.get_submodule(name)._parameters.get("weight") for name in list_routers(model)
    }
    return {
        name: tuple(weight.shape)
        for name, weight in weights.items()
        if weight is not None and weight.dim() == 2
    }


def refuse_frozen_routers(spec: "ModuleSpec") -> None:
    """Raise ConfigError for adapters of routers that their class freezes, or detaches."""
    try:
        _read_small_routers(spec)
    except _FrozenRouterError:
        raise ConfigError(
            f"lora.target_modules: router: {spec.architecture} gives its routers no gradient;"
            " remove it from the list"
        ) from None
    except ConfigError:  # what they choose is not read, and they have gradients
        pass


class _FrozenRouterError(ConfigError):
    pass


def list_routers(model: Any) -> dict[str, int]:
    """Return name of a module in the layers -> index of the router's logits in what it returns."""
    recorders: list[Any] = []
    for module in model.modules():
        entry = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders += entry if isinstance(entry, list) else [entry]
    other_parts = tuple(f"{part}." for part in list_other_parts(model))
    layers = tuple(f"{name}." for name in list_layer_names(model))
    indices = {}
    for name, module in model.named_modules():
        if not name.startswith(layers) or name.startswith(other_parts):
            continue
        for recorder in recorders:
            kind = getattr(recorder, "target_class", recorder)
            layer_name = getattr(recorder, "layer_name", None) or ""
            if isinstance(module, kind) and layer_name in name:
                indices[name] = getattr(recorder, "index", 0)
    return indices


def _count_experts(spec: "ModuleSpec", router: str) -> int:
    """Return the number of experts beside a router, which have two parameters of 3 dimensions."""
    owner = f"{router.rpartition('.')[0]}."
    sizes = [
        shape[0]
        for name, shape in spec.layout().shapes.items()
        if name.startswith(owner) and len(shape) == 3
    ]
    # Of shared experts there are fewer.
    return max((size for size in sizes if sizes.count(size) > 1), default=0)


@lru_cache(maxsize=4)
def _read_small_routers(spec: "ModuleSpec") -> tuple[dict[type, _Reading], str]:
    """Return how each class of a model's routers is read, and `Routers.convention`.

    Raises ConfigError for routers that cannot be read, or do not learn.
    """
    small = spec
    if sum(map(prod, spec.layout().shapes.values())) > SMALL_MODEL:
        if spec.source.implementation != TRANSFORMERS:
            raise _make_refusal(spec, "there is no small copy of it, on which they are read")
        small = spec.build_shrunk()
    # The planner simulates a run under dispatch modes, which must not see these forwards.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            return _read_forward(spec, small)
        except ConfigError:
            raise
        except Exception as error:  # the class' own code may raise anything
            raise _make_refusal(
                spec, f"a small model of it does not run ({format_one_line(error)})"
            ) from error


def _read_forward(spec: "ModuleSpec", small: "ModuleSpec") -> tuple[dict[type, _Reading], str]:
    """Run a small model, and return what `_read_small_routers` does. spec: named in errors."""
    model: Any = build_meta(small, torch.float32)
    allocate(model, torch.device("cpu"))
    randomize(model)
    model.eval()
    indices = list_routers(model)
    returned: dict[str, Any] = {}

    def note(name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        returned[name] = outputs

    for name in indices:
        model.get_submodule(name).register_forward_hook(partial(note, name))
        # A bias that corrects choices is 0 at first, which hides that the class' loss ignores it.
        for buffer in model.get_submodule(name.rpartition(".")[0]).buffers():
            buffer.copy_(torch.randn(buffer.shape))
    tokens = make_random_tokens(model, 0)
    inputs = model.build_inputs(tokens)
    if "output_router_logits" in inspect.signature(model.class_forward).parameters:
        inputs["output_router_logits"] = True
    output = model.class_forward(**inputs)
    own_loss = getattr(output, "aux_loss", None)
    readings: dict[type, _Reading] = {}
    for name, index in indices.items():
        router = model.get_submodule(name)
        reading = _read_outputs(returned.get(name), index, tokens.numel(), own_loss is not None)
        if reading is None:
            raise _make_refusal(
                spec,
                f"{name} does not return the logits, scores and indices of its experts",
            )
        logits = returned[name][index]
        if logits.shape[1] != _count_experts(small, name):
            raise _make_refusal(
                spec, f"{name} chooses among {logits.shape[1]}, which are not the experts beside it"
            )
        if not _learns(router, logits, returned[name][reading.scores], get_logits(output)):
            raise _FrozenRouterError(str(_make_refusal(spec, f"its class freezes {name}")))
        readings[type(router)] = reading
    kind = next(iter(readings.values())).kind
    own = "has no such loss of its own"
    if own_loss is not None:
        together = _compute_loss_together(
            [(readings[type(model.get_submodule(name))], returned[name]) for name in indices]
        )
        is_same = torch.allclose(together, own_loss.float(), rtol=1e-4)
        own = f"{'takes all layers together' if is_same else 'has another formula'} in its own"
    return readings, f"{kind}; {spec.architecture} {own}"


def _read_outputs(outputs: Any, index: int, num_tokens: int, is_softmax: bool) -> _Reading | None:
    """Return where a router's output has what is recorded; None: it has not.

    index: of the logits. num_tokens: n. is_softmax: the class has a loss, which are all of softmax.
    """
    if not isinstance(outputs, tuple):
        return None
    # Those for each token, by index
    tensors = {
        place: value
        for place, value in enumerate(outputs)
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == num_tokens
    }
    logits = tensors.pop(index, None)
    if logits is None:
        return None
    chosen = next((place for place, value in tensors.items() if value.dtype == torch.int64), None)
    shape = logits.shape if chosen is None else tensors[chosen].shape
    scores = next(
        (
            place
            for place, value in tensors.items()
            if value.is_floating_point() and value.shape == shape
        ),
        None,
    )
    if scores is None:
        return None
    # Without indices, others' scores are 0, of as many experts for each token.
    num_chosen = (tensors[scores] != 0).sum(dim=1)
    top_k = int(num_chosen.max()) if chosen is None else shape[1]
    if chosen is None and (num_chosen != top_k).any():
        return None
    reading = _Reading(index, scores, chosen=chosen, top_k=top_k, kind="softmax")
    picked = _find_chosen(reading, outputs)
    picked_scores = tensors[scores].gather(1, picked) if chosen is None else tensors[scores]
    # Some name probabilities where others name logits.
    if logits.min() >= 0 and torch.allclose(logits.sum(dim=1), logits.new_ones(())):
        return replace(reading, kind="as the router returns them")
    # The scores of a token are in proportion to what they are made of; one alone may be divided by
    # itself, so that all tokens' are compared.
    ratios = picked_scores / logits.sigmoid().gather(1, picked)
    ratios = ratios if top_k > 1 else ratios.t()
    is_sigmoid = torch.allclose(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-4)
    return replace(reading, kind="sigmoid") if is_sigmoid and not is_softmax else reading


def _learns(router: nn.Module, logits: Tensor, scores: Tensor, output: Tensor) -> bool:
    """Return True if a router has gradients from its logits, and from the model's output."""
    parameters = [parameter for parameter in router.parameters() if parameter.requires_grad]
    if not (parameters and logits.requires_grad and scores.requires_grad):
        return False
    gradients = (
        *torch.autograd.grad(logits.sum(), parameters, retain_graph=True, allow_unused=True),
        *torch.autograd.grad(output.sum(), scores, retain_graph=True, allow_unused=True),
    )
    return any(gradient is not None for gradient in gradients[:-1]) and gradients[-1] is not None


@torch.no_grad()
def _compute_loss_together(routers: list[tuple[_Reading, Any]]) -> Tensor:
    """Return the balance loss of all layers as one, of (reading, output) of each router."""
    logits = torch.cat([outputs[reading.logits] for reading, outputs in routers]).float()
    chosen = torch.cat([_find_chosen(reading, outputs) for reading, outputs in routers])
    rows_per_token = chosen.flatten().bincount(minlength=logits.shape[1]) / logits.shape[0]
    return logits.shape[1] * (rows_per_token * logits.softmax(dim=1).mean(dim=0)).sum()
