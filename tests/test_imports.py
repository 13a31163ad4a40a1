"""Imports run downwards only (design: layout), as the source says."""

import ast
import pathlib

import pytest

import jaxkv

PACKAGE = pathlib.Path(jaxkv.__file__).parent
# a module may import modules of its own band (by first name) and of those listed
BANDS = {
    "errors": set(),
    "spec": {"errors"},
    "placement": {"errors"},
    "plan": {"errors"},
    "host": {"errors", "spec", "placement", "plan"},
    "device": {"errors", "spec", "placement", "plan"},
    "cache": {"errors", "spec", "placement", "plan", "host", "device"},
    "transfer": {"errors", "spec", "placement", "plan", "host", "device", "cache"},
}
BANDS["snapshot"] = BANDS["transfer"]
BANDS["inspect"] = BANDS["transfer"]
BANDS["testing"] = BANDS["transfer"]
WITHOUT_JAX = {"errors", "spec", "placement", "plan", "host"}


def _modules():
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if name != "__init__":
            names.append(name)
    return names


def _imports(name: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            if node.module == "jaxkv":
                found |= {f"jaxkv.{alias.name}" for alias in node.names}
            else:
                found.add(node.module or "")
    return found


@pytest.mark.parametrize("name", _modules())
def test_imports_run_downwards(name):
    band = name.split("/")[0]
    assert band in BANDS, f"{name} has no band: add it to the layout"
    for module in _imports(name):
        parts = module.split(".")
        if parts[0] == "jaxkv":
            assert len(parts) > 1, f"{name} imports the facade"
            assert parts[1] == band or parts[1] in BANDS[band], f"{name} -> {module}"
        if band in WITHOUT_JAX:
            assert parts[0] not in ("jax", "jaxlib"), f"{name} imports {module}"
