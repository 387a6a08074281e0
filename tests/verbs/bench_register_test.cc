// `bench register` end to end on fake devices, with little memory.
#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/verbs/registrar_fixture.h"
#include "tools/bench/benchmarks.h"

namespace rekindle::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace verbs = transport::verbs;

class BenchRegister : public verbs::RegistrarFixture {};

TEST_F(BenchRegister, ReportsEachDeviceAllOfThemAndTheLimits) {
  open();
  const auto report = run_bench_register(*fabric, {.bytes = 6 * kMiB + 1, .rounds = 2});
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->options.bytes, 6 * kMiB + kPageBytes);
  for (const RegisterRow& row : report->rows) {
    EXPECT_GT(row.lowest, 0) << row.name;
    EXPECT_LE(row.lowest, row.gb_per_second);
    EXPECT_LE(row.gb_per_second, row.highest);
  }
  EXPECT_GT(report->ratio_touch, 0);
  EXPECT_GT(report->touch_share, 0);
  EXPECT_LE(report->touch_share, 1);
  EXPECT_THAT(to_text(*report), AllOf(HasSubstr("mlx5_0 "), HasSubstr("mlx5_1 "),
                                      HasSubstr("all devices"), HasSubstr("touched")));
  const auto json = nlohmann::json::parse(to_json(*report));
  EXPECT_EQ(json["devices"].size(), 2u);
  EXPECT_EQ(json["rows"].size(), report->rows.size());
  for (const std::string& name : names) EXPECT_EQ(network.registrations(name), 0u);
}

TEST_F(BenchRegister, MemoryThatCannotBeRegisteredIsAnErrorThatSaysWhy) {
  change([](verbs::FakeDevice& device) { device.max_registered_bytes = 1; });
  open();
  const auto report = run_bench_register(*fabric, {.bytes = kMiB, .rounds = 1});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(report.error().message(), HasSubstr("1.00 MiB not registered"));
}

TEST_F(BenchRegister, WrongOptionsAreRefused) {
  open();
  for (const RegisterOptions& bad : {RegisterOptions{.bytes = 0}, RegisterOptions{.rounds = 0}}) {
    const auto report = run_bench_register(*fabric, bad);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code(), ErrorCode::kInvalid);
  }
}

}  // namespace
}  // namespace rekindle::bench
