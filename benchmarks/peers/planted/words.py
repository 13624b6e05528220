"""List the words by which a tool's message on a planted fault is recognized.

`WORDS` has a regular expression for each fault, to be searched in a line without regard to case.
They are wider than any one tool's sentence: a tool is not to fail for its choice of words.
`verdict.judge` leaves out lines that merely show the config or a loss.
"""


def match_any(*patterns: str) -> str:
    """Return a pattern of a line that matches at least one of the patterns."""
    return "|".join(patterns)


def match_all(*patterns: str) -> str:
    """Return a pattern of a line that matches every one of the patterns, in any order."""
    return "".join(f"(?=.*(?:{pattern}))" for pattern in patterns)


# Words by which tools refuse a key or a value.
_COMPLAINT = match_any(
    "unknown", "unexpected", "unrecogni[sz]ed", "undefined", "invalid", "ignored", "unused", "extra", "no such",
    "not (a )?(valid|known|recogni[sz]ed|used|found|accepted|supported|allowed|in |defined)", "did you mean",
    "not exist", "could ?n.t", "cannot", "can't", "expected", "validation", "choose from", "no module", "missing",
    "should be", "must be",
)  # fmt: skip
# Of the token that ends a turn.
_END = match_any(
    "end[- ]of[- ](turn|text|sequence)",
    r"\beos\b",
    "eos_token",
    "stop[ -]token",
    r"teach\w*.{0,20} stop",
    "never stop",
)
# Of a loss or gradient that is not a number.
_NOT_FINITE = match_any(r"\bnan\b", r"\binf\b", "finite", "diverge", "overflow")


def match_complaint(*names: str) -> str:
    """Return a pattern of a line that has one of the names, as patterns, and a complaint."""
    return match_all(match_any(*names), _COMPLAINT)


# Name of a `Fault` or `Change` -> pattern. Misspelled words are the planted typos.
WORDS: dict[str, str] = {
    "typo": match_complaint("sise"),
    "typo_nested": match_complaint("misspelt_key"),
    "wrong_type": match_complaint(r"\btwo\b"),
    "unknown_recipe": match_complaint("fulll", "sftt"),
    "unknown_format": match_complaint("mesages"),
    "zero_rate": match_any("learning[ _]rate", r"\blr\b"),
    "adapter_target": match_complaint("q_prj", "lora_qury"),
    "experts_without_adapters": match_all(
        "expert|gate_proj|up_proj|down_proj",
        match_any(_COMPLAINT, r"\bno\b", r"\bnone\b", "not adapt"),
    ),
    "experts_not_quantized": match_all(
        "expert|3.?-?d|parameter", match_any(_COMPLAINT, "would stay", "not quanti", "skip")
    ),
    "empty_file": match_any(
        r"\bempty\b",
        "no (rows|data|examples|samples|training)",
        "expected rows",
        r"\b(found|got) 0\b",
        "num_samples=0",
        r"\b0 (rows|examples|samples)",
        "no columns",
    ),  # fmt: skip
    "broken_line": match_any("json", r":8\b", "line 8", r"\bpars(e|ing)", "decod"),
    "not_text": match_all(
        "content|text|str|string|answer|output", r"number|\bint\b|integer|type|expected"
    ),
    "no_answer": match_any(
        "without an answer",
        "no (answer|assistant|target|response)",
        "nothing to train",
        "odd number",
        "must (end|contain|alternate)",
        "invalid (message|format|role)",
        "missing.{0,30}(answer|assistant|output)",
        "at least one.{0,40}assistant",
        "'output'",
    ),  # fmt: skip
    "unknown_role": match_any(
        "asistant", "(unknown|invalid|unexpected|unsupported|wrong).{0,20}(role|tag)"
    ),
    "over_long": match_any(
        "truncat",
        "exceed",
        "longer than",
        "too long",
        "were cut",
        "dropped",
        "lost",
        "left out",
        "overlong",
    ),
    "duplicates": match_any("duplicat", "repeat", "same as an earlier", "identical"),
    "overlap": match_any(
        "overlap",
        "also (in|trained|train)",
        "trained on as well",
        "training (rows|sequences) as well",
        "contaminat",
        "leak",
        "(same|shared) (rows|examples)",
    ),  # fmt: skip
    "no_end": _END,
    "pad_is_eos": match_all("pad", _END),
    "drops_system": match_any(
        match_all(
            "system", "message|turn|prompt|role", "leav|drop|miss|ignor|not (written|support)"
        )
    ),
    "unmarked": match_any("generation", "assistant_only", r"assistant.{0,20}mask"),
    "untrained_token": match_all(
        "embed|token", "never trained|untrained|not trained|zero|newly|initiali[sz]ed|resiz"
    ),
    "other_tokenizer": match_any("vocab", "out of range", "embedding"),
    "truncated_weights": match_any(
        "safetensor", "truncat", "incomplete", "cut short", "header", "corrupt"
    ),
    "missing_shard": "model-00002",
    "missing_tensor": match_any(
        r"layers\.1\.mlp\.(up_proj|w3)",
        r"layers\.\{?1?\S*mlp\.up_proj",
        r"h\.1\.mlp\.fc_2",
        "newly initialized",
    ),
    "flipped_bit": match_any(_NOT_FINITE, "gradient norm is (exactly )?0", "too large"),
    "nan_weight": _NOT_FINITE,
    "small_disk": match_any(
        "space left", "disk", "no room", "are free", "free space", "not enough space"
    ),
    "earlier_work": match_any("exist", "overw", "earlier", "not empty", "already"),
    "beyond_positions": match_any(
        "max_position",
        "position (embed|ids)",
        "model was made for",
        "indexing errors",
        "model_max_length",
        "longer than the (specified )?max",
        "context (length|window)",
        "block_size",
        "max_seq_len of the model",
    ),  # fmt: skip
    "other_rows": match_any(
        "(other|different|changed|new|not the same).{0,30}(rows|data|dataset)",
        "(rows|data|dataset).{0,30}(changed|differ)",
        "fingerprint",
    ),  # fmt: skip
    "other_batch": match_any(
        "batch.{0,60}(differ|match|chang|was|saved|again)",
        "(do not|does not|not) match",
        "(differ|chang).{0,60}batch",
        "train_batch_size",
    ),  # fmt: skip
    "other_world": match_any("world", r"\branks?\b", "processes"),
    "damaged_state": match_any(
        "hash",
        "sha-?256",
        "checksum",
        r"\bcrc",
        "damaged",
        "corrupt",
        "PytorchStreamReader",
        "not as it was written",
    ),
    "killed_in_save": match_any(
        "incomplete", "unfinished", "leftover", "damaged", "not whole", "corrupt", "cleared"
    ),
    "packing": match_all("pack|padding.free", "contaminat|see each other|attention|mix|cross"),
}
NOTHING = r"(?!)"  # matches no line: the pattern of a run without a fault
