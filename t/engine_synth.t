#!/usr/bin/perl

# llm-engine synth: files that load and run, the same bytes from the same
# seed, and nothing left behind where a file cannot be written.

use strict;
use warnings;

use File::Temp qw(tempdir);
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $engine = "$build/llm-engine";
my $logits = "$build/t/tools/logits";
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $dir = tempdir(CLEANUP => 1);
my @small = qw(--like smollm2-135m --layers 2 --vocab 600 --context 512);

sub slurp {
    my ($path) = @_;

    open my $f, '<:raw', $path or return '';
    local $/;
    return scalar <$f> // '';
}

# exit status, standard output and standard error together
sub run {
    my ($command) = @_;
    my $out = `$command 2>&1`;

    return ($? >> 8, $out);
}

sub synth {
    my ($name, @options) = @_;

    return run("$engine synth --out $dir/$name @options");
}

sub generate {
    my ($name, @options) = @_;
    my @run = (qw(--max-tokens 24 --kv-cache-memory 16m --log-level error
        --ignore-eos), '--model', "$dir/$name", @options);

    return run("$engine generate --prompt 'Hello, \xc3\xa9t\xc3\xa9!' @run");
}

sub files { return sort map { s{.*/}{}r } glob "$dir/*" }


# --- the same bytes ---

for my $name (qw(a b)) {
    my ($status, $out) = synth("$name.gguf", @small, '--seed', 7);

    is $status, 0, 'written' or diag $out;
    like $out, qr/^smollm2-135m: 0\.01 billion parameters, Q4_1, seed 7$/m,
        'says what';
}

my $bytes = slurp("$dir/a.gguf");

ok $bytes eq slurp("$dir/b.gguf"), 'one seed, the same bytes';
cmp_ok length $bytes, '>', 4e6, 'of the size of its weights';
synth('b.gguf', @small, '--seed', 8);
is length slurp("$dir/b.gguf"), length $bytes, 'an older file is replaced';
ok slurp("$dir/b.gguf") ne $bytes, 'another seed, other bytes';
is_deeply [files()], ['a.gguf', 'b.gguf'], 'and nothing else in the folder';


# --- they run ---

my %tokens;

for my $type (qw(f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0)) {
    my ($status, $out) = synth('t.gguf', @small, '--type', $type);

    is $status, 0, "$type: written" or diag $out;
    ($status, my $first) = generate('t.gguf');
    is $status, 0, "$type: generates" or diag $first;
    my ($again, $baseline) = ((generate('t.gguf'))[1],
        (generate('t.gguf', '--isa', 'baseline'))[1]);

    is $again, $first, "$type: the same again";
    is $baseline, $first, "$type: the same on every instruction set";
    like $first, qr/^[ -~]{24,}$/m, "$type: printable";

    my %letter = map { $_ => 1 } split //, $first;

    cmp_ok scalar keys %letter, '>', 6, "$type: not one token for ever";
    $tokens{$first} = 1;
}

cmp_ok scalar keys %tokens, '>=', 4, 'types differ';

# the tokenizer is whole: any bytes, there and back
my ($status, $ids) = run("$engine tokenize --model $dir/a.gguf "
    . "--kv-cache-memory 16m --log-level error --prompt 'the cat \xe2\x82\xac'");

is $status, 0, 'tokenizes' or diag $ids;
my @ids = split ' ', $ids;
cmp_ok scalar @ids, '<', length("the cat \xe2\x82\xac"), 'with merges';
is scalar(grep { $_ < 3 || $_ >= 600 } @ids), 0, 'into what there is';
is join(' ', @ids[-3 .. -1]), join(' ', map { 3 + $_ } 0xe2, 0x82, 0xac),
    'and bytes';


# --- ref and cpu, and an independent forward pass ---

sub rows {
    my ($model, $backend) = @_;

    system("$logits $model $backend 0 $dir/$backend.bin @ids") == 0
        or die "$logits $model $backend";

    return unpack 'f*', slurp("$dir/$backend.bin");
}

