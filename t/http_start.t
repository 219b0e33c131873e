#!/usr/bin/perl

# Models that cannot be served, and memory that is too little for one: one
# [emerg] line with the cause, nginx stays up and answers 503 with it.  Tiny
# models of every tensor type that can.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $make = "$FindBin::Bin/tools/gguf_make.py";
my $dir = File::Temp::tempdir(CLEANUP => 1);
chmod 0755, $dir;

sub make_model {
    my ($name, @options) = @_;
    my $path = "$dir/$name.gguf";

    system($python, $make, @options, $path) == 0 or die "$make @options";
    return $path;
}

sub slurp { open my $f, '<:raw', $_[0] or die; local $/; return scalar <$f> }

sub spew {
    my ($name, $bytes) = @_;
    open my $f, '>:raw', "$dir/$name" or die;
    print $f $bytes;
    close $f;
    return "$dir/$name";
}

my $tiny = make_model('tiny');
my $bytes = slurp($tiny);

# --- what cannot be served: (name, file, cause) ---

my @bad = (
    ['empty metadata', spew('magic.gguf', 'GGUF' . pack 'V', 3), qr/./],
    ['not GGUF', spew('text.gguf', "hello\n" x 100), qr/GGUF/],
    ['truncated', spew('cut.gguf', substr $bytes, 0, length($bytes) * 0.7),
        qr/./],
    ['truncated in the metadata', spew('cut2.gguf', substr $bytes, 0, 200),
        qr/./],
    ['another version', spew('v9.gguf', 'GGUF' . pack('V', 9)
        . substr $bytes, 8), qr/version 9/],
    ['a huge count', spew('huge.gguf', substr($bytes, 0, 8) . "\xff" x 8
        . substr $bytes, 16), qr/./],
);

for my $case (@bad) {
    my ($name, $file, $cause) = @$case;
    my $t = LLM::Test->new(model => $file)->start(no_wait => 1);

    ok wait_for(sub { $t->log =~ /\[emerg\]/ }, 10), "$name: [emerg]";
    my @lines = $t->log =~ /^(.*\[emerg\].*)$/mg;
    is scalar @lines, 1, "$name: one line" or diag @lines;
    like $lines[0], $cause, "$name: with the cause";
    my $r = $t->chat('hi');
    is $r->{status}, 503, "$name: nginx answers 503";
    ok defined eval { $r->json->{error}{message} }, "$name: in the usual shape";
    is $t->get('/health')->{status}, 503, "$name: /health too";
    is $t->stop, 0, "$name: nginx leaves cleanly";
}

# --- every tensor type serves ---

for my $type (qw(F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K)) {
    my $model = make_model($type, '--type', $type, $type =~ /K$/
        ? ('--embd', 256, '--ff', 256) : ());
    my $t = LLM::Test->new(model => $model,
        engine => 'max_num_batched_tokens 128;')->start;
    my @r = map { $t->post('/v1/completions', { prompt => 'abc', seed => 1,
        max_tokens => 8, ignore_eos => \1 }) } 1 .. 2;

    is $r[0]->{status}, 200, "$type: served" or diag $t->log;
    is $r[0]->json->{choices}[0]{text}, $r[1]->json->{choices}[0]{text},
        "$type: one seed, one answer";
    $t->stop_ok;
}

# --- a template that loops forever, and one that cannot be parsed ---

my $loop = spew('loop.jinja', '{% for a in range(100000) %}'
    . '{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}');
my $t = LLM::Test->new(model => $tiny,
    engine => "chat_template $loop;")->start;
my $r = $t->chat('hi');
is $r->{status}, 400, 'a template that loops forever';
like $r->json->{error}{message}, qr/template/i, 'is named';
is $t->post('/v1/completions', { prompt => 'abc', max_tokens => 2 })->{status},
    200, 'the engine lives';
$t->stop_ok;

my $broken = spew('broken.jinja', "{% for m in messages %}\n{{ m.");
$t = LLM::Test->new(model => $tiny,
    engine => "chat_template $broken;")->start(no_wait => 1);
ok wait_for(sub { $t->log =~ /\[emerg\].*template/ }, 10),
    'a broken template: [emerg]';
