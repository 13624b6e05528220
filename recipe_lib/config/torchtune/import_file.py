"""Import a torchtune config file as a config of this project, checked, for `tune import`.

`import_file` returns an `ImportedConfig`: the config, and the fate of every key of the file
(carried, dropped with a reason, ...). "Theirs" is torchtune's, "ours" this project's. torchtune's
configs name no recipe: the model's builder and the loss say which is meant.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_lib.config.check_settings import COMMAND_LINE
from recipe_lib.config.describe import format_settings, format_value
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.load import ALTERNATIVES, LoadedConfig, load_with_origins
from recipe_lib.config.local_files import is_hub_id
from recipe_lib.config.paths import expand_home, read_recipe_configs
from recipe_lib.config.precision import describe_stalled_means
from recipe_lib.config.suggest import did_you_mean, quote, show
from recipe_lib.config.torchtune.conversion import (
    CARRIED,
    CHANGED,
    DEFAULT,
    DROPPED,
    NULL_MEANS,
    ConfigImport,
    KeyFate,
    Meaning,
    TorchtuneFile,
    is_off,
    read_torchtune_file,
)
from recipe_lib.config.torchtune.datasets import convert_datasets
from recipe_lib.config.torchtune.key_tables import (
    ANY,
    ATTENTION,
    DEFAULTS,
    FAMILIES,
    MEANINGS,
    MLP,
    NEEDED,
    NO_MEANING,
    NO_MODELS,
    OTHER_PURPOSES,
    REFUSED,
    SAME,
    WITHOUT,
)
from recipe_lib.errors import ConfigError, raise_faults

# One key of one dataset of several: (index, key).
_SOURCE = re.compile(r"data\.sources\[(\d+)\]\.(\w+)")
_LEAST_WIDTH = 20  # characters of the table's first column


@dataclass(frozen=True)
class ImportedConfig:
    """A config of ours that was imported, and the fate of each key of the file."""

    # Name of our recipe that the config is for.
    recipe: str
    # Name of the file, without its folder.
    source: str
    # The config object, of the recipe's class.
    cfg: Any
    # Key of theirs -> what became of it; of the file, or with a default of torchtune's.
    fates: dict[str, KeyFate]
    # Our dotted key -> value, of keys that differ from the defaults and have an effect.
    settings: dict[str, Any]
    # Lines for the user about optimizer states that rounding may stall; mostly empty.
    notes: list[str]

    def format_yaml(self, name: str) -> str:
        """Return the config as YAML. name: of the file it will be in, for the header's command."""
        header = (
            f"# Imported from {show(self.source)} of torchtune; `tune import` says what became of"
            " each key."
        )
        models = [self.settings.get(name) for name in ("model.path", "distill.teacher")]
        commands = [f"tune download {name}" for name in models if name and is_hub_id(name)]
        commands.append(f"tune run {self.recipe} --config {show(name)}")
        # Sections first, as in the shipped configs.
        names = sorted(self.settings, key=lambda name: "." not in name)
        settings = {"recipe": self.recipe} | {name: self.settings[name] for name in names}
        lines = [header, "#", *(f"#   {line}" for line in commands)]
        keys = read_schema(read_recipe_configs()[self.recipe]).keys
        return "\n".join(lines) + "\n" + format_settings(settings, keys)

    def format_table(self) -> str:
        """Return a line for each key of the file, and for defaults of theirs that are not ours."""
        rows: list[tuple[str, str]] = []
        for kind in (CARRIED, CHANGED, DEFAULT, DROPPED):
            fates = {
                key: fate
                for key, fate in self.fates.items()
                if fate.kind == kind and self._is_shown(fate)
            }
            if fates:
                rows.append((f"{kind} ({len(fates)})", ""))
                rows += [(f"  {show(name)}", _describe_fate(fate)) for name, fate in fates.items()]
        width = max([_LEAST_WIDTH, *(len(key) for key, _ in rows)])
        return "".join(f"{f'{key:{width}}  {text}'.rstrip()}\n" for key, text in rows)

    def _is_shown(self, fate: KeyFate) -> bool:
        if fate.kind != DEFAULT:
            return True
        # A default of theirs is shown if the config has it and it is not ours too, or has a note.
        return (
            any(setting in self.settings.items() for setting in fate.ours.items())
            if fate.ours
            else bool(fate.why)
        )


