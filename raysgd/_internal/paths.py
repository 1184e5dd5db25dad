"""Checks of user-supplied paths, and removal of secrets from URLs in messages."""

import os
import re
from pathlib import Path
from typing import Any

HIDDEN = "***"

# Match up to the last @ before the next URL of a chain, because passwords can contain @.
_PASSWORD = re.compile(r"//([^/:]*):(?!:\w+://)(?:(?!::\w+://).)*@", re.DOTALL)
_QUERY = re.compile(r"\?.*", re.DOTALL)
# Limit the length, because foreign text can be long and contain many partial matches.
_PASSWORD_IN_TEXT = re.compile(r"""//([^/:\s'"]*):(?!:\w+://)\S{0,2000}@""")
# A user name without a password can be a token.
_USER = re.compile(r"""//[^/:@\s'"]+@""")
_QUERY_IN_TEXT = re.compile(r"""\?[^\s'"=]{0,200}=[^\s'"]*""")
_SECRET = re.compile(r"(?i:password|passwd|passphrase|secret|credential)")
# Values of these names are secrets unless they are numbers, such as num_tokens.
_MAYBE_SECRET = re.compile(
    r"(?i:key|token|bearer|cookie)s?(?![a-z])|(?i:authorization)"
    r"|(?<![a-zA-Z])(?i:pass|pwd|pw|auth|pat)(?![a-z])"
)


def redact_url(url: str) -> str:
    """Return a URL without passwords or its query, which can contain a signature.

    >>> redact_url("simplecache::s3://me:pa@ss@host/x.pt?sig=abc")
    'simplecache::s3://me:***@host/x.pt?***'
    >>> redact_url("https://token@host/x.pt")
    'https://***@host/x.pt'
    """
    url = _PASSWORD.sub(rf"//\1:{HIDDEN}@", url)
    return _QUERY.sub(f"?{HIDDEN}", _USER.sub(f"//{HIDDEN}@", url))


def without_secrets(text: str) -> str:
    """Return a text without the passwords and queries of its URLs.

    >>> without_secrets("403, url='https://me:pass@host/x?sig=abc'. Is this yours?")
    "403, url='https://me:***@host/x?***'. Is this yours?"
    >>> without_secrets("git+https://token@host/x, and s3://me:it's@host")
    'git+https://***@host/x, and s3://me:***@host'
    """
    text = _PASSWORD_IN_TEXT.sub(rf"//\1:{HIDDEN}@", text)
    return _QUERY_IN_TEXT.sub(f"?{HIDDEN}", _USER.sub(f"//{HIDDEN}@", text))


def is_secret(name: str, is_count: bool) -> bool:
    """Return whether a value is secret, by its name, and whether it is a number or the like."""
    return bool(_SECRET.search(name) or (not is_count and _MAYBE_SECRET.search(name)))


def as_path(argument: str, path: Any, advice: str = "Mount the storage.") -> Path:
    """Return a local path, with ``~`` expanded. The error for a URL ends with `advice`."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{argument} must be a path, but it is {path!r}.")
    if not text:
        raise ValueError(f"{argument}='': must be a path. The current folder is '.'.")
    if "://" in text:
        raise ValueError(
            f"{argument}={redact_url(text)!r}: must be a local path, not a URL. {advice}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{argument}={text!r}: the user's home folder is unknown.") from error
