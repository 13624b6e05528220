"""Download what training needs of a model on the Hugging Face hub, for `tune download REPO`.

main.py calls `run(words)`. Fetches safetensors weights, config and tokenizer files; never code,
never pickles, which run code when loaded.
"""

import glob
import hashlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.cli.hub_refusals import convert_hub_errors
from recipe_lib.config.local_files import MODEL_FILES, NEVER_DOWNLOADED, check_folder
from recipe_lib.config.paths import find_config, list_configs
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, CheckpointError, ConfigError, StorageError
from recipe_lib.files import compute_sha256
from recipe_lib.reading import read_bytes, read_text
from recipe_lib.units import format_bytes

DESCRIPTION = """Fetches a model from the Hugging Face hub: safetensors weights, config and \
tokenizer files only.

Prints the folder that it is in. A model that asks for consent needs a token: `hf auth login`, or \
HF_TOKEN."""

PARSER = Parser(
    "download",
    DESCRIPTION,
    {
        "repo": {"metavar": "REPO", "help": "OWNER/NAME on the hub"},
        "--output-dir": {
            "metavar": "FOLDER",
            "help": "where to; default: the hub's cache, found by its name",
        },
        "--revision": {"help": "branch, tag or commit; default: main"},
        "--include": {
            "nargs": "+",
            "action": "extend",
            "metavar": "PATTERN",
            "help": "of those files, only the ones that match",
        },
    },
)


def run(words: list[str]) -> int:
    """Download; print the folder on standard output and the next command on standard error.

    Raises ConfigError or SetupError for what the hub refuses, CheckpointError for a repository
    without safe weights, and StorageError if the disk is too small.
    """
    arguments = PARSER.parse(words)
    output = Path(arguments.output_dir).expanduser() if arguments.output_dir else None
    if output is not None:
        check_folder(output, "--output-dir")
        # huggingface_hub keeps notes in .cache/huggingface: such a folder is that of an earlier
        # download, which goes on.
        if (
            output.is_dir()
            and any(output.iterdir())
            and not (output / ".cache" / "huggingface").is_dir()
        ):
            raise ConfigError(
                f"{show(str(output))}: holds other files; --output-dir expects a new or an empty"
                " folder"
            )

    from huggingface_hub import HfApi, snapshot_download

    with convert_hub_errors(arguments.repo, arguments.revision):
        model_info = HfApi().model_info(
            arguments.repo, revision=arguments.revision, files_metadata=True, timeout=20
        )
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in model_info.siblings or []}
        names = choose_files(arguments.repo, list(sizes), arguments.include)
        if output is not None:
            check_unchanged(
                output,
                [sibling for sibling in model_info.siblings or [] if sibling.rfilename in names],
            )
        check_space(
            arguments.repo,
            sizes={name: sizes[name] for name in names},
            commit=str(model_info.sha),
            output=output,
        )
        folder = snapshot_download(
            arguments.repo,
            revision=arguments.revision,
            local_dir=output,
            # A name with [ or * in it must match itself alone.
            allow_patterns=[glob.escape(name) for name in names],
        )
    print(folder)
    print(f"next: {suggest_next_command(arguments.repo, output)}", file=sys.stderr)
    return DONE


def suggest_next_command(repo: str, output: Path | None) -> str:
    """Return the command to go on with, of a shipped config that names the model if there is one.

    output: --output-dir; None: the model is in the hub's cache.
    """
    # The line `path: REPO` of a config's section `model`.
    model_line = re.compile(rf"^ +path: {re.escape(repo)}$", re.MULTILINE)
    names = []
    for configs in list_configs().values():
        names += [name for name in configs if model_line.search(read_text(find_config(name)))]
    # A config finds the model in the hub's cache by its name, and nowhere else.
    override = f" model.path={output or repo}" if output or not names else ""
    if not names:
        return f"tune run CONFIG{override}"
    first = next((name for name in names if name.endswith("_lora")), names[0])
    alternatives = ", ".join(name for name in names if name != first)
    return f"tune plan {first}{override}" + (f" (or {alternatives})" if alternatives else "")


