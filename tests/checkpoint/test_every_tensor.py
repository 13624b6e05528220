"""Every tensor of a checkpoint is read as transformers reads it, left out by a line that names it,
or refused.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_lib.models import read_config, read_spec
from recipe_lib.models.weight_names import build_weight_map
from tests.checkpoint.tensor_faults import (
    SINGLE,
    Fault,
    Tensors,
    explain_unaccounted,
    load,
    load_theirs,
    make_folder,
)
from tests.models.reference import build_reference_model
from tests.selection import mark_slow_but, mark_slow_except

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"
_MIXTURE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4, "vocab_size": 97,
}  # fmt: skip
EXTERNAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
    "gpt_neox": {"num_hidden_layers": 2, "vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4},
    "deepseek_v3": _MIXTURE
    | {
        "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "first_k_dense_replace": 1,
    },
}  # fmt: skip
NATIVE = [
    "llama3.1",
    "llama-biases",
    "qwen2.5",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite4",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's folder as transformers writes it, in one file."""
    root = tmp_path_factory.mktemp("families")

    def folder_of(case: str) -> Path:
        if not (root / case).exists():
            build_reference_model(case, num_hidden_layers=2).save_pretrained(root / case)
        return root / case

    return folder_of


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def drop(held: dict[str, Any], name: str) -> None:
    del held[name]


def faults_of_each(tensors: Tensors) -> dict[str, Fault]:
    """Every tensor renamed, copied under a foreign name, left out, longer by a row, of another
    type.

    Of layers and experts that have the same tensors, those of the last one.
    """
    faults = {}
    for name in {re.sub(r"\.\d+\.", ".*.", name): name for name in tensors}.values():
        foreign, wrapped = f"{name}.other", f"_orig_mod.{name}"
        longer = (
            name,
            lambda value: torch.cat((value, value[:1])) if value.dim() else value.repeat(2),
        )
        integers = (name, lambda value: value.to(torch.int8))
        faults |= {
            f"{name} renamed": Fault(
                lambda held, _, name=name, new=foreign: rename(held, name, new), (name,)
            ),
            f"{name} copied": Fault(
                lambda held, _, name=name, new=wrapped: held.update({new: held[name].clone()}),
                (wrapped,),
            ),
            f"{name} left out": Fault(lambda held, _, name=name: drop(held, name), (name,)),
            f"{name} longer": Fault(
                lambda held, _, new=longer: held.update({new[0]: new[1](held[new[0]])}), (name,)
            ),
            f"{name} of integers": Fault(
                lambda held, _, new=integers: held.update({new[0]: new[1](held[new[0]])}), (name,)
            ),
        }
    return faults


def add(name: str, value: Any) -> Fault:
    """One tensor more; value: of it, or the tensor that it is a copy of."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[name] = tensors[value].clone() if isinstance(value, str) else value.clone()

    return Fault(change, (name,))


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """A tensor with other numbers, or another type or shape."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return Fault(change, (name,))


def rename_all(old: str, new: str) -> Fault:
    """Another beginning of every name that begins so."""

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            rename(tensors, name, new + name.removeprefix(old))

    return Fault(change, (new,) if new else ())


def add_layer(tensors: Tensors, _: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(f"{LAYER}.")]:
        tensors[name.replace(LAYER, "model.layers.2")] = tensors[name].clone()


def move_head(tensors: Tensors, _: dict[str, Any]) -> None:
    rename(tensors, "model.embed_tokens.weight", "lm_head.weight")


