"""What a run and an export say to type next works as it stands; the card they leave says what was
trained, and how.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from recipe_lib.checkpoint.run_files import read_record
from recipe_lib.checkpoint.side_files import make_model_card
from recipe_lib.cli.main import main
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import build_spec, read_preset_config
from recipe_lib.training.export_model import (
    find_unserved_parts,
    format_merge_command,
    list_adapter_commands,
    list_model_commands,
)
from tests.cli.adapter_runs import write_adapter_run
from tests.recipes.runs import DPO, FULL, LORA, ROOT, build_story_arguments, run_here


def commands(lines: list[str]) -> list[list[str]]:
    """The commands as a shell has their words."""
    return [shlex.split(line.removeprefix("next: ")) for line in lines if line.startswith("next: ")]


def type_in(found: list[list[str]], capsys: pytest.CaptureFixture) -> list[str]:
    """Runs those of `tune`; gives what they print, a text for each."""
    said = []
    for program, *words in found:
        if program == "tune":
            capsys.readouterr()
            more = ["--prompt", "Hi", "--max-new-tokens", "3"] if words[0] == "generate" else []
            assert main([*words, *more]) == 0, (words, capsys.readouterr())
            said.append(capsys.readouterr().out)
    return said


@pytest.mark.slow
def test_after_an_adapter(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "a run's own $folder"
    run = write_adapter_run(realdata, output, "lora.rank=20", f"output_dir={output}")
    found = commands(run.said)
    base = str(realdata / "stories260K-hf")
    assert found == [
        ["tune", "generate", f"{output}/adapter"],
        ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"mine={output}/adapter", "--max-lora-rank", "32",
         "--chat-template", f"{output}/adapter/chat_template.jinja"],
        ["tune", "export", str(output), "--merge"],
    ]  # fmt: skip
    assert (output / "adapter" / "chat_template.jinja").is_file()
    assert f"report: {output}/report.html" in run.said and (output / "report.html").is_file()
    assert main(found[-1][1:]) == 0 and (output / "model").is_dir()
    again = write_adapter_run(
        realdata, output, "lora.rank=20", f"output_dir={output}", "overwrite_output_dir=true"
    )
    assert commands(again.said) == found and not (output / "model").exists()
    answer, exported = type_in(found, capsys)
    after = commands(exported.splitlines())
    assert after == [["tune", "generate", f"{output}/model"], ["vllm", "serve", f"{output}/model"]]
    assert type_in(after, capsys) == [answer]


@pytest.mark.slow
def test_after_an_adapter_that_was_merged(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = write_adapter_run(realdata, tmp_path / "run", "lora.merge_on_save=true", "lora.dora=true")
    found = commands(run.said)
    assert found == [  # vLLM loads no DoRA
        ["tune", "generate", f"{tmp_path}/run/adapter"],
        ["tune", "generate", f"{tmp_path}/run/model"],
        ["vllm", "serve", f"{tmp_path}/run/model"],
    ]
    answers = type_in(found, capsys)
    assert answers[0] == answers[1]


def test_after_full_training(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_adapter_run(
        realdata, tmp_path / "run", "checkpoint.save_every_n_steps=1", recipe=FULL
    )
    found = commands(run.said)
    assert found == [
        ["tune", "generate", f"{tmp_path}/run/model"],
        ["vllm", "serve", f"{tmp_path}/run/model"],
    ]
    (answer,) = type_in(found, capsys)
    assert main(["export", str(tmp_path / "run"), "--hf"]) == 0
    after = commands(capsys.readouterr().out.splitlines())
    assert after[0] == ["tune", "generate", f"{tmp_path}/run/model_step_2"]
    assert type_in(after, capsys) == [answer]


@pytest.mark.slow
def test_after_an_adapter_alone(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter_run(realdata, tmp_path / "run")
    (tmp_path / "run" / "adapter").rename(tmp_path / "-alone")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(realdata / "stories260K-hf", tmp_path / "base")
    words = ["--base", "base"]
    assert main(["export", "./-alone", "--adapter", *words]) == 0
    found = commands(capsys.readouterr().out.splitlines())
    assert found[0] == ["tune", "generate", "./-alone", *words]
    assert found[-1] == ["tune", "export", "./-alone", "--merge", *words]
    type_in(found, capsys)


@pytest.mark.slow
def test_a_recipe_of_ones_own_with_keys_of_its_own(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "recipes" / f"{LORA}.py").read_text()
    own = "@dataclass\nclass Config(LoraFinetuneConfig):\n    shift: float = 1.0\n"
    text = text.replace("Config = LoraFinetuneConfig\n", own).replace(
        "import torch\n", "from dataclasses import dataclass\n\nimport torch\n", 1
    )
    assert "shift" in text
    (tmp_path / "mine.py").write_text(text)
    write_adapter_run(realdata, tmp_path / "first")
    config = (tmp_path / "first" / "config.yaml").read_text().replace(
        "/first", "/run"
    ) + "shift: 2.0\n"
    (tmp_path / "run.yaml").write_text(config)
    (tmp_path / "run.jsonl").write_text((tmp_path / "first.jsonl").read_text())
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["run", str(tmp_path / "mine.py"), "--config", str(tmp_path / "run.yaml")]) == 0
    found = commands(capsys.readouterr().err.splitlines())
    assert found[-1] == [
        "tune",
        "export",
        f"{tmp_path}/run",
        "--merge",
        "--recipe",
        str(tmp_path / "mine.py"),
    ]
    type_in(found, capsys)


def test_no_commands_for_what_has_no_base(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """An adapter on random weights, which are in no checkpoint."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "output": "b"}\n')
    more = [f"data.source={rows}", f"recipe={LORA}", "max_steps=1", "model.path=null", "data.cache=false",
            f"model.preset={realdata}/stories260K-hf/config.json",
            f"tokenizer.path={realdata}/stories260K-hf"]  # fmt: skip
    run = run_here(build_story_arguments(realdata, tmp_path / "run", *more), recipe=LORA)
    assert run.code == 0, run.said
    assert commands(run.said) == []
    assert "vllm" not in (tmp_path / "run/adapter/README.md").read_text()
    for words in (["generate", "--prompt", "Once"], ["export", "--merge"]):
        capsys.readouterr()
        assert main([words[0], str(tmp_path / "run"), *words[1:]]) == 2
        assert "was trained with random weights (model.preset=" in capsys.readouterr().err


