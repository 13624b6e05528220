"""Every writer against every trouble: one line, exit code 2 or 6, nothing of the user's changed,
nothing left.
"""

import contextlib
import io
import itertools
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_lib import files
from tests.cli.commands import ROOT
from tests.cli.writers import FILE, FOLDER, WRITERS, Material, Writer, write
from tests.forked import call_forked
from tests.selection import mark_slow_except

MISTAKE = 2
STORAGE = 6
FOREIGN = {
    "one line without its end": b"my only notes",
    "empty": b"",
    "JSON": b'{"number": 1, "settings": "mine"}',
    "half of JSON": b'{"number": 1, "settings": "mine',
    "binary": bytes(range(256)),
}
OTHER_TROUBLES = ("FIFO", "full device", "null device", "socket")
FILES = [writer for writer in WRITERS if writer.kind == FILE]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of the demo's config begin at the root of a clone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TUNE_RECEIPTS", "on")
    monkeypatch.setenv("TUNE_STRATEGY", "off")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    cwd = os.getcwd()
    os.chdir(ROOT)
    made = Material(tmp_path_factory.mktemp("material"))
    os.chdir(cwd)
    return made


@pytest.fixture
def out_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_STATE_HOME", f"{name}-state")
        yield Path(name)


def parameters(writers: list[Writer] | tuple[Writer, ...] = WRITERS, *, slow: bool = True) -> list:
    """Return the rows; those that take seconds are marked, unless the trouble is seen before the
    work.
    """
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(writer, id=str(writer), marks=marks[slow and writer.slow])
        for writer in writers
    ]


