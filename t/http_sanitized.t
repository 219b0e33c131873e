#!/usr/bin/perl

# The HTTP tests once more, module and engine built with ASan and UBSan.

use strict;
use warnings;
use FindBin;
use Test::More;

my $build = 'build-address,undefined';

plan skip_all => "$build is not built"
    unless -x "$FindBin::Bin/../$build/llm-engine";

$ENV{LLM_TEST_BUILD} = $build;

for my $test (sort glob "$FindBin::Bin/http_*.t") {
    next if $test eq "$FindBin::Bin/http_sanitized.t";
    my ($name) = $test =~ m{([^/]+)$};
    my $out = `$^X $test 2>&1`;

    ok $? == 0 && $out !~ /^not ok/m, $name
        or diag substr $out, -6000;
}

done_testing;
