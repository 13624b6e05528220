"""Check what a run needs on this machine, before it starts: files, folders and packages.

`cli/start_checks.py` calls the `check_...` functions with a config's values. Files are only looked
at: none is read whole, fetched or imported. Code that meets the same fault later, in a run, tells
of it in the same line, from `describe_...`. A hub id is `OWNER/NAME`, on huggingface.co.
"""

import importlib.util
import os
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

from recipe_lib.config.key_conditions import HUB, is_hub
from recipe_lib.errors import CheckpointError, ConfigError, DataError, SetupError
from recipe_lib.reading import check_regular, read_text

# This project's name on PyPI.
DISTRIBUTION = "tune-recipes"

# Names of files in a hub model's top folder: `tune download` fetches them, and the hub's cache is
# searched for them.
MODEL_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",  # how images, video and audio are prepared: exports have it too
]

# Of these, the files that a tokenizer is read from: enough to look at samples.
TOKENIZER_PATTERNS = ("*token*", "*.model", "*.jinja", "config.json")

# Names that are not fetched, even if a pattern above fits: subfolders, code, formats that run code
# when loaded, second copies of weights.
NEVER_DOWNLOADED = [
    "*/*",
    "*.py",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.pkl",
    "*.pickle",
    "*.ckpt",
    "*.gguf",
    "consolidated*",
]


def format_install_line(extra: str) -> str:
    """Return `pip install 'datasets<6,>=4' 'pyarrow>=17'`, with the packages of an extra.

    extra: a key of `optional-dependencies` in pyproject.toml.
    """
    # Not the extra's own name, `tune-recipes[datasets]`, which is no help where the project came
    # from a clone or as a wheel.
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a copy of the package that nobody installed
        return f"pip install {extra}"
    # A line is `datasets<6,>=4; extra == "datasets"`.
    of_extra = re.compile(rf"(.*);.*extra == ['\"]{extra}['\"]")
    packages = [match[1].strip() for match in map(of_extra.match, required) if match]
    return f"pip install {shlex.join(packages or [extra])}"


# In `output_dir`: the config with every value that was used.
CONFIG_FILE = "config.yaml"
# Folders in `output_dir`. Resumable states, as step_N.
STATE_FOLDER = "state"
# In STATE_FOLDER: the weights of the step that validates best (`checkpoint.keep_best`), as step_N.
BEST_FOLDER = "best"
# Lists every file of a state with size and SHA-256. Written last, so a folder without one was never
# finished.
STATE_MANIFEST = "manifest.json"
# The trained model, and the trained adapter, in the Hugging Face layout.
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
# States of a run that `overwrite_output_dir=true` replaces, until the new model is complete.
EARLIER_FOLDER = "earlier"
# Pattern of what is left of the folder `{}` if a process ended while it was being replaced.
_HALF_EXCHANGED = ".{}.*.old"


def check_folder(folder: Path, key: str = "output_dir") -> None:
    """Raise ConfigError if the folder to write is a file, or if nothing can be written there.

    key: the config's key that names it, for the error.
    """
    if os.path.lexists(folder) and not os.path.isdir(folder):
        kind = "a file" if os.path.exists(folder) else "a link that leads nowhere"
        raise ConfigError(
            f"{key}: {folder} is {kind}, expected a folder or a new name; choose another {key}"
        )
    path = folder.absolute()
    # The folder is made later: its nearest parent that is there has to take it.
    parent = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {folder}: {parent} cannot be written to; choose another {key}")


def check_earlier_run(cfg: Any) -> None:
    """Raise ConfigError if output_dir holds an earlier run's work that this one would mix with.

    Also if `resume=latest` finds a trained model there and no state to resume from.
    """
    folder = Path(cfg.output_dir)
    if cfg.overwrite_output_dir:
        return
    has_state = any((folder / STATE_FOLDER).glob("step_*"))
    has_best = any((folder / STATE_FOLDER / BEST_FOLDER).glob("step_*"))
    has_earlier_state = any(folder.glob(f"{EARLIER_FOLDER}*/{STATE_FOLDER}/step_*"))
    has_model = any(
        (folder / name).exists() or any(folder.glob(_HALF_EXCHANGED.format(name)))
        for name in (MODEL_FOLDER, ADAPTER_FOLDER)
    )
    if cfg.resume is None and (has_state or has_best or has_model or has_earlier_state):
        work = "a trained model" if has_model else "the weights of a best step"
        if has_state or (has_earlier_state and not has_model):
            work = "saved states"
        remedy = "resume=latest goes on from them, " if has_state else ""
        raise ConfigError(
            f"output_dir: {folder} holds {work} of an earlier run;"
            f" {remedy}overwrite_output_dir=true replaces what is there, or choose another"
            " output_dir"
        )
    if cfg.resume == "latest" and has_model and not has_state:
        raise ConfigError(
            f"resume=latest: {folder} holds a trained model and no saved state to resume from;"
            " overwrite_output_dir=true trains anew, or choose another output_dir"
            " (checkpoint.save_every_n_steps saves states)"
        )


