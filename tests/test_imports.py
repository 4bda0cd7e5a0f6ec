"""The package's floors.

Imports only go down, files stay short, dependencies stay few, global settings stay untouched.
"""

import ast
import doctest
import importlib
import importlib.metadata
import pathlib
import pydoc
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "kbr_jax"
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

#: Lowest floor first; what shares a floor may not import from each other.
FLOORS = (
    ("_typing", "_tables"),
    ("_warnings",),
    ("_numerics",),
    ("_checks",),
    ("_trees",),
    ("_lapack", "devices"),
    ("_solves",),
    ("kernels",),
    ("features",),
    ("embedding",),
    ("rules",),
    ("moments", "causal"),
    ("filtering", "propagation", "dynamics", "herding", "hypotheses", "likelihood_free"),
    ("tuning",),
    ("learning",),
    ("plotting", "sklearn"),
    ("experimental",),
    ("__init__",),
)
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
OUTSIDE = {"jax", "equinox", "optax", "jaxtyping", "numpy"}

#: What one file alone may import, inside a function: the package works without it.
EXTRAS = {
    "tuning/_progress.py": {"tqdm"},
    "plotting/_axes.py": {"matplotlib"},
    "hypotheses/_discovery.py": {"causallearn"},
    "sklearn.py": {"sklearn"},
}


def name_of(path):
    return str(path.relative_to(ROOT))


def section_of(parts):
    """The part of the package that a module path belongs to: a folder, or a file at the top."""
    return parts[0] if parts else "__init__"


def module_parts(path):
    """`kernels/_base.py` -> ("kernels", "_base"); a folder's `__init__.py` is the folder itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path):
    """All imports of a file, wherever they stand."""
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def exists(parts):
    return (ROOT.joinpath(*parts[:-1]) / f"{parts[-1]}.py").exists() or ROOT.joinpath(
        *parts, "__init__.py"
    ).exists()


def relative_targets(path):
    """Modules of the package that a file imports, as parts."""
    parts = module_parts(path)
    package = parts if path.name == "__init__.py" else parts[:-1]
    targets = []
    for node in imports(path):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = package[: len(package) - (node.level - 1)]
        base += tuple(node.module.split(".")) if node.module else ()
        for alias in node.names:
            named = (*base, alias.name)
            targets.append(named if exists(named) else base)
    return targets


def absolute_targets(path):
    """Top-level names of what a file imports from outside."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_the_package_was_found():
    assert len(FILES) > 10
    assert {section_of(module_parts(path)) for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    own = section_of(module_parts(path))
    for target in relative_targets(path):
        section = section_of(target)
        assert section in FLOOR, f"{name_of(path)} imports {section}, which has no floor"
        lowest = ("__init__", "_numerics", "_checks", "_trees", "_lapack", "_solves", "_warnings")
        inside = section == own and own not in lowest
        assert inside or FLOOR[section] < FLOOR[own], (
            f"{name_of(path)} imports {'.'.join(target)}, from above"
        )


def test_no_module_imports_itself_in_a_circle():
    graph = {
        module_parts(path): set(relative_targets(path)) - {module_parts(path)} for path in FILES
    }
    done, active = set(), []

    def visit(module):
        assert module not in active, " -> ".join(
            ".".join(m) or "kbr_jax" for m in (*active, module)
        )
        if module in done:
            return
        active.append(module)
        for target in graph.get(module, ()):
            visit(target)
        done.add(active.pop())

    for module in graph:
        visit(module)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_outside_imports_are_few(path):
    outside = absolute_targets(path)
    assert "kbr_jax" not in outside, "imports inside the package are relative"
    assert outside <= OUTSIDE | EXTRAS.get(name_of(path), set()) | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short_and_documented(path):
    text = path.read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def dotted(node):
    """`jax.config.update` for the attribute chain of that name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([*reversed(names), node.id]) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_global_configuration_is_left_alone(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert "config" not in dotted(node).split("."), (
            f"line {node.lineno} touches the configuration"
        )
    named = [alias.name for node in imports(path) for alias in node.names]
    assert "config" not in named


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name == "__init__.py"], ids=name_of
)
def test_an_init_file_only_lists_its_names(path):
    body = ast.parse(path.read_text()).body
    for node in body[1:]:
        assert isinstance(node, (ast.ImportFrom, ast.Assign))
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert all(alias.asname in (None, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_have_few_arguments(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            given = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            assert len([name for name in given if name != "self"]) <= 10, node.name


def test_the_public_names():
    import kbr_jax as kbr

    assert len(kbr.__all__) <= 80 and len(set(kbr.__all__)) == len(kbr.__all__)
    assert kbr.__version__ == importlib.metadata.version("kbr_jax")
    for section in {section_of(module_parts(path)) for path in FILES} - {"__init__"}:
        module = importlib.import_module(f"kbr_jax.{section}")
        for name in getattr(module, "__all__", ()):
            assert getattr(module, name).__doc__, f"{section}.{name}"
    rendered = pydoc.render_doc(kbr, renderer=pydoc.plaintext)
    for name in kbr.__all__:
        assert getattr(kbr, name).__doc__ and name in rendered, name


def test_old_names_are_gone():
    """Some of the first column of the table in CONTRIBUTING."""
    import kbr_jax as kbr

    for name in ("Trace", "ChordalGaussian", "fit_posterior", "advance", "mmd_loss"):
        assert not hasattr(kbr, name)
    for name in ("PredictedEstimator", "given_landmarks", "Recovery", "read_beliefs"):
        assert not any(hasattr(getattr(kbr, s), name) for s in ("dynamics", "propagation"))


@pytest.mark.parametrize("path", [path for path in FILES if ">>>" in path.read_text()], ids=name_of)
def test_examples_in_docstrings_run(path):
    module = importlib.import_module(".".join(("kbr_jax", *module_parts(path))))
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module.__name__:
            for test in finder.find(value, name, module=False):
                runner.run(test)
    assert runner.tries > 0 and runner.failures == 0


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_docstrings_begin_with_a_short_sentence(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        text = re.sub(r"\$[^$]*\$|`[^`]*`", "X", text)
        text = re.sub(r"\((?:S09|S13|F11|L15|K16)[^)]*\)", "", text)
        assert len(re.split(r"(?<=[.:;])\s", text)[0].split()) <= 15, text
