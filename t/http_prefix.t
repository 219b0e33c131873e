#!/usr/bin/perl

# Prefix caching over HTTP: cached_tokens, the next turn of a conversation,
# several choices, who shares with whom, the metrics, and the cache turned off.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/chat/completions';
my $t = LLM::Test->new(
    http => 'log_format llm "$llm_prompt_tokens $llm_cached_tokens";',
    location => 'llm_cache_salt $http_x_tenant; access_log %%DIR%%/llm.log llm;',
)->start;

# a system prompt of many pages; the number makes it new
sub messages {
    my ($n, @more) = @_;

    return [{ role => 'system', content => "Library $n. "
            . 'You help visitors of a library. Answer in one short sentence. '
            . 'The library opens at nine and closes at six, on Saturdays at '
            . 'two, and never opens on Sundays.' },
        { role => 'user', content => 'When do you open?' }, @more];
}

sub ask {
    my ($messages, %o) = @_;
    my @headers = map { "X-Tenant: $_" } grep { defined } delete $o{tenant};
    my $r = $t->post($uri, { messages => $messages, temperature => 0,
        max_tokens => 24, %o }, headers => \@headers);

    is $r->{status}, 200, 'answered' or diag $r->{body};
    return $r->json;
}

sub cached { $_[0]{usage}{prompt_tokens_details}{cached_tokens} }

# what a prompt of n tokens can have at most: whole pages, not its last token
sub most { int(($_[0]{usage}{prompt_tokens} - 1) / 16) * 16 }

# --- the same prompt again, streamed and not ---

my $first = ask(messages(1));
is cached($first), 0, 'a new prompt is computed';
cmp_ok most($first), '>=', 48, 'it has some pages';

my $second = ask(messages(1));
is cached($second), most($first), 'the same again: all pages but the last';
is $second->{choices}[0]{message}{content},
    $first->{choices}[0]{message}{content}, 'and the same answer';

my $s = $t->stream($uri, { messages => messages(1), temperature => 0,
    max_tokens => 24, stream_options => { include_usage => \1 } })->finish;
my ($usage) = grep { ref && $_->{usage} } $s->chunks;
is cached($usage), most($first), 'streamed: the same number';
is $s->text, $first->{choices}[0]{message}{content}, 'and the same answer';

is $t->metric('vllm:prefix_cache_queries_total'),
    3 * $first->{usage}{prompt_tokens}, 'metrics: queries';
is $t->metric('vllm:prefix_cache_hits_total'), 2 * most($first),
    'metrics: hits';
is $t->metric('llm_preempted_queries_total'), 0, 'metrics: nothing preempted';
is $t->metric('llm_preempted_hits_total'), 0, 'metrics: nor found again';

# --- the next turn: history, with what was generated ---

my $answer = $first->{choices}[0]{message}{content};
my $turn = ask(messages(1, { role => 'assistant', content => $answer },
    { role => 'user', content => 'And on Saturdays?' }));
cmp_ok cached($turn), '>', most($first), 'the next turn finds the answer, too';
cmp_ok cached($turn), '<=', $first->{usage}{total_tokens},
    'but no more than there was';

# --- choices ---

my $n = ask(messages(2), n => 4, temperature => 1, seed => 1);
my $before = $t->metric('vllm:prefix_cache_hits_total');
is cached($n), 0, 'choices: the prompt was new';
$n = ask(messages(3), n => 4, temperature => 1, seed => 1);
is $t->metric('vllm:prefix_cache_hits_total') - $before, cached($n)
    + 3 * ($n->{usage}{prompt_tokens} - 1),
    'choices: the prompt is computed once, three of four compute a token of it';
isnt $n->{choices}[0]{message}{content}, $n->{choices}[1]{message}{content},
    'and they differ';

