#!/usr/bin/perl

# How the engine lives and dies with nginx: daemon mode, no master, binary
# upgrade and its rollback, an engine that cannot start, starts slowly or keeps
# dying, two engines, a dead worker.  Reloads and stops are in http_reload.t.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;
use Time::HiRes qw(time sleep);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/completions';
my %story = (prompt => 'Once upon a time', ignore_eos => \1, temperature => 0);
my @extra;

END { kill 'KILL', grep { LLM::Test::alive($_) } @extra }

sub alive { LLM::Test::alive($_[0]) }

sub serves {
    my ($t, $name) = @_;
    ok wait_for(sub { $t->post($uri, { prompt => 'x', max_tokens => 1 })
        ->{status} == 200 }, 20), $name;
}

# an executable in the folder of the test
sub script {
    my ($t, $name, $text) = @_;
    open my $f, '>', "$t->{dir}/$name" or die $!;
    print $f "#!/bin/sh\n$text\n";
    close $f;
    chmod 0755, "$t->{dir}/$name";
}

sub with_program {
    my ($t, $name) = @_;
    my $conf = $t->default_conf;
    $conf =~ s{program \S+;}{program %%DIR%%/$name;};
    return $t->write_conf($conf);
}

# --- daemon on: the engine belongs to the process that stays ---

my $t = LLM::Test->new(workers => 2)->start(global => 'daemon on;');
my $master = $t->{pid};
my $engine = $t->engine_pid;
ok $engine, 'daemon on: the engine is a child of the daemon';
serves($t, 'serves');
kill 'KILL', $engine;
ok wait_for(sub { my $e = $t->engine_pid; $e && $e != $engine }, 10),
    'it is started again';
serves($t, 'and serves');
$engine = $t->engine_pid;
my %old = map { $_ => 1 } $t->children('nginx');
$t->signal('HUP');
ok wait_for(sub { !grep { $old{$_} } $t->children('nginx') }, 10), 'a reload';
is $t->engine_pid, $engine, 'keeps it';
serves($t, 'and serves');
$t->stop;
ok !alive($master), 'the daemon leaves';
ok !alive($engine), 'so does the engine';
$t->clean_ok(except => qr/exited on signal 9/);

# --- master_process off: a timer looks after the engine ---

$t = LLM::Test->new->start(global => 'daemon off; master_process off;');
$engine = $t->engine_pid;
ok $engine, 'without a master: an engine';
serves($t, 'serves');
kill 'KILL', $engine;
ok wait_for(sub { my $e = $t->engine_pid; $e && $e != $engine }, 10),
    'it is started again';
serves($t, 'and serves');
$engine = $t->engine_pid;
is $t->stop, 0, 'nginx leaves';
ok wait_for(sub { !alive($engine) }, 20), 'so does the engine';
$t->clean_ok(except => qr/exited on signal 9/);

# --- USR2: two masters, each with an engine; then the old one leaves ---

