// `bench transfer` end to end with little data: every row is measured, every byte is verified.
#include <filesystem>
#include <fstream>
#include <iterator>

#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "src/base/units.h"
#include "tools/bench/benchmarks.h"

namespace rekindle::bench {
namespace {

class BenchTransfer : public ::testing::TestWithParam<const char*> {};

TEST_P(BenchTransfer, ReportsRekindleAndTheRawLimitWithAndWithoutIntegrity) {
  // Blocks that are no multiple of a tile or of a slice.
  for (const std::uint64_t block : {64 * kKiB, 1536 * kKiB, 8 * kMiB}) {
    const auto report = run_bench_transfer({.transport = GetParam(),
                                            .block_bytes = block,
                                            .total_bytes = 24 * kMiB,
                                            .streams = 2,
                                            .sources = 2,
                                            .rounds = 1});
    ASSERT_TRUE(report) << report.error().message();
    ASSERT_EQ(report->rows.size(), 4u);
    for (const auto& row : report->rows) EXPECT_GT(row.gb_per_second, 0);
    EXPECT_FALSE(report->rows[0].p50_ms);
    EXPECT_TRUE(report->rows[1].p50_ms && report->rows[1].p99_ms);
    EXPECT_GT(report->ratio, 0);
    EXPECT_NE(to_text(*report).find("rekindle / "), std::string::npos);
    const auto json = nlohmann::json::parse(to_json(*report));
    EXPECT_EQ(json["transport"], GetParam());
    EXPECT_EQ(json["rows"].size(), 4u);
  }
}

TEST_P(BenchTransfer, TheBytesOfAFileArriveInFreshMemory) {
  const auto directory = std::filesystem::path(::testing::TempDir());
  const auto name = [&](const char* end) {
    return (directory / fmt::format("bench-transfer-{}-{}.{}", GetParam(), ::getpid(), end))
        .string();
  };
  std::string bytes(4 * kMiB, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + i / kMiB);
  std::ofstream(name("in"), std::ios::binary) << bytes;
  const auto report = run_bench_transfer({.transport = GetParam(),
                                          .block_bytes = kMiB,
                                          .streams = 2,
                                          .rounds = 1,
                                          .file = name("in"),
                                          .save = name("out"),
                                          .cold = true});
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(report->options.total_bytes, bytes.size());
  std::ifstream saved(name("out"), std::ios::binary);
  const std::string arrived{std::istreambuf_iterator<char>(saved), {}};
  EXPECT_TRUE(arrived == bytes);
  std::filesystem::remove(name("in"));
  std::filesystem::remove(name("out"));
}

INSTANTIATE_TEST_SUITE_P(Transports, BenchTransfer, ::testing::Values("tcp", "shm"),
                         [](const auto& test) { return std::string(test.param); });

TEST(BenchTransferOptions, WrongOnesAreRefused) {
  const TransferOptions bad[] = {{.transport = "carrier-pigeon"},
                                 {.block_bytes = 1000},
                                 {.block_bytes = 0},
                                 {.block_bytes = 4 * kGiB},
                                 {.streams = 65},
                                 {.sources = 0},
                                 {.sources = 17},
                                 {.rounds = 0},
                                 {.transport = "shm", .link_bytes_per_second = 1},
                                 {.transport = "verbs", .cold = true}};
  for (const auto& options : bad) {
    const auto report = run_bench_transfer(options);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code(), ErrorCode::kInvalid);
  }
  const auto report = run_bench_transfer({.file = "/nowhere/file"});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace rekindle::bench
