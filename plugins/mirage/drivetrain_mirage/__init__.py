"""An invented accelerator with awkward rules, for tests."""

__version__ = "0.1.0"
