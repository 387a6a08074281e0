#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/worker.h"

// A worker that wants its weights on the double of a GPU.
namespace rekindle::client::testing {

inline constexpr std::uint64_t kBucket = 64u << 10;

inline rk_attach_options device_options(std::uint64_t bucket_bytes = kBucket) {
  rk_attach_options options = attach_options();
  options.device = "double:0";
  options.bucket_bytes = bucket_bytes;
  return options;
}
inline Session attach_device(const Agent& agent, std::uint64_t bucket_bytes = kBucket) {
  return attach_to(agent, device_options(bucket_bytes));
}

inline std::string device_path(const Session& session) {
  rk_session_info info{};
  info.size = sizeof info;
  EXPECT_EQ(rk_info(session.handle, &info, nullptr), RK_OK);
  return info.device_path;
}

inline std::vector<rk_tensor> tensors_of(const Session& session) {
  const rk_tensor* tensors = nullptr;
  std::size_t count = 0;
  EXPECT_EQ(rk_tensors(session.handle, &tensors, &count, nullptr), RK_OK);
  return {tensors, tensors + count};
}

struct Parts {
  std::int32_t code = RK_OK;
  std::string message;
  std::vector<rk_part> parts;
};
inline Parts next_bucket(const Session& session, std::int64_t timeout_ms = kPatienceMs) {
  const rk_part* parts = nullptr;
  std::size_t count = 0;
  rk_error error{};
  Parts out;
  out.code = rk_next_bucket(session.handle, timeout_ms, &parts, &count, &error);
  out.message = error.message;
  out.parts.assign(parts, parts + count);
  return out;
}

// Assembles tensors from their parts.
class Collected {
 public:
  explicit Collected(const Session& session) : session_(session) {
    const rk_tensor* all = nullptr;
    std::size_t count = 0;
    EXPECT_EQ(rk_tensors(session.handle, &all, &count, nullptr), RK_OK);
    tensors_ = {all, count};
    for (const rk_tensor& tensor : tensors_) bytes_.emplace_back(tensor.bytes, '\0');
    taken_.resize(count);
    seen_.resize(count);
  }
  void add(const std::vector<rk_part>& parts) {
    for (const rk_part& part : parts) {
      const auto index = static_cast<std::size_t>(part.tensor - tensors_.data());
      ASSERT_LT(index, tensors_.size());
      ASSERT_LE(part.offset_bytes + part.bytes, part.tensor->bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(part.data) % 256, 0u);
      if (part.bytes > 0) {
        std::memcpy(bytes_[index].data() + part.offset_bytes, part.data, part.bytes);
      }
      taken_[index] += part.bytes;
      ++seen_[index];
    }
  }
  // Takes buckets until there are no more, and returns their number.
  std::size_t add_all() {
    for (std::size_t buckets = 0;; ++buckets) {
      const Parts next = next_bucket(session_);
      EXPECT_EQ(next.code, RK_OK) << next.message;
      if (next.code != RK_OK || next.parts.empty()) return buckets;
      add(next.parts);
    }
  }
  void expect_whole(const FakeModel& model) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      EXPECT_EQ(taken_[i], tensors_[i].bytes) << tensors_[i].name << ": bytes came twice, or never";
      EXPECT_GE(seen_[i], 1u) << tensors_[i].name;
      EXPECT_TRUE(bytes_[i] == model.bytes_of(tensors_[i].name, box_of(tensors_[i])))
          << tensors_[i].name;
    }
  }
  std::size_t parts_of(std::string_view name) const {
    std::size_t parts = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (name == tensors_[i].name) parts += seen_[i];
    }
    return parts;
  }

 private:
  const Session& session_;
  std::span<const rk_tensor> tensors_;
  std::vector<std::string> bytes_;
  std::vector<std::uint64_t> taken_;
  std::vector<std::size_t> seen_;
};

inline void want(proto::AgentFrame& frame, const FakeModel& model, const TensorBox& box) {
  proto::WantedBox& wanted = *frame.mutable_attached()->add_wanted();
  wanted.set_tensor(model.tensors()[box.tensor].name);
  for (const auto value : box.box.offset.span()) wanted.add_offset(value);
  for (const auto value : box.box.extent.span()) wanted.add_extent(value);
}

// Receives the attach, and returns its answer, with all tiles or none, for the script to send.
inline proto::AgentFrame attached_for(AgentEnd& agent, const FakeModel& model, bool ready,
                                      const std::vector<TensorBox>& boxes = {}) {
  agent.hello();
  const auto call = agent.expect(proto::WorkerFrame::kAttach);
  EXPECT_EQ(call.attach().device(), "double:0");
  proto::AgentFrame frame = model.attached(call.call(), kSession, ready);
  for (const TensorBox& box : boxes) want(frame, model, box);
  return frame;
}

}  // namespace rekindle::client::testing
