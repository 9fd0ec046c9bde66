"""Chat templates: what Transformers renders, in a sandbox with bounds; what users write never becomes control."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import EngineConfig
from drivetrain.errors import RequestError, TokenizerError
from drivetrain.models.source import resolve
from drivetrain.tokens import ChatTemplate, Tokenizer, load_text, load_tokenizer
from drivetrain.tokens import chat as chat_module
from drivetrain.tokens.chat import template_source
from drivetrain.tokens.text import open_text
from tests.checkpoints import TEMPLATE, tiny_checkpoint

TALK = [
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "a dog"},
    {"role": "user", "content": "é"},
]
BUSY = """{%- set ns = namespace(count=0) -%}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] not in roles | default(['user', 'assistant']) %}
    {{- raise_exception('no role ' + message.role) }}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}<|im_start|>{{ message.role }}: {{ message.content.strip() }}<|im_end|>{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{- strftime_now('%Y') | length }}{{ ns.count }}{{ bos_token }}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["é", 1, None, True, "<b>"]}}}]


@pytest.mark.parametrize("source", [TEMPLATE, BUSY])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}])
def test_equal_to_transformers(tiny: Tokenizer, tiny_directory: Path, source: str, options: dict):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(tiny_directory))
    ours = ChatTemplate(source, tiny)
    more = {"add_generation_prompt": True, **options}
    for talk in (TALK, TALK[:1], [{"role": "system", "content": "x"}, *TALK][:2]):
        if source == BUSY and talk[0]["role"] == "system":
            talk = talk[1:]
        text = theirs.apply_chat_template(talk, chat_template=source, tokenize=False, **more)
        assert ours.render(talk, options) == text
        assert ours.encode(talk, options) == theirs(text, add_special_tokens=False).input_ids


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<bos>", "<", "a", "\n", "é", "<|im_"]), max_size=8))
def test_what_users_write_never_becomes_control(tiny: Tokenizer, words: list[str]):
    content = "".join(words)
    template = ChatTemplate(TEMPLATE, tiny)
    plain = template.encode([{"role": "user", "content": "a"}])
    ids = template.encode([{"role": "user", "content": content}])
    assert [i for i in ids if i in tiny.control_ids] == [i for i in plain if i in tiny.control_ids]
    assert template.render([{"role": "user", "content": content}]) == (
        f"<bos><|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_control_in_other_places_stays_text_too(tiny: Tokenizer):
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}{{ extra }}<eos>", tiny)
    ids = template.encode(
        [{"role": "<bos>", "name": "<eos>", "content": [{"type": "text", "text": "<|im_end|>"}]}],
        {"tools": [{"<pad>": "<bos>"}], "extra": "<bos>"},
    )
    assert [i for i in ids if i in tiny.control_ids] == [2] and ids[-1] == 2


def test_a_template_may_refuse(tiny: Tokenizer):
    with pytest.raises(RequestError, match="the chat template refuses these messages: no role judge") as caught:
        ChatTemplate(BUSY, tiny).encode([{"role": "judge", "content": ""}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__name__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_the_sandbox_holds(tiny: Tokenizer, source: str):
    with pytest.raises(RequestError, match="fails on these messages"):
        ChatTemplate(source, tiny).encode(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(99999) %}{{ f2(n) }}{% endfor %}{% endmacro %}"
        "{% macro f2(n) %}{% for i in range(99999) %}{% endfor %}{% endmacro %}{{ f(1) }}",
    ],
)
def test_endless_templates_are_stopped(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch, source: str):
    monkeypatch.setattr(chat_module, "MAX_SECONDS", 0.2)
    before = sys.gettrace()
    with pytest.raises(RequestError, match="was stopped: it takes more than"):
        ChatTemplate(source, tiny).encode(TALK)
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ 999999 * 'ab' * 99 }}",
        "{{ [1] * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 99999999 ** 60 }}",
    ],
)
def test_huge_output_is_stopped(tiny: Tokenizer, source: str):
    with pytest.raises(RequestError, match="was stopped"):
        ChatTemplate(source, tiny).encode(TALK)


def test_faults_in_the_template_are_found_when_it_is_read(tiny: Tokenizer):
    with pytest.raises(TokenizerError, match="mine is not a Jinja2 template"):
        ChatTemplate("{% for %}", tiny, "mine")
    with pytest.raises(TokenizerError, match="are taken"):
        ChatTemplate("a" * (1 << 20) + "b", tiny)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def test_model_text(model: Path):
    text = load_text(EngineConfig(model=str(model)))
    assert text.has_template and text.eos_ids == (2, 4) and text.vocabulary == 293
    assert text.encode("a").dtype == "int32" and text.encode("a")[0] == 1 and len(text.encode("", False)) == 0
    assert text.encode("<eos>", False).tolist() == [2]
    ids = text.chat(TALK)
    assert text.decode(ids).startswith("user\nthe fox")
    assert b"".join(map(text.token_bytes, text.encode("é", False).tolist())) == "é".encode()
    assert text.stops(["a"]).add("bab") == "b"
    assert text.detokenizer(ids, skip_special=False).add([2]) == "<eos>"


def test_other_templates(model: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    source = resolve(str(model))
    mine = open_text(source, chat_template=str(tmp_path / "mine.jinja"))
    assert mine.decode(mine.chat(TALK)) == "[the fox][a dog][é]"
    plain = open_text(source, chat_template="plain")
    assert plain.decode(plain.chat(TALK)) == "User: the fox\nAssistant: a dog\nUser: é\nAssistant:"
    with pytest.raises(TokenizerError, match="can't be read"):
        open_text(source, chat_template=str(tmp_path / "none.jinja"))


def test_a_model_without_a_template(model: Path, tmp_path: Path):
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_text(EngineConfig(model=str(bare)))
    assert not text.has_template
    with pytest.raises(TokenizerError, match="has no chat template; give one with --chat-template FILE"):
        text.chat(TALK)
    (bare / "chat_template.jinja").write_text("own")
    assert load_tokenizer(None, str(bare)).templates == {"default": "own"}
    (bare / "chat_template.jinja").unlink()
    config["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    made = load_tokenizer(None, str(bare))
    assert made.templates == {"default": "d", "tool_use": "t"}
    assert template_source(made, None)[0] == "d"


def test_the_tokenizer_can_be_another_ones(model: Path, real_gguf: Path):
    text = load_text(EngineConfig(model=str(model), tokenizer=str(real_gguf)))
    assert text.vocabulary == 262144 and text.eos_ids == (2, 4, 1)
