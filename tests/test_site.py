"""The offline documentation site: its parts, and the built pages in a browser (`pytest -m browser`)."""
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import build_docs  # noqa: E402
import make_sidebar  # noqa: E402
from notebook_files import cell, write_notebook  # noqa: E402

NAMES = {"00_core/00_types.ipynb": "00_core/types.ipynb", "10_math/02_losses.ipynb": "10_math/losses.ipynb"}
HOST = "https://somewhere.example/comlrl_nb/"


# ---- parts

@pytest.mark.parametrize("link, expected", [
    ("[t](../00_core/00_types.ipynb)", "[t](../00_core/types.ipynb)"),
    ("[t](../00_core/00_types.ipynb#node)", "[t](../00_core/types.ipynb#node)"),
    ("[l](02_losses.ipynb)", "[l](losses.ipynb)"),
    (f"[`Node`]({HOST}00_core/types.html#node)", "[`Node`](../00_core/types.ipynb#node)"),
    ("[x](https://elsewhere.example/00_types.ipynb)", "[x](https://elsewhere.example/00_types.ipynb)"),
])
def test_links_follow_the_page_names(link, expected):
    assert build_docs.relink(link, "10_math/losses.ipynb", NAMES, HOST) == expected


def test_two_notebooks_for_one_page_are_refused(tmp_path):
    for name in ("00_same", "01_same"):
        write_notebook(tmp_path / f"{name}.ipynb")
    with pytest.raises(SystemExit, match="same.ipynb"):
        build_docs.new_names(tmp_path)


def test_labelled_equations_are_numbered_over_the_page():
    first, second, third = build_docs.numbered_equations(["$$\na\n$$ {#eq-one}\n\n$$b$$\n", "$$c$$ {#eq-two}", "By @eq-two and [@eq-one], not @eq-three."])
    assert first == "::: {#eq-one}\n\n$$\na \\tag{1}\n$$\n\n:::\n\n$$b$$\n"
    assert "c \\tag{2}" in second
    assert third == "By [Equation 2](#eq-two) and [Equation 1](#eq-one), not @eq-three."


def test_prose_below_the_title_is_kept():
    title = {"cell_type": "markdown", "source": ["# Losses\n", "\n", "> One line.\n", "\n", "Much to say.\n", "- a: b"]}
    head, rest = build_docs.split_title([title])
    assert head["source"] == "# Losses\n\n> One line." and rest["source"] == "Much to say.\n- a: b"


def test_exported_code_is_shown_except_imports():
    assert build_docs.shown_source(cell("#| export\nimport os"))["source"] == "#| export\nimport os"
    assert build_docs.shown_source(cell("#| export\nx = 1"))["source"] == "#| exports\nx = 1"


def test_stylesheets_lose_only_what_is_remote():
    css = '@import url(https://fonts.example/css2?family=A:wght@300;400&display=swap);a{b:url("x.woff2")}@import "//c.example/d.css" screen;e{f:g}'
    assert build_docs.REMOTE_CSS.sub("", css) == 'a{b:url("x.woff2")}e{f:g}'


@pytest.mark.parametrize("tag, found", [
    ('<script src="https://cdn.example/x.js"></script>', True), ("<img alt='' src='//cdn.example/x.png'>", True),
    ('<link href="http://fonts.example/a.css" rel="stylesheet">', True), ('<a href="https://example.org">out</a>', False),
    ('<script src="../site_libs/x.js"></script>', False), ('<img src="data:image/png;base64,AA">', False),
])
def test_remote_requests_are_found(tmp_path, tag, found):
    (tmp_path / "page.html").write_text(f"<html>{tag}</html>")
    assert bool(build_docs.remote_requests(tmp_path)) == found


def test_links_to_source_on_a_server_are_dropped():
    text = '---\n\n[source](https://a.example/low.py#L3){target="_blank" style="float:right"}\n\n### low\n\n[sources](x.html)'
    assert build_docs.SOURCE_LINK.sub("", text) == "---\n\n### low\n\n[sources](x.html)"


# ---- a small site with one of everything, and the real one

