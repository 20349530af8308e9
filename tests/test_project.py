"""The repository itself: layout, rules of the floors, tools, and what an installed package contains."""
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import check_floors  # noqa: E402
import check_sync  # noqa: E402
import make_readme  # noqa: E402
import make_sidebar  # noqa: E402
from notebook_files import TITLE, cell, write_notebook  # noqa: E402

# ---- layout

@pytest.mark.parametrize("name", ["index.ipynb", "_quarto.yml"])
def test_pages_at_the_root_are_linked_into_nbs(name):
    link = ROOT / "nbs" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_file() and not (ROOT / name).is_symlink()


def test_default_exp_is_unique():  # C78
    assert not list(check_floors.one_home(check_floors.load(ROOT / "nbs")))


def test_no_rule_of_the_floors_is_broken(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert [found for found in check_floors.check(Path("nbs"), Path("comlrl_nb")) if found.hard] == []


def test_readme_is_what_the_index_gives():
    for path, content in make_readme.rendered(ROOT).items():
        assert (ROOT / path).read_bytes() == content, f"{path}: run `make sync`"


def test_sidebar_names_every_notebook_once():
    listed = [path for _, paths in make_sidebar.sections(ROOT / "nbs") for path in paths]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "nbs").as_posix() for path in (ROOT / "nbs").glob("*/**/*.ipynb")
                                    if ".ipynb_checkpoints" not in path.parts)


def test_commands_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [line.split()[1] for line in readme.splitlines() if line.startswith("make ")]
    assert commands == ["demo", "test"] and all(f"\n{command}:" in makefile for command in commands)


