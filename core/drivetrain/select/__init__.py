"""Finding, proving and opening the one backend that was asked for."""
