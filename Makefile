PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# A file or folder of every package, in under a minute.
QUICK := tests/_core tests/conversion tests/gates tests/heads tests/metrics \
	tests/app/runs/test_scores.py tests/compression/test_shrink.py tests/compression/test_threshold.py \
	tests/experiments/test_runner.py tests/functional/test_distributions.py \
	tests/integrations/test_lightning.py tests/layers/test_goldens.py \
	tests/layers/test_ties.py tests/objective/test_elbo.py tests/objective/test_sharing.py \
	tests/prediction/test_frozen.py tests/prediction/test_function_draws.py tests/tuning/test_train.py \
	tests/test_bad_calls.py tests/test_divergence.py tests/test_likelihoods.py tests/test_noisy.py \
	tests/test_reference.py

.PHONY: demo docs quick smoke matrix dist test slow coverage check format pictures bench bench-quick clean

demo: $(STAMP)
	$(BIN)/vardrop demo

quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK)

smoke: $(STAMP)
	$(BIN)/python tests/smoke.py

# Environments of their own under build/matrix, because each downloads gigabytes of CUDA packages.
matrix:
	$(PYTHON) tests/matrix.py

dist:
	$(PYTHON) tests/distribution.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# An interrupt that comes while coverage holds a lock never ends, so the tests of interrupts are left out.
coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -k "not interrupt" --cov=vardrop --cov-report=term:skip-covered --cov-fail-under=90

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
	rm -rf .venv build
