"""The supply of freshly played batches: which rows a run may go on with, and what a second attempt draws."""
import copy
import json
import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch

from checkpoint_runs import FAMILIES, Stop, differs, finished, make, outcome
from comlrl_nb.callbacks import Callback
from comlrl_nb.fresh_batches import FreshBatches
from comlrl_nb.items import fingerprint
from comlrl_nb.packing import Packer, unpack
from reinforce_runs import rows

OTHERS = {  # as many rows as the run began with
    "another prompt": lambda known: [*known[:1], {**known[1], "prompt": "say it"}, *known[2:]],
    "another last answer": lambda known: [*known[:-1], {**known[-1], "answer": 7}],
    "another order": lambda known: known[::-1],
    "one more column": lambda known: [{**row, "more": 1} for row in known],
    "text for a number": lambda known: [{**row, "answer": str(row["answer"])} for row in known],
}


def saved_after(name, n, folder, **changes):
    trainer = make(name, folder / "first", callbacks=[Stop(n)], **changes)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_checkpoint(folder / "saved")
    return trainer


@pytest.mark.parametrize("case", OTHERS)
def test_other_rows_are_refused_before_anything_changes(case, tmp_path):
    saved_after("MAGRPO", 2, tmp_path)
    other = make("MAGRPO", tmp_path / "second", train_dataset=OTHERS[case](rows()))
    before = outcome(other)
    with pytest.raises(ValueError, match="^train_dataset: its 3 rows are not those of the saved run; give the same dataset, or begin a new run$"):
        other.load_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match="^train_dataset: "):
        other.train(resume_from_checkpoint=tmp_path / "saved")
    assert differs(before, outcome(other)) == "" and other.run.update == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_trainer_refuses_other_rows(name, tmp_path):
    known = saved_after(name, 2, tmp_path).setup.train.dataset
    other = make(name, tmp_path / "second", train_dataset=OTHERS["another prompt"](known))
    with pytest.raises(ValueError, match=f"^train_dataset: its {len(known)} rows are not those of the saved run"):
        other.load_checkpoint(tmp_path / "saved")


class Lazy:
    """Rows made when they are asked for."""

    def __init__(self, change=lambda row: row):
        self.change = change

    def __len__(self):
        return 3

    def __getitem__(self, place):
        if not 0 <= place < 3:
            raise IndexError(place)
        return self.change(rows()[place])


@pytest.mark.parametrize("same", [lambda: copy.deepcopy(rows()), lambda: tuple(dict(reversed(row.items())) for row in rows()), lambda: datasets.Dataset.from_list(rows()), Lazy,
                                  lambda: [{**row, "answer": np.int64(row["answer"])} for row in rows()]])
def test_the_same_rows_in_another_form_are_taken(same, tmp_path):
    expected = finished(make("MAGRPO", tmp_path / "0"))
    saved_after("MAGRPO", 2, tmp_path)
    second = make("MAGRPO", tmp_path / "second", train_dataset=same())
    second.load_checkpoint(tmp_path / "saved")
    assert differs(expected, finished(second)) == ""


@pytest.mark.parametrize("dataset", [lambda: Lazy(lambda row: {**row, "noise": random.random()}), lambda: datasets.Dataset.from_list(rows()).to_iterable_dataset()])
def test_rows_that_cannot_be_compared_are_taken(dataset, tmp_path):
    trainer = saved_after("MAGRPO", 2, tmp_path, train_dataset=dataset())
    assert trainer.setup.train.identity["fingerprint"] is None
    second = make("MAGRPO", tmp_path / "second", train_dataset=dataset())
    second.train(resume_from_checkpoint=tmp_path / "saved")
    assert second.run.update > trainer.run.update


