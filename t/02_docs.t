#!/usr/bin/perl

# What the module offers is documented, and what is documented exists:
# directives, variables and metrics are read from the tables in the source and
# looked up in README.md and conf/llm.conf, and the other way round.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Tree qw(tree_files tree_read);
use Test::More;

my $readme = tree_read('README.md');
my $conf = tree_read('conf/llm.conf');
my %source = map { $_ => tree_read($_) } tree_files(qr/\.c$/, 'ngx_module');


# Names of the entries of all tables of one type, up to their null entry.
sub table_names {
    my ($type) = @_;
    my @names;

    for my $path (sort keys %source) {
        while ($source{$path} =~ /^static \s+ (?:const \s+)? \Q$type\E \s+ \w+
                                  \[\] \s* = \s* \{ (.*?) ^\};/gmsx) {
            my $body = $1;

            push @names, $body =~ /\{ \s* ngx_string\("(\w+)"\)/gx;
        }
    }

    return sort @names;
}


sub unique {
    my %seen;

    return sort grep { !$seen{$_}++ } @_;
}


# --- directives ---

# nginx's table, and the one of the llm_engine block
my @directives = unique(table_names('ngx_command_t'),
                        table_names('ngx_http_llm_option_t'));
my %known = map { $_ => 1 } @directives;

cmp_ok(scalar @directives, '>=', 10, 'the directives were found');
ok($known{$_}, "$_ is among them") for qw(llm_engine llm_pass model);

for my $name (@directives) {
    my ($entry) = $readme =~ /^[ ]{4}Syntax:[ ]+(\Q$name\E\b.*?)^\S/ms;

    ok(defined $entry, "README.md: Syntax: $name")
        and like($entry, qr/^\s+Default: /m, "README.md: default of $name");
    ok($conf =~ /^\s*\Q$name\E\b[^#\n]*[;{]/m, "conf/llm.conf: $name");
}

for my $name (unique($readme =~ /^[ ]{4}Syntax:[ ]+(\w+)/mg)) {
    ok($known{$name}, "$name of README.md exists");
}

# by their prefix; conf/llm.conf has nginx's own directives, too
for my $name (unique($conf =~ /^\s*(llm_\w+)/mg)) {
    ok($known{$name}, "$name of conf/llm.conf exists");
}


# --- variables ---

my @variables = table_names('ngx_http_variable_t');
my %variable = map { $_ => 1 } @variables;

cmp_ok(scalar @variables, '>=', 3, 'the variables were found');

for my $name (@variables) {
    ok($readme =~ /`\$\Q$name\E`/, "README.md: \$$name");
}

for my $name (unique($readme =~ /\$(llm_\w+)/g)) {
    ok($variable{$name}, "\$$name of README.md exists");
}


# --- metrics ---

# the table of families, and what the page makes itself
my $families = $source{'ngx_module/ngx_http_llm_families.c'};
my $page = $source{'ngx_module/ngx_http_llm_metrics.c'};

ok(defined $families && defined $page, 'the metrics were found')
    or BAIL_OUT('no ngx_http_llm_families.c or ngx_http_llm_metrics.c');

my @metrics = unique("$families$page" =~ /"((?:vllm:|llm_)[a-z0-9_]+)"/g);
my %metric = map { $_ => 1 } @metrics;

cmp_ok(scalar @metrics, '>=', 40, 'there are metrics');

for my $name (@metrics) {
    ok($readme =~ /`\Q$name\E[`{]/, "README.md: $name");
}

my ($section) = $readme =~ /^## Metrics\n(.*?)^## /ms;

for my $name (unique(($section // '') =~ /`((?:vllm:|llm_)\w+)/g)) {
    ok($metric{$name}, "$name of README.md exists");
}


# --- files ---

for my $path (qw(conf/nginx.conf conf/llm.conf conf/proxy.conf
                 CONVENTIONS.md CHANGES.md LICENSE config)) {
    ok(-s "$LLM::Tree::TOP/$path", "$path exists");
}

# every file that README.md names by its path
for my $path (unique($readme =~ m{(?<![\w/.-])((?:conf|t|engine|ngx_module
                                     |kernels)/[\w./-]*\w)}gx)) {
    ok(-e "$LLM::Tree::TOP/$path", "$path of README.md exists");
}

done_testing();
