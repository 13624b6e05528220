"""A function of one's own as head_loss: what it gives and its gradients, against a plain loop; what
a head also has.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import SetupError
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.parallel import materialize, shard_model, start_world
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import build_small_spec, make_small_batch

TEMPERATURE = 2.0


def teacher(labels: Tensor, vocabulary: int) -> Tensor:
    """Probabilities `[b, s, v]` that depend on the labels alone."""
    angles = labels.clamp(min=0).double().unsqueeze(-1) * torch.arange(
        1, vocabulary + 1, dtype=torch.float64
    )
    return torch.softmax(torch.sin(angles), dim=-1)


def distillation(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Kullback-Leibler divergence from a teacher, of the tokens with a label, in pieces of one
    sequence.
    """
    total = hidden.new_zeros(())
    for tokens, targets in zip(hidden, labels, strict=True):
        logs = F.log_softmax(F.linear(tokens, weight) / TEMPERATURE, dim=-1)
        wanted = teacher(targets, weight.shape[0]).to(logs.dtype)
        per_token = (wanted * (wanted.log() - logs)).sum(-1)
        total = total + per_token.masked_fill(targets == -100, 0).sum()
    return total


def by_hand(spec: DecoderSpec) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of a model's logits, all at once."""
    model = build_meta(spec, torch.float64).to_empty(device="cpu")
    init_weights(model, 3, spec)
    tokens, labels = make_small_batch()
    logs = torch.log_softmax(model(tokens) / TEMPERATURE, dim=-1)
    wanted = teacher(labels, spec.vocab_size)
    loss = ((wanted * (wanted.log() - logs)).sum(-1) * (labels != -100)).sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded(spec: DecoderSpec) -> dict[str, Any]:
    """Loss, gradients and head's kind of gather of a rank of FSDP."""
    parallel, memory = ParallelConfig(fsdp_wrap_policy="memory_efficient"), MemoryConfig()
    with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
        model = build_meta(spec, torch.float64)
        shard_model(model, parallel, memory, world)
        materialize(model, memory, world.device)
        init_weights(model, 3, spec)
        tokens, labels = make_small_batch()
        rows = len(tokens) // world.size
        mine = slice(world.rank * rows, (world.rank + 1) * rows)
        loss = model(tokens[mine], labels=labels[mine], head_loss=distillation)
        loss.backward()
        gradients = {name: one.grad.full_tensor() for name, one in model.named_parameters()}  # type: ignore[union-attr]
        return {"loss": world.all_reduce_sum(loss.detach()), **gradients}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_function_of_ones_own_on_one_and_on_two_ranks(tied: bool) -> None:
    spec = build_small_spec(tied=tied)
    wanted, gradients = by_hand(spec)
    model = build_meta(spec, torch.float64).to_empty(device="cpu")
    init_weights(model, 3, spec)
    tokens, labels = make_small_batch()
    loss = model(tokens, labels=labels, head_loss=distillation)
    loss.backward()
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12, msg=name)
    found = run_ranks(lambda: sharded(spec), 2)[0]
    torch.testing.assert_close(found.pop("loss"), wanted, rtol=1e-12, atol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12, msg=name)


def test_a_head_that_is_more_than_a_weight_says_so() -> None:
    """Rather than that a function computes with a part of it; the wrapper takes a loss of
    logits.
    """
    capped = replace(build_small_spec(), logit_softcap=30.0)
    adapted = build_meta(build_small_spec(), torch.float64)
    add_adapters(adapted, LoraConfig(target_modules=["head"]), torch.float64)
    tokens, labels = make_small_batch()
    for model, named in ((build_meta(capped, torch.float64), "softcap"), (adapted, "adapter")):
        model.to_empty(device="cpu")
        with pytest.raises(
            SetupError, match=rf"^head_loss: found distillation\(.*also has {named}, expected"
        ):
            model(tokens, labels=labels, head_loss=distillation)

    def takes_all(hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float) -> Tensor:
        return F.cross_entropy(
            softcap * torch.tanh(F.linear(hidden, weight) / softcap).flatten(0, 1),
            labels.flatten(),
            reduction="sum",
        )

    model = build_meta(capped, torch.float64).to_empty(device="cpu")
    init_weights(model, 3, capped)
    plain = float(model(tokens, labels=labels, head_loss=CrossEntropy(3)))
    assert float(model(tokens, labels=labels, head_loss=takes_all)) == pytest.approx(
        plain, rel=1e-12
    )

    def half(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum") / 2

    assert float(model(tokens, labels=labels, head_loss=CrossEntropy(3, half))) == pytest.approx(
        plain / 2, rel=1e-12
    )
    log_probs = model(tokens, labels=labels, head_loss=TokenLogProbs(3))
    assert log_probs.shape == labels.shape and float(log_probs.sum()) == pytest.approx(
        -plain, rel=1e-12
    )


def test_labels_and_head_loss_have_names() -> None:
    """So that no hook has to count arguments."""
    model: nn.Module = build_meta(build_small_spec(), torch.float64).to_empty(device="cpu")
    tokens, labels = make_small_batch()
    with pytest.raises(TypeError):
        model(tokens, None, None, labels)
