"""Inspect all sequences of a run: what they contain, and what is wrong with them.

`tune data check` prints the counts and findings of `inspect_datasets`. `tune data show` prints the
sequences of `show_item`, whose pieces it colors by whether they are trained. A finding is a fault
of the samples that a user may allow. An item is a sequence, or a pair of two. A pack is items that
share one sequence of max_seq_len tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from recipe_lib.data.data_plan import pack
from recipe_lib.data.dataset import Dataset, TokenSequence, find_overlap
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.units import pluralize

# Places that a finding names. A place is the file and line of a sample.
MAX_PLACES = 5
NOTHING_LEFT = "nothing-left"  # name of the finding that `--allow` cannot allow: no sample is left


@dataclass(frozen=True)
class Finding:
    """Something wrong with the samples of a run.

    `tune data check --json` prints the fields under these names.
    """

    name: str  # the name by which `--allow` of `tune data check` allows it
    line: str  # description, mostly with a remedy
    count: int  # number of samples, items, answers or sequences that have it; 0: not counted
    places: Sequence[str] = ()  # places of the first of them; empty: they are not known
    more: int = 0  # number of further places
    dataset: str = "training"  # or `validation`


@dataclass
class Inspection:
    """The counts and findings of a run's samples."""

    counts: dict[str, Any]  # by name, as JSON values
    findings: list[Finding] = field(default_factory=list)


def inspect_datasets(
    training: Dataset,
    validation: Dataset | None,
    max_seq_len: int,
    untrained_tokens: Sequence[str] | None,
) -> Inspection:
    """Return counts and findings of the training and the validation sequences.

    `counts["validation"]` has the counts of validation samples. validation: None if there is none.
    max_seq_len: tokens. untrained_tokens: special tokens in the sequences whose embedding the
    checkpoint has never trained; None: there is no checkpoint to look at.
    """
    report = training.report
    pack_length = max_seq_len * training.group  # tokens of a pack: a pair may fill two sequences
    num_packs = len(pack(training.item_lengths, pack_length))  # if the run were packed
    # Indices of the validation items that are training items too
    overlap = (
        find_overlap(training, validation)
        if validation is not None
        else np.array([], dtype=np.int64)
    )
    counts = _collect_counts(report) | {
        "shortest_sequence": int(training.lengths.min()) if len(training) else 0,
        "median_sequence": int(np.median(training.lengths)) if len(training) else 0,
        "longest_sequence": int(training.lengths.max()) if len(training) else 0,
        "packs": num_packs,
        "pack_length": pack_length,
        "packing_efficiency": float(training.item_lengths.sum())
        / (max(1, num_packs) * pack_length),
        "validation_sequences": len(validation) if validation is not None else 0,
        "overlapping_sequences": len(overlap),
    }
    findings = _find_faults(report, max_seq_len)
    if validation is not None:
        counts["validation"] = _collect_counts(validation.report)
        findings += [
            replace(finding, line=f"validation: {finding.line}", dataset="validation")
            for finding in _find_faults(validation.report, max_seq_len)
        ]
        if len(overlap):
            findings.append(
                _make_finding(
                    name="overlap",
                    line=(
                        _format_count_with_verb(
                            len(overlap), f"validation {validation.report.item_noun}", "is/are"
                        )
                        + " in the training data as well"
                    ),
                    count=len(overlap),
                    places=[validation.locate_item(item) for item in overlap[:MAX_PLACES].tolist()],
                    dataset="validation",
                )
            )
    if untrained_tokens is not None:
        counts["untrained_tokens"] = list(untrained_tokens)
    if untrained_tokens:
        names = ", ".join(untrained_tokens[:MAX_PLACES]) + (
            ", ..." if len(untrained_tokens) > MAX_PLACES else ""
        )
        findings.append(
            Finding(
                name="untrained-tokens",
                line=(
                    f"the sequences use {names}, whose embeddings the checkpoint has never trained;"
                    " train the embedding as well"
                ),
                count=0,
            )
        )
    return Inspection(counts, findings)


