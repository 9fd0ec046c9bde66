"""The contract between the core and every backend wheel; the current major is ``drivetrain_api.v1``."""

__version__ = "0.1.0"