def import_file(
    path: str, *, overrides: Sequence[str] = (), omitted: Sequence[str] = ()
) -> ImportedConfig:
    """Return the config of ours that a file of torchtune's asks for.

    overrides: `key=value` of our keys, as on the command line; they win. omitted: keys of the file
    to leave out. Raises ConfigError, with a line for each fault, for a file that no recipe of ours
    trains, a key that cannot be carried, or a config that is refused.
    """
    theirs = read_torchtune_file(path)
    # Of all tools' configs torchtune's alone name Python code so.
    if not any(key.rpartition(".")[2] == "_component_" for key in theirs.values):
        raise ConfigError(
            f"{theirs.shown}: has no key _component_, as torchtune's configs have, which alone are"
            f" imported; `tune validate {theirs.shown}` checks a config of ours, and has our key"
            " for each of another tool's"
        )
    omitted_fates = _omit_keys(omitted, theirs)
    given = {word.removeprefix("~").partition("=")[0] for word in overrides}  # our keys
    conversion = ConfigImport(theirs, dict(DEFAULTS), given)
    convert(conversion)
    loaded = _load(conversion, overrides, given)
    fates = _drop_idle(conversion, loaded, given) | omitted_fates
    settings = _select_settings(loaded, conversion.recipe)
    return ImportedConfig(
        recipe=conversion.recipe,
        source=theirs.path.name,
        cfg=loaded.cfg,
        fates=fates,
        settings=settings,
        notes=[f"note: {line}" for line in describe_stalled_means(loaded.cfg)],
    )


def _omit_keys(keys: Iterable[str], theirs: TorchtuneFile) -> dict[str, KeyFate]:
    """Remove keys and sections from `theirs`, as the user has asked; return their fates by key.

    Raises ConfigError for a key that the file does not have.
    """
    fates = {}
    for key in keys:
        names = theirs.list_keys(key)
        if not names:
            raise ConfigError(f"--without: {theirs.shown} has no key {quote(key)}")
        for name in names:
            del theirs.values[name]
            fates[name] = KeyFate(DROPPED, {}, "left out by --without")
    return fates


def _load(conversion: ConfigImport, overrides: Sequence[str], given: set[str]) -> LoadedConfig:
    """Load the config that was converted, checked as `tune validate` does.

    Its settings are passed as overrides, so that those of the user are later ones and win. given:
    our keys that the user sets. Raises ConfigError with lines that name places in their file.
    """
    ours = dict(conversion.ours)
    for pair in ALTERNATIVES:
        # Keys for the same thing, such as data.source and data.sources: the user's takes the place
        # of the converted one.
        for name, alternative in (pair, pair[::-1]):
            if name in given:
                ours = {key: ours[key] for key in ours if not key.startswith(alternative)}
    words = [f"{name}={format_value(value)}" for name, value in _join_sources(ours).items()]
    try:
        return load_with_origins((), [*words, *overrides], read_recipe_configs()[conversion.recipe])
    except ConfigError as error:
        # Beginnings of faults of the user's overrides, which stay; others are about converted keys.
        user_faults = tuple(f"{COMMAND_LINE}: {show(word)}" for word in overrides)
        faults = (
            line if user_faults and line.startswith(user_faults) else _place_fault(conversion, line)
            for line in error.faults
        )
        raise ConfigError(*faults) from error


def _place_fault(conversion: ConfigImport, line: str) -> str:
    """Return the line of a fault, with the place in their file instead of our override."""
    fault = line.removeprefix(f"{COMMAND_LINE}: ")
    our_name = fault.partition("=")[0]
    location = conversion.theirs.shown
    for key, fate in conversion.fates.items():
        if our_name in fate.ours:
            location = f"{conversion.theirs.format_place(key)}: {show(key)}"
    return f"{location}: as ours: {fault}"


def _join_sources(ours: dict[str, Any]) -> dict[str, Any]:
    """Return settings with all `data.sources[0].source` and the like joined to one list."""
    joined = {}
    sources: dict[int, dict[str, Any]] = {}  # index -> key -> value
    # `data.columns` beside a list are those of validation: a dataset without its own has none.
    columns: dict[str, Any] = {"columns": {}} if "data.columns" in ours else {}
    for name, value in ours.items():
        if match := _SOURCE.fullmatch(name):
            sources.setdefault(int(match[1]), dict(columns))[match[2]] = value
        else:
            joined[name] = value
    if sources:
        joined["data.sources"] = [sources[number] for number in sorted(sources)]
    return joined


