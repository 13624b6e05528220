"""What lies in a folder beside the text model is carried into an export, a few MiB at a time."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import export_model, load_weights
from recipe_lib.checkpoint.safetensors_files import FileTensor
from recipe_lib.models import allocate, build_meta, read_config, read_spec
from recipe_lib.units import GIB, MIB
from tests.checkpoint.tiny import build_tiny_world
from tests.distributed.ranks import run_ranks
from tests.external.published_layouts import ROOT, read_tensors, write_published
from tests.recipes.runs import FULL, build_arguments, run_here

EXPORT = """
import sys
from pathlib import Path
import torch
from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import export_model, load_weights
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.models import allocate, build_meta, read_config, read_spec

folder = Path(sys.argv[1])
spec = read_spec(read_config(folder), str(folder), "transformers")
model = build_meta(spec, torch.float32)
allocate(model, torch.device("cpu"))
load_weights(model, spec, folder)

def read(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = read("VmRSS")
export_model(model, spec=spec, source_config=read_config(folder), out=folder.parent / "out",
             tokenizer_folder=folder, max_shard_bytes=2**32, world=SingleRank(),
             carried=find_carried(spec, folder, carries=True))
print(read("VmHWM") - before)
"""


def write_sparse_file(path: Path, name: str) -> None:
    """Write a file with one tensor of 1 GiB, which takes no room on the disk."""
    entry = {name: {"dtype": "BF16", "shape": [GIB // 2], "data_offsets": [0, GIB]}}
    header = json.dumps(entry).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + GIB)


@pytest.mark.slow
def test_gibibytes_are_carried_in_a_few_mebibytes(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    write_published(folder, "qwen3_5")
    first = (folder / "model.safetensors").rename(folder / "first.safetensors")
    names = dict.fromkeys(load_file(first), first.name)
    write_sparse_file(folder / "extra.safetensors", "mtp.layers.1.weight")
    index = {"weight_map": names | {"mtp.layers.1.weight": "extra.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    command = [sys.executable, "-c", EXPORT, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.splitlines()[-1]) < 150 * MIB
    exported = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert exported > GIB


def write_gemma3(folder: Path) -> Any:
    """Write a small Gemma 3 with a vision tower, whose text model is native here."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    text = vision | {"vocab_size": 512, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    for path in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "preprocessor_config.json").write_text("{}\n")
    return model


def test_copies_are_read_by_the_rank_that_writes_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_gemma3(base)

    def export() -> int:
        num_read = 0
        stream = FileTensor.stream

        def count(self: FileTensor) -> Iterator[torch.Tensor]:
            nonlocal num_read
            num_read += 1
            return stream(self)

        FileTensor.stream = count  # type: ignore[method-assign]
        with build_tiny_world() as world:
            spec = read_spec(read_config(base), str(base), "native")
            model = build_meta(spec, torch.float32)
            allocate(model, torch.device("cpu"))
            load_weights(model, spec, base)
            export_model(
                model,
                spec=spec,
                source_config=read_config(base),
                out=tmp_path / "out",
                tokenizer_folder=base,
                max_shard_bytes=GIB,
                world=world,
                carried=find_carried(spec, base, carries=True),
            )
        return num_read

    on_rank_0, on_rank_1 = run_ranks(export, 2)
    assert on_rank_0 == sum("vision" in name or "projector" in name for name in read_tensors(base))
    assert on_rank_1 == 0
    assert read_tensors(base).keys() == read_tensors(tmp_path / "out").keys()


@pytest.mark.parametrize("carries", [True, False])
def test_a_native_text_model_is_written_with_its_vision_tower(
    tmp_path: Path, carries: bool
) -> None:
    base = tmp_path / "base"
    write_gemma3(base)
    words = [
        word
        for word in build_arguments(tmp_path / "full", "demo/full")
        if not word.startswith("model.preset=")
    ]
    words += [f"model.path={base}", "~model.preset", "dtype=fp32", "device=cpu", "max_steps=1",
              "optimizer.lr=1e-2", f"checkpoint.carry={carries}".lower()]  # fmt: skip
    run = run_here(words, recipe=FULL)
    assert run.code == 0, run.said
    folder = tmp_path / "full" / "model"
    before = read_tensors(base)
    after = read_tensors(folder)
    other = {name for name in before if "vision" in name or "projector" in name}
    if carries:
        assert before.keys() == after.keys()
        assert other and all(torch.equal(before[name], after[name]) for name in other)
        _, report = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True
        )
    else:
        _, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert len(after) == len(before) - len(other)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    changed = {
        name for name in after if name not in before or not torch.equal(before[name], after[name])
    }
    assert changed
    assert (folder / "preprocessor_config.json").exists() == carries
