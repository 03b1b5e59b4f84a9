# `make demo` and `make test` build what they need; nothing has to be set up by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint format docs clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("tracekv needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/tracekv demo $(ARGS)

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .hypothesis