def look(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return each name in a folder with its type and content; of links where they lead."""
    seen = {}
    for path in sorted(folder.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        content = path.read_bytes() if kind == stat.S_IFREG else b""
        seen[str(path.relative_to(folder))] = (
            kind,
            os.readlink(path).encode() if path.is_symlink() else content,
        )
    return seen


def attempt(writer: Writer, material: Material, out: Path, **limits: object) -> tuple[int, str]:
    """Return the exit code of the command in a fork, and what it says on standard error."""
    if writer.source:
        assert getattr(material, writer.source)  # made before the disk is full

    def command() -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = write(writer, material, out)
        return code, f"\n{said.getvalue()}"

    code, said = call_forked(command, **limits)  # type: ignore[arg-type]
    return code, said


def check_remedy(writer: Writer, said: str) -> None:
    """The remedy names no option of another command."""
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert writer.option == "output_dir" or "output_dir" not in line, line


def refused(writer: Writer, material: Material, folder: Path, out: Path, **limits: object) -> str:
    """Return what the command says, one line of it an error; nothing in the folder has changed."""
    before = look(folder)
    code, said = attempt(writer, material, out, **limits)
    assert code in (MISTAKE, STORAGE) and said.count("\nerror: ") == 1, (code, said)
    assert look(folder) == before
    return said


# Each writer with a folder, or a file for one, and with one of the others, in turn.
PLACES = [pytest.param(writer, "folder", id=f"{writer}-folder") for writer in WRITERS]
PLACES += [
    pytest.param(writer, trouble, id=f"{writer}-{trouble}", marks=pytest.mark.slow)
    for writer, trouble in zip(WRITERS, itertools.cycle(OTHER_TROUBLES), strict=False)
]


@pytest.mark.parametrize(("writer", "trouble"), PLACES)
def test_what_is_no_file_stays_in_its_place(
    writer: Writer, trouble: str, material: Material, out_folder: Path
) -> None:
    out = out_folder / f"out{writer.ending}"
    if trouble == "folder" and writer.kind == FILE:
        out.mkdir()
        (out / "mine").write_bytes(b"mine")
        if writer.verb == "cp":  # copies into a folder, and adds the ending to a name without one
            out = out.with_suffix("")
    elif trouble == "folder":
        out.write_bytes(b"a file where a folder is to be")
    elif trouble == "FIFO":
        os.mkfifo(out)
    elif trouble == "socket":
        os.mknod(out, stat.S_IFSOCK | 0o600)
    else:  # a link, so that a writer that replaces it harms nobody
        out.symlink_to("/dev/full" if trouble == "full device" else "/dev/null")
    assert refused(writer, material, out_folder, out)


@pytest.mark.slow
@pytest.mark.parametrize("writer", parameters(WRITERS[::2], slow=False))
def test_a_place_under_a_file_or_without_permission(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    (out_folder / "file").write_bytes(b"mine")
    assert refused(writer, material, out_folder, out_folder / "file" / f"out{writer.ending}")
    closed = out_folder / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    assert refused(writer, material, out_folder, closed / f"out{writer.ending}", as_plain_user=True)


# With --force `cp` replaces what is there, as it is told.
@pytest.mark.slow
@pytest.mark.parametrize(
    "writer", parameters([row for row in FILES if row.note != "--force"][::2], slow=False)
)
def test_a_file_of_the_users_stays_as_it_is(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    out = out_folder / f"out{writer.ending}"
    for name, content in FOREIGN.items():
        if writer.verb == "generate" and not content:
            continue  # nothing is lost
        out.write_bytes(content)
        assert "out" in refused(writer, material, out_folder, out), name


@pytest.mark.parametrize(
    "writer", parameters([row for row in WRITERS if row.kind == FOLDER], slow=False)
)
def test_files_of_the_users_in_a_folder_stay(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    for name in writer.names:
        out = out_folder / f"holds {name}"
        out.mkdir()
        (out / name).write_bytes(b"mine")
        assert refused(writer, material, out_folder, out), name


@pytest.mark.parametrize(
    "way", mark_slow_except(["the same", "relative", "link", "hard link"], ["link"])
)
@pytest.mark.parametrize("writer", parameters([row for row in WRITERS if row.reads], slow=False))
def test_no_output_is_an_input(
    writer: Writer, way: str, material: Material, out_folder: Path
) -> None:
    for name in writer.reads:
        read = getattr(material, name)
        out = out_folder / f"out{writer.ending}"
        if way == "relative":
            out = Path(os.path.relpath(read))
        elif way == "link":
            out.symlink_to(read)
        elif way == "hard link":
            os.link(read, out)
        else:
            out = read
        before = read.read_bytes()
        assert refused(writer, material, out_folder, out)
        assert read.read_bytes() == before


@pytest.mark.parametrize("writer", parameters())
def test_a_full_disk_leaves_all_or_nothing(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    takes_links = writer.kind == FILE and writer.verb not in (
        "import",
        "export",
    )  # the others refuse what is there
    for full, is_link in itertools.product(writer.full, (False, True) if takes_links else (False,)):
        out = out_folder / f"out{full}{writer.ending}"
        if is_link:
            out.symlink_to(out_folder / "elsewhere")
        code, said = attempt(writer, material, out, disk_bytes=full)
        assert code == STORAGE and said.count("\nerror: ") == 1, (code, said)
        check_remedy(writer, said)
        if is_link:
            assert out.is_symlink()
            out.unlink()
        left = list(out_folder.rglob("*"))
        assert not [path for path in left if files.is_temporary(path, "*")]
        if writer.kind == FOLDER:
            assert all(
                path.stat().st_size < full
                for path in left
                if path.is_file() and out in path.parents
            )
        else:
            assert left == []


@pytest.mark.parametrize("writer", parameters())
def test_a_name_that_the_system_refuses_is_one_line(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    code, said = attempt(writer, material, Path("/proc") / f"out{writer.ending}")
    assert (
        code in (MISTAKE, STORAGE) and said.count("\nerror: ") == 1 and "0 B are free" not in said
    ), (code, said)
    check_remedy(writer, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer",
    parameters(
        [row for row in FILES if row.verb not in ("import", "export") and row.note != "--force"][
            ::2
        ]
    ),
)
def test_a_link_stays_and_is_written_through(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    """To a file that is not there yet, and to one that an earlier start wrote."""
    out = out_folder / f"out{writer.ending}"
    (out_folder / "elsewhere").mkdir()
    led_to = out_folder / "elsewhere" / f"file{writer.ending}"
    out.symlink_to(led_to)
    for _ in range(1 if writer.verb == "cp" else 2):
        assert attempt(writer, material, out)[0] in (0, 1)
        assert out.is_symlink() and led_to.read_bytes() and not led_to.is_symlink()
    assert sorted(look(out_folder)) == ["elsewhere", f"elsewhere/{led_to.name}", out.name]


# The answers of `generate` are added to their file, a batch at a time.
@pytest.mark.slow
@pytest.mark.parametrize(
    "writer", parameters([row for row in FILES if row.verb != "generate"][::2])
)
def test_what_a_killed_start_left_goes(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    """Unless somebody may still be writing it."""
    out = out_folder / f"out{writer.ending}"
    left = [files.make_temporary_path(out) for _ in range(2)]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    assert attempt(writer, material, out)[0] in (0, 1)
    assert not left[0].exists() and out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer", parameters([row for row in FILES if row.verb not in ("cp", "import", "export")])
)
def test_what_an_earlier_start_wrote_is_whole_when_the_disk_is_full(
    writer: Writer, material: Material, out_folder: Path
) -> None:
    out = out_folder / f"out{writer.ending}"
    assert attempt(writer, material, out)[0] in (0, 1)  # of the doctor: a finding
    before = look(out_folder)
    assert list(before) == [out.name] and before[out.name][1]
    code, _ = attempt(writer, material, out, disk_bytes=writer.full[0])
    assert code in (0, STORAGE) and look(out_folder) == before  # 0: all prompts are answered
