"""Keeps passwords, keys and tokens out of what is recorded."""

import os
import re

_SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # the user and password of a URL
    r"|(?<=[?&]token=)[^&\s]+|(?<=[?&]key=)[^&\s]+"
    r"|(?<=[?&]access_token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
    r"|\bhf_[A-Za-z0-9]{20,}|\bwandb_v[0-9]_\w{20,}"
)
_NAMES = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD"}  # words of environment variables' names
_SHORTEST = 12  # characters; a shorter value is no key, and may be a common word


def redacted(text: str) -> str:
    """The text with *** for whatever looks like a secret or is one of the environment's."""
    for name, value in os.environ.items():
        is_path = value.startswith(("/", "~", "."))  # where a key is kept is no secret
        if len(value) >= _SHORTEST and not is_path and _NAMES & set(name.upper().split("_")):
            text = text.replace(value, "***")
    return _SECRET.sub("***", text)
