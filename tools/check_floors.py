"""Check that the notebooks keep the rules of the house. Reads only; run it from the repository root.

usage: check_floors.py [--all] [--lib comlrl_nb] [--nbs nbs]

A broken rule is printed and makes the exit status 1. `--all` also prints places worth a look: long functions and
modules, lessons without stored output, broad excepts. Those are hints and never fail.
"""
import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DEVELOPMENT = {"nbdev", "fastcore", "execnb", "jupytext", "nbclient", "nbconvert", "nbformat", "pytest", "hypothesis"}
OPTIONAL = {"IPython", "ipywidgets", "wandb", "tensorboard", "trackio", "peft", "accelerate", "gguf", "openai"}
EXPORTS = {"export", "exports", "exporti"}
UNWRITTEN = {"__init__.py", "_modidx.py"}  # modules that need no notebook
TOP = (10**6, "")  # height of a folder or notebook without a number
CELL_LINES, FUNCTION_LINES, MODULE_LINES, TRAINER_LINES, PARAMETERS, METHODS = 60, 40, 300, 200, 9, 25


@dataclass(frozen=True)
class Finding:
    """A place where a rule is broken (`hard`) or that is worth a look."""

    rule: str
    where: str
    hard: bool = False


@dataclass(frozen=True)
class Cell:
    index: int
    kind: str
    source: str
    id: str | None
    outputs: tuple

    @cached_property
    def directives(self) -> list[str]:
        return re.findall(r"^#\|[ \t]*(\S.*?)[ \t]*$", self.source, re.M) if self.kind == "code" else []

    @property
    def flags(self) -> set[str]:
        return {directive.split()[0] for directive in self.directives}

    @property
    def is_exported(self) -> bool:
        return bool(EXPORTS & self.flags)

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed cell without its magics, or None when it does not parse or is not code."""
        if self.kind != "code":
            return None
        try:
            return ast.parse(re.sub(r"^[ \t]*[%!].*$", "", self.source, flags=re.M))
        except SyntaxError:
            return None


@dataclass(frozen=True)
class Notebook:
    path: Path
    inside: Path  # the same file, seen from the folder of all notebooks
    cells: tuple[Cell, ...]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def module(self) -> str | None:
        named = [d.split()[1] for cell in self.code for d in cell.directives if re.match(r"default_exp\s+\S", d)]
        return named[0].removesuffix(".__init__") if named else None

    @property
    def height(self) -> tuple[tuple[int, str], ...]:
        """(floor, place on the floor): an import may not point to a greater one; 01_ comes before 01a_ and 02_."""
        numbers = (re.match(r"(\d+)([a-z]*)_", part) for part in self.inside.parts)
        return tuple((int(found.group(1)), found.group(2)) if found else TOP for found in numbers)


def read(path: Path, nbs: Path) -> Notebook:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return Notebook(path, path.relative_to(nbs), tuple(
        Cell(index, cell["cell_type"], "".join(cell["source"]), cell.get("id"), tuple(cell.get("outputs", ())))
        for index, cell in enumerate(cells)))


def load(nbs: Path) -> list[Notebook]:
    """Every notebook below `nbs`, ordered by path; hidden and generated folders are left out."""
    paths = (path for path in sorted(nbs.rglob("*.ipynb"))
             if not any(part.startswith((".", "_")) for part in path.relative_to(nbs).parts))
    return [read(path, nbs) for path in paths]


def code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def imported(node: ast.AST, module: str = "") -> list[str]:
    """Dotted names an import statement may load; relative ones are resolved against `module` (`lib.package.name`)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = ".".join(module.split(".")[:-node.level]) if node.level else ""
    root = ".".join(part for part in (base, node.module) if part)
    return [root, *(f"{root}.{alias.name}" for alias in node.names)]


# ---- rules of one notebook

