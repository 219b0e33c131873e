#!/usr/bin/perl

# The openai Python client against the real thing: streams, does not stream,
# and raises the right class for each error.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
plan skip_all => "$python has no openai package"
    if system("$python -c 'import openai' 2>/dev/null") != 0;

my $t = LLM::Test->new(workers => 2)->start;
my $client = "$FindBin::Bin/tools/openai_client.py";

open my $out, '-|', $python, $client, "http://127.0.0.1:$t->{port}" or die $!;
while (<$out>) {
    /^ok \d+ - (.*)/ ? pass($1) : /^not ok \d+ - (.*)/ ? fail($1) : diag $_;
}
close $out;
is $?, 0, 'the client ran to its end';

# an engine that is not there
kill 'STOP', my $engine = $t->engine_pid;
kill 'KILL', $engine;
$t->idle_ok;
$t->stop_ok(except => qr/exited on signal 9/);
done_testing;
