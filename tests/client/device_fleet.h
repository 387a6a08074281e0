#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tests/client/device_producer.h"
#include "tests/client/device_worker.h"

namespace rekindle::client::testing {

// An agent whose device process follows a script.
class Fleet {
 public:
  Fleet(const FakeModel& model, ProducerScript script, std::vector<TensorBox> boxes = {})
      : server_([this, &model, script, boxes](AgentEnd& agent) {
          proto::AgentFrame frame = attached_for(agent, model, true, boxes);
          frame.mutable_attached()->set_device_channel(true);
          producer_.emplace(model, frame, script);
          std::vector<UniqueFd> descriptors = model.segments();
          descriptors.push_back(producer_->take_worker_end());
          agent.send(frame, std::move(descriptors));
          agent.until_closed();
        }),
        agent_(connect_to(server_.store())) {}

  const Agent& agent() const { return agent_; }
  // After the attach.
  DeviceProducer& producer() { return *producer_; }

 private:
  std::optional<DeviceProducer> producer_;
  ScriptedAgent server_;
  const Agent agent_;
};

// A worker that has attached to such an agent.
struct DeviceWorker {
  explicit DeviceWorker(ProducerScript script)
      : fleet(model, script), session(attach_device(fleet.agent())) {}
  DeviceProducer& producer() { return fleet.producer(); }

  const FakeModel model;
  Fleet fleet;
  Session session;
};

// The worker's own parameters in device memory, which is host memory on a double.
struct Parameters {
  explicit Parameters(const Session& session) : tensors(tensors_of(session)) {
    for (const rk_tensor& tensor : tensors) memory.emplace_back(tensor.bytes + 1, '\x5a');
  }
  std::vector<rk_target> targets() {
    std::vector<rk_target> all;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      all.push_back({tensors[i].name, tensors[i].offset, memory[i].data(), tensors[i].bytes});
    }
    return all;
  }
  void expect_loaded(const FakeModel& model) const {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(memory[i].back(), '\x5a') << tensors[i].name << ": beyond its end";
      EXPECT_TRUE(std::string_view(memory[i]).substr(0, tensors[i].bytes) ==
                  model.bytes_of(tensors[i].name, box_of(tensors[i])))
          << tensors[i].name;
    }
  }

  std::vector<rk_tensor> tensors;
  std::vector<std::string> memory;
};

struct Outcome {
  std::int32_t code = RK_OK;
  std::string message;
};
// Of a function of the library, which gets the place of its error.
template <typename Call>
Outcome outcome_of(Call call) {
  rk_error error{};
  const std::int32_t code = call(&error);
  return {code, error.message};
}
inline Outcome load_into(const Session& session, const std::vector<rk_target>& targets,
                         std::int64_t timeout_ms = kPatienceMs) {
  return outcome_of([&](rk_error* error) {
    return rk_load_into(session.handle, targets.data(), targets.size(), timeout_ms, error);
  });
}
// Loads everything that has not been taken yet.
inline void expect_loads(const Session& session, const FakeModel& model) {
  Parameters own(session);
  EXPECT_EQ(load_into(session, own.targets()).message, "");
  own.expect_loaded(model);
}

}  // namespace rekindle::client::testing
