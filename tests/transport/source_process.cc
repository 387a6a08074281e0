#include "tests/transport/source_process.h"

#include <csignal>
#include <cstdio>
#include <filesystem>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace rekindle::transport::testing {

namespace {

bool all_threads_stopped(pid_t pid) {
  const std::filesystem::path tasks = fmt::format("/proc/{}/task", pid);
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    const std::string stat = rekindle::testing::read_file(task.path() / "stat");
    const auto name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.substr(name_end + 2, 1) != "T") return false;
  }
  return true;
}

}  // namespace

SourceUnderTest::SourceUnderTest(std::string kind, std::uint64_t size, std::string port,
                                 std::vector<std::pair<int, rlimit>> limits)
    : token_(SessionToken::random()), incarnation_(Incarnation::random()) {
  rekindle::testing::Spawn spawn;
  spawn.argv = {REKINDLE_TEST_SERVE, kind, std::to_string(size), token_.hex(), incarnation_.hex()};
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

void SourceUnderTest::freeze() {
  process_->signal(SIGSTOP);
  EXPECT_TRUE(rekindle::testing::eventually([&] { return all_threads_stopped(process_->pid()); }));
}

}  // namespace rekindle::transport::testing
