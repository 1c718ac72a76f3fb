"""Runs JAX's own tests cast, and what fails so plain, and lists what only passes plain: see `--help`.

The tests are not a part of jamp, and nothing is fetched: they come from a checkout of JAX at the installed version.
    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax ../jax
    python -m tools.jax_tests ../jax/tests --rebuild
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.jax_tests.excluded import EXCLUDED

FILES = """
lax_control_flow_test custom_api_test custom_root_test custom_linear_solve_test api_test nn_test shard_map_test
debugging_primitives_test state_test mutable_array_test jaxpr_effects_test python_callback_test jet_test hijax_test
batching_test experimental_rnn_test checkify_test generated_fun_test stax_test optimizers_test ode_test
""".split()
POLICY = "O2:bfloat16,full=['*']"
PASSED = ("passed", "skipped")


def run_file(path: Path, log: Path, env: dict[str, str], timeout: float) -> None:
    """Runs the tests of one file, each once, in as many processes as it takes to get past those that crash or hang."""
    env = {**os.environ, **env, "JAX_TESTS_LOG": str(log)}
    command = [sys.executable, "-m", "pytest", "-q", str(path), "-c", "/dev/null", "--rootdir", str(path.parent)]
    command += ["-p", "tools.jax_tests.plugin", "-p", "no:cacheprovider", "--import-mode=importlib", "--no-header"]
    while True:
        before = len(read(log))
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        outcome = watch(process, log, timeout)
        started = [name for name, entry in read(log).items() if entry["outcome"] == "started"]
        for name in started:
            append(log, test=name, outcome=outcome)
        if not started or len(read(log)) == before:
            return


def watch(process: subprocess.Popen[bytes], log: Path, timeout: float) -> str:
    """Waits for a process that writes to a log, and ends it if it writes nothing for too long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        if log.exists() and log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        if time.monotonic() - since > timeout:
            process.kill()
            process.wait()
            return "timeout"
    return "crash"


def read(log: Path) -> dict[str, dict[str, Any]]:
    """The last that a log says of each test."""
    lines = log.read_text().splitlines() if log.exists() else []
    entries = map(json.loads, lines)
    return {entry["test"]: entry for entry in entries}


def append(log: Path, **entry: Any) -> None:
    """Adds a line to a log."""
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def compare(plain: dict[str, Any], cast: dict[str, Any]) -> dict[str, Any]:
    """By test that passes plain and not cast: what it did cast."""
    return {name: entry for name, entry in cast.items() if plain.get(name, {}).get("outcome") == "passed"}


def excluded(name: str) -> bool:
    """Whether a test looks at what a cast changes on purpose."""
    return any(fnmatch.fnmatchcase(name, glob) for globs in EXCLUDED.values() for glob in globs.split())


def main() -> int:
    """Runs, compares, prints."""
    parser = argparse.ArgumentParser(prog="python -m tools.jax_tests", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder `tests` of a checkout of JAX at the installed version")
    parser.add_argument("--files", nargs="*", default=FILES, help="names of files, without .py")
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--wrap", nargs="*", default=["jit"], help="functions of `jax` whose argument is cast")
    parser.add_argument("--rebuild", action="store_true", help="rebuild also what jamp would leave as it is")
    parser.add_argument("--timeout", type=float, default=120, help="seconds without a result before a test is ended")
    parser.add_argument("--devices", type=int, default=8, help="number of CPU devices")
    parser.add_argument("--logs", type=Path, default=Path("jax-tests-logs"), help="plain results there are used again")
    parser.add_argument("--report", action="store_true", help="run nothing, and read the logs of the last time")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    common = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_TESTS_SOURCE": str(args.folder.parent / "jax" / "_src"),
    }
    cast_env = common | {
        "JAX_TESTS_POLICY": args.policy,
        "JAX_TESTS_WRAP": " ".join(args.wrap),
        "JAX_TESTS_REBUILD": str(int(args.rebuild)),
    }
    passing, failures, empty = 0, {}, []
    for name in args.files:
        plain_log, cast_log = args.logs / f"{name}.plain.jsonl", args.logs / f"{name}.cast.jsonl"
        began = time.monotonic()
        if not args.report:
            cast_log.unlink(missing_ok=True)
            run_file(args.folder / f"{name}.py", cast_log, cast_env, args.timeout)
        cast = read(cast_log)
        if not cast:
            print(f"{name}: no test was run. See: python -m pytest {args.folder / name}.py")
            empty.append(name)
            continue
        failed = {test for test, entry in cast.items() if entry["outcome"] not in PASSED}
        if not args.report and failed - read(plain_log).keys():  # What passes cast has no need to be run plain.
            args.logs.joinpath("only.json").write_text(json.dumps(sorted(failed)))
            only = {"JAX_TESTS_ONLY": str(args.logs / "only.json")}
            run_file(args.folder / f"{name}.py", plain_log, common | only, args.timeout)
        found = compare(read(plain_log), {test: cast[test] for test in failed})
        passes = sum(entry["outcome"] == "passed" for entry in cast.values())
        passing, failures = passing + passes, failures | found
        seconds = f"{time.monotonic() - began:.0f} s"
        print(f"{name}: {passes} of {len(cast)} pass cast, {len(found)} only plain ({seconds})", flush=True)
    wrong = {name: entry for name, entry in failures.items() if not excluded(name)}
    report(wrong)
    print(f"\n{passing} tests pass cast, {len(wrong)} fail, {len(failures) - len(wrong)} differ as they may")
    return bool(wrong or empty)


def report(failures: dict[str, Any]) -> None:
    """Prints failures by cause, the most frequent first."""
    causes = collections.defaultdict(list)
    for name, entry in failures.items():
        causes[entry.get("error", entry["outcome"]), entry.get("jamp", ""), entry.get("raised", "")].append(name)
    for (error, place, raised), names in sorted(causes.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} x {error} in {place or 'the test'} (raised at {raised})")
        print(f"    {failures[names[0]].get('text', '')[:200]!r}")
        for name in names:
            print(f"  {name}")


if __name__ == "__main__":
    sys.exit(main())
