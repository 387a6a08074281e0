#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/base/ids.h"
#include "tests/support/process.h"
#include "transport/path.h"

namespace rekindle::transport::testing {

// A real process that serves one TestSegment (tests/transport/serve_main.cc).
class SourceUnderTest {
 public:
  explicit SourceUnderTest(std::string kind, std::uint64_t size, std::string port = {},
                           std::vector<std::pair<int, rlimit>> limits = {});

  rekindle::testing::Process& process() { return *process_; }
  void freeze();  // SIGSTOP, and until every thread has stopped
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
