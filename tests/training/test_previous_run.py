"""A run that replaces an earlier one: what it refuses, what stays until when, and that nothing of
others ever goes.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipe_lib import files
from recipe_lib.checkpoint.run_files import (
    describe_file,
    publish,
    read_record,
    write_manifest,
    write_record,
)
from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.schema_data import SourceConfig
from recipe_lib.errors import ConfigError
from recipe_lib.training.output import (
    check_output,
    drop_earlier,
    is_record,
    open_output,
    record_written_files,
)
from recipe_lib.training.records import MetricsFile, write_report, write_summary
from tests.checkpoint.conftest import memory_path, memory_root  # noqa: F401
from tests.checkpoint.test_faults import end_process, in_child, operations_of, stop_at
from tests.checkpoint.tiny import read_tree
from tests.forked import call_forked


def config(folder: Path, kind: type = FullFinetuneConfig, **values: object) -> FullFinetuneConfig:
    cfg = kind(output_dir=str(folder), **values)
    cfg.model.path = cfg.data.source = "somewhere"
    return cfg


def write_model(root: Path, value: float, name: str = "model") -> None:
    """Publishes a folder as an export does."""
    temporary = files.make_temporary_path(root / name)
    files.make_folder(temporary)
    files.write_json(
        temporary / ("config.json" if name == "model" else "adapter_config.json"), {"value": value}
    )
    save_file(
        {"w": torch.full((4,), value)},
        temporary / f"{name.replace('adapter', 'adapter_model')}.safetensors",
    )
    publish(temporary, root / name)


def write_state(root: Path, step: int) -> None:
    folder = root / "state" / f"step_{step}"
    files.make_folder(folder)
    records = [files.write_json(folder / "state.json", {"step": step})]
    write_manifest(folder, step, step, 1, records)


def finish(root: Path, status: str = "done") -> None:
    """The end of a run: metrics, summary, report, and what trackers have left."""
    MetricsFile(root).append({"step": 1, "tokens_per_second": 1.0, "loss": 2.0})
    (root / "trackers" / "tensorboard").mkdir(parents=True, exist_ok=True)
    (root / "trackers" / "tensorboard" / "events.out.tfevents.1.host.2.3").write_text("event")
    write_summary(root, status, {}, wall_seconds=1.0, total_steps=1, world_size=1)
    write_report(root)
    record_written_files(root)


def earlier_run(root: Path, *names: str) -> None:
    """What a run with seed 1 leaves."""
    open_output(config(root, seed=1))
    write_state(root, 4)
    for name in names or ("model",):
        write_model(root, 1.0, name)
    finish(root)


def seed_in(folder: Path) -> str:
    return next(
        line
        for line in (folder / "config.yaml").read_text().splitlines()
        if line.startswith("seed:")
    )


def test_the_earlier_run_stays_until_the_new_model_is_there(tmp_path: Path) -> None:
    root = tmp_path / "out"
    earlier_run(root)
    model, state = read_tree(root / "model"), read_tree(root / "state")
    records = {
        name: (root / name).read_bytes() for name in ("config.yaml", "summary.json", "report.html")
    }
    cfg = config(root, seed=2, overwrite_output_dir=True)
    check_output(cfg)
    open_output(cfg)
    assert read_tree(root / "model") == model and read_tree(root / "earlier" / "state") == state
    assert {name: (root / "earlier" / name).read_bytes() for name in records} == records
    assert (
        root / "earlier/trackers/tensorboard/events.out.tfevents.1.host.2.3"
    ).read_text() == "event"
    assert (
        seed_in(root) == "seed: 2"
        and not (root / "state").exists()
        and not (root / "metrics.jsonl").exists()
    )
    finish(root, "diverged")
    drop_earlier(root)  # there is no model yet
    assert read_tree(root / "model") == model and read_tree(root / "earlier" / "state") == state
    write_model(root, 2.0)
    assert read_tree(root / "model") != model and read_tree(root / "earlier" / "state") == state
    drop_earlier(root)
    assert sorted(path.name for path in root.iterdir()) == [
        "config.yaml", "metrics.jsonl", "model", "report.html", "summary.json", "trackers", "written.json",
    ]  # fmt: skip
    assert json.loads((root / "written.json").read_text())["earlier"] == []
    with pytest.raises(ConfigError, match="holds a trained model of an earlier run"):
        check_output(config(root))


def test_an_attempt_that_failed_does_not_take_the_place_of_the_earlier_run(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    model = read_tree(tmp_path / "model")
    for seed in (2, 3):  # fails before it saves anything
        open_output(config(tmp_path, seed=seed, overwrite_output_dir=True))
        finish(tmp_path, "failed")
    write_state(tmp_path, 1)  # the third attempt has a state
    with pytest.raises(
        ConfigError, match=r"holds saved states .*; resume=latest goes on from them"
    ):
        check_output(config(tmp_path))
    check_output(config(tmp_path, resume="latest"))
    open_output(config(tmp_path, seed=4, overwrite_output_dir=True))
    assert read_tree(tmp_path / "model") == model
    kept = {
        seed_in(folder): [path.name for path in (folder / "state").iterdir()]
        for folder in tmp_path.glob("earlier*")
    }
    assert kept == {"seed: 1": ["step_4"], "seed: 3": ["step_1"]}
    write_model(tmp_path, 2.0)
    drop_earlier(tmp_path)
    assert not list(tmp_path.glob("earlier*"))


def test_what_a_run_of_another_kind_left_goes_too(tmp_path: Path) -> None:
    earlier_run(tmp_path, "adapter", "model")
    open_output(config(tmp_path, overwrite_output_dir=True))
    write_model(tmp_path, 2.0, "adapter")
    assert (tmp_path / "model").is_dir()
    drop_earlier(tmp_path)
    assert not (tmp_path / "model").exists() and (tmp_path / "adapter").is_dir()


UNRECORDED: dict[str, Callable[[Path], object]] = {
    "model/thesis.txt": lambda path: path.write_text("precious"),
    "model/config.json": lambda path: path.write_text('{"value": "mine"}'),
    "model/model.safetensors": lambda path: save_file({"w": torch.full((4,), 7.0)}, path),
    "model/more": lambda path: path.mkdir(),
    "adapter/README.md": lambda path: (
        path.write_text("mine") if path.parent.mkdir() is None else None
    ),
    "state/notes.txt": lambda path: path.write_text("mine"),
    "state/step_4/mine": lambda path: path.write_text("mine"),
    "state/old_step_4": lambda path: shutil.copytree(path.parent / "step_4", path),
    "trackers/mine.log": lambda path: path.write_text("mine"),
    "config.yaml": lambda path: path.write_text(
        "# my notes\nrecipe: full_finetune_distributed\nseed: 3\n"
    ),
    "metrics.jsonl": lambda path: path.write_text('{"step": 1, "accuracy": 0.5}\n'),
    "summary.json": lambda path: path.write_text('{"status": "good"}'),
    "report.html": lambda path: path.write_text("<!DOCTYPE html><p>mine"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_no_run_wrote_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    earlier_run(tmp_path)
    UNRECORDED[name](tmp_path / name)
    before = read_tree(tmp_path)
    for use in (check_output, open_output):
        with pytest.raises(ConfigError) as caught:
            use(config(tmp_path, overwrite_output_dir=True))
        assert (
            str(caught.value)
            == f"output_dir: {tmp_path / name} is not, or no longer, what a run wrote, and would be"
            " replaced; move it away, or choose another output_dir"
        )
    assert read_tree(tmp_path) == before


EDITS = {
    "config.yaml": ("seed: 1", "seed: 5"),
    "metrics.jsonl": ('"loss": 2.0', '"loss": 1.0'),
    "summary.json": ('"total_steps": 1', '"total_steps": 2'),
    "report.html": ("</html>", "<!-- my note --></html>"),
}


@pytest.mark.parametrize("first_line", ["hello", "[1]", '{"step": 1, "tokens_per_second": 2'])
def test_metrics_that_begin_otherwise_are_no_run_s(first_line: str, tmp_path: Path) -> None:
    """However they go on."""
    path = tmp_path / "metrics.jsonl"
    line = '{"step": 1, "tokens_per_second": 2}\n'
    path.write_text(f"{first_line}\n{line}")
    assert not is_record(path)
    path.write_text(f"{line}{first_line}")
    assert is_record(path)


@pytest.mark.parametrize("versions", [3, None, "tune-recipes", {"mine": 1}])
def test_a_summary_without_our_version_is_no_run_s(versions: Any, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"status": "ok", "settings": {}, "versions": versions}))
    assert not is_record(path)


def test_a_folder_that_an_interrupted_start_meant_to_keep_is_recorded_once(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    record = read_record(tmp_path)
    assert record is not None
    record.kept = ["earlier"]
    write_record(tmp_path, record)
    open_output(config(tmp_path, overwrite_output_dir=True))
    record = read_record(tmp_path)
    assert record is not None and record.kept == ["earlier"]


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_after_the_run_stays(name: str, tmp_path: Path) -> None:
    """A run that goes on has its own files, whatever was written there meanwhile."""
    earlier_run(tmp_path)
    text = (tmp_path / name).read_text()
    assert EDITS[name][0] in text
    (tmp_path / name).write_text(text.replace(*EDITS[name], 1))
    for use in (check_output, open_output):
        with pytest.raises(ConfigError, match=f"{name} is not, or no longer, what a run wrote"):
            use(config(tmp_path, overwrite_output_dir=True))
    assert (tmp_path / name).read_text() == text.replace(*EDITS[name], 1)
    open_output(config(tmp_path, resume="latest"))
    finish(tmp_path)
    open_output(config(tmp_path, overwrite_output_dir=True))


def test_a_record_of_an_earlier_version(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    fields = json.loads((tmp_path / "written.json").read_text())
    del fields["records"]
    (tmp_path / "written.json").write_text(json.dumps(fields))
    open_output(config(tmp_path, overwrite_output_dir=True))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_what_may_not_be_read_is_refused(tmp_path: Path) -> None:
    """Every file that a run has left."""
    earlier_run(tmp_path / "out", "model", "adapter")
    names = [
        path.relative_to(tmp_path / "out")
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    ]
    assert len(names) > 8
    for name in names:
        root = tmp_path / "copy"
        shutil.copytree(tmp_path / "out", root)
        (root / name).chmod(0)

        def refuse(root: Path = root) -> str:
            with pytest.raises(ConfigError) as caught:
                check_output(config(root, overwrite_output_dir=True))
            return str(caught.value)

        if name.parts[0] not in ("state", "trackers"):  # which are known by their names
            assert "is not, or no longer, what a run wrote" in call_forked(
                refuse, as_plain_user=True
            ), name
        shutil.rmtree(root)


def test_folders_that_are_links_are_refused(tmp_path: Path) -> None:
    for name in ("model", "state"):
        root = tmp_path / f"with_{name}"
        earlier_run(root)
        (root / name).rename(tmp_path / f"real_{name}")
        (root / name).symlink_to(tmp_path / f"real_{name}")
        with pytest.raises(ConfigError, match=f"{name} is not, or no longer, what a run wrote"):
            check_output(config(root, overwrite_output_dir=True))


def test_a_first_run_does_not_take_over_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine\nrecipe: full_finetune_distributed\n")
    with pytest.raises(ConfigError, match=r"config\.yaml is not, or no longer, what a run wrote"):
        check_output(config(tmp_path))


def test_a_run_that_goes_on_keeps_what_was_added_to_its_model(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "model" / "model.gguf").write_text("converted")
    with pytest.raises(ConfigError, match=r"model\.gguf is not, or no longer, what a run wrote"):
        check_output(config(tmp_path, resume="latest"))


INPUTS = {  # name: key, and where in the output folder it leads
    "path": ("model.path", "model"),
    "dots": ("model.path", "state/../model"),
    "preset": ("model.preset", "model/config.json"),
    "tokenizer": ("tokenizer.path", "model"),
    "template": ("tokenizer.chat_template", "model/chat_template.jinja"),
    "rows": ("data.source", "metrics.jsonl"),
    "folder of samples": ("data.source", "."),
    "validation": ("validation.source", "model/rows.jsonl"),
    "adapter": ("lora.adapter_path", "adapter"),
    "relative": ("model.path", "model"),
    "link": ("model.path", "model"),
    "folder of links": ("model.path", "model/model.safetensors"),
}


def leading_to(name: str, place: Path, away: Path) -> str:
    """A path that leads to the place in this way."""
    if name == "relative":
        return os.path.relpath(place)
    if name == "link":
        (away / "link").symlink_to(place)
        return str(away / "link")
    if name == "folder of links":
        (away / "base").mkdir()
        (away / "base" / place.name).symlink_to(place)
        return str(away / "base")
    return str(place)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "how",
    [{"overwrite_output_dir": True}, {"resume": "latest"}],
    ids=["overwrite_output_dir", "resume"],
)
def test_inputs_inside_what_is_replaced_are_refused(
    name: str, how: dict[str, object], tmp_path: Path
) -> None:
    root = tmp_path / "out"
    earlier_run(root, "model", "adapter")
    key, place = INPUTS[name]
    path = leading_to(name, root / place, tmp_path)
    cfg = config(root, LoraFinetuneConfig, **how)
    section, _, word = key.partition(".")
    setattr(getattr(cfg, section), word, path)
    before = read_tree(root)
    with pytest.raises(ConfigError) as caught:
        check_output(cfg)
    said = str(caught.value)
    assert said.startswith(f"{key}: ") and said.endswith(
        ", which a run in this output_dir replaces; copy it elsewhere, or choose another output_dir"
    )
    assert read_tree(root) == before


def test_one_of_several_sources_and_a_linked_output_folder(tmp_path: Path) -> None:
    root = tmp_path / "out"
    earlier_run(root)
    (tmp_path / "also").symlink_to(root)
    cfg = config(tmp_path / "also", overwrite_output_dir=True)
    cfg.data.sources = [SourceConfig("a.jsonl"), SourceConfig(str(root / "metrics.jsonl"))]
    with pytest.raises(ConfigError, match=r"^data\.sources\[1\]\.source: "):
        check_output(cfg)
    cfg.data.sources.pop()
    check_output(cfg)
    cfg.model.path = str(root)  # a model that lies in output_dir itself is not touched
    check_output(cfg)


def test_nothing_is_ours_without_a_record(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "written.json").unlink()
    with pytest.raises(ConfigError, match="is not, or no longer, what a run wrote"):
        check_output(config(tmp_path, overwrite_output_dir=True))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "folders": {"../x": []}}', "\x00" * 100]
)
def test_a_record_that_cannot_be_read_makes_nothing_ours(text: str, tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "written.json").write_text(text)
    with pytest.raises(ConfigError, match="is not, or no longer, what a run wrote"):
        check_output(config(tmp_path, overwrite_output_dir=True))


def test_a_large_file_is_known_by_blocks_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content = bytearray(2**23)
    path.write_bytes(content)
    first = describe_file(path)
    assert first.startswith(f"{2**23}:64x65536:") and describe_file(path) == first
    for place in (0, 2**22, 2**23 - 1):
        changed = content.copy()
        changed[place : place + 2**18] = bytes([1]) * len(changed[place : place + 2**18])
        path.write_bytes(changed)
        assert describe_file(path) != first


def replace_run(root: Path) -> None:
    """A whole run that replaces the one before, as far as the disk is concerned."""
    open_output(config(root, seed=2, overwrite_output_dir=True))
    write_state(root, 2)
    write_model(root, 2.0, "adapter")
    drop_earlier(root)


@pytest.mark.slow
def test_a_process_that_ends_at_every_fourth_operation(
    memory_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = memory_path / "source"
    earlier_run(source, "model", "adapter")
    old, state, adapter = (
        read_tree(source / "model"),
        read_tree(source / "state"),
        read_tree(source / "adapter"),
    )
    shutil.copytree(source, memory_path / "count")
    count = len(operations_of(lambda: replace_run(memory_path / "count"), monkeypatch))
    new = read_tree(memory_path / "count" / "adapter")
    assert count > 40 and new != adapter
    seen = set()
    for number in range(0, count, 4):
        root = memory_path / f"out{number}"
        shutil.copytree(source, root)

        def replace_and_end(number: int = number, root: Path = root) -> None:
            files.before_operation = stop_at(number, end_process)
            replace_run(root)

        assert in_child(replace_and_end) == 9
        found = read_tree(root / "adapter")
        assert found in (adapter, new), "neither the old adapter nor the new one is there"
        seen.add(found == new)
        if found == adapter:
            assert read_tree(root / "model") == old
            places = [root / "state", *root.glob("earlier*/state")]
            kept = next(place for place in places if read_tree(place) == state)
            assert seed_in(kept.parent) == "seed: 1" or kept == root / "state"
            assert any(seed_in(folder) == "seed: 1" for folder in (root, *root.glob("earlier*")))
        if (root / "state" / "step_2").exists():
            assert seed_in(root) == "seed: 2"
        replace_run(root)
        assert read_tree(root / "adapter") == new
        names = {path.name for path in root.iterdir()}
        assert names == {
            "adapter",
            "config.yaml",
            "state",
            "written.json",
        }, "leftovers outlive the next run"
        record = read_record(root)
        assert record is not None and list(record.folders) == ["adapter"] and not record.kept
        shutil.rmtree(root)
    assert seen == {False, True}