SKIP: {
    skip "$logits is not built (make tools)", 1 unless -x $logits;

    # activations are bytes where weights are; the real model's error is alike
    for my $case (['f16', 1e-3], ['q8_0', 0.06], ['q4_1', 0.06]) {
        my ($type, $bound) = @$case;

        synth('t.gguf', @small, '--type', $type);

        my @ref = rows("$dir/t.gguf", 'ref');
        my @cpu = rows("$dir/t.gguf", 'cpu');
        my ($error, $square, $most) = (0, 0, 0);

        for my $i (0 .. $#ref) {
            $error += ($ref[$i] - $cpu[$i]) ** 2;
            $square += $ref[$i] ** 2;
            $most = abs $ref[$i] if abs $ref[$i] > $most;
        }

        is scalar @cpu, 600 * @ids, "$type: a row each";
        cmp_ok sqrt($error / $square), '<', $bound, "$type: cpu is near ref";
        cmp_ok sqrt($square / @ref), '>', 1, "$type: logits vary";
        cmp_ok $most, '<', 60, "$type: and keep their size";
    }

    skip "$python has no numpy", 1
        if system("$python -c 'import numpy' 2>/dev/null") != 0;

    my @ref = rows("$dir/a.gguf", 'ref');
    my $out = `$python t/tools/forward.py $dir/a.gguf $dir/ref.bin @ids`;
    my ($diff, $most, $same, $n) = split ' ', $out;

    cmp_ok $diff // 'inf', '<=', 2e-3, 'ref is right';
    is $same, $n, 'best tokens too';
}

unlink glob "$dir/*";


# --- what is refused ---

for my $bad (
    [['--like', 'gpt-9'], qr/--like gpt-9: use one of llama-7b .*smollm2-135m/],
    [['--like', 'qwen2.5-7b'], qr/qwen2\.5-7b: the engine has no biases, use/],
    [[@small, '--type', 'q9'], qr/--type q9: use f32, .* or q4_0/],
    [[@small, '--type', 'q4_k'], qr/--type q4_k: use f32, .* or q4_0/],
    [[@small, '--seed', '-1'], qr/--seed -1: use a number/],
    [[@small, '--seed', '1x'], qr/--seed 1x: use a number/],
    [['--like', 'llama-1b', '--vocab', 258], qr/--vocab 258: .*259/],
    [['--like', 'llama-1b', '--vocab', 9e6], qr/--vocab .*to 493765/],
    [['--like', 'llama-1b', '--layers', 5000], qr/--layers 5000: use/],
    [[@small, '--colour', 'red'], qr/--colour red: use an option that synth/],
    [[@small, '--type'], qr/"--type" needs the form/],
    [[], qr/synth needs --like NAME and --out FILE/],
) {
    my ($options, $says) = @$bad;

    ($status, my $out) = synth('no.gguf', @$options);
    is $status, 1, "refused: @$options";
    like $out, $says, 'with the remedy';
}

($status, my $out) = run("$engine synth @small");
like $out, qr/needs --like NAME and --out FILE/, 'no --out';
is_deeply [files()], [], 'no file of any of them';


# --- what cannot be written ---

for my $case (["$dir/none/x.gguf", qr/none\/x\.gguf": No such file/],
    ['/dev/full', qr/"\/dev\/full": it is there and not a file/],
    [$dir, qr/it is there and not a file/]) {
    my ($path, $says) = @$case;

    ($status, $out) = run("$engine synth @small --out $path");
    is $status, 1, "$path: refused";
    like $out, $says, 'with the cause';
}

ok -c '/dev/full', '/dev/full is still there';

# a limit on the size of files ends like a full disk
($status, $out) = run("bash -c 'ulimit -f 2048; $engine synth @small "
    . "--out $dir/full.gguf'");
is $status, 1, 'no room';
like $out, qr/cannot write "\Q$dir\E\/full\.gguf": File too large/, 'said so';
is_deeply [files()], [], 'half a file is no file';

# what a killed process left is written over, what another writes is left alone
open my $f, '>', "$dir/k.gguf.tmp" or die $!;
print $f 'x' x 100;
close $f;
($status, $out) = synth('k.gguf', @small, '--seed', 7);
is $status, 0, 'a left-over temporary file' or diag $out;
ok slurp("$dir/k.gguf") eq $bytes, 'does not matter';

open $f, '>', "$dir/k.gguf.tmp" or die $!;
flock $f, 2 or die $!;
($status, $out) = synth('k.gguf', @small, '--seed', 9);
is $status, 1, 'two writers';
like $out, qr/k\.gguf" is being written by another process/, 'said so';
ok -e "$dir/k.gguf.tmp", 'the first goes on';
ok slurp("$dir/k.gguf") eq $bytes, 'the older file stays';

done_testing;
