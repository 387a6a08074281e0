/* A worker in C: attaches to qwen3 at the store argv[1], takes in every tensor, prints a line for
 * each, serves until it is killed. Also shows that rekindle.h is C. */
#include <inttypes.h>
#include <rekindle.h>
#include <stdio.h>
#include <string.h>

static int failed(const char* what, const rk_error* error) {
  fprintf(stderr, "%s: %s: %s\n", what, rk_code_name(error->code), error->message);
  return 1;
}

static uint64_t sum_of(const rk_tensor* tensor) {
  const unsigned char* bytes = tensor->data;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < tensor->bytes; ++i) sum += bytes[i];
  return sum;
}

static int load(rk_session* session) {
  rk_error error;
  const rk_tensor* tensors = NULL;
  size_t count = 0;
  int32_t code;
  while ((code = rk_next(session, 20000, &tensors, &count, &error)) == RK_OK && count > 0) {
    for (size_t i = 0; i < count; ++i) {
      printf("tensor %s %s %" PRIu64 " sum=%" PRIu64 "\n", tensors[i].name, tensors[i].dtype,
             tensors[i].bytes, sum_of(&tensors[i]));
    }
  }
  if (code != RK_OK) return failed("next", &error);
  if (rk_loaded(session, &error) != RK_OK) return failed("loaded", &error);
  if (rk_wait_commit(session, 20000, &error) != RK_OK) return failed("commit", &error);
  return 0;
}

int main(int argc, char** argv) {
  rk_connect_options where;
  rk_attach_options what;
  rk_agent* agent = NULL;
  rk_session* session = NULL;
  rk_error error;
  uint64_t version = 0;
  int32_t code;
  if (argc != 2 || rk_api_version() != RK_API_VERSION) return 2;
  memset(&where, 0, sizeof where);
  where.size = sizeof where;
  where.store = argv[1];
  if (rk_connect(&where, &agent, &error) != RK_OK) return failed("connect", &error);
  memset(&what, 0, sizeof what);
  what.size = sizeof what;
  what.model = "qwen3";
  if (rk_attach(agent, &what, &session, &error) != RK_OK) return failed("attach", &error);
  if (load(session) != 0) return 1;
  printf("serving\n");
  fflush(stdout);
  code = rk_wait_update(session, 20000, &version, &error);
  if (code != RK_OK) return failed("update", &error);
  printf("newer %" PRIu64 "\n", version);
  rk_detach(session);
  rk_disconnect(agent);
  return 0;
}
