"""Make the files beside the weights of an export: the tokenizer's files, and the model card.

`model_export.stage_folder` calls `list_tokenizer_files` and `copy_tokenizer`. A sentencepiece model
gets a tokenizer.json too (`make_tokenizer_json`), which transformers reads without further
packages. A run and `tune export` call `make_model_card` for README.md, with the metadata that the
Hugging Face hub reads; paths and names of this machine are left out of it.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from huggingface_hub import ModelCard, ModelCardData
from sentencepiece import SentencePieceProcessor

from recipe_lib import files
from recipe_lib.config import HUB, FullFinetuneConfig, LoraConfig, is_hub, resolve_sources
from recipe_lib.config.local_files import is_hub_snapshot
from recipe_lib.errors import DataError
from recipe_lib.logs import get_logger
from recipe_lib.reading import JSON_LIMIT, find_object, open_regular, read_object, suggest_remedy
from recipe_lib.redaction import redact
from recipe_lib.tokenizers.tokenizer import Tokenizer, load_tokenizer, read_json, read_template
from recipe_lib.tokenizers.vocabulary import SentencePieceVocabulary
from recipe_lib.units import format_bytes

GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENS_MAP = "special_tokens_map.json"
# Only the files of these two lists are copied from a tokenizer's folder: no code, no weights,
# nothing unknown. First those that hold a vocabulary, then those with settings.
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    "tokenizer.model",
    "tokenizer.model.v1",
    "tokenizer.model.v3",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
SETTINGS_FILES = (
    TOKENIZER_CONFIG,
    TOKENS_MAP,
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    GENERATION,
)
# Files that transformers opens beside the weights: settings by which images, video and audio are
# prepared, and the voices of Qwen2.5-Omni. They are copied, not read.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_preprocessor_config.json",
    "spk_dict.pt",
)
_TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")  # files that hold nothing but a chat template
_ANY_CLASS = "PreTrainedTokenizerFast"  # transformers' class that takes tokenizer.json as it is


def list_tokenizer_files(source: Path | None) -> list[Path]:
    """Return the tokenizer's files to copy into an export; none if `source` is None.

    source: a folder, whose TOKENIZER_FILES and SETTINGS_FILES are listed; or a tokenizer file,
    which is listed first, and then the SETTINGS_FILES next to it. Raises DataError for a file that
    cannot be copied, such as a broken link: the export would be incomplete without it.
    """
    if source is None:
        return []
    folder = source.parent if source.is_file() else source
    names = SETTINGS_FILES if source.is_file() else (*TOKENIZER_FILES, *SETTINGS_FILES)
    first = [source] if source.is_file() else []
    return _list_copied(first + [folder / name for name in names if folder / name != source])


def list_processor_files(folder: Path) -> list[Path]:
    """Return the processor's files of a model's folder, to copy into an export.

    Raises DataError as `list_tokenizer_files` does.
    """
    return _list_copied([folder / name for name in PROCESSOR_FILES])


def _list_copied(paths: Sequence[Path]) -> list[Path]:
    """Return those of the paths that exist; raise DataError for one that cannot be copied."""
    # lexists: exists would pass over a broken link, which must be an error.
    existing = [path for path in paths if os.path.lexists(path)]
    for path in existing:
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; {suggest_remedy(error)}") from error
        if size > JSON_LIMIT:
            raise DataError(f"{path}: is larger than {format_bytes(JSON_LIMIT)}; name another file")
    return existing


def copy_tokenizer(
    temporary: Path,
    copied: list[Path],
    chat_template: str | Path | None,
    stop_ids: Collection[int],
    pad_id: int | None = None,
) -> None:
    """Copy a tokenizer's files, with the chat template and the stop tokens of training.

    Args:
        temporary: folder to write into.
        copied: from `list_tokenizer_files`.
        chat_template: its text or its file; None: the tokenizer keeps its own. It is written into
            tokenizer_config.json too, where older programs look for it, together with BOS and EOS.
        stop_ids: token ids for generation_config.json; empty: that file is copied.
        pad_id: padding id of the model's config.json, which the tokenizer must pad with as well;
            None: the tokenizer's own.
    """
    generation: dict[str, Any] = {}
    for path in copied:
        is_replaced = chat_template is not None and path.name in _TEMPLATES
        if path.name == GENERATION and stop_ids:
            generation = read_json(path)
        elif path.name != TOKENIZER_CONFIG and not is_replaced:
            files.copy_file(path, temporary / path.name)
    if stop_ids:
        files.write_json(temporary / GENERATION, generation | {"eos_token_id": sorted(stop_ids)})
    template = read_template(chat_template) if isinstance(chat_template, Path) else chat_template
    if template is not None:
        files.write_bytes(temporary / CHAT_TEMPLATE, template.encode())
    vocabulary = next((path for path in copied if path.name not in SETTINGS_FILES), None)
    _write_settings(
        temporary,
        source=next((path for path in copied if path.name == TOKENIZER_CONFIG), None),
        tokenizer=None if vocabulary is None else _load_if_readable(vocabulary),
        template=template,
        pad_id=pad_id,
    )


def _load_if_readable(vocabulary: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(
            vocabulary.parent if vocabulary.name in TOKENIZER_FILES else vocabulary
        )
    except DataError:
        return None


def _write_settings(
    temporary: Path,
    *,
    source: Path | None,
    tokenizer: Tokenizer | None,
    template: str | None,
    pad_id: int | None,
) -> None:
    """Write tokenizer_config.json with the keys that transformers needs, and tokenizer.json.

    tokenizer.json is made of a sentencepiece model that has none. source: the tokenizer's own
    tokenizer_config.json; None: it has none. tokenizer: None if it cannot be read. template: None
    if the tokenizer keeps its own. pad_id: as for `copy_tokenizer`.
    """
    try:
        source_config: dict[str, Any] | None = {} if source is None else read_object(source)
    except (OSError, ValueError):
        source_config = None
    if source_config is None or (tokenizer is None and template is None):
        if source is not None:
            files.copy_file(source, temporary / TOKENIZER_CONFIG)
        return
    config = dict(source_config)
    if tokenizer is not None and not (temporary / TOKENIZER_JSON).is_file():
        text = make_tokenizer_json(tokenizer)
        if text is not None:
            files.write_bytes(temporary / TOKENIZER_JSON, text.encode())
            config["tokenizer_class"] = _ANY_CLASS
        elif isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
            get_logger().warning(
                "warning: %s: this sentencepiece model cannot be written as tokenizer.json; the"
                " export has a copy of it, which other programs may not read, or read as other ids;"
                " put the tokenizer.json of the model's own repository into the export",
                tokenizer.place,
            )
    if (temporary / TOKENIZER_JSON).is_file():
        config.setdefault("tokenizer_class", _ANY_CLASS)
    if template is not None:
        config["chat_template"] = template
    if tokenizer is not None and config != source_config:
        # The texts of BOS and EOS, unless the tokenizer's own files name them.
        named_roles = find_object(temporary / TOKENS_MAP)
        roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        role_texts: dict[str, Any] = {
            role: tokenizer.get_token_bytes(token).decode()
            for role, token in roles.items()
            if token is not None and role not in named_roles
        }
        config = role_texts | config
    # A padding token alone is no reason to write the file.
    is_written = source is not None or config != source_config
    if is_written and tokenizer is not None and pad_id is not None and pad_id != tokenizer.pad_id:
        config["pad_token"] = tokenizer.get_token_bytes(pad_id).decode("utf-8", errors="replace")
    if config != source_config:
        files.write_json(temporary / TOKENIZER_CONFIG, config)
    elif source is not None:
        files.copy_file(source, temporary / TOKENIZER_CONFIG)  # unchanged, byte for byte


_SPACE = "▁"  # sentencepiece's character for a space
# Texts for which tokenizer.json must give the same ids as the sentencepiece model it was made of.
_SAMPLES = (
    "Hello there, how are you?",
    "  two  spaces,\ta tab\n\nand lines \n of 1234567890 digits ",
    "Ünïcödé, 漢字, العربية, 🦙 and a zero\u200bwidth",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}\n",
)


def make_tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the text of a tokenizer.json for a sentencepiece model; None if it cannot be written.

    None is also returned if the result encodes some texts, alone and after special tokens, to other
    ids than the tokenizer does, and if `tokenizer` is of another kind.
    """
    vocabulary = tokenizer.vocabulary
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return None
    model = vocabulary.model
    scores = {model.id_to_piece(i): model.get_score(i) for i in range(len(model))}
    if len(scores) != len(model):  # two ids have one piece, which tokenizer.json cannot express
        return None
    unigrams = tokenizers.models.Unigram(
        list(scores.items()), model.unk_id(), byte_fallback=_has_bytes(model)
    )
    # The file does not say whether it is a BPE or a unigram model: try which one encodes alike.
    for pieces_model in (_build_byte_pairs(model, scores), unigrams):
        candidate = tokenizers.Tokenizer(pieces_model)
        _set_space_rules(candidate, vocabulary)
        added = sorted(tokenizer.added_tokens, key=lambda token: token.id)
        candidate.add_tokens(
            [
                tokenizers.AddedToken(
                    token.content,
                    special=token.special,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,  # matched in the raw text, before spaces are inserted
                )
                for token in added
            ]
        )
        has_same_ids = all(candidate.token_to_id(token.content) == token.id for token in added)
        if has_same_ids and _encodes_same(candidate, tokenizer):
            if tokenizer.add_bos_by_default and tokenizer.bos_id is not None:
                bos = tokenizer.get_token_bytes(tokenizer.bos_id).decode()
                candidate.post_processor = tokenizers.processors.TemplateProcessing(
                    single=f"{bos}:0 $A:0",
                    pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
                    special_tokens=[(bos, tokenizer.bos_id)],
                )
            return json.dumps(json.loads(candidate.to_str()), indent=1, ensure_ascii=False) + "\n"
    return None


