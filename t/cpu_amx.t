#!/usr/bin/perl

# The matrix unit's instructions are in the kernels that are built here, in
# the right order, though no machine may be at hand that runs them; the twin's
# build of the same source has none.

use strict;
use warnings;

use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $real = "$build/kernels/cpu/cpu_dot_amx.o";
my $twin = "$build/twin/kernels/cpu/cpu_dot_amx.o";

chomp(my $machine = `uname -m`);

plan skip_all => "kernels for $machine" if $machine ne 'x86_64';
plan skip_all => "$real is not built" if !-f $real;
plan skip_all => 'no objdump' if system('objdump --version >/dev/null 2>&1');

my $instruction = qr/\b(ldtilecfg|tilerelease|tilezero|tileloadd\w*|tilestored
                       |tdp\w+)\s*([^#\n]*)/x;


# Functions of an object that have such instructions: name => a list of them.
sub instructions {
    my ($path) = @_;
    my ($name, %found);

    for (`objdump -d --no-show-raw-insn $path`) {
        $name = $1 if /^[0-9a-f]+ <(\w+)>:/;
        push @{$found{$name}}, [$1, $2 =~ s/\s+$//r] if /$instruction/;
    }

    return %found;
}


my %found = instructions($real);
my @layouts = qw(q4_d16 q4_dm16 q4_dm32 q8_d16 q8_dm16 q8_dm32 q8_dd32);

is_deeply([sort keys %found], [sort map { "dot_$_" } @layouts],
          'each quantised layout has its kernel');

for my $name (sort keys %found) {
    my %n;

    $n{$_->[0]}++ for @{$found{$name}};

    is($n{ldtilecfg}, 1, "$name: one configuration");
    cmp_ok($n{tilerelease} || 0, '>=', 1, "$name: released");
    is($n{tdpbssd}, 2, "$name: two products under way");
    is_deeply([sort keys %n], [qw(ldtilecfg tdpbssd tileloadd tilerelease
                                  tilestored tilezero)],
              "$name: signed bytes, nothing else");

    # a product's operands, last first: weights, activations, dots
    my $steps = join "\n", map { "@$_" } @{$found{$name}};

    for my $tiles ([0, 2, 4], [1, 3, 5]) {
        my ($c, $a, $b) = @$tiles;

        like($steps, qr/^tilezero\ +%tmm$c\n
                        tileloadd\ +[^\n]*,%tmm$a\n
                        tileloadd\ +[^\n]*,%tmm$b\n
                        tdpbssd\ +%tmm$b,%tmm$a,%tmm$c\n
                        tilestored\ +%tmm$c,[^\n]*/mx,
             "$name: tile $c");
    }
}

SKIP: {
    skip "$twin is not built", 1 if !-f $twin;

    my %none = instructions($twin);

    is_deeply([keys %none], [], 'the twin is plain C');
}

done_testing();
