#!/usr/bin/perl

# /metrics: promtool finds nothing wrong with it, and every number agrees with
# what the test counts from the responses.  Several engines on one page, one of
# them failed; a reload, a new engine; a cache so small that sequences are
# preempted.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use List::Util qw(max sum0);
use Test::More;
use Time::HiRes qw(time);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/completions';

# What is wrong with vLLM's own names: a colon, and one histogram _total.
my $inherent = join '|', '^vllm:\w+ metric names should not contain \':\'$',
    '^vllm:iteration_tokens_total non-counter metrics should not have '
    . '"_total" suffix$';

sub lint {
    my ($t, $name) = @_;
    my $page = $t->get('/metrics')->{body};

    open my $f, '>', "$t->{dir}/page" or die $!;
    print $f $page;
    close $f;
    my @said = split /\n/, `promtool check metrics < $t->{dir}/page 2>&1`;
    ok scalar(grep { /$inherent/ } @said), "$name: promtool reads it";
    is_deeply [grep { !/$inherent/ } @said], [], "$name: and is content";
}

# {name}{labels without engine and model_name} of one engine
sub page {
    my ($t, $engine) = @_;
    my %page;

    $engine //= 'chat';
    for (split /\n/, $t->get('/metrics')->{body}) {
        my ($name, $who, $more, $value) =
            /^([\w:]+)\{engine="(\w+)",model_name="[^"]*",?([^}]*)\} (\S+)$/
            or next;
        $page{$more eq '' ? $name : "$name\{$more}"} = $value
            if $who eq $engine;
    }

    return \%page;
}

# --- what the test counts ---

my %want;
my %seen; # histogram => observations

# One answer: tokens of its prompt, of these cached, generated, allowed, and
# how it ended.
sub answer {
    my ($prompt, $cached, $output, $max, $how) = @_;

    $want{'vllm:prompt_tokens_total'} += $prompt;
    $want{'vllm:prompt_tokens_cached_total'} += $cached;
    $want{'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'}
        += $cached;
    $want{'vllm:prompt_tokens_by_source_total{source="local_compute"}'}
        += $prompt - $cached;
    $want{'vllm:prompt_tokens_cached_by_source_total{source="device"}'}
        += $cached;
    $want{'vllm:prefix_cache_queries_total'} += $prompt;
    $want{'vllm:prefix_cache_hits_total'} += $cached;
    $want{'vllm:generation_tokens_total'} += $output;
    $want{"vllm:request_success_total{finished_reason=\"$how\"}"}++;

    push @{ $seen{'vllm:request_prompt_tokens'} }, $prompt;
    push @{ $seen{'vllm:request_prefill_kv_computed_tokens'} },
        $prompt - $cached;
    push @{ $seen{'vllm:request_generation_tokens'} }, $output;
    push @{ $seen{'vllm:request_params_max_tokens'} }, $max;
    push @{ $seen{'vllm:request_num_preemptions'} }, 0;
    # the last token is not computed
    $want{'vllm:iteration_tokens_total_sum'} += $prompt - $cached + $output - 1;
    $want{"$_\_count"}++ for map { "vllm:$_\_seconds" } qw(time_to_first_token
        e2e_request_latency request_queue_time request_inference_time
        request_prefill_time request_decode_time);
    $want{'vllm:inter_token_latency_seconds_count'} += $output - 1;
    $want{'vllm:request_time_per_output_token_seconds_count'} += $output > 1;
}

# All answers to one prompt.
sub answers {
    push @{ $seen{'vllm:request_params_n'} }, scalar @_;
    push @{ $seen{'vllm:request_max_num_generation_tokens'} }, max @_;
}

sub ask {
    my ($t, %o) = @_;
    my $r = $t->post($o{messages} ? '/v1/chat/completions' : $uri, \%o);
    my $j = $r->json;
    my $u = $j->{usage};

    is $r->{status}, 200, 'answered' or diag $r->{body};
    answer($u->{prompt_tokens}, $u->{prompt_tokens_details}{cached_tokens},
        $u->{completion_tokens}, $o{max_tokens},
        $j->{choices}[0]{finish_reason});
    answers($u->{completion_tokens});

    return $j;
}

