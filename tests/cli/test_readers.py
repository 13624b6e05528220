"""No file that a user names is waited for without end or read without bound: every reader, every
kind of file.
"""

import importlib
import io
import itertools
import resource
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from recipe_lib.cli.main import VERBS, get_module_name, main
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.paths import read_recipe_configs
from recipe_lib.data import sample_files
from tests.forked import call_forked
from tests.readers import CONFIG, KINDS, READERS, SAMPLE, Reader, make_whole_model, put_whole_model
from tests.selection import mark_slow_but

SECONDS = 60  # that a verb may take, its imports included; one that waits takes for ever
MEMORY = 6 * 2**30  # bytes more than the process has
LINE = 2**22  # bytes of a line, in place of many more, which would all be read
AT_ONCE = ("a FIFO", "a device", "too large")
ODD = {
    "half a character": b'{"a": "\\ud800", "prompt": "\\udfff", "file_name": "\\ud83d"}\n',
    "line separators": '{"a\u2028b": "c\u0085d", "prompt": "e\u2029f"}\n'.encode(),
    "a NUL": b'{"a": "\0", "prompt": "\0"}\n',
    "an escaped NUL": b'{"a": "\\u0000", "prompt": "\\u0000", "path": "\\u0000"}\n',
    "a mark in the middle": '{"a": "\ufeff"}\n\ufeff{"a": 1}\n'.encode(),
}
_OURS = "a word, or a name"
_WRITTEN = "a file or folder to write"
# An option with a text that names no file to read -> what it is.
NOT_READ: dict[str, str] = {
    "ls words": _OURS, "cat overrides": _OURS, "cp destination": _WRITTEN, "import overrides": _OURS,
    "import --out": _WRITTEN, "import --model": _OURS, "import --without": _OURS, "validate overrides": _OURS,
    "download repo": _OURS, "download --output-dir": _WRITTEN, "download --revision": _OURS,
    "download --include": _OURS, "data overrides": _OURS, "data --allow": _OURS, "plan --nproc_per_node": _OURS,
    "plan --nnodes": _OURS, "plan --device": _OURS, "plan --fit": _OURS, "plan --sequence": _OURS,
    "plan --rank": _OURS, "plan --json": _WRITTEN, "plan --html": _WRITTEN, "plan --snapshot": _WRITTEN,
    "plan --calibrate": _WRITTEN, "tp-plan --tensor": _OURS, "tp-plan --json": _WRITTEN,
    "doctor --output_dir": _WRITTEN, "doctor --write": _WRITTEN,
    "eval what": "as generate checkpoint",
    "eval overrides": _OURS, "eval --data": "as data.source", "eval --format": _OURS,
    "eval --base": "as generate checkpoint", "eval --metric": _OURS, "eval --lm-eval": _OURS,
    "eval --include-path": "a folder of lm-evaluation-harness", "eval --out": _WRITTEN,
    "eval --recipe": "as validate --recipe", "export --pre": _OURS, "export --out": _WRITTEN,
    "export --base": "as generate checkpoint", "export --recipe": "as validate --recipe", "upload repo": _OURS,
    "upload --revision": _OURS, "generate --prompt": _OURS, "generate --out": _WRITTEN, "generate --system": _OURS,
    "generate --base": "as generate checkpoint",
    "run --nproc_per_node": _OURS,
}  # fmt: skip
KEYS_NOT_READ = {
    "data.cache_dir": "a folder of our own, whose files have digests",
    "distill.teacher": "as model.path",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bounded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if (
        callspec is not None
        and getattr(callspec.params.get("reader"), "beside", None) is put_whole_model
    ):
        make_whole_model()  # which may take longer than a read

    def late(*_: object) -> None:
        raise AssertionError("waited for a file without end")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sample_files, "LINE_LIMIT", LINE)
    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(SAMPLE)
    (tmp_path / "whole.yaml").write_text(CONFIG.format(source=tmp_path / "rows.jsonl"))
    return tmp_path / "whole.yaml"


def make(reader: Reader, kind: str, folder: Path) -> Path:
    """The reader's file, of that kind, and what lies beside it."""
    folder.mkdir(parents=True)
    file, how = folder / reader.name, KINDS[kind]
    if isinstance(how, bytes):
        file.write_bytes(how)
    else:
        how(file)
    reader.beside(folder)
    return file


def check_refused(
    reader: Reader, kind: str, folder: Path, config: Path, capsys: pytest.CaptureFixture
) -> None:
    file = make(reader, kind, folder)
    code = main(reader.build_command(file, config))
    said = capsys.readouterr().err
    assert (code, "Traceback" in said) == (2, False), f"{reader}: {kind}: {said}"
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    named = f"{folder.parent.name}/{folder.name}"  # from the working folder on, for some
    assert any(named in line for line in lines), f"{reader}: {kind}: {said}"
    assert not any("permission" in line for line in lines), (
        f"{reader}: {kind}: not what is wrong: {said}"
    )
    assert max(map(len, said.splitlines())) < 2000, f"{reader}: {kind}: a line without end"