def test_a_fingerprint_is_the_same_in_every_process():
    class Opaque:
        pass

    dataset = [{"prompt": "a", "image": Opaque(), "pixels": np.zeros(2), "weights": torch.zeros(1), "tags": ("x", "y"), "more": {"b": None, "a": 0.5}, "nan": float("nan"), 3: True}]
    assert fingerprint(dataset) == fingerprint([{**dataset[0], "image": Opaque(), "tags": ["x", "y"]}]) == "b24f3ead3c9865fa"


def test_a_long_dataset_is_not_read_as_a_whole():
    class Counted(list):
        read = 0

        def __getitem__(self, place):
            self.read += 1
            return super().__getitem__(place)

    dataset = Counted({"prompt": str(n)} for n in range(10_000))
    found = fingerprint(dataset)
    assert dataset.read == 128
    for place in (0, 9_999, 9_999 * 32 // 63):
        changed = list(dataset)
        changed[place] = {"prompt": "other"}
        assert fingerprint(changed) != found, place
    assert fingerprint([]) is None and fingerprint([{"n": 1}]) != fingerprint([{"n": 2}])


def test_rows_are_read_for_it_once(tmp_path):
    seen = []
    trainer = make("MAGRPO", tmp_path, train_dataset=Lazy(lambda row: seen.append(row) or row))
    trainer.train(checkpoint_dir=tmp_path / "kept", checkpoint_unit="updates")
    played = len(seen)
    assert len(list((tmp_path / "kept").iterdir())) > 2 and played <= 2 * 3 + 2 * 3 + 2  # two epochs, two readings, the columns


def test_a_state_without_the_new_entries_is_taken(tmp_path):
    expected = finished(make("MAGRPO", tmp_path / "0"))
    trainer = saved_after("MAGRPO", 2, tmp_path)
    state = trainer.state_dict()
    del state["own"]["source"]["before"]
    second = make("MAGRPO", tmp_path / "second")
    second.load_state_dict(state, tmp_path)
    assert differs(expected, finished(second)) == ""


class StopPlaying(Callback):
    """Ctrl-C while the n-th play is told: sampled, scored, and not kept."""

    def __init__(self, n):
        self.left = n

    def on_nodes(self, kind, nodes):
        self.left -= kind != "eval"
        if self.left == 0 and kind != "eval":
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["MAGRPO", "MAReMax", "MAAC", "IAC-heads"])
@pytest.mark.parametrize("n", [1, 2])
def test_stopped_while_a_play_is_told(name, n, tmp_path):
    expected = finished(make(name, tmp_path / "0"))
    trainer = make(name, tmp_path / "first", callbacks=[StopPlaying(n)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_checkpoint(tmp_path / "saved")
    second = make(name, tmp_path / "second")
    second.load_checkpoint(tmp_path / "saved")
    assert differs(expected, finished(second)) == "" and differs(expected, finished(trainer)) == ""


def test_the_state_is_plain(monkeypatch, tmp_path):
    """What waits for a second attempt survives the way through a file."""
    def interrupted(*given):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(FreshBatches, "_keep", interrupted)
        trainer = make("MAGRPO", tmp_path / "first")
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    packer = Packer()
    state = trainer.source.state_dict()
    back = unpack(json.loads(json.dumps(packer.pack(state))), packer.tensors)
    assert state["before"] and differs(state["before"], back["before"]) == ""


@pytest.mark.parametrize("name", ["MAGRPO", "IAC-heads"])
def test_an_error_while_minibatches_are_made_loses_no_row(name, monkeypatch, tmp_path):
    expected, failed = finished(make(name, tmp_path / "0")), []
    trainer = make(name, tmp_path / "first")
    real = trainer.supply

    def fails_once(prepare):
        def prepared(entries):
            if not failed:
                failed.append(len(entries))
                raise MemoryError
            return prepare(entries)
        return prepared

    def supply():
        source = real()
        source.filling = source.buffer.filling = replace(source.filling, prepare=fails_once(source.filling.prepare))
        return source

    monkeypatch.setattr(trainer, "supply", supply)
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.train()
    assert failed and differs(expected, outcome(trainer)) == ""
