"""Remote models against a server that misbehaves: formats, retries, waiting, limits, hidden keys, interruption, cache."""
import asyncio
import copy
import gc
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from email.utils import formatdate

import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

from comlrl_nb.config import Core, Sampling  # noqa: E402
from comlrl_nb.config_preference import Comparator, ComparatorAPI  # noqa: E402
from comlrl_nb.remote import RemoteModel  # noqa: E402
from comlrl_nb.remote_formats import Answer, Chat, Generic, Messages, RemoteError, Request, Responses  # noqa: E402
from comlrl_nb.remote_rules import Clocks, Limits, backoff, stated_wait  # noqa: E402
from remote_servers import Reply, chat, chat_error, serving  # noqa: E402

KEY = "sk-SECRET-0123456789"


@dataclass
class Config(ComparatorAPI, Comparator, Sampling, Core):
    pass


class Patience:
    """Clocks that only move when somebody sleeps."""

    def __init__(self):
        self.slept, self.now = [], 1_770_000_000.0

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def clocks(self):
        return Clocks(monotonic=lambda: self.now, wall=lambda: self.now, sleep=self.sleep)


def ask(num=1, prompt="which vehicle?", agent_idx=0, item=None):
    return Request(prompt, agent_idx, num, item or {})


def model(server, format=None, patience=None, **options):
    clocks = (patience or Patience()).clocks()
    return RemoteModel(server.url, format or Chat(model="m"), clocks=clocks, **options)


def texts(found):
    return [[answer.text for answer in answers] for answers in found]


def remote_threads():
    return [thread for thread in threading.enumerate() if thread.name == "comlrl_nb.remote"]


def wait_until(holds, patience=5.0):
    end = time.monotonic() + patience
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


# ---- what is sent

def config(server, **fields):
    return Config(comparator_policy="api", comparator_api_url=server.url, comparator_api_model="m", max_new_tokens=7, temperature=0.5, top_p=0.9,
                  top_k=5, **fields)


