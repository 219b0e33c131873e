#!/usr/bin/perl

# Who waits, who is refused, and who goes first: llm_queue and Retry-After,
# llm_tenant and its weight, priority and llm_priority.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use List::Util qw(max);
use POSIX qw(ceil);
use Test::More;
use Time::HiRes qw(time);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/completions';
my $t = LLM::Test->new(workers => 2, engine => 'max_num_seqs 1; slots 64;',
    http => 'llm_queue 500;',
    server => '
        location /two/ { llm_queue 2; llm_pass chat; }
        location /ten/ { llm_queue 10; llm_pass chat; }
        location /off/ { llm_queue off; llm_pass chat; }
        location /fair/ { llm_tenant $http_x_tenant weight=$http_x_weight;
            llm_pass chat; }
        location /fixed/ { llm_tenant all; llm_priority $http_x_priority;
            llm_pass chat; }',
)->start;

my %short = (prompt => 'Once upon a time', max_tokens => 8, ignore_eos => \1);
my %long = (%short, max_tokens => 4000);

sub waiting { $t->metric('vllm:num_requests_waiting') }
sub rejected {
    $t->metric('vllm:admission_rejections_total',
        'engine="chat",[^}]*,reason="[^"]*"')
}

sub queued_ok {
    my ($n, $name) = @_;
    my $is;

    ok wait_for(sub { ($is = waiting()) == $n }, 20), $name
        or diag "$is are waiting";
}

# A request that holds the only seat until it is aborted: none is more urgent.
sub occupy {
    my $s = $t->stream($uri, { %long, priority => -2147483648 });

    ok $s->next_event, 'one runs';
    return $s;
}

sub refused_ok {
    my ($r, $name) = @_;
    my $e = $r->{status} == 503 ? $r->json->{error} : {};

    is $r->{status}, 503, "$name: 503" or diag $r->{body};
    like $r->{headers}{'retry-after'} // '', qr/^[1-9]\d{0,2}$/,
        "$name: with Retry-After";
    cmp_ok $r->{headers}{'retry-after'} // 0, '<=', 600, "$name: within bounds";
    is $r->{headers}{'x-should-retry'}, undef, "$name: it may be tried again";
    is $e->{type}, 'server_error', "$name: type";
    is $e->{code}, 'engine_busy', "$name: code";
    is $e->{param}, undef, "$name: param";
    like $e->{message}, qr/^The engine has \d+ requests waiting/,
        "$name: message";
}

# --- a queue of two ---

is rejected(), 0, 'nothing refused yet';
my $busy = occupy();
my @two = map { $t->open_request(POST => "/two$uri", { %short }) } 1 .. 2;
queued_ok(2, 'two wait');

refused_ok($t->post("/two$uri", { %short }), 'the third');
refused_ok($t->post("/two$uri", { %short, stream => \1 }), 'a stream');
refused_ok($t->post("/two$uri", { %short, n => 4 }), 'four choices');
refused_ok($t->post("/two$uri", { %short, prompt => ['a', 'b'] }),
    'two prompts');
refused_ok($t->post('/two/v1/chat/completions', { messages =>
    [{ role => 'user', content => 'Hi' }], max_tokens => 4 }), 'a chat');
is rejected(), 5, 'each request counts once';
is waiting(), 2, 'those that wait still do';

is $t->post('/two/tokenize', { prompt => 'Hi' })->{status}, 200,
    'what is not generated needs no place';
is $t->get('/two/v1/models')->{status}, 200, 'nor does a look at the model';

# other locations have limits of their own, counted over all of them
my @more = map { $t->open_request(POST => "$_$uri", { %short }) }
    '/ten', '/off', '';
queued_ok(5, 'other locations take more');
$_->abort for @more;
queued_ok(2, 'and they leave');

# more events than can have been on their way
ok((grep { $busy->next_event } 1 .. 100) == 100, 'the one that runs goes on');
$busy->abort;

$_->finish for @two;
is $_->{status}, 200, 'those that waited are answered' for @two;
is $_->json->{usage}{completion_tokens}, 8, 'in full' for @two;
$t->idle_ok;
is $t->post("/two$uri", { %short })->{status}, 200, 'and then others';

# --- choices come in as a whole or not at all ---

my $whole = $t->post("/two$uri", { %short, n => 4, max_tokens => 4 });
is $whole->{status}, 200, 'nobody waits: more choices than places';
is scalar @{ $whole->json->{choices} }, 4, 'all of them answered';

$busy = occupy();
my $one = $t->open_request(POST => "/two$uri", { %short });
queued_ok(1, 'one waits');
refused_ok($t->post("/two$uri", { %short, n => 2 }), 'no room for two');
is waiting(), 1, 'neither of them was taken';
my $last = $t->open_request(POST => "/two$uri", { %short });
queued_ok(2, 'but room for one');
$_->abort for $one, $last;
queued_ok(0, 'they leave');

# --- exact, whichever worker they come from ---

my $before = rejected();
my @crowd = map { $t->open_request(POST => "/ten$uri", { %short }) } 1 .. 30;
queued_ok(10, 'of thirty at once ten wait');
ok wait_for(sub { rejected() == $before + 20 }, 10), 'and twenty do not'
    or diag rejected() - $before;
$busy->abort;
$_->finish for @crowd;
is scalar(grep { $_->{status} == 200 } @crowd), 10, 'ten are answered';
is scalar(grep { $_->{status} == 503 } @crowd), 20, 'twenty refused';
$t->idle_ok;

