"""Give a model of another library the call signature of our decoders.

`module_spec` calls `ExternalModel.adopt` on the module that `modules.make_module` makes: tokens and
labels in; logits, log-probabilities or the summed loss out.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.document_batches import (
    carries_state,
    masks_by_positions,
    run_documents_apart,
    split_at_documents,
)
from recipe_lib.external.inspection import (
    find_embedding_and_head,
    list_other_parts,
)
from recipe_lib.external.routers import note_real_tokens
from recipe_lib.external.stage_parts import get_logits, keep_parts, run_alone, run_only
from recipe_lib.logs import get_logger
from recipe_lib.models import ExternalSpec, StageParts
from recipe_lib.models.decoder import LinearHead, LogitTransform
from recipe_lib.models.language_model import LanguageModel, mix_in, replace_entries
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.ops.head_losses import HeadLoss, OutputAdapter, run_head_loss

# Divide a forward into the trunk and the output projection, to save the memory of all logits.
#
# A causal language model of transformers makes the logits of all tokens at once. Here its forward
# (the trunk) runs with a stand-in for the output projection, which keeps the hidden states that it
# gets, and returns one column of zeros in place of the logits. Operators on that column (a scale, a
# soft cap) are recorded. Then the projection computes the loss in chunks of tokens, with these
# operators on each chunk's logits. A forward that cannot be divided like that makes all logits.


# Operators of ATen that keep the values, in another type, view or memory.
_COPIES = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy clone alias view _unsafe_view slice detach expand lift_fresh reshape".split()
    )
)


@dataclass
class _Division:
    """A model's division into trunk and output projection, and how its forward is called."""

    head: Any  # the output projection
    owner: nn.Module  # the module that has the projection as a child
    name: str  # of the projection in `owner`
    accepted: frozenset[str]  # names of the forward's arguments
    windows: bool  # the class makes masks of positions: one of ours would undo sliding windows
    whole: bool  # the model cannot be divided: it makes all logits at once
    packs: bool = False  # a forward with several documents in a row has succeeded
    # Type of the weights; None: that of the first parameter. Set in a pipeline, where that
    # parameter may be on another rank.
    dtype: torch.dtype | None = None


