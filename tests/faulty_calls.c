/* Makes one of the calls that reach the files below a directory fail: for LD_PRELOAD.
 *
 * Arrays of checkpoints are read and written in C++, which no patch in Python reaches. Calls are counted
 * between faults_watch and faults_stop; the n-th of the wanted kinds fails, or it and all after it.
 *
 *     gcc -shared -fPIC -O1 -o faulty_calls.so faulty_calls.c -ldl
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, NAME = 16, LOOK = 32 };
enum { ERRNO = 0, SHORT = 1, ENDED = 2 };

#define MOST 65536
static char below[4096], hit[256];
static atomic_int active, handles[MOST];
static atomic_long count;
static long target;
static int wanted, number, how, lasting;

void faults_watch(const char *directory, long n, int kinds, int error, int mode, int all_after) {
    snprintf(below, sizeof below, "%s", directory);
    hit[0] = 0;
    target = n, wanted = kinds, number = error, how = mode, lasting = all_after;
    atomic_store(&count, 0);
    atomic_store(&active, 1);
}

long faults_stop(void) {
    atomic_store(&active, 0);
    return atomic_load(&count);
}

const char *faults_hit(void) { return hit; }

static int handle_here(int fd) { return fd >= 0 && fd < MOST && atomic_load(&handles[fd]); }

static int path_here(int folder, const char *path) {
    if (!path) return 0;
    if (path[0] == '/') return !strncmp(path, below, strlen(below));
    return handle_here(folder);
}

/* Whether this call is the one that fails. */
static int fails(int kind, int here, const char *call, const char *path) {
    if (!here || !atomic_load(&active) || !(kind & wanted)) return 0;
    long n = atomic_fetch_add(&count, 1) + 1;
    if (!target || n < target || (n > target && !lasting)) return 0;
    if (n == target) snprintf(hit, sizeof hit, "%s %s", call, path ? path : "");
    if (how == ERRNO) errno = number;
    return 1;
}

#define NEXT(result, name, ...)                                   \
    static result (*next)(__VA_ARGS__);                           \
    if (!next) next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define MODE(flags, last)                          \
    int mode = 0;                                  \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {       \
        va_list more;                              \
        va_start(more, last);                      \
        mode = va_arg(more, int);                  \
        va_end(more);                              \
    }

static int opened(int fd, int here) {
    if (fd >= 0 && fd < MOST) atomic_store(&handles[fd], here && atomic_load(&active));
    return fd;
}

