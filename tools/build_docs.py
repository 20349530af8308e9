"""Build the documentation site into _docs, for reading without a network.

usage: build_docs.py [--out _docs] [--root PROJECT]

nbdev prepares the pages on a copy of the project (it runs what its API tables need), smalldocs lays them out from the
same _quarto.yml that Quarto reads, and KaTeX and the ipywidgets player come from npm packages kept in .cache/docs.
Nothing on a page is loaded from another server; a page that would is an error.
"""
import argparse
import ast
import contextlib
import html
import inspect
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import make_sidebar

NPM = {"katex": "katex@0.16.22", "html-manager": "@jupyter-widgets/html-manager@1.0.15"}
ROOT = Path(__file__).resolve().parents[1]
VIEW, STATE = "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json"
STAGED = ("settings.ini", "pyproject.toml", "comlrl_nb", "nbs")
LEFT = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
FOLD = '#| code-fold: show\n#| code-summary: "Exported source"'  # what nbdev writes above exported source
EXPORTS = re.compile(r"^#\|[ \t]*export[ \t]*$", re.M)
REMOTE = re.compile(r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=["'](?:https?:)?//[^"']*|<link\b(?=[^>]*\brel=["'](?:stylesheet|icon|preload|preconnect))[^>]*\bhref=["'](?:https?:)?//[^"']*""")
SOURCE_LINK = re.compile(r"\[source\]\([^)]*\)\{[^}]*\}\s*")  # what nbdev adds leads to a server; the page shows the source itself
SHOW_ACTIVE = """
document.addEventListener("DOMContentLoaded", () => {  // the page's own entry, scrolled to the middle of the sidebar
  const bar = document.getElementById("quarto-sidebar"), entry = bar && bar.querySelector(".sidebar-link.active");
  if (entry) bar.scrollTop += entry.getBoundingClientRect().top - bar.getBoundingClientRect().top - bar.clientHeight / 2;
});
"""
REMOTE_CSS = re.compile(r"""@import\s*(?:url\(\s*["']?(?:https?:)?//[^)]*\)|["'](?:https?:)?//[^"']*["'])[^;]*;|url\(["']?(?:https?:)?//[^)]*\)""")


# ---- packages from npm

def npm_package(name: str, cache: Path) -> Path:
    """The unpacked npm package, fetched once."""
    target = cache / name.replace("/", "_").lstrip("@")
    if target.is_dir():
        return target
    if not shutil.which("npm"):
        raise SystemExit("make docs needs npm (it comes with Node.js) to fetch KaTeX and the ipywidgets player once.")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        (Path(folder) / "package").rename(target)
    return target


def add_libraries(site: Path, cache: Path) -> None:
    """Copy what the pages load from the packages, without the fonts and sources no browser asks for."""
    katex, widgets = npm_package(NPM["katex"], cache), npm_package(NPM["html-manager"], cache)
    shutil.copytree(katex / "dist", site / "site_libs/katex", ignore=shutil.ignore_patterns("*.ttf", "*.mjs", "katex.js", "katex.css", "README.md"))
    shutil.copytree(widgets / "dist", site / "site_libs/html-manager", ignore=shutil.ignore_patterns("*amd*", "*.map", "*.eot", "*.ttf"))


# ---- before nbdev: what its page processing would lose

def text_of(cell: dict) -> str:
    return "".join(cell["source"])


def is_only_imports(source: str) -> bool:
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body)


def split_title(cells: list[dict]) -> list[dict]:
    """Title and summary in a cell of their own: nbdev turns the whole first cell into the page's header."""
    found = re.match(r"# [^\n]+\n+(?:>[^\n]*\n*)?", text_of(cells[0])) if cells and cells[0]["cell_type"] == "markdown" else None
    if not found or not text_of(cells[0])[found.end():].strip():
        return cells
    rest = {"cell_type": "markdown", "id": "introduction", "metadata": {}, "source": text_of(cells[0])[found.end():].lstrip()}
    return [{**cells[0], "source": found.group().rstrip()}, rest, *cells[1:]]


