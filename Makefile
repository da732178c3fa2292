# The two commands that matter: `make demo` and `make test`.
# Everything runs from ./.venv, which `make venv` builds; `make system` installs Debian's Slurm packages (as root).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOTS ?= /var/tmp/migbatch-roots
# Packages: the virtual environment's place and interpreter on the hosts, a directory of wheels instead of an index,
# further extras of the controller (mysql,postgres), where the packages go.
PREFIX ?= /opt/slurm-migbatch
PACKAGE_PYTHON ?= /usr/bin/python3
WHEELS ?=
EXTRAS ?=
PACKAGES ?= build/packages
# Much of a test's time is Slurm's: more of them run at once than there are processors, each file in one process, those on
# a cluster spread over the run (tests/conftest.py).
PYTEST := $(BIN)/pytest -n $(or $(WORKERS),7) --dist loadfile --no-loadscope-reorder
APT_PACKAGES := slurmctld slurmd slurm-client slurmdbd munge slurm-wlm-basic-plugins lua5.1 lua-posix \
	mariadb-server postgresql strace gcc libc6-dev make python3 python3-venv iproute2 systemd mandoc groff-base

# Each process of a run imports every test: compiled anew, they take longer to import than most of them to run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv system driver compiled demo test test-fast test-all test-engine test-torch lint bench soak kills pyslurm test-matrix test-databases deb rpm clean

help: ## this list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

venv: $(VENV)/.done ## build ./.venv with everything the controller and the tests need

$(VENV)/.done: pyproject.toml setup.py
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || ./.ci/system-packages python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

system: ## install Debian's Slurm packages where they are missing (root)
	@./.ci/system-packages $(APT_PACKAGES)

driver: venv ## compile the simulated NVIDIA driver (also done on first use)
	$(BIN)/python -c 'from slurm_migbatch.testbed.simdriver import build; build()'

# Each process of a run imports every test: compiled by two processes before, not by all of them at the same time.
$(VENV)/.compiled: $(VENV)/.done $(wildcard tests/*.py tests/*/*.py tests/*/*/*.py)
	@printf '%s\n' tests/[a-z]*/ | xargs -n 13 -P 2 $(BIN)/pytest --collect-only -qq -p no:cacheprovider > /dev/null || true
	@touch $@

compiled: $(VENV)/.compiled

demo: venv system ## a private cluster, jobs of three users, and checks of what they got (3 minutes)
	$(BIN)/python -m slurm_migbatch.testbed.demo

lint: venv ## ruff, import contracts, mypy, and the simulated driver without a warning of the compiler
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	$(BIN)/mypy packages/*.py
	$(MAKE) -s -C slurm_migbatch/testbed/driver BUILD=$(CURDIR)/build/lint CFLAGS="-O2 -Werror"

test: venv system compiled ## every test but those that build packages or need a browser, real private Slurm clusters included (WORKERS=n at once)
	$(PYTEST) -m 'not packages and not engine and not torch and not browser and not ruby'

test-fast: venv system compiled ## the tests that need no Slurm, without the slow ones, with few generated examples
	$(BIN)/pytest -n $(or $(WORKERS),4) --dist loadfile --hypothesis-profile=few -m 'not slow and not slurm and not packages and not engine and not torch and not browser and not ruby'

test-all: venv system compiled ## every test with all of its generated examples, packages built and installed, pages in Chromium
	@./.ci/system-packages rpm ruby chromium fonts-dejavu-core
	$(PYTEST) --hypothesis-profile=all -m 'not engine and not torch'

test-engine: venv ## `migbatch profile run --server` on a real serving engine (llama.cpp, random weights, the CPU)
	$(BIN)/pip install --quiet -e '.[engine]'
	$(BIN)/pytest -m engine tests/profiling

test-torch: venv ## elastic trainings with PyTorch, on the GPU if there is one: the same weights after interruptions
	$(BIN)/pip install --quiet -e '.[torch]'
	$(BIN)/pytest -m torch tests/elastic

bench: venv system ## what the filter, the hooks, the reports and the learning cost
	$(BIN)/migbatch bench submit
	$(BIN)/migbatch bench hooks
	$(BIN)/migbatch bench reports
	$(BIN)/migbatch bench learn

soak: venv system ## 500 short jobs of three users on 2 nodes x 4 simulated GPUs, three hostile users beside
	$(BIN)/python -m slurm_migbatch.lab.bench.soak

kills: venv system ## SIGKILL at every system call of the hooks and the agent (an hour)
	$(BIN)/pytest -q tests/node/test_kills.py --kills-every=1 --timeout=0

$(ROOTS)/%/.done: | venv
	@./.ci/system-packages debootstrap
	rm -rf --one-file-system $(ROOTS)/$*
	$(BIN)/migbatch testbed root $* $(ROOTS)/$*
	touch $@

$(ROOTS)/%/.pyslurm: $(ROOTS)/%/.done
	$(BIN)/migbatch testbed pyslurm $(ROOTS)/$*
	touch $@

pyslurm: $(ROOTS)/resolute/.pyslurm ## a root with Slurm 25.11 and pyslurm built for it: pytest -m pyslurm --slurm-root=... (8 minutes)

RELEASES := noble trixie resolute forky # Slurm 23.11, 24.11, 25.11 and 26.05; Debian 12 has 22.05

test-matrix: venv system compiled $(RELEASES:%=$(ROOTS)/%/.done) $(ROOTS)/resolute/.pyslurm ## the tests on a real Slurm, with 22.05, 23.11, 24.11, 25.11 (pyslurm too) and 26.05
	$(PYTEST) -m slurm
	for release in $(RELEASES); do $(PYTEST) -m slurm --slurm-root=$(ROOTS)/$$release || exit; done

test-databases: venv system ## the tests of the record and those on a real Slurm, with MariaDB and with PostgreSQL
	$(PYTEST) -m 'slurm and not packages' --database=mariadb tests/e2e tests/daemon
	$(PYTEST) -m 'not packages' --database=mariadb tests/store
	$(PYTEST) -m 'slurm and not packages' --database=postgresql tests/e2e tests/daemon
	$(PYTEST) -m 'not packages' --database=postgresql tests/store

deb rpm: ## packages of the roles controller, node and login (PREFIX=, PACKAGE_PYTHON=, WHEELS=, EXTRAS=, PACKAGES=)
	$(PYTHON) packages/build.py $@ --prefix "$(PREFIX)" --python "$(PACKAGE_PYTHON)" --wheels "$(WHEELS)" \
		--extras "$(EXTRAS)" --output "$(PACKAGES)"

clean: ## remove what make has built here
	rm -rf $(VENV) build
