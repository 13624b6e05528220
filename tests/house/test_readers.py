"""A file of a name is opened by recipe_lib/reading.py alone, which waits for no writer and reads no
device.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.files import format_location, list_python_files, parse_tree

READING = "recipe_lib/reading.py"
# What reads a file, as it is written in the code; `open` counts unless its mode only writes.
READS = {
    "gzip.open", "json.load", "json.loads", "np.fromfile", "np.load", "np.memmap", "os.open", "safe_open",
    "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree",    "yaml.load", "yaml.safe_load",
}  # fmt: skip
METHODS = {"read_text", "read_bytes"}  # of pathlib; of reading.py they are the way
_PIPE = "what another process of ours has sent"
_PACKAGE = "a file of the package"
_SYSTEM = "a pseudo-file of the system"
_HEADER = "read_header has opened the file before, and found it regular"
# file -> what is read there in another way -> why.
ELSEWHERE: dict[str, dict[str, str]] = {
    "recipe_lib/checkpoint/adapter_files.py": {"safe_open": _HEADER},
    "recipe_lib/checkpoint/peft_folders.py": {"safe_open": _HEADER},
    "recipe_lib/checkpoint/safetensors_files.py": {"safe_open": _HEADER},
    "recipe_lib/checkpoint/gguf/gguf_adapter.py": {"safe_open": _HEADER},
    "recipe_lib/checkpoint/resumable_state.py": {
        "safe_open": "of a state whose files were compared with their digests"
    },
    "recipe_lib/checkpoint/adapter_base_weights.py": {"safe_open": _HEADER},
    "recipe_lib/checkpoint/huggingface.py": {"safe_open": _HEADER},
    "recipe_lib/cli/doctor.py": {"read_text": _PIPE},
    "recipe_lib/checkpoint/open_exports.py": {"open": "flushes what the function has written"},
    "recipe_lib/cli/ls.py": {"read_text": _PACKAGE},
    "recipe_lib/config/optimizer_facts.py": {"read_text": _PACKAGE},
    "recipe_lib/config/paths.py": {"read_text": _PACKAGE},
    "recipe_lib/data/tokenize_dataset.py": {"read_text": _SYSTEM},
    "recipe_lib/data/cache.py": {"np.memmap": "arrays of the cache, whose digests were compared"},
    "recipe_lib/external/module_spec.py": {
        "json.loads": "a text that transformers has just written"
    },
    "recipe_lib/external/tensor_plan/sharding_plan.py": {
        "json.loads": "a text that the line itself has written"
    },
    "recipe_lib/files.py": {"os.open": "a folder, to flush it"},
    "recipe_lib/memory/peaks.py": {"read_text": _SYSTEM},
    "recipe_lib/parallel/heartbeat.py": {
        "json.loads": _PIPE,
        "read_bytes": _SYSTEM,
        "read_text": _SYSTEM,
    },
    "recipe_lib/parallel/world.py": {"json.loads": _PIPE},
    "recipe_lib/plan/simulated_world/shape_only_model.py": {
        "read_text": _PACKAGE,
        "yaml.safe_load": _PACKAGE,
    },
    "recipe_lib/tokenizers/chat_template.py": {"json.loads": _PIPE},
    "recipe_lib/checkpoint/side_files.py": {"json.loads": "a text of the tokenizers library"},
    "recipe_lib/tokenizers/template_process.py": {"json.loads": _PIPE},
    "recipe_lib/training/records.py": {"json.loads": "a text that the function itself has written"},
}


def mode_of(call: ast.Call) -> str:
    """The mode that a file is opened with; `r` where none is written."""
    texts = [
        ast.unparse(word) for word in (*call.args, *(keyword.value for keyword in call.keywords))
    ]
    return next((text.strip("'") for text in texts if re.fullmatch(r"'[rwaxbt+]{1,3}'", text)), "r")


def find_reads(text: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """(call, what it reads with) of each call in a file that reads another one."""
    for node in ast.walk(text):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        name = called.rpartition(".")[2]
        if called == "os.open":
            reads = not re.search("O_WRONLY|O_RDWR|O_DIRECTORY", ast.unparse(node))
        elif called in READS or (
            name in METHODS and "." in called and not called.startswith("reading.")
        ):
            reads = True
        else:
            reads = name == "open" and not set(mode_of(node)) & set("wax")
        if reads:
            yield node, called if called in READS else name


def test_files_are_read_by_one_module():
    found: dict[str, set[str]] = {}
    faults = []
    for path in list_python_files("recipe_lib", "recipes"):
        for node, way in find_reads(parse_tree(path)):
            known = ELSEWHERE.get(format_location(path), {})
            if format_location(path) != READING and way not in known:
                faults.append(f"{format_location(path, node)}: {way}")
            found.setdefault(format_location(path), set()).add(way)
    assert not faults, f"read a file; call {READING}, or say in this test why it need not: {faults}"
    left = {
        (name, way)
        for name, ways in ELSEWHERE.items()
        for way in ways
        if way not in found.get(name, ())
    }
    assert not left, f"no longer read there: {left}"


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("open(path)", "open"), ("open(path, 'rb')", "open"), ("path.open()", "open"), ("path.open('rb+')", "open"),
        ("open(path, encoding='utf-8')", "open"), ("gzip.open(path)", "gzip.open"), ("path.read_text()", "read_text"),
        ("Path(a, b).read_bytes()", "read_bytes"), ("json.load(file)", "json.load"),
        ("os.open(a, os.O_RDONLY)", "os.open"),
        ("json.loads(path.read_text())", "json.loads"), ("safe_open(path, 'pt')", "safe_open"),
        ("open(path, 'xb')", None), ("open(path, mode='a')", None), ("reading.read_text(path, 5)", None),
        ("os.open(path, os.O_RDWR)", None), ("read_bytes(path, 5)", None), ("parse_json(text)", None),
    ],
)  # fmt: skip
def test_reads_are_found(line: str, way: str | None):
    assert [found for _, found in find_reads(ast.parse(line))][:1] == ([] if way is None else [way])
