package LLM::Test;

# Starts a real nginx with the module and a real engine in a folder of its own,
# talks HTTP to it, and looks at what it leaves behind.  Core Perl only.
#
#   my $t = LLM::Test->new(engine => 'max_num_seqs 8;')->start;
#   my $r = $t->post('/v1/completions', { prompt => 'Hi', max_tokens => 4 });
#   $t->stop_ok;
#
# nginx runs with `daemon off` as our child, on a port from the kernel.  Every
# process is ended by its pid.

use strict;
use warnings;

use Exporter 'import';
use File::Temp qw(tempdir);
use IO::Select;
use IO::Socket::INET;
use JSON::PP ();
use POSIX qw(WNOHANG);
use Test::More ();
use Time::HiRes qw(time sleep);

our @EXPORT = qw(json_encode json_decode wait_for);

my $JSON = JSON::PP->new->utf8->canonical->allow_nonref;

sub json_encode { $JSON->encode($_[0]) }
sub json_decode { $JSON->decode($_[0]) }

# The build under test and whether it carries a sanitizer.
my $build = $ENV{LLM_TEST_BUILD} || 'build';
$build = POSIX::getcwd() . "/$build" unless $build =~ m{^/};

# Every wait is for something that must come, and its limit only ends a test
# that hangs.  Slow builds get more patience, never a different expectation, and
# any build runs on machines that have other things to do.
my $patience = $build =~ /address|thread/ ? 10 : 3;

sub wait_for {
    my ($what, $seconds) = @_;
    my $end = time + $seconds * $patience;

    while (time < $end) {
        my $r = $what->();
        return $r if $r;
        sleep 0.02;
    }

    return;
}

# One that was given is free again until it is used: the kernel would give it
# to two of twenty-one in one of seventy runs.
my %given;

sub free_port {
    my $port;

    do {
        my $s = IO::Socket::INET->new(Listen => 1, LocalAddr => '127.0.0.1',
            LocalPort => 0) or die "no port: $!";
        $port = $s->sockport;
        close $s;
    } while $given{$port}++;

    return $port;
}

