#!/usr/bin/perl

# t/bench/peer.py against peers that only pretend: a few lines that answer like
# llama-server, llama-bench and openvino_genai, and note what they were asked.
# All sides must get the same questions, every row must be there, and the
# arithmetic must be right.  Times are not looked at.

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

my $dir = tempdir(CLEANUP => !$ENV{LLM_TEST_LEAVE});

sub read_file {
    open my $f, '<:raw', $_[0] or return '';
    local $/;
    return scalar <$f>;
}

sub write_file {
    my ($name, $text) = @_;
    open my $f, '>:raw', "$dir/$name" or die "$name: $!";
    print $f $text;
    close $f or die "$name: $!";
    chmod 0755, "$dir/$name";
}

# --- peers ---

write_file('llama-server', "#!/usr/bin/env python3\n" . <<'END');
import http.server, json, os, sys, time
option = dict(zip(sys.argv[1:], sys.argv[2:]))
assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
who = option["-fa"] + option.get("-b", "")
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    def event(self, **values):
        self.chunk(b"data: " + json.dumps(values).encode() + b"\n\n")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["PEER_NOTES"], "a") as f:
            f.write(json.dumps(["L " + who, body["messages"]]) + "\n")
        if os.path.exists(os.environ["PEER_NOTES"] + ".break"):
            os.remove(os.environ["PEER_NOTES"] + ".break")
            os._exit(1)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.event(choices=[{"delta": {"role": "assistant", "content": None}}])
        for _ in range(body["max_tokens"]):
            time.sleep(0.01)
            self.event(choices=[{"delta": {"content": "é "}}])
        self.event(choices=[], usage={"prompt_tokens": 7,
                                      "completion_tokens": body["max_tokens"]})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        self.close_connection = True
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
Server((option["--host"], int(option["--port"])), Handler).serve_forever()
END

write_file('llama-bench', "#!/usr/bin/env python3\n" . <<'END');
import json, sys
option = dict(zip(sys.argv[1:], sys.argv[2:]))
fast = 1000 if option["-fa"] == "on" else 10
print(json.dumps(
    [{"n_prompt": int(p), "n_depth": 0, "samples_ts": [1, fast, fast + 1]}
     for p in option["-p"].split(",") if p != "0"]
    + [{"n_prompt": 0, "n_depth": int(d), "samples_ts": [fast, 2, fast + 9]}
       for d in option.get("-d", "").split(",") if d]))
END

write_file('python', "#!/bin/sh\nPYTHONPATH=$dir exec $python \"\$@\"\n");
write_file('openvino.py', "Tensor = list\n");
write_file('openvino_genai.py', <<'END');
import json, os, sys
from types import SimpleNamespace as New
class SchedulerConfig: pass
class GenerationConfig: pass
class Tokenizer:
    def apply_chat_template(self, messages, add_generation_prompt):
        with open(os.environ["PEER_NOTES"], "a") as f:
            f.write(json.dumps(["O", messages]) + "\n")
        return json.dumps(messages)
    def encode(self, text):
        return New(input_ids=New(shape=[1, 7]))
class LLMPipeline:
    def __init__(self, model, device, scheduler_config, **options):
        print("this must not disturb", flush=True)
        self.bf16 = options.get("INFERENCE_PRECISION_HINT") == "bf16"
    def get_tokenizer(self):
        return Tokenizer()
    def generate(self, prompts, config):
        n = len(prompts) * config.max_new_tokens
        if self.bf16 and n > 100:
            raise RuntimeError("too much for bf16")
        return New(perf_metrics=New(get_num_generated_tokens=lambda: n))
END

# --- one round of everything, as small as can be ---

$ENV{PEER_NOTES} = "$dir/notes";
my @peer = ($python, 't/bench/peer.py', '--build', $build);
my $text = `@peer --tiny --rounds 1 --peer $dir --openvino $dir/python \\
    --out $dir/out 2>$dir/err`;

