"""Know the meaning of columns of a row and keys of a message by their names.

An UnreadNames (unread_names.py) asks these tables about columns and keys that a format does not
read: each is idle (known to change nothing), or a fault of its row. Names are compared as
`normalize_name` returns them. A name is in the idle tables only if it cannot mean a part of a
conversation.
"""

import re
from datetime import date, time
from functools import lru_cache
from numbers import Number
from typing import Any

# Column -> other names that tools give it, which are read if the column itself is missing
SAME_AS = {
    "system": ("system_prompt", "system_message", "system_instruction"),
    "tools": (
        "functions",
        "function",
        "function_list",
        "tool_list",
        "available_tools",
        "tool_definitions",
    ),
    "input": ("query",),
    "label": ("kto_tag",),
    "chosen": ("preferred_output",),
    "rejected": ("non_preferred_output",),
}

# Columns with images, sound or film: a fault
_MEDIA = frozenset(
    "image images img imgs image_path image_paths image_url image_urls image_file picture pictures"
    " photo pixel_values image_grid_thw video videos video_path video_paths video_url frames audio"
    " audios audio_path audio_paths audio_url speech sound sounds wav waveform multi_modal_data"
    " mm_data objects bbox bboxes box boxes".split()
)
# Columns with a list of ids or masks, made by another tokenizer: a fault
_TOKENIZED = frozenset(
    "input_ids token_ids tokens labels attention_mask loss_mask completion_mask assistant_masks"
    " position_ids token_type_ids prompt_ids completion_ids prompt_input_ids chosen_input_ids"
    " rejected_input_ids special_tokens_mask".split()
)
# Columns that say how much a row counts: a fault unless that is 1
_WEIGHTS = frozenset("weight weights sample_weight loss_weight example_weight loss_scale".split())
# Columns that say whether a row is desirable: a fault if it is not
_JUDGED = frozenset(
    "label kto_tag is_correct correct is_chosen is_preferred preferred is_good good is_desirable"
    " desirable accepted acceptable approved passed is_passed valid is_valid verified is_verified"
    " success is_success successful solved is_solved resolved train training trainable loss use"
    " keep include".split()
)
# Columns with an answer that is not to be trained: a fault unless the chosen answer is trained
UNWANTED = frozenset(
    "rejected rejected_response response_rejected rejected_answer non_preferred_output".split()
)
# Columns with a text of the whole row, as another template has rendered it
RENDERED = frozenset(
    "text full_text formatted formatted_text rendered prompt_text chat_text conversation_text"
    " chatml templated".split()
)

# Names of columns and keys that are idle if they hold labels: numbers, dates, short texts
_IDLE = frozenset(
    "id ids idx index uid uuid guid sha sha1 sha256 md5 hash key row_number line_number source"
    " sources src origin dataset datasets subset split config fold shard batch batch_number file"
    " filename file_name path filepath repo category categories subcategory subcategories"
    " class_name task tasks subtask topic topics subtopic subject domain domains field area genre"
    " theme keyword keywords tag tags type kind style format lang langs language languages"
    " language_code locale country region difficulty level grade complexity quality score scores"
    " rating ratings rank ranks reward rewards likes upvotes downvotes votes views view_count model"
    " models model_name generator generated_by teacher engine provider annotator annotators"
    " annotation_type author authors user username contributor license licence copyright url urls"
    " link links uri href doi avatarurl date datetime time timestamp timestamps created updated"
    " modified created_utc year version revision status stage state tree_state turn turns n_turns"
    " length len size count token_count word_count char_count temperature top_p max_tokens seed"
    " skip_prompt_formatting custom_instruction deleted synthetic toxic redacted nsfw flagged title"
    " order usage helpfulness correctness coherence verbosity harmlessness honesty truthfulness"
    " safety relevance fluency accuracy instruction_following instruction_adherence confidence"
    " agreement perplexity seconds duration cost epoch step iteration votes_up votes_down"
    " dataset_name task_name source_name finish_reason finish_reasons stop_reason object label_text"
    " label_name dump crawl pile_set_name repo_name hexsha added seed_data audience".split()
)
# Ends and beginnings of names that are idle in the same way
_IDLE_ENDS = tuple(
    "_id _ids _idx _index _uuid _hash _url _urls _uri _link _score _scores _rating _ratings _rank"
    " _model _source _category _type _tag _tags _count _length _len _tokens _date _at _time"
    " _timestamp _utc _lang _language _license _version _split _subset _difficulty _level _topic"
    " _domain _prob _logprob _path".split()
)
_IDLE_STARTS = tuple(
    "num_ n_ score_ rating_ index_level_ unnamed_ meta_ metadata_ token_count_ created_"
    " updated_".split()
)
# Names that are idle if they hold one line of text, however long
_ADDRESSES = ("url", "urls", "link", "links", "license", "licence", "copyright", "path", "filepath")
# Notes of the dataset's authors, idle also if they are lists or objects
_NOTES = frozenset(
    "meta metadata extra_info extra_fields annotations detoxify emojis labels moderation"
    " openai_moderation detoxify_moderation logprobs top_logprobs usage stats statistics provenance"
    " lineage quality_signals cache_control header".split()
)