@pytest.mark.parametrize("reader", mark_slow_but(READERS, 9), ids=str)
def test_what_would_not_end_is_refused(
    reader: Reader, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    for number, kind in enumerate(AT_ONCE):
        if kind not in reader.accepts:
            check_refused(reader, kind, tmp_path / str(number) / "in", config, capsys)


REFUSED = [kind for kind in KINDS if kind not in AT_ONCE]
# Each reader with one of the kinds, in turn.
IN_TURN = [(reader, REFUSED[at % len(REFUSED)]) for at, reader in enumerate(READERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "kind"), IN_TURN, ids=str)
def test_what_cannot_be_read_is_refused(
    reader: Reader, kind: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    if kind not in reader.accepts:
        check_refused(reader, kind, tmp_path / "0" / "in", config, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS[::4], ids=str)
def test_no_permission(reader: Reader, config: Path, tmp_path: Path):
    file = make(reader, "empty", tmp_path / "0" / "in")
    file.chmod(0)

    def read() -> list[object]:
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            return [main(reader.build_command(file, config)), said.getvalue()]

    code, said = call_forked(read, as_plain_user=True)
    assert code == 2 and "error: " in said and "Traceback" not in said, said


# Each reader with one of them, a plugin with one that is refused: with the others the verb would go
# on to its work.
ODD_IN_TURN = [
    (reader, "a NUL" if reader.name == "p.py" else kind)
    for reader, kind in zip(READERS, itertools.cycle(ODD), strict=False)
]


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "kind"), ODD_IN_TURN, ids=str)
def test_odd_letters(
    reader: Reader, kind: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Read, or refused in lines that any terminal takes."""
    file = make(reader, "missing", tmp_path / "0" / "in")
    file.write_bytes(ODD[kind])
    code = main(reader.build_command(file, config))
    said = capsys.readouterr().err
    assert code in (0, 2) and "Traceback" not in said, said
    assert said.isascii() or said.encode()


@pytest.mark.parametrize(
    "reader", [reader for reader in READERS if "{file}" in reader.words], ids=str
)
def test_a_name_that_no_file_can_have(
    reader: Reader, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "in" / f"a\0{reader.name}"
    file.parent.mkdir()
    assert main(reader.build_command(file, config)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said and "\0" not in said


@pytest.mark.parametrize(
    "reader", [reader for reader in READERS if reader.whole is not None], ids=str
)
def test_a_byte_order_mark_changes_nothing(
    reader: Reader, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    answers = []
    for encoding in ("utf-8", "utf-8-sig"):
        file = make(reader, "missing", tmp_path / encoding / "in")
        file.write_text(reader.whole or "", encoding=encoding)
        code = main(reader.build_command(file, config))
        said = capsys.readouterr()
        answers.append(
            (
                code,
                *(
                    text.replace(encoding, "").replace("\ufeff", "")
                    for text in (said.out, said.err)
                ),
            )
        )
    assert answers[0] == answers[1]
    assert (
        "JSON" not in answers[0][2]
        and "YAML" not in answers[0][2]
        and "Traceback" not in answers[0][2]
    )


def test_no_option_is_left_out():
    """An option that takes a text is one of a reader, or is said not to name a file that is
    read.
    """
    options = set()
    for verb in VERBS:
        for action in importlib.import_module(get_module_name(verb)).PARSER.list_arguments():
            if (
                action.nargs != 0
                and action.choices is None
                and action.type is None
                and action.help != "torchrun's"
            ):
                options.add(f"{verb} {(action.option_strings or [action.dest])[0]}")
    read = {reader.option for reader in READERS if " " in reader.option}
    assert options == read | set(NOT_READ) and not read & set(NOT_READ)


def test_no_key_is_left_out():
    keys = {name for config in read_recipe_configs().values() for name, key in read_schema(config).keys.items()
            if key.limits.get("path")}  # fmt: skip
    read = {reader.option for reader in READERS if " " not in reader.option}
    assert keys - read == set(KEYS_NOT_READ) and not read & set(KEYS_NOT_READ)


@pytest.mark.parametrize(
    "kind", ["a FIFO", "a device", "a folder", "too large", "deep", "not UTF-8"]
)
def test_receipts(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    reader = Reader("plan --receipts", "receipts.jsonl", "plan --receipts")
    make(reader, kind, tmp_path / "state" / "tune-recipes")
    code = main(["plan", "--receipts"])
    assert code == (2 if kind in ("a FIFO", "a device", "a folder") else 0)
    assert "Traceback" not in capsys.readouterr().err
