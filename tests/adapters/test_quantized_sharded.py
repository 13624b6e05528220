"""QLoRA over ranks: the same bits and losses for any number of them, bytes per rank, and memory
while loading.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from recipe_lib.adapters import add_adapters, get_adapter_parameters, init_adapters
from recipe_lib.adapters.quantized import QuantizedLinear, fake_quantize_weight
from recipe_lib.checkpoint import huggingface as weights_in
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import World, materialize, shard_model, start_world
from recipe_lib.tokenizers import load_tokenizer
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.selection import mark_slow_except, select_cases

ROWS = 4
LENGTH = 16
STEPS = 6


@contextmanager
def qlora(
    folder: Path, cfg: LoraFinetuneConfig, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Decoder, World]]:
    """A model as the recipe makes it, its frozen weights from the folder."""
    with start_world(cfg) as world:
        spec = build_spec(read_config(folder), str(folder))
        model = build_meta(spec, dtype)
        add_adapters(model, cfg.lora, dtype)
        apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
        shard_model(model, cfg.parallel, cfg.memory, world)
        materialize(model, cfg.memory, world.device)
        load_weights(model, spec, folder)
        init_adapters(model, 7)
        yield model, world


def config(quantize: str = "nf4", **options: Any) -> LoraFinetuneConfig:
    lora = LoraConfig(rank=4, quantize_base=quantize, dora=options.pop("dora", False))
    parallel = ParallelConfig(
        fsdp_wrap_policy="layers", reshard_after_forward=options.pop("reshard", True)
    )
    return LoraFinetuneConfig(
        device="cpu", lora=lora, parallel=parallel, memory=MemoryConfig(**options)
    )


def frozen_bits(model: nn.Module) -> str:
    """SHA-256 of this rank's part of everything that is not trained."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def rows_of_text(realdata: Path) -> Tensor:
    """Tokens of two batches `[2, ROWS, LENGTH + 1]`."""
    tokenizer = load_tokenizer(realdata / "stories260K-hf")
    lines = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()[:2000]
    return torch.tensor(tokenizer.encode(lines)[: 2 * ROWS * (LENGTH + 1)]).view(
        2, ROWS, LENGTH + 1
    )


def losses(folder: Path, cfg: LoraFinetuneConfig, text: Tensor) -> list[float]:
    """Losses of some AdamW steps on the same rows for any number of ranks; frozen bits must come
    out unchanged.

    text: `[batches, ROWS, LENGTH + 1]`.
    """
    with qlora(folder, cfg) as (model, world):
        before = frozen_bits(model)
        trained = get_adapter_parameters(model)
        optimizer = torch.optim.AdamW(trained.values(), lr=0.005)
        found = []
        for step in range(STEPS):
            mine = text[step % 2].chunk(world.size)[world.rank]
            loss = model(mine[:, :-1], labels=mine[:, 1:], head_loss=CrossEntropy(2)) / (
                ROWS * LENGTH
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(world.all_reduce_sum(loss.detach().double())))
        reshard(model)
        assert frozen_bits(model) == before
        return found


SETTINGS = {
    "nf4": config(),
    "int8, dora, full": config("int8", activation_checkpointing="full", dora=True),
}


def plain(cfg: LoraFinetuneConfig) -> tuple[str, bool]:
    """What losses depend on: how weights are kept, and the adapter's kind."""
    return cfg.lora.quantize_base, cfg.lora.dora


@pytest.fixture(scope="module")
def lost(
    request: pytest.FixtureRequest, realdata: Path
) -> tuple[dict[tuple[str, bool], list[float]], list[dict[str, list[float]]]]:
    """Losses of one rank by what they depend on, and of each of two ranks by selected setting."""
    folder, text = realdata / "stories260K-hf", rows_of_text(realdata)
    fake_quantize_weight(
        torch.zeros(64, 64), "nf4"
    )  # imports torchao here, which each rank would have to
    settings = {name: SETTINGS[name] for name in select_cases(request, "name")}
    kinds = dict.fromkeys(map(plain, settings.values()))
    alone = run_ranks(
        lambda: [losses(folder, config(kind, dora=dora), text) for kind, dora in kinds], 1
    )[0]
    both = run_ranks(lambda: {name: losses(folder, cfg, text) for name, cfg in settings.items()}, 2)
    return dict(zip(kinds, alone, strict=True)), both


@pytest.mark.parametrize("name", mark_slow_except(SETTINGS, ["nf4"]))
def test_two_ranks_lose_what_one_does(lost: Any, name: str) -> None:
    alone = lost[0][plain(SETTINGS[name])]
    first, second = (rank[name] for rank in lost[1])
    assert first == second and alone[-1] < alone[0] - 0.3
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=0, atol=1e-5)


def bits_of(module: QuantizedLinear) -> list[Tensor]:
    return [parameter.detach().view(torch.uint8).clone() for parameter in module.parameters()]


