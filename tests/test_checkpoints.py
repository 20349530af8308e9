"""Checkpoints: what is in them, when they are written, what is refused, and that a run taken up again is the run that was never stopped."""
import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import actor_critic_runs
import iterative_runs
import madpo_runs
import marlhf_runs
import reinforce_runs
from checkpoint_runs import ALWAYS, FAMILIES, RUNS, Stop, checkpoints, differs, finished, make, memory_folder, outcome
from comlrl_nb import packing
from comlrl_nb.callbacks import Callback
from comlrl_nb.fresh_batches import FreshBatches
from comlrl_nb.models.actor_critic import CausalLMWithValueHead
from comlrl_nb.packing import BrokenCheckpoint, read_checkpoint, read_checkpoint_metadata
from comlrl_nb.replay import ReplayStore
from comlrl_nb.streams import make_streams
from comlrl_nb.toy import micro_model
from reinforce_runs import rows, same, weights

UPDATES = dict(checkpoint_unit="updates")
SMALL_RUN = dict(num_train_epochs=2, num_generations=2)


@lru_cache(maxsize=None)
def reference(name, root):
    """The uninterrupted run and the number of its safe points."""
    stop = Stop()
    return finished(make(name, Path(root) / name, callbacks=[stop])), stop.seen


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def root():
    with memory_folder() as folder:
        yield str(folder)


def stopped(trainer, **given):
    with pytest.raises(KeyboardInterrupt):
        trainer.train(**given)
    return trainer


def taken_up(name, checkpoint, folder, **changes):
    trainer = make(name, folder, **changes)
    trainer.load_checkpoint(checkpoint)
    return trainer


def interrupted(name, n, folder):
    """A run stopped at its n-th safe point, saved, and finished by a new trainer."""
    stopped(trainer := make(name, folder / "first", callbacks=[Stop(n)]))
    trainer.save_checkpoint(folder / "saved")
    return finished(taken_up(name, folder / "saved", folder / "second"))


def small(folder, **changes):
    """A run of four short updates."""
    return reinforce_runs.make(output_dir=str(folder), **{**SMALL_RUN, **changes})