# The usage of each choice is in its chunks.
sub ask_stream {
    my ($t, %o) = @_;
    my (@usage, @how);
    my $s = $t->stream($uri, { %o, stream_options => { include_usage => \1,
        continuous_usage_stats => \1 } })->finish;

    for my $chunk (grep { ref } $s->chunks) {
        for my $choice (@{ $chunk->{choices} }) {
            $usage[$choice->{index}] = $chunk->{usage};
            $how[$choice->{index}] = $choice->{finish_reason}
                if $choice->{finish_reason};
        }
    }

    is scalar @usage, $o{n} // 1, 'streamed';
    answer($usage[$_]{prompt_tokens},
        $usage[$_]{prompt_tokens_details}{cached_tokens},
        $usage[$_]{completion_tokens}, $o{max_tokens}, $how[$_])
        for 0 .. $#usage;
    answers(map { $_->{completion_tokens} } @usage);
}

my %bounds = (n => [1, 2, 5, 10, 20], times => [1, 2, 3, 4, 5, 10, 20],
    tokens => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]);

sub agree {
    my ($t, $name) = @_;
    my $page = page($t);

    for my $hist (sort keys %seen) {
        my @values = @{ $seen{$hist} };
        my $bounds = $bounds{$hist =~ /_n$/ ? 'n' : $hist =~ /preempt/
            ? 'times' : 'tokens'};

        $want{"${hist}_count"} = @values;
        $want{"${hist}_sum"} = sum0 @values;
        $want{"${hist}_bucket{le=\"+Inf\"}"} = @values;
        for my $le (@$bounds) {
            $want{"${hist}_bucket{le=\"$le\"}"} = grep { $_ <= $le } @values;
        }
    }

    is $page->{$_}, $want{$_}, "$name: $_" for sort keys %want;
    is $page->{"vllm:request_success_total{finished_reason=\"$_\"}"},
        $want{"vllm:request_success_total{finished_reason=\"$_\"}"} // 0,
        "$name: $_" for qw(stop length abort error);
}

# --- three engines, one of which cannot start ---

my $more = 'program %%DIR%%/bin/llm-engine;';
my $t = LLM::Test->new(engine => 'max_model_len 1024; slots 64;',
    http => "llm_engine other { model %%MODEL%%; $more max_num_seqs 1;
        max_model_len 512; prefix_caching off; kv_cache_dtype q8_0; }
        llm_engine broken { model %%DIR%%/nginx.conf; $more }",
    server => 'location /other/ { llm_pass other; }
        location /broken/ { llm_pass broken; }')->start(no_wait => 1);

lint($t, 'at the start');
$t->ready;
ok wait_for(sub { $t->get('/other/health')->{status} == 200 }, 30), 'another';
ok wait_for(sub { $t->get('/broken/health')->{body} =~ /could not start/ }, 30),
    'a broken one';
is $t->metric('llm_engine_up', "engine=\"$$_[0]\",[^}]*"), $$_[1],
    "up: $$_[0]" for ['chat', 1], ['other', 1], ['broken', 0];
lint($t, 'without requests');

my $page = page($t);
is $page->{$_} + 0, 0, "nothing yet: $_"
    for grep { !/info|llm_engine|llm_kv_pages(?:_free)?$|step_seconds/ }
        sort keys %$page;
