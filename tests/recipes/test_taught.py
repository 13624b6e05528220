"""`tune teach`, and runs from what it has written: equal to runs with the teacher, and only of the same data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from recipe_lib.cli.main import main
from tests.distributed.ranks import run_ranks
from tests.recipes.distill_models import RECORDED, arguments, make_folder
from tests.recipes.runs import DISTILL, metrics, run_here

WORDS = ("distill.divergence=jensen_shannon", "distill.temperature=2", "distill.weight=0.6", "validation")
RANKS = {
    "packed": ("data.packing=true", "batch_size=2"),
    "context": ("parallel.context=2", "memory.loss_chunks=3"),
    "tensor": ("parallel.tensor=2", "memory.loss_chunks=3"),
}


def teach(folder: Path, out: Path, *options: str, words: tuple[str, ...] = WORDS) -> int:
    configs = arguments(folder, folder / "unused", *words)
    return main(["teach", *configs, "--out", str(out), "--shard-sequences", "5", *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def taught(folder: Path) -> dict[int, Path]:
    """By the number of tokens, all of the vocabulary and a few."""
    found = {count: folder / f"taught {count}" for count in (512, 8)}
    for count, out in found.items():
        assert teach(folder, out, "--top-k", str(count), "--dtype", "fp32") == 0
    return found


def run(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    done = run_here(arguments(folder, folder / name, *words), recipe=DISTILL)
    assert done.code == 0, done.said
    if dist.is_initialized():
        dist.barrier()
    return metrics(folder / name)


def from_disk(out: Path) -> tuple[str, ...]:
    return ("~distill.teacher", f"distill.from_disk={out}")


def recorded(lines: list[dict[str, Any]]) -> list[float]:
    return [line[prefix + name] for line in lines for prefix in ("", "validation_") for name in RECORDED
            if prefix + name in line]  # fmt: skip


def test_all_tokens_on_the_disk_are_the_teacher(folder: Path, taught: dict[int, Path]) -> None:
    with_teacher = run(folder, "with teacher", *WORDS)
    without = run(folder, "without", *WORDS, *from_disk(taught[512]))
    assert recorded(without) == pytest.approx(recorded(with_teacher), rel=1e-6)
    assert len(recorded(without)) == 2 * 4 + 3


def test_a_few_tokens_are_less_of_a_divergence(folder: Path, taught: dict[int, Path]) -> None:
    """As putting outcomes together lowers it (data processing); the files hold what they say."""
    few, every = (run(folder, f"of {count}", *WORDS, *from_disk(out))[0] for count, out in
                  ((8, taught[8]), (512, taught[512])))  # fmt: skip
    assert 0 < few["divergence"] < every["divergence"] and few["cross_entropy"] == every["cross_entropy"]
    facts = json.loads((taught[8] / "teacher.json").read_text())
    assert (facts["top_k"], facts["temperature"], facts["vocabulary"]) == (8, 2.0, 512)
    shards = sorted(taught[8].glob("train-*.safetensors"))
    assert len(shards) == 5 and len(list(taught[8].glob("validation-*.safetensors"))) == 5
    for shard in shards:
        found = load_file(shard)
        mass = found["log_probs"].exp().sum(-1) + found["rest"].exp()
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)
        assert found["ids"].dtype == torch.int32 and found["ids"].max() < 512


@pytest.mark.slow
def test_two_ranks_record_what_one_records(folder: Path, taught: dict[int, Path]) -> None:
    words = (*WORDS, *from_disk(taught[8]))

    def run_all(ranks: int) -> list[list[dict[str, Any]]]:
        found = []
        for name, lever in RANKS.items():
            own = ("data.packing=true",) if ranks == 1 and "data.packing=true" in lever else lever * (ranks > 1)
            found.append(run(folder, f"{name} {ranks}", *words, *own))
        return found

    alone = run_ranks(run_all, 1, 1)[0]
    for mine, wanted in zip(run_ranks(run_all, 2, 2)[0], alone, strict=True):
        assert recorded(mine) == pytest.approx(recorded(wanted), rel=1e-10)


def test_it_goes_on_where_it_was_stopped(
    folder: Path,
    taught: dict[int, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = taught[8]
    shard = out / "train-00002.safetensors"
    before, others = shard.read_bytes(), [path for path in out.iterdir() if path != shard]
    times = {path: path.stat().st_mtime_ns for path in others}
    shard.unlink()
    done = run_here(arguments(folder, folder / "stopped", *WORDS, *from_disk(out)), recipe=DISTILL)
    assert done.code == 2 and f"{shard} is missing or not whole" in done.said[-1]
    assert teach(folder, out, "--top-k", "8", "--dtype", "fp32") == 0
    assert "1 shard written" in capsys.readouterr().err
    assert shard.read_bytes() == before and times == {path: path.stat().st_mtime_ns for path in others}


@pytest.mark.parametrize(
    "words, line",
    [
        (("max_seq_len=40",), "is of other train sequences (fingerprint "),
        (("distill.temperature=1",), "holds probabilities at temperature 2, and distill.temperature is 1"),
        (("data.max_samples=12",), "run `tune teach` with this config"),
    ],
)
def test_of_other_data_or_numbers_it_is_refused(
    folder: Path,
    taught: dict[int, Path],
    words: tuple[str, ...],
    line: str,
    tmp_path: Path,
) -> None:
    done = run_here(arguments(folder, tmp_path / "run", *WORDS, *from_disk(taught[8]), *words), recipe=DISTILL)
    assert done.code == 2 and done.said[-1].startswith("error: distill.from_disk: ") and line in done.said[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, words, line",
    [
        (("--top-k", "16", "--dtype", "fp32"), WORDS, "was begun with top_k 8, found 16 now"),
        (("--top-k", "8", "--dtype", "fp32"), (*WORDS, "data.max_samples=4"), "was begun with data {"),
        (("--top-k", "0"), WORDS, "--top-k: found 0, expected a number >= 1"),
        (("--top-k", "513"), WORDS, "--top-k: found 513, expected at most the 512 tokens that both models have"),
        ((), (*WORDS, "~distill.teacher", "distill.from_disk=x"), "distill.from_disk: is what `tune teach` writes"),
    ],
)
def test_a_call_that_does_not_fit_is_one_line(
    folder: Path,
    taught: dict[int, Path],
    options: tuple[str, ...],
    words: tuple[str, ...],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert teach(folder, taught[8], *options, words=words) == 2
    (said,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert line in said
