# Every target makes what it needs on a machine that has only Python (3.11 or later, with pip) and make.
# PYTHON=/path/to/python chooses the interpreter of a new environment, PYTEST_ARGS goes to pytest.

export JAX_PLATFORMS ?= cpu
# Without bytecode, each of the many processes compiles JAX and the tests anew, which takes longer than to import them.
unexport PYTHONDONTWRITEBYTECODE
# Most of the time goes to compilation, on one core each.
PYTEST_WORKERS ?= -n 2 --dist worksteal
# With these, XLA compiles the tests' many small programs for the CPU twice as fast. jax 0.12 has lost the first, and XLA
# aborts on a flag that it does not know. `make test-newest` runs the same tests as XLA compiles by default.
QUICK_XLA_FLAGS := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
PYTHONS := 3.11 3.12 3.13 3.14
PYTHONS_NEWEST := 3.13 3.12
# The oldest jax that pyproject.toml admits.
OLDEST_JAX := $(shell sed -nE 's/^dependencies = .*"jax>=([0-9.]+)".*/\1/p' pyproject.toml)
# Of `make nightly`: a different one each time, and how many programs are drawn from it.
SEED := $(shell date +%s)
NIGHTLY_EXAMPLES := 20000

.PHONY: help demo test test-newest install-newest test-oldest test-random nightly lint format types docs pictures dist \
    coverage wheel bench bench-static bench-quick jax-tests mutants clean
.SECONDARY:

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: .venv/.installed-examples ## Train on real data at O0 to O3, and print and draw the comparison
	.venv/bin/python examples/digits.py $(ARGS)

test: .venv/.installed-test ## Run the tests, doctests and README code
	@if XLA_FLAGS="$(QUICK_XLA_FLAGS)" .venv/bin/python -c "import jax; jax.devices()" >/dev/null 2>&1; then \
	    export XLA_FLAGS="$(QUICK_XLA_FLAGS)"; \
	fi; \
	.venv/bin/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-newest: install-newest ## The same on the newest jax, where there is a Python 3.12 or later
	@if [ -x .venv-newest/bin/python ]; then .venv-newest/bin/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS); fi

install-newest: ## What `test-newest` needs
	@if [ -x .venv-newest/bin/python ] || tools/find-python $(PYTHONS_NEWEST) >/dev/null; then \
	    $(MAKE) --no-print-directory .venv-newest/.installed-test; \
	else \
	    echo "test-newest: SKIPPED. The newest jax needs Python 3.12 or later, and none is on PATH or under pyenv."; \
	fi

test-oldest: .venv-oldest/.installed-test ## The same on the oldest jax that pyproject.toml admits
	.venv-oldest/bin/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-random: ## Run the random tests alone, thousands of each, from a new seed; SEED=n repeats one
	@echo "make test-random SEED=$(SEED) repeats this."
	JAMP_PROPERTY_SEED=$(SEED) JAMP_PROPERTY_EXAMPLES=$(NIGHTLY_EXAMPLES) $(MAKE) --no-print-directory test \
	    PYTEST_ARGS="-m hypothesis --hypothesis-profile=nightly --hypothesis-seed=$(SEED) $(PYTEST_ARGS)"

nightly: test-random bench-static ## What takes too long for each change
	$(MAKE) --no-print-directory test test-oldest test-newest mutants PYTEST_ARGS="-m 'nightly or not nightly'"

lint: .venv/.installed-dev ## Check style and formatting
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.installed-dev ## Format the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: .venv/.installed-dev ## Check the types of jamp, and of users' programs: all code of the documentation
	.venv/bin/pyright
	.venv/bin/python -m tools.docs_types

docs: .venv/.installed-docs ## Build the documentation into site/, and fail on a broken link or a notebook that fails
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

wheel: .venv/.installed-dev ## Build the wheel, and import it away from the checkout
	rm -rf dist build/wheel
	.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/wheel dist/*.whl
	cd build/wheel && "$(CURDIR)/.venv/bin/python" -c \
	    "import jamp; assert 'build/wheel' in jamp.__file__, jamp.__file__; print(jamp.__version__, jamp.get_policy('auto'))"

pictures: .venv/.installed-examples ## Draw the documentation's diagrams and its chart of memory anew
	.venv/bin/python tools/draw_docs.py

dist: .venv/.installed-dev ## Build the sdist and the wheel into dist/, and check what PyPI will show
	rm -rf dist
	.venv/bin/python -m build
	.venv/bin/python -m twine check --strict dist/*

coverage: .venv/.installed-dev ## Run all tests, and print the share of jamp's lines and branches that they reach
	.venv/bin/python -m pytest $(PYTEST_WORKERS) --cov=jamp --cov-branch --cov-report=term:skip-covered $(PYTEST_ARGS)

bench: .venv/.installed-bench ## Measure jamp beside its peers
	.venv/bin/python -m benchmarks.precision $(ARGS)

bench-static: .venv/.installed-bench ## Measure all models by tracing alone, and fail where one is worse than it was
	.venv/bin/python -m benchmarks.precision --static --rounds 0 --against benchmarks/results/precision.json --strict

bench-quick: .venv/.installed-test ## Measure a few models by tracing alone, and fail where a goal is missed
	.venv/bin/python -m benchmarks.precision --quick --static --rounds 0 --strict

jax-tests: .venv/.installed-test ## Run JAX's own tests, cast without changing a number: JAX=folder of a checkout of that version
	.venv/bin/python -m tools.jax_tests $(JAX)/tests --rebuild $(ARGS)

mutants: .venv/.installed-test ## Change what decides precision in one place at a time, and count how often tests notice
	.venv/bin/python -m tools.mutants $(ARGS)

clean: ## Remove the environments and everything built
	rm -rf .venv .venv-newest .venv-oldest dist build site .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@python="$${PYTHON:-$$(tools/find-python $(PYTHONS))}" && [ -n "$$python" ] || \
	    { echo "jamp needs Python 3.11 or later, and none was found. Name one: make test PYTHON=/path/to/python" >&2; exit 1; }; \
	"$$python" -m venv .venv

.venv-newest/bin/python:
	"$$(tools/find-python $(PYTHONS_NEWEST))" -m venv .venv-newest

.venv-oldest/bin/python:
	"$$(tools/find-python $(PYTHONS))" -m venv .venv-oldest

# Without byte code of all packages, of which few are imported, an installation takes half of the time.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

# One stamp for each set of extras. It is as old as the last installation, so a changed pyproject.toml installs again.
.venv/.installed-%: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install $(PIP_FLAGS) --editable '.[$*]'
	@touch $@

.venv-newest/.installed-%: pyproject.toml | .venv-newest/bin/python
	.venv-newest/bin/python -m pip install $(PIP_FLAGS) --editable '.[$*]'
	@touch $@

.venv-oldest/.installed-test: pyproject.toml | .venv-oldest/bin/python
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --editable '.[test]' \
	    'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)'
	@touch $@
