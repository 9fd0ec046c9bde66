"""Writes gemma3_270m_prompts20.json: what Transformers continues 20 prompts with, in float32.

    python tests/data/make_gemma_golden.py          # minutes; needs transformers and the model's wheel

The model is the packaged Q4_K_M GGUF, dequantized by Transformers itself. Each case holds the prompt's ids (BOS
included), 32 greedy ids (end tokens are not special: the row goes on), and the gap between the two largest logits at
each of them, which says where arithmetic in a smaller format may choose differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OUT = Path(__file__).with_name("gemma3_270m_prompts20.json")
NUM_NEW = 32

STORY = (
    "The harbour was quiet before dawn. A lamp swung over the pier, and {who} counted the crates that had come in "
    "overnight: {a} of salt, {b} of rope, {c} of lemons packed in straw. Nobody had signed for the lemons. The ledger "
    "said that they belonged to a ship that had left a week ago, and the ship's agent, when asked, said that the "
    "ledger was wrong. "
)


def long_story(paragraphs: int) -> str:
    """A text that says nearly the same again and again, so that what lies far back matters."""
    names = ("Marta", "Ivo", "the clerk", "Old Henrik", "Sanne", "the boy", "Dr. Okafor", "nobody")
    parts = [STORY.format(who=names[i % 8], a=3 + i, b=2 * i + 1, c=40 - i) for i in range(paragraphs)]
    return "".join(parts) + "In the end, the lemons"


RECIPE = (
    "Rinse one cup of lentils and cook them in three cups of water for twenty minutes. Meanwhile soften an onion, two "
    "carrots and a stick of celery in olive oil; add a spoon of cumin, salt, and the juice of half a lemon. Drain the "
    "lentils, keep a little of the water, and stir everything together. "
)

PROMPTS = (
    "Hello",
    "The capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: What is 17 + 25?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "昔々、あるところに、おじいさんと",
    "Le chat est assis sur",
    "1, 1, 2, 3, 5, 8, 13,",
    "🎉 Happy birthday! 🎂 I wish you",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "<h1>Weather</h1>\n<p>Today it will be",
    "   Leading spaces, then\ttabs\t and  double  spaces. The next word is",
    "Столица России —",
    "Water boils at 100 degrees Celsius, which is 212 degrees",
    "Shopping list:\n- eggs\n- milk\n- bread\n-",
    "SELECT name, count(*) FROM orders JOIN customers ON orders.customer_id = customers.id WHERE",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and arrows of",
    RECIPE * 4 + "Serve it with",
    long_story(9),
    long_story(14),
)


def load(path: Path) -> tuple[transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel]:
    """Tokenizer and float32 model, both by Transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
        attn_implementation="eager",
    )
    with torch.no_grad():  # the dense copy that is served and compared is bfloat16, computed with in float32
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return tokenizer, model.eval()


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> tuple[list[int], list[float]]:
    """(NUM_NEW greedy ids, the gaps between the two largest logits)."""
    found: list[int] = []
    gaps: list[float] = []
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    while True:
        best = out.logits[0, -1].float().topk(2)
        found.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
        if len(found) == NUM_NEW:
            return found, gaps
        out = model(torch.tensor([[found[-1]]]), past_key_values=out.past_key_values, use_cache=True)


def main() -> None:
    from tests.real_model import assembled

    tokenizer, model = load(assembled())
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        found, gaps = greedy(model, ids)
        cases.append({"prompt": prompt, "prompt_ids": ids, "out_ids": found, "top1_top2_gap": gaps})
        print(f"{len(ids):4} tokens, smallest gap {min(gaps):.4f}: {tokenizer.decode(found)!r}", flush=True)
    about = (
        "gemma-3-270m base, dequantized from the packaged Q4_K_M GGUF to bfloat16, run in float32, eager attention, "
        f"Transformers {transformers.__version__}, torch {torch.__version__}; by make_gemma_golden.py"
    )
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{"model": {json.dumps(about)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
