# Everything runs in .venv, which the first target that needs it makes: python3.10 or later suffices.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
DOCS_READY := .venv/ready-docs
# tests and jobs start many processes: each would compile torch's sources anew where this is set
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo example examples test test-all docs links lint format fuzz release clean
setup: $(READY)

# torch by pip and pinned: without the pin, it may fetch gigabytes of CUDA libraries;
# the rest by uv, in a third of pip's time, the tools while torch is unpacked; by pip where only that
# knows an index or a proxy, which shows soon;
# --no-compile: of thousands of modules few are ever imported, and Python compiles those
PIP := $(BIN)/python -m pip install --quiet --no-compile --upgrade -c constraints.txt
UV := UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet -c constraints.txt
REST := -e '.[all]' --group dev pip
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("openrnn needs Python 3.10 or later")'
	$(PYTHON) -m venv .venv
	$(PIP) uv
	$(PIP) --no-deps torch & torch=$$!; $(UV) --group dev; failed=$$?; wait $$torch || exit 1; \
	{ [ $$failed = 0 ] && $(UV) $(REST); } || { $(PIP) pip && $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(REST); }
	touch $@

# a byte-level LSTM on the sources of Python's standard library: under three minutes, no download
demo: $(READY)
	rm -rf runs/demo
	$(BIN)/openrnn train --minutes 2.5 --out runs/demo
	$(BIN)/openrnn sample runs/demo --prompt "class " --length 400

# each under two minutes on a CPU; packages of other libraries go into .venv-examples/NAME
example: $(READY)
	$(BIN)/python examples/run.py $(or $(NAME),$(error say which: make example NAME=recurrent_ppo))

# all that this machine can run: an example is skipped where its packages cannot be installed
examples: $(READY)
	$(BIN)/python examples/run.py

# what decides whether a change lands, but for tests marked as slow; test-all runs these too
test: TESTS = -m 'not slow' --hypothesis-profile landing
# mypy has one thread and runs beside the tests; what it says comes last
test test-all: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy > .venv/types & types=$$!; $(BIN)/pytest -n 2 --dist worksteal $(TESTS); tests=$$?; \
	wait $$types; types=$$?; cat .venv/types; exit $$((tests || types))

# wheel and sdist in dist/, each then installed and tried in a fresh environment
release: $(READY)
	rm -rf dist
	$(PIP) --group release
	$(BIN)/python -m build --installer pip
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/try_release.py dist

# random calls and cells against the reference, e.g. make fuzz FUZZ="--seed 1 --device cuda"
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(FUZZ)

# the site, in docs/_build/html, on Python 3.11 or later; a warning is an error.
# DOCS="-D plot_gallery=0" runs no tutorial
docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees $(DOCS) docs docs/_build/html

# whether the external links of the site can be reached; needs the internet, and runs no tutorial
links: $(DOCS_READY)
	$(BIN)/python -m sphinx -b linkcheck -q -d docs/_build/doctrees-links -D plot_gallery=0 docs docs/_build/links

$(DOCS_READY): $(READY)
	$(PIP) --group docs
	touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-examples .mypy_cache .pytest_cache .ruff_cache .hypothesis dist runs/demo
	rm -rf docs/_build docs/gallery docs/generated
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
