/* LD_PRELOAD: records what happens to the files below one directory, so that disk_model.py can say
 * what a disk may hold if the power fails at any moment.
 *
 *   REKINDLE_TEST_DISK        the directory, an absolute path without links
 *   REKINDLE_TEST_DISK_TRACE  a directory for the record: `trace`, one operation a line; `lock`;
 *                             and a file of bytes for each content that a file was seen to have
 *   REKINDLE_TEST_DISK_TICK   looks at the contents every so many milliseconds, too
 *
 * An operation and its line are one step for all processes that share the record: both happen under
 * the lock. Bytes are not taken from the arguments of write() and its kin, which would miss
 * mappings, clones and copies. Instead every file that was opened for writing is watched: before
 * each operation on a name, and before each sync, the files that have changed are copied into the
 * record.
 *
 * A sync is recorded with the chain of callers in the program, and not handed to the disk: the
 * disk's answer is not what is tested here. */
#undef _FILE_OFFSET_BITS /* open and open64 are two symbols here */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kPath = 4096, kFrames = 24, kChunk = 1 << 16 };

struct watched {
  dev_t dev;
  ino_t ino;
  int fd;
  uint64_t hash;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[kPath];
static size_t root_length;
static char trace_directory[kPath];
static int trace_fd = -1;
static int lock_fd = -1;
static struct watched* watches;
static size_t watch_count;
static unsigned long content_count;

#define REAL(result, name, ...)                 \
  static result (*real)(__VA_ARGS__);           \
  if (real == NULL) {                           \
    void* const found = dlsym(RTLD_NEXT, name); \
    memcpy(&real, &found, sizeof real);         \
  }

static void give_up(const char* what) {
  dprintf(2, "disk_recorder: %s: %s\n", what, strerror(errno));
  abort();
}

static int real_open(const char* path, int flags, mode_t mode) {
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* The absolute path without "." and ".."; false when it is not below the directory. */
static int resolve(int at, const char* path, char* out) {
  char joined[2 * kPath];
  if (root_length == 0 || path == NULL) return 0;
  if (path[0] == '/') {
    snprintf(joined, sizeof joined, "%s", path);
  } else {
    char base[kPath];
    if (at == AT_FDCWD) {
      if (getcwd(base, sizeof base) == NULL) return 0;
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", at);
      const ssize_t length = readlink(link, base, sizeof base - 1);
      if (length <= 0) return 0;
      base[length] = '\0';
    }
    snprintf(joined, sizeof joined, "%s/%s", base, path);
  }
  size_t length = 0;
  for (const char* from = joined; *from != '\0';) {
    while (*from == '/') ++from;
    const size_t part = strcspn(from, "/");
    if (part == 0) break;
    if (part == 1 && from[0] == '.') {
    } else if (part == 2 && from[0] == '.' && from[1] == '.') {
      while (length > 0 && out[--length] != '/') {
      }
    } else {
      if (length + part + 2 > kPath) return 0;
      out[length++] = '/';
      memcpy(out + length, from, part);
      length += part;
    }
    from += part;
  }
  out[length] = '\0';
  return strncmp(out, root, root_length) == 0 &&
         (out[root_length] == '/' || out[root_length] == '\0');
}

/* Below the directory, which is cut off. */
static const char* relative(const char* path) {
  return path[root_length] == '\0' ? "." : path + root_length + 1;
}

static void lock_trace(void) {
  pthread_mutex_lock(&mutex);
  if (flock(lock_fd, LOCK_EX) != 0) give_up("lock");
}

static void unlock_trace(void) {
  const int kept = errno;
  flock(lock_fd, LOCK_UN);
  pthread_mutex_unlock(&mutex);
  errno = kept;
}

__attribute__((format(printf, 1, 2))) static void record(const char* format, ...) {
  char line[4 * kPath];
  const int head = snprintf(line, sizeof line, "%d\t", (int)getpid());
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line + head, sizeof line - (size_t)head - 1, format, arguments);
  va_end(arguments);
  if (length < 0 || (size_t)(length + head) >= sizeof line - 1) give_up("a line is too long");
  length += head;
  line[length++] = '\n';
  if (write(trace_fd, line, (size_t)length) != length) give_up("write the trace");
}

static uint64_t hash_bytes(uint64_t hash, const unsigned char* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  for (; size > 0; ++bytes, --size) hash = (hash ^ *bytes) * 0x100000001B3u;
  return hash;
}

static uint64_t hash_file(int fd) {
  static unsigned char chunk[kChunk];
  uint64_t hash = 14695981039346656037u;
  off_t offset = 0;
  for (;;) {
    const ssize_t got = pread(fd, chunk, sizeof chunk, offset);
    if (got <= 0) break;
    hash = hash_bytes(hash, chunk, (size_t)got);
    offset += got;
  }
  return hash ^ (uint64_t)offset;
}

/* Copies what the file holds now into the record. */
static void record_content(const struct watched* file) {
  static unsigned char chunk[kChunk];
  char path[kPath + 64];
  snprintf(path, sizeof path, "%s/%d.%lu", trace_directory, (int)getpid(), ++content_count);
  const int fd = real_open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) give_up(path);
  off_t offset = 0;
  for (;;) {
    const ssize_t got = pread(file->fd, chunk, sizeof chunk, offset);
    if (got <= 0) break;
    if (syscall(SYS_write, fd, chunk, (size_t)got) != got) give_up(path);
    offset += got;
  }
  close(fd);
  record("content\t%lu\t%d.%lu", (unsigned long)file->ino, (int)getpid(), content_count);
}

