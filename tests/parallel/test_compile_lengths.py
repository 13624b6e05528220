"""Compiled layers over rows of many lengths: the losses of layers as they are, and no more than two
compilations.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig
from recipe_lib.memory import apply_activation_checkpointing, compile_layers
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops import special_attention
from recipe_lib.ops.attention import make_attention_info
from recipe_lib.units import GIB
from tests.distributed.ranks import import_compiler
from tests.parallel.small_models import VOCABULARY, build_small_spec, read_gradients

LENGTHS = (12, 7, 30, 8, 64, 5, 33, 3, 48, 2)
ROWS = 2
# Two thirds of the layers' inputs beyond them: the layers keep different things.
BUDGET = MemoryConfig(
    activation_checkpointing="budget", activation_budget_gib=5 * ROWS * 64 * 32 * 4 / GIB
)


def build(backend: Any = None) -> nn.Module:
    spec = replace(
        build_small_spec(layers=2), windows=(9, 9), attention_softcap=20.0, post_norms=True
    )
    model = build_meta(spec, torch.float32)
    cfg = FullFinetuneConfig(batch_size=ROWS, max_seq_len=max(LENGTHS), memory=BUDGET)
    apply_activation_checkpointing(model, BUDGET.activation_checkpointing, cfg)
    if backend:
        compile_layers(model, backend)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model


@pytest.mark.slow
def test_rows_of_many_lengths() -> None:
    """Of capped scores, documents, a window and a budget, which makes the layers two kinds."""
    import_compiler()
    torch._dynamo.reset()
    compiled_for: list[int] = []
    length = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled_for.append(length)
        return graph.forward

    plain = build()
    compiled = build(count)
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, length), generator=generator)
        info = make_attention_info([[length // 2, length - length // 2]] * ROWS, length)
        losses = [model(tokens, None, info, labels=labels) for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-6, atol=0)
    assert compiled_for == [LENGTHS[0]] * 2 + [LENGTHS[1]] * 2
    for one, other in zip(
        read_gradients(compiled).values(), read_gradients(plain).values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_pieces_of_capped_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two, the fewest that hold no more scores than allowed; a query is never divided."""
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 1000)
    assert [
        special_attention._count_pieces(10, queries) for queries in (1, 100, 101, 201, 900)
    ] == [
        1,
        1,
        2,
        4,
        16,
    ]
    assert special_attention._count_pieces(5000, 3) == 3
