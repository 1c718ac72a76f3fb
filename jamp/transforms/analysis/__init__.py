"""Passes that read jaxprs and decide nothing: regimes, demand, patterns, recurrences."""
