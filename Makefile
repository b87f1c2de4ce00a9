# make demo: set everything up and run the main job. make test: set everything up and test.
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup

.PHONY: demo test lint bazel clean
.DELETE_ON_ERROR:

demo: $(SETUP)
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/generate.py

test: $(SETUP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bazel: $(SETUP)
	tools/bazel_build $(BIN)/python

$(SETUP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard ffi/*.cc ffi/*.h)
	test -x $(BIN)/python || $$(tools/find_python) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist
