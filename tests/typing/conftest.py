"""What lies here is for type checkers alone: `make types`."""

collect_ignore_glob = ["*.py"]
