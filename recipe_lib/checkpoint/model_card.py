"""Make the card of an export: README.md with the metadata that the hub reads.

It tells what was trained, on what, with which settings, and how to use it. Paths and names of this
machine are left out.
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
BASE = "BASE"  # stands for a base that is on no hub
# Where and how a run wrote and logged says nothing about the model.
_UNTOLD_KEYS = re.compile(
    r"output_dir|resume|overwrite_output_dir|device|plugins?|log\..*"
    r"|data\.(source|sources|format|cache.*|num_.*)|validation\.source|model\.path|model\.preset"
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
    """Return the card's text, the same for the same training.

    cfg: of the run; None: it is not known.
    base: the name of what training began from.
    base_folder: where that is, None for random weights; its own card says the license.
    lora: how the adapter was made, None for a model of which all weights were trained.
    is_adapter: the export is an adapter alone.
    commands: what to do with it, in a folder that they call FOLDER, and a base that they call BASE.
    plan, results: rows of the tables of how it was trained and what came of it.
    """
    shown_base = get_public_name(base, base_folder)
    sources = [] if cfg is None else [source.source for source in resolve_sources(cfg.data)]
    # A hub's data set, without the subset or file that follows its id.
    datasets = {name.removeprefix(HUB).partition(":")[0] for name in sources if is_hub(name)}
    is_base_on_hub = base_folder is not None and is_hub_snapshot(base_folder, base)
    data = ModelCardData(
        base_model=base if is_base_on_hub else None,
        datasets=sorted(datasets) or None,
        library_name="peft" if is_adapter else "transformers",
        license=_read_license(base_folder),
        pipeline_tag="text-generation",
        tags=["tune-recipes", *_list_kind_tags(cfg, lora)],
    )
    parts = [f"---\n{data.to_yaml()}\n---"]
    parts += _write_sections(
        cfg, base=base, base_folder=base_folder, lora=lora, is_adapter=is_adapter
    )
    for title, rows in (("Plan", plan), ("Results", results)):
        if rows:
            parts.append(f"## {title}\n\n{_format_table(rows)}")
    adapter_base = shown_base if is_adapter else None
    use = _describe_use(adapter_base, commands, has_base=base_folder is not None)
    parts.append(f"## Use\n\n{use}")
    # A setting may hold a token, though none should.
    return redact("\n\n".join(parts) + "\n")


def get_public_name(base: str, folder: Path | None) -> str:
    """Return how a card names what training began from: by its hub id or preset, else as BASE.

    A folder's path is of this machine and tells a reader nothing.
    """
    return base if folder is None or is_hub_snapshot(folder, base) else BASE


def _read_license(folder: Path | None) -> str | None:
    """Return the license in the card of the base; None if there is no card, or it names none."""
    if folder is None or not (folder / CARD).is_file():
        return None
    try:
        name = ModelCard.load(folder / CARD).data.license
    except (OSError, ValueError, AttributeError):  # a stranger's file
        return None
    return name if isinstance(name, str) else None


def _list_kind_tags(cfg: FullFinetuneConfig | None, lora: LoraConfig | None) -> list[str]:
    kinds = [] if lora is None else ["dora" if lora.dora else "lora"]
    if cfg is None:
        return kinds
    has_preferences = any(source.format == "preference" for source in resolve_sources(cfg.data))
    # Of dpo_distributed `dpo`, of reward_distributed `reward`.
    return [cfg.recipe.partition("_")[0] if has_preferences else "sft", *kinds]


def _write_sections(
    cfg: FullFinetuneConfig | None,
    *,
    base: str,
    base_folder: Path | None,
    lora: LoraConfig | None,
    is_adapter: bool,
) -> Iterator[str]:
    kind = "full fine-tuning"
    if lora is not None:
        kind = "DoRA" if lora.dora else "LoRA"
    product = f"{kind} adapter for" if is_adapter else f"Trained by {kind} from"
    origin = ""
    if cfg is not None and not cfg.model.path:
        origin = "random weights of the architecture "
    yield f"# {Path(base).name or 'model'}, fine-tuned"
    name = base if get_public_name(base, base_folder) == base else Path(base).name
    yield f"{product} {origin}`{name}`, made with tune-recipes."
    if cfg is not None:
        yield "## Data\n\n" + "\n".join(_list_data_lines(cfg))
        changed = {f"`{name}`": _format_cell(value) for name, value in _list_changed_keys(cfg)}
        if changed:
            yield f"## Settings that differ from the defaults\n\n{_format_table(changed)}"


def _format_table(rows: Mapping[str, str]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)


def _list_data_lines(cfg: FullFinetuneConfig) -> Iterator[str]:
    for source in resolve_sources(cfg.data):
        weight = f", weight {source.weight:g}" if source.weight != 1 else ""
        yield f"- `{_drop_folders(source.source)}`, format `{source.format}`{weight}"
    if cfg.validation.source:
        yield f"- validation: `{_drop_folders(cfg.validation.source)}`"


def _drop_folders(source: str) -> str:
    """Return a file's name: where it lay says nothing to whoever reads the card."""
    return source if is_hub(source) else Path(source).name


def _list_changed_keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that differ from their defaults, with their values."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _list_changed_keys(value, f"{name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default and not _UNTOLD_KEYS.fullmatch(name):
            if field.metadata.get("path") and isinstance(value, str):
                value = _drop_folders(value)
            yield name, value


def _format_cell(value: Any) -> str:
    # A bar or a line end would end the cell; chr() since an f-string takes no backslash.
    return f"`{str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')}`"


def _describe_use(base: str | None, commands: Sequence[str], *, has_base: bool) -> str:
    """Return how to load the export and ask it something.

    base: of an adapter; None for a model. has_base: the base has weights that can be loaded.
    """
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
    names = "FOLDER and BASE" if base == BASE else "FOLDER"
    text = f"In the place of {names}, a path or a name on the hub:\n\n```python\n"
    if base is not None:
        text += "from peft import PeftModel\n"
    text += "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    text += f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n{load}\n{_ASK}```'
    if commands:
        lines = "".join(f"{command}\n" for command in commands)
        text += f"\n\n```bash\n{lines}```"
    return text


_ASK = (
    'prompt = [{"role": "user", "content": "Hello"}]\n'
    "inputs = tokenizer.apply_chat_template(\n"
    '    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
    ")\n"
    "answer = model.generate(**inputs, max_new_tokens=100)\n"
    'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
)
