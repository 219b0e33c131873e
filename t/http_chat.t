#!/usr/bin/perl

# Chat completions, whole: stream and not, the order of chunks, usage, stop
# strings, log-probabilities, seeds.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new->start;
my $uri = '/v1/chat/completions';
my $hello = [{ role => 'user', content => 'Is water wet? Answer yes or no.' }];

# --- not streamed ---

my $r = $t->post($uri, { messages => $hello, temperature => 0,
    max_tokens => 60 });

is $r->{status}, 200, 'answered';
is $r->{headers}{'content-type'}, 'application/json', 'JSON';
is $r->{headers}{'content-length'}, length $r->{body}, 'with its length';

my $j = $r->json;
like $j->{id}, qr/^chatcmpl-[0-9a-f]+$/, 'id';
is $j->{object}, 'chat.completion', 'object';
like $j->{created}, qr/^\d+$/, 'created is a number';
is $j->{model}, 'smollm2', 'model';
is $j->{choices}[0]{message}{role}, 'assistant', 'role';
like $j->{choices}[0]{message}{content}, qr/water/, 'to the point';
is $j->{choices}[0]{finish_reason}, 'stop', 'it ends by itself';
is $j->{choices}[0]{index}, 0, 'index';
ok exists $j->{choices}[0]{logprobs} && !defined $j->{choices}[0]{logprobs},
    'logprobs is null';
is $j->{usage}{total_tokens},
    $j->{usage}{prompt_tokens} + $j->{usage}{completion_tokens}, 'usage adds up';
is $j->{usage}{prompt_tokens}, 39, 'prompt tokens, template included';
my $whole = $j->{choices}[0]{message}{content};

# --- streamed ---

my $s = $t->stream($uri, { messages => $hello, temperature => 0,
    max_tokens => 60, stream_options => { include_usage => \1 } })->finish;

is $s->{status}, 200, 'stream: answered';
like $s->{headers}{'content-type'}, qr{^text/event-stream}, 'stream: type';
is $s->{headers}{'cache-control'}, 'no-cache', 'stream: no-cache';
is $s->{headers}{'x-accel-buffering'}, 'no', 'stream: no buffering outside';
ok $s->{complete}, 'stream: the body is complete';
is $s->text, $whole, 'stream: the same text';

my @c = $s->chunks;
is pop @c, '[DONE]', 'stream: [DONE] is last';
my $usage = pop @c;
is_deeply $usage->{choices}, [], 'stream: usage has no choices';
cmp_ok $usage->{usage}{prompt_tokens_details}{cached_tokens}, '>', 0,
    'stream: the prompt was cached';
delete $_->{prompt_tokens_details} for $usage->{usage}, $j->{usage};
is_deeply $usage->{usage}, $j->{usage}, 'stream: the same usage';
is_deeply $c[0]{choices}[0]{delta}, { role => 'assistant', content => '' },
    'stream: the role comes first';
is $c[-1]{choices}[0]{finish_reason}, 'stop', 'stream: reason at the end';
is scalar(grep { defined $_->{choices}[0]{finish_reason} } @c), 1,
    'stream: and nowhere else';
is scalar(grep { $_->{id} ne $c[0]{id} || $_->{created} != $c[0]{created}
    || $_->{object} ne 'chat.completion.chunk' } @c), 0, 'stream: one id';
cmp_ok scalar @c, '>', 5, 'stream: in several pieces';

# events arrive while the model works, not at the end
my $long = $t->stream($uri, { messages => $hello, ignore_eos => \1,
    max_tokens => 4000 });
$long->next_event for 1 .. 3;
is $t->metric('vllm:num_requests_running'), 1, 'stream: events come meanwhile';
ok !$long->{complete}, 'stream: not all at once';
$long->abort;
$long = $t->stream($uri, { messages => $hello, ignore_eos => \1,
    max_tokens => 100 })->finish;
is((grep { ref } $long->chunks)[-1]{choices}[0]{finish_reason}, 'length',
    'max_tokens ends it');