@pytest.mark.parametrize("format, num, reply, body", [
    ("generic", 2, {"completions": ["a", "b"]}, {"prompt": "which vehicle?", "agent_idx": 1, "num_return_sequences": 2, "max_new_tokens": 7,
                                                 "temperature": 0.5, "top_p": 0.9, "top_k": 5, "batch_item": {"hour": 3}, "model": "m"}),
    ("openai", 2, chat("a", "b"), {"model": "m", "messages": [{"role": "user", "content": "which vehicle?"}], "n": 2, "max_tokens": 7,
                                   "temperature": 0.5, "top_p": 0.9}),
    ("anthropic", 1, {"content": [{"type": "text", "text": "a"}]}, {"model": "m", "max_tokens": 7, "temperature": 0.5,
                                                                     "messages": [{"role": "user", "content": "which vehicle?"}]}),
    ("codex", 1, {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": "a"}]}]},
     {"model": "m", "input": "which vehicle?", "max_output_tokens": 7, "stream": False}),
])
def test_bodies_are_exactly_as_documented(format, num, reply, body):
    with serving([reply]) as server:
        remote = RemoteModel.from_config(config(server, comparator_api_format=format, comparator_api_extra_body={"seed": 3}))
        assert texts(remote.answers([ask(num, agent_idx=1, item={"hour": 3})])) == [["a", "b"][:num]]
    assert [seen.body for seen in server.seen] == [{**body, "seed": 3}]


def test_unset_values_are_left_out_and_extra_fields_win():
    with serving([{"completions": ["a"]}]) as server:
        model(server, Generic(temperature=0.5, top_p=0.9, extra_body={"temperature": 0, "top_p": None})).answers([ask()])
    assert server.seen[0].body == {"prompt": "which vehicle?", "agent_idx": 0, "num_return_sequences": 1, "temperature": 0, "batch_item": {}}


def test_items_may_hold_arrays_and_nothing_that_json_cannot_say():
    with serving([{"completions": ["a"]}]) as server:
        remote = model(server, Generic())
        remote.answers([ask(item={"scores": np.arange(3), "one": np.float32(0.5)})])
        assert server.seen[0].body["batch_item"] == {"scores": [0, 1, 2], "one": 0.5}
        for value in (object(), float("nan"), {1, 2}):
            with pytest.raises(ValueError, match=r"requests\[1\] cannot be sent.*\['image'\]"):
                remote.answers([ask(), ask(item={"image": value})])
    assert len(server.seen) == 1


@pytest.mark.parametrize("format, fields, expected", [
    ("openai", {}, {"authorization": f"Bearer {KEY}"}),
    ("openai", {"comparator_api_key_header": "api-key", "comparator_api_key_prefix": None}, {"api-key": KEY, "authorization": None}),
    ("openai", {"comparator_api_key_prefix": ""}, {"authorization": KEY}),
    ("openai", {"comparator_api_headers": {"X-Team": "two", "AUTHORIZATION": "Token t"}}, {"x-team": "two", "authorization": "Token t"}),
    ("anthropic", {}, {"x-api-key": KEY, "anthropic-version": "2023-06-01", "authorization": None}),
    ("anthropic", {"comparator_api_key_header": "X-Gateway"}, {"x-gateway": f"Bearer {KEY}", "x-api-key": None}),
    ("anthropic", {"comparator_api_headers": {"Anthropic-Version": "2030-01-01"}}, {"anthropic-version": "2030-01-01"}),
])
def test_headers(format, fields, expected):
    reply = {"content": [{"type": "text", "text": "a"}], **chat("a")}
    with serving([reply]) as server:
        RemoteModel.from_config(config(server, comparator_api_format=format, comparator_api_key=KEY, **fields)).answers([ask()])
    assert {name: server.seen[0].headers.get(name) for name in expected} == expected


def test_the_key_of_the_environment(monkeypatch):
    with serving([chat("a")]) as server:
        args = config(server, comparator_api_format="openai", comparator_api_key_env="REMOTE_TEST_KEY")
        monkeypatch.delenv("REMOTE_TEST_KEY", raising=False)
        with pytest.raises(ValueError, match="comparator_api_key_env='REMOTE_TEST_KEY': that environment variable is not set"):
            RemoteModel.from_config(args)
        monkeypatch.setenv("REMOTE_TEST_KEY", f"{KEY}\n")
        RemoteModel.from_config(args).answers([ask()])
        RemoteModel.from_config(config(server, comparator_api_format="openai", comparator_api_key_env="REMOTE_TEST_KEY",
                                       comparator_api_key="sk-other")).answers([ask()])
    assert [seen.headers["authorization"] for seen in server.seen] == [f"Bearer {KEY}", "Bearer sk-other"]


def test_an_address_is_needed():
    with pytest.raises(ValueError, match="Config: comparator_api_url must be given"):
        RemoteModel.from_config(Config())


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(ImportError, match=r"pip install 'comlrl_nb\[remote\]'"):
        RemoteModel("http://127.0.0.1:1", Chat())


def test_importing_needs_no_optional_package():
    code = "import sys; import comlrl_nb.remote; sys.exit(bool({'httpx', 'tenacity'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- what is read

BLOCK = {"type": "text", "text": "A"}


@pytest.mark.parametrize("choice, expected", [  # C58
    ({"message": {"content": "A"}}, Answer("A")),
    ({"message": {"content": [BLOCK, {"type": "text", "text": "B"}]}}, Answer("AB")),
    ({"message": {"content": [{"type": "thinking", "thinking": "hm"}, BLOCK]}}, Answer("A")),
    ({"message": {"content": "A"}, "finish_reason": "length"}, Answer("A", False, "length")),
    ({"message": {"content": None}}, Answer(None, False, "empty")),
    ({"message": {"content": " \n"}}, Answer(None, False, "empty")),
    ({"message": {}}, Answer(None, False, "empty")),
    ({"message": None, "finish_reason": "stop"}, Answer(None, False, "empty")),
    ({"message": {"content": None, "refusal": "I will not."}}, Answer(None, False, "refusal")),
    ({"message": {"content": [{"type": "refusal", "refusal": "I will not."}]}}, Answer(None, False, "refusal")),
    ({"message": {"content": "par"}, "finish_reason": "content_filter"}, Answer(None, False, "content_filter")),
    ({"message": {"content": "par"}, "finish_reason": "SAFETY"}, Answer(None, False, "safety")),
    ({"message": {"content": None, "tool_calls": [{"id": 1}]}, "finish_reason": "tool_calls"}, Answer(None, False, "tool_calls")),
    ({"message": {"content": "", "reasoning_content": "hm"}}, Answer(None, False, "reasoning only")),
    ({"message": {"content": "", "reasoning_content": "hm"}, "finish_reason": "length"}, Answer(None, False, "length")),
    ({"message": {"content": 7}}, Answer(None, False, "empty")),
    ({"message": {"content": "None"}}, Answer("None")),
    ({"text": "A", "finish_reason": "stop"}, Answer("A")),
])
def test_chat_choices(choice, expected):
    assert Chat().read({"choices": [choice]}) == [expected]


@pytest.mark.parametrize("format", [Chat(), Generic(), Messages(), Responses()])
@pytest.mark.parametrize("reply", [{}, [], None, "", 7, {"choices": None}, {"choices": []}, {"content": None}, {"output": None}, {"output": []},
                                   {"completions": []}, {"choices": [3]}, {"choices": [[]]}, {"choices": [{}]}])
def test_replies_without_choices_are_typed_errors(format, reply):  # C57
    with pytest.raises(RemoteError, match="the reply has no .*; it is") as caught:
        format.read(reply)
    assert caught.value.status == 200 and not caught.value.transient


@pytest.mark.parametrize("format", [Chat(), Generic(), Messages(), Responses()])
@pytest.mark.parametrize("reply, message, transient", [
    ({"error": {"message": "No such model", "code": "model_not_found"}}, "No such model", False),
    ({"error": {"message": "Slow down", "code": 429}, "choices": []}, "Slow down", True),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "Overloaded", True),
    ({"error": "broken"}, "broken", False),
    ({"error": {"code": "server_error"}}, "an error without a message", True),
    ({"error": {"type": "insufficient_quota", "code": 429, "message": "No credit"}}, "No credit", False),
])
def test_errors_with_status_200_carry_the_message(format, reply, message, transient):  # C57
    with pytest.raises(RemoteError) as caught:
        format.read(reply)
    assert (str(caught.value), caught.value.transient) == (message, transient)