class ExternalModel(LanguageModel):
    """A mixin that gives a model of another library the signature of our own `Decoder`.

    `LanguageModel` documents the methods without a docstring.
    """

    # The forward of its own class, or the one that `run_class_forward_by` has put in its place.
    class_forward: Callable[..., Any]
    # Name -> module as the class made it, of modules that only other pipeline ranks have.
    elsewhere: Mapping[str, nn.Module] = MappingProxyType({})
    # The number of tensor-parallel ranks.
    ranks: int = 1
    # Names of layers, and of modules outside them, whose output has this rank's tokens alone.
    local_outputs: frozenset[str] = frozenset()
    _division: _Division

    @classmethod
    def adopt(
        cls, model: Any, spec: ExternalSpec, config: dict[str, Any], buffers: dict[str, Tensor]
    ) -> "ExternalModel":
        """Make a class' module an `ExternalModel`, in place, and return it.

        config: the content of config.json. buffers: values that the class' constructor computed, by
        name. A projection that is a plain nn.Linear becomes a `LinearHead`, which computes a loss
        in chunks; with another one the model is not divided. Raises SetupError for a model without
        embedding or output projection.
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
        split_at_documents(model)
        is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        class_forward = model.forward
        # No wrapper around the module, so that parameters keep the checkpoint's names. The new
        # class has `ExternalModel.forward` before that of its own class.
        mix_in(cls, model)
        model.spec = spec
        model.class_forward = class_forward
        model.other_parts = tuple(list_other_parts(model))
        model.computed_buffers = {**model.computed_buffers, **buffers}
        model._division = _Division(
            head,
            owner,
            name,
            accepted=accepted,
            # Modules with a state take no mask of ours where they take one for padding.
            windows=(
                masks_by_positions(model) if carries_state(model) else _has_windows(model, config)
            ),
            whole=not is_plain,
        )
        if is_plain:
            LinearHead.adopt(head)
        else:
            _log_undivided(model, "its output projection is no plain linear")
        return cast(ExternalModel, model)

    def find_stage_parts(self) -> StageParts:
        return cast(StageParts, self.spec.find_stage_parts())

    def keep_stages(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        self._division.dtype = _get_dtype(self)  # before the first parameter may be left out
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
        # Not tried under no_grad first, as in `forward`: where ranks share tokens, hidden states
        # have another shape without gradients, and the next stage would receive that.
        with run_documents_apart(attention, tokens), note_real_tokens(attention):
            output = self._run_packed(attention, run)
        dtype = _get_dtype(self)
        if output.dtype != dtype:  # the next stage expects hidden states of the weights' type
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

    def get_output_head(self) -> nn.Module | None:
        """Return the output projection; None where another rank of a pipeline has it."""
        division = self._division
        return (
            division.head if division.owner._modules.get(division.name) is division.head else None
        )

    def compute_hidden_shape(self, tokens: torch.Size, ranks: int) -> tuple[int, ...]:
        # `ranks` is not read: `run_class_forward_by` has set the number of tensor-parallel ranks.
        parts = self.find_stage_parts()
        return self.compute_output_shape(parts.layers[0], tokens, parts.width)

    def compute_output_shape(self, name: str, tokens: torch.Size, width: int) -> tuple[int, ...]:
        """Return the shape `[b, s, width]` of a module's output on this rank.

        name: of a layer, or of a module outside the layers. tokens: the shape `[b, s]` of the token
        ids. Where ranks share tokens, which they do with gradients alone, s is this rank's part.
        """
        shares_tokens = torch.is_grad_enabled() and name in self.local_outputs
        return tokens[0], tokens[1] // (self.ranks if shares_tokens else 1), width

    def build_inputs(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention: AttentionInfo | None = None,
    ) -> dict[str, Any]:
        """Build the keyword arguments of the class' forward.

        tokens: `[b, s]`. positions: `[b, s]`; None: they count from 0. attention: says which tokens
        of a packed row are of one document; None: rows are not packed. Rows are padded on the
        right, so that causality alone hides the padding. Documents are kept apart by a mask
        `[b, 1, s, s]`. A model with sliding windows gets positions alone: transformers makes masks
        of them that keep the windows.
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
            # [b, query, key]: of the same document, and not later.
            seen = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order)
            mask = torch.zeros(seen.shape, dtype=dtype, device=tokens.device)
            inputs["attention_mask"] = mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
        return inputs

    def _run_packed(self, attention: AttentionInfo | None, run: Callable[[], Tensor]) -> Tensor:
        """Run a forward, and note that one with several documents in a row has succeeded.

        Raises SetupError if the first such forward fails: the class takes no mask for documents.
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
        """Replace the class' forward by the one of a tensor-parallel rank.

        forward: takes the same arguments and returns the same. ranks: number of ranks.
        local_outputs: names of layers, and of modules outside them, whose output is this rank's
        tokens alone where gradients are computed.
        """
        self.class_forward = forward
        self.ranks = ranks
        self.local_outputs = local_outputs

    @property
    def reads_padding(self) -> bool:
        """Return True if prompts of different lengths can be read in one batch.

        That takes a forward with an `attention_mask`, which hides the padding.
        """
        return "attention_mask" in self._division.accepted

    def build_token_reader(self, padding: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return a function for generation: next tokens `[b, s]` -> the logits `[b, v]` after them.

        It keeps the class' cache of keys and values between calls; a class without a cache reads
        all tokens again at each call. padding: int64 `[b]`, the number of padding tokens on each
        row's left; None: there are none. Raises SetupError for padding if the class takes no mask.
        """
        accepted = self._division.accepted
        if padding is not None and "attention_mask" not in accepted:
            raise SetupError(
                f"{self.spec.family}: its forward takes no attention_mask; read one prompt at a"
                " time"
            )
        cache = None
        all_tokens = None

        def read(next_tokens: Tensor) -> Tensor:
            nonlocal cache, all_tokens
            all_tokens = (
                next_tokens if all_tokens is None else torch.cat([all_tokens, next_tokens], dim=1)
            )
            inputs: dict[str, Any] = {"input_ids": all_tokens if cache is None else next_tokens}
            if padding is not None:
                columns = torch.arange(all_tokens.shape[1], device=all_tokens.device)
                inputs["attention_mask"] = (columns >= padding[:, None]).long()
                if "position_ids" in accepted:  # counted from the first token after the padding
                    positions = columns[-inputs["input_ids"].shape[1] :] - padding[:, None]
                    inputs["position_ids"] = positions.clamp(0, self.spec.max_positions - 1)
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
        """Compute the loss of labels, or logits `[b, s, v]` without labels.

        tokens, labels: `[b, s]`. positions, attention: as in `build_inputs`. head_loss: computes
        the loss of hidden states and the projection in chunks; None: the summed cross-entropy.
        Raises SetupError if it is called with a cache, or for the first packed rows if the class
        cannot keep their documents apart.
        """
        division = self._division
        if cache is not None:
            raise SetupError(
                f"{self.spec.family}: found a cache, expected none: only our own families generate"
                " with one"
            )
        inputs = self.build_inputs(tokens, positions, attention)
        with run_documents_apart(attention, tokens), note_real_tokens(attention):
            # The first packed rows are tried without gradients, to find a class that takes no mask.
            if attention is not None and attention.documents is not None and not division.packs:
                with torch.no_grad():
                    self._run_packed(attention, partial(self.class_forward, **inputs))
            return self._compute(inputs, labels, head_loss)

    def _compute(
        self, inputs: dict[str, Any], labels: Tensor | None, head_loss: HeadLoss | None
    ) -> Tensor:
        """Return the loss of labels, or logits `[b, s, v]` without labels, as `forward` does."""
        division = self._division
        if labels is None:
            return get_logits(self.class_forward(**inputs))
        if not division.whole:
            hidden, logit_transform = run_trunk(self, division, inputs)
            if hidden is not None:
                return division.head(
                    hidden, labels=labels, head_loss=head_loss, logit_transform=logit_transform
                )
            division.whole = True  # from now on; this forward runs a second time
            _log_undivided(
                self, "what follows its output projection is not done to each logit by itself"
            )
        logits = get_logits(self.class_forward(**inputs))
        logits_as_hidden = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The chunked loss gets the logits as hidden states, with a projection that copies them.
        return run_head_loss(
            head_loss,
            hidden=logits_as_hidden,
            weight=logits_as_hidden,
            labels=labels,
            adapter=OutputAdapter(lambda rows, frozen=None: rows.clone(), (), lambda rows: rows),
        )


