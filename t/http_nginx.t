#!/usr/bin/perl

# What nginx has of its own, in front of and around llm_pass: error_page,
# limits, authentication, logs, gzip, proxying, TLS, keep-alive, bodies.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use IO::Uncompress::Gunzip qw(gunzip);
use LLM::Test;
use Socket ();
use Test::More;
use Time::HiRes qw(time sleep);

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $uri = '/v1/completions';
my %story = (prompt => 'Once upon a time', ignore_eos => \1, temperature => 0);
my %long = (%story, max_tokens => 4000);
my $conf = "$FindBin::Bin/../conf";

# one server for each feature, each on a port of its own
my %server = (
    fallback => 'location / { llm_pass down; error_page 503 = @other; }
        location @other { proxy_pass http://127.0.0.1:%%PORT%%; }',
    second => 'location / { llm_pass down; error_page 503 @other; }
        location @other { llm_pass chat; }',
    page => 'location / { llm_pass down; error_page 503 /busy; }
        location = /busy { internal; return 503 "busy\n"; }',
    auth => 'auth_basic "models"; auth_basic_user_file %%DIR%%/htpasswd;
        location / { llm_pass chat; }',
    rate => 'location / { limit_req zone=rate; limit_req_status 429;
        llm_pass chat; }',
    conn => 'location / { limit_conn conn 1; llm_pass chat; }',
    log => 'access_log %%DIR%%/llm.log llm;
        location / { llm_pass chat; add_header X-Tokens
            "$llm_prompt_tokens+$llm_completion_tokens"; }',
    gzip => 'gzip on; gzip_min_length 1; gzip_types application/json;
        location / { llm_pass chat; }',
    zipped => 'gzip on; gzip_min_length 1; gzip_types text/event-stream;
        location / { llm_pass chat; }',
    proxy => "location / { include $conf/proxy.conf;
        proxy_pass http://127.0.0.1:%%PORT%%; }",
    plain => 'location / { proxy_pass http://127.0.0.1:%%PORT%%; }',
    slow => 'limit_rate 2k; location / { llm_pass chat; }',
    small => 'client_max_body_size 1k; location / { llm_pass chat; }',
    file => 'client_body_buffer_size 1k; location / { llm_pass chat; }',
    only => 'client_body_in_file_only clean; location / { llm_pass chat; }',
    timeout => 'llm_timeout 1s; location / { llm_pass chat;
        error_page 504 = @late; } location @late { return 418 "late\n"; }
        location /plain/ { llm_pass chat; }',
    keepalive => 'llm_keepalive 100ms; location / { llm_pass chat; }',
    strict => 'llm_strict_context on; location / { llm_pass chat; }',
    cors => 'location / { if ($request_method = OPTIONS) { return 204; }
        llm_pass chat; }',
);

my %port = map { $_ => LLM::Test::free_port() } sort keys %server;
my $servers = join "\n", map { "server { listen 127.0.0.1:$port{$_}; "
    . "$server{$_} }" } sort keys %server;

sub spew {
    my ($path, $text) = @_;
    open my $f, '>', $path or die "$path: $!";
    print $f $text;
    close $f;
    chmod 0755, $path;
}

my $tls = LLM::Test::free_port();
my $keys = File::Temp::tempdir(CLEANUP => 1);
my $certificate = system("openssl req -x509 -newkey rsa:2048 -nodes -days 2"
    . " -subj /CN=localhost -keyout $keys/key -out $keys/pem"
    . ' >/dev/null 2>&1') == 0 && `curl -V` =~ /https/;
$servers .= "\nserver { listen 127.0.0.1:$tls ssl http2;
    ssl_certificate $keys/pem; ssl_certificate_key $keys/key;
    location / { llm_pass chat; } }" if $certificate;

