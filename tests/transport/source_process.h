#pragma once

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/base/ids.h"
#include "tests/support/process.h"
#include "tests/transport/transport_fixture.h"
#include "transport/path.h"

namespace rekindle::transport::testing {

// A real process that serves one TestSegment (tests/transport/serve_main.cc).
class SourceUnderTest {
 public:
  explicit SourceUnderTest(std::string kind, std::uint64_t size, std::string port = {},
                           std::vector<std::pair<int, rlimit>> limits = {})
      : token_(SessionToken::random()), incarnation_(Incarnation::random()) {
    rekindle::testing::Spawn spawn;
    spawn.argv = {REKINDLE_TEST_SERVE, kind, std::to_string(size), token_.hex(),
                  incarnation_.hex()};
    if (!port.empty()) spawn.argv.push_back(std::move(port));
    spawn.limits = std::move(limits);
    process_ = std::make_unique<rekindle::testing::Process>(std::move(spawn));
    const std::string endpoint = process_->value_after("endpoint ");
    const std::string region = process_->value_after("region ");
    if (endpoint.empty() ||
        std::sscanf(region.c_str(), "%u %u", &key_.region, &key_.generation) != 2) {
      ADD_FAILURE() << "the source did not start: " << process_->err();
    }
    target_ = {std::move(kind), endpoint, token_, incarnation_};
  }

  rekindle::testing::Process& process() { return *process_; }
  // SIGSTOP, and until every thread has stopped.
  void freeze() {
    process_->signal(SIGSTOP);
    EXPECT_TRUE(eventually([&] {
      const std::filesystem::path tasks = fmt::format("/proc/{}/task", process_->pid());
      for (const auto& task : std::filesystem::directory_iterator(tasks)) {
        const std::string stat = rekindle::testing::read_file(task.path() / "stat");
        const auto name_end = stat.rfind(')');
        if (name_end == std::string::npos || stat.substr(name_end + 2, 1) != "T") return false;
      }
      return true;
    }));
  }
  const PathTarget& target() const { return target_; }
  RegionKey key() const { return key_; }
  std::string port() const { return target_.endpoint.substr(target_.endpoint.rfind(':') + 1); }

 private:
  const SessionToken token_;
  const Incarnation incarnation_;
  std::unique_ptr<rekindle::testing::Process> process_;
  PathTarget target_;
  RegionKey key_;
};

}  // namespace rekindle::transport::testing