is $? >> 8, 1, 'the exit status says that something has failed'
    or diag read_file("$dir/err");

my $saved = eval { decode_json(read_file("$dir/out/peer.json")) };
ok $saved, 'peer.json is JSON' or BAIL_OUT("no peer.json: $@");

my (%run, %failed);
for my $run (@{ $saved->{runs} }) {
    my $m = $run->{measures};

    $run{$run->{work}}{$run->{side}} = $m;
    $failed{"$run->{work} $run->{side}"} = $m->{failed} if $m->{failed};
}

is_deeply [keys %failed], ['short-32 OpenVINO bf16'],
    'what must fail has, and nothing else' or diag explain \%failed;
like $failed{'short-32 OpenVINO bf16'}, qr/too much for bf16/, '... and why';
like $text, qr/^Failed: short-32, OpenVINO bf16, round 1: .*too much/m,
    '... and that is said';

my @llama = ('llama.cpp A', 'llama.cpp B');
my @openvino = map { "OpenVINO $_" } qw(bf16 default u8);
my %sides = (
    (map { $_ => [@openvino, @llama] } 'short-1', 'short-16', 'short-32',
        'shared-16', grep { $run{$_} } 'prefill-1t', 'prefill-2t'),
    (map { $_ => [@llama] } 'decode', 'multiturn-8', 'tiny-32'),
    'mixed-8' => [map { ($_, "$_ -b 256") } @llama],
);

for my $work (sort keys %sides) {
    is_deeply [sort keys %{ $run{$work} }],
        [sort @{ $sides{$work} }, 'ours'], "$work: all sides";
}
is_deeply [sort keys %run], [sort keys %sides], 'and no other workload';

is $run{'prefill-1t'}{'llama.cpp A'}{'prefill 24'}, 1000, 'median of prefill';
is $run{decode}{'llama.cpp A'}{'decode 0'}, 1000, 'median of decode';
is $run{decode}{'llama.cpp B'}{'decode 24'}, 10, '... without flash attention';

for my $side ('ours', @llama, 'OpenVINO u8') {
    is $run{'short-16'}{$side}{output_tokens}, 4, "$side: tokens are counted";
}
for my $work (qw(short-1 short-16 short-32 shared-16 multiturn-8 tiny-32)) {
    cmp_ok $run{$work}{ours}{$_}, '>', 0, "$work: $_"
        for qw(tok_s req_s ttft_p50 ttft_p95);
}
cmp_ok $run{'shared-16'}{$_}{hit}, '>', 0, "$_: the first token at a hit"
    for 'ours', 'llama.cpp A', 'OpenVINO u8';
for my $side (@{ $sides{'mixed-8'} }, 'ours') {
    my $m = $run{'mixed-8'}{$side};

    cmp_ok $m->{long_prompts}, '>=', 1, "$side: long prompts were answered";
    cmp_ok $m->{gap_max}, '>=', $m->{gap_p50}, '... the worst gap is no less';
}

# --- the same questions for all ---

my %asked;
for my $line (split /\n/, read_file("$dir/notes")) {
    my ($who, $messages) = @{ decode_json($line) };

    push @{ $asked{$who}{@$messages > 1 ? 'shared' : 'one'} },
        $messages->[-1]{content} unless @$messages > 2;
}

# one that computes the prefix, the workload, and five that find it
is scalar(@{ $asked{'L on'}{shared} }), 1 + 16 + 5, 'A was asked everything';
is_deeply [sort @{ $asked{'L on'}{shared} }],
    [sort @{ $asked{'L off'}{shared} }], 'A and B were asked the same';

# OpenVINO has three option sets
my %times;
$times{$_}++ for @{ $asked{O}{shared} };
is_deeply [sort keys %times], [sort @{ $asked{'L on'}{shared} }],
    'and so was OpenVINO';
