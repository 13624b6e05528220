"""A model of another library without memory for its parameters, called as ours is, and what can be
read off it.

Parameters are put on the meta device as they are registered. Buffers get their values, since what a
class computes in its constructor (rotary frequencies, slopes of alibi, causal masks) is in no
checkpoint.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.config.registry import get_registered, register
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    build_transformers_config,
    find_embedding_and_head,
    list_other_parts,
)
from recipe_lib.external.stage_parts import get_logits, keep_parts, run_alone, run_only
from recipe_lib.logs import get_logger
from recipe_lib.models import ExternalSpec, StageParts, build_meta, build_spec
from recipe_lib.models.decoder import LinearHead, LogitTransform
from recipe_lib.models.language_model import LanguageModel, replace_entries
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.head_losses import HeadLoss, OutputAdapter, run_head_loss

# An external model called as ours is: tokens and labels in, logits, log-probabilities or the summed
# loss out.
#
# A causal language model of transformers makes the logits of all tokens. Here its forward runs with
# the output projection left out: what that would have read is kept, and what is done to its result
# afterwards (a scale, a soft cap) is written down while it is done to a stand-in of one column.
# Then the projection, as a separate module that FSDP gathers, makes the loss in chunks of tokens.
# Where a forward cannot be divided like that, it makes all logits.


# What changes a tensor's type or who owns it, not its values' meaning.
_COPIES = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy clone alias view _unsafe_view slice detach expand lift_fresh reshape".split()
    )
)


@dataclass
class _Division:
    """A model as it is called: its trunk, and its output projection apart from it."""

    # The projection, and where it hangs: the module that has it, under this name.
    head: Any
    owner: nn.Module
    name: str
    # The names that its forward takes.
    accepted: frozenset[str]
    # Some layers see a window, which a mask of ours would undo.
    windows: bool
    # It cannot be divided: it makes all logits at once.
    whole: bool
    # It has run with several documents in a row.
    packs: bool = False
    # Of its weights, where the parameter that says so may be left out.
    dtype: torch.dtype | None = None


class ExternalModel(LanguageModel):
    """Mixed into the class of a model of another library, which then has our call signature
    (`Decoder.forward`).
    """

    # The forward of its class, or what tensor parallel makes of it.
    class_forward: Callable[..., Any]
    # Modules that other ranks of a pipeline have, by name.
    elsewhere: Mapping[str, nn.Module] = MappingProxyType({})
    # See `run_class_forward_by`.
    ranks: int = 1
    local_outputs: frozenset[str] = frozenset()
    _division: _Division

    @classmethod
    def adopt(
        cls, model: Any, spec: ExternalSpec, config: dict[str, Any], buffers: dict[str, Tensor]
    ) -> "ExternalModel":
        """Make a module one of these, in place. buffers: what its class computed.

        The projection gets the signature of `OutputHead.forward`.
        """
        _, head = find_embedding_and_head(model) or (None, None)
        if head is None:
            raise SetupError(f"{type(model).__name__}: found no embedding and output projection")
        head_path = next((path for path, module in model.named_modules() if module is head), None)
        if head_path is None:
            raise SetupError(f"{type(model).__name__}: its output projection is no module of it")
        path, _, name = head_path.rpartition(".")
        owner = model.get_submodule(path)
        accepted = frozenset(inspect.signature(model.forward).parameters)
        is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        class_forward = model.forward
        base = type(model)
        # No wrapper around it: its parameters keep the names that the checkpoint has. `forward` of
        # this class comes before its own.
        model.__class__ = type(base.__name__, (cls, base), {"__module__": base.__module__})
        model.spec = spec
        model.class_forward = class_forward
        model.other_parts = tuple(list_other_parts(model))
        model.computed_buffers = {**model.computed_buffers, **buffers}
        model._division = _Division(
            head, owner, name, accepted=accepted, windows=_has_windows(config), whole=not is_plain
        )
        if is_plain:
            LinearHead.adopt(head)
        else:
            _say_whole(model, "its output projection is no plain linear")
        return cast(ExternalModel, model)

    def find_stage_parts(self) -> StageParts:
        return cast(StageParts, self.spec.find_stage_parts())

    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        self._division.dtype = _get_dtype(self)  # the parameter that says so may be left out
        self.elsewhere, self.modules_elsewhere = keep_parts(
            self, self.find_stage_parts(), layers, first=first, last=last
        )

    def run_stage(
        self,
        hidden: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        attention: AttentionInfo | None,
        layers: Iterable[int],
    ) -> Tensor:
        run = partial(
            run_alone,
            self,
            self.find_stage_parts(),
            hidden,
            inputs=self.build_inputs(tokens, positions, attention),
            layers=list(layers),
        )
        # With gradients if they are wanted: without, hidden states are of another shape where ranks
        # share tokens.
        output = self._run_packed(attention, run)
        dtype = _get_dtype(self)
        if output.dtype != dtype:
            raise ConfigError(
                f"parallel.pipeline: layers of {self.spec.family} exchange hidden states of"
                f" {output.dtype} where its weights are of {dtype}, expected one type; set"
                " dtype=fp32, or parallel.pipeline=1"
            )
        return output

    def run_head(
        self,
        hidden: Tensor,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
    ) -> Tensor:
        with run_only(
            self, parts=self.find_stage_parts(), hidden=hidden, tokens=tokens, layers=None
        ):
            return ExternalModel.forward(self, tokens, labels=labels, head_loss=head_loss)

    def output_head(self) -> nn.Module | None:
        """Return the output projection; None where another rank of a pipeline has it."""
        division = self._division
        return (
            division.head if division.owner._modules.get(division.name) is division.head else None
        )

    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        parts = self.find_stage_parts()
        return self.compute_output_shape(parts.layers[0], tokens, parts.width)

    def compute_output_shape(self, name: str, tokens: torch.Size, width: int) -> tuple[int, ...]:
        """Return the shape of what a module at `name`, a layer or outside of them, gives on this
        rank of tokens `[b, s]`.
        """
        shared = torch.is_grad_enabled() and name in self.local_outputs
        return tokens[0], tokens[1] // (self.ranks if shared else 1), width

    def build_inputs(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
    ) -> dict[str, Any]:
        """Build the arguments of its class' forward.

        Rows are padded on the right, so that causality alone hides the padding. Documents are kept
        apart by a mask `[b, 1, s, s]`; in a model with windows by the positions alone, of which
        transformers makes masks that keep the windows. What does not come of it is noticed by
        `check_packing_isolation`.
        """
        accepted = self._division.accepted
        inputs = dict[str, Any](input_ids=tokens)
        if "use_cache" in accepted:
            inputs["use_cache"] = False
        is_packed = attention is not None and attention.documents is not None
        if "position_ids" in accepted and (is_packed or positions is not None):
            inputs["position_ids"] = positions
        if attention is None or attention.documents is None or self._division.windows:
            return inputs
        if "attention_mask" in accepted:
            documents = attention.documents
            dtype = _get_dtype(self)
            order = torch.arange(tokens.shape[1], device=tokens.device)
            seen = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order)
            mask = torch.zeros(seen.shape, dtype=dtype, device=tokens.device)
            inputs["attention_mask"] = mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
        return inputs

    def _run_packed(self, attention: AttentionInfo | None, run: Callable[[], Tensor]) -> Tensor:
        """Run a forward whose rows hold documents. Raises SetupError if it fails: it takes no mask
        for them.
        """
        if attention is None or attention.documents is None or self._division.packs:
            return run()
        try:
            output = run()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SetupError(
                f"data.packing: {self.spec.family} takes no mask that keeps documents of a row"
                f" apart ({' '.join(str(error).split())[:150]}); set data.packing=false"
            ) from None
        self._division.packs = True
        return output

    def run_class_forward_by(
        self, forward: Callable[..., Any], ranks: int, local_outputs: frozenset[str]
    ) -> None:
        """Replace the forward of its class, with the same inputs and outputs, by that of one of
        `ranks`.

        local_outputs: modules that give a rank's tokens alone where gradients are wanted; of layers
        and outside.
        """
        self.class_forward = forward
        self.ranks = ranks
        self.local_outputs = local_outputs

    @property
    def reads_padding(self) -> bool:
        """True if prompts of different lengths can be read together: its class takes a mask of
        padding.
        """
        return "attention_mask" in self._division.accepted

    def token_reader(self, padding: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return a function for generating, of tokens `[b, s]` that follow one another, to the
        logits `[b, v]` after them.

        Keys and values are kept in the cache that the class makes; a class that returns none reads
        everything again. padding: int64 `[b]`, how many tokens each row begins with that are none;
        None: no row. Raises SetupError for a class that takes no mask of them.
        """
        accepted = self._division.accepted
        if padding is not None and "attention_mask" not in accepted:
            raise SetupError(
                f"{self.spec.family}: its forward takes no attention_mask; read one prompt at a"
                " time"
            )
        cache = None
        seen = None

        def read(unread: Tensor) -> Tensor:
            nonlocal cache, seen
            seen = unread if seen is None else torch.cat([seen, unread], dim=1)
            inputs: dict[str, Any] = {"input_ids": seen if cache is None else unread}
            if padding is not None:
                places = torch.arange(seen.shape[1], device=seen.device)
                inputs["attention_mask"] = (places >= padding[:, None]).long()
                if "position_ids" in accepted:  # they count from a row's first real token
                    places = places[-inputs["input_ids"].shape[1] :] - padding[:, None]
                    inputs["position_ids"] = places.clamp(0, self.spec.max_positions - 1)
            if {"use_cache", "past_key_values"} <= accepted:
                inputs |= {"use_cache": True, "past_key_values": cache}
            elif "use_cache" in accepted:
                inputs["use_cache"] = False
            if "logits_to_keep" in accepted:
                inputs["logits_to_keep"] = 1
            output = self.class_forward(**inputs)
            cache = getattr(output, "past_key_values", None)
            return get_logits(output)[:, -1]

        return read

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
        *,
        labels: Tensor | None = None,
        head_loss: HeadLoss | None = None,
        cache: Any = None,
    ) -> Tensor:
        """See `Decoder.forward`; a cache is refused."""
        division = self._division
        if cache is not None:
            raise SetupError(
                f"{self.spec.family}: found a cache, expected none: only our own families generate"
                " with one"
            )
        inputs = self.build_inputs(tokens, positions, attention)
        if attention is not None and attention.documents is not None and not division.packs:
            with torch.no_grad():
                self._run_packed(attention, partial(self.class_forward, **inputs))
        if labels is None:
            return get_logits(self.class_forward(**inputs))
        if not division.whole:
            hidden, after = run_trunk(self, division, inputs)
            if hidden is not None:
                return division.head(hidden, labels=labels, head_loss=head_loss, after=after)
            division.whole = True
            _say_whole(
                self, "what follows its output projection is not done to each logit by itself"
            )
        logits = get_logits(self.class_forward(**inputs))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # To the chunked head all logits are hidden states, of which the projection is done.
        return run_head_loss(
            head_loss,
            hidden=wide,
            weight=wide,
            labels=labels,
            adapter=OutputAdapter(lambda rows, frozen=None: rows.clone(), (), lambda rows: rows),
        )