is $t->chat('hi')->{status}, 503, 'a broken template: 503';
$t->stop;

# --- a cache of repacked weights: written, found, and no place for it ---

{
    my $cache = "$dir/cache";
    my %answers;

    mkdir $cache or die $!;
    chmod 0777, $cache;

    for my $case (['off', qr/ready in/],
        [$cache, qr/"\Q$cache\E.*" written/, qr/repack cache: \d+ weights from/],
        [$dir, $> == 0 ? qr/not written: .*denied/ : qr/ready in/]) {
        my ($where, @starts) = @$case;

        $t = LLM::Test->new(model => $tiny, engine => "repack_cache $where;");

        # a model that has only just been written is not cached
        select undef, undef, undef, 0.3;

        for my $says (@starts) {
            $t->start;
            like $t->log, $says, "repack_cache $where: said";
            $answers{$t->post('/v1/completions', { prompt => 'abc',
                max_tokens => 8, temperature => 0 })->json->{choices}[0]{text}}
                = 1;
            $t->stop_ok;
        }
    }

    is scalar keys %answers, 1, 'the same tokens with and without a cache';
}

# --- memory: each way in which it is too little, and what fits ---

# A program that starts the engine with little address space: a small machine,
# whatever the real one has.  slots 1, for the shared segment lies in it, too, and
# like all shared mappings does not count as memory.
sub small_machine {
    my ($t, $mib) = @_;
    my $path = "$t->{dir}/bin/small-engine";

    open my $f, '>', $path or die;
    print $f "#!/bin/sh\nulimit -v ", $mib * 1024, "\n",
        "exec '$t->{dir}/bin/llm-engine' \"\$@\"\n";
    close $f;
    chmod 0755, $path;

    my $conf = do { open my $c, '<', $t->{conf_path} or die; local $/; <$c> };
    $t->write_conf($conf =~ s{program \S+;}{program $path;}r);
    return $t;
}