def describe_damaged_state(resume: str, damage: str) -> str:
    """Return the error's line for a `resume` folder that cannot be resumed from, by its damage."""
    return (
        f"resume={resume}: {damage}; expected a whole state folder: resume=latest takes the newest"
        " whole one"
    )


# Suffixes of files of samples that are read.
DATA_KINDS = (".csv", ".json", ".jsonl", ".parquet", ".tsv", ".txt")
# Suffix that may follow one of these (`rows.csv.gz`) -> name of the compression.
COMPRESSED = {".gz": "gzip", ".zst": "Zstandard"}
# Suffixes in which other programs keep samples: a folder with one holds more than would be read.
_OTHER_DATA_KINDS = (
    ".arrow",
    ".avro",
    ".feather",
    ".jsonlines",
    ".ndjson",
    ".ods",
    ".orc",
    ".xls",
    ".xlsx",
)
_OTHER_COMPRESSED = (".br", ".bz2", ".lz4", ".xz", ".zip")
# PEFT's file that makes a folder an adapter.
ADAPTER_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Values of `log.trackers` that ship: names of packages, and of this project's extras with them.
_TRACKER_PACKAGES = ("tensorboard", "wandb", "trackio")


def find_model_folder(path_or_hub_id: str | Path) -> Path | None:
    """Return the folder that a path names, `~` expanded; None for a hub id.

    Raises CheckpointError for a file, and for what is no folder and cannot be a hub id.
    """
    path = Path(path_or_hub_id).expanduser()
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise CheckpointError(
            f"{path}: is a file; expected the folder of a model (config.json and safetensors files)"
        )
    name = str(path_or_hub_id)
    if not is_hub_id(name):
        raise CheckpointError(
            f"{name}: no such folder; expected a model folder, or a hub id such as OWNER/NAME"
        )
    return None


def is_hub_id(name: str) -> bool:
    """Return True if a model on the hub can have that name, OWNER/NAME; nobody is asked."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def find_downloaded_model(hub_id: str) -> Path | None:
    """Return the newest snapshot of a model in the hub's cache; None if there is none."""
    # The layout of huggingface_hub's cache, whose import would take longer than all checks.
    folder = get_hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = read_text(folder / "refs" / "main", 4096).strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if os.path.isdir(snapshot) else None


def is_hub_snapshot(folder: str | Path, name: str) -> bool:
    """Return True if a folder lies where the hub's cache keeps the model of that hub id."""
    return f"models--{name.replace('/', '--')}" in Path(folder).parts


def resolve_base_name(name: str, folder: str | Path) -> str:
    """Return a name of a model that is right from any folder, for the files of a trained adapter.

    name: as the user gave it. folder: where the model was read. The name is the hub id if the
    folder is in the hub's cache, else the folder's absolute path.
    """
    return name if is_hub_snapshot(folder, name) else os.path.abspath(folder)


def get_hub_cache() -> Path:
    """Return the folder where huggingface_hub keeps what it has fetched.

    The environment variables, and their order, are those of huggingface_hub.
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def get_cache_root(folder: str | None) -> Path:
    """Return the folder for tokenized samples. folder: `data.cache_dir`; None: its default."""
    if folder is not None:
        return Path(folder).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache")
    return Path(cache) / "tune-recipes"


def check_model_present(path_or_hub_id: str) -> None:
    """Raise CheckpointError for a model that is neither a folder nor in the hub's cache."""
    if find_model_folder(path_or_hub_id) is None and find_downloaded_model(path_or_hub_id) is None:
        raise CheckpointError(describe_missing_model(path_or_hub_id))


def describe_missing_model(name: str) -> str:
    """Return the error's line for a hub id that is not on this machine."""
    return f"{name}: no such folder, and not in the hub cache; fetch it with `tune download {name}`"


# Remedies for a chat template that cannot be used: where a config is, and for a command without.
OTHER_TEMPLATE = "set tokenizer.chat_template to another file"
TEMPLATE_IN_FOLDER = "put another one into the folder as chat_template.jinja"


