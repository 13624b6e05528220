"""What training wrote is what transformers' `apply_chat_template` writes with every export, and its
ids are the ids that were trained.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from recipe_lib.cli.main import main
from tests.recipes.runs import DPO, FULL, LORA, build_story_arguments, run_here
from tests.tokenizers.made import CHATML

FILE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token if"
    " m['role'] == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CONVERSATIONS = [
    [("user", "Hi"), ("assistant", "Hello, you.")],
    [
        ("system", "Be  kind.\n"),
        ("user", "  Who?\nYou? "),
        ("assistant", "Me."),
        ("user", "So"),
        ("assistant", "it is."),
    ],
    [("system", "Ünï 漢 'q' \"d\" {{ x }} {% if %}"), ("user", "a\\nb"), ("assistant", "c\td")],
]
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}


def as_messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def row(turns: list[tuple[str, str]], form: str) -> dict[str, Any]:
    """A conversation as a sample of the format."""
    if form == "sharegpt":
        return {"conversations": [{"from": SPEAKERS[role], "value": text} for role, text in turns]}
    if form == "alpaca":
        said = dict(turns)
        found = {"instruction": said["user"], "output": said["assistant"]}
        return found | ({"system": said["system"]} if "system" in said else {})
    if form == "preference":
        *before, (_, answer) = turns
        return {"prompt": as_messages(before), "chosen": answer, "rejected": f"not {answer}"}
    return {"messages": as_messages(turns)}


def conversations(form: str) -> list[list[tuple[str, str]]]:
    return [turns for turns in CONVERSATIONS if form != "alpaca" or len(turns) < 4]


def rows_of(folder: Path, form: str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row(turns, form)) + "\n" for turns in conversations(form)))
    return file


def train(realdata: Path, folder: Path, form: str, recipe: str, *more: str) -> Any:
    words = [
        f"data.source={rows_of(folder, form)}",
        f"data.format={form}",
        "max_steps=1",
        "batch_size=1",
        f"recipe={recipe}",
        *more,
    ]
    run = run_here(
        build_story_arguments(
            realdata,
            folder / "run",
            "data.shuffle=false",
            "data.cache=false",
            "max_seq_len=256",
            *words,
        ),
        recipe=recipe,
    )
    assert run.code == 0, run.said
    return run


def trained_ids(run: Any, form: str) -> list[list[int]]:
    """The ids of each sample's sequence, without anything that was padded; of a pair those with the
    chosen answer.
    """
    dataset = run.recipe.data.dataset
    step = 2 if form == "preference" else 1
    found = [dataset[number] for number in range(0, len(dataset), step)]
    return [[*map(int, sequence.tokens), int(sequence.labels[-1])] for sequence in found]


def check(export: Path, run: Any, form: str, begins: str = "") -> None:
    """Text and ids of transformers are those of training, for whole conversations and for
    prompts.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    for turns, ids in zip(conversations(form), trained_ids(run, form), strict=True):
        messages = as_messages(turns)
        found = theirs.apply_chat_template(messages, return_dict=False)
        assert (
            found[: len(ids)] == ids and len(found) - len(ids) <= 1
        )  # a last line end is nothing to train
        text = theirs.apply_chat_template(messages, tokenize=False)
        assert text.startswith(begins) and text.count("<s>") == 1
        prompt = theirs.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        assert prompt == ids[: len(prompt)]


def plain(turns: list[tuple[str, str]]) -> str:
    """The built-in template once more, written for this test."""
    shown = {"system": "{}\n\n", "user": "User:\n{}\n\nAssistant:\n", "assistant": "{}</s>"}
    return "<s>" + "".join(shown[role].replace("{}", text) for role, text in turns)


@pytest.mark.parametrize(("recipe", "form"), [(FULL, "sharegpt"), (LORA, "messages")])
def test_plain(recipe: str, form: str, realdata: Path, tmp_path: Path) -> None:
    more = ["lora.merge_on_save=true"] if recipe == LORA else []
    run = train(realdata, tmp_path, form, recipe, *more)
    for export in ["model"] if recipe == FULL else ["adapter", "model"]:
        check(tmp_path / "run" / export, run, form, begins="<s>")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / export)
        for turns in conversations(form):
            assert theirs.apply_chat_template(as_messages(turns), tokenize=False) == plain(turns)