# the choices of a request are those of four with the seeds that follow; a
# prompt of less than a page, which no cache could have, is computed once, too
for my $prompt ('Once upon a time, in a land far, far away', 'The number '
    . join(', ', 50 .. 80)) {
    my %o = (prompt => $prompt, temperature => 1, max_tokens => 12,
        logprobs => 1);
    my %before = map { $_ => $t->metric("vllm:prefix_cache_${_}_total") }
        qw(queries hits);
    my $all = $t->post('/v1/completions', { %o, n => 4, seed => 40 })->json;
    my $len = $all->{usage}{prompt_tokens};

    cmp_ok $len, '>', 9, 'a prompt long enough to wait for';
    is cached($all), 0, 'which is new';
    is $t->metric('vllm:prefix_cache_queries_total') - $before{queries},
        4 * $len, 'is looked up four times';
    is $t->metric('vllm:prefix_cache_hits_total') - $before{hits},
        3 * ($len - 1), 'and computed once';

    for my $i (0 .. 3) {
        my $one = $t->post('/v1/completions', { %o, seed => 40 + $i })->json;

        is_deeply [@{ $one->{choices}[0] }{qw(text logprobs finish_reason)}],
            [@{ $all->{choices}[$i] }{qw(text logprobs finish_reason)}],
            "choice $i is what its seed gives alone";
    }
}

# --- salts ---

my %tenant = (tenant => 'a');
is cached(ask(messages(1), %tenant)), 0, 'a tenant does not see others';
is cached(ask(messages(1), %tenant)), most($first), 'but itself';
is cached(ask(messages(1), tenant => 'b')), 0, 'nor does another';
is cached(ask(messages(1), %tenant, cache_salt => 'x')), 0,
    'cache_salt divides further';
is cached(ask(messages(1), %tenant, cache_salt => 'x')), most($first),
    'and is found';
is cached(ask(messages(1), tenant => 'b', cache_salt => 'x')), 0,
    'within the tenant alone';
is cached(ask(messages(1), cache_salt => 'a')), 0,
    'a body cannot name a tenant';
is cached(ask(messages(1), tenant => 'ax')), 0,
    'nor run into its value';
is cached(ask(messages(1))), most($first), 'without both: still the first';

for my $bad ('', 1, \1, 'x' x 129, ['x']) {
    my $r = $t->post($uri, { messages => messages(1), cache_salt => $bad });

    is $r->{status}, 400, 'a bad cache_salt';
    is $r->json->{error}{param}, 'cache_salt', 'is named';
}

is cached(ask(messages(1), cache_salt => "\x{e9}" x 128)), 0,
    '128 characters are fine';

# --- completions: an echo with log-probabilities computes everything ---

my $text = join ' ', 1 .. 40;
my %echo = (prompt => $text, max_tokens => 2, temperature => 0, echo => \1,
    logprobs => 1);
my @echo = map { $t->post('/v1/completions', \%echo)->json } 1 .. 2;
is cached($_), 0, 'echo with logprobs: nothing is taken over' for @echo;
is_deeply $echo[0]{choices}, $echo[1]{choices}, 'both times the same';
delete @echo{qw(echo logprobs)};
is cached($t->post('/v1/completions', \%echo)->json), most($echo[0]),
    'but its pages can be';

# --- idle: nothing is held, much is findable ---

$t->idle_ok('no page is held');
cmp_ok $t->metric('llm_kv_pages_cached'), '>', 10, 'pages stay findable';

my @log = map { [split] } grep { /^\d/ } split /\n/, $t->log('llm.log');
is $log[1][1], most($first), '$llm_cached_tokens';
$t->stop_ok;

# --- off ---

$t = LLM::Test->new(engine => 'prefix_caching off; chunked_prefill off;
    max_model_len 1024; max_num_batched_tokens 1024;')->start;
my @off = map { ask(messages(1)) } 1 .. 2;
is cached($_), 0, 'off: nothing is cached' for @off;
is $off[1]{choices}[0]{message}{content}, $answer, 'off: the same answer';
is $t->metric('vllm:prefix_cache_queries_total'), 0, 'off: nothing counted';
is $t->metric('llm_kv_pages_cached'), 0, 'off: nothing findable';
$t->idle_ok;
$t->stop_ok;

done_testing;
