"""Looks for infinities and NaN in a program that runs: inside of `jit`, at next to no cost while there are none."""
