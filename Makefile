# The commands of a working day. Everything they need beyond Rust, Python and a C compiler is installed
# into .venv by `make venv`, which the others call.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Stamp files: what they stand for was done after everything they depend on last changed.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built

# Another torch than that of requirements.txt, with what the tests need, in an environment of its own.
TORCH ?= 2.10.0
OTHER := .venv-torch-$(TORCH)
TESTS ?= tests

# The wheel of this tree, as users get it; .venv and other torches install it.
WHEEL_BUILT := dist/.built

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name 'Cargo.toml') Cargo.toml
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi')

# PyO3 asks this interpreter about its ABI, so that `cargo` and `maturin` build the binding alike.
export PYO3_PYTHON := $(abspath $(BIN)/python)

.PHONY: help venv demo test test-rust test-python differential sanitize install-torch test-torch examples gpu wheel lint lint-rust lint-python format docs clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(BUILT) ## Make .venv with memfit, the examples' libraries and the tools

demo: venv ## Fit GPT-2 small into half its memory and compare real steps
	$(BIN)/memfit verify examples/gpt2.py:build --budget 50%

test: test-rust test-python ## Run all tests

# The allocator's tests compare with the one in the installed torch.
test-rust: $(INSTALLED)
	cargo test --workspace --quiet

# Two processes of one thread each: two threads would mostly wait for each other on small tensors.
WORKERS := --numprocesses 2 --dist loadfile

test-python: venv
	$(BIN)/python -m pytest $(WORKERS)

# A third of them run with all other tests.
differential: venv ## Compare planned with unplanned steps: every model, change and plan
	MEMFIT_DIFFERENTIAL=all $(BIN)/python -m pytest --numprocesses 2 tests/differential

# In folders of its own, since all is compiled in another way.
sanitize: ## Run the tests of what lends, stores and parks memory under AddressSanitizer (needs a nightly Rust)
	RUSTFLAGS=-Zsanitizer=address cargo +nightly test -p memfit-memory --quiet \
	    --target "$$(rustc -vV | sed -n 's/^host: //p')" --target-dir target/sanitized

install-torch: $(OTHER)/.installed # What test-torch needs, without memfit.

test-torch: $(OTHER)/.memfit ## Run the Python tests against another torch: make test-torch TORCH=2.12.1
	$(OTHER)/bin/python -m pytest $(WORKERS) $(TESTS)

examples: venv ## Verify all examples at three budgets and write the table of results
	$(BIN)/python benchmarks/examples.py

wheel: $(WHEEL_BUILT) ## Build the wheel into dist/ and check what it asks of a system
	@$(BIN)/auditwheel show dist/memfit-*.whl | grep 'platform tag: "manylinux_2_28_' || { \
	    echo 'the wheel asks for a newer system than its name says:' >&2; \
	    $(BIN)/auditwheel show dist/memfit-*.whl >&2; exit 1; \
	}

# Depends on nothing: the machine has its own torch, and no way to fetch anything.
gpu: ## Prove what only a GPU can (WHEEL=, PIECES=, OUT=, MINUTES=, DEVICE=; benchmarks/gpu/README.md)
	@python3 -m benchmarks.gpu $(PIECES) --wheel $(or $(WHEEL),newest) --device $(or $(DEVICE),cuda) \
	    --minutes $(or $(MINUTES),8) $(if $(OUT),--out $(OUT)) $(if $(MODELS),--models $(MODELS))

lint: lint-rust lint-python ## Check format, lints, types, the stub, the Rust documentation

lint-rust: $(CREATED)
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet

lint-python: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/stubtest memfit._native

format: venv ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

docs: venv ## Write the pages and the types that are made from the program
	MEMFIT_WRITE_DOCS=1 $(BIN)/python -m pytest --quiet tests/docs -k command_line_reference
	$(BIN)/python tests/schema/python_types.py --write

clean: ## Remove .venv and build outputs
	rm -rf $(VENV) target python/memfit/*.so

$(CREATED):
	@python=''; \
	for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then echo 'memfit needs Python 3.11 or later' >&2; exit 1; fi; \
	if [ ! -x $(BIN)/pip ]; then \
	    $$python -m venv $(VENV) || { \
	        rm -rf $(VENV); \
	        $$python -m venv --without-pip $(VENV) && \
	        $$python -m pip --python $(BIN)/python install pip; \
	    } || { \
	        rm -rf $(VENV); \
	        echo 'cannot make a virtual environment; on Debian: apt install python3-venv' >&2; \
	        exit 1; \
	    }; \
	fi
	@touch $@

$(INSTALLED): requirements.txt $(CREATED)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@touch $@

# zig links it against the glibc that torch's own wheels ask for (manylinux_2_28), whatever is installed here.
$(WHEEL_BUILT): pyproject.toml $(RUST_SOURCES) $(PYTHON_SOURCES) $(INSTALLED)
	@mkdir -p $(@D) && rm -f $(@D)/memfit-*.whl && touch $@.begun
	PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV=$(abspath $(VENV)) \
	    $(BIN)/maturin build --release --zig --compatibility manylinux_2_28 --quiet --out $(@D)
	@mv $@.begun $@  # What changes while it builds is newer than the stamp, and built next time.

# The wheel's native half with the Python of this tree: an edited Python file counts at once, edited Rust after
# `make venv`.
$(BUILT): pyproject.toml $(RUST_SOURCES) $(INSTALLED)
	@touch $@.begun
	@$(MAKE) --no-print-directory $(WHEEL_BUILT)
	@$(BIN)/python -m pip install --quiet --no-deps --force-reinstall dist/memfit-*.whl
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
	    mv $$site/memfit/_native.abi3.so python/memfit/ && rm -rf $$site/memfit && \
	    echo $(abspath python) > $$site/memfit.pth
	@$(BIN)/python -m compileall -q python/memfit  # As pip does for users: 0.2 s less at every start.
	@mv $@.begun $@

$(OTHER)/.installed: requirements.txt $(CREATED)
	@$(BIN)/python -m venv $(OTHER)
	@grep -vE '^torch(vision)?==' requirements.txt > $(OTHER)/requirements.txt
	@$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH) torchvision --requirement $(OTHER)/requirements.txt \
	    2> $(OTHER)/pip.log || { \
	    echo "torch $(TORCH) cannot be installed: $$(grep ERROR $(OTHER)/pip.log | tail -1)" >&2; \
	    rm -rf $(OTHER); exit 1; \
	}
	@touch $@

$(OTHER)/.memfit: $(OTHER)/.installed $(WHEEL_BUILT)
	@$(OTHER)/bin/python -m pip install --quiet --no-deps --force-reinstall dist/memfit-*.whl
	@touch $@
