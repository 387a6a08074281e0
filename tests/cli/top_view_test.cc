#include "tools/cli/top_view.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void add_node(proto::ClusterStatusResponse& status, const std::string& name,
              const std::string& state = "alive") {
  auto& node = *status.add_nodes();
  node.mutable_node()->set_node_id(name);
  node.set_state(state);
  node.set_health(1);
}

proto::PullStatus& add_pull(proto::ClusterStatusResponse& status, const std::string& puller,
                            const std::string& source, double rate) {
  auto& pull = *status.add_pulls();
  pull.set_puller(puller);
  pull.mutable_id()->set_model("m");
  pull.mutable_id()->set_version(7);
  pull.set_bytes_done(25'000'000'000);
  pull.set_bytes_total(100'000'000'000);
  pull.set_bytes_per_second(rate);
  auto& from = *pull.add_sources();
  from.set_node_id(source);
  from.set_goodput_bytes_per_second(rate);
  return pull;
}

std::string frame(const proto::ClusterStatusResponse& status, TopOrder order = TopOrder::kRate,
                  std::size_t width = 200, std::size_t height = 0) {
  return top_frame(status, order, "10.0.0.1:7300", width, height);
}

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count(text, '\n'));
}

TEST(TopView, SumsTheRatesOfAHostOverAllPulls) {
  proto::ClusterStatusResponse status;
  for (const char* name : {"a", "b", "c"}) add_node(status, name);
  add_pull(status, "b", "a", 3e9);
  add_pull(status, "c", "a", 1e9);
  const std::string text = frame(status);
  EXPECT_THAT(text,
              HasSubstr("3 of 3 hosts well, 0 of 0 versions ready, 2 pulls, 0 wait, 4.00 GB/s"));
  EXPECT_THAT(text, ::testing::ContainsRegex("a +- +alive +4\\.00 GB/s +- "));
  EXPECT_THAT(text, ::testing::ContainsRegex("b +- +alive +- +3\\.00 GB/s "));
  // 75 GB at 3 GB/s.
  EXPECT_THAT(text, ::testing::ContainsRegex(
                        "\\[####\\.{12}\\]  25 % +3\\.00 GB/s +25\\.0 s +a 3\\.00 GB/s"));
}

TEST(TopView, HostsThatAreNotWellComeFirstThenThoseThatMove) {
  proto::ClusterStatusResponse status;
  for (const char* name : {"a", "b", "c"}) add_node(status, name);
  add_node(status, "z", "dead");
  add_pull(status, "c", "b", 1e9);
  status.mutable_pulls(0)->set_bytes_per_second(2e9);
  const std::string whole = frame(status);
  const std::string text = whole.substr(whole.find("\nHOST"));
  EXPECT_LT(text.find("\nz "), text.find("\nc "));
  EXPECT_LT(text.find("\nc "), text.find("\nb "));
  EXPECT_LT(text.find("\nb "), text.find("\na "));
  const std::string sorted = frame(status, TopOrder::kName);
  const std::string by_name = sorted.substr(sorted.find("\nHOST"));
  EXPECT_LT(by_name.find("\nz "), by_name.find("\na "));
  EXPECT_LT(by_name.find("\na "), by_name.find("\nb "));
}

TEST(TopView, AThousandHostsFitTheScreenAndTheRestIsCounted) {
  proto::ClusterStatusResponse status;
  for (int i = 0; i < 1000; ++i) add_node(status, fmt::format("host-{:03}", i));
  for (int i = 0; i < 40; ++i) add_pull(status, fmt::format("host-{:03}", i), "host-999", 1e9);
  const std::string text = frame(status, TopOrder::kRate, 80, 24);
  EXPECT_LE(lines_of(text), 24u);
  EXPECT_THAT(text, HasSubstr("more pulls"));
  EXPECT_THAT(text, HasSubstr("more hosts"));
  EXPECT_THAT(text, HasSubstr("host-999"));
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    // The ellipsis has three bytes.
    EXPECT_LE(end - at, 82u) << text.substr(at, end - at);
    at = end + 1;
  }
  EXPECT_EQ(lines_of(frame(status)), 2u + 42 + 1002);
}

TEST(TopView, EveryHeightIsKept) {
  proto::ClusterStatusResponse status;
  for (int i = 0; i < 30; ++i) {
    add_node(status, fmt::format("h{}", i));
    add_pull(status, fmt::format("h{}", i), "h0", 1);
    auto& instance = *status.add_instances();
    instance.set_instance("i");
    instance.set_state("unfit");
    status.add_rounds()->set_phase("spreading");
  }
  for (std::size_t height = 1; height < 150; ++height) {
    EXPECT_LE(lines_of(frame(status, TopOrder::kRate, 80, height)),
              std::max<std::size_t>(height, 2))
        << height;
  }
}

TEST(TopView, ShowsUpdatesAndInstancesThatAreNotReady) {
  proto::ClusterStatusResponse status;
  auto& round = *status.add_rounds();
  round.set_phase("spreading");
  round.set_group("actors");
  round.add_members()->set_state("ready");
  round.add_members()->set_state("spreading");
  status.add_rounds()->set_phase("over");
  auto& loading = *status.add_instances();
  loading.set_instance("llm-0");
  loading.set_state("unfit");
  loading.set_why("rank 3 on b: the node died");
  auto& ready = *status.add_instances();
  ready.set_instance("llm-1");
  ready.set_state("committed");
  const std::string text = frame(status);
  EXPECT_THAT(text, ::testing::ContainsRegex("actors +spreading +1 of 2"));
  EXPECT_THAT(text, HasSubstr("rank 3 on b: the node died"));
  EXPECT_THAT(text, Not(HasSubstr("over")));
  EXPECT_THAT(text, Not(HasSubstr("llm-1")));
}

TEST(TopView, NamesFromTheNetworkCannotControlTheTerminal) {
  proto::ClusterStatusResponse status;
  add_node(status, "a\x1b[2J\nb");
  EXPECT_THAT(frame(status), HasSubstr("a\\x1b[2J\\x0ab"));
}

}  // namespace
}  // namespace rekindle::cli
