"""Write nbs/sidebar.yml: the tutorials, then every floor, each notebook by its real path.

usage: make_sidebar.py [--check]

The site takes page titles from the notebooks themselves; this file only says which pages there are and in which order.
"""
import argparse
import re
import sys
from pathlib import Path

TITLES = {
    "tutorials": "Tutorials",
    "00_core": "Core: records, settings, toy tasks",
    "10_math": "Mathematics",
    "20_models": "Models and devices",
    "30_interaction": "Prompts, rewards, rollouts",
    "40_preference": "Preferences and replay",
    "50_training": "Training loop",
    "60_trainers": "Trainers",
    "70_lab": "Lab: plots, widgets, command line",
}


def is_page(path: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.parts)


def notebooks(folder: Path) -> list[Path]:
    """Notebooks under `folder`, by number, as paths relative to it."""
    found = (path.relative_to(folder) for path in folder.rglob("*.ipynb"))
    return sorted(path for path in found if is_page(path))


def title(folder: str) -> str:
    plain = re.sub(r"^\d+_", "", folder).replace("_", " ")
    return TITLES.get(folder, plain[:1].upper() + plain[1:])


def sections(nbs: Path) -> list[tuple[str, list[str]]]:
    """(title, paths) per folder that holds notebooks: tutorials first, then the floors from the ground up."""
    folders = sorted((path.name for path in nbs.iterdir() if path.is_dir() and is_page(Path(path.name))),
                     key=lambda name: (name != "tutorials", name))
    pages = ((folder, [f"{folder}/{page.as_posix()}" for page in notebooks(nbs / folder)]) for folder in folders)
    return [(title(folder), paths) for folder, paths in pages if paths]


def sidebar(nbs: Path) -> str:
    lines = ["website:", "  sidebar:", "    contents:", "      - text: Overview", "        href: index.ipynb"]
    for name, paths in sections(nbs):
        lines += [f'      - section: "{name}"', "        contents:"]
        lines += [f"          - {path}" for path in paths]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is out of date")
    parser.add_argument("--nbs", type=Path, default=Path("nbs"))
    args = parser.parse_args()
    target, text = args.nbs / "sidebar.yml", sidebar(args.nbs)
    if args.check:
        return int(not target.exists() or target.read_text(encoding="utf-8") != text)
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
