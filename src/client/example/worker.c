/* A complete worker. It attaches to the model that `rekindle run` names, takes in every tensor,
 * serves, and moves on to each new version. A real worker uses the bytes in take_in(): it copies
 * them to its GPU, or builds its model on them.
 *
 *   cc worker.c -lrekindle -o worker
 *   rekindle run --model qwen3 --instance chat -- ./worker
 */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

#include <inttypes.h>
#include <rekindle.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value != NULL && *value != 0 ? value : otherwise;
}

static uint64_t number(const char* name, const char* otherwise) {
  return strtoull(setting(name, otherwise), NULL, 10);
}

/* Reports the error on stderr and exits. `rekindle run` starts the worker again. */
static void give_up(const char* what, const rk_error* error) {
  fprintf(stderr, "worker: %s: %s: %s\n", what, rk_code_name(error->code), error->message);
  exit(1);
}

/* The bytes are already mapped, verified and read-only. A model may use them in place. */
static uint64_t take_in(const rk_tensor* tensor) { return tensor->bytes; }

static void load(rk_session* session) {
  rk_error error;
  rk_session_info info = {.size = sizeof info};
  const rk_tensor* tensors;
  size_t count;
  uint64_t bytes = 0;
  int32_t code;
  const double started = milliseconds();
  while ((code = rk_next(session, 60000, &tensors, &count, &error)) == RK_OK && count > 0) {
    for (size_t i = 0; i < count; ++i) bytes += take_in(&tensors[i]);
  }
  if (code != RK_OK) give_up("cannot load", &error);
  if (rk_loaded(session, &error) != RK_OK) give_up("cannot say that it has loaded", &error);
  /* Another rank that has failed is started again: wait for it. */
  do {
    code = rk_wait_commit(session, 60000, &error);
  } while (code == RK_UNAVAILABLE || code == RK_TIMEOUT);
  if (code != RK_OK) give_up("is not ready", &error);
  if (rk_info(session, &info, &error) != RK_OK) give_up("cannot say what it has", &error);
  printf("ready: %s@%" PRIu64 ", %u entries, %.2f GiB from %s, %.0f ms\n", info.model, info.version,
         info.tensors, (double)bytes / (1 << 30), info.rung, milliseconds() - started);
  fflush(stdout);
}

/* Returns when there is a newer version to follow, or when the session has ended. A real worker
 * answers requests meanwhile. */
static void serve(rk_session* session, int follows) {
  rk_error error;
  uint64_t version;
  int32_t code;
  while (1) {
    code = rk_wait_update(session, 60000, &version, &error);
    if (code == RK_STALE || (code == RK_OK && follows)) return;
    if (code == RK_OK) sleep(1);
    if (code != RK_OK && code != RK_TIMEOUT) give_up("lost its agent", &error);
  }
}

int main(void) {
  rk_error error;
  rk_agent* agent;
  rk_session* session;
  rk_connect_options where = {.size = sizeof where, .store = setting("REKINDLE_STORE", NULL)};
  rk_attach_options what = {.size = sizeof what};
  what.model = setting("REKINDLE_MODEL", NULL);
  what.shard = setting("REKINDLE_SHARD", NULL);
  what.instance = setting("REKINDLE_INSTANCE", NULL);
  what.generation = number("REKINDLE_GENERATION", "0");
  what.rank = (uint32_t)number("REKINDLE_RANK", "0");
  what.world = (uint32_t)number("REKINDLE_WORLD", "1");
  if (what.model == NULL) {
    fprintf(stderr, "worker: start it by: rekindle run --model MODEL -- worker\n");
    return 2;
  }
  if (rk_connect(&where, &agent, &error) != RK_OK) give_up("cannot reach the agent", &error);
  while (1) {
    if (rk_attach(agent, &what, &session, &error) != RK_OK) give_up("cannot attach", &error);
    load(session);
    serve(session, strchr(what.model, '@') == NULL);
    rk_detach(session);
  }
}
