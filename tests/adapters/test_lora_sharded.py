"""Adapters over several ranks, with every lever: losses and gradients equal those of one plain
model in float64.
"""

import pytest
import torch
from torch import Tensor

from recipe_lib.adapters import (
    add_adapters,
    disable_adapters,
    get_adapter_parameters,
    init_adapters,
    is_adapter,
)
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import TokenLogProbs
from recipe_lib.parallel import parallelize, start_world
from tests.adapters.adapted import (
    EVERYWHERE,
    Setting,
    build_adapted,
    compute_mean_loss,
    move_adapters,
)
from tests.distributed.ranks import import_compiler, run_ranks
from tests.parallel.gathered import count_gathered_bytes
from tests.parallel.small_models import (
    build_small_spec,
    compute_gradient_difference,
    make_small_batch,
    read_gradients,
)
from tests.selection import mark_slow_but

LORA = LoraConfig(rank=3, alpha=5, target_modules=["q", "v"])
DORA = LoraConfig(rank=3, alpha=5, target_modules=EVERYWHERE, dora=True)
LAYERS = 2
Reference = dict[tuple[bool, bool], tuple[float, dict[str, Tensor]]]


def kept(spec: DecoderSpec, lora: LoraConfig) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of the small batch, of a model on one rank; no lever is used."""
    with build_adapted(spec, Setting(lora)) as (model, world):
        loss = compute_mean_loss(model, world)
        loss.backward()
        return float(loss.detach()), read_gradients(model)


@pytest.fixture(scope="module")
def expected() -> Reference:
    cases = {
        (tied, lora.dora): (build_small_spec(tied=tied, layers=LAYERS), lora)
        for tied in (False, True)
        for lora in (LORA, DORA)
    }
    return {case: kept(*made) for case, made in cases.items()}


def worst_difference(
    tied: bool, setting: Setting, reference: Reference, steps: tuple[int, ...] = (1, 2)
) -> float:
    """The largest difference of this rank's parts of the gradients, relative to each gradient's
    largest number.

    steps: micro-batches of each; in a second step of two, gradients accumulate.
    """
    loss, grads = reference[tied, setting.lora.dora]
    with build_adapted(build_small_spec(tied=tied, layers=LAYERS), setting) as (model, world):
        for parts in steps:
            model.zero_grad(set_to_none=True)
            total = torch.zeros((), dtype=torch.float64)
            for part in range(parts):
                partial_loss = compute_mean_loss(model, world, part, parts)
                partial_loss.backward()
                total += partial_loss.detach()
            assert abs(float(world.all_reduce_sum(total)) - loss) < 1e-12
        assert all(is_adapter(name) for name in grads)
        return compute_gradient_difference(model, grads)


@pytest.mark.parametrize(
    ("lora", "tied"), mark_slow_but([(LORA, False), (DORA, True)], 1), ids=["lora", "dora, tied"]
)
def test_two_ranks_with_every_lever_equal_one_plain_model(
    lora: LoraConfig, tied: bool, expected: Reference
) -> None:
    efficient = ParallelConfig(fsdp_wrap_policy="memory_efficient")
    levers = [
        (efficient, MemoryConfig(cpu_offload=True)),
        (efficient, MemoryConfig(activation_checkpointing="full")),
        (efficient, MemoryConfig(activation_checkpointing="selective")),
        (ParallelConfig(fsdp_wrap_policy="layers"), MemoryConfig()),
        (
            ParallelConfig(fsdp_wrap_policy="memory_efficient", reshard_after_forward=False),
            MemoryConfig(),
        ),
        (
            ParallelConfig(fsdp_wrap_policy="memory_efficient", data_replicate=2),
            MemoryConfig(activation_checkpointing="full"),
        ),
    ]
    settings = [Setting(lora, parallel, memory) for parallel, memory in levers]

    def work() -> list[float]:
        return [worst_difference(tied, setting, expected) for setting in settings]

    for errors in run_ranks(work, 2):
        assert max(errors) < 1e-11, dict(zip(map(str, settings), errors, strict=True))


@pytest.mark.slow
def test_compiled_checkpointed_and_sharded() -> None:
    lora = LoraConfig(rank=3, alpha=5, target_modules=["q", "down"], dora=True)
    reference = {(True, True): kept(build_small_spec(tied=True, layers=LAYERS), lora)}
    memory = MemoryConfig(activation_checkpointing="full")
    setting = Setting(
        lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"), memory, compiler="eager"
    )
    import_compiler()
    # Micro-batches of one size: that layers are compiled for others is
    # tests/parallel/test_compile_lengths, test_dpo.
    for error in run_ranks(lambda: worst_difference(True, setting, reference, (2,)), 2):
        assert error < 1e-11


@pytest.mark.slow
def test_hybrid_sharding_on_two_by_two_ranks(expected: Reference) -> None:
    setting = Setting(
        DORA, ParallelConfig(fsdp_wrap_policy="memory_efficient", data_replicate=2, data_shard=2)
    )

    for error in run_ranks(lambda: worst_difference(True, setting, expected), 4):
        assert error < 1e-11


def whole(model: Decoder) -> dict[str, Tensor]:
    """The adapters' values; sharded ones are gathered."""
    return {
        name: (
            (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
            .detach()
            .clone()
        )
        for name, parameter in get_adapter_parameters(model).items()
    }


@pytest.mark.slow
def test_adapters_begin_alike_on_any_number_of_ranks() -> None:
    def work(ranks: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for tied in (False, True):
            parallel, memory = (
                ParallelConfig(fsdp_wrap_policy="memory_efficient"),
                MemoryConfig(cpu_offload=tied),
            )
            with build_adapted(
                build_small_spec(tied=tied, layers=LAYERS), Setting(DORA, parallel, memory), moved=0
            ) as (
                model,
                world,
            ):
                assert world.size == ranks
                found |= {f"{tied} {name}": value for name, value in whole(model).items()}
                assert count_gathered_bytes(model) == 0
        return found

    one = run_ranks(work, 1, 1)[0]
    for found in run_ranks(work, 3, 3):
        assert found.keys() == one.keys()
        for name, value in found.items():
            assert torch.equal(value, one[name]), name


@pytest.mark.slow
def test_reference_without_adapters_then_a_step_with_them(expected: Reference) -> None:
    """What preference optimization does: the frozen model without gradients, then the adapted one
    with them.
    """

    def work() -> list[float]:
        found = []
        for tied, memory in (
            (False, MemoryConfig()),
            (True, MemoryConfig(activation_checkpointing="full")),
        ):
            spec = build_small_spec(tied=tied, layers=LAYERS)
            plain = build_meta(spec, torch.float64).to_empty(device="cpu")
            init_weights(plain, 3, spec)
            setting = Setting(DORA, ParallelConfig(fsdp_wrap_policy="memory_efficient"), memory)
            with build_adapted(spec, setting) as (model, world):
                with disable_adapters(model):
                    reference = compute_mean_loss(model, world)
                    assert not reference.requires_grad
                    found.append(abs(float(reference - compute_mean_loss(plain, world))))
                    assert count_gathered_bytes(model) == 0
                compute_mean_loss(model, world).backward()
                grads, wanted = read_gradients(model), expected[tied, True][1]
                assert grads.keys() == wanted.keys()
                found += [
                    float((grads[name] - grad).abs().max() / grad.abs().max())
                    for name, grad in wanted.items()
                ]
        return found

    for errors in run_ranks(work, 2):
        assert max(errors) < 1e-11


def test_a_model_that_is_sharded_gets_no_adapters() -> None:
    def work() -> str:
        model = build_meta(build_small_spec(), torch.float64)
        cfg = FullFinetuneConfig(device="cpu")
        with start_world(cfg) as world:
            parallelize(model, cfg, world)
        with pytest.raises(ConfigError) as caught:
            add_adapters(model, LORA, torch.float64)
        return str(caught.value)

    said = "add_adapters: the model's parameters are sharded already; call it before parallelize"
    assert run_ranks(work, 2) == [said, said]


@pytest.mark.slow
def test_logits_can_be_trained_on_too() -> None:
    """Without labels the head's weights are needed in backward, and gathered for it."""

    setting = Setting(DORA, ParallelConfig(fsdp_wrap_policy="memory_efficient"))

    def work() -> dict[str, Tensor]:
        with build_adapted(build_small_spec(layers=LAYERS), setting) as (model, world):
            compute_mean_loss(
                model, world
            ).backward()  # with labels first: the choice is made anew for each forward
            model.zero_grad(set_to_none=True)
            rows = 8 // world.size
            model(
                make_small_batch()[0][world.rank * rows : (world.rank + 1) * rows]
            ).square().sum().backward()
            return read_gradients(model)

    [wanted] = run_ranks(work, 1)
    for found in run_ranks(work, 2):
        for name, grad in wanted.items():
            assert float((found[name] - grad).abs().max() / grad.abs().max()) < 1e-11


@pytest.mark.slow
def test_log_probabilities_of_tokens() -> None:
    """Preference optimization: an adapted head projects again in backward, with a weight that is
    gathered again.
    """
    _, labels = make_small_batch()
    setting = Setting(DORA, ParallelConfig(fsdp_wrap_policy="memory_efficient"))

    def work() -> tuple[Tensor, dict[str, Tensor]]:
        with build_adapted(build_small_spec(tied=True, layers=LAYERS), setting) as (model, world):
            rows = 8 // world.size
            mine = slice(world.rank * rows, (world.rank + 1) * rows)
            found = model(
                make_small_batch()[0][mine], labels=labels[mine], head_loss=TokenLogProbs(3)
            )
            found.square().sum().backward()
            return found.detach(), read_gradients(model)

    [(values, grads)] = run_ranks(work, 1)
    two = run_ranks(work, 2)
    assert torch.allclose(torch.cat([found for found, _ in two]), values, rtol=1e-12, atol=1e-12)
    for _, found in two:
        for name, grad in grads.items():
            assert float((found[name] - grad).abs().max() / grad.abs().max()) < 1e-11


@pytest.mark.slow
def test_dora_beside_quantized_weights() -> None:
    """Lengths begin as those of the weights that are in use, the quantized ones; and two ranks
    equal one.
    """
    lora = LoraConfig(rank=3, alpha=5, target_modules=["q", "down"], dora=True, quantize_base="nf4")
    setting = Setting(
        lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"), dtype=torch.float32
    )

    def work() -> list[dict[str, Tensor]]:
        with build_adapted(build_small_spec(layers=LAYERS), setting, moved=0) as (model, world):
            found = whole(model)
            with disable_adapters(model):
                reference = compute_mean_loss(model, world)
            found["loss"] = world.all_reduce_sum(compute_mean_loss(model, world).detach())
            found["frozen"] = world.all_reduce_sum(reference)
            move_adapters(model, 0.1)
            compute_mean_loss(model, world).backward()
            return [found, read_gradients(model)]

    [one] = run_ranks(work, 1)
    assert float((one[0]["loss"] - one[0]["frozen"]).abs()) < 1e-5
    for two in run_ranks(work, 2):
        for name, value in one[0].items():
            assert torch.allclose(two[0][name], value, rtol=1e-6, atol=1e-6), name
        for name, grad in one[1].items():
            assert float((two[1][name] - grad).abs().max() / grad.abs().max()) < 1e-4, name


def test_fp32_adapters_over_a_bf16_base() -> None:
    """Two types in one unit; what is trained is summed in its own."""
    lora = LoraConfig(rank=3, alpha=5, target_modules=EVERYWHERE, dora=True, dtype="fp32")
    setting = Setting(
        lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"), dtype=torch.bfloat16
    )

    def work() -> dict[str, Tensor]:
        with build_adapted(build_small_spec(tied=True), setting) as (model, world):
            compute_mean_loss(model, world).backward()
            return read_gradients(model)

    [one] = run_ranks(work, 1)
    for two in run_ranks(work, 2):
        for name, grad in one.items():
            assert grad.dtype == two[name].dtype == torch.float32
            assert float((two[name] - grad).norm() / grad.norm()) < 2e-2, name


@pytest.mark.slow
def test_new_adapters_do_not_change_the_model() -> None:
    def work() -> list[float]:
        found = []
        for tied, lora in ((False, LORA), (True, DORA)):
            spec = build_small_spec(tied=tied, layers=LAYERS)
            plain = build_meta(spec, torch.float64).to_empty(device="cpu")
            init_weights(plain, 3, spec)
            with build_adapted(spec, Setting(lora), moved=0) as (model, world):
                found.append(
                    abs(
                        float(
                            (
                                compute_mean_loss(model, world) - compute_mean_loss(plain, world)
                            ).detach()
                        )
                    )
                )
                init_adapters(model, 8)
                found.append(
                    abs(
                        float(
                            (
                                compute_mean_loss(model, world) - compute_mean_loss(plain, world)
                            ).detach()
                        )
                    )
                )
        return found

    for errors in run_ranks(work, 2):
        assert max(errors) < 1e-13
