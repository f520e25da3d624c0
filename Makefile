# Everything runs in .venv, made from the pinned versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
PACKAGES := -e proto -e "services/reward[server]" -e "services/trainer[embedded]" -e "toyworld[model,pack]"

.PHONY: setup demo test lint bench clean

setup: $(STAMP)  ## make .venv and install every package of this repository into it

$(STAMP): constraints.txt requirements-dev.txt proto/pyproject.toml $(shell find proto/likeness -name '*.proto') services/reward/pyproject.toml \
          services/trainer/pyproject.toml toyworld/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt $(PACKAGES)
	touch $(STAMP)

demo: setup  ## train the toy world end to end and compare held-out people before and after
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/likeness-trainer demo $(DEMO_ARGS)

test: setup  ## run every test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest $(TEST_ARGS)

lint: setup  ## style, types and the contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python proto/lint.py

bench: setup  ## ratios measured side by side in one run
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python benchmarks/run.py

clean:  ## remove what setup made
	rm -rf .venv
