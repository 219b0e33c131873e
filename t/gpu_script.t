#!/usr/bin/perl

# t/gpu.sh --dry: the script for a machine with a GPU, over the emulated one:
# every step runs and is in its result; one that fails is noticed, and the rest
# goes on.

use strict;
use warnings;

use File::Temp qw(tempdir);
use FindBin;
use JSON::PP;
use Test::More;

chdir "$FindBin::Bin/.." or die;

my $build = $ENV{LLM_TEST_BUILD} || 'build';

plan skip_all => "no $build/emu/llm-engine" if !-x "$build/emu/llm-engine";

# exit status, and what is in the result
sub run {
    my (%setting) = @_;
    my $dir = tempdir(CLEANUP => 1);

    local @ENV{'OUT', keys %setting} = ($dir, values %setting);
    my $out = `bash t/gpu.sh --dry 2>&1`;
    my $status = $? >> 8;

    open my $f, '<', "$dir/gpu.json" or BAIL_OUT("no result: $out");
    local $/;
    my $result = decode_json(<$f>);

    diag $out if $status && !%setting;

    return ($status, $result, { map { $_->{step} => $_ } @{$result->{steps}} });
}

my @ops = qw(ops-op_test ops-fine_test ops-weight_test);
my @steps = (@ops, qw(device memcheck racecheck synccheck initcheck synth-small
                      synth-q4_0 end-to-end exactness speculation
                      bench-q4_0));

my ($status, $result, $step) = run();

is $status, 0, 'all is well';
is $step->{$_}{status}, 'passed', "$_ passed" for @steps;
is_deeply [sort keys %$step],
    [sort @steps, qw(batches draws cuda-attn_test cuda-kv_test)],
    'and nothing else ran';
is scalar @{$result->{speed}}, 1, 'a speed';
cmp_ok $result->{speed}[0]{tokens_per_s}, '>', 0, 'in tokens';
cmp_ok $result->{speed}[0]{gb_per_s}, '>', 0, 'and in bytes';
is $result->{speed}[0]{of_bandwidth}, undef, 'of no known GPU';

($status, $result, $step) = run(LLM_GPU_PLANT => 'racecheck');

is $status, 1, 'a step that fails';
is $result->{failed}, 1, 'in the result';
is $step->{racecheck}{status}, 'failed', 'by its name';
is $step->{racecheck}{why}, 'exit status 1', 'and why';
is $step->{$_}{status}, 'passed', "$_ passed" for grep { !/race/ } @steps;

($status, $result, $step) = run(LLM_SHIM_DEVICE => 'none');

is $status, 1, 'no GPU';
is $step->{$_}{status}, 'failed', "$_ says so" for @ops, 'end-to-end';
is $step->{'synth-small'}{status}, 'passed', 'what needs none passes';

($status, $result, $step) = run(LIMIT_S => 1);

is $status, 1, 'no time';
is $step->{exactness}{why}, 'no time was left', 'said so';

done_testing;
