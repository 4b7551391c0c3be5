# Two commands do everything: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The PyTorch that was tried.
TORCH ?= torch==2.13.0
DEMO := .demo

# Without its bytecode each of the thousands of commands that tests start would compile hpml again, and
# each of pytest's workers all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-monitoring test test-long lint system horovod bench docs viewer dist clean

help:
	@echo 'make demo             install, train a real model through the local backend, print the report'
	@echo 'make demo-monitoring  a cluster with simulated GPUs, Prometheus, jobs and live dashboards, until Ctrl-C'
	@echo 'make test             install what tests need (Debian packages too, when root) and run them all'
	@echo 'make test-long        the full kill counts, soaks and repeats'
	@echo 'make horovod          build Horovod (minutes, once) and install it for the tests'
	@echo 'make bench            the benchmarks, as ratios against named peers'
	@echo 'make viewer           build the dashboard viewer anew from dashboards/viewer (needs npm, 500 MB)'
	@echo 'make dist             the wheel and the source archive of a release'
	@echo 'make docs             write the manual pages and the command reference anew from the commands'

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'hpml needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  { echo 'python3 has no venv module: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# uv knows PyTorch's own index, and takes the build for this machine's driver: without one, that for CPUs.
$(VENV)/.train: pyproject.toml | $(BIN)/pip
	@echo "make: installing $(TORCH) from PyTorch's own index: without an NVIDIA driver its CPU build, 200 MB"
	@{ $(BIN)/pip install --quiet --disable-pip-version-check uv && UV_HTTP_RETRIES=0 \
	  $(BIN)/uv pip install --python $(BIN)/python --torch-backend=auto '$(TORCH)'; } || { \
	  echo "make: that index did not help: installing what pip finds; PyPI's CUDA build is 3 GB, and 5 GB on disk"; \
	  $(BIN)/pip install --disable-pip-version-check --progress-bar off '$(TORCH)' | grep -v '^Requirement already'; \
	  $(BIN)/python -c 'import torch'; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[train,sweep]'
	@touch $@

# The wheel of urllib3-future, which grafana-client needs, adds 20 ms to every start of this Python; its source package does not.
$(VENV)/.dev: pyproject.toml $(VENV)/.train
	URLLIB3_NO_OVERRIDE=1 $(BIN)/pip install --quiet --disable-pip-version-check --no-binary urllib3-future -e '.[train,sweep,dev]'
	@touch $@

# The copyable files are copied, as a user would, and run from there.
demo: $(VENV)/.train
	@rm -rf $(DEMO)
	@$(BIN)/hpml new images $(DEMO) >/dev/null
	$(BIN)/python $(DEMO)/make_digits.py $(DEMO)/digits
	$(BIN)/hpml run $(DEMO)/digits.yaml --local --set environment.venv=$(CURDIR)/$(VENV)
	@printf '\nnext:\n'; printf '  %-28s %s\n' '$(BIN)/hpml report last' 'what held the run back, and what to change' \
	  '$(BIN)/hpml show last' 'this summary again' '$(BIN)/hpml list' 'all runs, the newest first' \
	  docs/tutorial.md 'how to write a job file of your own'

# As root on Debian it installs Slurm, Prometheus and gcc; otherwise it does with what is there, and says what is missing.
demo-monitoring: $(VENV)/.train
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[train,sweep,export]'
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  deploy/devcluster/devcluster install && deploy/prometheus/install.sh && \
	  { command -v gcc >/dev/null || apt-get install -y -qq gcc libc6-dev; }; fi
	@$(BIN)/python -m deploy.demo.monitoring

# Real Slurm, MariaDB, Prometheus, Open MPI, Chromium, compilers, strace, archivers and readers of manual pages for the tests, from
# Debian's packages; without root they skip, loudly.
system: | $(BIN)/pip
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  deploy/devcluster/devcluster install && deploy/prometheus/install.sh && \
	  { command -v strace >/dev/null && command -v git >/dev/null && command -v tmux >/dev/null && \
	    command -v man >/dev/null && command -v groff >/dev/null && command -v mandoc >/dev/null && \
	    command -v mpirun >/dev/null && command -v mpicxx >/dev/null && command -v numactl >/dev/null && \
	    command -v ip >/dev/null && command -v tc >/dev/null && command -v ss >/dev/null && \
	    command -v cmake >/dev/null && command -v gcc >/dev/null && command -v g++ >/dev/null && \
	    command -v tclsh >/dev/null && command -v zstd >/dev/null && command -v zip >/dev/null && command -v unzip >/dev/null && command -v systemd-analyze >/dev/null && command -v chromium >/dev/null && \
	    test -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends \
	      strace git tmux man-db groff mandoc openmpi-bin libopenmpi-dev numactl iproute2 cmake gcc g++ make python3-dev \
	      tcl zstd zip unzip systemd chromium; }; }; \
	else echo 'make: not root: tests that need Debian packages skip if these are not installed'; fi

# Horovod, built once per PyTorch and kept in the user's cache. Where the compilers are missing its tests skip; on CI they fail.
horovod: system $(VENV)/.dev
	@$(BIN)/python deploy/horovod/build_wheel.py --python $(BIN)/python --install || { [ $$? = 69 ] && [ '$(CI)' != true ] && \
	  echo 'make: NO HOROVOD: its tests skip'; }

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# First what shares the machine, then what needs it: ranks that wait spinning starve whatever runs beside them.
# At the end what depends on Python, under the other versions that are here.
test: lint system horovod
	@status=0; $(BIN)/pytest -m 'not slow and not alone' || status=1; \
	$(BIN)/pytest -n0 -m 'alone and not slow' || status=1; tests/pythons || status=1; exit $$status

# All of it, the tests of unchanged tools too, and the main job and its binding on Debian testing's Slurm.
test-long: lint system horovod
	@status=0; export HPML_LONG=1; HPML_TOOLS=1 $(BIN)/pytest -m 'not alone' || status=1; \
	$(BIN)/pytest -n0 -m alone || status=1; tests/pythons || status=1; \
	if [ "$$(id -u)" = 0 ]; then \
	  command -v debootstrap >/dev/null || apt-get install -y -qq debootstrap; \
	  deploy/devcluster/with-suite testing tests/cluster/test_main_job.py tests/cluster/test_binding.py || status=1; \
	else echo 'make: NO NEWER SLURM: not root'; fi; exit $$status

bench: $(VENV)/.dev
	@for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(VENV)/.dev
	$(BIN)/python docs/make_commands.py
	$(BIN)/python docs/fields.py
	$(BIN)/python -m hpml_exporters.app > docs/metrics.md

# Its result is kept in the repository, so that users need no node. The lockfile names no registry.
viewer:
	cd dashboards/viewer && npm ci --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved \
	  && npm run build

# The files of a release: docs/releasing.md has the steps around it.
dist: $(VENV)/.dev
	@test -z "$$(git status --porcelain)" || { echo 'make: commit first: a release is built from a commit' >&2; exit 1; }
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . | tail -1

clean:
	rm -rf $(VENV) $(DEMO) dist build