def _has_windows(config: dict[str, Any]) -> bool:
    """Return True if a config speaks of layers that do not see everything before them."""
    return any(
        "slid" in key or "window" in key or "chunk" in key for key, value in config.items() if value
    ) or any(kind != "full_attention" for kind in config.get("layer_types") or [])


def _get_dtype(model: ExternalModel) -> torch.dtype:
    return model._division.dtype or next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )


def _say_whole(model: nn.Module, reason: str) -> None:
    get_logger().info("loss: %s makes all logits at once: %s", type(model).__name__, reason)


def run_trunk(
    model: Any, division: _Division, inputs: dict[str, Any]
) -> tuple[Tensor | None, LogitTransform]:
    """Run the forward without its projection: return what that would read `[b, s, d]`, and what
    would be done to the logits.

    None in place of the tensor where the forward cannot be divided.
    """
    steps = _Steps()
    with ExitStack() as stack:
        stand_in = _StandIn(division.head, steps, stack)
        stack.enter_context(replace_entries([(division.owner._modules, division.name, stand_in)]))
        output = model.class_forward(**inputs)
    after = steps.find_transform(get_logits(output)) if stand_in.calls == 1 else None
    return (None, LogitTransform()) if after is None else (stand_in.hidden, after)


class _StandIn(nn.Module):
    """In place of the output projection: keeps what it reads, and returns one column to be
    followed.
    """

    def __init__(self, head: Any, steps: "_Steps", stack: ExitStack) -> None:
        """stack: closed behind the forward; `steps` is entered there when the head is called."""
        super().__init__()
        self.held = [head]  # in a list, so that it is no module of this one
        self.steps = steps
        self.stack = stack
        self.calls = 0

    @property
    def weight(self) -> Tensor:
        """The weight of the projection: some forwards read its type."""
        return self.held[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden `[..., d]` to a column `[..., 1]`."""
        self.calls += 1
        self.hidden = hidden
        column = hidden.detach().new_zeros(*hidden.shape[:-1], 1)
        if self.calls == 1:
            self.steps.last = column
            self.stack.enter_context(self.steps)
        return column


class _Steps(TorchDispatchMode):
    """Writes down what is done to one tensor, as long as it is done to each element by itself."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.divided = True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if not any(value is self.last for value in args):
            return result
        name = operator.name().partition(".")[0]
        same = isinstance(result, Tensor) and result.shape == self.last.shape
        other_tensors = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value is not self.last
        ]
        if same and name in _COPIES:
            self.last = result
        elif (
            same
            and torch.Tag.pointwise in operator.tags
            and not any(other.dim() or other.requires_grad for other in other_tensors)
        ):
            self.steps.append(
                (operator, [_HERE if value is self.last else value for value in args], kwargs)
            )
            self.last = result
        elif name not in _COPIES:
            self.divided = False
        return result

    def find_transform(self, logits: Tensor) -> LogitTransform | None:
        """Return what was written down; None if the logits are something else than what came of the
        column.
        """
        if not self.divided or logits is not self.last:
            return None
        if not self.steps:
            return LogitTransform()
        names = [operator.name().partition(".")[0] for operator, _, _ in self.steps]
        numbers = [[value for value in args if value is not _HERE] for _, args, _ in self.steps]
        cap = numbers[0][0] if len(numbers[0]) == 1 else None
        if (
            names == ["aten::div", "aten::tanh", "aten::mul"]
            and numbers[2] == [cap]
            and isinstance(cap, int | float)
        ):
            return LogitTransform(softcap=float(cap))
        return LogitTransform(finish=partial(_repeat, self.steps))