def build(out, root=ROOT):
    done = subprocess.run([sys.executable, ROOT / "tools/build_docs.py", "--out", out, "--root", root], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def small_site(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    shutil.copy(ROOT / "settings.ini", root), shutil.copy(ROOT / "pyproject.toml", root), shutil.copy(ROOT / "_quarto.yml", root)
    (root / "comlrl_nb").mkdir()
    (root / "comlrl_nb/__init__.py").write_text('"""Small."""\n__version__ = "0.1.0"\n')
    write_notebook(root / "nbs/index.ipynb", first={"cell_type": "markdown", "id": "t", "metadata": {}, "source": "# Small\n\n> Line.\n\nSee `low` and `low.once`."})
    page = write_notebook(
        root / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell('#| export\nclass low:\n    "Lower."\n    def once(self, x: int) -> int:\n        return x - 1'),
        {"cell_type": "markdown", "id": "m", "metadata": {}, "source": "$$\nx - 1\n$$ {#eq-low}\n\nBy @eq-low, and inline $x^2$."},
        cell("from ipywidgets import IntSlider"), cell('IntSlider(value=3, description="depth")'),
        cell("#| export\ndef _last():\n    return None"), cell(f"wide = {list(range(100))}"))
    for name in ("styles.css", "favicon.svg"):
        shutil.copy(ROOT / "nbs" / name, root / "nbs" / name)
    shutil.copy(root / "_quarto.yml", root / "nbs/_quarto.yml")
    for command in (["tools/exec_nbs.py", page], ["-c", "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"]):
        script = [ROOT / command[0], *command[1:]] if command[0] != "-c" else command
        subprocess.run([sys.executable, *script], cwd=root, check=True, capture_output=True)
    return build(root / "site", root)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("docs") / "site")


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "the browser suite needs Chromium (Debian, Ubuntu: apt-get install chromium)"
    from playwright.sync_api import sync_playwright
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def serve():
    """folder -> address of a server on this machine."""
    servers = []

    def start(folder):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args, **options):
                super().__init__(*args, directory=str(folder), **options)

            def log_message(self, *_):
                pass
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def tab(browser):
    """(page, complaints): a page that cannot leave this machine, and what went wrong on it."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    complaints = []

    def guard(route):
        if route.request.url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:")):
            return route.continue_()
        complaints.append(f"left this machine: {route.request.url}")
        return route.abort()
    context.route("**/*", guard)
    page = context.new_page()
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}") if request.failure != "net::ERR_ABORTED" else None)
    page.on("response", lambda answer: complaints.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    yield page, complaints
    context.close()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.ids |= {given["id"]} if given.get("id") else set()


def broken_links(site):
    pages = {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, fragment = urldefrag(urljoin(f"/{name}", link))
            path = unquote(path).lstrip("/") or "index.html"
            if not (site / path).is_file():
                yield f"{name}: {link}"
            elif fragment and path in pages and unquote(fragment) not in pages[path].ids:
                yield f"{name}: {link} (no such place)"


@pytest.mark.browser
def test_one_of_everything(small_site, serve, tab):
    page, complaints = tab
    page.goto(serve(small_site) + "index.html")
    assert page.get_attribute("main a:has-text('low.once')", "href").endswith("00_core/low.html#low")
    page.click("main a:has-text('low')")  # from a name in backticks to its description
    page.wait_for_url("**/00_core/low.html#low")
    assert page.inner_text("#eq-low .katex .tag").strip() == "(1)" and page.inner_text("main p a[href='#eq-low']") == "Equation 1"
    assert page.locator("main p .katex:not(.katex-display .katex)").count() == 1
    page.click("summary:has-text('Source of low')")
    assert "return x - 1" in page.inner_text("details.code-fold")
    assert page.locator("main a[href^='http']").count() == 0
    slider = page.locator(".widget-hslider .noUi-handle")
    slider.wait_for()
    assert "depth" in page.inner_text(".widget-hslider") and page.inner_text(".widget-readout").strip() == "3"
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".widget-readout").strip() == "4"
    assert complaints == []


@pytest.mark.browser
def test_every_page_opens_without_a_complaint(site, serve, tab):
    page, complaints = tab
    address = serve(site)
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        page.goto(address + name, wait_until="load")
        complaints += [f"{name}: {text}" for text in page.locator(".katex-error").all_inner_texts()]
        left = page.evaluate("() => [...document.querySelectorAll('main p')].map(p => p.innerText).filter(t => /\\\\\\(|\\\\\\[|\\$\\$/.test(t))")
        complaints += [f"{name}: formula left as text: {text[:80]}" for text in left]
    assert complaints == []


@pytest.mark.browser
def test_a_page_of_mathematics_is_typeset(site, serve, tab):
    page, complaints = tab
    page.goto(serve(site) + "10_math/logprobs.html")
    assert page.locator(".katex-display .katex-html").count() > 0
    assert page.evaluate("() => document.fonts.ready.then(() => [...document.fonts].some(f => f.family.startsWith('KaTeX') && f.status == 'loaded'))")
    assert complaints == []


@pytest.mark.browser
def test_every_internal_link_resolves(site):
    assert list(broken_links(site)) == []


@pytest.mark.browser
def test_broken_links_are_found(tmp_path):
    (tmp_path / "index.html").write_text('<a href="gone.html"></a><a href="#nowhere"></a><a id="here" href="#here"></a>')
    assert list(broken_links(tmp_path)) == ["index.html: gone.html", "index.html: #nowhere (no such place)"]


@pytest.mark.browser
@pytest.mark.parametrize("from_disk", [False, True])
def test_search_finds_a_page(site, serve, tab, from_disk):
    page, complaints = tab
    page.goto((site / "index.html").as_uri() if from_disk else serve(site) + "index.html")
    page.fill(".smalldocs-search input", "joint response")
    page.locator(".search-result").first.wait_for()
    page.locator(".search-result", has_text="Types").first.click()
    page.wait_for_url("**/00_core/types.html*")
    assert complaints == []


CONTRAST = """element => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const over = (top, under) => { const a = top[3] ?? 1; return [0, 1, 2].map(i => a * top[i] + (1 - a) * under[i]); };
  const light = c => c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
  const back = layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
  const text = over(parse(getComputedStyle(element).color), back);
  const [high, low] = [light(text), light(back)].sort((a, b) => b - a);
  return (high + .05) / (low + .05);
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_search_box_can_be_read(small_site, serve, tab, scheme):
    page, _ = tab
    page.emulate_media(color_scheme=scheme)
    page.goto(serve(small_site) + "index.html")
    assert page.evaluate("() => document.documentElement.classList.contains('quarto-dark')") == (scheme == "dark")
    assert page.eval_on_selector(".smalldocs-search input", CONTRAST) > 4.5


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_the_search_finds_can_be_read(small_site, serve, tab, scheme):
    page, _ = tab
    page.emulate_media(color_scheme=scheme)
    page.goto(serve(small_site) + "index.html")
    page.fill(".smalldocs-search input", "lower")
    page.locator(".search-result").first.wait_for()
    for part in ("title", "section", "text", "text mark"):
        found = page.locator(f".search-result-{part}")
        assert found.count() and found.first.evaluate(CONTRAST) > 4.5, part
    page.hover(".search-result")
    assert page.eval_on_selector(".search-result:hover .search-result-text", CONTRAST) > 4.5


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_code_of_a_page_can_be_read(site, serve, tab, scheme):
    page, _ = tab
    page.emulate_media(color_scheme=scheme)
    page.goto(serve(site) + "10_math/losses.html")
    texts = "main p, main h2, main code, main td, main pre.sourceCode span[class], .sidebar-link, #TOC a, summary"
    poor = page.eval_on_selector_all(texts, f"all => all.filter(e => e.innerText && !e.closest('.katex') && ({CONTRAST})(e) < 4.5).map(e => e.outerHTML.slice(0, 80))")
    assert poor == [], "\n".join(poor)


