"""Cut a model of another library into pipeline stages, prove that it can be, and run a stage.

`module_spec` calls `find_parts` for the names of a class' parts. `build.ExternalModel` calls
`keep_parts`, which leaves out what other ranks have, and runs a stage (consecutive layers) by
`run_alone` and `run_only`. A stage runs the class' own forward, so that the class makes its masks
and rotary tables; modules of other stages are replaced while it runs (`run_only`).
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    build_transformers_config,
    find_embedding_and_head,
    format_one_line,
    list_other_parts,
)
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.models import StageParts, allocate, build_meta
from recipe_lib.models.language_model import hold_tied_weight, list_layer_names, replace_entries


def make_refusal(family: str, reason: str) -> ConfigError:
    """Make the error for a model that cannot be cut into stages.

    family: its model_type. reason: stands in the middle of the message.
    """
    return ConfigError(
        f"parallel.pipeline: {family} cannot be cut into stages: {reason}; set parallel.pipeline=1"
    )


class _EndOfStage(Exception):  # noqa: N818  (no error)
    """Ends a forward after a stage's last layer, with its hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden  # [b, s, d]


class _SkippedModule(nn.Module):
    """Stands for a module of another stage: always returns `output`, and has its attributes.

    A forward may read them, such as the type of a weight. Tensors among them are on meta, without
    values.
    """

    def __init__(self, held: nn.Module, output: Any = None) -> None:
        super().__init__()
        self.held = [held]  # in a list, so that it is no child of this module
        self.output = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["held"][0], name)
            if not isinstance(value, Tensor):
                return value
            # A tensor-parallel plan runs by a function mode that counts calls, but not this one.
            with torch._C.DisableTorchFunction():
                return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class _LastLayer(_SkippedModule):
    """Stands for a stage's last layer: runs it, and ends the forward by `_EndOfStage`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _EndOfStage(_get_hidden_states(self.held[0](*args, **kwargs)))


def _get_hidden_states(output: Any) -> Any:
    """Return the hidden states `[b, s, d]` that a layer returns, alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def run_alone(
    model: Any,
    parts: StageParts,
    hidden: Tensor | None,
    inputs: dict[str, Any],
    layers: Iterable[int],
) -> Tensor:
    """Run the layers of these indices; return the hidden states after them, `[b, s, d]`.

    hidden: the hidden states before the first of them, `[b, s, d]`; None: the first stage, which
    embeds tokens. inputs: the arguments of the class' forward, `input_ids` `[b, s]` among them.
    layers: indices in order.
    """
    with run_only(
        model, parts=parts, hidden=hidden, tokens=inputs["input_ids"], layers=list(layers)
    ):
        try:
            model.class_forward(**inputs)
        except _EndOfStage as reached:
            return reached.hidden
    raise RuntimeError(
        f"{model.spec.family}: its forward has not come to the last layer of a stage"
    )


def run_only(
    model: Any, parts: StageParts, hidden: Tensor | None, tokens: Tensor, layers: list[int] | None
) -> AbstractContextManager[None]:
    """Return a context in which the class' forward runs these layers alone.

    Modules with weights before the layers return zeros then, layers that do not run the hidden
    states that were received, and the last one ends the forward by `_EndOfStage`.

    hidden: the hidden states before the first layer, `[b, s, d]`; None: the first stage. tokens:
    `[b, s]`. layers: indices, in order; None: no layer, but what follows all layers, as on the last
    stage.
    """
    swaps: dict[str, nn.Module] = {}
    running_layers = [] if layers is None else layers
    for index, name in enumerate(parts.layers):
        if index not in running_layers:
            output = (hidden, *[None] * (parts.returned - 1)) if parts.returned else hidden
            swaps[name] = _SkippedModule(_get_full_module(model, name), output)
    if hidden is not None:
        zero = hidden.new_zeros(())
        for name in parts.first:
            blank = zero.expand(model.compute_output_shape(name, tokens.shape, hidden.shape[-1]))
            swaps[name] = _SkippedModule(_get_full_module(model, name), blank)
    if running_layers:
        last = parts.layers[running_layers[-1]]
        swaps[last] = _LastLayer(model.get_submodule(last))
    return replace_entries((*_find_owner(model, name), module) for name, module in swaps.items())


