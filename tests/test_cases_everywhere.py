"""Small inputs that broke other libraries, given to every trainer: tokens that are missing (C11), prompts that are too long (C14), rewards of a wrong shape (C33), few rows (C68)."""
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import checkpoint_runs
from comlrl_nb.toy import fast_tokenizer, micro_tokenizer
from reinforce_runs import rows

TRAINERS = ("MAGRPO", "MAREINFORCE", "MARLOO", "MAReMax", "CentralizedMAGRPO", "MAAC-Q", "IAC", "IAC-heads", "MADPO", "MARLHF-maac", "MADPOIter", "MARLHFIter")
every_trainer = pytest.mark.parametrize("name", TRAINERS)


def make(name, folder, **changes):
    """One epoch, or one round."""
    once = dict(num_iterations=1) if "Iter" in name else {}
    return checkpoint_runs.make(name, folder, **{"num_train_epochs": 1, **once, **changes})


def moved(trainer, before):
    return any(not torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))


def weights(trainer):
    return [parameter.detach().clone() for model in trainer.agents for parameter in model.parameters()]


def read_ids(trainer):
    """All ids that the agents' embeddings read from now on, row by row."""
    seen = []
    for model in trainer.agents:
        model = model if hasattr(model, "get_input_embeddings") else model.model  # one with a value head
        model.get_input_embeddings().register_forward_pre_hook(lambda part, inputs: seen.extend(inputs[0].tolist()))
    return seen


def without(*names):
    tokenizer = fast_tokenizer(Tokenizer.from_str(micro_tokenizer().backend_tokenizer.to_str()))
    for name in names:
        setattr(tokenizer, name, None)
    return tokenizer


@every_trainer
def test_c11_missing_tokens_never_become_none_ids(name, tmp_path):
    tokenizer = without("pad_token", "bos_token")
    trainer = make(name, tmp_path, tokenizer=tokenizer)
    before, seen = weights(trainer), read_ids(trainer)
    trainer.train()
    assert tokenizer.pad_token is None and tokenizer.bos_token is None
    assert seen and all(type(token) is int for row in seen for token in row) and moved(trainer, before)


@every_trainer
def test_c14_no_prompt_is_longer_than_asked_and_the_end_is_kept(name, tmp_path):
    text = "a long introduction that nobody needs, and then the question: ab"
    with pytest.warns(UserWarning, match="max_prompt_length=8"):
        trainer = make(name, tmp_path, train_dataset=[{**row, "prompt": f"{text}{n}"} for n, row in enumerate(rows())], max_prompt_length=8, tokenizer=without())
        node = trainer.rollout(trainer.setup.train.dataset[0])
        trainer.train()
    for prompt in node.prompts:
        assert len(prompt.token_ids) == 8 and trainer.tokenizer.decode(prompt.token_ids).endswith("ab0")


def values():
    yield from ([], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], np.ones((7, 1)), {"reward": 1.0}, (one for one in [1.0]), None, "0.5", [float("nan")], torch.tensor(float("inf")), [[1.0, 2.0], [3.0, 4.0]])


@every_trainer
def test_c33_rewards_of_a_wrong_shape_are_refused_and_change_nothing(name, tmp_path):
    wrong = [None]

    def judge_them(first, second):
        return wrong[0]

    trainer = make(name, tmp_path, reward_func=judge_them)
    before = weights(trainer)
    for wrong[0] in values():
        with pytest.raises(ValueError, match="judge_them"):
            trainer.train()
    assert not moved(trainer, before) and trainer.run.update == 0 and not any(optimizer.state for optimizer in trainer.optimizers)


@every_trainer
def test_c68_fewer_rows_than_a_batch_are_learned_from(name, tmp_path, count=3):
    seen = []

    def letters(first, second, prompts):
        seen.append(prompts[0][-1])
        return float(sum(map(ord, first[0] + second[0])) % 7)

    known = [{**row, "prompt": f"say {n}"} for n, row in enumerate(rows(count))]
    trainer = make(name, tmp_path, train_dataset=known, reward_func=letters, train_batch_size=8, rollout_buffer_size=8)
    before = weights(trainer)
    trainer.train()
    assert {text for text in seen if text.isdigit()} >= {str(n) for n in range(count)} and trainer.run.update > 0 and moved(trainer, before)


@every_trainer
def test_a_misspelt_argument_of_train_is_refused_before_anything_is_played(name, tmp_path):
    played = []
    trainer = make(name, tmp_path, reward_func=lambda first, second: played.append(first) or 0.0)
    for given, remedy in ((dict(checkpoint_dri="out"), "did you mean checkpoint_dir"), (dict(num_train_epochs=1), ""), (dict(repetition_penalti=2.0), "repetition_penalty")):
        with pytest.raises(ValueError, match=f"^train: '{next(iter(given))}' is neither an argument of train.. nor a keyword of generate; .*{remedy}"):
            trainer.train(**given)
    assert not played and trainer.run.update == 0


@every_trainer
def test_an_error_of_the_users_says_whose_code_it_was(name, tmp_path):
    def judge_them(first, second):
        return {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        make(name, tmp_path, reward_func=judge_them).train()
    assert any(note.startswith("raised by reward_func judge_them, item 0, sample 0") for note in caught.value.__notes__)


@every_trainer
def test_c68_no_rows_is_an_error(name, tmp_path):
    with pytest.raises(ValueError, match="train_dataset.*no rows"):
        make(name, tmp_path, train_dataset=[]).train()
