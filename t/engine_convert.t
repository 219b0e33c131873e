#!/usr/bin/perl

# llm-engine quantize and trim: what they write runs, says nearly the same,
# and holds what an independent reader finds in the input; memory stays near
# one tensor; a full disk and a second writer leave nothing.

use strict;
use warnings;

use File::Temp qw(tempdir);
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $engine = "$build/llm-engine";
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $model = $ENV{LLM_TEST_MODEL};
my $dir = tempdir(CLEANUP => 1);
my $run = '--kv-cache-memory 32m --log-level error';
my $text = 't/golden/perplexity_text.txt';

# exit status, standard output and standard error together
sub run {
    my ($command) = @_;
    my $out = `$command 2>&1`;

    return ($? >> 8, $out);
}

sub made {
    my ($what, $from, $to, $says) = @_;
    my ($status, $out) = run("$engine $what --model $from --out $dir/$to");

    is $status, 0, "$what: written" or diag $out;
    like $out, $says, "$what: says what" if $says;
}

sub generate {
    my ($name) = @_;
    my ($status, $out) = run("$engine generate --model $dir/$name $run "
        . "--prompt 'The sea' --max-tokens 24 --ignore-eos");

    is $status, 0, "$name: generates" or diag $out;
    return $out;
}

sub files { return sort map { s{.*/}{}r } glob "$dir/*" }


# --- any model ---

run("$engine synth --like smollm2-135m --layers 4 --vocab 600 --context 512 "
    . "--type bf16 --out $dir/s.gguf");

for my $type (qw(f32 f16 q8_0 q5_1 q5_0 q4_1 q4_0)) {
    made("quantize --type $type", "$dir/s.gguf", 't.gguf',
        qr/^\S+t\.gguf: 38 tensors, \U$type\E, head /);
    isnt generate('t.gguf'), '', "$type: says something";
}

made('quantize --type f32', "$dir/s.gguf", 'f32.gguf', qr/error 0\.0000 %/);
is generate('f32.gguf'), generate('s.gguf'), 'nothing is lost in f32';
made('trim --layers 4', "$dir/s.gguf", 't.gguf', qr/4 of 4 layers/);
is generate('t.gguf'), generate('s.gguf'), 'nor with all layers';
made('trim --layers 0-1,3', "$dir/s.gguf", 't.gguf', qr/3 of 4 layers/);
isnt generate('t.gguf'), generate('s.gguf'), 'but without one';


# --- what cannot be written ---

unlink "$dir/t.gguf";

my @before = files();

for my $what ('quantize --type f32', 'trim --layers 4') {
    my ($status, $out) = run("bash -c 'ulimit -f 1024; $engine $what "
        . "--model $dir/s.gguf --out $dir/full.gguf'");

    is $status, 1, "$what: no room";
    like $out, qr/cannot write "\Q$dir\E\/full\.gguf": File too large/,
        'said so';

    open my $f, '>', "$dir/k.gguf.tmp" or die $!;
    flock $f, 2 or die $!;
    ($status, $out) = run("$engine $what --model $dir/s.gguf "
        . "--out $dir/k.gguf");
    is $status, 1, 'two writers';
    like $out, qr/k\.gguf" is being written by another process/, 'said so';
    unlink "$dir/k.gguf.tmp";
}

is_deeply [files()], \@before, 'half a file is no file';
unlink glob "$dir/*";


# --- a real one ---

if (!$model) {
    diag 'LLM_TEST_MODEL is not set: no real model';
    done_testing;
    exit;
}

sub perplexity {
    my ($path) = @_;
    my ($status, $out) = run("$engine perplexity --model $path --file $text "
        . "--chunk 128 $run");

    return $out =~ /^perplexity: ([\d.]+)/m ? $1 : die "$status $out";
}

made('quantize --type f16', $model, 'f16.gguf', qr/F16, head F16/);
made('quantize --type q8_0', "$dir/f16.gguf", 'q8_0.gguf', qr/error 0\.5/);
made('quantize --type q4_1', "$dir/f16.gguf", 'q4_1.gguf', qr/head Q8_0/);
made('quantize --type q4_0', "$dir/f16.gguf", 'q4_0.gguf', qr/head Q8_0/);
made('trim --layers 25', $model, 't25.gguf', qr/25 of 30 layers, 227 tensors/);
made('trim --layers 10', $model, 't10.gguf', qr/10 of 30 layers, 92 tensors/);