@pytest.mark.parametrize("reply, expected", [  # C62
    ({"content": [{"type": "thinking", "thinking": "hm"}, BLOCK]}, Answer("A")),
    ({"content": [{"type": "redacted_thinking", "data": "x"}, BLOCK], "stop_reason": "end_turn"}, Answer("A")),
    ({"content": [BLOCK, {"type": "tool_use", "input": {}}, BLOCK], "stop_reason": "tool_use"}, Answer("AA")),
    ({"content": [{"type": "thinking", "thinking": "hm"}], "stop_reason": "end_turn"}, Answer(None, False, "reasoning only")),
    ({"content": [{"type": "thinking", "thinking": "hm"}], "stop_reason": "max_tokens"}, Answer(None, False, "length")),
    ({"content": [{"type": "tool_use", "input": {}}], "stop_reason": "tool_use"}, Answer(None, False, "tool_use")),
    ({"content": [BLOCK], "stop_reason": "max_tokens"}, Answer("A", False, "length")),
    ({"content": [BLOCK], "stop_reason": "refusal"}, Answer(None, False, "refusal")),
    ({"content": [], "stop_reason": "end_turn"}, Answer(None, False, "empty")),
])
def test_messages(reply, expected):
    assert Messages().read(reply) == [expected]


def spoken(*blocks):
    return {"type": "message", "content": list(blocks)}


WORD = {"type": "output_text", "text": "A"}


@pytest.mark.parametrize("reply, expected", [  # C60
    ({"status": "completed", "output": [{"type": "reasoning", "summary": []}, spoken(WORD)]}, Answer("A")),
    ({"status": "completed", "output": [spoken(WORD, WORD), {"type": "reasoning"}, spoken(WORD)]}, Answer("AAA")),
    ({"status": "completed", "output": [{"type": "reasoning"}]}, Answer(None, False, "reasoning only")),
    ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [{"type": "reasoning"}]}, Answer(None, False, "length")),
    ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [spoken(WORD)]}, Answer("A", False, "length")),
    ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": [spoken(WORD)]}, Answer(None, False, "content_filter")),
    ({"status": "incomplete", "incomplete_details": None, "output": []}, Answer(None, False, "length")),
    ({"status": "completed", "output": [spoken({"type": "refusal", "refusal": "No"})]}, Answer(None, False, "refusal")),
    ({"status": "completed", "error": None, "output": [spoken()]}, Answer(None, False, "empty")),
])
def test_responses(reply, expected):
    assert Responses().read(reply) == [expected]


@pytest.mark.parametrize("status, error, message", [
    ("failed", {"code": "server_error", "message": "It broke"}, "It broke"), ("failed", None, "status 'failed'"),
    ("queued", None, "status 'queued'"), ("in_progress", None, "status 'in_progress'"), ("cancelled", None, "status 'cancelled'")])
def test_responses_that_are_not_done(status, error, message):  # C60
    with pytest.raises(RemoteError, match=message):
        Responses().read({"status": status, "error": error, "output": [spoken(WORD)]})


@pytest.mark.parametrize("field, reply, expected", [
    ("completions", {"completions": ["a", None, ""]}, ["a", None, None]),
    ("data.texts", {"data": {"texts": ["a"]}, "choices": ["b"]}, ["a"]),
    ("data.0.t", {"data": [{"t": "a"}]}, ["a"]),
    ("data.texts", {"data.texts": ["a"]}, ["a"]),
    ("data.texts", {"choices": ["b"]}, ["b"]),
    ("completions", {"responses": ["a"], "outputs": ["b"]}, ["a"]),
    ("completions", {"outputs": [{"text": "a"}, {"generated_text": "b"}, {"message": {"content": "c"}}]}, ["a", "b", "c"]),
    ("text", {"text": "a"}, ["a"]),
    ("text", {"texts": ["a"]}, None),
])
def test_generic_field(field, reply, expected):
    if expected is None:
        with pytest.raises(RemoteError, match="texts at 'text'"):
            Generic(response_field=field).read(reply)
    else:
        assert [answer.text for answer in Generic(response_field=field).read(reply)] == expected