def check_unchanged(output: Path, siblings: list[Any]) -> None:
    """Raise ConfigError for a file that was changed since its download, or that no download wrote.

    siblings: huggingface_hub's `RepoSibling` of each file to fetch.
    """
    for sibling in siblings:
        path = output / sibling.rfilename
        if (
            path.is_file()
            and not _is_as_fetched(output, sibling.rfilename)
            and not _is_same_as_on_hub(path, sibling)
        ):
            raise ConfigError(
                f"{path}: is not what was downloaded, or was changed since; move it away, or choose"
                " another --output-dir"
            )


def _is_as_fetched(output: Path, name: str) -> bool:
    """Return True if the file was not written after its download, by the hub's notes."""
    metadata = output / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    try:
        # Lines: commit, etag, time of the download.
        timestamp = float(read_text(metadata, 2**16).splitlines()[2])
        return (output / name).stat().st_mtime <= timestamp + 1  # s: file times may be imprecise
    except (OSError, ValueError, IndexError):
        return False


def _is_same_as_on_hub(path: Path, sibling: Any) -> bool:
    if path.stat().st_size != sibling.size:
        return False
    # Of a large file the hub gives the content's SHA-256, of one in git the hash of git's blob.
    if sibling.lfs is not None:
        return compute_sha256(path) == sibling.lfs.sha256
    blob = hashlib.sha1(
        f"blob {sibling.size}\0".encode() + read_bytes(path, sibling.size), usedforsecurity=False
    )
    return blob.hexdigest() == sibling.blob_id


def choose_files(repo: str, names: list[str], include: list[str] | None) -> list[str]:
    """Return the files of a repository to fetch.

    names: all of its files. include: patterns of --include. Raises ConfigError if they match
    nothing, CheckpointError if there are no weights that can be read safely.
    """
    from huggingface_hub.utils import filter_repo_objects

    model_files = list(
        filter_repo_objects(names, allow_patterns=MODEL_FILES, ignore_patterns=NEVER_DOWNLOADED)
    )
    if include:
        included = list(filter_repo_objects(model_files, allow_patterns=include))
        if not included:
            raise ConfigError(
                f"{repo}: --include {' '.join(include)} matches none of:"
                f" {', '.join(model_files) or 'no file'}"
            )
        return included
    if not any(name.endswith(".safetensors") for name in model_files):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise CheckpointError(
                f"{repo}: has its weights as .bin, .pt or .pth files only, which can run code when"
                " loaded; expected .safetensors: look for a converted copy of the model"
            )
        kinds = "GGUF files only" if any(name.endswith(".gguf") for name in names) else "no weights"
        raise CheckpointError(
            f"{repo}: has {kinds}; expected .safetensors files: look for the model's original"
        )
    return model_files


def check_space(repo: str, sizes: dict[str, int], commit: str, output: Path | None) -> None:
    """Raise StorageError if the files that are not there yet do not fit on the disk.

    sizes: name -> bytes. commit: hash of the revision, by which the hub's cache knows its files.
    output: --output-dir; None: the hub's cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    def is_there(name: str) -> bool:
        if output is not None:
            return (output / name).is_file()
        return isinstance(try_to_load_from_cache(repo, name, revision=commit), str)

    missing_bytes = sum(size for name, size in sizes.items() if not is_there(name))
    target_folder = (output or Path(constants.HF_HUB_CACHE)).absolute()
    # It is made later: the disk is that of its nearest parent that is there.
    folder = next(path for path in (target_folder, *target_folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes > free_bytes:
        raise StorageError(
            f"{repo}: needs {format_bytes(missing_bytes)}, {folder} has {format_bytes(free_bytes)}"
            " free; "
            "make room, or choose another disk with --output-dir"
        )
