#!/usr/bin/perl

# reload, quit, stop, a broken configuration, a changed one, another binary
# path, the master's death: the table of the design, case by case.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;
use Time::HiRes qw(sleep time);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/completions';
my %story = (prompt => 'Once upon a time', ignore_eos => \1, temperature => 0);

# --- nginx -t starts nothing ---

my $t = LLM::Test->new(workers => 2);
my ($status, $out) = $t->test_conf;
is $status, 0, 'nginx -t' or diag $out;
is scalar(grep { (readlink "$_/exe" // '') =~ /^\Q$t->{dir}\E/ }
    glob '/proc/[0-9]*'), 0, 'starts nothing';
is -s "$t->{dir}/t.pid" // 0, 0, 'leaves no pid';

# --- ten reloads under streams lose none ---

$t->start;
my $engine = $t->engine_pid;
my $alone = $t->post($uri, { %story, max_tokens => 400 })
    ->json->{choices}[0]{text};
my (@streams, @late);

for my $i (1 .. 10) {
    push @streams, $t->stream($uri, { %story, max_tokens => 400 });
    $streams[-1]->next_event;
    my %old = map { $_ => 1 } $t->children('nginx');
    $t->signal('HUP');
    ok wait_for(sub { grep { !$old{$_} } $t->children('nginx') }, 10),
        "reload $i";
    wait_for(sub { $t->connects }, 5);
    push @late, $t->post($uri, { prompt => 'x', max_tokens => 1 })->{status};
}

$_->finish for @streams;
is scalar(grep { ($_->chunks)[-1] eq '[DONE]' } @streams), 10,
    'every stream is complete';
is scalar(grep { $_->text eq $alone } @streams), 10, 'and has the same text'
    or diag join "\n", map { substr $_->{events}[-2]{data}, 0, 300 }
        grep { $_->text ne $alone } @streams;
is_deeply \@late, [(200) x 10], 'new requests are served all the time';
is $t->engine_pid, $engine, 'by the same engine';
$t->idle_ok;

# --- a broken configuration changes nothing ---

my $good = $t->{conf};
my $text = do { open my $f, '<', $t->{conf_path} or die; local $/; <$f> };
$t->write_conf($text =~ s/llm_engine chat \{/llm_engine chat { nonsense on;/r);
$t->signal('HUP');
sleep 0.5;
is $t->engine_pid, $engine, 'a broken configuration: the same engine';
ok wait_for(sub { $t->post($uri, { prompt => 'x', max_tokens => 1 })
    ->{status} == 200 }, 5), 'serves';

# --- a changed block: a new engine beside the old one, which drains ---

my $s = $t->stream($uri, { %story, max_tokens => 600 });
$s->next_event;
$t->write_conf($text =~ s/llm_engine chat \{/llm_engine chat { max_num_seqs 7;/r);
$t->signal('HUP');
ok wait_for(sub { grep { $_ != $engine } $t->children('llm-engine') }, 10),
    'a changed block: a new engine';
$s->finish;
is(($s->chunks)[-1], '[DONE]', 'the old stream completes');
ok wait_for(sub { !grep { $_ == $engine } $t->children('llm-engine') }, 20),
    'then the old engine leaves';
$t->ready;
isnt $t->engine_pid, $engine, 'the new one serves';

# --- the block is removed, and comes back ---

$t->write_conf($text =~ s/llm_engine chat \{.*?\n    \}//sr
    =~ s/llm_pass chat;/return 204;/r);
$t->signal('HUP');
ok wait_for(sub { !$t->children('llm-engine') }, 20), 'removed: it leaves';
$t->write_conf($text);
$t->signal('HUP');
ok wait_for(sub { $t->engine_pid }, 10), 'put back: it starts';
$t->ready;
ok wait_for(sub { $t->post($uri, { prompt => 'x', max_tokens => 1 })
    ->{status} == 200 }, 5), 'serves';

# --- log rotation ---

rename "$t->{dir}/error.log", "$t->{dir}/error.log.1";
$t->signal('USR1');
ok wait_for(sub { -e "$t->{dir}/error.log" }, 5), 'USR1 reopens the log';
ok wait_for(sub { $t->post($uri, { prompt => 'x', max_tokens => 1 })
    ->{status} == 200 }, 5), 'serves';

# --- quit drains ---

$s = $t->stream($uri, { %story, max_tokens => 300 });
$s->next_event;
$t->signal('QUIT');
$s->finish;
is(($s->chunks)[-1], '[DONE]', 'quit lets the stream end');
$t->stop_ok(except => qr/unknown directive|nonsense|is not allowed/);

# --- stop does not wait; a hung engine is killed ---

$t = LLM::Test->new->start;
$s = $t->stream($uri, { %story, max_tokens => 4000 });
$s->next_event;
my $begin = time;
is $t->stop('TERM'), 0, 'stop';
cmp_ok time - $begin, '<', 10, 'is quick';
$t->clean_ok;

$t = LLM::Test->new->start;
$engine = $t->engine_pid;
kill 'STOP', $engine;
is $t->stop('TERM'), 0, 'stop with a hung engine';
ok !kill(0, $engine), 'which is gone';

# --- the master dies: engine and workers go on, and leave together ---

$t = LLM::Test->new->start;
$engine = $t->engine_pid;
my @workers = $t->children('nginx');
$s = $t->stream($uri, { %story, max_tokens => 300 });
$s->next_event;
kill 'KILL', $t->{pid};
waitpid $t->{pid}, 0;
delete $t->{pid};
$s->finish;
is(($s->chunks)[-1], '[DONE]', 'the master is dead: the stream completes');
kill 'TERM', @workers;
ok wait_for(sub { !kill 0, $engine }, 20),
    'without workers the engine leaves too';

done_testing;