def _drop_idle(
    conversion: ConfigImport, loaded: LoadedConfig, given: set[str]
) -> dict[str, KeyFate]:
    """Return the fates, with keys dropped whose counterpart is idle or given by the user.

    An idle key is one that another setting robs of its effect.
    """
    # Our key -> why theirs is dropped.
    reasons = dict(zip(loaded.idle, loaded.describe_idle_keys(), strict=True))
    reasons |= {name: f"{name} is set on the command line" for name in given}
    fates = dict(conversion.fates)
    for key, fate in fates.items():
        if fate.kind in (CARRIED, CHANGED) and fate.ours and set(fate.ours) <= set(reasons):
            fates[key] = KeyFate(DROPPED, {}, reasons[next(iter(fate.ours))])
    return fates


def _select_settings(loaded: LoadedConfig, recipe: str) -> dict[str, Any]:
    """Return our keys that differ from the defaults and have an effect, in the schema's order.

    A list of sections becomes a list of dicts, of what differs in each.
    """
    keys = read_schema(read_recipe_configs()[recipe]).keys
    settings: dict[str, Any] = {}
    for name, value, _ in loaded.rows:
        if name in loaded.idle or value == keys[name].default:
            continue
        if keys[name].section_class is not None:
            value = [_select_fields(section) for section in value]
        settings[name] = value
    return settings


def _select_fields(section: Any) -> dict[str, Any]:
    # Of a dataclass, an attribute of the class is a field's default.
    fields = vars(section).items()
    return {name: value for name, value in fields if value != getattr(type(section), name, None)}


def _describe_fate(fate: KeyFate) -> str:
    ours = ", ".join(f"{name}: {format_value(value)}" for name, value in fate.ours.items())
    return "; ".join(part for part in (f"-> {ours}" if ours else "", fate.why) if part) or "as here"


def convert(conversion: ConfigImport) -> None:
    """Choose our recipe, and note every key of the file in `conversion`.

    Raises ConfigError for a file that does not train a model, and for all keys that are refused.
    """
    _check_purpose(conversion)
    is_adapted = conversion.read_component("model").startswith(("lora_", "qlora_"))
    trainable = "adapters" if is_adapted else "all"
    if conversion.is_any_on("teacher_model"):
        conversion.recipe = "distill_distributed"
        conversion.ours["distill.trainable"] = trainable
    elif conversion.read_component("loss") in ("DPOLoss", "RSOLoss"):
        conversion.recipe = "dpo_distributed"
        conversion.ours["dpo.trainable"] = trainable
    else:
        conversion.recipe = (
            "lora_finetune_distributed" if is_adapted else "full_finetune_distributed"
        )
    if not is_adapted:
        # DEFAULTS has them for every file.
        del conversion.defaults["model.lora_rank"], conversion.defaults["model.lora_alpha"]
    if conversion.get_value("optimizer._component_") == "torch.optim.Adam" and conversion.is_on(
        "optimizer.weight_decay"
    ):
        conversion.refuse(
            "optimizer._component_",
            "its weight decay is part of the gradient, ours is decoupled; torch.optim.AdamW has"
            " that too",
        )
    convert_datasets(conversion)
    # The tables' keys first, in the tables' order: some bring defaults for later ones.
    for key in [*CONVERTED, *MEANINGS]:
        if key in conversion.theirs.values or key in conversion.defaults:
            _convert_key(conversion, key)
    for key in [*conversion.theirs.values, *conversion.defaults]:
        _convert_key(conversion, key)
    raise_faults(ConfigError, conversion.faults)


def _check_purpose(conversion: ConfigImport) -> None:
    """Raise ConfigError for a file that trains no model of ours."""
    for key, purpose in OTHER_PURPOSES.items():
        if key in conversion.theirs.values:
            raise conversion.build_error(f"{key}: {purpose}", key)
    if conversion.is_on("quantizer._component_") and not conversion.theirs.list_keys("dataset"):
        raise conversion.build_error(
            "quantizer: it quantizes a model; `tune export MODEL --quantize int4` does", "quantizer"
        )
    components = [
        str(value)
        for key, value in conversion.theirs.values.items()
        if key.endswith("._component_")
    ]
    for word, why in NO_MODELS:
        if any(word in component for component in components):
            full_name = conversion.get_value("model._component_") or ""
            raise conversion.build_error(
                f"model._component_: {full_name}: {why}", "model._component_"
            )


