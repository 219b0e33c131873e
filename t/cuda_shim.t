#!/usr/bin/perl

# Planted bugs of CUDA kernels and of the host's side (t/shim/bugs*.cu*): each
# build of the emulation that should notice does, in the words expected, and
# the same program without the bug passes.

use strict;
use warnings;

use FindBin;
use Test::More;

my $top = "$FindBin::Bin/..";
my %folder = (
    plain => $ENV{LLM_TEST_BUILD} || 'build',
    asan => 'build-address,undefined',
    tsan => 'build-thread',
    apart => 'build-thread',
);
my %environment = (apart => [LLM_SHIM_APART => 1]);

my $wrong = qr/^wrong with seed/m;
my $at = qr{(?:\./)?t/shim/bugs(?:_kernel)?\.cuh?:\d+};

# bug => what each build says; all: any of them, but not the slow apart
my %says = (
    missing_barrier => {
        plain => $wrong,
        tsan => qr{data\ race .* \bexchange\ $at .* \bexchange\ $at}xs,
    },
    missing_warp_barrier => {
        plain => $wrong,
        tsan => qr{data\ race .* exchange_in_warp\ $at
                   .* exchange_in_warp\ $at}xs,
    },
    divergent_barrier => {
        all => qr/divergent barrier: .*left while 32 wait at $at/,
    },
    different_barriers => {
        all => qr/divergent barrier: $at while others wait at $at/,
    },
    divergent_shuffle => {
        all => qr/lane has left while others wait for it: __shfl_xor_sync/,
    },
    reuse_race => {
        plain => $wrong,
        tsan => qr{data\ race .* (?:\./)?t/shim/gemm\.cuh:\d+
                   .* (?:\./)?t/shim/gemm\.cuh:\d+}xs,
    },
    missing_copy_wait => { all => $wrong },
    static_shared_bounds => {
        asan => qr/$at:\d+: runtime error: index 128 out of bounds/,
    },
    dynamic_shared_bounds => {
        plain => qr/written 0 bytes behind 512 bytes of dynamic shared/,
        asan => qr/heap-buffer-overflow .* write_dynamic $at/s,
    },
    global_write_bounds => {
        plain => qr/written 0 bytes behind the end of 512 bytes of device/,
        asan => qr/use-after-poison .* write_all $at/s,
    },
    global_read_bounds => {
        plain => $wrong,
        asan => qr/use-after-poison .* sum_of_two $at/s,
    },
    use_after_free => {
        plain => $wrong,
        asan => qr/use-after-poison .* sum_of_two $at/s,
    },
    misaligned => { all => qr/$at: 0x\w+ is not aligned to 16/ },
    misaligned_plainly => {
        asan => qr/$at:\d+: runtime error: .* misaligned address/,
    },
    uninitialised => { all => $wrong },
    uninitialised_static => { all => $wrong },
    uninitialised_called => { plain => $wrong, tsan => $wrong },
    uninitialised_dynamic => { all => $wrong },
    missing_sync => { all => $wrong },
    staging_reuse => { all => $wrong },
    missing_event => { all => $wrong },
    host_follows => { all => qr/host code touches device memory at offset 12/ },
    device_follows => {
        all => qr/argument 2 of kernel sum_of_two, .* pointer of the host/,
    },
    float_atomics => { all => $wrong },
    block_order => {
        plain => $wrong,
        asan => $wrong,
        tsan => $wrong,
        apart => qr{data\ race .* \bpass_on\ $at .* \bpass_on\ $at}xs,
    },
    other_memory => {
        all => qr/memory of device 0 is used while device 1 is the current/,
    },
    other_stream => {
        all => qr/a stream of device 1 is used while device 0 is the current/,
    },
    other_reach => {
        all => qr/a kernel of another device touches device memory at offset 0/,
    },
    two_writers => {
        apart => qr{data\ race .* write_in_blocks\ $at
                    .* write_in_blocks\ $at}xs,
    },
);


# With these settings, whatever the caller's environment says.
sub run {
    my ($command, %setting) = @_;

    delete local @ENV{grep { /^LLM_SHIM_/ } keys %ENV};
    local @ENV{keys %setting} = values %setting;

    return scalar `$command 2>&1`;
}


my $program = "$top/$folder{plain}/t/shim/bugs";

plan skip_all => 't/shim is not built' unless -x $program;

is_deeply([sort split ' ', run($program)], [sort keys %says],
          'each bug has its row');

for my $build (grep { -x "$top/$folder{$_}/t/shim/bugs" } sort keys %folder) {
    my $path = "$top/$folder{$build}/t/shim/bugs";

    chdir $top or die;

    for my $bug (sort keys %says) {
        my $want = $says{$bug}{$build}
            || ($build ne 'apart' && $says{$bug}{all});

        next if !$want;

        my @setting = @{$environment{$build} || []};
        my $out = run("$path $bug", @setting);
        my $status = $?;

        isnt($status, 0, "$build, $bug: noticed");
        like($out, $want, "$build, $bug: how");

        $out = run("$path $bug fixed", @setting);
        is($?, 0, "$build, $bug: passes when it is fixed") or diag $out;
    }
}


# --- settings from the environment ---

my @settings = (
    [3, qr/^wrong with seed 7$/, LLM_SHIM_SEED => 7],
    [2, qr/LLM_SHIM_SEED=x is no number/, LLM_SHIM_SEED => 'x'],
    [4, qr/^out of memory$/, LLM_SHIM_FAIL => 'malloc:1'],
    [4, qr/^an illegal memory access was encountered$/,
     LLM_SHIM_FAIL => 'async:1'],
    [4, qr/^unknown error$/, LLM_SHIM_FAIL => 'malloc:9,call:2'],
    [2, qr/LLM_SHIM_FAIL: luck:3/, LLM_SHIM_FAIL => 'call:9,luck:3'],
    [4, qr/^out of memory$/, LLM_SHIM_MEMORY => 100],
    [4, qr/^no CUDA-capable device/, LLM_SHIM_DEVICE => 'none'],
    [3, qr/^wrong with seed 0$/, LLM_SHIM_DEVICE => '80,90'],
    [4, qr/^CUDA driver version is insufficient/, LLM_SHIM_DEVICE => 'old'],
    [3, qr/^wrong with seed 0$/, LLM_SHIM_WORKERS => 2, LLM_SHIM_PROTECT => 1],
);

for my $case (@settings) {
    my ($status, $want, @setting) = @$case;
    my $out = run("$program missing_barrier", @setting);

    is($? >> 8, $status, "@setting: status");
    like($out, $want, "@setting");
}

done_testing();
