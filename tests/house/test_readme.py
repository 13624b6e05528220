"""Every sentence of the README with a number, or a "no", is held by a test or by a file that a
command makes.

TIES has a piece of each such sentence and what holds it: a function below, or another test by its
place. A sentence without one fails here, as does a piece that no sentence has any more.
"""

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest
from packaging.requirements import Requirement

from benchmarks import fit
from recipe_lib.cli import plan as plan_verb
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import list_presets, read_recipe_configs
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_spec, read_preset_config
from recipe_lib.models.config_fields import read_codes
from recipe_lib.parallel.context import check_context
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import Plan
from recipe_lib.units import GIB, convert_to_gib
from tests.house.documents import list_blocks
from tests.house.files import ROOT
from tests.parallel.small_models import build_small_spec
from tests.plan.apart import call_in_fork
from tests.selection import mark_slow_except

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KEYS = read_schema(read_recipe_configs()["dpo_distributed"]).keys
CLAIM = re.compile(r"\d|\b(?:no|not|none|never|nothing|neither|nor)\b", re.IGNORECASE)


def sentences() -> list[str]:
    """Sentences, rows of tables and headings outside of code, without the targets of links."""
    text = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    lines = [line for line in text.splitlines() if line and not line.startswith("|---")]
    parts = [
        [line] if line.startswith("|") else re.split(r"(?<=[.:;])\s+(?=[A-Z`\[])", line)
        for line in lines
    ]
    return [part for line in parts for part in line]


def sizes_of_models() -> None:
    sizes = sorted(
        float(name[:-1]) * (1e-3 if name[-1] == "M" else 1)
        for name in re.findall(r"[\d.]+[BM]\b", presets())
    )
    assert 0.1 <= sizes[0] < 0.2 and sizes[-1] == 120


def presets() -> str:
    return " ".join(name for name in list_presets() if not name.startswith("demo/"))


def python_version() -> None:
    assert PROJECT["requires-python"] == ">=3.11"


def pictures() -> None:
    """The pictures are there, and of what the sentence names."""
    from benchmarks.pictures import PLAN

    assert PLAN.startswith("plan llama3/8B_full --nproc_per_node 4 --device rtx4090")
    for name in ("plan", "run"):
        assert f"(docs/pictures/{name}.png)" in TEXT
        assert (ROOT / "docs" / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def bytecode_share() -> None:
    """By what docs/measurements/footprint.md has measured with and without."""
    text = (ROOT / "docs" / "measurements" / "footprint.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| tune-recipes |"))
    without = next(
        line for line in text.splitlines() if line.startswith("| tune-recipes (pip --no-compile) |")
    )
    sizes = [int(line.split("|")[3]) for line in (row, without)]
    assert abs((sizes[0] - sizes[1]) / sizes[0] - 1 / 6) < 0.02, sizes


def listed() -> None:
    """Every line of a config has its planned memory."""
    from contextlib import redirect_stdout

    from recipe_lib.cli import ls

    said = StringIO()
    with redirect_stdout(said):
        assert ls.run(["qwen3", "lora"]) == 0
    lines = [line for line in said.getvalue().splitlines() if "qwen3/" in line]
    assert len(lines) >= 6 and all("GiB" in line for line in lines)


def demo_needs_no_download() -> None:
    text = (ROOT / "configs" / "demo" / "full.yaml").read_text(encoding="utf-8")
    assert "hub:" not in text and "preset: demo/0.5M" in text
    assert all(
        (ROOT / path).exists() for path in re.findall(r"(?:path|source): (examples/\S+)", text)
    )


def torch_versions() -> None:
    allowed = next(need for need in PROJECT["dependencies"] if need.startswith("torch>"))
    (install,) = re.findall(r'pip install (?:--no-compile )?"(torch\S+)"', TEXT)
    assert set(install.removeprefix("torch").split(",")) == set(
        allowed.removeprefix("torch").split(",")
    )
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    named = re.findall(
        r"\b2\.\d\d\.\d\b", next(line for line in TEXT.splitlines() if "`make` takes" in line)
    )
    assert f"torch=={named[0]}\n" in pinned


