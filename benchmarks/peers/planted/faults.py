"""List the mistakes that are planted into a sound training run, to see if a tool tells of them.

`playing.py` calls `Fault.plant` with a `Setup` (a run in no tool's words: folder, model, rows,
settings) before the one command that is judged. Rows are conversations; where one row is damaged,
it is number 7 of 24. `Setup.twist` names a mistake in the config, which each tool spells its own
way. `states.py` has faults that take two runs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.planted import tensors
from benchmarks.peers.planted.ground import Row, Setup, build_rows, edit_json, write_rows


@dataclass(frozen=True)
class Fault:
    """Hold a fault of one run."""

    name: str  # for files and `--only`
    title: str  # what is wrong, as the page says it
    group: str  # of the page's table
    plant: Callable[[Setup], None]  # changes the setup and its files
    # Returns True if the trained texts (a list of pieces for each row) are as they should be. None
    # of a fault that does not show in them.
    trained: Callable[[list[list[str]]], bool] | None = None


def _make_twist(name: str) -> Callable[[Setup], None]:
    """Return a `plant` for a mistake in the config, or in how the run is made."""

    def plant(setup: Setup) -> None:
        setup.twist = name

    return plant


def _change_rows(change: Callable[[list[Row]], list[Row]]) -> Callable[[Setup], None]:
    """Return a `plant` that changes the training rows."""

    def plant(setup: Setup) -> None:
        setup.rows = change(setup.rows)
        setup.write(setup.rows)

    return plant


# What the faults of FAULTS do, whose titles say it in words.


def _remove_answer(rows: list[Row]) -> list[Row]:
    rows[7]["messages"].pop()
    return rows


def _use_unknown_role(rows: list[Row]) -> list[Row]:
    rows[7]["messages"][2]["role"] = "asistant"
    return rows


def _lengthen_rows(rows: list[Row]) -> list[Row]:
    # More tokens than `Setup.max_len`.
    rows[7]["messages"][1]["content"] += " Count them one after the other, please." * 60
    return rows


def _replace_text(rows: list[Row]) -> list[Row]:
    rows[7]["messages"][2]["content"] = 28
    return rows


def _repeat_rows(rows: list[Row]) -> list[Row]:
    """Return as many rows, each twice."""
    return rows[:12] + rows[:12]


def _break_line(setup: Setup) -> None:
    lines = setup.train.read_text(encoding="utf-8").splitlines()
    lines[7] = lines[7][:40]  # inside the JSON object
    setup.train.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _empty(setup: Setup) -> None:
    setup.rows = []
    setup.train.write_text("", encoding="utf-8")


def _overlap(setup: Setup) -> None:
    """Validate on three training rows and three others."""
    setup.validate = True
    write_rows(setup.held_out, setup.rows[:3] + build_rows(24, 27))


def _change_template(change: Callable[[str], str]) -> Callable[[Setup], None]:
    """Return a `plant` that changes the chat template."""

    def plant(setup: Setup) -> None:
        def edit(settings: dict[str, Any]) -> None:
            template = change(settings["chat_template"])
            assert template != settings["chat_template"]  # else nothing would be planted
            settings["chat_template"] = template

        setup.edit_tokenizer_config(edit)

    return plant


def _remove_end(text: str) -> str:
    return text.replace(" + eos_token", "")


def _drop_system(text: str) -> str:
    return text.replace("in messages %}", "in messages if message['role'] != 'system' %}")


def _remove_marks(text: str) -> str:
    return text.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _pad_is_eos(setup: Setup) -> None:
    setup.edit_tokenizer_config(lambda settings: settings.update(pad_token="</s>"))


def _add_untrained_tokens(setup: Setup) -> None:
    """Add two special tokens with embeddings of zero, which adapters on other modules never train.

    The chat template writes them around every message.
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
    setup.edit_tokenizer_config(
        lambda settings: settings.update(additional_special_tokens=list(new))
    )
    _change_template(
        lambda text: text.replace(
            "message['content'] + eos_token",
            f"'{new[0]}' + message['content'] + '{new[1]}' + eos_token",
        )
    )(setup)


