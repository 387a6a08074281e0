#include "src/base/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(UnitsTest, SizesParse) {
  const std::pair<const char*, std::uint64_t> known[] = {
      {"0", 0},           {"4096", 4096},       {"64M", 64 << 20},
      {"1.5G", 3u << 29}, {"16MiB", 16 << 20},  {"2GB", 2'000'000'000},
      {"3k", 3072},       {"1TiB", 1ull << 40}, {"64g", 64ull << 30},
      {"2t", 2ull << 40}, {"5kB", 5000}};
  for (const auto& [text, bytes] : known) EXPECT_EQ(parse_bytes(text).value(), bytes) << text;
}

TEST(UnitsTest, BadSizesAreInvalid) {
  for (const char* bad :
       {"", "M", "-1", "1 M", "1Q", "nan", "inf", "1e30", "0x10", "9999999999T", "1M "}) {
    EXPECT_FALSE(parse_bytes(bad)) << bad;
  }
}

TEST(UnitsTest, SizesAndRatesPrint) {
  EXPECT_EQ(format_bytes(17), "17 B");
  EXPECT_EQ(format_bytes(3u << 29), "1.50 GiB");
  EXPECT_EQ(format_bytes(100 << 20), "100.0 MiB");
  EXPECT_EQ(format_rate(3.21e9), "3.21 GB/s");
}

TEST(UnitsTest, RangesNeverOverflow) {
  constexpr std::uint64_t kMax = ~std::uint64_t{0};
  EXPECT_TRUE(in_range(0, 10, 10));
  EXPECT_TRUE(in_range(10, 0, 10));
  EXPECT_FALSE(in_range(1, 10, 10));
  EXPECT_FALSE(in_range(11, 0, 10));
  EXPECT_FALSE(in_range(2, kMax, 10));
  EXPECT_FALSE(in_range(kMax, 2, 10));
  EXPECT_EQ(round_up(4097, 4096), 8192u);
}

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(NumberList, IsNumbersAndRangesInTheirOrder) {
  EXPECT_THAT(parse_number_list("0-2,8", 9), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(parse_number_list("5,1-1", 9), ElementsAre(5, 1));
  EXPECT_THAT(parse_number_list("", 9), IsEmpty());
}

TEST(NumberList, IsEmptyWhenAnythingIsWrong) {
  for (const char* text : {"9", "0-9", "2-1", "-1", "1,", ",1", "1 2", "0x1", "1-", "a"}) {
    EXPECT_THAT(parse_number_list(text, 9), IsEmpty()) << text;
  }
}

}  // namespace
}  // namespace rekindle