@pytest.mark.browser
def test_long_lines_of_code_wrap(small_site, serve, tab):
    page, _ = tab
    page.goto(serve(small_site) + "00_core/low.html")
    assert page.locator("pre.sourceCode", has_text="wide =").count() == 1
    assert page.eval_on_selector_all("pre.sourceCode", "all => all.every(e => e.scrollWidth <= e.clientWidth)")


@pytest.mark.browser
def test_the_sidebar_shows_the_page_that_is_open(site, serve, tab):
    page, _ = tab
    page.goto(serve(site) + "70_lab/cli.html")
    entry, bar = page.locator("#quarto-sidebar .sidebar-link.active").bounding_box(), page.locator("#quarto-sidebar").bounding_box()
    assert max(bar["y"], 0) < entry["y"] < min(bar["y"] + bar["height"], 900) - entry["height"] and page.evaluate("scrollY") == 0


@pytest.mark.browser
def test_the_sidebar_goes_from_the_ground_up(site, serve, tab):
    page, _ = tab
    page.goto(serve(site) + "index.html")
    shown = [text.strip() for text in page.locator("#quarto-sidebar .sidebar-item-section > .sidebar-item-container .menu-text").all_inner_texts()]
    assert shown == [title for title, _ in make_sidebar.sections(ROOT / "nbs")]


@pytest.mark.browser
def test_stored_search_index_names_pages_that_exist(site):
    hits = json.loads((site / "search.json").read_text(encoding="utf-8"))
    assert hits and all((site / hit["href"].split("#")[0]).is_file() for hit in hits)
