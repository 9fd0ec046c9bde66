"""placeholder until tokens exists"""

from drivetrain.config import EngineConfig
from drivetrain.server.text import Text


def load_text(config: EngineConfig) -> Text:
    raise NotImplementedError