static void look(struct watched* file, int always) {
  const uint64_t hash = hash_file(file->fd);
  if (!always && hash == file->hash) return;
  file->hash = hash;
  record_content(file);
}

static void look_at_all(void) {
  for (size_t i = 0; i < watch_count;) {
    struct stat status;
    if (fstat(watches[i].fd, &status) != 0 || status.st_nlink == 0) {
      close(watches[i].fd);
      watches[i] = watches[--watch_count];
      continue;
    }
    look(&watches[i++], 0);
  }
}

static void watch(const char* path) {
  struct stat status;
  const int fd = real_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd < 0 || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    if (fd >= 0) close(fd);
    return;
  }
  for (size_t i = 0; i < watch_count; ++i) {
    if (watches[i].ino != status.st_ino || watches[i].dev != status.st_dev) continue;
    close(fd);
    look(&watches[i], 0);
    return;
  }
  watches = realloc(watches, (watch_count + 1) * sizeof *watches);
  if (watches == NULL) give_up("watch");
  watches[watch_count] = (struct watched){status.st_dev, status.st_ino, fd, 0};
  look(&watches[watch_count++], 1);
}

static void* tick(void* milliseconds) {
  const long pause = (long)(intptr_t)milliseconds;
  const struct timespec wait = {pause / 1000, pause % 1000 * 1000000};
  for (;;) {
    nanosleep(&wait, NULL);
    lock_trace();
    look_at_all();
    unlock_trace();
  }
  return NULL;
}

__attribute__((constructor)) static void begin(void) {
  const char* const directory = getenv("REKINDLE_TEST_DISK");
  const char* const trace = getenv("REKINDLE_TEST_DISK_TRACE");
  const char* const pause = getenv("REKINDLE_TEST_DISK_TICK");
  char path[kPath + 16];
  void* frames[4];
  if (directory == NULL || trace == NULL) return;
  (void)backtrace(frames, 4); /* loads what it needs, now and not inside of an operation */
  snprintf(trace_directory, sizeof trace_directory, "%s", trace);
  snprintf(path, sizeof path, "%s/trace", trace);
  trace_fd = real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  snprintf(path, sizeof path, "%s/lock", trace);
  lock_fd = real_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (trace_fd < 0 || lock_fd < 0) give_up(path);
  snprintf(root, sizeof root, "%s", directory);
  root_length = strlen(root);
  if (pause != NULL && atol(pause) > 0) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, tick, (void*)(intptr_t)atol(pause)) != 0) give_up("tick");
    pthread_detach(thread);
  }
}

__attribute__((destructor)) static void end(void) {
  if (root_length == 0) return;
  lock_trace();
  look_at_all();
  unlock_trace();
}