def cell_ids(book: Notebook) -> Iterator[Finding]:
    seen: set[str] = set()
    for cell in book.cells:
        if not cell.id or cell.id in seen:
            yield Finding("cell without an id of its own", f"{book.path} cell {cell.index}", hard=True)
        seen.add(cell.id or "")


def lone_imports(book: Notebook) -> Iterator[Finding]:
    """An import shares its cell with imports only; inside functions only exported code may import."""
    for cell in book.code:
        if cell.tree is None:
            continue
        beside = {is_import(node) for node in cell.tree.body} == {True, False}
        inside = not cell.is_exported and any(is_import(n) for top in cell.tree.body if not is_import(top) for n in ast.walk(top))
        if beside or inside:
            yield Finding("import beside other code", f"{book.path} cell {cell.index}", hard=True)


def stored_errors(book: Notebook) -> Iterator[Finding]:
    for cell in book.code:
        if any(output.get("output_type") == "error" for output in cell.outputs):
            yield Finding("stored error", f"{book.path} cell {cell.index}", hard=True)


def lesson_shape(book: Notebook) -> Iterator[Finding]:
    lessons = [cell for cell in book.code if not cell.is_exported and "default_exp" not in cell.flags]
    if lessons and not any(cell.outputs for cell in lessons):
        yield Finding("no stored output", str(book.path))
    hidden = sum("hide" in cell.flags for cell in book.code)
    if len(book.code) > 10 and hidden > .08 * len(book.code):
        yield Finding("hidden cells", f"{book.path}: {hidden} of {len(book.code)}")
    if not re.match(r"# \S.*\n+> \S", book.cells[0].source if book.cells else ""):
        yield Finding("no title and summary line", str(book.path))
    for cell in book.code:
        if cell.is_exported and (lines := code_lines(cell.source)) > CELL_LINES:
            yield Finding("long exported cell", f"{book.path} cell {cell.index}: {lines} lines")


# ---- rules of the whole house

def one_home(books: list[Notebook]) -> Iterator[Finding]:
    home: dict[str, Path] = {}
    for book in books:
        if book.module and book.module in home:
            yield Finding("same default_exp", f"{book.path} and {home[book.module]}: {book.module}", hard=True)
        if book.module:
            home.setdefault(book.module, book.path)


def lowest_home(name: str, homes: dict[str, Notebook]) -> Notebook | None:
    """The notebook of module `name`; of a package without one, its lowest notebook."""
    inside = [book for module, book in homes.items() if module.startswith(name + ".")]
    return homes.get(name) or min(inside, key=lambda book: book.height, default=None)


def only_passes_on(tree: ast.Module) -> bool:
    """True for a module that gives names of other modules another path: a docstring, imports and `__all__`."""
    def passes(node):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_import(node) or is_docstring or isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return all(passes(node) for node in tree.body)


def all_homes(books: list[Notebook], lib: Path) -> dict[str, Notebook]:
    """Module -> notebook; a module that only passes names on lives where the highest of them does."""
    homes = {book.module: book for book in reversed(books) if book.module}
    written = dict(homes)
    for path in sorted(lib.rglob("*.py")):
        module = ".".join(path.relative_to(lib).with_suffix("").parts)
        if path.name in UNWRITTEN or module in written:
            continue
        names = {name for node in ast.parse(path.read_text(encoding="utf-8")).body for name in imported(node, f"{lib.name}.{module}")}
        sources = [written[name.removeprefix(f"{lib.name}.")] for name in names if name.removeprefix(f"{lib.name}.") in written]
        if sources:
            homes[module] = max(sources, key=lambda book: book.height)
    return homes


def upward_imports(books: list[Notebook], homes: dict[str, Notebook], lib: str) -> Iterator[Finding]:
    for book in books:
        for cell in book.code:
            if not cell.is_exported or cell.tree is None:
                continue
            names = {name for node in ast.walk(cell.tree) for name in imported(node, f"{lib}.{book.module}")}
            for name in sorted(names):
                target = lowest_home(name.removeprefix(lib + "."), homes) if name.startswith(lib + ".") else None
                if target and target.height > book.height:
                    yield Finding("import points up", f"{book.path} cell {cell.index}: {name} lives in {target.path}", hard=True)


