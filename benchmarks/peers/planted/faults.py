"""The faults of one run: what is planted.

A fault is planted into a `Setup` before the one command that is judged (`states.py` has those that
take two runs).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.planted import tensors
from benchmarks.peers.planted.ground import Row, Setup, edit_json, rows_between, write_rows


@dataclass(frozen=True)
class Fault:
    """name: for files and `--only`. title: what was done. plant: does it.

    trained: of a fault in masks, whether the texts that are trained (one list of pieces a row) are
    as they should be. group: of the page.
    """

    name: str
    title: str
    group: str
    plant: Callable[[Setup], None]
    trained: Callable[[list[list[str]]], bool] | None = None


def _twist(name: str) -> Callable[[Setup], None]:
    def plant(setup: Setup) -> None:
        setup.twist = name

    return plant


def _rows(change: Callable[[list[Row]], list[Row]]) -> Callable[[Setup], None]:
    def plant(setup: Setup) -> None:
        setup.rows = change(setup.rows)
        setup.write(setup.rows)

    return plant


def _without_answer(rows: list[Row]) -> list[Row]:
    rows[7]["messages"].pop()
    return rows


def _unknown_role(rows: list[Row]) -> list[Row]:
    rows[7]["messages"][2]["role"] = "asistant"
    return rows


def _over_long(rows: list[Row]) -> list[Row]:
    rows[7]["messages"][1]["content"] += " Count them one after the other, please." * 60
    return rows


def _not_text(rows: list[Row]) -> list[Row]:
    rows[7]["messages"][2]["content"] = 28
    return rows


def _repeated(rows: list[Row]) -> list[Row]:
    return rows[:12] + rows[:12]


def _broken_line(setup: Setup) -> None:
    lines = setup.train.read_text(encoding="utf-8").splitlines()
    lines[7] = lines[7][:40]
    setup.train.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _empty(setup: Setup) -> None:
    setup.rows = []
    setup.train.write_text("", encoding="utf-8")


def _overlap(setup: Setup) -> None:
    setup.validate = True
    write_rows(setup.held_out, setup.rows[:3] + rows_between(24, 27))


def _template(change: Callable[[str], str]) -> Callable[[Setup], None]:
    def plant(setup: Setup) -> None:
        def edit(settings: dict[str, Any]) -> None:
            changed = change(settings["chat_template"])
            assert changed != settings["chat_template"]
            settings["chat_template"] = changed

        setup.tokenizer_settings(edit)

    return plant


def _no_end(text: str) -> str:
    return text.replace(" + eos_token", "")


def _drops_system(text: str) -> str:
    return text.replace("in messages %}", "in messages if message['role'] != 'system' %}")


def _unmarked(text: str) -> str:
    return text.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _pad_is_eos(setup: Setup) -> None:
    setup.tokenizer_settings(lambda settings: settings.update(pad_token="</s>"))


def _untrained_token(setup: Setup) -> None:
    """Two new special tokens in tokenizer and template; their embedding, which adapters leave as it
    is, is zero.
    """
    setup.targets = ["q_proj", "v_proj"]
    new = ("<|think|>", "<|done|>")
    size = json.loads((setup.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    edit_json(setup.model / "config.json", lambda config: config.update(vocab_size=size + 64))
    tensors.resize_embedding(setup.model / "model.safetensors", size + 64)

    def add(content: dict[str, Any]) -> None:
        like = content["added_tokens"][-1]
        content["added_tokens"] += [
            like | {"id": size + at, "content": text} for at, text in enumerate(new)
        ]

    edit_json(setup.model / "tokenizer.json", add)
    setup.tokenizer_settings(lambda settings: settings.update(additional_special_tokens=list(new)))
    _template(
        lambda text: text.replace(
            "message['content'] + eos_token",
            f"'{new[0]}' + message['content'] + '{new[1]}' + eos_token",
        )
    )(setup)


def _other_tokenizer(setup: Setup) -> None:
    """Fewer rows in the embedding than the tokenizer has tokens, which the rows use."""
    edit_json(setup.model / "config.json", lambda config: config.update(vocab_size=300))
    tensors.resize_embedding(setup.model / "model.safetensors", 300)


def _adapter_target(setup: Setup) -> None:
    setup.targets = ["q_prj", "v_proj"]


def _experts_without_adapters(setup: Setup) -> None:
    """Adapters on every projection by the names of a dense model, of one whose MLPs are experts."""
    tensors.make_mixture(setup.model, 4)
    setup.targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def _experts_not_quantized(setup: Setup) -> None:
    """Frozen weights in 4 bits, of a model most of whose weights are experts in one tensor."""
    tensors.make_mixture(setup.model, 4)
    setup.targets, setup.base_bits, setup.twist = ["q_proj", "v_proj"], 4, "transformers"


def _zero_rate(setup: Setup) -> None:
    setup.lr = "0.0"


def _beyond_positions(setup: Setup) -> None:
    """Rows longer than what the model was made for, and a limit that lets them pass."""
    _rows(_over_long)(setup)
    setup.max_len = 2048
    edit_json(
        setup.model / "config.json", lambda config: config.update(max_position_embeddings=128)
    )


def _truncated(setup: Setup) -> None:
    path = setup.model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])


def _missing_shard(setup: Setup) -> None:
    tensors.split_with_a_missing_shard(setup.model)


def _flipped_weight(setup: Setup) -> None:
    tensors.flip_exponent_bit(setup.model / "model.safetensors")


def _nan_weight(setup: Setup) -> None:
    tensors.put_nan(setup.model / "model.safetensors")


def _missing_tensor(setup: Setup) -> None:
    tensors.drop_tensor(setup.model / "model.safetensors")


def _earlier_work(setup: Setup) -> None:
    setup.twist = "twice"


def _small_disk(setup: Setup) -> None:
    setup.twist = "small_disk"


def ends_trained(rows: list[list[str]]) -> bool:
    """Every row trains an end-of-sequence token."""
    return bool(rows) and all(any("</s>" in piece for piece in pieces) for pieces in rows)


def only_answers(rows: list[list[str]]) -> bool:
    """What is trained of every row is its answer, and no word of the question or the system's."""
    return bool(rows) and all(
        "times" in "".join(row) and "How many" not in "".join(row) for row in rows
    )


