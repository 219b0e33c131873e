#!/usr/bin/perl

# Random requests: fields of every wrong kind, damaged JSON, odd framing, kept
# connections, clients that leave in the middle.  Whatever comes, each answer
# is a proper one, nginx and the engine live, and nothing leaks.
#
# LLM_TEST_SEED and LLM_TEST_REQUESTS repeat a run or make a longer one.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $seed = $ENV{LLM_TEST_SEED} // 1;
my $n = $ENV{LLM_TEST_REQUESTS} // 2000;
note "LLM_TEST_SEED=$seed";
srand $seed;

sub any { $_[rand @_] }
sub chance { rand() < $_[0] }

# --- values ---

my @texts = ('', 'x', 'Once upon', "\x{e9}\x{65e5}\x{1f35e}", "a\nb\t\"\\",
    '<|im_end|>', '%s%n%d', "\x{7f}\x{80}\x{ffff}", '{{ 7 * 7 }}', "\x{1f}",
    'y' x 3000, '/' x 70, 'user', 'auto', 'none', 'text', 'smollm2');
my @numbers = (0, 1, -1, 2, 3, 0.5, 1.5, -0.1, 1e-30, 1e30, 2**31, 2**31 - 1,
    -2**31, 2**53, 1e308, 49151, 49152, 64, 65, 8192);

sub value {
    my $depth = $_[0] // 0;
    my $kind = int rand($depth < 3 ? 8 : 5);

    return any(@texts) if $kind == 0;
    return 0 + any(@numbers) if $kind <= 2;
    return any(\0, \1) if $kind == 3;
    return undef if $kind == 4;
    return [map { value($depth + 1) } 1 .. rand 4] if $kind <= 6;
    return { map { any(@texts, 'type', 'text', 'role', 'content') =>
        value($depth + 1) } 1 .. rand 4 };
}

my %good = (
    temperature => sub { any(0, 0.7, 2) }, top_p => sub { any(0.1, 1) },
    top_k => sub { any(-1, 0, 1, 40) }, min_p => sub { any(0, 0.1, 1) },
    n => sub { any(1, 2, 9) }, seed => sub { int rand 1e9 },
    stop => sub { any('a', ['e', ' the']) }, logprobs => sub { any(\1, 1, 5) },
    top_logprobs => sub { any(0, 2, 20) }, stream => sub { any(\0, \1) },
    stream_options => sub { { include_usage => \1,
        continuous_usage_stats => any(\0, \1) } },
    echo => sub { any(\0, \1) }, min_tokens => sub { any(0, 1) },
    ignore_eos => sub { \1 }, logit_bias => sub { { int rand 49152 => 5 } },
    presence_penalty => sub { any(-2, 0.5) }, model => sub { 'smollm2' },
    frequency_penalty => sub { 1 }, repetition_penalty => sub { 1.1 },
    stop_token_ids => sub { [map { int rand 49152 } 1 .. 3] },
    max_completion_tokens => sub { any(1, 2) }, user => sub { 'me' },
    skip_special_tokens => sub { \0 }, parse_special => sub { any(\0, \1) },
    include_stop_str_in_output => sub { \1 }, best_of => sub { 1 },
    response_format => sub { { type => 'text' } },
    continue_final_message => sub { any(\0, \1) },
    add_generation_prompt => sub { any(\0, \1) },
    chat_template_kwargs => sub { { a => value() } },
    tools => sub { [{ type => 'function', function => { name => 'f',
        parameters => value() } }] }, tool_choice => sub { any('auto', 'none') },
    request_id => sub { any(@texts) }, suffix => sub { value() },
    prompt => sub { any('x', 'Once upon a time', [504, 3575], ['a', 'b'],
        [[1], [2, 3]]) },
    messages => sub { [map { message() } 1 .. 1 + rand 3] },
    tokens => sub { [map { int rand 49152 } 1 .. rand 5] },
);

sub message {
    my %m = (role => any(qw(system user assistant tool developer)),
        content => any(@texts, [{ type => 'text', text => any(@texts) }]));

    $m{tool_calls} = [{ id => 'c', type => 'function', function =>
        { name => 'f', arguments => any('{"a": [1, {"b": null}]}', '{', '7',
            '{"a":' . '[' x 500 . ']' x 500 . '}', '{"a": "\u0000"}', {}) } }]
        if chance(0.1);
    $m{ any(qw(role content tool_calls name)) } = value() if chance(0.1);

    return \%m;
}

sub body {
    my ($need) = @_;
    my %b = (max_tokens => any(1, 1, 2), map { $_ => $good{$_}->() } $need);

    for my $name (map { any(sort keys %good) } 1 .. rand 5) {
        $b{$name} = $good{$name}->();
    }

    for my $name (map { any(sort keys %good) } 1 .. rand 3) {
        $b{$name} = value();
    }

    return json_encode(\%b);
}

# damage to bytes
sub damage {
    my ($text) = @_;

    for (1 .. 1 + rand 3) {
        my $at = int rand(1 + length $text);
        my $len = int rand 8;
        my $kind = int rand 5;

        substr($text, $at, $kind == 1 ? $len : 0) =
            $kind == 0 ? join('', map { chr rand 256 } 1 .. $len)
            : $kind == 1 ? ''
            : $kind == 2 ? any('[', '{', '"', '\\', ':', ',', '\u0000',
                '\ud800', '1e999', '-', 'null', "\xc0\xaf", '[' x 200)
            : $kind == 3 ? substr($text, 0, $len)
            : ' ';
        $text = substr $text, 0, $at if $kind == 4 && chance(0.3);
    }

    return $text;
}

