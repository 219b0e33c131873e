#!/usr/bin/perl

# t/tools/roofline.py: at most six kernels a layer in a decode step, counted
# in the engine over the emulated GPU, and bounds that follow from the bytes.
# With dense weights both norms and the gate are kernels of their own: nine.
# Attention over more than 256 tokens has one more, which combines its splits.

use strict;
use warnings;

use FindBin;
use JSON::PP;
use Test::More;

chdir "$FindBin::Bin/.." or die;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';

plan skip_all => "no $build/emu/llm-engine" if !-x "$build/emu/llm-engine";

my $out = `$python t/tools/roofline.py --model llama-3.2-1b --json`;

is $?, 0, 'it runs' or BAIL_OUT($out);

my $got = decode_json($out);

my %most = (q4_0 => 6, bf16 => 9);

for my $type (sort keys %most) {
    my $layer = $got->{layer}{"llama-3.2-1b $type"};
    my $n = 0;

    $n += $_ for values %$layer;
    cmp_ok $n, '>=', 3, "$type: a layer was seen";
    cmp_ok $n, '<=', $most{$type}, "$type: at most $most{$type} kernels a layer"
        or diag explain $layer;
    is scalar(grep { $_ < 0 } values %$layer), 0, "$type: none is missing";
}

# --- the study's numbers, by hand: 2.47 GB in BF16, 0.70 in Q4_0 ---

my %row = map { ("$_->{type} $_->{gpu} $_->{context}" => $_) } @{$got->{rows}};

is $got->{splits}, 1, 'long contexts: one more, which combines the splits';
is scalar(keys %row), 2 * 3 * 2, 'types, GPUs, contexts';

for my $case (['bf16', 2.472e9], ['q4_0', 0.695e9]) {
    my ($type, $weights) = @$case;
    my $r = $row{"$type H200 8192"};
    my $want = $weights + 8192 * 32768;

    cmp_ok abs($r->{bytes} / $want - 1), '<', 0.02, "$type: bytes a token";
    cmp_ok abs($r->{decode} / (4.8e12 / $want) - 1), '<', 0.02,
        "$type: bound of decode";
    cmp_ok $r->{decode_launched}, '<', $r->{decode}, "$type: launches cost";
    cmp_ok abs($r->{prefill} / 400e3 - 1), '<', 0.02,
        "$type: bound of prefill";
}

done_testing;