def with_head(scale: float) -> Fault:
    """A head beside the embedding that is tied to it."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    return Fault(lambda tensors, _: tensors.update({head: tensors[embedding] * scale}), (head,))


def split(
    more: Callable[[Tensors], Tensors] | None = None,
) -> Callable[[Tensors], dict[str, Tensors]]:
    """Two files; more: tensors that the second has too."""

    def shards(tensors: Tensors) -> dict[str, Tensors]:
        names = sorted(tensors)
        first, second = ({name: tensors[name] for name in names[at::2]} for at in (0, 1))
        second |= {} if more is None else more(first)
        return {
            "model-00001-of-00002.safetensors": first,
            "model-00002-of-00002.safetensors": second,
        }

    return shards


UP = f"{LAYER}.mlp.up_proj.weight"
DOWN = f"{LAYER}.mlp.down_proj.weight"
LISTED: dict[str, tuple[str, Fault]] = {
    "a head that differs from the embedding": ("llama3.1", with_head(1.1)),
    "a head that is the embedding": ("llama3.1", with_head(1.0)),
    "only the head": ("llama3.1", Fault(move_head)),
    "only the head, of Gemma": ("gemma2", Fault(move_head)),
    "a longer head": ("llama3.1", add("lm_head.weight", torch.ones(98, 48))),
    "a bias of the head": ("llama3.1", add("lm_head.bias", torch.ones(97))),
    "a body by itself": ("llama3.1", rename_all("model.", "")),
    "compiled": ("llama3.1", rename_all("", "_orig_mod.")),
    "of DistributedDataParallel": ("llama3.1", rename_all("", "module.")),
    "of PEFT": ("llama3.1", rename_all("", "base_model.model.")),
    "a layer more": ("llama3.1", Fault(add_layer, ("model.layers.2",))),
    "a bias": ("llama3.1", add(f"{ATTENTION}.q_proj.bias", torch.ones(48))),
    "a norm of queries": ("llama3.1", add(f"{ATTENTION}.q_norm.weight", torch.ones(12))),
    "frequencies": ("llama3.1", add(f"{ATTENTION}.rotary_emb.inv_freq", torch.ones(6))),
    "frequencies of the body": ("llama3.1", add("model.rotary_emb.inv_freq", torch.ones(6))),
    "a mask": ("llama3.1", add(f"{LAYER}.attn.bias", torch.ones(1, 1, 4, 4))),
    "a bias that is no mask": ("llama3.1", add(f"{LAYER}.attn.bias", torch.ones(48))),
    "what masks": ("llama3.1", add(f"{ATTENTION}.masked_bias", torch.tensor(-1e4))),
    "a value head": ("llama3.1", add("v_head.summary.weight", torch.ones(1, 48))),
    "a score head": ("llama3.1", add("score.weight", torch.ones(1, 48))),
    "a classifier": ("llama3.1", add("classifier.weight", torch.ones(2, 48))),
    "scales": ("llama3.1", add(f"{LAYER}.mlp.up_proj.weight_scale", torch.ones(1))),
    "scales of blocks": ("llama3.1", add(f"{UP}_scale_inv", torch.ones(1, 1))),
    "codes of GPTQ": (
        "llama3.1",
        add(f"{LAYER}.mlp.up_proj.qweight", torch.ones(4, 4, dtype=torch.int32)),
    ),
    "scales of activations": ("llama3.1", add(f"{LAYER}.mlp.up_proj.input_scale", torch.ones(1))),
    "factors of an adapter": (
        "llama3.1",
        add(f"{ATTENTION}.q_proj.lora_A.weight", torch.ones(2, 48)),
    ),
    "fused beside parts": ("llama3.1", add(f"{ATTENTION}.qkv_proj.weight", torch.ones(96, 48))),
    "parts beside fused": ("phi3", add(f"{ATTENTION}.q_proj.weight", torch.ones(48, 48))),
    "fused experts beside others": (
        "qwen3-moe",
        Fault(
            add(f"{LAYER}.mlp.experts.gate_up_proj", torch.ones(6, 48, 48)).change,
            (f"{LAYER}.mlp.experts.",),
        ),
    ),
    "an expert more": (
        "qwen3-moe",
        add(f"{LAYER}.mlp.experts.6.up_proj.weight", f"{LAYER}.mlp.experts.0.up_proj.weight"),
    ),
    "a correction of the router": (
        "qwen3-moe",
        add(f"{LAYER}.mlp.gate.e_score_correction_bias", torch.ones(6)),
    ),
    "eight bits": ("llama3.1", put(UP, lambda value: value.to(torch.float8_e4m3fn))),
    "integers": ("llama3.1", put(UP, lambda value: value.to(torch.int8))),
    "64 bits": ("llama3.1", put(UP, lambda value: value.double())),
    "16 bits": ("llama3.1", put(UP, lambda value: value.half())),
    "an empty tensor more": ("llama3.1", add("model.empty", torch.ones(0))),
    "an empty weight": ("llama3.1", put(UP, lambda value: value[:0])),
    "a padded vocabulary": (
        "qwen2.5",
        put("model.embed_tokens.weight", lambda value: torch.cat((value, value[:3]))),
    ),
    "the same tensor in two files": (
        "llama3.1",
        Fault(shards=split(lambda first: {DOWN: first[DOWN].clone()}), names=()),
    ),
    "another tensor in two files": (
        "llama3.1",
        Fault(shards=split(lambda first: {DOWN: first[DOWN] + 1}), names=(DOWN,)),
    ),
    "an unnamed weight": (
        "llama3.1",
        Fault(shards=split(), index=lambda names: drop(names, UP), names=(UP,)),
    ),
    "an unnamed tensor": (
        "llama3.1",
        Fault(
            shards=split(lambda first: {"v_head.weight": first[DOWN] + 1}),
            index=lambda names: drop(names, "v_head.weight"),
            names=("v_head.weight",),
        ),
    ),
    "a name without its tensor": (
        "llama3.1",
        Fault(
            shards=split(),
            index=lambda names: names.update({"model.x": "model-00001-of-00002.safetensors"}),
            names=("model.x",),
        ),
    ),
    "a consolidated file": (
        "llama3.1",
        Fault(files=("consolidated.safetensors",), names=("consolidated.safetensors",)),
    ),
    "a pickle": ("llama3.1", Fault(files=("pytorch_model.bin",), names=("pytorch_model.bin",))),
    "an adapter's file": (
        "llama3.1",
        Fault(files=("adapter_model.safetensors",), names=("adapter_model.safetensors",)),
    ),
    "shards that are not read": (
        "llama3.1",
        Fault(
            files=("model-00001-of-00001.safetensors",), names=("model-00001-of-00001.safetensors",)
        ),
    ),
    "a file of the config's": (
        "llama3.1",
        Fault(
            lambda _, config: config.update(transformers_weights="other.safetensors"),
            ("other.safetensors",),
            files=("other.safetensors",),
        ),
    ),
}


IMPLEMENTATIONS = ["native", "transformers"]
# Each fault with one of the two, in turn.
IN_TURN = [(name, IMPLEMENTATIONS[at % 2]) for at, name in enumerate(LISTED)]


@pytest.mark.parametrize(("name", "implementation"), mark_slow_but(IN_TURN, 20))
def test_what_files_may_hold_besides(
    name: str, implementation: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    case, fault = LISTED[name]
    make_folder(models(case), fault, tmp_path / "model")
    assert explain_unaccounted(tmp_path / "model", fault, implementation) is None


def check_each(folder: Path, implementation: str, tmp_path: Path) -> list[str]:
    """The faults of one family's tensors whose outcome is not one of the three."""
    bad = []
    tensors = load_file(folder / SINGLE)
    entries = build_weight_map(read_spec(read_config(folder), str(folder), implementation), tensors)
    parameters = {entry.file_name: entry.our_name for entry in entries}
    for at, (name, fault) in enumerate(faults_of_each(tensors).items()):
        if (
            implementation != "native"
        ):  # where transformers has another name, or makes one of several, that is named
            fault.names += (
                parameters.get(name.split()[0], name),
                f"{name.partition('.experts.')[0]}.experts.",
            )
        make_folder(folder, fault, tmp_path / str(at))
        why = explain_unaccounted(tmp_path / str(at), fault, implementation)
        if why is not None:
            bad.append(f"{name}: {why}")
    return bad


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3"])
def test_each_tensor_of_what_is_not_native(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **EXTERNAL[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.arange(value.numel()) * 0.6 - 1)
    model.save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model", "transformers").said == []
    assert not check_each(tmp_path / "model", "transformers", tmp_path)


def test_what_its_class_in_transformers_does_not_read_is_left_out(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("gpt_neox", **EXTERNAL["gpt_neox"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    layer = "gpt_neox.layers.0.attention"
    fault = add(
        f"{layer}.masked_bias", torch.ones(2, 2)
    )  # by its class' pattern, whatever its shape
    make_folder(tmp_path / "saved", fault, tmp_path / "model")
    assert explain_unaccounted(tmp_path / "model", fault, "transformers") is None
    assert not load(tmp_path / "model", "transformers").refused


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("case", mark_slow_except(["llama3.1", "gemma2"], ["llama3.1"]))
def test_the_remedy_of_a_head_of_its_own(
    case: str, implementation: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers does not tie what differs: with the key that the refusal names we have its
    logits.
    """
    make_folder(models(case), with_head(1.1), tmp_path / "tied")
    assert "set tie_word_embeddings to false" in load(tmp_path / "tied", implementation).refused[0]
    fault = Fault(lambda _, config: config.update(tie_word_embeddings=False))
    make_folder(tmp_path / "tied", fault, tmp_path / "untied")
    outcome = load(tmp_path / "untied", implementation)
    assert outcome.logits is not None and not outcome.said
    torch.testing.assert_close(outcome.logits, load_theirs(tmp_path / "tied"), rtol=0, atol=1e-4)


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with vision, whose config.json says twice that the head is tied."""
    text = build_reference_model("gemma3", num_hidden_layers=2).config
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


TIES: dict[
    str, tuple[bool | None, bool | None, bool]
] = {  # outer key, the text's key; whether it loads
    "differs": (None, None, False),
    "outer": (False, True, True),
    "text": (True, False, False),
    "both": (False, False, True),
}


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("case", mark_slow_except(TIES, ["outer"]))
def test_the_head_of_a_multimodal_model(
    case: str, implementation: str, multimodal: Path, tmp_path: Path
) -> None:
    """transformers reads the outer key."""
    outer, text, loads = TIES[case]
    embedding, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[head] = tensors[embedding] * 1.1
        if outer is not None:
            config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = (
                outer,
                text,
            )

    fault = Fault(change, (head,))
    make_folder(multimodal, fault, tmp_path / "model")
    assert explain_unaccounted(tmp_path / "model", fault, implementation) is None
    outcome = load(tmp_path / "model", implementation)
    assert bool(outcome.refused) is not loads
    assert (
        loads
        or f"{head} differs from {embedding}, and config.json ties the two" in outcome.refused[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "implementation"),
    [("llama3.1", "native"), ("llama-biases", "native"), ("qwen2.5", "native"), ("gemma2", "native"),
     ("phi3", "native"), ("granite4", "native"), ("qwen3-moe", "native"), ("gemma3", "transformers"), ("gpt-oss", "transformers")],
)  # fmt: skip
def test_each_tensor_of_every_family(
    case: str, implementation: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    assert not check_each(models(case), implementation, tmp_path)


def test_a_folder_as_it_is(models: Callable[[str], Path]) -> None:
    """Without a fault nothing is said, so that what is said elsewhere is of the fault."""
    for case in NATIVE:
        outcome = load(models(case))
        assert outcome.logits is not None and not outcome.said, outcome.said
        torch.testing.assert_close(outcome.logits, load_theirs(models(case)), rtol=0, atol=1e-4)
