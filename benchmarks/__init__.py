"""Measurements of jamp; each module here is a command, and none of them is part of the package."""
