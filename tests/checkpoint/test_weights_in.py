"""Weights of a folder: each rank reads its own slices, and what is wrong is found from the
headers.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from recipe_lib.checkpoint import huggingface, tensor_matching
from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint, load_weights
from recipe_lib.checkpoint.safetensors_files import Reader, read_header
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.models.weight_names import build_weight_map, compute_parameter_shapes
from tests.checkpoint.tiny import build_tiny_model, build_tiny_world, gather_full
from tests.distributed.ranks import run_ranks
from tests.models.reference import build_reference_model, load_ours

CASES = Path(__file__).parents[1] / "bad_inputs" / "models"


def spec_of(folder: Path) -> DecoderSpec:
    return build_spec(read_config(folder), str(folder))


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build_meta(spec_of(folder), dtype)
    model.to_empty(device="cpu")
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as transformers writes them: tied, fused, biased, and one in several files."""
    made = {}
    for case, size in [
        ("llama3.1", "5MB"),
        ("phi3", "40KB"),
        ("qwen2.5", "5MB"),
        ("gemma3", "50KB"),
        ("smollm3", "5MB"),
        ("granite4", "40KB"),
    ]:
        made[case] = tmp_path_factory.mktemp(case)
        build_reference_model(case).save_pretrained(made[case], max_shard_size=size)
    return made


@pytest.mark.parametrize("case", ["llama3.1", "phi3", "qwen2.5", "gemma3", "smollm3", "granite4"])
def test_parameters_are_those_of_the_files(folders: dict[str, Path], case: str) -> None:
    folder = folders[case]
    check_weights(spec_of(folder), folder)
    model = empty_model(folder)
    load_weights(model, spec_of(folder), folder)
    for name, parameter in load_ours(folder).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    tokens = torch.arange(1, 12).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = model(tokens), build_reference_model(case)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_told_with_their_tensor(
    folders: dict[str, Path], tmp_path: Path, number: str
) -> None:
    folder = shutil.copytree(folders["llama3.1"], tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float(number)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_weights(empty_model(folder), spec_of(folder), folder)
    assert (
        str(caught.value)
        == f"{folder}: model.layers.1.mlp.up_proj.weight holds NaN or infinite numbers; take an"
        " earlier state of its training, or download it again"
    )


@pytest.mark.parametrize("case", ["llama3.1", "phi3", "granite4"])
def test_a_rank_of_two_reads_its_half(folders: dict[str, Path], case: str) -> None:
    folder = folders[case]
    whole = sum(
        entry.end - entry.start for file in folder.glob("*.safetensors") for entry in entries(file)
    )

    def load() -> tuple[int, dict[str, torch.Tensor]]:
        read = count_reads()
        with build_tiny_world() as world:
            model = build_tiny_model(world, seed=None, spec=spec_of(folder))
            load_weights(model, spec_of(folder), folder)
            return sum(read), {
                name: gather_full(parameter.detach())
                for name, parameter in model.named_parameters()
            }

    (first, parameters), (second, _) = run_ranks(load, 2)
    assert first + second == whole
    assert 0.45 * whole < first < 0.55 * whole
    for name, parameter in load_ours(folder).named_parameters():
        assert torch.equal(parameters[name], parameter), name


def entries(file: Path) -> list[Any]:
    return list(read_header(file).tensors.values())


def count_reads() -> list[int]:
    """From now on, in this process: bytes of every slice that is read and of every part filled."""
    read: list[int] = []
    real = Reader.get_slice
    real_fill = Reader.fill

    def fill(self: Reader, name: str, local: torch.Tensor, offsets: tuple[int, ...]) -> bool:
        is_filled = real_fill(self, name, local, offsets)
        if is_filled:
            read.append(local.nbytes)
        return is_filled

    Reader.fill = fill  # type: ignore[method-assign]

    class Slice:
        def __init__(self, source: Any):
            self.source = source

        def __getitem__(self, place: Any) -> torch.Tensor:
            part = self.source[place]
            read.append(part.numel() * part.element_size())
            return part

    Reader.get_slice = lambda self, name: Slice(real(self, name))  # type: ignore[method-assign]
    return read


def test_copies_of_the_model_and_other_dimensions(folders: dict[str, Path]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    folder = folders["phi3"]

    def load() -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        model = empty_model(folder)
        for name, parameter in list(model.named_parameters()):
            places = (
                [Replicate(), Shard(0)] if "mlp" in name else [Shard(0), Shard(parameter.dim() - 1)]
            )
            owner, _, last = name.rpartition(".")
            sharded = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, places))
            setattr(model.get_submodule(owner), last, sharded)
        load_weights(model, spec_of(folder), folder)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return {
            name: gather_full(parameter.detach()) for name, parameter in model.named_parameters()
        }

    loaded = run_ranks(load, 4)[3]
    for name, parameter in load_ours(folder).named_parameters():
        assert torch.equal(loaded[name], parameter), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_parameters_type(
    folders: dict[str, Path], dtype: torch.dtype
) -> None:
    folder = folders["llama3.1"]
    model = empty_model(folder, dtype)
    load_weights(model, spec_of(folder), folder)
    for name, parameter in load_ours(folder).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.to(dtype)), name


