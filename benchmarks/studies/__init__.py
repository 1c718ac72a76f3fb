"""Studies: each module here is a command that answers one question."""
