"""The Hugging Face hub: one quick look whether it answers, so that its absence costs no wait."""

import functools
import http.client
import os
import queue
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from precexp.config import UserError

PROBE_SECONDS = 3

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_local(name: str) -> bool:
    """Whether the name is that of an existing file or folder."""
    return Path(name).exists()


def prepare_hub(key: str, name: str) -> None:
    """Call before anything that may ask the hub for `name`, the value of config key `key`.

    Without a network, the hub's libraries retry for 23 to 47 seconds. Here the hub is probed once
    per process, and when nothing answers, the process and its children go offline: what is in the
    local cache loads, anything else fails at once. Raises UserError if `name` is not on disk and
    can't be a hub id.
    """
    if is_local(name):
        return
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"{key}: {name!r} is not found; give an existing folder or a hub id")
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        _go_offline()


def hub_error(key: str, name: str, error: Exception) -> UserError:
    """What to raise when a library could not load `name`: one line that says what to do."""
    from huggingface_hub import constants

    if is_local(name):
        return UserError(f"{key}: can't load {name!r}: {_one_line(error)}")
    # Offline, the libraries report what is not cached as OSError: not found, no connection.
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return UserError(
            f"{key}: can't load {name!r} from the hub: no network (and not in the local cache); "
            "give a local folder"
        )
    return UserError(f"{key}: can't load {name!r} from the hub: {_one_line(error)}")


@functools.cache
def _answers(endpoint: str) -> bool:
    """Whether anything speaks HTTP at the endpoint, directly or through the proxies of the env.

    A thread bounds the wait as a whole: urllib's timeout leaves out the name lookup, which alone
    can take half a minute.
    """
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_probe(endpoint)), daemon=True).start()
    try:
        return answer.get(timeout=PROBE_SECONDS)
    except queue.Empty:
        return False


def _probe(endpoint: str) -> bool:
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # A certificate that only Python's store doubts: let the library speak for itself.
        return isinstance(error.reason, ssl.SSLCertVerificationError)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _go_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The libraries read the variable when they are imported; transformers asks huggingface_hub.
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            vars(sys.modules[module])["HF_HUB_OFFLINE"] = True


def _one_line(error: Exception) -> str:
    """The library's message on one line, in our words for what it asks to set."""
    words = " ".join(str(error).split()) or type(error).__name__
    words = words.replace("trust_remote_code=True", "model.trust_remote_code=true")
    return words if len(words) <= 400 else f"{words[:400]}..."