def four_cards() -> None:
    """Of the sum in the story: it is under what a card of 24 GB has for torch, with more than 1 GiB
    to spare.
    """
    (total,) = re.findall(r"one chunk of logits: ([\d.]+) GiB", TEXT)
    assert float(total) + 1 < convert_to_gib(find_hardware("24GB").memory) - 688 / 1024 - 600 / 1024
    assert plan_of(
        command(
            "--nproc_per_node 4 full_finetune_distributed --config llama3/8B_full --device rtx4090"
        )
    )[1]


def what_ran_on_a_gpu() -> None:
    """Of the cards that there are reports of, the README says which, and of no other."""
    folder = ROOT / "docs" / "measurements"
    page = (folder / "on_a_gpu.md").read_text(encoding="utf-8")
    cards = {path.stem.split("-nvidia-")[1] for path in folder.glob("*-nvidia-*.md")}
    assert cards == {"h200"} and "on one H200" in TEXT
    for said in ("Cards of 24 GB", "More than one GPU", "the ladder of levers"):
        assert said in page, said


def levers_on_a_gpu() -> None:
    """How well peaks were planned, as the page of the report says it."""
    folder = ROOT / "docs" / "measurements"
    page = (folder / "gpu-plan-levers-nvidia-h200.md").read_text(encoding="utf-8")
    requested, reserved = re.findall(r"- (?:requested|reserved): .*? 95 % within ([\d.]+)%", page)
    assert f"planned to {requested} % in 95 of 100 figures, reserved ones to {reserved} %" in TEXT
    (row,) = re.findall(r"\| full llama3/8B .*stream_layers.*state_bits=4 .*\| step \|.*", page)
    errors = [abs(float(error)) for error in re.findall(r"([+-][\d.]+)%", row)]
    assert errors[0] <= 0.01 and 1.2 < errors[-1] < 1.4


def one_card() -> None:
    """The planned figures of full fine-tuning on one card, from the command above them."""
    words = command(
        "memory.stream_layers=true memory.optimizer_in_backward=true memory.optimizer_offload=true"
    )
    assert "clip_grad_norm=null" in words and "max_seq_len" not in " ".join(words)
    plan, fits = plan_of(words)
    reserved, host = plan.heaviest.reserved, plan.heaviest.host
    spec = build_spec(read_preset_config("llama3/8B"), "llama3/8B")
    assert fits and spec.num_layers == 32
    assert (
        f"one card of 8 GB, in sequences of 2048 tokens: {reserved / GIB:.2f} GiB reserved" in TEXT
    )
    assert f"and {host / GIB:.0f} GiB of host memory. The 14.96 GiB of weights" in TEXT


def command(piece: str) -> list[str]:
    """The `tune plan` of the README that has all these words."""
    found = [
        words
        for block in list_blocks(README)
        if block.language == "bash"
        for words in block.list_commands()
    ]
    return next(
        words[2:]
        for words in found
        if words[:2] == ["tune", "plan"] and set(piece.split()) <= set(words)
    )


def plan_of(words: list[str]) -> tuple[Plan, bool]:
    """(the plan, whether it fits)."""
    text, fits = call_in_fork(_planned, words)
    return Plan.from_json(json.loads(text)), fits


def _planned(words: list[str]) -> tuple[str, bool]:
    from contextlib import redirect_stdout

    said = StringIO()
    with redirect_stdout(said):
        code = plan_verb.run([*words, "--json", "-"])
    return said.getvalue(), code == 0


def fit_page() -> None:
    assert fit.CARDS == (1, 2, 4, 8)
    assert list(fit.MODELS) == [
        "1B",
        "3B",
        "8B",
        "14B",
        "32B",
        "70B",
        "gpt-oss-20b",
        "Qwen3-30B-A3B",
    ]
    assert list(fit.METHODS.values()) == ["full fine-tuning", "LoRA", "QLoRA"]


def exit_code_of_a_plan() -> None:
    assert plan_verb.NO_ROOM == 3


def adapters_of_8b() -> None:
    """Rank 16 on all linear layers, and bytes of what is frozen."""
    spec = build_spec(read_preset_config("llama3/8B"), "llama3/8B")
    d, f, kv = spec.width, spec.mlp_width, spec.num_kv_heads * spec.head_width
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)]
    trained = spec.num_layers * sum(16 * (wide + high) for wide, high in shapes)
    linears = spec.num_layers * sum(wide * high for wide, high in shapes)
    total = linears + 2 * spec.vocab_size * d + (2 * spec.num_layers + 1) * d
    assert f"that is {trained:,} parameters" in TEXT
    assert f"2 N bytes in bf16 ({convert_to_gib(2 * total):.2f} GiB)" in TEXT
    assert (
        f"2 for the rest ({convert_to_gib(0.516 * linears + 2 * (total - linears)):.2f} GiB)"
        in TEXT
    )


