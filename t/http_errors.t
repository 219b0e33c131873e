#!/usr/bin/perl

# Bad input always gets a clear error in OpenAI's shape, and loses nothing.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new(server => 'client_max_body_size 11m;')->start;
my $chat = '/v1/chat/completions';
my $text = '/v1/completions';
my @hi = (messages => [{ role => 'user', content => 'hi' }]);

sub error_is {
    my ($r, $status, $param, $like, $name) = @_;
    my $e = eval { $r->json->{error} };

    subtest $name => sub {
        is $r->{status}, $status, 'status';
        is_deeply [sort keys %{ $e || {} }], [qw(code message param type)],
            'all four keys' or diag $r->{body};
        is $e->{param}, $param, 'param';
        like $e->{message}, $like, 'message';
        ok !defined $e->{code} || !ref $e->{code}, 'code';
    };
}

# --- JSON ---

my %broken = (
    'not JSON' => 'hello',
    'cut off' => '{"messages": [',
    'trailing bytes' => '{"prompt": "x"} x',
    'empty' => '',
    'an array' => '[1, 2]',
    'a number' => '7',
    'invalid UTF-8' => "{\"prompt\": \"a\xff\"}",
    'overlong UTF-8' => "{\"prompt\": \"\xc0\xaf\"}",
    'a surrogate' => '{"prompt": "\ud800"}',
    'U+0000' => '{"prompt": "a\u0000b"}',
    'a broken escape' => '{"prompt": "a\u00zz"}',
    'an unknown escape' => '{"prompt": "a\x"}',
    'a raw control character' => "{\"prompt\": \"a\x01b\"}",
    'a depth bomb' => '{"prompt": ' . '[' x 5000 . ']' x 5000 . '}',
    'a huge number' => '{"prompt": "x", "temperature": 1e999}',
);

for my $name (sort keys %broken) {
    my $r = $t->post($text, $broken{$name});
    is $r->{status}, 400, "$name: 400";
    is eval { $r->json->{error}{type} }, 'invalid_request_error',
        "$name: type" or diag $r->{body};
}

# --- fields: (endpoint, body, param, message) ---

my @wrong = (
    [$chat, { messages => [] }, 'messages', qr/at least one|empty/i],
    [$chat, {}, 'messages', qr/required|missing/i],
    [$chat, { messages => 'hi' }, 'messages', qr/array/],
    [$chat, { messages => ['hi'] }, 'messages', qr/object/],
    [$chat, { messages => [{ content => 'hi' }] }, 'messages', qr/role/],
    [$chat, { messages => [{ role => 'king', content => 'hi' }] }, 'messages',
        qr/role/],
    [$chat, { messages => [{ role => 'user', content => 5 }] }, 'messages',
        qr/content/],
    [$chat, { messages => [{ role => 'user', content => [{ type => 'image_url',
        image_url => { url => 'x' } }] }] }, 'messages', qr/image_url|text/],
    [$chat, { @hi, temperature => 'hot' }, 'temperature', qr/number/],
    [$chat, { @hi, temperature => 2.5 }, 'temperature', qr/2/],
    [$chat, { @hi, temperature => -1 }, 'temperature', qr/0/],
    [$chat, { @hi, top_p => 0 }, 'top_p', qr/0/],
    [$chat, { @hi, top_p => 1.5 }, 'top_p', qr/1/],
    [$chat, { @hi, min_p => 2 }, 'min_p', qr/1/],
    [$chat, { @hi, top_k => -7 }, 'top_k', qr/-1|0/],
    [$chat, { @hi, presence_penalty => 3 }, 'presence_penalty', qr/2/],
    [$chat, { @hi, frequency_penalty => -3 }, 'frequency_penalty', qr/2/],
    [$chat, { @hi, repetition_penalty => 0 }, 'repetition_penalty', qr/0/],
    [$chat, { @hi, max_tokens => 0 }, 'max_tokens', qr/1/],
    [$chat, { @hi, max_tokens => 1.5 }, 'max_tokens', qr/integer/],
    [$chat, { @hi, max_tokens => 99999999 }, 'max_tokens', qr/max_model_len/],
    [$chat, { @hi, min_tokens => 10, max_tokens => 5 }, 'min_tokens',
        qr/max_tokens/],
    [$chat, { @hi, n => 0 }, 'n', qr/1/],
    [$chat, { @hi, n => 1000000 }, 'n', qr/\d/],
    [$chat, { @hi, stop => 7 }, 'stop', qr/string/],
    [$chat, { @hi, stop => [''] }, 'stop', qr/empty/],
    [$chat, { @hi, stop => ['a', 'b', 'c', 'd', 'e'] }, 'stop', qr/4/],
    [$chat, { @hi, seed => 'x' }, 'seed', qr/integer/],
    [$chat, { @hi, stream => 'yes' }, 'stream', qr/true or false/],
    [$chat, { @hi, top_logprobs => 3 }, 'top_logprobs', qr/logprobs/],
    [$chat, { @hi, logprobs => \1, top_logprobs => 99 }, 'top_logprobs',
        qr/20/],
    [$chat, { @hi, stream_options => { include_usage => \1 } },
        'stream_options', qr/stream/],
    [$chat, { @hi, tools => [] }, 'tools', qr/tools|empty/],
    [$chat, { @hi, response_format => { type => 'json_object' } },
        'response_format', qr/support/],
    [$chat, { @hi, logit_bias => { x => 1 } }, 'logit_bias', qr/token/i],
    [$chat, { @hi, logit_bias => { 99999999 => 1 } }, 'logit_bias',
        qr/token id below 49152/],
    [$text, {}, 'prompt', qr/required|missing/i],
    [$text, { prompt => 7 }, 'prompt', qr/string/],
    [$text, { prompt => [] }, 'prompt', qr/empty/],
    [$text, { prompt => '' }, 'prompt', qr/empty/],
    [$text, { prompt => [1, 'x'] }, 'prompt', qr/./],
    [$text, { prompt => [-1] }, 'prompt', qr/vocabulary/],
    [$text, { prompt => [49152] }, 'prompt', qr/vocabulary/],
    [$text, { prompt => 'x', max_tokens => 0 }, 'max_tokens', qr/echo|1/],
    [$text, { prompt => 'x', suffix => 'y' }, 'suffix', qr/support/],
    ['/detokenize', { tokens => 'x' }, 'tokens', qr/array/],
    ['/detokenize', { tokens => [99999999] }, 'tokens', qr/vocabulary/],
);

