"""The demo and the command line."""
import io
import re
import subprocess
import sys

import pytest

from comlrl_nb import callbacks, demo, toy
from comlrl_nb.callbacks import Progress
from comlrl_nb.cli import TASKS, is_writable, main
from comlrl_nb.demo import demo_trainer, run_demo, train_rounds
from comlrl_nb.history import History

LINE = re.compile(r"^demo: task reward \d\.\d\d -> \d\.\d\d, well-formed \d\.\d\d, \d+ s$")


def test_a_short_demo_ends_with_its_line_and_its_figure(tmp_path, capsys):
    figure = tmp_path / "curve.png"
    assert main(["demo", "--rounds", "2", "--figure", str(figure)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert LINE.match(out[-1]) and figure.read_bytes().startswith(b"\x89PNG")
    assert any(line.startswith("before") for line in out) and any(line.startswith("after") for line in out)


@pytest.mark.parametrize("arguments, said", [
    (["--task", "chess"], "delivery"), (["--figure", "/no/such/folder/x.png"], "does not exist"),
    (["--figure", "{}/curve.txt"], "does not end in .png"), (["--figure", "{}/curve"], "does not end in .png"), (["--figure", "{}/a.png"], "cannot be written"),
])
def test_wrong_arguments_are_told_before_anything_is_loaded(arguments, said, tmp_path):
    (tmp_path / "a.png").mkdir()
    code = "import sys; from comlrl_nb.cli import main; status = main(sys.argv[1:]); assert not {'torch', 'pandas'} & sys.modules.keys(); sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code, "demo", *(text.format(tmp_path) for text in arguments)], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_figure_that_is_there_keeps_its_content_until_it_is_drawn_again(tmp_path):
    (tmp_path / "old.png").write_text("old")
    assert is_writable(tmp_path / "old.png") and (tmp_path / "old.png").read_text() == "old"


def test_the_command_line_knows_the_tasks():
    assert TASKS == tuple(toy.TASKS)


def test_ctrl_c_is_one_line_and_status_130(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(demo, "measure", interrupted)
    assert main(["demo", "--figure", str(tmp_path / "curve.png")]) == 130
    assert capsys.readouterr().err == "comlrl-nb demo: interrupted\n"


# ---- bars

class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn_on(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    bar = Progress()
    bar.on_phase("training", total=2)
    bar.on_advance(1, {"loss": 0.5})
    bar.on_end(History())
    return stream.getvalue()


def test_bars_are_drawn_in_a_terminal_and_not_in_a_log_file(monkeypatch):
    assert "training" in drawn_on(Terminal(), monkeypatch)
    assert drawn_on(io.StringIO(), monkeypatch) == ""


def test_bars_are_drawn_in_a_notebook(monkeypatch):
    monkeypatch.setattr(callbacks, "in_notebook", lambda: True)
    assert "training" in drawn_on(io.StringIO(), monkeypatch)


def test_an_interrupted_demo_closes_its_bar(monkeypatch):
    ended = []
    class Watch(callbacks.Callback):
        def on_advance(self, count, metrics): raise KeyboardInterrupt
        def on_end(self, history): ended.append(len(history))
    task = toy.TASKS["meeting"]
    with pytest.raises(KeyboardInterrupt):
        train_rounds(demo_trainer(task), task, rounds=2, every=2, on_round=Watch())
    assert len(ended) == 1


# ---- learning


@pytest.mark.parametrize("arguments", [["demo", "--rounds", "0"], ["demo", "--rounds", "many"], ["nothing"], []])
def test_wrong_usage_ends_with_status_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_rounds_measure_at_the_start_and_at_the_end():
    task = toy.TASKS["meeting"]
    result = train_rounds(demo_trainer(task), task, rounds=3, every=2)
    assert [number for number, *_ in result.points] == [0, 2, 3] and LINE.match(result.line)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(toy.TASKS))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_task_is_learned(task, seed):
    """The reward at least doubles and reaches one half, and the agents still write sentences."""
    result = run_demo(task, seed=seed)
    (_, start, _), (_, end, well_formed) = result.points[0], result.points[-1]
    assert end >= 0.5 and end >= 2 * start and well_formed >= 0.9, result.points