def _has_windows(model: nn.Module, config: dict[str, Any]) -> bool:
    """Return True if a config.json has keys of sliding windows or chunked attention.

    Or if one of its `layer_types`, or of those of the text model inside it, is not full attention.
    """
    text_config: Any = getattr(model, "config", None)
    if hasattr(text_config, "get_text_config"):
        text_config = text_config.get_text_config()
    kinds = config.get("layer_types") or getattr(text_config, "layer_types", None) or []
    return any(
        "slid" in key or "window" in key or "chunk" in key for key, value in config.items() if value
    ) or any(kind != "full_attention" for kind in kinds)


def _get_dtype(model: ExternalModel) -> torch.dtype:
    """Return the type of the weights, of which attention masks are made."""
    return model._division.dtype or next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )


def _log_undivided(model: nn.Module, reason: str) -> None:
    get_logger().info("loss: %s makes all logits at once: %s", type(model).__name__, reason)


def run_trunk(
    model: Any, division: _Division, inputs: dict[str, Any]
) -> tuple[Tensor | None, LogitTransform]:
    """Run the forward without its projection.

    Returns the hidden states `[b, s, d]` that the projection would read, and what the forward does
    to the logits after it. None in place of hidden states where the forward cannot be divided.
    """
    steps = _Steps()
    with ExitStack() as stack:
        stand_in = _StandIn(division.head, steps, stack)
        stack.enter_context(replace_entries([(division.owner._modules, division.name, stand_in)]))
        output = model.class_forward(**inputs)
    after = steps.find_transform(get_logits(output)) if stand_in.calls == 1 else None
    return (None, LogitTransform()) if after is None else (stand_in.hidden, after)


class _StandIn(nn.Module):
    """Stands for the output projection: keeps the hidden states `[..., d]` that it gets.

    It returns one column of zeros, `[..., 1]`. From its first call on, `steps` records what is done
    to that column.
    """

    def __init__(self, head: Any, steps: "_Steps", stack: ExitStack) -> None:
        super().__init__()
        self.held = [head]  # in a list, so that it is no child of this module
        self.steps = steps
        self.stack = stack  # closed after the forward; `steps` is entered on it
        self.calls = 0  # more than one: the forward cannot be divided

    # Some forwards read the type of the projection's weight.
    @property
    def weight(self) -> Tensor:
        return self.held[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.hidden = hidden
        column = hidden.detach().new_zeros(*hidden.shape[:-1], 1)
        if self.calls == 1:
            self.steps.last = column
            self.stack.enter_context(self.steps)
        return column


class _Steps(TorchDispatchMode):
    """The mode that records the pointwise operators on one tensor, the stand-in for the logits."""

    last: Tensor  # the tensor as the last recorded operator gave it

    def __init__(self) -> None:
        super().__init__()
        # (operator, its arguments with `_HERE` for the tensor, keyword arguments)
        self.steps: list[tuple[Any, list[Any], dict[str, Any]]] = []
        # All operators so far work on each element by itself, with constants alone.
        self.divided = True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if not any(value is self.last for value in args):
            return result
        name = operator.name().partition(".")[0]
        has_same_shape = isinstance(result, Tensor) and result.shape == self.last.shape
        other_tensors = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value is not self.last
        ]
        if has_same_shape and name in _COPIES:
            self.last = result
        elif (
            has_same_shape
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
        """Return the recorded operators as a transform of logits.

        logits: what the forward returned. None if they are not the recorded tensor, or one of the
        operators does not work on each element by itself.
        """
        if not self.divided or logits is not self.last:
            return None
        if not self.steps:
            return LogitTransform()
        names = [operator.name().partition(".")[0] for operator, _, _ in self.steps]
        constants = [[value for value in args if value is not _HERE] for _, args, _ in self.steps]
        # tanh(logits / cap) * cap is a soft cap, for which losses have an argument of its own.
        cap = constants[0][0] if len(constants[0]) == 1 else None
        if (
            names == ["aten::div", "aten::tanh", "aten::mul"]
            and constants[2] == [cap]
            and isinstance(cap, int | float)
        ):
            return LogitTransform(softcap=float(cap))
        return LogitTransform(finish=partial(_repeat, self.steps))


_HERE = object()  # where the tensor stood among an operator's arguments


def _repeat(steps: list[tuple[Any, list[Any], dict[str, Any]]], logits: Tensor) -> Tensor:
    # An operator in place would write into the argument.
    if any(operator._schema.is_mutable for operator, _, _ in steps):
        logits = logits.clone()
    for operator, args, kwargs in steps:
        logits = operator(*(logits if value is _HERE else value for value in args), **kwargs)
    return logits
