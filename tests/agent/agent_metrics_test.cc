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

}  // namespace
}  // namespace rekindle::agent
