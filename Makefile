# `make train` and `make test` need g++ and Python; all else goes into a virtual environment here.
#   make test TORCH=2.11.0    in .venv-2.11.0, with that torch
#   make train ARGS="--steps 100"
#   make bench ARGS="--quick"
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
PINNED := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt | head -n 1)
TORCH ?= $(PINNED)
ARGS ?=
# Python must keep what it compiles: otherwise each process compiles torch's sources again, which takes
# as long as the rest of its imports, and three times as long where Inductor is imported too.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(TORCH),$(PINNED))
VENV := .venv
CONSTRAIN := cat constraints.txt
else
VENV := .venv-$(TORCH)
CONSTRAIN := sed -e '/^torch==/d' -e '/^torchvision==/s/==.*//' -e '$$a torch==$(TORCH)' constraints.txt
endif
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.packages-installed
BUILT := $(VENV)/.extension-built
SOURCES := $(shell find csrc cmake tools CMakeLists.txt setup.py pyproject.toml \
    -not -name '__pycache__' -not -name '*.pyc')
CPP := $(shell find csrc tests/cpp tests/emulated examples -name '*.h' -o -name '*.cpp' -o -name '*.cu')

# The CUDA bodies of the ops, on kernels compiled for the CPU.
EMULATED := --emulate-cuda build/cp*-torch$(TORCH)/tests/cpp/emulated/libtransformer_ops_emulated.so \
    tests/packaging/test_cuda.py tests/ops/test_attention.py tests/ops/test_products.py tests/ops/test_dropout.py tests/ops/test_epilogues.py \
    tests/ops/test_linear_cross_entropy.py \
    $(addprefix tests/ops/test_grouped.py::test_, splits a_nan_stays_in_its_group groups_are_multiplied_by_torch \
        a_layer_is_a_loop_over_experts rows_that_somebody_else_has_sorted) \
    tests/ops/test_main_grad.py tests/ops/test_packed_linear.py tests/ops/test_lora_linear.py tests/quantization/test_quantize.py tests/quantization/test_saved_formats.py \
    tests/quantization/test_scaled_products.py tests/quantization/test_codes.py tests/quantization/test_products_of_codes.py \
    tests/quantization/test_cublaslt_products.py tests/quantization/test_modules_of_codes.py tests/quantization/test_groups_on_cuda.py \
    tests/quantization/test_rounded_by_scale.py tests/quantization/test_four_over_six.py tests/fuser/test_fusions_under_recipes.py

# What depends on how products run: numbers, bytes and plans.
ON_PROCESSORS := tests/ops/test_processor.py tests/quantization/test_widened_products.py tests/memory/test_peak_memory.py \
    tests/ops/test_products.py tests/ops/test_epilogues.py tests/memory/test_recompute.py tests/memory/test_recompute_products.py tests/fuser/test_residual_fusions.py \
    tests/quantization/test_scaled_products.py tests/fuser/test_fusions_under_recipes.py tests/ops/test_main_grad.py tests/ops/test_attention.py tests/models/test_fuse_forms.py

# The tests read one file of it: the whole package wants another huggingface_hub than transformers.
LITGPT := litgpt==0.5.13

# Files of tests side by side, the slowest first: most of their time is one thread of a compiler. Threads
# that wait for their next loop must not take the cores from the tests beside them: small products take
# 20 times as long. Inductor compiles in each of them: a process that only compiles begins with imports.
PYTEST := env OMP_WAIT_POLICY=PASSIVE TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 \
    --dist loadfile --no-loadscope-reorder

# Every part runs, and the last lines list what failed in all of them.
PARTS := $(BIN)/python tools/run_parts.py

.PHONY: test test-processors test-arm test-arm-python check slow train bench docs build wheel build-times lint format sanitize fuzz clean FORCE

test: build
	$(PARTS) --part "C++ tests" $(BIN)/python tools/cmake_build.py \
	    --part "Python tests" $(PYTEST) -m "not slow" tests $(ARGS) \
	    --part "Python tests on emulated CUDA kernels" $(PYTEST) $(EMULATED) $(ARGS)
	@sed -n 's/^LEFT_OUT = "\(..*\)"/Left out: \1/p' transformer_ops/lib/torch*/_build_info.py

# The first lane of CI, a minute or so on 2 cores once all is built: format and lint, the C++ tests
# that need no libtorch, links of the documentation, and every op in two dtypes.
check: lint
	$(BIN)/python tools/cmake_build.py --only fuser memory
	$(MAKE) --no-print-directory build
	$(BIN)/python -m pytest -q tests/docs/test_site.py tests/docs/test_frame.py
	$(PYTEST) tests/ops/test_ops.py --dist load -k "float32 or bfloat16" $(ARGS)

