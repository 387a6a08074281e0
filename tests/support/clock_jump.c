/* LD_PRELOAD: the wall clock is an hour ahead in every other half second; no other clock is
 * touched. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <time.h>

enum { kHour = 3600, kHalfSecond = 500 * 1000 * 1000 };

static void jump(struct timespec* now) {
  if (now->tv_nsec >= kHalfSecond) now->tv_sec += kHour;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  const long result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) jump(now);
  return (int)result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* result) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return (time_t)-1;
  if (result != NULL) *result = exact.tv_sec;
  return exact.tv_sec;
}
