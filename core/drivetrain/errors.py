"""Exceptions that may cross a seam. Each says what is wrong and what the user can do about it."""

from __future__ import annotations


class DrivetrainError(Exception):
    """``message``: what is wrong, naming the culprit. ``fix``: what to do, or empty."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}; {fix}" if fix else message)
        self.message = message
        self.fix = fix


class ConfigError(DrivetrainError):
    """A flag, a configuration key or a combination of them can't be used."""


class DeviceError(DrivetrainError):
    """A backend is missing, broken or unable to run."""


class ModelError(DrivetrainError):
    """A model can't be found or has no family."""


class WeightsError(DrivetrainError):
    """A checkpoint is missing tensors, damaged, or not of the expected shapes."""


class TokenizerError(DrivetrainError):
    """A tokenizer or a chat template is missing or fails."""


class RequestError(DrivetrainError):
    """A request asks for something impossible. ``param``: the field at fault; ``code``: a stable short name."""

    def __init__(self, message: str, *, fix: str = "", param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.param = param
        self.code = code


class StepError(DrivetrainError):
    """A step failed on the device; its requests end, the loop goes on."""


class OverloadedError(DrivetrainError):
    """The server holds all the work it will take. ``retry_after``: seconds after which trying again is sensible."""

    def __init__(self, message: str, *, retry_after: float, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after