_HERE = object()  # where the tensor stood among an operator's arguments


def _repeat(steps: list[tuple[Any, list[Any], dict[str, Any]]], logits: Tensor) -> Tensor:
    """Do to logits what was done to the column."""
    if any(operator._schema.is_mutable for operator, _, _ in steps):
        logits = logits.clone()
    for operator, args, kwargs in steps:
        logits = operator(*(logits if value is _HERE else value for value in args), **kwargs)
    return logits


@dataclass(frozen=True)
class ModuleSource:
    """The sources of a model's module."""

    implementation: str  # `transformers`, or the name that a plugin registered
    config: dict[str, Any] = field(hash=False)  # what config.json holds
    attention: str = "sdpa"  # or `eager`: what transformers calls its implementation


def make_module(source: ModuleSource, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make the module as its class does, parameters on meta, with the class' own forward."""
    with put_parameters_on_meta():
        make = get_registered("model", source.implementation)
        config = dict(source.config)
        is_ours = source.implementation == TRANSFORMERS  # a plugin is asked for the module alone
        model = make(config, source.attention, dtype) if is_ours else make(config)
    if not isinstance(model, nn.Module):
        raise SetupError(
            f"model.implementation={source.implementation}: found {type(model).__name__}, expected"
            " a torch.nn.Module"
        )
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                # In place, since others may share it.
                parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def put_parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers inside the block on the meta device; buffers keep
    theirs.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            placed = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            # A class may mark its parameters.
            placed.__dict__.update(parameter.__dict__ | placed.__dict__)
            module._parameters[name] = placed

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@register("model", "native")
def build_native_module(config: dict[str, Any]) -> nn.Module:
    """Build our own decoder of a config.json, on meta."""
    return build_meta(build_spec(config, "config.json"), torch.float32)


@register("model", "transformers")
def build_transformers_module(
    config: dict[str, Any], attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the causal language model that transformers has for a config.json; attention: its word
    for an implementation.
    """
    from transformers import AutoModelForCausalLM

    model_config = build_transformers_config(config, str(config.get("model_type")))
    model_config.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(
        model_config, attn_implementation=attention, dtype=dtype
    )
    model.tie_weights()
    return cast(nn.Module, model)
