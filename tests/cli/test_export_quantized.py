"""`tune export --quantize`: folders that transformers opens, with the weights that torchao's
formula gives.
"""

import errno
import json
from pathlib import Path

import pytest
import torch
import transformers

from recipe_lib import files
from recipe_lib.cli import main
from recipe_lib.errors import StorageError
from tests.checkpoint.gguf.made_models import SMALL, save_model
from tests.cli.adapter_runs import write_adapter_run
from tests.cli.export_calls import call_export, expect_refusal


def check_rounded(found: torch.Tensor, weight: torch.Tensor, kind: str, group: int) -> None:
    """Symmetric rounding: the scale is 2 / (codes - 1) of the largest magnitude that shares it.
    That magnitude itself is half-way between two codes of 4 bits, and either is right.
    """
    levels, size = {"int4": (15, group), "int8": (255, weight.shape[1])}[kind]
    parts, read = weight.double().unflatten(1, (-1, size)), found.double().unflatten(1, (-1, size))
    scale = parts.abs().amax(-1, keepdim=True) * 2 / levels
    steps = parts / scale
    expected = steps.round().clamp(-(levels + 1) // 2, levels // 2)
    off = (read / scale - expected).abs()
    half_way = ((steps.abs() % 1) - 0.5).abs() < 1e-4
    assert off[~half_way].max() < 1e-4 and off.max() < 1 + 1e-4 and half_way.float().mean() < 0.05


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 64), ("int8", 0)])
@torch.no_grad()
def test_linears_are_rounded_and_the_rest_is_kept(
    kind: str, group: int, tmp_path: Path, capsys: pytest.CaptureFixture
):
    model = save_model("llama2" if group == 64 else "qwen2", tmp_path / "model")
    words = ["--group-size", group] if group == 64 else []
    code, out, err = call_export(capsys, tmp_path / "model", "--quantize", kind, *words)
    assert (code, err) == (0, "")
    folder = tmp_path / f"model-{kind}"
    lines = out.splitlines()
    scales = f"a scale for {group} weights" if group else "a scale for each row"
    assert lines[0].startswith(f"model: {folder} ({kind}, {scales}, ")
    check = next(line for line in lines if line.startswith("check: "))
    assert check.startswith(
        "check: transformers opens it and computes what was quantized, 21 linears; next tokens"
        " diverg"
    )
    assert lines[-1] == f"next: vllm serve {folder}"
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
        == "torchao"
    )
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("the cat")
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            read = opened.get_submodule(name).weight.dequantize()
            check_rounded(read, module.weight, kind, group)
            module.weight.copy_(read)
    ids = torch.randint(4, 320, (2, 20), generator=torch.Generator().manual_seed(9))
    expected = model(ids).logits
    torch.testing.assert_close(
        opened(ids).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max())
    )


@pytest.mark.slow
def test_a_run_of_adapters_and_generate_on_what_comes_out(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    write_adapter_run(realdata, tmp_path / "mine")
    assert expect_refusal(capsys, tmp_path / "mine", "--quantize", "int4").startswith(
        "--group-size: found 32 for model.layers.0.mlp.down_proj.weight, whose rows have 172"
        " weights, expected a "
    )
    assert [path.name for path in (tmp_path / "mine").iterdir() if "model" in path.name] == []
    code, out, err = call_export(capsys, tmp_path / "mine", "--quantize", "int8")
    assert (code, err) == (0, "") and out.startswith(
        f"merged: {tmp_path / 'mine' / 'adapter'} into its base"
    )
    assert main.main(["generate", str(tmp_path / "mine" / "model-int8"), "--prompt", "Hi"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "config.json: quantization_config: the weights are quantized (torchao)" in said
    )
    adapter = tmp_path / "mine" / "adapter"
    assert (
        expect_refusal(capsys, adapter, "--quantize", "int8")
        == f"{adapter}: is an adapter; merge it first (tune export {adapter} --merge), and quantize"
        " the merged model"
    )


def test_what_is_not_quantized(tmp_path: Path, capsys: pytest.CaptureFixture):
    small = SMALL | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**small))
    model.save_pretrained(tmp_path / "mixtral")
    assert expect_refusal(capsys, tmp_path / "mixtral", "--quantize", "int8").startswith(
        f"{tmp_path / 'mixtral'}: is a mixture of experts, whose weights are stacked and no linears"
        " to torchao"
    )
    assert (
        expect_refusal(capsys, tmp_path, "--quantize", "int8", "--group-size", "32")
        == "--group-size: is for --quantize int4; leave it out"
    )
    assert "argument --quantize: invalid choice: 'int2'" in expect_refusal(
        capsys, tmp_path, "--quantize", "int2"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("qat: null\n", None),
        ("qat: ~\n", None),
        ("qat:\n", None),
        ("qat: int8\n", "rounded as in training (qat=int8)"),
        (
            "qat: int4\nqat_group_size: 64\n",
            "note: not rounded as in training, which was with qat=int4 qat_group_size=64",
        ),
    ],
)
def test_the_rounding_of_training_is_compared_unless_it_is_null(
    text: str, line: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_model("qwen2", tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "config.yaml").write_text(text)
    code, out, err = call_export(capsys, tmp_path / "model", "--quantize", "int8")
    assert (code, err) == (0, "")
    compared = [shown for shown in out.splitlines() if "rounded as in training" in shown]
    assert compared == ([] if line is None else [line])


def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    save_model("qwen2", tmp_path / "model", num_hidden_layers=1)

    def fail(what: str, path: Path) -> None:
        if what == "flush":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(files, "before_operation", fail)
        code, out, err = call_export(capsys, tmp_path / "model", "--quantize", "int8")
    assert code == 6 and out == "" and "No space left on device" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_export_left_takes_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    save_model("qwen2", tmp_path / "model", num_hidden_layers=1)
    (tmp_path / ".model-int8.01234567.tmp").mkdir()

    def refuse(folder: Path, needed: int, purpose: str) -> None:
        raise StorageError(
            f"{purpose} has no room beside {sorted(path.name for path in folder.iterdir())}"
        )

    monkeypatch.setattr(files, "require_space", refuse)
    assert call_export(capsys, tmp_path / "model", "--quantize", "int8") == (
        6, "", "error: the quantized model has no room beside ['model']\n"
    )  # fmt: skip
