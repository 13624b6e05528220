"""Which sizes of a tensor-parallel group can share a model, by its shape alone."""

from recipe_lib.adapters.quantized import can_cut, can_quantize
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec

# A layer's linears that are cut by rows, so that each rank has some of their outputs; and by
# columns.
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def check_tensor(spec: DecoderSpec, parallel: ParallelConfig, quantize: str = "none") -> None:
    """Refuse a model that `parallel.tensor` ranks cannot share: ConfigError, a line a number, with
    legal sizes.

    quantize: `lora.quantize_base`, whose blocks are not cut.
    """
    size = parallel.tensor
    counts = {
        "attention heads": spec.num_heads,
        "tokens of the vocabulary": spec.vocab_size,
    } | _get_widths(spec)
    copies = parallel.tensor_replicate_kv_heads and not spec.width_norms
    if not _copies_kv_heads(spec, copies, size):
        counts["key and value heads"] = spec.num_kv_heads
    legal = [
        other
        for other in range(1, spec.num_heads + 1)
        if all(
            count % other == 0
            for count in (spec.num_heads, spec.vocab_size, *_get_widths(spec).values())
        )
        and (spec.num_kv_heads % other == 0 or _copies_kv_heads(spec, copies, other))
        and not _list_uncuttable(spec, quantize, other, copies)
    ]
    sizes = f"sizes that fit: {', '.join(map(str, legal))}"
    faults = [
        f"parallel.tensor={size}: the model has {count} {what}, which {size} ranks cannot share"
        f" evenly; {sizes}"
        for what, count in counts.items()
        if count % size
    ]
    helps_to_copy = not copies and not spec.width_norms and _copies_kv_heads(spec, True, size)
    if helps_to_copy and spec.num_kv_heads % size and spec.num_heads % size == 0:
        faults[-1] += "; parallel.tensor_replicate_kv_heads=true gives every rank their weights"
    uncuttable = [] if faults else _list_uncuttable(spec, quantize, size, copies)
    if uncuttable:
        faults.append(
            f"parallel.tensor={size}: lora.quantize_base={quantize} does not cut"
            f" {' and '.join(uncuttable)}, whose blocks of numbers stay whole; {sizes}; or set"
            " another lora.quantize_base"
        )
    if faults:
        raise ConfigError(*faults)


def _get_widths(spec: DecoderSpec) -> dict[str, int]:
    """Return what is cut of the layers besides attention: the channels of MLPs, of experts, or of
    both.
    """
    mixture = spec.mixture
    widths = {} if mixture is not None and all(mixture.layers) else {"MLP channels": spec.mlp_width}
    return widths if mixture is None else widths | {"channels of an expert": mixture.mlp_width}


def _copies_kv_heads(spec: DecoderSpec, copies: bool, size: int) -> bool:
    """Return True if all `size` ranks have all kv heads, of which each needs one
    (`parallel.tensor_replicate_kv_heads`).
    """
    return copies and size % spec.num_kv_heads == 0


def _list_uncuttable(spec: DecoderSpec, quantize: str, size: int, copies: bool) -> list[str]:
    """Return the linears of a layer whose quantized weight `size` ranks cannot cut."""
    if quantize == "none" or size == 1:
        return []
    heads = spec.num_heads * spec.head_width
    kv_heads = spec.num_kv_heads * spec.head_width
    inputs = {"o_proj": heads, "down_proj": spec.mlp_width}
    outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    found = _list_uncuttable_experts(spec, quantize, size)
    dense = "MLP channels" in _get_widths(spec)
    for matrix in (*COLUMN, *ROW):
        if matrix in MLP and not dense:
            continue
        out_features = spec.width if matrix in ROW else outputs.get(matrix, spec.mlp_width)
        in_features = inputs.get(matrix, spec.width)
        parts = (
            spec.num_kv_heads
            if _copies_kv_heads(spec, copies, size) and matrix in ("k_proj", "v_proj")
            else size
        )
        if can_quantize(in_features, out_features, quantize) and not can_cut(
            in_features, out_features, quantize, parts, by_columns=matrix in ROW
        ):
            found.append(matrix)
    return found


def _list_uncuttable_experts(spec: DecoderSpec, quantize: str, size: int) -> list[str]:
    """Return the matrices of experts, gate and up being one, that `size` ranks cannot cut. In int8
    gate and up are not.
    """
    mixture = spec.mixture
    if mixture is None or not can_quantize(spec.width, mixture.mlp_width, quantize):
        return []
    down = can_cut(mixture.mlp_width, spec.width, quantize, size, by_columns=True)
    height = mixture.mlp_width * (2 if mixture.interleaved else 1)
    gate_up = quantize == "nf4" and can_cut(spec.width, height, quantize, size, by_columns=False)
    return [
        name
        for name, cut in (("experts.gate_up_proj", gate_up), ("experts.down_proj", down))
        if not cut
    ]
