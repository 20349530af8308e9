"""The demo and the command line."""
import re

import pytest

from comlrl_nb import toy
from comlrl_nb.cli import main
from comlrl_nb.demo import demo_trainer, run_demo, train_rounds

LINE = re.compile(r"^demo: task reward \d\.\d\d -> \d\.\d\d, well-formed \d\.\d\d, \d+ s$")


def test_a_short_demo_ends_with_its_line_and_its_figure(tmp_path, capsys):
    figure = tmp_path / "curve.png"
    assert main(["demo", "--rounds", "2", "--figure", str(figure)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert LINE.match(out[-1]) and figure.read_bytes().startswith(b"\x89PNG")
    assert any(line.startswith("before") for line in out) and any(line.startswith("after") for line in out)



@pytest.mark.parametrize("arguments, said", [(["demo", "--task", "chess"], "delivery"), (["demo", "--figure", "/no/such/folder/x.png"], "does not exist")])
def test_wrong_arguments_are_told(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


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
