"""Write README.md from index.ipynb, as the notebook stands: no cell is run.

usage: make_readme.py [--check]

Hidden cells and directives are left out, figures go to docs_assets/ under the number of their cell. Links to pages are
written as the site in nbs/ needs them, `10_math/02_losses.ipynb`, and get their folder here.
"""
import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

SOURCE, TARGET, ASSETS, PAGES = "index.ipynb", "README.md", "docs_assets", "nbs"
HIDDEN = {"hide", "export", "exporti", "default_exp"}


def directives(cell) -> dict[str, str]:
    """`#| name: value` and `#| name value` lines at the top of a code cell."""
    found = re.findall(r"^#\|[ \t]*([\w-]+):?[ \t]*(.*)$", cell.source, re.M) if cell.cell_type == "code" else []
    return {name: value.strip().strip('"') for name, value in found}


def is_shown(cell) -> bool:
    return cell.cell_type != "raw" and not HIDDEN & directives(cell).keys()


def without_directives(source: str) -> str:
    return re.sub(r"^#\|.*\n?", "", source, flags=re.M).lstrip("\n")


def prepared(notebook):
    """The notebook with what a reader of the README is to see, and the alternative text of its figures in order."""
    alts = []
    notebook.cells = [cell for cell in notebook.cells if is_shown(cell)]
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        options = directives(cell)
        alts += [options.get("fig-alt", "figure") for output in cell.outputs if "image/png" in output.get("data", {})]
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data = {"image/png": output.data["image/png"]}
        cell.source = "" if options.get("echo") == "false" else without_directives(cell.source)
    return notebook, alts


def linked_from_root(text: str) -> str:
    """The text with its links to notebooks of other folders made relative to the root."""
    return re.sub(r"\]\((?!\w+:|\.|/)([\w./-]+/[\w.-]+\.ipynb[)#])", rf"]({PAGES}/\1", text)


def rendered(root: Path) -> dict[str, bytes]:
    """Path -> content of README.md and its figures."""
    notebook, alts = prepared(nbformat.read(root / SOURCE, 4))
    notebook.metadata["language_info"] = {"name": "python"}
    body, resources = MarkdownExporter().from_notebook_node(notebook)
    files = {}
    for number, (name, data) in enumerate(sorted(resources["outputs"].items())):
        path = f"{ASSETS}/index_{number}{Path(name).suffix}"
        body = re.sub(rf"!\[[^\]]*\]\({re.escape(name)}\)", f"![{alts[number]}]({path})", body)
        files[path] = data
    body = re.sub(r"^```python\n\s*```$", "", body, flags=re.M)
    body = linked_from_root(re.sub(r"[ \t]+$", "", body, flags=re.M))
    body = re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"
    note = f"<!-- Written by `make readme` from {SOURCE}: edit the notebook. -->\n\n"
    return {TARGET: (note + body).encode(), **files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    parser.add_argument("--root", type=Path, default=Path("."))
    args = parser.parse_args()
    files = rendered(args.root)
    stale = {path for path, data in files.items()
             if not (args.root / path).exists() or (args.root / path).read_bytes() != data}
    orphans = {path.relative_to(args.root).as_posix() for path in (args.root / ASSETS).glob("index_*")} - files.keys()
    if args.check:
        for path in sorted(stale | orphans):
            print(f"{path}: out of date", file=sys.stderr)
        return int(bool(stale | orphans))
    for path in stale:
        (args.root / path).parent.mkdir(exist_ok=True)
        (args.root / path).write_bytes(files[path])
    for path in orphans:
        (args.root / path).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
