#!/usr/bin/perl

# Who may include whom.  The table is the architecture: an arrow that is not
# in it fails, and so does an include that is not written from the root.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Tree qw(tree_files tree_read);
use Test::More;

# folder => folders whose headers it may include, beside its own
my %may = (
    'ngx_module' => ['engine/ipc'],

    'engine/ipc' => [],
    'engine/base' => [],
    'engine/text' => ['engine/base'],
    'engine/chat' => ['engine/base'],
    'engine/grammar' => ['engine/text', 'engine/base'],
    'engine/kv' => ['kernels/op', 'engine/base'],
    'engine/model' => ['kernels/op', 'engine/base'],
    'engine/sched' => ['engine/kv', 'engine/base'],
    'engine/sample' => ['engine/grammar', 'engine/base'],
    'engine/spec' => ['engine/model', 'engine/kv', 'engine/sample',
                      'engine/sched', 'engine/base'],

    # the root of the engine sees its folders; no folder sees the root
    'engine' => [map({ "engine/$_" } qw(ipc base text chat grammar kv model
                                        sched sample spec)), 'kernels/op'],

    'kernels/op' => [],
    'kernels/ref' => ['kernels/op'],
    'kernels/cpu' => ['kernels/op'],
    'kernels/cuda' => ['kernels/op'],
    'kernels' => ['kernels/op', 'kernels/ref', 'kernels/cpu', 'kernels/cuda'],
);

# single files that see more: the one place that picks a backend, and those
# where C takes the place of a device or of a unit
my %file_may = (
    'engine/engine.c' => ['kernels/backend.h'],
    'kernels/cuda/prim.cuh' => ['t/shim/cuda_shim.h'],
    'kernels/cpu/cpu_tile.h' => ['t/ops/twin/tile.h'],
);

my $roots = 'engine|kernels|ngx_module|t';

# what engine/ipc, which is compiled into both processes, may use of libc
my $libc = qr{^(?: assert | ctype | errno | fcntl | inttypes | limits
                 | linux/(?:futex|memfd) | math | signal | stdalign | stdarg
                 | stdatomic | stdbool | stddef | stdint | stdio | stdlib
                 | string | sys/(?:eventfd|mman|stat|syscall|types) | time
                 | unistd )\.h$}x;

# headers of others that only some may see
my @reserved = (
    [qr/^(?:ngx_|nginx)/, qr{^ngx_module/}, 'a header of nginx'],
    [qr/^(?:cuda|cublas|cooperative_groups|mma\.h|nv)/, qr{^kernels/cuda/},
     'a header of CUDA'],
    [qr/immintrin|arm_neon/, qr{^kernels/}, 'vector instructions'],
    [qr/cJSON/, qr{^(?:ngx_module|engine(?:/chat)?)/[^/]+$|^engine/base/json\.},
     'JSON, which ends at the templates'],
);


sub folder {
    my ($path) = @_;

    return $path =~ m{^(.*)/} ? $1 : '';
}


# What is wrong with one quoted include, or nothing.
sub arrow {
    my ($from, $to) = @_;
    my $here = folder($from);
    my $there = folder($to);

    return "$to is not written from the root" if $there eq ''
        || $to =~ m{(?:^|/)\.\.?/} || $to !~ m{^(?:$roots)/};

    return if $from =~ m{^t/};   # tests see everything
    return "$from: a folder without rules" if !exists $may{$here};
    return if $there eq $here && $to ne 'kernels/backend.h';
    return if grep { $there eq $_ } @{$may{$here}};
    return if $here eq 'kernels' && $there eq $here;
    return if grep { $to eq $_ } @{$file_may{$from} || []};

    return "$here may not include $to";
}


# What is wrong with one system include.
sub system_arrow {
    my ($from, $to) = @_;

    return "engine/ipc is libc only, not <$to>"
        if $from =~ m{^engine/ipc/} && $to !~ $libc;

    for my $rule (@reserved) {
        my ($header, $who, $what) = @$rule;

        return "<$to> is $what" if $to =~ $header && $from !~ $who
            && $from !~ m{^t/};
    }

    return;
}


# Kernels are written once for the GPU and the emulation: only prim*.cuh know
# which it is.
sub device_only {
    my ($from, $text) = @_;

    return if $from !~ m{^kernels/cuda/} || $from =~ m{^kernels/cuda/prim\w*\.cuh$};

    $text =~ s{/\*.*?\*/}{}sg;

    return map { "$from: $_ is for prim*.cuh" }
        $text =~ /\b(LLM_CUDA_EMU|__CUDA_ARCH__|asm|atomic[A-Z]\w*|__atomic_\w+
                    |__threadfence\w*|__trap|__ldg|__dp4a|__cvta_\w+)\b/xg;
}


