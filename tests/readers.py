"""List every file that a user names and `tune` reads, and ways in which such a file can be bad.

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
# Kind of bad file -> its content, or a function that makes it at a path.
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
# A sample in the format `messages`, as JSON.
SAMPLE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
# A valid config but for `{source}`, which is to be filled in.
CONFIG = f"""recipe: full_finetune_distributed
model: {{{{preset: demo/0.5M}}}}
tokenizer: {{{{path: {TOKENIZER}}}}}
data: {{{{source: {{source}}, cache: false}}}}
max_seq_len: 64
"""


@dataclass(frozen=True)
class Reader:
    """A file that a command reads."""

    option: str  # that names the file or its folder: `cat config`, or a key of a config
    name: str  # of the file
    words: str  # command line with `{file}`, its `{folder}`, a valid `{config}` and `{out}`
    whole: str | None = None  # a valid content; None: no test reads a valid file
    accepts: tuple[str, ...] = ()  # of KINDS, those that are valid here
    beside: Callable[[Path], object] = lambda folder: None  # writes the folder's other files

    def __str__(self) -> str:
        return f"{self.option} {self.name}"

    def build_command(self, file: Path, config: Path) -> list[str]:
        """Return the words of the command line. file: the one to read. config: a valid one."""
        out = file.parent.parent / "out"
        paths = {"file": file, "folder": file.parent, "config": config, "out": out}
        return [word.format(**paths) for word in self.words.split()]


def put_tokenizer(folder: Path) -> None:
    """Copy the files of a tokenizer into the folder, except those that are there already."""
    for file in TOKENIZER.iterdir():
        if not os.path.lexists(folder / file.name):
            shutil.copy(file, folder)


def put_model(folder: Path) -> None:
    """Copy config.json of a tiny model, without weights, into the folder, unless it has one."""
    if not os.path.lexists(folder / "config.json"):
        shutil.copy(ROOT / "recipe_lib/models/presets/demo/0.5M.json", folder / "config.json")


@functools.cache
def make_whole_model() -> Path:
    """Return the folder of a tiny model with its tokenizer; it is written once a process."""
    # Imports transformers, which most users of this file do not need.
    from tests.evaluation.models import write_model

    folder = Path(tempfile.mkdtemp(prefix="readers-"))
    owner = os.getpid()
    # A fork of this process runs the same exit handlers, and must not remove it.
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
    return write_model("llama", folder / "model")


def put_whole_model(folder: Path) -> None:
    """Copy all files of a model into the folder, except those that are there already."""
    for file in make_whole_model().iterdir():
        if not os.path.lexists(folder / file.name):
            shutil.copy(file, folder)


def put_adapter(folder: Path) -> None:
    """Write an adapter's config into the folder, unless it has one."""
    if not os.path.lexists(folder / "adapter_config.json"):
        settings = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "base_model_name_or_path": "x/y",
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))


