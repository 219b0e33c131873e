#!/usr/bin/perl

# Text completions: prompt forms, echo, log-probabilities, token ids, limits
# on tokens; tokenize and detokenize; models and health.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new->start;
my $uri = '/v1/completions';
my %greedy = (temperature => 0, max_tokens => 8);
my $france = 'The capital of France is';

my $r = $t->post($uri, { prompt => $france, %greedy });
my $j = $r->json;
is $r->{status}, 200, 'answered';
is $j->{object}, 'text_completion', 'object';
like $j->{id}, qr/^cmpl-[0-9a-f]+$/, 'id';
like $j->{choices}[0]{text}, qr/^ Paris/, 'text';
is $j->{choices}[0]{finish_reason}, 'length', 'finish_reason';
is_deeply [@{ $j->{usage} }{qw(prompt_tokens completion_tokens)}], [5, 8],
    'usage';
my $text = $j->{choices}[0]{text};

# --- forms of prompt ---

$r = $t->post($uri, { prompt => [504, 3575, 282, 4649, 314], %greedy });
is $r->json->{choices}[0]{text}, $text, 'token ids';

$r = $t->post($uri, { prompt => [$france, 'One, two, three,'], %greedy });
is scalar @{ $r->json->{choices} }, 2, 'two prompts';
is $r->json->{choices}[0]{text}, $text, 'the first as alone';
is $r->json->{choices}[1]{index}, 1, 'the second has its index';
like $r->json->{choices}[1]{text}, qr/four/, 'and its own text';

$r = $t->post($uri, { prompt => [[504, 3575, 282, 4649, 314], [504]],
    n => 2, %greedy });
is_deeply [map { $_->{index} } @{ $r->json->{choices} }], [0, 1, 2, 3],
    'prompts × n, in order';
is $r->json->{choices}[1]{text}, $text, 'greedy choices are alike';

my $s = $t->stream($uri, { prompt => $france, %greedy })->finish;
is $s->text, $text, 'stream: the same text';
my @c = $s->chunks;
is $c[0]{object}, 'text_completion', 'stream: the same object name';
is $c[-1], '[DONE]', 'stream: [DONE]';
is $c[-2]{choices}[0]{finish_reason}, 'length', 'stream: finish_reason';

is $t->post($uri, { prompt => $france, temperature => 0 })
    ->json->{usage}{completion_tokens}, 16, 'max_tokens is 16 by default';

# --- echo and log-probabilities ---

$r = $t->post($uri, { prompt => $france, echo => \1, %greedy });
is $r->json->{choices}[0]{text}, $france . $text, 'echo';

$r = $t->post($uri, { prompt => $france, echo => \1, logprobs => 2,
    temperature => 0, max_tokens => 0 });
$j = $r->json->{choices}[0];
is $j->{text}, $france, 'echo alone';
is scalar @{ $j->{logprobs}{tokens} }, 5, 'prompt log-probabilities';
ok !defined $j->{logprobs}{token_logprobs}[0], 'the first is null';
is scalar(grep { defined && $_ < 0 } @{ $j->{logprobs}{token_logprobs} }), 4,
    'the others are logarithms';
is_deeply $j->{logprobs}{text_offset}, [0, 3, 11, 14, 21], 'offsets';

$r = $t->post($uri, { prompt => $france, logprobs => 2, %greedy });
$j = $r->json->{choices}[0]{logprobs};
is scalar @{ $j->{tokens} }, 8, 'log-probabilities';
is $j->{tokens}[0], ' Paris', 'of the text';
is scalar keys %{ $j->{top_logprobs}[0] }, 2, 'with alternatives';

# --- limits on tokens ---

$r = $t->post($uri, { prompt => $france, temperature => 0, max_tokens => 12,
    min_tokens => 12, stop_token_ids => [30] });
is $r->json->{usage}{completion_tokens}, 12, 'min_tokens masks stop tokens';

$r = $t->post($uri, { prompt => $france, temperature => 0, max_tokens => 12,
    stop_token_ids => [30] });
is $r->json->{choices}[0]{stop_reason}, 30, 'stop_token_ids';
is $r->json->{choices}[0]{text}, ' Paris', 'the stop token is left out';

$r = $t->post($uri, { prompt => 'x', ignore_eos => \1, max_tokens => 300,
    logit_bias => { 2 => 100 }, temperature => 0 });
is $r->json->{usage}{completion_tokens}, 300, 'ignore_eos';
$r = $t->post($uri, { prompt => 'x', max_tokens => 300,
    logit_bias => { 2 => 100 }, temperature => 0 });
is $r->json->{usage}{completion_tokens}, 1, 'logit_bias';

# clamped to the context, as vLLM does
my $small = LLM::Test->new(engine => 'max_model_len 64;')->start;
my $few = $small->post($uri, { prompt => [(504) x 60], max_tokens => 50,
    temperature => 0, ignore_eos => \1 });
is $few->json->{usage}{completion_tokens}, 4, 'clamped to the context';
is $few->json->{choices}[0]{finish_reason}, 'length', 'and says length';
is $small->post($uri, { prompt => [(504) x 64] })->{status}, 400,
    'a prompt that fills the context leaves no room';
$small->stop_ok;

# --- tokenize, detokenize ---

$j = $t->post('/tokenize', { prompt => $france })->json;
is_deeply $j->{tokens}, [504, 3575, 282, 4649, 314], 'tokenize';
is $j->{count}, 5, 'count';
is $j->{max_model_len}, 8192, 'max_model_len';
is $t->post('/detokenize', { tokens => $j->{tokens} })->json->{prompt},
    $france, 'detokenize';
is_deeply $t->post('/tokenize', { prompt => '<|im_end|>' })->json->{tokens},
    [2], 'special tokens are parsed';
is scalar(grep { $_ == 2 } @{ $t->post('/tokenize', { prompt => '<|im_end|>',
    parse_special => \0 })->json->{tokens} }), 0, 'or not';
my $umlaut = "na\xc3\xafve \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x8d\x9e";
utf8::decode($umlaut);
my $ids = $t->post('/tokenize', { prompt => $umlaut })->json->{tokens};
is $t->post('/detokenize', { tokens => $ids })->json->{prompt}, $umlaut,
    'beyond ASCII';
my $big = 'word ' x 60000;
is $t->post('/tokenize', { prompt => $big })->json->{count}, 60001,
    'a text far beyond the context';

# --- models, health ---

$j = $t->get('/v1/models')->json;
is $j->{object}, 'list', 'models';
is $j->{data}[0]{id}, 'smollm2', 'id';
is $j->{data}[0]{max_model_len}, 8192, 'max_model_len';
is $t->get('/v1/models/smollm2')->json->{id}, 'smollm2', 'one model';
is $t->get('/v1/models/nope')->{status}, 404, 'another model';
is $t->get('/health')->{status}, 200, 'health';

$t->idle_ok;
$t->stop_ok;
done_testing;