my %ppl = map { $_ => perplexity("$dir/$_.gguf") }
    qw(f16 q8_0 q4_1 q4_0 t25 t10);
my $original = perplexity($model);

sub near {
    my ($name, $to, $bound) = @_;
    my $off = abs log $ppl{$name} / $to;

    cmp_ok $off, '<', $bound, "$name: perplexity $ppl{$name} is near $to";
}

# activations are bytes where weights are, which makes most of the difference
near('f16', $original, 0.02);
near('q8_0', $ppl{f16}, 0.02);
near('q4_1', $original, 0.005);
near('q4_0', $ppl{f16}, 0.4);
cmp_ok $ppl{q4_0}, '>', 1.1 * $ppl{f16}, 'q4_0 loses something';
cmp_ok $ppl{t25}, '<', 3 * $ppl{f16}, 'of five layers less, some sense is left';
cmp_ok $ppl{t10}, '>', 10 * $ppl{t25}, 'of ten none';

# one vocabulary
my $words = "--prompt 'The sea, caf\xc3\xa9 <|im_end|>' $run";

is +(run("$engine tokenize --model $dir/$_.gguf $words"))[1],
    (run("$engine tokenize --model $model $words"))[1],
    "$_: the same tokens" for qw(f16 t10);

# a chain of them: a trimmed one is quantized, a quantized one trimmed
made('quantize --type q8_0', "$dir/t25.gguf", 'tq.gguf', qr/227 tensors/);
isnt generate('tq.gguf'), '', 'runs';

SKIP: {
    skip "$python has no numpy", 1
        if system("$python -c 'import numpy' 2>/dev/null") != 0;

    # all values are exact in double precision, and rounded to binary32 before
    # they become halves, as they are read
    my $check = <<'END';
import sys
sys.path.insert(0, 't/tools')
import numpy as np
from forward import Gguf

old, half = Gguf(sys.argv[1]), Gguf(sys.argv[2])
mine, same, held = 0, 0, 0
with np.errstate(over='ignore'):
    for name, (dims, kind, _) in old.table.items():
        x, y = old.tensor(name).astype('f4'), half.tensor(name)
        want = x if len(dims) == 1 else x.astype('f2')
        mine += x.size
        same += int((want.astype('f8') == y).sum())
        held += int((x == y).sum())
assert list(old.table) == list(half.table)
assert all(half.table[n][1] == (0 if len(half.table[n][0]) == 1 else 1)
           for n in half.table)
for key, value in old.kv.items():
    equal = np.array_equal(value, half.kv.get(key))
    assert equal or key == 'general.file_type', key
assert half.kv['general.file_type'] == 1
print(mine, same, held)
END

    open my $f, '>', "$dir/check.py" or die $!;
    print $f $check;
    close $f;

    my ($status, $out) = run("$python $dir/check.py $model $dir/f16.gguf");
    my ($n, $same, $held) = $out =~ /^(\d+) (\d+) (\d+)$/
        or diag $out;

    is $status, 0, 'an independent reader finds the same keys and types';
    is $same, $n, 'every value is the rounded one, bit by bit';
    cmp_ok $held // 0, '>', 0, 'some need no rounding';
    diag sprintf 'of %d values %.1f %% need no rounding', $n // 0,
        100 * ($held // 0) / ($n || 1);

    # the most that a child of this process has had resident
    my $rss = q{import resource, subprocess, sys; }
        . q{subprocess.run(sys.argv[1:], check=True); }
        . q{print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)};

    for my $what ('quantize --type q8_0', 'trim --layers 20') {
        ($status, $out) = run("$python -c '$rss' $engine $what "
            . "--model $dir/f16.gguf --out $dir/rss.gguf");
        is $status, 0, $what or diag $out;

        my ($kib) = $out =~ /^(\d+)$/m;

        # the embedding is 56.6 MB of 269
        cmp_ok $kib // 1e9, '<', 100 * 1024, "$what: memory of one tensor"
            unless $build =~ /address|thread/;
    }
}

done_testing;
