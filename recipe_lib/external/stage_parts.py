"""Cut a class of another library into the stages of a pipeline, prove that it can be, and run one.

It is cut at its list of layers. Each stage runs the class' own forward from its tokens, which makes
masks and rotations for itself. What has weights before the layers gives zeros where another stage
has it; layers before the stage's give the hidden states that came from there; the forward ends
behind the stage's last layer. So names stay those of the checkpoint. That hidden states are all
that one layer has from those before it is proven on a small model of the class: cut at every layer,
it has to come to the same numbers, bit for bit.
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
    """Make the error of a class that is not cut."""
    return ConfigError(
        f"parallel.pipeline: {family} cannot be cut into stages: {reason}; set parallel.pipeline=1"
    )


class _EndOfStage(Exception):  # noqa: N818  (no error)
    """Ends a forward behind a stage's last layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OfOtherStage(nn.Module):
    """In place of a module of another stage, with what a forward may ask it for, and no values of
    its tensors.
    """

    def __init__(self, held: nn.Module, output: Any = None) -> None:
        super().__init__()
        self.held = [held]  # in a list, so that it is no module of this one
        self.output = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["held"][0], name)
            if not isinstance(value, Tensor):
                return value
            with torch._C.DisableTorchFunction():  # it is no call of the forward's
                return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it was given to return."""
        return self.output


class _Last(_OfOtherStage):
    """Runs a stage's last layer, and ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `_EndOfStage`."""
        raise _EndOfStage(_get_hidden_states(self.held[0](*args, **kwargs)))


def _get_hidden_states(output: Any) -> Any:
    """Return the hidden states among what a layer returns."""
    return output[0] if isinstance(output, tuple) else output


