# Two commands are enough: `make bench` runs the main job, `make test` the tests.
# Every target sets up .venv first, where that is not done yet.

PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: help setup bench test lint plots reference clean

help:
	@echo "make bench      DDP beside ZeRO-1/2/3 on real text: table, parquet files and figure"
	@echo "make test       the tests"
	@echo "make lint       ruff and mypy"
	@echo "make plots      every figure and the README's table again, from the committed tables"
	@echo "make reference  the committed tables again, on this machine (results/reference/)"
	@echo "make setup      what all of them use: .venv with the pinned versions"

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -c constraints.txt -e ".[dev]"
	@touch .venv/installed

bench: setup
	@code=0; $(RUN) -m zerobench experiment=stages || code=$$?; \
	test $$code -gt 1 || $(RUN) analysis/memory.py results/runs --out results/runs/figures || code=$$?; \
	exit $$code

test: setup
	$(RUN) -m pytest

lint: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

plots: setup
	$(RUN) analysis/memory.py results/reference/cpu/stages --out results/reference/cpu/figures
	$(RUN) analysis/readme.py

reference: setup
	$(RUN) -m zerobench experiment=stages device=cpu world_size=2 results_dir=results/runs/reference
	$(RUN) -m zerobench export results/runs/reference --latest --format parquet --out results/reference/cpu/stages
	$(MAKE) plots

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
