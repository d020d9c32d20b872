PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo docs test slow check format pictures bench bench-quick clean

demo: $(STAMP)
	$(BIN)/vardrop demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -p no:cacheprovider --doctest-modules src experiments

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

pictures: $(STAMP)
	$(BIN)/python -m docs.pictures
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python docs/tutorials/write.py
	$(BIN)/python -m tests.app.report.screenshot
	$(BIN)/vardrop reproduce --page

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py --threads 1 2

bench-quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py --quick

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv
