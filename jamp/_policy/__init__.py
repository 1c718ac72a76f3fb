"""Presets, rules and spellings of policies; `jamp.policy` is what one imports."""