MESSAGE_READ = frozenset(("role", "content", "train", "tool_calls"))  # keys that every format reads
# Further keys of a message that are idle if they hold labels
_MESSAGE_IDLE = frozenset(
    "name turn_identifier language country state object status end_turn is_error".split()
)
_WHY_NOT_MEDIA = "images, sound or film, which no recipe reads"
_WHY_NOT_DETAIL = "which letters of a message are trained, which is said of whole messages alone"
# Key of a message that is a fault -> what it means
_MESSAGE_REFUSED = {
    "refusal": "the model's refusal, which a chat template does not write",
    "train_detail": _WHY_NOT_DETAIL,
    "training_detail": _WHY_NOT_DETAIL,
}
# torchtune's key of a message -> the value that asks for what is done anyway: then it is idle
_MESSAGE_USUAL = {"eot": True, "ipython": False, "prefix": False}

_MAX_LABEL_LETTERS = 200  # a longer text may be a part of a conversation, whatever its name
_REQUEST = ("parallel_tool_calls", "tool_choice")  # settings of a request, which no template shows


@lru_cache(4096)  # rows repeat the same few names
def normalize_name(name: str) -> str:
    """Return a name in lower case, with one underscore for each run of other characters."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_blank(value: Any) -> bool:
    """Return True for null, blank text, an object of blank values, or a list without values."""
    if isinstance(value, str):
        return not value or value.isspace()
    if isinstance(value, dict):
        return all(map(is_blank, value.values()))
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None


def is_label(value: Any) -> bool:
    """Return True if a value is a number, a date or a short line of text, or a list of such."""
    if isinstance(value, str):
        return len(value) <= _MAX_LABEL_LETTERS and "\n" not in value.strip()
    if isinstance(value, (list, tuple)):
        return all(map(is_label, value))
    return value is None or isinstance(value, (Number, date, time))


def is_idle(name: str, value: Any) -> bool:
    """Return True if a column or a key is known by its name to change nothing.

    Its value must be of the kind that such names have, mostly a label: under the same name a long
    text may be a part of a conversation.
    """
    normalized = normalize_name(name)
    if normalized in _NOTES or normalized in _REQUEST:
        # A text that begins so may be a list or object as JSON.
        return not isinstance(value, str) or is_label(value) or value.lstrip()[:1] in ("{", "[")
    if normalized in _ADDRESSES and isinstance(value, str):
        return "\n" not in value.strip()
    has_idle_name = (
        normalized in _IDLE
        or normalized.endswith(_IDLE_ENDS)
        or normalized.startswith(_IDLE_STARTS)
    )
    return has_idle_name and is_label(value)


def is_idle_key(name: str, value: Any) -> bool:
    """Return True if a key of a message changes nothing where no chat template reads it."""
    return (
        is_idle(name, value)
        or (name in _MESSAGE_IDLE and is_label(value))
        or _MESSAGE_USUAL.get(name) is value
    )


def why_not_key(name: str) -> str:
    """Return what a key of a message means if that is known to matter, else ""."""
    return _WHY_NOT_MEDIA if normalize_name(name) in _MEDIA else _MESSAGE_REFUSED.get(name, "")


def why_not_column(name: str, value: Any, is_text: bool) -> str:
    """Return what a column that is not read means if that is known to matter, else "".

    It is for an error line. is_text: rows are documents, whose label may be a number that does not
    judge them.
    """
    normalized = normalize_name(name)
    if normalized in _MEDIA:
        return _WHY_NOT_MEDIA
    if normalized in _TOKENIZED and isinstance(value, list):
        return "tokens that are made already, and rows are read as text"
    if _is_weight(normalized) and not _is_one(value):
        return "a weight of the row, which data.sources has for whole sources alone"
    if normalized in _JUDGED and _judge(normalized, value, is_text) is False:
        return (
            "that the row is not wanted, and it would be trained; leave such rows out, or train"
            " with dpo.loss=kto"
        )
    return ""


def is_neutral_label(name: str, value: Any) -> bool:
    """Return True if a column only says that its row is desirable, or names its class.

    A weight of 1 is neutral too. An undesirable row is not asked about: it is a fault.
    """
    normalized = normalize_name(name)
    if _is_weight(normalized):
        return _is_one(value)
    return (
        normalized in _JUDGED
        and (_judge(normalized, value, is_text=False) is not None or normalized == "label")
        and is_label(value)
    )


def _is_weight(word: str) -> bool:
    """Return True if a column of this name says how much its row counts."""
    return word in _WEIGHTS or word.endswith(("_weight", "_weights"))


def _is_one(value: Any) -> bool:
    """Return True if a weight is 1, as a number or as the text of a table's cell."""
    return not isinstance(value, bool) and str(value).strip() in ("1", "1.0")


def _judge(word: str, value: Any, is_text: bool) -> bool | None:
    """Return whether a column of _JUDGED calls the row desirable; None: it does not say.

    Of numbers only those of a label count, 0 and 1. word: the normalized name. is_text: rows are
    documents.
    """
    is_label_column = word in ("label", *SAME_AS["label"])
    is_switch = isinstance(value, bool) or (
        isinstance(value, str) and value.strip().lower() in ("true", "false")
    )
    return read_truth(value) if is_switch or (is_label_column and not is_text) else None


# Truth values as JSON and tables write them
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def read_truth(value: Any) -> bool | None:
    """Return the truth value of a JSON value or a table's cell, also of 0 and 1; else None."""
    return _TRUTHS.get(str(value).strip().lower()) if isinstance(value, (bool, int, str)) else None
