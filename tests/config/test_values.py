"""Types, bounds and choices of a single value: what is taken, and what the line says when it is
not.
"""

import math
from pathlib import Path

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.schema import LoraFinetuneConfig

INTEGER = "expected an integer >= 1"

WRONG = [
    # types
    ("batch_size: eight", f"batch_size: found 'eight', {INTEGER}"),
    ("batch_size: 'eight'", f"batch_size: found 'eight', {INTEGER}"),
    ("batch_size: '8'", f"batch_size: found '8' in quotes, {INTEGER}; remove the quotes"),
    ("batch_size: true", f"batch_size: found true, {INTEGER}"),
    ("batch_size: 1.5", f"batch_size: found 1.5, {INTEGER}"),
    ("batch_size: 2.0", f"batch_size: found 2.0, {INTEGER}"),
    ("batch_size: 1e3", f"batch_size: found 1e3, {INTEGER}"),
    ("batch_size: null", f"batch_size: found null, {INTEGER}"),
    ("batch_size: ~", f"batch_size: found null, {INTEGER}"),
    ("batch_size:", f"batch_size: found nothing, {INTEGER}"),
    ("batch_size: [8]", f"batch_size: found a list, {INTEGER}"),
    ("batch_size: {a: 8}", f"batch_size: found a section of keys, {INTEGER}"),
    ("batch_size: 08", f"batch_size: found 08, {INTEGER}; write it without leading zeros"),
    ("batch_size: 0x8", f"batch_size: found '0x8', {INTEGER}"),
    ("batch_size: 1:30", f"batch_size: found '1:30', {INTEGER}"),
    ("batch_size: ٣", f"batch_size: found '٣', {INTEGER}"),
    ("max_steps: none", "max_steps: found 'none', expected an integer >= 1, or null; write null"),
    ("max_steps: 'None'", "max_steps: found 'None', expected an integer >= 1, or null"),
    ("compile: 1", "compile: found 1, expected true or false"),
    (
        "compile: 'true'",
        "compile: found 'true' in quotes, expected true or false; remove the quotes",
    ),
    ("compile: ture", "compile: found 'ture', expected true or false"),
    (
        "output_dir: 3",
        "output_dir: found 3, expected text; if it is meant as text, put it in quotes",
    ),
    (
        "output_dir: 1e-5",
        "output_dir: found 1e-5, expected text; if it is meant as text, put it in quotes",
    ),
    (
        "output_dir: false",
        "output_dir: found false, expected text; if it is meant as text, put it in quotes",
    ),
    ("output_dir: null", "output_dir: found null, expected text"),
    ("output_dir: ''", "output_dir: found an empty text, expected text"),
    ("output_dir: [a]", "output_dir: found a list, expected text"),
    (
        'output_dir: "a\\0b"',
        "output_dir: found 'a\\x00b', expected text; a text is one line of printable letters",
    ),
    (
        "output_dir: |\n  a\n",
        "output_dir: found 'a\\n', expected text; a text is one line of printable letters",
    ),
    ('output_dir: "???"', "output_dir: found '???', expected text; put a value in its place"),
    ("resume: none", "resume: found 'none', expected text, or null; write null"),
    ("clip_grad_norm: big", "clip_grad_norm: found 'big', expected a number > 0, or null"),
    # bounds
    ("batch_size: 0", f"batch_size: found 0, {INTEGER}"),
    ("batch_size: -3", f"batch_size: found -3, {INTEGER}"),
    ("seed: -1", "seed: found -1, expected an integer >= 0"),
    (
        f"seed: {2**63}",
        f"seed: found {2**63}, expected an integer >= 0; at most 9223372036854775807 (2^63 - 1)",
    ),
    ("clip_grad_norm: 0", "clip_grad_norm: found 0, expected a number > 0, or null"),
    (
        "clip_grad_norm: .nan",
        "clip_grad_norm: found .nan, expected a number > 0, or null; it has to be finite",
    ),
    (
        "clip_grad_norm: NaN",
        "clip_grad_norm: found NaN, expected a number > 0, or null; it has to be finite",
    ),
    (
        "clip_grad_norm: -.inf",
        "clip_grad_norm: found -.inf, expected a number > 0, or null; it has to be finite",
    ),
    (
        "clip_grad_norm: 1e999",
        "clip_grad_norm: found 1e999, expected a number > 0, or null; it has to be finite",
    ),
    # choices
    ("dtype: fp23", "dtype: found 'fp23', expected one of fp32, bf16, fp64; did you mean fp32?"),
    (
        "dtype: bfloat16",
        "dtype: found 'bfloat16', expected one of fp32, bf16, fp64; did you mean bf16?",
    ),
    (
        "dtype: float32",
        "dtype: found 'float32', expected one of fp32, bf16, fp64; did you mean fp32?",
    ),
    ("dtype: 16", "dtype: found '16', expected one of fp32, bf16, fp64; did you mean bf16?"),
    ("dtype: BF16", "dtype: found 'BF16', expected one of fp32, bf16, fp64; did you mean bf16?"),
    ("device: gpu", "device: found 'gpu', expected one of auto, cpu, cuda; did you mean cuda?"),
    (
        "loss: crossentropy",
        "loss: found 'crossentropy', expected one of cross_entropy; did you mean cross_entropy?",
    ),
]