is_deeply [grep { $_ != 3 } values %times], [], 'each question by each set';
is_deeply [grep { $_->{seed} != 1000 } @{ $saved->{runs} }], [],
    'one seed for all sides';

my %known = map { $_ => 1 } @{ $asked{'L on'}{one} };
is scalar(grep { !$known{$_} } @{ $asked{O}{one} }), 0,
    'short questions are the same, too';

# --- a peer that dies, another load generator ---

write_file('load', "#!/usr/bin/env python3\n" . <<'END');
import json, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert option["--workload"] == "short" and option["--prompt-words"] == "45"
print(json.dumps({
    "out_tok_s": 123, "req_s": 4, "ttft_ms": {"p50": 5, "p95": 6},
    "itl_ms": {"p50": 7, "max": 8}, "out_tok_avg": int(option["--max-tokens"]),
    "prompt_tok_avg": int(option["--seed"]), "wall_s": 2, "other_cores": 0,
    "server_cpu_s": 1, "client_cpu_s": 0}))
END

sub only_short {
    system "@peer --tiny --rounds 2 --only short-1 --peer $dir --out $dir/out "
        . "@_ >$dir/text 2>$dir/err";
    return map { [@$_{qw(round side)}, $_->{measures}] }
        @{ decode_json(read_file("$dir/out/peer.json"))->{runs} };
}

write_file('notes.break', '');
my @kept = only_short();
is_deeply [map { "$_->[0] $_->[1]" } grep { $_->[2]{failed} } @kept],
    ['0 llama.cpp A'], 'a peer that dies fails once, and is started again'
    or diag read_file("$dir/err");
is scalar(@kept), 6, '... and nothing is left out';
like +(grep { $_->[2]{failed} } @kept)[0][2]{failed}, qr/closed early/,
    '... for that reason';

my @loaded = only_short("--load $dir/load");
is_deeply [map { join ' ', @$_[0, 1], @{ $_->[2] }{qw(tok_s ttft_p95
    output_tokens prompt_tokens server_cores)} } @loaded],
    [map { my $i = $_; map { "$i $_ 123 6 4 100$i 0.5" }
        $i ? reverse 'ours', @llama : ('ours', @llama) } 0, 1],
    'another load generator, with the same options and seeds for all'
    or diag read_file("$dir/err");

# --- the arithmetic, by known numbers ---

my @runs;
sub runs {
    my ($work, $measure, %values) = @_;

    for my $side (sort keys %values) {
        my $family = $side eq 'ours' ? 'ours' : $side =~ /^Open/ ? 'O' : 'L';
        my $i = 0;

        push @runs, { work => $work, side => $side, family => $family,
            round => $i++, measures => { $measure => $_ } }
            for @{ $values{$side} };
    }
}

# the better one is B by its median; ratios 2, 1.9 and 1.5
runs('short-1', tok_s => ours => [200, 190, 300],
    'llama.cpp A' => [1000, 90, 90], 'llama.cpp B' => [100, 100, 200]);
# OpenVINO is the better one; a round that it has not made does not count
runs('short-16', tok_s => ours => [800, 900, 1],
    'llama.cpp A' => [100, 100, 100], 'OpenVINO u8' => [200, 300]);
# less is better: the better one is A
runs('short-16', ttft_p95 => ours => [10, 20, 30],
    'llama.cpp A' => [40, 50, 60], 'llama.cpp B' => [400, 500, 600]);
runs('shared-16', hit => ours => [10]);
# only the sets with small batches count for the gap
runs('mixed-8', gap_max => ours => [10], 'llama.cpp A' => [20],
    'llama.cpp B -b 256' => [100]);
runs('mixed-8', tok_s => ours => [400], 'llama.cpp A' => [100],
    'llama.cpp B -b 256' => [90]);

write_file('known.json', encode_json({ runs => \@runs, machine => {
    commit => 'c0ffee', cpus => 2, cpu => 'none', model => '/m/a.gguf',
    date => 'today', mode => 'full' } }));
