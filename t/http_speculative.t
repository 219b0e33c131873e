#!/usr/bin/perl

# Speculative decoding through nginx: whatever drafts, the answers are those of
# an engine without, alone and in a crowd; what is counted as drafted and
# accepted is what follows from the steps and rows that the answers took; a
# model that cannot draft is refused at start.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use List::Util qw(sum0);
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

# The engines, by what they have more than the one without.
my %drafting = (
    ngram => 'speculative ngram; num_speculative_tokens 4;',
    suffix => 'speculative suffix; num_speculative_tokens 3;',
    model => 'speculative_model %%MODEL%%; num_speculative_tokens 2;',
    all => 'speculative ngram min=3 max=8; speculative suffix;
        speculative_model %%MODEL%%; num_speculative_tokens 15;',
    auto => 'speculative suffix; speculative ngram max=4 min=1;
        speculative_model %%MODEL%%; num_speculative_tokens auto;',
);
my @drafting = sort keys %drafting;
my $same = 'program %%DIR%%/bin/llm-engine; max_model_len 1024;
    max_num_seqs 16;';
my $kv = 'kv_cache_memory 96m;';

# Drafts of another vocabulary: other tokens, as many or fewer.
my %wrong = (
    smaller => [qr/it has 999 tokens, the model \d+: use one of the same/,
        '--vocab 999'],
    other => [qr/its token \d+ is not that of the model: use one of the same/,
        '--vocab 49152'],
    none => [qr/".*none\.gguf": this is not a GGUF file/],
);

