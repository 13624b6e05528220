"""Means in bf16 that cannot follow are told exactly where they stand still, by every verb that
reads a config.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.cli.main import main
from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.load import load_config
from recipe_lib.config.optimizer_facts import read_built_in_optimizers
from recipe_lib.config.precision import FARTHEST, describe_stalled_means
from recipe_lib.optim.optimizers import build_optimizer
from tests.cli.commands import ROOT, tune_forked
from tests.selection import mark_slow_but
from tests.training.formulas import compute_dynamic_levels

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EDGE = 2 / 258  # 1 - decay below which a mean in bf16 stays at twice or half
DECAYS = [0.8, 0.9, 0.95, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999, 0.9999]
BLOCK_EDGES = {
    "exp_avg": 0.9 / 32,
    "exp_avg_sq": 0.9 / 64,
}  # in 8 bits, of half of a block's largest number
BLOCK_EDGES["momentum_buffer"] = BLOCK_EDGES["exp_avg"]
EVERY_EDGE = {EDGE, 1 / 258, *BLOCK_EDGES.values()}
DECAYS += [1 - edge * (1 + off) for edge in EVERY_EDGE for off in (-0.05, 0.05)]
STALLED = ["optimizer.betas=[0.9,0.999]", "dtype=bf16"]


def test_bf16_rests_where_the_rule_says() -> None:
    """torch's bf16 at both ends of the range, just inside and outside, over all significands of a
    number.
    """
    means = (torch.arange(128, 256) / 128.0).bfloat16()

    def rests(share: float, decay: float) -> bool:
        return bool(
            (decay * means.double() + (1 - decay) * share * means.double())
            .bfloat16()
            .eq(means)
            .any()
        )

    for decay in DECAYS:
        off, margin = 1 / (256 * (1 - decay)), 1e-6 / (1 - decay)
        assert rests(1 + off - margin, decay) and not rests(1 + off + margin, decay), decay


def stands_still(optimizer: Any, parameter: nn.Parameter, state: str, decay: float) -> bool:
    """Whether a number stays in a step of the optimizer though what it is the mean of is half or
    twice of it.
    """
    means = (torch.arange(128, 256).repeat(2) / 128.0).to(parameter.dtype).view(parameter.shape)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for share in (1 / FARTHEST, FARTHEST):
        if state not in optimizer.state[parameter]:
            return False
        kept = optimizer.state[parameter][state]
        kept.copy_(means)
        wanted = means.double() * share
        if state == "exp_avg_sq":
            wanted = wanted.sqrt()
        elif not hasattr(optimizer, "cfg") and state == "momentum_buffer":
            wanted = wanted * (1 - decay)  # torch's is the sum, not the mean
        parameter.grad = wanted.to(parameter.dtype)
        before = kept.clone()
        optimizer.step()
        if bool(kept.eq(before).any()):
            return True
    return False


def stands_still_in_8_bits(optimizer: Any, parameter: nn.Parameter, state: str) -> bool:
    """Whether a number of half of its block's largest, which stays, does so too though it averages
    half or twice.
    """
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if f"{state}_codes" not in optimizer.state[parameter]:
        return False
    levels = compute_dynamic_levels(8, state != "exp_avg_sq").double()
    half = int((levels >= 0.5).nonzero()[0])
    codes = torch.full(parameter.shape, half, dtype=torch.uint8)
    codes[:, 0] = 255
    for share in (1 / FARTHEST, FARTHEST):
        optimizer.state[parameter][f"{state}_codes"].copy_(codes)
        optimizer.state[parameter][f"{state}_scales"].fill_(1.0)
        wanted = levels[codes.int()]
        wanted[:, 1:] *= share
        wanted = wanted.sqrt() if state == "exp_avg_sq" else wanted
        parameter.grad = wanted.to(parameter.dtype)
        optimizer.step()
        if bool(optimizer.state[parameter][f"{state}_codes"].eq(codes)[:, 1:].all()):
            return True
    return False


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("bf16", {"implementation": "fused"}),
    ("bf16", {"state_bits": 16}),
    ("fp32", {"state_bits": 16}),
    ("fp32", {}),
    ("bf16", {"state_bits": 32}),
    ("bf16", {"master_weights": True}),
    ("bf16", {"master_weights": True, "state_bits": 16}),
    ("bf16", {"name": "muon"}),
    ("fp32", {"name": "muon", "state_bits": 16}),
    ("bf16", {"name": "muon", "state_bits": 32}),
    ("fp32", {"name": "sgd"}),
    ("bf16", {"state_bits": 8}),
    ("fp32", {"state_bits": 8}),
    ("bf16", {"state_bits": 8, "stochastic_rounding": True}),
    ("bf16", {"state_bits": 8, "master_weights": True}),
    ("bf16", {"name": "muon", "state_bits": 8}),
]


REMEDIES = {
    "; set optimizer.state_bits=32": ["optimizer.state_bits=32"],
    ", or 16 with optimizer.stochastic_rounding=true": [
        "optimizer.state_bits=16", "optimizer.stochastic_rounding=true"
    ],
}  # fmt: skip


def check_remedies(config: str, words: list[str], schema: Any, lines: list[str]) -> None:
    """A config with any of what a line names is valid, and nothing is left to tell of it."""
    for line in lines:
        offered = [settings for remedy, settings in REMEDIES.items() if remedy in line]
        assert offered
        for settings in offered:
            keys = [setting.partition("=")[0] for setting in settings]
            others = [word for word in words if word.partition("=")[0] not in keys]
            assert (
                describe_stalled_means(load_config(config, [*others, *settings], schema)) == []
            ), settings


# Each kind of a run of all weights or of adapters, in turn.
CASES = [(*kind, at % 2 == 1) for at, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("dtype", "settings", "adapters"), mark_slow_but(CASES, 6), ids=str)
def test_a_config_is_told_exactly_where_its_optimizer_stands_still(
    dtype: str, settings: dict[str, Any], adapters: bool
) -> None:
    """Every decay of every optimizer in every kind of state, by steps of the optimizer itself."""
    facts = read_built_in_optimizers()[settings.get("name", "adamw")]
    means = {
        "exp_avg": ("betas", 0),
        "exp_avg_sq": ("betas", 1),
        "momentum_buffer": ("momentum", None),
    }
    for state in {*facts.states, *(facts.layer_matrix_states or ())}:
        word, at = means[state]
        for decay in DECAYS:
            value: Any = decay if at is None else [0.5, 0.5]
            if at is not None:
                value[at] = decay
            words = [
                f"optimizer.{key}={str(one).lower()}"
                for key, one in (settings | {word: value}).items()
            ]
            own = ["dtype=bf16", f"lora.dtype={dtype}"] if adapters else [f"dtype={dtype}"]
            schema = LoraFinetuneConfig if adapters else FullFinetuneConfig
            config = "llama3/8B_lora" if adapters else "llama3/8B_full"
            cfg = load_config(config, [*own, *words], schema)
            lines = describe_stalled_means(cfg)
            name = "layers.0.w" if state == "momentum_buffer" else "norm"
            in_blocks = cfg.optimizer.state_bits == 8
            shape = (16, 256) if in_blocks else (2, 128)
            parameter = nn.Parameter(torch.ones(shape, dtype=DTYPES[dtype]))
            optimizer = build_optimizer(cfg.optimizer, [(name, parameter)], torch.device("cpu"))
            place = "" if at is None else f"[{at}]"
            if in_blocks:
                still = stands_still_in_8_bits(optimizer, parameter, state)
            else:
                still = stands_still(optimizer, parameter, state, decay)
            assert [line.split("=")[0] for line in lines] == ([f"optimizer.{word}{place}"] if still else []), (
                state, decay
            )  # fmt: skip
            check_remedies(config, [*own, *words], schema, lines)


def test_by_chance_a_mean_that_would_stand_still_moves() -> None:
    """Every number in one of some steps: the chance of each step is a hundredth at least."""
    cfg = load_config("llama3/8B_full", [*STALLED, "optimizer.stochastic_rounding=true"])
    assert describe_stalled_means(cfg) == []
    parameter = nn.Parameter(torch.zeros((2, 128), dtype=torch.bfloat16))
    optimizer = build_optimizer(cfg.optimizer, [("w", parameter)], torch.device("cpu"))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    means: Tensor = (torch.arange(128, 256).repeat(2) / 128.0).bfloat16().view(2, 128)
    optimizer.state[parameter]["exp_avg_sq"].copy_(means)
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(300):
        optimizer.step()
    assert (optimizer.state[parameter]["exp_avg_sq"] < means).all()


SET = "set optimizer.state_bits=32, or 16 with optimizer.stochastic_rounding=true"
LINE = (
    "optimizer.betas[1]=0.999: the second moment in 16 bits may rest at 0.2 of its value, and not"
    f" come down again; {SET}"
)


def test_the_line_says_what_is_lost_and_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["validate", "demo/full", f"output_dir={tmp_path}/run", *STALLED]
    assert main(words) == 0
    assert f"note: {LINE}\n" in capsys.readouterr().out
    assert 1 / (1 + 1 / 0.256) == pytest.approx(0.2, rel=0.02)
    for setting in ("optimizer.state_bits=32", "optimizer.stochastic_rounding=true"):
        assert main([*words, setting]) == 0  # each of what it names helps
        assert "may rest at" not in capsys.readouterr().out


OTHERS = {
    "optimizer.betas=[0.9,0.995]": (
        "optimizer.betas[1]=0.995: the second moment in 16 bits may rest at 0.56 of its "
        "value, or stay at 4.6 times it; set"
    ),
    "optimizer.name=sgd optimizer.momentum=0.999": (
        "optimizer.momentum=0.999: the momentum in 16 bits may rest at 0.2 of its value, and not"
        " come down again; set it to 0.98 or less, or dtype=fp32"
    ),
    "optimizer.state_bits=4 optimizer.stochastic_rounding=true": (
        "note: optimizer.state_bits=4: a gradient far below its block's largest hardly moves its"
        " weight; set 8 or 32"
    ),
    "optimizer.betas=[0.9,0.999] optimizer.master_weights=true optimizer.state_bits=16": (
        "not come down again; set optimizer.state_bits=32\n"
    ),
    "optimizer.betas=[0.9,0.999] dtype=fp32 optimizer.state_bits=8": (
        "not come down again; set optimizer.state_bits=32\n"
    ),
    "optimizer.betas=[0.9,0.999] optimizer.state_bits=8": (
        "note: optimizer.betas[1]=0.999: the second moment in 8 bits may rest at 0.12 of its"
        f" value, and not come down again; {SET}"
    ),
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_lines(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dtype = [] if "dtype=" in words else ["dtype=bf16"]
    assert (
        main(["validate", "demo/full", f"output_dir={tmp_path}/run", *dtype, *words.split()]) == 0
    )
    assert OTHERS[words] in capsys.readouterr().out


PAGED = "bitsandbytes.optim.PagedAdamW"


@pytest.mark.parametrize(
    "optimizer", ["torch.optim.AdamW", f"{PAGED}8bit", PAGED, "torch.optim.SGD"]
)
def test_an_import_tells_it(
    tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their betas[1] of 0.999, which is their default, with states in bf16; and what 8 bits do."""
    theirs = tmp_path / "theirs.yaml"
    text = (ROOT / "tests" / "config" / "torchtune_lora.yaml").read_text(encoding="utf-8")
    theirs.write_text(
        re.sub(r"optimizer: .*", f"optimizer: {{_component_: {optimizer}, lr: 1e-5}}", text)
    )
    assert main(["import", str(theirs)]) == 0
    said = capsys.readouterr().err
    assert (f"note: {LINE}\n" in said) == (optimizer == "torch.optim.AdamW")
    assert ("the second moment in 8 bits" in said) == optimizer.endswith("8bit")
    assert ("under a thousandth of its block's largest" in said) == optimizer.endswith("8bit")


def test_a_run_tells_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """-q leaves warnings."""
    words = ["max_steps=1", f"output_dir={tmp_path}/run", "checkpoint.save_model=false", "device=cpu", "batch_size=1",
             "max_seq_len=32", "~validation", "data.max_samples=8"]  # fmt: skip
    assert main(["run", "-q", "--no-plan", "demo/full", *STALLED, *words]) == 0
    assert f"warning: {LINE}" in capfd.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_plan_tells_it() -> None:
    done = tune_forked("plan", "--device", "24GB", "demo/full", *STALLED, "~validation")
    assert done.returncode == 0 and LINE in " ".join(done.stdout.split())
