"""What the model is never shown, and what it is shown twice: messages that a template leaves out,
rows of both sets.
"""

import numpy as np

from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, ValidationConfig
from recipe_lib.data import build_dataset, build_validation_dataset, warn_of_overlap
from recipe_lib.data.inspect import inspect_datasets
from recipe_lib.tokenizers import load_tokenizer
from tests.tokenizers.made import write_json

TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] | trim) + '<|im_end|>\\n' }}"
WHOLE = f"{{% for m in messages %}}{TURN}{{% endfor %}}"


def rows():
    def talk(*turns):
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    return (
        talk(("user", "Hi!"), ("assistant", "Hello.")),
        talk(("system", "Be  brief.\n"), ("user", " 2+2?"), ("assistant", "4")),
        talk(("system", ""), ("user", "3+3?"), ("assistant", "6")),
    )


def unseen(tmp_path, rows_file, template):
    tokenizer = load_tokenizer(write_json(tmp_path, template=template))
    dataset = build_dataset(DataConfig(source=rows_file(*rows()), format="messages"), tokenizer, 64)
    findings = {
        finding.name: finding.count
        for finding in inspect_datasets(dataset, None, 64, None).findings
    }
    assert findings.get("unseen-messages", 0) == dataset.report.unseen_samples
    return dataset.report


def test_a_system_message_that_is_left_out_is_told(tmp_path, rows_file):
    report = unseen(tmp_path, rows_file, WHOLE)
    assert report.unseen_samples == 0 and not any(
        "leaves out" in line for line in report.format_lines()
    )
    report = unseen(
        tmp_path, rows_file, WHOLE.replace("in messages", "in messages if m['role'] != 'system'")
    )
    assert report.unseen_samples == 1  # an empty one is not missed
    (line,) = [line for line in report.format_lines() if "leaves out" in line]
    assert line.startswith(
        "warning: data: in 1 samples the chat template leaves out a system's or user's message"
    )


def test_a_question_that_is_left_out_is_told(tmp_path, rows_file):
    start = "{{ '<|im_start|>assistant\\n' }}"
    only = f"{{% for m in messages if m['role'] == 'assistant' %}}{TURN}{{% endfor %}}"
    report = unseen(
        tmp_path, rows_file, f"x\n{only}{{% if add_generation_prompt %}}{start}{{% endif %}}"
    )
    assert report.unseen_samples == 3


def test_validation_rows_that_are_trained_on_are_told(plain, rows_file, said):
    train, held_out = (
        rows_file(*rows()),
        rows_file(rows()[1], {"messages": rows()[0]["messages"] * 2}, name="h.jsonl"),
    )
    cfg = FullFinetuneConfig(data=DataConfig(source=train, format="messages"), max_seq_len=64)
    dataset = build_dataset(cfg.data, plain, 64)
    warn_of_overlap(dataset, None)
    for number, source in enumerate(
        (held_out, rows_file({"messages": rows()[0]["messages"] * 2}, name="n.jsonl"))
    ):
        cfg.validation = ValidationConfig(source=source)
        validation = build_validation_dataset(cfg, plain)
        assert np.isin(validation.digests, dataset.digests).sum() == 1 - number
        warn_of_overlap(dataset, validation)
    (line,) = [line for line in said if line.startswith("warning:")]
    assert (
        line == f"warning: 1 of 2 validation sequences of {held_out} are training sequences as well"
        f" (first: {held_out}:1); take them out of one"
    )