def find_tokenizer(path: Path, *, by_key: bool = True) -> Path:
    """Return the file of a tokenizer: `path` itself, or the one in that folder.

    by_key: True if there is a config, so that errors advise to set `tokenizer.path`; else they
    advise to mend the folder. Raises DataError if the folder is missing, or has none or several.
    """
    if os.path.isfile(path):
        return path
    if not os.path.exists(path):
        raise DataError(
            f"{path}: no such folder or file;"
            f" {'set tokenizer.path to' if by_key else 'put there'} a folder with a tokenizer"
        )
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path / name).is_file():
            return path / name
    # Mistral's file names end in a version, as in tokenizer.model.v3.
    versions = sorted(path.glob("*.model.v*"))
    if len(versions) == 1:
        return versions[0]
    if versions:
        names = ", ".join(file.name for file in versions)
        by_hand = "leave one of them in the folder"
        raise DataError(
            f"{path}: found several tokenizers ({names});"
            f" {'set tokenizer.path to one of the files' if by_key else by_hand}"
        )
    paths = path.iterdir() if os.path.isdir(path) else ()
    files = sorted(file.name for file in paths if file.is_file())
    file_names = (", ".join(files[:8]) or "no files") + (" ..." if len(files) > 8 else "")
    by_hand = "put the tokenizer's files into the folder"
    remedy = "set tokenizer.path to a folder with one" if by_key else by_hand
    raise DataError(
        f"{path}: found {file_names}, expected tokenizer.json or tokenizer.model; {remedy}"
    )


def check_template(path: Path) -> None:
    """Raise DataError for a chat template that is missing or no regular file."""
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(describe_template_fault(path, error)) from None


def describe_template_fault(
    path: Path, error: OSError, remedy: str = "set tokenizer.chat_template to a Jinja file"
) -> str:
    """Return the error's line for a chat template that cannot be read."""
    is_missing = isinstance(error, FileNotFoundError)
    fault = "no such file" if is_missing else f"cannot be read ({error.strerror})"
    return f"{path}: {fault}; {remedy}"


def check_adapter(folder: Path) -> None:
    """Raise CheckpointError if a folder is missing, or has no PEFT adapter."""
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder}: no such folder; expected a PEFT adapter ({ADAPTER_CONFIG} and safetensors)"
        )
    if not os.path.lexists(folder / ADAPTER_CONFIG):
        merged = "; it is a model, not an adapter" if os.path.isfile(folder / "config.json") else ""
        raise CheckpointError(
            f"{folder}: has no {ADAPTER_CONFIG}{merged}; expected the folder of a PEFT adapter"
        )


def is_data(path: Path) -> bool:
    """Return True for a name of a file of samples that is read: `rows.jsonl`, `rows.csv.gz`."""
    is_compressed = path.suffix in COMPRESSED
    kind = Path(path.stem).suffix if is_compressed else path.suffix
    # Parquet compresses its own columns, and is read from its end.
    return kind in DATA_KINDS and not (is_compressed and kind == ".parquet")


def _is_unread_data(path: Path) -> bool:
    """Return True if a file holds samples, by its name, in a form that is not read.

    For example `rows.ndjson`, `rows.JSONL.xz`.
    """
    if is_data(path):
        return False
    stem = Path(path.stem.lower())
    suffix = path.suffix.lower()
    is_compressed = suffix in (*COMPRESSED, *_OTHER_COMPRESSED)
    return (stem.suffix if is_compressed else suffix) in (*DATA_KINDS, *_OTHER_DATA_KINDS)


def _check_saved_dataset(folder: Path, key: str) -> None:
    """Raise DataError for a folder that `datasets` saved: its JSON files hold no samples.

    key: the config's key that names the folder.
    """
    kinds = {"state.json": "Dataset", "dataset_dict.json": "DatasetDict"}  # file -> class saved
    kind = next((kinds[name] for name in kinds if (folder / name).is_file()), None)
    has_rows = any(folder.glob("*.arrow" if kind == "Dataset" else "*/*.arrow"))
    if kind and has_rows:
        part = "" if kind == "Dataset" else '["train"]'
        raise DataError(
            f"{folder}: found a {kind} that save_to_disk of the package datasets wrote, which is"
            " not read; write it as Parquet,"
            f" load_from_disk({str(folder)!r}){part}.to_parquet('rows.parquet'), and set"
            f" {key}=rows.parquet"
        )


def find_files(source: str, key: str = "data.source") -> list[Path]:
    """Return the files of samples that a local source names: itself, or a folder's, sorted by name.

    key: the config's key that names it. Raises DataError if it does not exist, if there is none, or
    if a folder also has samples in a form that is not read.
    """
    path = Path(source)
    kinds = f"{', '.join(DATA_KINDS)}, or one of them with .gz or .zst"
    if os.path.isdir(path):
        # Hidden files are none of the user's: macOS puts `._rows.jsonl` next to `rows.jsonl`.
        shown = sorted(
            file for file in path.iterdir() if not file.name.startswith(".") and file.is_file()
        )
        _check_saved_dataset(path, key)
        # Refused, not left out: half of a user's samples would be missing without a word.
        if unread := [file.name for file in shown if _is_unread_data(file)]:
            ending = " and more" if len(unread) > 5 else ""
            raise DataError(
                f"{source}: found {', '.join(unread[:5])}{ending} in the folder, which would not be"
                f" read, expected files of samples as {kinds};"
                " write them as one of these, or move them away"
            )
        files = [file for file in shown if is_data(file)]
        if not files:
            raise DataError(
                f"{source}: found no file of samples in the folder ({kinds}); set {key} to one with"
                " data"
            )
        return files
    if not os.path.exists(path):
        raise DataError(
            f"{source}: no such file or folder; set {key} to one of yours, or to {HUB}OWNER/NAME"
            " for a hub dataset"
        )
    if not is_data(path):
        kind = "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix
        raise DataError(f"{source}: found a {kind or 'nameless'} file, expected one of {kinds}")
    return [path]


