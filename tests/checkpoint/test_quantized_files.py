"""Checkpoints that are quantized already: what is read equals what transformers makes of them, bit
for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from recipe_lib.adapters import add_adapters
from recipe_lib.checkpoint import huggingface
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.safetensors_files import Reader
from recipe_lib.checkpoint.tensor_matching import check_weights
from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.models import Decoder, build_meta
from recipe_lib.models.weight_names import Fp8Blocks, Mxfp4Blocks, OpenView
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.parallel import materialize, shard_model, start_world
from tests.adapters.hugging_face import load_plain, read_folder_spec
from tests.checkpoint.quantized_folders import (
    decode_fp8,
    write_fp8_folder,
    write_mxfp4_folder,
    write_twin,
)
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes

# Blocks of 24 rows cut the matrices of 64 and 96 rows, and heads, with a smaller one at the end;
# 128 is all of one.
FP8: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, blocks of 16 x 32": ("qwen3", {"block": (16, 32), "scales": torch.bfloat16}),
    "qwen3, smaller last blocks": ("qwen3", {"block": (24, 40)}),
    "qwen3, powers of 2": ("qwen3", {"block": (32, 32), "scales": torch.float8_e8m0fnu}),
    "qwen3, some modules left": (
        "qwen3",
        {"block": (32, 32), "left": ("embed", "lm_head", "o_proj", "layers.1.mlp")},
    ),
    "qwen3, head and embedding too": ("qwen3", {"block": (16, 16), "left": ()}),
    "phi3, smaller last blocks": ("phi3", {"block": (24, 32)}),
    "phi3, whole blocks": ("phi3", {"block": (32, 32)}),
    "granite4": ("granite4", {"block": (24, 32)}),
    "qwen3-moe": ("qwen3-moe", {"block": (16, 16), "moe_intermediate_size": 32}),
    "mixtral, fused experts": (
        "mixtral",
        {"block": (32, 16), "fused": True, "scales": torch.bfloat16},
    ),
}
EXACT = [
    "qwen3",
    "qwen3, blocks of 16 x 32",
    "qwen3, powers of 2",
    "phi3, whole blocks",
    "qwen3-moe",
]
FOLDERS = ["mxfp4", *FP8]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders by name, each made once, with its twin `NAME/twin` in bf16."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("quantized") / "model"
            case, options = FP8.get(name, ("", {}))
            write_mxfp4_folder(made[name]) if name == "mxfp4" else write_fp8_folder(
                made[name], case, **options
            )
            write_twin(made[name], made[name] / "twin")
        return made[name]

    return folder


def bits(tensor: Tensor) -> Tensor:
    """What tells a negative zero from a positive one."""
    return tensor.detach().contiguous().view(torch.uint8)


def assert_same(ours: nn.Module, other: nn.Module) -> None:
    expected = dict(other.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == expected[name].dtype
        assert torch.equal(bits(parameter), bits(expected[name])), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FOLDERS)
def test_numbers_are_those_that_transformers_functions_make(
    folders: Callable[[str], Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = folders(name)
    stored = {value.dtype for value in load_file(folder / "model.safetensors").values()}
    assert stored & {torch.uint8, torch.float8_e4m3fn}
    check_weights(read_folder_spec(folder), folder)
    other = (
        folder / "twin" if dtype == torch.bfloat16 else write_twin(folder, tmp_path / "twin", dtype)
    )
    assert_same(load_plain(folder, dtype), load_plain(other, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", *EXACT])
def test_transformers_computes_the_same_with_the_folder(
    folders: Callable[[str], Path], name: str, dtype: torch.dtype
) -> None:
    """It dequantizes where it has no kernels; of FP8 it reads whole blocks alone, and no fused
    experts.
    """
    folder = folders(name)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    ours = load_plain(folder, dtype)
    named, compared = dict(theirs.named_parameters()), 0
    for own, parameter in ours.named_parameters():
        other = named.get(own.removesuffix(".weight") if ".experts." in own else own)
        if other is None or own.endswith("experts.gate_up_proj.bias"):
            continue
        if "_proj" in own:  # other weights stay of the file's type there
            assert other.dtype == dtype
            compared += 1
        turned = other.transpose(1, 2) if name == "mxfp4" and other.dim() == 3 else other
        assert torch.equal(bits(parameter), bits(turned.to(dtype))), own
    assert compared >= 4
    if dtype == torch.float32:
        tokens = torch.arange(1, 25).view(2, 12)
        with torch.no_grad():
            torch.testing.assert_close(
                ours(tokens), theirs.float()(tokens).logits, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_code_of_mxfp4_with_every_exponent(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1).view(4, 64, 16, 16)
    exponents = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(4, 64, 16)
    files = {"blocks": codes, "scales": exponents}
    view = OpenView(Mxfp4Blocks("blocks", "scales", (4, 64, 512)), files.__getitem__, dtype)
    expected = convert_moe_packed_tensors(codes, exponents, dtype=dtype).transpose(1, 2)
    found, numbers = view[:], ~expected.isnan()
    assert torch.equal(found.isnan(), ~numbers) and numbers.sum() > 0.99 * numbers.numel()
    assert torch.equal(bits(found[numbers]), bits(expected[numbers]))
    part = (slice(1, 3), slice(5, 40), slice(45, 46))
    for columns in (part[2], slice(31, 33), slice(64, 96), slice(300, 512)):
        assert torch.equal(bits(view[(*part[:2], columns)]), bits(expected[(*part[:2], columns)]))
    assert torch.equal(
        bits(view.rows(60, 130, slice(3, 50))), bits(expected.flatten(0, 1)[60:130, 3:50])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_of_fp8_and_every_part(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = (
        codes[codes & 127 != 127].repeat(40)[: 100 * 72].view(100, 72).view(torch.float8_e4m3fn)
    )  # no NaN
    scales = torch.exp(8 * torch.randn(4, 5, generator=generator))
    files = {"codes": codes, "scales": scales}
    view = OpenView(Fp8Blocks("codes", "scales", (100, 72), (32, 16)), files.__getitem__, dtype)
    expected = decode_fp8(codes, scales, [32, 16], dtype)
    assert torch.equal(bits(view[:]), bits(expected))
    for rows in ((0, 1), (31, 33), (5, 100), (96, 100)):
        for columns in ((0, 72), (15, 17), (64, 72), (40, 41)):
            part = (slice(*rows), slice(*columns))
            assert torch.equal(bits(view[part]), bits(expected[part])), (rows, columns)
    files["scales"] = torch.tensor(
        [[120, 127, 130, 90, 10]] * 4, dtype=torch.uint8
    )  # exponents alone
    powers = Fp8Dequantize(None)._dequantize_one(codes[:96, :64], files["scales"][:3, :4], dtype)
    assert torch.equal(bits(view[0:96, 0:64]), bits(powers))


def test_blocks_larger_than_a_matrix_take_no_memory() -> None:
    codes = torch.full((3, 5), 1.5).to(torch.float8_e4m3fn)
    files = {"codes": codes, "scales": torch.tensor([[2.0]])}
    view = Fp8Blocks("codes", "scales", (3, 5), (10**30, 2**40))
    assert view.tensors()["scales"].shape == (1, 1)
    assert torch.equal(
        OpenView(view, files.__getitem__, torch.float32)[1:, 2:], torch.full((2, 3), 3.0)
    )


def with_adapters(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    spec = read_folder_spec(folder)
    model = build_meta(spec, dtype)
    add_adapters(model, LoraConfig(quantize_base=kind), dtype)
    model.to_empty(device="cpu")
    load_weights(model, spec, folder)
    return model


def frozen(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    "name", ["mxfp4", "qwen3, smaller last blocks", "phi3, smaller last blocks", "qwen3-moe"]
)
def test_straight_into_four_and_eight_bits(
    folders: Callable[[str], Path], name: str, kind: str
) -> None:
    folder = folders(name)
    found, expected = (frozen(with_adapters(path, kind)) for path in (folder, folder / "twin"))
    assert (
        found.keys() == expected.keys()
        and sum(name.endswith("weight_codes") for name in found) >= 8
    )
    for each, tensor in found.items():
        assert torch.equal(bits(tensor), bits(expected[each])), each


@contextmanager
def sharded(folder: Path, kind: str, dtype: torch.dtype) -> Iterator[Decoder]:
    """A model on this rank's world, without weights. kind: `plain`, or of a quantized base beside
    adapters.
    """
    lora = LoraConfig(quantize_base=kind if kind != "plain" else "none")
    cfg = LoraFinetuneConfig(
        device="cpu", lora=lora, parallel=ParallelConfig(fsdp_wrap_policy="layers")
    )
    with start_world(cfg) as world:
        model = build_meta(read_folder_spec(folder), dtype)
        if kind != "plain":
            add_adapters(model, lora, dtype)
        shard_model(model, cfg.parallel, MemoryConfig(), world)
        materialize(model, MemoryConfig(), world.device)
        yield model


def count_slices() -> list[tuple[str, int]]:
    """From now on, in this process: the name and the numbers of each slice that is read of a
    file.
    """
    read: list[tuple[str, int]] = []
    real = Reader.get_slice

    class Counted:
        def __init__(self, source: Any, name: str):
            self.source, self.name = source, name

        def __getitem__(self, place: Any) -> Tensor:
            part: Tensor = self.source[place]
            read.append((self.name, part.numel()))
            return part

    Reader.get_slice = lambda self, name: Counted(real(self, name), name)  # type: ignore[method-assign]
    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("mxfp4", "nf4"), ("qwen3, smaller last blocks", "plain"), ("qwen3-moe", "int8")],
)
def test_each_of_two_ranks_reads_its_own_part(
    folders: Callable[[str], Path], name: str, kind: str
) -> None:
    folder, dtype = folders(name), torch.bfloat16
    whole = frozen(load_plain(folder, dtype) if kind == "plain" else with_adapters(folder, kind))
    sizes = {name: value.numel() for name, value in load_file(folder / "model.safetensors").items()}
    coded = {name for name in sizes if name.endswith("_blocks") or f"{name}_scale_inv" in sizes}

    def load() -> tuple[int, int]:
        read = count_slices()
        with sharded(folder, kind, dtype) as model:
            load_weights(model, model.spec, folder)
            sharded_ones = 0
            for own, parameter in frozen(model).items():
                local, offset = locate_local_part(parameter.detach())
                part = tuple(
                    slice(at, at + size) for at, size in zip(offset, local.shape, strict=True)
                )
                assert torch.equal(bits(local), bits(whole[own][part] if part else whole[own])), own
                sharded_ones += (
                    isinstance(parameter, DTensor) and local.numel() < whole[own].numel()
                )
            assert sharded_ones > 20
            counts = [count for name, count in read if name in coded]
            return sum(counts), max(counts)

    (first, largest), (second, _) = run_ranks(load, 2)
    total = sum(sizes[name] for name in coded)
    most = (
        total if kind != "nf4" else 1.2 * total
    )  # rows in which blocks of two ranks meet are read by both
    assert total <= first + second <= most
    assert 0.3 * total < first < 0.7 * total
    assert largest < max(sizes[name] for name in coded)


def test_large_matrices_are_read_some_rows_at_a_time(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within an expert, whose codes take several times their bytes while they are made
    numbers.
    """
    folder, limit = folders("mxfp4"), 64 * 8 * 10
    monkeypatch.setattr(huggingface, "READ_BYTES", limit)
    read: list[int] = []
    real = Mxfp4Blocks.read

    def counted(self: Mxfp4Blocks, *args: Any) -> Tensor:
        found = real(self, *args)
        read.append(found.numel())
        return found

    monkeypatch.setattr(Mxfp4Blocks, "read", counted)
    assert_same(load_plain(folder, torch.bfloat16), load_plain(folder / "twin", torch.bfloat16))
    assert max(read) * 8 <= limit and len(read) > 2 * 5 * 10


@pytest.mark.parametrize("block", [None, (32, 16)])
def test_codes_take_little_more_than_a_piece(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int] | None
) -> None:
    """What is made in passing: a piece of READ_BYTES, and as much again; of 8 experts, one at a
    time at most.
    """
    shape, limit = (8, 256, 128), 8 * 64 * 128
    monkeypatch.setattr(huggingface, "READ_BYTES", limit)
    if block is None:
        files = {
            "codes": torch.zeros(8, 256, 4, 16, dtype=torch.uint8),
            "scales": torch.zeros(8, 256, 4).byte(),
        }
        view: Any = Mxfp4Blocks("codes", "scales", shape)
    else:
        files = {"codes": torch.zeros(shape).to(torch.float8_e4m3fn), "scales": torch.ones(8, 8, 8)}
        view = Fp8Blocks("codes", "scales", shape, block)
    parameter = torch.empty(shape, dtype=torch.bfloat16)
    with LiveBytes() as live:
        huggingface.read_part(
            OpenView(view, files.__getitem__, torch.bfloat16), parameter, (0, 0, 0)
        )
    assert limit / 8 < live.peak < 2 * limit and not parameter.any()
