# Everything runs in .venv, made from the pinned versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
TRITON := .venv/triton
PACKAGES := -e proto -e "services/reward[server,triton,otel,visual,gradients]" -e "services/trainer[embedded,kubernetes]" -e "toyworld[model,pack]"

.PHONY: setup demo test test-deploy fuzz lint bench clean

setup: $(STAMP)  ## make .venv and install every package of this repository into it

$(STAMP): constraints.txt requirements-dev.txt proto/pyproject.toml $(shell find proto/likeness -name '*.proto') services/reward/pyproject.toml \
          services/trainer/pyproject.toml toyworld/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt $(PACKAGES)
	touch $(STAMP)

demo: setup  ## train the toy world end to end and compare held-out people before and after
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/likeness-trainer demo $(DEMO_ARGS)

# Triton for the tests: its wheel needs a numpy of its own. Without it, those tests are skipped.
$(TRITON)/.complete: requirements-triton.txt
	$(PYTHON) -m venv $(TRITON) && $(TRITON)/bin/pip install --quiet --no-deps --requirement requirements-triton.txt && touch $@ \
		|| echo "cannot install Triton from requirements-triton.txt: its tests will be skipped"

test: setup $(TRITON)/.complete  ## run every test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest $(TEST_ARGS)

test-deploy: setup $(TRITON)/.complete  ## images and compositions for real, the chart, and submit; root without a Docker engine starts one
	LIKENESS_DEPLOY=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest tests/deploy tests/trainer/launch $(TEST_ARGS)

fuzz: setup  ## 200,000 changed messages, streams and images, and 20,000 changed videos, against a real server
	LIKENESS_FUZZ_EXAMPLES=$${LIKENESS_FUZZ_EXAMPLES:-100000} OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 7200 tests/reward/faults/test_abuse.py -k changed

lint: setup  ## style, types and the contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python proto/lint.py

bench: setup $(TRITON)/.complete  ## ratios measured side by side in one run
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/reward_speed.py
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONPATH=tests/reward/triton $(BIN)/python benchmarks/triton.py

clean:  ## remove what setup made
	rm -rf .venv
