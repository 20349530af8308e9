"""The joint reward model: which state is scored, Bradley–Terry against autograd, what is read once, joint texts that are too long, saving, frozen backbones, sources."""
import copy
import math
import random
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from comlrl_nb.losses import NonFiniteError
from comlrl_nb.models.actor_critic import CausalLMWithValueHead
from comlrl_nb.models.reward import REWARD_HEAD_FILE, JointRewardModel
from comlrl_nb.reward_fit import Duel, duel_stats, duels_of, reward_update, score_pieces
from comlrl_nb.reward_text import JointTextReader, LearnedReward, shares, without_middle
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.reward_source import bare, copied
from comlrl_nb.trainers.preference import JointRewardModel as exported
from comlrl_nb.trainers.reward_phase import split_by_prompts
from marlhf_runs import TOKENIZER, forwards, joint_ids, judge, naive_score, reader, reward_model, same, text_pair, weights

KINDS = ["gpt2", "llama"]
TEXTS = [(1, 30, 31), (1, 32, 33, 34, 35, 36, 37, 2, 38), (1,), (1, 2, 2), (1, 0, 40), (1, 30, 31)]  # end and padding ids inside
PROMPTS = ("say ab", "and the ok?")
PAIRS = [text_pair(PROMPTS, ("one", "two"), ("one", "four")), text_pair(PROMPTS, ("one", "two"), ("three", "two")), text_pair(("other", "words"), ("a", "b"), ("", "b"))]


def duels(pairs=PAIRS):
    return duels_of(pairs, reader())[0]


def naive_loss(model, pairs):
    total = 0.0
    for pair in pairs:
        read = [prompt.text for prompt in pair.prompts]
        scores = [naive_score(model, joint_ids(read, [completion.text for completion in side])) for side in (pair.winner, pair.loser)]
        total = total - torch.log(torch.sigmoid(scores[0] - scores[1]))
    return total / len(pairs)


def step_gradient(model, pairs, **more):
    """What the optimizer is about to use in one update."""
    optimizer, taken = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0), {}
    optimizer.register_step_pre_hook(lambda opt, *rest: taken.update({p: p.grad.clone() for group in opt.param_groups for p in group["params"] if p.grad is not None}))
    loss, stats = reward_update(model, optimizer, duels(pairs), 0, **more)
    return taken, loss, stats


# which state is scored

@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_head_on_the_last_tokens_state(kind):
    model = reward_model(kind=kind)
    found = model.scores(TEXTS)
    assert found.dtype == torch.float64 and found[0] == found[5]
    torch.testing.assert_close(found, torch.stack([naive_score(model, ids) for ids in TEXTS]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 3])
def test_padding_and_batch_mates_do_not_matter(kind, side, extra):
    model, width = reward_model(kind=kind), max(map(len, TEXTS)) + extra
    for pad in (0, 2, 77):
        ids, mask = torch.full((len(TEXTS), width), pad), torch.zeros(len(TEXTS), width, dtype=torch.long)
        for row, text in enumerate(TEXTS):
            place = slice(width - len(text), width) if side == "left" else slice(0, len(text))
            ids[row, place], mask[row, place] = torch.tensor(text), 1
        torch.testing.assert_close(model(ids, mask), torch.stack([naive_score(model, text) for text in TEXTS]), rtol=1e-10, atol=1e-10)


def test_a_mask_of_truth_values():
    model = reward_model()
    ids = torch.tensor([[1, 30, 31, 0]])
    assert model(ids, torch.tensor([[1, 1, 1, 0]])) == model(ids, torch.tensor([[True, True, True, False]]))


def test_a_row_without_tokens_is_refused():
    model = reward_model()
    with pytest.raises(ValueError, match="row 1 has no real token"):
        model(torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match="without tokens"):
        model.scores([(1, 2), ()])


def test_no_texts_no_scores():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert reward_model(dtype=dtype).scores([]).shape == (0,) and duel_stats(reward_model(dtype=dtype), {"held_out": []}, 0) == {}


