"""`tune upload`: what is sent and what never is, and a line for each refusal."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from recipe_lib.cli import main
from tests.cli.adapter_runs import write_adapter_run
from tests.cli.commands import tune


@pytest.fixture(scope="module")
def adapted(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """output_dir of a run of adapters, with a state."""
    folder = tmp_path_factory.mktemp("adapted") / "mine"
    write_adapter_run(
        realdata, folder, "checkpoint.save_every_n_steps=1", "validation.source=${data.source}"
    )
    return folder


class Recorder:
    """In the place of HfApi: what it was asked, and a public repository."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.private = False

    def create_repo(self, repo: str, **more: Any) -> None:
        self.asked.append(("create_repo", repo, more))

    def create_branch(self, repo: str, **more: Any) -> None:
        self.asked.append(("create_branch", repo, more))

    def model_info(self, repo: str) -> Any:
        return SimpleNamespace(private=self.private)

    def upload_folder(self, **more: Any) -> Any:
        from huggingface_hub.utils import filter_repo_objects

        folder = Path(more["folder_path"])
        names = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
        self.sent = sorted(filter_repo_objects(names, allow_patterns=more["allow_patterns"]))
        self.asked.append(("upload_folder", more["repo_id"], {"revision": more["revision"]}))
        return SimpleNamespace(commit_url="https://hub/o/n/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: recorder)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    return recorder


def call(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main.main(["upload", *map(str, words)])
    written = capsys.readouterr()
    return code, written.out, written.err


ADAPTER = ["README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
           "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]  # fmt: skip


def test_an_adapter_with_its_card_and_nothing_else(
    adapted: Path, hub: Recorder, capsys: pytest.CaptureFixture
):
    secret = adapted / "adapter" / "notes.txt"
    secret.write_text("mine")
    (adapted / "adapter" / "state").mkdir(exist_ok=True)
    (adapted / "adapter" / "state" / "model.safetensors").write_bytes(b"state")
    code, out, err = call(capsys, adapted, "owner/name", "--revision", "v2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines[: len(ADAPTER)]] == ADAPTER == hub.sent
    size = (adapted / "adapter" / "README.md").stat().st_size
    assert lines[0].strip() == f"{size / 1024:.2f} KiB  README.md"
    assert lines[len(ADAPTER)].startswith(f"8 files of {adapted / 'adapter'}, ")
    assert "note: stays here, being neither weights, tokenizer nor card: notes.txt, state/" in lines
    assert any(
        line.startswith("note: adapter_config.json names the base by a folder of this machine")
        for line in lines
    )
    assert lines[-1] == "uploaded: https://hub/o/n/commit/1"
    assert [name for name, *_ in hub.asked] == ["create_repo", "create_branch", "upload_folder"]
    assert hub.asked[0][2] == {"private": False, "exist_ok": True}
    assert hub.asked[2][1:] == ("owner/name", {"revision": "v2"})


def test_the_card_says_data_settings_plan_and_metrics(adapted: Path):
    card = (adapted / "adapter" / "README.md").read_text()
    for part in ("## Data", "- `mine.jsonl`, format `messages`", "## Settings that differ", "`optimizer.lr`", "## Plan",
                 "| batch | batch_size 1", "## Results", "| loss of the last step |", "| validation loss at the end |",
                 "## Use"):  # fmt: skip
        assert part in card, part


def test_a_dry_run_asks_nobody(adapted: Path, hub: Recorder, capsys: pytest.CaptureFixture):
    code, out, err = call(capsys, adapted / "adapter", "owner/name", "--dry-run")
    assert (code, err) == (0, "") and out.endswith("dry run: nothing was sent\n")
    assert "adapter_model.safetensors" in out and hub.asked == []


def test_private_means_private(adapted: Path, hub: Recorder, capsys: pytest.CaptureFixture):
    code, _, err = call(capsys, adapted, "owner/name", "--private")
    assert (
        code == 2
        and err
        == "error: owner/name: is there already and is public; make it private on its page, or"
        " choose another\n"
    )
    assert [name for name, *_ in hub.asked] == ["create_repo"] and hub.asked[0][2]["private"]
    hub.private = True
    assert call(capsys, adapted, "owner/name", "--private")[0] == 0


def test_a_secret_in_a_text_is_not_sent(
    adapted: Path, hub: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture
):
    import shutil

    shutil.copytree(adapted / "adapter", tmp_path / "own")
    card = tmp_path / "own" / "README.md"
    card.write_text(card.read_text() + "\nlogin with hf_" + "aBcDeFgHiJ" * 4)
    code, out, err = call(capsys, tmp_path / "own", "owner/name")
    assert (code, out) == (2, "")
    assert (
        err
        == f"error: {card}: holds what looks like a token or a password; take it out, nothing was"
        " sent\n"
    )
    assert hub.asked == []


def test_what_is_no_model(
    adapted: Path, tmp_path: Path, hub: Recorder, capsys: pytest.CaptureFixture
):
    def refused(*words: object) -> str:
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, "") and err.count("\n") == 1
        return err.removeprefix("error: ").removesuffix("\n")

    assert refused(adapted, "name").startswith(
        "name: is not a repository on the hub; expected OWNER/NAME"
    )
    assert refused(tmp_path / "no", "o/n").endswith(
        "no such folder; expected a run's output_dir, a model or an adapter"
    )
    assert refused(tmp_path, "o/n").startswith(
        f"{tmp_path}: is no model, adapter or run; expected config.json or adapter"
    )
    state = next((adapted / "state").glob("step_*"))
    assert "is a state to resume from, no model; write one with `tune export`" in refused(
        state, "o/n"
    )
    (tmp_path / "config.json").write_text("{}")
    assert refused(tmp_path, "o/n").endswith(
        "is a model without weights; expected .safetensors files"
    )


class _Refusing(BaseHTTPRequestHandler):
    """Answers everything with the status that the server was made with."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[Callable[[int], str]]:
    """A hub that refuses, by status."""
    servers = []

    def start(status: int) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
        server.status = status  # type: ignore[attr-defined]
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_the_hub_refuses_is_one_line(
    adapted: Path,
    refusing: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert (
        call(capsys, adapted, "owner/name")[2]
        == "error: owner/name: there is no token to write with; `hf auth login`, or set HF_TOKEN\n"
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    made = huggingface_hub.HfApi
    assert (
        call(capsys, adapted, "owner/name")[2]
        == "error: owner/name: HF_HUB_OFFLINE is set; unset it to upload\n"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for status, line in (
        (401, "the hub refused the token (401)"),
        (403, "the token may not write to owner (403)"),
    ):
        api = made(endpoint=refusing(status), token="a token")
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda api=api: api)
        code, _, err = call(capsys, adapted, "owner/name")
        assert (
            code == 2 and err.startswith(f"error: owner/name: {line}; ") and err.count("\n") == 1
        ), err


def test_without_a_network(adapted: Path, tmp_path: Path):
    settings: dict[str, str | None] = {
        "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_none", "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": None,
    }  # fmt: skip
    done = tune("upload", adapted, "owner/name", timeout=90, **settings)
    assert (
        done.returncode == 2
        and done.stderr
        == "error: owner/name: cannot reach http://127.0.0.1:9; check the network, a proxy, and"
        " HF_ENDPOINT\n"
    )
