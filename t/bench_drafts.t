#!/usr/bin/perl

# bench/drafts on a small model: a line for every contest, figures in order, the
# same answers with drafts and without.

use strict;
use warnings;

use File::Temp qw(tempdir);
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $program = "$build/t/bench/drafts";
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

for my $bad ('--rounds 0', '--rounds 101', '--other 1', "--model $dir/none") {
    ($status, $out) = run("$program --model $dir/m.gguf $bad");
    is $status, 2, "$bad: refused";
}

($status, $out)
    = run("$program --model $dir/m.gguf --draft $dir/m.gguf --rounds 1");
is $status, 0, 'it runs, and the answers are the same' or diag $out;

my %seen;

while ($out =~ m{^(\S+)\ +(\d+)\ streams:\ off\ +([\d.]+),\ on\ +([\d.]+)\ tok/s,\ ratio
                 \ ([\d.]+)\ /\ ([\d.]+)\ /\ ([\d.]+);\ (\d+)\ of\ (\d+)\ drafts
                 \ right$}mgx)
{
    $seen{$1} .= "$2 ";
    ok $3 > 0 && $4 > 0 && $5 <= $6 && $6 <= $7, "$1 $2: figures in order";
    cmp_ok $8, '<=', $9, "$1 $2: no more right than made";
}

is_deeply \%seen, { noise => '1 4 16 64 ', repeat => '1 ',
    'look-up' => '1 16 64 ', model => '1 4 16 64 ' }, 'every contest';

done_testing;
