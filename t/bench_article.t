#!/usr/bin/perl

# t/bench/article.py in its smallest size: every table is printed and written,
# counts are what they must be, plots are XML.  Times are not looked at.

use strict;
use warnings;
use File::Temp qw(tempdir);
use FindBin;
use JSON::PP;
use Test::More;

my $top = "$FindBin::Bin/..";
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $build = $ENV{LLM_TEST_BUILD} || 'build';

chdir $top or die "chdir: $!";
plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};
plan skip_all => "an instrumented build ($build)" if $build =~ /address|thread/;

my $out = tempdir(CLEANUP => 1);
my $text = `$python t/bench/article.py --tiny --build $build --out $out 2>$out/err`;

is $?, 0, 'it runs' or diag read_file("$out/err");

sub read_file {
    open my $f, '<:raw', $_[0] or return '';
    local $/;
    return scalar <$f>;
}

my $markdown = read_file("$out/article.md");
my $json = eval { decode_json(read_file("$out/article.json")) };
ok $json, 'article.json is JSON' or BAIL_OUT("no article.json: $@");

# --- every table, on paper and on the screen ---

my @tables = @{ $json->{tables} };
my @titles = ('(a) Paging', '(b) Prefix', '(b) A prompt', '(b) What', '(c) 8',
    '(c) Throughput', '(d) Users', '(e) gpu', 'Bounds');

for my $title (@titles) {
    like $text, qr/^\Q$title\E/m, "printed: $title";
    like $markdown, qr/^## \Q$title\E/m, "written: $title";
}

is scalar @tables, @titles - 1, 'and no other';
cmp_ok scalar @{ $_->{rows} }, '>=', 2, "$_->{title} has rows" for @tables;
for my $table (@tables) {
    my $n = @{ $table->{columns} };
    is scalar(grep { @$_ != $n } @{ $table->{rows} }), 0,
        "$table->{title}: a cell for each column";
}

my ($paging, $rates, undef, undef, $gaps, undef, $users, $held)
    = map { $_->{data} } @tables;

# --- (a) reserving wastes more, and takes what it says ---

my %runs = map { ("$_->{lengths} $_->{mode}" => $_->{runs}[0]) }
    @{ $paging->{runs} };
my $seats = $paging->{pages} / (2048 / 16);

ok $paging->{equal}, 'the same answers, paged or reserved';

for my $lengths (qw(ShareGPT Alpaca)) {
    my ($paged, $reserved) = @runs{"$lengths paging", "$lengths reservation"};

    cmp_ok $paged->{waste}, '<', $reserved->{waste},
        "$lengths: paging wastes less";
    cmp_ok $reserved->{waste}, '>', 0.5, "$lengths: reservation wastes most";

    # of samples, which may have missed the fullest moment
    cmp_ok $reserved->{max_running}, '<=', $seats, "$lengths: the seats bind";
    cmp_ok $paged->{max_running}, '>', $reserved->{max_running},
        "$lengths: paging holds more";
    is $reserved->{preemptions}, 0, "$lengths: nothing reserved is preempted";
}

# --- (b) hits ---

my %work = %{ $rates->{workloads} };

is join(', ', sort keys %work), 'RAG, coding agent, multi-turn chat',
    'all workloads';
is $work{RAG}{cached_tokens}, $work{RAG}{by_hand},
    'RAG: cached tokens as computed by hand';

for my $name (sort keys %work) {
    my $w = $work{$name};

    ok $w->{equal}, "$name: the same answers with and without";
    cmp_ok $w->{cached_tokens}, '>', 0, "$name: something was found";
    cmp_ok $w->{cached_tokens}, '<', $w->{prompt_tokens}, '... not everything';
    cmp_ok abs($w->{by_metrics} - $w->{cached_tokens} / $w->{prompt_tokens}),
        '<', 1e-9, '... and the metrics say the same';
}

# --- (c), (d), (e) ---

cmp_ok scalar(keys %$gaps), '>=', 3, 'several ways of chunking';

for my $run (map { @$_ } values %$gaps) {
    cmp_ok $run->{worst}, '>=', $run->{median}, 'the worst gap is the worst';
    cmp_ok $run->{ttft}, '>', 0, 'the long prompt was answered';
}

cmp_ok $_->{tokens_s}, '>', 0, 'users got tokens' for values %$users;

for my $h (@{ $held->{held} }) {
    my ($share, $fit, $n, $whole, $preempted, $alive) = @$h;

    is $whole, $n, "utilization $share: all answered";
    is $preempted, 0, '... nobody preempted';
    ok $alive, '... and the engine is the first one';
}

cmp_ok $held->{held}[0][1], '<', $held->{held}[-1][1],
    'a larger share holds more';

# --- plots ---

my @plots = glob "$out/*.svg";

cmp_ok scalar @plots, '>=', 8, 'plots are written';
is system($python, '-c', <<'END', @plots), 0, 'and are well-formed XML';
import sys, xml.etree.ElementTree as tree
for path in sys.argv[1:]:
    assert tree.parse(path).getroot().tag.endswith("svg"), path
END

for my $plot (@plots) {
    my ($name) = $plot =~ m{([^/]+)$};
    like $markdown, qr/\(\Q$name\E\)/, "$name is in article.md";
    unlike read_file($plot), qr/nan|inf\b/i, "$name has numbers only";
}

done_testing();
