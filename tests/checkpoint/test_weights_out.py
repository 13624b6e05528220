"""The exported folder: equal tensors, equal logits in transformers, no warning, bounded memory,
whole or not there.
"""

import json
import logging
import shutil
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_lib import files
from recipe_lib.checkpoint import model_export
from recipe_lib.checkpoint.huggingface import check_weights, export_model, load_weights
from recipe_lib.checkpoint.run_files import OutputRecord, write_record
from recipe_lib.errors import CheckpointError, StorageError
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.units import format_bytes
from tests.checkpoint.tiny import (
    CONFIG,
    build_tiny_model,
    build_tiny_spec,
    build_tiny_world,
    read_tree,
    train,
)
from tests.distributed.ranks import run_ranks
from tests.models.reference import build_reference_model

LARGE = 2**30


def load_source(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, dict[str, Any]]:
    """Our model with the folder's weights, its spec, its config."""
    config = read_config(folder)
    spec = build_spec(config, str(folder))
    model = build_meta(spec, dtype)
    model.to_empty(device="cpu")
    load_weights(model, spec, folder)
    return model, spec, config


def export(model: Any, spec: Any, config: dict[str, Any], out: Path, **options: Any) -> None:
    """In this process's world, with defaults."""
    with build_tiny_world() as world:
        arguments = {"tokenizer_folder": None, "max_shard_bytes": LARGE} | options
        export_model(model, spec, config, out, world=world, **arguments)


