"""Remote models against a real server: `transformers serve` with the embedded model, for chat completions and responses."""
import importlib.util

import pytest

from comlrl_nb.remote import RemoteModel
from comlrl_nb.remote_formats import Chat, RemoteError, Request, Responses
from comlrl_nb.remote_rules import Limits
from comlrl_nb.toy import TASKS, data_dir
from comlrl_nb.toy_language import parse
from remote_servers import model_server

MISSING = [name for name in ("httpx", "tenacity", "fastapi", "uvicorn", "openai", "accelerate") if not importlib.util.find_spec(name)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install 'transformers[serving]' httpx tenacity")]
TASK = TASKS["delivery"]
PROMPTS = [prompt for row in TASK.eval[:3] for prompt in TASK.prompts(row)]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with model_server(data_dir(), tmp_path_factory.mktemp("server") / "log.txt") as address:
        yield address


def remote(address, make, path, **settings):
    options = dict(model=str(data_dir()), max_new_tokens=12, temperature=1.0, top_p=1.0)
    return RemoteModel(f"{address}/v1/{path}", make(**{**options, **settings}), limits=Limits(timeout=60, max_concurrency=4))


def asked(num):
    return [Request(prompt, index % 2, num, {}) for index, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("make, path", [(Chat, "chat/completions"), (Responses, "responses")])
def test_every_candidate_is_answered_with_a_sentence(address, make, path):
    model = remote(address, make, path)
    found = model.answers(asked(3))
    answers = [answer for answers in found for answer in answers]
    assert [len(answers) for answers in found] == [3] * len(PROMPTS) and model.counts["answers"] == len(answers)
    assert sum(parse(answer.text) is not None for answer in answers) >= 0.7 * len(answers)
    assert model.counts["requests"] >= len(answers)  # one choice each, whatever n says


def test_a_text_at_the_length_limit_is_not_finished(address):
    model = remote(address, Chat, "chat/completions", max_new_tokens=2)
    found = model.answers(asked(1)[:2])
    assert [(answer.finished, answer.reason) for answers in found for answer in answers] == [(False, "length")] * 2


@pytest.mark.parametrize("make, path", [(Chat, "chat/completions"), (Responses, "responses")])
def test_the_message_of_the_server_is_shown(address, make, path):
    with pytest.raises(RemoteError, match="another-model") as caught:
        remote(address, make, path, model="another-model").answers(asked(1))
    assert caught.value.status in (400, 404, 422)


def test_an_unknown_path_is_an_error_at_once(address):
    model = remote(address, Chat, "no/such/path")
    with pytest.raises(RemoteError, match="HTTP 404: Not Found"):
        model.answers(asked(1))
    assert model.counts["retries"] == 0
