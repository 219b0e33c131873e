#!/usr/bin/perl

# What nvcc made of the kernels (t/tools/sass.py): no spills, no stack, the
# loads, tensor cores and copies that they were written for; and registers,
# shared memory and instructions as t/cuda/sass_table.txt has them.

use strict;
use warnings;

use File::Temp qw(tempdir);
use FindBin;
use Test::More;

chdir "$FindBin::Bin/.." or die;

my $build = $ENV{LLM_TEST_BUILD} || 'build';
my $python = $ENV{LLM_TEST_PYTHON} || 'python3';
my $table = 't/cuda/sass_table.txt';
my @objects = glob "$build/gpu/kernels/cuda/*.o";

plan skip_all => "no nvcc has made $build/gpu" if !@objects;

my $nvcc = `\${NVCC:-nvcc} --version 2>&1 || /usr/local/cuda/bin/nvcc --version`;

plan skip_all => 'there is no nvcc' if ($nvcc // '') !~ /release/;

my $tool = "$python t/tools/sass.py";
my $out = `$tool check $table @objects 2>&1`;

plan skip_all => 'no cuobjdump, no nvdisasm' if $out =~ /^no cuobjdump/;

is $?, 0, 'the kernels' or diag grep { !/^ok/ } map { "$_\n" } split /\n/, $out;
cmp_ok scalar(() = $out =~ /^ok/mg), '>', 100, 'of which there are many';

# --- what it must notice: a table that says otherwise ---

my $dir = tempdir(CLEANUP => 1);

SKIP: {
    skip 'the table is another nvcc\'s', 3 if $out =~ /^# recorded with/m;

    open my $f, '<', $table or die $!;
    my $text = do { local $/; <$f> };
    my ($archs) = $out =~ /(sm_\d+)/;

    $text =~ s/^(gemv<3,1> +$archs +)(\d+)/$1 . ($2 + 1)/me;
    $text =~ s/^rmsnorm +$archs .*\n//m;
    open $f, '>', "$dir/table" or die $!;
    print $f $text;
    close $f;

    my $bad = `$tool check $dir/table @objects 2>&1`;

    is $? >> 8, 1, 'a table that differs fails';
    like $bad, qr/^not\ ok .*gemv<3,1>,\ $archs:\ as\ recorded\n .*\n
                  \#\ recorded:\ gemv.*\n\#\ built:\ +gemv.*\n
                  \#\ if\ that\ is\ meant:\ python3/mx, 'both lines, and how';
    is scalar(() = $bad =~ /^not ok/mg), 2, 'and nothing else';
}

# --- the rules, on rows that break them ---

my $rules = `$python - <<'END' 2>&1
import sys
sys.path.insert(0, "t/tools")
import sass
row = dict.fromkeys(sass.COLUMNS, 1)
for name, change in (("gemm<3,4>", {}), ("gemm<3,4>", {"imma": 0}),
                     ("gemv<3,1>", {"ldg128": 0}), ("embed_float", {})):
    fine = dict(row, stack=0, local=0, spill=0)
    print(name, sass.faults((name, "sm_90"), dict(fine, **change)))
print(sass.faults(("gemm<3,4>", "sm_75"), dict(fine, ldgsts=0, imma=0)))
for column in ("stack", "local", "spill"):
    print(sass.faults(("x", "sm_80"), dict(fine, **{column: 8})))
END`;

is $rules, <<'END', 'spills, stack and what is missing';
gemm<3,4> []
gemm<3,4> ['no imma']
gemv<3,1> ['no ldg128']
embed_float []
['no imma']
['8 in stack']
['8 in local']
['8 in spill']
END

done_testing;