def _get_full_module(model: Any, name: str) -> nn.Module:
    """Return the class' own module of this name, also where `keep_parts` has replaced it."""
    return cast(nn.Module, model.elsewhere.get(name) or model.get_submodule(name))


def _find_owner(model: Any, name: str) -> tuple[dict[str, Any], str]:
    """Return the `_modules` dict that has the module of this name, and its key there."""
    owner, _, child = name.rpartition(".")
    return model.get_submodule(owner)._modules, child


def keep_parts(
    model: Any, parts: StageParts, layers: Iterable[int], *, first: bool, last: bool
) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """Replace the modules that only other stages have by empty ones, in place.

    layers: indices of the layers that this rank keeps. first, last: it has the first or the last
    stage. The weight of a tied embedding stays on the last stage, for the output projection.
    Returns the modules that were replaced, by name, and the names of all modules that are left out
    with them. Raises ConfigError for a tied embedding that cannot be twice on one rank.
    """
    tied = model.spec.tied
    kept_layers = set(layers)
    embedding = model.get_submodule(parts.embedding)
    if tied and first and last and type(embedding) is not nn.Embedding:
        raise make_refusal(
            model.spec.family,
            f"its tied embedding is a {type(embedding).__name__}, and this schedule has it twice on"
            " the first rank",
        )
    all_modules = {name for name, _ in model.named_modules() if name}
    absent = [name for index, name in enumerate(parts.layers) if index not in kept_layers]
    absent += [*(() if first else parts.first), *(() if last else parts.last)]
    placeholders = {name: nn.Module() for name in absent}
    if tied and last and not first:
        placeholders[parts.embedding] = hold_tied_weight(embedding)
    elsewhere = {}
    for name, module in placeholders.items():
        modules, child = _find_owner(model, name)
        elsewhere[name] = modules[child]
        modules[child] = module
    empty = {name for name in absent if next(model.get_submodule(name).parameters(), None) is None}
    kept_modules = {name for name, _ in model.named_modules()} - empty
    return elsewhere, frozenset(all_modules - kept_modules)


if TYPE_CHECKING:
    from recipe_lib.external.module_spec import ModuleSpec  # which imports this module

_TOKENS_SHAPE = (2, 12)  # [b, s] of a small model's token ids


@lru_cache(maxsize=8)
def find_parts(spec: "ModuleSpec") -> StageParts:
    """Find which modules the stages of a pipeline may have, and prove it on a small model.

    The small model, cut at every layer, must compute the same as in one piece, bit for bit: then a
    layer needs nothing but hidden states of those before it. Raises ConfigError for a class where
    that fails.
    """
    small = spec
    num_elements = sum(map(prod, spec.layout().shapes.values()))
    # The planner simulates a run under dispatch modes, which must not see these forwards.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        try:
            if num_elements > SMALL_MODEL and spec.source.implementation == TRANSFORMERS:
                small = spec.build_shrunk(min_layers=spec.num_layers)
            model: Any = build_meta(small, torch.float32)
            allocate(model, torch.device("cpu"))
            randomize(model)
            parts = _find_small_parts(model.eval())
            _prove(model, parts)
        except ConfigError:
            raise
        except Exception as error:  # the class' own code may raise anything
            raise make_refusal(
                spec.family,
                "a small model of it does not run in stages"
                f" ({type(error).__name__}: {format_one_line(error)})",
            ) from error
    return parts if small is spec else _resize_parts(spec, parts)