def _build_byte_pairs(model: SentencePieceProcessor, scores: dict[str, float]) -> Any:
    """Return the BPE model of a sentencepiece model.

    Every two pieces that together are a third one become a merge, the highest score first.

    scores: piece -> score, in the order of ids.
    """
    ids = {piece: index for index, piece in enumerate(scores)}
    # (minus the score of the merged piece, ids of the two pieces, the two pieces).
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    pairs = [(left, right) for *_, left, right in merges]
    unknown = model.id_to_piece(model.unk_id())
    return tokenizers.models.BPE(
        ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(model)
    )


def _has_bytes(model: SentencePieceProcessor) -> bool:
    return any(model.is_byte(i) for i in range(len(model)))


def _set_space_rules(built: Any, vocabulary: SentencePieceVocabulary) -> None:
    """Set where `built`, a tokenizer of the package tokenizers, puts a space into a text.

    That is nowhere, at its start, or after special tokens too.
    """
    spaces = [tokenizers.normalizers.Replace(" ", _SPACE)]
    if vocabulary.collapses_spaces:
        spaces.insert(0, tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    stripped = [tokenizers.decoders.Strip(" ", 1, 0)] if vocabulary.eats_first_space else []
    if vocabulary.eats_space_after_special:
        built.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend(_SPACE), *spaces]
        )
    elif vocabulary.eats_first_space:
        if vocabulary.collapses_spaces:
            built.normalizer = spaces[0]
        built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            _SPACE, prepend_scheme="first", split=False
        )
    else:
        built.normalizer = tokenizers.normalizers.Sequence(spaces)
    built.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(_SPACE, " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            *stripped,
        ]
    )


