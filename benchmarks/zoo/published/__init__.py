"""Models that others published, unmodified, in tiny sizes with random weights: what jamp was not built on."""
