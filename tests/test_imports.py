"""The structure: imports point one way, and each heavy library appears only in its room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxgpt"
BASE = {"errors", "durable", "config", "schema", "strict_json", "toml_values", "validation", "ramp"}
BASE |= {"chips"}
DATA = BASE | {"tokenization", "data"}
# What each room or module may import from jaxgpt, besides itself.
MAY_IMPORT = {
    "errors": set(),
    "durable": {"errors"},
    "toml_values": {"errors"},
    "ramp": {"schema"},  # types only
    "validation": {"config", "ramp"},  # of config only types
    "schema": set(),
    "strict_json": set(),
    "chips": set(),
    "config": {"errors", "schema", "toml_values", "validation"},
    "runtime": BASE,
    "tokenization": BASE,
    "data": BASE | {"tokenization"},
    "corpus": DATA,
    "model": BASE,
    "parallel": DATA | {"model", "runtime"},
    "training": DATA | {"model", "parallel", "runtime"},
    "planning": DATA | {"model", "parallel", "training", "runtime"},
    "checkpoint": DATA | {"model", "parallel", "training", "runtime"},
    "evaluation": DATA | {"model", "parallel", "training", "checkpoint", "runtime"},
}
MAY_IMPORT["interop"] = MAY_IMPORT["evaluation"] | {"evaluation", "run_folder"}
MAY_IMPORT["start"] = MAY_IMPORT["evaluation"] | {"evaluation"}
MAY_IMPORT["run_folder"] = DATA | {"training", "checkpoint"}
MAY_IMPORT["train"] = set(MAY_IMPORT) - {"corpus"}
MAY_IMPORT["bench"] = set(MAY_IMPORT)
MAY_IMPORT["commands"] = set(MAY_IMPORT)  # and nothing else: what is measured knows of no bench
MAY_IMPORT["option_types"] = set()
MAY_IMPORT["bench_options"] = {"option_types"}
MAY_IMPORT["options"] = BASE | {"option_types", "bench_options"}
MAY_IMPORT["cli"] = BASE | {"options", "commands", "runtime"}
ONLY_IN = {
    "tensorflow": {"data", "corpus/tfds_source.py"},
    "tensorflow_datasets": {"corpus/tfds_source.py"},
    "sentencepiece": {"tokenization"},
    "tokenizers": {"tokenization/hf_engine.py"},
    "safetensors": {"interop"},
    "transformers": {"interop/verify.py"},
    "torch": {"interop/verify.py", "bench/torch_step.py"},
    "PIL": {"bench/chart.py"},
    "tiktoken": {"tokenization/tiktoken_engine.py"},
    "pyarrow": {"corpus"},
    "fsspec": {"corpus/remote.py"},
    "apache_beam": {"corpus/beam_runner.py"},
    "optax": {"training/optimizer.py", "training/transforms.py"},
    "orbax": {"checkpoint"},
    "tensorboard": {"training/metrics.py"},
    "rich": {"training/progress.py", "evaluation", "commands"},
}
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (module, whether it is imported when the file is) of every import in a file."""
    tree = ast.parse(path.read_text())
    nested = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in nested) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) not in nested))
            if node.module.startswith("jaxgpt"):
                found += [(f"{node.module}.{a.name}", id(node) not in nested) for a in node.names]
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if path.name == "__init__.py" and path.parent == ROOT:
        return
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "jaxgpt" and len(parts) > 1 and parts[1] not in ("__version__", room(path)):
            assert parts[1] in MAY_IMPORT[room(path)], f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_appear_only_in_their_rooms(path):
    here = path.relative_to(ROOT).as_posix()
    for name, _ in imports(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        if allowed is not None:
            assert any(here == a or here.startswith(f"{a}/") for a in allowed), f"{here}: {name}"


def test_libraries_that_not_every_verb_needs_are_never_imported_at_import_time():
    lazy = ("tensorflow", "pyarrow", "tokenizers", "tiktoken", "fsspec", "apache_beam", "rich")
    lazy += ("torch", "transformers")
    for path in MODULES:
        for name, at_import in imports(path):
            assert not (at_import and name.split(".")[0].startswith(lazy)), path


def test_nothing_unsafe_is_used_to_read_files():
    for path in MODULES:
        text = path.read_text()
        for word in ("import pickle", "allow_pickle=True", "eval(", "exec(", "np.load("):
            calls = [line for line in text.splitlines() if word in line.split("#")[0]]
            unsafe = [c for c in calls if not any(ok in c for ok in ("_eval(", ".eval(", "def "))]
            assert not unsafe, f"{path}: {unsafe}"


def test_rooms_are_one_level_deep():
    assert all(len(path.relative_to(ROOT).parts) <= 2 for path in MODULES)
