"""What a recipe has changed in a decoder that ranks with only parts of it would not run as one process does."""

from torch import nn

from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import MLP, Attention, Decoder, DecoderLayer, Norm, SandwichLayer, WidthNorm
from recipe_lib.models.language_model import LanguageModel
from recipe_lib.models.meta_init import extra_tensors
from recipe_lib.models.mixture import Mixture

_KNOWN = tuple(kind.forward for kind in (Attention, MLP, Mixture, DecoderLayer, SandwichLayer, Norm, WidthNorm))


def refuse_for_tensor(model: Decoder) -> None:
    """ConfigError for extra parameters, and for forwards and hooks that tensor parallel would not call, or otherwise.

    A rank has a part of the tokens, heads and channels there, and inputs of other shapes.
    """
    found = next(iter(extra_tensors(model)), None) or next(iter(_changed(model)), None)
    if found is not None:
        raise ConfigError(
            f"parallel.tensor: found {found}, which the recipe added, expected a model as it is built: ranks that "
            "share matrices have a part of the tokens each, and run forwards of their own; set parallel.tensor=1"
        )


def refuse_for_context(model: LanguageModel) -> None:
    """ConfigError for a model that is not ours, for extra parameters, and for another forward of attention.

    A rank has some of the tokens of a sequence there, and what looks at others would see none of them.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            "parallel.context: found a model whose attention is not ours, expected model.implementation=native; set "
            "that, or parallel.context=1"
        )
    own = [
        f"another forward of {name}"
        for name, module in model.named_modules()
        if isinstance(module, Attention) and type(module).forward is not Attention.forward
    ]
    found = next(iter(extra_tensors(model)), None) or next(iter(own), None)
    if found is not None:
        raise ConfigError(
            f"parallel.context: found {found}, which the recipe added, expected a model as it is built: ranks that "
            "share sequences have a part of the tokens each; set parallel.context=1"
        )


def _changed(model: Decoder) -> list[str]:
    inside: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MLP, Mixture)):
            inside |= {id(child) for child in module.modules()}
        if id(module) in inside and (module._forward_hooks or module._forward_pre_hooks):
            found.append(f"a hook of {name}")
        if isinstance(module, (Attention, MLP, Mixture, DecoderLayer, Norm)):
            own = "forward" in vars(module) or type(module).forward not in _KNOWN
            found += [f"another forward of {name}"] if own else []
    return found


def refuse_for_pipeline(model: LanguageModel, stages: list[range]) -> None:
    """ConfigError for extra parameters that no stage, or more than one, would have. The model is still whole."""
    extras = extra_tensors(model)
    if not extras:
        return
    last, parts = len(stages) - 1, model.stage_parts()
    stage_of = {f"{parts.layers[layer]}.": stage for stage, layers in enumerate(stages) for layer in layers}
    stage_of |= {f"{name}.": last for name in parts.last}
    stage_of |= {f"{name}.": 0 for name in parts.first if name != parts.embedding or not model.spec.tied}
    places: dict[int, set[int]] = {}
    for name, tensor in _named(model):
        prefix = next((start for start in stage_of if name.startswith(start)), None)
        if name in extras and prefix is None:
            raise ConfigError(
                f"parallel.pipeline: found {name}, which the recipe added outside of the layers, expected it on one "
                "stage; put it into a layer, the last norm or the head, or set parallel.pipeline=1"
            )
        if prefix is not None:
            places.setdefault(id(tensor), set()).add(stage_of[prefix])
    shared = [name for name, tensor in extras.items() if len(places[id(tensor)]) > 1]
    if shared:
        raise ConfigError(
            f"parallel.pipeline: found {shared[0]}, which the recipe added to layers of several stages, expected it on "
            "one; give each layer its own, or set parallel.pipeline=1"
        )


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = list(model.named_parameters(remove_duplicate=False))
    return [*named, *model.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
