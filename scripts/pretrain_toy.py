"""Pre-train the embedded language model on text the project generates, and write it to comlrl_nb/data/toy.

    OMP_NUM_THREADS=1 python scripts/pretrain_toy.py            # about two minutes on one thread
    OMP_NUM_THREADS=1 python scripts/pretrain_toy.py --check    # train again and compare with what is stored

The corpus, the initial weights and the order of the text come from fixed seeds, one thread computes, and nothing else is read:
on the same machine with the same versions the result is bit-equal; elsewhere floating-point sums differ in their last digits and
training carries that on, so `--check` compares behaviour (loss on fresh text, first rewards of the tasks) and only reports the rest.

The model is to know the language and *not* the tasks. So the answers in the corpus are careless: the first part of training
copies every fact from the question (this is how copying is learned), the second part only some, as `ACCURACY` says. A slight habit
is left in choices among equals, as people have it: without one, agents need several times as many updates to find a convention.
Questions are read but not predicted.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from comlrl_nb import toy
from comlrl_nb.toy_language import GRAMMAR, REACH, well_formed, write_sentence
from comlrl_nb.trainers.preference import TaggedCentralizedComparatorAdapter

SEED, STEPS, BATCH, LEARNING_RATE = 0, 1200, 64, 3e-3
CLEAN_SHARE = 0.5  # of the steps, with every fact right
# Share of answers that heed the question: a vehicle that gets there, a day or room from the list, a fact, the kind of sentence.
# A habit is the share of choices among equals that go to the first vehicle in `REACH`, the earliest day, the room in the agent's own position.
ACCURACY = {"vehicle": 0.75, "vehicle habit": 0.2, "day": 0.95, "day habit": 0.2, "room": 0.85, "room habit": 0.35,
            "fact": 0.58, "form": 0.97}
FLOURISH = 0.15  # share of answers with an adjective or adverb that nobody asked for
CENTRAL_EVERY = 5  # each fifth batch is one model answering for all agents
WORD = r"</?agent_\d>|[A-Za-z]+|[^A-Za-z\s]"


class Writer:
    """Questions with careless answers."""

    def __init__(self, rng: random.Random, accuracy: dict[str, float]):
        self.rng, self.accuracy = rng, accuracy

    def heed(self, kind: str, value: str, symbol: str) -> str:
        """`value`, or now and then any word of the same symbol."""
        return value if self.rng.random() < self.accuracy[kind] else self.rng.choice(GRAMMAR[symbol])

    def flourish(self, symbol: str) -> str:
        return f"{self.rng.choice(GRAMMAR[symbol])} " if self.rng.random() < FLOURISH else ""

    def choose(self, kind: str, options: Sequence[str], habit: str) -> str:
        """Any of the options, the habitual one more often."""
        return habit if self.rng.random() < self.accuracy[f"{kind} habit"] else self.rng.choice(options)

    def delivery(self, agent: int, row: dict) -> str:
        vehicle = self.heed("vehicle", self.choose("vehicle", REACH[row["place"]], REACH[row["place"]][0]), "VEHICLE")
        if agent == 1:
            return f"the {vehicle} leaves at {self.heed('fact', row['hour'], 'HOUR')}."
        return f"the {vehicle} takes the {self.flourish('ADJECTIVE')}{self.heed('fact', row['thing'], 'THING')}."

    def meeting(self, agent: int, row: dict) -> str:
        earliest = min(row["days"][agent], key=GRAMMAR["DAY"].index)
        day = self.heed("day", self.choose("day", row["days"][agent], earliest), "DAY")
        if agent == 1:
            return f"we meet on {day} at {self.heed('fact', row['hour'], 'HOUR')}."
        return f"we meet on {day} in the {self.heed('fact', row['room'], 'ROOM')}."

    def search(self, agent: int, row: dict) -> str:
        room = self.heed("room", self.choose("room", row["rooms"], row["rooms"][agent]), "ROOM")
        return f"{GRAMMAR['NAME'][agent]} {self.flourish('MANNER')}looks in the {room}."

    def answer(self, task: toy.Task, agent: int, row: dict) -> str:
        if self.rng.random() > self.accuracy["form"]:
            return write_sentence(self.rng)
        return {"delivery": self.delivery, "meeting": self.meeting, "search": self.search}[task.name](agent, row)

    def row(self) -> tuple[toy.Task, dict]:
        """A task and a row of it that is not held out."""
        task = self.rng.choice(list(toy.TASKS.values()))
        row = task.draw(self.rng)
        return (task, row) if row not in task.eval else self.row()

    def document(self) -> tuple[str, str]:
        """Question and answer; one in ten is a sentence out of the blue."""
        if self.rng.random() < 0.1:
            return "", write_sentence(self.rng)
        task, row = self.row()
        agent = self.rng.randrange(task.num_agents)
        return task.formatters[agent](row), self.answer(task, agent, row)

    def central_document(self) -> tuple[str, str]:
        """The question to a model that answers for all agents, and its tagged answer."""
        task, row = self.row()
        answers = [f"<agent_{i}> {self.answer(task, i, row)} </agent_{i}>" for i in range(task.num_agents)]
        return TaggedCentralizedComparatorAdapter().build_prompt(row, task.prompts(row)), " ".join(answers)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, sign or tag, so that a text is split alike wherever it stands."""
    writer = Writer(random.Random(SEED), dict.fromkeys(ACCURACY, 1.0))
    texts = [" ".join(alternative for alternatives in GRAMMAR.values() for alternative in alternatives)]
    texts += [" ".join(writer.central_document()) for _ in range(300)]
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(WORD), "isolated")])
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text) if word not in GRAMMAR}
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(words)]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = splitter, decoders.WordPiece(prefix="##", cleanup=True)
    return toy.fast_tokenizer(core)


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """Random weights; the wide initial distribution is what lets a model this small find copying within a few hundred steps."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.07, attn_implementation="sdpa", **toy.SPECIAL_IDS))


def loss_of(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[tuple[str, str]]) -> torch.Tensor:
    """Mean negative log-probability of the answers' tokens, the end token among them."""
    batch = tokenizer([f"{question} {answer} <eos>" for question, answer in documents], padding=True, padding_side="right", return_tensors="pt")
    starts = torch.tensor([len(tokenizer(question).input_ids) for question, _ in documents])
    unread = (torch.arange(batch.input_ids.shape[1]) < starts[:, None]) | (batch.attention_mask == 0)
    return model(**batch, labels=batch.input_ids.masked_fill(unread, -100)).loss


