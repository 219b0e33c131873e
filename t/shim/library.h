/*
 * dlopen for the libraries of CUDA that a program opens itself: there is one,
 * cuBLAS, and its functions are those of cublas.cpp.
 */

#ifndef T_SHIM_LIBRARY_H
#define T_SHIM_LIBRARY_H

/* before the names are taken */
#include <dlfcn.h>

void *shim_dlopen(const char *name, int flags);
void *shim_dlsym(void *library, const char *name);
int shim_dlclose(void *library);
char *shim_dlerror(void);

#define dlopen shim_dlopen
#define dlsym shim_dlsym
#define dlclose shim_dlclose
#define dlerror shim_dlerror

#endif
