#!/usr/bin/perl

# Worker CPU time for each streamed token at 64 streams: /proc/PID/schedstat of
# the nginx worker before and after.  Prints; judges nothing.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/../lib";
use LLM::Test;

# numbers, so that JSON does not carry them as strings
my $streams = 0 + ($ARGV[0] || 64);
my $tokens = 0 + ($ARGV[1] || 100);
my $rounds = 0 + ($ARGV[2] || 5);

sub cpu_ns {
    my $ns = 0;
    for my $pid (@_) {
        open my $f, '<', "/proc/$pid/schedstat" or die $!;
        $ns += (split ' ', <$f>)[0];
    }
    return $ns;
}

my $t = LLM::Test->new(workers => 1)->start;
my @workers = $t->children('nginx');
my @us;

for my $round (0 .. $rounds) {
    my $before = cpu_ns(@workers);
    my @all = map { $t->stream('/v1/completions', { prompt => "Story $_:",
        max_tokens => $tokens, ignore_eos => \1, seed => $_ }) } 1 .. $streams;
    $_->finish for @all;
    my $events = 0;
    $events += grep { ref } $_->chunks for @all;
    my $us = (cpu_ns(@workers) - $before) / 1000 / ($streams * $tokens);

    # the first round warms up
    push @us, $us if $round;
    printf "# %d streams × %d tokens, %d events: %.2f µs of worker CPU a "
        . "token%s\n", $streams, $tokens, $events, $us,
        $round ? '' : ' (warm-up)';
}

@us = sort { $a <=> $b } @us;
printf "worker CPU a token: min %.2f, median %.2f, max %.2f µs\n", $us[0],
    $us[@us / 2], $us[-1];
$t->stop;
