"""The real small language model that `make smollm` writes."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models/smollm2-135m-instruct"
sys.path.insert(0, str(ROOT / "tools"))

import get_smollm  # noqa: E402


@pytest.mark.parametrize("broken", ["fetch_gguf", "convert"])
def test_a_broken_run_leaves_nothing_half_made(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise OSError("no network")
    monkeypatch.setattr(get_smollm, "fetch_gguf", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(get_smollm, broken, fail)
    with pytest.raises(OSError, match="no network"):
        get_smollm.make(tmp_path / "models/small")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_incomplete_result_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(get_smollm, "fetch_gguf", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(get_smollm, "convert", lambda gguf, target: target.mkdir())
    with pytest.raises(RuntimeError, match="lacks some of model.safetensors"):
        get_smollm.make(tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
@pytest.mark.skipif(not get_smollm.is_complete(FOLDER), reason="run `make smollm` first")
def test_it_answers_a_question():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    written = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids.input_ids.shape[1]:]
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer(prompt, add_special_tokens=False).input_ids.count(tokenizer.bos_token_id) == 3  # one per message