def state_bytes_of_adamw() -> None:
    """Two states of 2 bytes in bf16; 8 and 4 bits are a half and a quarter of that."""
    assert (2 * 2, 8 / 16, 1 - 4 / 16) == (4, 0.5, 0.75)


def methods() -> None:
    """What recipes and losses there are."""
    names = {
        "full_finetune_distributed",
        "lora_finetune_distributed",
        "dpo_distributed",
        "reward_distributed",
    }
    assert set(read_recipe_configs()) == names | {"distill_distributed"}
    kinds = (
        read_schema(read_recipe_configs()["distill_distributed"])
        .keys["distill.divergence"]
        .limits["choices"]
    )
    assert kinds == ("forward_kl", "reverse_kl", "jensen_shannon")
    losses = {name.upper() for name in KEYS["dpo.loss"].limits["choices"]}
    assert losses >= {
        "SIGMOID",
        "IPO",
        "SIMPO",
        "KTO",
    }, losses  # the first is DPO, and cDPO by the next key
    assert "dpo.label_smoothing" in KEYS


def no_ring_attention() -> None:
    assert not {name for name in KEYS if "ring" in name.split("_")} and "parallel.context" in KEYS
    check_context(
        replace(build_small_spec(), num_heads=8, num_kv_heads=1), ParallelConfig(context=8)
    )
    with pytest.raises(ConfigError, match="8 attention heads"):
        check_context(
            replace(build_small_spec(), num_heads=8, num_kv_heads=1), ParallelConfig(context=16)
        )


def no_expert_parallelism() -> None:
    from recipe_lib.models.families import FAMILIES

    assert not {name for name in KEYS if "expert_parallel" in name or name == "parallel.expert"}
    assert not FAMILIES.keys() & {"deepseek_v2", "deepseek_v3", "qwen2_moe"}


def few_quantized_checkpoints() -> None:
    """Two layouts are read; the others are refused with the method's name."""
    from recipe_lib.errors import UserError

    dense, mixture = (
        read_preset_config("llama3/8B"),
        {"model_type": "gpt_oss", "num_local_experts": 4},
    )
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert build_spec({**dense, "quantization_config": fp8}, "config.json").codes.fp8_block == (
        128,
        128,
    )
    assert read_codes({**mixture, "quantization_config": {"quant_method": "mxfp4"}}, "").mxfp4
    for method in ("gptq", "awq", "bitsandbytes"):
        with pytest.raises(
            UserError, match=rf"quantization_config: the weights are quantized \({method}\)"
        ):
            build_spec({**dense, "quantization_config": {"quant_method": method}}, "config.json")