# ---- retries and waiting

def after(*headers):
    """A busy server: one 429 per set of headers, then an answer."""
    return [Reply(429, chat_error("Slow down."), each) for each in headers] + [chat("a")]


@pytest.mark.parametrize("headers, waited", [  # C55
    ({"retry-after": "2"}, 2.0), ({"retry-after": "0"}, 0.0), ({"retry-after": "1.5"}, 1.5), ({"retry-after-ms": "50"}, 0.05),
    ({"retry-after-ms": "abc", "retry-after": "3"}, 3.0), ({"retry-after": "99999"}, 60.0),
])
def test_the_stated_time_is_waited(headers, waited):
    patience = Patience()
    with serving(after(headers)) as server:
        assert texts(model(server, patience=patience).answers([ask()])) == [["a"]]
    assert patience.slept == [waited]


def test_a_date_is_waited_for():  # C55
    patience = Patience()
    with serving(after({"retry-after": formatdate(patience.now + 7, usegmt=True)})) as server:
        model(server, patience=patience).answers([ask()])
    assert patience.slept == [7.0]


@pytest.mark.parametrize("value", ["abc", "-3", "nan", "inf", "", "1e9", "Sun, 01 Jan 2012 10:00:00 GMT", "Mon, 99 Foo 2026", "٣"])
def test_bad_values_fall_back_to_backoff(value):  # C55
    patience = Patience()
    assert stated_wait({"retry-after": value}, patience.now) is None
    with serving(after({"retry-after": value.encode().decode("latin-1")})) as server:
        model(server, patience=patience).answers([ask()])
    assert len(patience.slept) == 1 and backoff(1, 1.0) <= patience.slept[0] <= backoff(1, 0.0)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529, 599])
def test_statuses_that_pass_are_tried_again(status):  # C55
    patience = Patience()
    with serving([Reply(status, chat_error("later"))] * 2 + [chat("a")]) as server:
        remote = model(server, patience=patience)
        assert texts(remote.answers([ask()])) == [["a"]]
    assert len(server.seen) == 3 and remote.counts["retries"] == 2 and patience.slept[0] < patience.slept[1]


@pytest.mark.parametrize("status", [429, 500, 529])
def test_tries_are_bounded_and_the_status_is_kept(status):  # C55
    patience = Patience()
    with serving([Reply(status, chat_error("Still busy."))]) as server:
        with pytest.raises(RemoteError, match=rf"HTTP {status}: Still busy\. \(tried 8 times\)") as caught:
            model(server, patience=patience).answers([ask()])
    assert len(server.seen) == 8 == caught.value.tries and caught.value.status == status
    assert patience.slept == sorted(patience.slept) and len(patience.slept) == 7


