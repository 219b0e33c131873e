#!/usr/bin/perl

# ops/roofline on a small model: a line for every matrix, row count and number
# of threads, figures in order, percentages that follow from them.

use strict;
use warnings;

use File::Temp qw(tempdir);
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $program = "$build/t/ops/roofline";
my $dir = tempdir(CLEANUP => 1);

plan skip_all => "an instrumented build ($build)" if $build =~ /address|thread/;

sub run {
    my ($command) = @_;
    my $out = `$command 2>&1`;

    return ($? >> 8, $out);
}

my ($status, $out) = run("$build/llm-engine synth --like smollm2-135m"
    . " --layers 2 --vocab 600 --out $dir/m.gguf");
is $status, 0, 'a model' or BAIL_OUT($out);

# --- bad input ---

for my $case (['--rounds 0', 2, qr/usage/], ['--rounds', 2, qr/usage/],
    ['--rounds 100', 2, qr/usage/], ['--other 1', 2, qr/usage/],
    ['--isa pentium', 1, qr/unknown instruction set/],
    ["$dir/none.gguf", 1, qr/none\.gguf.*No such file/])
{
    ($status, $out) = run("$program $case->[0]");
    is $status, $case->[1], "$case->[0]: refused";
    like $out, $case->[2], 'and says why';
}

# --- every line ---

($status, $out) = run("$program --rounds 3 $dir/m.gguf");
is $status, 0, 'it runs' or BAIL_OUT($out);

my (%seen, %figures, $threads, $matrix);

for (split /\n/, $out) {
    if (/^\S+: [\d.]+ MB of weights; min, median, max of 3$/) {
        $seen{title}++;

    } elsif (/^\S+, \w+, (\d) threads?$/) {
        $threads = $1;

    } elsif (/^  (\w+)(?: \d+x\d+ Q\w+)?, [\d.]+ MB$/) {
        $matrix = $1;

    } elsif (/^    (read|registers|\d+ rows?) +(\d.*) (G\w+\/s)(?: +(\d+) %)?/) {
        $seen{"$threads $matrix"} .= "$1 $3;";
        $figures{"$threads $matrix $1"} = [split(/ +/, $2), $4];

    } else {
        fail "an unknown line: $_";
    }
}

my $bandwidth = 'read GB/s;1 row GB/s;2 rows GB/s;4 rows GB/s;';
my $isa_has_peak = $out =~ /registers/ ? 'registers GOP/s;' : '';

is delete $seen{title}, 1, 'a title';

for my $n (1, 2) {
    for my $name (qw(qkv out gate_up down head)) {
        my @rows = (8, 16, 32, 64, 128, $name eq 'head' ? () : (256, 512));

        is delete $seen{"$n $name"}, $bandwidth . $isa_has_peak
            . join('', map { "$_ rows GOP/s;" } @rows), "$n threads, $name";
    }

    is delete $seen{"$n all"}, $bandwidth, "$n threads, the model";
}

is_deeply \%seen, {}, 'and nothing else';

# --- figures ---

my @disorder = grep {
    my $v = $figures{$_};

    !($v->[0] > 0 && $v->[0] <= $v->[1] && $v->[1] <= $v->[2])
} keys %figures;

is "@disorder", '', 'above zero, and in order';

# the median of three quotients lies between the quotients of the extremes
my @wrong;

for (grep { /GB|row/ } keys %figures) {
    my ($at, $n) = /^(\d \w+) (\d+) rows?$/ or next;
    my $v = $figures{$_};
    my $limit = $figures{$n <= 4 ? "$at read" : "$at registers"} or next;
    my ($low, $high) = (100 * $v->[0] / $limit->[2], 100 * $v->[2] / $limit->[0]);

    push @wrong, $_ if $v->[3] < $low - 1 || $v->[3] > $high + 1;
}

is "@wrong", '', 'percentages are of the limits';

done_testing;