def test_pages_linked_from_the_readme_exist():
    links = re.findall(r"\]\((?!\w+:)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).is_file()] == []
    folders = {path.name for path in (ROOT / "nbs").iterdir() if list(path.glob("*.ipynb"))} - {"nbs"}
    assert {link.split("/")[1] for link in links if link.startswith("nbs/")} == folders


@pytest.mark.parametrize("link, expected", [
    ("[l](10_math/02_losses.ipynb)", "[l](nbs/10_math/02_losses.ipynb)"),
    ("[l](10_math/02_losses.ipynb#a), [t](tutorials/x.ipynb)", "[l](nbs/10_math/02_losses.ipynb#a), [t](nbs/tutorials/x.ipynb)"),
    ("[f](docs_assets/index_0.png) [w](https://a.example/b.ipynb)", "[f](docs_assets/index_0.png) [w](https://a.example/b.ipynb)"),
])
def test_links_of_the_index_start_at_the_root_in_the_readme(link, expected):
    assert make_readme.linked_from_root(link) == expected


# ---- each rule finds what it is for

@pytest.fixture
def house(tmp_path):
    """A small package in order: `low` on the ground floor, `high` above it."""
    write_notebook(tmp_path / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("#| export\ndef low():\n    return 1"))
    write_notebook(tmp_path / "nbs/10_math/00_high.ipynb", cell("#| default_exp pack.high"),
                   cell("#| export\nfrom lib.low import low"), cell("#| export\ndef high():\n    return low()"))
    for module in ("low", "pack/high"):
        (tmp_path / f"lib/{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"lib/{module}.py").write_text("x = 1\n")
    return tmp_path


def rules(house, hard=True):
    return {found.rule for found in check_floors.check(house / "nbs", house / "lib") if found.hard == hard}


def test_a_house_in_order_has_no_findings(house):
    assert rules(house) == set()


@pytest.mark.parametrize("source", [
    "from lib.pack.high import high", "import lib.pack.high", "from lib.pack import high", "from lib import pack",
    "from .pack.high import high", "from . import pack", "def f():\n    from lib.pack.high import high\n    return high",
])
def test_imports_that_point_up_are_found(house, source):
    write_notebook(house / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell(f"#| export\n{source}"))
    assert rules(house) == {"import points up"}


def test_a_later_notebook_of_the_same_floor_is_up(house):
    write_notebook(house / "nbs/00_core/01_later.ipynb", cell("#| default_exp later"), cell("#| export\nx = 1"))
    (house / "lib/later.py").write_text("x = 1\n")
    write_notebook(house / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("#| export\nfrom lib.later import x"))
    assert rules(house) == {"import points up"}


def test_lessons_may_look_up(house):
    write_notebook(house / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("from lib.pack.high import high"))
    assert rules(house) == set()


@pytest.mark.parametrize("cells, rule", [
    ([cell("import os\nprint(os.name)")], "import beside other code"),
    ([cell("#| export\nimport os\nx = os.name")], "import beside other code"),
    ([cell("def f():\n    import os\n    return os")], "import beside other code"),
    ([cell("1 + 1", cell_id="")], "cell without an id of its own"),
    ([cell("1 + 1", "same"), cell("2 + 2", "same")], "cell without an id of its own"),
    ([cell("1 / 0", outputs=[{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}])], "stored error"),
    ([cell("#| default_exp low")], "same default_exp"),
])
def test_broken_notebooks_are_found(house, cells, rule):
    write_notebook(house / "nbs/20_more/00_page.ipynb", *cells)
    assert rules(house) == {rule}


def test_exported_functions_may_import_what_only_they_need(house):
    write_notebook(house / "nbs/20_more/00_page.ipynb", cell("#| export\ndef f():\n    import os\n    return os"))
    assert rules(house) == set()


@pytest.mark.parametrize("text, rule", [
    ("from fastcore.basics import patch", "development import"),
    ("def f():\n    import nbdev", "development import"),
    ("import wandb", "optional package imported by the module"),
])
def test_broken_modules_are_found(house, text, rule):
    (house / "lib/low.py").write_text(text + "\n")
    assert rules(house) == {rule}


def test_an_optional_package_inside_a_function_is_fine(house):
    (house / "lib/low.py").write_text("def f():\n    import wandb\n    return wandb\n")
    assert rules(house) == set()


@pytest.mark.parametrize("text", ["x = 1\n", "print(1)\n", "def f(): pass\n"])
def test_a_module_without_notebook_is_found(house, text):
    (house / "lib/stray.py").write_text(text)
    assert rules(house) == {"module without notebook"}


def test_a_module_that_passes_names_on_needs_no_notebook_but_has_a_floor(house):
    (house / "lib/other_path.py").write_text('"""Another path."""\nfrom lib.pack.high import high\n\n__all__ = ["high"]\n')
    assert rules(house) == set()
    write_notebook(house / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("#| export\nfrom lib.other_path import high"))
    assert rules(house) == {"import points up"}


def test_letters_after_a_number_count(house):
    write_notebook(house / "nbs/00_core/00a_next.ipynb", cell("#| default_exp next"), cell("#| export\nfrom lib.low import low"))
    (house / "lib/next.py").write_text("x = 1\n")
    assert rules(house) == set()
    write_notebook(house / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("#| export\nfrom lib.next import x"))
    assert rules(house) == {"import points up"}


@pytest.mark.parametrize("text, hint", [
    ("def f():\n" + "    x = 1\n" * 41, "long function"),
    ("x = 1\n" * 301, "long module"),
    ("def f(a, b, c, d, e, f, g, h, i, j):\n    pass", "many parameters"),
    ("class C:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(26)), "large class"),
    ("try:\n    x = 1\nexcept Exception:\n    pass", "broad except"),
    ("try:\n    x = 1\nexcept:\n    pass", "broad except"),
    ("def f(self):\n    return getattr(self, 'x', 1)", "getattr on self"),
    ("print(1)", "print"),
])
def test_hints_about_modules(house, text, hint):
    (house / "lib/low.py").write_text(text + "\n")
    assert hint in rules(house, hard=False) and rules(house) == set()


def test_hints_about_notebooks(house):
    write_notebook(house / "nbs/20_more/00_page.ipynb", cell("#| export\n" + "x = 1\n" * 61), cell("1 + 1"),
                   first={**TITLE, "source": "# No summary"})
    assert rules(house, hard=False) >= {"long exported cell", "no stored output", "no title and summary line"}
    (house / "lib/trainers").mkdir()
    (house / "lib/trainers/t.py").write_text("y = log_softmax(x)\n")
    assert "not a trainer's work" in rules(house, hard=False)


def test_the_exit_status_tells(house, monkeypatch, capsys):
    arguments = ["check_floors.py", "--nbs", str(house / "nbs"), "--lib", str(house / "lib")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert check_floors.main() == 0
    (house / "lib/stray.py").write_text("print(1)\n")
    assert check_floors.main() == 1
    assert "stray.py" in capsys.readouterr().out


# ---- in step with the notebooks

@pytest.fixture
def project(tmp_path):
    """A package of one notebook with the files the check reads, exported and clean."""
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "comlrl_nb").mkdir()
    (tmp_path / "comlrl_nb/__init__.py").write_text('"""Small."""\n__version__ = "0.1.0"\n')
    write_notebook(tmp_path / "index.ipynb", cell("1 + 1"))
    write_notebook(tmp_path / "nbs/00_core/00_low.ipynb", cell("#| default_exp low"), cell("#| export\ndef low():\n    return 1"))
    (tmp_path / "nbs/index.ipynb").symlink_to("../index.ipynb")
    assert check_sync.export_and_clean(tmp_path) == ""
    return tmp_path


def test_a_project_in_step_is_left_alone(project):
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    assert check_sync.out_of_step(project) == []
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


def test_what_is_out_of_step_is_named_and_kept(project):
    module, page = project / "comlrl_nb/low.py", project / "nbs/00_core/00_low.ipynb"
    module.write_text(module.read_text().replace("return 1", "return 2"))
    page.write_text(page.read_text().replace('"execution_count": null', '"execution_count": 7'))
    edited = module.read_text(), page.read_text()
    assert check_sync.out_of_step(project) == ["comlrl_nb/low.py: not what the notebooks export", "nbs/00_core/00_low.ipynb: not clean"]
    assert (module.read_text(), page.read_text()) == edited


# ---- running notebooks

def run_tool(name, *arguments, cwd=ROOT, **env):
    kept = {key: value for key, value in os.environ.items() if key != "IN_TEST"}
    return subprocess.run([sys.executable, str(ROOT / "tools" / name), *map(str, arguments)],
                          cwd=cwd, env={**kept, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("change", ["torch.set_default_dtype(torch.float64)", "os.environ['COMPARATOR_KEY'] = 'x'"])
def test_a_notebook_may_not_change_the_process(project, change):  # C80
    page = project / "nbs/00_core/01_rude.ipynb"
    write_notebook(page, cell("import os\nimport torch"), cell(change))
    done = run_tool("test_nbs.py", page, cwd=project)
    assert done.returncode == 1 and "01_rude.ipynb changes the process for the next notebook" in done.stderr


def test_notebooks_that_leave_no_trace_pass(project):
    done = run_tool("test_nbs.py", "--workers", 0, "--reverse", cwd=project)
    assert done.returncode == 0 and "Success." in done.stdout, done.stderr


def test_stored_outputs_are_the_same_every_time(tmp_path):
    kept = {"output_type": "stream", "name": "stdout", "text": "stored long ago"}
    page = write_notebook(tmp_path / "page.ipynb", cell("import matplotlib.pyplot as plt\nfrom ipywidgets import IntSlider\nfrom tqdm.auto import tqdm"),
                          cell("for _ in tqdm(range(2)):\n    pass\nIntSlider()"), cell("_ = plt.plot([1, 2])"), cell("#| slow\n1 + 1", outputs=[kept]))
    runs = []
    for _ in range(2):
        done = run_tool("exec_nbs.py", page)
        assert done.returncode == 0 and done.stderr == ""
        runs.append(page.read_text(encoding="utf-8"))
    assert runs[0] == runs[1]
    outputs = [json.dumps(made["outputs"]) for made in json.loads(runs[0])["cells"][1:]]
    assert outputs[1].count("model_id") == 1 and "IntSlider" in outputs[1] and "HBox" not in runs[0]  # the bar is an HBox
    assert "image/png" in outputs[2] and "stored long ago" in outputs[3]


def test_a_failing_notebook_is_reported_and_keeps_its_file(tmp_path):
    page = write_notebook(tmp_path / "page.ipynb", cell("1 / 0"))
    before = page.read_bytes()
    done = run_tool("exec_nbs.py", page)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and page.read_bytes() == before


@pytest.mark.parametrize("content, said", [(None, "there is no such notebook"), ("no json", "this is no notebook")])
def test_what_is_no_notebook_is_one_line(tmp_path, content, said):
    page = tmp_path / "page.ipynb"
    if content:
        page.write_text(content)
    done = run_tool("exec_nbs.py", page)
    assert done.returncode == 1 and done.stderr == f"{page}: {said}\n"


# ---- set-up

@pytest.fixture
def machine(tmp_path):
    """A PATH that holds only what a test puts there, beside the commands the script needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "rm"):
        (folder / name).symlink_to(shutil.which(name))

    def python(name, body):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    def set_up(given=""):
        env = {"PATH": str(folder), "VENV": "venv", "PYTHON": given}
        return subprocess.run(["/bin/sh", str(ROOT / "tools/setup_env.sh"), "demo"], cwd=tmp_path, env=env, capture_output=True, text=True)
    return python, set_up


OLD = 'case $1 in --version) echo "Python 3.9.2";; *) exit 1;; esac'


def test_an_old_python_is_refused_with_advice(machine):
    python, set_up = machine
    python("python3", OLD)
    done = set_up()
    assert done.returncode == 1
    assert "found: python3 is Python 3.9.2" in done.stderr and "needs Python 3.11 or newer" in done.stderr


def test_a_newer_python_beside_an_old_one_is_used(machine):
    python, set_up = machine
    python("python3", OLD)
    python("python3.13", 'case $1 in --version) echo "Python 3.13.0";; -c) ;; *) echo "asked: $*"; exit 3;; esac')
    done = set_up()
    assert done.returncode == 3 and "Creating" in done.stdout and "asked: -m venv --clear" in done.stdout


def test_a_given_python_that_is_of_no_use_is_named(machine):
    python, set_up = machine
    python("python3.13", "exit 0")
    python("old", OLD)
    done = set_up("old")
    assert done.returncode == 1 and done.stderr.startswith("PYTHON=old cannot be used: it is Python 3.9.2.")
    done = set_up("/no/such/python")
    assert done.returncode == 1 and done.stderr.startswith("PYTHON=/no/such/python cannot be used: it cannot be run.")


@pytest.mark.parametrize("home, made_anew", [("{}/venv", False), ("/some/other/folder/venv", True)])
def test_an_environment_that_was_moved_is_made_anew(machine, tmp_path, home, made_anew):
    python, set_up = machine
    python("python3", 'case $1 in --version) echo "Python 3.11.0";; -c) ;; *) echo "asked: $*"; exit 3;; esac')
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").write_text('#!/bin/sh\necho "inside: $*"\n')
    (tmp_path / "venv/bin/python").chmod(0o755)
    (tmp_path / "venv/bin/pip").write_text(f"#!{home.format(tmp_path)}/bin/python3\n")
    done = set_up()
    assert ("asked: -m venv --clear" in done.stdout) == made_anew, done
    assert done.returncode == (3 if made_anew else 0)


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_home_folder_that_cannot_be_written_is_replaced(tmp_path):
    (tmp_path / ".ready-dev").write_text(f"{ROOT}\n")
    say = ["make", "--no-print-directory", "-f", "-", "say"]
    rule = f"include {ROOT}/Makefile\nsay:\n\t@echo $$HOME\n"
    for home in (tmp_path, tmp_path / "none"):
        done = subprocess.run(say, input=rule, cwd=tmp_path, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True)
        assert done.stdout.strip() == str(home if home.is_dir() else tmp_path / ".cache/home"), done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_an_environment_is_made_again_only_when_it_must(tmp_path):
    def plan():
        return subprocess.run(["make", "--no-print-directory", "-n", "check", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True).stdout
    stamp = tmp_path / ".ready-dev"
    assert "setup_env.sh dev" in plan()
    stamp.write_text(f"{ROOT}\n")
    assert "setup_env.sh" not in plan()
    stamp.write_text("/some/other/folder\n")
    assert "setup_env.sh dev" in plan()
    stamp.write_text(f"{ROOT}\n")
    os.utime(stamp, (0, 0))
    assert "setup_env.sh dev" in plan()


# ---- what is installed

def modules_after(code):
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_is_light():
    loaded = modules_after("import comlrl_nb")
    assert not loaded & {"torch", "transformers", "datasets", "pandas", "matplotlib", "IPython"}


def test_no_module_pulls_development_or_optional_packages():
    everything = "import importlib, pkgutil, comlrl_nb\n" \
        "for found in pkgutil.walk_packages(comlrl_nb.__path__, 'comlrl_nb.'): importlib.import_module(found.name)"
    unwanted = {"nbdev", "fastcore", "execnb", "jupyter_client", "jupyter_core", "jupyterlab", "ipykernel", "IPython", "ipywidgets",
                "wandb", "tensorboard", "trackio", "pytest", "jupytext", "nbformat"}
    assert not modules_after(everything) & unwanted


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "comlrl_nb", source / "comlrl_nb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "settings.ini"):
        shutil.copy(ROOT / name, source / name)
    for stray in ("tests", "tools", "nbs"):
        (source / stray).mkdir()
        (source / stray / "__init__.py").touch()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)
    names = {name for name in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist() if ".dist-info/" not in name}
    package = source / "comlrl_nb"
    assert names == {path.relative_to(source).as_posix() for path in package.rglob("*") if path.is_file()}
