"""README and docs are true: their rows and configs can be read, keys exist, links lead somewhere,
sums add up.
"""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.cli.recipes import read_recipe_name
from recipe_lib.config import get_registered, load_config
from recipe_lib.config.paths import list_presets, read_recipe_configs
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.data.chat_templates import TemplateFields
from recipe_lib.data.samples import RenamedSample, Sample
from recipe_lib.data.unread_names import UnreadNames, collect_texts
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from recipe_lib.methods.dpo.config import UNPAIRED, DpoFinetuneConfig
from recipe_lib.methods.reward.config import RewardFinetuneConfig
from recipe_lib.models import build_spec, read_preset_config
from recipe_lib.units import convert_to_gib
from tests.house.documents import list_blocks, list_documents, list_links
from tests.house.files import ROOT, list_python_files
from tests.house.test_configs import NAMES, flatten
from tests.models.test_configs import WITHOUT_FULL

DOCUMENTS = list_documents()
NAMED = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
KEYS = flatten(DpoFinetuneConfig())
BASE = "model: {preset: demo/0.5M}\ntokenizer: {path: there}\ndata: {source: rows.jsonl}\n"


def test_there_are_documents():
    expected = "README.md docs/first_run.md docs/your_data.md docs/your_recipe.md docs/checkpoints.md".split()
    assert {
        *expected,
        "docs/architecture.md",
        "docs/config.md",
        "docs/measurements/README.md",
    } <= set(NAMED)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_links_lead_somewhere(path: Path):
    broken = [target for target in list_links(path) if not (path.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_rows_can_be_read(path: Path):
    for block in list_blocks(path):
        if block.language == "json":
            assert block.mark == "rows", f"say which format this is:\n{block.text}"
            for line in block.text.splitlines():
                assert read_whole(block.name, json.loads(line))


def read_whole(form: str, row: dict[str, Any]) -> Sample:
    """What a row becomes; nothing of it may be left over."""
    reader = get_registered("data.format", form)
    names = UnreadNames(form, (), TemplateFields(None))
    renamed = RenamedSample(row, {}, "data")
    names.tidy_columns(renamed)
    sample = reader(renamed)
    assert names.find(renamed, sample, collect_texts(sample)) == []
    return sample


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_configs_are_valid(path: Path, tmp_path: Path):
    for block in list_blocks(path):
        if block.language == "yaml":
            (tmp_path / "config.yaml").write_text(block.text, encoding="utf-8")
            recipe = read_recipe_name(tmp_path / "config.yaml") or "full_finetune_distributed"
            assert load_config(tmp_path / "config.yaml", (), read_recipe_configs()[recipe])


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_overrides_are_valid(path: Path, tmp_path: Path):
    """Every `key=value` in the running text."""
    for override in re.findall(
        r"`([a-z_]+(?:\.[a-z_]+)?=[^`\s]+)`", path.read_text(encoding="utf-8")
    ):
        if override.endswith("key=value"):
            continue
        base = (
            BASE.replace("preset: demo/0.5M", "path: there")
            if override.startswith("lora.")
            else BASE
        )
        (tmp_path / "config.yaml").write_text(base, encoding="utf-8")
        pairs = override.startswith("dpo.") or override == "data.format=preference"
        taught = override.startswith("distill.")
        schema = (
            DpoFinetuneConfig if pairs else DistillFinetuneConfig if taught else LoraFinetuneConfig
        )
        schema = FullFinetuneConfig if override == "recipe=full_finetune_distributed" else schema
        schema = RewardFinetuneConfig if override.startswith("reward.") else schema
        single = any(loss in override for loss in UNPAIRED)
        given = [f"data.format={'kto' if single else 'preference'}"] * pairs
        given += ["distill.teacher_preset=demo/0.5M"] * taught
        assert load_config(tmp_path / "config.yaml", [override, *given], schema)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_keys_exist(path: Path):
    """Every `section.key` and `section.key: value` in the running text, but for the first column of
    the two pages that has torchtune's keys.
    """
    sections = {name.split(".")[0] for name in KEYS if "." in name}
    text = path.read_text(encoding="utf-8")
    text = (
        re.sub(r"(?m)^\| [^|]* \|", "|", text)
        if path.name in ("torchtune.md", "imported_keys.md")
        else text
    )
    for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)(?:: [^`]+)?`", text):
        if section in sections:
            assert f"{section}.{key}" in KEYS


def test_every_preset_is_in_the_table():
    """`llama3/8B`, `70B`; a size stands behind the family that was named last."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Models")[1].split("## ")[0]
    told, family = set(), ""
    for name in re.findall(r"`([\w./]+)`", table.split("A config is")[0]):
        family = name.split("/")[0] if "/" in name else family
        told.add(name if "/" in name else f"{family}/{name}")
    shipped = {name for name in list_presets() if not name.startswith("demo/")}
    assert (
        told - {"config.json", "transformers"} - {f"{family}/config.json", f"{family}/transformers"}
        >= shipped
    )
    assert {
        name for name in told if name.split("/")[0] in {preset.split("/")[0] for preset in shipped}
    } == shipped
    methods = ("full", "lora", "qlora", "dora", "dpo", "kto", "reward", "qat", "distill")
    assert {name for name in shipped if f"{name}_full" not in NAMES} == WITHOUT_FULL
    assert {f"{name}_qlora" for name in shipped} <= set(NAMES)
    assert {name for name in NAMES if not name.startswith("demo/")} <= {
        f"{n}_{m}" for n in shipped for m in methods
    }


def test_readme_arithmetic():
    """The 24 GB story, from the shipped architecture."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    spec = build_spec(read_preset_config("llama3/8B"), "llama3/8B")
    d, f, v, layers, s = spec.width, spec.mlp_width, spec.vocab_size, spec.num_layers, 4096
    layer = 2 * d * d + 2 * d * spec.num_kv_heads * spec.head_width + 3 * d * f + 2 * d
    count = layers * layer + 2 * v * d + d
    sharded, kept, own = (
        convert_to_gib(8 * count / 4),
        convert_to_gib(2 * layers * s * d),
        convert_to_gib(2 * s * (3 * f + 8 * d)),
    )
    gathered, vocabulary, logits = (
        convert_to_gib(2 * 2 * layer),
        convert_to_gib(2 * v * d),
        convert_to_gib(4 * s * v),
    )
    common = sharded + kept + own + gathered
    for figure in (f"{count:,}", f"{layer:,}", f"{v:,}", f"{d:,}", f"{f:,}"):
        assert figure in text, figure
    for amount in (
        sharded,
        kept,
        own,
        gathered,
        2 * vocabulary,
        4 * vocabulary,
        logits,
        3 * logits,
        logits / 16,
    ):
        assert f"{amount:.2f}" in text, amount
    assert f"{vocabulary:.2f} GiB against {convert_to_gib(2 * layer):.2f}" in text
    assert f"That is {common:.2f} GiB" in text
    assert f"= {common + 4 * vocabulary + 3 * logits:.2f} GiB on the one hand" in text
    assert f"one chunk of logits: {common + 2 * vocabulary + logits / 16:.2f} GiB" in text


def test_figures_of_levers_are_those_of_the_ladder():
    """docs/memory_levers.md repeats lines of the planned table, of each run without levers and with
    one.
    """
    ladder = (ROOT / "docs" / "measurements" / "ladder.md").read_text(encoding="utf-8")
    begin = {"full": "## Full fine-tuning", "LoRA": "## LoRA"}
    guide = (ROOT / "docs" / "memory_levers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| (full|LoRA) \| (.+) \| (.+) \|$", guide, re.MULTILINE)
    assert len(rows) > 10
    for lever, run, change, speed in rows:
        table = ladder.split(begin[run])[1].split("The config as `tune cp` gives it")[0]
        (line,) = [line for line in table.splitlines() if line.startswith(f"| `{lever}`")]
        cells = [cell.strip() for cell in line.split("|")]
        assert (cells[4], cells[8]) == (change, speed), lever


# Files of a reader's own in examples, and one that its design note announces.
NOT_OURS = {
    "mine.py",
    "my_parts.py",
    "my_model.py",
    "test_wires.py",
    "anchored_finetune.py",
    "lion.py",
    "saved_dtype.py",
    "count.py",
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMED)
def test_named_files_exist(path: Path):
    """Every `file.py`, `folder/file.py` and `test_*.py` in the running text, from the root or from
    a folder in it.
    """
    ours = [
        f"/{file.relative_to(ROOT).as_posix()}"
        for file in [*list_python_files(), *(ROOT / "tests").rglob("*.py")]
    ]
    for name in re.findall(r"`([\w./*-]+\.py)(?:::\w+)?`", path.read_text(encoding="utf-8")):
        is_example = path.name == "extending.md" and (
            Path(name).name in NOT_OURS or "methods/anchored/" in name
        )
        assert is_example or any(fnmatch(file, f"*/{name}") for file in ours), name