def shown_source(cell: dict) -> dict:
    """Exported code is shown below its description, except imports."""
    if cell["cell_type"] != "code" or not EXPORTS.search(text_of(cell)) or is_only_imports(text_of(cell)):
        return cell
    return {**cell, "source": EXPORTS.sub("#| exports", text_of(cell))}


def stage(root: Path, target: Path) -> None:
    """A copy of the project with notebooks made ready for nbdev."""
    for name in STAGED:
        source = root / name
        shutil.copytree(source, target / name, ignore=LEFT) if source.is_dir() else shutil.copy(source, target / name)
    for path in (target / "nbs").rglob("*.ipynb"):
        book = json.loads(path.read_text(encoding="utf-8"))
        end = {"cell_type": "markdown", "id": "end", "metadata": {}, "source": "<!-- end -->"}  # nbdev looks one cell past shown source
        book["cells"] = [*(shown_source(cell) for cell in split_title(book["cells"])), end]
        path.write_text(json.dumps(book), encoding="utf-8")
    (target / "nbs/sidebar.yml").write_text(make_sidebar.sidebar(target / "nbs"), encoding="utf-8")


def signature(function, *, eval_str=False, **options):
    """`inspect.signature`; annotations that name what only a parent class's module imports stay text."""
    try:
        return inspect.signature(function, eval_str=eval_str, **options)
    except NameError:
        return inspect.signature(function, eval_str=False, **options)


def processed(project: Path) -> Path:
    """Let nbdev add API descriptions and links to `project`, the current folder; the folder of finished notebooks."""
    sys.path.insert(0, str(project))
    import fastcore.docments
    import nbdev.doclinks
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    fastcore.docments.signature = signature
    refresh_quarto_yml()
    nbdev.doclinks._build_modidx()
    return proc_nbs(force=True, n_workers=0)


# ---- after nbdev: what smalldocs does not know

def page_name(path: PurePosixPath) -> PurePosixPath:
    """Where nbdev's links expect the page of a notebook: the number before its name is left out."""
    return path.with_name(re.sub(r"^\d+[a-zA-Z0-9]*_", "", path.name.lower()))


def new_names(pages: Path) -> dict[str, str]:
    names = {}
    for path in sorted(pages.rglob("*.ipynb")):
        inside = PurePosixPath(path.relative_to(pages).as_posix())
        names[str(inside)] = str(page_name(inside))
    twice = {new for new in names.values() if list(names.values()).count(new) > 1}
    if twice:
        raise SystemExit(f"two notebooks would be the same page: {', '.join(sorted(twice))}")
    return names


def relink(text: str, page: str, names: dict[str, str], host: str) -> str:
    """Markdown links to notebooks and to nbdev's site, made to point to the pages of this site."""
    folder = posixpath.dirname(page)

    def notebook(found):
        target = posixpath.normpath(posixpath.join(folder, found.group(1)))
        return f"]({posixpath.relpath(names[target], folder or '.')}{found.group(2)}" if target in names else found.group()

    def hosted(found):
        target = found.group(1).removesuffix(".html") + ".ipynb"
        return f"]({posixpath.relpath(target, folder or '.')}{found.group(2)}" if target in names.values() else found.group()
    text = re.sub(r"\]\((?!\w+:)([^)#\s]+\.ipynb)([)#])", notebook, text)
    return re.sub(rf"\]\({re.escape(host)}([^)#\s]+\.html)([)#])", hosted, text)


def numbered_equations(sources: list[str]) -> list[str]:
    """Quarto's labelled equations `$$ … $$ {#eq-name}` and references `@eq-name`, numbered in order of appearance."""
    numbers: dict[str, int] = {}

    def label(found):
        numbers[found.group(2)] = len(numbers) + 1
        return f"::: {{#{found.group(2)}}}\n\n$$\n{found.group(1).strip()} \\tag{{{len(numbers)}}}\n$$\n\n:::"

    def reference(found):
        name = found.group(1)
        return f"[Equation {numbers[name]}](#{name})" if name in numbers else found.group()
    labelled = [re.sub(r"\$\$((?:(?!\$\$).)+)\$\$\s*\{#(eq-[\w-]+)\}", label, source, flags=re.S) for source in sources]
    return [re.sub(r"\[?@(eq-[\w-]+)\]?", reference, source) for source in labelled]


