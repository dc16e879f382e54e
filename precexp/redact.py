"""Keeps passwords, keys and tokens out of what is recorded."""

import os
import re

_SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # the user and password of a URL
    r"|(?<=[?&]token=)[^&\s]+|(?<=[?&]key=)[^&\s]+"
    r"|(?<=[?&]access_token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
    r"|\bhf_[A-Za-z0-9]{20,}|\bwandb_v[0-9]_\w{20,}"
)
_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in those of environment variables
_SHORTEST = 12  # characters; a shorter value is no key, and may be a common word


def redacted(text: str) -> str:
    """The text with *** for whatever looks like a secret or is one of the environment's."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and any(part in name.upper() for part in _NAMES):
            text = text.replace(value, "***")
    return _SECRET.sub("***", text)