sub complaints {
    my ($from, $text) = @_;
    my @bad = device_only($from, $text);

    while ($text =~ /^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]/mg) {
        push @bad, $1 eq '"' ? arrow($from, $2) : system_arrow($from, $2);
    }

    return @bad;
}


# --- the rules themselves: each of these must be found ---

my @wrong = (
    ['engine/sched/x.c', '#include "kernels/op/op.h"'],
    ['engine/sched/x.c', '#include "engine/model/model.h"'],
    ['engine/kv/x.h', '#include "engine/sched/seq.h"'],
    ['engine/base/x.c', '#include "engine/ipc/shm.h"'],
    ['engine/text/x.c', '#include "engine/engine.h"'],
    ['engine/ipc/x.h', '#include "engine/base/status.h"'],
    ['engine/ipc/x.c', '#include <pthread.h>'],
    ['engine/ipc/x.c', '#include <ngx_config.h>'],
    ['engine/loop.c', '#include <ngx_core.h>'],
    ['engine/loop.c', '  #  include "ngx_module/ngx_http_llm_ring.h"'],
    ['engine/loop.c', '#include "kernels/cpu/cpu.h"'],
    ['engine/loop.c', '#include "kernels/backend.h"'],
    ['engine/kv/pool.c', '#include "pool.h"'],
    ['engine/kv/pool.c', '#include "../base/status.h"'],
    ['engine/kv/pool.c', '#include <cuda_runtime.h>'],
    ['engine/sample/math.c', '#include <immintrin.h>'],
    ['engine/text/x.c', '#include <cjson/cJSON.h>'],
    ['engine/newcomer/x.c', '#include "engine/base/status.h"'],
    ['kernels/cpu/x.c', '#include "kernels/ref/ref.h"'],
    ['kernels/op/x.c', '#include "kernels/cpu/cpu.h"'],
    ['kernels/ref/x.c', '#include "kernels/backend.h"'],
    ['kernels/cpu/x.c', '#include "engine/base/status.h"'],
    ['kernels/cpu/x.c', '#include <cublas_v2.h>'],
    ['kernels/cuda/x.cu', '    asm("trap;");'],
    ['kernels/cuda/x.cuh', '#if __CUDA_ARCH__ >= 800'],
    ['kernels/cuda/x.cu', '    atomicAdd(sum, 1);'],
    ['ngx_module/x.c', '#include "engine/base/status.h"'],
    ['ngx_module/x.c', '#include "kernels/op/op.h"'],
    ['t/unit/x.c', '#include "random.h"'],
);

my @right = (
    ['engine/sched/x.c', '#include "engine/kv/pool.h"'],
    ['engine/engine.c', '#include "kernels/backend.h"'],
    ['engine/ipc/x.c', '#include <stdatomic.h>'],
    ['engine/ipc/x.c', '#include "engine/ipc/ring.h"'],
    ['kernels/backend.c', '#include "kernels/backend.h"'],
    ['kernels/cuda/x.cu', '#include <cuda_fp16.h>'],
    ['kernels/cuda/prim_x.cuh', '#if __CUDA_ARCH__ >= 800'],
    ['kernels/cuda/x.cu', '/* no asm (LLM_CUDA_EMU) here */'],
    ['ngx_module/x.c', "#include <ngx_core.h>\n#include <cjson/cJSON.h>"],
    ['t/unit/x.c', '#include "kernels/cpu/cpu.h"'],
);

is(scalar complaints(@$_), 1, "found: $_->[0] $_->[1]") for @wrong;
is_deeply([complaints(@$_)], [], "allowed: $_->[0] $_->[1]") for @right;


# --- the tree ---

my @files = tree_files(qr/\.(?:c|h|cu|cuh|cpp)$/, qw(engine kernels ngx_module t));

cmp_ok(scalar @files, '>', 100, 'the tree was found');

for my $path (@files) {
    my @bad = complaints($path, tree_read($path));

    push @bad, map { "no such file: $_" }
        grep { !-f "$LLM::Tree::TOP/$_" }
        tree_read($path) =~ /^\s*#\s*include\s*"([^"]+)"/mg;

    is_deeply(\@bad, [], $path);
}

done_testing();
