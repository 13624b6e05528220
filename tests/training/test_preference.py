"""Preference losses against the formulas in float64: values, gradients, rewards, however the pairs
are batched.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import disable_adapters
from recipe_lib.config.schema import LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import Batch, make_step
from recipe_lib.errors import ConfigError
from recipe_lib.methods.dpo.checks import describe_reference
from recipe_lib.methods.dpo.config import DpoConfig, DpoFinetuneConfig
from recipe_lib.methods.dpo.loss import (
    compute_pair_loss,
    compute_step_metrics,
)
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import TokenLogProbs
from recipe_lib.parallel import World, materialize, shard_model, start_world
from recipe_lib.training import compute_answer_logps
from recipe_lib.training.training_data import check_pairs
from tests.adapters.adapted import EVERYWHERE, Setting, build_adapted
from tests.distributed.ranks import run_ranks
from tests.parallel.gathered import count_gathered_bytes
from tests.parallel.small_models import VOCABULARY, build_small_spec, read_gradients
from tests.selection import mark_slow_but
from tests.training.pairs import LOSSES, build_pairs, compute_plain_loss

LORA = LoraConfig(rank=3, alpha=5, target_modules=EVERYWHERE, dora=True)
Found = tuple[list[float], dict[str, Tensor]]  # means of NUMBERS, gradients by name


def compared(
    model: Decoder, reference: Decoder | None, batch: Batch, cfg: DpoConfig
) -> tuple[Tensor, Tensor]:
    """What a recipe does with a micro-batch; without a second model the reference is the model's
    frozen part.
    """

    def answers(of: Decoder) -> Tensor:
        inputs = (batch.tokens, batch.positions, batch.attention)
        return compute_answer_logps(
            of(*inputs, labels=batch.labels, head_loss=TokenLogProbs(3)),
            batch,
            mean=cfg.takes_mean_logps,
        )

    old = None
    if cfg.needs_reference:
        with torch.no_grad() if reference else disable_adapters(model):
            old = answers(reference or model)
    return compute_pair_loss(answers(model), old, cfg)


def step(
    model: Decoder,
    reference: Decoder | None,
    cfg: DpoConfig,
    world: World,
    batch_size: int,
    packed: bool = False,
) -> Found:
    """One step over all pairs."""
    rows = build_pairs(VOCABULARY)
    items = np.arange(rows.items)
    slots = (
        [items[at : at + 2] for at in range(0, len(items), 2)]
        if packed
        else list(items.reshape(-1, 1))
    )
    accumulation = len(slots) // (batch_size * world.size)
    batches = make_step(
        rows, slots, world.data_rank, world.data_ranks, batch_size, accumulation, pad_id=0
    )
    assert batches.num_items == rows.items
    model.zero_grad(set_to_none=True)
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches.micro_batches:
        assert (batch.attention.documents is not None) == packed
        loss, numbers = compared(model, reference, batch, cfg)
        (loss / batches.num_items).backward()
        sums += numbers
    return (world.all_reduce_sum(sums) / batches.num_items).tolist(), read_gradients(model)


def frozen(spec: DecoderSpec, seed: int) -> Decoder:
    model = build_meta(spec, torch.float64).to_empty(device="cpu").requires_grad_(False)
    init_weights(model, seed, spec)
    return model


@cache
def expected(kind: str, tied: bool, loss: str) -> Found:
    """By the formulas, of the model `kind` makes."""
    rows, spec, cfg = build_pairs(VOCABULARY), build_small_spec(tied=tied), LOSSES[loss]
    with made(kind, spec, cfg) as (model, reference, _):
        if cfg.needs_reference and reference is None:
            reference = frozen(spec, 3)  # what `build_adapted` puts adapters on
        loss, numbers = compute_plain_loss(model, reference, rows, cfg)
        loss.backward()
        return [float(loss.detach()), *numbers], read_gradients(model)


class made:  # noqa: N801  (used as a context manager)
    """The model to train, the reference (None: none, or the model with its adapters off) and the
    world.
    """

    def __init__(self, kind: str, spec: DecoderSpec, cfg: DpoConfig, **levers) -> None:
        self.kind, self.spec, self.cfg = kind, spec, cfg
        self.setting = Setting(LORA, **levers)

    def __enter__(self) -> tuple[Decoder, Decoder | None, World]:
        if self.kind == "lora":
            self.inner = build_adapted(self.spec, self.setting)
            model, world = self.inner.__enter__()
            return model, None, world
        self.inner = start_world(DpoFinetuneConfig(device="cpu", parallel=self.setting.parallel))
        world = self.inner.__enter__()
        model = self.placed(world, 11)
        reference = (
            self.placed(world, 3).requires_grad_(False) if self.cfg.needs_reference else None
        )
        return model, reference, world

    def placed(self, world: World, seed: int) -> Decoder:
        model = build_meta(self.spec, torch.float64)
        if seed == 3:
            model.requires_grad_(False)
        shard_model(model, self.setting.parallel, self.setting.memory, world)
        materialize(model, self.setting.memory, world.device)
        init_weights(model, seed, self.spec)
        return model

    def __exit__(self, *exception) -> None:
        self.inner.__exit__(*exception)


def assert_same(found: Found, wanted: Found) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10, abs=1e-12)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert float((found[1][name] - grad).norm()) < 1e-10 * float(grad.norm()), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("loss", mark_slow_but(LOSSES, 2))
def test_loss_rewards_and_gradients_equal_the_formulas(loss: str, kind: str, packed: bool) -> None:
    wanted = expected(kind, False, loss)
    assert len({round(number, 6) for number in wanted[0]}) == 4
    with made(kind, build_small_spec(), LOSSES[loss]) as (model, reference, world):
        assert_same(step(model, reference, LOSSES[loss], world, 2, packed), wanted)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_micro_batches_of_any_size_give_the_same_step(batch_size: int) -> None:
    with made("lora", build_small_spec(), LOSSES["ipo"]) as (model, reference, world):
        assert_same(
            step(model, reference, LOSSES["ipo"], world, batch_size), expected("lora", False, "ipo")
        )


def notes(model: nn.Module) -> int:
    """Units that FSDP has noted for a backward to come."""
    return len(model._get_fsdp_state()._comm_ctx.post_forward_order)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("lora", True), ("full", False)])
def test_two_ranks_with_every_lever_equal_the_formulas(kind: str, tied: bool) -> None:
    wanted = {loss: expected(kind, tied, loss) for loss in ("sigmoid", "simpo")}
    checkpointed = MemoryConfig(cpu_offload=True, activation_checkpointing="full")
    levers = [
        ("sigmoid", ParallelConfig(fsdp_wrap_policy="layers"), checkpointed),
        ("sigmoid", ParallelConfig(fsdp_wrap_policy="memory_efficient"), MemoryConfig()),
        (
            "simpo",
            ParallelConfig(fsdp_wrap_policy="memory_efficient", reshard_after_forward=False),
            MemoryConfig(),
        ),
        (
            "sigmoid",
            ParallelConfig(fsdp_wrap_policy="memory_efficient", data_replicate=2),
            checkpointed,
        ),
    ]

    def work() -> None:
        for loss, parallel, memory in levers:
            placing = made(
                kind, build_small_spec(tied=tied), LOSSES[loss], parallel=parallel, memory=memory
            )
            with placing as (model, reference, world):
                assert (reference is None) == (kind == "lora" or loss == "simpo")
                for packed in (False, True):  # the second step from a clean start
                    assert_same(
                        step(model, reference, LOSSES[loss], world, 2 - packed, packed),
                        wanted[loss],
                    )
                    for part in (model, reference):
                        assert part is None or count_gathered_bytes(part) == notes(part) == 0

    run_ranks(work, 2)


@pytest.mark.slow
def test_hybrid_sharding_on_two_by_two_ranks() -> None:
    wanted = expected("full", True, "sigmoid")
    parallel = ParallelConfig(fsdp_wrap_policy="memory_efficient", data_replicate=2, data_shard=2)

    def work() -> None:
        with made("full", build_small_spec(tied=True), LOSSES["sigmoid"], parallel=parallel) as (
            model,
            reference,
            world,
        ):
            assert_same(step(model, reference, LOSSES["sigmoid"], world, 1), wanted)

    run_ranks(work, 4)


def test_the_reference_leaves_no_graph_and_no_gradient() -> None:
    with made("full", build_small_spec(), LOSSES["sigmoid"]) as (model, reference, world):
        step(model, reference, LOSSES["sigmoid"], world, 8)
        assert all(parameter.grad is None for parameter in reference.parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_large_margins_stay_finite() -> None:
    policy = torch.tensor([-900.0, -10.0, -10.0, -900.0], dtype=torch.float64, requires_grad=True)
    for cfg in (LOSSES["sigmoid"], LOSSES["cdpo"]):
        loss, numbers = compute_pair_loss(policy, None, cfg)
        (grad,) = torch.autograd.grad(loss, policy)
        assert loss.isfinite() and grad.isfinite().all() and grad.any()
        assert numbers[3] == 1


def test_no_pairs_are_nothing() -> None:
    """What a rank has in a validation step when the pairs have run out."""
    nothing = torch.full((2, 1), -100)
    batch = Batch(nothing, nothing, sequence_ids=torch.full((2, 1), -1), num_sequences=0)
    for cfg in LOSSES.values():
        answers = compute_answer_logps(torch.zeros(2, 1), batch, mean=cfg.takes_mean_logps)
        assert answers.shape == (0,)
        loss, numbers = compute_pair_loss(answers, None, cfg)
        assert loss == 0 and numbers.tolist() == [0, 0, 0, 0]


def test_metrics_are_named_means() -> None:
    means = torch.tensor([0.5, 2.0, -1.5, 0.75], dtype=torch.float64)
    metrics = compute_step_metrics(4 * means, num_items=4, kl=None, cfg=DpoConfig())
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 0.5,
        "reward_chosen": 2.0,
        "reward_rejected": -1.5,
        "reward_accuracy": 0.75,
        "reward_margin": 3.5,
    }


def test_rows_of_one_answer_are_refused_in_one_line() -> None:
    rows = build_pairs(VOCABULARY)
    check_pairs(cast(Any, SimpleNamespace(dataset=rows, validation_dataset=None)), "do else")
    single = SimpleNamespace(group=1, report=SimpleNamespace(format="alpaca"))
    for key, given in (("data.format", (single, None)), ("validation.format", (rows, single))):
        with pytest.raises(
            ConfigError, match=rf"^{key}: found alpaca, .*; set {key}=preference, or do else$"
        ):
            check_pairs(
                cast(Any, SimpleNamespace(dataset=given[0], validation_dataset=given[1])), "do else"
            )


def test_the_reference_is_said() -> None:
    model = nn.Linear(4, 8, bias=False)
    assert describe_reference(DpoConfig(), None) == "reference: the model without its adapters"
    assert describe_reference(DpoConfig(), model) == "reference: a frozen copy, 128 B per rank"
    assert describe_reference(LOSSES["simpo"], None) == "reference: none, dpo.loss=simpo"
    assert (
        describe_reference(LOSSES["ipo without reference"], None)
        == "reference: none, dpo.reference_free=true"
    )
