# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index: they build .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   ?= configs/demo.yaml
DEMO_RUN ?= runs/demo

# One thread per process: the networks of the default tasks are small, and idle OpenMP threads cost more than they bring.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint install clean help

help:
	@echo "make demo     install, then fine-tune the digit generator and write a report (about 5 minutes after installation)"
	@echo "make test     install, then run the tests"
	@echo "make lint     install, then ruff and mypy"
	@echo "make install  only the virtual environment in $(VENV)"
	@echo "make clean    remove $(VENV) and build files (runs/ and caches of trained models stay)"

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "genrl needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing genrl and what it needs into $(VENV): a few minutes, about 6 GB, most of it torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,ocr,diffusers]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/genrl train $(DEMO) run_dir=$(DEMO_RUN)
	@echo "Report, with samples before and after: $(CURDIR)/$(DEMO_RUN)/report.html"

test: export HF_HUB_OFFLINE = 1
test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
