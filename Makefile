# Everything runs in the virtual environment .venv, which is made here; nothing else is touched. A stamp file remembers
# what is installed, so a second call starts at once unless pyproject.toml has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
DEMO_ARGS ?=

# The install is editable in every case: one package, never older than the sources beside it.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet --editable

.DEFAULT_GOAL := help
.PHONY: help demo test lint typecheck format clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  make \1	\2/'
	@echo '  Variables: PYTHON (3.11 or newer, default python3), DEMO_ARGS, PYTEST_ARGS'

demo: $(VENV)/.installed-demo ## set up, then SmolLM2-135M: dense against SALS on a long prompt
	$(BIN)/python examples/generate.py $(DEMO_ARGS)

test: $(VENV)/.installed-test ## set up, then all tests
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -n auto --dist loadfile $(PYTEST_ARGS)  # one file to a process: models and kernels are shared within one

lint: $(VENV)/.installed-lint ## set up, then ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory typecheck

# mypy does not follow the import hook of an editable install. It gets a tree of links in which `passes` and `kernels`
# stand where they are installed, and is started inside it, so that `sals_compile.passes` means what it means to users.
typecheck: $(VENV)/.installed-lint ## mypy alone
	@rm -rf build/typecheck && mkdir -p build/typecheck/sals_compile
	@cd build/typecheck/sals_compile && ln -s ../../../sals_compile/* ../../../passes ../../../kernels .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p sals_compile

format: $(VENV)/.installed-lint ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and all that was built
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'sals-compile needs Python 3.11 or newer; name one: make PYTHON=python3.11 ...' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-demo: EXTRAS = transformers
$(VENV)/.installed-test: EXTRAS = test,plots
$(VENV)/.installed-lint: EXTRAS = test,plots,dev
$(VENV)/.installed-%: pyproject.toml $(VENV)/.made
	@echo "Installing sals-compile[$(EXTRAS)] into $(VENV); PyTorch makes this take a few minutes the first time"
	$(INSTALL) '.[$(EXTRAS)]'
	@touch $@
