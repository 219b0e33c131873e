#!/usr/bin/perl

# llm-engine plan: the article's 13-billion model on a 40 GB card, the file of
# the tests, and what it refuses.

use strict;
use warnings;

use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';

# seconds of a processor that children have had
sub spent { my (undef, undef, $user, $system) = times; return $user + $system }

# exit status, standard output, standard error
sub plan_of {
    my @args = @_;

    open my $old, '>&', \*STDERR or die $!;
    open STDERR, '>', "/tmp/llm-plan-$$.err" or die $!;
    open my $pipe, '-|', "$build/llm-engine", 'plan', @args or die $!;
    local $/;
    my $out = <$pipe>;
    close $pipe;
    my $status = $? >> 8;
    open STDERR, '>&', $old or die $!;
    open my $f, '<', "/tmp/llm-plan-$$.err" or die $!;
    my $err = <$f>;
    unlink "/tmp/llm-plan-$$.err";

    return ($status, $out // '', $err // '');
}

my $start = spent();
my ($status, $out, $err) = plan_of(qw(--like llama-13b --memory 40GB
    --bandwidth 2000));

is $status, 0, 'llama-13b on 40 GB' or diag $err;
cmp_ok spent() - $start, '<', $build =~ /address|thread/ ? 5 : 0.5,
    'in no time';
like $out, qr/^llama-13b: 13\.02 billion parameters, weights F16$/m, 'the size';
like $out, qr/^weights +26\.03 GB +24\.24 GiB +65\.1 %$/m, 'weights: 65 %';
like $out, qr/^KV cache +9\.49 GB/m, 'what is left';
like $out, qr/800\.0 KiB per token.* 724 pages, 11584 tokens$/m, 'KV';
like $out, qr/^  reserved +5 .* 75\.0 % stays empty$/m, 'reserved';
like $out, qr/^  paged +22 .* 1\.4 % stays empty$/m, 'paged';
like $out, qr/^ +1 request +76\.6 tok\/s$/m, 'alone';
like $out, qr/^ +22 requests +1259\.6 tok\/s, 17\.5 ms a step$/m, 'together';

# half the bytes in KV, less than half in weights
($status, $out) = plan_of(qw(--like llama-13b --memory 40GB --dtype q4_0
    --kv-cache-dtype q8_0 --context 4096 --mean-tokens 1000));
is $status, 0, 'quantised';
like $out, qr/weights Q4_0.*^weights +7\.32 GB.*425\.0 KiB per token/ms,
    'bytes of the types';
like $out, qr/up to 4096 tokens at once, if they reach 1000/, 'lengths';
unlike $out, qr/tok\/s/, 'no bandwidth, no speed';

# binary units as in the configuration
($status, $out) = plan_of(qw(--like llama-13b --memory 40G));
like $out, qr/^memory +42\.95 GB +40\.00 GiB/m, '40G';

# every name of the list
($status, $out, $err) = plan_of(qw(--like gpt-9 --memory 40G));
is $status, 1, 'an unknown name';
like $err, qr/--like gpt-9: use one of llama-7b .*qwen2\.5-7b/, 'and the list';

for my $name ($err =~ /use one of (.*)/ ? split ' ', $1 : ()) {
    ($status, $out) = plan_of('--like', $name, '--memory', '1t');
    is $status, 0, "$name on 1 TiB";
    like $out, qr/^\Q$name\E: /, 'named';
}

# too small: as the engine says it
($status, $out, $err) = plan_of(qw(--like llama-13b --memory 20GB));
is $status, 1, 'weights that do not fit';
like $err, qr/no memory is left for the KV cache/, 'said so';
($status, $out, $err) = plan_of(qw(--like llama-13b --memory 32GB
    --context 4096));
is $status, 1, 'one sequence does not fit';
like $err, qr/the longest context that fits is 2\d{3};/, 'what would';
($status, $out) = plan_of(qw(--like llama-3.2-1b --memory 6GB));
is $status, 0, 'without --context: what fits';
like $out, qr/requests of up to \d{5} tokens/, 'less than 131072';

for my $bad (['--memory', 'much'], ['--memory', '0'], ['--memory', '-1G'],
    ['--dtype', 'q9'], ['--kv-cache-dtype', 'q4_0'],
    ['--kv-cache-dtype', 'f32'], ['--kv-cache-dtype', 'bf16'],
    ['--kv-cache-dtype', ''], ['--kv-dtype', 'f16'], ['--utilization', '2'],
    ['--utilization', 'nan'], ['--context', '0'], ['--context', '12x'],
    ['--bandwidth', '-3'], ['--mean-tokens', '9999999'], ['--colour', 'red'],
    ['--context'], ['--model', '/nonexistent.gguf'], ['plain']) {
    ($status, $out, $err) = plan_of('--like', 'llama-7b', @$bad);
    is $status, 1, "refused: @$bad";
    like $err, qr/^llm-engine: ./, 'with a word about it';
}

($status, $out, $err) = plan_of(qw(--like llama-7b --kv-cache-dtype f32));
is $err, "llm-engine: --kv-cache-dtype f32: use f16 or q8_0\n",
    'KV types are those of an engine';

($status, $out, $err) = plan_of();
is $status, 1, 'of nothing';

if ($ENV{LLM_TEST_MODEL}) {
    ($status, $out, $err) = plan_of('--model', $ENV{LLM_TEST_MODEL},
        '--memory', '1G');
    is $status, 0, 'a model file' or diag $err;
    like $out, qr/0\.13 billion parameters, weights the file's types/,
        'its shape';
    like $out, qr/KV \(F16\): 22\.5 KiB per token/, 'its KV';

    ($status, $out, $err) = plan_of('--model', $ENV{LLM_TEST_MODEL},
        '--like', 'llama-7b');
    is $status, 1, 'a file or a name, not both';
}

done_testing;
