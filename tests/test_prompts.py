"""Formatters, prompt ids (C06, C07, C11, C14), text completions and chats."""
import functools
import inspect
import warnings

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from comlrl_nb import toy
from comlrl_nb.prompts import build_formatters, chat_formatter, encode_prompt, encode_text_completion
from comlrl_nb.utils import build_formatters as public_build_formatters

TEMPLATE = ("{% if bos_token %}{{ bos_token }}{% endif %}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


def word_tokenizer(bos=True, adds="<bos> $A", pad=True):
    """Words are tokens; `adds` is what the tokenizer puts around a text."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefgh", "[user]", "[system]", "[assistant]"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds:
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    specials = dict(eos_token="<eos>", unk_token="<unk>") | (dict(bos_token="<bos>") if bos else {}) | (dict(pad_token="<pad>") if pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **specials)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# formatters

def test_signature_is_the_public_one():
    assert str(inspect.signature(public_build_formatters)).startswith("(formatters:")
    assert list(inspect.signature(public_build_formatters).parameters) == ["formatters", "num_agents", "pass_none_external_prompts"]
    assert public_build_formatters is build_formatters


def test_without_formatter_the_prompt_or_the_external_text():
    for formatter in build_formatters(None, 3):
        assert formatter({"prompt": "p"}) == "p" and formatter({"prompt": "p"}, external_prompts="x") == "x"


def test_one_formatter_serves_all_agents_and_a_list_one_each():
    one = build_formatters(lambda item: item["q"], 2)
    each = build_formatters([lambda item: "a" + item["q"], lambda item: "b" + item["q"]], 2)
    assert [f({"q": "?"}) for f in one] == ["?", "?"] and [f({"q": "?"}) for f in each] == ["a?", "b?"]


@pytest.mark.parametrize("pass_none, expected", [(True, [{"external_prompts": None}, {"external_prompts": "x"}]), (False, [{}, {"external_prompts": "x"}])])
def test_external_prompts_are_passed_by_name(pass_none, expected):
    seen = []

    def formatter(item, **named):
        seen.append(named)
        return "p"

    def takes(item, external_prompts="absent"):
        return formatter(item, **({} if external_prompts == "absent" else {"external_prompts": external_prompts}))

    wrapped, = build_formatters(takes, 1, pass_none_external_prompts=pass_none)
    wrapped({}), wrapped({}, external_prompts="x")
    assert seen == expected


def test_formatter_that_does_not_name_the_external_text_finds_it_as_the_items_prompt():
    wrapped, = build_formatters(lambda item: f"{item['prompt']} ({item['_original_prompt']})", 1)
    row = {"prompt": "first"}
    assert wrapped(row, external_prompts="x") == "x (first)" and row == {"prompt": "first"}


def test_partials_and_objects_are_formatters():
    class Writer:
        def __call__(self, item, external_prompts=None):
            return external_prompts or "w"

    formatters = build_formatters([functools.partial(lambda sign, item: item["q"] + sign, "!"), Writer()], 2)
    assert [f({"q": "a"}) for f in formatters] == ["a!", "w"]


@pytest.mark.parametrize("result", [None, "", 3, ["text"], b"bytes"])
def test_result_that_is_no_text_names_the_agent(result):
    formatters = build_formatters([lambda item: "fine", lambda item: result], 2)
    with pytest.raises(ValueError, match=r"agent 1 must return a non-empty string, got ") as caught:
        formatters[1]({"prompt": "p"})
    assert repr(result) in str(caught.value)


def test_item_without_prompt_names_the_remedy():
    with pytest.raises(ValueError, match=r"no 'prompt', only \['answer', 'question'\].*formatters="):
        build_formatters(None, 1)[0]({"question": 1, "answer": 2})


@pytest.mark.parametrize("formatters", ["prompt", 3, [], [len], [len, len, len], [len, None], {"a": len, "b": len}])
def test_wrong_formatters(formatters):
    with pytest.raises(ValueError, match=r"formatters must be None, a callable, or a list of 2 callables"):
        build_formatters(formatters, 2)


def test_an_error_inside_a_formatter_surfaces_unchanged():
    with pytest.raises(KeyError, match="missing"):
        build_formatters(lambda item: item["missing"], 1)[0]({})


# one start token (C06)

def test_one_start_token_whether_the_template_or_the_tokenizer_writes_it():
    for tokenizer in (toy.micro_tokenizer(), word_tokenizer()):
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False, add_generation_prompt=True)
        assert list(tokenizer(rendered)["input_ids"])[:2] == [1, 1]  # the plain way doubles it
        for text in (rendered, "a b", "<bos>a b"):
            prompt = encode_prompt(tokenizer, text)
            assert prompt.token_ids[0] == 1 and prompt.token_ids.count(1) == 1
        assert encode_prompt(tokenizer, rendered).token_ids == tuple(ids_of(tokenizer, rendered))


def test_a_tokenizer_that_adds_nothing_gets_nothing_added():
    tokenizer = word_tokenizer(adds=None)
    assert encode_prompt(tokenizer, "a b").token_ids == (4, 5)
    assert encode_prompt(tokenizer, "<bos> a b").token_ids == (1, 4, 5)


def test_an_end_token_that_the_tokenizer_appends_is_not_part_of_a_prompt():
    tokenizer = word_tokenizer(adds="<bos> $A <eos>")
    assert tokenizer("a b")["input_ids"] == [1, 4, 5, 2]
    assert encode_prompt(tokenizer, "a b").token_ids == (1, 4, 5)


def test_tokenizer_without_special_tokens_never_gives_none():  # C11
    tokenizer = word_tokenizer(bos=False, adds=None, pad=False)
    assert tokenizer.bos_token_id is None and tokenizer.pad_token_id is None
    assert encode_prompt(tokenizer, "a b").token_ids == (4, 5)
    assert encode_text_completion(tokenizer, "a b", eos_id=None).token_ids == (4, 5)
    assert encode_text_completion(tokenizer, "a b", eos_id=None).finished is False


class BrokenTokenizer:
    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": ([None] if add_special_tokens else []) + [7]}


def test_an_id_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"\[None, 7\].*integer"):
        encode_prompt(BrokenTokenizer(), "a")


@pytest.mark.parametrize("text", ["", "   "])
def test_text_without_tokens_is_refused(text):
    with pytest.raises(ValueError, match="has no tokens"):
        encode_prompt(word_tokenizer(), text)


# truncation (C14)

@pytest.mark.parametrize("limit", range(1, 9))
def test_shortened_prompt_keeps_its_end_and_its_start_token(limit):
    tokenizer = word_tokenizer()
    text = "a b c d e f [assistant]"
    for source in (text, "<bos> " + text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = encode_prompt(tokenizer, source, max_prompt_length=limit).token_ids
        assert len(ids) == limit and ids[-1] == 14
        assert ids == ((1, *ids_of(tokenizer, text)[-(limit - 1):]) if limit > 1 else (14,))


def test_nothing_is_lost_when_the_prompt_fits():
    tokenizer = word_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode_prompt(tokenizer, "a b c", max_prompt_length=4).token_ids == (1, 4, 5, 6)


def test_warns_once_for_each_tokenizer_and_limit():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tokenizer in (word_tokenizer(), word_tokenizer()):
            for limit in (2, 2, 3):
                encode_prompt(tokenizer, "a b c d", max_prompt_length=limit)
    assert len(caught) == 4 and "max_prompt_length=2" in str(caught[0].message)


# completions from text (C07)

def test_prompt_ids_do_not_depend_on_the_completion():
    tokenizer = toy.micro_tokenizer()
    prompt = encode_prompt(tokenizer, "a:")
    for text in (" ok", "ok", "? "):
        completion = encode_text_completion(tokenizer, text, eos_id=2)
        assert encode_prompt(tokenizer, "a:") == prompt
        assert completion.token_ids == (*ids_of(tokenizer, text), 2) and completion.text == text and completion.finished
    assert ids_of(tokenizer, "a: ok") != ids_of(tokenizer, "a:") + ids_of(tokenizer, " ok")


def test_text_completion_has_no_start_token_and_an_end_token_unless_cut_off():
    tokenizer = word_tokenizer(adds="<bos> $A <eos>")
    assert encode_text_completion(tokenizer, "a b", eos_id=2).token_ids == (4, 5, 2)
    cut = encode_text_completion(tokenizer, "a b", eos_id=2, finished=False)
    assert cut.token_ids == (4, 5) and not cut.finished
    assert encode_text_completion(tokenizer, "", eos_id=2).token_ids == (2,)


def test_text_completion_stops_at_an_end_token_inside_the_text():
    completion = encode_text_completion(word_tokenizer(), "a <eos> b", eos_id=2, finished=False)
    assert completion.token_ids == (4, 2) and completion.text == "a" and completion.finished


@pytest.mark.parametrize("text", [None, 3, ["a"]])
def test_a_completion_that_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match="must be text"):
        encode_text_completion(word_tokenizer(), text, eos_id=2)


# chats

def test_chat_uses_messages_or_system_and_user():
    tokenizer = word_tokenizer()
    chat = chat_formatter(tokenizer, system="a", user="q")
    assert chat({"q": "b"}) == "<bos>[system] a [user] b [assistant]"
    assert chat({"messages": [{"role": "user", "content": "c"}]}) == "<bos>[system] a [user] c [assistant]"
    own = [{"role": "system", "content": "d"}, {"role": "user", "content": "c"}]
    assert chat({"messages": own}) == "<bos>[system] d [user] c [assistant]"
    assert own == [{"role": "system", "content": "d"}, {"role": "user", "content": "c"}]
    assert chat({"messages": own}, external_prompts="e") == "<bos>[system] d [user] e [assistant]"
    assert chat_formatter(tokenizer, user=lambda item: item["x"] * 2)({"x": "a"}) == "<bos>[user] aa [assistant]"


def test_chat_formatter_is_a_formatter_that_gets_external_prompts():
    wrapped, = build_formatters(chat_formatter(word_tokenizer()), 1)
    assert wrapped({"prompt": "a"}) == "<bos>[user] a [assistant]"
    assert wrapped({"prompt": "a"}, external_prompts="b") == "<bos>[user] b [assistant]"
    assert encode_prompt(word_tokenizer(), wrapped({"prompt": "a"})).token_ids == (1, 12, 4, 14)


def test_chat_without_template_or_text_is_refused():
    tokenizer = word_tokenizer()
    with pytest.raises(ValueError, match=r"item\['messages'\] or a user text from 'q', got None from an item with \['prompt'\]"):
        chat_formatter(tokenizer, user="q")({"prompt": "a"})
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat_template"):
        chat_formatter(tokenizer)