# --- requests: bytes, and whether the HTTP of it is in order ---

my @endpoints = (['/v1/chat/completions', 'messages'],
    ['/v1/completions', 'prompt'], ['/tokenize', 'prompt'],
    ['/tokenize', 'messages'], ['/detokenize', 'tokens']);

sub request {
    my ($path, $need) = @{ any(@endpoints) };
    my $method = chance(0.95) ? 'POST' : any(qw(GET HEAD PUT OPTIONS));
    my $body = body($need);
    my $ok = 1;

    if (chance(0.1)) {
        $path = any('/v1/models', '/v1/models/smollm2', '/health', '/metrics',
            '/version', '/v1/models/', '/', '//v1/completions', '/x?y=%00',
            '/v1/models/' . 'z' x 900);
        $method = any(qw(GET HEAD POST));
        $body = '' if $method ne 'POST';
    }

    $body = damage($body) if chance(0.4);

    my @head = ("$method $path HTTP/1.1", 'Host: x');
    push @head, 'X-' . any(qw(a b)) . ': ' . 'h' x rand 900 if chance(0.1);
    push @head, 'Content-Type: ' . any(qw(text/plain application/json))
        if chance(0.5);

    if (chance(0.2)) {
        push @head, 'Transfer-Encoding: chunked';
        $body = join '', map { sprintf "%x\r\n%s\r\n", length, $_ }
            ($body =~ /(.{1,400})/gs), '';

    } else {
        push @head, 'Content-Length: ' . length $body;
    }

    my $bytes = join("\r\n", @head, '', '') . $body;

    if (chance(0.02)) {
        $bytes = damage(join "\r\n", @head) . "\r\n\r\n$body";
        $ok = 0;
    }

    return ($bytes, $ok, $method eq 'HEAD');
}

# --- answers ---

my (%count, @bad);

sub judge {
    my ($r, $bytes, $head) = @_;
    my $status = $r->{status} || 0;
    my $json = ($r->{headers}{'content-type'} // '') =~ m{^application/json};
    my $stream = ($r->{headers}{'content-type'} // '') =~ m{^text/event-stream};
    my $why;

    $count{$status}++;

    if (!$r->{complete}) {
        $why = 'not complete';

    } elsif ($status !~ /^(?:200|400|404|405|413|503)$/) {
        $why = 'status';

    } elsif ($stream) {
        $why = 'no [DONE]' if $r->{body} !~ /data: \[DONE\]\n\n$/;
        $why = 'bad JSON in a chunk' unless eval { $r->chunks; 1 };

    } elsif (!$head && $status >= 400 && $bytes !~ m{^\S+ /metrics }) {
        my $e = eval { $r->json->{error} } || {};
        $why = 'no error object' unless join(' ', sort keys %$e)
            eq 'code message param type';

    } elsif (!$head && $json) {
        $why = 'bad JSON' unless eval { $r->json };
    }

    push @bad, "$why: $status, " . substr($r->{body}, 0, 300) . "\n<- "
        . substr($bytes, 0, 2000) if $why;
}

my $t = LLM::Test->new(workers => 2, engine => 'slots 8; max_model_len 64;
    max_num_seqs 8; max_num_batched_tokens 128;',
    server => 'client_max_body_size 64k;')->start;
my $engine = $t->engine_pid;
my @workers = $t->children('nginx');
my $c;

local $SIG{PIPE} = 'IGNORE';

while ($n-- > 0) {
    my ($bytes, $ok, $head) = request();

    $c = LLM::Test::Response->new(IO::Socket::INET->new(
        PeerAddr => "127.0.0.1:$t->{port}") || die "connect: $!")
        if !$c || $c->{eof};

    # leaves in the middle of the request, of the wait, or of the answer
    if (!$ok || chance(0.1)) {
        $bytes = substr $bytes, 0, rand length $bytes if $ok && chance(0.5);
        syswrite $c->{s}, $bytes;
        shutdown $c->{s}, 1 if chance(0.3);
        $c->fill(rand 0.02) if chance(0.7);
        $c->abort;
        $count{left}++;
        next;
    }

    # sometimes in two pieces
    my $cut = chance(0.1) ? int rand length $bytes : length $bytes;
    syswrite $c->{s}, substr $bytes, 0, $cut;
    select undef, undef, undef, 0.002 if $cut < length $bytes;
    syswrite $c->{s}, substr $bytes, $cut;

    $c = LLM::Test::Response->new($c->{s}, $c->{raw}, $head)->finish(60);
    judge($c, $bytes, $head);
    $c->{eof} = 1 if !$c->{complete}
        || ($c->{headers}{connection} // '') eq 'close' || chance(0.05);
}

note join ', ', map { "$_: $count{$_}" } sort keys %count;
is scalar @bad, 0, 'every answer is a proper one'
    or diag "LLM_TEST_SEED=$seed\n", join "\n\n", @bad[0 .. min($#bad, 4)];
cmp_ok $count{$_} // 0, '>', 0, "some had $_" for 200, 400, 404, 405;
is $t->engine_pid, $engine, 'the engine lives';
is_deeply [$t->children('nginx')], \@workers, 'the workers live';
$t->idle_ok;
is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'and it serves';
$t->stop_ok;
done_testing;

sub min { $_[0] < $_[1] ? $_[0] : $_[1] }