# --- stop strings ---

$r = $t->post($uri, { messages => $hello, temperature => 0, stop => 'wet' });
is $r->json->{choices}[0]{finish_reason}, 'stop', 'stop string';
unlike $r->json->{choices}[0]{message}{content}, qr/wet/, 'is left out';
is $r->json->{choices}[0]{stop_reason}, 'wet', 'and named';

$r = $t->post($uri, { messages => $hello, temperature => 0,
    stop => ['xyz', ' is no'], include_stop_str_in_output => \1 });
like $r->json->{choices}[0]{message}{content}, qr/ is no$/, 'or kept on demand';

# --- seeds ---

my %warm = (temperature => 1.2, max_tokens => 30, messages => $hello);
my @same = map { $t->post($uri, { %warm, seed => 7 })
    ->json->{choices}[0]{message}{content} } 1 .. 2;
is $same[0], $same[1], 'one seed, one answer';
isnt $t->post($uri, { %warm, seed => 8 })->json->{choices}[0]{message}{content},
    $same[0], 'another seed, another';

# other ways to write it
for my $json ('"seed":' . ' ' x 40 . '7', '"s\u0065ed": 7', '"seed": 7.0e0') {
    my $body = json_encode(\%warm) =~ s/^\{/{$json,/r;
    is $t->post($uri, $body)->json->{choices}[0]{message}{content}, $same[0],
        "a seed: $json";
}
is $t->post($uri, { %warm, seed => undef })->{status}, 200, 'or null';
my @wide = map { $t->post($uri, json_encode(\%warm) =~ s/^\{/{"seed": $_,/r)
    ->json->{choices}[0]{message}{content} } '9007199254740992',
    '9007199254740993';
isnt $wide[0], $wide[1], 'all of its 64 bits count';

$r = $t->post($uri, { %warm, seed => 7, n => 2 });
is scalar @{ $r->json->{choices} }, 2, 'n choices';
is $r->json->{choices}[0]{message}{content}, $same[0], 'the first is as alone';
isnt $r->json->{choices}[1]{message}{content}, $same[0], 'the second differs';

# --- log-probabilities ---

$r = $t->post($uri, { messages => $hello, temperature => 0, max_tokens => 5,
    logprobs => \1, top_logprobs => 3 });
my $lp = $r->json->{choices}[0]{logprobs}{content};
is scalar @$lp, 5, 'a log-probability for each token';
is scalar @{ $lp->[0]{top_logprobs} }, 3, 'with alternatives';
is $lp->[0]{top_logprobs}[0]{token}, $lp->[0]{token}, 'greedy takes the best';
cmp_ok $lp->[0]{logprob}, '<=', 0, 'it is a logarithm';
is join('', map { $_->{token} } @$lp), $r->json->{choices}[0]{message}{content},
    'the tokens make up the text';
is_deeply $lp->[0]{bytes}, [unpack 'C*', $lp->[0]{token}], 'bytes';

# --- shapes of messages ---

$r = $t->post($uri, { temperature => 0, max_tokens => 60, messages =>
    [{ role => 'user', content => [{ type => 'text',
        text => 'Is water wet? Answer yes or no.' }] }] });
is $r->json->{choices}[0]{message}{content}, $whole, 'content as parts';

$r = $t->post($uri, { temperature => undef, top_p => undef, stop => undef,
    max_tokens => 1, messages => $hello, stream => undef, n => undef,
    some_vendor_field => { a => 1 } });
is $r->{status}, 200, 'null is absent, unknown fields are ignored';

# a control token in a message is text: it must not end the message
my $plain = $t->post('/tokenize', { messages => [{ role => 'user',
    content => 'a<|im_end|>b' }] })->json;
is scalar(grep { $_ == 2 } @{ $plain->{tokens} }), 2,
    'control tokens come from the template only';

$t->idle_ok;
$t->stop_ok;
done_testing;
