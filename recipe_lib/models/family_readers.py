"""Read fields of a native model's spec that families have in ways of their own.

They stand in the rows of `FAMILIES`: `fn(fields, common)` returns the value of one field of the
spec. fields: the config.json. common: the fields that all families read alike.
"""

from collections.abc import Callable, Mapping
from typing import Any

from recipe_lib.models.config_fields import Fields, Read, read_activation, read_layer_windows
from recipe_lib.models.spec import MixtureSpec


def evaluate_shape(
    shape: Mapping[str, Any], fields: Fields, common: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a `shape`, with each reader replaced by what it reads."""
    return {
        name: value(fields, common) if callable(value) else value for name, value in shape.items()
    }


def make_flag_reader(key: str) -> Read:
    """Return a reader of a key that is true or false."""
    return lambda fields, common: fields.read_flag(key)


def make_window_reader(slides: Callable[[Fields, int], bool]) -> Read:
    """Return a reader of each layer's window, in tokens; None: a layer attends to all tokens.

    slides: `fn(fields, layer index)` returns True for a layer with a window. It decides for files
    without `layer_types`.
    """

    def read(fields: Fields, common: dict[str, Any]) -> tuple[int | None, ...]:
        layers = common["num_layers"]
        return read_layer_windows(
            fields, layers, [slides(fields, layer) for layer in range(layers)]
        )

    return read


def read_same_windows(fields: Fields, common: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer, the same for all."""
    return (fields.read_optional_integer("sliding_window"),) * common["num_layers"]


def read_mixtral_windows(fields: Fields, common: dict[str, Any]) -> tuple[int | None, ...]:
    """Return `sliding_window` for every layer; refuse the family's router noise."""
    if fields.config["router_jitter_noise"] != 0:
        raise fields.make_fault(
            "router_jitter_noise", "0 (noise on the router's input is not supported)"
        )
    return read_same_windows(fields, common)


def read_qwen_windows(fields: Fields, common: dict[str, Any]) -> tuple[int | None, ...]:
    """Return `sliding_window` for the layers from `max_window_layers` on.

    No layer has a window if `use_sliding_window` is false.
    """
    if not fields.read_flag("use_sliding_window"):
        return (None,) * common["num_layers"]
    first = fields.config["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.make_fault("max_window_layers", "an integer")
    has_window = fields.config["sliding_window"] is not None
    return make_window_reader(lambda fields, layer: has_window and layer >= first)(fields, common)


def read_sparse_layers(fields: Fields, common: dict[str, Any]) -> tuple[bool, ...]:
    """Return True for each layer of Qwen 3 with experts, False for one with an MLP.

    Every n-th layer has experts (n: `decoder_sparse_step`), but those of `mlp_only_layers`.
    """
    step = fields.read_integer("decoder_sparse_step")
    dense = fields.config["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.make_fault("mlp_only_layers", "a list of layers' numbers")
    layers = tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(common["num_layers"])
    )
    if not any(layers):
        raise fields.make_fault(
            "mlp_only_layers", "some layer with experts: without any the model is one of type qwen3"
        )
    return layers


def read_rotated_layers(fields: Fields, common: dict[str, Any]) -> tuple[bool, ...]:
    """Return True for each layer of SmolLM3 whose queries and keys rotate.

    `no_rope_layers` has a 1 for it, in spite of the name. Without the list all layers rotate but
    every `no_rope_layer_interval`-th.
    """
    count = common["num_layers"]
    marks = fields.config["no_rope_layers"]
    if marks is None:
        interval = fields.read_integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    is_complete = isinstance(marks, list) and len(marks) >= count
    if not is_complete or not all(mark in (0, 1) for mark in marks):
        raise fields.make_fault("no_rope_layers", f"a 1 or 0 for each of {count} layers")
    return tuple(map(bool, marks[:count]))


def read_smollm3_windows(fields: Fields, common: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer of SmolLM3, of which few have one."""
    has_windows = fields.read_flag("use_sliding_window") and bool(fields.config["sliding_window"])
    # transformers gives windows to the layers that do not rotate.
    slides = [has_windows and not rotates for rotates in read_rotated_layers(fields, common)]
    return read_layer_windows(fields, common["num_layers"], slides)


def refuse_cap(fields: Fields, common: dict[str, Any]) -> None:
    """Return None, the value of `attention_softcap`; raise CheckpointError if the file has one."""
    if fields.config["attn_logit_softcapping"] is not None:
        raise fields.make_fault(
            "attn_logit_softcapping", "null (the attention of Gemma 3 has no cap)"
        )


def make_mixture_reader(width: str, **more: Any) -> Read:
    """Return a reader of a family's mixture of experts.

    width: the key of an expert's inner width. more: fields of `MixtureSpec`, values or readers,
    that the family has otherwise than most.
    """

    def read(fields: Fields, common: dict[str, Any]) -> MixtureSpec:
        # Files of one family have either name, by who wrote them.
        key = "num_local_experts" if "num_local_experts" in fields.config else "num_experts"
        experts = fields.read_integer(key)
        top_k = fields.read_integer("num_experts_per_tok")
        if top_k > experts:
            raise fields.make_fault("num_experts_per_tok", f"at most {key} = {experts}")
        shape: dict[str, Any] = {
            "num_experts": experts,
            "top_k": top_k,
            "mlp_width": fields.read_integer(width),
            "layers": (True,) * common["num_layers"],
            "normalized": True,
            "router_bias": False,
            "expert_bias": False,
            "activation": read_activation(fields, "hidden_act"),
            "interleaved": False,
            "alpha": 1.0,
            "limit": float("inf"),
        }
        return MixtureSpec(**shape | evaluate_shape(more, fields, common))

    return read