CONFIG, DATA, TEMPLATES, FILES = (
    "config", "rows", "tokens and templates", "files and disk",
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (
    Fault("typo", "key of the batch size misspelled, at the top", CONFIG, _twist("typo")),
    Fault("typo_nested", "key inside a section misspelled", CONFIG, _twist("typo_nested")),
    Fault("wrong_type", "batch size is the word two", CONFIG, _twist("wrong_type")),
    Fault("unknown_recipe", "name of the recipe misspelled", CONFIG, _twist("unknown_recipe")),
    Fault(
        "unknown_format", "name of the data's format misspelled", CONFIG, _twist("unknown_format")
    ),
    Fault("zero_rate", "learning rate 0", CONFIG, _zero_rate),
    Fault(
        "adapter_target",
        "adapters on two modules, the name of one misspelled",
        CONFIG,
        _adapter_target,
    ),
    Fault(
        "experts_without_adapters",
        "adapters by the names of a dense model, on a mixture of experts",
        CONFIG,
        _experts_without_adapters,
    ),
    Fault(
        "experts_not_quantized",
        "frozen weights in 4 bits, of which experts in one tensor would stay in 16",
        CONFIG,
        _experts_not_quantized,
    ),
    Fault("empty_file", "file of rows is empty", DATA, _empty),
    Fault("broken_line", "a line of the rows is cut off", DATA, _broken_line),
    Fault("not_text", "an answer is a number", DATA, _rows(_not_text)),
    Fault("no_answer", "a conversation without an answer", DATA, _rows(_without_answer)),
    Fault("unknown_role", "role misspelled in one row", DATA, _rows(_unknown_role)),
    Fault(
        "over_long", "a row longer than the limit, its answer behind it", DATA, _rows(_over_long)
    ),
    Fault("beyond_positions", "rows longer than the model's positions", DATA, _beyond_positions),
    Fault("duplicates", "every row twice", DATA, _rows(_repeated)),
    Fault("overlap", "validation rows that are trained on", DATA, _overlap),
    Fault("no_end", "template that writes no end token", TEMPLATES, _template(_no_end)),
    Fault("pad_is_eos", "padding token is the end token", TEMPLATES, _pad_is_eos, ends_trained),
    Fault(
        "drops_system",
        "template that leaves out the system's turn",
        TEMPLATES,
        _template(_drops_system),
    ),
    Fault(
        "unmarked",
        "template that does not mark what is trained",
        TEMPLATES,
        _template(_unmarked),
        only_answers,
    ),
    Fault(
        "untrained_token",
        "special tokens whose embedding is zero, with adapters",
        TEMPLATES,
        _untrained_token,
    ),
    Fault(
        "other_tokenizer", "tokenizer with more tokens than the model", TEMPLATES, _other_tokenizer
    ),
    Fault("truncated_weights", "weights file cut short", FILES, _truncated),
    Fault("missing_shard", "index names a file that is not there", FILES, _missing_shard),
    Fault("missing_tensor", "a matrix missing in the weights", FILES, _missing_tensor),
    Fault("flipped_bit", "an exponent bit of a weight flipped", FILES, _flipped_weight),
    Fault("nan_weight", "a weight that is NaN", FILES, _nan_weight),
    Fault("small_disk", "output on a disk too small for the model", FILES, _small_disk),
    Fault("earlier_work", "output folder that holds an earlier run", FILES, _earlier_work),
)

SOUND = Fault("sound", "nothing: the sound run", CONFIG, lambda setup: None)
