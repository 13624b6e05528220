"""Files that are no config: not there, not text, not YAML, or YAML with what a config must not
hold.
"""

import os
import time

import pytest

from recipe_lib.config import load_config
from recipe_lib.config.read_yaml import MAX_BYTES
from recipe_lib.errors import ConfigError

SYNTAX = [
    ("a: b: c\n", 1, "a second `: ` in a value, or a line indented too far; quote text with `: `"),
    (
        "seed: 3\n  batch_size: 4\n",
        2,
        "a second `: ` in a value, or a line indented too far; quote text with `: `",
    ),
    ("data:\n  source: x\n format: y\n", 3, "the indentation does not fit the lines above"),
    ("data:\n\tsource: x\n", 2, "indented with a tab; use spaces"),
    (
        "seed: 3\ndata: {source: x\nepochs: 3\n",
        2,
        "a mapping `{...}` is not closed, or lacks a comma",
    ),
    ("log:\n  trackers: [wandb\nseed: 3\n", 2, "a list `[...]` is not closed, or lacks a comma"),
    ("seed: 3\nresume: 'abc\nepochs: 3\n", 2, "a quote is not closed"),
    ('resume: "\\q"\n', 1, "an unknown escape after a backslash; use single quotes"),
    ("resume: @latest\n", 1, "a value that begins with a special letter; put it in quotes"),
    ("resume: `x`\n", 1, "a value that begins with a special letter; put it in quotes"),
    (
        "seed: 3\nepochs\n",
        2,
        "a key without `: ` after it, or a quote or bracket that is not closed",
    ),
    ("a: [1,\n b: {", 2, "a mapping `{...}` is not closed, or lacks a comma"),
    ("seed: 3\na: [{b: 1}, [2],\n\n", 2, "a list `[...]` is not closed, or lacks a comma"),
    ("data: {source: ???}\n", 1, "a list or mapping with an empty place; put the value in quotes"),
    (
        "seed: 3\n...\nfoo\n",
        3,
        "the indentation does not fit the lines above, or text follows a closed value",
    ),
    ("seed: 3\nresume: a\x07b\n", 2, "found the control character 0x07; remove it"),
    ("\x00", 1, "found the control character 0x00; remove it"),
]


@pytest.mark.parametrize("pure", [False, True], ids=["libyaml", "pure"])
@pytest.mark.parametrize(
    ("text", "line", "words"), SYNTAX, ids=[repr(text) for text, _, _ in SYNTAX]
)
def test_not_yaml(faults, monkeypatch, text, line, words, pure):
    import yaml

    if pure:
        monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert faults(text, whole=True) == [f"c.yaml:{line}: not valid YAML: {words}"]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            b"seed: 3\nresume: caf\xe9\n",
            "c.yaml:2: not UTF-8 text: found the byte 0xe9; save the file as UTF-8",
        ),
        (
            "seed: 3".encode("utf-16"),
            "c.yaml:1: not UTF-8 text: found the byte 0xff; save the file as UTF-8",
        ),
        (
            b"x" * (MAX_BYTES + 1),
            "c.yaml: larger than 1 MiB; a config holds a few dozen lines (is this a data file?)",
        ),
        (b"- a\n- b\n", "c.yaml:1: found a list, expected lines of `key: value`"),
        (b"# purpose\nhello\n", "c.yaml:2: found 'hello', expected lines of `key: value`"),
        (b"[" * 5000, "c.yaml:1: nested more than 20 deep; a config has sections of keys"),
        (
            b"a: " + b"{a: " * 5000,
            "c.yaml:1: nested more than 20 deep; a config has sections of keys",
        ),
    ],
)
def test_not_a_config(faults, data, line):
    assert faults(data) == [line]


REFUSED = [
    ("seed: &x 1\nepochs: *x\n", ["1: seed: found the anchor &x; anchors are refused, remove it",
                                  "2: epochs: found the alias *x; aliases are refused, write the value again"]),
    ("<<: *x\n", ["1: <<: found the alias *x; aliases are refused, write the value again"]),
    ("seed: !!int 3\n", ["1: seed: found the tag !!int; tags are refused, remove it"]),
    ("resume: !!python/object/apply:os.system [ls]\n",
     ["1: resume: found the tag !!python/object/apply:os.system; tags are refused, remove it"]),
    ("log: !mine {run_name: x}\n", ["1: log: found the tag !mine; tags are refused, remove it"]),
    ("log:\n  trackers: [!!str wandb]\n", ["2: log.trackers[0]: found the tag !!str; tags are refused, remove it"]),
    ("seed: 1\nepochs: 2\nseed: 3\n", ["3: seed: set twice, first on line 1; remove one of the two"]),
    ("log:\n  keep: 3\nlog:\n  run_name: x\n", ["3: log: set twice, first on line 1; remove one of the two"]),
    ("optimizer: {lr: 1, lr: 2}\n", ["1: optimizer.lr: set twice, first on line 1; remove one of the two"]),
    ("? [a]\n: b\n", ["1: found a list as a key; a key is a word"]),
    ("resume: ${oc.env:HF_TOKEN}\n",
     ["1: resume: found '${oc.env:HF_TOKEN}', expected ${section.key} of this config; environment variables and "
      "resolvers are refused, write the value itself"]),
    ("resume: '${output_dirs}/x'\n",
     ["1: resume: found '${output_dirs}/x': there is no key output_dirs; did you mean output_dir?"]),
    ("parallel: {fsdp_wrap_policy: ['${x}']}\n",
     ["1: parallel.fsdp_wrap_policy: found '${x}': there is no key x; `tune cat CONFIG --describe` lists all keys"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lines"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused_yaml(faults, text, lines):
    assert faults(text) == [f"c.yaml:{line}" for line in lines]


def test_interpolation_in_a_mapping(faults):
    assert faults("data:\n  source: x\n  columns: {'${x}': b}\n") == [
        "c.yaml:3: data.columns: found '${x}'; interpolation is refused, write the name itself"
    ]


def test_a_second_document(faults):
    text = "model: {path: x}\ndata: {source: x}\n---\nseed: 4\n"
    assert faults(text) == [
        "c.yaml:3: a second document begins here (`---`); a config is one document"
    ]


def test_hostile_yaml_runs_nothing(faults, monkeypatch):
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    faults("resume: !!python/object/apply:os.system ['echo hacked']\n")
    faults("resume: !!python/object/new:os.system ['echo hacked']\n")
    faults("!!python/object/apply:os.system ['echo hacked']\n", whole=True)
    assert ran == []


def test_an_alias_bomb_costs_nothing(faults):
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    before = time.process_time()
    lines = faults("\n".join(rows) + "\n")
    assert time.process_time() - before < 2
    assert len(lines) == 51
    assert lines[-1] == "the first 50 faults are shown; there are more"


def test_a_megabyte_of_unknown_keys(faults):
    before = time.process_time()
    lines = faults("".join(f"key_{number}: 1\n" for number in range(70_000)))
    assert time.process_time() - before < 5
    assert len(lines) == 51


def test_empty_files_are_all_defaults(faults, load):
    for text in ("", "# nothing\n", "---\n"):
        assert [line.partition(": ")[2].partition(":")[0] for line in faults(text, whole=True)] == [
            "model.path, model.preset",
            "data.source, data.sources",
        ]
    assert load("log:\nmemory: {}\n") == load("")


def test_bom_and_windows_lines(load):
    assert load("\ufeffseed: 3\r\nepochs: 2\r\n").epochs == 2


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 3\n")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"