def has_package(name: str) -> bool:
    """Return True if a package is installed; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # somebody put it into sys.modules by hand
        return True


def describe_missing_datasets(source: str, key: str = "data.source") -> str:
    """Return the error's line if the package `datasets`, which reads hub datasets, is missing."""
    return f"{key}: {source} needs the package datasets; run `{format_install_line('datasets')}`"


# Suffix -> (name of the kind of file, package that reads it, extra that installs the package).
_READERS = {
    ".parquet": ("Parquet", "pyarrow", "datasets"),
    ".zst": ("Zstandard", "zstandard", "zstd"),
}


def describe_missing_reader(path: Path) -> str:
    """Return the error's line for a file with a suffix of _READERS whose package is missing."""
    kind, package, extra = _READERS[path.suffix]
    return f"{path}: {kind} needs the package {package}; run `{format_install_line(extra)}`"


def check_source(source: str, key: str = "data.source") -> str | None:
    """Check a source of samples; return a note if `datasets` is missing for a hub dataset, or None.

    key: the config's key that names the source. Raises DataError if a local source has no files of
    samples, or the package that reads them is missing.
    """
    # Of a hub dataset a note alone: nothing is asked of the hub here.
    if is_hub(source):
        return None if has_package("datasets") else describe_missing_datasets(source, key)
    for path in find_files(source, key):
        if path.suffix in _READERS and not has_package(_READERS[path.suffix][1]):
            raise DataError(describe_missing_reader(path))
    return None


def check_transformers() -> None:
    """Raise SetupError if the package for model.implementation=transformers is missing."""
    if not has_package("transformers"):
        raise SetupError(
            "model.implementation=transformers: found no package transformers;"
            f" {format_install_line('transformers')}"
        )


def describe_missing_tracker(package: str, reason: str) -> str:
    """Return the error's line for a tracker's package that cannot be imported, with the reason."""
    return (
        f"log.trackers: {package} cannot be imported ({reason}); {format_install_line(package)}, or"
        f" remove {package} from log.trackers"
    )


def check_tracker(name: str) -> None:
    """Raise ConfigError for a tracker without its package, or wandb without a login."""
    if name not in _TRACKER_PACKAGES:
        return  # a plugin registered it, and knows what it needs
    if not has_package(name):
        raise ConfigError(describe_missing_tracker(name, f"No module named '{name}'"))
    if name == "wandb" and not _can_log_to_wandb():
        raise ConfigError(
            "log.trackers: wandb is not logged in; run `wandb login`, or set WANDB_MODE=offline"
        )


def _can_log_to_wandb() -> bool:
    # Found where wandb looks, its variables, settings files and netrc, without importing it.
    get = os.environ.get
    has_key = get("WANDB_API_KEY") or get("WANDB_IDENTITY_TOKEN_FILE")
    is_offline = get("WANDB_MODE", "online") not in ("online", "run", "shared")
    if has_key or is_offline or get("WANDB_DISABLED"):
        return True
    address = re.sub(r"^https?://", "", get("WANDB_BASE_URL") or "https://api.wandb.ai")
    host = address.partition("/")[0].partition(":")[0]
    netrc_files = [get("NETRC")] if get("NETRC") else ["~/.netrc", "~/_netrc"]
    if any(host in _read_if_there(name) for name in netrc_files if name):
        return True
    folders = (get("WANDB_CONFIG_DIR") or "~/.config/wandb", f"{get('WANDB_DIR') or '.'}/wandb")
    settings = "\n".join(_read_if_there(f"{folder}/settings") for folder in folders)
    # A line by which a key is there, or none is needed here.
    sufficient_line = r"^\s*(api_key\s*=|base_url\s*=|mode\s*=\s*(offline|disabled|dryrun))"
    return re.search(sufficient_line, settings, re.MULTILINE) is not None


def _read_if_there(name: str) -> str:
    # What wandb could not read either is as good as empty. RuntimeError: `~` cannot be expanded.
    try:
        return read_text(Path(name).expanduser())
    except (OSError, ValueError, RuntimeError):
        return ""