def test_any_number_of_ranks_makes_the_same_bits() -> None:
    """Shards that end within rows, uneven ones, empty ones; sharded four ways, and two copies
    sharded two ways.
    """

    def fill(kind: str, shape: tuple[int, int], dims: tuple[int, ...]) -> list[Tensor]:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.bfloat16)
        module = QuantizedLinear(linear, kind)
        if dims:
            names = ("copies", "shards")[-len(dims) :]
            fully_shard(module, mesh=init_device_mesh("cpu", dims, mesh_dim_names=names))
        module.to_empty(device="cpu").fill_weight(
            lambda start, stop, columns: weight[start:stop, columns]
        )
        if isinstance(module, FSDPModule):
            module.unshard()
        return bits_of(module)

    cases = list(product(("nf4", "int8"), ((43, 64), (2, 64), (30, 96))))
    expected = [fill(*case, ()) for case in cases]
    for found in run_ranks(
        lambda: [[fill(*case, dims) for dims in ((4,), (2, 2))] for case in cases], 4
    ):
        for case, both, one in zip(cases, found, expected, strict=True):
            for parts in both:
                assert all(torch.equal(*pair) for pair in zip(parts, one, strict=True)), case


@pytest.mark.slow
def test_bytes_per_rank_are_those_of_the_formula(realdata: Path) -> None:
    """Two ranks, stories260K: 5 layers of width 64, keys 32, MLP 172, vocabulary 512, tied; rank 4,
    AdamW, fp32.
    """
    matrices = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    matrices |= {"gate": (172, 64), "up": (172, 64), "down": (64, 172)}

    def half(count: int) -> int:
        return -(-count // 2)

    def frozen(rows: int, columns: int) -> int:
        blocks = rows * columns // 64
        group = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if blocks % size == 0)
        return half(blocks) * (32 + 1) + 4 * half(blocks // group + 1)

    layer = sum(frozen(*shape) for shape in matrices.values()) + 2 * 4 * half(64)
    outside = 4 * half(512) * 64 + 4 * half(64)
    adapters = sum(half(4) * columns + half(rows) * 4 for rows, columns in matrices.values())
    gradients_and_states = 3 * 4 * 5 * adapters
    expected = 5 * (layer + 4 * adapters) + outside + gradients_and_states

    def measure() -> tuple[int, int, list[str]]:
        with qlora(realdata / "stories260K-hf", config()) as (model, _):
            optimizer = torch.optim.AdamW(get_adapter_parameters(model).values(), lr=0.01)
            tokens = torch.arange(16).view(1, 16)
            model(tokens, labels=tokens).backward()
            optimizer.step()
            reshard(model)
            held = set(model.parameters())
            tensors = [*held, *(parameter.grad for parameter in held if parameter.grad is not None)]
            tensors += [
                state
                for states in optimizer.state.values()
                for state in states.values()
                if state.dim()
            ]
            storages = {tensor.to_local().untyped_storage() for tensor in tensors}
            bytes_of = {storage.data_ptr(): storage.nbytes() for storage in storages}
            grads = [
                name for name, parameter in model.named_parameters() if parameter.grad is not None
            ]
            return (
                sum(bytes_of.values()),
                sum(tensor.to_local().nbytes for tensor in tensors),
                grads,
            )

    for allocated, used, gradients in run_ranks(measure, 2):
        assert allocated == expected
        assert expected - 2000 < used <= expected  # the rest is padding
        assert gradients and all(".lora_" in name for name in gradients)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 192,
    "intermediate_size": 2000, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose largest matrices take 1.5 MB each in fp32; the MLP's blocks end within rows of
    the down matrix.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = build_meta(build_spec(CONFIG, "wide"), torch.float32).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in model.named_parameters()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_loading_reads_a_ranks_blocks_in_pieces(wide: Path, quantize: str) -> None:
    piece = 2**12  # elements
    model_elements = 4 * 192 * 192 + 3 * 192 * 2000

    def load(count: bool) -> tuple[int, int, int, str]:
        import recipe_lib.adapters.quantized as module

        reads: list[int] = []
        if count:
            module._PIECE_ELEMENTS = piece
            weights_in._make_row_reader = counting(weights_in._make_row_reader, reads)  # type: ignore[attr-defined]
        with qlora_empty(wide, quantize) as (model, spec), LiveBytes() as live:
            load_weights(model, spec, wide)
            return max(reads, default=0), sum(reads), live.peak, frozen_bits(model)

    one_piece, pieces = (run_ranks(load, 2, count) for count in (False, True))
    for rank in range(2):
        largest, read, peak, bits = pieces[rank]
        assert bits == one_piece[rank][3]
        assert largest <= piece + 2 * 2000
        assert read <= model_elements / 2 * (
            1 if quantize == "int8" else 1.6
        )  # rows in two pieces are read twice
        # Some copies of a piece, which may begin and end within rows; nf4: maxima and scales of the
        # whole matrix.
        bound = 4 * 6 * (piece + 2 * 2000) + (4 * 8 * 192 * 2000 // 64 if quantize == "nf4" else 0)
        assert peak <= bound < one_piece[rank][2] / 2


@contextmanager
def qlora_empty(folder: Path, quantize: str) -> Iterator[tuple[Decoder, Any]]:
    with start_world(config(quantize)) as world:
        spec = build_spec(read_config(folder), str(folder))
        model = build_meta(spec, torch.float32)
        add_adapters(model, config(quantize).lora, torch.float32)
        shard_model(model, config().parallel, MemoryConfig(), world)
        materialize(model, MemoryConfig(), world.device)
        yield model, spec


def counting(make: Callable[..., Any], reads: list[int]) -> Callable[..., Any]:
    """A reader of rows that also keeps how many elements each read had."""

    def make_counting(*args: Any) -> Any:
        read_rows = make(*args)

        def read(*part: Any) -> Tensor:
            rows = read_rows(*part)
            reads.append(rows.numel())
            return rows

        return read

    return make_counting