def _resize_parts(spec: "ModuleSpec", parts: StageParts) -> StageParts:
    """Return the parts of the large model, from those of its small model.

    Raises ConfigError where the large one has modules that the small one lacks, or its config does
    not name the width of hidden states.
    """
    layout = spec.layout()
    prefix = parts.layers[0].removesuffix("0")  # such as `model.layers.`
    layers = [
        name
        for name in layout.modules
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    ]
    in_parts = tuple(f"{name}." for name in (*parts.first, *layers, *parts.last))
    in_no_part = [
        name
        for name in layout.shapes
        if name not in layout.buffers and not name.startswith(in_parts)
    ]
    if (
        in_no_part
        or not 0 < len(layers) <= len(parts.layers)
        or {*parts.first, *parts.last} - set(layout.modules)
    ):
        raise make_refusal(
            spec.family,
            f"its small model has other modules ({(in_no_part or layers or ['no layers'])[0]})",
        )
    width = _read_hidden_size(spec)
    if width is None or _read_hidden_size(spec.build_shrunk()) != parts.width:
        raise make_refusal(
            spec.family, "its config does not say how wide its hidden states are (hidden_size)"
        )
    return replace(parts, layers=tuple(layers), width=width)


def _read_hidden_size(spec: "ModuleSpec") -> int | None:
    """Return the width of hidden states from the text model's config; None if it has none."""
    return getattr(
        build_transformers_config(spec.source.config, spec.family).get_text_config(),
        "hidden_size",
        None,
    )


def _find_small_parts(model: Any) -> StageParts:
    """Find the parts of a small model by the order in which one forward calls its modules.

    model: on the CPU, with values. Raises ConfigError where modules before, in and after the list
    of layers do not run in that order.
    """
    not_text_parts = tuple(list_other_parts(model))
    layers = [
        name
        for name in list_layer_names(model)
        if not name.startswith(tuple(f"{part}." for part in not_text_parts))
    ]
    lists = {name.rpartition(".")[0] for name in layers}  # names of the module lists
    if len(lists) != 1:
        raise make_refusal(model.spec.family, f"it has {len(lists)} lists of layers, not one")
    owners = _list_owners(model, layers, not_text_parts)
    with torch.no_grad():
        _, outputs = _run_whole(model, make_random_tokens(model, 0), (*owners, *layers))
    order = [name for name, _ in outputs]
    if [name for name in order if name in layers] != layers:
        raise make_refusal(
            model.spec.family, "its forward does not call each layer once, in the order of the list"
        )
    begin = order.index(layers[0])
    end = order.index(layers[-1])
    names_before = set(order[:begin])
    between = set(order[begin:end]) - set(layers)
    names_behind = set(order[end + 1 :])
    if between or names_before & names_behind:
        raise make_refusal(
            model.spec.family,
            f"{min(between or names_before & names_behind)} runs with layers of several stages",
        )
    embedding, head = find_embedding_and_head(model) or (None, None)
    names = {id(module): name for name, module in model.named_modules()}
    if names[id(embedding)] in names_behind or names[id(head)] in names_before:
        raise make_refusal(model.spec.family, "its embedding runs behind its layers")
    output = outputs[begin][1]
    hidden = _get_hidden_states(output)
    if not isinstance(hidden, Tensor) or hidden.shape[:-1] != torch.Size(_TOKENS_SHAPE):
        raise make_refusal(
            model.spec.family, "a layer returns something else than hidden states [b, s, d]"
        )
    # The head is one of them, also where the forward does not call it as a module.
    last_parts = dict.fromkeys([*order[end + 1 :], names[id(head)]])
    return StageParts(
        first=(*(name for name in owners if name not in last_parts), *not_text_parts),
        layers=tuple(layers),
        last=tuple(last_parts),
        embedding=names[id(embedding)],
        width=hidden.shape[-1],
        returned=len(output) if isinstance(output, tuple) else 0,
    )


