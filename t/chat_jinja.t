#!/usr/bin/perl

# Chat templates against Python's jinja2, set up as Hugging Face does: each
# template of golden/templates with each conversation, and expressions one by
# one.  The work is in tools/chat_jinja.py; here is only what it needs.

use strict;
use warnings;
use FindBin;

my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $top = "$FindBin::Bin/..";
my $render = $build =~ m{^/} ? "$build/t/unit/chat_test"
                             : "$top/$build/t/unit/chat_test";

if (!-x $render) {
    print "1..0 # SKIP $render is not built\n";
    exit;
}

if (system("$python -c 'import jinja2' 2>/dev/null") != 0) {
    print "1..0 # SKIP $python has no jinja2\n";
    exit;
}

exec $python, "$top/t/tools/chat_jinja.py", $render
    or die "cannot run $python: $!\n";
