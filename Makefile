# Thin names; the work is in conf/ and t/.  `make SAN=address|undefined|thread`
# builds everything into a folder of its own.

ifeq ($(origin CC),default)
CC     := gcc
endif
SAN    ?=
DEBUG  ?=
BUILD  ?= build$(if $(SAN),-$(SAN))
PREFIX ?= /usr
NGINX_SRC ?= /usr/share/nginx/src

Q      := $(if $(V),,@)# make V=1 shows the commands
ARCH   := $(shell uname -m)
PKGS   := libcjson libpcre2-8 libutf8proc libxxhash
WARN   := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wpointer-arith -Wvla \
          -Werror
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer \
            $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=all))
CFLAGS += -std=c11 -D_GNU_SOURCE $(WARN) -g -O2 -ffp-contract=off -fPIC \
          $(if $(DEBUG)$(SAN),-DLLM_DEBUG) $(SANFLAGS) -I.
LDFLAGS += $(SANFLAGS)
LIBS   := $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lm -lpthread

ENGINE_SRC := $(wildcard engine/*.c engine/*/*.c)
KERNEL_SRC := $(wildcard kernels/*.c kernels/op/*.c kernels/ref/*.c \
              kernels/cpu/*.c)
objs = $(patsubst %.c,$(BUILD)/%.o,$(1))
folder = $(call objs,$(foreach d,$(1),$(wildcard $(d)/*.c)))

.PHONY: emu gpu-tests all module engine run test check lint bench bench-article bench-peer \
        bench-roofline install clean units ops tools fuzz shim
.SECONDARY:

all: engine module

engine: $(BUILD)/llm-engine

module:
	BUILD=$(BUILD) SAN=$(SAN) NGINX_SRC=$(NGINX_SRC) bash conf/build-module.sh

run:
	bash conf/run.sh

test check lint bench bench-article bench-peer bench-roofline:
	bash t/run.sh $@

install: all
	install -D -m 755 $(BUILD)/llm-engine \
	    $(DESTDIR)$(PREFIX)/lib/nginx-llm/llm-engine
	install -D -m 644 $(BUILD)/ngx_http_llm_module.so \
	    $(DESTDIR)$(PREFIX)/lib/nginx/modules/ngx_http_llm_module.so
	install -D -m 644 conf/llm.conf \
	    $(DESTDIR)$(PREFIX)/share/doc/nginx-llm/llm.conf

clean:
	rm -rf build build-*

# --- kernels/cuda, compiled by nvcc (CUDA=1, where there is one; CUDA=0 to do
# without) for GPUs, and by g++ over an emulated runtime for tests ---

NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) \
        $(wildcard /usr/local/cuda/bin/nvcc))
CUDA ?= $(if $(NVCC),$(if $(SAN),0,1),0)
CUDA_ARCHS ?= 75 80 86 89 90 100 120
CUDA_SRC := $(wildcard kernels/cuda/*.cu)
GPU_OBJ := $(BUILD)/gpu/kernels/backend.o $(CUDA_SRC:%.cu=$(BUILD)/gpu/%.o)
GPU_LIBS = -L$(dir $(NVCC))../lib64 -lcudart_static -ldl -lrt -lstdc++
PLAIN_BACKEND := $(BUILD)/kernels/backend.o

# -fmad=false and -ffp-contract=off: sums have the same bits everywhere
NVCCFLAGS += -std=c++17 -O3 -fmad=false -lineinfo -I. -t2 \
    -Xcompiler -fPIC,-Wall,-Wextra,-ffp-contract=off \
    -Xfatbin -compress-all \
    $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a$(,)code=sm_$a) \
    $(foreach a,$(lastword $(CUDA_ARCHS)), \
    -gencode arch=compute_$a$(,)code=compute_$a)
, := ,
ENGINE_OBJ := $(call objs,$(ENGINE_SRC) $(KERNEL_SRC))
ifeq ($(CUDA),1)
ENGINE_OBJ := $(filter-out $(PLAIN_BACKEND),$(ENGINE_OBJ)) $(GPU_OBJ)
ENGINE_LIBS = $(GPU_LIBS)
endif

$(BUILD)/llm-engine: $(ENGINE_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(ENGINE_LIBS)

$(BUILD)/gpu/%.o: %.cu Makefile
	@mkdir -p $(@D)
	@echo "  nvcc $<"
	$(Q)$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# names → backends, where cuda is one of them
$(BUILD)/gpu/%.o $(BUILD)/emu/%.o: CFLAGS += -DLLM_CUDA
$(BUILD)/gpu/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/emu/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

# kernels want -O3; each instruction set has flags of its own.  Nobody reads
# the floating-point exception flags, and keeping them stops vectorising.
# Unrolled code with sanitizer checks takes minutes to compile above -O1.
$(BUILD)/kernels/%.o $(BUILD)/twin/%.o: CFLAGS += $(if $(SAN),-O1,-O3) \
    -fno-trapping-math
# exp in vectors: its conditions may be computed on both sides
$(BUILD)/engine/sample/%.o: CFLAGS += -O3 -fno-trapping-math
ifeq ($(ARCH),x86_64)
$(BUILD)/kernels/cpu/%_avx2.o: CFLAGS += -mavx2 -mfma -mf16c
$(BUILD)/kernels/cpu/%_avx512.o $(BUILD)/kernels/cpu/%_amx.o \
$(BUILD)/twin/kernels/cpu/%_amx.o $(BUILD)/twin/t/ops/twin/tile.o: \
    CFLAGS += -mavx512f -mavx512bw -mavx512dq \
    -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c -mprefer-vector-width=512
endif

$(BUILD)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

# the matrix unit's kernels over t/ops/twin in place of the unit
$(BUILD)/twin/%.o: CFLAGS += -DCPU_TILE_EMU
$(BUILD)/twin/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  cc $< (twin)"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

# --- CUDA sources on the CPU: t/shim in place of CUDA ---

EMUFLAGS := -std=c++17 -D_GNU_SOURCE -DLLM_CUDA_EMU -Wall -Wextra -Wshadow \
            -Wpointer-arith -Wvla -Werror -Wno-unknown-pragmas \
            -Wno-maybe-uninitialized -g \
            $(if $(SAN),-O1,-O3 -march=native) -ffp-contract=off -fPIC \
            $(SANFLAGS) -I.
# The shim switches stacks, and tells TSan so itself; a copy that became a call
# of memcpy would be looked at.
SHIMFLAGS := -fno-tree-loop-distribute-patterns -Wno-maybe-uninitialized \
             $(if $(findstring thread,$(SAN)),-fno-sanitize=thread -DSHIM_TSAN)
SHIM_OBJ := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard t/shim/*.cpp))
EMU_OBJ := $(BUILD)/emu/kernels/backend.o $(CUDA_SRC:%.cu=$(BUILD)/%.emu.o) \
           $(SHIM_OBJ)
EMU_LIBS := -rdynamic -ldl -lstdc++

$(BUILD)/t/shim/%.o: t/shim/%.cpp Makefile
	@mkdir -p $(@D)
	@echo "  c++ $<"
	$(Q)$(CXX) $(EMUFLAGS) $(SHIMFLAGS) -MMD -MP -c -o $@ $<

# products of matrices in plain loops
$(BUILD)/t/shim/matrix.o: SHIMFLAGS += $(if $(SAN),,-O3)

$(BUILD)/%.emu.o: %.cu Makefile
	@mkdir -p $(@D)
	@echo "  c++ $< (emulated)"
	$(Q)$(CXX) -x c++ $(EMUFLAGS) -MMD -MP -c -o $@ $<

# the engine over the emulation, for t/gpu.sh --dry and t/tools/roofline.py
$(BUILD)/emu/llm-engine: $(filter-out $(PLAIN_BACKEND),\
        $(call objs,$(ENGINE_SRC) $(KERNEL_SRC))) $(EMU_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(EMU_LIBS)

# --- tests: a unit test links only what its folder may use ---

LINK_base    := engine/base
LINK_ipc     := engine/ipc
LINK_text    := engine/text engine/base
LINK_chat    := engine/chat engine/base
LINK_model   := engine/model engine/base kernels kernels/op kernels/ref \
                kernels/cpu
LINK_kv      := engine/kv engine/base kernels/op
LINK_sched   := engine/sched engine/kv engine/base kernels/op
LINK_sample  := engine/sample engine/base
LINK_spec    := engine/spec engine/sched engine/kv engine/model engine/sample \
                engine/base kernels kernels/op kernels/ref kernels/cpu
LINK_engine  := engine/base engine/ipc engine/text engine/chat engine/model \
                engine/kv engine/sched engine/sample engine/spec kernels \
                kernels/op kernels/ref kernels/cpu
ROOT_engine  := $(call objs,$(filter-out engine/main.c,$(wildcard engine/*.c)))
# their allocations fail one by one
$(BUILD)/t/unit/engine_oom_test $(BUILD)/t/unit/engine_convert_oom_test: \
    LDFLAGS += -Wl,--wrap=malloc -Wl,--wrap=calloc -Wl,--wrap=realloc
# a gate before it
$(BUILD)/t/unit/engine_thread_test $(BUILD)/t/unit/engine_thread_leave_test: \
    LDFLAGS += -Wl,--wrap=prepare_request
$(BUILD)/t/unit/engine_thread_leave_test: LDFLAGS += -Wl,--wrap=intake_thread_stop
# its clock stands still
$(BUILD)/t/unit/model_cache_test: LDFLAGS += -Wl,--wrap=clock_gettime
# they see how it slept
$(BUILD)/t/unit/engine_thread_test $(BUILD)/t/unit/engine_port_test: \
    LDFLAGS += -Wl,--wrap=poll
$(BUILD)/t/unit/sched_fair_test: LDFLAGS += -Wl,--wrap=calloc \
    -Wl,--wrap=realloc
LINK_op      := kernels kernels/op kernels/ref kernels/cpu
LINK_cuda    := $(LINK_engine)
ROOT_cuda    := $(ROOT_engine)

UNITS := $(patsubst t/unit/%.c,$(BUILD)/t/unit/%,$(wildcard t/unit/*_test.c))
TOOLS := $(patsubst t/tools/%.c,$(BUILD)/t/tools/%,$(wildcard t/tools/*.c))
OPS   := $(patsubst t/ops/%.c,$(BUILD)/t/ops/%,$(wildcard t/ops/*.c))
SHIM  := $(patsubst t/shim/%.cu,$(BUILD)/t/shim/%,$(wildcard t/shim/*.cu))
CUDA_TESTS := $(patsubst t/cuda/%.cu,$(BUILD)/t/cuda/%, \
              $(wildcard t/cuda/*_test.cu))
FUZZ  := $(patsubst t/fuzz/%.c,$(BUILD)/t/fuzz/%,$(wildcard t/fuzz/*_fuzz.c))

units: $(UNITS)
ops: $(OPS)
tools: $(TOOLS)
fuzz: $(FUZZ)
shim: $(SHIM)
cuda-tests: $(CUDA_TESTS)
emu: $(BUILD)/emu/llm-engine

.SECONDEXPANSION:
unit_name = $(firstword $(subst _, ,$(notdir $(1))))

$(BUILD)/t/unit/cuda_%_test: $(BUILD)/t/unit/cuda_%_test.o \
        $$(filter-out $$(PLAIN_BACKEND),$$(call folder,$$(LINK_cuda))) \
        $$(ROOT_cuda) $$(TEST_CUDA_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(TEST_CUDA_LIBS) -lcmocka

$(BUILD)/t/unit/%_test: $(BUILD)/t/unit/%_test.o \
        $$(call folder,$$(LINK_$$(call unit_name,$$*))) \
        $$(ROOT_$$(call unit_name,$$*))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka

# the CUDA backend of a test: emulated, or with TEST_CUDA=gpu the real one
TEST_CUDA ?= emu
TEST_CUDA_OBJ = $(if $(filter gpu,$(TEST_CUDA)),$(GPU_OBJ),$(EMU_OBJ))
TEST_CUDA_LIBS = $(if $(filter gpu,$(TEST_CUDA)),$(GPU_LIBS),$(EMU_LIBS))

$(filter %_test,$(OPS)): $(BUILD)/t/ops/%_test: $(BUILD)/t/ops/%_test.o \
        $$(filter-out $$(PLAIN_BACKEND),$$(call folder,$(LINK_op))) \
        $$(call folder,t/ops/lib) $$(TEST_CUDA_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(TEST_CUDA_LIBS) -lcmocka

# what t/gpu.sh runs on a GPU; tests that look into the emulation stay here
GPU_TESTS := $(addprefix build-gpu/t/,$(addprefix ops/,op_test fine_test \
             weight_test) cuda/attn_test cuda/kv_test unit/cuda_engine_test \
             unit/cuda_draw_test)

gpu-tests:
	$(MAKE) BUILD=build-gpu TEST_CUDA=gpu CUDA=1 build-gpu/llm-engine $(GPU_TESTS)

# it reads the shapes of a model's file
$(BUILD)/t/ops/roofline: $(call folder,t/ops/roof engine/model engine/base)

$(BUILD)/t/ops/%: $(BUILD)/t/ops/%.o $$(call folder,$(LINK_op))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/t/tools/%: $(BUILD)/t/tools/%.o $$(call folder,$(LINK_model))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(SHIM): $(BUILD)/t/shim/%: $(BUILD)/t/shim/%.emu.o $(SHIM_OBJ)
	$(Q)$(CXX) $(LDFLAGS) -o $@ $^ -lm -lpthread -ldl -lcmocka

$(BUILD)/t/bench/drafts: $(BUILD)/t/bench/drafts.o \
        $$(call folder,$$(LINK_engine)) $$(ROOT_engine)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

# kernels by themselves
cuda_obj = $(if $(filter gpu,$(TEST_CUDA)),$(BUILD)/gpu/$(1).o,$(BUILD)/$(1).emu.o)

$(CUDA_TESTS): $(BUILD)/t/cuda/%: $$(call cuda_obj,t/cuda/$$*) \
        $$(call cuda_obj,t/cuda/attn_world) \
        $$(call cuda_obj,kernels/cuda/cuda_kv) \
        $$(call cuda_obj,kernels/cuda/cuda_attn) \
        $(BUILD)/t/ops/lib/attn_world.o $(BUILD)/t/ops/lib/compare.o \
        $$(call folder,$(LINK_op)) \
        $$(if $$(filter gpu,$$(TEST_CUDA)),,$(SHIM_OBJ))
	$(Q)$(CXX) $(LDFLAGS) -o $@ $^ $(LIBS) $(TEST_CUDA_LIBS) -lcmocka

# tests of ops with the matrix unit's twin in its place, and of the engine
TWIN_OBJ := $(BUILD)/twin/kernels/cpu/cpu_dot_amx.o \
            $(BUILD)/twin/t/ops/twin/tile.o
TWIN_FOR := $(BUILD)/kernels/cpu/cpu_dot_amx.o $(BUILD)/kernels/cpu/cpu_tile.o
TWIN_OPS := $(patsubst %,$(BUILD)/twin/%_test,op fine point weight)
TWINS    := $(TWIN_OPS) $(patsubst %,$(BUILD)/twin/%_test,twin tile engine_amx)
twin_op   = $(filter-out $(PLAIN_BACKEND) $(TWIN_FOR),\
            $(call folder,$(LINK_op))) $(call folder,t/ops/lib) $(EMU_OBJ)

.PHONY: twins
twins: $(TWINS)

$(TWIN_OPS): $(BUILD)/twin/%_test: $(BUILD)/t/ops/%_test.o $$(twin_op) \
        $(TWIN_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(EMU_LIBS) -lcmocka

$(BUILD)/twin/tile_test: $(BUILD)/twin/t/ops/twin/tile_test.o $$(twin_op) \
        $(TWIN_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) $(EMU_LIBS) -lcmocka

$(BUILD)/twin/twin_test: $(BUILD)/twin/t/ops/twin/twin_test.o \
        $(BUILD)/twin/t/ops/twin/tile.o
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ -lpthread -lcmocka

$(BUILD)/twin/engine_amx_test: $(BUILD)/t/unit/engine_amx_test.o \
        $$(filter-out $(TWIN_FOR),$$(call folder,$(LINK_engine))) \
        $(ROOT_engine) $(TWIN_OBJ)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka

# the JSON entry is the module's: it wants nginx's headers, configured before
$(BUILD)/t/fuzz/json_fuzz: t/fuzz/json_fuzz.c ngx_module/ngx_http_llm_json.c
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) -D_GNU_SOURCE -g -O1 $(SANFLAGS) -fsanitize=fuzzer -I. \
	    -Ibuild/nginx $(addprefix -I$(NGINX_SRC)/src/,core event event/modules \
	    os/unix http http/modules http/v2) -o $@ $^ -lcjson -lm

# fuzz targets are built by clang in their own folder: make fuzz
# CC=clang BUILD=build-fuzz SAN=fuzzer-no-link,address,undefined
# (FUZZ_model: parsing needs no backend, and clang takes minutes over one.)
FUZZ_model := engine/model engine/base kernels/op

$(BUILD)/t/fuzz/%_fuzz: $(BUILD)/t/fuzz/%_fuzz.o \
        $$(call folder,$$(or $$(FUZZ_$$*),$$(LINK_$$(call unit_name,$$*))))
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ $(LIBS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