def run_alone(
    model: Any,
    parts: StageParts,
    hidden: Tensor | None,
    inputs: dict[str, Any],
    layers: Iterable[int],
) -> Tensor:
    """Return the hidden states behind layers of these numbers; see `LanguageModel.run_stage`.
    inputs: of the class' forward.
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
    """Run, inside, these layers alone in the class' forward of `tokens` `[b, s]`; None: what is
    after them.

    hidden: what is there instead of those before, None for the first stage.
    """
    swaps: dict[str, nn.Module] = {}
    running = [] if layers is None else layers
    for number, name in enumerate(parts.layers):
        if number not in running:
            output = (hidden, *[None] * (parts.returned - 1)) if parts.returned else hidden
            swaps[name] = _OfOtherStage(_get_held_module(model, name), output)
    if hidden is not None:
        zero = hidden.new_zeros(())
        for name in parts.first:
            blank = zero.expand(model.compute_output_shape(name, tokens.shape, hidden.shape[-1]))
            swaps[name] = _OfOtherStage(_get_held_module(model, name), blank)
    if running:
        last = parts.layers[running[-1]]
        swaps[last] = _Last(model.get_submodule(last))
    return replace_entries((*_find_owner(model, name), module) for name, module in swaps.items())


def _get_held_module(model: Any, name: str) -> nn.Module:
    """Return a module, also one that another rank has."""
    return cast(nn.Module, model.elsewhere.get(name) or model.get_submodule(name))


def _find_owner(model: Any, name: str) -> tuple[dict[str, Any], str]:
    """Return the modules of the module that owns one, by their names there; and its own name."""
    owner, _, child = name.rpartition(".")
    return model.get_submodule(owner)._modules, child


def keep_parts(
    model: Any, parts: StageParts, layers: Iterable[int], *, first: bool, last: bool
) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """Leave out what other stages have, as `LanguageModel.keep_stages`: a module without parameters
    stands there.

    Returns what is left out, by name, and the names of all modules in it.
    """
    tied = model.spec.tied
    kept = set(layers)
    embedding = model.get_submodule(parts.embedding)
    if tied and first and last and type(embedding) is not nn.Embedding:
        raise make_refusal(
            model.spec.family,
            f"its tied embedding is a {type(embedding).__name__}, and this schedule has it twice on"
            " the first rank",
        )
    all_modules = {name for name, _ in model.named_modules() if name}
    absent = [name for number, name in enumerate(parts.layers) if number not in kept]
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
    from recipe_lib.external.module_spec import ModuleSpec

_TOKENS = (2, 12)  # rows and length of what a small model reads


@lru_cache(maxsize=8)
def find_parts(spec: "ModuleSpec") -> StageParts:
    """Find the parts of a pipeline, and prove them; see `ExternalSpec.find_stage_parts`."""
    small = spec
    elements = sum(map(prod, spec.layout().shapes.values()))
    # A simulation's modes: this is none of it.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        try:
            if elements > SMALL_MODEL and spec.source.implementation == TRANSFORMERS:
                small = spec.build_shrunk(layers=spec.num_layers)
            model: Any = build_meta(small, torch.float32)
            allocate(model, torch.device("cpu"))
            randomize(model)
            parts = _find_small_parts(model.eval())
            _prove(model, parts)
        except ConfigError:
            raise
        except Exception as error:  # of the class' own code
            raise make_refusal(
                spec.family,
                "a small model of it does not run in stages"
                f" ({type(error).__name__}: {format_one_line(error)})",
            ) from error
    return parts if small is spec else _resize_parts(spec, parts)


def _resize_parts(spec: "ModuleSpec", parts: StageParts) -> StageParts:
    """Return the parts of the large model, which are those of the small one, with its width."""
    layout = spec.layout()
    prefix = parts.layers[0].removesuffix("0")
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
    width = _read_width(spec)
    if width is None or _read_width(spec.build_shrunk()) != parts.width:
        raise make_refusal(
            spec.family, "its config does not say how wide its hidden states are (hidden_size)"
        )
    return replace(parts, layers=tuple(layers), width=width)


def _read_width(spec: "ModuleSpec") -> int | None:
    return getattr(
        build_transformers_config(spec.source.config, spec.family).get_text_config(),
        "hidden_size",
        None,
    )


def _find_small_parts(model: Any) -> StageParts:
    """Find the parts of a model with values, by the order in which one forward calls its modules.
    Raises ConfigError.
    """
    elsewhere = tuple(list_other_parts(model))
    layers = [
        name
        for name in list_layer_names(model)
        if not name.startswith(tuple(f"{part}." for part in elsewhere))
    ]
    lists = {name.rpartition(".")[0] for name in layers}
    if len(lists) != 1:
        raise make_refusal(model.spec.family, f"it has {len(lists)} lists of layers, not one")
    owners = _list_owners(model, layers, elsewhere)
    with torch.no_grad():
        _, called = _run_whole(model, _make_tokens(model, 0), (*owners, *layers))
    order = [name for name, _ in called]
    if [name for name in order if name in layers] != layers:
        raise make_refusal(
            model.spec.family, "its forward does not call each layer once, in the order of the list"
        )
    begin = order.index(layers[0])
    end = order.index(layers[-1])
    before = set(order[:begin])
    between = set(order[begin:end]) - set(layers)
    last = set(order[end + 1 :])
    if between or before & last:
        raise make_refusal(
            model.spec.family, f"{min(between or before & last)} runs with layers of several stages"
        )
    embedding, head = find_embedding_and_head(model) or (None, None)
    names = {id(module): name for name, module in model.named_modules()}
    if names[id(embedding)] in last or names[id(head)] in before:
        raise make_refusal(model.spec.family, "its embedding runs behind its layers")
    output = called[begin][1]
    hidden = _get_hidden_states(output)
    if not isinstance(hidden, Tensor) or hidden.shape[:-1] != torch.Size(_TOKENS):
        raise make_refusal(
            model.spec.family, "a layer returns something else than hidden states [b, s, d]"
        )
    behind = dict.fromkeys([*order[end + 1 :], names[id(head)]])
    return StageParts(
        first=(*(name for name in owners if name not in behind), *elsewhere),
        layers=tuple(layers),
        last=tuple(behind),
        embedding=names[id(embedding)],
        width=hidden.shape[-1],
        returned=len(output) if isinstance(output, tuple) else 0,
    )


def _list_owners(model: Any, layers: list[str], elsewhere: tuple[str, ...]) -> list[str]:
    """List the modules outside the layers that have parameters of their own, the outermost ones."""
    inside = tuple(f"{name}." for name in (*layers, *elsewhere))
    owners: list[str] = []
    for name, module in model.named_modules():
        own_parameter = next((each for each, _ in module.named_parameters(recurse=False)), None)
        is_inside = f"{name}.".startswith((*inside, *(f"{owner}." for owner in owners)))
        if is_inside or own_parameter is None:
            continue
        if any(layer.startswith(f"{name}." if name else "") for layer in layers):
            path = f"{name}.{own_parameter}".lstrip(".")
            raise make_refusal(
                model.spec.family, f"{path} is in no module that one stage could have"
            )
        owners.append(name)
    return owners


def _make_tokens(model: Any, seed: int) -> Tensor:
    words = model.spec.vocab_size  # the first ones may be padding, of which classes warn
    return torch.randint(
        min(3, words - 1), words, _TOKENS, generator=torch.Generator().manual_seed(seed)
    )


def _run_whole(
    model: Any, tokens: Tensor, names: Iterable[str] = ()
) -> tuple[Tensor, list[tuple[str, Any]]]:
    """Return the logits, and what the named modules gave, in the order of their calls."""
    called: list[tuple[str, Any]] = []
    with ExitStack() as hooks:
        for name in names:

            def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                called.append((name, pytree.tree_map_only(Tensor, torch.clone, output)))

            hooks.callback(model.get_submodule(name).register_forward_hook(note).remove)
        return get_logits(model.class_forward(**model.build_inputs(tokens))), called


@torch.no_grad()
def _prove(model: Any, parts: StageParts) -> None:
    """Cut a model at each of its layers, and compare what each gives with what it gave in the whole
    model.

    What a forward leaves in the model must not help.
    """
    family = model.spec.family
    tokens = _make_tokens(model, 0)
    logits, called = _run_whole(model, tokens, parts.layers)
    hidden_states = [_get_hidden_states(output) for _, output in called]
    # Another forward runs before, and the last layers are first: no cache of the model helps.
    _run_whole(model, _make_tokens(model, 1))
    with run_only(model, parts=parts, hidden=hidden_states[-1], tokens=tokens, layers=None):
        if not torch.equal(_run_whole(model, tokens)[0], logits):
            raise make_refusal(
                family, "what is behind its layers takes more from them than hidden states"
            )
    for number in reversed(range(len(parts.layers))):
        received = hidden_states[number - 1] if number else None
        try:
            hidden = run_alone(
                model,
                parts=parts,
                hidden=received,
                inputs=model.build_inputs(tokens),
                layers=[number],
            )
        except Exception as error:  # of the class' own code
            raise make_refusal(
                family,
                f"{parts.layers[number]} does not run by itself"
                f" ({type(error).__name__}: {format_one_line(error)})",
            ) from error
        if not torch.equal(hidden, hidden_states[number]):
            raise make_refusal(
                family,
                f"{parts.layers[number]} takes more from the layers before it than hidden states",
            )


def get_logits(output: Any) -> Tensor:
    """Return the logits of what a forward returns: a tensor, an object with `.logits`, or a tuple
    that begins with them.
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