def test_host_memory_is_bounded_by_a_piece(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "get_slice", Reader.get_slice)  # put back what count_reads replaces
    monkeypatch.setattr(huggingface, "READ_BYTES", 4096)
    folder = folders["phi3"]
    # Nothing is in between where a part is filled straight from the file.
    monkeypatch.setattr(Reader, "fill", lambda *_: False)
    read = count_reads()
    model = empty_model(folder)
    load_weights(model, spec_of(folder), folder)
    assert max(read) <= 4096
    for name, parameter in load_ours(folder).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_multimodal_gemma3_file(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in folders["gemma3"].glob("*.safetensors"):
        tensors |= {f"language_model.{name}": value for name, value in load_file(file).items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    text = read_config(folders["gemma3"])
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check_weights(spec_of(tmp_path), tmp_path)
    model = empty_model(tmp_path)
    load_weights(model, spec_of(tmp_path), tmp_path)
    for name, parameter in load_ours(folders["gemma3"]).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_real_llama_2_names_its_old_buffers_and_they_are_ignored(
    realdata: Path, tmp_path: Path
) -> None:
    """The index of the real 7B model lists rotary_emb.inv_freq; a tiny folder with the same names
    must pass.
    """
    source = realdata / "hf-layouts" / "llama-2-7b-chat"
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    config = read_config(source) | {
        "hidden_size": 8,
        "intermediate_size": 4,
        "num_attention_heads": 2,
        "vocab_size": 6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = tensor_matching.compute_file_shapes(
        build_weight_map(spec_of(tmp_path), index), compute_parameter_shapes(spec_of(tmp_path))
    )
    assert shapes.keys() <= index.keys()
    for file_name in set(index.values()):
        names = [name for name, file in index.items() if file == file_name]
        save_file(
            {name: torch.zeros(shapes.get(name, (2,))) for name in names}, tmp_path / file_name
        )
    shutil.copy(source / "model.safetensors.index.json", tmp_path)
    check_weights(spec_of(tmp_path), tmp_path)


def bad_cases() -> list[Path]:
    """Those of a folder that is loaded, not of a config.json alone."""
    cases = sorted(path.parent for path in CASES.glob("*/expected"))
    return [case for case in cases if "model.preset={case}" not in (case / "command").read_text()]


@pytest.mark.parametrize("case", bad_cases(), ids=lambda path: path.name)
def test_bad_folders(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines kept beside the folders, without the command around them."""
    monkeypatch.chdir(CASES.parents[2])
    command = (case / "command").read_text().split()
    name = str(case.relative_to(CASES.parents[2]))
    [argument] = [
        word.split("=")[-1]
        for word in command
        if "{case}/model" in word or word.startswith("no-such")
    ]
    with pytest.raises(CheckpointError) as raised:
        folder = find_checkpoint(argument.replace("{case}", name))
        check_weights(spec_of(folder), folder)
    lines = "".join(f"error: {fault}\n" for fault in raised.value.faults)
    assert lines == (case / "expected").read_text().replace("{case}", name)


def test_there_are_bad_folders() -> None:
    assert len(bad_cases()) >= 15


def test_loading_finds_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES.parents[2])
    folder = CASES.relative_to(CASES.parents[2]) / "missing_tensors" / "model"
    with pytest.raises(CheckpointError) as raised:
        load_weights(empty_model(folder), spec_of(folder), folder)
    assert f"error: {raised.value}\n" == (folder.parent / "expected").read_text().replace(
        "{case}", str(folder.parent)
    )


def hub_cache(root: Path, source: Path) -> Path:
    """A snapshot as the hub's cache lays it out: links into the blobs of the repository."""
    snapshot, blobs = (
        root / "models--a--b" / "snapshots" / "0123abcd",
        root / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        shutil.copy(file, blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"hash-of-{file.name}"))
    return snapshot


def test_links_are_followed(folders: dict[str, Path], tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "hub", folders["llama3.1"])
    check_weights(spec_of(snapshot), snapshot)
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(folders["llama3.1"] / "config.json", plain)
    (plain / "model.safetensors").symlink_to(folders["llama3.1"] / "model.safetensors")
    check_weights(spec_of(plain), plain)
    (plain / "model.safetensors").unlink()
    (plain / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        check_weights(spec_of(plain), plain)


def test_a_hub_id_is_found_in_the_local_cache_alone(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = hub_cache(tmp_path, folders["llama3.1"])
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0123abcd")
    assert find_checkpoint("a/b").resolve() == snapshot.resolve()
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint("a/c")
    assert (
        str(raised.value)
        == "a/c: no such folder, and not in the hub cache; fetch it with `tune download a/c`"
    )


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "a\\b.safetensors",
        "x\0.safetensors",
        "sub/x.safetensors",
        "..",
        "x.bin",
        "",
    ],
)
def test_names_in_an_index_are_plain(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    shutil.copy(folders["llama3.1"] / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )
    with pytest.raises(
        CheckpointError, match="expected plain names of .safetensors files in its own folder"
    ):
        check_weights(spec_of(tmp_path), tmp_path)


@pytest.mark.slow
def test_ten_thousand_damaged_headers_end_in_one_line_each(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Random bytes changed in a real header: refused, or read as a header that fits the file; never
    another error.
    """
    source = (folders["llama3.1"] / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(source[:8], "little")
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(source)
    refused = 0
    with open(path, "r+b") as file:
        for _ in range(10_000):
            places = torch.randint(0, length, (2,), generator=generator).tolist()
            values = torch.randint(0, 256, (2,), generator=generator).tolist()
            for place, value in zip(places, values, strict=True):
                file.seek(place)
                file.write(bytes([value]))
            file.flush()
            try:
                read_header(path)
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
                refused += 1
            for place in places:
                file.seek(place)
                file.write(source[place : place + 1])
    assert refused > 5_000