def _exchange_tokenizer(setup: Setup) -> None:
    """Give the embedding fewer rows than the tokenizer has tokens; the training rows use more."""
    edit_json(setup.model / "config.json", lambda config: config.update(vocab_size=300))
    tensors.resize_embedding(setup.model / "model.safetensors", 300)


def _misname_adapter_target(setup: Setup) -> None:
    setup.targets = ["q_prj", "v_proj"]


def _leave_experts_without_adapters(setup: Setup) -> None:
    """Put adapters on modules by a dense model's names, where the MLPs are experts."""
    tensors.make_mixture(setup.model, 4)
    setup.targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def _leave_experts_unquantized(setup: Setup) -> None:
    """Quantize frozen weights to 4 bits where most of them are experts in one tensor.

    Tools that quantize linears alone leave that tensor in 16 bits.
    """
    tensors.make_mixture(setup.model, 4)
    setup.targets = ["q_proj", "v_proj"]
    setup.base_bits = 4
    # Ours then trains transformers' model, whose experts are such a tensor.
    setup.twist = "transformers"


def _zero_rate(setup: Setup) -> None:
    setup.lr = "0.0"


def _exceed_positions(setup: Setup) -> None:
    """Make a row longer than the model has positions, and raise the limit that would cut it."""
    _change_rows(_lengthen_rows)(setup)
    setup.max_len = 2048
    edit_json(
        setup.model / "config.json", lambda config: config.update(max_position_embeddings=128)
    )


def _truncate_weights(setup: Setup) -> None:
    path = setup.model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])


def _remove_shard(setup: Setup) -> None:
    tensors.split_with_a_missing_shard(setup.model)


def _flip_weight(setup: Setup) -> None:
    tensors.flip_exponent_bit(setup.model / "model.safetensors")


def _write_nan_weight(setup: Setup) -> None:
    tensors.put_nan(setup.model / "model.safetensors")


def _remove_tensor(setup: Setup) -> None:
    tensors.drop_tensor(setup.model / "model.safetensors")


def _leave_earlier_work(setup: Setup) -> None:
    """Have the sound run made first, into the same output folder."""
    setup.twist = "twice"


def _limit_disk(setup: Setup) -> None:
    """Have a file system of 400 kB mounted as the output folder."""
    setup.twist = "small_disk"


def are_ends_trained(rows: list[list[str]]) -> bool:
    """Return True if every row trains an end-of-sequence token.

    rows: the trained texts, a list of pieces each.
    """
    return bool(rows) and all(any("</s>" in piece for piece in pieces) for pieces in rows)


def are_only_answers_trained(rows: list[list[str]]) -> bool:
    """Return True if every row trains its answer, and nothing of the question.

    rows: the trained texts, a list of pieces each.
    """
    # Every answer has `times` in it and every question `How many`.
    return bool(rows) and all(
        "times" in "".join(row) and "How many" not in "".join(row) for row in rows
    )


