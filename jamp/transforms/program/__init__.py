"""The words that all passes speak: states of values, wants, plans. Nothing here reads a jaxpr as a whole."""
