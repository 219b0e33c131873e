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

.PHONY: all module engine run test check lint bench bench-article bench-peer \
        bench-roofline install clean units ops tools fuzz
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

$(BUILD)/llm-engine: $(call objs,$(ENGINE_SRC) $(KERNEL_SRC))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

# kernels want -O3; each instruction set has flags of its own.  Nobody reads
# the floating-point exception flags, and keeping them stops vectorising.
# Unrolled code with sanitizer checks takes minutes to compile above -O1.
$(BUILD)/kernels/%.o: CFLAGS += $(if $(SAN),-O1,-O3) -fno-trapping-math
# exp in vectors: its conditions may be computed on both sides
$(BUILD)/engine/sample/%.o: CFLAGS += -O3 -fno-trapping-math
ifeq ($(ARCH),x86_64)
$(BUILD)/kernels/cpu/%_avx2.o: CFLAGS += -mavx2 -mfma -mf16c
$(BUILD)/kernels/cpu/%_avx512.o: CFLAGS += -mavx512f -mavx512bw -mavx512dq \
    -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c -mprefer-vector-width=512
endif

$(BUILD)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  cc $<"
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

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
$(BUILD)/t/unit/sched_fair_test: LDFLAGS += -Wl,--wrap=calloc \
    -Wl,--wrap=realloc
LINK_op      := kernels kernels/op kernels/ref kernels/cpu

UNITS := $(patsubst t/unit/%.c,$(BUILD)/t/unit/%,$(wildcard t/unit/*_test.c))
TOOLS := $(patsubst t/tools/%.c,$(BUILD)/t/tools/%,$(wildcard t/tools/*.c))
OPS   := $(patsubst t/ops/%.c,$(BUILD)/t/ops/%,$(wildcard t/ops/*.c))
FUZZ  := $(patsubst t/fuzz/%.c,$(BUILD)/t/fuzz/%,$(wildcard t/fuzz/*_fuzz.c))

units: $(UNITS)
ops: $(OPS)
tools: $(TOOLS)
fuzz: $(FUZZ)

.SECONDEXPANSION:
unit_name = $(firstword $(subst _, ,$(notdir $(1))))

$(BUILD)/t/unit/%_test: $(BUILD)/t/unit/%_test.o \
        $$(call folder,$$(LINK_$$(call unit_name,$$*))) \
        $$(ROOT_$$(call unit_name,$$*))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka

$(filter %_test,$(OPS)): $(BUILD)/t/ops/%_test: $(BUILD)/t/ops/%_test.o \
        $$(call folder,$(LINK_op)) $$(call folder,t/ops/lib)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka

# it reads the shapes of a model's file
$(BUILD)/t/ops/roofline: $(call folder,t/ops/roof engine/model engine/base)

$(BUILD)/t/ops/%: $(BUILD)/t/ops/%.o $$(call folder,$(LINK_op))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/t/tools/%: $(BUILD)/t/tools/%.o $$(call folder,$(LINK_model))
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

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
