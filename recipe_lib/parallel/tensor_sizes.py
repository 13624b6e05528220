"""Which sizes of a tensor-parallel group can share a model, by its shape alone."""

from recipe_lib.adapters.quantized import can_cut, can_quantize
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models.spec import DecoderSpec

# A layer's linears that are cut by rows, so that each rank has some of their outputs; and by columns.
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


def check_tensor(spec: DecoderSpec, parallel: ParallelConfig, quantize: str = "none") -> None:
    """Refuses a model that `parallel.tensor` ranks cannot share: ConfigError, a line a number, with legal sizes.

    quantize: `lora.quantize_base`, whose blocks are not cut.
    """
    size = parallel.tensor
    counts = {
        "attention heads": spec.num_heads,
        "MLP channels": spec.mlp_width,
        "tokens of the vocabulary": spec.vocab_size,
    }
    copies = parallel.tensor_replicate_kv_heads
    if not _copied(spec, copies, size):
        counts["key and value heads"] = spec.num_kv_heads
    legal = [
        other
        for other in range(1, spec.num_heads + 1)
        if all(count % other == 0 for count in (spec.num_heads, spec.mlp_width, spec.vocab_size))
        and (spec.num_kv_heads % other == 0 or _copied(spec, copies, other))
        and not _uncuttable(spec, quantize, other, copies)
    ]
    sizes = f"sizes that fit: {', '.join(map(str, legal))}"
    faults = [
        f"parallel.tensor={size}: the model has {count} {what}, which {size} ranks cannot share evenly; {sizes}"
        for what, count in counts.items()
        if count % size
    ]
    if not copies and spec.num_kv_heads % size and _copied(spec, True, size) and spec.num_heads % size == 0:
        faults[-1] += "; parallel.tensor_replicate_kv_heads=true gives every rank their weights"
    uncuttable = [] if faults else _uncuttable(spec, quantize, size, copies)
    if uncuttable:
        faults.append(
            f"parallel.tensor={size}: lora.quantize_base={quantize} keeps blocks of 64 numbers whole, which the "
            "parts of "
            f"{' and '.join(uncuttable)} are no multiple of; {sizes}; or set lora.quantize_base=int8"
        )
    if faults:
        raise ConfigError(*faults)


def _copied(spec: DecoderSpec, copies: bool, size: int) -> bool:
    """Whether all `size` ranks have all kv heads, of which each needs one (`parallel.tensor_replicate_kv_heads`)."""
    return copies and size % spec.num_kv_heads == 0


def _uncuttable(spec: DecoderSpec, quantize: str, size: int, copies: bool) -> list[str]:
    """The linears of a layer whose quantized weight `size` ranks cannot cut."""
    if quantize == "none" or size == 1:
        return []
    heads = spec.num_heads * spec.head_width
    kv_heads = spec.num_kv_heads * spec.head_width
    inputs = {"o_proj": heads, "down_proj": spec.mlp_width}
    outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    found = []
    for matrix in (*COLUMN, *ROW):
        out_features = spec.width if matrix in ROW else outputs.get(matrix, spec.mlp_width)
        in_features = inputs.get(matrix, spec.width)
        parts = spec.num_kv_heads if _copied(spec, copies, size) and matrix in ("k_proj", "v_proj") else size
        if can_quantize(in_features, out_features, quantize) and not can_cut(
            in_features, out_features, quantize, parts, by_columns=matrix in ROW
        ):
            found.append(matrix)
    return found