# ---- rules of an exported module

def module_imports(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        roots = {name.split(".")[0] for name in imported(node)} if not getattr(node, "level", 0) else set()
        for root in sorted(roots & DEVELOPMENT):
            yield Finding("development import", f"{path}:{node.lineno} {root}", hard=True)
        for root in sorted(roots & OPTIONAL if node in tree.body else ()):
            yield Finding("optional package imported by the module", f"{path}:{node.lineno} {root}", hard=True)


def functions(path: Path, text: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            where = f"{path}:{node.lineno} {node.name}"
            if (lines := code_lines(ast.get_source_segment(text, node) or "")) > FUNCTION_LINES:
                yield Finding("long function", f"{where}: {lines} lines")
            if node.name != "__init__" and len(node.args.args) + len(node.args.kwonlyargs) > PARAMETERS:
                yield Finding("many parameters", where)
        if isinstance(node, ast.ClassDef) and (methods := sum(isinstance(n, ast.FunctionDef) for n in node.body)) > METHODS:
            yield Finding("large class", f"{path}:{node.lineno} {node.name}: {methods} methods")


def statements(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if called == "print":
            yield Finding("print", f"{path}:{node.lineno}")
        if called == "getattr" and isinstance(node.args[0], ast.Name) and node.args[0].id == "self":
            yield Finding("getattr on self", f"{path}:{node.lineno}")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")):
            yield Finding("broad except", f"{path}:{node.lineno}")


def other_work(path: Path, text: str) -> Iterator[Finding]:
    for found in re.finditer(r"log_softmax|logsigmoid|urlopen|httpx|json\.dump", text):
        yield Finding("not a trainer's work", f"{path}:{text.count(chr(10), 0, found.start()) + 1} {found.group()}")


def module_rules(lib: Path, modules: set[str]) -> Iterator[Finding]:
    for path in sorted(lib.rglob("*.py")):
        inside = path.relative_to(lib)
        if path.name in UNWRITTEN:
            continue
        text, in_trainers = path.read_text(encoding="utf-8"), inside.parts[0] == "trainers"
        if ".".join(inside.with_suffix("").parts) not in modules and not only_passes_on(ast.parse(text)):
            yield Finding("module without notebook", str(path), hard=True)
        if (lines := code_lines(text)) > (TRAINER_LINES if in_trainers else MODULE_LINES):
            yield Finding("long module", f"{path}: {lines} lines of code")
        tree = ast.parse(text)
        yield from module_imports(path, tree)
        yield from functions(path, text, tree)
        yield from statements(path, tree)
        yield from other_work(path, text) if in_trainers else ()


def check(nbs: Path, lib: Path) -> list[Finding]:
    books = load(nbs)
    found = [finding for book in books for rule in (cell_ids, lone_imports, stored_errors, lesson_shape) for finding in rule(book)]
    found += one_home(books)
    found += upward_imports(books, all_homes(books, lib), lib.name)
    found += module_rules(lib, {book.module for book in books if book.module})
    return found


def report(found: list[Finding]) -> None:
    for rule in sorted({finding.rule for finding in found}):
        places = [finding.where for finding in found if finding.rule == rule]
        print(f"{rule} ({len(places)})", *places, sep="\n    ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print the hints as well")
    parser.add_argument("--lib", type=Path, default=Path("comlrl_nb"))
    parser.add_argument("--nbs", type=Path, default=Path("nbs"))
    args = parser.parse_args()
    found = check(args.nbs, args.lib)
    hard = [finding for finding in found if finding.hard]
    report(found if args.all else hard)
    if not hard:
        print("The floors are in order.")
    return int(bool(hard))


if __name__ == "__main__":
    sys.exit(main())
