"""Measurements of jamp. Each folder here is a set of commands, and none of them is part of the package.

`precision` and `steptime` are the two benchmarks, `studies` holds what answers one question each, and `render` writes
what is stored of all of them into the README and the documentation.
"""
