#include "recovery/agent/agent_metrics.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::agent {
namespace {

using ::testing::HasSubstr;

TEST(AgentMetrics, MemoryWindowsAreThoseOfAllDevices) {
  AgentFigures figures;
  figures.windows = {.in_use = 3, .limit = 64, .bound = 10, .invalidated = 6, .refused = 1};
  metrics::Metrics metrics;
  const auto added = metrics.add([&](metrics::Readings& readings) {
    read_agent(proto::AgentStatusResponse(), figures, readings);
  });
  const std::string text = metrics.text();
  for (const char* line :
       {"rekindle_memory_windows 3", "rekindle_memory_windows_limit 64",
        "rekindle_memory_windows_bound_total 10", "rekindle_memory_windows_invalidated_total 6",
        "rekindle_memory_windows_refused_total 1"}) {
    EXPECT_THAT(text, HasSubstr("\n" + std::string(line) + "\n"));
  }
}

TEST(AgentMetrics, MemoryOfResidentCopiesIsUsedOrWaits) {
  proto::AgentStatusResponse status;
  for (const auto& [bytes, users] : {std::pair(10u, 1u), {20u, 0u}, {300u, 0u}}) {
    status.add_residents()->set_bytes(bytes);
    status.mutable_residents()->rbegin()->set_users(users);
  }
  metrics::Metrics metrics;
  const auto added = metrics.add(
      [&](metrics::Readings& readings) { read_agent(status, AgentFigures(), readings); });
  const std::string text = metrics.text();
  EXPECT_THAT(text, HasSubstr("\nrekindle_resident_bytes{state=\"used\"} 10\n"));
  EXPECT_THAT(text, HasSubstr("\nrekindle_resident_bytes{state=\"waiting\"} 320\n"));
}

}  // namespace
}  // namespace rekindle::agent
