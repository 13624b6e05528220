"""The card of an export: README.md with the metadata that the hub reads, what was trained and how
to use it.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from recipe_lib.config.local_files import is_hub_snapshot
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig
from recipe_lib.config.schema_data import HUB, is_hub, resolve_sources
from recipe_lib.redaction import redact

CARD = "README.md"
BASE = "BASE"  # the place of a base that is on no hub
# Where and how a run wrote and logged says nothing about the model.
_NOT_TOLD = re.compile(
    r"output_dir|resume|overwrite_output_dir|device|plugins?|log\..*|data\.(source|sources|format|cache.*|num_.*)"
    r"|validation\.source|model\.path|model\.preset"
)


def make_model_card(
    cfg: FullFinetuneConfig | None,
    *,
    base: str,
    base_folder: Path | None,
    lora: LoraConfig | None,
    is_adapter: bool,
    commands: Sequence[str] = (),
    plan: Mapping[str, str] | None = None,
    results: Mapping[str, str] | None = None,
) -> str:
    """The card's text, the same for the same training.

    cfg: of the run; None: it is not known. base: the name of what training began from. base_folder:
    where that is, None for random weights; its own card says the license. lora: how the adapter was
    made, None for a model of which all weights were trained. is_adapter: whether the export is an
    adapter alone. commands: what to do with it, in a folder that they call FOLDER, and a base that
    they call BASE. plan, results: rows of the tables of how it was trained and what came of it.
    """
    shown = get_public_name(base, base_folder)
    sources = [] if cfg is None else [one.source for one in resolve_sources(cfg.data)]
    data = ModelCardData(
        base_model=base if base_folder is not None and is_hub_snapshot(base_folder, base) else None,
        datasets=sorted(
            {name.removeprefix(HUB).partition(":")[0] for name in sources if is_hub(name)}
        )
        or None,
        library_name="peft" if is_adapter else "transformers",
        license=_read_license(base_folder),
        pipeline_tag="text-generation",
        tags=["tune-recipes", *_list_kind_tags(cfg, lora)],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        *_write_sections(cfg, base, base_folder, lora, is_adapter),
    ]
    parts += [
        f"## {title}\n\n{_format_table(rows)}"
        for title, rows in (("Plan", plan), ("Results", results))
        if rows
    ]
    parts.append(
        "## Use\n\n"
        + _describe_use(shown if is_adapter else None, commands, base_folder is not None)
    )
    return redact("\n\n".join(parts) + "\n")


def get_public_name(base: str, folder: Path | None) -> str:
    """How a card names what training began from: by its hub id, or as BASE, since its folder is of
    this machine.
    """
    return base if folder is None or is_hub_snapshot(folder, base) else BASE


def _read_license(folder: Path | None) -> str | None:
    """The license in the card of the base; None: there is no card, or it names none."""
    if folder is None or not (folder / CARD).is_file():
        return None
    try:
        found = ModelCard.load(folder / CARD).data.license
    except (OSError, ValueError, AttributeError):  # a stranger's file
        return None
    return found if isinstance(found, str) else None


def _list_kind_tags(cfg: FullFinetuneConfig | None, lora: LoraConfig | None) -> list[str]:
    kinds = [] if lora is None else ["dora" if lora.dora else "lora"]
    if cfg is None:
        return kinds
    prefers = any(one.format == "preference" for one in resolve_sources(cfg.data))
    return [cfg.recipe.partition("_")[0] if prefers else "sft", *kinds]


def _write_sections(
    cfg: FullFinetuneConfig | None,
    base: str,
    base_folder: Path | None,
    lora: LoraConfig | None,
    is_adapter: bool,
) -> Iterator[str]:
    kind = "full fine-tuning" if lora is None else "DoRA" if lora.dora else "LoRA"
    what = f"{kind} adapter for" if is_adapter else f"Trained by {kind} from"
    begin = "random weights of the architecture" if cfg is not None and not cfg.model.path else ""
    yield f"# {Path(base).name or 'model'}, fine-tuned"
    name = base if get_public_name(base, base_folder) == base else Path(base).name
    yield f"{what} {begin + ' ' if begin else ''}`{name}`, made with tune-recipes."
    if cfg is not None:
        yield "## Data\n\n" + "\n".join(_list_data_lines(cfg))
        changed = {f"`{name}`": _format_cell(value) for name, value in _list_changed_keys(cfg)}
        if changed:
            yield f"## Settings that differ from the defaults\n\n{_format_table(changed)}"


def _format_table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    )


def _list_data_lines(cfg: FullFinetuneConfig) -> Iterator[str]:
    for one in resolve_sources(cfg.data):
        weight = f", weight {one.weight:g}" if one.weight != 1 else ""
        yield f"- `{_drop_folders(one.source)}`, format `{one.format}`{weight}"
    if cfg.validation.source:
        yield f"- validation: `{_drop_folders(cfg.validation.source)}`"


def _drop_folders(source: str) -> str:
    """A file by its name: where it lay says nothing to whoever reads the card."""
    return source if is_hub(source) else Path(source).name


def _list_changed_keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that differ from their defaults, with their values."""
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _list_changed_keys(value, f"{name}.")
            continue
        made = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        if value != made and not _NOT_TOLD.fullmatch(name):
            yield (
                name,
                (
                    _drop_folders(value)
                    if field.metadata.get("path") and isinstance(value, str)
                    else value
                ),
            )


def _format_cell(value: Any) -> str:
    return f"`{str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')}`"


def _describe_use(base: str | None, commands: Sequence[str], has_base: bool) -> str:
    """base: of an adapter; None for a model. has_base: it has weights that can be loaded."""
    if base is not None and not has_base:
        return (
            f"The adapter is of use with the random weights of `{base}` alone that it was"
            " trained on."
        )
    load = 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    if base is not None:
        load = (
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}),"
            ' "FOLDER")'
        )
    lines = "".join(f"{command}\n" for command in commands)
    return (
        f"In the place of FOLDER{' and BASE' if base == BASE else ''}, a path or a name on the"
        " hub:\n\n```python\n"
        + ("from peft import PeftModel\n" if base is not None else "")
        + "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        + f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n{load}\n{_ASK}```'
        + (f"\n\n```bash\n{lines}```" if lines else "")
    )


_ASK = (
    'prompt = [{"role": "user", "content": "Hello"}]\n'
    "inputs = tokenizer.apply_chat_template(\n"
    '    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
    ")\n"
    "answer = model.generate(**inputs, max_new_tokens=100)\n"
    'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
)