def _convert_key(conversion: ConfigImport, key: str) -> None:
    value = conversion.get_value(key)
    if conversion.is_noted(key):
        return
    if (
        value is None
        and key not in NULL_MEANS
        and (key in SAME or key in CONVERTED or key in MEANINGS)
    ):
        conversion.drop(key, "not set")
    elif key in CONVERTED:
        try:
            CONVERTED[key](conversion, key)
        except (AttributeError, TypeError, ValueError):
            # The functions take the user's value as it is: it may be text where a number is
            # expected, or a list where text is.
            conversion.refuse(key, "is no value of this key", may_be_left_out=False)
    elif meaning := _find_meaning(key, str(value)):
        conversion.carry_meaning(key, meaning)
    elif key in SAME:
        conversion.carry(key, {SAME[key]: value})
    elif reason := find_row(WITHOUT, key):
        conversion.drop(key, reason)
    elif key in MEANINGS:
        expected = " or ".join(MEANINGS[key]).replace("True or False", "true or false")
        conversion.refuse(
            key, NO_MEANING.get(key, f"expected {expected}"), may_be_left_out=key not in NEEDED
        )
    elif is_off(value):
        conversion.drop(key, "is off, as here")
    elif missing := find_row(REFUSED, key):
        conversion.refuse(key, missing)
    else:
        hint = did_you_mean(key, [*SAME, *CONVERTED, *MEANINGS, *WITHOUT, *REFUSED])
        conversion.refuse(key, f"is no key of torchtune that is known here{hint}")


def _find_meaning(key: str, value: str) -> Meaning | None:
    """Return the meaning of a value, written as text; None: it has none in MEANINGS.

    A component, `torchtune.modules.loss.CrossEntropyLoss`, is found by its last word.
    """
    # As it is written first: of optimizers the module counts too. ANY stands for every value.
    meanings = MEANINGS.get(key, {})
    spellings = (value, value.rpartition(".")[2], value.partition(":")[0], ANY)
    return next((meanings[spelling] for spelling in spellings if spelling in meanings), None)


def find_row(table: Mapping[str, str], key: str) -> str | None:
    """Return the text of a key, or of the innermost section around it that has one; else None."""
    name = key
    while name:
        if name in table:
            return table[name]
        cut = max(name.rfind("."), name.rfind("["))
        name = name[:cut] if cut > 0 else ""
    return None


def _convert_model(c: ConfigImport, key: str) -> None:
    """Note the model's builder, such as `torchtune.models.llama3.qlora_llama3_8b`.

    Family and size come from the model folder; only NF4 quantization needs a key of ours.
    """
    component = str(c.get_value(key))
    family, _, builder = component.removeprefix("torchtune.models.").partition(".")
    if not component.startswith("torchtune.models.") or family not in FAMILIES:
        c.refuse(key, f"expected a builder of one of {', '.join(FAMILIES)}", may_be_left_out=False)
        return
    in_folder = "the folder's config.json has the architecture"
    if builder.startswith("qlora_"):
        c.carry(key, {"lora.quantize_base": "nf4"})
    else:
        c.carry(key, {}, in_folder)
    if c.is_any_on("teacher_model"):
        c.carry("teacher_model._component_", {}, in_folder)


def _convert_folder(c: ConfigImport, key: str) -> None:
    """Note a checkpoint folder: one that exists is kept, else the model's name on the hub is taken.

    The file's `tune download` line has that name.
    """
    folder = str(c.get_value(key)).rstrip("/")
    ours = "distill.teacher" if key.startswith("teacher") else "model.path"
    outer = folder.removesuffix("/original")  # Meta's own files, in a folder of Hugging Face's
    if os.path.isdir(expand_home(outer)):
        why = "the folder above has the same weights in Hugging Face's layout"
        c.carry_meaning(key, Meaning({ours: outer}, why, differs=outer != folder))
    elif name := find_hub_name(c.theirs, outer):
        c.carry(
            key,
            {ours: name},
            "there is no such folder here; the file's own download line has the name",
            differs=True,
        )
    else:
        c.carry(
            key,
            {ours: outer},
            f"there is no such folder here; {ours}=OWNER/NAME has it from the hub",
            differs=True,
        )