def check_window_of_torch() -> None:
    """The first and the last of the window, and the one that is pinned."""
    (torch,) = [Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch>")]
    assert [version for version in range(30) if f"2.{version}.0" in torch.specifier] == list(
        range(11, 16)
    )
    assert "\ntorch==2.13." in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def devices() -> None:
    assert KEYS["device"].limits["choices"] == ("auto", "cpu", "cuda")


def license_is_bsd() -> None:
    assert PROJECT["license"] == "BSD-3-Clause"


DOCUMENTS = "tests/house/test_documents.py"
LEVERS = "tests/recipes/test_levers.py::test_losses_are_those_of_the_plain_run_or_it_is_refused"
ARITHMETIC = f"{DOCUMENTS}::test_readme_arithmetic"
CHECKED_DATA = "tests/cli/test_data.py::test_check_finds_every_fault"
PRESETS = f"{DOCUMENTS}::test_every_preset_is_in_the_table"
TIES: dict[str, Callable[[], None] | str] = {
    "of 0.1 to 120 billion parameters": sizes_of_models,
    "Llama 3 8B with all parameters trained on four cards": pictures,
    "both are HTML pages that need no network": (
        "tests/training/test_report_page.py::test_the_page_stands_alone_and_is_well_formed"
    ),
    "Python 3.11 or newer": python_version,
    "`--no-compile` leaves out bytecode": bytecode_share,
    "A wheel of it": (
        "tests/house/test_package.py::test_the_commands_of_all_pages_run_from_the_wheel"
    ),
    "`tune ls qwen3 lora` lists": listed,
    "| by transformers' class": "tests/models/test_configs.py::test_the_config_of_a_preset",
    "| `full_finetune_distributed`": methods,
    "| `lora_finetune_distributed`": methods,
    "| `dpo_distributed`": methods,
    "| `reward_distributed`": methods,
    "none, then nearly all": "tests/house/test_demo.py::test_score_counts_exact_answers",
    "Nothing is downloaded for it": demo_needs_no_download,
    "`make` takes torch": torch_versions,
    "Tested are torch 2.11": check_window_of_torch,
    "## The 24 GB story": ARITHMETIC,
    "on four cards of 24 GB is a matter": four_cards,
    "Let N be the parameters": ARITHMETIC,
    "The model's width d is 4,096": ARITHMETIC,
    "A sequence has s tokens": ARITHMETIC,
    "AdamW's two states, sharded": ARITHMETIC,
    "| layer inputs, kept with": ARITHMETIC,
    "one layer's own results": ARITHMETIC,
    "| a layer gathered": ARITHMETIC,
    "That is 17.35 GiB": ARITHMETIC,
    "What is in no unit stays gathered": (
        "tests/parallel/test_fsdp.py::test_gathered_bytes_of_each_policy"
    ),
    "If only the layers are units": ARITHMETIC,
    "As separate units": "tests/parallel/test_fsdp_wrap_policy.py::test_auto_goes_by_size",
    "Logits in fp32 are 4 s v bytes": ARITHMETIC,
    "and their gradients, in bf16, are 0.12 GiB": ARITHMETIC,
    "So: 17.35": ARITHMETIC,
    "On the other 17.35": ARITHMETIC,
    "The second fits in 24 GB": four_cards,
    "This is arithmetic, not a measurement": what_ran_on_a_gpu,
    "What has run on a GPU, and what has not": what_ran_on_a_gpu,
    "peaks of configs with each of these were measured": levers_on_a_gpu,
    "No card of 24 GB was": what_ran_on_a_gpu,
    "of the same model on one card": one_card,
    "The 14.96 GiB of weights and the optimizer's states": one_card,
    "Gradients are not clipped": one_card,
    "What these levers keep, move and free is tested": what_ran_on_a_gpu,
    "fit 1, 2, 4 and 8 cards of 24 GB": fit_page,
    "tensors have sizes and no bytes": (
        "tests/plan/test_closed_forms.py::"
        "test_a_rank_holds_its_part_of_parameters_gradients_and_states"
    ),
    "exit code 0 or 3": exit_code_of_a_plan,
    "versions that do not work together": (
        "tests/cli/test_doctor.py::test_a_fault_is_found_and_told_with_its_remedy"
    ),
    "For Llama 3 8B with rank 16": adapters_of_8b,
    "The frozen weights are what remains to fit": adapters_of_8b,
    "On several cards, configs whose model fits one of 24 GB": (
        "tests/models/test_planned_peaks.py::test_adapters_have_whole_models_where_they_fit"
    ),
    "no rank ever holds the model in 16 bits": (
        "tests/adapters/test_quantized_sharded.py::test_loading_reads_a_ranks_blocks_in_pieces"
    ),
    "It names invalid ones by cause": CHECKED_DATA,
    "It finds duplicates, validation samples": CHECKED_DATA,
    "The exit code is 2 if there is a fault": CHECKED_DATA,
    "`checkpoint.keep_best` exports the best step": "tests/recipes/test_best_runs.py",
    "A model goes to llama.cpp and Ollama": "tests/checkpoint/gguf/test_gguf_models.py",
    "`qat=int4` trains it for the bits": (
        "tests/recipes/test_qat_runs.py::"
        "test_what_transformers_loads_quantized_computes_what_training_computed"
    ),
    "have not been measured on a GPU": what_ran_on_a_gpu,
    "| `batch_size=1` with": LEVERS,
    "| `data.packing=true`": (
        "tests/data/test_packing.py::test_within_one_percent_of_the_fewest_possible"
    ),
    "activation_checkpointing=budget": (
        "tests/memory/test_budget.py::"
        "test_as_many_bytes_are_kept_as_planned_and_gradients_are_the_same"
    ),
    "| `memory.loss_chunks=16`": (
        "tests/ops/test_cross_entropy.py::test_peak_bytes_are_those_of_one_chunk"
    ),
    "| `memory.mlp_tiles=8`": (
        "tests/memory/test_mlp_tiles.py::test_the_inner_width_exists_for_a_piece_at_a_time"
    ),
    "no longer gathered throughout": (
        "tests/parallel/test_fsdp.py::test_gathered_bytes_of_each_policy"
    ),
    "| `parallel.data_shard=-1`": (
        "tests/plan/test_closed_forms.py::"
        "test_a_rank_holds_its_part_of_parameters_gradients_and_states"
    ),
    "| `memory.stream_layers=true`": "tests/memory/test_layer_stream.py",
    "| `parallel.context=8`": (
        "tests/parallel/test_context.py::test_a_layer_keeps_its_part_of_the_tokens"
    ),
    "| `parallel.tensor=8`": (
        "tests/parallel/test_tensor_memory.py::test_kept_bytes_are_those_of_the_formula"
    ),
    "| `parallel.pipeline: 4`": (
        "tests/parallel/pipeline/test_memory.py::"
        "test_what_is_alive_after_each_action_is_what_theory_says_to_the_byte"
    ),
    "optimizer.implementation=fused": LEVERS,
    "| `optimizer.state_bits=8`": (
        "tests/plan/test_optimizer_bytes.py::test_states_of_few_bits_are_codes_and_scales"
    ),
    "optimizer_in_backward=true clip": (
        "tests/plan/test_stepping_bytes.py::test_one_gradient_at_a_time"
    ),
    "| `optimizer.name=sgd`": state_bytes_of_adamw,
    "| `parallel.strategy=ddp`": (
        "tests/parallel/test_ddp.py::test_losses_and_norms_are_those_of_one_process"
    ),
    "| `matmul_dtype=int8`": (
        "tests/memory/test_matmul_dtype.py::test_the_layers_linears_and_nothing_else"
    ),
    "memory.recompute_cheap=true": (
        "tests/memory/test_kept_bytes.py::test_a_layer_keeps_the_bytes_of_the_formula"
    ),
    "parallel.reduce_dtype=fp32": "tests/parallel/test_fsdp.py::test_dtype_of_the_reduction",
    "parallel.data_replicate=2": (
        "tests/plan/test_closed_forms.py::test_copies_sum_the_part_that_is_reduced_already"
    ),
    "| Llama 2 |": PRESETS,
    "| Llama 3, 3.1": PRESETS,
    "| SmolLM2": PRESETS,
    "| Mistral": PRESETS,
    "| Qwen 2.5": PRESETS,
    "| Qwen 3": PRESETS,
    "| Gemma 2": PRESETS,
    "| Phi 3": PRESETS,
    "| Granite 3": PRESETS,
    "| gpt-oss": PRESETS,
    "A config is `FAMILY/SIZE_METHOD`": PRESETS,
    "a preset `FAMILY/SIZE`": PRESETS,
    "in another size needs no preset": "tests/models/test_spec.py",
    "## What it does not do yet": methods,
    "No reinforcement learning": methods,
    "No ring attention": no_ring_attention,
    "No expert parallelism": no_expert_parallelism,
    "Of checkpoints that are quantized already": few_quantized_checkpoints,
    "no AMD, Intel or Apple GPUs": devices,
    "BSD 3-Clause": license_is_bsd,
}


def test_every_claim_has_what_holds_it():
    claims = [sentence for sentence in sentences() if CLAIM.search(sentence)]
    loose = [claim for claim in claims if not any(piece in claim for piece in TIES)]
    assert not loose, "tie these to a test, or take them out"
    stale = [piece for piece in TIES if not any(piece in claim for claim in claims)]
    assert not stale


CHECKS = sorted({check for check in TIES.values() if callable(check)}, key=lambda one: one.__name__)


@pytest.mark.parametrize(
    "check",
    mark_slow_except(CHECKS, [check for check in CHECKS if check not in (one_card, four_cards)]),
    ids=lambda one: one.__name__,
)
def test_claims(check: Callable[[], None]):
    check()


@pytest.mark.parametrize(
    "place", sorted({place for place in TIES.values() if isinstance(place, str)})
)
def test_what_holds_a_claim_is_a_test(place: str):
    path, _, name = place.partition("::")
    assert importlib.util.spec_from_file_location("held", ROOT / path) is not None
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE) if name else "\ndef test_" in text
