"""The one table of settings that do not go together, with the reason and the remedy.

`load_config` refuses by it, `docs/config.md` prints it, and the tests walk it. A combination that only the
world (ranks, devices, files) can decide is not here: it is checked where the world is known.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Incompatible:
    """One combination.

    applies: true for a config that has it. keys: those it is about; an error names the line of the last one set.
    unread: the key that would have no effect; if given, the combination is one only where that key is not left
    at its default. example: overrides that bring it about on a config with a checkpoint and local data.
    """

    name: str
    applies: Callable[[Any], bool]
    keys: tuple[str, ...]
    reason: str
    remedy: str
    example: tuple[str, ...]
    unread: str | None = None

    @property
    def line(self) -> str:
        """`model.path, model.preset: both are set; keep ...`."""
        return f"{', '.join(self.keys)}: {self.reason}; {self.remedy}"


def _from_hub(source: str | None) -> bool:
    return source is not None and source.startswith("hub:")


INCOMPATIBLE: tuple[Incompatible, ...] = (
    Incompatible(
        "no model",
        lambda cfg: cfg.model.path is None and cfg.model.preset is None,
        ("model.path", "model.preset"),
        "neither is set",
        "set model.path to a checkpoint, or model.preset to an architecture with random weights",
        ("~model.path",),
    ),
    Incompatible(
        "two models",
        lambda cfg: cfg.model.path is not None and cfg.model.preset is not None,
        ("model.path", "model.preset"),
        "both are set",
        "keep one: model.path trains a checkpoint, model.preset starts from random weights (~KEY removes KEY)",
        ("model.preset=llama3/8B",),
    ),
    Incompatible(
        "no tokenizer",
        lambda cfg: cfg.model.path is None and cfg.model.preset is not None and cfg.tokenizer.path is None,
        ("model.preset", "tokenizer.path"),
        "an architecture brings no tokenizer",
        "set tokenizer.path to a folder or file that has one",
        ("~model.path", "model.preset=llama3/8B"),
    ),
    Incompatible(
        "no data",
        lambda cfg: cfg.data.source is None,
        ("data.source",),
        "is not set",
        "set it to a file or folder of rows (.json, .jsonl, .txt), or to hub:OWNER/NAME",
        ("~data.source",),
    ),
    Incompatible(
        "split of a local file",
        lambda cfg: not _from_hub(cfg.data.source) and not _from_hub(cfg.validation.source),
        ("data.source", "data.split"),
        "a local file has no splits",
        "remove data.split, or name the split's own file",
        ("data.split=test",),
        unread="data.split",
    ),
    Incompatible(
        "template without turns",
        lambda cfg: {cfg.data.format, cfg.validation.format or cfg.data.format} <= {"text", "prompt_completion"},
        ("data.format", "data.template"),
        "rows of text or prompt_completion have no turns to put in a template",
        "remove data.template, or choose a format that has turns",
        ("data.format=text", "data.template=chat"),
        unread="data.template",
    ),
    Incompatible(
        "long rows of plain text",
        lambda cfg: {cfg.data.format, cfg.validation.format or cfg.data.format} == {"text"},
        ("data.format", "data.long_rows"),
        "a text is cut into rows of max_seq_len, so that none is longer",
        "remove data.long_rows",
        ("data.format=text", "data.long_rows=skip"),
        unread="data.long_rows",
    ),
    Incompatible(
        "unused chat template",
        lambda cfg: cfg.tokenizer.chat_template is not None and cfg.data.template == "plain",
        ("tokenizer.chat_template", "data.template"),
        "the built-in plain template would be used in place of the file",
        "remove one of the two",
        ("tokenizer.chat_template=chat.jinja", "data.template=plain"),
    ),
    *(
        Incompatible(
            f"validation.{word} without validation",
            lambda cfg: cfg.validation.source is None,
            ("validation.source", f"validation.{word}"),
            "validation is off while its source is null",
            f"set validation.source, or remove validation.{word}",
            ("~validation.source", f"validation.{word}={'alpaca' if word == 'format' else 1}"),
            unread=f"validation.{word}",
        )
        for word in ("format", "every_steps", "max_rows", "batch_size")
    ),
    Incompatible(
        "final share of a constant rate",
        lambda cfg: cfg.lr_schedule.kind == "constant",
        ("lr_schedule.kind", "lr_schedule.final_share"),
        "a constant rate does not fall",
        "remove lr_schedule.final_share, or choose cosine or linear",
        ("lr_schedule.kind=constant", "lr_schedule.final_share=0.1"),
        unread="lr_schedule.final_share",
    ),
    Incompatible(
        "momentum of adamw",
        lambda cfg: cfg.optimizer.name == "adamw",
        ("optimizer.name", "optimizer.momentum"),
        "AdamW does not read it",
        "remove optimizer.momentum (AdamW's is the first of optimizer.betas), or choose sgd",
        ("optimizer.name=adamw", "optimizer.momentum=0.9"),
        unread="optimizer.momentum",
    ),
    Incompatible(
        "betas of sgd",
        lambda cfg: cfg.optimizer.name == "sgd",
        ("optimizer.name", "optimizer.betas"),
        "SGD does not read them",
        "remove optimizer.betas (~optimizer.betas on the command line), or choose adamw",
        ("optimizer.name=sgd", "optimizer.betas=[0.9, 0.999]"),
        unread="optimizer.betas",
    ),
    Incompatible(
        "eps of sgd",
        lambda cfg: cfg.optimizer.name == "sgd",
        ("optimizer.name", "optimizer.eps"),
        "SGD does not read it",
        "remove optimizer.eps (~optimizer.eps on the command line), or choose adamw",
        ("optimizer.name=sgd", "optimizer.eps=1e-6"),
        unread="optimizer.eps",
    ),
    Incompatible(
        "fp64 on a GPU",
        lambda cfg: cfg.dtype == "fp64" and cfg.device == "cuda",
        ("dtype", "device"),
        "fp64 is for checks of the arithmetic on a CPU; no attention kernel of a GPU takes it",
        "choose bf16 or fp32, or device=cpu",
        ("dtype=fp64", "device=cuda"),
    ),
    Incompatible(
        "lower reduction of fp64",
        lambda cfg: cfg.dtype == "fp64" and cfg.parallel.reduce_dtype is not None,
        ("dtype", "parallel.reduce_dtype"),
        "summing in a lower precision would undo what fp64 is for",
        "remove parallel.reduce_dtype",
        ("dtype=fp64", "parallel.reduce_dtype=fp32"),
    ),
    Incompatible(
        "offload on a CPU",
        lambda cfg: cfg.memory.cpu_offload and cfg.device == "cpu",
        ("device", "memory.cpu_offload"),
        "on a CPU everything is in host memory already",
        "remove memory.cpu_offload",
        ("device=cpu", "memory.cpu_offload=true"),
    ),
    Incompatible(
        "resume and overwrite",
        lambda cfg: cfg.resume is not None and cfg.overwrite,
        ("resume", "overwrite"),
        "one goes on from what output_dir holds, the other removes it",
        "remove one of the two",
        ("resume=latest", "overwrite=true"),
    ),
)


def incompatibilities(cfg: Any, changed: Collection[str], judged: Collection[str]) -> list[Incompatible]:
    """The entries of the table that a config has.

    changed: dotted keys whose value is not their default. judged: dotted keys that may be judged; an entry about
    a key outside of them (one with a fault of its own, one that the config's class lacks) is passed over.
    """
    return [
        entry
        for entry in INCOMPATIBLE
        if all(key in judged for key in entry.keys)
        and (entry.unread is None or entry.unread in changed)
        and entry.applies(cfg)
    ]
