"""Say what is out of step with the notebooks: exported code, uncleaned notebooks, README, sidebar.

usage: check_sync.py [--root DIR]

Works on a copy in a temporary folder, so it changes nothing and needs no git. Exits 1 when something is out of step.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIB, NBS = "comlrl_nb", "nbs"
LOOSE = ("settings.ini", "pyproject.toml", "index.ipynb", "_quarto.yml")
EXPORT_AND_CLEAN = "from nbdev.doclinks import nbdev_export; from nbdev.clean import nbdev_clean; nbdev_export.__wrapped__(); nbdev_clean.__wrapped__()"


def copy(root: Path, target: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "data")
    for folder in (LIB, NBS):
        shutil.copytree(root / folder, target / folder, symlinks=True, ignore=leave)
    for name in LOOSE:
        shutil.copy2(root / name, target / name)


def export_and_clean(folder: Path) -> str:
    """Run both commands in `folder`; whatever they say."""
    env = {name: value for name, value in os.environ.items() if name != "IN_TEST"}
    done = subprocess.run([sys.executable, "-c", EXPORT_AND_CLEAN], cwd=folder, env=env, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip()
    return said or (f"exit status {done.returncode}" if done.returncode else "")


def files(folder: Path) -> dict[str, bytes]:
    """Path -> content of the package's modules and of all notebooks, each notebook once."""
    found = [*(folder / LIB).rglob("*.py"), *folder.glob("*.ipynb"), *(folder / NBS).rglob("*.ipynb")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)
            if not path.is_symlink() and ".ipynb_checkpoints" not in path.parts and "__pycache__" not in path.parts}


def differences(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    def why(path):
        return "not clean" if path.endswith(".ipynb") else "not what the notebooks export"
    return [f"{path}: {why(path)}" for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]


def out_of_step(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder).resolve() / "copy"
        target.mkdir()
        copy(root, target)
        said = export_and_clean(target)
        found = [f"nbdev_export and nbdev_clean are not silent:\n{said}"] if said else []
        return found + differences(files(root), files(target))


def stale_pages(root: Path) -> list[str]:
    """README and sidebar, each checked by the script that writes it."""
    tools = Path(__file__).parent
    scripts = {"README.md": ["make_readme.py", "--root", root], "nbs/sidebar.yml": ["make_sidebar.py", "--nbs", root / NBS]}
    return [f"{name}: out of date" for name, (script, *args) in scripts.items()
            if subprocess.run([sys.executable, tools / script, "--check", *args], stderr=subprocess.DEVNULL).returncode]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("."))
    root = parser.parse_args().root.resolve()
    found = out_of_step(root) + stale_pages(root)
    for line in found:
        print(line)
    print("Out of step with the notebooks: run `make sync` and look at what it changed." if found else "In step with the notebooks.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