def _collect_counts(report: DataReport) -> dict[str, Any]:
    return {
        "samples_read": report.samples_read,
        "sequences": report.sequences,
        "pairs": report.pairs,
        "tokens": report.tokens,
        "label_tokens": report.trained_tokens,
        "label_token_fraction": report.label_token_fraction,
        "bad_samples": sum(report.bad_samples.values()),
        "bad_samples_by_cause": dict(report.bad_samples),
        "truncated_sequences": report.truncated_sequences,
        "skipped_long_sequences": report.skipped_long_sequences,
        "lost_answer_tokens": report.lost_answer_tokens,
        "sequences_without_answer_left": report.emptied_sequences,
        "untrained_ends": report.untrained_ends,
        "split_samples": report.split_samples,
        "split_sequences": report.split_sequences,
        # Tokens of conversations that became several sequences, and if each had become one.
        "split_tokens": report.split_tokens,
        "unsplit_tokens": report.unsplit_tokens,
        # Marked by the chat template, as what is trained: `{% generation %}`.
        "marked_answers": report.marked_answers,
        "marks_differing": report.marks_differing,
        "samples_with_unseen_messages": report.unseen_samples,
        "special_tokens_parsed": dict(report.special.parsed),
        # They stay text, which the tokenizer splits into several tokens.
        "special_tokens_unparsed": dict(report.special.split),
        "samples_with_unparsed_special_tokens": report.special.samples,
        # Samples whose texts hold a chat template's special tokens; no template is applied.
        "samples_rendered_already": report.special.rendered,
        "columns_that_change_nothing": dict(report.idle_names),
        "samples_with_control_characters": report.control_characters,
        "duplicate_sequences": report.duplicate_sequences,
    }


def _find_faults(report: DataReport, max_seq_len: int) -> list[Finding]:
    source_reports = report.parts or [report]  # one for each source
    bad_sample_findings = [
        _make_finding(
            name="bad-samples",
            line=f"{pluralize(count, 'bad sample')}: {cause}",
            count=count,
            places=report.list_places(cause),
        )
        for cause, count in report.bad_samples.most_common()
    ]
    empty_source_findings = [
        Finding(name=NOTHING_LEFT, line=reason, count=0)
        for source_report in source_reports
        if (reason := source_report.why_nothing_left())
    ]
    label_share_findings = [
        Finding(
            name="label-tokens",
            line=f"{source_report.source}: {fault}",
            count=source_report.sequences,
        )
        for source_report in source_reports
        if (fault := source_report.find_share_fault())
    ]
    duplicates = _make_finding(
        name="duplicates",
        line=(
            _format_count_with_verb(report.duplicate_sequences, report.item_noun, "repeats/repeat")
            + " an earlier one"
        ),
        count=report.duplicate_sequences,
        places=[f"{item} is {earlier}" for item, earlier in report.duplicates],
    )
    return [
        *bad_sample_findings,
        *empty_source_findings,
        # A count of 0 is none.
        *(finding for finding in _make_counted_findings(report, max_seq_len) if finding.count),
        *label_share_findings,
        *([duplicates] if duplicates.count else []),
    ]


def _make_counted_findings(report: DataReport, max_seq_len: int) -> list[Finding]:
    lost_tokens = report.lost_answer_tokens
    # Items over max_seq_len are a finding only if answer tokens were lost.
    num_long = report.truncated_sequences + report.skipped_long_sequences if lost_tokens else 0
    share = lost_tokens / max(1, report.trained_tokens + lost_tokens)
    return [
        Finding(
            name="truncation",
            line=(
                _format_count_with_verb(num_long, report.item_noun, "exceeds/exceed")
                + f" {max_seq_len} tokens; {lost_tokens} answer tokens ({share:.1%}) are lost"
            ),
            count=num_long,
        ),
        Finding(
            name="no-answer-left",
            line=(
                _format_count_with_verb(report.emptied_sequences, report.item_noun, "is/are")
                + f" left out because the whole answer is after {max_seq_len} tokens"
            ),
            count=report.emptied_sequences,
        ),
        Finding(
            name="untrained-ends",
            line=(
                _format_count_with_verb(report.untrained_ends, "answer", "ends/end")
                + " without a trained end-of-turn token: nothing teaches to stop there"
            ),
            count=report.untrained_ends,
        ),
        _make_finding(
            name="generation-marks",
            line=(
                f"in {pluralize(report.marks_differing, 'answer')} the chat template marks"
                " something else than what is generated"
            ),
            count=report.marks_differing,
            places=[report.first_mark],
        ),
        Finding(
            name="unseen-messages",
            line=(
                f"in {pluralize(report.unseen_samples, 'sample')} the chat template leaves out a"
                " system's or user's message"
            ),
            count=report.unseen_samples,
        ),
        _make_finding(
            name="split-special-tokens",
            line=report.special.describe_split(),
            count=report.special.samples,
            places=report.special.places,
        ),
        _make_finding(
            name="control-characters",
            line=(
                f"in {pluralize(report.control_characters, 'sample')} a text holds a control"
                " character (JSON reads \\b as one; a backslash is two there)"
            ),
            count=report.control_characters,
            places=[report.first_control],
        ),
    ]


