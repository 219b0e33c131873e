#!/usr/bin/perl

# The form of the source that a program can judge: CONVENTIONS.md, "Form" and
# "Size".  What is merely long is reported, what is far too long fails.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::Bin/lib";
use LLM::Tree qw(tree_files tree_read tree_bare);
use Test::More;

use constant {
    WIDTH => 80,
    FILE_AIM => 600, FILE_MAX => 800,
    FUNCTION_AIM => 80, FUNCTION_MAX => 120,
};

# spelled so that this file does not find itself
my $notes = join '|', map { join '', @$_ } ['TO', 'DO'], ['FIX', 'ME'],
    ['X', 'XX'], ['HA', 'CK'];


# The functions of a C text: [name, first line, last line], lines from 1.  A
# body begins with a brace in the first column, and so does nothing else.
sub functions {
    my (@lines) = @_;
    my ($open, @found);

    for my $i (0 .. $#lines) {
        if ($lines[$i] =~ /^\{\s*$/) {
            $open = $i;

        } elsif (defined $open && $lines[$i] =~ /^\}\s*$/) {
            my $first = $open;

            # up to the line behind the blank one, the comment or the #endif
            $first-- while $first > 0
                && $lines[$first - 1] !~ m{^\s*$|^#|\*/\s*$};

            my $head = join ' ', @lines[$first .. $open - 1];
            my ($name) = $head =~ /(\w+)\s*\(/;

            push @found, [$name // '?', $first + 1, $i + 1];
            $open = undef;
        }
    }

    return @found;
}


sub long_parts {
    my ($path, @lines) = @_;
    my (@bad, @note);
    my $n = @lines;

    push @{$n > FILE_MAX ? \@bad : \@note}, "$path: $n lines"
        if $n > FILE_AIM;

    for my $function (functions(@lines)) {
        my ($name, $first, $last) = @$function;
        my $length = $last - $first + 1;

        push @{$length > FUNCTION_MAX ? \@bad : \@note},
            "$path:$first: $name has $length lines"
            if $length > FUNCTION_AIM;
    }

    return (\@bad, \@note);
}


# Exactly two blank lines after a function, but for the end of the file and
# lines of the preprocessor.  In a source file two somewhere before it, too:
# above its comment, or above the heading of its section.
sub blank_lines {
    my ($path, $text) = @_;
    my @lines = split /\n/, $text;
    my @code = split /\n/, tree_bare($text);
    my @bad;

    for my $function (functions(@lines)) {
        my ($name, $first, $last) = @$function;
        my $after = join "\n", @lines[$last .. $#lines];

        push @bad, "$path:$last: no two blank lines after $name"
            if $after =~ /\S/ && $after !~ /\A\n\n\S/ && $after !~ /\A\n?#/;

        my $i = $first - 2;

        $i-- while $i >= 0 && $code[$i] !~ /\S/;

        push @bad, "$path:$first: no two blank lines before $name"
            if $i >= 0 && $path =~ /\.(?:cu?|cpp)$/ && $code[$i] !~ /^#/
            && join("\n", @lines[$i .. $first - 1]) !~ /\n\n\n/;
    }

    return @bad;
}


# Statements without braces.  $code: without comments and strings.
sub braces {
    my ($path, $code) = @_;
    my @bad;

    # the preprocessor has an #if of its own, and macros are another matter
    $code =~ s{^[ \t]*#(?:[^\n]*\\\n)*[^\n]*}
              {my $t = $&; $t =~ s/[^\n]//g; $t}gem;

    while ($code =~ /\b(if|for|while|switch|else|do)\b/g) {
        my ($word, $at) = ($1, pos $code);
        my $line = 1 + (substr($code, 0, $at) =~ tr/\n//);
        my $rest = substr $code, $at;

        if ($word eq 'else') {
            next if $rest =~ /^\s*(?:\{|if\b)/;

        } elsif ($word eq 'do') {
            next if $rest =~ /^\s*\{/;

        } else {
            next if $rest !~ /^\s*(\((?:[^()]++|(?1))*\))\s*(.)/s;
            next if $2 eq '{';

            # the end of do { } while ();
            next if $word eq 'while' && $2 eq ';'
                && substr($code, 0, $at - 5) =~ /\}\s*$/;
        }

        push @bad, "$path:$line: $word without braces";
    }

    return @bad;
}


# Line by line.
sub line_faults {
    my ($path, $text, $c) = @_;
    my @bad;
    my $n = 0;

    for my $line (split /\n/, $text) {
        $n++;
        push @bad, "$path:$n: trailing blanks" if $line =~ /\s$/;
        push @bad, "$path:$n: a tab" if $line =~ /\t/;
        push @bad, "$path:$n: a note to self: $1" if $line =~ /\b($notes)\b/;
        push @bad, "$path:$n: " . length($line) . ' columns'
            if $c && length $line > WIDTH;
    }

    push @bad, "$path: no newline at the end" if $text !~ /\n\z/;
    push @bad, "$path: blank lines at the end" if $text =~ /\n\n\z/;

    return @bad;
}


sub c_faults {
    my ($path, $text) = @_;
    my $code = tree_bare($text);
    my @bad;

    # a comment of two slashes: in code, not in a string or another comment
    my $slashes = $text;
    $slashes =~ s{/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'}
                 {my $t = $&; $t =~ s/[^\n]/ /g; $t}gse;

    while ($slashes =~ m{//}g) {
        my $line = 1 + (substr($slashes, 0, pos $slashes) =~ tr/\n//);
        push @bad, "$path:$line: //";
    }

    push @bad, "$path: does not begin with a comment" if $text !~ m{\A/\*};

    while ($code =~ /\bgoto\s+(\w+)/g) {
        push @bad, "$path: goto $1" if $1 !~ /^(?:done|failed)$/;
    }

    return (@bad, braces($path, $code), blank_lines($path, $text));
}


sub guard_faults {
    my ($path, $text) = @_;
    my $want = uc $path =~ s{[^A-Za-z0-9]}{_}gr;

    # nginx's own guards have no folder in front
    $want =~ s/^NGX_MODULE_//;

    return $text =~ /^#ifndef \Q$want\E\n#define \Q$want\E\n/m
        ? () : ("$path: no guard $want");
}


# --- the rules themselves: each of these must be found ---

sub all_faults {
    my ($text) = @_;
    my ($bad) = long_parts('x.c', split /\n/, $text);

    return (@$bad, line_faults('x.c', $text, 1), c_faults('x.c', $text));
}

my $top = "/* x */\n\n";
my $body = "int\nf(void)\n{\n    return 0;\n}\n";

my @wrong = (
    ['a tab', "$top\tint x;\n"],
    ['trailing', "${top}int x; \n"],
    ['81 columns', "${top}/* " . 'x' x 75 . " */\n"],
    ['//', "${top}int x; // y\n"],
    ['a note', "${top}/* " . 'TO' . "DO: x */\n"],
    ['newline', "${top}int x;"],
    ['begin with', "int x;\n"],
    ['if without', $top . $body =~ s/return 0;/if (f(1)) return 0;/r],
    ['else without', $top . $body =~ s/return 0;/if (1) { } else return 0;/r],
    ['for without', $top . $body =~ s/return 0;/for (;;)\n        f();/r],
    ['while without', $top . $body =~ s/return 0;/while (f());/r],
    ['do without', $top . $body =~ s/return 0;/do f(); while (1);/r],
    ['goto', $top . $body =~ s/return 0;/goto again;/r],
    ['blank lines after', "$top\n$body\nint x;\n"],
    ['blank lines after', "$top\n$body\n\n\nint x;\n"],
    ['blank lines before', "${top}int x;\n\n$body"],
    ['blank lines before', "${top}int x;\n\n/* why */\n$body"],
    ['f has 121 lines',
     "$top\n" . $body =~ s/    return 0;\n/"    x();\n" x 117/er],
    ['801 lines', "/* x */\n" . "int x;\n" x 800],
);

for my $case (@wrong) {
    my ($what, $text) = @$case;
    my @bad = all_faults($text);

    is(scalar(grep { /\Q$what\E/ } @bad), 1, "found: $what")
        or diag join "\n", @bad;
}

my $right = <<'END';
/* A file // with everything that looks wrong and is not. */

#include <stdio.h>

#if 1
#define TWICE(x) do x; while (0); \
    if (x) y()
#endif

static const char *s = "// if (x) y; \" 'TAB";
static const char c = '"', d = '\'';


/* Why. */
static int
f(int x)
{
    do {
        x--; /* if (x) y; */
    } while (x > 0);

    if ((x > 1)
        && (x < 2))
    {
        goto done;

    } else if (x) {
        x = 1;

    } else {
        for (;;) { }
    }

done:
    return x;
}


static struct {
    int x;
} y = {
    1
};


int
g(void)
{
    return f(1);
}
END

is_deeply([all_faults($right)], [], 'allowed: what only looks wrong');
is(scalar(my @no = guard_faults('engine/kv/pool.h',
                                "#ifndef POOL_H\n#define POOL_H\n")),
   1, 'found: a wrong guard');


# --- the tree ---

my @c = tree_files(qr/\.(?:c|h|cu|cuh|cpp)$/, qw(engine kernels ngx_module t));
my @other = (grep({ -f "$LLM::Tree::TOP/$_" } 'README.md', 'CHANGES.md',
                  'config'),
             tree_files(qr/\.(?:t|pm|pl|py|sh|conf|pml)$/, qw(t conf)));

cmp_ok(scalar @c, '>', 100, 'the tree was found');

for my $path (@c) {
    my $text = tree_read($path);
    my ($bad, $note) = long_parts($path, split /\n/, $text);

    push @$bad, line_faults($path, $text, 1), c_faults($path, $text);

    # a _body.h is included more than once, on purpose
    push @$bad, guard_faults($path, $text)
        if $path =~ /\.h$/ && $path !~ /_body\.h$/;

    diag("$_, longer than it should be") for @$note;
    ok(@$bad == 0, $path) or diag join "\n", @$bad;
}

for my $path (@other) {
    my @bad = line_faults($path, tree_read($path), 0);

    ok(@bad == 0, $path) or diag join "\n", @bad;
}

# the formatter's word is final, but another version has another opinion
SKIP: {
    my ($tool) = grep { (`$_ --version 2>/dev/null` // '') =~ /version 14\./ }
        'clang-format-14', 'clang-format';

    skip 'no clang-format 14', 1 if !defined $tool;

    my @files = grep { m{^(?:engine|kernels)/} } @c;
    my $out = do {
        chdir $LLM::Tree::TOP or die;
        `$tool --dry-run -Werror @files 2>&1`;
    };
    my %seen;
    my @bad = grep { !$seen{$_}++ } $out =~ /^(\S+?):\d+:\d+: error/mg;

    is($?, 0, 'clang-format') or diag "not formatted: @bad";
}

# prove executes them
ok -x $_, "$_ is a program" for glob "t/*.t";

done_testing();