def embed_widgets(book: dict, to_root: str) -> None:
    """Put stored widgets and their player into the page as HTML."""
    state, shown = book["metadata"].get("widgets", {}).get(STATE, {}), 0
    for output in (output for cell in book["cells"] for output in cell.get("outputs", [])):
        if VIEW in output.get("data", {}) and output["data"][VIEW]["model_id"] in state.get("state", {}):
            view = json.dumps(output["data"][VIEW]).replace("</", "<\\/")
            output["data"] = {"text/html": f'<div class="widget"><script type="{VIEW}">{view}</script></div>'}
            shown += 1
    if shown:
        player = f'<script src="{to_root}site_libs/html-manager/embed.js"></script>'
        models = f'<script type="{STATE}">{json.dumps(state).replace("</", "<" + chr(92) + "/")}</script>'
        output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": player + models}}
        book["cells"].append({"cell_type": "code", "metadata": {}, "execution_count": None, "source": "#| echo: false", "outputs": [output]})


def defined(cell: dict) -> list[str]:
    return [node.name for node in ast.parse(text_of(cell)).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def described(cell: dict) -> str | None:
    """The name that a `show_doc` cell describes."""
    found = re.search(r"^show_doc\((\w+)", text_of(cell), re.M) if cell["cell_type"] == "code" else None
    return found.group(1) if found else None


def source_last(cells: list[dict]) -> list[dict]:
    """Descriptions in the order of definition, then the source they describe; nbdev puts the source after the first."""
    done: list[dict] = []
    for cell in cells:
        if described(cell) and done and FOLD in text_of(done[-1]) and described(cell) in defined(done[-1]):
            order = defined(done[-1])
            first = len(done) - 1
            while first and described(done[first - 1]) in order:
                first -= 1
            source, names = done[-1], [*done[first:-1], cell]
            done[first:] = [*sorted(names, key=lambda made: order.index(described(made))), source]
        else:
            done.append(cell)
    return done


def folded(cell: dict) -> str:
    """The cell's source with nbdev's open fold closed and named."""
    names = ", ".join(defined(cell)) if FOLD in text_of(cell) else ""
    return text_of(cell).replace(FOLD, f'#| code-fold: true\n#| code-summary: "Source{" of " if names else ""}{names}"')


def finish_page(path: Path, page: str, names: dict[str, str], host: str) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    book["cells"] = source_last(book["cells"])
    prose = [cell for cell in book["cells"] if cell["cell_type"] == "markdown"]
    for cell, source in zip(prose, numbered_equations([text_of(cell) for cell in prose])):
        cell["source"] = relink(source, page, names, host)
    for cell in book["cells"]:
        if cell["cell_type"] == "raw":
            cell["source"] = re.sub(r"^output-file:.*\n", "", text_of(cell), flags=re.M)
        if cell["cell_type"] != "code":
            continue
        cell["source"] = folded(cell)
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                text = SOURCE_LINK.sub("", "".join(output["data"]["text/markdown"]))
                output["data"]["text/markdown"] = relink(text, page, names, host)
    embed_widgets(book, "../" * page.count("/"))
    path.write_text(json.dumps(book), encoding="utf-8")


def finish(pages: Path, host: str) -> None:
    names = new_names(pages)
    for old, new in names.items():
        finish_page(pages / old, new, names, host)
        (pages / old).rename(pages / new)
    sidebar = (pages / "sidebar.yml").read_text(encoding="utf-8")
    for old, new in names.items():
        sidebar = re.sub(rf"^(\s*- ){re.escape(old)}$", rf"\g<1>{new}", sidebar, flags=re.M)
    (pages / "sidebar.yml").write_text(sidebar, encoding="utf-8")


# ---- the site

def render(pages: Path) -> tuple[Path, list[str]]:
    """Lay out the pages; the folder of the site and what smalldocs warns about."""
    import smalldocs.layout
    from smalldocs.site import build
    smalldocs.layout.KATEX = "@@KATEX@@"
    with contextlib.redirect_stdout(io.StringIO()):
        site = build(pages, quiet=True)
    return Path(site.out), list(site.warnings)


def adapt_script(site: Path) -> None:
    """The search index as a script as well, as a page opened from disk may not fetch a JSON file; the sidebar shows where one is."""
    index = (site / "search.json").read_text(encoding="utf-8")
    (site / "site_libs/search-index.js").write_text(f"window.searchIndex = {index};\n", encoding="utf-8")
    script = site / "site_libs/smalldocs.js"
    text = script.read_text(encoding="utf-8")
    fetched = 'const r = await fetch(offset + "search.json");\n      index = await r.json();'
    if fetched not in text:
        raise SystemExit("smalldocs reads its search index in another way now: look at adapt_script")
    script.write_text(text.replace(fetched, "index = window.searchIndex;") + SHOW_ACTIVE, encoding="utf-8")


def localise(site: Path, host: str) -> None:
    """Point every page to the local libraries and drop what a stylesheet would load from elsewhere."""
    for path in site.rglob("*.html"):
        to_root = "../" * (len(path.relative_to(site).parts) - 1)
        text = path.read_text(encoding="utf-8").replace("@@KATEX@@", f"{to_root}site_libs/katex")
        text = re.sub(rf'href="{re.escape(host)}', f'href="{to_root or "./"}', text)
        text = text.replace('<script src="' + to_root + 'site_libs/fuse/fuse.min.js"></script>',
                            f'<script src="{to_root}site_libs/fuse/fuse.min.js"></script><script src="{to_root}site_libs/search-index.js" defer></script>')
        path.write_text(text, encoding="utf-8")
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        path.write_text(REMOTE_CSS.sub("", text), encoding="utf-8")


def link_methods(site: Path) -> None:
    """Let links to a method without a description of its own (`#node.best`) go to its class (`#node`)."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}

    def nearest(found, path):
        target = Path(os.path.normpath(path.parent / found.group(1))) if found.group(1) else path
        known, place = places.get(target, set()), found.group(2)
        parent = place.rpartition(".")[0]
        return f'href="{found.group(1)}#{parent}"' if place not in known and parent in known else found.group()
    for path, text in pages.items():
        path.write_text(re.sub(r'href="([^"#:]*)#([\w.]+\.\w+)"', lambda found: nearest(found, path), text), encoding="utf-8")


def remote_requests(site: Path) -> list[str]:
    return [f"{path.relative_to(site)}: {html.unescape(found.group())}"
            for path in sorted(site.rglob("*.html")) for found in REMOTE.finditer(path.read_text(encoding="utf-8"))]


def build(root: Path, out: Path, cache: Path) -> list[str]:
    """Build the site of the project `root` in `out`; what is wrong with it, in which case `out` is left alone."""
    with tempfile.TemporaryDirectory(prefix="comlrl_nb-docs-") as folder, contextlib.chdir(folder):
        stage(root, Path(folder).resolve())
        pages = processed(Path(folder).resolve())
        from nbdev.config import get_config
        host = f"{get_config().doc_host}{get_config().doc_baseurl}/"
        finish(pages, host)
        site, warnings = render(pages)
        add_libraries(site, cache)
        localise(site, host)
        link_methods(site)
        adapt_script(site)
        found = [*warnings, *(f"loads from another server: {place}" for place in remote_requests(site))]
        if not found:
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(site, out)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    out, root, cache = args.out.resolve(), args.root.resolve(), ROOT / ".cache/docs"
    for name in NPM.values():
        npm_package(name, cache)
    found = build(root, out, cache)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{out}: {len(list(out.rglob('*.html')))} pages, open {out / 'index.html'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