@pytest.mark.parametrize("status, body, said", [
    (400, chat_error("max_tokens is too large"), "max_tokens is too large"),
    (401, chat_error("no key"), "no key"), (402, {"message": "pay first"}, "pay first"), (403, {"detail": "not you"}, "not you"),
    (404, {"error": "no such model"}, "no such model"), (413, b"<html>too big</html>", "<html>too big</html>"),
    (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"), (400, b"", "no message"),
    (429, chat_error("You exceeded your current quota", code="insufficient_quota", type="insufficient_quota"), "You exceeded your current quota"),
    (301, b"", r"no message \(redirects are not followed"),
])
def test_other_statuses_are_not_tried_again_and_show_the_message(status, body, said):
    headers = {"location": "http://127.0.0.1:1/"} if status == 301 else {}
    with serving([Reply(status, body, headers)]) as server:
        with pytest.raises(RemoteError, match=rf"remote model at {server.url}: HTTP {status}: {said}") as caught:
            model(server).answers([ask()])
    assert len(server.seen) == 1 and caught.value.status == status


def test_a_server_that_takes_one_candidate_at_a_time():
    with serving(lambda seen: chat("a") if seen.body["n"] == 1 else Reply(400, chat_error("n must be 1", type="api_error"))) as server:
        with pytest.raises(RemoteError, match=r"n must be 1 \(asked for 3 candidates at once; comparator_api_max_n_per_request=1"):
            model(server).answers([ask(3)])
        assert len(server.seen) == 1
        assert texts(model(server, limits=Limits(max_n=1)).answers([ask(3)])) == [["a"] * 3]


def test_a_server_may_forbid_another_try():
    with serving([Reply(500, chat_error("broken for good"), {"x-should-retry": "false"})]) as server, pytest.raises(RemoteError, match="for good"):
        model(server).answers([ask()])
    assert len(server.seen) == 1


@pytest.mark.parametrize("fault", [Reply(how="drop"), Reply(body=chat("lost"), how="half"), Reply(body=b"", status=200), Reply(body=b'{"choices": [{"mess'),
                                   Reply(body=chat_error("busy", code=503)), Reply(body=chat_error("busy", type="overloaded_error"))])
def test_broken_connections_and_passing_errors_are_tried_again(fault):
    with serving([fault, fault, chat("a")]) as server:
        remote = model(server)
        assert texts(remote.answers([ask()])) == [["a"]]
    assert remote.counts["retries"] == 2


def test_a_page_instead_of_json_is_not_tried_again():
    with serving([Reply(body=b"<html>Sign in</html>", headers={"content-type": "text/html"})]) as server:
        with pytest.raises(RemoteError, match=r"the reply is no JSON \(text/html\): '<html>Sign in</html>'"):
            model(server).answers([ask()])
    assert len(server.seen) == 1


def test_nobody_listens():
    with serving([]) as server:
        pass
    with pytest.raises(RemoteError, match=r"ConnectError: .* \(tried 8 times\)") as caught:
        model(server).answers([ask()])
    assert caught.value.status is None and caught.value.transient


def test_one_try_is_bounded():
    with serving([Reply(how="stall"), chat("a")]) as server:
        remote = model(server, limits=Limits(timeout=0.2))
        assert texts(remote.answers([ask()])) == [["a"]]
    assert remote.counts["retries"] >= 1


def test_a_reply_that_drips_is_bounded_too():
    with serving([Reply(body=chat("a"), how="half", delay=0.0), Reply(body=chat("b"), delay=5), chat("c")]) as server:
        started = time.monotonic()
        assert texts(model(server, limits=Limits(timeout=0.3)).answers([ask()])) == [["c"]]
        assert time.monotonic() - started < 4


def test_all_tries_are_bounded():
    patience = Patience()
    with serving([Reply(503, chat_error("busy"), {"retry-after": "40"})]) as server:
        with pytest.raises(RemoteError, match=r"tried 3 times; the total time limit leaves no time to try again"):
            model(server, patience=patience, limits=Limits(total_timeout=100)).answers([ask()])
    assert patience.slept == [40.0, 40.0]


def test_the_total_time_starts_with_the_first_request_of_each():
    """Three requests one after the other, each with a wait of 40 s: none of them takes more than 100 s, all together do."""
    patience, busy = Patience(), set()

    def script(seen):
        prompt = seen.body["messages"][0]["content"]
        if prompt in busy:
            return chat("a")
        busy.add(prompt)
        return Reply(503, chat_error("busy"), {"retry-after": "40"})
    with serving(script) as server:
        remote = model(server, patience=patience, limits=Limits(total_timeout=100, max_concurrency=1))
        assert texts(remote.answers([ask(prompt=name) for name in "pqr"])) == [["a"]] * 3
    assert patience.slept == [40.0] * 3


# ---- several candidates, several requests

def test_missing_choices_are_topped_up_in_portions_of_what_came():
    def script(seen):
        return chat(*"ab"[:seen.body["n"]])
    with serving(script) as server:
        remote = model(server)
        assert texts(remote.answers([ask(7)])) == [["a", "b"] * 3 + ["a"]]
    assert server.seen[0].body["n"] == 7 and sorted(seen.body["n"] for seen in server.seen[1:]) == [1, 2, 2]


def test_too_many_choices_are_cut():
    with serving([chat(*"abcd")]) as server:
        assert texts(model(server).answers([ask(2)])) == [["a", "b"]]


@pytest.mark.parametrize("format, reply", [(Chat(), lambda n: chat(*"a" * n)), (Generic(), lambda n: {"completions": ["a"] * n})])
def test_at_most_max_n_per_request(format, reply):
    with serving(lambda seen: reply(seen.body.get("n") or seen.body["num_return_sequences"])) as server:
        model(server, format, limits=Limits(max_n=3)).answers([ask(8)])
    assert sorted(seen.body.get("n") or seen.body["num_return_sequences"] for seen in server.seen) == [2, 3, 3]


@pytest.mark.parametrize("format, reply", [(Messages(model="m"), {"content": [BLOCK]}), (Responses(model="m"), {"status": "completed", "output": [spoken(WORD)]})])
def test_one_request_per_candidate(format, reply):
    with serving([reply]) as server:
        assert texts(model(server, format).answers([ask(4)])) == [["A"] * 4]
    assert len(server.seen) == 4


def test_answers_come_in_the_order_of_the_requests():
    def script(seen):
        name = seen.body["messages"][0]["content"]
        return Reply(body=chat(*[name] * seen.body["n"]), delay=0.05 * (ord("z") - ord(name)) / 25)
    with serving(script) as server:
        assert texts(model(server).answers([ask(2, prompt=name) for name in "azmb"])) == [[name] * 2 for name in "azmb"]


def test_at_most_so_many_at_once_and_not_fewer():
    def script(seen):
        server.until_full(8)
        return {"content": [BLOCK]}
    with serving(script) as server:
        model(server, Messages(), limits=Limits(max_concurrency=8)).answers([ask(32), ask(32)])
    assert server.most_at_once == 8 and len(server.seen) == 64


def test_sixty_four_candidates_take_eight_rounds_even_where_n_is_ignored():
    """One request shows that the server ignores n; the other 63 go out eight at a time."""
    def script(seen):
        if seen.body["n"] == 1:
            server.until_full(8)
        return chat("a")
    with serving(script) as server:
        remote = model(server)
        assert texts(remote.answers([ask(64)])) == [["a"] * 64]
    assert remote.counts["requests"] == 64 and server.most_at_once == 8


@pytest.mark.slow
@pytest.mark.parametrize("format, reply", [(Chat(), chat("a")), (Messages(), {"content": [BLOCK]})])
def test_sixty_four_candidates_at_200_ms_take_under_2_5_s(format, reply):
    with serving([Reply(body=reply, delay=0.2)]) as server:
        remote, seconds = RemoteModel(server.url, format), []
        for num in (1, 64, 64):  # the first call pays for what is loaded once
            started = time.perf_counter()
            remote.answers([ask(num)])
            seconds.append(time.perf_counter() - started)
    assert min(seconds[1:]) < 2.5, seconds


def test_what_was_begun_first_is_finished_first():
    """The server gives `a` half of what was asked; what is missing then goes before the many requests for `b` that already wait."""
    def script(seen):
        name, num = seen.body["messages"][0]["content"], seen.body["n"]
        return chat(*name * (num // 2 if name == "a" and num > 2 else num))
    with serving(script) as server:
        remote = model(server, limits=Limits(max_concurrency=2, max_n=4))
        assert texts(remote.answers([ask(8, prompt="a"), ask(40, prompt="b")])) == [["a"] * 8, ["b"] * 40]
    order = "".join(seen.body["messages"][0]["content"] for seen in server.seen)
    assert order.count("a") == 4 and order.rindex("a") <= 6 and len(order) >= 14, order


def test_no_answers_keep_their_place_and_are_counted():
    choices = [{"message": {"content": "a"}, "finish_reason": "stop"}, {"message": {"content": None, "refusal": "no"}},
               {"message": {"content": "b"}, "finish_reason": "length"}, {"message": {"content": ""}}]
    with serving([{"choices": choices}]) as server:
        remote = model(server)
        found = remote.answers([ask(4)])
    assert texts(found) == [["a", None, "b", None]] and [answer.finished for answer in found[0]] == [True, False, False, False]
    assert remote.counts == {"requests": 1, "answers": 2, "cut_off": 1, "no_answer": 2, "no_answer/refusal": 1, "no_answer/empty": 1}


def test_a_prompt_that_the_provider_blocks_has_no_answer():
    def script(seen):
        blocked = seen.body["messages"][0]["content"] == "bad"
        return Reply(400, chat_error("filtered", code="content_filter")) if blocked else chat("a")
    with serving(script) as server:
        remote = model(server)
        assert texts(remote.answers([ask(1), ask(3, prompt="bad")])) == [["a"], [None] * 3]
    assert remote.counts["no_answer/blocked"] == 3 and len(server.seen) == 2


def test_nothing_asked_is_nothing_sent():
    with serving([]) as server:
        assert model(server).answers([]) == [] and model(server).answers([ask(0)]) == [[]]
    assert server.seen == []


@pytest.mark.parametrize("request_", [ask(-1), ask(prompt=""), ask(prompt=None)])
def test_requests_that_make_no_sense(request_):
    with serving([]) as server, pytest.raises(ValueError, match=r"requests\[0\]: expected a prompt"):
        model(server).answers([request_])


def test_a_failure_cancels_the_others():
    def script(seen):
        return Reply(401, chat_error("no key")) if seen.body["messages"][0]["content"] == "bad" else Reply(how="stall")
    with serving(script) as server:
        started = time.monotonic()
        with pytest.raises(RemoteError, match="no key"):
            model(server).answers([ask(), ask(), ask(prompt="bad")])
        assert time.monotonic() - started < 5
    wait_until(lambda: not remote_threads())


def test_failures_leave_nothing_on_the_terminal():
    code = ("import sys\nfrom comlrl_nb.remote import RemoteError, RemoteModel, Request\nfrom comlrl_nb.remote_formats import Messages\n"
            "try:\n    RemoteModel(sys.argv[1], Messages()).answers([Request('p', 0, 16, {}), Request('q', 0, 16, {})])\n"
            "except RemoteError as error:\n    print(error.status)\n")
    with serving([Reply(401, chat_error("no key"))]) as server:
        done = subprocess.run([sys.executable, "-W", "default::ResourceWarning", "-c", code, server.url], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("401\n", "")


# ---- loops, interruptions, random numbers

def test_works_inside_a_running_loop():
    with serving([chat("a")]) as server:
        async def cell():
            return model(server).answers([ask()])
        assert texts(asyncio.run(cell())) == [["a"]]


def test_several_threads_may_ask_at_once():
    found = []
    with serving(lambda seen: chat(*[seen.body["messages"][0]["content"]] * seen.body["n"])) as server:
        remote = model(server)
        threads = [threading.Thread(target=lambda name=name: found.append((name, texts(remote.answers([ask(3, prompt=name)]))))) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [(name, [[name] * 3]) for name in "abcd"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_an_interruption_stops_at_once():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with serving([Reply(how="stall")]) as server:
            remote = model(server, Messages())
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                remote.answers([ask(32)])
            assert time.monotonic() - started < 3 and len(server.seen) == 8
            wait_until(lambda: not remote_threads())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_process_ends_at_once(tmp_path):
    code = ("import sys\nfrom comlrl_nb.remote import RemoteModel, Request\nfrom comlrl_nb.remote_formats import Messages\n"
            "print('ready', flush=True)\nRemoteModel(sys.argv[1], Messages()).answers([Request('p', 0, 16, {})])\n")
    with serving([Reply(how="stall")]) as server:
        process = subprocess.Popen([sys.executable, "-c", code, server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            while not server.seen:
                time.sleep(0.05)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert said.rstrip().endswith("KeyboardInterrupt") and time.monotonic() - started < 10


def test_random_numbers_of_the_run_are_left_alone():
    import random

    import torch
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with serving(after({}, {})) as server:
        model(server).answers([ask(3)])
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


# ---- the key

def failures():
    """Every kind of failure, with a server that repeats the key wherever it can."""
    leak = f"wrong key Bearer {KEY} ({KEY.replace('-', '%2D')})"
    yield from ([Reply(status, chat_error(leak))] for status in (400, 401, 402, 403, 404, 422, 429, 500, 503, 529))
    yield [Reply(429, chat_error(leak, code="insufficient_quota"))]
    yield [Reply(401, leak.encode(), {"content-type": "text/plain", "x-echo": KEY, "www-authenticate": KEY})]
    yield [Reply(301, b"", {"location": f"http://127.0.0.1:1/?key={KEY}"})]
    yield from ([Reply(body=body)] for body in (chat_error(leak), {"choices": None, KEY: 1}, [KEY], KEY, {"choices": [{KEY: 1}]}))
    yield [Reply(body=leak.encode(), headers={"content-type": "text/html"})]
    yield [Reply(body=leak.encode())]
    yield [Reply(how="drop")]
    yield [Reply(body=chat("a"), how="half")]
    yield [Reply(how="stall")]
    yield [Reply(body=b"\x1f\x8b broken", headers={"content-encoding": "gzip"})]


def chain(error):
    """The error and everything that hangs on it."""
    todo, seen = [error], []
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.append(one)
            todo += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return seen


def shown_of(error):
    """All that a careless reader of an exception may see: texts, attributes, tracebacks with local variables of the library."""
    found = []
    for one in chain(error):
        found += [str(one), repr(one), repr(vars(one)), repr(one.args)]
        found += traceback.format_exception(one)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if "comlrl_nb" in frame.f_code.co_filename:
                found += [f"{name}={value!r}" for name, value in frame.f_locals.items()]
    return "\n".join(found)


@pytest.mark.parametrize("place", ["everywhere", "env"])
def test_the_key_is_nowhere(place, monkeypatch, caplog, tmp_path):  # C67
    monkeypatch.setenv("REMOTE_TEST_KEY", KEY)
    options = {"env": dict(comparator_api_key_env="REMOTE_TEST_KEY"),
               "everywhere": dict(comparator_api_key=KEY, comparator_api_headers={"X-Token": f"Token {KEY}"}, comparator_api_extra_body={"auth": {"token": KEY}})}
    caplog.set_level(logging.DEBUG)
    output, shown = io.StringIO(), []
    for script in failures():
        with serving(script) as server, redirect_stdout(output), redirect_stderr(output):
            args = config(server, comparator_api_format="openai", comparator_api_timeout=0.2, **options[place])
            args.comparator_api_url += f"?key={KEY}" * (place == "everywhere")
            remote = RemoteModel.from_config(args, clocks=Patience().clocks(), cache_dir=tmp_path / "cache")
            with pytest.raises(RemoteError) as caught:
                remote.answers([ask(2)])
        shown += [shown_of(caught.value), repr(remote), remote._repr_markdown_(), repr(vars(remote)), repr(remote.format), str(remote.counts)]
        shown += [repr(pickle.dumps(caught.value))]
        for attempt in (pickle.dumps, copy.deepcopy, lambda it: json.dumps(vars(it), default=repr)):
            try:
                shown.append(repr(attempt(remote)))
            except (TypeError, AttributeError) as error:
                shown.append(str(error))
    gc.collect()
    log = "\n".join(f"{record.getMessage()} {record.args}" for record in caplog.records)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    marks = (KEY, KEY[3:])
    assert [text for text in (*shown, log, output.getvalue(), *files) if any(mark in text for mark in marks)] == []
    assert "httpx" in {record.name for record in caplog.records} and len(shown) > 100


def test_a_model_with_a_key_is_not_pickled():  # C67
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="build its owner from the configuration again"):
            attempt(RemoteModel("http://127.0.0.1:1", Chat(), key=KEY))


def test_the_key_is_neither_in_answers_nor_in_the_cache(tmp_path):
    with serving([chat(f"my key is {KEY}", "fine")]) as server:
        remote = model(server, key=KEY, cache_dir=tmp_path)
        assert texts(remote.answers([ask(2)])) == [["my key is <hidden>", "fine"]]
    assert [KEY in path.read_text() for path in tmp_path.iterdir()] == [False]


@pytest.mark.parametrize("options", [dict(key=f"{KEY}\n"), dict(key=f"{KEY}\x00"), dict(key=f"{KEY}é"), dict(key=f" {KEY}", key_prefix=None), dict(key=KEY, key_header=f"{KEY}:\n"),
                                     dict(headers={"X-Token": f"{KEY}\r\nX-More: 1"}), dict(headers={f"{KEY} x": "1"}), dict(key=KEY, key_prefix="Bea\nrer")])
def test_headers_that_cannot_be_sent_are_refused_unseen(options):  # C67
    with pytest.raises(ValueError) as caught:
        RemoteModel("http://127.0.0.1:1", Chat(), **options)
    assert KEY not in "".join(traceback.format_exception(caught.value)) and "not shown" in str(caught.value)


def test_a_password_in_the_address_is_refused_unseen():  # C67
    with pytest.raises(ValueError) as caught:
        RemoteModel(f"http://user:{KEY}@127.0.0.1:1/v1", Chat())
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_what_does_not_belong_to_the_key_is_shown():
    with serving([Reply(401, chat_error("Incorrect API key provided: sk-SE**6789. See https://models.example/keys"))]) as server:
        with pytest.raises(RemoteError, match="Incorrect API key provided: sk-SE.*6789. See https://models.example/keys"):
            model(server, key=KEY).answers([ask()])


# ---- the cache

def test_the_cache_is_off_by_default_and_answers_without_the_network(tmp_path):
    with serving(lambda seen: chat(f"answer {len(server.seen)}")) as server:
        plain, first = model(server), model(server, cache_dir=tmp_path / "c", key=KEY)
        assert texts(plain.answers([ask()])) != texts(plain.answers([ask()]))
        kept = first.answers([ask(), ask(prompt="another")])
        asked = len(server.seen)
        again = model(server, cache_dir=tmp_path / "c", key="sk-another-key-entirely")
        assert again.answers([ask(prompt="another"), ask()]) == kept[::-1] and len(server.seen) == asked
        assert again.counts == {"cached": 2, "answers": 2}
        again.answers([ask(2)]), model(server, Chat(model="m", temperature=1.0), cache_dir=tmp_path / "c").answers([ask()])
        assert len(server.seen) > asked + 1


@pytest.mark.parametrize("content", ["", "{", "[]", '[{"text": "a"', '[{"what": 1}]', "[3]", "\x00"])
def test_a_damaged_cache_file_is_asked_for_again(tmp_path, content):
    with serving([chat("a")]) as server:
        model(server, cache_dir=tmp_path).answers([ask()])
        path, = tmp_path.iterdir()
        path.write_text(content)
        assert texts(model(server, cache_dir=tmp_path).answers([ask()])) == [["a"]]
        assert json.loads(path.read_text())[0]["text"] == "a" and os.listdir(tmp_path) == [path.name]


def test_failures_are_not_kept_but_what_was_answered_before_is(tmp_path):
    def script(seen):
        return Reply(401, chat_error("no"), delay=0.3) if seen.body["messages"][0]["content"] == "bad" else chat("a")
    with serving(script) as server:
        with pytest.raises(RemoteError):
            model(server, cache_dir=tmp_path).answers([ask(), ask(prompt="bad")])
    assert len(list(tmp_path.iterdir())) == 1