WRONG_IN_SECTIONS = [
    ("optimizer", "lr: 0", "optimizer.lr: found 0, expected a number > 0"),
    ("optimizer", "lr: fast", "optimizer.lr: found 'fast', expected a number > 0"),
    ("optimizer", "lr: [1e-5]", "optimizer.lr: found a list, expected a number > 0"),
    (
        "optimizer",
        "betas: 0.9",
        "optimizer.betas: found 0.9, expected a list [...] of 2 numbers, each >= 0 and < 1",
    ),
    (
        "optimizer",
        "betas: [0.9]",
        "optimizer.betas: found a list of 1, expected a list [...] of 2 numbers, each >= 0 and < 1",
    ),
    (
        "optimizer",
        "betas: [0.9, 1]",
        "optimizer.betas: found 1, expected a list [...] of 2 numbers, each >= 0 and < 1",
    ),
    (
        "optimizer",
        "betas: [0.9, a]",
        "optimizer.betas: found 'a', expected a list [...] of 2 numbers, each >= 0 and < 1",
    ),
    (
        "optimizer",
        "name: adam",
        "optimizer.name: found 'adam', expected one of adamw, muon, sgd; did you mean adamw?",
    ),
    (
        "optimizer",
        "momentum: 1",
        "optimizer.momentum: found 1, expected a number >= 0 and < 1, or null",
    ),
    (
        "lr_scheduler",
        "min_lr_ratio: 1.5",
        "lr_scheduler.min_lr_ratio: found 1.5, expected a number >= 0 and <= 1",
    ),
    ("parallel", "data_shard: 0", "parallel.data_shard: found 0, expected an integer >= 1, or -1"),
    (
        "parallel",
        "data_shard: -2",
        "parallel.data_shard: found -2, expected an integer >= 1, or -1",
    ),
    (
        "parallel",
        "fsdp_wrap_policy: layer",
        (
            "parallel.fsdp_wrap_policy: found 'layer', expected one of auto, layers,"
            " memory_efficient, or a list [...] of texts; did you mean layers?"
        ),
    ),
    (
        "parallel",
        "fsdp_wrap_policy: model.layers.*",
        (
            "parallel.fsdp_wrap_policy: found 'model.layers.*', expected one of auto, layers,"
            " memory_efficient, or a list [...] of texts; write [model.layers.*]"
        ),
    ),
    (
        "parallel",
        "fsdp_wrap_policy: []",
        (
            "parallel.fsdp_wrap_policy: found a list of 0, expected one of auto, layers,"
            " memory_efficient, or a list [...] of texts"
        ),
    ),
    (
        "parallel",
        "fsdp_wrap_policy: [3]",
        (
            "parallel.fsdp_wrap_policy: found 3, expected one of auto, layers, memory_efficient, or"
            " a list [...] of texts; if it is meant as text, put it in quotes"
        ),
    ),
    (
        "log",
        "trackers: wandb",
        "log.trackers: found 'wandb', expected a list [...] of tensorboard, wandb, trackio",
    ),
    (
        "log",
        "trackers: [wandb, tensorbord]",
        (
            "log.trackers: found 'tensorbord', expected a list [...] of tensorboard, wandb,"
            " trackio; did you mean tensorboard?"
        ),
    ),
    (
        "memory",
        "activation_checkpointing: true",
        (
            "memory.activation_checkpointing: found 'true', expected one of none, full, selective,"
            " budget; did you mean full?"
        ),
    ),
]


