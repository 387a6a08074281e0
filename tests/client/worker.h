#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/client/rekindle.h"
#include "tests/client/scripted_agent.h"

// The worker's side of the tests: the C ABI, with handles that close themselves.
namespace rekindle::client::testing {

inline constexpr std::int64_t kPatienceMs = 20'000;

struct Agent {
  Agent() = default;
  Agent(Agent&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  ~Agent() { rk_disconnect(handle); }
  rk_agent* handle = nullptr;
};
struct Session {
  Session() = default;
  Session(Session&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  ~Session() { rk_detach(handle); }
  rk_session* handle = nullptr;
};

inline Agent connect_to(const std::string& store) {
  Agent agent;
  rk_error error{};
  const rk_connect_options options{sizeof options, store.c_str(), kPatienceMs};
  if (rk_connect(&options, &agent.handle, &error) != RK_OK) ADD_FAILURE() << error.message;
  return agent;
}

inline rk_attach_options attach_options(const char* model = "qwen3@41") {
  rk_attach_options options{};
  options.size = sizeof options;
  options.model = model;
  options.timeout_ms = kPatienceMs;
  return options;
}

inline Session attach_to(const Agent& agent, const rk_attach_options& options = attach_options()) {
  Session session;
  rk_error error{};
  if (rk_attach(agent.handle, &options, &session.handle, &error) != RK_OK) {
    ADD_FAILURE() << error.message;
  }
  return session;
}

struct Batch {
  std::int32_t code = RK_OK;
  std::string message;
  std::vector<rk_tensor> tensors;
};
inline Batch next(const Session& session, std::int64_t timeout_ms = kPatienceMs) {
  const rk_tensor* tensors = nullptr;
  std::size_t count = 0;
  rk_error error{};
  Batch batch;
  batch.code = rk_next(session.handle, timeout_ms, &tensors, &count, &error);
  batch.message = error.message;
  batch.tensors.assign(tensors, tensors + count);
  return batch;
}
// Takes tensors until there are no more. An error fails the test.
inline std::vector<rk_tensor> all_tensors(const Session& session) {
  std::vector<rk_tensor> all;
  while (true) {
    const Batch batch = next(session);
    if (batch.code != RK_OK) ADD_FAILURE() << batch.message;
    if (batch.code != RK_OK || batch.tensors.empty()) return all;
    all.insert(all.end(), batch.tensors.begin(), batch.tensors.end());
  }
}

inline std::string bytes_of(const rk_tensor& tensor) {
  return {static_cast<const char*>(tensor.data), tensor.bytes};
}
inline Box box_of(const rk_tensor& tensor) {
  return {*Dims::from({tensor.offset, tensor.dimensions}),
          *Dims::from({tensor.shape, tensor.dimensions})};
}
inline void expect_bytes(const FakeModel& model, const rk_tensor& tensor) {
  EXPECT_TRUE(bytes_of(tensor) == model.bytes_of(tensor.name, box_of(tensor))) << tensor.name;
}

}  // namespace rekindle::client::testing
