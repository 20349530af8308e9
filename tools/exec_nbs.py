"""Run notebooks in a fresh kernel each and store their outputs.

usage: exec_nbs.py [--flags slow,network] NOTEBOOK...

Cells marked `#| eval: false`, and cells carrying one of the flags notest, slow, gpu or network, keep the outputs
they have; `--flags slow` runs the slow ones too. Widget state is kept with ids that do not change between runs.
"""
import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

WIDGETS = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"
FLAGS = {"notest", "slow", "gpu", "network"}


def directives(source):
    return re.findall(r"^#\|\s*(\S.*?)\s*$", source, re.M)


def is_skipped(source, wanted):
    """True for a cell that is not to be run: not evaluated, or flagged with a flag nobody asked for."""
    flags = FLAGS - wanted
    return any(re.match(r"eval:\s*false", d, re.I) or d.split()[0] in flags for d in directives(source))


class Client(NotebookClient):
    wanted = frozenset()

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        if cell.cell_type != "code" or is_skipped(cell.source, self.wanted):
            return cell
        return await super().async_execute_cell(cell, cell_index, **kwargs)


def with_stable_widget_ids(notebook, key):
    """The notebook with ids of widgets that say which notebook and which widget, not which run."""
    text = nbformat.writes(notebook)
    models = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    for index, model_id in enumerate(models):
        text = text.replace(model_id, hashlib.md5(f"{key}-{index}".encode()).hexdigest())
    return nbformat.reads(text, 4)


def is_progress(output):
    """True for progress on stderr and for a tqdm bar, which the environment cannot switch off in a notebook."""
    if output.output_type == "stream":
        return output.name == "stderr"
    data = output.get("data", {})
    return VIEW in data and bool(re.search(r"\d+%\||\d+it \[", data.get("text/plain", "")))


def used_widgets(notebook):
    """The stored widgets that an output shows, with all their parts."""
    state = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    todo = [o.data[VIEW]["model_id"] for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs if VIEW in o.get("data", {})]
    used = set()
    while todo:
        model_id = todo.pop()
        if model_id in state and model_id not in used:
            used.add(model_id)
            todo += re.findall(r"IPY_MODEL_(\w+)", json.dumps(state[model_id]))
    return {model_id: model for model_id, model in state.items() if model_id in used}


def tidy(notebook):
    """Drop what differs from run to run: kernel version, timings, progress bars with their widgets."""
    notebook.metadata = nbformat.from_dict({k: v for k, v in notebook.metadata.items() if k in ("kernelspec", "widgets")})
    notebook.metadata["kernelspec"] = {"display_name": "python3", "language": "python", "name": "python3"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if not is_progress(output)]
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = None
    if WIDGETS in notebook.metadata.get("widgets", {}):
        notebook.metadata["widgets"][WIDGETS]["state"] = used_widgets(notebook)
        if not notebook.metadata["widgets"][WIDGETS]["state"]:
            del notebook.metadata["widgets"]


def execute(client):
    """Run all cells; what the kernel says about itself on stderr is shown only when it dies."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        try:
            client.execute(stderr=said)
        except DeadKernelError:
            said.seek(0)
            print(said.read(), file=sys.stderr, flush=True)
            raise


def run(path, wanted):
    started = time.perf_counter()
    notebook = nbformat.read(path, 4)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code" and not is_skipped(cell.source, wanted):
            cell.outputs = []
    client = Client(notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}},
                    store_widget_state=True, record_timing=False)
    client.wanted = wanted
    execute(client)
    tidy(notebook)
    path.write_text(nbformat.writes(with_stable_widget_ids(notebook, path.name)) + "\n", encoding="utf-8")
    print(f"{path}: {time.perf_counter() - started:.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="", help="flags whose cells are run as well, comma-separated")
    parser.add_argument("notebooks", nargs="+", type=Path)
    args = parser.parse_args()
    os.environ.update(IN_TEST="1", SOURCE_DATE_EPOCH="0", PYTHONHASHSEED="0", TQDM_DISABLE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = []
    for path in args.notebooks:
        if not path.is_file():
            failed.append(path)
            print(f"{path}: there is no such notebook", file=sys.stderr, flush=True)
            continue
        try:
            run(path, {flag for flag in args.flags.split(",") if flag})
        except nbformat.reader.NotJSONError:
            failed.append(path)
            print(f"{path}: this is no notebook", file=sys.stderr, flush=True)
        except CellExecutionError as error:
            failed.append(path)
            print(f"{path}: FAILED\n{str(error)[-3000:]}", file=sys.stderr, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
