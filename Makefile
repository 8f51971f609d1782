# Needs Python >= 3.11, make and a package index; everything else goes into $(VENV).
#   make test PYTHON=python3.12 VENV=/tmp/venv      another Python, another place
#   make test ARGS="-k collector -x" JOBS=0         arguments for pytest, which then runs in one process

VENV ?= .venv
# The first of these that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
# Processes that share the tests among them: they wait more than they work.
JOBS ?= 3
BIN := $(VENV)/bin
# Libraries that do not fit beside one another, or are too large for every environment: each the name of an extra, and of its
# tests, tests/interop/test_<name>*.py, which skip where it is not installed. Nobody needs SuperSuit for its view: it is no extra.
INTEROP ?= envpool overcooked rllib supersuit tianshou
# Suites of JAX get a virtual environment of their own beside the other families'.
JAX_FAMILIES = $(patsubst %,tests/families/test_%.py,jax jaxmarl jumanji pgx)
# Tests of envs that no extra brings, or one that `make test` does without; the others of that folder run there.
FAMILIES = $(patsubst %,tests/families/test_%.py,kaggle openspiel other_families textarena vmas)

# Some images for containers set this. Hundreds of programs and workers that tests start would then compile marlvec again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all interop families distributed lint format bench docs soak coverage checklist faults finders findings clean
# Two pip runs in one virtual environment would trip over each other.
.NOTPARALLEL:
.SUFFIXES:

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.stamp-run ## Set up, then the main job: simple_spread in 16 envs, a table and a plot
	$(BIN)/python examples/quickstart.py
	$(BIN)/marlvec rollout simple_spread --num-envs 16 --env-steps 20000 --seed 0 \
		--policy evolve=examples/policies.py:Evolve --policy examples/policies.py:seek --mapping agent_2=seek \
		--connectors "evolve=FlattenObs, NormalizeObs(clip=5), AgentIndicator" --plot demo.png

test: $(VENV)/.stamp-test ## Set up, then the quick tests: two to five minutes on two cores
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: test ## All tests but the soak: the quick ones first, then the slow ones; 12 to 30 minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not soak" $(ARGS)

interop: $(INTEROP:%=.venv-interop/%/.stamp) ## Tests of libraries that get a virtual environment each; INTEROP="envpool" for some
	@for name in $(INTEROP); do echo "marlvec: tests/interop/test_$$name*.py"; \
		.venv-interop/$$name/bin/python -m pytest -n $(JOBS) -m "not soak" tests/interop/test_$$name*.py $(ARGS) || exit 1; done

families: .venv-interop/families/.stamp .venv-interop/jax/.stamp ## Tests of envs that others wrote, in virtual environments of their own
	.venv-interop/families/bin/python -m pytest -n $(JOBS) -m "not soak" $(FAMILIES) $(ARGS)
	.venv-interop/jax/bin/python -m pytest -n $(JOBS) -m "not soak" $(JAX_FAMILIES) $(ARGS)

distributed: .venv-interop/distributed/.stamp ## Tests of marlvec.distributed on Ray, in a virtual environment of its own; 5 minutes
	.venv-interop/distributed/bin/python -m pytest -n 0 -m "not soak" tests/distributed/test_ray.py $(ARGS)

lint: $(VENV)/.stamp-lint ## ruff, mypy --strict and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p marlvec
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.stamp-lint ## Let ruff write the code in its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-run ## Measure against the physical limit; a few minutes on an idle machine
	$(BIN)/python benchmarks/limit.py $(ARGS)

docs: $(VENV)/.stamp-docs ## Build docs/ into site/, and look at it in Chromium where there is one; a fault ends it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml
	@$(BIN)/python -m tests.docs.browser site
	@echo "open site/index.html"

soak: $(VENV)/.stamp-test .venv-interop/distributed/.stamp .venv-interop/overcooked/.stamp ## The long tests: hours of random kills, for a machine that is free
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=10800 $(ARGS)
	.venv-interop/distributed/bin/python -m pytest -n 0 -m soak tests/distributed/test_ray.py
	.venv-interop/overcooked/bin/python -m pytest -n 0 -m soak tests/interop/test_overcooked.py

coverage: $(VENV)/.stamp-test ## All tests but the soak, and which lines they never reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not soak" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

checklist: $(VENV)/.stamp-test ## Which lines of the checklist no passing test covers yet
	$(BIN)/python -m tests.checklist

faults: $(VENV)/.stamp-test ## The catalogue of faults, and the tests that cover each line
	$(BIN)/python -m tests.faults.harness.table

finders: $(VENV)/.stamp-test ## Make the table of injected defects and the tests that find them anew; some minutes
	$(BIN)/python -m tests.defects.finders $(ARGS)

findings: ## Which scripts of findings/ still hold; they install other packages under the temp folder, and need no set-up
	@for script in findings/*.sh; do \
		if PYTHON="$(PYTHON)" bash $$script > /dev/null 2>&1; then echo "holds     $$script"; else echo "CHANGED   $$script"; fi; done

clean: ## Remove what the other targets made
	rm -rf $(VENV) .venv-interop site dist build demo.png htmlcov .coverage .coverage.* .checklist.json \
		.hypothesis .pytest_cache .mypy_cache .ruff_cache
	find marlvec connectors tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: a second `make test` installs nothing, a changed pyproject.toml installs again.
$(VENV)/.stamp-run: EXTRAS = plot
$(VENV)/.stamp-test: EXTRAS = test,plot,video,native,external,classic,butterfly,sisl,atari,box2d,lbf,rware
$(VENV)/.stamp-lint: EXTRAS = lint,plot,test,external
$(VENV)/.stamp-docs: EXTRAS = docs

$(VENV)/.stamp-%: pyproject.toml $(VENV)/.stamp-venv
	@echo "marlvec: installing .[$(EXTRAS)] into $(VENV) (once; a minute or so)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

.venv-interop/%/.stamp: EXTRAS = $*,butterfly,classic,native,plot
.venv-interop/rllib/.stamp .venv-interop/tianshou/.stamp: PACKAGES = torch==2.13.0
.venv-interop/supersuit/.stamp: EXTRAS = plot
.venv-interop/supersuit/.stamp: PACKAGES = 'supersuit>=3.11'
.venv-interop/jax/.stamp: EXTRAS = brax,jumanji,pgx,native
.venv-interop/jax/.stamp: PACKAGES = torch==2.13.0
.venv-interop/families/.stamp: EXTRAS = vmas,openspiel,textarena
.venv-interop/families/.stamp: PACKAGES = torch==2.13.0 -r tests/families/requirements.txt
.venv-interop/families/.stamp: tests/families/requirements.txt
# Kaggle's package asks for litellm, transformers and another gymnasium; its games need three small ones.
.venv-interop/families/.stamp: ALONE = kaggle-environments==1.33.2

.venv-interop/%/.stamp: pyproject.toml
	@echo "marlvec: installing .[$(EXTRAS)] into .venv-interop/$* (once; a minute or so)"
	@$(PYTHON) -m venv .venv-interop/$*
	@.venv-interop/$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]' \
		$(PACKAGES) 'pytest>=9.0' 'pytest-xdist>=3.8' 'hypothesis>=6.120'
	@test -z "$(ALONE)" || .venv-interop/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ALONE)
	@touch $@

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "marlvec needs Python 3.11 or newer, and found none: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "marlvec needs Python 3.11 or newer; '$(PYTHON)' is not: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "marlvec: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@
