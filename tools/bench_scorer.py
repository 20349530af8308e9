#!/usr/bin/env python3
"""Our scorer beside the least that any scorer must do, on the same tokens.

    python tools/bench_scorer.py [--size medium] [--repeats 7] [--json FILE]

"bare" is two forward passes (prompts with the cache on; completions on the copied cache), log-softmax, gather and backward,
written out for prompts of one length and completions of one length, without a mask, checks or bookkeeping. Both run
forward and backward in turn; the table shows medians and the ratio ours/bare.
"""
import argparse
import copy
import json
import statistics
import time

import torch
from bench_peer import NEW, SIZES, model

from comlrl_nb.logprobs import completion_logprobs, completion_logprobs_naive

PROMPTS, CANDIDATES = 3, 16


def tokens(size):
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 259, (PROMPTS, SIZES[size][2]), generator=generator)
    completions = torch.randint(3, 259, (PROMPTS * CANDIDATES, NEW), generator=generator)
    return prompts, completions


def bare(net, prompts, completions):
    out = net(input_ids=prompts, use_cache=True, logits_to_keep=1)
    cache = copy.copy(out.cache)
    cache.layers = [copy.copy(layer) for layer in out.cache.layers]
    for layer in cache.layers:
        layer.keys, layer.values = (part[:, None].expand(-1, CANDIDATES, -1, -1, -1).reshape(-1, *part.shape[1:]) for part in (layer.keys, layer.values))
    rest = net(input_ids=completions[:, :-1], cache=cache, use_cache=True).logits
    first = out.logits[:, -1].repeat_interleave(CANDIDATES, 0)
    logits = torch.cat([first[:, None], rest], dim=1)
    return torch.log_softmax(logits, -1).gather(-1, completions[..., None])[..., 0].sum(-1)


def timed(net, score):
    net.zero_grad(set_to_none=True)
    started = time.perf_counter()
    sums = score()
    sums.mean().backward()
    return time.perf_counter() - started, sums.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    net = model(args.size, 1).eval()
    prompts, completions = tokens(args.size)
    as_lists = prompts.tolist(), completions.tolist(), [row // CANDIDATES for row in range(PROMPTS * CANDIDATES)]
    contestants = {"bare": lambda: bare(net, prompts, completions), "ours": lambda: completion_logprobs(net, *as_lists).sums(),
                   "whole sequences": lambda: completion_logprobs_naive(net, *as_lists).sums()}
    seconds = {name: [] for name in contestants}
    for repeat in range(args.repeats + 1):
        values = {}
        for name, score in contestants.items():
            wall, values[name] = timed(net, score)
            seconds[name] += [wall] if repeat else []
        assert torch.allclose(values["ours"], values["bare"], atol=1e-2), "the scores differ"
    table = {name: statistics.median(walls) for name, walls in seconds.items()}
    ratio = statistics.median(ours / least for ours, least in zip(seconds["ours"], seconds["bare"]))
    print(f"{args.size}: " + "  ".join(f"{name} {wall:.3f} s" for name, wall in table.items()) + f"  ours/bare {ratio:.2f}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**table, "ratio": ratio}, file)


if __name__ == "__main__":
    main()
