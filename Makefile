# Every target sets up what it needs in .venv. The only requirements are make and Python 3.11 or newer.
#   make test PIP_ARGS="--extra-index-url URL"   another package index, say for a CPU build of torch
#   make test PYTHON=/path/to/python3.12         another interpreter, where there is no .venv yet

VENV ?= .venv
PY := $(VENV)/bin/python
DEV := $(VENV)/.ready-dev
NB ?= index.ipynb $(sort $(wildcard nbs/*/*.ipynb))
PYTEST_ARGS ?=
LAB_ARGS ?=

export OMP_NUM_THREADS ?= 1
export VENV PYTHON PIP_ARGS
export TOKENIZERS_PARALLELISM ?= false

# Where the home folder cannot be written, what matplotlib, Jupyter and pip keep there goes to .cache.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export HOME := $(CURDIR)/.cache/home
$(shell mkdir -p "$(CURDIR)/.cache/home")
endif

# A complete development environment serves the demo as well.
READY := $(if $(wildcard $(DEV)),$(DEV),$(VENV)/.ready-demo)

# A stamp holds the folder it was made in: an environment that was moved or copied is made anew.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
$(DEV) $(VENV)/.ready-demo: moved
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check test-notebooks test-code test-site lab docs nb nb-slow smollm readme sync clean moved

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready-%: pyproject.toml constraints.txt tools/setup_env.sh
	@tools/setup_env.sh $*

moved:

demo: $(READY)  ## train a team of tiny language models and draw its learning curve
	@$(VENV)/bin/comlrl-nb demo

test: check test-notebooks test-code  ## everything: rules, notebooks, tests

check: $(DEV)  ## exported code, README and sidebar in step with clean notebooks; no import points up
	@$(PY) tools/check_sync.py
	@$(PY) tools/check_floors.py

test-notebooks: $(DEV)  ## run every notebook
	@$(PY) tools/test_nbs.py

test-code: $(DEV)  ## run the tests in tests/ (two processes; PYTEST_ARGS="-n 0 ..." for one)
	@$(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-site: $(DEV)  ## build the site and look at it with Chromium
	@$(PY) -m pytest -m browser $(PYTEST_ARGS)

lab: $(DEV)  ## open the notebooks in JupyterLab
	@$(PY) -m jupyterlab --ServerApp.root_dir=nbs $(LAB_ARGS)

sync: $(DEV)  ## before a commit: export, clean, write README and sidebar
	@$(PY) -c "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"
	@$(PY) -c "from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()"
	@$(PY) tools/make_sidebar.py
	@$(PY) tools/make_readme.py

nb: $(DEV)  ## run notebooks and store their outputs (NB="..." for some of them)
	@$(PY) tools/exec_nbs.py $(NB)
	@$(PY) -c "from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()"

nb-slow: $(DEV)  ## the same with the cells marked slow
	@$(PY) tools/exec_nbs.py --flags slow $(NB)
	@$(PY) -c "from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()"

readme: $(DEV)  ## write README.md from index.ipynb
	@$(PY) tools/make_readme.py

docs: $(DEV)  ## build the site for reading offline in _docs (needs npm)
	@$(PY) tools/build_docs.py

smollm: $(DEV)  ## a real small language model in models/smollm2-135m-instruct
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt gguf accelerate
	@$(PY) tools/get_smollm.py

clean:  ## remove what can be built again, but not .venv
	@rm -rf _docs _proc build dist .cache/docs *.egg-info
