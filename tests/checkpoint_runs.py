"""Short runs of every trainer, what they leave behind, and children that may be killed, for the tests of checkpoints."""
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

import actor_critic_runs
import iterative_runs
import madpo_runs
import marlhf_runs
import reinforce_runs
from comlrl_nb.callbacks import Callback
from comlrl_nb.demo import one_thread
from reinforce_runs import Halves, rows, unclocked

ALWAYS = dict(checkpoint_interval=1e-9, checkpoint_unit="minutes")  # at every safe point
TWO_TURNS = dict(num_turns=2, num_generations=2)
ACTOR_CRITIC = dict(num_train_epochs=2, rollout_buffer_size=3, num_turns=2)
JUDGED = dict(num_train_epochs=2, reward_num_train_epochs=2)
ROUNDS = dict(num_iterations=3, num_train_epochs=2)
LAMBDA = dict(preference_replay_mode="lambda_decay", preference_replay_lambda=0.7)


def centralized(make, **more):
    return lambda **given: make(**{"collaboration_mode": "centralized", "centralized_comparator_adapter": Halves(), "agents": reinforce_runs.team(("gpt2",)), **more, **given})


def given(make, *place, **fields):
    return lambda **more: make(*place, **{**fields, **more})


RUNS = {  # name → make(**changes): a new trainer
    "MAGRPO": given(reinforce_runs.make, num_train_epochs=2, rollout_buffer_size=4, **TWO_TURNS),
    "MAREINFORCE": given(reinforce_runs.make, name="MAREINFORCE", num_train_epochs=2, shuffle=True),
    "MARLOO": given(reinforce_runs.make, name="MARLOO", num_train_epochs=2, joint_mode="cross", num_generations=2),
    "MAReMax": given(reinforce_runs.make, name="MAReMax", num_train_epochs=2, reference_kl_enabled=True, reference_kl_coef=0.1),
    "CentralizedMAGRPO": given(reinforce_runs.make, name="CentralizedMAGRPO", num_train_epochs=2, centralized_adapter=Halves()),
    "MAAC": given(actor_critic_runs.make, name="MAAC", critic_type="v", **ACTOR_CRITIC),
    "MAAC-Q": given(actor_critic_runs.make, name="MAAC", critic_type="q", shuffle=True, **ACTOR_CRITIC),
    "IAC": given(actor_critic_runs.make, name="IAC", critic_type="q", **ACTOR_CRITIC),
    "IAC-heads": given(actor_critic_runs.make, name="IAC", use_separate_critic=False, **{**ACTOR_CRITIC, "num_turns": 1, "num_generations": 2}),
    "MADPO": given(madpo_runs.make, num_train_epochs=3, shuffle=True),
    "MADPO-reference": given(madpo_runs.make, num_train_epochs=2, dpo_reference=True, score_last_token=True),
    "MADPO-central": centralized(madpo_runs.make, num_train_epochs=2),
    **{f"MARLHF-{name}": given(marlhf_runs.make, rl_algorithm=name, **JUDGED) for name in marlhf_runs.ALGORITHMS},
    "MARLHF-heads": given(marlhf_runs.make, rl_algorithm="iac", use_separate_critic=False, reward_holdout=0.4, **JUDGED),
    "MADPOIter": given(iterative_runs.make, "MADPO", comparator_policy="history", **LAMBDA, **ROUNDS),
    "MADPOIter-copy": given(iterative_runs.make, "MADPO", comparator_policy="current_copy", shuffle=True, preference_replay_mode="nearest_k", preference_replay_k=2, **ROUNDS),
    "MARLHFIter": given(iterative_runs.make, "MARLHF", comparator_policy="history", comparator_history_k=2, **LAMBDA, **ROUNDS),
    "MARLHFIter-own-score": given(iterative_runs.make, "MARLHF", preference_scoring_reward="reward_model", preference_replay_mode="all_history", **ROUNDS),
}
FAMILIES = ("MAGRPO", "MAAC", "IAC-heads", "MADPO", "MARLHF-iac", "MADPOIter", "MARLHFIter")
LONG = {f"{name}, {epochs} epochs": given(RUNS[name], num_train_epochs=epochs) for name, epochs in {"MAGRPO": 3, "MAAC": 3, "IAC-heads": 4, "MADPO": 6}.items()}  # 12 updates and more