for my $case (@wrong) {
    my ($uri, $body, $param, $like) = @$case;
    error_is($t->post($uri, $body), 400, $param, $like,
        "$uri: " . substr json_encode($body), 0, 70);
}

# --- the model, the context, the endpoint ---

my $r = $t->post($chat, { @hi, model => 'gpt-4' });
error_is($r, 404, 'model', qr/The model `gpt-4` does not exist/, 'model');
is $r->json->{error}{code}, 'model_not_found', 'its code';

for my $body ({ prompt => [(504) x 8192] }, { prompt => 'word ' x 20000 }) {
    $r = $t->post($text, $body);
    error_is($r, 400, 'prompt', qr/This model's maximum context length is 8192/,
        'prompt too long');
    is $r->json->{error}{code}, 'context_length_exceeded', 'its code';
}

$r = $t->post($chat, { messages => [{ role => 'user',
    content => 'word ' x 20000 }] });
error_is($r, 400, 'messages', qr/This model's maximum context length is/,
    'messages too long');

error_is($t->get('/v1/nope'), 404, undef, qr/./, 'unknown path');
$r = $t->get($chat);
error_is($r, 405, undef, qr/GET is not allowed/, 'wrong method');
like $r->{headers}{allow}, qr/POST/, 'Allow';
is $t->open_request(DELETE => '/v1/models')->finish->{status}, 405,
    'DELETE on models';

# --- size ---

my $mega = 'x' x (10 * 1024 * 1024);
$r = $t->post($text, { prompt => $mega });
ok $r->{status} == 400 || $r->{status} == 413, '10 MB: refused';
ok defined eval { $r->json->{error}{message} }, '10 MB: in the right shape';
$r = $t->post($text, { prompt => 'x', junk => 'y' x (2 * 1024 * 1024),
    max_tokens => 1 });
is $r->{status}, 200, 'a large body with a small prompt is fine';
$r = $t->post($text, { prompt => $mega . $mega });
is $r->{status}, 413, 'beyond client_max_body_size';
ok defined eval { $r->json->{error}{message} }, 'in the right shape';

# --- what clients send is not for the log, least of all as a line of its own ---

my $secret = 'xyzzy';
$t->post($_->[0], $_->[1], headers => ["Authorization: Bearer $secret"])
    for [$chat, { @hi, model => "a\n2026/01/01 [emerg] $secret" }],
    [$chat, { messages => [{ role => $secret, content => $secret }] }],
    [$chat, { messages => [{ role => 'user', content => [{ type => $secret }] }] }],
    [$chat, { @hi, logit_bias => { $secret => 1 } }],
    [$chat, { @hi, response_format => { type => $secret } }],
    [$chat, { messages => [{ role => 'user', content => $secret }],
        max_tokens => 2 }],
    [$text, { prompt => "$secret " x 20000 }],
    [$text, { prompt => $secret, stop => $secret, max_tokens => 2,
        request_id => $secret }];
unlike $t->log, qr/$secret/, 'the log has nothing of what clients send';

# --- many at once, and it still works ---

my @all = map { $t->open_request(POST => $text, $broken{'cut off'}) } 1 .. 50;
$_->finish for @all;
is scalar(grep { $_->{status} == 400 } @all), 50, 'fifty at once';
is $t->post($text, { prompt => 'x', max_tokens => 2 })->{status}, 200,
    'then a good one';

$t->idle_ok;
$t->stop_ok;
done_testing;
