#!/usr/bin/perl

# Prompts that take long to be tokenized do not hold up who is streaming.
# Order is judged, not time: how much a stream gets while others are worked on.
# A word of 420 000 letters takes the tokenizer a tenth of a second.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;
use Time::HiRes qw(time);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new(server => 'client_max_body_size 8m;')->start;
my $uri = '/v1/completions';
my %stream = (prompt => 'Once upon a time', max_tokens => 500,
    ignore_eos => \1, temperature => 0);

srand 1;
my $word = join '', map { chr(97 + int rand 26) } 1 .. 420_000;
my $long = 'international ' x 700;

my $ask = json_encode({ prompt => $word });

sub tokenize { $t->open_request(POST => '/tokenize', $ask) }

# Reads all until each of the others has begun to be answered: the events that
# the stream got meanwhile.
sub meanwhile {
    my ($name, $s, @others) = @_;
    my $n = @{ $s->{events} };
    my $start = my $last = time;
    my $worst = 0;

    while (grep { !defined $_->{status} && !$_->{eof} } @others) {
        $s->fill(0.002);
        $_->fill(0) for @others;

        if (@{ $s->{events} } > $n || $s->{eof}) {
            my $now = time;

            $worst = $now - $last if $now - $last > $worst;
            $n = @{ $s->{events} };
            $last = $now;
        }
    }

    # what has come before the answers, and was not looked at
    1 while $s->fill(0);
    $n = @{ $s->{events} };

    diag sprintf '%s: %.0f ms, %d events of the stream meanwhile, worst gap '
        . '%.1f ms', $name, 1000 * (time - $start), $n, 1000 * $worst;
    $s->next_event while @{ $s->{events} };

    return $n;
}

my $alone = $t->stream($uri, \%stream)->finish;

is $alone->{status}, 200, 'a stream alone';

my $s = $t->stream($uri, \%stream);

$s->next_event for 1 .. 5;
my @all = map { tokenize() } 1 .. 10;
cmp_ok meanwhile('ten words', $s, @all), '>', 40,
    'a stream goes on while others are tokenized';
$_->finish for @all;
is scalar(grep { $_->{status} == 200 } @all), 10, 'which are answered';
$s->finish;
is $s->text, $alone->text, 'the stream says what it says alone';

$s = $t->stream($uri, \%stream);
$s->next_event for 1 .. 5;
my $r = $t->stream($uri, { prompt => $long, max_tokens => 4 });
cmp_ok meanwhile('a long prompt', $s, $r), '>', 3,
    'the stream goes on while a prompt is computed';
is $r->finish->{status}, 200, 'which is answered';
$s->finish;
is $s->text, $alone->text, 'and the stream says the same again';
$t->idle_ok;

# --- all of a megabyte, there and back ---

$s = $t->stream($uri, \%stream);
$s->next_event;
my $tokens = $all[0]->json->{tokens};
cmp_ok scalar @$tokens, '>', 100_000, 'many tokens';
is_deeply $all[9]->json->{tokens}, $tokens, 'the same for all';
$r = $t->open_request(POST => '/detokenize', { tokens => $tokens });
meanwhile('detokenize', $s, $r);
is $r->finish->json->{prompt}, $word, 'which are the word';
$r = $t->open_request(POST => $uri, { prompt => "$long " x 100 });
meanwhile('a megabyte', $s, $r);
is $r->finish->{status}, 400, 'a megabyte is too much for the context';
like $r->json->{error}{message}, qr/at least \d+ input tokens/, 'and says so';
$s->abort;
$t->idle_ok;

# --- who leaves meanwhile ---

# so many that what follows happens before they are done
@all = map { tokenize() } 1 .. 40;
my @behind = map { $t->open_request(POST => $uri, { prompt => $_,
    max_tokens => 4 }) } $long, 'short', $long;

ok wait_for(sub { $t->metric('vllm:num_requests_waiting') == 3 }, 20),
    'they wait while others are tokenized';
is $t->metric('vllm:num_requests_waiting_by_reason',
    'engine="chat",[^}]*,reason="deferred"'), 3, 'not for pages';
$_->abort for @behind[0, 1];
ok wait_for(sub { $t->metric('vllm:num_requests_waiting') == 1 }, 20),
    'two leave';
$_->abort for @all;
is $behind[2]->finish->{status}, 200, 'the third is answered';
$t->idle_ok;

@all = map { tokenize() } 1 .. 8;
$r = $t->open_request(POST => $uri, { prompt => $long, max_tokens => 4 });
ok wait_for(sub { $t->metric('vllm:num_requests_waiting') == 1 }, 20),
    'one more waits';
$t->stop_ok;
done_testing;
