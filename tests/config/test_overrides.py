"""The command line: `key=value`, `section={...}`, `~key`, and what is said when it is none of
these.
"""

import pytest

from recipe_lib.config import load_config
from recipe_lib.errors import ConfigError


def test_values(load):
    cfg = load(
        "batch_size: 2\nepochs: 3\n",
        "batch_size=4",
        "optimizer.lr=3e-4",
        "optimizer.betas=[0.8, 0.9]",
        "data.source=a=b # c: *d &e !f",
        "log.run_name=7",
        "log.project='true'",
        "parallel.fsdp_wrap_policy=[model.layers.*, lm_head]",
        "resume=null",
        "compile=true",
        "max_steps= 5 ",
    )
    assert (cfg.batch_size, cfg.epochs, cfg.max_steps, cfg.resume, cfg.compile) == (
        4,
        3,
        5,
        None,
        True,
    )
    assert cfg.optimizer.lr == 3e-4
    assert cfg.optimizer.betas == [0.8, 0.9]
    assert cfg.data.source == "a=b # c: *d &e !f"
    assert (cfg.log.run_name, cfg.log.project) == ("7", "true")
    assert cfg.parallel.fsdp_wrap_policy == ["model.layers.*", "lm_head"]


def test_the_last_one_wins(load):
    assert load("", "epochs=2", "epochs=5").epochs == 5
    assert load("epochs: 9\n", "epochs=2", "~epochs").epochs == 1
    assert load("", "~epochs", "epochs=4").epochs == 4


def test_back_to_the_default(load):
    cfg = load(
        "seed: 1\nclip_grad_norm: 3\noptimizer: {lr: 1, eps: 1e-6}\n",
        "~clip_grad_norm",
        "~optimizer",
        "~loss",
    )
    assert (cfg.seed, cfg.clip_grad_norm) == (1, 1.0)
    assert (cfg.optimizer.lr, cfg.optimizer.eps) == (2e-5, 1e-8)


def test_a_whole_section(load):
    cfg = load("data: {source: x, format: text}\n", "data={source: y, max_samples: 3}", "memory={}")
    assert (cfg.data.source, cfg.data.format, cfg.data.max_samples) == ("y", "text", 3)


def test_entries_of_a_mapping(load):
    text = "data:\n  source: x\n  columns: {instruction: question}\n"
    assert load(text, "data.columns.output=answer").data.columns == {
        "instruction": "question",
        "output": "answer",
    }
    assert load(text, "data.columns={output: answer}").data.columns == {"output": "answer"}
    assert load(text, "data.columns.a.b=c").data.columns == {"instruction": "question", "a.b": "c"}
    assert load(text, "~data.columns").data.columns == {}


INTEGER = "expected an integer >= 1"
TRACKERS = "expected a list [...] of tensorboard, wandb, trackio"

WRONG = [
    ("batch_size=0", f"found 0, {INTEGER}"),
    ("batch_size=", f"found nothing, {INTEGER}"),
    ("batch_size=null", f"found null, {INTEGER}"),
    ("batch_size='3'", f"found '3' in quotes, {INTEGER}; remove the quotes"),
    ("batch_size={a: 3}", f"found a section of keys, {INTEGER}"),
    ("max_steps=none", "found 'none', expected an integer >= 1, or null; write null"),
    ("max_steps=", "found nothing, expected an integer >= 1, or null"),
    ("log.run_name=", "found an empty text, expected text, or null"),
    ("optimizer.lr=nan", "found nan, expected a number > 0; it has to be finite"),
    ("log.trackers=wandb", f"found 'wandb', {TRACKERS}"),
    ("log.trackers=[wandb", "not valid YAML: a list `[...]` is not closed, or lacks a comma"),
    ("log.trackers=[&a wandb, *a]", "found the anchor &a; anchors are refused, remove it"),
    ("log.trackers=[!!str wandb]", "found the tag !!str; tags are refused, remove it"),
    ("resume=${HOME}/x", "found '${HOME}/x': there is no key HOME; `tune cat CONFIG --describe` lists all keys"),
    ("resume=a\nb", "found 'a\\nb', expected text, or null; a text is one line of printable letters"),
    ("bach_size=3", "unknown key; did you mean batch_size?"),
    ("lr=3", "unknown key; did you mean optimizer.lr?"),
    ("optimizer.lrr=3", "unknown key; did you mean optimizer.lr?"),
    ("optimiser.lr=3", "unknown key; did you mean optimizer.lr?"),
    ("optimizer.zzzz=3", "unknown key; the keys of optimizer are name, lr, weight_decay, betas, eps, momentum, "
     "state_bits, master_weights, stochastic_rounding, implementation"),
    ("zzzz=3", "unknown key; `tune cat CONFIG --describe` lists all keys"),
    ("=3", "unknown key; `tune cat CONFIG --describe` lists all keys"),
    ("optimizer=adamw", "found 'adamw', expected keys of the section, as in optimizer.name=VALUE"),
    ("optimizer=[adamw]", "found a list, expected keys of the section, as in optimizer.name=VALUE"),
    ("optimizer={lrr: 3}", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    ("optimizer={lr: 0}", "optimizer.lr: found 0, expected a number > 0"),
    ("data.columns.a=[b]", "found a list, expected a mapping {name: text}"),
    ("--epochs=3", "overrides have no - in front; write epochs=3"),
    ("+epochs=3", "overrides have no + in front; write epochs=3"),
    ("epochs", "expected key=value, or ~key for the default; a further config is --config FILE"),
    ("--epochs", "expected key=value, or ~key for the default; a further config is --config FILE"),
    ("epochs: 3", "expected key=value, or ~key for the default; a further config is --config FILE"),
    ("optimizer", "expected key=value, or ~key for the default; a further config is --config FILE"),
    ("", "expected key=value, or ~key for the default; a further config is --config FILE"),
    ("~epochs=3", "~ goes back to the default and takes no value; write ~epochs"),
    ("~epoch", "unknown key; did you mean epochs?"),
    ("~", "unknown key; `tune cat CONFIG --describe` lists all keys"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "line"), WRONG, ids=[repr(override) for override, _ in WRONG])
def test_wrong_override(faults, override, line):
    shown = override.replace("\n", "\\n")
    assert faults("", override)[0] == f"command line: {shown}: {line}"


def test_a_tag_in_a_section_is_told_once(faults):
    assert faults("", "data={source: !!python/object/apply:os.system [ls]}") == [
        "command line: data={source: !!python/object/apply:os.system [ls]}: source: found the tag "
        "!!python/object/apply:os.system; tags are refused, remove it"
    ]


def test_several_at_once(faults):
    assert len(faults("", "epochs=0", "batch_size=x", "zzzz=1", "seed")) == 4


def test_a_file_fault_is_told_although_it_is_overridden(faults):
    assert faults("epochs: 0\n", "epochs=3") == [
        "c.yaml:1: epochs: found 0, expected an integer >= 1"
    ]


def test_path_given_as_text(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^/no/such\.yaml: no such config; `tune ls` lists the names, or"
    ):
        load_config("/no/such.yaml")