def test_what_vllm_serves() -> None:
    def served(**settings: Any) -> bool:
        rank = settings.pop("rank", 16)
        spec = build_spec(read_preset_config("qwen2_5/0.5B"), "config.json")
        lora = LoraConfig(**settings)
        parts = find_unserved_parts(spec, lora)
        refused = any(part.is_refused for part in parts)
        found = list_adapter_commands(Path("a"), "b", lora, rank=rank, served=not refused)
        assert found[0] == "tune generate a"
        return len(found) == 2

    assert served() and served(rank=512) and served(target_modules=["q", "v"])
    assert (
        not served(rank=513)
        and not served(dora=True)
        and not served(target_modules=["q", "embedding"])
    )
    assert list_model_commands(Path("-m")) == ["tune generate ./-m", "vllm serve ./-m"]
    assert (
        format_merge_command(Path("r"), "b c", "m.py")
        == "tune export r --merge --base 'b c' --recipe m.py"
    )


@pytest.mark.slow
def test_the_card_of_a_run(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = shutil.copytree(realdata / "stories260K-hf", tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    more = [f"model.path={base}", "lora.merge_on_save=true", "lora.quantize_base=nf4"]
    write_adapter_run(realdata, tmp_path / "run", *more)
    adapter, model = (
        ModelCard.load(tmp_path / "run" / name / "README.md") for name in ("adapter", "model")
    )
    assert (adapter.data.library_name, model.data.library_name) == ("peft", "transformers")
    for card in (adapter, model):
        assert card.data.license == "mit" and card.data.pipeline_tag == "text-generation"
        assert card.data.tags == ["tune-recipes", "sft", "lora"]
        text = card.content
        assert (
            "- `run.jsonl`, format `messages`" in text and str(tmp_path / "run.jsonl") not in text
        )
        assert "| `lora.quantize_base` | `nf4` |" in text and "| `optimizer.lr` | `0.01` |" in text
        assert "| batch | batch_size 1 x gradient_accumulation_steps 1 on each data rank |" in text
        assert "| devices | 1 |" in text and "| passes over the data | 1 |" in text
        first, last = (
            json.loads(line)["loss"]
            for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        )
        assert (
            f"| loss of the first step | {first:.4f} |" in text
            and f"| loss of the last step | {last:.4f} |" in text
        )
    record = read_record(tmp_path / "run")
    assert record is not None
    for name in ("adapter", "model"):
        assert any("README.md" in written for written in record.folders[name])
    for name, card in (("adapter", adapter), ("model", model)):
        lines = card.content.partition("```bash\n")[2].partition("```")[0].splitlines()
        assert len(lines) == 2
        there = [line.replace("FOLDER", f"{tmp_path}/run/{name}") for line in lines]
        type_in([shlex.split(line) for line in there], capsys)
    again = write_adapter_run(realdata, tmp_path / "run", *more, "overwrite_output_dir=true")
    assert again.code == 0


@pytest.mark.slow
def test_a_base_is_found_from_any_folder_and_not_taken_for_one_of_the_hub(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of two parts looks like a hub id, in the folder where it is no path."""
    shutil.copytree(realdata / "stories260K-hf", tmp_path / "mods" / "stories")
    monkeypatch.chdir(tmp_path)
    write_adapter_run(
        realdata,
        tmp_path / "run",
        "model.path=mods/stories",
        f"tokenizer.path={tmp_path}/mods/stories",
    )
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert main(["generate", "../run", "--prompt", "Hi", "--max-new-tokens", "3"]) == 0
    for words in (["--merge"], ["--adapter"], ["--adapter", "--base", "../mods/stories"]):
        assert main(["export", "../run", *words, "--out", f"out{len(words)}{words[0]}"]) == 0, (
            capsys.readouterr().err
        )
    for folder in (tmp_path / "run" / "adapter", *tmp_path.glob("else/out*")):
        card = (folder / "README.md").read_text()
        assert (
            "base_model" not in card
            and str(tmp_path) not in card
            and "| `tokenizer.path` | `stories` |" in card
        )
        if (folder / "adapter_config.json").is_file():
            config = json.loads((folder / "adapter_config.json").read_text())
            assert config["base_model_name_or_path"] == str(tmp_path / "mods" / "stories")
            assert "from_pretrained('BASE')" in card


def test_a_preset_is_no_base_on_the_hub(tmp_path: Path) -> None:
    assert main(["run", "demo/full", "max_steps=1", "data.max_samples=64", "~validation.source",
                 f"output_dir={tmp_path}/run"]) == 0  # fmt: skip
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert (
        card.data.base_model is None
        and "random weights of the architecture `demo/0.5M`" in card.content
    )


def test_the_card_names_a_base_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "1234"
    card = make_model_card(
        None, base="owner/name", base_folder=snapshot, lora=LoraConfig(), is_adapter=True
    )
    assert "base_model: owner/name" in card and "from_pretrained('owner/name')" in card
    here = make_model_card(
        None,
        base="owner/name",
        base_folder=tmp_path / "owner" / "name",
        lora=None,
        is_adapter=False,
    )
    assert "base_model" not in here and "`name`" in here


@pytest.mark.parametrize("trainable", ["adapters", "all"])
def test_the_card_of_preferences(trainable: str, realdata: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    pair = {"prompt": [{"role": "user", "content": "Hi"}], "chosen": "Hello.", "rejected": "No."}
    rows.write_text(json.dumps(pair) + "\n")
    more = [
        f"data.source={rows}",
        "data.format=preference",
        "data.cache=false",
        f"recipe={DPO}",
        "max_steps=1",
    ]
    run = run_here(
        build_story_arguments(
            realdata, tmp_path / "run", *more, "batch_size=1", f"dpo.trainable={trainable}"
        ),
        recipe=DPO,
    )
    assert run.code == 0, run.said
    name = "adapter" if trainable == "adapters" else "model"
    card = ModelCard.load(tmp_path / "run" / name / "README.md")
    assert card.data.tags == ["tune-recipes", "dpo", *(["lora"] if trainable == "adapters" else [])]
    assert commands(run.said)[0] == ["tune", "generate", f"{tmp_path}/run/{name}"]


def test_no_secret_is_in_a_card() -> None:
    secret = "hf_" + "xY" * 17
    card = make_model_card(
        None, base=f"/models/{secret}/one", base_folder=None, lora=None, is_adapter=True
    )
    assert "/models/" in card and secret not in card