def kept(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# a run that is stopped and one that is not

@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in FAMILIES)])
def test_stopped_in_the_middle(name, root, tmp_path):
    expected, points = reference(name, root)
    assert differs(expected, interrupted(name, points // 2, tmp_path)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_stopped_at_every_safe_point(name, root, tmp_path):
    expected, points = reference(name, root)
    for n in range(1, points + 1):
        assert differs(expected, interrupted(name, n, tmp_path / str(n))) == "", n


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_change_nothing_and_the_last_one_is_the_end(name, root, tmp_path):
    expected, points = reference(name, root)
    trainer = make(name, tmp_path / "runs")
    trainer.train(checkpoint_dir=tmp_path / "kept", **ALWAYS)
    assert differs(expected, outcome(trainer)) == "" and len(checkpoints(tmp_path / "kept")) == points
    again = make(name, tmp_path / "again")
    again.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "kept", **ALWAYS)
    assert differs(expected, outcome(again)) == "" and len(checkpoints(tmp_path / "kept")) == points


@pytest.mark.parametrize("name", ["MAAC", "MARLHFIter"])
def test_a_trainer_goes_back_to_its_own_earlier_checkpoint(name, root, tmp_path):
    expected, points = reference(name, root)
    trainer = make(name, tmp_path / "runs")
    trainer.train(checkpoint_dir=tmp_path / "kept", **ALWAYS)
    trainer.load_checkpoint(tmp_path / "kept" / "checkpoint-2")
    assert differs(expected, finished(trainer)) == ""


@pytest.mark.parametrize("unit, every, limit", [("epochs", 1, None), ("updates", 2, 1)])
def test_resumed_twice(unit, every, limit, root, tmp_path):
    given = dict(checkpoint_dir=tmp_path / "kept", checkpoint_interval=every, checkpoint_unit=unit, checkpoint_total_limit=limit)
    stopped(make("MAGRPO", tmp_path / "1", callbacks=[Stop(6)]), **given)
    stopped(make("MAGRPO", tmp_path / "2", callbacks=[Stop(2)]), resume_from_checkpoint="latest", **given)
    trainer = make("MAGRPO", tmp_path / "3")
    trainer.train(resume_from_checkpoint="latest", **given)
    assert differs(reference("MAGRPO", root)[0], outcome(trainer)) == ""


class Rows:
    """A stream: rows without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


@pytest.mark.parametrize("changes", [dict(shuffle=True, train_dataset=rows(10)), dict(train_dataset=Rows(7)), dict(shuffle=True, train_dataset=rows(10), rollout_buffer_size=4, train_batch_size=2)])
@pytest.mark.parametrize("n", [3, 5])
def test_the_same_items_in_the_same_order(changes, n, tmp_path):  # C74
    def run(told, stop=0):
        def reward(*texts, batch_items):
            told.append(batch_items[0]["answer"])
            return reinforce_runs.letters(*texts)
        return small(tmp_path / "runs", callbacks=[Stop(stop)], reward_func=reward, **changes)
    whole, parts = [], []
    expected = finished(run(whole))
    trainer = stopped(run(parts, n))
    trainer.save_checkpoint(tmp_path / "saved")
    again = run(parts)
    again.load_checkpoint(tmp_path / "saved")
    assert differs(expected, finished(again)) == "" and parts == whole
    assert len(whole) == 4 * len(list(changes["train_dataset"]))


@pytest.mark.parametrize("name, longer", [("MAGRPO", dict(num_train_epochs=3)), ("MAAC", dict(num_train_epochs=3)), ("MADPO", dict(num_train_epochs=4)), ("MARLHF-magrpo", dict(num_train_epochs=3)),
                                          ("MADPOIter", dict(num_iterations=4))])
def test_a_longer_run_is_one_that_was_planned_longer(name, longer, tmp_path):
    expected = finished(make(name, tmp_path / "plain", **longer))
    make(name, tmp_path / "short").train(checkpoint_dir=tmp_path / "kept", checkpoint_total_limit=1)
    trainer = make(name, tmp_path / "long", **longer)
    trainer.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "kept")
    assert differs(expected, outcome(trainer)) == ""


# Ctrl-C

def interrupt_in(trainer, place, n):
    """Ctrl-C at the n-th call of the reward function, of `generate`, or of a model in an update."""
    calls = []

    def count(*_):
        calls.append(None)
        if len(calls) == n:
            signal.raise_signal(signal.SIGINT)
    if place == "reward":
        real = trainer.setup.reward.score
        trainer.setup.reward.score = lambda *given: (count(), real(*given))[1]
    elif place == "generate":
        model = trainer.team.models[-1]
        own = model.generate
        model.generate = lambda **given: (count(), own(**given))[1]
    else:
        for optimizer in dict.fromkeys(trainer.optimizers):
            optimizer.register_step_pre_hook(count)
    return calls


@pytest.mark.parametrize("place", ["reward", "generate", "update"])
@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads", "MADPO", "MARLHF-iac", "MADPOIter"])
def test_ctrl_c_saved_and_finished_by_a_new_trainer(name, place, root, tmp_path):
    trainer = make(name, tmp_path / "first")
    interrupt_in(trainer, place, 1 if place == "generate" else 2)
    stopped(trainer)
    assert len(trainer.history) == len(trainer.history.frame)
    trainer.save_checkpoint(tmp_path / "saved")
    assert differs(reference(name, root)[0], finished(taken_up(name, tmp_path / "saved", tmp_path / "second"))) == ""


@pytest.mark.parametrize("name", ["MADPO", "MAAC"])
def test_ctrl_c_and_train_goes_on(name, root, tmp_path):
    trainer = stopped(make(name, tmp_path, callbacks=[Stop(3)]))
    rows_so_far = len(trainer.history)
    assert 0 < rows_so_far
    trainer.train()
    assert len(trainer.history) > rows_so_far and differs(reference(name, root)[0], outcome(trainer)) == ""


# when checkpoints are written, and how many stay

@pytest.mark.parametrize("unit, every, expected", [("epochs", 1, [2, 4]), ("epochs", 2, [4]), ("updates", 1, [1, 2, 3, 4]), ("updates", 3, [3]), ("minutes", 1e-9, [1, 2, 3, 4]), ("minutes", 60, [])])
def test_intervals(unit, every, expected, tmp_path):
    small(tmp_path / "runs").train(checkpoint_dir=tmp_path / "kept", checkpoint_interval=every, checkpoint_unit=unit)
    found = sorted(checkpoints(tmp_path / "kept"), key=lambda path: int(path.name.split("-")[1]))
    assert [read_checkpoint_metadata(path)["update"] for path in found] == expected


@pytest.mark.parametrize("kind", ["MADPO", "MARLHF"])
@pytest.mark.parametrize("unit, every, expected", [(None, 1, 3), ("iterations", 2, 1), ("epochs", 1, 6)])
def test_intervals_of_rounds(kind, unit, every, expected, tmp_path):
    trainer = iterative_runs.make(kind, num_iterations=3, num_train_epochs=2, output_dir=str(tmp_path / "runs"))
    trainer.train(checkpoint_dir=tmp_path / "kept", checkpoint_interval=every, checkpoint_unit=unit)
    assert len(checkpoints(tmp_path / "kept")) == expected


@pytest.mark.parametrize("given, named", [(dict(checkpoint_total_limit=0), "checkpoint_total_limit"), (dict(checkpoint_total_limit=True), "checkpoint_total_limit"), (dict(checkpoint_interval=0), "checkpoint_interval"),
                                          (dict(checkpoint_interval=1.5), "checkpoint_interval"), (dict(checkpoint_interval=-1), "checkpoint_interval"), (dict(checkpoint_unit="steps"), "checkpoint_unit"),
                                          (dict(checkpoint_unit="iterations"), "checkpoint_unit"), (dict(checkpoint_dir=3), "checkpoint_dir"), (dict(resume_from_checkpoint=3), "resume_from_checkpoint")])
def test_wrong_arguments_are_named(given, named, tmp_path):
    trainer = small(tmp_path / "runs")
    before = weights(trainer)
    with pytest.raises(ValueError, match=named):
        trainer.train(**{"checkpoint_dir": tmp_path / "kept", **given})
    assert same(before, weights(trainer)) and trainer.run.update == 0 and not (tmp_path / "kept").exists()


@pytest.mark.parametrize("limit, expected", [(1, [11]), (2, [10, 11]), (None, list(range(1, 12)))])
def test_rotation_is_numeric(limit, expected, tmp_path):  # C72
    small(tmp_path / "runs", num_train_epochs=11, train_dataset=rows(1), rollout_buffer_size=1).train(checkpoint_dir=tmp_path / "kept", checkpoint_total_limit=limit)
    assert {*kept(tmp_path / "kept")} == {f"checkpoint-{n}" for n in expected}


def test_foreign_folders_and_files_stay(tmp_path):  # C72
    place = tmp_path / "kept"
    for name in ("checkpoint-1000", "checkpoint-2", "checkpoint-x", "checkpoint-", "mine", ".unfinished-checkpoint-1-someone-1"):
        (place / name).mkdir(parents=True)
    (place / "checkpoint-2" / "notes.txt").write_text("mine")
    (place / "checkpoint-3").write_text("a file")
    before = {*kept(place)}
    trainer = small(tmp_path / "runs")
    trainer.train(checkpoint_dir=place, checkpoint_total_limit=2, **UPDATES)
    assert {*kept(place)} == before | {"checkpoint-5", "checkpoint-6"}
    assert (place / "checkpoint-2" / "notes.txt").read_text() == "mine" and (place / "checkpoint-3").read_text() == "a file"
    again = small(tmp_path / "again")
    again.train(resume_from_checkpoint=True, checkpoint_dir=place)
    assert differs(outcome(trainer), outcome(again)) == ""


def test_two_runs_in_one_folder(tmp_path):
    first, second = small(tmp_path / "1"), small(tmp_path / "2", seed=1)
    for trainer in (first, second):
        trainer.train(checkpoint_dir=tmp_path / "kept", checkpoint_total_limit=2, **UPDATES)
    known = {path.name: read_checkpoint_metadata(path)["run_id"] for path in checkpoints(tmp_path / "kept")}
    assert sorted(known.values()) == sorted([first.run_id, second.run_id] * 2), "each run keeps two of its own"
    again = small(tmp_path / "3", seed=1)
    again.train(resume_from_checkpoint="latest", checkpoint_dir=tmp_path / "kept", checkpoint_total_limit=2)
    assert again.run_id == second.run_id and differs(outcome(second), outcome(again)) == "", "the newest is that of the run that wrote last"
    with pytest.raises(ValueError, match="seed"):
        small(tmp_path / "4").train(resume_from_checkpoint="latest", checkpoint_dir=tmp_path / "kept")


def test_what_a_killed_process_left_goes_when_its_run_goes_on(tmp_path):
    stopped(trainer := small(tmp_path / "runs", callbacks=[Stop(2)]), checkpoint_dir=tmp_path / "kept", **UPDATES)
    left = tmp_path / "kept" / f".unfinished-checkpoint-9-{trainer.run_id}-123456"
    others = tmp_path / "kept" / ".unfinished-checkpoint-9-0123-123456"
    for folder in (left, others):
        folder.mkdir()
        (folder / "state.json").write_text("half")
    small(tmp_path / "again").train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "kept", **UPDATES)
    assert not left.exists() and others.exists()


def test_an_earlier_checkpoint_can_be_taken_up_beside_later_ones(tmp_path):
    expected = finished(small(tmp_path / "plain"))
    small(tmp_path / "runs").train(checkpoint_dir=tmp_path / "kept", **UPDATES)
    trainer = small(tmp_path / "again")
    trainer.train(resume_from_checkpoint=tmp_path / "kept" / "checkpoint-1", checkpoint_dir=tmp_path / "kept", **UPDATES)
    assert differs(expected, outcome(trainer)) == "" and {*kept(tmp_path / "kept")} == {f"checkpoint-{n}" for n in range(1, 8)}


def test_a_checkpoint_by_hand_never_writes_over_anything(tmp_path):
    trainer = small(tmp_path / "runs")
    trainer.save_checkpoint(tmp_path / "mine")
    before = (tmp_path / "mine" / "state.json").read_bytes()
    with pytest.raises(FileExistsError, match="mine"):
        trainer.save_checkpoint(tmp_path / "mine")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(FileExistsError, match="file"):
        trainer.save_checkpoint(tmp_path / "file")
    assert (tmp_path / "mine" / "state.json").read_bytes() == before and (tmp_path / "file").read_text() == "a file"
    assert kept(tmp_path) == ["file", "mine"]


# which one is resumed, and what is broken

DAMAGE = {
    "zero bytes": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-10] + b"0123456789"),
    "gone": lambda path: path.unlink(),
}
FILES = ("metadata.json", "state.json", "tensors.safetensors", "replay/iteration_0001.json", "policies/iteration_0002/agent_1.pt")


@pytest.fixture(scope="module")
def of_rounds():
    """Three checkpoints of an iterative run, and its outcome."""
    with memory_folder() as folder:
        trainer = make("MADPOIter", folder / "runs")
        trainer.train(checkpoint_dir=folder / "kept")
        yield folder / "kept", outcome(trainer)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_broken_one_is_passed_over_or_refused(of_rounds, how, file, tmp_path):
    if (how, file) == ("changed", "metadata.json"):
        pytest.skip("the end of the metadata is brackets")
    shutil.copytree(of_rounds[0], place := tmp_path / "kept")
    broken = place / "checkpoint-3"
    DAMAGE[how](broken / file)
    trainer = make("MADPOIter", tmp_path / "again")
    before = outcome(trainer)
    with pytest.raises(BrokenCheckpoint, match="checkpoint-3.*" + Path(file).name):
        trainer.load_checkpoint(broken)
    with pytest.raises(BrokenCheckpoint, match="checkpoint-3.*" + Path(file).name):
        trainer.train(resume_from_checkpoint=str(broken))
    assert differs(before, outcome(trainer)) == "" and trainer.source is None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint="latest", checkpoint_dir=place)
    assert any("checkpoint-3" in str(each.message) and "before" in str(each.message) for each in heard)
    assert differs(of_rounds[1], outcome(trainer)) == "" and kept(place) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_a_replay_file_that_vanished_or_was_cut_is_named_before_it_is_used(tmp_path):
    stopped(trainer := make("MADPOIter", tmp_path, callbacks=[Stop(6)]))
    path = trainer.rounds.store.index.folder / "iteration_0001.json"
    content = path.read_bytes()
    for damage, error in (("cut", ValueError), ("gone", FileNotFoundError)):
        DAMAGE[damage](path)
        with pytest.raises((error, BrokenCheckpoint), match="iteration_0001.json"):
            trainer.train()
        path.write_bytes(content)
    assert differs(finished(make("MADPOIter", tmp_path / "plain")), finished(trainer)) == ""


@pytest.mark.parametrize("resume, error, words", [(True, ValueError, "checkpoint_dir"), ("latest", ValueError, "checkpoint_dir"), ("nowhere", FileNotFoundError, "nowhere"), (3.5, ValueError, "resume_from_checkpoint")])
def test_what_cannot_be_resumed(resume, error, words, tmp_path):
    with pytest.raises(error, match=words):
        small(tmp_path).train(resume_from_checkpoint=resume)


def test_nothing_to_resume_from(tmp_path):
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            small(tmp_path / "runs").train(resume_from_checkpoint=True, checkpoint_dir=place)
    with pytest.raises(BrokenCheckpoint, match="metadata.json"):
        small(tmp_path / "runs").train(resume_from_checkpoint=tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"version": 99, "files": {}}))
    with pytest.raises(BrokenCheckpoint, match="version 99"):
        small(tmp_path / "runs").load_checkpoint(tmp_path)


# what is refused

DIFFERENT = {
    "another trainer": (lambda folder: reinforce_runs.make(name="MARLOO", output_dir=str(folder), **SMALL_RUN), "MAGRPOTrainer.*MARLOOTrainer"),
    "agent_learning_rate": (lambda folder: small(folder, agent_learning_rate=1e-3), "agent_learning_rate=0.01.*0.001"),
    "seed": (lambda folder: small(folder, seed=1), "seed=0.*1"),
    "num_generations": (lambda folder: small(folder, num_generations=4), "num_generations=2.*4"),
    "temperature": (lambda folder: small(folder, temperature=0.5), "temperature=1.0.*0.5"),
    "shuffle": (lambda folder: small(folder, shuffle=True), "shuffle=False.*True"),
    "other shapes": (lambda folder: small(folder, agents=reinforce_runs.team(("gpt2", "gpt2"), n_embd=48)), "agent 0.*shape"),
    "other layers": (lambda folder: small(folder, agents=reinforce_runs.team(("gpt2", "llama"))), "agent 1.*same kind"),
    "number of agents": (lambda folder: small(folder, agents=reinforce_runs.team(("gpt2",))), "num_agents=2.*1"),
    "rows": (lambda folder: small(folder, train_dataset=rows(4)), "4 rows.*3"),
}


@pytest.fixture(scope="module")
def of_groups():
    with memory_folder() as folder:
        stopped(trainer := small(folder / "runs", callbacks=[Stop(3)]))
        trainer.save_checkpoint(folder / "saved")
        yield folder / "saved"


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_run_of_something_else_is_refused_by_name(what, of_groups, tmp_path):
    new, words = DIFFERENT[what]
    trainer = new(tmp_path)
    before = outcome(trainer)
    with pytest.raises(ValueError, match=words):
        trainer.load_checkpoint(of_groups)
    assert differs(before, outcome(trainer)) == ""
    trainer.train()
    assert differs(finished(new(tmp_path)), outcome(trainer)) == "", "it trains as if nothing had been asked"


def test_what_may_differ(of_groups, tmp_path):
    watched = dict(eval_dataset=rows(2), eval_interval=1, eval_num_samples=1, eval_batch_size=2, parallel_training="mp", agent_devices=["cpu", "cpu:0"], logging_steps=100)
    found = [finished(taken) for changes in ({}, watched) for taken in [small(tmp_path / "runs", **changes)] if taken.load_checkpoint(of_groups) is None]
    for key in ("weights", "optimizers", "clocks"):
        assert differs(found[0][key], found[1][key]) == ""


def test_other_critics_are_refused(tmp_path):
    stopped(trainer := make("IAC", tmp_path / "runs", callbacks=[Stop(2)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = make("IAC", tmp_path / "other", critics=[actor_critic_runs.critic(50), actor_critic_runs.critic(51, n_embd=48)])
    before = outcome(other)
    with pytest.raises(ValueError, match="critic 1.*shape"):
        other.load_checkpoint(tmp_path / "saved")
    assert differs(before, outcome(other)) == ""


def test_other_rows_are_refused_before_a_critic_moves(tmp_path):
    stopped(trainer := make("IAC", tmp_path / "runs", callbacks=[Stop(2)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = make("IAC", tmp_path / "other", train_dataset=rows(5))
    before = outcome(other)
    with pytest.raises(ValueError, match="5 rows.*3"):
        other.load_checkpoint(tmp_path / "saved")
    assert differs(before, outcome(other)) == ""


def test_another_judge_is_refused_before_anything_changes(tmp_path):
    stopped(trainer := make("MARLHF-maac", tmp_path / "runs", callbacks=[Stop(9)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = make("MARLHF-maac", tmp_path / "other", reward_model=marlhf_runs.judge(n_embd=48))
    before = outcome(other)
    with pytest.raises(ValueError, match="reward model.*shape"):
        other.load_checkpoint(tmp_path / "saved")
    assert differs(before, outcome(other)) == ""


def test_a_replay_folder_of_another_run_is_refused_before_anything_changes(tmp_path):
    stopped(trainer := make("MADPOIter", tmp_path / "runs", callbacks=[Stop(6)]))
    trainer.save_checkpoint(tmp_path / "saved")
    make("MADPOIter", tmp_path / "others", num_iterations=1, preference_replay_dir=str(tmp_path / "taken")).train()
    files = {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()}
    other = make("MADPOIter", tmp_path / "other", preference_replay_dir=str(tmp_path / "taken"))
    before = outcome(other)
    with pytest.raises(FileExistsError, match="iteration_0001.json.*another run"):
        other.load_checkpoint(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="iteration_0001.json.*another run"):
        other.train()
    assert differs(before, outcome(other)) == "" and other.source is None and other.run.update == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()} == files


def test_past_policies_of_another_run_are_not_written_over(tmp_path):
    place = tmp_path / "policies"
    make("MADPOIter", tmp_path / "1", num_iterations=1, policy_checkpoint_dir=str(place)).train()
    before = {path: path.read_bytes() for path in sorted(place.rglob("*.pt"))}
    other = make("MADPOIter", tmp_path / "2", num_iterations=1, policy_checkpoint_dir=str(place), agents=[micro_model(seed, n_layer=1) for seed in (8, 9)])
    with pytest.raises(FileExistsError, match="policies"):
        other.train()
    assert before and {path: path.read_bytes() for path in sorted(place.rglob("*.pt"))} == before


# a save that fails

class Crash(Exception):
    pass


FAULTS = {
    "disk full in the tensors": (packing, "save_file", OSError(errno.ENOSPC, "No space left on device")),
    "killed in the tensors": (packing, "save_file", Crash()),
    "disk full in a copy": (packing.shutil, "copyfile", OSError(errno.ENOSPC, "No space left on device")),
    "fsync": (packing.os, "fsync", OSError(errno.EIO, "Input/output error")),
    "rename": (packing.os, "replace", OSError(errno.EACCES, "Permission denied")),
    "state": (packing.json, "dumps", OSError(errno.ENOSPC, "No space left on device")),
    "checksums": (packing, "checksum_of", KeyboardInterrupt()),
    "read-only": (packing.Path, "mkdir", PermissionError(errno.EROFS, "Read-only file system")),
}


class Fault:
    """A function that fails while `on`."""

    def __init__(self, patch, owner, name, error):
        self.real, self.error, self.on = getattr(owner, name), error, True
        patch.setattr(owner, name, self)

    def __get__(self, owner, kind=None):
        return lambda *given, **more: self(owner, *given, **more)

    def __call__(self, *given, **more):
        if self.on:
            raise self.error
        return self.real(*given, **more)


@pytest.mark.parametrize("what", FAULTS)
def test_a_save_that_fails_leaves_training_and_earlier_checkpoints_whole(what, of_rounds, monkeypatch, tmp_path):  # C71
    place, (owner, name, error) = tmp_path / "kept", FAULTS[what]

    class Break(Stop):
        fault = None

        def on_safe_point(self):
            self.seen += 1
            if self.seen == 6:
                self.fault = Fault(monkeypatch, owner, name, error)

    watcher = Break()
    trainer = make("MADPOIter", tmp_path / "runs", callbacks=[watcher])
    with pytest.raises(type(error)):
        trainer.train(checkpoint_dir=place, **ALWAYS)
    watcher.fault.on = False
    assert kept(place) == [f"checkpoint-{n}" for n in range(1, 6)], "nothing half is left"
    assert trainer.run.update == 5
    again = make("MADPOIter", tmp_path / "again")
    again.train(resume_from_checkpoint="latest", checkpoint_dir=place)
    assert differs(of_rounds[1], outcome(again)) == ""
    trainer.train(checkpoint_dir=tmp_path / "more", **ALWAYS)
    assert differs(of_rounds[1], outcome(trainer)) == "" and "checkpoint-6" in kept(tmp_path / "more")


@pytest.mark.parametrize("deadly", range(1, 40, 3))
def test_killed_between_any_two_writes_of_a_save(deadly, tmp_path):  # C71
    """A child that dies without a chance to clean up; the checkpoint before is taken up."""
    trainer = stopped(small(tmp_path / "runs", callbacks=[Stop(2)]))
    trainer.save_checkpoint(tmp_path / "kept" / "checkpoint-1")
    expected = finished(small(tmp_path / "plain"))
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        count = [0]

        def dying(real):
            def call(*given, **more):
                count[0] += 1
                if count[0] == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*given, **more)
            return call
        for owner, name in ((packing, "save_file"), (packing.os, "fsync"), (packing.os, "replace"), (packing.Path, "mkdir"), (packing.Path, "write_text"), (packing, "checksum_of"), (packing.json, "dumps")):
            setattr(owner, name, dying(getattr(owner, name)))
        trainer.save_checkpoint(tmp_path / "kept" / "checkpoint-2")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    names = {path.name for path in checkpoints(tmp_path / "kept")}
    assert names == {"checkpoint-1"} if code and deadly < 10 else "checkpoint-1" in names
    again = small(tmp_path / "again")
    again.train(resume_from_checkpoint="latest", checkpoint_dir=tmp_path / "kept")
    assert differs(expected, outcome(again)) == ""


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = small(tmp_path / "runs")
    with pytest.raises(ValueError, match="checkpoint_dir: nothing can be written into .*file"):
        trainer.train(checkpoint_dir=tmp_path / "file", **UPDATES)
    assert trainer.run.update == 0
    trainer.train(checkpoint_dir=tmp_path / "kept", **UPDATES)
    assert differs(finished(small(tmp_path / "plain")), outcome(trainer)) == "" and len(checkpoints(tmp_path / "kept")) == 4


# what is inside

def test_metadata(tmp_path):
    trainer = small(tmp_path / "runs")
    trainer.train(checkpoint_dir=tmp_path / "kept")
    folder = tmp_path / "kept" / "checkpoint-2"
    about = read_checkpoint_metadata(folder)
    assert about == read_checkpoint_metadata(str(folder / "state.json"))
    assert {key: about[key] for key in ("version", "trainer_class", "algorithm", "run_id", "sequence", "update", "env_step", "wandb")} == dict(
        version=1, trainer_class="MAGRPOTrainer", algorithm="MAGRPO", run_id=trainer.run_id, sequence=2, update=4, env_step=trainer.env_step, wandb=None)
    assert about["config"]["num_generations"] == "2" and about["saved_at"] > 1.7e9
    assert {*about["files"]} == {"state.json", "tensors.safetensors"} and about["files"]["state.json"]["size"] == (folder / "state.json").stat().st_size
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint_metadata(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_pickle_but_tensors_alone(name, tmp_path):
    stopped(trainer := make(name, tmp_path / "runs", callbacks=[Stop(6)]))
    trainer.save_checkpoint(tmp_path / "saved")
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    for path in files:
        if path.suffix == ".pt":
            assert path.parts[-3] == "policies" and all(isinstance(value, torch.Tensor) for value in torch.load(path, weights_only=True).values())
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        else:
            assert path.name == "tensors.safetensors" and b"safetensors" not in path.read_bytes()[:2]
    assert {path.relative_to(tmp_path / "saved").as_posix() for path in files} == {"metadata.json", *read_checkpoint_metadata(tmp_path / "saved")["files"]}


def test_no_key_in_a_checkpoint(tmp_path):
    secrets = dict(comparator_api_key="sk-very-secret-1", comparator_api_headers={"X-Key": "sk-very-secret-2"}, comparator_api_extra_body={"token": "sk-very-secret-3"}, comparator_api_url="http://127.0.0.1:1/v1")
    trainer = iterative_runs.make("MADPO", output_dir=str(tmp_path / "runs"), comparator_policy="api", **secrets)
    trainer.save_checkpoint(tmp_path / "saved")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert b"very-secret" not in everything
    other = iterative_runs.make("MADPO", output_dir=str(tmp_path / "other"), comparator_policy="api", comparator_api_url="http://127.0.0.1:2/v1", comparator_api_key="another",
                                comparator_api_extra_body={"token": "another"})
    other.load_checkpoint(tmp_path / "saved")
    assert other.run_id == trainer.run_id


def test_a_seed_that_nobody_chose_is_in_the_checkpoint(tmp_path):
    torch.manual_seed(5)
    stopped(trainer := small(tmp_path / "runs", seed=None, callbacks=[Stop(2)]))
    trainer.save_checkpoint(tmp_path / "saved")
    torch.manual_seed(6)
    other = small(tmp_path / "again", seed=None)
    other.load_checkpoint(tmp_path / "saved")
    before = torch.get_rng_state()
    trainer.train()
    assert differs(outcome(trainer), finished(other)) == "" and torch.equal(before, torch.get_rng_state())


# models that share, heads, devices

@pytest.mark.parametrize("make_it", [lambda agents, folder: small(folder, agents=agents), lambda agents, folder: madpo_runs.make(agents, num_train_epochs=2, output_dir=str(folder))])
def test_shared_agents_stay_shared(make_it, tmp_path):
    new = lambda folder, **more: make_it([micro_model(3, n_layer=1)] * 2, folder)
    expected = finished(new(tmp_path / "plain"))
    trainer = new(tmp_path / "runs")
    trainer.callbacks = [Stop(2)]
    stopped(trainer).save_checkpoint(tmp_path / "saved")
    other = new(tmp_path / "again")
    other.load_checkpoint(tmp_path / "saved")
    assert other.agents[0] is other.agents[1] and other.optimizers[0] is other.optimizers[1]
    assert differs(expected, finished(other)) == ""
    tensors = packing.load_file(tmp_path / "saved" / "tensors.safetensors")
    size = sum(value.numel() for value in tensors.values() if value.is_floating_point())
    assert size < 4 * sum(p.numel() for p in other.agents[0].parameters()), "weights and two moments once, not twice"


@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads", "MADPO-reference"])
def test_tied_embeddings_stay_tied(name, tmp_path):
    agents = lambda: [micro_model(seed, "llama", num_hidden_layers=1, tie_word_embeddings=True) for seed in (1, 2)]
    expected = finished(make(name, tmp_path / "plain", agents=agents()))
    stopped(trainer := make(name, tmp_path / "runs", agents=agents(), callbacks=[Stop(3)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = taken_up(name, tmp_path / "saved", tmp_path / "again", agents=agents())
    for actor in other.team.actors:
        assert actor.model.get_input_embeddings().weight is actor.model.get_output_embeddings().weight
    assert differs(expected, finished(other)) == ""


@pytest.mark.parametrize("name", ["MAAC", "MAAC-Q", "IAC", "IAC-heads", "MARLHF-heads", "MARLHF-maac"])
def test_value_heads_and_their_optimizers_are_restored_exactly(name, tmp_path):
    stopped(trainer := make(name, tmp_path / "runs", callbacks=[Stop(14 if "MARLHF" in name else 4)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = taken_up(name, tmp_path / "saved", tmp_path / "again")
    heads = lambda one: [model.value_head for model in (*one.critics, *one.agents) if isinstance(model, CausalLMWithValueHead) and model.value_head is not None]
    assert heads(trainer) and all(differs(dict(a.state_dict()), dict(b.state_dict())) == "" for a, b in zip(heads(trainer), heads(other), strict=True))
    optimizers = lambda one: (*one.optimizers, *one.critic_optimizers)
    assert any(optimizer.state for optimizer in optimizers(other))
    assert differs(outcome(trainer)["optimizers"], outcome(other)["optimizers"]) == ""


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    stopped(trainer := make("IAC-heads", tmp_path / "runs", callbacks=[Stop(1)]))
    trainer.save_checkpoint(tmp_path / "saved")
    packed = json.loads((tmp_path / "saved" / "state.json").read_text())
    for model in packed["team"]["models"]:
        for key in [key for key in model if key.startswith("value_head")]:
            del model[key]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(packed))
    about = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    about["files"]["state.json"] = {"size": (tmp_path / "saved" / "state.json").stat().st_size, "sha256": packing.checksum_of(tmp_path / "saved" / "state.json")}
    (tmp_path / "saved" / "metadata.json").write_text(json.dumps(about))
    other = make("IAC-heads", tmp_path / "again")
    before = outcome(other)
    with pytest.raises(ValueError, match="agent 0: value_head.* not in the checkpoint"):
        other.load_checkpoint(tmp_path / "saved")
    assert differs(before, outcome(other)) == ""


@pytest.mark.parametrize("name, devices", [("MAGRPO", dict(agent_devices=["cpu", "cpu:1"])), ("IAC", dict(agent_devices=["cpu:1", "cpu"], critic_devices=["cpu", "cpu:1"])),
                                           ("MADPO-reference", dict(agent_devices=["cpu:1", "cpu"], reference_devices=["cpu", "cpu:1"]))])
def test_loaded_on_other_devices(name, devices, root, tmp_path):  # C70
    stopped(trainer := make(name, tmp_path / "runs", callbacks=[Stop(3)]))
    trainer.save_checkpoint(tmp_path / "saved")
    other = taken_up(name, tmp_path / "saved", tmp_path / "again", parallel_training="mp", **devices)
    found = finished(other)
    expected = reference(name, root)[0]
    assert [str(device) for device in other.agent_devices] == devices["agent_devices"]
    assert differs(expected["weights"], found["weights"]) == "" and expected["clocks"] == found["clocks"]


# evaluation and streams

@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation_changes_nothing_that_is_learned(name, root, tmp_path):
    found = finished(make(name, tmp_path, eval_dataset=rows(2), eval_interval=1, eval_num_samples=2))
    expected = reference(name, root)[0]
    assert any(row["kind"] == "eval" for row in found["history"])
    streams = lambda one: {key: value for key, value in one["streams"].items() if not key.startswith("evaluation")}
    for key in ("weights", "optimizers", "clocks", "rounds"):
        assert differs(expected[key], found[key]) == "", key
    assert differs(streams(expected), streams(found)) == ""


def test_interrupted_evaluations_are_made_once(tmp_path):
    given = dict(eval_dataset=rows(2), eval_interval=1, eval_num_samples=2)
    expected = finished(make("MAGRPO", tmp_path / "plain", **given))
    for n in (1, 2, 5):
        stopped(trainer := make("MAGRPO", tmp_path / str(n), callbacks=[Stop(n)], **given))
        trainer.save_checkpoint(tmp_path / f"saved {n}")
        assert differs(expected, finished(taken_up("MAGRPO", tmp_path / f"saved {n}", tmp_path / "again", **given))) == ""


def test_another_stream_disturbs_none():
    few, many = make_streams(7, ["policy 0", "data"]), make_streams(7, ["new", "policy 0", "policy 1", "data", "replay"])
    for name in few:
        many["new"].python.random()
        assert few[name].python.random() == many[name].python.random()
        with few[name].on("cpu"):
            first = torch.rand(3)
        with many[name].on("cpu"):
            assert torch.equal(first, torch.rand(3))


def test_the_first_sample_after_resuming_is_the_next_one(tmp_path):  # C76
    """Not the first one of the run, and not one that a new seed gives."""
    def run(texts, stop=0):
        return small(tmp_path / "runs", callbacks=[Stop(stop)], reward_func=lambda *own: (texts.append(own), reinforce_runs.letters(*own))[1])
    whole, before, after = [], [], []
    run(whole).train()
    stopped(trainer := run(before, 2)).save_checkpoint(tmp_path / "saved")
    other = run(after)
    other.load_checkpoint(tmp_path / "saved")
    other.train()
    assert before + after == whole and after[:2] != whole[:2] and math.isfinite(trainer.history.rows[-1]["loss"])


# Ctrl-C at any line

def ctrl_c_at(n):
    """A tracer that presses Ctrl-C at the n-th line of the library, n=0 only counts; and the count."""
    count = [0]

    def lines(frame, event, arg):
        if event == "line":
            count[0] += 1
            if count[0] == n:
                signal.raise_signal(signal.SIGINT)
        return lines

    def calls(frame, event, arg):
        return lines if "comlrl_nb" in frame.f_code.co_filename else None
    return calls, count


def traced(trainer, n):
    """Train with Ctrl-C at that line; was it heard, and how many lines were there?"""
    before, (tracer, count) = sys.gettrace(), ctrl_c_at(n)
    try:
        sys.settrace(tracer)
        trainer.train()
        return False, count[0]
    except KeyboardInterrupt:
        return True, count[0]
    finally:
        sys.settrace(before)


def wrong_lines(name, root, folder, lines):
    """The lines at which a run that was stopped there, saved and finished by a new trainer is another one."""
    expected, wrong = reference(name, root)[0], []
    for n in lines:
        trainer = make(name, folder / f"{n} first")
        heard, _ = traced(trainer, n)
        if heard and (trainer.run.update == 0 or differs(expected, outcome(trainer))):
            trainer.save_checkpoint(folder / f"{n} saved")
            trainer = taken_up(name, folder / f"{n} saved", folder / f"{n} second")
            try:
                trainer.train()
            except Exception as error:
                wrong.append((n, repr(error)))
                continue
        if found := differs(expected, outcome(trainer)):
            wrong.append((n, found))
    return wrong


def some_lines(name, folder, count):
    rng = random.Random(name)
    return rng.sample(range(1, traced(make(name, folder / "counted"), 0)[1]), count)


@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads", "MARLHF-iac", "MADPOIter"])
def test_ctrl_c_at_some_lines(name, root, tmp_path):
    assert wrong_lines(name, root, tmp_path, some_lines(name, tmp_path, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ctrl_c_at_many_lines(name, root, tmp_path):
    assert wrong_lines(name, root, tmp_path, some_lines(name, tmp_path, 60)) == []


def once(patch, owner, name):
    """The first call of a method is a Ctrl-C that comes just before it."""
    real, calls = getattr(owner, name), []

    def call(*given):
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)
    patch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads"])
def test_ctrl_c_between_playing_and_keeping(name, root, monkeypatch, tmp_path):
    expected = reference(name, root)[0]
    once(monkeypatch, FreshBatches, "_keep")
    stopped(trainer := make(name, tmp_path / "first")).save_checkpoint(tmp_path / "saved")
    assert differs(expected, finished(taken_up(name, tmp_path / "saved", tmp_path / "second"))) == ""
    assert differs(expected, finished(trainer)) == ""


@pytest.mark.parametrize("place", ["store", "select"])
def test_ctrl_c_between_comparing_and_drawing(place, root, monkeypatch, tmp_path):
    expected = reference("MADPOIter", root)[0]
    once(monkeypatch, ReplayStore, place)
    stopped(trainer := make("MADPOIter", tmp_path / "first")).save_checkpoint(tmp_path / "saved")
    assert differs(expected, finished(taken_up("MADPOIter", tmp_path / "saved", tmp_path / "second"))) == ""
    assert differs(expected, finished(trainer)) == ""


def test_folders_that_a_run_chose_stay_its_own_when_it_goes_on(root, tmp_path):
    """Files that were written after the checkpoint are not another run's."""
    places = dict(policy_checkpoint_dir=str(tmp_path / "policies"), preference_replay_dir=str(tmp_path / "replay"))
    expected, points = reference("MADPOIter", root)
    trainer = make("MADPOIter", tmp_path / "first", callbacks=[Stop(points - 1)], **places)
    stopped(trainer, checkpoint_dir=tmp_path / "kept")
    assert len(checkpoints(tmp_path / "kept")) == 2 and (tmp_path / "policies" / "iteration_0003").exists() and (tmp_path / "replay" / "iteration_0003.json").exists()
    shutil.rmtree(tmp_path / "kept" / "checkpoint-2")
    again = make("MADPOIter", tmp_path / "second", **places)
    again.train(resume_from_checkpoint=True, checkpoint_dir=tmp_path / "kept")
    assert differs(expected, outcome(again)) == ""


def test_a_folder_of_checkpoints_or_a_saved_team_is_no_checkpoint(tmp_path):
    trainer = make("MAGRPO", tmp_path / "run")
    trainer.train(checkpoint_dir=tmp_path / "kept", checkpoint_unit="updates")
    trainer.save_model(tmp_path / "team")
    for place, remedy in (("kept", "give one of them, or this folder as checkpoint_dir with resume_from_checkpoint=True"), ("team", "comlrl_nb.saved.load_agents reads it")):
        with pytest.raises(ValueError, match=remedy):
            make("MAGRPO", tmp_path / "second").train(resume_from_checkpoint=tmp_path / place)
