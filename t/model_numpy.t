#!/usr/bin/perl

# The `ref` backend against an independent forward pass in numpy
# (t/tools/forward.py): a tiny model in every block format, then the real one.
#
# Both compute in double over dequantised weights.  What is left is K and V
# rounded to f16 where the last bits of a float differ, and activations kept
# as floats: up to 2e-4 was seen on tiny models and 4e-3 on the real one, of
# logits up to 35.  A wrong sign, scale, order of values or position moves
# logits by whole units.

use strict;
use warnings;
use File::Temp qw(tempdir);
use FindBin;
use Test::More;

my $top = "$FindBin::Bin/..";
my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $logits = "$build/t/tools/logits";
my ($tiny_bound, $real_bound) = (2e-3, 2e-2);

chdir $top or die "chdir: $!";
plan skip_all => "$logits is not built (make tools)" unless -x $logits;
plan skip_all => "$python has no numpy"
    if system("$python -c 'import numpy' 2>/dev/null") != 0;

my $work = tempdir(CLEANUP => 1);
my @ids = (10, 20, 30, 40, 7, 8, 9, 100, 200, 270, 3 .. 20, 5, 5, 5);


sub compare {
    my ($name, $model, $bound, @tokens) = @_;

    is system("$logits $model ref 0 $work/logits @tokens 2>$work/err"), 0,
        "$name: runs" or diag `cat $work/err`;

    my $out = `$python t/tools/forward.py $model $work/logits @tokens`;
    my ($diff, $most, $same, $n) = split ' ', $out;

    cmp_ok $diff // 'inf', '<=', $bound, "$name: largest difference";
    cmp_ok $most // 0, '>', 5, "$name: of logits worth comparing";
    is $same, $n, "$name: best tokens";
}


sub tiny {
    my ($name, @options) = @_;

    is system('python3', 't/tools/gguf_make.py', "$work/tiny.gguf", @options),
        0, "$name: made";
    compare($name, "$work/tiny.gguf", $tiny_bound, @ids);
}


for my $type (qw(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K)) {
    tiny($type, '--type', $type, '--embd', 256, '--ff', 512, '--layers', 1);
}

tiny('mixed types', '--type', 'Q4_0', '--v-type', 'Q8_0', '--embd-type', 'F16');
tiny('odd shape', qw(--head-dim 32 --kv-heads 1 --layers 3 --separate-head));
tiny('RoPE factors', qw(--rope-freqs --rope-base 500000));
tiny('linear RoPE', qw(--kv llama.rope.scaling.type=str:linear
    --kv llama.rope.scaling.factor=f32:2.5));
tiny('partial RoPE', qw(--kv llama.rope.dimension_count=u32:8));

SKIP: {
    my $model = $ENV{LLM_TEST_MODEL};

    skip 'LLM_TEST_MODEL is not set', 1 unless $model;
    compare('SmolLM2', $model, $real_bound, 1, 9690, 198, 2683, 359, 253, 5356,
        5646, 11173, 3365, 3511, 308, 504, 3575, 282, 4649, 314, 7042, 30);
}

done_testing;
