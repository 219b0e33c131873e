#!/usr/bin/perl

# Runs each libFuzzer target for a bounded time on its seed corpus.  They are
# built by clang into build-fuzz (see Makefile); without them, nothing to do.

use strict;
use warnings;
use File::Temp qw(tempdir);
use FindBin;
use Test::More;

my $top = "$FindBin::Bin/..";
my @targets = glob "$top/build-fuzz/t/fuzz/*_fuzz";

plan skip_all => 'no fuzz targets are built' unless @targets;

my $seconds = $ENV{LLM_TEST_FUZZ_SECONDS} || 20;

for my $target (@targets) {
    my ($name) = $target =~ m{([^/]+)_fuzz$};
    my $work = tempdir(CLEANUP => 1);
    my $log = `$target -max_total_time=$seconds -timeout=10 -rss_limit_mb=2048 \\
        -verbosity=1 -print_final_stats=1 -artifact_prefix=$work/ $work \\
        $top/t/fuzz/corpus/$name 2>&1`;

    is $?, 0, "$name: $seconds s" or diag substr $log, -4000;
    my ($runs) = $log =~ /stat::number_of_executed_units:\s+(\d+)/;
    cmp_ok $runs // 0, '>', 100, "$name: " . ($runs // 0) . ' inputs';
}

done_testing;
