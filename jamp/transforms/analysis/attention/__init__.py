"""Attention in a jaxpr, however it is written, and what its masks say."""