my $t = LLM::Test->new(engine => 'slots 32; max_num_seqs 16;', http => <<"H");
    log_format llm '\$status \$llm_model \$llm_prompt_tokens'
        ' \$llm_completion_tokens \$llm_cached_tokens \$llm_ttft'
        ' \$llm_queue_time \$llm_finish_reason';
    limit_req_zone \$server_port zone=rate:1m rate=1r/m;
    limit_conn_zone \$server_port zone=conn:1m;
    llm_engine down { model %%MODEL%%; program %%DIR%%/down; slots 2; }
    $servers
H

spew("$t->{dir}/down", "#!/bin/sh\nexit 2\n");
spew("$t->{dir}/htpasswd", "me:{PLAIN}secret\n");
$t->start;

sub post {
    my ($server, $body, %o) = @_;
    return $t->post($o{uri} // $uri, $body, port => $port{$server}, %o);
}

sub stream {
    my ($server, $body, %o) = @_;
    return $t->stream($uri, $body, port => $port{$server}, %o);
}

my %short = (%story, max_tokens => 20);
my $alone = $t->post($uri, { %short })->json->{choices}[0]{text};
my $engine = (grep { my $pid = $_; open my $f, '<', "/proc/$pid/cmdline";
    local $/; <$f> =~ /name=chat/ } $t->children('llm-engine'))[0];

# --- error_page ---

ok wait_for(sub { $t->get('/health', undef, port => $port{page})->{status}
    == 503 }, 10), 'an engine is down';
my $r = post('fallback', { %short });
is $r->{status}, 200, 'error_page 503 = @fallback';
is $r->json->{choices}[0]{text}, $alone, 'which gets the body';
$r = post('fallback', { %short, junk => 'y' x 300000 });
is $r->json->{choices}[0]{text}, $alone, 'even a large one';
is stream('fallback', { %short })->finish->text, $alone, 'and streams';
$r = post('page', { %short });
is $r->{body}, "busy\n", 'error_page with a page';
is $r->{status}, 503, 'keeps its status';
$r = post('second', { %short });
is $r->{status}, 503, 'error_page 503 @other keeps the status';
is eval { $r->json->{choices}[0]{text} }, $alone, 'over another answer'
    or diag $r->{body};
is stream('second', { %short })->finish->text, $alone, 'a streamed one, too';

# --- access ---

$r = post('auth', { %short });
is $r->{status}, 401, 'auth_basic';
is $r->json->{error}{code}, 'invalid_api_key', 'in the usual shape';
like $r->{headers}{'www-authenticate'}, qr/models/, 'WWW-Authenticate';
is post('auth', { %short }, headers => ['Authorization: Basic bWU6c2VjcmV0'])
    ->{status}, 200, 'with the password';

is post('rate', { %short })->{status}, 200, 'limit_req: the first';
$r = post('rate', { %short });
is $r->{status}, 429, 'the second';
is $r->json->{error}{code}, 'rate_limit_exceeded', 'in the usual shape';

my $s = stream('conn', { %long });
$s->next_event;
$r = post('conn', { %short });
is $r->{status}, 503, 'limit_conn';
is $r->json->{error}{type}, 'server_error', 'in the usual shape';
$s->abort;
ok wait_for(sub { post('conn', { %short })->{status} == 200 }, 10),
    'when the first has gone the next is served';

# --- logs ---

sub logged {
    my $n = @_ ? $_[0] : 1;
    my @lines;
    wait_for(sub { @lines = split /\n/, $t->log('llm.log'); @lines >= $n }, 5);
    return [split / /, $lines[$n - 1] // ''];
}

my $usage = post('log', { %short })->json->{usage};
my $line = logged(1);
is_deeply [@$line[0 .. 4, 7]], [200, 'smollm2', @$usage{qw(prompt_tokens
    completion_tokens)}, 0, 'length'], 'access_log: the variables' or diag "@$line";
like $line->[5], qr/^\d+\.\d{3}$/, 'seconds to the first token';
like $line->[6], qr/^\d+\.\d{3}$/, 'seconds in the queue';
cmp_ok $line->[6], '<=', $line->[5], 'which come first';

$s = stream('log', { %short, n => 2, prompt => ['a b', 'c d e'],
    stream_options => { include_usage => \1 } })->finish;
$usage = (grep { ref } $s->chunks)[-1]{usage};
$s->abort; # nginx logs a request when its connection has closed
$line = logged(2);
is_deeply [@$line[2, 3]], [@$usage{qw(prompt_tokens completion_tokens)}],
    'of all choices together, in spite of $llm_… in a header';
is $usage->{completion_tokens}, 80, 'which are four';

post('log', { prompt => 'x', temperature => 'hot' });
is "@{ logged(3) }", '400 - - - - - - -', 'a bad request has none';
$s = stream('log', { %long });
$s->next_event;
$s->abort;
is logged(4)->[7], 'abort', 'a client that left';
post('log', { prompt => [(504) x 8192] });
is_deeply [@{ logged(5) }[0, 7]], [400, 'error'], 'an error of the engine';
$t->get('/health', undef, port => $port{log});
is "@{ logged(6) }", '200 - - - - - - -', '/health has none';

# --- events are not held back for larger packets ---

# a copy of the worker's end of a connection (pidfd_open, pidfd_getfd)
sub worker_end {
    my ($s) = @_;
    my $pair = sprintf '0100007F:%04X 0100007F:%04X', $s->peerport,
        $s->sockport;
    open my $f, '<', '/proc/net/tcp' or die $!;
    my ($inode) = map { (split)[9] } grep { /$pair/ } <$f>;

    for my $pid ($t->children('nginx')) {
        my ($fd) = map { m{([0-9]+)$} } grep { (readlink // '')
            eq "socket:[$inode]" } glob "/proc/$pid/fd/*";
        next unless defined $fd;
        my $pidfd = syscall 434, $pid + 0, 0;
        my $copy = syscall 438, $pidfd, $fd + 0, 0;
        return $copy < 0 ? undef : IO::Socket->new_from_fd($copy, 'r');
    }
    return;
}

SKIP: {
    $s = $t->stream($uri, { %long });
    $s->next_event;
    my $end = worker_end($s->{s});
    $s->abort;
    skip 'pidfd_getfd() is not allowed', 1 unless $end;
    isnt unpack('i', getsockopt $end, Socket::IPPROTO_TCP,
        Socket::TCP_NODELAY), 0, 'a stream has TCP_NODELAY';
}

# --- gzip ---

my @zip = (headers => ['Accept-Encoding: gzip']);
$r = post('gzip', { %short }, @zip);
is $r->{headers}{'content-encoding'}, 'gzip', 'gzip: a response';
gunzip(\$r->{body}, \my $text);
is json_decode($text)->{choices}[0]{text}, $alone, 'is whole';
$s = stream('gzip', { %long }, @zip);
ok defined $s->next_event, 'gzip: a stream';
ok !$s->{headers}{'content-encoding'}, 'is not compressed';
cmp_ok $t->metric('vllm:num_requests_running'), '>', 0,
    'and arrives while it runs';
$s->abort;
$s = stream('zipped', { %long }, @zip);
ok wait_for(sub { $s->fill(0.1); length $s->{body} > 20 }, 20),
    'compressed on demand, it arrives, too';
is $s->{headers}{'content-encoding'}, 'gzip', 'compressed';
cmp_ok $t->metric('vllm:num_requests_running'), '>', 0,
    'while it runs';
$s->abort;
$s = stream('zipped', { %short }, @zip)->finish;
gunzip(\$s->{body}, \$text);
like $text, qr/data: \[DONE\]\n\n$/, 'and is whole';

# --- behind another nginx ---

for my $server (qw(proxy plain)) {
    $s = stream($server, { %long });
    ok defined $s->next_event, "$server: a stream" for 1 .. 3;
    cmp_ok $t->metric('vllm:num_requests_running'), '>',
        0, "$server: arrives while it runs";
    $s->abort;
    is stream($server, { %short })->finish->text, $alone, "$server: whole";
    is post($server, { prompt => 7 })->{status}, 400, "$server: an error";
}
$t->idle_ok('clients that leave the proxy are noticed');

# --- limit_rate ---

$s = stream('slow', { %short, max_tokens => 40 })->finish;
is(($s->chunks)[-1], '[DONE]', 'limit_rate: a slow stream is whole');

# --- TLS ---

SKIP: {
    skip 'no certificate', 3 unless $certificate;
    my $body = json_encode({ %short, stream => \1 });
    for my $version ('--http1.1', '--http2') {
        my $out = `curl -skN $version https://127.0.0.1:$tls$uri -d '$body'`;
        like $out, qr/data: \[DONE\]\n\n$/, "TLS $version: a stream";
    }
    my $out = `curl -sk https://127.0.0.1:$tls$uri -d '{'`;
    is eval { json_decode($out)->{error}{type} }, 'invalid_request_error',
        'TLS: an error';
}

# --- connections: kept over errors, pipelined ---

my $c = $t->open_request(POST => $uri, { %short }, keep => 1)->finish;
is $c->json->{choices}[0]{text}, $alone, 'keep-alive: an answer';
for my $case ([POST => $uri, '{', 400], [GET => '/nope', undef, 404],
    [GET => $uri, undef, 405], [POST => $uri, { prompt => 7 }, 400],
    [POST => $uri, { prompt => [(504) x 8192] }, 400],
    [POST => $uri, { prompt => 'x', n => 33 }, 503],
    [HEAD => '/health', undef, 200], [GET => '/health', undef, 200])
{
    my ($method, $path, $body, $status) = @$case;
    $c = $t->open_request($method, $path, $body, keep => 1, on => $c)->finish;
    is $c->{status}, $status, "keep-alive: then $status";
}
is $c->{body}, '{"status":"ok"}', 'keep-alive: nothing is left over';
$c = $t->open_request(POST => $uri, { %short, stream => \1 }, keep => 1,
    on => $c)->finish;
is $c->text, $alone, 'keep-alive: a stream on the same connection';

my $one = json_encode({ %short });
my $get = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
my $both = "POST $uri HTTP/1.1\r\nHost: x\r\nContent-Length: "
    . length($one) . "\r\n\r\n$one";
$c = $t->open_request(GET => '/health', undef, keep => 1);
print { $c->{s} } $both, $get, $both =~ s/"temperature":0/"temperature":x/r,
    $get;
$c->{s}->flush;
my @seen;
for (1 .. 5) {
    push @seen, $c->finish->{status};
    is $c->json->{choices}[0]{text}, $alone, 'pipelined: an answer'
        if $_ == 2;
    $c = $c->follow;
}
is "@seen", '200 200 200 400 200', 'pipelined: all, in order';

# --- bodies ---

$r = post('small', { %short, junk => 'y' x 2000 });
is $r->{status}, 413, 'client_max_body_size';
is $r->json->{error}{code}, 'request_too_large', 'in the usual shape';
for my $server (qw(file only)) {
    is post($server, { %short, junk => 'y' x 100000 })
        ->json->{choices}[0]{text}, $alone, "$server: a body in a file";
    is post($server, { %short })->json->{choices}[0]{text}, $alone,
        "$server: a small one";
}

$c = $t->open_request(POST => $uri, undef, keep => 1,
    headers => ['Transfer-Encoding: chunked']);
for my $piece ($one =~ /(.{1,7})/gs, '') {
    printf { $c->{s} } "%x\r\n%s\r\n", length $piece, $piece;
    $c->{s}->flush;
}
is $c->finish->json->{choices}[0]{text}, $alone, 'a chunked body';

$c = $t->open_request(POST => $uri, undef, keep => 1,
    headers => ['Expect: 100-continue', 'Content-Length: ' . length $one]);
my $got = '';
wait_for(sub { sysread $c->{s}, $got, 100, length $got; $got =~ /\r\n\r\n/ },
    10);
is $got, "HTTP/1.1 100 Continue\r\n\r\n", 'Expect: 100-continue';
print { $c->{s} } $one;
$c->{s}->flush;
is $c->finish->json->{choices}[0]{text}, $alone, 'then the body';

# --- methods ---

$r = $t->open_request(HEAD => '/v1/models')->finish;
is $r->{status}, 200, 'HEAD';
cmp_ok $r->{headers}{'content-length'}, '>', 100, 'with its length';
$r = $t->open_request(OPTIONS => $uri)->finish;
is $r->{status}, 405, 'OPTIONS';
is $r->{headers}{allow}, 'POST', 'Allow';
is $t->open_request(OPTIONS => $uri, undef, port => $port{cors})->finish
    ->{status}, 204, 'unless nginx answers it';
is post('cors', { %short })->json->{choices}[0]{text}, $alone,
    'beside an if in the location';

# --- slots ---

$r = $t->post($uri, { %short, n => 33 });
is $r->{status}, 503, 'more choices than slots';
is $r->json->{error}{code}, 'engine_busy', 'in the usual shape';
is $r->{headers}{'x-should-retry'}, 'false', 'however often it is tried';
$r = $t->post($uri, { %story, max_tokens => 1, n => 32 });
is scalar @{ $r->json->{choices} }, 32, 'as many as slots';
my @busy = map { $t->stream($uri, { %long }) } 1 .. 32;
ok wait_for(sub { $t->post($uri, { %short })->{status} == 503 }, 10),
    'all slots are taken';
like $t->post($uri, { %short })->{headers}{'retry-after'}, qr/^[1-9]\d{0,2}$/,
    'Retry-After';
ok wait_for(sub { $t->metric('llm_slots_used') == 32 }, 20), 'the engine knows';
$_->abort for @busy;
$t->idle_ok;

# --- llm_strict_context ---

for my $stream (0, 1) {
    my $body = { prompt => 'a b c', max_tokens => 8192, ignore_eos => \1,
        stream => $stream ? \1 : \0 };
    $r = post('strict', $body);
    is $r->{status}, 400, 'llm_strict_context: too much is refused';
    is $r->json->{error}{code}, 'context_length_exceeded', 'with its code';
    like $r->json->{error}{message}, qr/8195 tokens \(3 in the prompt, 8192/,
        'and the numbers';
}
is post('strict', { %short })->{status}, 200, 'what fits is served';

# --- llm_timeout ---

kill 'STOP', $engine;
$r = post('timeout', { %short }, uri => "/plain$uri");
is $r->{status}, 504, 'llm_timeout';
is $r->json->{error}{code}, 'timeout', 'in the usual shape';
is post('timeout', { %short })->{status}, 418, 'error_page 504';
kill 'CONT', $engine;
$s = stream('timeout', { %long });
$s->next_event;
kill 'STOP', $engine;
$s->finish(30);
is(($s->chunks)[-2]{error}{code}, 'timeout', 'an event in a stream');
is(($s->chunks)[-1], '[DONE]', 'which ends');
kill 'CONT', $engine;
$t->idle_ok('what was given up is dropped');

# --- llm_keepalive ---

kill 'STOP', $engine;
$s = stream('keepalive', { %short });
ok wait_for(sub { $s->fill(0.1); @{ $s->{comments} || [] } >= 3 }, 20),
    'llm_keepalive: comments before the first token';
is $s->{status}, 200, 'after the headers';
is scalar @{ $s->{events} }, 0, 'and nothing else';
my $bad = stream('keepalive', { prompt => [(504) x 8192] });
ok wait_for(sub { $bad->fill(0.1); $bad->{comments} }, 20), 'headers are out';
my $whole = $t->open_request(POST => $uri, { %short }, port => $port{keepalive});
ok !$whole->fill(0.5), 'a response that is not streamed waits';
kill 'CONT', $engine;
is $s->finish->text, $alone, 'then the stream comes';
is(($bad->finish->chunks)[0]{error}{code}, 'context_length_exceeded',
    'a late error is an event');
is $whole->finish->json->{choices}[0]{text}, $alone, 'and the response';

$t->idle_ok;
is $t->stop, 0, 'nginx leaves cleanly';
$t->clean_ok(except => qr/cannot be respawned/);
done_testing;
