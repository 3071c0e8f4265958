# SPDX-License-Identifier: Apache-2.0
#
# A short front for CMake. `make help` lists what there is.
PRESET ?= release
PREFIX ?= /usr/local
BUILD := build/$(PRESET)
WERROR := $(if $(CI),ON,OFF)

all: build ## build everything (default)

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo "All cores build (CMAKE_BUILD_PARALLEL_LEVEL=2 make … leaves some to others); tests run two at a time."

setup: ## install what building needs and is missing (apt), or print the line to run
	@scripts/setup

# Again when options are given: they hold for this build folder from then on.
configure:
	@test -f $(BUILD)/build.ninja -a -z "$(CMAKE_FLAGS)$(CI)" || cmake --preset $(PRESET) -DTUTTI_WERROR=$(WERROR) $(CMAKE_FLAGS)

build: configure
	@cmake --build $(BUILD)

demo: setup configure ## install what is missing, build, and train a small GPT on four ranks, one of which dies (a minute)
	@cmake --build $(BUILD) --target tutti_command example_gpt
	@scripts/demo $(BUILD)

hello: setup configure ## four ranks that find each other
	@cmake --build $(BUILD) --target tutti_command example_hello
	$(BUILD)/bin/tutti run -n 4 $(BUILD)/examples/hello

test: ## the release suite, then a slice of it under each sanitizer (minutes)
	@scripts/setup test
	@scripts/test

test-all: ## everything under each sanitizer, compiler, instruction set and GPU architecture (an hour)
	@scripts/setup test
	@scripts/test all

test-peers: ## the tests against PyTorch, Open MPI and MPICH, which are installed first
	@scripts/setup peers
	@$(MAKE) --no-print-directory build
	@scripts/test peers

test-python: ## the Python package as a wheel of its source distribution, in a virtual environment of its own
	@scripts/setup python
	@scripts/test python

test-arm64: ## cross build for arm64; unit tests under qemu-user
	@scripts/setup arm64
	@scripts/test arm64

bench: setup build ## measure Tutti and its peers side by side
	@scripts/bench

soak: build ## random operations, deaths and shrinks: make soak SECONDS=60 SEED=1
	@scripts/soak $(or $(SECONDS),60) $(or $(SEED),1)

lint: ## formatting, names, layers, headers, static analysis
	@scripts/lint

install: configure ## build what is installed, and install it: make install PREFIX=/usr/local
	@cmake $(BUILD) -DCMAKE_INSTALL_PREFIX=$(abspath $(PREFIX)) >/dev/null
	@cmake --build $(BUILD) --target tutti_installed
	cmake --install $(BUILD)

uninstall: ## remove what the last make install wrote
	@cmake --build $(BUILD) --target uninstall

clean: ## remove the build folder
	rm -rf build

.PHONY: all help setup configure build demo hello test test-all test-peers test-python test-arm64 bench soak lint install uninstall clean
