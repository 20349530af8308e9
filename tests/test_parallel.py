"""Workers: order, overlap, thread-local switches, errors, interrupts, lifetimes."""
import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch

from comlrl_nb.parallel import AgentWorkers

APART, TOGETHER = ("cpu", "cpu:1", "cpu:2"), ("cpu", "cpu", "cpu")


@pytest.fixture(params=[APART, TOGETHER], ids=["apart", "together"])
def workers(request):
    with AgentWorkers(request.param) as workers:
        yield workers


@pytest.fixture
def apart():
    with AgentWorkers(APART) as workers:
        yield workers


def agent_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("agent-")]


def test_results_in_agent_order(workers):
    def slow_first(agent, delay):
        time.sleep(delay)
        return agent

    assert workers.run(slow_first, [(0, 0.05), (1, 0.02), (2, 0.0)]) == [0, 1, 2]
    assert workers.run(lambda: None, [(), (), ()]) == [None] * 3


@pytest.mark.parametrize("devices, parallel", [(APART, True), (TOGETHER, False), (("cpu:1",), False), (("cpu", "cpu", "cpu:1"), True)])
def test_threads_only_where_devices_differ(devices, parallel):
    with AgentWorkers(devices) as workers:
        names = workers.run(lambda _: threading.current_thread().name, [(i,) for i in range(len(devices))])
        assert workers.parallel == parallel
        here = threading.current_thread().name
        assert names == ([f"agent-{i}" for i in range(len(devices))] if parallel else [here] * len(devices))


def test_calls_overlap_and_threads_live_on(apart):
    barrier = threading.Barrier(3, timeout=10)

    def ident():
        barrier.wait()
        return threading.get_ident()

    first = apart.run(ident, [()] * 3)
    assert len(set(first)) == 3 and apart.run(ident, [()] * 3) == first


def grad_state():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (torch.ones(1, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize("mode, expected", [
    (torch.enable_grad, (True, False, True)), (torch.no_grad, (False, False, False)), (torch.inference_mode, (False, True, False))])
def test_grad_mode_holds_inside(workers, mode, expected):
    with mode():
        assert workers.run(grad_state, [()] * 3) == [expected] * 3
    assert workers.run(grad_state, [()] * 3) == [(True, False, True)] * 3


def test_a_worker_that_changes_the_mode_changes_only_its_own_call(apart):
    apart.run(torch.set_grad_enabled, [(False,)] * 3)
    assert torch.is_grad_enabled() and apart.run(torch.is_grad_enabled, [()] * 3) == [True] * 3


def test_autocast_holds_inside(workers):
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {out.dtype for out in workers.run(torch.mm, [(x, x)] * 3)} == {torch.bfloat16}
        with torch.autocast("cpu", enabled=False):
            assert {out.dtype for out in workers.run(torch.mm, [(x, x)] * 3)} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.float16):
        assert {out.dtype for out in workers.run(torch.mm, [(x, x)] * 3)} == {torch.float16}
    assert {out.dtype for out in workers.run(torch.mm, [(x, x)] * 3)} == {torch.float32}


def test_training_gives_the_same_weights_in_threads_and_in_turn():
    def step(layer, x):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(5):
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach().clone()

    def trained(devices):
        torch.manual_seed(0)
        args = [(torch.nn.Linear(3, 2), torch.randn(4, 3)) for _ in devices]
        with AgentWorkers(devices) as workers:
            return torch.stack(workers.run(step, args))

    assert torch.equal(trained(APART), trained(TOGETHER))


class Trouble(Exception):
    pass


def test_all_finish_then_the_first_error_by_agent_order(workers):
    errors, done = [Trouble("agent 2"), KeyError("agent 3")], []

    def work(agent, delay):
        time.sleep(delay)
        done.append(agent)
        if agent:
            raise errors[agent - 1]
        return agent

    with pytest.raises(Trouble) as caught:
        workers.run(work, [(0, 0.05), (1, 0.02), (2, 0.0)])
    assert caught.value is errors[0] and sorted(done) == [0, 1, 2]
    assert "in work" in "".join(traceback.format_exception(caught.value)) and caught.value.__context__ is None
    assert workers.run(lambda a: a, [(0,), (1,), (2,)]) == [0, 1, 2]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_worker_survives_any_error(apart, error):
    def fail(agent):
        if agent == 1:
            raise error

    with pytest.raises(type(error)):
        apart.run(fail, [(0,), (1,), (2,)])
    assert apart.run(lambda: 1, [()] * 3) == [1, 1, 1]


def test_in_turn_an_interrupt_comes_at_once_and_before_errors():
    calls = []

    def work(agent):
        calls.append(agent)
        raise [Trouble(), KeyboardInterrupt(), Trouble()][agent]

    with AgentWorkers(TOGETHER) as workers, pytest.raises(KeyboardInterrupt):
        workers.run(work, [(0,), (1,), (2,)])
    assert calls == [0, 1]


def test_ctrl_c_in_the_caller_waits_for_running_calls_and_leaves_usable_workers(apart):
    done = []

    def work(agent):
        time.sleep(0.4)
        done.append(agent)

    handler = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            apart.run(work, [(0,), (1,), (2,)])
        assert sorted(done) == [0, 1, 2], "a call was still running when the interrupt came out"
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert apart.run(lambda a: a, [(0,), (1,), (2,)]) == [0, 1, 2]


def test_a_second_ctrl_c_does_not_wait(apart):
    release = threading.Event()
    handler = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            apart.run(release.wait, [(10,)] * 3)
        assert not release.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        release.set()
    assert apart.run(lambda a: a, [(0,), (1,), (2,)]) == [0, 1, 2]


@pytest.mark.parametrize("args, fragment", [([(0,)], "1 entries"), ([], "0 entries"), ([(0,)] * 4, "4 entries"), ([(0,), [1], (2,)], r"per_agent_args\[1\]=\[1\]"),
                                            ([(0,), (1,), "ab"], r"per_agent_args\[2\]='ab'"), ([(0,), None, (1,)], r"per_agent_args\[1\]=None")])
def test_bad_arguments(workers, args, fragment):
    with pytest.raises(ValueError, match="per_agent_args") as caught:
        workers.run(lambda a: a, args)
    assert caught.match(fragment)


def test_no_devices():
    with pytest.raises(ValueError, match="devices"):
        AgentWorkers([])


def test_run_from_inside_a_worker_is_refused(apart):
    with pytest.raises(RuntimeError, match="own workers"):
        apart.run(lambda: apart.run(lambda: 1, [()] * 3), [()] * 3)


def test_close_twice_then_run(workers):
    workers.run(lambda: None, [()] * 3)
    workers.close()
    workers.close()
    assert not agent_threads()
    with pytest.raises(RuntimeError, match="closed"):
        workers.run(lambda: None, [()] * 3)


def test_no_thread_before_the_first_run():
    workers = AgentWorkers(APART)
    assert not agent_threads()
    workers.close()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_have_threads_of_their_own(apart, duplicate):
    class Trainer:
        pass

    mine = apart.run(threading.get_ident, [()] * 3)
    with duplicate(apart) as other:
        assert other.devices == apart.devices and not set(mine) & set(other.run(threading.get_ident, [()] * 3))
    trainer = Trainer()
    trainer.workers = apart
    assert copy.deepcopy(trainer).workers is not apart
    assert apart.run(threading.get_ident, [()] * 3) == mine


def test_forgotten_workers_end_their_threads():
    workers = AgentWorkers(APART)
    workers.run(lambda: None, [()] * 3)
    threads = workers._threads
    del workers
    gc.collect()
    for thread in threads:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in threads)


