"""Every file that a user names and `tune` reads, and every way in which such a file can be bad.

Tests make a file of each of KINDS for each of READERS, and run its command, which has to refuse it
in one line.
"""

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BIG = 2**40  # bytes of a sparse file, which takes no room on the disk
# kind -> the file's content, or a function that makes the file
KINDS: dict[str, bytes | Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "missing": lambda path: None,
    "too large": lambda path: (path.touch(), os.truncate(path, BIG)),
    "deep": b"[" * 100_000,
    "a huge number": b'{"a": ' + b"9" * 6000 + b"}",
    "not UTF-8": b'a: "\xff\xfe\xfa"\n',
    "empty": b"",
}
ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "examples/demo/tokenizer"
SAMPLE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
CONFIG = f"""recipe: full_finetune_distributed
model: {{{{preset: demo/0.5M}}}}
tokenizer: {{{{path: {TOKENIZER}}}}}
data: {{{{source: {{source}}, cache: false}}}}
max_seq_len: 64
"""


@dataclass(frozen=True)
class Reader:
    """A file that a command reads."""

    option: str  # what names the file or its folder: `cat config`, or a key of a config
    name: str  # of the file
    words: str  # command line with `{file}`, its `{folder}`, a valid `{config}` and `{out}`
    whole: str | None = None  # a valid content; None: only other files of this option have one
    accepts: tuple[str, ...] = ()  # kinds that are valid here
    beside: Callable[[Path], object] = lambda folder: None  # writes the folder's other files

    def __str__(self) -> str:
        return f"{self.option} {self.name}"

    def build_command(self, file: Path, config: Path) -> list[str]:
        """Return the words of the command line."""
        out = file.parent.parent / "out"
        paths = {"file": file, "folder": file.parent, "config": config, "out": out}
        return [word.format(**paths) for word in self.words.split()]


def put_tokenizer(folder: Path) -> None:
    """Copy the files of a tokenizer into the folder, but for one that is there already."""
    for file in TOKENIZER.iterdir():
        if not os.path.lexists(folder / file.name):
            shutil.copy(file, folder)


def put_model(folder: Path) -> None:
    """Copy config.json of a tiny model, without weights, into the folder."""
    if not os.path.lexists(folder / "config.json"):
        shutil.copy(ROOT / "recipe_lib/models/presets/demo/0.5M.json", folder / "config.json")


@functools.cache
def make_whole_model() -> Path:
    """Return the folder of a tiny model with its tokenizer; it is written once."""
    from tests.evaluation.models import write_model

    folder = Path(tempfile.mkdtemp(prefix="readers-"))
    owner = os.getpid()
    # A fork runs the same exit handlers, and must not remove it.
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
    return write_model("llama", folder / "model")


def put_whole_model(folder: Path) -> None:
    """Copy all files of a model into the folder, but for one that is there already."""
    for file in make_whole_model().iterdir():
        if not os.path.lexists(folder / file.name):
            shutil.copy(file, folder)


def put_adapter(folder: Path) -> None:
    """Write an adapter's config into the folder."""
    if not os.path.lexists(folder / "adapter_config.json"):
        settings = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "base_model_name_or_path": "x/y",
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))


