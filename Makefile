# The few verbs of this project. CI calls the same ones.
#
#   make demo        a cluster on this machine, an answer, and where its KV cache came from
#   make oracle      the tests at public seams alone, for each step of a redesign
#   make test        all checks, and beside them all tests, at a fortieth of the stated counts (`make test-long`: all of them)
#   make test-clients  other people's clients of the OpenAI API, unmodified, against `baton up`; in an environment of their own
#   make images      the three images, with docker (IMAGE_REGISTRY, IMAGE_TAG; TORCH_INDEX_URL must be given)
#   make kind        the chart on a kind cluster: clients, load, scaling, upgrades, kills; needs docker, kind and helm
#   make chaos       parts of a real cluster killed, stopped and damaged at random; BATON_TEST_SEED=n replays
#
# Each makes what it needs first: a virtual environment in .venv with everything in it, Redis included.
#
#   PYTHON            which Python makes the environment: 3.11 or 3.12 (others lack wheels of what we need)
#   TORCH_INDEX_URL   where torch comes from. The default index has a CUDA build for Linux; without a GPU
#                     TORCH_INDEX_URL=<the CPU index that PyTorch's install page names> saves 3 GB.
#   TEST_JOBS         processes that share the tests, and the types; 3, one more than two cores: many tests wait.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& echo $$python && break; done)
TORCH_INDEX_URL ?=
TEST_JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS_VENV := .venv-protos
PROTOS_READY := $(PROTOS_VENV)/.ready
CLIENTS_VENV := .venv-clients
CLIENTS_READY := $(CLIENTS_VENV)/.ready

TORCH := $(shell grep '^torch==' constraints.txt)
PACKAGES := baton benchmarks checkpoints engine engine_client kernels/baton_kernels kvstore process services tokens tools
# Several engines share few cores in the tests: one thread each, or they stall one another. And the
# hundreds of processes that they start shall not compile this source each anew, as they do where an
# image asks for that (a CI's, for instance).
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# A file's tests stay in one process: they share what is slow to make. tests/conftest.py has the longest files first.
TEST_OPTIONS := --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
CHECK = $(MAKE) --no-print-directory check TEST_JOBS=0

IMAGE_REGISTRY ?=
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: setup demo test oracle test-long test-clients chaos check protos schema images kind locks bench clean

setup: $(READY)

demo: $(READY)
	$(BIN)/baton demo

# The checks run beside the tests, whose waits leave them a core; what they say comes last.
test: $(READY) $(PROTOS_READY)
	@checks=$$(mktemp); $(CHECK) > $$checks 2>&1 & number=$$!; code=0; \
	trap 'kill $$number 2> /dev/null || true; rm -f $$checks' EXIT; \
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(TEST_OPTIONS) || code=$$?; \
	wait $$number || code=$$?; cat $$checks; exit $$code

oracle: $(READY)
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(TEST_OPTIONS) -m oracle $$(grep -rl --include='test_*.py' 'mark[.]oracle' tests)

test-long: check
	$(TEST_ENVIRONMENT) BATON_TEST_LONG=1 $(BIN)/pytest $(TEST_OPTIONS) -o faulthandler_timeout=2400

test-clients: $(READY) $(CLIENTS_READY)
	$(TEST_ENVIRONMENT) $(CLIENTS_VENV)/bin/pytest -c tests/clients/pytest.ini tests/clients

chaos: $(READY)
	$(TEST_ENVIRONMENT) BATON_TEST_LONG=1 $(BIN)/pytest -o faulthandler_timeout=2400 -v tests/chaos

check: $(READY) $(PROTOS_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers $(TEST_JOBS) $(PACKAGES)
	$(BIN)/lint-imports
	$(PROTOS_VENV)/bin/python tools/gen_protos.py --check

protos: $(PROTOS_READY)
	$(PROTOS_VENV)/bin/python tools/gen_protos.py

# The chart's values.schema.json and docs/settings.md, out of the settings classes.
schema: $(READY)
	$(BIN)/python tools/gen_values_schema.py
	$(BIN)/python tools/gen_settings_docs.py

images:
	@test -n '$(TORCH_INDEX_URL)' || { echo 'give TORCH_INDEX_URL: the CPU index that the install page of PyTorch names' >&2; exit 1; }
	for target in control worker-cpu worker-cuda; do \
		docker build --target $$target --build-arg VERSION=$(IMAGE_TAG) \
			--build-arg REVISION=$$(git rev-parse HEAD) --build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL) \
			--tag $(if $(IMAGE_REGISTRY),$(IMAGE_REGISTRY)/)baton/$$target:$(IMAGE_TAG) .; done

# What the images install, by hash; needs uv.
locks: $(READY)
	$(BIN)/python tools/lock_image_packages.py

kind: $(READY)
	BATON_KIND=1 TORCH_INDEX_URL=$(TORCH_INDEX_URL) $(TEST_ENVIRONMENT) $(BIN)/pytest -v tests/kind

bench: $(READY)
	for benchmark in engine_cpu "stalls joining" "structured_output both" "accuracy kv" "kv_transfer host" "cluster handover"; do \
		$(BIN)/python -m benchmarks.$$benchmark; done

clean:
	rm -rf $(VENV) $(PROTOS_VENV) $(CLIENTS_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# torch first and alone; then everything else, which finds it there. A new pip knows --group.
$(READY): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or 3.12 is needed; name one with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	$(BIN)/python -m pip install -c constraints.txt -e '.[worker,nixl,local]' --group dev
	touch $@

# The generator pins an old protobuf, so it lives apart.
$(PROTOS_READY): Makefile
	$(PYTHON) -m venv $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python -m pip install --quiet 'grpcio-tools==1.66.2' 'setuptools<81'
	touch $@

# The clients may want other versions of what we have, so they live apart. The list is complete: pip need not solve.
$(CLIENTS_READY): tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --no-deps --no-compile --only-binary :all: -r $<
	touch $@