#define OPENS(name)                                                   \
    int name(const char *path, int flags, ...) {                      \
        NEXT(int, name, const char *, int, ...);                      \
        MODE(flags, flags)                                            \
        int here = path_here(AT_FDCWD, path);                         \
        if (fails(OPEN, here, #name, path)) return -1;                \
        return opened(next(path, flags, mode), here);                 \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                \
    int name(int folder, const char *path, int flags, ...) {          \
        NEXT(int, name, int, const char *, int, ...);                 \
        MODE(flags, flags)                                            \
        int here = path_here(folder, path);                           \
        if (fails(OPEN, here, #name, path)) return -1;                \
        return opened(next(folder, path, flags, mode), here);         \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

DIR *opendir(const char *path) {
    NEXT(DIR *, opendir, const char *);
    return fails(OPEN, path_here(AT_FDCWD, path), "opendir", path) ? NULL : next(path);
}

int close(int fd) {
    NEXT(int, close, int);
    if (fd >= 0 && fd < MOST) atomic_store(&handles[fd], 0);
    return next(fd);
}

/* A short answer is a part of what was asked for; one that has ended says that the file does. */
static size_t part(size_t size) { return how == ENDED ? 0 : (size + 1) / 2; }

#define READS(name, parameters, arguments, types, kind, size)                     \
    ssize_t name parameters {                                                     \
        NEXT(ssize_t, name, types);                                               \
        if (fails(kind, handle_here(fd), #name, NULL)) {                          \
            if (how == ERRNO) return -1;                                          \
            if (!(size = part(size))) return 0;                                   \
        }                                                                         \
        return next arguments;                                                    \
    }
#define C ,
READS(read, (int fd, void *to, size_t size), (fd, to, size), int C void * C size_t, READ, size)
READS(pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at), int C void * C size_t C off_t, READ, size)
READS(pread64, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at), int C void * C size_t C off64_t, READ, size)
READS(write, (int fd, const void *of, size_t size), (fd, of, size), int C const void * C size_t, WRITE, size)
READS(pwrite, (int fd, const void *of, size_t size, off_t at), (fd, of, size, at), int C const void * C size_t C off_t, WRITE, size)
READS(pwrite64, (int fd, const void *of, size_t size, off64_t at), (fd, of, size, at), int C const void * C size_t C off64_t, WRITE, size)
READS(readv, (int fd, const struct iovec *to, int size), (fd, to, size), int C const struct iovec * C int, READ, size)
READS(writev, (int fd, const struct iovec *of, int size), (fd, of, size), int C const struct iovec * C int, WRITE, size)
READS(preadv, (int fd, const struct iovec *to, int size, off_t at), (fd, to, size, at), int C const struct iovec * C int C off_t, READ, size)
READS(pwritev, (int fd, const struct iovec *of, int size, off_t at), (fd, of, size, at), int C const struct iovec * C int C off_t, WRITE, size)
READS(preadv64, (int fd, const struct iovec *to, int size, off64_t at), (fd, to, size, at), int C const struct iovec * C int C off64_t, READ, size)
READS(pwritev64, (int fd, const struct iovec *of, int size, off64_t at), (fd, of, size, at), int C const struct iovec * C int C off64_t, WRITE, size)

#define OF_HANDLE(name, kind)                                                  \
    int name(int fd) {                                                         \
        NEXT(int, name, int);                                                  \
        return fails(kind, handle_here(fd), #name, NULL) ? -1 : next(fd);      \
    }
OF_HANDLE(fsync, SYNC)
OF_HANDLE(fdatasync, SYNC)

#define OF_PATH(name, kind, folder, parameters, arguments, types)                               \
    int name parameters {                                                                       \
        NEXT(int, name, types);                                                                 \
        return fails(kind, path_here(folder, path), #name, path) ? -1 : next arguments;         \
    }
OF_PATH(rename, NAME, AT_FDCWD, (const char *path, const char *to), (path, to), const char * C const char *)
OF_PATH(renameat, NAME, at, (int at, const char *path, int there, const char *to), (at, path, there, to), int C const char * C int C const char *)
OF_PATH(renameat2, NAME, at, (int at, const char *path, int there, const char *to, unsigned flags), (at, path, there, to, flags), int C const char * C int C const char * C unsigned)
OF_PATH(mkdir, NAME, AT_FDCWD, (const char *path, mode_t mode), (path, mode), const char * C mode_t)
OF_PATH(mkdirat, NAME, at, (int at, const char *path, mode_t mode), (at, path, mode), int C const char * C mode_t)
OF_PATH(rmdir, NAME, AT_FDCWD, (const char *path), (path), const char *)
OF_PATH(unlink, NAME, AT_FDCWD, (const char *path), (path), const char *)
OF_PATH(unlinkat, NAME, at, (int at, const char *path, int flags), (at, path, flags), int C const char * C int)
OF_PATH(stat, LOOK, AT_FDCWD, (const char *path, struct stat *to), (path, to), const char * C struct stat *)
OF_PATH(lstat, LOOK, AT_FDCWD, (const char *path, struct stat *to), (path, to), const char * C struct stat *)
OF_PATH(fstatat, LOOK, at, (int at, const char *path, struct stat *to, int flags), (at, path, to, flags), int C const char * C struct stat * C int)
OF_PATH(stat64, LOOK, AT_FDCWD, (const char *path, struct stat64 *to), (path, to), const char * C struct stat64 *)
OF_PATH(lstat64, LOOK, AT_FDCWD, (const char *path, struct stat64 *to), (path, to), const char * C struct stat64 *)
OF_PATH(fstatat64, LOOK, at, (int at, const char *path, struct stat64 *to, int flags), (at, path, to, flags), int C const char * C struct stat64 * C int)
OF_PATH(access, LOOK, AT_FDCWD, (const char *path, int mode), (path, mode), const char * C int)
OF_PATH(truncate, WRITE, AT_FDCWD, (const char *path, off_t size), (path, size), const char * C off_t)

#define OF_STAT(name, form)                                                                    \
    int name(int fd, struct form *to) {                                                        \
        NEXT(int, name, int, struct form *);                                                   \
        return fails(LOOK, handle_here(fd), #name, NULL) ? -1 : next(fd, to);                  \
    }
OF_STAT(fstat, stat)
OF_STAT(fstat64, stat64)
OF_PATH(__xstat64, LOOK, AT_FDCWD, (int version, const char *path, struct stat64 *to), (version, path, to), int C const char * C struct stat64 *)
OF_PATH(__lxstat64, LOOK, AT_FDCWD, (int version, const char *path, struct stat64 *to), (version, path, to), int C const char * C struct stat64 *)
OF_PATH(__xstat, LOOK, AT_FDCWD, (int version, const char *path, struct stat *to), (version, path, to), int C const char * C struct stat *)
OF_PATH(__lxstat, LOOK, AT_FDCWD, (int version, const char *path, struct stat *to), (version, path, to), int C const char * C struct stat *)

#define OF_OLD_STAT(name, form)                                                                \
    int name(int version, int fd, struct form *to) {                                           \
        NEXT(int, name, int, int, struct form *);                                              \
        return fails(LOOK, handle_here(fd), #name, NULL) ? -1 : next(version, fd, to);         \
    }
OF_OLD_STAT(__fxstat, stat)
OF_OLD_STAT(__fxstat64, stat64)
