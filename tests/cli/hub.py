"""Serve a Hugging Face hub on 127.0.0.1, as much of it as a download needs.

with run_hub() as hub:
    tune("download", "owner/good", HF_ENDPOINT=hub.address)
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34  # of every repository
# File -> content: those that a download takes.
SAFE = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": b"first" * 100,
    "model-00002-of-00002.safetensors": b"second" * 100,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
# File -> content: code, pickles, and what a run does not need, which a download leaves.
UNSAFE = {
    "modeling_own.py": b"print('code ran')",
    "tokenizer_own.py": b"print('code ran')",
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/tokenizer.model": b"again",
    "onnx/model.safetensors": b"other",
    "README.md": b"# words",
    "model.gguf": b"other",
}
REPOSITORIES = {  # name -> its files; `_send_listing` and `_send_file` treat some names differently
    "owner/good": SAFE | UNSAFE,
    "owner/gated": SAFE,
    "owner/bins": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "owner/gguf": {"model.gguf": b"x"},
    "owner/words": {"README.md": b"x"},
    "owner/large": {"model.safetensors": b"x", "config.json": b"{}"},
    "owner/broken": SAFE,
}
LARGE = 10**18  # bytes that the API claims for a file of owner/large


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for a model's information and its tree, and for files."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a response. headers: by name, with `_` for `-`."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        """Send an error as the hub does. status: of HTTP. code: the hub's, in a header."""
        self._send(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def _answer(self) -> None:
        """Answer a HEAD or GET request."""
        address = urlsplit(self.path)
        path = unquote(address.path)
        self.server.asked.append(path)
        if path.startswith("/api/models/"):
            name, _, rest = path.removeprefix("/api/models/").partition("/revision/")
            name, _, tree = name.partition("/tree/")
            self._send_listing(name, rest or "main", tree=bool(tree))
        else:
            name, _, rest = path[1:].partition("/resolve/")
            self._send_file(name, rest.partition("/")[2])

    def _send_listing(self, name: str, revision: str, *, tree: bool) -> None:
        """Send a repository's information, or with `tree` the list of its files.

        owner/broken, an expired token, an unknown name or revision get an error.
        """
        if name == "owner/broken":
            return self._send(500)
        if self.headers.get("Authorization") == "Bearer hf_expired_token":
            return self._send(401, b"{}")
        if name not in REPOSITORIES:
            return self._refuse(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
        if revision not in ("main", "v2", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        sizes = {file: len(content) for file, content in REPOSITORIES[name].items()}
        if name == "owner/large":
            sizes["model.safetensors"] = LARGE
        if tree:
            entries = []
            for file, size in sizes.items():
                etag = _compute_etag(REPOSITORIES[name][file])
                entries.append({"type": "file", "path": file, "size": size, "oid": etag})
            body: object = entries
        else:
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            body = {
                "id": name,
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
                "private": False,
                "downloads": 0,
            }
        self._send(200, json.dumps(body).encode(), Content_Type="application/json")

    def _send_file(self, name: str, file: str) -> None:
        """Send a file of a repository; owner/gated wants a token that is allowed."""
        if name == "owner/gated":
            allowed = self.headers.get("Authorization") == "Bearer hf_allowed_token"
            if not allowed:
                return self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        content = REPOSITORIES.get(name, {}).get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        self._send(200, content, ETag=f'"{_compute_etag(content)}"', X_Repo_Commit=COMMIT)


def _compute_etag(content: bytes) -> str:
    """Return a hash that stands for the hub's of a file."""
    return hashlib.sha1(content).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server of REPOSITORIES."""

    daemon_threads = True  # a request that hangs does not keep the test process alive

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []  # paths of all requests, in order

    @property
    def address(self) -> str:
        """Return the value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Serve a hub while the block runs."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
