#!/usr/bin/perl

# The engine dies: nginx stays up, requests in flight end with a proper error,
# the next one after the respawn is served.  A worker dies: its requests are
# dropped, nobody else notices.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new(workers => 2, location => 'error_page 502 @none;',
    server => 'location @none { return 204; }')->start;
my $uri = '/v1/completions';
my %long = (prompt => 'Once upon a time', max_tokens => 4000,
    ignore_eos => \1);

my $engine = $t->engine_pid;
ok $engine, 'the engine is a child of the master';

# --- kill -9 ---

my @streams = map { $t->stream($uri, { %long }) } 1 .. 8;
ok $_->next_event, 'streaming' for @streams;
my @waiting = map { $t->open_request(POST => $uri, { %long }) } 1 .. 4;
wait_for(sub { $t->metric('vllm:num_requests_running') == 12 }, 10);

kill 'KILL', $engine;
$_->finish(10) for @streams, @waiting;

for my $s (@streams) {
    my @c = $s->chunks;
    is $c[-1], '[DONE]', 'a stream ends properly';
    like $c[-2]{error}{message}, qr/engine/, 'with an error that says why';
}
is $_->{status}, 503, 'a request without headers gets a 503' for @waiting;
ok defined $_->{headers}{'retry-after'}, 'and Retry-After' for @waiting;
is $waiting[0]->json->{error}{type}, 'server_error', 'in the usual shape';

ok wait_for(sub { my $e = $t->engine_pid; $e && $e != $engine }, 10),
    'a new engine is there';
$t->ready;
is $t->post($uri, { prompt => 'x', max_tokens => 2 })->{status}, 200,
    'and serves';
is $t->metric('llm_engine_epoch'), 2, 'it is the second one';
$t->idle_ok;

# --- requests while it is away ---

$engine = $t->engine_pid;
kill 'STOP', $engine;
my $held = $t->open_request(POST => $uri, { prompt => 'x', max_tokens => 2 });
ok !$held->fill(0.3), 'a stopped engine answers nothing';
kill 'KILL', $engine;
is $held->finish(10)->{status}, 503, 'its death is noticed';
$t->ready;

# --- kill -9 of a worker ---

my @busy = map { $t->stream($uri, { %long }) } 1 .. 6;
ok $_->next_event, 'streaming' for @busy;
my @workers = $t->children('nginx');
is scalar @workers, 2, 'two workers';
kill 'KILL', $workers[0];
ok wait_for(sub { my @now = $t->children('nginx'); @now == 2 }, 10),
    'a new worker is there';
$_->abort for @busy;
$t->idle_ok('its requests are dropped');
is $t->post($uri, { prompt => 'x', max_tokens => 2 })->{status}, 200,
    'and it serves';

is $t->stop, 0, 'nginx leaves cleanly';
$t->clean_ok(except => qr/exited on signal 9/);
done_testing;
