"""A small stand-in for wandb's server, and wandb's own reader of what a run kept on disk.

It is NOT wandb's server: it answers the few requests that wandb 0.31 and wandb-workspaces 0.4 make
for a run, a table and a saved view, from what it was sent, and an error to all others. What passes
against it shows what the clients send, not that wandb.ai takes it. Files of artifacts are never
asked for: it says that it has them.
"""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from precexp import tracking

KEY = "0123456789" * 4  # wandb wants 40 characters


@dataclass
class KeptRun:
    """A run as the server has it: what later requests are answered from."""

    config: str = "{}"
    summary: str = "{}"
    history: list[str] = field(default_factory=list)  # a line per row
    exit_codes: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.history]


@dataclass
class KeptView:
    view_id: str
    name: str
    display_name: str
    spec: str


class WandbServer(http.server.ThreadingHTTPServer):
    """Keeps what is sent; `refused` holds the names of operations to answer with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upserts: list[dict] = []  # the variables of each UpsertBucket
        self.operations: list[str] = []
        self.runs: dict[str, KeptRun] = {}
        self.views: list[KeptView] = []
        self.files: dict[str, bytes] = {}
        self.refused: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict) -> dict:
        if path != "/graphql":
            return self.keep_stream(path.split("/")[-2], body)
        named = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
        operation = body.get("operationName") or (named.group(1) if named else "")
        self.operations.append(operation)
        method = None if operation in self.refused else ANSWERS.get(operation)
        if method is None:
            return {"errors": [{"message": f"not here: {operation}"}]}
        return {"data": method(self, body.get("variables") or {})}

    def keep_stream(self, name: str, body: dict) -> dict:
        run = self.runs[name]
        files = body.get("files", {})
        if history := files.get("wandb-history.jsonl"):
            # Lines have their place: those that come twice are kept once.
            run.history[history["offset"] :] = history["content"]
        if summary := files.get("wandb-summary.json"):
            run.summary = summary["content"][-1]
        if "exitcode" in body:
            run.exit_codes.append(body["exitcode"])
        return {}

    def viewer(self, _: dict) -> dict:
        name = "somebody"
        edges: dict[str, list] = {"edges": []}
        viewer = {"id": "u", "entity": name, "username": name, "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": edges}}

    def upsert_bucket(self, variables: dict) -> dict:
        self.upserts.append(variables)
        inserted = variables["name"] not in self.runs
        run = self.runs.setdefault(variables["name"], KeptRun())
        run.config = variables["config"] or run.config
        project = {"name": variables["project"], "entity": {"name": "somebody"}}
        bucket = {"id": variables["name"], "name": variables["name"], "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def resume_status(self, variables: dict) -> dict:
        name, run = variables["name"], self.runs.get(variables["name"])
        bucket = run and {
            "id": name,
            "name": name,
            "displayName": name,
            "summaryMetrics": run.summary,
            "config": run.config,
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(run.history),
            "historyTail": json.dumps(run.history[-1:]),
            "eventsTail": "[]",
            "tags": [],
            "notes": None,
            "wandbConfig": '{"t": 1}',
        }
        entity = {"id": "e", "name": "somebody"}
        model = {"id": "p", "name": variables["project"], "entity": entity, "bucket": bucket}
        return {"model": model}

    def create_run_files(self, variables: dict) -> dict:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/{urllib.parse.quote(name)}"}
            for name in variables["files"]
        ]
        return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}

    def create_artifact(self, _: dict) -> dict:
        sequence = {"latestArtifact": None}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def views_named(self, variables: dict) -> dict:
        nodes = [
            {"id": view.view_id, "displayName": view.display_name, "spec": view.spec}
            for view in self.views
            if view.name == variables["viewName"]
        ]
        return {"project": {"allViews": {"edges": [{"node": node} for node in nodes]}}}

    def upsert_view(self, variables: dict) -> dict:
        found = [view for view in self.views if view.view_id == variables.get("id")]
        view = found[0] if found else KeptView(f"view-{len(self.views)}", "", "", "")
        view.name, view.display_name = variables["name"], variables["displayName"]
        view.spec = variables["spec"]
        if not found:
            self.views.append(view)
        answer = {"view": {"id": view.view_id, "name": view.name}, "inserted": not found}
        return {"upsertView": answer}


ANSWERS = {
    "Viewer": WandbServer.viewer,
    "UpsertBucket": WandbServer.upsert_bucket,
    "RunResumeStatus": WandbServer.resume_status,
    "CreateRunFiles": WandbServer.create_run_files,
    "CreateArtifact": WandbServer.create_artifact,
    "View": WandbServer.views_named,
    "UpsertView2": WandbServer.upsert_view,
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, WandbServer)
        text = self.read()
        if not text.startswith(b"{"):  # telemetry of `wandb sync`, in protobuf
            return self.reply(b"{}")
        answer = self.server.answer(self.path, json.loads(text))
        return self.reply(json.dumps(answer).encode())

    def do_PUT(self) -> None:
        assert isinstance(self.server, WandbServer)
        self.server.files[urllib.parse.unquote(self.path).lstrip("/")] = self.read()
        self.reply(b"{}")

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A server that this process is logged in to."""
    with WandbServer() as server:
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_BASE_URL", server.url)
        for limit in ("INIT_SECONDS", "FINISH_SECONDS"):  # a busy machine is slow, and not away
            patch.setattr(tracking, limit, 120)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        yield server
        server.shutdown()


@contextmanager
def clean_wandb(home: Path) -> Iterator[pytest.MonkeyPatch]:
    """A machine where nobody is logged in, and a process that has not used wandb yet."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("WANDB_") or name == "NETRC":
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        yield patch
        if "wandb" in sys.modules:
            import wandb

            wandb.teardown()
            patch.delenv("WANDB_SERVICE", raising=False)


def records_of(directory: Path) -> list[dict[str, dict]]:
    """What the one wandb run under the directory holds, in wandb's own words."""
    (folder,) = (directory / "wandb").glob("*run-*")
    result = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def only(records: list[dict[str, dict]], kind: str) -> list[dict]:
    return [record[kind] for record in records if kind in record]


def summary_of(records: list[dict[str, dict]]) -> dict:
    merged = {}
    for summary in only(records, "summary"):
        merged |= summary["update"]
    return merged
