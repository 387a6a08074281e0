/* A worker for worker_recovery_bench: attaches as the environment says, takes everything in without
 * copying it, and says when main() began and when it may serve (µs of the Unix epoch). */
#include <unistd.h>

#include <rekindle.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long long now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (long long)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void check(int code, const char* what, const rk_error* error) {
  if (code == RK_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, rk_code_name(code), error->message);
  exit(3);
}

int main(void) {
  const long long began = now_us();
  rk_error error;
  rk_connect_options where;
  memset(&where, 0, sizeof where);
  where.size = sizeof where;
  where.store = getenv("REKINDLE_STORE");
  rk_agent* agent = NULL;
  check(rk_connect(&where, &agent, &error), "connect", &error);
  rk_attach_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.model = getenv("REKINDLE_MODEL");
  options.instance = getenv("REKINDLE_INSTANCE");
  options.timeout_ms = 60000;
  rk_session* session = NULL;
  check(rk_attach(agent, &options, &session, &error), "attach", &error);
  const rk_tensor* tensors = NULL;
  size_t count = 0;
  unsigned long long bytes = 0;
  do {
    check(rk_next(session, 60000, &tensors, &count, &error), "next", &error);
    for (size_t i = 0; i < count; ++i) bytes += tensors[i].bytes;
  } while (count > 0);
  check(rk_loaded(session, &error), "loaded", &error);
  check(rk_wait_commit(session, 60000, &error), "commit", &error);
  printf("{\"pid\":%d,\"began\":%lld,\"ready\":%lld,\"bytes\":%llu}\n", (int)getpid(), began,
         now_us(), bytes);
  fflush(stdout);
  for (;;) pause();
}