# Options: model, program (an engine that is not the build's, of the same name),
# engine (lines of the llm_engine block), http, server, main
# (more lines there), location (lines beside llm_pass), listen (parameters),
# workers, conf (a whole file instead).  %%DIR%%, %%PORT%%, %%MODEL%%, %%BUILD%% are replaced.
sub new {
    my ($class, %o) = @_;
    my $self = bless { owner => $$, workers => 1, %o }, $class;

    $self->{model} ||= $ENV{LLM_TEST_MODEL};
    $self->{dir} = tempdir('llm-test-XXXXXXXX', TMPDIR => 1,
        CLEANUP => !$ENV{LLM_TEST_LEAVE});
    chmod 0755, $self->{dir};
    mkdir "$self->{dir}/bin";

    # nginx's user must be able to execute the engine and read the model
    for my $file ($self->{program} || "$build/llm-engine",
        "$build/ngx_http_llm_module.so") {
        my ($name) = $file =~ m{([^/]+)$};
        link($file, "$self->{dir}/bin/$name")
            || system('cp', $file, "$self->{dir}/bin/$name") == 0
            || die "$file is not built";
    }

    if ($self->{model}) {
        $self->{model_path} = "$self->{dir}/model.gguf";
        link($self->{model}, $self->{model_path})
            || system('cp', $self->{model}, $self->{model_path}) == 0
            || die "no model $self->{model}";
        chmod 0644, $self->{model_path};
    }

    $self->{port} = free_port();
    $self->write_conf($self->{conf} // $self->default_conf);

    return $self;
}

sub default_conf {
    my $self = shift;
    my %o = map { $_ => $self->{$_} // '' }
        qw(engine http server main location listen);
    my $user = $< == 0 ? 'user www-data;' : '';

    return <<"CONF";
$user
load_module %%DIR%%/bin/ngx_http_llm_module.so;
worker_processes $self->{workers};
error_log %%DIR%%/error.log info;
$o{main}
events { }
http {
    access_log off;
    client_body_temp_path %%DIR%%/body;
    proxy_temp_path %%DIR%%/proxy;
    fastcgi_temp_path %%DIR%%/fastcgi;
    uwsgi_temp_path %%DIR%%/uwsgi;
    scgi_temp_path %%DIR%%/scgi;
    $o{http}
    llm_engine chat {
        model %%MODEL%% alias=smollm2;
        program %%DIR%%/bin/llm-engine;
        $o{engine}
    }
    server {
        listen 127.0.0.1:%%PORT%% reuseport $o{listen};
        $o{server}
        location / { llm_pass chat; $o{location} }
        location /metrics { llm_metrics; }
    }
}
CONF
}

sub write_conf {
    my ($self, $conf) = @_;
    my %v = (DIR => $self->{dir}, PORT => $self->{port}, BUILD => $build,
        MODEL => $self->{model_path} // '/nonexistent');

    $conf =~ s/%%(\w+)%%/$v{$1} \/\/ die "no variable $1"/ge;
    $self->{conf_path} = "$self->{dir}/nginx.conf";
    open my $f, '>', $self->{conf_path} or die $!;
    print $f $conf;
    close $f;

    return $self;
}

sub environment {
    return if $build !~ /address/;
    # an instrumented module in a plain nginx wants the runtime first
    chomp(my $lib = `gcc -print-file-name=libasan.so`);
    chomp(my $ub = `gcc -print-file-name=libubsan.so`);
    $ENV{LD_PRELOAD} = "$lib $ub";
    $ENV{ASAN_OPTIONS} = 'detect_leaks=0:abort_on_error=1';
    $ENV{UBSAN_OPTIONS} = 'halt_on_error=1:print_stacktrace=1';
}

sub nginx { $ENV{TEST_NGINX_BINARY} || '/usr/sbin/nginx' }

sub nginx_args {
    my ($self, @more) = @_;
    return ('-p', $self->{dir}, '-c', $self->{conf_path}, '-e',
        "$self->{dir}/error.log", @more);
}

# `nginx -t`: (exit status, output).
sub test_conf {
    my $self = shift;
    my $pid = open my $out, '-|';

    die $! unless defined $pid;
    if (!$pid) {
        environment();
        open STDERR, '>&', \*STDOUT;
        exec nginx(), '-p', $self->{dir}, '-c', $self->{conf_path}, '-t', '-g',
            "pid $self->{dir}/t.pid;";
    }

    my $text = do { local $/; <$out> };
    close $out;

    return ($? >> 8, $text);
}

# Options: no_wait (for the engine), global (directives for the main context
# instead of "daemon off").  With "daemon on" the master is not our child.
sub start {
    my ($self, %o) = @_;
    my $global = $o{global} // 'daemon off;';
    my $pid = fork() // die $!;

    if (!$pid) {
        environment();
        open STDERR, '>>', "$self->{dir}/stderr.log";
        open STDOUT, '>>', "$self->{dir}/stderr.log";
        exec nginx(), $self->nginx_args('-g',
            "$global pid $self->{dir}/nginx.pid;")
            or POSIX::_exit(127);
    }

    if ($global =~ /daemon on/) {
        waitpid $pid, 0;
        $pid = wait_for(sub { $self->pid_file }, 10)
            or die 'no pid file: ' . $self->log . $self->log('stderr.log');
    }

    $self->{pid} = $pid;
    wait_for(sub { $self->connects || waitpid($pid, WNOHANG) }, 10);
    $self->connects
        or die 'nginx did not start: ' . $self->log . $self->log('stderr.log');
    $self->ready unless $o{no_wait};

    return $self;
}

# The pid that nginx wrote down.
sub pid_file {
    my ($pid) = ($_[0]->log('nginx.pid') // '') =~ /^(\d+)$/m;
    return $pid;
}

# Whether a process runs; one that only waits to be reaped does not.
sub alive {
    my ($pid) = @_;

    open my $f, '<', "/proc/$pid/stat" or return 0;
    my $line = <$f> // return 0;
    return $line =~ /^\d+ \(.*\) [^ZX] / ? 1 : 0;
}

sub connects {
    return IO::Socket::INET->new(PeerAddr => "127.0.0.1:$_[0]{port}",
        Timeout => 1);
}

# Waits until /health says 200.
sub ready {
    my $self = shift;

    wait_for(sub { $self->get('/health')->{status} == 200 }, 30)
        or die 'the engine is not ready: ' . $self->log;
    return $self;
}

sub signal { kill $_[1], $_[0]{pid}; return $_[0] }

# Exit status, or undef when it had to be killed.
sub stop {
    my ($self, $signal) = @_;

    return unless $self->{pid};
    kill $signal || 'QUIT', $self->{pid};
    my $done = wait_for(sub {
        my $r = waitpid $self->{pid}, WNOHANG;

        # -1: a daemon, or the master of an upgrade, is no child of ours
        return $r > 0 ? \"$?" : $r < 0 && !alive($self->{pid}) ? \'0' : 0;
    }, 20);
    if (!$done) {
        kill 'KILL', $_ for $self->children, $self->{pid};
        waitpid $self->{pid}, 0;
    }
    delete $self->{pid};

    return $done ? $$done : undef;
}

# Stops, and asserts that nothing bad was left in the logs.
sub stop_ok {
    my ($self, %o) = @_;

    Test::More::is($self->stop, 0, 'nginx leaves cleanly');
    $self->clean_ok(%o);
}

# No alert, no crash, no sanitizer report.  except: a pattern of lines that the
# test provoked.
sub clean_ok {
    my ($self, %o) = @_;
    my @bad = grep { !$o{except} || !/$o{except}/ }
        ($self->log =~ /^.*\[(?:alert|emerg|crit)\].*$/mg,
         $self->log =~ /^.*exited on signal.*$/mg,
         $self->log('stderr.log') =~ /^.*(?:ERROR: .*Sanitizer|runtime error:).*$/mg,
         $self->log =~ /^.*(?:ERROR: .*Sanitizer|runtime error:).*$/mg);

    Test::More::is(scalar @bad, 0, 'no alerts in the logs')
        or Test::More::diag(join "\n", @bad,
            substr $self->log('stderr.log'), 0, 4000);
}

sub log {
    my ($self, $name) = @_;

    open my $f, '<', "$self->{dir}/" . ($name || 'error.log') or return '';
    local $/;
    return scalar <$f>;
}

# pids of the master's living children, of a program name if given; their
# number in scalar context.
sub children {
    my ($self, $name, $parent) = @_;
    my @pids;

    $parent //= $self->{pid} or return;
    for my $stat (glob '/proc/[0-9]*/stat') {
        open my $f, '<', $stat or next;
        my $line = <$f> // next;
        push @pids, $1
            if $line =~ /^(\d+) \((.*)\) (\S) (\d+)/ && $3 ne 'Z'
            && $4 == $parent && (!defined $name || $2 eq $name);
    }

    # sort has no meaning in scalar context
    @pids = sort { $a <=> $b } @pids;
    return @pids;
}

sub engine_pid { return ($_[0]->children('llm-engine'))[0] }

# A value of /metrics, by name and label pattern; of the engine "chat" unless
# that says otherwise.
sub metric {
    my ($self, $name, $labels) = @_;
    my $text = $self->get('/metrics')->{body};

    $labels //= 'engine="chat",[^}]*';
    return $text =~ /^\Q$name\E(?:\{$labels\})? (\S+)$/m ? $1 : undef;
}

# Pages, slots and queues are back to nothing; of the engine "chat" unless
# another is named.
sub idle_ok {
    my ($self, $name, $engine) = @_;
    my $labels = sprintf 'engine="%s",[^}]*', $engine // 'chat';
    my @left;

    my $ok = wait_for(sub {
        @left = map { "$_=" . ($self->metric($_, $labels) // 'undef') }
            qw(llm_kv_pages_used llm_slots_used vllm:num_requests_running
               vllm:num_requests_waiting);
        return !grep { !/=0(?:\.0+)?$/ } @left;
    }, 10);
    Test::More::ok($ok, $name || 'all pages and slots are free')
        or Test::More::diag("left: @left");
}

# --- requests ---

# Opens a request and returns at once: the test decides when to read.  Options:
# headers, version, rcvbuf, port, on (a response whose connection is used
# again), keep (the connection is kept open).
sub open_request {
    my ($self, $method, $uri, $body, %o) = @_;
    my $port = $o{port} // $self->{port};
    my $s = $o{on} ? $o{on}{s}
        : IO::Socket::INET->new(PeerAddr => "127.0.0.1:$port")
        || die "connect: $!";
    my $version = $o{version} || '1.1';

    $body = json_encode($body) if ref $body;
    $s->setsockopt(SOL_SOCKET, SO_RCVBUF, $o{rcvbuf}) if $o{rcvbuf};

    my $head = "$method $uri HTTP/$version\r\nHost: localhost\r\n";
    $head .= "Connection: close\r\n" unless $o{keep};
    $head .= "$_\r\n" for @{ $o{headers} || [] };
    if (defined $body) {
        $head .= "Content-Type: application/json\r\n"
            . 'Content-Length: ' . length($body) . "\r\n";
    }

    local $SIG{PIPE} = 'IGNORE';
    print $s $head, "\r\n", $body // '';
    $s->flush;

    return LLM::Test::Response->new($s, $o{on} ? $o{on}{raw} : '',
        $method eq 'HEAD');
}

sub get { my $t = shift; return $t->open_request(GET => @_)->finish }
sub post { my $t = shift; return $t->open_request(POST => @_)->finish }

sub stream {
    my ($self, $uri, $body, %o) = @_;
    return $self->open_request(POST => $uri, { %$body, stream => \1 }, %o);
}

sub chat {
    my ($self, $text, %o) = @_;
    return $self->post('/v1/chat/completions',
        { messages => [{ role => 'user', content => $text }], %o });
}

sub DESTROY {
    my $self = shift;

    return if $self->{owner} != $$;
    local ($?, $@);
    $self->stop;
}

package LLM::Test::Response;

# Incremental HTTP/1.1 and server-sent events, with the time of each arrival.

use strict;
use warnings;
use Time::HiRes qw(time);

# On a connected socket, with what has been read of it already; head: there is
# no body.
sub new {
    my ($class, $s, $raw, $head) = @_;

    return bless { s => $s, raw => $raw // '', head => $head, body => '',
        sse => '', events => [], t0 => time }, $class;
}

# The next response of the same connection.
sub follow {
    my ($r, $head) = @_;
    my $next = LLM::Test::Response->new($r->{s}, $r->{raw}, $head);

    $next->{eof} = $r->{eof};
    $next->parse_head;
    $next->parse_body if defined $next->{status};

    return $next;
}

sub fill {
    my ($r, $seconds) = @_;

    return 0 if $r->{eof};
    return 0 unless IO::Select->new($r->{s})->can_read($seconds);
    my $n = sysread $r->{s}, $r->{raw}, 65536, length $r->{raw};
    $r->{eof} = 1 if !$n;
    $r->parse_head unless defined $r->{status};
    $r->parse_body if defined $r->{status};

    return 1;
}

sub parse_head {
    my $r = shift;

    $r->{raw} =~ s/^HTTP\/1\.\d (\d+)[^\r]*\r\n(.*?)\r\n\r\n//s or return;
    ($r->{status}, my $head) = ($1, $2);
    while ($head =~ /^([^:\r\n]+):[ \t]*([^\r\n]*)/mg) {
        $r->{headers}{lc $1} = $2;
    }
    $r->{chunked} = lc($r->{headers}{'transfer-encoding'} // '') eq 'chunked';
}

sub parse_body {
    my $r = shift;
    my $new = '';

    if ($r->{chunked}) {
        while ($r->{raw} =~ /^([0-9a-f]+)\r\n/i
            && length $r->{raw} >= length($1) + 4 + hex $1)
        {
            my ($skip, $n) = (length($1) + 2, hex $1);
            $new .= substr $r->{raw}, $skip, $n;
            substr($r->{raw}, 0, $skip + $n + 2) = '';
            if (!$n) {
                $r->{complete} = 1;
                last;
            }
        }
    } elsif ($r->{head} || $r->{status} == 204) {
        $r->{complete} = 1;
    } elsif (defined(my $length = $r->{headers}{'content-length'})) {
        # what follows belongs to the next response
        $new = substr $r->{raw}, 0, $length - length $r->{body}, '';
        $r->{complete} = 1 if length($r->{body} . $new) >= $length;
    } else {
        ($new, $r->{raw}) = ($r->{raw}, '');
        $r->{complete} = 1 if $r->{eof};
    }

    $r->{body} .= $new;
    $r->{sse} .= $new;
    while ($r->{sse} =~ s/^(.*?)\n\n//s) {
        my $event = $1;
        push @{ $r->{comments} }, $event and next if $event =~ /^:/;
        push @{ $r->{events} }, { at => time - $r->{t0},
            data => join "\n", $event =~ /^data: ?(.*)$/mg };
    }
}

# The next event's data, or undef when the stream has ended or nothing came.
sub next_event {
    my ($r, $seconds) = @_;
    my $end = time + ($seconds // 30) * $patience;

    while (!@{ $r->{events} } && !$r->{complete} && !$r->{eof}
        && time < $end)
    {
        $r->fill($end - time);
    }

    my $event = shift @{ $r->{events} } or return;
    push @{ $r->{seen} }, $event;
    return $event->{data};
}

sub finish {
    my ($r, $seconds) = @_;
    my $end = time + ($seconds // 120) * $patience;

    while (!$r->{eof} && !$r->{complete} && time < $end) {
        $r->fill($end - time);
    }

    $r->{status} //= 0;
    return $r;
}

sub json { return LLM::Test::json_decode($_[0]{body}) }

# All events, parsed; the last one is '[DONE]' as a string.
sub chunks {
    my $r = shift;
    return map { $_->{data} eq '[DONE]' ? '[DONE]'
        : LLM::Test::json_decode($_->{data}) }
        @{ $r->{seen} || [] }, @{ $r->{events} };
}

# Concatenated text of a chat or completion stream.
sub text {
    my $r = shift;
    my $text = '';

    for my $c (grep { ref } $r->chunks) {
        for my $choice (@{ $c->{choices} || [] }) {
            $text .= $choice->{text} // $choice->{delta}{content} // '';
        }
    }

    return $text;
}

sub abort { close $_[0]{s}; $_[0]{eof} = 1; return $_[0] }

1;