def test_end_tokens_in_the_text_and_pad_equal_to_end():
    """The place of the score is told by lengths, never by ids."""
    model, tokenizer = reward_model(), micro_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    texts = [JointTextReader(tokenizer).ids(["is <eos> the end?", "b"], answers) for answers in (("<eos>", "x<eos>"), ("no", ""))]
    assert tokenizer.pad_token_id == 2 in texts[0] and texts[0].count(2) == 3
    found = model.scores(texts, tokenizer.pad_token_id)
    torch.testing.assert_close(found, torch.stack([naive_score(model, ids) for ids in texts]), rtol=1e-10, atol=1e-10)


def test_scores_of_half_precision_are_single():
    model = JointRewardModel(micro_model(dtype=torch.bfloat16))
    assert model.reward_head.weight.dtype == torch.bfloat16 and model.scores(TEXTS).dtype == torch.float32


def test_a_new_head_is_near_zero_and_drawn_from_the_global_stream():
    heads = [weights([reward_model(seed, loud=1.0).reward_head])[0] for seed in (0, 0, 1)]
    assert same(heads[:1], heads[1:2]) and not same(heads[:1], heads[2:])
    assert 0 < heads[0]["weight"].abs().max() < 0.1 and heads[0]["bias"].item() == 0 and exported is JointRewardModel


# Bradley–Terry

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [None, 1])
def test_the_gradient_is_autograds_on_the_naive_loss(kind, budget):
    model = reward_model(kind=kind)
    taken, loss, stats = step_gradient(model, PAIRS, budget=budget)
    wanted = torch.autograd.grad(naive_loss(model, PAIRS), [*model.parameters()], allow_unused=True)
    assert math.isclose(loss, naive_loss(model, PAIRS).item(), rel_tol=1e-9) and stats["reward_model/loss"] == loss
    for parameter, right in zip(model.parameters(), wanted, strict=True):
        own = taken.get(parameter, torch.zeros_like(parameter))
        torch.testing.assert_close(own, torch.zeros_like(parameter) if right is None else right, **(dict(rtol=1e-8, atol=1e-10) if kind == "gpt2" else dict(rtol=1e-4, atol=1e-5)))


