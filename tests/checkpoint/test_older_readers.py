"""What is exported says all that transformers 5 has renamed under both names, and means the same by either."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipe_lib.checkpoint.weights_out import export_config
from recipe_lib.models import spec_from_config
from tests.checkpoint.spellings import NEWER, OLDER, leave_out, write_older
from tests.models.reference import CASES, SMALL


def newer_config(case: str, folder: Path) -> dict[str, Any]:
    """A case's config.json as transformers 5 writes it."""
    class_name, options = CASES[case]
    made = getattr(transformers, class_name)(**SMALL | options)
    made.architectures = [class_name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    made.dtype = "float32"
    made.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def read_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 makes of a config.json, but for older names that it keeps as they are."""
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    found = {key: value for key, value in made.to_dict().items() if key not in OLDER}
    if "rope_scaling" in config:
        found["rope_parameters"].pop("type", None)  # which transformers keeps beside rope_type
    return found


@pytest.mark.parametrize("case", CASES)
def test_either_name_means_what_was_trained(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newer = newer_config(case, tmp_path)
    older = write_older(case, newer)
    expected = read_by_transformers(newer | {"dtype": "bfloat16"})
    caplog.clear()  # what transformers says of the numbers themselves, once in a process
    for source in (newer, older, newer | older):
        spec = spec_from_config(source, case)
        exported = export_config(source, spec, torch.bfloat16)
        assert exported["dtype"] == exported["torch_dtype"] == "bfloat16"
        assert {"rope_parameters", "rope_theta", "rope_scaling"} <= exported.keys()
        for left_out in (set(), OLDER, NEWER):
            config = leave_out(exported, left_out)
            assert spec_from_config(config, case) == spec
            read = read_by_transformers(config)
            differing = {key: (value, read.get(key)) for key, value in expected.items() if read.get(key) != value}
            assert not differing
    assert [record.getMessage() for record in caplog.records if record.name.startswith("transformers")] == []