class Big:
    """Something whose end can be watched."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_after_a_run(workers, fails):
    """A finished task, its result and its error are released without the garbage collector."""
    def work(big):
        result = Big()
        made.append(weakref.ref(result))
        if fails:
            raise Trouble("no")
        return result

    made, given = [], [Big() for _ in range(3)]
    made += [weakref.ref(big) for big in given]
    gc.collect()
    gc.disable()
    try:
        try:
            workers.run(work, [(big,) for big in given])
        except Trouble:
            assert fails
        del given
        deadline = time.time() + 5
        while any(ref() is not None for ref in made) and time.time() < deadline:
            time.sleep(0.01)
        assert [ref() for ref in made] == [None] * 6
    finally:
        gc.enable()


EXIT = """
import threading, time
from comlrl_nb.parallel import AgentWorkers
workers = AgentWorkers(["cpu", "cpu:1"])
workers.run(lambda: None, [()] * 2)
{body}
print("end", flush=True)
"""


@pytest.mark.parametrize("body", ["", "workers._queues[0].put(lambda: time.sleep(60))", "raise SystemExit(print('end'))"], ids=["idle", "busy", "exit"])
def test_the_interpreter_does_not_wait_for_workers(body):
    done = subprocess.run([sys.executable, "-c", EXIT.format(body=body)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stdout == "end\n" and done.stderr == ""


@pytest.mark.gpu
def test_a_worker_computes_on_its_own_device():
    accelerator = torch.accelerator.current_accelerator()
    first = torch.device(accelerator.type, 0)
    with AgentWorkers(["cpu", first]) as workers:
        def work(device):
            x = torch.ones(8, 8, device=device, requires_grad=True)
            (x @ x).sum().backward()
            return str(x.grad.device), torch.accelerator.current_device_index()

        assert workers.run(work, [("cpu",), (first,)])[1] == (str(first), 0)
        with torch.no_grad(), torch.autocast(first.type, dtype=torch.bfloat16):
            out = workers.run(lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2, device=d), [("cpu",), (first,)])
        assert out[0].dtype == torch.float32 and out[1].dtype == torch.bfloat16
