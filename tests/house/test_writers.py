"""Files are opened for writing in `recipe_lib/files.py` alone; every option that names one is in
the table of them.
"""

import argparse
import ast
import importlib
from collections import Counter
from collections.abc import Iterator

from recipe_lib.cli.main import VERBS, get_module_name
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.training.output import _NOT_READ
from tests.cli.writers import NOT_IN_THE_TABLE, WRITERS
from tests.house.files import ROOT, list_python_files, parse_tree

FILES = "recipe_lib/files.py"
# Elsewhere: file and call -> how often and why. No file that a user names is among them.
ALLOWED = {
    ("recipe_lib/errors.py", "open"): (1, "a mark in the launcher's own folder"),
    ("recipe_lib/errors.py", "os.open"): (1, "/dev/null"),
    ("recipe_lib/parallel/heartbeat.py", "open"): (1, "a mark in the launcher's own folder"),
    ("recipe_lib/parallel/thread_stacks.py", "open"): (1, "memory without a name"),
    ("recipe_lib/memory/peaks.py", "write_text"): (1, "/proc/self/clear_refs"),
    ("recipe_lib/cli/main.py", "open"): (1, "/dev/null"),
    ("recipe_lib/data/cache.py", "open"): (
        2,
        "a lock; arrays of a folder, which gets its name when it is whole",
    ),
    ("recipe_lib/data/cache.py", "rename"): (1, "a folder of the cache gets its name"),
    ("recipe_lib/data/sources.py", "open"): (1, "the temporary name of `write_aside`"),
    ("recipe_lib/checkpoint/open_exports.py", "save_pretrained"): (
        1,
        "a temporary folder; the format is torchao's",
    ),
    ("recipe_lib/external/apply_plan.py", "save_pretrained"): (
        1,
        "transformers' own, under its own name, for a loop",
    ),
    ("recipe_lib/plan/simulated_world/shape_only_model.py", "tempfile.mkdtemp"): (
        1,
        "of this process",
    ),
}
COPIES = ("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "os.rename", "os.replace",
          "os.link", "os.symlink", "tempfile.mkstemp", "tempfile.mkdtemp", "tempfile.NamedTemporaryFile",
          "torch.save", "np.save", "np.savez", "np.memmap")  # fmt: skip
METHODS = ("write_text", "write_bytes", "rename", "replace", "symlink_to", "hardlink_to", "tofile", "save_pretrained",
           "save_file")  # fmt: skip
# Modules of ours with functions of these names.
OURS = ("files.", "dataclasses.", "self.")
# What an option's value is, where it names no file to write.
VALUES = {
    "BRANCH", "CHECKPOINT", "CONFIG", "CONFIG key=value", "FAULT", "FORMAT", "K", "KEY", "LENGTH", "M", "MODEL", "N",
    "NAME", "OTHER", "P", "PATTERN", "R,...", "RECIPE", "RECIPE|CONFIG", "REPO", "SOURCE", "T", "T,...", "TASKS",
    "TEXT", "TOOL", "WHAT", "WORD", "X", "bash|zsh", "key=value", "show|check", "4x24GB",
}  # fmt: skip
# Files and folders that are read.
READ = {("import", "FILE"), ("plan", "--calibration"), ("generate", "--prompts"), ("eval", "--include-path"),
        ("doctor", "--output_dir")}  # fmt: skip


def calls_that_write(path: ast.Module) -> Iterator[str]:
    """The calls of a file that open something for writing, or change a name on the disk, as they
    are called.
    """
    for node in ast.walk(path):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        method = called.rpartition(".")[2]
        words = [*node.args, *(word.value for word in node.keywords)]
        if called == "os.open":
            if any(
                flag in ast.unparse(node) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND")
            ):
                yield called
        elif called in COPIES:
            is_read = called == "np.memmap" and "mode='r'" in ast.unparse(node)
            if not is_read:
                yield called
        elif method == "open":
            modes = [
                word.value
                for word in words
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            ]
            if any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes):
                yield method
        elif method in METHODS and "." in called and not called.startswith(OURS):
            # str.replace has two arguments, and dataclasses.replace no positional ones but the
            # first
            if method != "replace" or (len(node.args) == 1 and not node.keywords):
                yield method


def test_files_are_written_by_one_module() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in list_python_files("recipe_lib", "recipes"):
        name = path.relative_to(ROOT).as_posix()
        if name != FILES:
            found.update((name, call) for call in calls_that_write(parse_tree(path)))
    assert found == {place: count for place, (count, _) in ALLOWED.items()}


def test_what_is_looked_for_is_found() -> None:
    """Each way to write is one that the rule sees."""
    for text in (
        "open(p, 'w')", "open(p, mode='a')", "p.open('wb')", "gzip.open(p, 'x')",
        "os.open(p, os.O_WRONLY)", "os.open(p, os.O_RDWR | os.O_CREAT)", "p.write_text(t)", "p.write_bytes(b)",
        "shutil.copyfile(a, b)", "os.replace(a, b)", "a.replace(b)", "a.rename(b)", "model.save_pretrained(p)",
        "safetensors.torch.save_file(t, p)", "np.memmap(p, mode='w+')", "tempfile.mkstemp()",
    ):  # fmt: skip
        assert list(calls_that_write(ast.parse(text))), text
    for text in ("open(p)", "open(p, 'rb')", "p.open()", "os.open(p, os.O_RDONLY)", "text.replace('a', 'b')",
                 "replace(cfg, a=1)", "files.rename(a, b)", "np.memmap(p, mode='r')"):  # fmt: skip
        assert not list(calls_that_write(ast.parse(text))), text


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Name and kind of value of each option, and of each word, that takes one."""
    for action in parser._actions:
        if (
            action.nargs != 0
            and action.type is None
            and not (action.choices and not action.metavar)
        ):
            yield next(iter(action.option_strings), str(action.metavar)), str(action.metavar)


def test_every_option_that_names_a_file_to_write_is_in_the_table() -> None:
    in_the_table = {(writer.verb, writer.option) for writer in WRITERS} | NOT_IN_THE_TABLE.keys()
    for verb in VERBS:
        for option, value in options_of(importlib.import_module(get_module_name(verb)).PARSER):
            is_known = value in VALUES or option == "--plugin" or (verb, option) in READ
            is_known = is_known or option in ("--revision", "--recipe", "--config")
            assert is_known != ((verb, option) in in_the_table - {("run", "--log-dir")}), (
                verb,
                option,
                value,
            )


def test_every_key_that_names_a_folder_to_write_is_in_the_table() -> None:
    written = {
        name for name in _NOT_READ if name != "resume"
    }  # what is resumed is below output_dir
    assert written <= read_schema(FullFinetuneConfig).keys.keys()
    in_the_table = {writer.option for writer in WRITERS} | {
        option for _, option in NOT_IN_THE_TABLE
    }
    assert written <= in_the_table
