#!/usr/bin/perl

# t/tools/roofline.py: at most six kernels a layer in a decode step, counted
# in the engine over the emulated GPU, and bounds that follow from the bytes.
# Norms and gates go with the products, and attention over more than 256 tokens
# puts its splits together itself.

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

for my $type (qw(q4_0 bf16)) {
    my $layer = $got->{layer}{"llama-3.2-1b $type"};
    my $n = 0;

    $n += $_ for values %$layer;
    cmp_ok $n, '>=', 3, "$type: a layer was seen";
    cmp_ok $n, '<=', 6, "$type: at most six kernels a layer"
        or diag explain $layer;
    is scalar(grep { $_ < 0 } values %$layer), 0, "$type: none is missing";
}

# --- the study's numbers, by hand: 2.47 GB in BF16, 0.70 in Q4_0 ---

my %row = map { ("$_->{type} $_->{gpu} $_->{context}" => $_) } @{$got->{rows}};

is $got->{splits}, 0, 'long contexts: not one more';
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