def _format_count_with_verb(count: int, noun: str, verbs: str) -> str:
    """Return `1 pair repeats` or `2 pairs repeat`. verbs: singular and plural, `repeats/repeat`."""
    return f"{pluralize(count, noun)} {verbs.split('/')[count != 1]}"


def _make_finding(
    *, name: str, line: str, count: int, places: Sequence[str], dataset: str = "training"
) -> Finding:
    return Finding(
        name=name,
        line=line,
        count=count,
        places=places,
        more=count - len(places),
        dataset=dataset,
    )


def list_special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id -> text of the special tokens."""
    texts = tokenizer.special_texts
    # The ids come from encoding each text; one that becomes several ids is left out.
    return {
        ids[0]: text
        for ids, text in zip(tokenizer.encode_pieces(texts), texts, strict=True)
        if len(ids) == 1
    }


def collect_ids(*datasets: Dataset | None) -> set[int]:
    """Return all ids in the sequences of the datasets; None: no dataset."""
    present = [dataset for dataset in datasets if dataset is not None]
    return set[int]().union(*(np.unique(dataset.ids).tolist() for dataset in present))


@dataclass(frozen=True)
class Piece:
    """Adjacent tokens of one kind, as text."""

    text: str
    trained: bool  # whether the loss counts them as targets
    special: bool  # whether they are special tokens


@dataclass(frozen=True)
class ShownSequence:
    """A sequence as `tune data show` shows it; `--json` prints the fields under these names."""

    number: int  # index in the dataset
    place: str  # file and line of its sample
    # `chosen` or `rejected` of a pair; the label in words; "": neither
    answer: str
    tokens: int  # number of tokens
    trained: int  # number of label tokens, which the loss counts
    pieces: list[Piece]  # its text, in order


def show_item(dataset: Dataset, item: int, tokenizer: Tokenizer) -> list[ShownSequence]:
    """Return the sequences of an item: one, or a pair's chosen and rejected answer."""
    return [
        ShownSequence(
            number=sequence,
            place=dataset.locate_item(item),
            answer=_show_label(dataset, item, sequence),
            tokens=int(dataset.lengths[sequence]),
            trained=int(dataset.trained_counts[sequence]),
            pieces=list(split_pieces(dataset[sequence], tokenizer)),
        )
        for sequence in range(item * dataset.group, (item + 1) * dataset.group)
    ]


def _show_label(dataset: Dataset, item: int, sequence: int) -> str:
    """Return which answer of a pair a sequence is, or its label in words; "": neither."""
    if dataset.group == 2:
        return ("chosen", "rejected")[sequence % 2]
    value = int(dataset.values[item])  # a class' index, or KTO's 1 (desirable) or 0
    if dataset.report.labels:
        return "wanted" if value else "not wanted"
    return f"class {dataset.report.classes[value]}" if dataset.report.classified else ""


def split_pieces(sequence: TokenSequence, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield the text of a sequence, in order: all tokens, and the last target if it is trained.

    The first token is never trained. Tokens of one kind are decoded together, so that a character
    of several tokens is decoded as one.
    """
    has_label = sequence.labels >= 0
    # The last target is not among the tokens.
    ids = np.append(sequence.tokens, sequence.labels[-1:][has_label[-1:]])
    trained = np.append(False, has_label)[: len(ids)]  # a label stands one place before its token
    special = np.isin(ids, list(list_special_tokens(tokenizer)))
    kinds = zip(ids.tolist(), trained.tolist(), special.tolist(), strict=True)
    for (is_trained, is_special), run in groupby(kinds, key=itemgetter(1, 2)):
        text = b"".join(tokenizer.get_token_bytes(token_id) for token_id, *_ in run).decode(
            "utf-8", errors="replace"
        )
        yield Piece(text, is_trained, is_special)
