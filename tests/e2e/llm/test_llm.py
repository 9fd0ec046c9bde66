"""``LLM`` on tiny checkpoints: a loop here, a loop in its own process and Transformers give the same tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from drivetrain.errors import ConfigError, RequestError, TokenizerError
from drivetrain.llm import LLM
from drivetrain.params import SamplingParams
from tests.checkpoints import VOCABULARY, hf_greedy, random_ids, tiny_checkpoint

SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "cache_bytes": 8 << 20}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["inline", "process"])
def llm(request, checkpoint):
    with LLM(str(checkpoint), loop=request.param, **SETTINGS) as opened:
        yield opened


def test_greedy_tokens_are_those_of_transformers(llm, checkpoint):
    prompts = [random_ids(length, seed=length) for length in (3, 17, 40)]
    outputs = llm.generate(prompts, GREEDY)
    assert [list(o.completions[0].token_ids) for o in outputs] == hf_greedy(checkpoint, prompts, 12)
    assert [list(o.prompt_ids) for o in outputs] == prompts
    assert all(o.completions[0].finish_reason == "length" for o in outputs)


def test_text_and_its_tokens_are_one_prompt(llm):
    ids = llm.encode("hello there").tolist()
    by_text, by_ids = llm.generate("hello there", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert by_text.completions == by_ids.completions
    assert by_text.prompt_ids == tuple(ids)


def test_a_stream_joined_is_the_answer(llm):
    text = "".join(delta.text for delta in llm.stream("hello", GREEDY))
    assert text == llm.generate("hello", GREEDY)[0].completions[0].text


def test_a_seed_repeats_samples_in_any_company(llm):
    params = SamplingParams(seed=11, n=3, max_tokens=8, ignore_eos=True, logprobs=2)
    alone = llm.generate([5, 6, 7], params)[0]
    mixed = llm.generate([random_ids(9), [5, 6, 7], random_ids(30)], [GREEDY, params, GREEDY])[1]
    assert [c.token_ids for c in alone.completions] == [c.token_ids for c in mixed.completions]
    assert len({c.token_ids for c in alone.completions}) == 3, "samples of one seed differ"
    for completion in alone.completions:
        assert [r.token for r in completion.logprobs] == list(completion.token_ids)


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    prompt = random_ids(100, seed=77)
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert (first.num_cached, second.num_cached >= 64) == (0, True)
    assert first.completions == second.completions


def test_leaving_a_stream_frees_its_row(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("on", GREEDY)
    deadline = time.monotonic() + 20
    while (figures := (llm.stats().waiting, llm.stats().running)) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)  # a loop in its own process tells its figures when it falls idle
    assert figures == (0, 0)


def test_bad_prompts_are_named_before_anything_runs(llm):
    for prompt, why in (([VOCABULARY], "token id"), ([-1], "token id"), ("x" * 4000, "context"), ([], "no tokens")):
        with pytest.raises(RequestError, match=why):
            llm.generate([prompt, "fine"], GREEDY)
    with pytest.raises(RequestError, match="2 parameters for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])


def test_chat_without_a_template_names_the_way_out(checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    assert settings.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(bare), loop="inline", **SETTINGS) as llm:
        for call in (llm.require_template, lambda: llm.chat([{"role": "user", "content": "hello"}], GREEDY)):
            with pytest.raises(TokenizerError, match="--chat-template"):
                call()


def test_pooled_vectors_are_of_unit_length_and_repeat(llm):
    vectors = llm.pooled([[4, 5, 6], random_ids(20)])
    again = llm.pooled([[4, 5, 6]])
    assert np.allclose([np.linalg.norm(v) for v in vectors], 1.0, atol=1e-5)
    assert np.allclose(vectors[0], again[0], atol=1e-5) and not np.allclose(vectors[0], vectors[1])


def test_chat_equals_the_rendered_prompt(checkpoint, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    with LLM(str(checkpoint), loop="inline", chat_template=str(template), **SETTINGS) as llm:
        answer = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
        rendered = llm.encode("<user>hello<assistant>").tolist()
        streamed = "".join(d.text for d in llm.stream_chat([{"role": "user", "content": "hello"}], GREEDY))
    assert list(answer.prompt_ids)[-len(rendered) + 1 :] == rendered[1:]
    assert answer.completions[0].text == streamed


def test_settings_that_do_not_exist_are_named(checkpoint):
    with pytest.raises(ConfigError, match="max_lenght"):
        LLM(str(checkpoint), max_lenght=3)
    with pytest.raises(ConfigError, match="'process' or 'inline'"):
        LLM(str(checkpoint), loop="thread")


def test_the_module_and_a_loop_in_its_own_process_need_no_torch(checkpoint):
    code = (
        "import sys; from drivetrain.llm import LLM; from drivetrain.params import SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    with LLM({str(checkpoint)!r}, device='cpu', max_model_len=64, cache_bytes=8 << 20) as llm:\n"
        "        answer = llm.generate([3, 4], SamplingParams(max_tokens=4, ignore_eos=True))[0]\n"
        "        print(len(answer.completions[0].token_ids))\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["4", "False"], done.stderr


def test_penalties_bias_and_bad_words_reach_the_device(llm):
    ids = random_ids(9, seed=3)
    plain = llm.generate(ids, GREEDY)[0].completions[0].token_ids
    biased = llm.generate(ids, replace(GREEDY, logit_bias={77: 100.0}))[0].completions[0].token_ids
    assert biased == (77,) * 12
    without = llm.generate(ids, replace(GREEDY, bad_word_ids=((plain[0],),)))[0].completions[0].token_ids
    assert plain[0] not in without
    once = llm.generate(ids, replace(GREEDY, repetition_penalty=100.0, logit_bias={77: 5.0}))[0].completions[0]
    assert len(set(once.token_ids)) == 12


def test_bad_words_are_told_as_text(llm):
    """Letters that a bias makes likely are not said where a bad word is made of them."""
    (letter,) = llm.encode("Q").tolist()[-1:]
    asked = replace(GREEDY, logit_bias={letter: 100.0})
    assert llm.generate("hello", asked)[0].completions[0].text == "Q" * 12
    answer = llm.generate("hello", replace(asked, bad_words=("QQQ",)))[0].completions[0].text
    assert "QQQ" not in answer and answer.startswith("QQ")
    with pytest.raises(RequestError, match="logit_bias names token") as caught:
        llm.generate("hello", replace(GREEDY, logit_bias={VOCABULARY: 1.0}))
    assert caught.value.param == "logit_bias"


def test_a_stop_string_waits_for_the_minimum(llm):
    (letter,) = llm.encode("Q").tolist()[-1:]
    asked = replace(GREEDY, logit_bias={letter: 100.0}, stop=("Q",))
    assert llm.generate("hello", asked)[0].completions[0].text == ""
    held = llm.generate("hello", replace(asked, min_tokens=5))[0].completions[0]
    assert (held.text, held.finish_reason) == ("Q" * 5, "stop")
