"""Runs the stages of a pipeline in a class of another library, cut at its list of layers.

Each stage runs the class' own forward from its tokens, which makes masks and rotations for itself. What has weights
before the layers gives zeros where another stage has it; layers before the stage's give the hidden states that came
from there; the forward ends behind the stage's last layer. So names stay those of the checkpoint.
`recipe_lib.external.stage_parts` proves that hidden states are all that one layer has from those before it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import StageParts


def refusal(family: str, reason: str) -> ConfigError:
    """The fault of a class that is not cut."""
    return ConfigError(f"parallel.pipeline: {family} cannot be cut into stages: {reason}; set parallel.pipeline=1")


class _EndOfStage(Exception):  # noqa: N818  (no error)
    """Ends a forward behind a stage's last layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OfOtherStage(nn.Module):
    """In place of a module of another stage, with what a forward may ask it for, and no values of its tensors."""

    def __init__(self, held: nn.Module, output: Any = None) -> None:
        super().__init__()
        self.held = [held]  # in a list, so that it is no module of this one
        self.output = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(vars(self)["held"][0], name)
            if not isinstance(found, Tensor):
                return found
            with torch._C.DisableTorchFunction():  # it is no call of the forward's
                return torch.empty(found.shape, dtype=found.dtype, device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What it was given to return."""
        return self.output


class _Last(_OfOtherStage):
    """Runs a stage's last layer, and ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `_EndOfStage`."""
        output = self.held[0](*args, **kwargs)
        raise _EndOfStage(output[0] if isinstance(output, tuple) else output)


def run_alone(
    model: Any, parts: StageParts, hidden: Tensor | None, inputs: dict[str, Any], layers: Iterable[int]
) -> Tensor:
    """Hidden states behind layers of these numbers; see `LanguageModel.run_stage`. inputs: of the class' forward."""
    with only(model, parts, hidden, inputs["input_ids"], list(layers)):
        try:
            model.class_forward(**inputs)
        except _EndOfStage as reached:
            return reached.hidden
    raise RuntimeError(f"{model.spec.family}: its forward has not come to the last layer of a stage")


@contextmanager
def only(
    model: Any, parts: StageParts, hidden: Tensor | None, tokens: Tensor, layers: list[int] | None
) -> Iterator[None]:
    """Inside, the class' forward of `tokens` `[b, s]` runs these layers alone, and ends; None: what is after them.

    hidden: what is there instead of those before, None for the first stage.
    """
    swaps: dict[str, nn.Module] = {}
    running = [] if layers is None else layers
    for number, name in enumerate(parts.layers):
        if number not in running:
            output = (hidden, *[None] * (parts.returned - 1)) if parts.returned else hidden
            swaps[name] = _OfOtherStage(_held(model, name), output)
    if hidden is not None:
        zero = hidden.new_zeros(())
        for name in parts.first:
            blank = zero.expand(model.output_shape(name, tokens.shape, hidden.shape[-1]))
            swaps[name] = _OfOtherStage(_held(model, name), blank)
    if running:
        last = parts.layers[running[-1]]
        swaps[last] = _Last(model.get_submodule(last))
    before = {name: _swap(model, name, module) for name, module in swaps.items()}
    try:
        yield
    finally:
        for name, module in before.items():
            _swap(model, name, module)


def _held(model: Any, name: str) -> nn.Module:
    """A module, also one that another rank has."""
    found: nn.Module = model.elsewhere.get(name) or model.get_submodule(name)
    return found


def _swap(model: Any, name: str, module: nn.Module) -> nn.Module:
    owner, _, child = name.rpartition(".")
    held: dict[str, Any] = model.get_submodule(owner)._modules
    before, held[child] = held[child], module
    return before


def keep_parts(
    model: Any, parts: StageParts, layers: Iterable[int], *, first: bool, last: bool
) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """See `LanguageModel.keep_stages`. In the place of what is left out is a module without parameters.

    Returns what is left out, by name, and the names of all modules in it.
    """
    tied, kept = model.spec.tied, set(layers)
    embedding = model.get_submodule(parts.embedding)
    if tied and first and last and type(embedding) is not nn.Embedding:
        raise refusal(
            model.spec.family,
            f"its tied embedding is a {type(embedding).__name__}, and this schedule has it twice on the first rank",
        )
    whole = {name for name, _ in model.named_modules() if name}
    absent = [name for number, name in enumerate(parts.layers) if number not in kept]
    absent += [*(parts.first if not first else ()), *(parts.last if not last else ())]
    placeholders = {name: nn.Module() for name in absent}
    if tied and last and not first:
        placeholders[parts.embedding] = _holder(embedding)
    elsewhere = {name: _swap(model, name, module) for name, module in placeholders.items()}
    here = {name for name, _ in model.named_modules()} - {name for name in absent if not _has_weights(model, name)}
    return elsewhere, frozenset(whole - here)


def _has_weights(model: Any, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _holder(embedding: Any) -> nn.Embedding:
    """What holds the head's matrix under the embedding's name on a rank that embeds nothing."""
    holder = nn.Embedding(*embedding.weight.shape, device="meta")
    holder.weight = embedding.weight
    return holder
