"""Which receipt a plan quotes, in what words, and what of a run's settings a receipt has."""

from dataclasses import replace

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.nearest_receipt import comparable, nearest, quote_line
from recipe_lib.plan.receipt_facts import run_of
from recipe_lib.plan.receipts import NearestReceipt
from recipe_lib.plan.report import render
from recipe_lib.plan.world.sequence_lengths import Sequence
from recipe_lib.plan.world.shape_only_model import plannable
from tests.plan.made_receipts import made_receipt, made_run
from tests.plan.plans import hand_made

CARD = find_hardware("rtx4090")
SETTINGS = PlanSettings(hardware=CARD, sequence=Sequence(512, "max_seq_len"), recipe="lora_finetune_distributed")


def test_only_the_same_card_and_recipe_count():
    fits = made_receipt(card_memory=CARD.memory)
    others = [
        made_receipt(card_memory=CARD.memory, card="rtx3090"),
        made_receipt(card_memory=CARD.memory // 2),  # a slice of the card
        made_receipt(card_memory=CARD.memory, recipe="full_finetune_distributed"),
    ]
    assert comparable([others[0], fits, *others[1:]], SETTINGS) == [fits]


LARGE = {"model": "llama3/70B", "layers": 80, "width": 8192, "parameters": 70_553_706_496}
SMALL = {"model": "llama3_2/1B", "layers": 16, "width": 2048, "parameters": 1_235_814_400}
FOUR = {"ranks": 4, "mesh": {"data_shard": 4}}


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        # fewer differences
        ({}, {"levers": {}}),
        ({"sequence": 4096}, {"levers": {}}),  # before any size
        (LARGE, FOUR | {"levers": {}}),
        (FOUR, FOUR | {"dtype": "fp32"}),
        ({"levers": {"memory.activation_checkpointing": "selective"}}, {"levers": {"memory.loss_chunks": "16"}}),
        # as many: closer in size
        (SMALL, LARGE),
        (FOUR, LARGE),
        ({"parameters": 9 * 10**9}, {"parameters": 3 * 10**9}),
        ({"sequence": 600}, {"sequence": 400}),
        ({"sequence": 128, "batch_size": 4}, {"sequence": 513}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 1}),
    ],
)
def test_the_nearest_has_the_fewest_differences_then_the_closest_sizes(nearer: dict, farther: dict):
    near, far = made_receipt(**nearer), made_receipt(**farther)
    for order in ([near, far], [far, near]):
        assert nearest(order, made_run()).receipt is near


def test_of_equal_ones_the_last():
    receipts = [made_receipt(planned=size) for size in (1.0, 2.0, 3.0)]
    assert nearest(receipts, made_run()).receipt is receipts[2]


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({}, {}, []),
        ({"model": "meta-llama/x"}, {}, []),  # the same shape under another name
        ({"sequence": 300}, {}, []),
        (LARGE, {}, ["of another model: llama3/70B, 70.55 B parameters in 80 layers, here 8.03 B parameters in 32 lay"
                     "ers"]),
        (FOUR, {}, ["on 4 ranks, here 1"]),
        ({}, FOUR, ["on 1 rank, here 4"]),
        (FOUR, FOUR | {"mesh": {"data_replicate": 2, "data_shard": 2, "tensor": 1}},
         ["data_shard 4, here data_replicate 2 x data_shard 2"]),
        ({"levers": {}}, {}, ["without memory.activation_checkpointing=full"]),
        ({"levers": {"lora.rank": "8"}}, {"levers": {"lora.rank": "64"}}, ["with lora.rank=8, here 64"]),
        ({"levers": {"lora.rank": "8"}}, {"levers": {}}, ["with lora.rank=8"]),
        ({"dtype": "fp32"}, {}, ["with dtype=fp32, here bf16"]),
        ({"batch_size": 4}, {}, ["2,048 tokens in a micro-batch, here 512"]),
    ],
)  # fmt: skip
def test_what_that_run_had_otherwise_is_said(there: dict, here: dict, said: list[str]):
    assert nearest([made_receipt(**there)], made_run(**here)).differences == said


def test_the_quote():
    run = "2026-11-20, rtx4090, lora_finetune_distributed llama3/8B_lora: planned "
    receipt = made_receipt()
    assert quote_line(NearestReceipt(receipt, [])) == (
        f"{run}15.21 GiB reserved, measured 15.43 GiB (-1.4%); 1.7 K tokens/s planned, 1.9 K measured"
    )
    quick = made_receipt(rates=(1700.0, None), expandable=True)
    quick.planned = replace(quick.planned, allocated=None)
    assert quote_line(NearestReceipt(quick, ["a", "b"])) == (
        f"{run}about 15.21 GiB reserved (expandable segments), measured 15.43 GiB (-1.4%); a; b"
    )
    assert quote_line(NearestReceipt(quick, list("abcd"))).endswith("; a; b; c; 1 more difference")
    assert quote_line(NearestReceipt(quick, list("abcde"))).endswith("; a; b; c; 2 more differences")


@pytest.mark.parametrize("full", [False, True])
def test_the_report_quotes_it_above_the_verdict(full: bool):
    found = NearestReceipt(made_receipt(), ["on 4 ranks, here 1"])
    above = render(hand_made(receipt=found), width=120, full=full).rstrip().split("\n\n")[-2]
    assert " ".join(above.split()).endswith(f" receipt: {quote_line(found)}")
    assert "receipt" not in render(hand_made(), width=120, full=full)


def facts(*overrides: str, ranks: int = 1, config: str = "llama3/8B_lora"):
    cfg = load_config(config, overrides, LoraFinetuneConfig)
    shaped, _ = plannable(cfg)
    return run_of(cfg, shaped, replace(SETTINGS, ranks=ranks, config=config, overrides=overrides))


def test_the_facts_of_a_run():
    """Quantized weights and adapters do not make it another model; what the mesh says is no lever."""
    plain = facts("memory.activation_checkpointing=full", "parallel.data_shard=2", "parallel.data_replicate=2",
                  "compile=true", ranks=4)  # fmt: skip
    assert (plain.layers, plain.width, plain.parameters) == (32, 4096, 8_030_261_248)
    assert (plain.card, plain.card_memory, plain.ranks, plain.sequence) == ("rtx4090", CARD.memory, 4, 512)
    assert plain.mesh == {"pipeline": 1, "data_replicate": 2, "data_shard": 2, "tensor": 1}
    shared = facts("parallel.context=2", "parallel.strategy=ddp", "max_seq_len=512", ranks=4)
    assert shared.mesh == {"pipeline": 1, "data_replicate": 2, "data_shard": 1, "context": 2, "tensor": 1}
    assert "parallel.context" not in shared.levers
    assert plain.levers["memory.activation_checkpointing"] == "full"
    assert plain.levers["compile"] == "true"  # though it is planned without
    assert not {"parallel.data_shard", "lora.alpha"} & set(plain.levers)
    quantized = facts("lora.quantize_base=nf4", "lora.rank=64")
    assert quantized.parameters == plain.parameters
    assert (quantized.levers["lora.quantize_base"], quantized.levers["lora.rank"]) == ("nf4", "64")


def test_what_shards_nothing_on_one_rank_is_no_lever():
    assert facts("parallel.strategy=ddp").levers == facts("parallel.strategy=auto").levers
    assert facts("parallel.strategy=ddp", ranks=2).levers["parallel.strategy"] == "ddp"
