"""A key that another one makes idle is a line, not a fault, and has its default in the config that
is used.
"""

import dataclasses

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig, load_config
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.key_conditions import describe_needs, explain_idle_key
from recipe_lib.config.load import load_with_origins as load_all
from recipe_lib.config.mesh import SCHEDULES
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.errors import ConfigError
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.methods.reward.config import RewardFinetuneConfig

GOOD = "model: {path: x}\ndata: {source: rows.jsonl}\n"
PAIRS = "model: {path: x}\ndata: {source: rows.jsonl, format: preference}\n"
TAUGHT = f"{GOOD}distill: {{teacher: x}}\n"
LORA = LoraFinetuneConfig
DPO = DpoFinetuneConfig
DISTILL = DistillFinetuneConfig

# Override of the key, others, the line; schema.
CASES = [
    ("lr_scheduler.min_lr_ratio=0.1", ["lr_scheduler.type=constant"], "lr_scheduler.type is constant"),
    ("lr_scheduler.warmup_steps=9", ["lr_scheduler.warmup_ratio=0.1"], "lr_scheduler.warmup_ratio is 0.1"),
    ("optimizer.momentum=0.9", [], "optimizer.name is adamw"),
    ("validation.split=test", ["validation.source=own.jsonl"], "validation.source is no dataset of the hub"),
    ("optimizer.betas=[0.9, 0.999]", ["optimizer.name=sgd"], "optimizer.name is sgd"),
    ("optimizer.eps=1e-6", ["optimizer.name=sgd"], "optimizer.name is sgd"),
    ("optimizer.state_bits=8", ["optimizer.name=sgd"], "optimizer.name is sgd"),
    ("optimizer.master_weights=true", ["optimizer.name=sgd"], "optimizer.name is sgd"),
    ("optimizer.master_weights=true", ["dtype=fp32"], "dtype is fp32"),
    ("optimizer.stochastic_rounding=true", ["optimizer.name=sgd"], "optimizer.name is sgd"),
    ("optimizer.stochastic_rounding=true", ["dtype=fp32"], "dtype is fp32"),
    ("optimizer.implementation=foreach", ["optimizer.name=muon"], "optimizer.name is muon"),
    ("optimizer.implementation=foreach", ["optimizer.state_bits=8"],
     "optimizer.state_bits is 8, which has one implementation"),
    ("parallel.data_shard=2", ["parallel.strategy=ddp"], "parallel.strategy is ddp"),
    ("parallel.data_replicate=2", ["parallel.strategy=ddp"], "parallel.strategy is ddp"),
    ("parallel.fsdp_wrap_policy=layers", ["parallel.strategy=ddp"], "parallel.strategy is ddp"),
    ("parallel.reshard_after_forward=false", ["parallel.strategy=ddp"], "parallel.strategy is ddp"),
    ("parallel.reduce_gradients=step", ["parallel.strategy=ddp", "gradient_accumulation_steps=2"],
     "parallel.strategy is ddp"),
    ("parallel.reduce_gradients=step", [], "gradient_accumulation_steps is 1, parallel.pipeline is 1"),
    ("parallel.accumulate_grad_in_fp32=true", [], "gradient_accumulation_steps is 1, parallel.pipeline is 1"),
    ("parallel.accumulate_grad_in_fp32=true", ["dtype=fp32", "gradient_accumulation_steps=2"], "dtype is fp32"),
    ("parallel.tensor_regather_in_backward=true", [], "parallel.tensor is 1"),
    ("parallel.tensor_replicate_kv_heads=true", [], "parallel.tensor is 1"),
    ("parallel.tensor_replicate_kv_heads=true", ["parallel.tensor=2", "model.implementation=transformers"],
     "model.implementation is transformers"),
    ("parallel.pipeline_schedule=zbv", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_microbatches=4", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_stages_per_rank=3", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_stages_per_rank=3", ["parallel.pipeline=2", "gradient_accumulation_steps=4"],
     "parallel.pipeline_schedule is 1f1b"),
    ("parallel.pipeline_max_deferred_weight_grads=1", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_max_deferred_weight_grads=1", ["parallel.pipeline=2", "gradient_accumulation_steps=4"],
     "parallel.pipeline_schedule is 1f1b"),
    ("parallel.pipeline_balance=memory", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_layers_per_stage=[1, 1]", [], "parallel.pipeline is 1"),
    ("parallel.pipeline_balance=memory",
     ["parallel.pipeline=2", "gradient_accumulation_steps=4", "parallel.pipeline_layers_per_stage=[1, 1]"],
     "parallel.pipeline_layers_per_stage is set"),
    ("memory.activation_budget_gib=4", [], "memory.activation_checkpointing is none"),
    ("memory.activation_offload_prefetch_layers=2", [], "memory.activation_offload is false"),
    ("memory.recompute_cheap=false",
     ["memory.activation_checkpointing=budget", "memory.activation_budget_gib=4", "compile=true"],
     "compile is true, memory.activation_checkpointing is budget"),
    ("memory.recompute_cheap=false", ["memory.activation_checkpointing=full"],
     "memory.activation_checkpointing is full"),
    ("memory.recompute_cheap=false", ["model.implementation=transformers", "compile=true"],
     "model.implementation is transformers, compile is true"),
    ("memory.recompute_cheap=false", ["model.implementation=transformers", "parallel.tensor=2"],
     "model.implementation is transformers, parallel.tensor is 2"),
    ("memory.activation_offload=true", ["device=cpu"], "device is cpu"),
    ("memory.cpu_offload=true", ["device=cpu"], "device is cpu"),
    ("fused_kernels=false", ["device=cpu"], "device is cpu"),
    ("memory.optimizer_offload=true", ["device=cpu"], "device is cpu"),
    ("memory.optimizer_offload=true", ["memory.cpu_offload=true"], "memory.cpu_offload is true"),
    ("memory.host_memory_limit_gib=64", [],
     "memory.cpu_offload is false, memory.optimizer_offload is false, memory.activation_offload is false, "
     "memory.stream_layers is false"),
    ("memory.stream_layers=true", ["device=cpu"], "device is cpu"),
    ("memory.stream_layers=true", ["memory.cpu_offload=true"], "memory.cpu_offload is true"),
    ("memory.stream_layers=experts", ["device=cpu"], "device is cpu"),
    ("memory.stream_layers=experts", ["memory.cpu_offload=true"], "memory.cpu_offload is true"),
    ("data.split=test", [], "no source is a dataset of the hub"),
    ("data.template=chat", ["data.format=text"], "data.format is text"),
    ("data.history=split", ["data.format=text"], "data.format is text"),
    ("data.history=split", ["data.train_on=all"], "data.train_on is all"),
    ("data.truncation=drop", ["data.format=text"], "data.format is text"),
    ("data.train_on=last", ["data.format=text"], "data.format is text"),
    ("data.cache_dir=rows", ["data.cache=false"], "data.cache is false"),
    ("validation.format=alpaca", [], "validation.source is null"),
    ("validation.every_n_steps=1", [], "validation.source is null"),
    ("validation.max_samples=1", [], "validation.source is null"),
    ("validation.batch_size=1", [], "validation.source is null"),
    ("validation.metrics=[exact_match]", [], "validation.source is null"),
    ("validation.max_new_tokens=9", [], "validation.source is null"),
    (
        "validation.max_new_tokens=9",
        ["validation.source=own.jsonl", "validation.metrics=[exact_match]"],
        "validation.metrics names no metric of a plugin",
    ),
    ("validation.min_delta=0.1", ["validation.source=own.jsonl"], "validation.patience is null"),
    ("checkpoint.best_metric=validation_reward_margin", ["validation.source=own.jsonl"],
     "checkpoint.keep_best is false, validation.patience is null"),
    ("checkpoint.greater_is_better=true", ["validation.source=own.jsonl"],
     "checkpoint.keep_best is false, validation.patience is null"),
    ("qat_group_size=16", ["qat=int8"], "qat is int8"),
    ("qat_start_step=5", [], "qat is null"),
    ("lora.merge_on_save=true", ["checkpoint.save_model=false"], "checkpoint.save_model is false", LORA),
    *((f"lora.{word}", ["dpo.trainable=all"], "dpo.trainable is all", DPO)
      for word in ("rank=4", "alpha=8", "dropout=0.1", "target_modules=[q]", "rslora=true", "dora=true",
                   "quantize_base=nf4", "dtype=fp32", "adapter_path=outputs/run/adapter", "merge_on_save=true")),
    ("dpo.label_smoothing=0.1", ["dpo.loss=ipo"], "dpo.loss is ipo", DPO),
    ("dpo.simpo_gamma=1.0", [], "dpo.loss is sigmoid", DPO),
    ("dpo.reference_free=true", ["dpo.loss=simpo"], "dpo.loss is simpo", DPO),
    ("dpo.desirable_weight=2.0", [], "dpo.loss is sigmoid", DPO),
    ("dpo.undesirable_weight=2.0", ["dpo.loss=simpo"], "dpo.loss is simpo", DPO),
    ("reward.num_labels=3", [], "reward.loss is pairwise", RewardFinetuneConfig),
    ("reward.center_rewards_coefficient=0.1", ["reward.loss=classification", "data.format=classification"],
     "reward.loss is classification", RewardFinetuneConfig),
    ("data.train_on=all", [], "data.format is preference", DPO),
    ("data.add_eos=false", ["data.format=alpaca"], "data.format is alpaca"),
    ("data.parse_special_tokens=true", ["data.format=text"], "data.format is text"),
    ("lora.rank=4", [], "distill.trainable is all", DISTILL),
    ("distill.beta=0.3", [], "distill.divergence is forward_kl", DISTILL),
    ("distill.stream_teacher=true", ["device=cpu"], "device is cpu", DISTILL),
    ("distill.stream_teacher=true", ["memory.cpu_offload=true", "device=cuda"], "memory.cpu_offload is true", DISTILL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {' '.join(case[1])}")
def test_idle_keys_are_told_and_have_their_defaults(write, case):
    override, others, reason, *rest = case
    schema = rest[0] if rest else FullFinetuneConfig
    samples = {DPO: PAIRS, DISTILL: TAUGHT, RewardFinetuneConfig: PAIRS}
    path, name = write(samples.get(schema, GOOD)), override.partition("=")[0]
    loaded = load_all(path, [override, *others], schema)
    assert loaded.idle == {name: reason}
    assert dataclasses.asdict(loaded.cfg) == dataclasses.asdict(load_config(path, others, schema))
    (row,) = [row for row in loaded.rows if row[0] == name]
    assert row[2] == f"command line; no effect: {reason}"


def test_every_declaration_has_a_case():
    declared = {name for schema in read_recipe_configs().values() for name, key in read_schema(schema).keys.items()
                if "needs" in key.limits}  # fmt: skip
    assert declared - {case[0].partition("=")[0] for case in CASES} == {"loss"}


def test_conditions_name_keys_that_stand_before(write):
    """They are judged in the schema's order, each after what it needs."""
    for schema in read_recipe_configs().values():
        keys = read_schema(schema).keys
        order = list(keys)
        for name, key in keys.items():
            if needs := key.limits.get("needs"):
                assert describe_needs(needs)
                conditions = needs if isinstance(needs, tuple) else (needs,)
                for one in (
                    part
                    for each in conditions
                    if isinstance(each, str)
                    for part in each.split(" or ")
                ):
                    named = one.partition(" ")[0]
                    assert any(
                        named in read_schema(each).keys for each in read_recipe_configs().values()
                    ), name
                    if "needs" in getattr(keys.get(named), "limits", {}):
                        assert order.index(named) < order.index(name), (
                            f"{name} is judged before {named}"
                        )


@pytest.mark.parametrize(
    ("overrides", "kept", "idle", "schema"),
    [
        (
            ["dtype=fp32", "optimizer.master_weights=true"],
            "fused",
            "optimizer.master_weights",
            FullFinetuneConfig,
        ),
        (
            ["dtype=fp32", "optimizer.stochastic_rounding=true"],
            "fused",
            "optimizer.stochastic_rounding",
            LORA,
        ),
    ],
)
def test_an_idle_key_makes_no_other_idle(write, overrides, kept, idle, schema):
    loaded = load_all(write(GOOD), [*overrides, f"optimizer.implementation={kept}"], schema)
    assert loaded.cfg.optimizer.implementation == kept
    assert list(loaded.idle) == [idle]


def test_a_pipeline_config_without_its_pipeline(write, capsys, monkeypatch):
    text = (
        GOOD + "parallel:\n  pipeline: 2\n  pipeline_schedule: zbv\n  pipeline_microbatches:"
        " 4\nbatch_size: 4\n"
    )
    loaded = load_all(write(text), ["parallel.pipeline=1"])
    assert loaded.describe_idle_keys() == [
        "parallel.pipeline_schedule has no effect: parallel.pipeline is 1",
        "parallel.pipeline_microbatches has no effect: parallel.pipeline is 1",
    ]


def test_at_its_default_nothing_is_said(write):
    for text in ("optimizer: {name: sgd, betas: [0.9, 0.95], eps: 1e-8}\n", "data: {source: a, split: train}\n",
                 "lr_scheduler: {type: constant, min_lr_ratio: 0}\n"):  # fmt: skip
        assert (
            load_all(
                write(
                    "model: {path: x}\n" + ("" if "data" in text else "data: {source: a}\n") + text
                )
            ).idle
            == {}
        )


def test_an_idle_key_is_part_of_no_rule(write):
    """nf4 weights with int8 matmuls are refused, but not where no adapter is trained."""
    words = ["lora.quantize_base=nf4", "matmul_dtype=int8"]
    with pytest.raises(ConfigError):
        load_config(write(PAIRS), words, DPO)
    assert load_config(write(PAIRS), [*words, "dpo.trainable=all"], DPO).matmul_dtype == "int8"


def test_a_wrong_value_of_an_idle_key_is_a_fault(faults):
    assert faults("", "parallel.pipeline_schedule=zbx") != []


def test_a_loss_of_tokens_has_no_use_for_pairs():
    keys = read_schema(DPO).keys
    assert explain_idle_key(DPO(), keys["loss"]) == "the loss of pairs is dpo.loss, sigmoid"
    expected = "the loss is distillation, distill.divergence forward_kl"
    assert explain_idle_key(DISTILL(), keys["loss"]) == expected
    assert explain_idle_key(FullFinetuneConfig(), keys["loss"]) is None


def test_validate_says_so_and_ends_well(capsys, tmp_path):
    levers = ["optimizer.name=sgd", "optimizer.eps=1e-3", "parallel.pipeline_schedule=zbv"]
    assert main(["validate", "demo/full", f"output_dir={tmp_path / 'new'}", *levers]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "demo/full: a valid config of full_finetune_distributed"
    assert said[1:3] == [
        "note: optimizer.eps has no effect: optimizer.name is sgd",
        "note: parallel.pipeline_schedule has no effect: parallel.pipeline is 1",
    ]


def test_schedules_are_those_of_the_table():
    """What the conditions spell out, since the schema knows no schedule."""
    needs = {name: key.limits["needs"][1] for name, key in read_schema(FullFinetuneConfig).keys.items()
             if name.endswith(("deferred_weight_grads", "stages_per_rank"))}  # fmt: skip
    splitting = ", ".join(name for name, facts in SCHEDULES.items() if facts.splits)
    free = ", ".join(name for name, facts in SCHEDULES.items() if facts.stages is None)
    assert (
        needs["parallel.pipeline_max_deferred_weight_grads"]
        == f"parallel.pipeline_schedule in {splitting}"
    )
    assert needs["parallel.pipeline_stages_per_rank"] == f"parallel.pipeline_schedule in {free}"
