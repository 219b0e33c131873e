#!/usr/bin/perl

# Clients that leave and clients that do not read.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use List::Util qw(shuffle);
use Test::More;
use Time::HiRes qw(sleep time);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

# it has to be longer than what a slow reader takes to be parked
my $send_timeout = ($ENV{LLM_TEST_BUILD} // '') =~ /address/ ? '30s' : '8s';

my $t = LLM::Test->new(
    engine => 'max_num_seqs 4; max_num_batched_tokens 64;',
    listen => 'sndbuf=4k', server => "send_timeout $send_timeout;")->start;
my $uri = '/v1/completions';
my %long = (prompt => 'Once upon a time', max_tokens => 4000,
    ignore_eos => \1);

# --- leaving while streaming, while waiting for the whole, while queued ---

my $s = $t->stream($uri, { %long });
ok $s->next_event, 'streaming';
cmp_ok $t->metric('llm_kv_pages_used'), '>', 0, 'pages are in use';
$s->abort;
$t->idle_ok('a stream that was left frees its pages');

my $w = $t->open_request(POST => $uri, { %long });
ok wait_for(sub { $t->metric('vllm:num_requests_running') > 0 }, 5), 'running';
$w->abort;
$t->idle_ok('so does a request that was not streamed');

my @busy = map { $t->stream($uri, { %long }) } 1 .. 4;
$_->next_event for @busy;
my @queued = map { $t->open_request(POST => $uri, { %long }) } 1 .. 5;
ok wait_for(sub { $t->metric('vllm:num_requests_waiting') == 5 }, 5), 'queued';
$_->abort for @queued;
ok wait_for(sub { $t->metric('vllm:num_requests_waiting') == 0 }, 5),
    'queued ones that were left are gone';
is $t->metric('vllm:num_requests_running'), 4, 'the others run on';
$_->abort for @busy;
$t->idle_ok;

my $prefill = $t->open_request(POST => $uri, { prompt => [(504) x 8000],
    max_tokens => 100 });
sleep 0.05;
$prefill->abort;
$t->idle_ok('a long prompt that was left frees its pages');

# --- a client that does not read parks only itself ---

my $slow = $t->stream($uri, { %long, logprobs => 20 }, rcvbuf => 2048);
$slow->next_event;
ok wait_for(sub { ($t->metric('llm_requests_parked') // 0) == 1 }, 60),
    'a slow reader is parked' or diag $t->get('/metrics')->{body};
my $other = $t->post($uri, { prompt => 'x', max_tokens => 20 });
is $other->{status}, 200, 'nobody else waits';
ok wait_for(sub { $t->metric('vllm:num_requests_running') == 0 }, 30),
    'send_timeout ends it';
$t->idle_ok;
$slow->abort;

# one that reads late gets everything, in order
my $seq = { prompt => 'x', max_tokens => 1500, ignore_eos => \1,
    temperature => 0, logprobs => 2 };
my $late = LLM::Test->new(engine => 'max_num_seqs 4;', listen => 'sndbuf=4k',
    server => 'send_timeout 900s;')->start;
my $l = $late->stream($uri, $seq, rcvbuf => 2048);
$l->next_event;
wait_for(sub { ($late->metric('llm_requests_parked') // 0) == 1 }, 60);
$l->finish;
is((grep { ref } $l->chunks)[-1]{choices}[0]{finish_reason}, 'length',
    'a late reader gets the end');
is $l->text, $late->post($uri, $seq)->json->{choices}[0]{text},
    'and all of the text';
$late->idle_ok;
$late->stop_ok;

# --- a storm of clients that leave at random moments ---

srand 42;
for my $round (1 .. 3) {
    my @all = map { rand() < 0.5 ? $t->stream($uri, { %long })
        : $t->open_request(POST => $uri, { %long }) } 1 .. 20;
    for my $c (shuffle @all) {
        $c->fill(0.01 * rand);
        $c->abort;
    }
}
$t->idle_ok('after a storm of leavers');

$t->stop_ok;
done_testing;
