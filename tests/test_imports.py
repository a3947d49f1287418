"""Imports point one way, and nothing loads what it does not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom

PACKAGE = Path(fedloom.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
)

# from the bottom to the top: a module may import its own layer and those above it in this table
LAYERS = [
    ["fedloom", "errors", "faults", "machine"],
    [
        *("files", "keys", "tree", "record", "discovery", "user_code", "environment_reads", "code_values"),
        *("syntax_hash", "former_keys", "field_words"),
    ],
    ["unread_fields", "training.generators"],
    [
        "aggregation",
        "training.optimizers",
        "training.masking",
        "metrics",
        "score_metrics",
        "training.hidden_layers",
        "training.keras_module",
        "training.modules",
        "training.python_state",
        "training.tape",
        "data",
        "models",
    ],
    ["task"],
    ["training", "privacy", "compression"],
    ["federation", "clock", "backends.protocol", "training.probe"],
    ["algorithm"],
    ["algorithms", "backends"],
    ["federation.engine"],
    ["catalogue", "experiment", "results", "tuning", "papers"],
    ["audits"],
    ["watch"],
    ["network"],
    ["flower"],
    ["testing"],
    ["cli", "__main__"],
]


def part(module: str) -> str:
    """The module or folder of the package that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def layer(module: str) -> int:
    for name in (module.removeprefix("fedloom."), part(module)):
        for number, layer in enumerate(LAYERS):
            if name in layer:
                return number
    raise AssertionError(f"say in LAYERS where {part(module)} belongs")


def file_of(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(module: str, *, lazily: bool = True) -> set[str]:
    """The modules of the package that one imports: when it runs, or only when it is loaded itself."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and not lazily:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else str(node.module) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file_of(module).read_text()))
    return {name for name in found if name == "fedloom" or name.startswith("fedloom.")}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_above_it(module: str) -> None:
    above = {other for other in imported(module) if layer(other) > layer(module)}
    assert above == set()


def test_algorithms_and_backends_never_import_each_other() -> None:
    for module in MODULES:
        parts = {part(other) for other in imported(module)}
        if part(module) == "algorithms":
            assert not parts & {"backends", "engine", "experiment"}
        if part(module) == "backends":
            assert not parts & {"algorithms", "engine", "experiment"}


def test_coordinator_and_agent_share_only_the_protocol() -> None:
    """A rehearsal, which starts agents, is the one exception."""
    for module in MODULES:
        others = imported(module)
        if module.startswith("fedloom.network.protocol"):
            assert not {
                other for other in others if other.startswith(("fedloom.network.agent", "fedloom.network.coordinator"))
            }
        if module.startswith("fedloom.network.agent"):
            assert not {other for other in others if other.startswith("fedloom.network.coordinator")}, module
        if module.startswith("fedloom.network.coordinator") and module != "fedloom.network.coordinator.rehearsal":
            assert not {other for other in others if other.startswith("fedloom.network.agent")}, module


def test_the_tree_knows_nothing_of_the_rest() -> None:
    assert imported("fedloom.tree") == set()
    assert imported("fedloom.aggregation.means") == {"fedloom.tree"}


def test_no_module_waits_for_itself_to_be_loaded() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        if module in done:
            return
        for other in imported(module, lazily=False) - {"fedloom"}:
            walk(other, (*path, module))
        done.add(module)

    for module in MODULES:
        walk(module, ())


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["fedloom", "fedloom.cli", "fedloom.errors", "fedloom.files", "fedloom.keys", "fedloom.record"]
)
def test_importing_it_does_not_load_torch(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not {"torch", "sklearn", "pandas", "matplotlib"} & loaded


def test_a_public_name_is_loaded_when_it_is_used() -> None:
    loaded = loaded_by("import fedloom; fedloom.FedAvg")
    assert {"torch", "fedloom.algorithms.fedavg"} <= loaded
    assert "fedloom.backends.vector" not in loaded


def test_every_public_name_exists() -> None:
    assert set(dir(fedloom)) == set(fedloom.__all__)
    for name in fedloom.__all__:
        assert getattr(fedloom, name) is not None
    with pytest.raises(AttributeError, match="module 'fedloom' has no attribute 'FedAvgg'"):
        fedloom.FedAvgg  # noqa: B018


def test_every_public_name_can_be_had_and_every_algorithm_is_public() -> None:
    import fedloom
    from fedloom.algorithms import ALGORITHMS

    assert all(getattr(fedloom, name) is not None for name in fedloom.__all__)
    assert {kind.__name__ for kind in ALGORITHMS.values()} <= set(fedloom.__all__)
