"""Runs that train rounded weights: what they export, rounded, computes what they computed; when
rounding begins.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.cli.main import main
from tests import torchao_oracle
from tests.recipes.runs import (
    DPO,
    LORA,
    build_arguments,
    build_story_arguments,
    expect_done,
    make_probe_tokens,
    read_metrics,
    read_steps,
    run_here,
)
from tests.recipes.test_dpo import write_pairs
from tests.recipes.test_resume import everything, stop_after

GROUP = 4  # the MLPs of the real model have 172 channels
START = 2
STEPS = 4
# Recipe's file by name, and what its run sets besides.
RUNS: dict[str, tuple[str, ...]] = {
    "int4": ("qat=int4", f"qat_group_size={GROUP}"),
    "int8": ("qat=int8", "dtype=bf16", "qat_start_step=1"),
    "int4, adapters": (
        f"recipe={LORA}",
        "qat=int4",
        f"qat_group_size={GROUP}",
        "lora.merge_on_save=true",
    ),
}


def quantized(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """The exported folder as transformers loads it in `kind`."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    rounding = TorchAoConfig(quant_type=torchao_oracle.build_base_config(kind, GROUP))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=rounding, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_transformers_loads_quantized_computes_what_training_computed(
    realdata: Path, tmp_path: Path, name: str
):
    rows = f"data.source={realdata / 'datasets' / 'text' / 'tinyshakespeare.txt'}"
    overrides = (rows, "data.format=text", "max_steps=3", "batch_size=2", *RUNS[name])
    recipe = LORA if "adapters" in name else "full_finetune_distributed"
    run = expect_done(
        run_here(build_story_arguments(realdata, tmp_path / "run", *overrides), recipe=recipe)
    )
    assert any("by torchao's IntxWeightOnlyConfig(torch.int" in line for line in run.said)
    assert (
        "saved are the weights before rounding"
        in (tmp_path / "run" / "model" / "README.md").read_text()
    )
    model, dtype = run.recipe.model, torch.bfloat16 if "dtype=bf16" in overrides else torch.float32
    with torch.no_grad():
        trained = model(make_probe_tokens())
        theirs = quantized(tmp_path / "run" / "model", name.partition(",")[0], dtype)
        found = theirs(make_probe_tokens()).logits
        linears = [at for at, module in theirs.named_modules() if at.endswith("_proj")]
        assert len(linears) == run.recipe.parallel.levers.quantization.linears == 5 * 7
        for at in linears:
            layer = theirs.get_submodule(at)
            assert layer.weight.qdata.dtype == torch.int8
            one_each = torch.eye(layer.in_features, dtype=dtype)
            assert torch.equal(layer(one_each), model.get_submodule(at)(one_each)), at
    assert float((found - trained).norm() / trained.norm()) < (
        1e-6 if dtype == torch.float32 else 1e-2
    )


def command(output: Path, *overrides: str) -> list[str]:
    """Four steps that are validated each, of a small model."""
    own = ("validation.source=examples/demo/heldout.jsonl", "validation.format=alpaca", "validation.every_n_steps=1",
           "validation.max_samples=4", f"max_steps={STEPS}", "log.every_n_steps=1000", "optimizer.lr=1e-2")  # fmt: skip
    return [word for word in build_arguments(output) if word != "~validation"] + [*own, *overrides]


def validations(output: Path) -> list[float]:
    """Loss of each validation."""
    return [line["validation_loss"] for line in read_metrics(output) if "validation_loss" in line]


@pytest.mark.slow
def test_rounding_begins_at_its_step_and_a_run_goes_on_bitwise_across_it(tmp_path: Path):
    late = ("qat=int4", f"qat_start_step={START}")
    for name, overrides in {"plain": (), "rounded": ("qat=int4",), "late": late}.items():
        expect_done(run_here(command(tmp_path / name, *overrides)))
    plain, rounded, begun = (read_steps(tmp_path / name) for name in ("plain", "rounded", "late"))
    assert begun[:START] == plain[:START] and rounded[0] != plain[0]
    assert all(one[1] != other[1] for one, other in zip(begun[START:], plain[START:], strict=True))
    # A validation is by the forward of the step before it.
    assert validations(tmp_path / "late")[:START] == validations(tmp_path / "plain")[:START]
    assert validations(tmp_path / "late")[START] != validations(tmp_path / "plain")[START]
    whole = run_here(command(tmp_path / "whole", *late))
    for stop in (
        START - 1,
        START,
    ):  # the next step is the last without rounding, or the first with it
        output = tmp_path / f"stopped{stop}"
        halted = run_here(command(output, *late), stop_after(stop))
        assert halted.code == 3, halted.said
        gone_on = expect_done(run_here(command(output, *late, "resume=latest")))
        assert read_steps(output) == begun and validations(output) == validations(tmp_path / "late")
        wanted = everything(whole.recipe)
        assert all(
            torch.equal(tensor, wanted[name]) for name, tensor in everything(gone_on.recipe).items()
        )


