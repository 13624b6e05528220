"""Upload a trained model or adapter with its model card to the Hugging Face hub: `tune upload`.

main.py calls `run(words)`. Sends the files of `_SENT_PATTERNS` alone: never states (folders to
resume from), metrics or data.
"""

import argparse
import glob
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipe_lib.checkpoint.model_folders import find_exported_folder
from recipe_lib.cli.arguments import SWITCH, Parser
from recipe_lib.cli.hub_refusals import convert_hub_errors
from recipe_lib.config.local_files import ADAPTER_CONFIG
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, CheckpointError, ConfigError, SetupError
from recipe_lib.logs import print_wrapped
from recipe_lib.reading import describe_fault, read_bytes, read_object
from recipe_lib.redaction import redact
from recipe_lib.units import MIB, format_bytes

DESCRIPTION = """Puts a model or an adapter into a repository on the Hugging Face hub, and makes \
the repository.

WHAT is a run's output_dir (its model/ or adapter/, the newer one), or such a folder. Weights, \
config, tokenizer and the
model card (README.md) are sent, each listed with its bytes before; other files in the folder are \
named and stay.
It takes a token that may write: `hf auth login`, or HF_TOKEN."""

_CARD = "README.md"
# All that is ever sent. States, optimizer states, metrics, logs and data have other names and other
# folders.
_SENT_PATTERNS = (
    "config.json",
    "generation_config.json",
    ADAPTER_CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    _CARD,
)
# Files of text, which are searched for secrets before they are sent.
_CHECKED_FOR_SECRETS = (
    _CARD,
    "config.json",
    "generation_config.json",
    ADAPTER_CONFIG,
    "tokenizer_config.json",
    "chat_template.jinja",
)
_LARGEST_READ = 16 * MIB  # bytes of such a file; a larger one is an error

PARSER = Parser(
    "upload",
    DESCRIPTION,
    {
        "checkpoint": {
            "metavar": "WHAT",
            "help": "output_dir, or the folder of a model or an adapter",
        },
        "repo": {"metavar": "REPO", "help": "OWNER/NAME on the hub; made if there is none"},
        "--private": SWITCH | {"help": "a new repository is yours alone to see"},
        "--revision": {
            "metavar": "BRANCH",
            "help": "the branch to put it on, made if there is none",
        },
        "--dry-run": SWITCH | {"help": "list the files, send nothing and ask nothing"},
    },
)


def run(words: list[str]) -> int:
    """List the files, send them in one commit and print its address.

    Raises ConfigError for a name that is no repository's, and what `find_folder`, `choose_files`
    and `upload_files` raise.
    """
    arguments = PARSER.parse(words)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.repo):
        raise ConfigError(
            f"{show(arguments.repo)}: is not a repository on the hub; expected OWNER/NAME"
        )
    folder = find_folder(arguments.checkpoint)
    names = choose_files(folder)
    sizes = {name: (folder / name).stat().st_size for name in names}
    width = max(len(format_bytes(size)) for size in sizes.values())
    for name, size in sizes.items():
        print(f"{format_bytes(size):>{width}}  {name}")
    print_wrapped(
        f"{len(sizes)} files of {folder}, {format_bytes(sum(sizes.values()))}, to {arguments.repo}"
    )
    for note in _list_notes(folder, names):
        print_wrapped(f"note: {note}")
    if arguments.dry_run:
        print("dry run: nothing was sent")
        return DONE
    print_wrapped(f"uploaded: {upload_files(folder, names, arguments)}")
    return DONE


def find_folder(name: str) -> Path:
    """Return the folder of a model or an adapter that is named, or the newer of a run's.

    Raises CheckpointError if there is none, or it has no weights.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        raise CheckpointError(
            f"{show(name)}: no such folder; expected a run's output_dir, a model or an adapter"
        )
    folder = find_exported_folder(path)
    for file, kind in ((ADAPTER_CONFIG, "adapter"), ("config.json", "model")):
        if (folder / file).is_file():
            if not any(folder.glob("*.safetensors")):
                raise CheckpointError(
                    f"{show(str(folder))}: is a {kind} without weights; expected .safetensors files"
                )
            return folder
    raise CheckpointError(
        f"{show(name)}: is no model, adapter or run; expected config.json or {ADAPTER_CONFIG} in it"
    )


def choose_files(folder: Path) -> list[str]:
    """Return the names of the files to send.

    Raises ConfigError for a text that holds a secret, and CheckpointError if one cannot be read.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    names = sorted(
        path.name for path in files if any(path.match(pattern) for pattern in _SENT_PATTERNS)
    )
    for name in names:
        path = folder / name
        if name in _CHECKED_FOR_SECRETS:
            text = _read(read_bytes, path).decode(errors="replace")
            # `redact` replaces what looks like a secret, as in logs.
            if redact(text) != text:
                raise ConfigError(
                    f"{path}: holds what looks like a token or a password; take it out, nothing was"
                    " sent"
                )
    return names


def _read(reader: Callable[[Path, int], Any], path: Path) -> Any:
    try:
        return reader(path, _LARGEST_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {describe_fault(error)}; nothing was sent"
        ) from error


def _list_notes(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield lines on files that are not sent, and on what others will miss who load the rest."""
    unsent = sorted(
        path.name + ("/" if path.is_dir() else "")
        for path in folder.iterdir()
        if path.name not in names
    )
    if unsent:
        yield f"stays here, being neither weights, tokenizer nor card: {', '.join(unsent)}"
    if _CARD not in names:
        yield (
            f"there is no model card; write {folder / _CARD}, or export again from the run, which"
            " writes one"
        )
    if ADAPTER_CONFIG in names:
        base = str(_read(read_object, folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
        if Path(base).is_absolute() or Path(base).exists():
            yield (
                f"{ADAPTER_CONFIG} names the base by a folder of this machine, {base}; others find"
                " it by base_model_name_or_path, an id on the hub"
            )


def upload_files(folder: Path, names: list[str], arguments: argparse.Namespace) -> str:
    """Make the repository and one commit; return the commit's address.

    Raises SetupError without a token, or if the hub refuses it or cannot be reached. Raises
    ConfigError if --private names a repository that is public.
    """
    from huggingface_hub import HfApi, get_token

    # Before anything is asked of the hub, whose answer would be a 401.
    if get_token() is None:
        raise SetupError(
            f"{arguments.repo}: there is no token to write with; `hf auth login`, or set HF_TOKEN"
        )
    api: Any = HfApi()
    with convert_hub_errors(arguments.repo, uploads=True):
        api.create_repo(arguments.repo, private=arguments.private, exist_ok=True)
        # `private` makes a new repository so; one that is there stays as it is.
        if arguments.private and not api.model_info(arguments.repo).private:
            raise ConfigError(
                f"{arguments.repo}: is there already and is public; make it private on its page, or"
                " choose another"
            )
        if arguments.revision:
            api.create_branch(arguments.repo, branch=arguments.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=arguments.repo,
            folder_path=folder,
            # A name with [ or * in it must match itself alone.
            allow_patterns=[glob.escape(name) for name in names],
            revision=arguments.revision,
            commit_message=(
                f"{'Adapter' if ADAPTER_CONFIG in names else 'Model'} trained with tune-recipes"
            ),
        )
    return str(commit.commit_url)
