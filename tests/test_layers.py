"""The house's import order (docs/architecture.md): imports point one way."""

import ast
from pathlib import Path

import pytest

import precexp

LAYERS = [
    {"redact"},
    {"config", "record"},
    {"precision", "hub"},
    {"model", "data", "optim", "environment", "flops", "progress", "interrupts"},
    {"numerics"},
    {"train", "checkpoint"},
    {"memory", "tracking", "outcome"},
    {"run"},
    {"launcher"},
    {"sweep"},
    {"engine"},
    {"cli"},
    {"bench", "plan", "export", "comparison", "workspace", "dashboard", "__main__"},
]
OWN = ("__version__", "set_process_defaults")  # of the package itself
REPORTERS = ("sweep", "bench", "plan", "comparison", "workspace", "dashboard")  # import the report
PACKAGE = Path(precexp.__file__).parent
NO_TORCH = ("config.py", "record.py", "report/")


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, at top level or inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if module in names), None)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_lower_layers(path: Path) -> None:
    module = path.relative_to(PACKAGE).with_suffix("").parts[0]
    own_layer = layer_of(module)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "precexp" or len(parts) < 2 or parts[1] in (module, *OWN):
            continue
        if module == "report":
            assert parts[1] in ("record", "config"), f"report imports {name}"
        elif parts[1] == "report":
            assert module in REPORTERS, f"{module} imports {name}"
        else:
            target = layer_of(parts[1])
            assert target is not None, f"{name} has no layer"
            assert own_layer is not None, f"{module} has no layer"
            assert target <= own_layer, f"{module} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_needs_no_torch_imports_none(path: Path) -> None:
    relative = str(path.relative_to(PACKAGE))
    if relative.startswith(NO_TORCH):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & {"torch", "transformers", "wandb", "datasets"}


def test_only_the_cli_imports_hydra() -> None:
    users = {p.name for p in FILES if any(n.split(".")[0] == "hydra" for n in imports_of(p))}
    assert users == {"cli.py"}