is_deeply [map { /le="(.*)"/ } grep { /^vllm:request_prompt_tokens_bucket/ }
    map { /^(\S+)/ } split /\n/,
    $t->get('/metrics')->{body} =~ s/.*engine="(?:other|broken)".*\n//gr],
    [@{ $bounds{tokens} }, '+Inf'], 'token bounds go up to max_model_len';

# --- a mix of requests ---

my $story = 'It was a dark and stormy night, and the rain fell in torrents '
    . 'except at occasional intervals, when it was checked by a violent gust '
    . 'of wind which swept up the streets of the town.';

ask($t, prompt => $story, max_tokens => 12, temperature => 0);
ask($t, prompt => $story, max_tokens => 7, temperature => 0);
ask($t, prompt => "$story Then", max_tokens => 1);
ask($t, messages => [{ role => 'user', content => 'Say "yes".' }],
    max_tokens => 60, temperature => 0);
ask($t, prompt => 'Count: 1, 2, 3,', stop => '7', max_tokens => 40,
    temperature => 0);
ask_stream($t, prompt => $story, max_tokens => 20, ignore_eos => \1);
ask_stream($t, prompt => 'Two of them:', max_tokens => 9, n => 2, seed => 1,
    ignore_eos => \1);
ask_stream($t, prompt => "Three of them. $story", max_tokens => 30, n => 3,
    seed => 2);

# not for the statistics: refused before the engine, or the tokenizer's
is $t->post($uri, '{')->{status}, 400, 'no JSON';
is $t->post($uri, { prompt => 'x', temperature => 9 })->{status}, 400,
    'a bad parameter';
is $t->post('/tokenize', { prompt => $story })->{status}, 200, 'tokenize';
is $t->post('/detokenize', { tokens => [1, 2, 3] })->{status}, 200,
    'detokenize';
is $t->post('/tokenize', { prompt => 'y ' x 300000 })->{status}, 400,
    'too much to tokenize';

# refused by the engine
is $t->post($uri, { prompt => 'x ' x 2000, max_tokens => 1 })->{status}, 400,
    'too long';
$want{'vllm:request_success_total{finished_reason="error"}'}++;

$t->idle_ok;
agree($t, 'mix');
lint($t, 'after requests');

# --- times ---

$page = page($t);
my %sum = map { my ($n) = /^vllm:(?:request_)?(\w+)_seconds_sum$/;
    $n ? ($n => $page->{$_}) : () } keys %$page;
cmp_ok abs($sum{prefill_time} + $sum{decode_time} - $sum{inference_time}), '<',
    0.001, 'prefill and decode make inference';
cmp_ok $sum{queue_time} + $sum{inference_time}, '<=',
    $sum{e2e_request_latency} + 0.001, 'queue and inference are in all';
cmp_ok abs($sum{inter_token_latency} - $sum{decode_time}), '<', 0.001,
    'the times between tokens make decode';
cmp_ok $sum{time_to_first_token}, '>=', $sum{prefill_time},
    'the first token comes after prefill';
cmp_ok $page->{"llm_step_seconds_total{phase=\"$_\"}"}, '>', 0, "time: $_"
    for qw(intake schedule forward sample emit flush);
cmp_ok sum0(map { $page->{"llm_step_seconds_total{phase=\"$_\"}"} }
    qw(schedule forward sample emit)), '>=', 0.9 * $sum{decode_time} / 3,
    'steps take the time that sequences take';
is $page->{'vllm:iteration_tokens_total_count'}, $page->{llm_steps_total},
    'tokens of every step';

# --- canceled: tokens that nobody saw count, too ---

my $gone = $t->stream($uri, { prompt => $story, max_tokens => 900,
    ignore_eos => \1 });
$gone->next_event for 1 .. 3;
$gone->abort;
$t->idle_ok;
$page = page($t);
is $page->{'vllm:request_success_total{finished_reason="abort"}'}, 1,
    'canceled';
is $page->{'vllm:request_generation_tokens_count'},
    $want{'vllm:request_generation_tokens_count'} + 1, 'and observed';
is $page->{"vllm:${_}_tokens_total"}, $page->{"vllm:request_${_}_tokens_sum"},
    "$_ tokens: all of them belong to requests" for qw(prompt generation);
is $page->{'vllm:request_params_n_count'}, $want{'vllm:request_params_n_count'},
    'but its answers are not all there';

# --- gauges while something runs ---

my %busy = (max_tokens => 900, ignore_eos => \1, seed => 1);
my @streams = map { $t->stream($uri, { prompt => $story, %busy }) } 1 .. 2;
$_->next_event for @streams;
ok wait_for(sub {
    my $p = page($t);
    my ($held, $used) = @$p{qw(llm_kv_slots_held llm_kv_slots_used)};

    return $p->{'vllm:num_requests_running'} == 2
        && $p->{llm_slots_used} == 2
        && $p->{llm_kv_pages_used} > $p->{llm_kv_pages_shared}
        && $p->{llm_kv_pages_shared} >= 2
        && $p->{llm_kv_pages_used} + $p->{llm_kv_pages_free}
            == $p->{llm_kv_pages}
        && $held == 16 * $p->{llm_kv_pages_used}
        && $used < $held && $used > $held - 2 * 16
        && abs($p->{llm_kv_waste_ratio} - 1 + $used / $held) < 1e-6
        && abs($p->{'vllm:kv_cache_usage_perc'}
            - $p->{llm_kv_pages_used} / $p->{llm_kv_pages}) < 1e-6;
}, 10), 'two with one beginning: pages, slots and waste' or diag explain page($t);
$_->abort for @streams;

# one runs, one waits
@streams = map { $t->stream("/other$uri", { prompt => $story, max_tokens => 400,
    ignore_eos => \1 }) } 1 .. 2;
$streams[0]->next_event;
ok wait_for(sub {
    my $p = page($t, 'other');

    return $p->{'vllm:num_requests_running'} == 1
        && $p->{'vllm:num_requests_waiting'} == 1
        && $p->{'vllm:num_requests_waiting_by_reason{reason="capacity"}'} == 1
        && $p->{'vllm:num_requests_waiting_by_reason{reason="deferred"}'} == 0;
}, 10), 'one waits for a place' or diag explain page($t, 'other');
$_->abort for @streams;
$t->idle_ok;

# --- at 32 streams the model takes the time; how much is printed ---

my $before = page($t);
$_->finish for map { $t->stream($uri, { prompt => "Story $_: $story",
    max_tokens => 16, ignore_eos => \1, seed => $_ }) } 1 .. 32;
$page = page($t);
my %phase = map { $_ => $page->{"llm_step_seconds_total{phase=\"$_\"}"}
    - $before->{"llm_step_seconds_total{phase=\"$_\"}"} }
    qw(intake schedule forward sample emit flush);
my $part = ($phase{intake} + $phase{schedule} + $phase{emit})
    / sum0 values %phase;
cmp_ok $part, '>', 0, 'intake, schedule and emit have taken time';
diag sprintf 'intake, schedule and emit: %.2f %% of it', 100 * $part;

# --- one page, several engines ---

is_deeply [sort map { /^vllm:cache_config_info\{(.*?,block.*),num.*\} 1$/ }
    split /\n/, $t->get('/metrics')->{body}],
    [map { "engine=\"$$_[0]\",model_name=\"$$_[1]\",block_size=\"16\","
        . "cache_dtype=\"$$_[2]\",enable_prefix_caching=\"$$_[3]\","
        . 'gpu_memory_utilization="0.9"' } ['broken', 'broken', 'f16', 'True'],
        ['chat', 'smollm2', 'f16', 'True'],
        ['other', 'model.gguf', 'q8_0', 'False']], 'configurations';
is page($t)->{'vllm:cache_config_info{block_size="16",cache_dtype="f16",'
    . 'enable_prefix_caching="True",gpu_memory_utilization="0.9",'
    . 'num_gpu_blocks="' . page($t)->{llm_kv_pages} . '"}'}, 1,
    'with the number of pages';
is page($t, 'other')->{'vllm:prefix_cache_queries_total'}, 0,
    'what one counts is not the other\'s';

# the page and the README name the same
my $readme = do {
    open my $f, '<', "$FindBin::Bin/../README.md" or die $!;
    local $/;
    <$f> =~ /^## Metrics\n(.*?)^## /ms ? $1 : die 'no metrics in README.md';
};
my %named = map { $_ => 1 } $readme =~ /`((?:vllm:|llm_)\w+)`/g;
is_deeply [sort $t->get('/metrics')->{body} =~ /^# TYPE (\S+)/mg],
    [sort keys %named], 'README.md has every metric';

# --- methods ---

my $r = $t->open_request(HEAD => '/metrics')->finish;
is $r->{status}, 200, 'HEAD';
is $r->{body}, '', 'without a body';
like $r->{headers}{'content-type'}, qr/^text\/plain; version=0\.0\.4/, 'a type';
is $t->post('/metrics', '{}')->{status}, 405, 'POST';

# --- a reload keeps the numbers, a new engine has none ---

my $steps = page($t)->{llm_steps_total};
my %old = map { $_ => 1 } $t->children('nginx');
$t->signal('HUP');
ok wait_for(sub { my @now = $t->children('nginx');
    @now && !grep { $old{$_} } @now }, 10), 'reloaded';
wait_for(sub { $t->connects }, 5);
is page($t)->{llm_steps_total}, $steps, 'the numbers are kept';

kill 'KILL', $t->engine_pid;
ok wait_for(sub { ($t->metric('llm_engine_epoch') // 0) == 2
    || ($t->metric('llm_engine_epoch', 'engine="other",[^}]*') // 0) == 2 }, 30),
    'a new engine';
my ($new) = grep { $t->metric('llm_engine_epoch', "engine=\"$_\",[^}]*") == 2 }
    qw(chat other);
my $at = $new eq 'chat' ? '' : '/other';
ok wait_for(sub { $t->get("$at/health")->{status} == 200 }, 30), 'is ready';
is page($t, $new)->{llm_steps_total}, 0, 'and counts anew';
is $t->post("$at$uri", { prompt => 'x', max_tokens => 3, ignore_eos => \1 })
    ->{status}, 200, 'it serves';
is page($t, $new)->{'vllm:generation_tokens_total'}, 3, 'and counts';
lint($t, 'at the end');

is $t->stop, 0, 'nginx leaves cleanly';
$t->clean_ok(except => qr/llm_engine[ ]"broken"|exited[ ]on[ ]signal[ ]9
    |exited[ ]with[ ]fatal[ ]code[ ]2/x);

# --- preemption ---

$t = LLM::Test->new(engine => 'kv_cache_memory 5m; max_model_len 224;')->start;
(%want, %seen) = ();
my ($n, $tokens, $prompts) = (0, 0, 0);

for my $max (40, 60, 80, 100) {
    my @all = map { $t->open_request(POST => $uri, { prompt => "Story $_ of $max",
        max_tokens => $max, ignore_eos => \1, seed => $_ }) } 1 .. 8;

    for my $r (map { $_->finish(60) } @all) {
        is $r->{status}, 200, 'answered';
        $n++;
        $tokens += $r->json->{usage}{completion_tokens};
        $prompts += $r->json->{usage}{prompt_tokens};
    }
}

$t->idle_ok;
$page = page($t);
diag "$page->{'vllm:num_preemptions_total'} preemptions, "
    . "$page->{llm_kv_evictions_total} evictions";
cmp_ok $page->{'vllm:num_preemptions_total'}, '>', 0, 'preempted';
is $page->{'vllm:request_num_preemptions_sum'},
    $page->{'vllm:num_preemptions_total'}, 'each of them is somebody\'s';
is $page->{'vllm:request_num_preemptions_count'}, $n, 'all are observed';
cmp_ok $page->{'vllm:request_num_preemptions_bucket{le="20"}'}, '<=', $n,
    'in buckets';
is $page->{'vllm:generation_tokens_total'}, $tokens,
    'tokens count once, however often they are computed';
is $page->{'vllm:prompt_tokens_total'}, $prompts, 'prompts, too';
cmp_ok $page->{llm_preempted_queries_total}, '>', 0, 'they look for their pages';
cmp_ok $page->{llm_kv_evictions_total}, '>', 0, 'pages are given away';
cmp_ok $page->{'vllm:iteration_tokens_total_sum'}, '>=',
    $tokens + $prompts - $page->{'vllm:prompt_tokens_cached_total'} - $n,
    'and some tokens computed twice';
$t->stop_ok;

done_testing;