# Suffix of a file of samples -> a valid content.
WHOLE = {
    ".jsonl": SAMPLE,
    ".json": f"[{SAMPLE}]",
    ".txt": "a text",
    ".csv": "prompt,completion\na,b\n",
    ".tsv": "prompt\tcompletion\na\tb\n",
}
# Files of a model's folder, each of which is made bad in turn.
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors",
)
ANY_TEXT = ("deep", "a huge number", "empty")  # kinds that any reader of plain text accepts
# Beginnings of command lines.
LORA = "run lora_finetune_distributed --config {config} recipe=lora_finetune_distributed"
DATA = "data check {config} data.source={file}"
READERS: Sequence[Reader] = (
    Reader("cat config", "c.yaml", words="cat {file}", whole="seed: 1\n", accepts=ANY_TEXT),
    Reader("cat --config", "c.yaml", words="cat {config} --config {file} --resolved",
           whole="seed: 1\n", accepts=("empty",)),
    Reader("cat --plugin", "p.py", words="cat {config} --plugin {file}", whole="a = 1\n", accepts=("empty",)),
    Reader("cp source", "c.yaml", words="cp {file} {out}.yaml", whole="seed: 1\n", accepts=(*ANY_TEXT, "not UTF-8")),
    Reader("import file", "c.yaml", words="import {file}",
           whole="model: {_component_: torchtune.models.llama3.llama3_8b}\n"),
    Reader("validate config", "c.yaml", words="validate {file}", whole=CONFIG.format(source="x.jsonl")),
    Reader("validate --config", "c.yaml", words="validate {config} --config {file}",
           whole="seed: 1\n", accepts=("empty",)),
    Reader("validate --plugin", "p.py", words="validate {config} --plugin {file}", whole="a = 1\n", accepts=("empty",)),
    Reader("validate --recipe", "r.py", words="validate {config} --recipe {file}"),
    Reader("data config", "c.yaml", words="data check {file}"),
    Reader("data --config", "c.yaml", words="data check {config} --config {file}",
           whole="seed: 1\n", accepts=("empty",)),
    Reader("data --plugin", "p.py", words="data check {config} --plugin {file}", whole="a = 1\n", accepts=("empty",)),
    Reader("data --recipe", "r.py", words="data check {config} --recipe {file}"),
    Reader("plan words", "c.yaml", words="plan {file} --device 24GB"),
    Reader("plan --config", "c.yaml", words="plan {config} --config {file} --device 24GB", accepts=("empty",)),
    Reader("plan --plugin", "p.py", words="plan {config} --plugin {file} --device 24GB", accepts=("empty",)),
    Reader("plan --diff", "p.json", words="plan {config} --device 24GB --diff {file}"),
    Reader("plan --calibration", "c.json", words="plan {config} --device 24GB --calibration {file}"),
    Reader("tp-plan model", "config.json", words="tp-plan {file}"),
    Reader("run words", "c.yaml", words="run {file}"),
    Reader("run --config", "c.yaml", words="run full_finetune_distributed --config {file}"),
    Reader("run --plugin", "p.py", words="run full_finetune_distributed --config {config} --plugin {file}",
           accepts=("empty",)),
    Reader("eval --plugin", "p.py", words="eval {folder} --plugin {file}", accepts=("empty",)),
    Reader("export checkpoint", "adapter_config.json", words="export {folder} --merge --out {out}"),
    Reader("generate --prompts", "p.jsonl", words="generate {folder} --prompts {file} --device cpu", beside=put_model),
    Reader("generate checkpoint", "config.json", words="generate {folder} --prompt a --device cpu"),
    Reader("generate checkpoint", "adapter_config.json", words="generate {folder} --prompt a --device cpu"),
    Reader("generate checkpoint", "model.safetensors", words="generate {folder} --prompt a --device cpu",
           beside=put_model),
    Reader("generate checkpoint", "model.safetensors.index.json", words="generate {folder} --prompt a --device cpu",
           beside=put_model),
    *(
        Reader("generate checkpoint", name, words="generate {folder} --prompt a --max-new-tokens 1 --device cpu",
               accepts=("missing", *(ANY_TEXT if name.endswith(".jinja") else ())), beside=put_whole_model)
        for name in (*MODEL_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    ),
    *(
        # Files beside the model are copied as they are, whatever they hold.
        Reader("export checkpoint", name, words="export {folder} --quantize int8 --out {out}",
               accepts=("missing", *((*ANY_TEXT, "not UTF-8") if name[0] in "tg" else ())), beside=put_whole_model)
        for name in MODEL_FILES
    ),
    Reader("upload checkpoint", "adapter_config.json", words="upload {folder} a/b --dry-run",
           beside=lambda folder: (folder / "a.safetensors").touch()),
    Reader("model.path", "config.json", words="run {config} model.path={folder} model.preset=null output_dir={out}"),
    Reader("model.preset", "m.json", words="run {config} model.preset={file} output_dir={out}"),
    Reader("tokenizer.path", "t.json", words="data check {config} tokenizer.path={file}"),
    *(
        Reader("tokenizer.path", name, words="data check {config} tokenizer.path={folder}",
               whole=(TOKENIZER / name).read_text() if (TOKENIZER / name).exists() else "{}", accepts=("missing",),
               beside=put_tokenizer)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                     "generation_config.json", "config.json", "chat_template.jinja")
    ),
    Reader("tokenizer.chat_template", "t.jinja", words="data check {config} tokenizer.chat_template={file}"),
    *(
        Reader("data.source", f"s{kind}", words=DATA, whole=WHOLE.get(kind),
               accepts=ANY_TEXT if kind == ".txt" else ())
        for kind in (*WHOLE, ".parquet", ".jsonl.gz", ".json.gz")
    ),
    Reader("validation.source", "s.jsonl", words="data check {config} validation.source={file}"),
    Reader("lora.adapter_path", "adapter_config.json",
           words=LORA + " lora.adapter_path={folder} output_dir={out}"),
    Reader("lora.adapter_path", "adapter_model.safetensors",
           words=LORA + " lora.adapter_path={folder} output_dir={out}", beside=put_adapter),
    *(
        Reader("output_dir", name, words="run {config} output_dir={folder}", accepts=("missing",))
        for name in ("config.yaml", "summary.json", "report.html")
    ),
    Reader("output_dir", "metrics.jsonl", words="run {config} output_dir={folder}", accepts=("missing", "empty")),
    Reader("resume", "manifest.json", words="run {config} resume={folder} output_dir={out}"),
)  # fmt: skip