@pytest.mark.slow
def test_an_evaluation_of_a_run_rounds_as_its_validations_did(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And its base is measured as it was before training."""
    text = (
        "data.source=examples/demo/train.jsonl",
        "validation.source=examples/demo/heldout.jsonl",
    )
    text += (
        "validation.every_n_steps=1",
        "validation.max_samples=4",
        "max_steps=3",
        "optimizer.lr=1e-2",
        "data.max_samples=16",
    )
    run = expect_done(
        run_here(build_story_arguments(realdata, tmp_path / "run", *text, *RUNS["int4"]))
    )
    evaluated, exported = (
        f"next: tune {words}"
        for words in (f"eval {tmp_path}/run", f"export {tmp_path}/run --quantize int4")
    )
    assert evaluated in run.said and exported in run.said
    expect_done(
        run_here(build_story_arguments(realdata, tmp_path / "still", *text, "optimizer.lr=1e-12"))
    )
    capsys.readouterr()
    found = {}
    for words in ((), ("qat=null",)):
        assert main(["eval", str(tmp_path / "run"), "--no-generate", "--json", *words]) == 0
        found[words] = json.loads(capsys.readouterr().out)
    rounded, unrounded = (numbers["tuned"]["loss"] for numbers in found.values())
    assert main(exported.split()[2:]) == 0  # by the run's group size, which is not the default
    assert "rounded as in training (qat=int4)" in capsys.readouterr().out
    with (tmp_path / "run" / "config.yaml").open("a") as config:  # of a recipe with keys of its own
        config.write("shift: 2.0\n")
    other = ["--quantize", "int4", "--group-size", "2", "--out", str(tmp_path / "other")]
    assert main(["export", str(tmp_path / "run"), *other]) == 0
    assert "not rounded as in training, which was with qat=int4 qat_group_size=4" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (
        rounded == pytest.approx(validations(tmp_path / "run")[-1], rel=1e-6)
        and abs(rounded - unrounded) > 1e-3
    )
    for numbers in found.values():
        assert numbers["base"]["loss"] == pytest.approx(
            validations(tmp_path / "still")[-1], rel=1e-6
        )


def test_a_start_that_never_comes_is_refused(tmp_path: Path):
    run = run_here(command(tmp_path / "run", "qat=int8", f"qat_start_step={STEPS}"))
    assert run.code == 2 and run.said[-1].startswith(
        "error: qat_start_step: found 4 for a run of 4 steps, none of"
    )
    assert not (tmp_path / "run" / "model").exists() and not metrics_of(tmp_path / "run")


def metrics_of(output: Path) -> list[Any]:
    return read_metrics(output) if (output / "metrics.jsonl").exists() else []


def test_a_reference_is_not_rounded(tmp_path: Path):
    """Adapters that begin at zero and a copy of the model are the same reference to the same
    rounded policy.
    """
    rows = write_pairs(tmp_path)
    found = {}
    for name, overrides in {
        "adapters": ("qat=int4", "lora.rank=4"),
        "all": ("qat=int4", "dpo.trainable=all"),
        "unrounded": ("dpo.trainable=all",),
    }.items():
        words = [
            word
            for word in build_arguments(tmp_path / name)
            if not word.startswith("data.max_samples")
        ]
        own = [f"recipe={DPO}", f"data.source={rows}", "data.format=preference", "max_steps=1"]
        expect_done(run_here([*words, *own, "checkpoint.save_model=false", *overrides], recipe=DPO))
        found[name] = read_metrics(tmp_path / name)[0]
    assert found["unrounded"]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert abs(found["all"]["loss"] - math.log(2)) > 1e-6
    for name in ("loss", "reward_chosen", "reward_margin"):
        assert found["adapters"][name] == pytest.approx(found["all"][name], rel=1e-4, abs=1e-8)
