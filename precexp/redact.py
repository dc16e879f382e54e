"""Keeps passwords, keys and tokens out of what is recorded."""

import os
import re

# Of a URL's query or fragment, signatures of prepared links among them.
_PARAMETERS = (
    "token|key|sig|signature|password|secret|credential|"
    r"[\w-]*[_-](?:token|key|signature|secret|credential)"
)
_SECRET = re.compile(
    r"(?<=://)[^/\s?#]+(?=@)"  # the user and password of a URL
    rf"|(?P<name>[?&#](?:{_PARAMETERS})=)[^&#\s]+"
    r"|\bhf_[A-Za-z0-9]{20,}|\bwandb_v[0-9]_\w{20,}"
    r"|\bgh[a-z]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    re.IGNORECASE,
)
# Words of environment variables' names.
_NAMES = {
    "APIKEY", "CREDENTIALS", "KEY", "PASSPHRASE", "PASSWD", "PASSWORD", "PAT", "PGPASSWORD",
    "PWD", "SECRET", "TOKEN",
}  # fmt: skip
_SHORTEST = 12  # characters; a shorter value is no key, and may be a common word


def redacted(text: str) -> str:
    """The text with *** for whatever looks like a secret or is one of the environment's."""
    for value in _of_environment():
        text = text.replace(value, "***")
    return _SECRET.sub(lambda found: f"{found['name'] or ''}***", text)


def _of_environment() -> list[str]:
    """Its secrets, the longest first: one may begin with another."""
    found = set()
    for name, whole in os.environ.items():
        value = whole.strip()  # as what reads it does
        is_path = value.startswith(("/", "~", "."))  # where a key is kept is no secret
        if len(value) >= _SHORTEST and not is_path and _NAMES & set(name.upper().split("_")):
            found.add(value)
    return sorted(found, key=len, reverse=True)
