"""No code of ours opens a door that a checkpoint, a config or a name could walk through; told by
the syntax tree.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NAMES = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load", "os.system", "os.popen",
    "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all",
}  # fmt: skip
KEYWORDS = {"allow_pickle": True, "shell": True, "weights_only": False}


def faults(source: str) -> list[str]:
    """What the source does that it must not, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[0] in MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node.lineno, str(node.module)))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name in NAMES:
                found.append((node.lineno, name))
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                # False is said where transformers would ask on the terminal otherwise.
                is_trust = keyword.arg == "trust_remote_code" and value is not False
                if is_trust or (keyword.arg in KEYWORDS and value is KEYWORDS[keyword.arg]):
                    found.append((node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"))
    return [f"{line}: {what}" for line, what in found]


@pytest.mark.slow
def test_no_source_does() -> None:
    files = [
        path
        for folder in ("recipe_lib", "recipes")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 20
    found = {
        str(path.relative_to(ROOT)): lines for path in files if (lines := faults(path.read_text()))
    }
    # PyTorch's memory viewer reads nothing but a pickle; that file writes one, and calls `dumps`
    # alone.
    written = found.pop("recipe_lib/plan/allocation/replay.py")
    assert [line.partition(": ")[2] for line in written] == ["pickle"]
    # A plan of compiled layers runs what inductor wrote for them, as inductor itself would.
    ran = found.pop("recipe_lib/plan/simulated_world/compiled_code.py")
    assert [line.partition(": ")[2] for line in ran] == ["exec", "compile"]
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "import marshal as m",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
    ],
)
def test_each_rule_can_fail(line: str) -> None:
    assert len(faults(line)) >= 1
    assert (
        faults(
            "yaml.safe_load(text)\nsubprocess.run(words)\nre.compile(x)\nload(path,"
            " weights_only=True)"
        )
        == []
    )
