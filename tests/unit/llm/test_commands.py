"""``engine generate`` and ``engine chat`` over a stand-in for ``LLM``."""

from __future__ import annotations

import io
import json
from typing import ClassVar

import numpy as np
import pytest

from drivetrain import llm as llm_module
from drivetrain.cli.main import main
from drivetrain.completing import Completion, RequestOutput
from drivetrain.errors import TokenizerError
from drivetrain.server.assembly import Delta


class StandIn:
    """Answers every prompt with its own text in capitals; ``!`` in a prompt fails."""

    device = "cpu"
    has_template = True
    seen: ClassVar[list] = []

    @classmethod
    def from_config(cls, config, *, loop="process"):
        cls.seen = []
        return cls()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.seen.append("closed")

    def require_template(self):
        if not self.has_template:
            raise TokenizerError("no chat template", fix="give one with --chat-template FILE")

    def generate(self, prompts, params):
        self.seen.append(params)
        outputs = []
        for prompt in prompts:
            failed = "!" in prompt
            completions = tuple(
                Completion(
                    index=index,
                    text="" if failed else prompt.upper(),
                    token_ids=(1,),
                    finish_reason="error" if failed else "stop",
                    error="planted" if failed else "",
                )
                for index in range(params.n)
            )
            outputs.append(RequestOutput(prompt_ids=(7,), completions=completions, num_cached=0))
        return outputs

    def stream(self, prompt, params):
        self.seen.append(params)
        for letter in prompt.upper():
            yield Delta(index=0, text=letter)

    def stream_chat(self, messages, params):
        self.seen.append([dict(m) for m in messages])
        yield from self.stream(messages[-1]["content"], params)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(llm_module, "LLM", StandIn)
    monkeypatch.setattr(StandIn, "has_template", True)


def test_one_prompt_is_printed_as_it_comes(capsys):
    flags = [
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--stop",
        "x",
        "--stop",
        "y",
        "--sampling-seed",
        "9",
        "--seed",
        "4",
    ]
    assert main(["generate", "m", "--prompt", "hello", "--max-tokens", "2k", *flags]) == 0
    assert capsys.readouterr().out == "HELLO\n"
    params = StandIn.seen[0]
    assert (params.temperature, params.top_k, params.stop, params.seed) == (0.5, 3, ("x", "y"), 9)
    assert params.max_tokens == 2048 and StandIn.seen[-1] == "closed"


def test_prompts_of_flags_and_file_become_data(tmp_path, capsys):
    (tmp_path / "prompts").write_text("two\n\nthree\n")
    target = tmp_path / "out.json"
    words = ["generate", "m", "--prompt", "one", "--file", str(tmp_path / "prompts"), "-n", "2", "--json", str(target)]
    assert main(words) == 0
    data = json.loads(target.read_text())
    assert [a["prompt"] for a in data["answers"]] == ["one", "two", "three"]
    assert [c["text"] for c in data["answers"][1]["completions"]] == ["TWO", "TWO"]
    assert "[1, stop] THREE" in capsys.readouterr().out
    assert main(["generate", "m", "--prompt", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["prompt_ids"] == [7], "nothing but JSON is printed"


def test_a_sequence_that_failed_is_the_exit_status(capsys):
    assert main(["generate", "m", "--prompt", "fine", "--prompt", "bad!"]) == 1
    captured = capsys.readouterr()
    assert "planted" in captured.err and "FINE" in captured.out


@pytest.mark.parametrize(
    "words,why",
    [
        (["generate", "m"], "no prompt given"),
        (["generate", "m", "--file", "/nowhere/at/all"], "--file /nowhere/at/all"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "--prompt", "x"], "no model given"),
        (["chat", "m", "--top-p", "0"], "top_p is 0.0"),
    ],
)
def test_bad_flags_are_named_before_a_model_loads(capsys, words, why):
    StandIn.seen = ["untouched"]
    assert main(words) == 2
    assert why in capsys.readouterr().err and StandIn.seen == ["untouched"]


def test_a_conversation_keeps_its_turns(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n/clear\nanew\n\n"))
    assert main(["chat", "m", "--system", "be loud"]) == 0
    talks = [s for s in StandIn.seen if isinstance(s, list)]
    system = {"role": "system", "content": "be loud"}
    assert talks[1] == [
        system,
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "HELLO"},
        {"role": "user", "content": "again"},
    ]
    assert talks[2] == [system, {"role": "user", "content": "anew"}]
    assert "AGAIN" in capsys.readouterr().out


def test_one_question_as_json(capsys):
    assert main(["chat", "m", "--prompt", "hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"][-1] == {"role": "assistant", "content": "HI"}


def test_a_model_without_a_template_says_so(monkeypatch, capsys):
    monkeypatch.setattr(StandIn, "has_template", False)
    assert main(["chat", "m", "--prompt", "hi"]) == 2
    assert "--chat-template" in capsys.readouterr().err
    assert np.array(StandIn.seen).tolist() == ["closed"]


def test_a_template_is_looked_for_before_a_model_loads(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    StandIn.seen = ["untouched"]
    assert main(["chat", str(tmp_path), "--prompt", "hi"]) == 2
    assert "has no chat template" in capsys.readouterr().err and StandIn.seen == ["untouched"]
    assert main(["chat", str(tmp_path), "--prompt", "hi", "--chat-template", "plain"]) == 0
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["chat", str(tmp_path), "--prompt", "hi"]) == 0
