"""Models to measure precision transforms on: unmodified float32 code of several libraries, in tiny sizes."""

import importlib

from benchmarks.zoo._entries import Entry as Entry

LIBRARIES = ("flax_linen", "flax_linen_cnn", "flax_nnx", "haiku", "equinox", "keras", "diffrax", "plain")


def load() -> tuple[list[Entry], dict[str, str]]:
    """Imports the zoo of every library that is installed.

    Returns:
        The entries in the order of `LIBRARIES`, and for each module that cannot be imported the reason.
    """
    entries: list[Entry] = []
    missing: dict[str, str] = {}
    for library in LIBRARIES:
        try:
            entries += importlib.import_module(f"benchmarks.zoo.{library}").ZOO.entries
        except ImportError as error:
            missing[library] = str(error)
    return entries, missing