# nginx wants to be a daemon for this, and hands on no variables of its own
# accord: a sanitizer needs some
$t = LLM::Test->new(main => 'env LD_PRELOAD; env ASAN_OPTIONS;
    env UBSAN_OPTIONS;')->start(global => 'daemon on;');
$master = $t->{pid};
$engine = $t->engine_pid;
my $alone = $t->post($uri, { %story, max_tokens => 150 })
    ->json->{choices}[0]{text};
my $s = $t->stream($uri, { %story, max_tokens => 150 });
$s->next_event;

$t->signal('USR2');
my $new = wait_for(sub { my $p = $t->pid_file; $p && $p != $master && $p }, 10);
ok $new, 'USR2: a second master';
push @extra, $new;
my $second = wait_for(sub { ($t->children('llm-engine', $new))[0] }, 10);
ok $second, 'with an engine of its own';
push @extra, $second;
ok alive($engine), 'beside the old one';
serves($t, 'requests are answered');

kill 'QUIT', $master;
$s->finish;
is $s->text, $alone, 'the old stream is complete';
ok wait_for(sub { !alive($master) }, 20), 'the old master leaves';
ok !alive($engine), 'with its engine';
ok alive($second), 'the new engine stays';
$t->{pid} = $new;
$t->ready;
serves($t, 'and serves');

# --- WINCH, then back: nginx starts workers without reading the configuration,
# the next reload brings the engine ---

$t->signal('USR2');
my $third = wait_for(sub { my $p = $t->pid_file; $p && $p != $new && $p }, 10);
push @extra, $third, $t->children('llm-engine', $third);
$engine = wait_for(sub { ($t->children('llm-engine', $third))[0] }, 10);
push @extra, $engine;
$t->signal('WINCH');
ok wait_for(sub { !$t->children(undef, $new)
    || !grep { $_ != $third } $t->children(undef, $new) }, 20),
    'WINCH: old workers and the old engine leave';
$t->ready;
serves($t, 'the new ones serve');
$t->signal('HUP');
ok wait_for(sub { grep { $_ != $third } $t->children('nginx', $new) }, 10),
    'rollback: the old master has workers again';
kill 'QUIT', $third;
ok wait_for(sub { !alive($third) }, 20), 'the new master leaves';
ok wait_for(sub { $t->pid_file && $t->pid_file == $new }, 5),
    'the old one has its pid file back';
my $r = $t->post($uri, { prompt => 'x', max_tokens => 1 });
is $r->{status}, 503, 'without an engine: 503';
is $r->json->{error}{code}, 'engine_unavailable', 'in the usual shape';
$t->signal('HUP');
$t->ready;
serves($t, 'the next reload starts it');
$t->idle_ok;
$t->stop;
ok !alive($new), 'and all of it leaves';
$t->clean_ok;
@extra = ();

# --- the program is gone when the engine has to be started again ---

$t = LLM::Test->new->start;
my $bin = "$t->{dir}/bin/llm-engine";
rename $bin, "$bin.away" or die $!;
kill 'KILL', $t->engine_pid;
ok wait_for(sub { ($t->get('/health')->json->{error}{code} // '')
    eq 'engine_failed' }, 10), 'no program: 503 that says so';
$r = $t->post($uri, { prompt => 'x' });
is $r->{status}, 503, 'for requests, too';
is $r->{headers}{'x-should-retry'}, 'false', 'it is no use to try again';
like $r->json->{error}{message}, qr/could not be started/, 'the cause';
# the master hears of it later than a worker does
ok wait_for(sub { $t->log =~ /cannot be respawned/ }, 10), 'nginx gives up';
is scalar(() = $t->log =~ /cannot be respawned/g), 1, 'and does not insist';
ok alive($t->{pid}), 'nginx stays';
rename "$bin.away", $bin or die $!;
$t->signal('HUP');
$t->ready;
serves($t, 'put back, a reload starts it');
is $t->stop, 0, 'nginx leaves';
$t->clean_ok(except => qr/on signal 9|execv\(\) failed|cannot be respawned/);

# --- a reload while an engine that has failed is still there ---

# it writes its state (3 at 64: failed) into the segment, and takes its time
$t = LLM::Test->new;
script($t, 'fails', qq{perl -e 'open my \$f, "+<&=", 3; seek \$f, 64, 0;
    syswrite \$f, pack "L", 3'
    while ! [ -e $t->{dir}/go ]; do sleep 0.1; done
    exit 2});
with_program($t, 'fails')->start(no_wait => 1);
ok wait_for(sub { ($t->get('/health')->json->{error}{code} // '')
    eq 'engine_failed' }, 10), 'an engine that has failed';
unlink "$t->{dir}/fails" or die $!;
link("$t->{dir}/bin/llm-engine", "$t->{dir}/fails") or die $!;
$t->signal('HUP');
$t->ready;
serves($t, 'a reload starts another one at once');
open my $touch, '>', "$t->{dir}/go" or die $!;
close $touch;
ok wait_for(sub { $t->log =~ /exited with code 2/ }, 10), 'the other leaves';
serves($t, 'which disturbs nobody');
is $t->stop, 0, 'nginx leaves';
$t->clean_ok;

# --- an engine that dies at once is started more and more slowly ---

$t = LLM::Test->new;
script($t, 'dies', "echo >>$t->{dir}/starts; exit 1");
open $touch, '>', "$t->{dir}/starts" or die $!;
close $touch;
chmod 0666, "$t->{dir}/starts";
with_program($t, 'dies')->start(no_wait => 1);
ok wait_for(sub { $t->log =~ /died young \d+ times, starting it again in 2 s/ },
    20), 'an engine that dies at once: the pauses grow';
cmp_ok scalar(() = $t->log('starts') =~ /\n/g), '<=', 4, 'it is not a storm';
$r = $t->post($uri, { prompt => 'x' });
is $r->{status}, 503, 'meanwhile requests get 503';
ok $r->{headers}{'retry-after'}, 'with Retry-After';
is $t->stop, 0, 'nginx leaves in the middle of a pause';
$t->clean_ok;

# --- a slow start ---

$t = LLM::Test->new;
script($t, 'slow', "while ! [ -e $t->{dir}/go ]; do sleep 0.1; done\n"
    . "exec $t->{dir}/bin/llm-engine \"\$@\"");
with_program($t, 'slow')->start(no_wait => 1);
ok wait_for(sub { ($t->get('/health')->json->{error}{code} // '')
    eq 'engine_loading' }, 10), 'loading';
$r = $t->post($uri, { prompt => 'x' });
is $r->{status}, 503, 'requests get 503';
ok $r->{headers}{'retry-after'} > 0, 'with Retry-After';
is $r->json->{error}{type}, 'server_error', 'in the usual shape';
is $t->metric('llm_engine_up'), 0, 'the metrics say so';
is $t->get('/version')->{status}, 200, 'what needs no engine is answered';
open $touch, '>', "$t->{dir}/go" or die $!;
close $touch;
$t->ready;
serves($t, 'then it serves');
$t->stop_ok;

# --- two engines ---

$t = LLM::Test->new(http => 'llm_engine two { model %%MODEL%% alias=smollm2;
        program %%DIR%%/bin/llm-engine; max_num_seqs 4; slots 8; }',
    server => 'location /two/ { llm_pass two; }')->start;
ok wait_for(sub { $t->get('/two/health')->{status} == 200 }, 30), 'two engines';
my @engines = $t->children('llm-engine');
is scalar @engines, 2, 'are two processes';
my @both = map { $t->post("$_$uri", { %story, max_tokens => 20 })
    ->json->{choices}[0]{text} } '', '/two';
is $both[1], $both[0], 'with the same answer';
my $metrics = $t->get('/metrics')->{body};
my @names = map { s/ \S+$//r } grep { !/^#/ } split /\n/, $metrics;
my %seen;
is scalar(grep { $seen{$_}++ } @names), 0, 'each sample once, though both serve one model';

my ($two) = grep { my $pid = $_; open my $f, '<', "/proc/$pid/cmdline";
    local $/; <$f> =~ /name=two/ } @engines;
$s = $t->stream($uri, { %story, max_tokens => 150 });
$s->next_event;
my $dying = $t->stream("/two$uri", { %story, max_tokens => 4000 });
$dying->next_event;
kill 'KILL', $two;
$dying->finish;
is(($dying->chunks)[-2]{error}{code}, 'engine_unavailable', 'one dies');
$s->finish;
is $s->text, $alone, 'the other streams on';
ok wait_for(sub { $t->get('/two/health')->{status} == 200 }, 30),
    'the first is back';
is $t->stop, 0, 'nginx leaves';
$t->clean_ok(except => qr/on signal 9/);

# --- a worker dies while the other one streams ---

# the worker that holds the other end of a connection
sub worker_of {
    my ($t, $stream) = @_;
    my $pair = sprintf '0100007F:%04X 0100007F:%04X', $t->{port},
        $stream->{s}->sockport;
    open my $f, '<', '/proc/net/tcp' or die $!;
    my ($inode) = map { (split)[9] } grep { /$pair/ } <$f>;

    return 0 unless $inode;    # not accepted yet
    for my $pid ($t->children('nginx')) {
        return $pid if grep { (readlink // '') eq "socket:[$inode]" }
            glob "/proc/$pid/fd/*";
    }
    return 0;
}

$t = LLM::Test->new(workers => 2)->start;
my @workers = $t->children('nginx');
my (%idle, %of);

# whose a connection is, is known before it asks: one that is to be cut asks
# for so much that it cannot have ended
for (1 .. 60) {
    my $c = LLM::Test::Response->new($t->connects);
    my $worker = wait_for(sub { worker_of($t, $c) }, 10) // 0;
    push @{ $idle{$worker} }, $c;
    last if keys %idle == 2 && (grep { @$_ >= 2 } values %idle) == 2;
}
is_deeply [sort { $a <=> $b } keys %idle], \@workers, 'both workers have some';
for my $worker (@workers) {
    my $n = $worker == $workers[0] ? 4000 : 150;
    $of{$worker} = [map { $t->stream($uri, { %story, max_tokens => $n },
        on => $_) } @{ $idle{$worker} }];
}
ok $_->next_event, 'streaming' for map { @$_ } values %of;
kill 'KILL', $workers[0];
$_->finish for map { @$_ } values %of;
is scalar(grep { $_->text ne $alone } @{ $of{$workers[1]} }), 0,
    'one dies, the streams of the other are complete';
is scalar(grep { $_->{complete} && ($_->chunks)[-1] eq '[DONE]' }
    @{ $of{$workers[0]} }), 0, 'its own are cut';
$t->idle_ok('the engine has dropped them');
ok wait_for(sub { $t->children('nginx') == 2 }, 10), 'a new worker is there';
serves($t, 'all serve');
is $t->stop, 0, 'nginx leaves';
$t->clean_ok(except => qr/on signal 9/);

done_testing;
