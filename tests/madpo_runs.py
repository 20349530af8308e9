"""Micro teams, tasks and recorders for the tests of MADPO."""
import torch
from torch.nn import functional as F

from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers.preference import MADPOConfig, MADPOTrainer

TOKENIZER = micro_tokenizer()
SMALL = dict(num_agents=2, num_train_epochs=1, agent_learning_rate=1e-2, logging_steps=1, max_new_tokens=5, temperature=1.0, top_p=1.0,
             top_k=None, eval_interval=0, preference_num_candidates=4, preference_pairs_per_sample=2, train_batch_size=4, seed=0)


def rows(count=3):
    return [{"prompt": "say " + "ab" * (1 + 2 * i), "answer": i} for i in range(count)]


def letters(first, second):
    """A rule that seldom ties."""
    return [(sum(map(ord, first[0])) * 31 + sum(map(ord, second[0]))) % 101 / 100]


def config(**fields):
    return MADPOConfig(**{**SMALL, **fields})


def team(kinds=("gpt2", "llama"), dtype=torch.float32, **overrides):
    return [micro_model(seed, kind, dtype, **overrides) for seed, kind in enumerate(kinds)]


def make(agents=None, *, args=None, tokenizer=None, **given):
    """A small trainer that shows nothing; `given` are arguments of the trainer, then fields of the config."""
    names = MADPOTrainer.__init__.__kwdefaults__.keys() | set(MADPOTrainer.__init__.__code__.co_varnames)
    fields = {name: given.pop(name) for name in [*given] if name not in names}
    agents = agents or team()
    fields.setdefault("num_agents", given.get("num_agents", 2 if fields.get("collaboration_mode") == "centralized" else len(agents)))
    call = dict(train_dataset=rows(), reward_func=letters, callbacks=[])
    return MADPOTrainer(agents=agents, tokenizer=tokenizer or TOKENIZER, args=args or config(**fields), **{**call, **given})


def weights(models):
    return [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in getattr(models, "agents", models)]


def same(first, second):
    """Bit for bit."""
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True))


def scripted(model, *continuations):
    """Let `generate` return the prompt followed by the given ids, one list per sample and in turn; shorter ones are padded with pad ids."""
    seen = []

    def generate(input_ids, attention_mask, num_return_sequences, **keywords):
        repeated = input_ids.repeat_interleave(num_return_sequences, 0)
        width = max(map(len, continuations))
        pad = model.generation_config.pad_token_id
        chosen = [continuations[k % len(continuations)] for k in range(len(repeated))]
        seen.extend(row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask))
        tail = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in chosen], dtype=torch.long).reshape(len(repeated), width)
        return torch.cat([repeated, tail], 1)

    model.generate = generate
    return seen


def forwards(model):
    """Records the ids of every forward pass of the model in a list of lists of rows."""
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].tolist()))
    return seen


def gradients(trainer):
    """What every optimizer is about to use, at each of its steps: per optimizer a list of {parameter: gradient}."""
    found = {}
    for optimizer in dict.fromkeys(trainer.optimizers):
        def hook(opt, args, kwargs):
            taken = {p: p.grad.clone() for group in opt.param_groups for p in group["params"] if p.grad is not None}
            found.setdefault(opt, []).append(taken)
        optimizer.register_step_pre_hook(hook)
    return found


def logprob(model, prompt, completion, last=True):
    """log π(completion | prompt), one sequence, no padding, no cache."""
    ids = torch.tensor([[*prompt, *completion]])
    table = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0].to(torch.float64 if model.dtype == torch.float64 else torch.float32), -1)
    used = len(completion) if last else len(completion) - 1
    places = [len(prompt) - 1 + t for t in range(used)]
    return sum((table[place, token] for place, token in zip(places, completion)), table.sum() * 0)


def margin(model, pair, agent, last=True):
    prompt = pair.prompts[agent].token_ids
    return logprob(model, prompt, pair.winner[agent].token_ids, last) - logprob(model, prompt, pair.loser[agent].token_ids, last)


def closed_form(models, pairs, beta, last=False, references=None):
    """Per agent {parameter: −β E[σ(−βΔ) ∇Δ_i]}, written out pair by pair."""
    sums = [{} for _ in models]
    for pair in pairs:
        own = [margin(model, pair, i, last) for i, model in enumerate(models)]
        team_margin = sum(m.detach() for m in own)
        if references is not None:
            with torch.no_grad():
                team_margin = team_margin - sum(margin(model, pair, i, last) for i, model in enumerate(references))
        weight = beta * torch.sigmoid(-beta * team_margin) / len(pairs)
        for i, model in enumerate(models):
            parameters = [p for p in model.parameters() if p.requires_grad]
            for p, g in zip(parameters, torch.autograd.grad(own[i], parameters)):
                sums[i][p] = sums[i].get(p, 0) - weight * g
    return sums