/* The chain of callers in the program, innermost first, as addresses that addr2line takes. */
static void describe_callers(char* out, size_t size) {
  void* frames[kFrames];
  const int count = backtrace(frames, kFrames);
  size_t length = 0;
  int found = 0;
  out[0] = '\0';
  for (int i = 1; i < count && found < 6; ++i) {
    struct link_map* map = NULL;
    Dl_info info;
    if (dladdr1(frames[i], &info, (void**)&map, RTLD_DL_LINKMAP) == 0) continue;
    if (map == NULL || map->l_name[0] != '\0') continue;
    const int put = snprintf(out + length, size - length, "%s%lx", found > 0 ? "," : "",
                             (unsigned long)((uintptr_t)frames[i] - map->l_addr - 1));
    if (put < 0 || (size_t)put >= size - length) break;
    length += (size_t)put;
    ++found;
  }
}

static int path_of(int fd, char* out) {
  char link[64];
  char path[kPath];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  return resolve(AT_FDCWD, path, out);
}

/* True when the sync was one of ours and is recorded. */
static int synced(int fd) {
  char path[kPath];
  char callers[512];
  struct stat status;
  if (root_length == 0 || fstat(fd, &status) != 0 || !path_of(fd, path)) return 0;
  describe_callers(callers, sizeof callers);
  lock_trace();
  look_at_all();
  record("%s\t%lu\t%s\t%s", S_ISDIR(status.st_mode) ? "syncdir" : "sync",
         (unsigned long)status.st_ino, relative(path), callers);
  unlock_trace();
  return 1;
}

/* What this recorder cannot tell the effect of. The harness refuses such a record. */
static void unsupported(const char* what) {
  if (root_length == 0) return;
  lock_trace();
  record("unsupported\t%s", what);
  unlock_trace();
}

static int open_recorded(int at, const char* path, int flags, mode_t mode) {
  char full[kPath];
  const int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0;
  if (root_length == 0 || !writes || !resolve(at, path, full)) {
    return (int)syscall(SYS_openat, at, path, flags, mode);
  }
  if ((flags & O_TMPFILE) == O_TMPFILE) unsupported("O_TMPFILE");
  lock_trace();
  look_at_all();
  struct stat before;
  const int was_there = lstat(full, &before) == 0;
  const int fd = (int)syscall(SYS_openat, at, path, flags, mode);
  if (fd >= 0) {
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
      if (!was_there) record("create\t%lu\t%s", (unsigned long)status.st_ino, relative(full));
      watch(full);
    }
  }
  unlock_trace();
  return fd;
}

/* mode_t promotes to int in a variable argument list. */
#define OPEN_MODE(flags, last)                                      \
  mode_t mode = 0;                                                  \
  if (((flags)&O_CREAT) != 0 || ((flags)&O_TMPFILE) == O_TMPFILE) { \
    va_list arguments;                                              \
    va_start(arguments, last);                                      \
    mode = va_arg(arguments, mode_t);                               \
    va_end(arguments);                                              \
  }

