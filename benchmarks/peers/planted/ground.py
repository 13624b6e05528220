"""Make the sound run that faults are planted in: a small model, conversations, settings.

`make_setup` writes a folder for each run; `faults.py` and `states.py` damage it. A `Setup` is in no
tool's words: each tool's own file (trl.py, litgpt.py ...) writes its config from it. A row is a
conversation of three messages.
"""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # {"messages": [{"role": ..., "content": ...}, ...]}

# `{% generation %}` marks what is trained.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + '] ' }}{% if"
    " message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{%"
    " endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
# The same text, for tools whose templates do not know that mark.
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SYSTEM = "Answer in one short line."
# A conversation asks for the legs of several things of a kind.
THINGS = ("bird", "cow", "ant", "spider", "table", "dog", "fish", "chair")
LEGS = (2, 4, 6, 8, 4, 4, 0, 4)


@dataclass
class Setup:
    """Hold a run in no tool's words."""

    folder: Path  # of this run alone; all its files are in it
    steps: int = 4  # optimizer steps
    batch: int = 2  # rows of a step and rank
    lr: str = "1e-3"  # as it is written into configs
    max_len: int = 256  # tokens of a row; more are cut off
    packing: bool = False
    validate: bool = False  # on `held_out`
    targets: list[str] | None = None  # modules with an adapter; None: every parameter is trained
    base_bits: int = 16  # of the frozen weights next to adapters, 16 or 4
    save_every: int | None = None  # steps between states; None: none is saved
    resume: bool = False  # from the last state in `output`
    ranks: int = 1
    shuffle: bool = True
    # Name of a mistake in the config or the command, which each tool's file spells its own way; or
    # of another way to make the run (`transformers`, `twice`, `small_disk`). Empty: none.
    twist: str = ""
    rows: list[Row] = field(default_factory=list)  # as they were first written to `train`

    @property
    def model(self) -> Path:
        """Return the checkpoint to start from."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        """Return the training rows, one conversation a line."""
        return self.folder / "rows" / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """Return the validation rows."""
        return self.folder / "rows" / "test.jsonl"

    @property
    def output(self) -> Path:
        """Return the folder that the tool is told to write into."""
        return self.folder / "output"

    def write(self, rows: Sequence[Row]) -> None:
        """Replace the training rows."""
        write_rows(self.train, rows)

    def edit_tokenizer_config(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the model's tokenizer_config.json; `change` gets its content."""
        edit_json(self.model / "tokenizer_config.json", change)

    def copy_with(self, **changes: Any) -> "Setup":
        """Return the same run in the same folder, with other settings."""
        changed_setup = copy.copy(self)
        for name, value in changes.items():
            setattr(changed_setup, name, value)
        return changed_setup


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Read a JSON object, let `change` edit it in place, and write it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_conversation(number: int) -> Row:
    """Build the row of a number; each number has another question."""
    thing = THINGS[number % 8]
    legs = LEGS[number % 8]
    count = 2 + number // 8
    question = f"How many legs do {count} of the kind {thing} have?"
    answer = f"{count} times {legs} is {count * legs} legs."
    return {
        "messages": [
            build_message("system", SYSTEM),
            build_message("user", question),
            build_message("assistant", answer),
        ]
    }


def build_message(role: str, content: str) -> dict[str, str]:
    """Build a message of a conversation."""
    return {"role": role, "content": content}


def build_rows(first: int, last: int) -> list[Row]:
    """Build the rows of the numbers from `first` to before `last`."""
    return [build_conversation(number) for number in range(first, last)]


def make_setup(folder: Path, model: Path) -> Setup:
    """Make a run's folder anew: a copy of the model, 24 training rows, 6 other validation rows."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    setup = Setup(folder)
    shutil.copytree(model, setup.model)
    setup.rows = build_rows(0, 24)
    setup.write(setup.rows)
    write_rows(setup.held_out, build_rows(24, 30))
    return setup


def make_model(given: Path, out: Path) -> None:
    """Copy the Hugging Face folder `given` to `out`, with all that some tool needs.

    It gets our chat template, a padding token, and if there is none a tokenizer.json, which is
    built from tokenizer.model (SentencePiece, byte-pair encoding).
    """
    out.mkdir(parents=True)
    for path in given.iterdir():
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    if not (out / "tokenizer.json").exists():
        build_tokenizer(out / "tokenizer.model").save(str(out / "tokenizer.json"))

    def complete(settings: dict[str, Any]) -> None:
        settings.update(chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
        settings["pad_token"] = settings.get("pad_token") or settings["unk_token"]
        settings.pop("legacy", None)  # of the class that is replaced

    edit_json(out / "tokenizer_config.json", complete)


def build_tokenizer(path: Path) -> Any:
    """Build a `tokenizers.Tokenizer` that encodes as the SentencePiece byte-pair model does."""
    # Inside, since only a folder without tokenizer.json needs these packages.
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pieces = sentencepiece.SentencePieceProcessor(str(path))
    vocabulary = {pieces.id_to_piece(number): number for number in range(pieces.get_piece_size())}
    # Without bytes, control pieces and the unknown one, which no merge makes.
    text_ids = [
        n
        for n in vocabulary.values()
        if not (pieces.is_byte(n) or pieces.is_control(n) or pieces.is_unknown(n))
    ]
    # SentencePiece merges by score; each piece may come from any two pieces that make it up.
    merges: list[tuple[str, str]] = []
    for number in sorted(text_ids, key=lambda n: (-pieces.get_score(n), n)):
        text = pieces.id_to_piece(number)
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        known_splits = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known_splits, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    ends = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(ends)
    tokenizer.add_special_tokens([pieces.id_to_piece(number) for number in range(3)])
    bos_piece = pieces.id_to_piece(1)  # begins every text
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos_piece} $A", special_tokens=[(bos_piece, 1)]
    )
    return tokenizer
