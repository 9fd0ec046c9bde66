"""Text to tokens and back, torch-free: tokenizers, chat templates, incremental text, stop strings."""

from drivetrain.tokens.chat import ChatTemplate
from drivetrain.tokens.detokenize import IncrementalDetokenizer
from drivetrain.tokens.load import load_tokenizer
from drivetrain.tokens.stops import StopStrings
from drivetrain.tokens.text import ModelText, load_text
from drivetrain.tokens.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "ModelText",
    "StopStrings",
    "Tokenizer",
    "load_text",
    "load_tokenizer",
]
