"""Which layers each stage has: by hand, against every other split, and what does not fit."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

from recipe_lib.adapters import add_adapters
from recipe_lib.config.mesh import SCHEDULES, count_stages, find_stage_rank, list_rank_stages
from recipe_lib.config.schema import (
    FullFinetuneConfig,
    LoraFinetuneConfig,
    OptimizerConfig,
    ParallelConfig,
)
from recipe_lib.errors import ConfigError
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.models import build_meta, build_spec, read_preset_config
from recipe_lib.optim.optimizers import count_optimizer_state_bytes
from recipe_lib.parallel.pipeline.balance import (
    count_kept_elements,
    count_layer_weights,
    estimate_times,
    make_memory_cost,
    split_layers,
)

LLAMA = build_spec(read_preset_config("llama3/8B"), "llama3/8B")


def config(
    schedule="1f1b", ranks=4, balance="compute", recipe=FullFinetuneConfig, length=1, **parallel
):
    cfg = recipe()
    cfg.parallel = ParallelConfig(
        pipeline=ranks, pipeline_schedule=schedule, pipeline_balance=balance, **parallel
    )
    cfg.max_seq_len, cfg.gradient_accumulation_steps = length, 16
    return cfg


def counts(spec, cfg, shards=1):
    found = split_layers(spec, cfg, shards)
    assert [number for stage in found for number in stage] == list(range(spec.num_layers))
    return [len(stage) for stage in found]


def shaped(layers, **changes):
    return replace(LLAMA, num_layers=layers, windows=(None,) * layers, **changes)


def test_a_head_takes_as_long_as_some_layers():
    """Llama-3-8B: a layer has 2 x 4096 x (4096 + 1024) + 3 x 4096 x 14336 = 218.1 M weights, the
    head 525.3 M.
    """
    assert count_layer_weights(LLAMA) == 218_103_808
    layer, head = estimate_times(LLAMA, config(length=0))
    assert (layer, head) == (6 * 218_103_808, 6 * 525_336_576)
    assert head / layer == pytest.approx(2.409, abs=1e-3)
    # 32 layers and 2.4 for the head, 8.6 on each rank: no rank can have less than 9.
    assert counts(LLAMA, config(length=0)) == [8, 9, 9, 6]
    # V: ranks hold stages 0 and 7, 1 and 6, ...; the head is rank 0's: 6 + 2.4, and 9, 9, 8.
    assert counts(LLAMA, config("zbv", length=0)) == [4, 4, 5, 5, 4, 4, 4, 2]
    # 16 stages of 2.15 each: the head is longer than that alone, and its stage has the one layer it
    # must have.
    assert counts(LLAMA, config("zbv", ranks=8, length=0))[-1] == 1


@pytest.mark.parametrize("name", ["mixtral/8x7B", "qwen3_moe/30B", "gpt_oss/20B", "every second"])
def test_layers_of_experts_weigh_what_they_have_and_take_the_time_of_what_computes(name):
    """By the matrices of the model as it is built: of all experts in bytes, of a token's choices in
    time.
    """
    spec = build_spec(read_preset_config("qwen3_moe/30B" if name == "every second" else name), name)
    mixture = spec.mixture
    if name == "every second":
        mixture = replace(mixture, layers=(False, True) * (spec.num_layers // 2))
        spec = replace(spec, mixture=mixture)
    model = build_meta(spec, torch.bfloat16)
    every, computing, layers = 0, 0, model.model.layers
    for key, parameter in layers.named_parameters():
        if key.endswith("weight") and parameter.dim() > 1:
            every += parameter.numel()
            share = mixture.top_k / mixture.num_experts if parameter.dim() == 3 else 1
            computing += parameter.numel() * share
    assert count_layer_weights(spec) == every // len(layers)
    assert estimate_times(spec, config(length=0))[0] == 6 * computing / len(layers)
    counted = make_memory_cost(spec, config(length=0))
    assert counted(1, {1: 2}) - counted(1, {1: 1}) == 2 * 4 * count_layer_weights(
        spec
    )  # weight, gradient and two states


def test_adapters_of_experts_weigh_more_than_others():
    spec = build_spec(read_preset_config("qwen3_moe/30B"), "qwen3_moe/30B")
    alone, both = (config(length=0, recipe=LoraFinetuneConfig) for _ in range(2))
    both.lora.target_modules = ["all-linear", "experts"]
    numbers = []
    for cfg in (alone, both):
        model = build_meta(spec, torch.bfloat16)
        add_adapters(model, cfg.lora, torch.bfloat16)
        numbers.append(
            sum(one.numel() for one in model.parameters() if one.requires_grad) // spec.num_layers
        )
    weighed = [
        make_memory_cost(spec, cfg)(1, {1: 2}) - make_memory_cost(spec, cfg)(1, {1: 1})
        for cfg in (alone, both)
    ]
    assert weighed[1] - weighed[0] == 2 * 4 * (numbers[1] - numbers[0])
    assert weighed[0] == 2 * count_layer_weights(spec) + 2 * 4 * numbers[0]


def test_what_is_computed_again_and_what_is_not_trained_counts():
    layer, head = estimate_times(LLAMA, config(length=0))
    full = config(length=0)
    full.memory.activation_checkpointing = "full"
    assert estimate_times(LLAMA, full) == (layer * 4 / 3, head)
    full.memory.activation_checkpointing = "selective"
    assert estimate_times(LLAMA, full) == (layer * 7 / 6, head)
    assert estimate_times(LLAMA, config(length=0, recipe=LoraFinetuneConfig)) == (
        layer * 2 / 3,
        head * 2 / 3,
    )
    dpo = config(length=0, recipe=DpoFinetuneConfig)
    assert estimate_times(LLAMA, dpo) == (layer * 2 / 3, head * 2 / 3)
    dpo.dpo.trainable = "all"
    assert estimate_times(LLAMA, dpo) == (layer, head)
    # 8192 tokens: each sees 4096 of them on average, 4 x 4096 operations for each, forward and 2.5
    # times backward.
    assert estimate_times(LLAMA, config(length=8192))[0] == layer + 3.5 * 4 * 4096 * 4096
    windowed = replace(LLAMA, windows=(1024, None) * 16)
    assert (
        estimate_times(windowed, config(length=8192))[0]
        == layer + 3.5 * 4 * 4096 * (1024 + 4096) / 2
    )


def every_split(spec, cfg):
    stages = count_stages(cfg.parallel)
    for ends in combinations(range(1, spec.num_layers), stages - 1):
        edges = [0, *ends, spec.num_layers]
        yield [after - before for before, after in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize(("layers", "vocab"), [(9, 1000), (11, 128256), (13, 500_000)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_other_split_has_a_faster_slowest_rank(schedule, layers, vocab):
    cfg = config(schedule, ranks=3)
    spec = shaped(layers, vocab_size=vocab)
    layer, head = estimate_times(spec, cfg)
    last = count_stages(cfg.parallel) - 1

    def slowest(split):
        times = [
            layer * count + (head if stage == last else 0) for stage, count in enumerate(split)
        ]
        return max(
            sum(times[stage] for stage in list_rank_stages(cfg.parallel, rank)) for rank in range(3)
        )

    assert slowest(counts(spec, cfg)) == pytest.approx(min(map(slowest, every_split(spec, cfg))))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_other_split_has_a_smaller_largest_rank(schedule, checkpointing):
    cfg = config(schedule, balance="memory", length=2048)
    cfg.memory.activation_checkpointing = checkpointing
    spec = shaped(14)
    cost = make_memory_cost(spec, cfg)

    def largest(split):
        return max(
            cost(rank, {stage: split[stage] for stage in list_rank_stages(cfg.parallel, rank)})
            for rank in range(4)
        )

    assert largest(counts(spec, cfg)) == min(map(largest, every_split(spec, cfg)))


def test_memory_by_hand():
    """bf16 weights, gradients and two states: 8 bytes a weight; one micro-batch of 1000 tokens on
    each rank with gpipe keeps 2 x 1000 x 4 d + 2 h e + 2 k e + 4 f bytes a layer.
    """
    cfg = config("gpipe", balance="memory", length=1000)
    cfg.gradient_accumulation_steps, cfg.memory.loss_chunks = 1, 1
    cost = make_memory_cost(LLAMA, cfg)
    kept = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    assert count_kept_elements(LLAMA, "none") == kept
    assert cost(1, {1: 3}) == 3 * (8 * 218_103_808 + 2000 * kept)
    assert cost(0, {0: 3}) - cost(1, {1: 3}) == 8 * 525_336_576
    logits = 1000 * 128256 * 10  # in bf16, and in fp32 twice
    assert cost(3, {3: 3}) - cost(1, {1: 3}) == (8 + 2) * 525_336_576 + logits
    cfg.gradient_accumulation_steps = 5
    assert make_memory_cost(LLAMA, cfg)(1, {1: 3}) == 3 * (8 * 218_103_808 + 5 * 2000 * kept)
    cfg.parallel.pipeline_schedule = "1f1b"
    assert make_memory_cost(LLAMA, cfg)(2, {2: 3}) == 3 * (8 * 218_103_808 + 2 * 2000 * kept)
    assert make_memory_cost(LLAMA, cfg, shards=8)(2, {2: 3}) == 3 * (218_103_808 + 2 * 2000 * kept)


def test_ranks_with_more_in_flight_have_fewer_layers():
    split = counts(shaped(32, vocab_size=8), config(balance="memory", length=8192))
    assert split == sorted(split)
    assert split[0] < 8 < split[-1]


def test_frozen_weights_weigh_less():
    full = make_memory_cost(LLAMA, config(balance="memory"))(1, {1: 1})
    lora = config(balance="memory", recipe=LoraFinetuneConfig)
    plain = make_memory_cost(LLAMA, lora)(1, {1: 1})
    lora.lora.quantize_base = "nf4"
    quantized = make_memory_cost(LLAMA, lora)(1, {1: 1})
    assert full > 3 * plain > 3 * 2 * quantized
    dpo = config(balance="memory", recipe=DpoFinetuneConfig)
    dpo.dpo.trainable = "all"  # and a frozen copy
    assert make_memory_cost(LLAMA, dpo)(1, {1: 1}) > 1.2 * full


def test_a_tied_head_on_the_rank_of_the_embedding_is_no_second_one():
    tied = replace(LLAMA, tied=True)
    cfg = config("zbv", balance="memory")
    first = find_stage_rank(cfg.parallel, 7)
    assert first == 0
    weights = 8 * LLAMA.vocab_size * LLAMA.width
    assert (
        make_memory_cost(LLAMA, cfg)(0, {0: 1, 7: 1}) - make_memory_cost(tied, cfg)(0, {0: 1, 7: 1})
        == weights
    )
    cfg = config(balance="memory")
    assert make_memory_cost(LLAMA, cfg)(3, {3: 1}) == make_memory_cost(tied, cfg)(3, {3: 1})


def test_a_list_is_taken_as_it_is():
    assert counts(LLAMA, config(pipeline_layers_per_stage=[10, 8, 8, 6])) == [10, 8, 8, 6]


@pytest.mark.parametrize(
    ("layers", "cfg", "message"),
    [
        (
            4,
            config("zbv"),
            (
                r"parallel.pipeline: found 8 stages for 4 layers, expected .*; set"
                r" parallel.pipeline lower"
            ),
        ),
        (3, config(), "found 4 stages for 3 layers"),
        (
            8,
            config(pipeline_layers_per_stage=[2, 2, 4]),
            "found 3 stages with 8 layers, expected 4 stages .* list 4 numbers",
        ),
        (
            8,
            config(pipeline_layers_per_stage=[4, 0, 2, 2]),
            "found 4 stages with 8 layers, stage 1 with 0, expected .* one layer or more",
        ),
        (
            8,
            config(pipeline_layers_per_stage=[2, 2, 2, 3]),
            "found 4 stages with 9 layers, expected 4 stages .* 8 layers in all",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(layers, cfg, message):
    with pytest.raises(ConfigError, match=message) as caught:
        split_layers(shaped(layers), cfg)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"state_bits": 8},
        {"state_bits": 4, "master_weights": True},
        {"master_weights": True},
        {"stochastic_rounding": True},
        {"state_bits": 32},
        {"name": "muon"},
        {"name": "muon", "state_bits": 8},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9},
    ],
    ids=str,
)
def test_states_weigh_what_the_optimizer_keeps(settings):
    """Of a layer's matrices, and of embedding and head, as the optimizer counts them; on the host
    they are none.
    """
    cfg = config(balance="memory")
    plain = make_memory_cost(LLAMA, config(balance="memory"))
    cfg.optimizer = OptimizerConfig(**settings)
    matrices = {
        "model.layers.0.mlp.up_proj.weight": (14336, 4096),
        "lm_head.weight": (128256, 4096),
    }
    kept = {}
    for name, shape in matrices.items():
        parameter = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        kept[name] = (
            count_optimizer_state_bytes(cfg.optimizer, [(name, parameter)]) / parameter.numel()
        )
    of_layer, of_head = kept.values()
    cost = make_memory_cost(LLAMA, cfg)
    assert plain(1, {1: 3}) - cost(1, {1: 3}) == pytest.approx(
        3 * 218_103_808 * (4 - of_layer), abs=1
    )
    first = [
        one(0, {0: 3}) - one(1, {1: 3}) for one in (plain, cost)
    ]  # 4 micro-batches in flight, and 3
    assert first[0] - first[1] == pytest.approx(525_336_576 * (4 - of_head), abs=1)
    last = [one(3, {3: 3}) - one(1, {1: 3}) for one in (plain, cost)]
    assert last[0] - last[1] == pytest.approx(525_336_576 * (4 - of_head), abs=1)
    cfg.memory.optimizer_offload = True
    assert cost(1, {1: 3}) - make_memory_cost(LLAMA, cfg)(1, {1: 3}) == pytest.approx(
        3 * 218_103_808 * of_layer, abs=1
    )