# What depends on the processor, as on smaller x86 processors than this one. All have kernels where
# TRANSFORMER_OPS_NATIVE=OFF: `make` alone builds them for this machine's widest instruction set. With
# SAMPLE=--sample as on one of them, each day another.
test-processors: build
	$(BIN)/python tools/run_on_processors.py $(SAMPLE) $(PYTEST) $(ON_PROCESSORS) $(ARGS)

# The C++ tests that need no libtorch, cross-compiled for aarch64, under qemu. Installs the compiler and
# qemu by apt-get where they are missing.
test-arm: $(PACKAGES)
	$(BIN)/python tools/cmake_build.py --arm $(ARGS)

# The executor's tests and Python tests on aarch64, under qemu, on Debian: cross-compiles the extension,
# and downloads Debian's Python for arm64 and torch.
test-arm-python: $(PACKAGES)
	$(BIN)/python tools/arm_python.py $(ARGS)

# The tests that `make test` skips: they add an op to a copy of the tree, with a build of its own,
# delete it again, and compile more graphs.
slow: build
	$(BIN)/python -m pytest -q -m slow tests $(ARGS)

train: build
	$(BIN)/python examples/train_lm.py $(ARGS)

bench: build
	$(BIN)/python benchmarks/bench.py $(ARGS)

# The site, in build/docs/html: runs the gallery, takes warnings for errors, and loads nothing from
# elsewhere. Sphinx needs Python 3.11.
docs: build
	$(BIN)/python tools/make_docs.py $(ARGS)

build: $(BUILT)

$(PACKAGES): constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "make: no Python >= 3.10 found, name one: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(CONSTRAIN) > $(VENV)/packages.txt
	$(BIN)/python tools/install_packages.py -r $(VENV)/packages.txt
	$(BIN)/python tools/install_packages.py --no-deps $(LITGPT)
	@touch $@

# Every environment of this checkout shares the built files in transformer_ops/: build again after
# a `make` with another TORCH, TRANSFORMER_OPS_CUDA or TRANSFORMER_OPS_NATIVE. The build folder of each
# torch is kept, so that takes seconds.
built = $(shell sed -n 's/^$(1) = "\(.*\)"/\1/p' transformer_ops/lib/torch*/_build_info.py 2>/dev/null)
installed := $(shell sed -n "s/^__version__ = '\(.*\)'/\1/p" \
    $(VENV)/lib/python3*/site-packages/torch/version.py 2>/dev/null)
ifneq ($(call built,TORCH_VERSION) $(call built,CUDA_ASKED) $(call built,NATIVE),\
    $(installed) $(TRANSFORMER_OPS_CUDA) $(or $(TRANSFORMER_OPS_NATIVE),ON))
$(BUILT): FORCE
endif

$(BUILT): $(PACKAGES) $(SOURCES)
	@echo "Building the C++ extension: minutes the first time, seconds later."
	$(BIN)/python tools/cmake_build.py --extension
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

# Builds the wheel of a release in dist/, for each minor version of torch, and tests it with the oldest
# and the newest (RELEASING.md). This is quicker: make wheel ARGS="--native --torch 2.11.0 2.15.0"
wheel:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tools/build_wheel.py $(ARGS)

# What .ci/run checks besides the tests.
lint: $(PACKAGES)
	$(PARTS) --together --part clang-format $(BIN)/clang-format --dry-run -Werror $(CPP) \
	    --part ruff $(BIN)/ruff check . \
	    --part "ruff format" $(BIN)/ruff format --check . \
	    --part comments $(BIN)/python tools/check_comments.py \
	    --part mypy $(BIN)/mypy transformer_ops tools benchmarks examples \
	    --part "mypy, tests" $(BIN)/mypy --config-file tests/mypy.ini tests

format: $(PACKAGES)
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Seconds for each file of the last build; ARGS=--check fails where one is over its budget.
build-times: build
	$(BIN)/python tools/build_times.py $(ARGS)

# Both, or one: make sanitize SANITIZERS=address
SANITIZERS ?= address thread
sanitize: build
	$(PARTS) $(foreach name,$(SANITIZERS),--part "$(name) sanitizer" $(BIN)/python tools/cmake_build.py --sanitize $(name) $(ARGS))

# Random models, texts, calls and threads against plain torch, from a seed that no run had before:
#   make fuzz ARGS="--seconds 600 --only pipelines,threads"
fuzz: build
	$(BIN)/python -m tests.fuzz --seed random $(ARGS)

clean:
	rm -rf build transformer_ops/lib transformer_ops/include transformer_ops/share $(BUILT)
