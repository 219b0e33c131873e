#!/usr/bin/perl

# An engine on a GPU, emulated, behind nginx: it serves; when a kernel dies the
# engine leaves with one line, those who waited get a proper error, and the
# master starts another one, which serves.  A device that is not there is one
# line, too, and with "auto" it is the CPU.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $engine = "$FindBin::Bin/../$build/emu/llm-engine";

plan skip_all => "no $build/emu/llm-engine" if !-x $engine;

my $dir = File::Temp::tempdir(CLEANUP => 1);
my $model = "$dir/small.gguf";
my $synth = 'synth --like smollm2-135m --layers 1 --vocab 600 --context 512';

`$engine $synth --out $model`;
is $?, 0, 'a small model' or BAIL_OUT('synth');

sub nginx {
    my ($device, %o) = @_;

    return LLM::Test->new(model => $model, program => $engine,
        engine => "device $device; kv_cache_memory 16m; max_model_len 512;
            max_num_seqs 4;")->start(%o);
}

my $uri = '/v1/completions';
my %short = (prompt => 'a b c', max_tokens => 4, temperature => 0,
    ignore_eos => \1);
my %long = (%short, max_tokens => 400);

# --- a kernel dies ---

{
    # of each engine, the 2000th: more than a short answer takes
    local $ENV{LLM_SHIM_FAIL} = 'async:2000';
    my $t = nginx('cuda:0');
    my $first = $t->post($uri, { %short });

    is $first->{status}, 200, 'it serves';
    like $t->log, qr/on cuda \(GPU 0, CPU emulation/, 'on the GPU';

    my $before = $t->engine_pid;
    my @streams = map { $t->stream($uri, { %long }) } 1, 2;

    $_->finish(60) for @streams;

    for my $s (@streams) {
        my @chunks = $s->chunks;

        is $chunks[-1], '[DONE]', 'a stream ends properly';
        like $chunks[-2]{error}{message}, qr/engine/, 'with an error';
    }

    my @told = $t->log =~ /^.*\[emerg\].*$/mg;

    is scalar @told, 1, 'one line' or diag "@told";
    like $told[0], qr/the device has failed: GPU 0: .*illegal memory access/,
        'says what happened';

    ok wait_for(sub { my $e = $t->engine_pid; $e && $e != $before }, 10),
        'a new engine is there';
    $t->ready;

    my $again = $t->post($uri, { %short });

    is $again->{status}, 200, 'and serves';
    is $again->json->{choices}[0]{text}, $first->json->{choices}[0]{text},
        'what the first one said';
    is $t->metric('llm_engine_epoch'), 2, 'it is the second one';
    cmp_ok $t->metric('llm_rows_ahead_used_total'), '>', 0,
        'decodes are computed ahead';
    $t->idle_ok;
    is $t->stop, 0, 'nginx leaves cleanly';
    $t->clean_ok(except => qr/the device has failed/);
}

# --- no GPU ---

{
    local $ENV{LLM_SHIM_DEVICE} = 'none';
    my $t = nginx('cuda', no_wait => 1);

    ok wait_for(sub { $t->log =~ /\[emerg\].*device cuda: / }, 10),
        'no GPU is a line';
    is $t->get('/health')->{status}, 503, 'and nginx stays up';
    $t->stop;

    $t = nginx('auto');
    like $t->log, qr/device auto: using the CPU, because /, 'auto: the CPU';
    is $t->post($uri, { %short })->{status}, 200, 'which serves';
    $t->stop_ok;
}

done_testing;