def test_the_gradient_of_the_loss_by_hand():
    """dL/ds_w = −σ(s_l − s_w)/P: of the head's bias nothing is left, of its weight the difference of the two states."""
    model = reward_model()
    taken, _, _ = step_gradient(model, PAIRS[:1])
    state = lambda ids: model.backbone(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    winner, loser = (state(ids) for ids in (duels()[0].winner, duels()[0].loser))
    share = torch.sigmoid(model.reward_head(loser) - model.reward_head(winner))
    torch.testing.assert_close(taken[model.reward_head.weight][0], -share * (winner - loser), rtol=1e-8, atol=1e-10)
    assert abs(taken[model.reward_head.bias].item()) < 1e-12


def test_numbers_of_an_update():
    model = reward_model()
    with torch.no_grad():
        scores = torch.stack([model.scores([duel.winner, duel.loser]) for duel in duels()])
    _, _, stats = step_gradient(model, PAIRS)
    margins = scores[:, 0] - scores[:, 1]
    assert math.isclose(stats["reward_model/margin"], margins.mean().item(), abs_tol=1e-9)
    assert stats["reward_model/accuracy"] == (margins > 0).double().mean().item() and stats["reward_model/grad_norm"] > 0


def test_the_reward_gap_of_a_pair_is_not_used():
    """Only who won matters."""
    far = [text_pair(PROMPTS, ("one", "two"), ("one", "four"), rewards=(90.0, -5.0))]
    first, second = (step_gradient(reward_model(), pairs)[0] for pairs in (PAIRS[:1], far))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def test_an_update_raises_the_winner_over_the_loser():
    model = reward_model(loud=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [reward_update(model, optimizer, duels(), 0)[0] for _ in range(20)]
    assert losses[0] > 0.6 and losses[-1] < 0.1
    assert duel_stats(model, {"pairs": duels()}, 0)["reward_model/pairs_accuracy"] == 1.0


def test_dropout_is_off_and_the_mode_comes_back():
    model = JointRewardModel(judge(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = {reward_update(model, optimizer, duels(), 0)[0] for _ in range(3)}
    assert len(losses) == 1 and model.training and len({duel_stats(model, {"x": duels()}, 0)["reward_model/x_loss"] for _ in range(2)}) == 1 and model.training


def test_no_duels_no_update():
    model = reward_model()
    before = weights([model])
    assert reward_update(model, torch.optim.AdamW(model.parameters()), [], 0) == (0.0, {}) and same(before, weights([model]))
    assert duel_stats(model, {"a": [], "b": []}, 0) == {}


@pytest.mark.parametrize("skip", [False, True])
def test_scores_that_are_not_finite_move_nothing(skip):
    model = reward_model()
    with torch.no_grad():
        model.reward_head.bias.fill_(float("nan"))
    optimizer, before = torch.optim.AdamW(model.parameters()), [p.clone() for p in model.parameters()]
    if skip:
        loss, stats = reward_update(model, optimizer, duels(), 0, skip_nonfinite=True)
        assert math.isnan(loss) and stats["nonfinite_skipped"] == 1.0
    else:
        with pytest.raises(NonFiniteError, match="reward model: a score is nan"):
            reward_update(model, optimizer, duels(), 0)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, model.parameters(), strict=True)) and not optimizer.state


def test_numbers_of_test_sets():
    model = reward_model()
    stats = duel_stats(model, {"held_out": duels()[:2], "left_out": duels()[2:], "none": []}, 0)
    with torch.no_grad():
        margins = torch.stack([model.scores([duel.winner, duel.loser]) for duel in duels()])
    margins = (margins[:, 0] - margins[:, 1])
    assert {name.rpartition("_")[2] for name in stats} == {"accuracy", "loss", "margin", "confidence"} and not any("none" in name for name in stats)
    assert math.isclose(stats["reward_model/held_out_confidence"], torch.sigmoid(margins[:2].abs()).mean().item(), rel_tol=1e-9)
    assert math.isclose(stats["reward_model/left_out_loss"], -torch.nn.functional.logsigmoid(margins[2]).item(), rel_tol=1e-9)


# what is read once

def test_every_distinct_text_and_shared_beginning_is_run_once():
    """Three pairs of one item's four answers: the prompts are run once, then each answer's own tokens."""
    answers = [("yes", "no"), ("yes", "yes"), ("no", "no"), ("ab", "no")]
    pairs = [text_pair(PROMPTS, answers[0], answers[j]) for j in (1, 2, 3)]
    model = reward_model()
    seen = forwards(model.backbone)
    reward_update(model, torch.optim.SGD(model.parameters(), lr=0.0), duels(pairs), 0)
    read = [reader().ids(PROMPTS, own) for own in answers]
    shared = len(torch.tensor([ids[:min(map(len, read))] for ids in read]).T) and next(i for i in range(min(map(len, read))) if len({ids[i] for ids in read}) > 1)
    slots = sum(len(row) for batch in seen for row in batch)
    least = shared + sum(len(ids) - shared for ids in read)
    assert [len(row) for row in seen[0]] == [shared] and least <= slots <= least + 4 * 6  # padding of the ends
    assert slots < 0.7 * sum(map(len, read)) < sum(len(ids) for duel in duels(pairs) for ids in (duel.winner, duel.loser))


def test_scoring_reads_distinct_texts_once():
    model = reward_model()
    seen = forwards(model.backbone)
    model.scores([(1, 40, 41)] * 50 + [(1, 50)])
    assert sum(len(batch) for batch in seen) == 2


def test_pieces_keep_relatives_together_and_hold_to_the_budget():
    texts = [(1, 2, 3), (5, 5), (1, 2, 4), (5, 6), (1,)]
    pieces = score_pieces(texts, 6)
    assert sorted(index for piece in pieces for index in piece) == [0, 1, 2, 3, 4]
    assert all(sum(len(texts[index]) for index in piece) <= 6 for piece in pieces) and [texts[index] for piece in pieces for index in piece] == sorted(texts)
    assert score_pieces([(1,) * 50], 6) == [[0]] and score_pieces([], 6) == []


# joint texts

def test_the_joint_text_by_hand():
    assert reader().ids(PROMPTS, ("one", "two")) == joint_ids(PROMPTS, ("one", "two"))
    text = TOKENIZER.decode(reader().ids(PROMPTS, ("one", "two")))
    assert text == "<bos>Agent 0 reads:\nsay ab\n\nAgent 1 reads:\nand the ok?\n\nAgent 0 writes:\none\n\nAgent 1 writes:\ntwo\n\n"


def test_one_start_token_also_of_rendered_chats():
    assert reader().ids(["<bos>say ab", "<bos>and the ok?"], ("one", "two")) == joint_ids(PROMPTS, ("one", "two"))


def test_a_tokenizer_without_a_start_token():
    tokenizer = micro_tokenizer()
    tokenizer.bos_token = None
    assert JointTextReader(tokenizer).ids(PROMPTS, ("one", "two")) == joint_ids(PROMPTS, ("one", "two"))[1:]


LONG = ("the beginning " + "ab" * 40 + " the end", "short?")


@pytest.mark.parametrize("length", [100, 110, 120, 130])
def test_the_middle_of_prompts_goes_before_any_answer(length):
    answers = ("a whole answer", "another")
    full = joint_ids(LONG, answers)
    with pytest.warns(UserWarning, match=f"reward_max_length={length}"):
        ids = reader(max_length=length).ids(LONG, answers)
    text = TOKENIZER.decode(ids)
    assert len(ids) == length < len(full) and all(answer in text for answer in answers)
    assert "reads:\nthe" in text and "nd\n\nAgent 1" in text and LONG[0] not in text


def test_answers_are_cut_when_no_prompt_is_left():
    least = reader().least(2, 2)
    with pytest.warns(UserWarning):
        ids = reader(max_length=least + 6).ids(LONG, ("abcdefghij", "klmnopqrst"))
    text = TOKENIZER.decode(ids)
    assert len(ids) == least + 6 and "reads:\n\n\n" in text and "the beginning" not in text and "writes:\nab" in text


def test_long_texts_are_warned_about_once_and_counted():
    short = reader(max_length=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for answer in ("a", "b", "c"):
            short.ids(LONG, (answer, "d"))
        short.ids(("x", "y"), ("a", "d"))
    assert len(caught) == 1 and short.shortened == 3


def test_a_text_of_exactly_the_length_is_left_alone():
    full = joint_ids(LONG, ("a", "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader(max_length=len(full)).ids(LONG, ("a", "b")) == full


@pytest.mark.parametrize("length", [1, 20, 71])
def test_no_room_beside_the_headings(length):
    with pytest.raises(ValueError, match=f"reward_max_length={length}: the headings alone take 71 tokens"):
        reader(max_length=length).ids(PROMPTS, ("a", "b"))
    assert reader().least(2, 2) == 71


def test_more_tokens_than_the_model_has_positions():
    with pytest.raises(ValueError, match=r"reward_max_length=None: a joint text of \d+ tokens does not fit into the reward model's 90 positions"):
        reader(positions=90).ids(LONG, ("a", "b"))


def test_shares_by_hand():
    assert shares([3, 100, 50], 43) == [3, 20, 20] and shares([5], 3) == [3] and shares([], 3) == [] and shares([4, 4], -1) == [0, 0]
    assert without_middle([1, 2, 3, 4, 5], 3) == [1, 2, 5] and without_middle([1, 2], 9) == [1, 2] and without_middle([1, 2], 0) == []


# pairs that cannot be told apart

def test_identical_pairs_are_dropped_and_counted():
    pairs = [*PAIRS, text_pair(PROMPTS, ("a", "b"), ("a", "b"))]
    found, identical = duels_of(pairs, reader())
    assert len(found) == 3 and identical == 1


def test_pairs_identical_after_truncation_are_dropped_and_counted():
    far = "x" * 30
    pairs = [text_pair(LONG, (far + "abcd" + far, "b"), (far + "efgh" + far, "b")), text_pair(LONG, ("z" + far, "b"), (far, "b"))]
    with pytest.warns(UserWarning):
        found, identical = duels_of(pairs, reader(max_length=reader().least(2, 2) + 20))
    assert len(found) == 1 and identical == 1 and found[0].winner != found[0].loser


def test_same_text_in_other_tokens_is_identical_for_a_reader_of_texts():
    pair = PAIRS[0]
    other = copy.copy(pair)
    object.__setattr__(other, "loser", tuple(type(one)(one.text, (*one.token_ids, 2), one.finished) for one in pair.winner))
    assert duels_of([other], reader()) == ([], 1)


# a held-out share

@pytest.mark.parametrize("share, held", [(0.0, 0), (0.1, 0), (0.2, 1), (0.5, 2), (0.9, 4)])
def test_whole_items_are_held_out(share, held):
    pairs = [text_pair((f"item {i}", "x"), (f"w{j}", "a"), (f"l{j}", "a")) for i in range(5) for j in range(1 + i % 3)]
    learn, out = split_by_prompts(pairs, share, random.Random(0))
    names = lambda side: {pair.prompts[0].text for pair in side}
    assert len(names(out)) == held and not names(learn) & names(out) and len(learn) + len(out) == len(pairs)
    assert [pair for pair in pairs if pair in learn] == learn


def test_one_item_is_never_held_out():
    assert split_by_prompts(PAIRS[:2], 0.9, random.Random(0)) == (PAIRS[:2], []) and split_by_prompts([], 0.5, random.Random(0)) == ([], [])


# freezing

@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_backbone_stays_and_the_head_learns(kind):
    model = reward_model(kind=kind, dtype=torch.float32, freeze_backbone=True)
    before = weights([model])[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["reward_head.weight", "reward_head.bias"]
    taken, _, _ = step_gradient(reward_model(kind=kind, freeze_backbone=True), PAIRS)
    assert len(taken) == 2
    for _ in range(3):
        reward_update(model, optimizer, duels(), 0)
    after = weights([model])[0]
    assert "reward_head.weight" in (moved := {name for name in before if not torch.equal(before[name], after[name])}) and moved <= {"reward_head.weight", "reward_head.bias"}


def test_the_learned_reward_needs_no_gradient_and_eval_mode_is_used():
    model = JointRewardModel(judge(resid_pdrop=0.5, embd_pdrop=0.5)).train()
    learned = LearnedReward(model, reader(), 0)
    assert len({learned.score(PROMPTS, [("a", "b")], {})[0] for _ in range(3)}) == 1 and model.training
    values = learned.values([(PROMPTS, ("a", "b")), (PROMPTS, ("c", "d"))])
    assert not values.requires_grad and values.shape == (2,)


def test_a_learned_score_that_is_not_finite_names_item_and_sample():
    model = reward_model()
    with torch.no_grad():
        model.reward_head.bias.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"reward model, item 7: a score is inf at \[0\]"):
        LearnedReward(model, reader(), 0).score(PROMPTS, [("a", "b")], {}, 7)


# saving

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_read_back(tmp_path, kind, tied):
    torch.manual_seed(0)
    model = JointRewardModel(judge(kind=kind, tie_word_embeddings=tied)).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reward_update(model, optimizer, duels(), 0)
    model.save_pretrained(tmp_path)
    again = JointRewardModel.from_pretrained(tmp_path).eval()
    assert same(weights([model]), weights([again])) and torch.equal(model.scores(TEXTS), again.scores(TEXTS))
    shared = lambda one: one.backbone.get_input_embeddings().weight.data_ptr() == one.backbone.get_output_embeddings().weight.data_ptr()
    assert shared(model) == shared(again) == tied
    assert len({p for group in optimizer.param_groups for p in group["params"]}) == len([*model.parameters()])
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == kind and (tmp_path / REWARD_HEAD_FILE).exists()


def test_a_folder_without_a_head_is_refused(tmp_path):
    judge().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{REWARD_HEAD_FILE}.*JointRewardModel"):
        JointRewardModel.from_pretrained(tmp_path)


def test_read_back_in_another_dtype(tmp_path):
    reward_model(dtype=torch.float32).save_pretrained(tmp_path)
    again = JointRewardModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_models_without_a_hidden_size_are_refused():
    with pytest.raises(ValueError, match="hidden_size.*Linear"):
        JointRewardModel(torch.nn.Linear(2, 2))


def test_a_backbone_with_a_value_head_is_used_bare():
    base = judge()
    wrapped = CausalLMWithValueHead(base)
    assert bare(wrapped) is base and bare(JointRewardModel(base)) is base and bare(base) is base
    made = copied(wrapped, False)
    assert made.backbone is not base and same(weights([made.backbone]), weights([base]))


def test_of_a_reward_model_the_head_is_kept():
    model = reward_model().requires_grad_(False)
    made, frozen = copied(model, False), copied(model, True)
    assert torch.equal(made.reward_head.weight, model.reward_head.weight) and all(p.requires_grad for p in made.parameters())
    assert {name.split(".")[0] for name, p in frozen.named_parameters() if p.requires_grad} == {"reward_head"} and not any(p.requires_grad for p in model.parameters())
