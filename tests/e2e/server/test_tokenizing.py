"""/tokenize and /detokenize with a real tokenizer: ids and conversations are those of Transformers."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from drivetrain.server.tokenizing import MAX_CHARACTERS
from tests.checkpoints import tiny_checkpoint
from tests.e2e.server.test_http import serving_model

TEXTS = ["", " ", "the quick brown fox", "<|im_end|> and 'then'\n", "the  other\tdog 42!"]
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who was seen <|im_end|>?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving_model(checkpoint, "cpu") as running:
        yield running


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_transformers_and_come_back(server, checkpoint, text, special):
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
    mine = server.client().post("/tokenize", json=body).json()
    assert mine["tokens"] == theirs.encode(text, add_special_tokens=special)
    assert "".join(mine["token_strs"]).endswith(text) and len(mine["token_strs"]) == mine["count"]
    bare = server.client().post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.client().post("/detokenize", json={"tokens": bare}).json() == {"prompt": text}


@pytest.mark.parametrize("prompting", [True, False])
def test_a_conversation_is_that_of_the_template_but_control_tokens_that_users_type_stay_text(
    server, checkpoint, prompting
):
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    tame = [one | {"content": one["content"].replace("<|im_end|>", "")} for one in TALK]
    ask = {"add_generation_prompt": prompting}
    mine = server.client().post("/tokenize", json={"messages": tame} | ask).json()["tokens"]
    assert mine == theirs.apply_chat_template(tame, tokenize=True, return_dict=False, **ask)
    typed = server.client().post("/tokenize", json={"messages": TALK} | ask).json()["tokens"]
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert typed.count(end) == mine.count(end) == 2
    said = server.client().post("/detokenize", json={"tokens": typed, "skip_special_tokens": True}).json()["prompt"]
    assert "who was seen <|im_end|>?" in said


def test_a_text_beyond_the_context_is_counted_and_one_beyond_the_limit_is_refused(server):
    content = server.client().post("/tokenize", json={"prompt": "fox " * 400}).json()
    assert content["count"] > content["max_model_len"] == 256
    assert server.client().post("/tokenize", json={"prompt": "a" * (MAX_CHARACTERS + 1)}).status_code == 400
