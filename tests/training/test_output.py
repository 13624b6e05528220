"""An output folder with earlier work in it is not mixed with a new run; config.yaml is what was
used.
"""

import json
from pathlib import Path

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.errors import CheckpointError, ConfigError, StorageError
from recipe_lib.parallel import start_world
from recipe_lib.training.output import (
    check_output,
    check_same_data,
    lock_output,
    open_output,
    unlock_output,
)
from recipe_lib.training.run_log import RunLog


def config(folder: Path, **values: object) -> FullFinetuneConfig:
    cfg = FullFinetuneConfig(output_dir=str(folder), **values)
    cfg.model.path = cfg.data.source = "somewhere"
    return cfg


def test_a_new_folder_and_one_with_metrics_alone_are_free(tmp_path: Path) -> None:
    check_output(config(tmp_path / "new"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_per_second": 9.5}\n')
    check_output(config(tmp_path))


def test_states_are_not_mixed_with_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "state" / "step_4").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        check_output(config(tmp_path))
    assert (
        str(caught.value)
        == f"output_dir: {tmp_path} holds saved states of an earlier run; resume=latest goes on"
        " from them, overwrite_output_dir=true replaces what is there, or choose another"
        " output_dir"
    )
    check_output(config(tmp_path, resume="latest"))
    check_output(config(tmp_path, overwrite_output_dir=True))


def test_a_trained_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_output(config(tmp_path))
    assert (
        str(caught.value) == f"output_dir: {tmp_path} holds a trained model of an earlier run;"
        " overwrite_output_dir=true replaces what is there, or choose another output_dir"
    )
    with pytest.raises(ConfigError) as caught:
        check_output(config(tmp_path, resume="latest"))
    assert (
        str(caught.value)
        == f"resume=latest: {tmp_path} holds a trained model and no saved state to resume from; "
        "overwrite_output_dir=true trains "
        "anew, or choose another output_dir (checkpoint.save_every_n_steps saves states)"
    )


def test_a_folder_in_use_is_left_to_its_run(tmp_path: Path) -> None:
    cfg = config(tmp_path / "out")
    lock = lock_output(cfg)
    for use in (check_output, lock_output):
        with pytest.raises(ConfigError) as caught:
            use(config(tmp_path / "out", overwrite_output_dir=True))
        assert (
            str(caught.value)
            == f"output_dir: {tmp_path / 'out'} is in use by a run that is still going on; wait for"
            " its end, or choose another output_dir"
        )
    unlock_output(lock)
    check_output(cfg)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_that_fails_says_so_in_its_summary(tmp_path: Path) -> None:
    cfg = config(tmp_path, device="cpu")
    with start_world(cfg) as world, pytest.raises(StorageError), RunLog(cfg, world, 3, done=0):
        raise StorageError("full")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    check_output(cfg)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_output(config(tmp_path / "out"))
    assert (
        str(caught.value)
        == f"output_dir: {tmp_path / 'out'} is a file, expected a folder or a new name; choose"
        " another output_dir"
    )


def test_the_written_config_loads_as_what_was_used(tmp_path: Path) -> None:
    cfg = config(tmp_path / "a" / "b", max_steps=3)
    cfg.parallel.fsdp_wrap_policy = ["model.layers.*"]
    cfg.optimizer.lr = 1e-5
    open_output(cfg)
    assert load_config(tmp_path / "a" / "b" / "config.yaml") == cfg


def test_the_written_config_keeps_names_that_look_like_keys(tmp_path: Path) -> None:
    cfg = config(tmp_path / "task-classification-v2")
    cfg.data.source = "disk-benchmark-rows.jsonl"
    check_output(cfg)
    open_output(cfg)
    assert load_config(tmp_path / "task-classification-v2" / "config.yaml") == cfg


def test_a_secret_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    cfg = config(tmp_path / "out")
    cfg.log.run_name = "hf_" + "abcdefgABCDEFG" * 3
    with pytest.raises(ConfigError) as caught:
        check_output(cfg)
    assert str(caught.value).startswith(
        "log.run_name: holds what looks like a token or a password, "
    )
    assert "abcdefg" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        open_output(config(tmp_path / "file" / "out"))
    assert (
        str(caught.value)
        == f"{tmp_path / 'file' / 'out'}: Not a directory; move the file away that stands for a"
        " folder, or choose another place"
    )


@pytest.mark.parametrize(
    ("key", "found", "line"),
    [
        (
            "seed",
            2,
            (
                "p: was saved with seed=1, found seed=2; the order of the sequences follows from"
                " it: set seed=1"
            ),
        ),
        (
            "global_batch_size",
            16,
            (
                "p: was saved with a global batch of 8 sequences, found 16; make batch_size x "
                "gradient_accumulation_steps x ranks 8 again"
            ),
        ),
        (
            "data",
            "b" * 64,
            (
                "p: was saved with other data (fingerprint aaaaaaaaaaaa, found bbbbbbbbbbbb);"
                " resume with the data, tokenizer and max_seq_len of the saved run, or start over"
                " in another output_dir"
            ),
        ),
        (
            "order",
            {"data.packing": True},
            (
                "p: was saved with data.packing=false, found data.packing=true; the order of the"
                " sequences follows from it: set data.packing=false"
            ),
        ),
    ],
)
def test_a_step_must_mean_the_same_sequences(key: str, found: object, line: str) -> None:
    saved = {"seed": 1, "global_batch_size": 8, "data": "a" * 64, "order": {"data.packing": False}}
    check_same_data(saved, dict(saved), Path("p"))
    with pytest.raises(CheckpointError) as caught:
        check_same_data(saved, saved | {key: found}, Path("p"))
    assert str(caught.value) == line
