"""Our decoder against transformers, on tiny random models of every family."""

from pathlib import Path

import pytest
import torch
import transformers

from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import KVCache, build_spec
from recipe_lib.ops.attention import compute_document_positions, make_attention_info
from recipe_lib.ops.head_losses import CrossEntropy
from tests.models.reference import CASES, build_reference_model, load_ours, save_ours
from tests.selection import mark_slow_except

LENGTH = (
    40  # longer than every window and than the original context of the stretched rotary embeddings
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the models made so far are saved, by case."""
    return {"root": tmp_path_factory.mktemp("reference")}


def saved(case: str, folders: dict[str, Path]) -> Path:
    if case not in folders:
        folders[case] = folders["root"] / case
        build_reference_model(case).save_pretrained(folders[case])
    return folders[case]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest logit: what two orders of the same fp32 sums may differ by."""
    torch.testing.assert_close(
        actual, expected, atol=1e-5 * max(1.0, float(expected.abs().max())), rtol=0
    )


def tokens(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(case: str, folders: dict[str, Path]) -> None:
    ours, theirs = load_ours(saved(case, folders)), build_reference_model(case)
    expected = theirs(tokens()).logits
    assert expected.std() > 0.05
    assert_close(ours(tokens()), expected)


# One case of each way to name tensors.
NAMED = ["llama3.1", "llama-biases", "qwen2.5", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe",
         "olmoe", "gpt-oss", "smollm3", "granite", "granite4"]  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
@torch.no_grad()
def test_transformers_loads_our_names(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = saved(case, folders)
    ours = load_ours(source)
    for parameter in ours.parameters():
        parameter.mul_(1.25)  # so that weights left as they were would be noticed
    save_ours(ours, source, tmp_path / "out")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(loading.values()), loading
    assert_close(ours(tokens()), theirs(tokens()).logits)


@pytest.mark.parametrize(
    "case", ["llama3.1", "mistral-window", "gemma2", "gemma3", "phi3", "smollm3"]
)
@torch.no_grad()
def test_right_padding_changes_nothing_before_it(case: str, folders: dict[str, Path]) -> None:
    ours, theirs = load_ours(saved(case, folders)), build_reference_model(case)
    rows, mask = tokens(3), torch.ones(3, LENGTH, dtype=torch.long)
    for row, length in enumerate((LENGTH, 23, 11)):
        rows[row, length:], mask[row, length:] = 0, 0
    expected = theirs(rows, attention_mask=mask).logits
    actual = ours(rows)
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert actual.isfinite().all()


@pytest.mark.parametrize(
    "case",
    [
        "llama3.1",
        "mistral-window",
        "qwen2.5-window",
        "gemma2",
        "gemma3",
        "phi4-mini",
        "smollm3-window",
        "granite4",
    ],
)
@torch.no_grad()
def test_documents_in_one_row_equal_separate_rows(case: str, folders: dict[str, Path]) -> None:
    ours = load_ours(saved(case, folders))
    lengths = [[9, 20, 3], [LENGTH], [1, 1, 30]]
    rows = tokens(3)
    info, positions = (
        make_attention_info(lengths, LENGTH),
        compute_document_positions(lengths, LENGTH),
    )
    packed = ours(rows, positions, info)
    assert packed.isfinite().all()
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            piece = slice(start, start + length)
            assert_close(packed[row, piece], ours(rows[row : row + 1, piece])[0])
            start += length


@pytest.mark.parametrize(
    "case",
    ["llama3.1", "mistral-window", "gemma2", "gemma3-linear", "phi3", "qwen3", "smollm3"],
)
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_pass(case: str, folders: dict[str, Path]) -> None:
    ours = load_ours(saved(case, folders))
    spec = build_spec(build_reference_model(case).config.to_dict(), case)
    whole = ours(tokens())
    cache = KVCache(spec, 2, LENGTH, torch.float32, "cpu")
    pieces, start = [], 0
    for length in (10, 1, 1, 12, 1, 15):  # prompts in several pieces as well as single tokens
        pieces.append(ours(tokens()[:, start : start + length], cache=cache))
        start += length
    assert cache.length == LENGTH
    assert_close(torch.cat(pieces, dim=1), whole)
    with pytest.raises(ValueError, match="room for 40 tokens, 41 are needed"):
        ours(tokens()[:, :1], cache=cache)


@pytest.mark.parametrize(
    "case", ["llama3.1", "qwen3", "gemma2", "gemma3", "smollm3", "smollm3-window", "granite"]
)
def test_gradients_and_loss_equal_those_of_transformers(
    case: str, folders: dict[str, Path]
) -> None:
    ours, theirs = load_ours(saved(case, folders)), build_reference_model(case)
    inputs, labels = tokens(), tokens().roll(-1, dims=1)
    labels[:, :4], labels[:, -1] = -100, -100
    loss = ours(inputs, labels=labels, head_loss=CrossEntropy(3))
    expected = torch.nn.functional.cross_entropy(
        theirs(inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    (loss / 70).backward()
    (expected / 70).backward()
    for name, parameter in ours.named_parameters():
        grad = theirs.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad, grad, atol=1e-5 * float(grad.abs().max()) + 1e-7, rtol=1e-4, msg=name
        )


@torch.no_grad()
def test_a_real_checkpoint(realdata: Path) -> None:
    folder = realdata / "stories260K-hf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.randint(0, 512, (2, 300), generator=torch.Generator().manual_seed(1))
    assert_close(load_ours(folder)(inputs), theirs(inputs).logits)


@pytest.mark.parametrize(
    "case", mark_slow_except(["llama3.1", "gpt-oss", "smollm3", "granite"], ["llama3.1"])
)
def test_a_compiled_layer_is_one_graph(case: str, tmp_path: Path) -> None:
    torch.compiler.reset()  # graphs of other cases count among those of this one
    build_reference_model(case, num_hidden_layers=2).save_pretrained(tmp_path)
    plain = load_ours(tmp_path)
    compiled = load_ours(tmp_path)
    apply_activation_checkpointing(
        compiled, "full"
    )  # a layer that were no graph then would not be compiled at all
    for layer in compiled.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    for inputs in (tokens(), tokens()[:, :-3]):  # of another length
        losses = [
            model(inputs, labels=inputs.roll(-1, dims=1), head_loss=CrossEntropy(2))
            for model in (plain, compiled)
        ]
        torch.autograd.backward(losses)
        assert torch.equal(*losses)
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, atol=1e-5 * float(other.grad.abs().max()), rtol=0
        )
