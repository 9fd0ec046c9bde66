"""An LLM inference engine whose core knows no hardware."""

__version__ = "0.1.0"
