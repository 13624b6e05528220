"""Find secrets in text, and replace them.

A secret is a token of a known shape, a password in an address, or the value of an environment
variable with a name such as HF_TOKEN. Errors, logs and what a run writes go through `redact`;
config/load.py refuses a config for which `has_secret` is true.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

SECRET = "[secret]"

# No character of a word stands directly before, or directly behind.
_WORD_BEGINS = r"(?<![A-Za-z0-9_-])"
_WORD_ENDS = r"(?![A-Za-z0-9])"
# Tokens count only as whole words and at full length: `task-classification-v2`, `sk-learn-data` and
# `hf_models/7b` are ordinary text. A new shape needs its beginning in `_TOKEN_BEGINNINGS`, or it is
# never searched for.
_TOKEN = re.compile(
    "|".join(
        rf"{_WORD_BEGINS}{shape}{_WORD_ENDS}"
        for shape in (
            # Hugging Face; not the hash of a commit
            r"(?:hf|api_org)_(?=[a-f0-9]*[A-Zg-z])[A-Za-z0-9]{30,}",
            # OpenAI, Anthropic, OpenRouter, and others with keys of their shape
            r"sk-(?=[A-Za-z]*\d)[A-Za-z0-9]{32,}",
            r"sk-(?:proj|svcacct|admin|ant-[a-z]{3,5}\d{2})-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32,}",
            r"sk-or-v1-[0-9a-f]{32,}",
            r"gh[oprsu]_[A-Za-z0-9]{36,}",  # GitHub
            r"github_pat_\w{40,}",
            r"glpat-(?=[\w-]*[A-Z])[\w-]{20,}(?:\.[\w.]+)?",  # GitLab
            r"A(?:KIA|SIA)[A-Z0-9]{16}",  # Amazon
            r"AIza[\w-]{35}",  # Google
            r"xox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
            r"wandb_v\d_\w{40,}",
            r"npm_[A-Za-z0-9]{36}",
            r"pypi-[\w-]{50,}",
            r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",  # a JSON web token
        )
    )
)
# Secrets that only the words before them tell. The named group stays in the text, what follows it
# is replaced. A new one needs its word in `_CONTEXT_WORDS`, in lower case. The last group is for
# the older keys of Weights & Biases: 40 digits, which without such a word may be any hash.
_IN_CONTEXT = re.compile(
    r"(?P<address>://)[^/\s@'\"\\]*:[^/\s@'\"\\]+(?=@)"
    r"|(?P<header>(?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?))"
    r"[^\s'\",;\\]+"
    r"|(?P<bearer>(?i:\bbearer\s+))[\w.~+/=-]{16,}"
    r"|(?P<query>(?i:[?&](?:access_|auth_|api_)?(?:token|key|password|sig|signature)=))"
    r"[^&\s'\"\\]{8,}"
    r"|(?P<key>(?i:(?:key|token|secret)['\"]?\s*[:=]\s*['\"]?|\bwandb login\s+))[0-9a-f]{40}\b"
)
# Text without any of these, which nearly all is, need not be searched by the patterns above.
_TOKEN_BEGINNINGS = (
    "hf_",
    "api_org_",
    "sk-",
    "gh",
    "github_pat_",
    "glpat-",
    "AKIA",
    "ASIA",
    "AIza",
    "xox",
    "wandb_v",
    "npm_",
    "pypi-",
    "eyJ",
)
_CONTEXT_WORDS = (
    "://",
    "authorization",
    "bearer",
    "token",
    "key",
    "secret",
    "wandb login",
    "sig",
    "password",
)
# Names of environment variables that hold a secret.
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|API_?KEY|SECRET(?:_ACCESS)?(?:_KEY)?|ACCESS_KEY(?:_ID)?|PASSWORD|PAT)$"
)
# Characters of a variable's value; a shorter one (`1`, `true`) is no secret.
_MIN_SECRET_CHARACTERS = 8
# From so many characters on a value is replaced within words too; a shorter one may be part of an
# ordinary word.
_MIN_CHARACTERS_IN_WORDS = 16


def redact(text: str) -> str:
    """Return the text with every secret in it replaced by `[secret]`."""
    for name, value in os.environ.items():
        if (
            len(value) < _MIN_SECRET_CHARACTERS
            or value not in text
            or not _SECRET_VARIABLE.search(name)
        ):
            continue
        if value.startswith(("/", "~", ".")):
            continue  # the value is the path of a file that holds the secret
        if len(value) >= _MIN_CHARACTERS_IN_WORDS:
            text = text.replace(value, SECRET)
        else:
            text = re.sub(f"{_WORD_BEGINS}{re.escape(value)}{_WORD_ENDS}", SECRET, text)
    lower = text.lower()
    if any(word in lower for word in _CONTEXT_WORDS):
        # Each alternative of the pattern is a named group, so there always is a last one; `or 0` is
        # for the type checker.
        text = _IN_CONTEXT.sub(lambda match: f"{match[match.lastgroup or 0]}{SECRET}", text)
    if any(beginning in text for beginning in _TOKEN_BEGINNINGS):
        text = _TOKEN.sub(SECRET, text)
    return text


def redact_values(value: Any) -> Any:
    """Return nested mappings and lists with every text in them redacted; keys stay as they are.

    The result is what JSON can hold: mappings have become dicts, tuples lists.
    """
    if isinstance(value, Mapping):
        return {key: redact_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def has_secret(text: str) -> bool:
    """Return True if `redact` would change the text."""
    return redact(text) != text