def make(name, folder, **changes):
    """A new trainer that writes its own files under `folder`."""
    return (RUNS | LONG)[name](**{"output_dir": str(folder), **changes})


@contextmanager
def memory_folder():
    """A temporary folder in memory where there is one: a disk takes its time for every fsync."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        yield Path(place)


class Stop(Callback):
    """Ctrl-C at the n-th safe point, counted from 1; n=0 only counts."""

    def __init__(self, n=0):
        self.n, self.seen = n, 0

    def on_safe_point(self):
        self.seen += 1
        if self.seen == self.n:
            raise KeyboardInterrupt


def plain(value):
    """Nested state with tensors copied, for comparisons."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def rounds_of(trainer):
    """The round files as they are, without the run's name."""
    if not hasattr(trainer, "rounds"):
        return []
    contents = [json.loads((trainer.rounds.store.index.folder / each.name).read_text("utf-8")) for each in trainer.rounds.store.index.rounds]
    return [{key: value for key, value in content.items() if key != "run"} for content in contents]


def outcome(trainer):
    """All that a run leaves: weights, optimizers, random streams, history without the clock, round files."""
    judge = getattr(trainer, "reward_model", None)
    return {"weights": [plain(dict(module.state_dict())) for module in (*trainer.agents, *trainer.critics, *trainer.reference_models, *([judge] if judge is not None else []))],
            "optimizers": [plain(optimizer.state_dict()) for optimizer in (*trainer.optimizers, *trainer.critic_optimizers)],
            "streams": {name: plain(stream.state_dict()) for name, stream in trainer.setup.streams.items()},
            "history": unclocked(trainer.history), "clocks": [trainer.run.update, trainer.env_step], "rounds": rounds_of(trainer)}


def differs(first, second, at=""):
    """Where two outcomes differ; empty when they are the same, bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return "" if same else at
    if type(first) is not type(second):
        return f"{at}: {type(first).__name__} and {type(second).__name__}"
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return f"{at}: keys {sorted(map(str, first.keys() ^ second.keys()))}"
        return next((found for key in first if (found := differs(first[key], second[key], f"{at}/{key}"))), "")
    if isinstance(first, list):
        if len(first) != len(second):
            return f"{at}: {len(first)} and {len(second)} entries"
        return next((found for place, (one, other) in enumerate(zip(first, second)) if (found := differs(one, other, f"{at}/{place}"))), "")
    return "" if first == second or first != first and second != second else f"{at}: {first!r} and {second!r}"


def finished(trainer):
    trainer.train()
    return outcome(trainer)


# children

def checkpoints(folder):
    return [path for path in Path(folder).glob("checkpoint-*") if (path / "metadata.json").is_file()]


def live(name, folder, results, started=lambda: None):
    """One life of a child: begin, or go on from the newest checkpoint; at the end leave the outcome in `results`."""
    folder = Path(folder)
    with one_thread():
        trainer = make(name, folder / "runs")
        started()
        resume = "latest" if checkpoints(folder / "kept") else None
        trainer.train(resume_from_checkpoint=resume, checkpoint_dir=folder / "kept", checkpoint_total_limit=2, **ALWAYS)
        torch.save(outcome(trainer), results)


class Nursery:
    """A process with everything imported that makes a child for every line it reads, and says when the child has a trainer and how it ended."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def life(self, name, folder, results, after=None):
        """Run a child and kill it after that many seconds of work (None: never); True when it was killed."""
        self.process.stdin.write(json.dumps([name, str(folder), str(results)]) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        assert self.process.stdout.readline() == "started\n"
        if after is not None:
            select.select([self.process.stdout], [], [], after)
            os.kill(pid, signal.SIGKILL)  # the nursery keeps the number until it is told to go on
        assert self.process.stdout.readline() == "ended\n"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        assert code in (0, -signal.SIGKILL), code
        return code != 0

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def nursery():
    """The other side of `Nursery`."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            name, folder, results = json.loads(line)
            try:
                print(os.getpid(), flush=True)
                live(name, folder, results, lambda: print("started", flush=True))
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print("ended", flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    live(*sys.argv[1:]) if sys.argv[1:] else nursery()