my $shown = `@peer --show $dir/known.json --out $dir/out`;
is $?, 0, 'runs that were saved are shown';
like $shown, qr/^Commit c0ffee, 2 CPUs \(none\), a\.gguf, today UTC\.$/m,
    '... with machine and commit';

my $markdown = read_file("$dir/out/peer.md");
for my $line (
    '| short-1 | tok/s | 200 | 100 (B) | — | ≥ 1.8 × L '
        . '| 1.50 / 1.90 / 2.00 | held |',
    '| short-16 | tok/s | 800 | 100 (A) | 250 (u8) '
        . '| ≥ 4 × the better of L, O | 3.00 / 3.50 / 4.00 | MISSED |',
    '| short-16 | TTFT p95, ms | 20.0 | 50.0 (A) | — | ≤ 1/4 L '
        . '| 0.250 / 0.400 / 0.500 | MISSED |',
    '| shared-16 | first token at a hit, ms | 10.0 | — | — | ≤ 1/4 O '
        . '| — / — / — | not measured |',
    '| mixed-8 | worst gap, ms | 10.0 | 100 (B -b 256) | — '
        . '| ≤ 1/8 L (-b 256) | 0.100 / 0.100 / 0.100 | held |',
    '| mixed-8 | tok/s | 400 | 100 (A) | — | ≥ 4 × L '
        . '| 4.00 / 4.00 / 4.00 | held |')
{
    ok index($markdown, "$line\n") >= 0, $line or diag $markdown;
}
is scalar(() = $markdown =~ /\| (?:held|MISSED|not measured) \|$/mg), 6,
    'and no other line is judged';

# --- a reply in pieces, and sets that need not be measured again ---

write_file('pieces.py', <<'END');
import json, sys
sys.path.insert(0, "t/bench")
from peer_client import Answer, Reply
from peer_table import worth_another_round

head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
def event(**values):
    return b"data: " + json.dumps(values).encode() + b"\n\n"
body = b"".join([event(choices=[{"delta": {"content": t}}])
                 for t in ("a", "", "0\r\n\r\n", "é")]
                + [event(usage={"completion_tokens": 3, "prompt_tokens": 9}),
                   b"data: [DONE]\n\n"])
for size in (1, 7, 64, 1000):
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[i:i + size]),
                                        body[i:i + size])
                      for i in range(0, len(body), size)) + b"0\r\n\r\n"
    raw = head + chunks
    for step in (1, 2, 3, 10, 100, 10000):
        reply = Reply(b"")
        reply.sent = -1
        pieces = [raw[i:i + step] for i in range(0, len(raw), step)]
        ends = [reply.take(t, piece) for t, piece in enumerate(pieces)]
        assert ends == [False] * (len(pieces) - 1) + [True], (size, step)
        reply.ended = len(pieces) - 1
        answer = Answer(reply)
        assert answer.text == "a0\r\n\r\né", answer.text
        assert (answer.tokens, answer.prompt_tokens) == (3, 9)
        assert not answer.error and len(answer.arrivals) == 3
        assert answer.arrivals == sorted(answer.arrivals)
        assert answer.arrivals[-1] <= reply.ended
        if step == 1 and size == 1000:
            at = raw.index(b"\n\n", len(head)) + 1
            assert answer.first == at and answer.ttft_ms == 1000 * (at + 1)

runs = [{"work": "short-16", "side": side, "family": "L", "round": 0,
         "measures": {"tok_s": tok_s, "ttft_p95": ttft}}
        for side, tok_s, ttft in (("fast", 100, 10), ("near", 90, 30),
                                  ("early", 50, 9), ("bad", 50, 20))]
kept = [run["side"] for run in runs
        if worth_another_round(runs, "short-16", run["side"], "L")]
assert kept == ["fast", "near", "early"], kept
END
is system($python, "$dir/pieces.py"), 0, 'replies in pieces, sets kept';

done_testing();