int open(const char* path, int flags, ...) {
  OPEN_MODE(flags, flags)
  return open_recorded(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  OPEN_MODE(flags, flags)
  return open_recorded(AT_FDCWD, path, flags, mode);
}
int openat(int at, const char* path, int flags, ...) {
  OPEN_MODE(flags, flags)
  return open_recorded(at, path, flags, mode);
}
int openat64(int at, const char* path, int flags, ...) {
  OPEN_MODE(flags, flags)
  return open_recorded(at, path, flags, mode);
}
int creat(const char* path, mode_t mode) {
  return open_recorded(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char* path, mode_t mode) { return creat(path, mode); }
int __open_2(const char* path, int flags);
int __open_2(const char* path, int flags) { return open_recorded(AT_FDCWD, path, flags, 0); }
int __open64_2(const char* path, int flags);
int __open64_2(const char* path, int flags) { return open_recorded(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char* path, int flags);
int __openat_2(int at, const char* path, int flags) { return open_recorded(at, path, flags, 0); }
int __openat64_2(int at, const char* path, int flags);
int __openat64_2(int at, const char* path, int flags) { return open_recorded(at, path, flags, 0); }

/* C++ streams end here. What fopen would do with the path happens before it. */
static void prepare_stream(const char* path, const char* mode) {
  char full[kPath];
  if (mode[0] == 'r' && strchr(mode, '+') == NULL) return;
  if (!resolve(AT_FDCWD, path, full)) return;
  int flags = O_RDWR | O_CLOEXEC;
  if (mode[0] != 'r') flags |= O_CREAT;
  if (mode[0] == 'w') flags |= O_TRUNC;
  const int fd = open_recorded(AT_FDCWD, path, flags, 0666);
  if (fd >= 0) close(fd);
}
FILE* fopen(const char* restrict path, const char* restrict mode) {
  REAL(FILE*, "fopen", const char*, const char*)
  prepare_stream(path, mode);
  return real(path, mode);
}
FILE* fopen64(const char* restrict path, const char* restrict mode) {
  REAL(FILE*, "fopen64", const char*, const char*)
  prepare_stream(path, mode);
  return real(path, mode);
}

int mkdirat(int at, const char* path, mode_t mode) {
  char full[kPath];
  if (!resolve(at, path, full)) return (int)syscall(SYS_mkdirat, at, path, mode);
  lock_trace();
  look_at_all();
  const int result = (int)syscall(SYS_mkdirat, at, path, mode);
  struct stat status;
  if (result == 0 && stat(full, &status) == 0) {
    record("mkdir\t%lu\t%s", (unsigned long)status.st_ino, relative(full));
  }
  unlock_trace();
  return result;
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int at, const char* path, int flags) {
  char full[kPath];
  if (!resolve(at, path, full)) return (int)syscall(SYS_unlinkat, at, path, flags);
  lock_trace();
  look_at_all();
  const int result = (int)syscall(SYS_unlinkat, at, path, flags);
  if (result == 0) {
    record("%s\t%s", (flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlink", relative(full));
  }
  unlock_trace();
  return result;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  const int result = unlinkat(AT_FDCWD, path, 0);
  return result != 0 && errno == EISDIR ? unlinkat(AT_FDCWD, path, AT_REMOVEDIR) : result;
}

int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  char full_from[kPath];
  char full_to[kPath];
  const int from_here = resolve(from_at, from, full_from);
  const int to_here = resolve(to_at, to, full_to);
  if (!from_here && !to_here) {
    return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
  }
  if (from_here != to_here) unsupported("rename across the border of the disk");
  if ((flags & ~(unsigned)RENAME_NOREPLACE) != 0) unsupported("renameat2 with flags");
  lock_trace();
  look_at_all();
  const int result = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
  if (result == 0 && from_here && to_here) {
    record("rename\t%s\t%s", relative(full_from), relative(full_to));
  }
  unlock_trace();
  return result;
}
int renameat(int from_at, const char* from, int to_at, const char* to) {
  return renameat2(from_at, from, to_at, to, 0);
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_at, const char* from, int to_at, const char* to, int flags) {
  char full[kPath];
  if (!resolve(to_at, to, full)) {
    return (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
  }
  lock_trace();
  look_at_all();
  const int result = (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
  struct stat status;
  if (result == 0 && lstat(full, &status) == 0) {
    record("link\t%lu\t%s", (unsigned long)status.st_ino, relative(full));
    watch(full);
  }
  unlock_trace();
  return result;
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char* target, int at, const char* path) {
  char full[kPath];
  if (resolve(at, path, full)) unsupported("symlink");
  return (int)syscall(SYS_symlinkat, target, at, path);
}
int symlink(const char* target, const char* path) { return symlinkat(target, AT_FDCWD, path); }
int truncate(const char* path, off_t size) {
  char full[kPath];
  if (resolve(AT_FDCWD, path, full)) unsupported("truncate by path");
  return (int)syscall(SYS_truncate, path, size);
}
int truncate64(const char* path, off64_t size) { return truncate(path, size); }

int fsync(int fd) { return synced(fd) ? 0 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return synced(fd) ? 0 : (int)syscall(SYS_fdatasync, fd); }
int syncfs(int fd) {
  unsupported("syncfs");
  return (int)syscall(SYS_syncfs, fd);
}
void sync(void) {
  unsupported("sync");
  (void)syscall(SYS_sync);
}
int msync(void* address, size_t size, int flags) {
  if ((flags & MS_SYNC) != 0) unsupported("msync");
  return (int)syscall(SYS_msync, address, size, flags);
}
