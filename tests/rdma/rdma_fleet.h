#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tests/rdma/rails.h"
#include "tests/support/fleet.h"

// Coordinator, agents and pulls as real processes over real verbs: agents use the devices of side
// b, pulls those of side a.
namespace rekindle::testing {

// A command that runs its arguments in some way, as the arguments that go before theirs.
using Under = std::vector<std::string>;
Under with_memlock(std::uint64_t kib);  // as a user without CAP_IPC_LOCK
Under operator+(Under outer, Under inner);

// What a port has received over its cable, by its interface.
std::uint64_t received_bytes(char side, std::size_t cable);
// How often `text` stands in `all`.
std::size_t count_of(std::string_view all, std::string_view text);

class RdmaFleet : public ::testing::Test {
 protected:
  // A coordinator and the weights of m@1; skips where there is no device.
  void SetUp() override;

  // An agent that holds them.
  void start_source(const std::string& name, std::vector<std::string> more = {});
  // `transport` "": the automatic choice. Its log is on stderr.
  std::unique_ptr<Process> start_pull(const std::string& transport,
                                      std::vector<std::string> more = {}, const Under& under = {});
  // Until so much of its bytes has verified. False: it has ended.
  static bool wait_for_bytes(Process& pull, int percent = 1);
  static Fleet::Answer finish(Process& pull);

  // Done, identical, and nothing that had landed was fetched again.
  void expect_complete(const Fleet::Answer& answer);
  static nlohmann::json source_of(const Fleet::Answer& answer, const std::string& name);
  nlohmann::json status_of(const std::string& agent);

  Fleet fleet_;
  Rails rails_;
  std::string coordinator_host_ = "127.0.0.1";
  std::string hca_a_, hca_b_;  // as --hca has it
  int mib_ = 32;               // of weights
  std::uint64_t total_bytes_ = 0;
};

// Where cables can fail.
class RdmaCables : public RdmaFleet {
 protected:
  void SetUp() override;
};

// Agents and pulls on hosts of their own: shared memory is out of the question.
class RdmaHosts : public RdmaFleet {
 protected:
  void SetUp() override;
  static Under on_host(const std::string& name);
  void start_source_on_host(const std::string& name, std::vector<std::string> more = {},
                            const Under& under = {});
  std::unique_ptr<Process> start_pull_on_host(const std::string& transport,
                                              std::vector<std::string> more = {},
                                              const Under& under = {});

 private:
  static std::string address_of(const std::string& host);

  std::string source_address_;
};

}  // namespace rekindle::testing
