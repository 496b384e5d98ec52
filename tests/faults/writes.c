/* Preloaded into a process: counts the calls that change files below FAULT_ROOTS and kills the process at call FAULT_AT.

   Without FAULT_AT it only counts: each call's name and path go to FAULT_LOG, a line each. The environment is read
   in every new process once FAULT_ROOTS is in it, so that a fork can be given a number of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pid_t known_pid;
static long kill_at;
static long count;
static char roots[4][PATH_MAX];
static char log_path[PATH_MAX];

static void look(void) {
  if (known_pid == getpid() && roots[0][0]) return;
  known_pid = getpid();
  count = kill_at = 0;
  memset(roots, 0, sizeof roots);
  log_path[0] = 0;
  const char *at = getenv("FAULT_AT"), *below = getenv("FAULT_ROOTS"), *log = getenv("FAULT_LOG");
  if (at) kill_at = atol(at);
  if (log) snprintf(log_path, sizeof log_path, "%s", log);
  for (int i = 0; below && *below && i < 4; i++) {
    const char *end = strchrnul(below, ':');
    snprintf(roots[i], sizeof roots[i], "%.*s", (int)(end - below), below);
    below = *end ? end + 1 : end;
  }
}

static int below_roots(const char *path) {
  for (int i = 0; i < 4 && roots[i][0]; i++)
    if (strncmp(path, roots[i], strlen(roots[i])) == 0) return 1;
  return 0;
}

static void seen(const char *name, const char *path) {
  if (!below_roots(path)) return;
  long number = __sync_add_and_fetch(&count, 1);
  if (log_path[0]) {
    int fd = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    if (fd >= 0) {
      syscall(SYS_write, fd, line, length);
      syscall(SYS_close, fd);
    }
  }
  if (kill_at && number == kill_at) syscall(SYS_kill, getpid(), SIGKILL);
}

/* Relative names are below the working folder or below a descriptor. */
static void seen_at(const char *name, int dirfd, const char *path) {
  char full[2 * PATH_MAX], base[PATH_MAX] = "";
  look();
  if (!path || !roots[0][0]) return;
  if (path[0] == '/') {
    seen(name, path);
    return;
  }
  if (dirfd == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) return;
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    ssize_t length = readlink(link, base, sizeof base - 1);
    if (length < 0) return;
    base[length] = 0;
  }
  snprintf(full, sizeof full, "%s/%s", base, path);
  seen(name, full);
}

static void seen_fd(const char *name, int fd) {
  look();
  if (!roots[0][0]) return;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return;
  path[length] = 0;
  seen(name, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name)                                                                                                  \
  int name(const char *path, int flags, ...) {                                                                       \
    va_list rest;                                                                                                    \
    va_start(rest, flags);                                                                                           \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;                                        \
    va_end(rest);                                                                                                    \
    if (flags & (O_CREAT | O_TRUNC)) seen_at("open", AT_FDCWD, path);                                                \
    return REAL(name)(path, flags, mode);                                                                            \
  }
#define OPENS_AT(name)                                                                                               \
  int name(int dirfd, const char *path, int flags, ...) {                                                            \
    va_list rest;                                                                                                    \
    va_start(rest, flags);                                                                                           \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;                                        \
    va_end(rest);                                                                                                    \
    if (flags & (O_CREAT | O_TRUNC)) seen_at("open", dirfd, path);                                                   \
    return REAL(name)(dirfd, path, flags, mode);                                                                     \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int fd, const void *data, size_t size) { seen_fd("write", fd); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { seen_fd("pwrite", fd); return REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { seen_fd("pwrite", fd); return REAL(pwrite64)(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int number) { seen_fd("writev", fd); return REAL(writev)(fd, parts, number); }
int ftruncate(int fd, off_t size) { seen_fd("ftruncate", fd); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { seen_fd("ftruncate", fd); return REAL(ftruncate64)(fd, size); }
int fsync(int fd) { seen_fd("fsync", fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { seen_fd("fsync", fd); return REAL(fdatasync)(fd); }
int rename(const char *from, const char *to) { seen_at("rename", AT_FDCWD, to); return REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { seen_at("rename", b, to); return REAL(renameat)(a, from, b, to); }
int mkdir(const char *path, mode_t mode) { seen_at("mkdir", AT_FDCWD, path); return REAL(mkdir)(path, mode); }
int mkdirat(int fd, const char *path, mode_t mode) { seen_at("mkdir", fd, path); return REAL(mkdirat)(fd, path, mode); }
int unlink(const char *path) { seen_at("unlink", AT_FDCWD, path); return REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) { seen_at("unlink", fd, path); return REAL(unlinkat)(fd, path, flags); }
int rmdir(const char *path) { seen_at("rmdir", AT_FDCWD, path); return REAL(rmdir)(path); }
int symlink(const char *to, const char *path) { seen_at("symlink", AT_FDCWD, path); return REAL(symlink)(to, path); }
int link(const char *from, const char *path) { seen_at("link", AT_FDCWD, path); return REAL(link)(from, path); }
