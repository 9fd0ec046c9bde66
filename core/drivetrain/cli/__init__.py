"""The command line: the only place where parts are put together for a user."""
