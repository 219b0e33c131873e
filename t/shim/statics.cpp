/*
 * Where static shared memory is.  The compiler makes a variable of __shared__
 * that is local to a function, and C++ calls it _ZZ<function>E<name>, so the
 * program's own symbol table tells whose it is.  It is read at the first
 * launch.
 *
 * Without ASan such variables are thread-local, and nothing else of that name
 * is: those of functions that are no kernels are filled, too.  With ASan, only
 * those of the kernel itself.
 */

#include "t/shim/exec.h"
#include "t/shim/worker.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#define POISON 0xff

#ifdef SHIM_ASAN
#define KIND STT_OBJECT
#else
#define KIND STT_TLS
#endif

typedef struct {
    std::string function; /* mangled, without _Z */
    ptrdiff_t offset;     /* from shim_worker if thread-local */
    size_t n_bytes;
} variable_t;

typedef std::vector<variable_t> variables_t;

static struct {
    variables_t variables;
    std::map<const void *, std::string> functions;
    std::map<const void *, variables_t> of_kernel;
    pthread_mutex_t mutex;
} table = { {}, {}, {}, PTHREAD_MUTEX_INITIALIZER };


/* The program is first in the list; its bias tells where it was loaded. */
static int
find_bias(struct dl_phdr_info *info, size_t size, void *data)
{
    (void) size;
    *(ElfW(Addr) *) data = info->dlpi_addr;

    return 1;
}


static void
add_symbol(const ElfW(Sym) *symbol, const char *name, ElfW(Addr) bias)
{
    const int type = ELF64_ST_TYPE(symbol->st_info);

    if (type == STT_FUNC && strncmp(name, "_Z", 2) == 0) {
        table.functions[(const void *) (bias + symbol->st_value)] = name + 2;
    }

    if (type == KIND && strncmp(name, "_ZZ", 3) == 0) {
        const ptrdiff_t offset = symbol->st_value
                                 + (KIND == STT_OBJECT ? bias : 0);

        table.variables.push_back({ name + 3, offset, symbol->st_size });
    }
}


/* Offsets of thread-local variables become those from one that is known. */
static void
rebase(ptrdiff_t known)
{
    for (variable_t &variable : table.variables) {
        variable.offset -= known;
    }
}


static void
read_symbols(const char *file)
{
    const ElfW(Ehdr) *head = (const ElfW(Ehdr) *) file;
    const ElfW(Shdr) *sections = (const ElfW(Shdr) *) (file + head->e_shoff);
    ElfW(Addr) bias = 0;
    ptrdiff_t known = 0;

    dl_iterate_phdr(find_bias, &bias);

    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) {
            continue;
        }

        const ElfW(Sym) *symbols
            = (const ElfW(Sym) *) (file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        const size_t n = sections[i].sh_size / sizeof(ElfW(Sym));

        for (size_t j = 0; j < n; j++) {
            const char *name = names + symbols[j].st_name;

            add_symbol(&symbols[j], name, bias);

            if (KIND == STT_TLS && strcmp(name, "shim_worker") == 0) {
                known = symbols[j].st_value;
            }
        }
    }

    rebase(known);
}


static void
read_program(void)
{
    struct stat info;
    const int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fstat(fd, &info) != 0) {
        perror("cuda-shim: symbols of the program");
        abort();
    }

    void *file = mmap(NULL, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);

    close(fd);

    if (file == MAP_FAILED) {
        perror("cuda-shim: symbols of the program");
        abort();
    }

    read_symbols((const char *) file);
    munmap(file, info.st_size);
}


/* Whether a variable, called <function>E<name>, is in a function. */
static bool
is_in(const variable_t *variable, const std::string &function)
{
    return variable->function.compare(0, function.size() + 1, function + "E")
           == 0;
}


/* Whether it is in a kernel that was launched, other than this one. */
static bool
is_in_other(const variable_t *variable, const void *kernel)
{
    for (const auto &known : table.of_kernel) {
        if (known.first != kernel
            && is_in(variable, table.functions[known.first]))
        {
            return true;
        }
    }

    return false;
}


static void
list_variables(const void *kernel)
{
    const std::string &name = table.functions[kernel];
    variables_t &list = table.of_kernel[kernel];

    list.clear();

    for (const variable_t &variable : table.variables) {
        if (is_in(&variable, name)
            || (KIND == STT_TLS && !is_in_other(&variable, kernel)))
        {
            list.push_back(variable);
        }
    }
}


static const variables_t *
variables_of(const void *kernel)
{
    static bool was_read;

    pthread_mutex_lock(&table.mutex);

    if (!was_read) {
        was_read = true;
        read_program();
    }

    if (table.of_kernel.count(kernel) == 0) {
        list_variables(kernel);
    }

    const variables_t *list = &table.of_kernel[kernel];

    pthread_mutex_unlock(&table.mutex);

    return list;
}


void
shim_statics_poison(const void *kernel)
{
    char *base = KIND == STT_TLS ? (char *) &shim_worker : NULL;

    for (const variable_t &variable : *variables_of(kernel)) {
        memset(base + variable.offset, POISON, variable.n_bytes);
    }
}
