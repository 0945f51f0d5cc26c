# The front door: `make quickstart` and `make test` do all their own set-up, at once the second time.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
BEAM := .venv-beam
BEAM_READY := $(BEAM)/.installed
PLAN_READY := $(VENV)/.installed-plan
BROWSER_READY := $(VENV)/.browser

.PHONY: quickstart notebooks recall plan-paper test lint format clean

quickstart: $(READY)
	@$(RUN) -m block_recurrent.prepare --task=python_stdlib
	@$(RUN) -m block_recurrent.train --gin_file=configs/quickstart.gin --workdir=runs/quickstart
	@$(RUN) -m block_recurrent.evaluate runs/quickstart --split=test
	@$(RUN) -m block_recurrent.generate runs/quickstart --prompt='def ' --tokens=400 --temperature=0.7
	@$(RUN) -m block_recurrent.report runs/quickstart

# The quickstart's run, if it is not there yet, and two small recurrences compared, through every notebook.
notebooks: $(READY)
	@$(RUN) -m block_recurrent.prepare --task=python_stdlib
	@$(RUN) -m block_recurrent.train --gin_file=configs/quickstart.gin --workdir=runs/quickstart
	@$(RUN) -m block_recurrent.compare configs/side_by_side/sru.gin configs/side_by_side/lrn.gin --task=python_stdlib \
	  --tokens=307200 --output=runs/notebooks/comparison
	@BR_COMPARISON=../runs/notebooks/comparison BR_RECURRENCES=../runs/notebooks/comparison/lrn-seed0 \
	  BR_RUNS=../runs/notebooks/comparison/sru-seed0:../runs/notebooks/comparison/lrn-seed0 \
	  $(VENV)/bin/jupyter-execute --output='../runs/notebooks/{notebook_name}.ipynb' notebooks/*.ipynb
	@echo 'Executed: runs/notebooks/*.ipynb'

recall: $(READY)
	@$(RUN) -m benchmarks.recall --output=runs/recall

plan-paper: $(PLAN_READY)
	@$(RUN) -m benchmarks.plan_paper

test: lint $(BEAM_READY) $(BROWSER_READY)
	$(RUN) -m pytest -n 2 --dist worksteal

lint: $(READY)
	@$(VENV)/bin/ruff format --check --quiet . || { echo 'run "make format" to lay the code out'; exit 1; }
	@$(VENV)/bin/ruff check --quiet .

format: $(READY)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# The marker is written last, so an interrupted install is done again.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Setting up $(VENV) (about two minutes and 3 GB, once) ...'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	@touch $@

# The TPU compiler, to plan for TPUs on a machine that has none.
$(PLAN_READY): $(READY) requirements-plan.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-plan.txt
	@touch $@

# Apache Beam lives apart: it wants an older protobuf than TensorFlow.
$(BEAM_READY): requirements-beam.txt
	@echo 'Setting up $(BEAM) (half a minute, once) ...'
	@test -x $(BEAM)/bin/python || $(PYTHON) -m venv $(BEAM)
	@$(BEAM)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-beam.txt
	@touch $@

# A browser, in which tests open the report's pages. Tried once: without one, those tests are skipped.
$(BROWSER_READY): | $(READY)
	@for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit; done; \
	test "$$(id -u)" = 0 && command -v apt-get > /dev/null || exit 0; \
	echo 'Installing chromium for the tests of pages (a minute, once) ...'; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ timeout 300 apt-get -qq update; \
	  timeout 600 apt-get -qq install -y --no-install-recommends chromium; } > /dev/null 2>&1 < /dev/null || true
	@touch $@

clean:
	rm -rf $(VENV) $(BEAM) .pytest_cache .ruff_cache
