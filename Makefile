.PHONY: style quality test test-all bench

PYTHON ?= python3

style:  ## Rewrite the sources into the project's style.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

quality:  ## The checks that CI makes, without the tests.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:  ## The fast suite: CPU only.
	$(PYTHON) -m pytest -m "not gpu and not slow" -n 2 -q

test-all:  ## Everything that this machine can run; GPU tests skip themselves without a GPU.
	$(PYTHON) -m pytest

bench:  ## The whole-model benchmark; needs one GPU with 80 GB.
	$(PYTHON) benchmarks/generate.py