def documents_of(writer: Writer, step: int) -> list[tuple[str, str]]:
    if step % CENTRAL_EVERY == CENTRAL_EVERY - 1:
        return [writer.central_document() for _ in range(BATCH // 4)]
    return [writer.document() for _ in range(BATCH)]


def train(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model, rng = build_model(len(tokenizer)), random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        accuracy = dict.fromkeys(ACCURACY, 1.0) if step < CLEAN_SHARE * STEPS else ACCURACY
        loss = loss_of(model, tokenizer, documents_of(Writer(rng, accuracy), step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
    return model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The weights as 16-bit numbers; the config says 32 bit, so that is what they are loaded as."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    halves = {name: value.half().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    weights = folder / "model.safetensors"
    save_file(halves, weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def first_rewards(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: toy.Task, num: int = 32) -> tuple[float, float]:
    """Mean reward and well-formed share on the held-out rows, `num` joint responses each, temperature 1."""
    texts = []
    torch.manual_seed(SEED)
    for formatter in task.formatters:
        batch = tokenizer([formatter(row) for row in task.eval], padding=True, return_tensors="pt")
        ids = model.generate(**batch, do_sample=True, top_k=0, num_return_sequences=num, max_new_tokens=task.max_new_tokens)
        texts.append(tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True))
    rewards = task.reward_func(*texts, batch_items=[row for row in task.eval for _ in range(num)])
    flat = [well_formed(text) for column in texts for text in column]
    return sum(rewards) / len(rewards), sum(flat) / len(flat)


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Loss on fresh text and the tasks' first rewards."""
    writer = Writer(random.Random(SEED + 1), ACCURACY)
    with torch.no_grad():
        figures = {"loss": loss_of(model, tokenizer, [writer.document() for _ in range(500)]).item()}
        figures["central loss"] = loss_of(model, tokenizer, [writer.central_document() for _ in range(100)]).item()
    for task in toy.TASKS.values():
        figures[f"{task.name} reward"], figures[f"{task.name} well formed"] = first_rewards(model, tokenizer, task)
    return figures


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return LlamaForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def check(new: Path, stored: Path) -> bool:
    """Whether both behave alike; says so, and whether they are bit-equal."""
    print("bit-equal weights:", (new / "model.safetensors").read_bytes() == (stored / "model.safetensors").read_bytes())
    ours, theirs = report(*load(new)), report(*load(stored))
    for name in ours:
        print(f"{name:22s} new {ours[name]:.3f}  stored {theirs[name]:.3f}")
    return all(abs(ours[name] - theirs[name]) < 0.1 for name in ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="train again and compare with the stored model")
    parser.add_argument("--out", type=Path, default=toy.data_dir(), help="where to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.check else options.out
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer()
        save(train(tokenizer), tokenizer, folder)
        if options.check:
            return 0 if check(folder, options.out) else 1
    for name, value in report(*load(folder)).items():
        print(f"{name:22s} {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
