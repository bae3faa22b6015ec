# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index: they build .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FULL   := $(VENV)/.installed-full
DEMO   ?= configs/demo.yaml
DEMO_RUN ?= runs/demo
POLICY_DEMO ?= configs/policies/demo.yaml
POLICY_DEMO_RUN ?= runs/demo_policy
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# One thread per process: the networks of the default tasks are small, and idle OpenMP threads cost more than they bring.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint install clean help

help:
	@echo "make demo     install what it needs, fine-tune the digit generator, train a one-step robot policy, write two"
	@echo "              reports (about 3 minutes after installation)"
	@echo "make test     install everything, then run the tests"
	@echo "make lint     install everything, then ruff and mypy"
	@echo "make install  only the virtual environment in $(VENV), with every extra"
	@echo "make clean    remove $(VENV) and build files (runs/ and caches of trained models stay)"

install: $(FULL)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "genrl needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing genrl and what it needs into $(VENV): a few minutes, about 6 GB, most of it torch"
	@$(PIP) -e ".[ocr,diffusers,metaworld]"
	@touch $(STAMP)

# robomimic's own data set is what our files are checked against; its dependencies are for parts that are not used here.
$(FULL): $(STAMP)
	@echo "Installing every extra for tests and other simulators: a minute more, about 2 GB; needs a C compiler"
	@$(PIP) -e ".[dev,ocr,diffusers,rewards,datasets,robots]"
	@$(PIP) --no-deps robomimic==0.3.0
	@touch $(FULL)

demo: $(STAMP)
	$(BIN)/genrl train $(DEMO) run_dir=$(DEMO_RUN)
	$(BIN)/genrl train $(POLICY_DEMO) run_dir=$(POLICY_DEMO_RUN)
	@echo "Reports:"
	@echo "  generator, samples before and after:  $(CURDIR)/$(DEMO_RUN)/report.html"
	@echo "  policy, success and videos:           $(CURDIR)/$(POLICY_DEMO_RUN)/report.html"

test: export HF_HUB_OFFLINE = 1
test: $(FULL)
	$(BIN)/python -m pytest

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