# --- Retry-After follows the rate ---

my %steady = (%short, max_tokens => 40);
my $t0 = time;
my @steady = map { $t->open_request(POST => "/off$uri", { %steady }) } 1 .. 24;
$_->finish for @steady;
my $each = (time - $t0) / @steady;
$busy = occupy();
my @ten = map { $t->open_request(POST => "/ten$uri", { %short }) } 1 .. 10;
queued_ok(10, 'ten wait');
my $after = $t->post("/ten$uri", { %short })->{headers}{'retry-after'};
my $most = ceil(3 * 10 * $each) + 2;
cmp_ok $after, '>=', max(1, int(10 * $each / 3)), 'not sooner than ten took';
cmp_ok $after, '<=', $most, 'nor much later';
$_->abort for @ten, $busy;
$t->idle_ok;

# --- the order in which requests are let in ---

# Sends requests [name, uri, body, headers...] while one runs, each when the
# one before it waits; ends that one, and then each as soon as it is seen to
# run: one runs at a time, and none of them ends by itself.
sub order_of {
    my @asks = @_;
    my $hold = occupy();
    my (@r, @begun);

    for my $ask (@asks) {
        my ($name, $at, $body, @headers) = @$ask;
        push @r, $t->stream("$at$uri", { %long, %$body },
            headers => \@headers);
        $r[-1]{name} = $name;
        wait_for(sub { waiting() == @r }, 20) or diag "$name does not wait";
    }

    $hold->abort;

    while (@begun < @r) {
        my $runs;

        wait_for(sub {
            $_->fill(0) for grep { !$_->{eof} } @r;
            ($runs) = grep { !$_->{eof} && @{ $_->{events} } } @r;
        }, 20) or last;
        push @begun, $runs->abort;
    }

    is scalar(grep { $_->{status} == 200 } @begun), @asks, 'all are let in';
    $t->idle_ok;

    return map { $_->{name} } @begun;
}

is join(' ', order_of(['a', '', {}], ['b', '', {}], ['c', '', {}])), 'a b c',
    'in the order of arrival';
is join(' ', order_of(['late', '', { priority => 5 }], ['b', '', {}],
    ['soon', '', { priority => -3 }], ['d', '', { priority => 0 }],
    ['first', '', { priority => -2147483648 }])), 'first soon b d late',
    'by priority, then by arrival';
is join(' ', order_of(
    ['a', '/fixed', { priority => -9 }, 'X-Priority: 1'],
    ['b', '/fixed', { priority => 9 }, 'X-Priority: -1'],
    ['c', '/fixed', { priority => -99 }])), 'b c a',
    'llm_priority goes before the body\'s, and without a value it is 0';

my $calm = $t->stream($uri, \%long);
ok $calm->next_event, 'one runs that is not urgent';
is $t->post($uri, { %short, priority => -1 })->{status}, 200,
    'a more urgent one takes its place';
ok((grep { $calm->next_event } 1 .. 100) == 100, 'it goes on afterwards');
ok !$calm->{complete}, 'and had not ended before';
$calm->abort;
$t->idle_ok;

for my $bad (1.5, '1', 2147483648, -2147483649, \1, [1]) {
    my $r = $t->post($uri, { %short, priority => $bad });

    is $r->{status}, 400, 'a bad priority';
    is $r->json->{error}{param}, 'priority', 'is named';
}

is $t->post($uri, { %short, priority => undef })->{status}, 200, 'null is none';

# --- one tenant floods ---

my @flood = map { ["a$_", '/fair', { priority => -100 }, 'X-Tenant: a'] }
    1 .. 12;
my @order = order_of(@flood, ['b', '/fair', { priority => 100 },
    'X-Tenant: b']);
my ($place) = grep { $order[$_] eq 'b' } 0 .. $#order;
cmp_ok $place, '<=', 2, 'a tenant is not held up by another\'s flood'
    or diag "@order";
is join(' ', grep { /a/ } @order), join(' ', map { "a$_" } 1 .. 12),
    'which keeps its own order';

# --- weights and names: nothing that a header holds is an error ---

for my $weight ('abc', '', '-1', '0', '1e3', 'nan', '5', '0.01', '1000.1') {
    is $t->post("/fair$uri", { %short }, headers => ['X-Tenant: w',
        "X-Weight: $weight"])->{status}, 200, "weight \"$weight\"";
}

my $warned = () = $t->log =~ /\[warn\].*llm_tenant: weight "/g;
cmp_ok $warned, '>=', 1, 'the log names a bad weight';
cmp_ok $warned, '<=', 2, 'once a worker';

is $t->post("/fair$uri", { %short }, headers => ['X-Tenant: ' . 'x' x $_])
    ->{status}, 200, "a tenant's name of $_ bytes" for 0, 255, 256, 3000;

for my $priority ('abc', '1.5', '-', '99999999999') {
    is $t->post("/fixed$uri", { %short }, headers => ["X-Priority: $priority"])
        ->{status}, 200, "llm_priority \"$priority\"";
}

$warned = () = $t->log =~ /\[warn\].*llm_priority: "/g;
cmp_ok $warned, '>=', 1, 'the log names a bad priority';
cmp_ok $warned, '<=', 2, 'once a worker';

$t->idle_ok;
$t->stop_ok;
done_testing;
