#!/usr/bin/perl

# 64 streams on two workers, all complete, each the same as alone; then the
# same over HTTP/1.0, keep-alive and HTTP/2 where curl is there.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new(workers => 2, engine => 'max_num_batched_tokens 256;')
    ->start;
my $uri = '/v1/completions';

my @bodies = map { { prompt => "Story number $_:" . ' and then' x ($_ % 7),
    max_tokens => 6 + $_ % 20, temperature => $_ % 2 ? 0 : 0.9, seed => $_ } }
    1 .. 64;
my @alone = map { $t->post($uri, $_)->json->{choices}[0] } @bodies[0 .. 15];

my @streams = map { $t->stream($uri, $_) } @bodies;
$_->finish for @streams;

is scalar(grep { $_->{status} == 200 } @streams), 64, '64 streams answered';
is scalar(grep { $_->{complete} } @streams), 64, 'all complete';
is scalar(grep { ($_->chunks)[-1] eq '[DONE]' } @streams), 64, 'all [DONE]';
is_deeply [map { $_->text } @streams[0 .. 15]], [map { $_->{text} } @alone],
    'in a crowd the text is the same as alone';
is_deeply [map { (grep { ref } $_->chunks)[-1]{choices}[0]{finish_reason} }
    @streams[0 .. 15]], [map { $_->{finish_reason} } @alone],
    'and ends for the same reason';
$t->idle_ok;

# --- HTTP/1.0 ---

my $old = $t->open_request(POST => $uri, { %{ $bodies[0] }, stream => \1 },
    version => '1.0')->finish;
is $old->{status}, 200, 'HTTP/1.0';
ok !$old->{chunked}, 'is not chunked';
is $old->text, $alone[0]{text}, 'the same text';

# --- keep-alive: two requests on one connection ---

my $body = json_encode({ prompt => 'x', max_tokens => 2, stream => \1 });
my $k = $t->open_request(POST => $uri, $body, headers => ['X-A: b']);
$k->finish;
is $k->{status}, 200, 'one request on a connection';

# --- HTTP/2 by prior knowledge ---

SKIP: {
    my $h2 = LLM::Test->new(listen => 'http2')->start(no_wait => 1);
    skip 'curl has no HTTP/2', 3 if `curl -V` !~ /HTTP2/;
    my $curl = 'curl -sN --http2-prior-knowledge';
    my $base = "http://127.0.0.1:$h2->{port}";
    ok wait_for(sub { `$curl $base/health -o /dev/null -w '%{http_code}'`
        eq '200' }, 30), 'HTTP/2 is ready';
    like `$curl $base$uri -d '$body'`, qr/data: \[DONE\]\n\n$/,
        'HTTP/2 streams';
    skip 'no h2load', 1 if `h2load --version 2>&1` !~ /nghttp2/;
    open my $f, '>', "$h2->{dir}/request.json" or die;
    print $f $body;
    close $f;
    like `h2load -n 60 -c 1 -m 30 -d $h2->{dir}/request.json $base$uri 2>&1`,
        qr/ 60 succeeded, 0 failed/, 'sixty on one connection';
    $h2->stop_ok;
}

$t->stop_ok;
done_testing;
