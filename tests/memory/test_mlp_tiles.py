"""MLPs in pieces: the gradients of whole ones beside every other lever, and the bytes they hold, by
formula.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, chunk_mlps
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.models.decoder import MLP
from recipe_lib.ops.deferred import defer_weight_gradients, enable_split_backward
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import materialize, shard_model, start_world
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import ROWS, build_small_spec, make_small_batch, read_gradients
from tests.parallel.test_tensor import BIASES, GEMMA, Case, compare

CHUNKS = 5  # does not divide 96 tokens
TOKENS = 64
D = 32
F = 256


def decoder(
    chunks: int, mode: str = "none", lora: LoraConfig | None = None, **changes: Any
) -> nn.Module:
    spec = replace(build_small_spec(), **changes)
    dtype = (
        torch.float64 if lora is None or lora.quantize_base == "none" else torch.float32
    )  # what 4 bits are turned into
    model = build_meta(spec, dtype)
    if lora is not None:
        add_adapters(model, lora, dtype)
    chunk_mlps(model, chunks)
    apply_activation_checkpointing(model, mode)
    return filled(model, spec, lora)


def filled(model: nn.Module, spec: DecoderSpec, lora: LoraConfig | None) -> nn.Module:
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    if lora is not None:
        init_adapters(model, 4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would hide A's gradient
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def backward(model: nn.Module) -> dict[str, Tensor]:
    tokens, labels = make_small_batch()
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3))
    loss.backward()
    return {"loss": loss.detach(), **read_gradients(model)}


def assert_close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], in_fp32: float = 1e-5
) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        close = 1e-11 if value.dtype == torch.float64 else in_fp32
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=close * float(value.abs().max()), msg=name
        )


LORA = {"lora": LoraConfig(rank=4)}
ONLY_MLP = {
    "lora": LoraConfig(rank=4, target_modules=["up", "down"])
}  # the first layer's input wants no gradient
NF4 = {
    "lora": LoraConfig(rank=4, quantize_base="nf4"),
    "width": 64,
    "head_width": 16,
    "mlp_width": 128,
}
KINDS = [{}, BIASES, GEMMA, LORA, ONLY_MLP, {"lora": LoraConfig(rank=4, dora=True)}, NF4]


@pytest.mark.parametrize(
    "changes", KINDS, ids=["llama", "biases", "gemma", "lora", "mlp only", "dora", "nf4"]
)
def test_gradients_are_those_of_whole_mlps(changes: dict[str, Any]) -> None:
    is_quantized = "nf4" in str(changes)
    wanted = backward(decoder(1, **changes))
    for mode in ("none", "selective", "full"):
        model = decoder(CHUNKS, mode, **changes)
        assert is_quantized == isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
        # Where matmuls are kept, an adapter's sum is rounded in another order: in fp32 with these
        # large weights 5e-5 of a gradient.
        is_rounded = is_quantized and mode == "selective"
        assert_close(backward(model), wanted, 1e-4 if is_rounded else 1e-5)


def test_more_pieces_than_tokens_and_no_gradients() -> None:
    tokens = torch.randint(0, 512, (1, 3), generator=torch.Generator().manual_seed(1))
    plain, chunked = decoder(1), decoder(64)
    torch.testing.assert_close(chunked(tokens), plain(tokens))
    with torch.no_grad():
        assert not chunked(tokens).requires_grad


def test_dropout_is_drawn_alike_again() -> None:
    """Against the same pieces one after the other, without any recomputation."""
    lora = LoraConfig(rank=4, dropout=0.5)

    def in_order(mlp: MLP) -> Any:
        whole = mlp.forward

        def forward(hidden: Tensor) -> Tensor:
            flat = hidden.flatten(0, -2)
            ends = [flat.shape[0] * piece // CHUNKS for piece in range(CHUNKS + 1)]
            pieces = [whole(flat[first:last]) for first, last in zip(ends, ends[1:], strict=False)]
            return torch.cat(pieces).view_as(hidden)

        return forward

    plain = decoder(1, lora=lora)
    for layer in plain.model.layers:
        layer.mlp.forward = in_order(layer.mlp)
    torch.manual_seed(8)
    wanted = backward(plain)
    after = torch.rand(3)
    for mode in ("none", "full"):
        torch.manual_seed(8)
        assert_close(backward(decoder(CHUNKS, mode, lora=lora)), wanted)
        assert torch.equal(torch.rand(3), after)  # what comes behind is drawn as ever


def test_a_parameter_is_told_of_its_gradient_once() -> None:
    """What steps or reduces a parameter when its gradient is there must not see those of pieces."""
    model, told = decoder(CHUNKS, "full"), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: told.append(name))
    found = backward(model)
    assert sorted(told) == sorted(found.keys() - {"loss"})


def test_weight_gradients_of_pieces_are_not_deferred() -> None:
    """They would hold every piece's inner tensors until they are made."""
    wanted = backward(decoder(1))
    model = decoder(CHUNKS)
    tokens, labels = make_small_batch()
    with enable_split_backward():
        loss = model(tokens, labels=labels, head_loss=CrossEntropy(3))
        with defer_weight_gradients() as later:
            loss.backward()
    for entry in later:
        entry.run()
    assert_close({"loss": loss.detach(), **read_gradients(model)}, wanted)


