# Everything runs in .venv, which the first target that needs it makes. PYTHON chooses the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-fuzz test-npu test-projects test-versions campaign lint docs package clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-13s %s\n", $$1, $$2}'

train: $(VENV)/.stamp ## train the default example over two stages; pass overrides as ARGS="trainer.devices=4"
	OMP_NUM_THREADS=1 $(BIN)/python examples/train.py $(ARGS)

# Three workers: a test has up to four processes of its own, which mostly wait for one another. A file's tests share what
# their fixtures launched, so one worker has them all.
test: $(VENV)/.stamp ## run the tests; pass options as ARGS="-k schedules"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/.stamp ## run what the default tests leave out: more models, sweeps, the benchmark
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-fuzz: $(VENV)/.stamp ## for half an hour, at random: damaged files, arguments of any content, random modules and options
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=long PROGRAMS_FROM=$$(date +%s) OPTIONS_FROM=$$(date +%s) $(BIN)/python -m pytest -m "slow or not slow" tests/fuzz $(ARGS)

test-npu: ## run the tests over a simulated Ascend device, in an environment of their own, where g++ and torch_npu can be had
	@PYTHON=$(PYTHON) tests/npu/run.sh $(ARGS)

test-projects: ## train models of public packages on one and two stages, in environments of their own; ARGS="darts" for one
	@PYTHON=$(PYTHON) tests/projects/run.sh $(ARGS)

test-versions: ## run the tests with the oldest and the newest versions, in environments of their own; ARGS="oldest" for one
	@tests/versions/run.sh $(ARGS)

campaign: $(VENV)/.stamp ## let faults befall small runs, for hours; options as ARGS="--trials 200 --seed 1" (ARGS=-h lists them)
	$(BIN)/python -m tests.campaign $(ARGS)

lint: $(VENV)/.stamp ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.stamp ## build the pages into site/, without a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(VENV)/.stamp ## build the sdist and the wheel into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*

clean: ## remove the environment and caches
	rm -rf $(VENV) .venv-npu .projects .versions build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch comes first and alone: pip then takes a build that it has at hand instead of whatever the extras ask for.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,examples]'
	@touch $@
