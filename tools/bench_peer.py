#!/usr/bin/env python3
"""Same work, two packages, one run: comlrl_nb beside comlrl 1.4.3 through their common public API.

    python tools/bench_peer.py --peer-python VENV/bin/python [--repeats 3] [--size medium] [--only madpo,maac] [--threads 1]

Each workload runs in its own process, the two packages alternate, and the table shows medians and the ratio
peer/ours (above 1: ours is faster or smaller). `--worker` is the inner call.
"""
import argparse, importlib, json, os, random, resource, statistics, subprocess, sys, tempfile, time

SIZES = {"small": (128, 2, 192), "medium": (256, 4, 192), "long": (128, 2, 768)}  # hidden width, layers, prompt tokens
WORK = ("madpo", "madpo_iter", "marlhf", "magrpo", "magrpo_turns", "maac", "iac")
NEW = 48


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>"] + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def model(size, seed):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    hidden, layers, _ = SIZES[size]
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def items(n, prompt):
    rng = random.Random(0)
    return [{"prompt": "".join(rng.choice("abcdefghij klmnop") for _ in range(prompt))} for _ in range(n)]


def reward(first, second):
    return [0.1 * (a.count("a") - b.count("b")) + 0.01 * len(set(a) & set(b)) for a, b in zip(first, second)]


def feedback(prompt, agent_completions, num_agents, **_):
    half = len(prompt) // 2
    return [prompt[:half] + c[:half] for c in agent_completions]


def build(lib, work, size, folder):
    family = "reinforce" if work.startswith("magrpo") else "actor_critic" if work in ("maac", "iac") else "preference"
    pref = reinforce = critic = importlib.import_module(f"{lib}.trainers.{family}")
    sample = dict(max_new_tokens=NEW, temperature=1.0, top_p=1.0, top_k=None, eval_interval=0, num_agents=2, agent_learning_rate=1e-5)
    agents, tok, rows = [model(size, 1), model(size, 2)], tokenizer(), lambda n: items(n, SIZES[size][2])
    common = dict(agents=agents, tokenizer=tok, reward_func=reward)
    pairs = dict(preference_num_candidates=16, train_batch_size=8, rollout_buffer_size=8)
    if work == "madpo":
        args = pref.MADPOConfig(num_train_epochs=2, preference_pairs_per_sample=16, **pairs, **sample)
        return pref.MADPOTrainer(num_agents=2, train_dataset=rows(3), args=args, **common)
    if work == "madpo_iter":
        args = pref.MADPOIterConfig(num_iterations=3, preference_pairs_per_sample=8, pair_selection="reward_gap", preference_replay_mode="lambda_decay",
            preference_replay_lambda=0.8, preference_replay_dir=folder, **pairs, **sample)
        return pref.MADPOIterTrainer(num_agents=2, train_dataset=rows(2), args=args, **common)
    if work == "marlhf":
        name = os.path.join(folder, "rm"); model(size, 3).save_pretrained(name); tok.save_pretrained(name)
        args = pref.MARLHFConfig(num_train_epochs=1, preference_pairs_per_sample=8, num_generations=8, reward_model_name=name, reward_model_device="cpu",
            reward_train_batch_size=4, preference_num_candidates=8, rollout_buffer_size=2, train_batch_size=2, **sample)
        return pref.MARLHFTrainer(num_agents=2, train_dataset=rows(3), args=args, **common)
    if work in ("magrpo", "magrpo_turns"):
        turns = 2 if work == "magrpo_turns" else 1
        args = reinforce.MAGRPOConfig(num_train_epochs=1, num_turns=turns, num_generations=3 if turns == 2 else 8, rollout_buffer_size=4, early_termination_threshold=None, **sample)
        return reinforce.MAGRPOTrainer(num_agents=2, train_dataset=rows(3 if turns == 2 else 6), args=args, external_transition=feedback if turns == 2 else None, **common)
    more = dict(num_train_epochs=1, num_turns=1, num_generations=4, rollout_buffer_size=16, train_batch_size=16)
    if work == "maac":
        return critic.MAACTrainer(critics=[model(size, 3)], train_dataset=rows(8), args=critic.MAACConfig(critic_type="v", **more, **sample), **common)
    return critic.IACTrainer(train_dataset=rows(8), args=critic.IACConfig(use_separate_critic=False, **more, **sample), **common)


def worker(a):
    import torch
    torch.set_num_threads(a.threads); torch.manual_seed(0); random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trainer = build(a.lib, a.worker, a.size, folder); trainer.verbose = False
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        out = dict(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print("RESULT " + json.dumps(out))


def run(python, lib, work, a):
    env = dict(os.environ, OMP_NUM_THREADS=str(a.threads), WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")
    done = subprocess.run([python, os.path.abspath(__file__), "--worker", work, "--lib", lib, "--size", a.size, "--threads", str(a.threads)],
        capture_output=True, text=True, env=env)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "): return json.loads(line[7:])
    sys.exit(f"{lib} {work} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--worker"); p.add_argument("--lib", default="comlrl_nb"); p.add_argument("--peer", default="comlrl")
    p.add_argument("--python", default=sys.executable); p.add_argument("--peer-python", default=sys.executable)
    p.add_argument("--repeats", type=int, default=3); p.add_argument("--size", default="medium", choices=SIZES)
    p.add_argument("--only", default=",".join(WORK)); p.add_argument("--threads", type=int, default=1); p.add_argument("--json")
    a = p.parse_args()
    if a.worker: return worker(a)
    table = {}
    print(f"{'workload':<13}{'ours s':>9}{'peer s':>9}{'wall x':>8}{'cpu x':>8}{'ours MiB':>10}{'peer MiB':>10}")
    for work in a.only.split(","):
        ours, peer = [], []
        for _ in range(a.repeats):
            ours.append(run(a.python, a.lib, work, a)); peer.append(run(a.peer_python, a.peer, work, a))
        med = lambda rows, key: statistics.median(r[key] for r in rows)
        ratio = lambda key: statistics.median(q[key] / o[key] for o, q in zip(ours, peer))
        table[work] = dict(ours=med(ours, "wall"), peer=med(peer, "wall"), wall=ratio("wall"), cpu=ratio("cpu"), ours_mib=med(ours, "mib"), peer_mib=med(peer, "mib"))
        t = table[work]
        print(f"{work:<13}{t['ours']:>9.2f}{t['peer']:>9.2f}{t['wall']:>8.2f}{t['cpu']:>8.2f}{t['ours_mib']:>10.0f}{t['peer_mib']:>10.0f}", flush=True)
    if a.json: open(a.json, "w").write(json.dumps(table, indent=1))


if __name__ == "__main__": main()