my $t = LLM::Test->new(engine => "max_model_len 1024; $kv",
    http => "log_format rate '\$uri \$llm_completion_tokens \$llm_accept_rate';"
        . join(' ', map { "llm_engine $_ { model %%MODEL%% alias=smollm2; $same
            $kv $drafting{$_} }" } @drafting)
        . join(' ', map { "llm_engine bad_$_ { model %%MODEL%%; $same
            speculative_model %%DIR%%/$_.gguf; }" } sort keys %wrong),
    server => join(' ', map { "location /$_/ { llm_pass $_;
            access_log %%DIR%%/rates.log rate; }" } @drafting)
        . ' location /chat/ { llm_pass chat;
            access_log %%DIR%%/rates.log rate; }'
        . join ' ', map { "location /bad_$_/ { llm_pass bad_$_; }" }
            sort keys %wrong);

for my $name (sort keys %wrong) {
    my $path = "$t->{dir}/$name.gguf";
    my $how = $wrong{$name}[1];

    if ($how) {
        my $made = `$t->{dir}/bin/llm-engine synth --like smollm2-135m --layers 1 $how --out $path 2>&1`;
        is $?, 0, "a model: $name" or diag $made;
    } else {
        open my $f, '>', $path or die $!;
        print $f 'not a model';
        close $f;
    }

    chmod 0644, $path;
}

$t->start;
for my $name (@drafting) {
    ok wait_for(sub { $t->get("/$name/health")->{status} == 200 }, 60),
        "ready: $name" or diag $t->log;
}

# --- the engine is told what the block says ---

sub words {
    for my $pid ($t->children('llm-engine')) {
        open my $f, '<', "/proc/$pid/cmdline" or next;
        local $/;
        my @words = split /\0/, <$f>;

        return join ' ', map { s/\Q$t->{model_path}\E/MODEL/r }
            grep { /speculative/ } @words if grep { $_ eq "name=$_[0]" } @words;
    }

    return;
}

is words('chat'), '', 'nothing said';
is words('ngram'), 'speculative=ngram:2:5 num_speculative_tokens=4',
    'a drafter with its defaults';
is words('all'), 'speculative=ngram:3:8,suffix speculative_model=MODEL '
    . 'num_speculative_tokens=15', 'all of them';
is words('auto'), 'speculative=suffix,ngram:1:4 speculative_model=MODEL',
    'in their order, and auto';

# --- the same answers ---

my $code = <<'CODE';
def add(a, b):
    return a + b


def sub(a, b):
    return a - b


def mul(a, b):
    return a * b


CODE
my $text = 'The harbour was quiet. Two boats lay at the old pier, and a man '
    . 'in a red coat counted the crates that had come from the island.';
my $uri = '/v1/completions';
my $chat = '/v1/chat/completions';

sub user { return (messages => [{ role => 'user', content => $_[0] }]) }

my @requests = (
    ['code', $uri, { prompt => $code, max_tokens => 60, temperature => 0,
        logprobs => 3 }],
    ['repeat, streamed', $chat, { user("Repeat this text:\n\n$text"),
        max_tokens => 60, temperature => 0, logprobs => \1, top_logprobs => 2,
        stream => \1, ignore_eos => \1 }],
    ['seeded', $chat, { user("Say it in other words: $text"), seed => 7,
        max_tokens => 40, temperature => 0.8, top_p => 0.9 }],
    ['penalties, a stop string', $uri, { prompt => "1, 2, 3, 4, 5, 6,",
        max_tokens => 60, seed => 3, temperature => 0.5, stop => ['17', '31'],
        repetition_penalty => 1.05, presence_penalty => 0.1, min_tokens => 9,
        logprobs => 1 }],
    ['short', $uri, { prompt => $text, max_tokens => 1, temperature => 0 }],
    ['seeded, streamed', $uri, { prompt => "$text $text", seed => 11,
        max_tokens => 50, temperature => 0.7, top_k => 20, stream => \1,
        logprobs => 1, ignore_eos => \1 }],
    ['code again', $uri, { prompt => $code, max_tokens => 64,
        temperature => 0 }],
    ['two answers', $chat, { user('Count to twenty.'), n => 2, seed => 5,
        max_tokens => 40, temperature => 0.6, stream => \1 }],
);

sub start_request {
    my ($at, $uri, $body) = @_;

    return $t->open_request(POST => "$at$uri", $body->{stream}
        ? { %$body, stream_options => { include_usage => \1 } } : $body);
}

# What the client gets of each choice, however it was cut; and the usage.
sub answer_of {
    my ($r) = @_;
    my @parts = ($r->{headers}{'content-type'} // '') =~ /event-stream/
        ? grep { ref } $r->chunks : $r->json;
    my (@choices, $usage);

    for my $part (@parts) {
        $usage = $part->{usage} if $part->{usage};
        for my $c (@{ $part->{choices} }) {
            my $to = $choices[$c->{index}] //= { text => '', logprobs => [] };
            my $l = $c->{logprobs} // {};

            $to->{text} .= $c->{text} // ($c->{delta} // $c->{message})->{content}
                // '';
            $to->{finish} = $c->{finish_reason} if $c->{finish_reason};
            $to->{stop} = $c->{stop_reason} if defined $c->{stop_reason};
            push @{ $to->{logprobs} }, $l->{content} ? @{ $l->{content} }
                : map { [$l->{tokens}[$_], $l->{token_logprobs}[$_],
                    $l->{top_logprobs}[$_]] } 0 .. $#{ $l->{tokens} // [] };
        }
    }

    return { choices => \@choices, prompt => $usage->{prompt_tokens},
        output => $usage->{completion_tokens},
        cached => $usage->{prompt_tokens_details}{cached_tokens} };
}

sub same_ok {
    my ($got, $want, $name) = @_;

    is_deeply [@$got{qw(choices prompt output)}],
        [@$want{qw(choices prompt output)}], $name;
}

# --- what is counted ---

my $spec = 'vllm:spec_decode_num_';

# Counters of an engine, the places in a list.
sub counters {
    my ($engine) = @_;
    my %c;

    for (split /\n/, $t->get('/metrics')->{body}) {
        my ($name, $more, $value) = /^([\w:]+)\{engine="$engine",
            model_name="[^"]*",?([^}]*)\}\ (\S+)$/x or next;
        if ($more =~ /^position="(\d+)"$/) {
            $c{$name}[$1] = $value;
        } elsif ($more eq '') {
            $c{$name} = $value;
        }
    }

    return \%c;
}

my $logged = 0;

# The rate that was logged for the next request.
sub next_rate {
    my ($engine, $uri, $output) = @_;
    my @lines;

    wait_for(sub { @lines = grep { m{/v1/} } split /\n/, $t->log('rates.log');
        @lines > $logged }, 5);
    my ($at, $tokens, $rate) = split / /, $lines[$logged++] // '';
    is_deeply [$at, $tokens], ["/$engine$uri", $output], 'the log has it'
        or diag "line $logged: $at $tokens $rate";

    return $rate;
}

# From one request that had the engine to itself: a step draws one token, and
# one more for each draft that was right; a row is a token of the prompt, a
# token drawn but for the last, or a draft that was wrong.
sub count_ok {
    my ($engine, $uri, $answer, $was, $now, $name) = @_;
    my %d = map { $_ => $now->{$_} - $was->{$_} } qw(llm_steps_total
        vllm:iteration_tokens_total_sum), map { "$spec${_}_total" }
        qw(drafts draft_tokens accepted_tokens);
    my ($drafts, $drafted, $accepted) =
        map { $d{"$spec${_}_total"} } qw(drafts draft_tokens accepted_tokens);
    my $places = "${spec}accepted_tokens_per_pos_total";
    my @at = map { $now->{$places}[$_] - $was->{$places}[$_] } 0 .. 14;
    my $rate = next_rate($engine, $uri, $answer->{output});

    is sum0(@at), $accepted, "$name: accepted, by place";
    ok !(grep { $at[$_] > $at[$_ - 1] } 1 .. 14),
        "$name: no draft without the ones before";
    cmp_ok $at[0], '<=', $drafts, "$name: drafts";

    # the last draft may be the end
    if (@{ $answer->{choices} } == 1) {
        my $saved = $answer->{output} - $d{llm_steps_total};
        my $wrong = $d{'vllm:iteration_tokens_total_sum'} - $answer->{prompt}
            + $answer->{cached} - ($answer->{output} - 1);
        my $end = $answer->{choices}[0]{finish} eq 'stop' ? 1 : 0;

        ok $accepted == $saved || $accepted == $saved + $end,
            "$name: each draft that is right has saved a step"
            or diag "$accepted accepted, $saved saved";
        ok $drafted - $accepted == $wrong
            || $drafted - $accepted == $wrong - $end,
            "$name: each that is wrong has cost a row"
            or diag "$drafted drafted, $accepted accepted, $wrong wrong";
        cmp_ok $drafts, '<=', $d{llm_steps_total} - 1,
            "$name: none in the first step";
    }

    if ($drafted) {
        like $rate, qr/^[01]\.\d{3}$/, "$name: a rate";
        cmp_ok abs($rate - $accepted / $drafted), '<=', 0.0005001,
            "$name: \$llm_accept_rate";
    } else {
        is $rate, '-', "$name: no rate without drafts";
    }

    return ($drafted, $accepted);
}

my (@want, %sum);

for my $engine ('chat', @drafting) {
    my $first = counters($engine);

    for my $i (0 .. $#requests) {
        my ($name, $uri, $body) = @{ $requests[$i] };
        my $was = counters($engine);
        my $r = start_request("/$engine", $uri, $body)->finish;

        is $r->{status}, 200, "$engine: $name" or diag $r->{body};
        my $answer = answer_of($r->abort); # nginx logs when it may close

        if ($engine eq 'chat') {
            push @want, $answer;
        } else {
            same_ok($answer, $want[$i], "$engine: $name: the same answer");
        }

        my @n = count_ok($engine, $uri, $answer, $was, counters($engine),
            "$engine: $name");
        $sum{$engine}[$_] += $n[$_] for 0, 1;
    }

    $t->idle_ok("$engine: pages and slots are free", $engine);
}

is_deeply $sum{chat}, [0, 0], 'no drafts without the directives';
for my $engine (qw(ngram suffix model all)) {
    cmp_ok $sum{$engine}[1], '>', 0, "$engine: some drafts were right";
    cmp_ok $sum{$engine}[0], '>', $sum{$engine}[1], "$engine: some were not"
        if $engine ne 'model';
}
diag join ', ', map { "$_: $sum{$_}[1] of $sum{$_}[0] drafts right" } @drafting;

# the model is its own draft: it agrees but where rows are cut off at the end
cmp_ok $sum{model}[1], '>', 0.9 * $sum{model}[0], 'one model, one opinion';

# --- a crowd, some of which leaves ---

for my $engine (@drafting) {
    my @gone = map { $t->stream("/$engine$uri", { prompt => "$code$_",
        max_tokens => 500, ignore_eos => \1, seed => $_ }) } 1, 2;
    $_->next_event for @gone;
    my @all = map { start_request("/$engine", @$_[1, 2]) } @requests;
    $_->abort for @gone;
    same_ok(answer_of($all[$_]->finish), $want[$_],
        "$engine, in a crowd: $requests[$_][0]") for 0 .. $#all;
    $t->idle_ok("$engine: free after the crowd", $engine);

    my $c = counters($engine);
    cmp_ok $c->{"${spec}accepted_tokens_total"}, '<=',
        $c->{"${spec}draft_tokens_total"}, "$engine: never more than drafted";
}

# --- what cannot draft ---

for my $name (sort keys %wrong) {
    ok wait_for(sub { $t->get("/bad_$name/health")->{body}
        =~ /could not start/ }, 30), "refused: $name";
    like $t->log, qr/speculative_model: $wrong{$name}[0]/, 'with the reason';
}

# --- a changed setting is another engine ---

my %was = map { $_ => 1 } $t->children('llm-engine');
my $conf = $t->log('nginx.conf');
$t->write_conf($conf =~ s/(speculative ngram); num_speculative_tokens 4/$1 min=4; num_speculative_tokens 4/r);
$t->signal('HUP');
ok wait_for(sub { (words('ngram') // '') =~ /ngram:4:5/
    || grep { !$was{$_} } $t->children('llm-engine') }, 20), 'a new engine';
ok wait_for(sub { $t->get('/ngram/health')->{status} == 200
    && counters('ngram')->{"${spec}drafts_total"} == 0 }, 30), 'counts anew';

$t->stop_ok(except => qr/speculative_model|exited with fatal code 2/);
done_testing;