def _list_owners(model: Any, layers: list[str], not_text_parts: tuple[str, ...]) -> list[str]:
    """List the outermost modules with parameters of their own, outside layers and `not_text_parts`.

    layers: names. Raises ConfigError for a parameter of a module that contains layers: no stage
    could have it.
    """
    prefixes = tuple(f"{name}." for name in (*layers, *not_text_parts))
    owners: list[str] = []
    for name, module in model.named_modules():
        own_parameter = next((key for key, _ in module.named_parameters(recurse=False)), None)
        is_inside = f"{name}.".startswith((*prefixes, *(f"{owner}." for owner in owners)))
        if is_inside or own_parameter is None:
            continue
        if any(layer.startswith(f"{name}." if name else "") for layer in layers):
            path = f"{name}.{own_parameter}".lstrip(".")
            raise make_refusal(
                model.spec.family, f"{path} is in no module that one stage could have"
            )
        owners.append(name)
    return owners


def make_random_tokens(model: Any, seed: int) -> Tensor:
    """Make token ids `[b, s]` for a small model."""
    vocab_size = model.spec.vocab_size
    # Not the first three ids: one may be padding, of which classes warn.
    return torch.randint(
        min(3, vocab_size - 1),
        vocab_size,
        _TOKENS_SHAPE,
        generator=torch.Generator().manual_seed(seed),
    )


def _run_whole(
    model: Any, tokens: Tensor, names: Iterable[str] = ()
) -> tuple[Tensor, list[tuple[str, Any]]]:
    """Run the class' forward; return logits `[b, s, v]` and (name, output) of the named modules.

    The outputs are copies, in the order of the calls.
    """
    outputs: list[tuple[str, Any]] = []
    with ExitStack() as hooks:
        for name in names:

            def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                outputs.append((name, pytree.tree_map_only(Tensor, torch.clone, output)))

            hooks.callback(model.get_submodule(name).register_forward_hook(note).remove)
        return get_logits(model.class_forward(**model.build_inputs(tokens))), outputs


@torch.no_grad()
def _prove(model: Any, parts: StageParts) -> None:
    """Run each layer of a small model by itself, and what follows them; compare with one forward.

    Raises ConfigError where a layer's hidden states, or the logits, are not the same bit for bit.
    """
    family = model.spec.family
    tokens = make_random_tokens(model, 0)
    logits, outputs = _run_whole(model, tokens, parts.layers)
    hidden_states = [_get_hidden_states(output) for _, output in outputs]
    # Another forward runs in between, and layers run from the last to the first: what a forward
    # leaves in the model must not make up for what a stage does not get.
    _run_whole(model, make_random_tokens(model, 1))
    with run_only(model, parts=parts, hidden=hidden_states[-1], tokens=tokens, layers=None):
        if not torch.equal(_run_whole(model, tokens)[0], logits):
            raise make_refusal(
                family, "what is behind its layers takes more from them than hidden states"
            )
    for index in reversed(range(len(parts.layers))):
        received = hidden_states[index - 1] if index else None
        try:
            hidden = run_alone(
                model,
                parts=parts,
                hidden=received,
                inputs=model.build_inputs(tokens),
                layers=[index],
            )
        except Exception as error:  # the class' own code may raise anything
            raise make_refusal(
                family,
                f"{parts.layers[index]} does not run by itself"
                f" ({type(error).__name__}: {format_one_line(error)})",
            ) from error
        if not torch.equal(hidden, hidden_states[index]):
            raise make_refusal(
                family,
                f"{parts.layers[index]} takes more from the layers before it than hidden states",
            )


def get_logits(output: Any) -> Tensor:
    """Return the logits of a forward's output.

    output: the logits, an object with `.logits`, or a tuple or list that begins with them. Raises
    SetupError for anything else.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, (tuple, list)):
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise SetupError(
            f"model.implementation: forward returned {type(output).__name__}, expected logits or"
            " .logits"
        )
    return logits
