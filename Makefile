# make serve      chat with the default model on http://127.0.0.1:8888
# make test       every law at small counts       make test-long   the acceptance counts
# make lint       ruff and mypy                   make clean       remove what make has built
#
# FLAGS="--dp 2 --port 9000" goes to launch.py; TORCH=torch==2.13.0 names the torch to install (a CUDA machine takes
# the one that fits its driver); PYTHON names the interpreter, 3.11 or newer.

PYTHON ?= python3
TORCH ?= torch==2.13.0
FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
PACKAGES := api engine_proc frontend launcher router_proc tokenizer_proc wire $(wildcard hicache kvnet)
CHECKED := launch.py $(PACKAGES) tests $(wildcard serve/*.py bench/*.py)
TESTS := tests/unit tests/pipeline tests/model tests/fault tests/client
# What pip installs, read from pyproject.toml: its dependencies less torch, which TORCH names, or one of its extras.
REQUIREMENTS := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = project["optional-dependencies"]; \
	names = extras[sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"]; \
	print("\n".join(name for name in names if not name.startswith("torch")))

.PHONY: FORCE serve test test-long lint format clean
.DELETE_ON_ERROR:

serve: $(VENV)/.base
	@exec $(BIN)/python launch.py $(FLAGS)

test: $(VENV)/.dev
	@echo "make: model for the tests"
	@$(BIN)/python serve/get_model.py smollm2-135m-instruct
	@echo "make: tests"
	$(BIN)/python -m pytest $(wildcard $(TESTS)) -m "not long and not gpu"

test-long: $(VENV)/.dev
	@$(BIN)/python serve/get_model.py smollm2-135m-instruct
	@echo "make: tests at the acceptance counts"
	$(BIN)/python -m pytest $(wildcard $(TESTS)) -m "not gpu" --timeout 3600

lint: $(VENV)/.dev
	@echo "make: lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@echo "make: virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: $(PYTHON) is too old; 3.11 or newer is needed (PYTHON=...)")'
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) has no venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }

# Which torch was asked for: changed only when another one is.
$(VENV)/torch.txt: FORCE | $(VENV)/bin/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.base: pyproject.toml $(VENV)/torch.txt | $(VENV)/bin/python
	@echo "make: installing $(TORCH) and the libraries (minutes at the first time)"
	@$(BIN)/python -c '$(REQUIREMENTS)' > $(VENV)/base.txt
	@$(PIP) install '$(TORCH)' -r $(VENV)/base.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.base
	@echo "make: installing the tools for tests and lint"
	@$(BIN)/python -c '$(REQUIREMENTS)' dev > $(VENV)/dev.txt
	@$(PIP) install -r $(VENV)/dev.txt
	@touch $@

FORCE:
