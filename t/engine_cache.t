#!/usr/bin/perl

# repack_cache with a real model: the same tokens with and without it, in
# every state of the cache, and what the log and the memory say.

use strict;
use warnings;

use File::Temp qw(tempdir);
use Test::More;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $model = $ENV{LLM_TEST_MODEL};

plan skip_all => 'LLM_TEST_MODEL is not set' unless $model;

my $dir = tempdir(CLEANUP => 1);
my @args = (qw(--max-tokens 20 --kv-cache-memory 64m --max-model-len 1024
    --max-num-batched-tokens 256 --log-level notice), '--model', $model);
my $prompt = 'Once upon a time there was';

# the text, and the log
sub generate {
    my ($cache, @more) = @_;

    unlink "$dir/log";
    my $out = `$build/llm-engine generate --prompt '$prompt' @args @more \\
        --repack-cache $cache --log $dir/log`;

    is $?, 0, "generates with $cache";
    open my $f, '<', "$dir/log" or die $!;
    local $/;

    return ($out, scalar <$f>);
}

sub cache_file {
    my @files = glob "$dir/*.repack*";

    is scalar @files, 1, 'one file';
    return $files[0];
}

my ($want, $log) = generate('off');

unlike $log, qr/repack cache/, 'off: not a word';
like $want, qr/\w+ \w+ \w+ \w+/, 'a text';

my ($is, $written) = generate($dir);

is $is, $want, 'the first start: the same tokens';
like $written, qr/\[notice\].*repack cache: "\Q$dir\E.*" written, \d+ weights/,
    'and a cache';

my $file = cache_file();

cmp_ok -s $file, '<', 1.05 * (-s $model) + 3e6, 'of the size of the model';

for my $more ('', '--isa baseline', '--isa avx2', '--threads 1',
    '--device ref') {
    next if $more =~ /avx2/ && slurp('/proc/cpuinfo') !~ /\bavx2\b/;

    my $one = $more =~ /ref/ ? (generate('off', $more, '--max-tokens 3'))[0]
        : $want;

    ($is, $log) = generate($dir, $more,
        $more =~ /ref/ ? '--max-tokens 3' : '');
    is $is, $one, "later, $more: the same tokens";
    like $log, $more =~ /ref/ ? qr/"ref" has no use for one/
        : qr/repack cache: \d+ weights from "\Q$file\E"/, "later, $more: said";
}

# damage in one weight
open my $f, '+<:raw', $file or die $!;
seek $f, 30_000_000, 0;
print $f 'damage';
close $f;
($is, $log) = generate($dir);
is $is, $want, 'damaged: the same tokens';
like $log, qr/\[warn\].*is damaged: 1 of \d+ weights were repacked/, 'said so';
($is, $log) = generate($dir);
like $log, qr/\d+ weights from/, 'and mended';

truncate $file, 40_000_000;
($is, $log) = generate($dir);
is $is, $want, 'cut: the same tokens';
like $log, qr/\[notice\].*is cut short.*written/s, 'said so, and mended';

# nowhere to write
unlink $file;
($is, $log) = generate("$dir/none");
is $is, $want, 'no folder: the same tokens';
like $log, qr/\[notice\].*repack cache: not written: .*No such file/,
    'said so, once';
is scalar(() = $log =~ /repack cache/g), 1, 'in one line';

sub slurp { open my $g, '<', $_[0] or return ''; local $/; return <$g> }

done_testing;