# Valid samples by the suffix of their file.
WHOLE = {
    ".jsonl": SAMPLE,
    ".json": f"[{SAMPLE}]",
    ".txt": "a text",
    ".csv": "prompt,completion\na,b\n",
    ".tsv": "prompt\tcompletion\na\tb\n",
}
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors",
)
ANY_TEXT = ("deep", "a huge number", "empty")
LORA = "run lora_finetune_distributed --config {config} recipe=lora_finetune_distributed"
DATA = "data check {config} data.source={file}"
READERS: Sequence[Reader] = (
    Reader("cat config", "c.yaml", "cat {file}", "seed: 1\n", ANY_TEXT),
    Reader("cat --config", "c.yaml", "cat {config} --config {file} --resolved", "seed: 1\n", ("empty",)),
    Reader("cat --plugin", "p.py", "cat {config} --plugin {file}", "a = 1\n", ("empty",)),
    Reader("cp source", "c.yaml", "cp {file} {out}.yaml", "seed: 1\n", (*ANY_TEXT, "not UTF-8")),
    Reader("import file", "c.yaml", "import {file}", "model: {_component_: torchtune.models.llama3.llama3_8b}\n"),
    Reader("validate config", "c.yaml", "validate {file}", CONFIG.format(source="x.jsonl"), ()),
    Reader("validate --config", "c.yaml", "validate {config} --config {file}", "seed: 1\n", ("empty",)),
    Reader("validate --plugin", "p.py", "validate {config} --plugin {file}", "a = 1\n", ("empty",)),
    Reader("validate --recipe", "r.py", "validate {config} --recipe {file}", None),
    Reader("data config", "c.yaml", "data check {file}"),
    Reader("data --config", "c.yaml", "data check {config} --config {file}", "seed: 1\n", ("empty",)),
    Reader("data --plugin", "p.py", "data check {config} --plugin {file}", "a = 1\n", ("empty",)),
    Reader("data --recipe", "r.py", "data check {config} --recipe {file}"),
    Reader("plan words", "c.yaml", "plan {file} --device 24GB"),
    Reader("plan --config", "c.yaml", "plan {config} --config {file} --device 24GB", None, ("empty",)),
    Reader("plan --plugin", "p.py", "plan {config} --plugin {file} --device 24GB", None, ("empty",)),
    Reader("plan --diff", "p.json", "plan {config} --device 24GB --diff {file}"),
    Reader("plan --calibration", "c.json", "plan {config} --device 24GB --calibration {file}"),
    Reader("tp-plan model", "config.json", "tp-plan {file}"),
    Reader("run words", "c.yaml", "run {file}"),
    Reader("run --config", "c.yaml", "run full_finetune_distributed --config {file}"),
    Reader("run --plugin", "p.py", "run full_finetune_distributed --config {config} --plugin {file}", None, ("empty",)),
    Reader("eval --plugin", "p.py", "eval {folder} --plugin {file}", None, ("empty",)),
    Reader("export checkpoint", "adapter_config.json", "export {folder} --merge --out {out}"),
    Reader("generate --prompts", "p.jsonl", "generate {folder} --prompts {file} --device cpu", beside=put_model),
    Reader("generate checkpoint", "config.json", "generate {folder} --prompt a --device cpu"),
    Reader("generate checkpoint", "adapter_config.json", "generate {folder} --prompt a --device cpu"),
    Reader("generate checkpoint", "model.safetensors", "generate {folder} --prompt a --device cpu", beside=put_model),
    Reader("generate checkpoint", "model.safetensors.index.json", "generate {folder} --prompt a --device cpu",
           beside=put_model),
    *(
        Reader("generate checkpoint", name, "generate {folder} --prompt a --max-new-tokens 1 --device cpu", None,
               ("missing", *(ANY_TEXT if name.endswith(".jinja") else ())), beside=put_whole_model)
        for name in (*MODEL_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    ),
    *(
        # Files beside the model are copied as they are, whatever they hold.
        Reader("export checkpoint", name, "export {folder} --quantize int8 --out {out}", None,
               ("missing", *((*ANY_TEXT, "not UTF-8") if name[0] in "tg" else ())), beside=put_whole_model)
        for name in MODEL_FILES
    ),
    Reader("upload checkpoint", "adapter_config.json", "upload {folder} a/b --dry-run", None, (),
           beside=lambda folder: (folder / "a.safetensors").touch()),
    Reader("model.path", "config.json", "run {config} model.path={folder} model.preset=null output_dir={out}"),
    Reader("model.preset", "m.json", "run {config} model.preset={file} output_dir={out}"),
    Reader("tokenizer.path", "t.json", "data check {config} tokenizer.path={file}"),
    *(
        Reader("tokenizer.path", name, "data check {config} tokenizer.path={folder}",
               (TOKENIZER / name).read_text() if (TOKENIZER / name).exists() else "{}", ("missing",),
               beside=put_tokenizer)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                     "generation_config.json", "config.json", "chat_template.jinja")
    ),
    Reader("tokenizer.chat_template", "t.jinja", "data check {config} tokenizer.chat_template={file}"),
    *(
        Reader("data.source", f"s{kind}", DATA, WHOLE.get(kind),
               ANY_TEXT if kind == ".txt" else ())
        for kind in (*WHOLE, ".parquet", ".jsonl.gz", ".json.gz")
    ),
    Reader("validation.source", "s.jsonl", "data check {config} validation.source={file}", None, ()),
    Reader("lora.adapter_path", "adapter_config.json",
           LORA + " lora.adapter_path={folder} output_dir={out}"),
    Reader("lora.adapter_path", "adapter_model.safetensors",
           LORA + " lora.adapter_path={folder} output_dir={out}", beside=put_adapter),
    *(
        Reader("output_dir", name, "run {config} output_dir={folder}", None, ("missing",))
        for name in ("config.yaml", "summary.json", "report.html")
    ),
    Reader("output_dir", "metrics.jsonl", "run {config} output_dir={folder}", None, ("missing", "empty")),
    Reader("resume", "manifest.json", "run {config} resume={folder} output_dir={out}"),
)  # fmt: skip