def peaks(chunks: int, trained: bool) -> tuple[int, int, int]:
    """Elements: the most in forward, those kept, the most in backward; of an MLP, with its output
    and gradients.
    """
    holder = nn.ModuleList([MLP(replace(build_small_spec(), width=D, mlp_width=F))])
    chunk_mlps(holder.requires_grad_(trained), chunks)
    hidden = torch.randn(1, TOKENS, D, requires_grad=True)
    with LiveBytes() as live:
        out = holder[0](hidden)
        forward = live.peak
        kept = live.count_bytes()
        live.peak = 0
        out.backward(torch.ones_like(out))
    return forward // 4, kept // 4, live.peak // 4


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_the_inner_width_exists_for_a_piece_at_a_time(chunks: int) -> None:
    inner, stream = TOKENS * F // chunks, TOKENS * D
    forward, kept, backward = peaks(chunks, trained=False)
    assert forward == stream + 4 * inner  # the output; gate, activation, up and their product
    assert kept == stream  # the output; the input is there anyway
    # The output, its gradient, the input's, a piece of it; gate, activation, up, product and
    # gradients of two of them.
    assert backward == 3 * stream + stream // chunks + 6 * inner
    with_weights = peaks(chunks, trained=True)[2]
    assert (
        with_weights <= backward + 4 * D * F
    )  # sums of three weights' gradients, and a piece's of one
    assert peaks(1, trained=False)[2] > 6 * TOKENS * F


def test_selective_checkpointing_keeps_nothing_of_pieces() -> None:
    def kept(layers: int) -> int:
        model = decoder(CHUNKS, "selective", num_layers=layers, windows=(None,) * layers)
        tokens, labels = make_small_batch()
        with LiveBytes() as live:
            loss = model(tokens, labels=labels)
            found = live.count_bytes()
        loss.backward()
        return found

    tokens, width = ROWS * 12, 32
    # Input, attention with its log-sum-exp in fp64, key and output projections; no up.
    assert kept(4) - kept(3) == tokens * (width + width + 4 + 16 + width) * 8


def ranks() -> list[str]:
    """Tensor parallel, and FSDP; what differs from the plain model."""
    chunked = {"mlp_tiles": 3}
    faults = compare(
        [
            Case(parallel={"tensor": 2}, memory=chunked),
            Case(
                parallel={"tensor": 2},
                memory=chunked | {"activation_checkpointing": "full"},
                spec=GEMMA,
            ),
            Case(
                parallel={"tensor": 2},
                memory=chunked | {"activation_checkpointing": "selective"},
                lora={},
            ),
        ]
    )
    wanted = backward(decoder(1))
    for wrapping in ("layers", ["model.layers.*", "model.layers.*.mlp"]):
        parallel, memory = ParallelConfig(fsdp_wrap_policy=wrapping), MemoryConfig()
        with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
            spec = build_small_spec()
            model = build_meta(spec, torch.float64)
            chunk_mlps(model, 3)
            apply_activation_checkpointing(model, "full")
            shard_model(model, parallel, memory, world)
            materialize(model, memory, world.device)
            init_weights(model, 3, spec)
            tokens, labels = make_small_batch()
            mine = slice(world.rank * ROWS // 2, (world.rank + 1) * ROWS // 2)
            loss = model(tokens[mine], labels=labels[mine], head_loss=CrossEntropy(3))
            loss.backward()
            assert_close(
                {"loss": world.all_reduce_sum(loss.detach()), **read_gradients(model)}, wanted
            )
    return faults


@pytest.mark.slow
def test_sharded_models() -> None:
    assert run_ranks(ranks, 2) == [[], []]


def test_a_model_without_mlps_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        chunk_mlps(nn.Linear(2, 2), 4)
    assert (
        str(caught.value)
        == "memory.mlp_tiles: found 4 for a model without MLPs of ours, expected 1; remove"
        " memory.mlp_tiles"
    )
