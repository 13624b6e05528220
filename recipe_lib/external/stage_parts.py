"""Where a class of another library is cut into the stages of a pipeline, and the proof that it can be.

It is cut at its list of layers (`recipe_lib.external.run_stages`). That hidden states are all that one layer has from
those before it is proven on a small model of the class: cut at every layer, it has to come to the same numbers, bit for
bit.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.errors import ConfigError
from recipe_lib.external.find_modules import embedding_and_head, other_parts
from recipe_lib.external.run_stages import only, refusal, run_alone
from recipe_lib.external.tensor_plan.transformers_models import randomize
from recipe_lib.external.token_reader import logits_of
from recipe_lib.external.transformers_config import TRANSFORMERS, one_line, transformers_config
from recipe_lib.models.language_model import layer_names
from recipe_lib.models.meta_init import allocate, build_meta
from recipe_lib.models.spec import StageParts

if TYPE_CHECKING:
    from recipe_lib.external.module_spec import ModuleSpec

_SMALL = 2**20  # elements of a model that needs no smaller one
_TOKENS = (2, 12)  # rows and length of what a small model reads


@lru_cache(maxsize=8)
def find_parts(spec: "ModuleSpec") -> StageParts:
    """See `ExternalSpec.stage_parts`. Proves what it finds."""
    small, elements = spec, sum(map(_elements, spec.layout().shapes.values()))
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):  # a simulation's: this is none of it
        try:
            if elements > _SMALL and spec.source.implementation == TRANSFORMERS:
                small = spec.shrunk(layers=spec.num_layers)
            model: Any = build_meta(small, torch.float32)
            allocate(model, torch.device("cpu"))
            randomize(model)
            parts = _found(model.eval())
            _prove(model, parts)
        except ConfigError:
            raise
        except Exception as error:  # of the class' own code
            line = f"{type(error).__name__}: {one_line(error)}"
            raise refusal(spec.family, f"a small model of it does not run in stages ({line})") from error
    return parts if small is spec else _of(spec, parts)


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _of(spec: "ModuleSpec", parts: StageParts) -> StageParts:
    """The parts of the large model, which are those of the small one; its width."""
    layout = spec.layout()
    prefix = parts.layers[0].removesuffix("0")
    layers = [name for name in layout.modules if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()]
    held = tuple(f"{name}." for name in (*parts.first, *layers, *parts.last))
    other = [name for name in layout.shapes if name not in layout.buffers and not name.startswith(held)]
    if other or not 0 < len(layers) <= len(parts.layers) or missing(layout.modules, (*parts.first, *parts.last)):
        raise refusal(spec.family, f"its small model has other modules ({(other or layers or ['no layers'])[0]})")
    width = _width(spec)
    if width is None or _width(spec.shrunk()) != parts.width:
        raise refusal(spec.family, "its config does not say how wide its hidden states are (hidden_size)")
    return replace(parts, layers=tuple(layers), width=width)


def missing(names: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """Those of the wanted names that are none of the names."""
    return set(wanted) - set(names)


def _width(spec: "ModuleSpec") -> int | None:
    return getattr(transformers_config(spec.source.config, spec.family).get_text_config(), "hidden_size", None)


def _found(model: Any) -> StageParts:
    """The parts of a model with values, by the order in which one forward calls its modules. Raises ConfigError."""
    elsewhere = tuple(other_parts(model))
    layers = [name for name in layer_names(model) if not name.startswith(tuple(f"{part}." for part in elsewhere))]
    lists = {name.rpartition(".")[0] for name in layers}
    if len(lists) != 1:
        raise refusal(model.spec.family, f"it has {len(lists)} lists of layers, not one")
    owners = _owners(model, layers, elsewhere)
    called: list[tuple[str, Any]] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: called.append((name, output)))
        for name in (*owners, *layers)
    ]
    with torch.no_grad():
        _whole(model, _tokens(model, 0))
    for hook in hooks:
        hook.remove()
    order = [name for name, _ in called]
    if [name for name in order if name in layers] != layers:
        raise refusal(model.spec.family, "its forward does not call each layer once, in the order of the list")
    begin, end = order.index(layers[0]), order.index(layers[-1])
    before, between, last = set(order[:begin]), set(order[begin:end]) - set(layers), set(order[end + 1 :])
    if between or before & last:
        raise refusal(model.spec.family, f"{min(between or before & last)} runs with layers of several stages")
    embedding, head = embedding_and_head(model) or (None, None)
    names = {id(module): name for name, module in model.named_modules()}
    if names[id(embedding)] in last or names[id(head)] in before:
        raise refusal(model.spec.family, "its embedding runs behind its layers")
    output = called[begin][1]
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor) or hidden.shape[:-1] != torch.Size(_TOKENS):
        raise refusal(model.spec.family, "a layer returns something else than hidden states [b, s, d]")
    last |= {names[id(head)]}
    first = (*(name for name in owners if name not in last), *elsewhere)
    behind = tuple(dict.fromkeys([name for name in order[end + 1 :] if name in last] + [names[id(head)]]))
    returned = len(output) if isinstance(output, tuple) else 0
    return StageParts(first, tuple(layers), behind, names[id(embedding)], hidden.shape[-1], returned)


def _owners(model: Any, layers: list[str], elsewhere: tuple[str, ...]) -> list[str]:
    """The modules outside the layers that have parameters of their own, the outermost ones."""
    inside = tuple(f"{name}." for name in (*layers, *elsewhere))
    owners: list[str] = []
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside) or f"{name}.".startswith(tuple(f"{owner}." for owner in owners)):
            continue
        own = next((f"{name}.{each}" for each, _ in module.named_parameters(recurse=False)), None)
        if own is not None and any(layer.startswith(f"{name}." if name else "") for layer in layers):
            raise refusal(model.spec.family, f"{own.lstrip('.')} is in no module that one stage could have")
        owners += [name] if own is not None else []
    return owners


def _tokens(model: Any, seed: int) -> Tensor:
    words = model.spec.vocab_size  # the first ones may be padding, of which classes warn
    return torch.randint(min(3, words - 1), words, _TOKENS, generator=torch.Generator().manual_seed(seed))


def _whole(model: Any, tokens: Tensor) -> Tensor:
    return logits_of(model.class_forward(**model.inputs_of(tokens)))


@torch.no_grad()
def _prove(model: Any, parts: StageParts) -> None:
    """Cuts a model at each of its layers, and compares what each gives with what it gave in the whole model.

    What a forward leaves in the model must not help: another one runs before, and the last layers are first.
    """
    family, tokens = model.spec.family, _tokens(model, 0)
    given: list[Tensor] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output: given.append((output[0] if isinstance(output, tuple) else output).clone())
        )
        for name in parts.layers
    ]
    whole = _whole(model, tokens)
    for hook in hooks:
        hook.remove()
    _whole(model, _tokens(model, 1))
    with only(model, parts, given[-1], tokens, None):
        if not torch.equal(_whole(model, tokens), whole):
            raise refusal(family, "what is behind its layers takes more from them than hidden states")
    for number in reversed(range(len(parts.layers))):
        received = given[number - 1] if number else None
        try:
            found = run_alone(model, parts, received, model.inputs_of(tokens), [number])
        except Exception as error:  # of the class' own code
            line = f"{type(error).__name__}: {one_line(error)}"
            raise refusal(family, f"{parts.layers[number]} does not run by itself ({line})") from error
        if not torch.equal(found, given[number]):
            reason = f"{parts.layers[number]} takes more from the layers before it than hidden states"
            raise refusal(family, reason)
