"""Which receipt a plan quotes, in what words, and what of a run's settings a receipt has."""

from dataclasses import replace

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.schema import LoraFinetuneConfig
from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.measured.receipts import ReceiptRun, describe_run, find_nearest, format_receipt
from recipe_lib.plan.simulated_world.planned_data import PlannedSequence
from recipe_lib.plan.simulated_world.shape_only_model import make_plannable
from recipe_lib.plan.views.report import render
from tests.plan.made_receipts import build_receipt, build_run
from tests.plan.plans import build_example_plan

CARD = find_hardware("rtx4090")
SETTINGS = PlanSettings(
    hardware=CARD, sequence=PlannedSequence(512, "max_seq_len"), recipe="lora_finetune_distributed"
)


def test_only_the_same_card_and_recipe_count():
    fits = build_receipt()
    others = [
        build_receipt(card="rtx3090"),
        build_receipt(card_memory=fits.run.card_memory // 2),  # a slice of the card
        build_receipt(recipe="full_finetune_distributed"),
    ]
    found = find_nearest([others[0], fits, *others[1:]], build_run({"dtype": "fp32"}))
    assert found is fits
    assert find_nearest(others, build_run()) is None and find_nearest([], build_run()) is None


SMALL = {"model": "llama3_2/1B"}
FOUR = {"mesh": "data_shard 4"}


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ({}, SMALL),
        ({"sequence": "4096"}, SMALL | {"sequence": "4096"}),
        (FOUR, SMALL | {"dtype": "fp32"}),
        ({"memory.activation_checkpointing": "selective"}, FOUR | {"memory.loss_chunks": "16"}),
    ],
)
def test_the_nearest_has_the_fewest_differences(nearer: dict[str, str], farther: dict[str, str]):
    near, far = build_receipt(settings=nearer), build_receipt(settings=farther)
    for order in ([near, far], [far, near]):
        assert find_nearest(order, build_run()) is near


def test_of_equal_ones_the_last():
    receipts = [build_receipt(planned=size, settings={"dtype": "fp32"}) for size in (1.0, 2.0, 3.0)]
    assert find_nearest(receipts, build_run()) is receipts[2]


def test_the_quote():
    run = (
        "2026-11-20, rtx4090, lora_finetune_distributed llama3/8B_lora: planned 15.21 GiB reserved,"
        " measured "
    )
    assert (
        format_receipt(build_receipt())
        == f"{run}15.43 GiB (-1.4%); 1.7 K tokens/s planned, 1.9 K measured"
    )
    assert format_receipt(build_receipt(rates=(1700.0, None))) == f"{run}15.43 GiB (-1.4%)"


@pytest.mark.parametrize("full", [False, True])
def test_the_report_quotes_it_above_the_verdict(full: bool):
    quote = format_receipt(build_receipt())
    above = (
        render(build_example_plan(receipt=quote), width=120, full=full).rstrip().split("\n\n")[-2]
    )
    assert " ".join(above.split()).endswith(f" receipt: {quote}")
    assert "receipt" not in render(build_example_plan(), width=120, full=full)


def describe(*overrides: str, ranks: int = 1, config: str = "llama3/8B_lora") -> ReceiptRun:
    cfg = load_config(config, overrides, LoraFinetuneConfig)
    shaped, _ = make_plannable(cfg)
    return describe_run(
        cfg, shaped, replace(SETTINGS, ranks=ranks, config=config, overrides=overrides)
    )


def test_the_settings_of_a_run():
    """What the mesh says is no lever, nor is what changes no memory."""
    plain = describe(
        "memory.activation_checkpointing=full",
        "parallel.data_shard=2",
        "parallel.data_replicate=2",
        "compile=true",
        ranks=4,
    )
    assert (plain.card, plain.card_memory, plain.ranks) == ("rtx4090", CARD.memory, 4)
    assert (
        plain.settings["model"] == "meta-llama/Meta-Llama-3-8B"
        and plain.settings["sequence"] == "512"
    )
    assert plain.settings["mesh"] == "data_replicate 2 x data_shard 2"
    shared = describe("parallel.context=2", "parallel.strategy=ddp", "max_seq_len=512", ranks=4)
    assert shared.settings["mesh"] == "data_replicate 2 x context 2"
    assert "parallel.context" not in shared.settings
    assert plain.settings["memory.activation_checkpointing"] == "full"
    assert plain.settings["compile"] == "true"  # though it is planned without
    assert not {"parallel.data_shard", "lora.alpha"} & set(plain.settings)
    quantized = describe("lora.quantize_base=nf4", "lora.rank=64").settings
    assert (quantized["lora.quantize_base"], quantized["lora.rank"]) == ("nf4", "64")


def test_what_shards_nothing_on_one_rank_is_no_lever():
    assert describe("parallel.strategy=ddp").settings == describe("parallel.strategy=auto").settings
    assert describe("parallel.strategy=ddp", ranks=2).settings["parallel.strategy"] == "ddp"
