"""Turn errors of the Hugging Face hub into our errors of one line, which say the remedy.

download.py and upload.py call the hub inside `with convert_hub_errors(repo): ...`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError, SetupError, StorageError


@contextmanager
def convert_hub_errors(
    repo: str, revision: str | None = None, *, uploads: bool = False
) -> Iterator[None]:
    """Turn errors of the hub, the network or the disk into our errors of one line.

    repo: OWNER/NAME. revision: branch, tag or commit; None: the default one. uploads: files are
    sent, not fetched. Raises ConfigError if the name is at fault, SetupError for token, network or
    hub, and StorageError if the disk is full or refuses a write.
    """
    # Imported here: only a command that uses the hub pays for it.
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            f"{show(repo)}: is not a repository on the hub; expected OWNER/NAME"
        ) from error
    except OfflineModeIsEnabled as error:
        verb = "upload" if uploads else "download"
        raise SetupError(f"{repo}: HF_HUB_OFFLINE is set; unset it to {verb}") from error
    except (HTTPError, LocalEntryNotFoundError) as error:
        raise make_hub_error(repo, revision=revision, error=error, uploads=uploads) from error
    except (OSError, RuntimeError) as error:
        # A RuntimeError of the hub's library has no errno: its text says that the disk is full.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise StorageError(
                f"{repo}: the disk is full; make room (what is there already is kept), or choose"
                " another disk with --output-dir"
            ) from error
        if isinstance(error, PermissionError) and not uploads:
            raise StorageError(
                f"{show(str(error.filename))}: cannot be written: {error.strerror}"
            ) from error
        raise


def make_hub_error(repo: str, revision: str | None, error: Any, uploads: bool = False) -> Exception:
    """Return the hub's answer, or that there was none, as one of our errors.

    error: of huggingface_hub. The other arguments are those of `convert_hub_errors`.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repo}"
    owner = show(repo.partition("/")[0])
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    # The hub answers 404 for a repository that the token may not see, and so for another's.
    if uploads and isinstance(error, RepositoryNotFoundError):
        return SetupError(
            f"{repo}: the token's account may not write to {owner}; check REPO and the token"
        )
    if uploads and status == 403:
        return SetupError(
            f"{repo}: the token may not write to {owner} (403); take one with write access, or"
            " another REPO"
        )
    # Before RepositoryNotFoundError, of which it is a subclass.
    if isinstance(error, GatedRepoError):
        if get_token():
            return SetupError(
                f"{repo}: your token's account has no access yet; ask for it at {page}, then try"
                " again"
            )
        return SetupError(
            f"{repo}: asks for consent; give it at {page}, then `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(
            f"{repo}: has no revision {show(str(revision))}; {page}/refs lists its branches and"
            " tags"
        )
    if isinstance(error, RepositoryNotFoundError):
        private = (
            "your token has no access to it" if get_token() else "it is private (then set HF_TOKEN)"
        )
        return ConfigError(
            f"{repo}: no such model at {constants.ENDPOINT}, or {private}; check the spelling"
        )
    if status in (401, 403):
        return SetupError(
            f"{repo}: the hub refused the token ({status}); renew it with `hf auth login`"
        )
    if status is not None:
        return SetupError(f"{repo}: {constants.ENDPOINT} answered {status}; try again later")
    return SetupError(
        f"{repo}: cannot reach {constants.ENDPOINT}; check the network, a proxy, and HF_ENDPOINT"
    )
