#include "src/cuda/registrations.h"

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace rekindle::cuda {
namespace {

using bucket::Download;
using bucket::Upload;

class RegistrationsTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = 1 << 16;

  RegistrationsTest() : host_(kBytes) {
    std::mt19937 random(7);
    for (std::byte& byte : host_) byte = static_cast<std::byte>(random());
  }
  std::span<const std::byte> part(std::size_t from, std::size_t bytes) const {
    return std::span(host_).subspan(from, bytes);
  }
  static void apply(const Upload& copy, std::vector<std::byte>& out) {
    for (std::uint64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(out.data() + copy.to + row * copy.to_stride, copy.from + row * copy.from_stride,
                  copy.run_bytes);
    }
  }
  // Whether a part of it, but not all, is in `part`.
  static bool crosses(const Upload& copy, std::span<const std::byte> part) {
    const std::byte* const end = copy.from + (copy.rows - 1) * copy.from_stride + copy.run_bytes;
    const bool apart = end <= part.data() || copy.from >= part.data() + part.size();
    const bool inside = copy.from >= part.data() && end <= part.data() + part.size();
    return !apart && !inside;
  }

  std::vector<std::byte> host_;
  Registrations registrations_;
};

TEST_F(RegistrationsTest, WhatLiesInOneIsLeftWhole) {
  registrations_.add(part(1000, 5000));
  std::vector<Upload> out;
  const Upload run{.from = host_.data() + 1000, .to = 7, .run_bytes = 5000};
  const Upload rows{.from = host_.data() + 2000,
                    .to = 9000,
                    .run_bytes = 10,
                    .rows = 20,
                    .from_stride = 30,
                    .to_stride = 40};
  registrations_.cut(std::vector{run, rows, Upload{.from = host_.data()}}, out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].run_bytes, 5000u);
  EXPECT_EQ(out[1].rows, 20u);
}

TEST_F(RegistrationsTest, RowsWithoutGapsAreOneRun) {
  std::vector<Upload> out;
  const Upload rows{.from = host_.data(),
                    .to = 0,
                    .run_bytes = 16,
                    .rows = 64,
                    .from_stride = 16,
                    .to_stride = 16};
  registrations_.cut({&rows, 1}, out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rows, 1u);
  EXPECT_EQ(out[0].run_bytes, 1024u);
}

TEST_F(RegistrationsTest, NoUploadCrossesABorderAndAllBytesArrive) {
  const std::vector<std::span<const std::byte>> parts{part(4096, 4096), part(8192, 8192),
                                                      part(20'000, 5000), part(40'000, 25'536)};
  for (const auto& one : parts) registrations_.add(one);
  std::mt19937_64 random(11);
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  for (int i = 0; i < 2000; ++i) {
    Upload copy{.to = below(100), .run_bytes = 1 + below(3000), .rows = 1 + below(30)};
    copy.from_stride = below(4) == 0 ? copy.run_bytes : below(2000);
    copy.to_stride = copy.run_bytes + below(2) * below(100);
    const std::uint64_t extent = (copy.rows - 1) * copy.from_stride + copy.run_bytes;
    if (extent > kBytes) continue;
    copy.from = host_.data() + below(kBytes - extent + 1);
    std::vector<Upload> out;
    registrations_.cut({&copy, 1}, out);
    std::vector<std::byte> expected(200 + copy.rows * copy.to_stride);
    std::vector<std::byte> seen(expected.size());
    apply(copy, expected);
    for (const Upload& one : out) {
      apply(one, seen);
      for (const auto& border : parts) ASSERT_FALSE(crosses(one, border)) << "case " << i;
    }
    ASSERT_EQ(seen, expected) << "case " << i;
  }
}

TEST_F(RegistrationsTest, DownloadsAreCutLikewise) {
  registrations_.add(part(1000, 1000));
  const Download copy{.from = 5000, .to = host_.data() + 500, .bytes = 2000};
  std::vector<Download> out;
  registrations_.cut({&copy, 1}, out);
  ASSERT_EQ(out.size(), 3u);
  EXPECT_EQ(out[1].from, 5500u);
  EXPECT_EQ(out[1].to, host_.data() + 1000);
  EXPECT_EQ(out[1].bytes, 1000u);
  registrations_.remove(part(1000, 1000));
  out.clear();
  registrations_.cut({&copy, 1}, out);
  EXPECT_EQ(out.size(), 1u);
}

TEST_F(RegistrationsTest, RowsOfDownloadsAreCutWhereTheyLandAndKeepTheirStrides) {
  registrations_.add(part(1000, 1000));
  const Download copy{.from = 5000,
                      .to = host_.data() + 800,
                      .bytes = 100,
                      .rows = 20,
                      .from_stride = 128,
                      .to_stride = 150};
  std::vector<Download> out;
  registrations_.cut({&copy, 1}, out);
  // The source of each byte, by its target.
  std::map<std::size_t, std::uint64_t> seen;
  for (const Download& one : out) {
    for (std::uint64_t row = 0; row < one.rows; ++row) {
      const auto at = static_cast<std::size_t>(one.to - host_.data()) + row * one.to_stride;
      EXPECT_TRUE(at + one.bytes <= 1000 || at >= 2000 || (at >= 1000 && at + one.bytes <= 2000));
      for (std::uint64_t i = 0; i < one.bytes; ++i) {
        seen[at + i] = one.from + row * one.from_stride + i;
      }
    }
  }
  std::map<std::size_t, std::uint64_t> expected;
  for (std::uint64_t row = 0; row < copy.rows; ++row) {
    for (std::uint64_t i = 0; i < copy.bytes; ++i) {
      expected[800 + row * 150 + i] = 5000 + row * 128 + i;
    }
  }
  EXPECT_EQ(seen, expected);
  EXPECT_LT(out.size(), 10u) << "not row by row";
}

}  // namespace
}  // namespace rekindle::cuda
