#!/usr/bin/perl

# Wrong configuration fails `nginx -t` with file, line, directive, value and a
# remedy; conf/llm.conf itself is good.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Test;
use Test::More;

plan skip_all => 'LLM_TEST_MODEL is not set' unless $ENV{LLM_TEST_MODEL};

my $t = LLM::Test->new;
my $good = do { open my $f, '<', $t->{conf_path} or die; local $/; <$f> };

my ($status, $out) = $t->test_conf;
is $status, 0, 'the base is good' or diag $out;

# lines of the engine block that must work
my @right = ('device cpu;', 'device auto;', 'device cuda;',
    'device cuda:0;', 'device cuda:63;', 'block_size 16;',
    'max_model_len 2048;', 'max_model_len auto;', 'max_num_seqs 1;',
    'max_num_batched_tokens 4096;', 'kv_cache_memory 64m;', 'threads 2;',
    'threads auto;', 'reserved_cpus 0;', 'reserved_cpus 1;',
    'cpu_affinity on;', 'cpu_affinity off;', 'slots 64;',
    'deterministic on;', 'deterministic off;',
    'gpu_memory_utilization 0.05;',
    'gpu_memory_utilization 1;', 'inter_token_target 0;',
    'inter_token_target 50ms;', 'inter_token_target 1m;',
    'gpu_memory_utilization 0.925;',
    'kv_cache_prefault on;', 'kv_cache_prefault off;', 'kv_cache_dtype f16;',
    'kv_cache_dtype q8_0;', 'repack_cache on;', 'repack_cache off;',
    'repack_cache /tmp;', 'prefix_caching on;', 'prefix_caching off;',
    'reservation on;', 'reservation off;',
    'chunked_prefill on;', 'chunked_prefill off;',
    'chunked_prefill off; max_model_len 2048;',
    'long_prefill_token_threshold 0;', 'long_prefill_token_threshold 512;',
    'speculative off;', 'speculative ngram;', 'speculative suffix;',
    'speculative ngram min=1 max=64;', 'speculative ngram max=8 min=8;',
    'speculative ngram max=2;', 'speculative ngram min=5;',
    'speculative suffix; speculative ngram;',
    'speculative ngram; speculative suffix; speculative_model %%MODEL%%;',
    'speculative_model %%MODEL%%;', 'speculative_model model.gguf;',
    'num_speculative_tokens 1;', 'num_speculative_tokens 15;',
    'num_speculative_tokens auto;',
    'speculative off; num_speculative_tokens 3;');

