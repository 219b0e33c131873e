#!/usr/bin/perl

# Models that cannot be served: one [emerg] line with the cause, nginx stays up
# and answers 503 with it.  Tiny models of every tensor type that can.

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

# --- too little memory for one sequence: the longest context that fits ---

if ($ENV{LLM_TEST_MODEL}) {
    $t = LLM::Test->new(engine => 'kv_cache_memory 32m; max_model_len 8192;')
        ->start(no_wait => 1);
    ok wait_for(sub { $t->log =~ /\[emerg\].*kv_cache_memory/i }, 10),
        'too few pages: [emerg]' or diag $t->log;
    $t->stop;
}

done_testing;