def open_in_transformers(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> Any:
    """The model as transformers reads it; fails on any warning, and on any name that is missing or
    unexpected.
    """
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as seen, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, attn_implementation="eager", **options
            )
    finally:
        logger.removeHandler(caplog.handler)
    assert [str(warning.message) for warning in seen] == []
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("transformers")
    ] == []
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize(
    ("case", "shard_bytes"),
    [("llama2", LARGE), ("llama3.1", 40_000), ("qwen2.5", LARGE), ("qwen3", 40_000), ("gemma2", LARGE),
     ("gemma3", LARGE), ("phi3", 40_000), ("mistral-window", LARGE), ("smollm3", LARGE), ("granite", 40_000), ("granite4", 40_000)],
)  # fmt: skip
def test_transformers_opens_it_with_equal_tensors_and_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, shard_bytes: int
) -> None:
    original = build_reference_model(case)
    original.save_pretrained(tmp_path / "source")
    model, spec, config = load_source(tmp_path / "source")
    export(model, spec, config, tmp_path / "out", max_shard_bytes=shard_bytes)
    check_weights(spec, tmp_path / "out")
    reopened = open_in_transformers(tmp_path / "out", caplog)
    assert reopened.dtype == torch.float32 and type(reopened) is type(original)
    for name, value in original.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], value), name
    tokens = torch.arange(1, 14).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(reopened(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    weights = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if shard_bytes == LARGE:
        assert weights == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert weights == sorted(set(index["weight_map"].values())) and len(weights) > 2
        tensors = {
            name: value
            for file in weights
            for name, value in load_file(tmp_path / "out" / file).items()
        }
        assert index["metadata"]["total_size"] == sum(
            value.numel() * 4 for value in tensors.values()
        )
        assert index["weight_map"].keys() == tensors.keys()
        assert ("lm_head.weight" in tensors) == (not spec.tied)


def test_the_type_is_that_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_reference_model("llama3").save_pretrained(tmp_path / "source")
    model, spec, config = load_source(tmp_path / "source", torch.bfloat16)
    export(model, spec, config, tmp_path / "out")
    assert read_config(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert open_in_transformers(tmp_path / "out", caplog).dtype == torch.bfloat16


def test_what_another_program_must_not_run_or_look_for_is_left_out() -> None:
    config = CONFIG | {
        "auto_map": {"AutoModel": "evil.Model"},
        "quantization_config": {},
        "_name_or_path": "/home/me",
    }
    exported = model_export.export_config(config, build_tiny_spec(), torch.bfloat16)
    spelled = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": 10000.0,
               "rope_scaling": None, "dtype": "bfloat16", "torch_dtype": "bfloat16"}  # fmt: skip
    assert exported == CONFIG | spelled


def test_a_text_that_json_can_only_escape_is_written_as_it_was_read(tmp_path: Path) -> None:
    """Half a surrogate pair in a config.json: found when the model is written, after the
    training.
    """
    value = {"half": "\ud800", "\udfff": ["é 😀", "\\ud800", '"\udc00"']}
    files.write_json(tmp_path / "config.json", value)
    assert json.loads((tmp_path / "config.json").read_bytes()) == value


def test_a_multimodal_config_becomes_that_of_its_text_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_reference_model("gemma3").save_pretrained(tmp_path / "source")
    model, spec, config = load_source(tmp_path / "source")
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
    }
    export(model, spec, outer, tmp_path / "out")
    assert type(open_in_transformers(tmp_path / "out", caplog)).__name__ == "Gemma3ForCausalLM"


def test_tokenizer_files_alone_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        (source / name).write_text(name)
    for name in (
        "modeling_evil.py",
        "model.safetensors",
        "pytorch_model.bin",
        "README.md",
        "config.json",
        ".env",
    ):
        (source / name).write_text("not this")
    with build_tiny_world() as world:
        model = build_tiny_model(world)
    export(model, build_tiny_spec(), CONFIG, tmp_path / "out", tokenizer_folder=source)
    names = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"chat_template.jinja"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    export(
        model,
        build_tiny_spec(),
        CONFIG,
        tmp_path / "out2",
        tokenizer_folder=source / "tokenizer.json",
    )
    assert {path.name for path in (tmp_path / "out2").iterdir()} == names | {"chat_template.jinja"}


def test_template_and_stop_tokens_are_those_of_the_training(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    (source / "chat_template.jinja").write_text("theirs")
    (tmp_path / "mine.txt").write_text("ours")
    with build_tiny_world() as world:
        model = build_tiny_model(world)
    trained_with = {"chat_template": tmp_path / "mine.txt", "stop_ids": frozenset({7, 1})}
    export(
        model, build_tiny_spec(), CONFIG, tmp_path / "out", tokenizer_folder=source, **trained_with
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "ours"
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [1, 7], "temperature": 0.6}
    export(model, build_tiny_spec(), CONFIG, tmp_path / "out2", tokenizer_folder=None, stop_ids={3})
    assert json.loads((tmp_path / "out2" / "generation_config.json").read_text()) == {
        "eos_token_id": [3]
    }


@pytest.mark.slow
def test_ranks_write_what_one_process_writes_and_hold_one_parameter_at_a_time(
    tmp_path: Path,
) -> None:
    spec = build_tiny_spec(tie_word_embeddings=True)

    def export_sharded(out: Path) -> int:
        alive: list[weakref.ref] = []
        most = 0
        real = model_export.gather_whole

        def count(parameter: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, 1 + sum(reference() is not None for reference in alive))
            whole = real(parameter)
            alive.append(weakref.ref(whole))
            return whole

        model_export.gather_whole = count
        with build_tiny_world(replicate=2) as world:
            model = build_tiny_model(world, spec=spec)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            train(model, optimizer, 1)
            with torch.no_grad():
                model(torch.zeros(1, 3, dtype=torch.int64))  # leaves the root gathered
            export_model(
                model, spec, CONFIG, out, tokenizer_folder=None, max_shard_bytes=700, world=world
            )
        return most

    with build_tiny_world() as world:
        model = build_tiny_model(world, spec=spec)
    export(model, spec, CONFIG, tmp_path / "1", max_shard_bytes=700)
    assert run_ranks(export_sharded, 4, tmp_path / "4") == [1, 1, 1, 1]
    assert read_tree(tmp_path / "1") == read_tree(tmp_path / "4")


def test_an_older_export_is_replaced_and_a_stranger_is_not(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        first, second = build_tiny_model(world, 0), build_tiny_model(world, 1)
    out = tmp_path / "model"
    write_record(tmp_path, OutputRecord())
    export(first, build_tiny_spec(), CONFIG, out, max_shard_bytes=700)
    export(second, build_tiny_spec(), CONFIG, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "written.json"]
    assert torch.equal(
        load_file(out / "model.safetensors")["lm_head.weight"], second.lm_head.weight
    )
    assert not list(out.glob("model-*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError) as raised:
        export(first, build_tiny_spec(), CONFIG, tmp_path / "mine")
    assert (
        str(raised.value)
        == f"{tmp_path / 'mine' / 'thesis.txt'}: was not written by a run, and stays; what was to"
        f" replace it is {tmp_path / 'mine-2'}"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    assert torch.equal(
        load_file(tmp_path / "mine-2" / "model.safetensors")["lm_head.weight"], first.lm_head.weight
    )


def test_rank_0_cannot_write_and_no_rank_hangs(tmp_path: Path) -> None:
    def export_failing() -> str:
        def fail(operation: str, path: Path) -> None:
            if path.name.startswith("model-00002") and operation == "write":
                raise OSError(28, "No space left on device", str(path))

        files.before_operation = fail
        with build_tiny_world() as world, pytest.raises(StorageError) as raised:
            model = build_tiny_model(world)
            export_model(
                model,
                build_tiny_spec(),
                CONFIG,
                tmp_path / "out",
                tokenizer_folder=None,
                max_shard_bytes=700,
                world=world,
            )
        return str(raised.value)

    messages = run_ranks(export_failing, 2)
    assert "model-00002-of-" in messages[0] and "No space left on device" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_tiny_world() as world:
        model = build_tiny_model(world)
        model_export.check_room(model, tmp_path / "new" / "model", world)
        monkeypatch.setattr(
            files.shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=1000)
        )
        with pytest.raises(StorageError) as raised:
            model_export.check_room(model, tmp_path / "new" / "model", world)
        (tmp_path / "old" / "model").mkdir(parents=True)
        with pytest.raises(StorageError) as beside:
            model_export.check_room(model, tmp_path / "old" / "model", world)
        assert (
            "the model at the end of the run, in addition to the one in"
            f" {tmp_path / 'old' / 'model'} that stays until then, needs " in str(beside.value)
        )
        monkeypatch.setattr(
            files.shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=1000)
        )
        (
            tmp_path / "old" / ".model.0123abcd.tmp"
        ).mkdir()  # of a killed run: it is removed before there is a new one
        (tmp_path / "old" / ".model.0123abcd.tmp" / "x").write_bytes(bytes(10**6))
        model_export.check_room(model, tmp_path / "old" / "model", world)
        shutil.rmtree(tmp_path / "old")
    needed = format_bytes(sum(parameter.numel() for parameter in model.parameters()) * 4)
    assert (
        str(raised.value)
        == f"{tmp_path}: the model at the end of the run needs {needed}, 1000 B are free; "
        "free some space, or choose another place"
    )
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build_tiny_world() as world:
        model = build_tiny_model(world)
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 10**9, "free": 5})()
    )
    with pytest.raises(
        StorageError, match="the model needs 2.00 MiB, 5 B are free; free some space"
    ):
        export(model, build_tiny_spec(), CONFIG, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_real_weights_survive_the_round_trip(
    realdata: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = realdata / "stories260K-hf"
    model, spec, config = load_source(source)
    export(model, spec, config, tmp_path / "out", tokenizer_folder=source)
    tokens = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    again = open_in_transformers(tmp_path / "out", caplog)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
        torch.testing.assert_close(model(tokens), again(tokens).logits, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (
        source / "tokenizer.model"
    ).read_bytes()
    settings = [
        json.loads((folder / "tokenizer_config.json").read_text())
        for folder in (tmp_path / "out", source)
    ]
    assert settings[0] == settings[1] | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }  # as tokenizer.json has it