for my $line (@right) {
    $t->write_conf($good =~ s/(llm_engine chat \{)/$1 $line/r);
    ($status, $out) = $t->test_conf;
    is $status, 0, "good: $line" or diag $out;
}

# lines of a location that must work
my @open = ('llm_queue 1;', 'llm_queue 1000000;', 'llm_queue off;',
    'llm_tenant off;', 'llm_tenant one;', 'llm_tenant "";',
    'llm_tenant $remote_user;', 'llm_tenant "$remote_addr-$remote_user";',
    'llm_tenant x weight=0.01;', 'llm_tenant x weight=1000;',
    'llm_tenant x weight=$http_x_weight;',
    'llm_tenant x weight=2${http_x_weight};', 'llm_priority 0;',
    'llm_priority -2147483648;', 'llm_priority 2147483647;',
    'llm_priority off;', 'llm_priority $http_x_priority;',
    'llm_cache_salt $remote_user;');

for my $line (@open) {
    for my $at ('llm_pass chat;', 'access_log off;', 'server {') {
        $t->write_conf($good =~ s/\Q$at\E/$at $line/r);
        ($status, $out) = $t->test_conf;
        is $status, 0, "good: $at $line" or diag $out;
    }
}

# and those that must not: (line, what the message names)
my @wrong = (
    ['nonsense on;', qr/nonsense/],
    ['device tpu;', qr/device.*tpu.*(auto|cpu)/],
    ['device cuda:;', qr/device.*cuda:.*cuda:N/],
    ['device cuda:64;', qr/cuda:64.*0 to 63/],
    ['device cuda:x;', qr/cuda:x.*cuda:N/],
    ['device cuda:-1;', qr/cuda:-1.*cuda:N/],
    ['device cuda1;', qr/cuda1.*cuda:N/],
    ['device;', qr/device/],
    ['block_size 32;', qr/block_size.*32.*16/],
    ['max_model_len 0;', qr/max_model_len.*0/],
    ['max_model_len many;', qr/max_model_len.*many/],
    ['max_num_seqs 0;', qr/max_num_seqs.*0/],
    ['max_num_seqs 99999999;', qr/max_num_seqs.*99999999/],
    ['max_num_batched_tokens x;', qr/max_num_batched_tokens.*x/],
    ['max_num_seqs 64; max_num_batched_tokens 32;',
        qr/max_num_batched_tokens.*max_num_seqs/],
    ['kv_cache_memory lots;', qr/kv_cache_memory.*lots/],
    ['gpu_memory_utilization 0.04;',
        qr/gpu_memory_utilization "0\.04".*from 0\.05 to 1/],
    ['inter_token_target 61s;', qr/inter_token_target "61s"/],
    ['inter_token_target x;', qr/inter_token_target "x".*such as 50ms/],
    ['gpu_memory_utilization 1.01;', qr/gpu_memory_utilization "1\.01"/],
    ['gpu_memory_utilization 90%;', qr/gpu_memory_utilization "90%"/],
    ['gpu_memory_utilization -1;', qr/gpu_memory_utilization "-1"/],
    ['gpu_memory_utilization "";', qr/gpu_memory_utilization ""/],
    ['gpu_memory_utilization 0.5 0.6;', qr/gpu_memory_utilization.*one/],
    ['kv_cache_prefault yes;', qr/kv_cache_prefault "yes".*"on" or "off"/],
    ['kv_cache_dtype q4_0;', qr/kv_cache_dtype.*q4_0.*(f16|q8_0)/],
    ['kv_cache_dtype q8;', qr/kv_cache_dtype.*"q8"/],
    ['repack_cache yes;', qr/repack_cache "yes".*"on", "off" or a folder/],
    ['repack_cache /nonexistent;', qr/repack_cache "\/nonexistent"/],
    ['repack_cache /etc/passwd;', qr/repack_cache.*a folder that exists/],
    ['repack_cache "";', qr/repack_cache "".*folder/],
    ['repack_cache on /tmp;', qr/repack_cache.*one/],
    ['threads -1;', qr/threads.*-1/],
    ['reserved_cpus -1;', qr/reserved_cpus.*-1/],
    ['reserved_cpus 256;', qr/reserved_cpus.*256/],
    ['deterministic no;', qr/deterministic "no".*"on" or "off"/],
    ['cpu_affinity auto;', qr/cpu_affinity "auto".*"on" or "off"/],
    ['slots 3;', qr/slots.*3/],
    ['prefix_caching maybe;', qr/prefix_caching.*maybe/],
    ['reservation 2048;', qr/reservation.*2048/],
    ['chunked_prefill 1;', qr/chunked_prefill.*1/],
    ['chunked_prefill off; max_model_len 4096;',
        qr/max_num_batched_tokens 2048.*max_model_len 4096/],
    ['long_prefill_token_threshold -1;', qr/long_prefill_token_threshold.*-1/],
    ['device cpu; device cpu;', qr/duplicate "device"/],
    ['speculative;', qr/arguments in "speculative".*one to three/],
    ['speculative on;', qr/speculative "on".*"off", "ngram.*or "suffix"/],
    ['speculative "";', qr/speculative "" of/],
    ['speculative ngram:2:5;', qr/speculative "ngram:2:5"/],
    ['speculative ngram min=0;', qr/min=0 max=5.*1 <= min <= max <= 64/],
    ['speculative ngram max=65;', qr/min=2 max=65.*1 <= min <= max <= 64/],
    ['speculative ngram min=6;', qr/min=6 max=5 of speculative/],
    ['speculative ngram max=1;', qr/min=2 max=1 of speculative/],
    ['speculative ngram min=99999999999999999999;', qr/parameter "min=9+"/],
    ['speculative ngram min=x;', qr/parameter "min=x" of speculative/],
    ['speculative ngram min=;', qr/parameter "min=" of speculative/],
    ['speculative ngram max=-1;', qr/parameter "max=-1" of speculative/],
    ['speculative ngram 3;', qr/parameter "3" of speculative.*"max=N"/],
    ['speculative ngram "";', qr/parameter "" of speculative/],
    ['speculative ngram m;', qr/parameter "m" of speculative/],
    ['speculative ngram min=2 min=2;', qr/parameter "min=2".*each once/],
    ['speculative ngram max=2 max=2;', qr/parameter "max=2".*each once/],
    ['speculative ngram min=1 max=2 max=3;', qr/"speculative".*one to three/],
    ['speculative suffix min=1;', qr/"suffix".*only ngram takes param/],
    ['speculative off min=1;', qr/"off".*only ngram takes param/],
    ['speculative off; speculative ngram;', qr/"off" must be alone/],
    ['speculative suffix; speculative off;', qr/"off" must be alone/],
    ['speculative off; speculative off;', qr/"off" must be alone/],
    ['speculative ngram; speculative ngram max=3;', qr/"ngram".*duplicate/],
    ['speculative ngram; speculative suffix; speculative suffix;',
        qr/"suffix".*duplicate/],
    ['speculative off; speculative_model %%MODEL%%;',
        qr/"chat" has both "speculative off" and a speculative_model/],
    ['speculative_model %%MODEL%%; speculative off;', qr/"chat" has both/],
    ['speculative_model;', qr/"speculative_model".*one/],
    ['speculative_model "";', qr/speculative_model.*empty/],
    ['speculative_model /nonexistent.gguf;',
        qr/speculative_model "\/nonexistent.gguf".*cannot be read/],
    ['speculative_model /tmp;', qr/speculative_model "\/tmp".*not a file/],
    ['speculative_model %%MODEL%% alias=x;', qr/"speculative_model".*one/],
    ['speculative_model %%MODEL%%; speculative_model %%MODEL%%;',
        qr/duplicate "speculative_model"/],
    ['num_speculative_tokens 0;', qr/num_speculative_tokens "0".*1 to 15/],
    ['num_speculative_tokens 16;',
        qr/num_speculative_tokens "16".*"auto" or a number from 1 to 15/],
    ['num_speculative_tokens off;', qr/num_speculative_tokens "off"/],
    ['num_speculative_tokens 1; num_speculative_tokens 2;',
        qr/duplicate "num_speculative_tokens"/],
    ['chat_template /nonexistent.jinja;', qr/chat_template.*nonexistent/],
);

for my $case (@wrong) {
    my ($line, $like) = @$case;
    $t->write_conf($good =~ s/(llm_engine chat \{)/$1 $line/r);
    ($status, $out) = $t->test_conf;
    is $status, 1, "refused: $line" or diag $out;
    like $out, $like, 'names it';
    like $out, qr/nginx\.conf:\d+/, 'with file and line';
}

# of a location, the same
my @closed = (
    ['llm_queue 0;', qr/llm_queue "0".*from 1 to 1000000, or off/],
    ['llm_queue 1000001;', qr/llm_queue "1000001"/],
    ['llm_queue -1;', qr/llm_queue "-1"/],
    ['llm_queue many;', qr/llm_queue "many"/],
    ['llm_queue $http_x;', qr/llm_queue "\$http_x"/],
    ['llm_queue "";', qr/llm_queue ""/],
    ['llm_queue;', qr/llm_queue/],
    ['llm_queue 1 2;', qr/llm_queue/],
    ['llm_queue 1; llm_queue off;', qr/"llm_queue" directive is duplicate/],
    ['llm_tenant;', qr/llm_tenant/],
    ['llm_tenant x weight=0;', qr/weight "0" of llm_tenant.*0\.01 to 1000/],
    ['llm_tenant x weight=0.009;', qr/weight "0\.009"/],
    ['llm_tenant x weight=1000.1;', qr/weight "1000\.1"/],
    ['llm_tenant x weight=-1;', qr/weight "-1"/],
    ['llm_tenant x weight=1e2;', qr/weight "1e2"/],
    ['llm_tenant x weight=nan;', qr/weight "nan"/],
    ['llm_tenant x weight=;', qr/weight ""/],
    ['llm_tenant x 2;', qr/parameter "2" of llm_tenant.*weight=/],
    ['llm_tenant x weight=1 y;', qr/llm_tenant/],
    ['llm_tenant off weight=2;', qr/"llm_tenant" directive off takes no/],
    ['llm_tenant off; llm_tenant x;', qr/"llm_tenant" directive is duplicate/],
    ['llm_priority high;', qr/llm_priority "high"/],
    ['llm_priority 2147483648;', qr/llm_priority "2147483648"/],
    ['llm_priority -2147483649;', qr/llm_priority "-2147483649"/],
    ['llm_priority 1.5;', qr/llm_priority "1\.5"/],
    ['llm_priority "";', qr/llm_priority ""/],
    ['llm_priority -;', qr/llm_priority "-"/],
    ['llm_priority 1; llm_priority 1;', qr/"llm_priority" directive is dupl/],
);

for my $case (@closed) {
    my ($line, $like) = @$case;
    $t->write_conf($good =~ s/llm_pass chat;/llm_pass chat; $line/r);
    ($status, $out) = $t->test_conf;
    is $status, 1, "refused: $line" or diag $out;
    like $out, $like, 'names it';
    like $out, qr/nginx\.conf:\d+/, 'with file and line';
}

my @whole = (
    ['no model', sub { s/model %?\S+ alias=smollm2;//r }, qr/model/],
    ['a model that is not there',
        sub { s{model \S+ alias}{model /nonexistent.gguf alias}r },
        qr/nonexistent\.gguf/],
    ['an engine binary that is not there',
        sub { s{program \S+;}{program /nonexistent/llm-engine;}r },
        qr/nonexistent/],
    ['an engine name that is not defined',
        sub { s/llm_pass chat;/llm_pass chatt;/r }, qr/chatt/],
    ['the same name twice',
        sub { s/(llm_engine chat \{.*?\n    \})/$1\n$1/sr },
        qr/duplicate llm_engine "chat"/],
    ['llm_pass twice', sub { s/llm_pass chat;/llm_pass chat; llm_pass chat;/r },
        qr/llm_pass.*duplicate/],
    ['llm_pass without a name', sub { s/llm_pass chat;/llm_pass;/r },
        qr/llm_pass/],
    ['llm_timeout soon', sub { s/llm_pass chat;/llm_pass chat; llm_timeout x;/r },
        qr/llm_timeout/],
    ['llm_cache_salt twice',
        sub { s/llm_pass chat;/llm_pass chat; llm_cache_salt a; llm_cache_salt b;/r },
        qr/llm_cache_salt.*duplicate/],
    ['llm_cache_salt of an unknown variable',
        sub { s/llm_pass chat;/llm_pass chat; llm_cache_salt \$nonesuch;/r },
        qr/nonesuch/],
    ['llm_tenant of an unknown variable',
        sub { s/llm_pass chat;/llm_pass chat; llm_tenant \$nonesuch;/r },
        qr/nonesuch/],
    ['a weight of an unknown variable',
        sub { s/llm_pass chat;/llm_pass chat; llm_tenant x weight=\$nonesuch;/r },
        qr/nonesuch/],
    ['llm_priority of an unknown variable',
        sub { s/llm_pass chat;/llm_pass chat; llm_priority \$nonesuch;/r },
        qr/nonesuch/],
    ['llm_engine in server', sub { s/server \{/server { llm_engine x { }/r },
        qr/llm_engine/],
);

for my $case (@whole) {
    my ($name, $change, $like) = @$case;
    local $_ = $good;
    $t->write_conf($change->());
    ($status, $out) = $t->test_conf;
    is $status, 1, "refused: $name" or diag $out;
    like $out, $like, 'names it' or diag $out;
}

# --- the example with every directive ---

my $llm = do { open my $f, '<', "$FindBin::Bin/../conf/llm.conf" or die;
    local $/; <$f> };
$llm =~ s{modules/ngx_http_llm_module}{%%DIR%%/bin/ngx_http_llm_module};
$llm =~ s{/var/lib/llm/\S+\.gguf}{%%MODEL%%}g;
$llm =~ s{/var/lib/llm/\S+\.jinja}{%%DIR%%/t.jinja}g;
$llm =~ s{/usr/lib/nginx-llm/llm-engine}{%%DIR%%/bin/llm-engine}g;
$llm =~ s{/var/log/nginx/\S+\.log}{%%DIR%%/error.log}g;
$llm =~ s{listen 8080}{listen 127.0.0.1:%%PORT%%};
$llm =~ s/^http \{/http { access_log off;
    client_body_temp_path %%DIR%%\/body; proxy_temp_path %%DIR%%\/proxy;
    fastcgi_temp_path %%DIR%%\/fastcgi; uwsgi_temp_path %%DIR%%\/uwsgi;
    scgi_temp_path %%DIR%%\/scgi;/m;
open my $j, '>', "$t->{dir}/t.jinja" or die;
print $j '{% for m in messages %}{{ m.content }}{% endfor %}';
close $j;
$t->write_conf($llm);
($status, $out) = $t->test_conf;
is $status, 0, 'conf/llm.conf is good' or diag $out;
$t->start;
is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'and serves';
like $t->log, qr/kv: cache of \d+ tokens \(\d+ pages, F16,/, 'with the cache it says';
$t->stop_ok;

$t->write_conf($llm =~ s/kv_cache_dtype f16/kv_cache_dtype q8_0/r);
$t->start;
is $t->chat('Hi', max_tokens => 2)->{status}, 200, 'kv_cache_dtype q8_0 serves';
like $t->log, qr/kv: cache of \d+ tokens \(\d+ pages, Q8_0,/, 'with bytes';
$t->stop_ok;

done_testing;
