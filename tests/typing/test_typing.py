"""User code passes type checkers in strict mode; each test is left out where its checker is not installed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_code.py")


# optax has no type information of its own.
IGNORED = ("--disable-error-code=import-untyped", f"--cache-dir={os.devnull}")


def check(*command):
    env = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy():
    done = check("mypy", "--strict", "--follow-imports=silent", "--explicit-package-bases", *IGNORED, str(PROGRAM))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright(tmp_path):
    # JAX's own functions are partly unknown to pyright, and optax has no types.
    theirs = {"reportMissingTypeStubs": False, "reportUnknownMemberType": False}
    config = {"include": [PROGRAM.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"} | theirs
    shutil.copy(PROGRAM, tmp_path)  # Pyright looks for programs below its configuration.
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = check("pyright", "-p", str(tmp_path), "--pythonpath", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