@pytest.mark.parametrize(("text", "line"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_value(faults, text, line):
    assert faults(f"{text}\n") == [f"c.yaml:1: {line}"]


@pytest.mark.parametrize(
    ("section", "text", "line"), WRONG_IN_SECTIONS, ids=[text for _, text, _ in WRONG_IN_SECTIONS]
)
def test_wrong_value_in_a_section(faults, section, text, line):
    assert faults(f"{section}:\n  {text}\n") == [f"c.yaml:2: {line}"]


def test_wrong_mapping(faults):
    text = "data:\n  source: x\n  columns: {}\n"
    for value, found in (
        ("a", "'a'"),
        ("[a]", "a list"),
        ("{a: [b]}", "a list"),
        ("{a: {b: c}}", "a section of keys"),
    ):
        expected = f"c.yaml:3: data.columns: found {found}, expected a mapping {{name: text}}"
        assert faults(text.replace("{}", value)) == [expected]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("'1e-5'", 1e-5),
        ("1.0e-05", 1e-5),
        ("3", 3.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_0.5", 10.5),
    ],
)
def test_numbers(load, text, value):
    lr = load(f"optimizer: {{lr: {text}}}\n").optimizer.lr
    assert lr == value
    assert type(lr) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", True),
        ("yes", True),
        ("on", True),
        ("false", False),
        ("NO", False),
        ("off", False),
    ],
)
def test_truth_values(load, text, value):
    assert load(f"compile: {text}\n").compile is value


def test_right_values(load):
    cfg = load(
        "seed: 1_000\nmax_steps:\nclip_grad_norm: ~\nresume: '7'\noutput_dir: on\nlog: {run_name:"
        " 2024-01-01, trackers: []}\nparallel: {fsdp_wrap_policy: [model.layers.*, lm_head],"
        " data_shard: -1}\noptimizer: {betas: [0, 0.5]}\n"
    )
    assert (cfg.seed, cfg.max_steps, cfg.clip_grad_norm, cfg.resume) == (1000, None, None, "7")
    assert cfg.output_dir == "on"
    assert cfg.log.run_name == "2024-01-01"
    assert cfg.parallel.fsdp_wrap_policy == ["model.layers.*", "lm_head"]
    assert cfg.optimizer.betas == [0.0, 0.5]
    assert all(math.isfinite(beta) and type(beta) is float for beta in cfg.optimizer.betas)


def test_defaults_are_not_shared(load):
    load("").optimizer.betas.append(7.0)
    load("").data.columns["a"] = "b"
    assert load("").optimizer.betas == [0.9, 0.95]
    assert load("").data.columns == {}


def test_a_megabyte_value_is_shown_short(faults):
    (line,) = faults(f"dtype: {'x' * 900_000}\n")
    assert len(line) < 250


@pytest.mark.parametrize(
    "name",
    ["model.path", "data.source", "output_dir", "lora.adapter_path", "tokenizer.chat_template"],
)
def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(
        "recipe: lora_finetune_distributed\nmodel: {path: m}\ndata: {source: d.txt}\n"
    )
    cfg = load_config(tmp_path / "config.yaml", [f"{name}=~/x"], LoraFinetuneConfig)
    section, _, key = name.rpartition(".")
    assert getattr(getattr(cfg, section) if section else cfg, key) == f"{tmp_path}/x"
    cfg = load_config(tmp_path / "config.yaml", ["log.project=~/x"], LoraFinetuneConfig)
    assert cfg.log.project == "~/x"  # no path


@pytest.mark.parametrize(
    ("text", "hint"),
    [("dtype: fp16", "bf16"), ("optimizer: {state_bits: 2}", ""), ("optimizer: {state_bits: 64}", ""),
     ("device: xpu", ""), ("optimizer: {name: adafactor}", ""),
     ("optimizer: {name: adamw_8bit}", "adamw with optimizer.state_bits=8"),
     ("lr_scheduler: {type: constant_with_warmup}", "constant"),
     ("matmul_dtype: float8", "fp8"), ("parallel: {pipeline_balance: time}", "compute")],
)  # fmt: skip
def test_hints_at_values_are_near_or_none(faults, text, hint):
    (line,) = faults(f"{text}\n")
    assert line.partition("; did you mean ")[2] == (f"{hint}?" if hint else "")