# Groups of the page's table.
CONFIG = "config"
DATA = "rows"
TEMPLATES = "tokens and templates"
FILES = "files and disk"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "typo",
        title="key of the batch size misspelled, at the top",
        group=CONFIG,
        plant=_make_twist("typo"),
    ),
    Fault(
        "typo_nested",
        title="key inside a section misspelled",
        group=CONFIG,
        plant=_make_twist("typo_nested"),
    ),
    Fault(
        "wrong_type",
        title="batch size is the word two",
        group=CONFIG,
        plant=_make_twist("wrong_type"),
    ),
    Fault(
        "unknown_recipe",
        title="name of the recipe misspelled",
        group=CONFIG,
        plant=_make_twist("unknown_recipe"),
    ),
    Fault(
        "unknown_format",
        title="name of the data's format misspelled",
        group=CONFIG,
        plant=_make_twist("unknown_format"),
    ),
    Fault("zero_rate", title="learning rate 0", group=CONFIG, plant=_zero_rate),
    Fault(
        "adapter_target",
        title="adapters on two modules, the name of one misspelled",
        group=CONFIG,
        plant=_misname_adapter_target,
    ),
    Fault(
        "experts_without_adapters",
        title="adapters by the names of a dense model, on a mixture of experts",
        group=CONFIG,
        plant=_leave_experts_without_adapters,
    ),
    Fault(
        "experts_not_quantized",
        title="frozen weights in 4 bits, of which experts in one tensor would stay in 16",
        group=CONFIG,
        plant=_leave_experts_unquantized,
    ),
    Fault("empty_file", title="file of rows is empty", group=DATA, plant=_empty),
    Fault("broken_line", title="a line of the rows is cut off", group=DATA, plant=_break_line),
    Fault("not_text", title="an answer is a number", group=DATA, plant=_change_rows(_replace_text)),
    Fault(
        "no_answer",
        title="a conversation without an answer",
        group=DATA,
        plant=_change_rows(_remove_answer),
    ),
    Fault(
        "unknown_role",
        title="role misspelled in one row",
        group=DATA,
        plant=_change_rows(_use_unknown_role),
    ),
    Fault(
        "over_long",
        title="a row longer than the limit, its answer behind it",
        group=DATA,
        plant=_change_rows(_lengthen_rows),
    ),
    Fault(
        "beyond_positions",
        title="rows longer than the model's positions",
        group=DATA,
        plant=_exceed_positions,
    ),
    Fault("duplicates", title="every row twice", group=DATA, plant=_change_rows(_repeat_rows)),
    Fault("overlap", title="validation rows that are trained on", group=DATA, plant=_overlap),
    Fault(
        "no_end",
        title="template that writes no end token",
        group=TEMPLATES,
        plant=_change_template(_remove_end),
    ),
    Fault(
        "pad_is_eos",
        title="padding token is the end token",
        group=TEMPLATES,
        plant=_pad_is_eos,
        trained=are_ends_trained,
    ),
    Fault(
        "drops_system",
        title="template that leaves out the system's turn",
        group=TEMPLATES,
        plant=_change_template(_drop_system),
    ),
    Fault(
        "unmarked",
        title="template that does not mark what is trained",
        group=TEMPLATES,
        plant=_change_template(_remove_marks),
        trained=are_only_answers_trained,
    ),
    Fault(
        "untrained_token",
        title="special tokens whose embedding is zero, with adapters",
        group=TEMPLATES,
        plant=_add_untrained_tokens,
    ),
    Fault(
        "other_tokenizer",
        title="tokenizer with more tokens than the model",
        group=TEMPLATES,
        plant=_exchange_tokenizer,
    ),
    Fault(
        "truncated_weights", title="weights file cut short", group=FILES, plant=_truncate_weights
    ),
    Fault(
        "missing_shard",
        title="index names a file that is not there",
        group=FILES,
        plant=_remove_shard,
    ),
    Fault(
        "missing_tensor", title="a matrix missing in the weights", group=FILES, plant=_remove_tensor
    ),
    Fault(
        "flipped_bit", title="an exponent bit of a weight flipped", group=FILES, plant=_flip_weight
    ),
    Fault("nan_weight", title="a weight that is NaN", group=FILES, plant=_write_nan_weight),
    Fault(
        "small_disk",
        title="output on a disk too small for the model",
        group=FILES,
        plant=_limit_disk,
    ),
    Fault(
        "earlier_work",
        title="output folder that holds an earlier run",
        group=FILES,
        plant=_leave_earlier_work,
    ),
)

SOUND = Fault("sound", title="nothing: the sound run", group=CONFIG, plant=lambda setup: None)
