"""Children that are killed with SIGKILL at random moments end as if nothing had happened."""
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from checkpoint_runs import FAMILIES, LONG, RUNS, Nursery, differs, finished, make, memory_folder
from comlrl_nb.demo import one_thread


@pytest.fixture(scope="module")
def nursery():
    found = Nursery()
    yield found
    found.close()


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


def lives(nursery, name, folder, kills, rng):
    """Kill children of the run `name` until `kills` were killed; the outcome of every run that came to its end, and of the last one."""
    begin = time.monotonic()
    nursery.life(name, folder / "first", folder / "first.pt")
    length, outcomes, killed, run = time.monotonic() - begin, [], 0, 0
    while killed < kills or not outcomes or outcomes[-1] != folder / f"{run}.pt":
        run += bool(outcomes) and outcomes[-1] == folder / f"{run}.pt"  # the last one came to its end
        results = folder / f"{run}.pt"
        if nursery.life(name, folder / str(run), results, rng.uniform(0, length) if killed < kills else None):
            killed += 1
        else:
            outcomes.append(results)
    return [torch.load(path) for path in (folder / "first.pt", *outcomes)]


def check(nursery, name, folder, kills, seed):
    folder.mkdir(exist_ok=True)
    with one_thread():
        expected = finished(make(name, folder / "plain"))
    assert expected["clocks"][0] >= 12 or name not in KILLED
    found = lives(nursery, name, folder, kills, random.Random(f"{name} {seed}"))
    assert len(found) >= 2
    for outcome in found:
        assert differs(expected, outcome) == ""


KILLED = (*LONG, *(name for name in FAMILIES if not any(long.startswith(f"{name},") for long in LONG)))


@pytest.mark.parametrize("name", KILLED)
def test_two_kills(nursery, name, tmp_path):
    check(nursery, name, tmp_path, kills=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KILLED, *(name for name in RUNS if name not in FAMILIES)])
def test_twenty_kills(nursery, name, tmp_path):
    check(nursery, name, tmp_path, kills=20, seed=1)
    kept = sorted(path.name for path in (tmp_path / "0" / "kept").iterdir())
    assert len(kept) <= 2 and all(path.startswith("checkpoint-") for path in kept), "nothing of a killed process is left"


def test_another_interpreter_goes_on_where_this_one_stopped(tmp_path):
    """Nothing depends on the order of sets or on anything else that a process begins with."""
    name, script = "MADPOIter", Path(__file__).with_name("checkpoint_runs.py")
    with one_thread():
        expected = finished(make(name, tmp_path / "plain"))
    environment = {**os.environ, "PYTHONHASHSEED": "4", "OMP_NUM_THREADS": "1"}
    code = "import os, sys, checkpoint_runs as c; t = c.make('MADPOIter', sys.argv[1] + '/runs', callbacks=[c.Stop(7)])\n" \
           "try: t.train(checkpoint_dir=sys.argv[1] + '/kept', **c.ALWAYS)\nexcept KeyboardInterrupt: os._exit(9)"
    first = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env={**environment, "PYTHONPATH": str(script.parent)})
    assert first.returncode == 9
    subprocess.run([sys.executable, str(script), name, str(tmp_path / "run"), str(tmp_path / "end.pt")], env=environment, check=True)
    assert differs(expected, torch.load(tmp_path / "end.pt")) == ""
    kept = json.loads((tmp_path / "run" / "kept" / "checkpoint-6" / "metadata.json").read_text()) if (tmp_path / "run" / "kept" / "checkpoint-6").exists() else None
    assert kept is None, "the newest two are kept"
