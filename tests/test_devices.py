"""Placement: every spelling of a device field on machines with 0, 1 and 4 accelerators, and every mistake."""
import inspect
import warnings

import pytest
import torch

from comlrl_nb.schedulers import DeviceScheduler, device_scheduler as module
from comlrl_nb.schedulers.device_scheduler import (
    DistributedContext, Placement, first_device, follow, local_context, normalize_parallel_training, parse_device, place, placement_table,
    resolve_spec)

CPU = torch.device("cpu")
FOUR = tuple(torch.device("cuda", i) for i in range(4))


def names(devices):
    return [str(device) for device in devices]


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has the given accelerators."""
    return lambda accelerators: monkeypatch.setattr(module, "available_accelerators", lambda: tuple(accelerators))


@pytest.mark.parametrize("spec, count, accelerators, expected", [
    (None, 2, 0, ["cpu", "cpu"]),
    ("auto", 2, 0, ["cpu", "cpu"]),
    ("AUTO", 2, 1, ["cuda:0", "cuda:0"]),
    ("auto", 2, 4, ["cuda:0", "cuda:1"]),
    (["auto"], 3, 4, ["cuda:0", "cuda:1", "cuda:2"]),
    ("auto", 4, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("auto", 5, 4, ["cuda:0"] * 5),
    ("cpu", 3, 4, ["cpu"] * 3),
    ("cuda", 2, 4, ["cuda:0", "cuda:0"]),
    (["cuda:3"], 2, 4, ["cuda:3", "cuda:3"]),
    (("cuda:3", "cpu"), 2, 4, ["cuda:3", "cpu"]),
    (["cpu", "cpu:1"], 2, 0, ["cpu", "cpu:1"]),
    ([torch.device("cuda"), "cuda:0"], 2, 1, ["cuda:0", "cuda:0"]),
    (torch.device("cpu:1"), 2, 0, ["cpu:1", "cpu:1"]),
])
def test_a_field_becomes_one_device_per_agent(spec, count, accelerators, expected):
    assert names(resolve_spec(spec, count, "agent_devices", FOUR[:accelerators])) == expected


BAD = [
    ("gpu0", "gpu0"), ("cuda:99", "cuda:99"), ("cuda:4", "cuda:4"), ("meta", "meta"), ("", "''"), ("cuda:0,cuda:1", "cuda:0,cuda:1"), (" cpu", " cpu"),
    ("CPU", "CPU"), ("cpu:-1", "cpu:-1"), (3, "3"), (True, "True"), (1.5, "1.5"), (b"cpu", "cpu"), ({"cpu": 1}, "cpu"), ({"cpu"}, "cpu"), ([], "[]"),
    ((), "()"), ([None], "None"), ([None, None], "None"), ([0, 1], "0"), (["cpu", "gpu0"], "gpu0"), (["cpu", ["cpu"]], "['cpu']"),
    (["auto", "cpu"], "auto"), (["cpu"] * 3, "3 entries"),
]


@pytest.mark.parametrize("spec, fragment", BAD, ids=[repr(spec) for spec, _ in BAD])
@pytest.mark.parametrize("field", ["agent_devices", "reference_devices"])
def test_a_mistake_names_field_and_value(spec, fragment, field):
    with pytest.raises(ValueError) as caught:
        resolve_spec(spec, 2, field, FOUR)
    assert field in str(caught.value) and fragment in str(caught.value)


def test_an_absent_accelerator_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match="agent_devices='cuda:0'.*expected one of 'cpu', or 'auto'"):
        resolve_spec("cuda:0", 2, "agent_devices", ())
    with pytest.raises(ValueError, match=r"agent_devices\[1\]='cuda:2'.*'cpu', 'cuda:0', 'cuda:1'"):
        resolve_spec(["cuda:1", "cuda:2"], 2, "agent_devices", FOUR[:2])


def test_other_kinds_of_accelerator():
    apple = (torch.device("mps", 0),)
    assert names(resolve_spec("auto", 1, "agent_devices", apple)) == ["mps:0"]
    assert parse_device("mps", "agent_devices", apple) == apple[0]


@pytest.mark.parametrize("count", [0, -1])
def test_count_must_be_positive(count):
    with pytest.raises(ValueError, match="agent_devices.*at least 1"):
        DeviceScheduler.resolve_devices("cpu", count, kind="agent_devices")


@pytest.mark.parametrize("specs, expected", [
    ((), "cuda:0"), ((None, None), "cuda:0"), (("auto",), "cuda:0"), ((None, "cpu"), "cpu"), ((["cuda:2", "cuda:0"], "cpu"), "cuda:2"),
    ((["auto", "cpu"],), "cuda:0"), ((torch.device("cuda"),), "cuda:0"),
])
def test_single_device(machine, specs, expected):
    machine(FOUR)
    assert str(DeviceScheduler.resolve_single_device(*specs)) == expected


@pytest.mark.parametrize("specs", [([],), (3,), (["cpu", "gpu0"],), ("cpu", "gpu0"), ([None],)])
def test_single_device_checks_every_name(machine, specs):
    machine(FOUR)
    with pytest.raises(ValueError, match="device spec"):
        DeviceScheduler.resolve_single_device(*specs)
    with pytest.raises(ValueError, match="agent_devices"):
        first_device(dict(zip(("agent_devices", "agent_devices "), specs)), FOUR)


def test_static_methods_look_at_the_machine(machine):
    machine(FOUR)
    assert names(DeviceScheduler.resolve_devices(None, 2)) == ["cuda:0", "cuda:1"]
    agents, critics = DeviceScheduler.assign_devices(2, "auto", "cuda:3", use_separate_critic=True)
    assert names(agents) == ["cuda:0", "cuda:1"] and names(critics) == ["cuda:3", "cuda:3"]
    assert DeviceScheduler.assign_devices(2, "auto", None, use_separate_critic=True) == (agents, agents)
    assert DeviceScheduler.assign_devices(2, "auto", "cuda:3", use_separate_critic=False) == (agents, agents)
    assert DeviceScheduler.assign_shared_critic_device(agents, None) == agents[0]
    assert str(DeviceScheduler.assign_shared_critic_device(agents, ["cuda:3"])) == "cuda:3"
    assert str(DeviceScheduler.assign_shared_critic_device(agents, "auto")) == "cuda:0"


def test_a_shared_critic_has_one_device():
    with pytest.raises(ValueError, match="critic_devices.*2 entries: expected exactly 1"):
        DeviceScheduler.assign_shared_critic_device([CPU, CPU], ["cpu", "cpu:1"])
    for mode in ("none", "mp"):
        with pytest.raises(ValueError, match="critic_devices.*2 entries"):
            place(2, parallel_training=mode, agent_devices="cpu", num_critics=1, critic_devices=["cpu", "cpu"], accelerators=())


def test_signatures():
    expected = {"assign_devices": ["num_agents", "agent_devices", "critic_devices", "use_separate_critic"],
                "assign_shared_critic_device": ["agent_devices", "critic_devices"],
                "resolve_devices": ["spec", "num_devices", "kind"], "resolve_single_device": ["specs"]}
    for method, parameters in expected.items():
        assert list(inspect.signature(getattr(DeviceScheduler, method)).parameters) == parameters


@pytest.mark.parametrize("mode, expected", [("none", "none"), (None, "none"), ("null", "none"), (" MP ", "mp"), ("None", "none")])
def test_parallel_training_spellings(mode, expected):
    assert normalize_parallel_training(mode) == expected


@pytest.mark.parametrize("mode", ["ddp", "", True, 2])
def test_parallel_training_mistakes(mode):
    with pytest.raises(ValueError, match="parallel_training=.*expected 'none'.*'mp'"):
        place(2, parallel_training=mode, accelerators=())


@pytest.mark.parametrize("accelerators, expected", [(0, "cpu"), (1, "cuda:0"), (4, "cuda:0")])
@pytest.mark.parametrize("spec", [None, "auto"])
def test_one_device_by_default(spec, accelerators, expected):
    placement = place(3, agent_devices=spec, num_critics=3, accelerators=FOUR[:accelerators])
    assert names(placement.agents) == names(placement.critics) == [expected] * 3


def test_one_device_is_the_first_entry_and_says_what_it_leaves_unused():
    with pytest.warns(UserWarning, match=r"agent_devices=\['cuda:2', 'cuda:1'\].*cuda:2"):
        assert names(place(2, agent_devices=["cuda:2", "cuda:1"], accelerators=FOUR).agents) == ["cuda:2"] * 2
    with pytest.warns(UserWarning, match="critic_devices='cuda:1'.*cuda:0"):
        place(2, agent_devices="cuda:0", num_critics=2, critic_devices="cuda:1", accelerators=FOUR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place(2, agent_devices=["cuda", "cuda:0"], num_critics=1, critic_devices=["cuda:0"], accelerators=FOUR)
        place(2, agent_devices="auto", num_critics=2, critic_devices="auto", accelerators=FOUR)


@pytest.mark.parametrize("mode", ["none", "mp"])
@pytest.mark.parametrize("field", ["agent_devices", "critic_devices"])
@pytest.mark.parametrize("spec", ["gpu0", "cuda:99", 3, [], [None], ["cpu"] * 3])
def test_place_refuses_bad_fields_in_both_modes(mode, field, spec):
    fields = {"agent_devices": "cpu", "critic_devices": "cpu", field: spec}
    with pytest.raises(ValueError, match=field):
        place(2, parallel_training=mode, num_critics=2, accelerators=FOUR, **fields)


def test_mp_needs_its_fields():
    with pytest.raises(ValueError, match="agent_devices=None.*'mp' needs agent_devices"):
        place(2, parallel_training="mp", accelerators=FOUR)
    with pytest.raises(ValueError, match="critic_devices=None.*'mp' needs critic_devices"):
        place(2, parallel_training="mp", agent_devices="auto", num_critics=2, accelerators=FOUR)
    assert place(2, parallel_training="mp", agent_devices="auto", accelerators=FOUR) == Placement(FOUR[:2])


def test_followers():
    assert follow(None, FOUR[1:3], "reference_devices", FOUR) == FOUR[1:3]
    assert follow("cuda:3", FOUR[1:3], "reference_devices", FOUR) == (FOUR[3],) * 2
    with pytest.raises(ValueError, match="reference_devices.*3 entries"):
        follow(["cpu"] * 3, FOUR[1:3], "reference_devices", FOUR)


def test_table_lists_every_device_once(machine):
    placement = Placement(agents=(FOUR[0], torch.device("cpu:1")), critics=(FOUR[1],), references=FOUR[:2], reward_models=(FOUR[1],))
    rows = {device: who for device, _, who in placement_table(placement, FOUR[:3]).rows}
    assert rows == {"cpu": (), "cuda:0": ("agent 0", "reference 0"), "cuda:1": ("critic", "reference 1", "reward model"), "cuda:2": (),
                    "cpu:1": ("agent 1",)}
    machine(())
    assert "nobody" in DeviceScheduler.placement_table()._repr_markdown_()
    assert "| agent 1 | cpu:1 |" in placement._repr_markdown_()


def test_local_context():
    assert local_context(torch.device("cpu:1")) == DistributedContext(is_main=True, device=torch.device("cpu:1"))
    assert local_context().is_main


@pytest.mark.gpu
def test_the_real_accelerators():
    found = module.available_accelerators()
    assert found and DeviceScheduler.resolve_single_device() == found[0]
    with torch.device("cpu"):
        assert torch.ones(1).to(found[0]).device == found[0]
    assert "GiB" in str(DeviceScheduler.placement_table()) or found[0].type != "cuda"
