"""What of a checkpoint is left out is said when it is loaded and again when it is exported, by
every verb.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib.checkpoint.safetensors_files import EXTRA_PARAMETERS_KEY
from recipe_lib.cli.main import main
from tests.cli.adapter_runs import write_adapter_run
from tests.recipes import distill_models
from tests.recipes.labeled_runs import build_arguments, write_margins
from tests.recipes.runs import DISTILL, FULL, LORA, REWARD, build_story_arguments, run_here
from tests.selection import mark_slow_except

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
LINES = [
    (
        "left out: lm_head.weight (1 tensor, 128.00 KiB): the same numbers as"
        " model.embed_tokens.weight"
    ),
    "left out: model.layers.*.self_attn.rotary_emb.inv_freq (1 tensor, 16 B): computed, not read",
    "not read: consolidated.safetensors: other files have the weights",
]
ALL = [f"{what}: {line}" for what in ("model", "export") for line in LINES]


def write_model(source: Path, folder: Path, scale: float = 1.0) -> Path:
    """The stories' model, which is tied, with a head beside the embedding, old buffers and a file
    of another format.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale
    tensors[FREQUENCIES] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(source / "model.safetensors", folder / "consolidated.safetensors")
    return folder


@pytest.fixture
def model(realdata: Path, tmp_path: Path) -> Path:
    return write_model(realdata / "stories260K-hf", tmp_path / "m")


def told(lines: list[str]) -> list[str]:
    return [line for line in dict.fromkeys(lines) if "left out: " in line or "not read: " in line]


def test_a_run_and_its_export(realdata: Path, model: Path, tmp_path: Path) -> None:
    run = write_adapter_run(realdata, tmp_path / "run", f"model.path={model}", recipe=FULL)
    assert told(run.said) == ALL
    assert FREQUENCIES not in load_file(tmp_path / "run" / "model" / "model.safetensors")


@pytest.mark.slow
def test_adapters_that_are_merged(
    realdata: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = write_adapter_run(
        realdata, tmp_path / "run", f"model.path={model}", "lora.merge_on_save=true"
    )
    assert told(run.said) == ALL
    assert (
        main(["export", str(tmp_path / "run"), "--merge", "--out", str(tmp_path / "merged")]) == 0
    )
    assert told(capsys.readouterr().err.splitlines()) == ALL


@pytest.mark.slow
def test_a_state(
    realdata: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ("checkpoint.save_every_n_steps=1", f"model.path={model}")
    write_adapter_run(realdata, tmp_path / "run", *words, recipe=FULL)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--hf", "--out", str(tmp_path / "again")]) == 0
    assert told(capsys.readouterr().err.splitlines()) == ALL[3:]


VERBS: dict[str, Callable[[Path, Path], list[str]]] = {
    "generate": lambda model, _: [
        "generate",
        str(model),
        "--prompt",
        "Once",
        "--raw",
        "--max-new-tokens",
        "2",
    ],
    "gguf": lambda model, out: [
        "export",
        str(model),
        "--gguf",
        "f32",
        "--out",
        str(out / "x.gguf"),
    ],
    "quantize": lambda model, out: [
        "export",
        str(model),
        "--quantize",
        "int8",
        "--out",
        str(out / "x"),
    ],
    "eval": lambda model, out: [
        "eval",
        str(model),
        "--data",
        str(out / "rows.jsonl"),
        "--out",
        str(out / "eval"),
    ],
}


def run_verb(verb: str, model: Path, tmp_path: Path) -> int:
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return main(VERBS[verb](model, tmp_path))


@pytest.mark.parametrize("verb", mark_slow_except(VERBS, ["generate", "gguf"]))
def test_verbs_say_it(
    verb: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run_verb(verb, model, tmp_path) == 0
    expected = ALL[3:] if verb in ("gguf", "quantize") else ALL[:3]
    assert told(capsys.readouterr().err.splitlines()) == expected


@pytest.mark.parametrize("verb", ["gguf"])
def test_verbs_refuse_a_head_of_its_own(
    verb: str, realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_model(realdata / "stories260K-hf", tmp_path / "m", 1.1)
    assert run_verb(verb, folder, tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {folder}: lm_head.weight differs from model.embed_tokens.weight, and config.json"
    )


def test_what_a_recipe_added_is_not_dropped_by_quantizing(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = shutil.copytree(realdata / "stories260K-hf", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors") | {"model.gate": torch.ones(3)}
    save_file(
        tensors, folder / "model.safetensors", {"format": "pt", EXTRA_PARAMETERS_KEY: "model.gate"}
    )
    assert run_verb("quantize", folder, tmp_path) == 2
    assert "holds model.gate, which a recipe added to the model" in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_head_is_exported_as_the_embedding(realdata: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(realdata / "stories260K-hf", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(
        tensors | {"lm_head.weight": embedding}, folder / "model.safetensors", {"format": "pt"}
    )
    write_adapter_run(realdata, tmp_path / "run", f"model.path={folder}", "lora.merge_on_save=true")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert (
        torch.equal(merged["model.embed_tokens.weight"], embedding)
        and "lm_head.weight" not in merged
    )
    for verb in ("gguf", "quantize"):
        assert run_verb(verb, folder, tmp_path) == 0
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert (written["token_embd.weight"].reshape(embedding.shape) == embedding.numpy()).all()


def refusal(run: Any) -> str:
    assert run.code == 2
    return run.said[-1]


def test_a_folder_with_model_and_adapter_is_no_base(
    realdata: Path, model: Path, tmp_path: Path
) -> None:
    (model / "adapter_config.json").write_text("{}")
    for recipe in (FULL, LORA):
        words = (f"model.path={model}", f"data.source={tmp_path / 'x.jsonl'}", f"recipe={recipe}")
        line = refusal(
            run_here(build_story_arguments(realdata, tmp_path / "run", *words), recipe=recipe)
        )
        assert line.startswith(
            f"error: {model}: has a model and an adapter (adapter_config.json), expected one"
        )


def test_a_teacher(tmp_path: Path) -> None:
    folder = distill_models.make_folder(tmp_path)
    teacher = folder / "tied"
    tensors = load_file(teacher / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
    words = distill_models.build_arguments(folder, tmp_path / "run", "distill.teacher={tied}")
    assert f"{teacher}: lm_head.weight differs from" in refusal(run_here(words, recipe=DISTILL))


def test_a_reward_model_says_that_it_has_no_output_head(model: Path, tmp_path: Path) -> None:
    rows = write_margins(tmp_path)
    more = (
        "~model.preset",
        "~tokenizer.path",
        "reward.trainable=all",
        "max_steps=1",
        "checkpoint.save_model=true",
    )
    words = (f"model.path={model}", *more)
    run = run_here(build_arguments(rows, tmp_path / "run", REWARD, *words), recipe=REWARD)
    assert run.code == 0, run.said
    lines = [line for line in told(run.said) if "lm_head" in line]
    end = "left out: lm_head.weight (1 tensor, 128.00 KiB): the score head takes its place"
    assert lines == [f"model: {end}", f"export: {end}"]
    written = tmp_path / "run" / "model"
    tensors = load_file(written / "model.safetensors")
    tensors["score.other"] = tensors.pop("score.weight")
    save_file(tensors, written / "model.safetensors", {"format": "pt"})
    words = (f"model.path={written}", *more)
    again = run_here(build_arguments(rows, tmp_path / "again", REWARD, *words), recipe=REWARD)
    assert again.code == 2 and "score.weight is missing" in again.said[-2], again.said
