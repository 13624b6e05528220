"""`tune download` from a hub on this machine: what is fetched, what never is, and a line for each
refusal.
"""

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from recipe_lib.cli.hub_refusals import convert_hub_errors
from recipe_lib.errors import StorageError
from tests.cli.commands import tune_forked
from tests.cli.hub import COMMIT, SAFE, Hub, run_hub

Download = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    disable_progress_bars()
    with run_hub() as server:
        yield server
    enable_progress_bars()


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Download:
    def run(*words: object, **changes: str | None) -> subprocess.CompletedProcess:
        settings: dict[str, str | None] = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": None,
            "HF_TOKEN": None,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
        }
        began = time.monotonic()
        result = tune_forked("download", *words, timeout=60, **(settings | changes))
        assert (
            time.monotonic() - began < 20
        )  # Python on a loaded machine; a hub's retries would take longer
        assert "Traceback" not in result.stderr
        return result

    return run


def names(folder: Path) -> set[str]:
    """The files in a folder, hidden ones and their folders left out."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith(".cache/")}


@pytest.mark.slow
def test_a_file_that_was_changed_is_not_fetched_over(download: Download, tmp_path: Path):
    output = tmp_path / "good"
    assert download("owner/good", "--output-dir", output).returncode == 0
    config = output / "tokenizer_config.json"
    fetched = config.stat().st_mtime
    config.write_text('{"mine": true}')
    os.utime(config, (fetched + 60, fetched + 60))
    result = download("owner/good", "--output-dir", output, "--revision", "v2")
    assert result.returncode == 2
    assert (
        result.stderr
        == f"error: {config}: is not what was downloaded, or was changed since; move it away, or"
        " choose another --output-dir\n"
    )
    assert config.read_text() == '{"mine": true}'
    config.unlink()
    assert download("owner/good", "--output-dir", output).returncode == 0
    assert config.read_text() == "{}"


def test_safe_files_and_no_others(download: Download, hub: Hub, tmp_path: Path):
    hub.asked.clear()
    output = tmp_path / "models" / "good"
    result = download("owner/good", "--output-dir", output)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{output}\n"
    assert result.stderr == f"next: tune run CONFIG model.path={output}\n"
    assert names(output) == set(SAFE)
    assert all((output / name).read_bytes() == content for name, content in SAFE.items())
    assert not any(path.endswith((".py", ".bin", ".pth", ".gguf")) for path in hub.asked)


@pytest.mark.slow
def test_the_cache_and_finding_it_again(download: Download, tmp_path: Path):
    result = download("owner/good")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.rstrip("\n"))
    assert folder == tmp_path / "hf" / "hub" / "models--owner--good" / "snapshots" / COMMIT
    assert names(folder) == set(SAFE)
    # What a recipe does with `model.path=owner/good`: no network, no complaint about the files that
    # were left out.
    found = tune_forked(
        "generate", "owner/good", "--prompt", "a", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
    )
    assert found.returncode == 2
    assert str(folder) in found.stderr


@pytest.mark.slow
def test_include_narrows(download: Download, tmp_path: Path):
    result = download(
        "owner/good",
        "--output-dir",
        tmp_path / "a",
        "--include",
        "config.json",
        "tokenizer*",
        "*.py",
    )
    assert result.returncode == 0, result.stderr
    assert names(tmp_path / "a") == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    }
    result = download("owner/good", "--include", "*.py", "--output-dir", tmp_path / "b")
    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: owner/good: --include *.py matches none of: config.json, "
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_a_second_download_completes_the_first(download: Download, tmp_path: Path):
    assert (
        download(
            "owner/good", "--output-dir", tmp_path / "a", "--include", "config.json"
        ).returncode
        == 0
    )
    assert (
        download("owner/good", "--output-dir", tmp_path / "a", "--revision", "v2").returncode == 0
    )
    assert names(tmp_path / "a") == set(SAFE)


@pytest.mark.slow
def test_gated(download: Download, hub: Hub, tmp_path: Path):
    page = f"{hub.address}/owner/gated"
    result = download("owner/gated", "--output-dir", tmp_path / "a")
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"error: owner/gated: asks for consent; give it at {page}, then `hf auth login` or set"
        " HF_TOKEN\n"
    )
    result = download("owner/gated", "--output-dir", tmp_path / "a", HF_TOKEN="hf_someone_elses")
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"error: owner/gated: your token's account has no access yet; ask for it at {page}, then"
        " try again\n"
    )
    assert names(tmp_path / "a") == set()
    result = download("owner/gated", "--output-dir", tmp_path / "a", HF_TOKEN="hf_allowed_token")
    assert result.returncode == 0, result.stderr
    assert names(tmp_path / "a") == set(SAFE)
    assert "hf_allowed_token" not in result.stdout + result.stderr


def test_a_token_from_the_token_file(download: Download, tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_allowed_token\n")
    assert download("owner/gated").returncode == 0


@pytest.mark.slow
def test_refusals(download: Download, hub: Hub, tmp_path: Path):
    here = hub.address
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("words")
    token = {"HF_TOKEN": "hf_someone_elses"}
    for words, changes, code, line in [
        (
            ["owner/absent"],
            {},
            2,
            (
                f"owner/absent: no such model at {here}, or it is private (then set HF_TOKEN);"
                " check the spelling"
            ),
        ),
        (
            ["owner/absent"],
            token,
            2,
            (
                f"owner/absent: no such model at {here}, or your token has no access to it; check"
                " the spelling"
            ),
        ),
        (
            ["owner/good", "--revision", "v9"],
            {},
            2,
            f"owner/good: has no revision v9; {here}/owner/good/refs lists its branches and tags",
        ),
        (
            ["owner/good"],
            {"HF_TOKEN": "hf_expired_token"},
            2,
            "owner/good: the hub refused the token (401); renew it with `hf auth login`",
        ),
        (["owner/broken"], {}, 2, f"owner/broken: {here} answered 500; try again later"),
        (["a/b/c"], {}, 2, "a/b/c: is not a repository on the hub; expected OWNER/NAME"),
        (
            ["owner/good"],
            {"HF_HUB_OFFLINE": "1"},
            2,
            "owner/good: HF_HUB_OFFLINE is set; unset it to download",
        ),
        (
            ["owner/bins"],
            {},
            2,
            (
                "owner/bins: has its weights as .bin, .pt or .pth files only, which can run code"
                " when loaded; expected .safetensors: look for a converted copy of the model"
            ),
        ),
        (
            ["owner/gguf"],
            {},
            2,
            (
                "owner/gguf: has GGUF files only; expected .safetensors files: look for the model's"
                " original"
            ),
        ),
        (
            ["owner/words"],
            {},
            2,
            (
                "owner/words: has no weights; expected .safetensors files: look for the model's"
                " original"
            ),
        ),
        (
            ["owner/good", "--output-dir", str(full)],
            {},
            2,
            f"{full}: holds other files; --output-dir expects a new or an empty folder",
        ),
        (
            ["owner/good", "--output-dir", str(full / "thesis.txt")],
            {},
            2,
            (
                f"--output-dir: {full}/thesis.txt is a file, expected a folder or a new name;"
                " choose another --output-dir"
            ),
        ),
    ]:
        result = download(*words, **changes)
        assert result.stderr == f"error: {line}\n"
        assert (result.returncode, result.stdout) == (code, "")
    assert names(full) == {"thesis.txt"}


def test_no_room(download: Download, tmp_path: Path):
    result = download("owner/large", "--output-dir", tmp_path / "a")
    assert result.returncode == 6
    assert result.stderr.startswith(f"error: owner/large: needs 931322574.62 GiB, {tmp_path} has ")
    assert result.stderr.endswith(" free; make room, or choose another disk with --output-dir\n")
    assert not (tmp_path / "a").exists()


def test_a_hub_that_cannot_be_reached(download: Download, tmp_path: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (tmp_path / "a" / ".cache" / "huggingface").mkdir(parents=True)
        result = download("owner/good", "--output-dir", tmp_path / "a", HF_ENDPOINT=address)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"error: owner/good: cannot reach {address}; check the network, a proxy, and"
        " HF_ENDPOINT\n"
    )


ROOM = "make room (what is there already is kept), or choose another disk with --output-dir"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "o/n: the disk is full; " + ROOM,
        ),
        (
            RuntimeError("Data processing error: No space left on device (os error 28)"),
            "o/n: the disk is full; " + ROOM,
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/models/x"),
            "/models/x: cannot be written: Permission denied",
        ),
    ],
)
def test_a_disk_that_refuses(error: Exception, line: str):
    with pytest.raises(StorageError) as caught, convert_hub_errors("o/n", None):
        raise error
    assert str(caught.value) == line


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(RuntimeError, match="a bug"), convert_hub_errors("o/n", None):
        raise RuntimeError("a bug")
