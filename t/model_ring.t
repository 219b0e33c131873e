#!/usr/bin/perl

# Proves the protocol of engine/ipc with spin: the model as it is has no
# error, and with any one of its steps taken away it has one.

use strict;
use warnings;

use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use Test::More;

my $model = dirname(abs_path(__FILE__)) . '/model/ring.pml';
my $cc = $ENV{CC} || 'cc';

plan(skip_all => 'spin is not installed')
    if system('spin -V > /dev/null 2>&1') != 0;

my @bugs = qw(
    BUG_NO_RECHECK BUG_FLAG_FIRST BUG_LATE_CLEAR BUG_NO_NOTIFIED
    BUG_NO_SPACE_RECHECK BUG_TAIL_FIRST
);

my $out = search();

like($out, qr/errors: 0\b/, 'the protocol holds') or diag($out);
unlike($out, qr/max search depth too small|out of memory|aborted/,
    'the search was complete');
like($out, qr/^\s*(\d{4,}) states, stored/m, 'and not trivial');

my @all_reached = $out =~ /\(0 of \d+ states\)/g;
is(scalar @all_reached, 2, 'every step of both sides was taken');

if ($out =~ /([\d.e+]+) states, stored/) {
    note("$1 states");
}

foreach my $bug (@bugs) {
    $out = search("-D$bug");
    like($out, qr/errors: [1-9]/, "$bug is found") or diag($out);

    # the reason, so that a broken model is not taken for a caught bug
    my ($why) = $out =~ /pan:\d+: (.*)/;
    like($why // '', qr/assertion violated|invalid end state/,
        "$bug: " . ($why // 'no reason'));
}

done_testing();


# Builds and runs the verifier in a folder of its own; all it says.

sub search {
    my (@define) = @_;
    my $dir = tempdir(CLEANUP => 1);
    my $spin = join(' ', 'spin -a', @define, "'$model'");

    my $text = `cd $dir && $spin 2>&1`;
    $text .= `cd $dir && $cc -w -O1 -DSAFETY -DMEMLIM=1024 -o pan pan.c 2>&1`;
    $text .= `cd $dir && ./pan -m100000 2>&1`;

    return $text;
}
