PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin
CONSTRAINTS = constraints.txt
ifneq ($(VERSIONS),)
VENV := $(VENV)-$(VERSIONS)
CONSTRAINTS = $(VENV)/constraints.txt
# The tests that depend most on PyTorch and Ray.
SELECTED = $(addprefix tests/unit/,_internal cluster comm torch train) \
	$(patsubst %,tests/distributed/test_%.py,elastic failures shares state tensorflow tune)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test vary soak check docs bench dist clean
# Two parallel runs of pip would break the environment.
.NOTPARALLEL:
# Without bytecode files, each worker compiles its imports again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

help: ## List these targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-14s%s\n", $$1, $$2}'
	@echo
	@echo "Variables: ARGS (for demo, test, vary, soak, bench), VERSIONS (for test: oldest, newest), PYTHON (3.11 to 3.13; $(PYTHON)), VENV ($(VENV))"

demo: $(VENV)/.demo-stamp ## Train a model on handwritten digits with two workers
	$(BIN)/python examples/digits.py $(ARGS)

test: $(VENV)/.test-stamp ## Run the tests on all cores; ARGS="-k name" selects some
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 $(SELECTED) $(ARGS)

vary: $(VENV)/.test-stamp ## Run tests in another environment; ARGS="2 tests/unit" selects both
	$(BIN)/python -m tests.variations $(ARGS)

soak: $(VENV)/.test-stamp ## Look for rare failures; ARGS="--minutes 120" says for how long
	$(BIN)/python -m tests.soak $(ARGS)

check: $(VENV)/.test-stamp ## Check lint, format, spelling, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.docs-stamp ## Build the documentation into docs/_build
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build
	@echo "docs/_build/index.html"

bench: ## Time raysgd beside plain DDP, Ray Train, Lightning and Accelerate
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench $(VENV)-bench/.bench-stamp
	$(VENV)-bench/bin/python examples/benchmarks/all.py $(ARGS)

# The version of setuptools that builds the package comes from constraints.txt, too.
dist: $(VENV)/.dist-stamp ## Build the sdist and the wheel into dist, check both, and try the wheel
	rm -rf dist
	PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	.ci/try-wheel $(BIN)/python dist/*.whl

clean: ## Remove caches and build outputs; the environment stays
	rm -rf build dist docs/_build docs/api *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find raysgd operators examples tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Each environment gets raysgd with these extras, and these dependency groups of pyproject.toml.
$(VENV)/.demo-stamp: EXTRAS = torch
$(VENV)/.demo-stamp: GROUPS = examples
$(VENV)/.test-stamp: EXTRAS = all
$(VENV)/.test-stamp: GROUPS = test
$(VENV)/.docs-stamp: EXTRAS = all
$(VENV)/.docs-stamp: GROUPS = docs
$(VENV)/.bench-stamp: EXTRAS = all
$(VENV)/.bench-stamp: GROUPS = bench
$(VENV)/.dist-stamp: GROUPS = dist

# Python compiles a module at its first import. Most installed modules are never imported.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)

define INSTALL_HOROVOD
	@wheel=$$(.ci/horovod-wheel $(BIN)/python $(HOROVOD)); status=$$?; \
	case $$status in \
		0) $(INSTALL) --no-deps "$$wheel" ;; \
		3) echo "Horovod is not installed. The tests that need it are skipped." ;; \
		*) exit $$status ;; \
	esac
endef
HOROVOD = $(shell sed -n 's/^horovod==//p' constraints.txt)

# tensorflow-cpu exists only for Linux on x86_64. Elsewhere, tensorflow is for CPUs anyway.
TENSORFLOW := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && echo tensorflow-cpu || echo tensorflow)
ifeq ($(VERSIONS),)
$(VENV)/.test-stamp: BESIDE = $(TENSORFLOW) wheel
$(VENV)/.test-stamp: AND_THEN = $(INSTALL_HOROVOD)
$(VENV)/.test-stamp: .ci/horovod-wheel
else
$(VENV)/.test-stamp: BESIDE = $(shell sed -n 's/^tensorflow==.*/tensorflow/p' tests/versions/requirements-$(VERSIONS).txt)
$(VENV)/.test-stamp: $(CONSTRAINTS)
# The versions in tests/versions replace those in constraints.txt.
$(CONSTRAINTS): tests/versions/requirements-$(VERSIONS).txt constraints.txt | $(BIN)/pip
	@awk -F== 'NR == FNR { new[$$1] } NR == FNR || !($$1 in new)' $^ > $@
endif

# The pip of Python 3.11 does not know --group.
$(VENV)/.%-stamp: pyproject.toml setup.py constraints.txt | $(BIN)/pip
	@echo "Installing what make $* needs into $(VENV): once, a minute or more"
	$(INSTALL) pip
	$(INSTALL) $(if $(EXTRAS),-e ".[$(EXTRAS)]") --group $(GROUPS) $(BESIDE)
	$(AND_THEN)
	@touch $@

# Depend on bin/pip: without ensurepip, venv creates bin/python and fails.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
