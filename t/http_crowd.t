#!/usr/bin/perl

# A hundred clients with KV pages for about ten, from five tenants of which one
# has sixty: all are served, each as if alone, and while all wait every tenant
# gets at least half of its fair share.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use IO::Select;
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

# requests of each client, one after another, and their least length; a slow
# build has less to do
my ($rounds, $tokens) = ($ENV{LLM_TEST_BUILD} // '') =~ /address/ ? (1, 10)
    : (2, 40);
my %clients = (noisy => 60, b => 10, c => 10, d => 10, e => 10);

# 20 MiB are 56 pages of this model; a request ends with 4 to 6 of them
my $t = LLM::Test->new(workers => 2, location => 'llm_tenant $http_x_tenant;',
    engine => 'kv_cache_memory 20m; max_model_len 256; slots 128;')->start;
my $uri = '/v1/completions';

sub body_of {
    my $k = shift;

    return { prompt => "Letter $k, to" . " my dear friend and" x (4 + $k % 5),
        max_tokens => $tokens + $k % 17, temperature => $k % 2 ? 0.8 : 0,
        seed => $k, ignore_eos => \1 };
}

my @alone = map { $t->post($uri, body_of($_))->json->{choices}[0]{text} }
    0 .. 9;

# --- all at once, each client's next request when it has its answer ---

my (%by_socket, @answers);
my $select = IO::Select->new;
my $number = 0;

sub submit {
    my ($tenant, $left) = @_;
    my $k = $number++;
    my $r = $t->open_request(POST => $uri, body_of($k),
        headers => ["X-Tenant: $tenant"]);

    $by_socket{$r->{s}} = { r => $r, k => $k, tenant => $tenant,
        left => $left };
    $select->add($r->{s});
}

# interleaved, so that no tenant is first by accident
for my $i (0 .. 59) {
    submit($_, $rounds - 1)
        for sort grep { $clients{$_} > $i } keys %clients;
}

while ($select->count) {
    my @ready = $select->can_read(120) or last;

    for my $s (@ready) {
        my $client = delete $by_socket{$s};

        $select->remove($s);
        $client->{r}->finish;
        push @answers, $client;
        submit($client->{tenant}, $client->{left} - 1) if $client->{left};
    }
}

my $total = 100 * $rounds;

is scalar(@answers), $total, "$total requests have ended";
is scalar(grep { $_->{r}{status} == 200 } @answers), $total, 'all served';
is scalar(grep { $_->{r}->json->{usage}{completion_tokens}
    == body_of($_->{k})->{max_tokens} } @answers), $total, 'all whole';

my %text = map { $_->{k} => $_->{r}->json->{choices}[0]{text} } @answers;
is_deeply [@text{0 .. 9}], \@alone, 'in a crowd the text is the same as alone';

# --- shares, in the service the scheduler counts: prompt + 2 × generated ---

my (%service, %done);
my $quiet = $rounds * $clients{b};

for my $answer (@answers) {
    my $usage = $answer->{r}->json->{usage};
    my $tenant = $answer->{tenant};

    $service{$tenant} += $usage->{prompt_tokens}
        - $usage->{prompt_tokens_details}{cached_tokens}
        + 2 * $usage->{completion_tokens};
    last if ++$done{$tenant} == $quiet; # from here on it need not wait
}

my $sum = 0;
$sum += $_ for values %service;
my ($least) = sort { $a <=> $b } map { $_ // 0 } @service{keys %clients};

cmp_ok $least, '>=', $sum / 5 / 2, 'no tenant has less than half its share'
    or diag explain \%service;

diag sprintf 'preemptions %d, least share %.2f of the fair one',
    $t->metric('vllm:num_preemptions_total'), $least / ($sum / 5);

$t->idle_ok;
$t->stop_ok;
done_testing;