def _encodes_same(built: Any, tokenizer: Tokenizer) -> bool:
    """Return True if `built` encodes `_SAMPLES` and the tokenizer's own pieces as it does."""
    specials = [
        tokenizer.get_token_bytes(token).decode()
        for token in (tokenizer.bos_id, tokenizer.eos_id)
        if token is not None
    ]
    for sample in (*_SAMPLES, *_list_words(tokenizer)):
        # Stripped: models that drop spaces do so only at the ends of a full text.
        texts = [sample.strip(), *(f"{token}{sample}{token}{sample}" for token in specials)]
        ids = [built.encode(text, add_special_tokens=False).ids for text in texts]
        if ids != [tokenizer.encode(text, allow_special=True) for text in texts]:
            return False
    return True


def _list_words(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that join 4096 ordinary pieces each, until each has been in one."""
    ids = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
    texts = [tokenizer.get_token_bytes(token).decode(errors="ignore") for token in ids]
    # ⁇, the text of the unknown token, is itself encoded as other pieces.
    words = [text for text in texts if text and "⁇" not in text]
    for start in range(0, len(words), 4096):
        yield "".join(words[start : start + 4096])


CARD = "README.md"  # the file that the hub takes for a model's card
BASE = "BASE"  # stands in commands for a base model that is not on the hub
# Config keys that a card leaves out: where a run read and wrote and what it logged. They say
# nothing about the model.
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
    """Return the text of a model card, which depends on nothing but the training.

    Args:
        cfg: of the run; None: not known.
        base: name of the model that training began from.
        base_folder: its folder, whose own card names the license; None: random weights.
        lora: settings of the adapter; None: all weights were trained.
        is_adapter: the export is an adapter without its base.
        commands: command lines shown under "Use"; FOLDER stands in them for the export's folder,
            BASE for the base's.
        plan, results: name -> value, rows of the tables "Plan" and "Results"; None: no table.
    """
    sources = [] if cfg is None else [source.source for source in resolve_sources(cfg.data)]
    # Ids of data sets on the hub, without the subset or file that follows an id.
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
    tables = {"Plan": plan, "Results": results}
    parts += [f"## {title}\n\n{_format_table(rows)}" for title, rows in tables.items() if rows]
    adapter_base = get_public_name(base, base_folder) if is_adapter else None
    use = _describe_use(adapter_base, commands, has_base=base_folder is not None)
    parts.append(f"## Use\n\n{use}")
    # A setting should not hold an access token, but a user may have put one there.
    return redact("\n\n".join(parts) + "\n")


def get_public_name(base: str, folder: Path | None) -> str:
    """Return the base's name in a card: its hub id or preset, else BASE.

    A path of this machine would tell a reader nothing. folder: None for random weights.
    """
    return base if folder is None or is_hub_snapshot(folder, base) else BASE


def _read_license(folder: Path | None) -> str | None:
    """Return the license in the card of the base; None if there is no card, or it names none."""
    if folder is None or not (folder / CARD).is_file():
        return None
    try:
        name = ModelCard.load(folder / CARD).data.license
    except (OSError, ValueError, AttributeError):  # a card that ModelCard cannot parse
        return None
    return name if isinstance(name, str) else None


# Return the hub tags for the method (`sft`, `dpo`, ...) and the kind of adapter.
def _list_kind_tags(cfg: FullFinetuneConfig | None, lora: LoraConfig | None) -> list[str]:
    kinds = [] if lora is None else ["dora" if lora.dora else "lora"]
    if cfg is None:
        return kinds
    has_preferences = any(source.format == "preference" for source in resolve_sources(cfg.data))
    # The recipe's name tells the method: `dpo_distributed` -> `dpo`.
    return [cfg.recipe.partition("_")[0] if has_preferences else "sft", *kinds]


# Yield the title, the summary, and the sections "Data" and "Settings"; see `make_model_card`.
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
    has_random_start = cfg is not None and not cfg.model.path
    origin = "random weights of the architecture " if has_random_start else ""
    yield f"# {Path(base).name or 'model'}, fine-tuned"
    name = base if get_public_name(base, base_folder) == base else Path(base).name
    yield f"{product} {origin}`{name}`, made with tune-recipes."
    if cfg is not None:
        yield "## Data\n\n" + "\n".join(_list_data_lines(cfg))
        changed = {f"`{name}`": _format_cell(value) for name, value in _list_changed_keys(cfg)}
        if changed:
            yield f"## Settings that differ from the defaults\n\n{_format_table(changed)}"


# Return a Markdown table of two columns without a heading.
def _format_table(rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _list_data_lines(cfg: FullFinetuneConfig) -> Iterator[str]:
    for source in resolve_sources(cfg.data):
        weight = f", weight {source.weight:g}" if source.weight != 1 else ""
        yield f"- `{_drop_folders(source.source)}`, format `{source.format}`{weight}"
    if cfg.validation.source:
        yield f"- validation: `{_drop_folders(cfg.validation.source)}`"


def _drop_folders(source: str) -> str:
    """Return the name of a local file without its folders, which say nothing to a card's reader."""
    return source if is_hub(source) else Path(source).name


def _list_changed_keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that differ from their defaults, with their values.

    section: a config's dataclass. prefix: goes before its keys, such as `lora.`.
    """
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
    # A bar or a line end would end the cell. chr(): before Python 3.12 an f-string takes no
    # backslash.
    return f"`{str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')}`"


def _describe_use(base: str | None, commands: Sequence[str], *, has_base: bool) -> str:
    """Return the text of the section "Use": how to load the export and generate an answer.

    base: name of an adapter's base; None: the export is a full model. commands: see
    `make_model_card`. has_base: the base has weights that can be loaded; False: training began from
    random ones.
    """
    if base is not None and not has_base:
        return (
            f"The adapter is of use with the random weights of `{base}` alone that it was"
            " trained on."
        )
    imports = ""
    load = 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    if base is not None:
        imports = "from peft import PeftModel\n"
        load = (
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}),"
            ' "FOLDER")'
        )
    names = "FOLDER and BASE" if base == BASE else "FOLDER"
    text = (
        f"In the place of {names}, a path or a name on the hub:\n\n```python\n{imports}"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n{load}\n{_ASK}```'
    )
    if commands:
        lines = "".join(f"{command}\n" for command in commands)
        text += f"\n\n```bash\n{lines}```"
    return text


# End of the Python example: ask the model and print its answer.
_ASK = (
    'prompt = [{"role": "user", "content": "Hello"}]\n'
    "inputs = tokenizer.apply_chat_template(\n"
    '    prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
    ")\n"
    "answer = model.generate(**inputs, max_new_tokens=100)\n"
    'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
)
