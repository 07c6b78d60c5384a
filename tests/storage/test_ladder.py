"""Holds the ladder: who may import whom, read from the source with `ast`."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT) for room in ("actors", "storage") for path in (ROOT / room).rglob("*.py")
)


def dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = set(map(dotted, FILES))

TABLES = {"batches", "branches", "heads", "inbox", "messages", "moves", "sessions", "turns"}
"""A table each; where they meet is `steps`, `admission`, what makes changes, and `reads`."""

PURE = {
    Path("storage/errors.py"),
    Path("storage/receipts.py"),
    Path("storage/records.py"),
    Path("storage/codec.py"),
    Path("storage/places.py"),
    Path("actors/errors.py"),
    Path("actors/closing.py"),
    Path("actors/pending.py"),
    Path("actors/taking.py"),
    *(file for file in FILES if file.parent == Path("actors/conversation")),
}
IMPURE_MODULES = {"apsw", "trio", "trio_util", "threading", "time", "datetime", "random", "secrets"}
IMPURE_MODULES |= {"os", "pathlib", "socket", "subprocess", "uuid", "asyncio"}

TRIO_IN_STORAGE = {"opening.py", "offload.py", "readers.py", "renewal.py", "writer.py", "beside.py"}


def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text("utf-8"), str(file))


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """What stands under ``if TYPE_CHECKING:``, which no running program imports."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for part in node.body
        for inner in ast.walk(part)
    }


def imports(file: Path, *, at_runtime: bool = False) -> Iterator[str]:
    """Yield the dotted name of every module that `file` imports, relative ones resolved."""
    tree = parsed(file)
    skipped = typing_only(tree) if at_runtime else set()
    folder = file.parent.parts
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                assert node.module is not None
                yield node.module
                continue
            base = folder[: len(folder) - node.level + 1]
            stem = [*base, *(node.module or "").split(".")] if node.module else [*base]
            own = ".".join(stem) == dotted(file)  # a front door that shows one of its rooms
            for alias in node.names:
                name = ".".join([*stem, alias.name])
                passed_on = stem and not own and alias.name in exports(".".join(stem))
                is_module = name in MODULES and not passed_on
                yield name if is_module else ".".join(stem)


def exports(name: str) -> list[str]:
    names = importlib.import_module(f"turnkeeper.{name}").__all__
    assert isinstance(names, list)
    return names


def modules_of(file: Path, *, at_runtime: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(file, at_runtime=at_runtime)}


def in_room(room: str) -> list[Path]:
    return [file for file in FILES if file.parts[0] == room]


def by_name(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=str)


def test_the_house_is_where_it_is_looked_for() -> None:
    assert {Path("storage/store.py"), Path("actors/actor.py")} <= set(FILES)
    assert set(FILES) >= PURE
    assert {Path(f"storage/{name}.py") for name in TABLES} <= set(FILES)
    assert "storage.errors" in set(imports(Path("storage/codec.py")))
    assert "storage" in set(imports(Path("actors/actor.py")))
    assert "storage.branches" in set(imports(Path("storage/reads.py")))


@by_name(in_room("storage"))
def test_storage_knows_no_actors(file: Path) -> None:
    names = set(imports(file))
    assert not {name for name in names if name.split(".")[0] in ("actors", "turnkeeper")}


@by_name(in_room("actors"))
def test_actors_see_storage_through_its_front_door_only(file: Path) -> None:
    names = set(imports(file))
    assert not {name for name in names if name.startswith("storage.")}
    assert not {name for name in names if name.split(".")[0] == "turnkeeper"}


@by_name(in_room("actors"))
def test_actors_know_no_sql(file: Path) -> None:
    assert not modules_of(file) & {"apsw", "sqlite3"}


@by_name([Path(f"storage/{name}.py") for name in sorted(TABLES)])
def test_no_table_imports_another(file: Path) -> None:
    others = {f"storage.{name}" for name in TABLES} - {dotted(file)}
    assert not set(imports(file)) & others


@by_name(sorted(PURE))
def test_a_pure_file_does_no_io_and_has_no_clock(file: Path) -> None:
    assert not modules_of(file) & IMPURE_MODULES
    for node in ast.walk(parsed(file)):
        assert not isinstance(node, (ast.AsyncFunctionDef, ast.Await))
        assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "print"))


@by_name(sorted(PURE))
def test_a_pure_file_of_storage_imports_pure_ones_only(file: Path) -> None:
    inside = {name for name in imports(file) if name.split(".")[0] in ("actors", "storage")}
    pure = {dotted(file) for file in PURE} | {"storage", "actors.conversation"}
    if file.parts[0] == "storage":
        pure.remove("storage")
    assert inside <= pure


@by_name(in_room("storage"))
def test_trio_is_met_in_six_files_of_storage(file: Path) -> None:
    assert ("trio" in modules_of(file)) == (file.name in TRIO_IN_STORAGE)


def test_no_import_ring() -> None:
    below = {dotted(file): set(imports(file, at_runtime=True)) & MODULES for file in FILES}
    path: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(below[name]):
            visit(other)
        done.add(path.pop())

    for name in below:
        visit(name)


@by_name(FILES)
def test_no_import_hides_behind_a_type_check(file: Path) -> None:
    """A ring that only the type checker sees is one all the same."""
    inner = set(imports(file)) - set(imports(file, at_runtime=True))
    assert not {name for name in inner if name.split(".")[0] in ("actors", "storage")}


@by_name(FILES)
def test_every_file_says_what_it_exports_in_order_and_has_it(file: Path) -> None:
    module = importlib.import_module(f"turnkeeper.{dotted(file)}")
    names = module.__all__
    assert list(names) == sorted(names, key=export_order)
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(module, name), name


def export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@by_name([file for file in FILES if file.name != "__init__.py"])
def test_what_a_file_exports_is_its_own(file: Path) -> None:
    names = exports(dotted(file))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(parsed(file))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not imported & set(names)


@by_name([file for file in FILES if file.name != "__init__.py"])
def test_nobody_imports_what_a_file_does_not_export(file: Path) -> None:
    package = ".".join(["turnkeeper", *file.parent.parts])
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            source = importlib.import_module("." * node.level + (node.module or ""), package)
            name = source.__name__.removeprefix("turnkeeper").lstrip(".")
            for alias in node.names:
                if f"{name}.{alias.name}".lstrip(".") not in MODULES:
                    assert alias.name in exports(name)


@by_name([file for file in FILES if file.name == "__init__.py"])
def test_a_front_door_only_passes_on(file: Path) -> None:
    for node in parsed(file).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert is_docstring or is_all or isinstance(node, ast.ImportFrom), ast.unparse(node)


@by_name(FILES)
def test_every_file_opens_with_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(parsed(file))