DATED = (
    "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{"
    ' bos_token }}Today is {{ day }}, {{ strftime_now( "%Y" ) }}.\n'
    + FILE.removeprefix("{{ bos_token }}")
)


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_the_date_of_training_stays(given: bool, realdata: Path, tmp_path: Path) -> None:
    """Whether the template is the tokenizer's own or a file."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for path in (realdata / "stories260K-hf").glob("*token*"):
        (tokenizer / path.name).write_bytes(path.read_bytes())
    template = tmp_path / "dated.jinja" if given else tokenizer / "chat_template.jinja"
    template.write_text(DATED)
    chosen = [f"tokenizer.chat_template={template}"] if given else []
    run = train(
        realdata,
        tmp_path,
        "messages",
        LORA,
        f"tokenizer.path={tokenizer}",
        "lora.merge_on_save=true",
        *chosen,
    )
    assert any("26 Jul 2024 in training" in line for line in run.said)
    for export in ("adapter", "model"):
        check(tmp_path / "run" / export, run, "messages", begins="<s>Today is 26 Jul 2024, 2024.\n")
        config = json.loads((tmp_path / "run" / export / "tokenizer_config.json").read_text())
        assert "strftime_now(" not in config["chat_template"]


@pytest.mark.parametrize("trainable", ["all", "adapters"])
def test_preference(trainable: str, realdata: Path, tmp_path: Path) -> None:
    run = train(realdata, tmp_path, "preference", DPO, f"dpo.trainable={trainable}")
    check(
        tmp_path / "run" / ("model" if trainable == "all" else "adapter"),
        run,
        "preference",
        begins="<s>",
    )


@pytest.mark.slow
def test_exports_of_a_state(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saves = ["checkpoint.save_every_n_steps=1", "checkpoint.save_model=false"]
    run = train(realdata, tmp_path, "messages", LORA, *saves)
    assert (
        main(
            [
                "export",
                str(tmp_path / "run/state/step_1"),
                "--merge",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    check(tmp_path / "out", run, "messages", begins="<s>")


def test_the_model_of_a_state(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    saves = ["checkpoint.save_every_n_steps=1", "checkpoint.save_model=false"]
    run = train(realdata, tmp_path, "messages", FULL, *saves)
    assert main(["export", str(tmp_path / "run"), "--hf", "--out", str(tmp_path / "out")]) == 0
    check(tmp_path / "out", run, "messages", begins="<s>")


@pytest.mark.slow
def test_an_adapter_without_its_run_keeps_it(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = train(realdata, tmp_path, "messages", LORA)
    (tmp_path / "run" / "adapter").rename(tmp_path / "alone")
    assert main(["export", str(tmp_path / "alone"), "--merge", "--out", str(tmp_path / "out")]) == 0
    check(tmp_path / "out", run, "messages", begins="<s>")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["alpaca"])
def test_a_template_of_ones_own(form: str, realdata: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(FILE)
    run = train(realdata, tmp_path, form, LORA, f"tokenizer.chat_template={file}")
    export = tmp_path / "run" / "adapter"
    assert json.loads((export / "tokenizer_config.json").read_text())["chat_template"] == FILE
    assert (export / "chat_template.jinja").read_text() == FILE
    check(export, run, form, begins="<s>[")


def with_template(realdata: Path, folder: Path, template: str) -> Path:
    """The tokenizer of the stories with a chat template in its settings."""
    folder.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (folder / name).write_bytes((realdata / "stories260K-hf" / name).read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": template
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_tokenizers_own_template_stays(realdata: Path, tmp_path: Path) -> None:
    own = with_template(realdata, tmp_path / "own", FILE)
    run = train(realdata, tmp_path, "messages", LORA, f"tokenizer.path={own}")
    check(tmp_path / "run" / "adapter", run, "messages", begins="<s>[")


def test_plain_in_place_of_the_tokenizers_own(realdata: Path, tmp_path: Path) -> None:
    own = with_template(realdata, tmp_path / "own", CHATML)
    (own / "chat_template.jinja").write_text(CHATML)
    run = train(
        realdata, tmp_path, "messages", LORA, f"tokenizer.path={own}", "data.template=plain"
    )
    check(tmp_path / "run" / "adapter", run, "messages", begins="<s>")
    assert CHATML not in (tmp_path / "run" / "adapter" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("form", ["text", "prompt_completion"])
def test_no_template_was_trained(form: str, realdata: Path, tmp_path: Path) -> None:
    own = with_template(realdata, tmp_path / "own", CHATML)
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"text": "Once upon a time.", "prompt": "Once", "completion": " upon"}) + "\n"
    )
    words = [
        f"data.source={file}",
        f"data.format={form}",
        "max_steps=1",
        "batch_size=1",
        f"tokenizer.path={own}",
        f"recipe={LORA}",
    ]
    run = run_here(
        build_story_arguments(realdata, tmp_path / "run", "data.cache=false", *words), recipe=LORA
    )
    assert run.code == 0, run.said
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    assert theirs.chat_template == CHATML