my $sanitized = ($ENV{LLM_TEST_BUILD} // '') =~ /address|thread/;

# (name, engine lines, machine in MiB or 0, what the line says)
my @little = (
    ['kv_cache_memory for one sequence',
        'kv_cache_memory 32m; max_model_len 8192;', 0,
        qr/8192 tokens needs a KV cache of 180\.0 MiB, but kv_cache_memory/,
        qr/allows 32\.0 MiB; the longest context that fits is 1456; raise/],
    ['less is free than the utilization asks for',
        'gpu_memory_utilization 1; threads 1; slots 1;', 2048,
        qr/gpu_memory_utilization 1 asks for (1[5-9]\d\d\.\d MiB) of the \1/,
        qr/but only [\d.]+ MiB are free: lower gpu_memory_utilization/],
    ['nothing is left for the cache',
        'gpu_memory_utilization 0.05; threads 1; slots 1;', 2048,
        qr/no memory is left for the KV cache: gpu_memory_utilization 0\.05/,
        qr/of 1[5-9]\d\d\.\d MiB allows [789]\d\.\d MiB,.*: raise gpu_mem/],
    ['the utilization for one sequence',
        'gpu_memory_utilization 0.15; max_model_len 8192; threads 1; slots 1;',
        2048,
        qr/8192 tokens.*180\.0 MiB, but gpu_memory_utilization 0\.15/,
        qr/the longest context that fits is \d+; raise gpu_memory_util/],
    ['activations that nobody has memory for',
        'max_num_batched_tokens 131072; threads 1; slots 1;', 2048,
        qr/weights and [\d.]+ MiB for activations, but only [\d.]+ MiB of/,
        qr/free: use a smaller model, lower max_num_batched_tokens/],
);

for my $case (@little) {
    my ($name, $lines, $mib, @like) = @$case;

    # sanitizers map more address space than there may be
    next if !$ENV{LLM_TEST_MODEL} || ($mib && $sanitized);

    $t = LLM::Test->new(engine => $lines);
    small_machine($t, $mib) if $mib;
    $t->start(no_wait => 1);
    ok wait_for(sub { $t->log =~ /\[emerg\]/ }, 10), "$name: [emerg]"
        or diag $t->log;
    my @lines = $t->log =~ /^(.*\[emerg\].*)$/mg;
    is scalar @lines, 1, "$name: one line" or diag @lines;
    like $lines[0], $_, "$name: with cause and remedy" for @like;
    is $t->chat('hi')->{status}, 503, "$name: nginx answers 503";
    $t->stop;
}

if ($ENV{LLM_TEST_MODEL}) {
    # auto takes what fits, to the page: 32 MiB are 91.02 pages of 368640 bytes
    $t = LLM::Test->new(engine => 'kv_cache_memory 32m; kv_cache_prefault on;')
        ->start;
    like $t->log, qr/max_model_len auto: 1456 tokens instead of 8192/,
        'max_model_len auto';
    like $t->log, qr/cache of 1456 tokens \(91 pages, F16, 32\.0 MiB\)/,
        'what the cache holds';
    like $t->log, qr/maximum concurrency for 1456 tokens per request: 1\.00x/,
        'and for how many';
    is $t->get('/v1/models')->json->{data}[0]{max_model_len}, 1456,
        'is the context of the model card';
    is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'and serves';
    $t->stop_ok;

    # 171.3 pages of 195840 bytes
    $t = LLM::Test->new(engine => 'kv_cache_memory 32m; kv_cache_dtype q8_0;')
        ->start;
    like $t->log, qr/cache of 2736 tokens \(171 pages, Q8_0, 31\.9 MiB\)/,
        'more with q8_0';
    is $t->get('/v1/models')->json->{data}[0]{max_model_len}, 2736,
        'and a longer context';
    is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'which serves';
    $t->stop_ok;

    # compute threads, by the processors that this very process may use
    my ($mask) = map { /^Cpus_allowed:\s+([\da-f,]+)/ ? $1 : () }
        do { open my $f, '<', '/proc/self/status' or die; <$f> };
    my $cpus = ($mask =~ s/([\da-f])/sprintf '%b', hex $1/ger) =~ tr/1//;
    my $most = $cpus > 1 ? $cpus - 1 : 1;

    $t = LLM::Test->new(engine => 'reserved_cpus 1; cpu_affinity on;')->start;
    my ($threads) = $t->log =~ /, (\d+) threads?, (?:not )?pinned\)/;
    cmp_ok $threads, '<=', $most, "of $cpus processors one is reserved";
    is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'serves';
    $t->stop_ok;

    # a prompt is prefilled in one step, so the smaller of step and cache counts
    for my $case ([1024, 1024], [2048, 1456]) {
        my ($step, $len) = @$case;

        $t = LLM::Test->new(engine => "kv_cache_memory 32m; max_model_len auto;
            chunked_prefill off; max_num_batched_tokens $step;")->start;
        like $t->log, qr/auto: $step tokens instead of 8192, because chunked/,
            "not chunked, steps of $step: said";
        is $t->get('/v1/models')->json->{data}[0]{max_model_len}, $len,
            "a context of $len";
        my $most = $t->post('/v1/completions', { max_tokens => 5, prompt =>
            [(100) x ($len - 1)], ignore_eos => \1 })->json;
        is $most->{usage}{total_tokens}, $len, 'is served whole';
        $r = $t->post('/v1/completions', { max_tokens => 5, prompt =>
            [(100) x $len] });
        is $r->{status}, 400, 'one token more is refused';
        like $r->json->{error}{message}, qr/maximum context length is $len /,
            'with the length';
        $t->stop_ok;
    }

    if (!$sanitized) {
        # an explicit share is used whole
        $t = LLM::Test->new(
            engine => 'gpu_memory_utilization 0.5; threads 1; slots 1;');
        small_machine($t, 2048)->start;
        my ($pages) = $t->log =~ /kv: cache of \d+ tokens \((\d+) pages/;
        cmp_ok $pages, '>', 700e6 / 368640, 'gpu_memory_utilization 0.5 …';
        cmp_ok $pages, '<', 1e9 / 368640, '… of 2 GiB, less the model';
        is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'serves';
        $t->stop_ok;
    }
}

done_testing;
