# The two commands that matter: `make demo` and `make test`.
# Everything runs from ./.venv, which `make venv` builds; the Slurm packages come from `make system` (Debian, as root).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
APT_PACKAGES := slurmctld slurmd slurm-client slurmdbd munge slurm-wlm-basic-plugins \
	lua5.1 lua-posix mariadb-server gcc make python3-venv

.PHONY: help venv system driver demo test test-unit test-slurm lint bench soak test-matrix clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

venv: $(VENV)/.done ## build ./.venv with everything the controller and the tests need

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

system: ## install Debian's Slurm packages where they are missing (root)
	@./.ci/system-packages $(APT_PACKAGES)

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: venv system ## all tests, those on a real Slurm cluster included
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build
