# Two commands for a fresh machine: `make demo` and `make test`. Everything lives in .venv and models/.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_MODEL := smollm2-135m-instruct
PROMPT ?= Name the capital of France.

.PHONY: demo test test-slow lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo-installed models/$(DEMO_MODEL)/config.json
	$(BIN)/python -m samir_vllm generate "$(PROMPT)" --model $(DEMO_MODEL)

test: $(VENV)/test-installed models/$(DEMO_MODEL)/config.json lint
	$(BIN)/python -m pytest tests -m "not slow"

test-slow: $(VENV)/test-installed $(VENV)/test-slow-tried models/$(DEMO_MODEL)/config.json
	$(BIN)/python -m pytest tests -m slow

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A stamp for each set of extras, remade when the dependencies change.
$(VENV)/demo-installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	touch $@

$(VENV)/test-installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[test,demo,hub,plot,serve]"
	touch $@ $(VENV)/demo-installed

# What may be missing: its tests are then skipped, and say so.
$(VENV)/test-slow-tried: pyproject.toml | $(VENV)/test-installed
	$(BIN)/python -m pip install --quiet --editable ".[test-slow]" || echo "lm-eval can't be installed"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

models/$(DEMO_MODEL)/config.json: | $(VENV)/demo-installed
	$(BIN)/python -m samir_vllm pull $(DEMO_MODEL)

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
