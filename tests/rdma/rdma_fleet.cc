#include "tests/rdma/rdma_fleet.h"

#include <cstdlib>
#include <regex>
#include <stdexcept>
#include <utility>

namespace rekindle::testing {

namespace {

std::string hca_of(const std::vector<std::string>& devices) {
  std::string list;
  for (const auto& device : devices) list += (list.empty() ? "=" : ",") + device;
  return list;
}

Under lab(std::vector<std::string> arguments) {
  const char* program = std::getenv("REKINDLE_RDMA_LAB");
  if (program == nullptr) throw std::runtime_error("no lab here: only tests/rdma/run has it");
  arguments.insert(arguments.begin(), program);
  return arguments;
}

}  // namespace

Under with_memlock(std::uint64_t kib) { return lab({"with_memlock", std::to_string(kib)}); }

Under operator+(Under outer, Under inner) {
  outer.insert(outer.end(), std::make_move_iterator(inner.begin()),
               std::make_move_iterator(inner.end()));
  return outer;
}

std::uint64_t received_bytes(char side, std::size_t cable) {
  const std::string interface = side + std::to_string(cable);
  return std::stoull(read_file("/sys/class/net/" + interface + "/statistics/rx_bytes"));
}

std::size_t count_of(std::string_view all, std::string_view text) {
  std::size_t count = 0;
  for (auto at = all.find(text); at != std::string_view::npos; at = all.find(text, at + 1)) ++count;
  return count;
}

void RdmaFleet::SetUp() {
  rails_ = rdma_rails();
  if (rails_.a.empty()) GTEST_SKIP() << "this host has no RDMA device with an active port";
  hca_a_ = hca_of(rails_.a);
  hca_b_ = hca_of(rails_.b);
  fleet_.start_coordinator(coordinator_host_);
  total_bytes_ = make_checkpoint(fleet_.dir("model"), mib_ / 2, 1024, 7);  // of 2 MiB each
}

void RdmaFleet::start_source(const std::string& name, std::vector<std::string> more) {
  more.insert(more.end(), {"--hca", hca_b_});
  fleet_.start_agent(name, std::move(more));
  fleet_.publish(name, "m@1", fleet_.dir("model"));
}

std::unique_ptr<Process> RdmaFleet::start_pull(const std::string& transport,
                                               std::vector<std::string> more, const Under& under) {
  std::vector<std::string> arguments = {"pull",  "m@1",  "--to",        fleet_.dir("out").string(),
                                        "--hca", hca_a_, "--log-level", "info"};
  if (!transport.empty()) arguments.insert(arguments.end(), {"--transport", transport});
  Spawn spawn = fleet_.command(Under(std::move(arguments)) + std::move(more));
  spawn.argv = under + std::move(spawn.argv);
  return std::make_unique<Process>(std::move(spawn));
}

// By the line that it writes once a second.
bool RdmaFleet::wait_for_bytes(Process& pull, int percent) {
  static const std::regex kLine("transfer ([0-9]+) %");
  return eventually([&] {
           const std::string lines = pull.err();
           for (std::sregex_iterator line(lines.begin(), lines.end(), kLine), end; line != end;
                ++line) {
             if (std::stoi((*line)[1]) >= percent) return true;
           }
           return !pull.running();
         }) &&
         pull.running();
}

Fleet::Answer RdmaFleet::finish(Process& pull) {
  const auto exit = pull.wait(60'000ms);
  EXPECT_TRUE(!exit || exit->signal == 0) << "it crashed: signal " << exit->signal;
  return Fleet::answer_of({exit.value_or(Exit{}), !exit, pull.out(), pull.err()});
}

void RdmaFleet::expect_complete(const Fleet::Answer& answer) {
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  EXPECT_EQ(answer.json["refetched_bytes"], 0) << answer.err;
  EXPECT_EQ(answer.json["fetched_bytes"].get<std::uint64_t>() +
                answer.json["resumed_bytes"].get<std::uint64_t>(),
            answer.json["bytes"].get<std::uint64_t>())
      << answer.err;
}

nlohmann::json RdmaFleet::source_of(const Fleet::Answer& answer, const std::string& name) {
  for (const auto& source : answer.json.value("sources", nlohmann::json::array())) {
    if (source["name"] == name) return source;
  }
  return {{"bytes", 0}, {"lost", false}, {"cause", ""}, {"transport", ""}};
}

nlohmann::json RdmaFleet::status_of(const std::string& agent) {
  return fleet_.run_command({"status", "--agent", fleet_.agent(agent).control}).json;
}

void RdmaCables::SetUp() {
  if (!rdma_cables_can_fail()) GTEST_SKIP() << "these are real cables";
  RdmaFleet::SetUp();
}

void RdmaHosts::SetUp() {
  if (!rdma_cables_can_fail()) GTEST_SKIP() << "hosts are emulated, with their cables";
  source_address_ = address_of("source");
  (void)address_of("puller");
  coordinator_host_ = "10.1.0.254";
  RdmaFleet::SetUp();
}

std::string RdmaHosts::address_of(const std::string& host) {
  Finished done = run(lab({"add_host", host}));
  if (done.exit != Exit{.code = 0}) throw std::runtime_error("add_host failed: " + done.err);
  while (!done.out.empty() && done.out.back() == '\n') done.out.pop_back();
  return done.out;
}

Under RdmaHosts::on_host(const std::string& name) { return lab({"on_host", name}); }

void RdmaHosts::start_source_on_host(const std::string& name, std::vector<std::string> more,
                                     const Under& under) {
  more.insert(more.end(), {"--hca", hca_b_});
  fleet_.start_agent(name, std::move(more), source_address_ + ":0", on_host("source") + under);
  fleet_.publish(name, "m@1", fleet_.dir("model"));
}

std::unique_ptr<Process> RdmaHosts::start_pull_on_host(const std::string& transport,
                                                       std::vector<std::string> more,
                                                       const Under& under) {
  return start_pull(transport, std::move(more), on_host("puller") + under);
}

}  // namespace rekindle::testing
