"""Op lists of other frameworks, in jax's names."""

PRESETS: dict[str, dict[str, tuple[str, ...]]] = {}
