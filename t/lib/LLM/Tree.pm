package LLM::Tree;

# The source tree as the house-keeping tests see it: which files there are,
# and C text without comments and strings.

use strict;
use warnings;

use Cwd qw(abs_path);
use Encode qw(decode);
use Exporter qw(import);
use File::Basename qw(dirname);
use File::Find;

our @EXPORT_OK = qw(tree_files tree_read tree_bare);

our $TOP = abs_path(dirname(abs_path(__FILE__)) . '/../../..');


# Files below the given folders whose names match, as paths from the root.
sub tree_files {
    my ($match, @folders) = @_;
    my @files;

    find({
        no_chdir => 1,
        wanted => sub {
            my $path = substr($File::Find::name, length("$TOP/"));
            push @files, $path if -f $File::Find::name && $path =~ $match;
        },
    }, grep { -d } map { "$TOP/$_" } @folders);

    return sort @files;
}


# The text of a file, as characters.
sub tree_read {
    my ($path) = @_;

    open(my $file, '<:raw', "$TOP/$path") or die "$path: $!";
    local $/;

    return decode('UTF-8', scalar <$file>, Encode::FB_CROAK);
}


# C text in which comments are blank and strings are empty, so that what is
# left is code; lines keep their numbers.
sub tree_bare {
    my ($text) = @_;

    $text =~ s{(/\*.*?\*/ | //[^\n]*)
               | ("(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')}
              {defined $1 ? blank($1) : substr($2, 0, 1) x 2}gsex;

    return $text;
}


sub blank {
    my ($text) = @_;

    $text =~ s/[^\n]/ /g;

    return $text;
}


1;