def find_hub_name(theirs: TorchtuneFile, folder: str) -> str | None:
    """Return the name on the hub of the model that is downloaded into a folder; None: not known.

    The comments of a file have `tune download NAME --output-dir FOLDER`. The folder is this one, or
    one that has the model's own name.
    """
    for line in theirs.comments:
        download = re.search(r"tune download (\S+/(\S+))(.*)", line)
        if download is None:
            continue
        output_dir = re.search(r"--output-dir[ =](\S+)", download[3])
        is_folder = output_dir is not None and output_dir[1].rstrip("/") == folder
        if is_folder or folder.rpartition("/")[2] == download[2]:
            return download[1]
    return None


def _convert_reference(c: ConfigImport, key: str) -> None:
    # The reference model's folder has to be the trained model's.
    if str(c.get_value(key)).rstrip("/") == str(c.get_value("checkpointer.checkpoint_dir")).rstrip(
        "/"
    ):
        c.carry(key, {}, "the reference is the model before training")
    else:
        c.refuse(key, "the reference is the model before training, no other one")


def _convert_tokenizer(c: ConfigImport, key: str) -> None:
    # Theirs is a file, ours the folder of one.
    path = str(c.get_value(key))
    folder = str(c.get_value("checkpointer.checkpoint_dir")).rstrip("/").removesuffix("/original")
    if path.startswith(f"{folder}/"):
        c.drop(key, "the tokenizer in the model's folder is used")
    elif path.endswith((".json", ".txt")):
        c.carry(
            key,
            {"tokenizer.path": path.rpartition("/")[0]},
            "the folder, for its tokenizer.json",
            differs=True,
        )
    else:
        c.carry(key, {"tokenizer.path": path})


def _convert_template(c: ConfigImport, key: str) -> None:
    """Note a prompt template: a model's own is in its tokenizer's files, others are refused."""
    if str(c.get_value(key)).startswith("torchtune.models."):
        c.carry(
            key,
            {},
            "text is written by the chat template of the tokenizer's files, which models have"
            " learned",
            differs=True,
        )
    else:
        c.refuse(
            key,
            "text is written by the tokenizer's chat template; tokenizer.chat_template takes a"
            " Jinja file",
        )


def _convert_linears(c: ConfigImport, key: str) -> None:
    """Note the three keys that choose modules for LoRA, which are one list here."""
    modules = [ATTENTION.get(str(word), str(word)) for word in c.get_value(key)]
    if c.get_value("model.apply_lora_to_mlp"):
        modules += MLP
    if c.get_value("model.apply_lora_to_output"):
        modules.append("head")
    # ATTENTION: torchtune's name of a linear -> ours. MLP: our names of the MLP's linears.
    is_every_one = set(modules) == {*ATTENTION.values(), *MLP}
    c.carry(key, {"lora.target_modules": ["all-linear"] if is_every_one else modules})
    for switch in ("model.apply_lora_to_mlp", "model.apply_lora_to_output"):
        if switch in c.theirs.values:
            c.carry(switch, {}, "part of lora.target_modules")


def _convert_steps(c: ConfigImport, key: str) -> None:
    # Theirs counts the steps of an epoch, ours of the run.
    steps = c.get_value(key)
    epochs = c.get_value("epochs") or 1
    if epochs == 1:
        c.carry(key, {"max_steps": steps})
    else:
        c.carry(
            key,
            {"max_steps": steps * epochs},
            f"there each epoch ends after {steps} steps and the next begins, here steps are of"
            " whole passes",
            differs=True,
        )


# Key of theirs -> the function that notes it; called with the key, in this order.
CONVERTED: dict[str, Callable[[ConfigImport, str], None]] = {
    "model._component_": _convert_model,
    "checkpointer.checkpoint_dir": _convert_folder,
    "teacher_checkpointer.checkpoint_dir": _convert_folder,
    "ref_checkpointer.checkpoint_dir": _convert_reference,
    "tokenizer.path": _convert_tokenizer,
    "tokenizer.prompt_template": _convert_template,
    "model.lora_attn_modules": _convert_linears,
    "max_steps_per_epoch": _convert_steps,
}
