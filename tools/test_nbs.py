"""nbdev_test, and no notebook may leave the process changed for the next one.

usage: test_nbs.py [--workers N] [--reverse] [--flags "slow gpu"] [NOTEBOOK_OR_FOLDER]

Notebooks share worker processes, so a lesson that sets the default dtype, the number of threads or an environment
variable would change the lessons after it. Its page fails here and says what it left behind.
"""
import argparse
import functools
import os
import sys
import time
from pathlib import Path

import nbdev.test

run_notebook = nbdev.test.test_nb
find_notebooks = nbdev.test.nbglob
SET_BY_TOOLS = ("IN_TEST", "JPY_", "MPL", "TORCH", "KMP_", "TOKENIZERS_")  # variables that libraries set for themselves
SLOW = 20.0  # seconds a page may take


def process_state() -> dict[str, object]:
    """What notebooks in one process share: environment, folder and torch's defaults."""
    import torch
    state = {f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(SET_BY_TOOLS)}
    state["os.getcwd()"] = os.getcwd()
    state["torch.get_default_dtype()"] = torch.get_default_dtype()
    state["torch.get_default_device()"] = torch.get_default_device()
    state["torch.get_num_threads()"] = torch.get_num_threads()
    state["torch.is_grad_enabled()"] = torch.is_grad_enabled()
    state["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
    return state


def left_behind(before: dict, after: dict) -> list[str]:
    return [f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
            for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def test_nb(path, **options):
    """`nbdev.test.test_nb` of one notebook, with its seconds; fails as well when the process is not as it was."""
    started, before = time.perf_counter(), process_state()
    passed, _ = run_notebook(path, **options)
    changed, seconds = left_behind(before, process_state()), time.perf_counter() - started
    if changed:
        print(f"{path} changes the process for the next notebook:", *changed, sep="\n    ", file=sys.stderr, flush=True)
    if seconds > SLOW:
        print(f"{path.name}: {seconds:.0f} s, more than {SLOW:.0f} s", flush=True)
    return passed and not changed, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes; 0 runs all notebooks in this one")
    parser.add_argument("--reverse", action="store_true", help="last notebook first")
    parser.add_argument("--flags", default="", help="flags whose cells are run as well")
    parser.add_argument("path", nargs="?")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import test_nbs  # this file under a name that worker processes find: a notebook takes the name __main__ for itself
    nbdev.test.test_nb = test_nbs.test_nb
    if args.reverse:
        nbdev.test.sorted = functools.partial(sorted, reverse=True)
    nbdev.test.nbdev_test.__wrapped__(path=args.path, flags=args.flags, n_workers=args.workers)


if __name__ == "__main__":
    main()
