"""Whatever stands in another tool's config, or in its list of datasets, it is a config of ours or a line."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe_lib.config.other_configs import import_file
from recipe_lib.errors import UserError
from tests.config.test_other_configs import FILES, FOLDER
from tests.hostile import changed

VALUES: tuple[Any, ...] = (
    None, True, 5, 1e400, "", "x", "\0", "../x", "a" * 5000, "\u202e", [], [1], ["x"], {}, {"a": 1}, {"a": [1]},
    {"prompt": 5}, {"prompt": ["x"]}, {"messages": {}}, {"role_tag": []}, {"kto_tag": 1},
)  # fmt: skip
KEYS = ("file_name", "hf_hub_url", "subset", "split", "num_samples", "formatting", "ranking", "columns", "tags")
WHOLE: dict[str, Any] = {"file_name": "a.json", "split": "train", "columns": {"prompt": "question"}}
CHAT: dict[str, Any] = {"hf_hub_url": "a/b", "formatting": "sharegpt", "columns": {"messages": "m"},
                        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                                 "assistant_tag": "assistant"}}  # fmt: skip


def imported(path: Path) -> str:
    """Return the faults of a file, empty if it becomes a config of ours."""
    try:
        import_file(str(path)).yaml("ours.yaml")
    except UserError as error:
        assert error.faults and all("\n" not in fault and len(fault) < 6000 for fault in error.faults)
        return str(error)
    return ""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    """A config of LLaMA-Factory that names the dataset `x`."""
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"model_name_or_path: a/b\ndataset: x\ndataset_dir: {tmp_path}\nstage: STAGE\nfinetuning_type: full\n"
    )
    return path


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "pt"])
@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_dataset(key: str, stage: str, factory: Path):
    """A value of another type than LLaMA-Factory gives it is refused by the key's name."""
    factory.write_text(factory.read_text().replace("STAGE", stage))
    for whole, value in itertools.product((WHOLE, CHAT), VALUES):
        (factory.parent / "dataset_info.json").write_text(json.dumps({"x": whole | {key: value}}))
        imported(factory)


@pytest.mark.parametrize("value", [5, [1], {"a": 1}, "x"])
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_is_named(key: str, value: Any, factory: Path):
    factory.write_text(factory.read_text().replace("STAGE", "sft"))
    kind = {"num_samples": int, "ranking": bool, "columns": dict, "tags": dict}.get(key, str)
    if type(value) is kind and (key, value) not in (("formatting", "x"), ("columns", {"a": 1}), ("tags", {"a": 1})):
        return
    (factory.parent / "dataset_info.json").write_text(json.dumps({"x": CHAT | {key: value}}))
    assert f"x.{key}" in imported(factory)


def test_changed_lists_of_datasets(factory: Path):
    factory.write_text(factory.read_text().replace("STAGE", "sft"))
    for seed in range(300):
        draw = random.Random(seed)
        described: Any = {"x": draw.choice((WHOLE, CHAT))}
        for _ in range(draw.choice((1, 1, 2, 3))):
            described = changed(described, draw)
        (factory.parent / "dataset_info.json").write_text(json.dumps(described))
        imported(factory)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_changed_configs(path: Path, tmp_path: Path):
    theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for seed in range(12):
        draw = random.Random(seed)
        (tmp_path / path.name).write_text(yaml.safe_dump(changed(theirs, draw)))
        imported(tmp_path / path.name)
